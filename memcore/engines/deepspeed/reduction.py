"""How gradients come through the backward at stages that reduce them as they come, one after the other.

Follows deepspeed 0.19.8, runtime/zero/stage_1_and_2.py (reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, average_tensor, copy_grads_in_partition) and stage3.py (the first of these, and
__avg_scatter_contiguous_grads). A gradient that does not fit what is left of the bucket has the bucket reduced first,
and waits meanwhile; one larger than the bucket never enters it, and waits for the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memcore.units import ceil_div

# Of the backward: a layer's, or its end, where what is left in the bucket is reduced.
Segment = int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """One gradient of `numel` elements, made in a segment of the backward. `pieces`: the ranks that its elements belong
    to, in order and without a gap, and how many of them."""

    segment: Segment
    numel: int
    pieces: tuple[tuple[int, int], ...]

    def is_of(self, rank: int) -> bool:
        """Whether some of its elements belong to a rank."""
        return self.pieces[0][0] <= rank <= self.pieces[-1][0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """What is alive at one instant beside the bucket: gradients in storages of their own, in elements; copies made
    for the reduction, in bytes; and whether this rank's slice of reduced gradients is there."""

    gradients: int = 0
    copies: int = 0
    has_slice: bool = False


def touched(gradients: Sequence[Gradient], rank: int) -> int:
    """Elements of all gradients that a rank owns a piece of, whole: its slice of reduced gradients."""
    return sum(gradient.numel for gradient in gradients if gradient.is_of(rank))


def pieces_of(sizes: Sequence[int], slice_size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """For each tensor of a flat group, cut into slices of one size, the rank and size of each of its pieces."""
    start = 0
    for size in sizes:
        end = start + size
        ranks = range(start // slice_size, ceil_div(end, slice_size))
        yield tuple((rank, min(end, (rank + 1) * slice_size) - max(start, rank * slice_size)) for rank in ranks)
        start = end


def flattened(bucket: Sequence[Gradient], limit: int) -> int:
    """Elements flattened at once for a reduction at stages 1 and 2: neighbouring pieces of one rank are one piece, and
    groups of pieces, closed when they exceed the bucket's size, are flattened unless they are a single piece."""
    merged: list[list[int]] = []
    for rank, number in (piece for gradient in bucket for piece in gradient.pieces):
        if merged and merged[-1][0] == rank:
            merged[-1][1] += number
        else:
            merged.append([rank, number])
    return _largest_group([number for _rank, number in merged], limit)


def flattened_apart(bucket: Sequence[Gradient], limit: int) -> int:
    """The same where every gradient's piece has a destination of its own in an FP32 slice, and none are merged."""
    return _largest_group([number for gradient in bucket for _rank, number in gradient.pieces], limit)


def _largest_group(pieces: Sequence[int], limit: int) -> int:
    largest = group = count = 0
    for number in pieces:
        group, count = group + number, count + 1
        largest = max(largest, group if count > 1 else 0)
        if group > limit:
            group = count = 0
    return largest


def reduce_as_they_come(
    gradients: Sequence[Gradient],
    *,
    limit: int,
    rank: int,
    keeps_others: bool,
    copies: Callable[[Sequence[Gradient]], int],
    width: int,
    makes_slice: bool = True,
) -> dict[Segment, Instant]:
    """The fullest instant of each segment of the backward on one rank.

    `gradients` in the order of the backward, `limit` the bucket's size in elements, `copies` the bytes that reducing
    a bucket takes. `keeps_others`: gradients of other ranks that never entered the bucket stay (stage 1).
    `makes_slice`: the rank's slice comes with the first of its gradients that is reduced, with `width` bytes for each
    element of all those that it owns a piece of; else it was always there.
    """
    slice_bytes = width * touched(gradients, rank)
    bucket: list[Gradient] = []
    filled = 0
    fullest: dict[Segment, Instant] = {}
    kept, has_slice, segment = 0, False, gradients[0].segment

    def see(own: int, copied: int = 0) -> None:
        instant = Instant(gradients=own, copies=copied, has_slice=has_slice)
        if segment not in fullest or _weight(instant) > _weight(fullest[segment]):
            fullest[segment] = instant

    def _weight(instant: Instant) -> int:
        return width * instant.gradients + instant.copies + (slice_bytes if instant.has_slice else 0)

    def reduce(newest: int) -> None:
        nonlocal kept, has_slice, filled
        waiting = sum(gradient.numel for gradient in bucket if gradient.numel > limit)
        see(kept + waiting + newest, copies(bucket))
        has_slice = has_slice or (makes_slice and any(gradient.is_of(rank) for gradient in bucket))
        see(kept + waiting + newest)
        if keeps_others:
            kept += sum(gradient.numel for gradient in bucket if gradient.numel > limit and not gradient.is_of(rank))
        bucket.clear()
        filled = 0

    for gradient in gradients:
        segment = gradient.segment
        if bucket and filled + gradient.numel > limit:
            reduce(gradient.numel)
        see(kept + gradient.numel)
        bucket.append(gradient)
        filled += gradient.numel
    segment = "reduce"
    reduce(0)
    return fullest

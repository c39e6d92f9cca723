"""Batch and sequence for free: the tapes of a few sizes of a step give those of all others.

Each change of a step takes bytes that are a polynomial of batch b and sequence s: of 1, s and s^2 at batch 1, whose
step has changes of its own, and of 1, b, s, bs, s^2 and bs^2 at more. With as many tapes as the polynomial has terms,
the bytes at any size are a weighted sum of theirs, the same weights for all changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import Any

from memcore.trace.tape import Tape
from memcore.units import round_up

Size = tuple[int, int]

# Multiples of every kernel's block, so that rounding up is nothing here; short of any learned table of positions.
_SAMPLED = (128, 256, 384)
# The block that "rounded" changes are rounded up to (memcore.trace.kernels, cuda_hidden).
_BLOCK = 128
# Where a polynomial is held against a trace of its own: a prime, which no block divides, and a long sequence.
_CHECKED = (331, 40_009)


class NotPolynomialError(Exception):
    """The step's changes are no polynomials of its size."""


def sampled_sizes(micro_batch: int) -> tuple[Size, ...]:
    """The sizes to trace for all others of that batch's kind: batch 1, or more."""
    return tuple((batch, length) for batch in ((1,) if micro_batch == 1 else (2, 3)) for length in _SAMPLED)


def checked_sizes(micro_batch: int, positions: int) -> tuple[Size, ...]:
    """The sizes at which to hold the result against a trace; `positions` is the longest sequence, 0 for no limit."""
    batch = 1 if micro_batch == 1 else 5
    return tuple((batch, min(length, positions or length)) for length in _CHECKED)


def preparation(payload: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The workers' tasks, one size each, after which the same request is answered at any size at once."""
    sizes = sampled_sizes(payload["micro_batch"])
    each = [("trace", {**payload, "micro_batch": batch, "seq_len": length}) for batch, length in sizes]
    return [*each, ("trace_sizes", payload)]


def tape_at(tapes: Mapping[Size, Tape], size: Size) -> Tape:
    """The tape of a size from those of the sampled sizes. Raises NotPolynomialError where they do not fit together."""
    sizes = list(tapes)
    first = tapes[sizes[0]]
    if any(replace(tape, changes=()) != replace(first, changes=()) for tape in tapes.values()):
        raise NotPolynomialError
    batch, length = size
    plain = _weights(sizes, size)
    rounded = _weights(sizes, (batch, round_up(length, _BLOCK)))
    columns = zip(*(tape.changes for tape in tapes.values()), strict=True)
    changes = (
        _sum(column, rounded if is_rounded else plain)
        for column, is_rounded in zip(columns, first.rounded, strict=True)
    )
    return replace(first, changes=tuple(changes))


def _sum(figures: Sequence[int], weights: tuple[Sequence[int], int]) -> int:
    numerators, denominator = weights
    total = sum(figure * weight for figure, weight in zip(figures, numerators, strict=True))
    if total % denominator:
        raise NotPolynomialError
    return total // denominator


def _weights(sizes: Sequence[Size], size: Size) -> tuple[list[int], int]:
    """Whole numerators and their common denominator: the sampled sizes' terms, so weighted, add up to the size's."""
    rows = [list(column) for column in zip(*map(_terms, sizes), strict=True)]
    solution = _solve(rows, _terms(size))
    denominator = lcm(*(fraction.denominator for fraction in solution))
    return [int(fraction * denominator) for fraction in solution], denominator


def _terms(size: Size) -> list[Fraction]:
    batch, length = size
    powers = [Fraction(1), Fraction(length), Fraction(length**2)]
    return powers if batch == 1 else [*powers, *(batch * power for power in powers)]


def _solve(rows: list[list[Fraction]], right: list[Fraction]) -> list[Fraction]:
    """Solve a small linear system exactly, by elimination."""
    size = len(right)
    work = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for place in range(size):
        pivot = next(row for row in range(place, size) if work[row][place])
        work[place], work[pivot] = work[pivot], work[place]
        work[place] = [value / work[place][place] for value in work[place]]
        for row in range(size):
            if row != place:
                factor = work[row][place]
                work[row] = [value - factor * above for value, above in zip(work[row], work[place], strict=True)]
    return [row[-1] for row in work]

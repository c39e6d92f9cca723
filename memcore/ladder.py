"""From what tensors take to what the card must give: the figures that users confuse, apart."""

from dataclasses import dataclass

from memcore.allocator import Reservation
from memcore.hardware import Accelerator
from memcore.terms import Category, EvidenceKind, Formula, Term, product
from memcore.units import MIB, round_up

# PyTorch's caching allocator takes memory from the device in multiples of this for requests of 10 MiB and
# more (torch 2.13, c10/core/AllocatorConfig.h, kRoundLarge).
SEGMENT_BYTES = 2 * MIB
SEGMENT_SOURCE = "torch 2.13, c10/core/AllocatorConfig.h, kRoundLarge: each term in whole segments"
_STEPS_SOURCE = (
    "the traced step's storages through a model of the allocator (torch 2.13, c10/cuda/CUDACachingAllocator.cpp)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """The figures that users confuse, apart, in bytes: what tensors take at the peak, what the allocator must hold for
    them, what it has reserved after some steps, what nvidia-smi shows, and what the card can give.

    `least_reserved`: what holds the tensors in whole segments. `reserved`: the same, unless `reservation` says what it
    was in training steps: a part of it is then a cache.
    """

    allocated: int
    reserved: int
    runtime: Term
    usable: int
    least_reserved: int | None = None
    reservation: Reservation | None = None

    @property
    def device(self) -> int:
        """Reserved, and what lies outside the allocator: what nvidia-smi shows for the process."""
        return self.reserved + self.runtime.largest

    @property
    def steady(self) -> bool:
        """Whether what is reserved after some steps is known, and the card has it."""
        return self.reservation is not None and not self.reservation.overfull

    @property
    def reserved_evidence(self) -> EvidenceKind:
        """Where the figure of what is reserved comes from."""
        return EvidenceKind.FORMULA if self.reservation is None else EvidenceKind.TRACE

    @property
    def reserved_source(self) -> str:
        """The same, as a source."""
        return SEGMENT_SOURCE if self.reservation is None else _STEPS_SOURCE

    @property
    def held(self) -> int:
        """The least that the allocator must have reserved: it gives back segments that are wholly free before an
        allocation fails."""
        return self.reserved if self.least_reserved is None else self.least_reserved

    @property
    def cached(self) -> int:
        """What the allocator keeps beyond that after some steps."""
        return max(0, self.reserved - self.held)

    @property
    def needed(self) -> int:
        """The least that the card must give, which a verdict compares with what it can."""
        return self.held + self.runtime.largest

    @property
    def headroom(self) -> int:
        """What the card can give beyond that; below 0 where it cannot."""
        return self.usable - self.needed

    @property
    def for_tensors(self) -> int:
        """What the card can give less what lies outside the allocator: what tensors are compared with."""
        return self.usable - self.runtime.largest


def ladder_of(
    terms: tuple[Term, ...], totals: tuple[int, ...], device: Accelerator, gpus: int, reservation: Reservation | None
) -> Ladder:  # fmt: skip
    """The ladder of a budget's terms; `reservation`: what the allocator reserved in training steps, where that is
    known."""
    peak = totals.index(max(totals))
    least = sum(round_up(term.at(peak), SEGMENT_BYTES) for term in terms)
    found = device.runtime(gpus)
    runtime = Term(
        name="runtime",
        category=Category.RUNTIME,
        bytes_at=found.num_bytes,
        formula=Formula(symbols="C", numbers=product(found.num_bytes)),
        source=found.source,
        evidence=found.evidence,
    )
    return Ladder(
        allocated=totals[peak],
        reserved=least if reservation is None else max(reservation.reserved, totals[peak]),
        runtime=runtime,
        usable=device.usable_bytes,
        least_reserved=least,
        reservation=reservation,
    )

"""The vocabulary of an answer: moments of a step, and terms that occupy bytes at those moments.

A step is an ordered list of moments. Each engine, the states and later the activations return terms;
:mod:`memcore.budget` adds them up moment by moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """What a term's bytes are for; the order is the order of stacking in charts."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    ACTIVATIONS = "activations"
    LOSS = "loss"
    WORKSPACE = "workspace"
    RUNTIME = "runtime"


class EvidenceKind(StrEnum):
    """Where a number comes from."""

    FORMULA = "formula"
    TRACE = "trace"
    MEASURED = "measured"


class Phase(StrEnum):
    """The part of a training step that a moment belongs to, in order."""

    INIT = "init"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One moment of a step. `segment` is the layer's index, or "reduce" where gradients are reduced
    at the end of the backward, or "gradients" where the optimizer step readies them before its update,
    else None."""

    phase: Phase
    segment: int | str | None = None

    @property
    def label(self) -> str:
        """A short name such as ``backward[3]``."""
        return self.phase.value if self.segment is None else f"{self.phase.value}[{self.segment}]"


Timeline = tuple[Moment, ...]


def step_timeline(num_layers: int) -> Timeline:
    """The moments of one step of a model with `num_layers` layers.

    A model that is only a parameter count has one segment. The backward visits the layers from the
    last to the first, then reduces what gradients are still to be reduced. The optimizer step first
    takes the gradients' norm, readies them (an engine may cast or flatten them), then updates.
    """
    segments = range(max(num_layers, 1))
    return (
        Moment(phase=Phase.INIT),
        *(Moment(phase=Phase.FORWARD, segment=i) for i in segments),
        Moment(phase=Phase.LOSS),
        *(Moment(phase=Phase.BACKWARD, segment=i) for i in reversed(segments)),
        Moment(phase=Phase.BACKWARD, segment="reduce"),
        Moment(phase=Phase.OPTIMIZER, segment="norm"),
        Moment(phase=Phase.OPTIMIZER, segment="gradients"),
        Moment(phase=Phase.OPTIMIZER),
        Moment(phase=Phase.IDLE),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """How a number comes about: in symbols (LaTeX) and with the user's numbers.

    `numbers` is arithmetic only (``2 × 7,000,000,000 / 8``), so that it needs no translation and a
    test can work it out again. Symbols: Psi parameters, N ranks that share, K optimizer bytes.
    """

    symbols: str
    numbers: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Bytes that one rank holds, moment by moment.

    `bytes_at` is one number where the term is there during the whole step, else one number for each
    moment of the timeline. `formula` explains the largest of them.
    """

    name: str
    category: Category
    bytes_at: int | tuple[int, ...]
    formula: Formula
    source: str
    evidence: EvidenceKind = EvidenceKind.FORMULA

    def at(self, index: int) -> int:
        """Bytes at the moment with that index."""
        return self.bytes_at if isinstance(self.bytes_at, int) else self.bytes_at[index]

    @property
    def largest(self) -> int:
        """The most bytes that the term takes at any moment."""
        return self.bytes_at if isinstance(self.bytes_at, int) else max(self.bytes_at)


def during(timeline: Timeline, share: Callable[[Moment], int]) -> tuple[int, ...]:
    """Bytes for each moment of the timeline, from a function of the moment."""
    return tuple(share(moment) for moment in timeline)


def by_layer(
    timeline: Timeline, forward: Sequence[int], loss: int, backward: Sequence[int], end: int = 0
) -> tuple[int, ...]:
    """Bytes in each layer's forward and backward, by layer, at the loss, and at the backward's end; nothing at the
    other moments."""

    def at(moment: Moment) -> int:
        if moment.phase is Phase.LOSS:
            return loss
        if moment.segment == "reduce":
            return end
        if not isinstance(moment.segment, int):
            return 0
        return (forward if moment.phase is Phase.FORWARD else backward)[moment.segment]

    return during(timeline, at)


def in_phases(timeline: Timeline, num_bytes: int, *phases: Phase) -> tuple[int, ...]:
    """The same bytes at every moment of the given phases, nothing at the others."""
    return during(timeline, lambda moment: num_bytes if moment.phase in phases else 0)


def product(*factors: float) -> str:
    """Write a product with thousands separators: ``2 × 7,000,000,000``."""
    return " × ".join(f"{factor:,}" for factor in factors)

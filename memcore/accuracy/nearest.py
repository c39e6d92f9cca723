"""The published runs that are most like a scenario."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from memcore.accuracy.scored import ScoredRun
from memcore.terms import EvidenceKind

# Another engine, or another method, is as far as so many doublings of the model or of the sequence.
_OTHER_ENGINE = 4.0
_OTHER_METHOD = 4.0
NUM_NEAREST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Like:
    """What a run is compared by: engine, method, parameters, and tokens of a sequence."""

    engine: str
    method: str
    n_params: int
    seq_len: int


def distance(one: Like, run: ScoredRun) -> float:
    """How unlike a run is: one for each doubling of the parameters and of the sequence between the two, and four each
    for another engine and another method."""
    return (
        abs(log2(run.n_params / one.n_params))
        + abs(log2(run.seq_len / one.seq_len))
        + _OTHER_ENGINE * (run.engine != one.engine)
        + _OTHER_METHOD * (run.method != one.method)
    )


def nearest(one: Like, runs: Iterable[ScoredRun], evidence: EvidenceKind, count: int = NUM_NEAREST) -> list[ScoredRun]:
    """The runs with a prediction that rests on this evidence which are least unlike, the nearest first; of equals, the
    first in the file. One of each family, since its runs say the same."""
    found: dict[str, ScoredRun] = {}
    predicted = (run for run in runs if run.predicted_by(evidence) is not None)
    for run in sorted(predicted, key=lambda run: distance(one, run)):
        found.setdefault(run.family, run)
    return list(found.values())[:count]

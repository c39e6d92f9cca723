"""The error band that a verdict carries: earned by published runs of the same engine and method, or stated as wide."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from memcore.accuracy.scored import OF_A_STEP, Figure, ScoredRun, published
from memcore.terms import EvidenceKind

# Fewer runs than these say too little, and the band is the wide one.
FEWEST_RUNS = 5
WIDE_PERCENT = 20
# So many of the runs that are yet to come are to lie within the band, as far as they are of the same kind.
_TENTHS_WITHIN = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """An error band in per cent, and the published runs behind it.

    `runs` of `families`: those of the same engine and method, with the same evidence; `figure`: what was measured of
    them, None where the band is not earned. `covers_all`: there were too few to leave one of ten out, and the
    band reaches to the furthest.
    """

    percent: int
    runs: int
    families: int
    figure: Figure | None
    covers_all: bool = False

    @property
    def earned(self) -> bool:
        """Whether published runs stand behind it."""
        return self.figure is not None


@cache
def band_for(engine: str, method: str, evidence: EvidenceKind | None, figures: tuple[Figure, ...] = OF_A_STEP) -> Band:
    """The band of a prediction. `evidence`: where its activations come from; None where they are not counted, which
    no published run is predicted without. `figures`: which may have been measured, the preferred first."""
    return earned_band(published().runs, engine, method, evidence, figures)


def earned_band(
    runs: Iterable[ScoredRun],
    engine: str,
    method: str,
    evidence: EvidenceKind | None,
    figures: Sequence[Figure] = OF_A_STEP,
) -> Band:
    """The band that runs of the same engine and method give, of the first of the `figures` that enough of them have.

    What tensors take comes first: a verdict is about what must be held for them, since the allocator gives back what it
    holds beyond that before it fails. Runs on another device than a GPU, and those whose metric is not known, do not
    count.
    """
    alike = [run for run in runs if (run.engine, run.method, run.device) == (engine, method, "cuda")]
    errors = {figure: _errors(alike, figure, evidence) for figure in figures}
    earned = [_band(figure, found) for figure, found in errors.items() if len(found) >= FEWEST_RUNS]
    if earned:
        return earned[0]
    return Band(percent=WIDE_PERCENT, runs=max(map(len, errors.values())), families=0, figure=None)


def _errors(
    runs: Iterable[ScoredRun], figure: Figure, evidence: EvidenceKind | None
) -> list[tuple[ScoredRun, float]]:  # fmt: skip
    """The runs of which that figure was measured, with the errors of predictions that rest on the evidence."""
    if evidence is None:
        return []
    found = ((run, run.error_of(evidence)) for run in runs if run.figure is figure)
    return [(run, error) for run, error in found if error is not None]


def _band(figure: Figure, found: Sequence[tuple[ScoredRun, float]]) -> Band:
    return Band(
        percent=max(1, ceil(within([abs(error) for _run, error in found]))),
        runs=len(found),
        families=len({run.family for run, _error in found}),
        figure=figure,
        covers_all=_rank(len(found)) == len(found),
    )


def within(errors: Sequence[float]) -> float:
    """The error that the next run exceeds in one case of ten, as far as it is of the same kind as those that gave
    `errors`: of n, sorted, number ceil(0.9 (n + 1)), at most the last.

    That is split conformal prediction's quantile (Lei et al., arXiv 1604.04173, section 2.2), which holds whatever the
    errors' distribution. Below 9 errors it is the largest, and promises less.
    """
    return sorted(errors)[_rank(len(errors)) - 1]


def _rank(count: int) -> int:
    """ceil(0.9 (count + 1)) in whole numbers, at most `count`."""
    return min(count, -(-_TENTHS_WITHIN * (count + 1) // 10))

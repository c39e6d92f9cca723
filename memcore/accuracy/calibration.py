"""A team's own runs as a correction of predictions: the median of measured over predicted, always named as such.

It is applied beside a prediction and never in its place. A run on a CPU says nothing of a GPU and does not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from memcore.accuracy.scored import Figure, ScoredRun
from memcore.budget import Budget, Verdict, judge
from memcore.ladder import Ladder
from memcore.terms import EvidenceKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The median of measured over predicted, of so many of one's own runs with one engine, method and evidence;
    `figure`: what was measured of them."""

    ratio: float
    runs: int
    figure: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """A prediction with a calibration applied, in bytes per GPU; the budget itself has the figures without."""

    by: Calibration
    allocated: int
    needed: int
    verdict: Verdict


def calibration_for(budget: Budget, runs: Iterable[ScoredRun]) -> Calibration | None:
    """What the runs that have the budget's engine, method and evidence say; None where there are none.

    Runs whose metric is what tensors take come first: what the allocator must hold for them is what a verdict is about.
    """
    scenario = budget.scenario
    evidence = EvidenceKind.FORMULA if budget.evidence.profile is None else EvidenceKind.TRACE
    wanted = (scenario.parallelism.engine.value, scenario.recipe.method.value, "cuda")
    alike = [run for run in runs if (run.engine, run.method, run.device) == wanted]
    for figure in (Figure.TENSORS, Figure.CARD):
        errors = [error for run in alike if run.figure is figure and (error := run.error_of(evidence)) is not None]
        if errors:
            ratio = median(1 / (1 + error / 100) for error in errors)
            return Calibration(ratio=ratio, runs=len(errors), figure=figure)
    return None


def calibrated(budget: Budget, by: Calibration) -> Calibrated:
    """The budget's figures times the ratio; what lies outside the allocator stays as it is."""
    ladder: Ladder = replace(
        budget.ladder,
        allocated=round(by.ratio * budget.ladder.allocated),
        reserved=round(by.ratio * budget.ladder.reserved),
        least_reserved=round(by.ratio * budget.ladder.held),
    )
    return Calibrated(
        by=by, allocated=ladder.allocated, needed=ladder.needed, verdict=judge(ladder, budget.band.percent)
    )

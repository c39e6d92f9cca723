"""A team's own runs as a correction of predictions: the median of measured over predicted, always named as such.

It is applied beside a prediction and never in its place. A run on a CPU says nothing of a GPU and does not count. Where
layers alone were measured, their ratio is applied to activations alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from memcore.accuracy.scored import OF_A_STEP, Figure, ScoredRun
from memcore.budget import Budget, Verdict, judge
from memcore.ladder import Ladder
from memcore.terms import Category, EvidenceKind


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
    Layers alone come last, and say nothing of a closed form: what is measured of them has a weight's gradient for a
    moment, which the form of activations has not.
    """
    scenario = budget.scenario
    evidence = budget.activations_from
    wanted = (scenario.parallelism.engine.value, scenario.recipe.method.value, "cuda")
    alike = [run for run in runs if (run.engine, run.method, run.device) == wanted]
    for figure in OF_A_STEP if evidence is EvidenceKind.FORMULA else (*OF_A_STEP, Figure.ACTIVATIONS):
        errors = [error for run in alike if run.figure is figure and (error := run.error_of(evidence)) is not None]
        if errors:
            ratio = median(1 / (1 + error / 100) for error in errors)
            return Calibration(ratio=ratio, runs=len(errors), figure=figure)
    return None


def calibrated(budget: Budget, by: Calibration) -> Calibrated:
    """The budget's figures times the ratio, or the activations in them; what lies outside the allocator stays."""
    ladder = _with_activations(budget, by.ratio) if by.figure is Figure.ACTIVATIONS else _times(budget.ladder, by.ratio)
    return Calibrated(
        by=by, allocated=ladder.allocated, needed=ladder.needed, verdict=judge(ladder, budget.band.percent)
    )


def _times(ladder: Ladder, ratio: float) -> Ladder:
    return replace(
        ladder,
        allocated=round(ratio * ladder.allocated),
        reserved=round(ratio * ladder.reserved),
        least_reserved=round(ratio * ladder.held),
    )


def _with_activations(budget: Budget, ratio: float) -> Ladder:
    """The ladder with activations times the ratio at every moment: the peak may be at another one then. What is
    reserved grows by as much as the peak."""
    ladder = budget.ladder
    shares = [budget.by_category(index).get(Category.ACTIVATIONS, 0) for index in range(len(budget.timeline))]
    peak = round(max(total + (ratio - 1) * share for total, share in zip(budget.totals, shares, strict=True)))
    more = peak - ladder.allocated
    return replace(ladder, allocated=peak, reserved=ladder.reserved + more, least_reserved=ladder.held + more)

"""Errors of many runs in a few figures: medians and 90th percentiles by what was measured and by regime."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import floor
from statistics import fmean
from typing import Any

from memcore.accuracy.scored import ScoredRun
from memcore.score.rows import row_of
from memcore.score.scoring import Score, Status

# What was measured, of one kind each, which is never averaged with another. Gold runs are in two of them, and
# FSDP2's, whose reserved memory depends most on the allocator, have a line of their own too.
GROUPS: dict[str, Callable[[ScoredRun], bool]] = {
    "gold": lambda run: run.gold,
    "allocated": lambda run: run.metric in ("allocated", "active"),
    "reserved": lambda run: run.metric == "reserved",
    "reserved_fsdp2": lambda run: run.metric == "reserved" and run.engine == "fsdp2",
    "other": lambda run: run.metric in ("nvidia_smi", "unknown"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The errors of `n` runs within the scope, of which `predicted` have one, in per cent of what was measured."""

    n: int
    predicted: int
    median_abs_pct: float | None
    p90_abs_pct: float | None
    median_signed_pct: float | None


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` of them lie, between two of them in proportion (Hyndman and Fan 1996,
    definition 7, numpy's default); None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def figures(runs: Iterable[ScoredRun]) -> Figures:
    """The figures of those runs that are within the scope."""
    within = [run for run in runs if run.status in (Status.PREDICTED, Status.NOT_PREDICTED)]
    errors = [error for run in within if (error := run.error_pct) is not None]
    return Figures(
        n=len(within),
        predicted=len(errors),
        median_abs_pct=percentile(map(abs, errors), 0.5),
        p90_abs_pct=percentile(map(abs, errors), 0.9),
        median_signed_pct=percentile(errors, 0.5),
    )


def by_group(runs: Sequence[ScoredRun]) -> dict[str, Figures]:
    """The figures of each kind of what was measured."""
    return {name: figures(filter(holds, runs)) for name, holds in GROUPS.items()}


def by_regime(runs: Iterable[ScoredRun]) -> dict[str, dict[str, Figures]]:
    """The same for each regime."""
    found: dict[str, list[ScoredRun]] = {}
    for run in runs:
        found.setdefault(run.regime, []).append(run)
    return {regime: by_group(part) for regime, part in sorted(found.items())}


def macro_median(regimes: dict[str, dict[str, Figures]], group: str) -> float | None:
    """The mean over the regimes of their medians, so that no regime counts for its number of runs."""
    medians = [each for part in regimes.values() if (each := part[group].median_abs_pct) is not None]
    return fmean(medians) if medians else None


def split(scores: Iterable[Score], by: str) -> dict[str, list[Score]]:
    """The scores by a field of their runs, in the fields' own order; those that could not be read have none."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        if score.run is not None:
            found.setdefault(getattr(score.run, by), []).append(score)
    return dict(sorted(found.items()))


def rows_of(scores: Iterable[Score]) -> list[ScoredRun]:
    """The rows of the records that could be read."""
    return [row_of(score) for score in scores if score.run is not None]


def summarise(scores: Sequence[Score]) -> dict[str, Any]:
    """The summary as JSON data, each group with the mean over the regimes of their medians."""
    rows = rows_of(scores)
    regimes = by_regime(rows)
    overall = {
        name: {**asdict(each), "macro_median_abs_pct": macro_median(regimes, name)}
        for name, each in by_group(rows).items()
    }
    return {
        **overall,
        "regimes": {name: {group: asdict(each) for group, each in part.items()} for name, part in regimes.items()},
        "records": {status.value: sum(score.status is status for score in scores) for status in Status},
        "not_predicted": reasons(scores),
    }


def reasons(scores: Iterable[Score]) -> dict[str, dict[str, int]]:
    """For each field that cannot be expressed, the runs that are not predicted for it, and those for it `alone`."""
    counts: dict[str, dict[str, int]] = {}
    for score in scores:
        fields = {gap.field for gap in score.gaps}
        for field in fields:
            count = counts.setdefault(field, {"records": 0, "alone": 0})
            count["records"] += 1
            count["alone"] += len(fields) == 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1]["records"], item[0])))

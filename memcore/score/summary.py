"""Errors of many runs in a few figures: medians and 90th percentiles by what was measured and by regime."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import floor
from statistics import fmean
from typing import Any

from memcore.score.scoring import Score, Status

# What was measured, of one kind each, which is never averaged with another. Gold runs are in two of them.
GROUPS: dict[str, Callable[[Score], bool]] = {
    "gold": lambda score: score.run is not None and score.run.gold,
    "allocated": lambda score: score.run is not None and score.run.measured.metric in ("allocated", "active"),
    "reserved": lambda score: score.run is not None and score.run.measured.metric == "reserved",
    "other": lambda score: score.run is not None and score.run.measured.metric in ("nvidia_smi", "unknown"),
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


def figures(scores: Iterable[Score]) -> Figures:
    """The figures of those scores that are within the scope."""
    within = [score for score in scores if score.status in (Status.PREDICTED, Status.NOT_PREDICTED)]
    errors = [error for score in within if (error := score.error_pct) is not None]
    return Figures(
        n=len(within),
        predicted=len(errors),
        median_abs_pct=percentile(map(abs, errors), 0.5),
        p90_abs_pct=percentile(map(abs, errors), 0.9),
        median_signed_pct=percentile(errors, 0.5),
    )


def by_group(scores: Sequence[Score]) -> dict[str, Figures]:
    """The figures of each kind of what was measured."""
    return {name: figures(filter(holds, scores)) for name, holds in GROUPS.items()}


def split(scores: Iterable[Score], by: str) -> dict[str, list[Score]]:
    """The scores by a field of their runs, in the fields' own order; those that could not be read have none."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        if score.run is not None:
            found.setdefault(getattr(score.run, by), []).append(score)
    return dict(sorted(found.items()))


def summarise(scores: Sequence[Score]) -> dict[str, Any]:
    """The summary as JSON data. `macro`: for each group the mean over the regimes of their medians, so that no
    regime counts for its number of runs."""
    regimes = {name: by_group(part) for name, part in split(scores, "regime").items()}
    overall = by_group(scores)
    return {
        **{name: {**asdict(each), "macro_median_abs_pct": _macro(regimes, name)} for name, each in overall.items()},
        "regimes": {name: {group: asdict(each) for group, each in part.items()} for name, part in regimes.items()},
        "records": {status.value: sum(score.status is status for score in scores) for status in Status},
        "not_predicted": reasons(scores),
    }


def _macro(regimes: dict[str, dict[str, Figures]], group: str) -> float | None:
    medians = [each for part in regimes.values() if (each := part[group].median_abs_pct) is not None]
    return fmean(medians) if medians else None


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

"""The best settings for a goal, among those of the grid: the same as trying each with :func:`memcore.budget.predict`.

At ZeRO stage 3 the grid has some ten thousand combinations. The engine's terms depend on three groups of settings
apart (the prefetcher's, the bucket's, the sub-group's), so that each group's terms are worked out once per value and
added up moment by moment; a test holds that to the prediction of every combination.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import add, sub

from memcore.budget import Budget, Verdict, predict
from memcore.engine_options import EngineName
from memcore.engines import ENGINE_TERMS, Inputs
from memcore.suggest.grid import (
    DEFAULT_LEAST_BUCKET,
    Grid,
    Settings,
    candidates,
    inputs_of,
    settings_grid,
    settings_now,
    with_settings,
)
from memcore.suggest.traffic import Traffic, gather_traffic, reduce_traffic, traffic, update_traffic


class GoalKind(StrEnum):
    """What settings are looked for."""

    MEMORY = "memory"
    SPEED = "speed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Least memory with a reduce bucket of at least `least_bucket` elements, the fastest of equals; or the most speed
    of what fits the card with the error band, the smallest of equals. Speed is :class:`Traffic`'s order."""

    kind: GoalKind
    least_bucket: int = DEFAULT_LEAST_BUCKET


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting of a suggestion, and the suggestion with this one alone put back to its present value."""

    setting: str
    now: int | bool
    suggested: int | bool
    peak_if_kept: int
    traffic_if_kept: Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """What is suggested, by the same prediction before and after.

    `met` is False where the most speed is wanted and nothing of the grid surely fits: then it is the least memory.
    `tried` combinations were compared.
    """

    goal: Goal
    before: Budget
    after: Budget
    traffic_before: Traffic
    traffic_after: Traffic
    changes: tuple[Change, ...]
    met: bool
    tried: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A combination, in the parts that it was made of, with its peak in bytes and how many settings it changes."""

    parts: tuple[Settings, ...]
    peak_bytes: int
    traffic: Traffic
    num_changes: int

    @property
    def settings(self) -> dict[str, int | bool]:
        """The value of each setting."""
        return {name: value for part in self.parts for name, value in part.items()}


def suggest(budget: Budget, goal: Goal, grid: Grid | None = None) -> Suggestion | None:
    """The settings for a goal; None where the engine has nothing to choose. Of equals, the one that changes least.

    `grid`: the values to try for each of :func:`settings_now`; those of :func:`settings_grid` by default.
    """
    now = settings_now(budget)
    if not now:
        return None
    if grid is None:
        grid = settings_grid(budget, goal.least_bucket if goal.kind is GoalKind.MEMORY else None)
    separable = budget.scenario.parallelism.engine is EngineName.DEEPSPEED and budget.scenario.parallelism.stage == 3
    found = list((_added_up if separable else _predicted)(budget, grid, now))
    best = _fastest_that_fits(budget, found) if goal.kind is GoalKind.SPEED else None
    chosen = best or min(found, key=lambda each: (each.peak_bytes, each.traffic, each.num_changes))
    changed = {name: value for name, value in chosen.settings.items() if value != now[name]}
    after = _predict(budget, changed) if changed else budget
    return Suggestion(
        goal=goal,
        before=budget,
        after=after,
        traffic_before=traffic(inputs_of(budget)),
        traffic_after=chosen.traffic,
        changes=tuple(_change(budget, now, changed, name) for name in changed),
        met=goal.kind is GoalKind.MEMORY or best is not None,
        tried=len(found),
    )


def _fastest_that_fits(budget: Budget, found: Sequence[_Candidate]) -> _Candidate | None:
    """In the order of speed, the first that the verdict says fits. What tensors take is a lower bound of what it
    judges, so that most of what does not fit needs no prediction."""
    ladder = budget.ladder
    fixed, band = ladder.runtime.largest, budget.band.percent
    for each in sorted(found, key=lambda each: (each.traffic, each.peak_bytes, each.num_changes)):
        peak = each.peak_bytes
        if peak + fixed + peak * band // 100 <= ladder.usable and (
            _predict(budget, each.settings).verdict is Verdict.FITS
        ):
            return each
    return None


def _change(budget: Budget, now: Settings, changed: Settings, name: str) -> Change:
    others = {other: value for other, value in changed.items() if other != name}
    kept = _predict(budget, others)
    return Change(
        setting=name,
        now=now[name],
        suggested=changed[name],
        peak_if_kept=kept.peak_bytes,
        traffic_if_kept=traffic(inputs_of(kept)),
    )


def _predict(budget: Budget, settings: Settings) -> Budget:
    return predict(with_settings(budget.scenario, settings), budget.evidence)


def _num_changes(settings: Settings, now: Settings) -> int:
    return sum(value != now[name] for name, value in settings.items())


def _predicted(budget: Budget, grid: Grid, now: Settings) -> Iterator[_Candidate]:
    """Every combination with its own prediction."""
    for settings in candidates(grid):
        found = _predict(budget, settings)
        yield _Candidate(
            parts=(settings,),
            peak_bytes=found.peak_bytes,
            traffic=traffic(inputs_of(found)),
            num_changes=_num_changes(settings, now),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    """A group's values: what they add to each moment over the present ones, in bytes, and their traffic."""

    settings: Settings
    more: tuple[int, ...]
    traffic: Traffic
    num_changes: int


_BUCKET, _SUB_GROUP = "reduce_bucket_size", "sub_group_size"


def _added_up(budget: Budget, grid: Grid, now: Settings) -> Iterator[_Candidate]:
    """Combinations at stage 3 from their groups' terms. overlap_comm takes no memory there and makes nothing slower:
    where it is on already, off is left out."""
    on_already = now["overlap_comm"] and True in grid["overlap_comm"]
    for overlap in (True,) if on_already else grid["overlap_comm"]:
        yield from _with_overlap(budget, grid, now, {"overlap_comm": overlap})


def _with_overlap(budget: Budget, grid: Grid, now: Settings, overlap: Settings) -> Iterator[_Candidate]:
    """Every combination of the other settings."""
    base = _predict(budget, overlap)
    prefetcher = {name: values for name, values in grid.items() if name.startswith("stage3_")}
    gathers = _options(base, prefetcher, now, gather_traffic)
    buckets = _options(base, {_BUCKET: grid[_BUCKET]}, now, reduce_traffic)
    updates = _options(base, {_SUB_GROUP: grid[_SUB_GROUP]} if _SUB_GROUP in grid else {}, now, update_traffic)
    for gather in gathers:
        gathered = tuple(map(add, base.totals, gather.more))
        for bucket in buckets:
            both = tuple(map(add, gathered, bucket.more))
            moved = gather.traffic + bucket.traffic
            changes = _num_changes(overlap, now) + gather.num_changes + bucket.num_changes
            for update in updates:
                yield _Candidate(
                    parts=(overlap, gather.settings, bucket.settings, update.settings),
                    peak_bytes=max(map(add, both, update.more)),
                    traffic=moved + update.traffic,
                    num_changes=changes + update.num_changes,
                )


def _options(budget: Budget, grid: Grid, now: Settings, traffic_of: Callable[[Inputs], Traffic]) -> list[_Option]:
    """The combinations of one group, in the engine's own terms; `budget` holds the present ones."""
    present = _engine_totals(inputs_of(budget))
    found = []
    for settings in candidates(grid):
        inputs = inputs_of(budget, with_settings(budget.scenario, settings))
        option = _Option(
            settings=settings,
            more=tuple(map(sub, _engine_totals(inputs), present)),
            traffic=traffic_of(inputs),
            num_changes=_num_changes(settings, now),
        )
        found.append(option)
    return found


def _engine_totals(inputs: Inputs) -> tuple[int, ...]:
    """The sum of the engine's terms at each moment, in bytes."""
    terms = ENGINE_TERMS[inputs.scenario.parallelism.engine](inputs)
    return tuple(sum(term.at(index) for term in terms) for index in range(len(inputs.timeline)))

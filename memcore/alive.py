"""What is alive at the fullest moment of forward and backward, module by module, as a trace saw it."""

from dataclasses import dataclass

from memcore.budget import Budget
from memcore.terms import Moment
from memcore.trace.terms import term_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """Bytes of one term that one module, of all layers together, has alive; a path within a layer or the model."""

    term: str
    module: str
    num_bytes: int


def fullest_traced(budget: Budget) -> int | None:
    """The index of the moment with the largest sum among those that a trace covers: the budget's peak, unless the
    optimizer's step binds. None without a trace."""
    profile = budget.evidence.profile
    if profile is None:
        return None
    # The moments of a trace follow the first of the step, its start.
    return max(range(1, len(profile.totals) + 1), key=budget.totals.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AliveTable:
    """What is alive at `moment` beside the states: the largest first, then `num_others` more of `others_bytes`."""

    moment: Moment
    rows: tuple[Alive, ...]
    num_others: int
    others_bytes: int


def alive_by_module(budget: Budget, most: int = 12) -> AliveTable | None:
    """The fullest traced moment and what is alive then, at most so many rows; None without a trace."""
    index, profile = fullest_traced(budget), budget.evidence.profile
    if index is None or profile is None:
        return None
    found = [
        Alive(term=term_name(row.category), module=row.module, num_bytes=row.bytes_at[index - 1])
        for row in profile.rows
        if row.bytes_at[index - 1]
    ]
    found.sort(key=lambda alive: -alive.num_bytes)
    others = found[most:]
    return AliveTable(
        moment=budget.timeline[index],
        rows=tuple(found[:most]),
        num_others=len(others),
        others_bytes=sum(alive.num_bytes for alive in others),
    )

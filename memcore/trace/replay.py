"""Depth for free: the events of a few traced units, laid out over all units of the model.

A unit is what is recomputed together: a layer, or a segment of layers. Its forward and its backward leave the
same bytes behind wherever it stands, so the timeline of the whole model is the traced segments in its order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Event = tuple[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedUnit:
    """Events of one unit: changes in bytes by category, in order, in its forward and in its backward."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """A traced step: what comes before the first unit, the units, what lies between the last unit's forward and
    its backward (final norm, head, loss), and what comes after the first unit's backward."""

    before: tuple[Event, ...]
    units: tuple[TracedUnit, ...]
    loss: tuple[Event, ...]
    after: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Bytes by category at the fullest instant of each unit's forward and backward, and of the loss."""

    forward: tuple[Mapping[str, int], ...]
    backward: tuple[Mapping[str, int], ...]
    loss: Mapping[str, int]


def replay(step: TracedStep, order: Sequence[int]) -> Replayed:
    """Lay the traced units out: `order[i]` is the traced unit that unit i of the model is like."""
    level: dict[str, int] = {}
    forward = [
        _run(level, (*(step.before if i == 0 else ()), *step.units[unit].forward)) for i, unit in enumerate(order)
    ]
    loss = _run(level, step.loss)
    backward = []
    for i in reversed(range(len(order))):
        events = (*step.units[order[i]].backward, *(step.after if i == 0 else ()))
        backward.append(_run(level, events))
    return Replayed(forward=tuple(forward), backward=tuple(reversed(backward)), loss=loss)


def _run(level: dict[str, int], events: Sequence[Event]) -> dict[str, int]:
    """Apply events to the level, and return the level at its fullest."""
    total = sum(level.values())
    best, fullest = total, dict(level)
    for change, category in events:
        level[category] = level.get(category, 0) + change
        total += change
        if total > best:
            best, fullest = total, dict(level)
    return fullest

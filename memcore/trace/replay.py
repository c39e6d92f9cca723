"""Depth for free: the events of a few traced units, laid out over all units of the model.

A unit is what is recomputed together: a layer, or a segment of layers. Its forward and its backward leave the
same bytes behind wherever it stands, so the timeline of the whole model is the traced segments in its order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# A change in bytes, and the category of its storage.
Event = tuple[int, str]

# The category of parameters' gradients. They are states, so they are kept out of each moment's figures.
GRADIENTS = "gradients"


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedUnit:
    """Events of one unit: changes in bytes by category, in order, in its forward and in its backward.

    `repeated`: its backward where the backward of a unit like it is still to come. What all units share, such as
    rotary tables, is given back by the last of them alone.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    repeated: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """A traced step: what comes before the first unit, the units, and what lies between the last unit's forward
    and its backward (final norm, head, loss). The first unit's backward runs to the end of the step."""

    before: tuple[Event, ...]
    units: tuple[TracedUnit, ...]
    loss: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Bytes by category at the fullest instant of each unit's forward and backward, and of the loss, gradients
    aside; and the most bytes at any instant of the step with them."""

    forward: tuple[Mapping[str, int], ...]
    backward: tuple[Mapping[str, int], ...]
    loss: Mapping[str, int]
    with_gradients: int


@dataclass(slots=True)
class _Segment:
    """A run of events seen from the level at its start: what it adds at its fullest and by its end, gradients
    aside, and the most that it adds at any instant, and by its end, with them."""

    fullest: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    most_with_gradients: int = 0
    end_with_gradients: int = 0


def replay(step: TracedStep, order: Sequence[int]) -> Replayed:
    """Lay the traced units out: `order[i]` is the traced unit that unit i of the model is like."""
    forwards = [_segment(unit.forward) for unit in step.units]
    backwards = [_segment(unit.backward) for unit in step.units]
    repeated = [_segment(unit.repeated) for unit in step.units]
    first = _segment((*step.before, *step.units[order[0]].forward))
    loss = _segment(step.loss)
    back = [backwards[unit] if order.index(unit) == place else repeated[unit] for place, unit in enumerate(order)]
    run = [first, *(forwards[unit] for unit in order[1:]), loss, *reversed(back)]
    moments, most = _lay_out(run)
    count = len(order)
    return Replayed(
        forward=tuple(moments[:count]),
        loss=moments[count],
        backward=tuple(reversed(moments[count + 1 :])),
        with_gradients=most,
    )


def _segment(events: Sequence[Event]) -> _Segment:
    """Where a segment is fullest does not depend on the level at its start."""
    found, level, best = _Segment(), 0, 0
    for change, category in events:
        found.end_with_gradients += change
        found.most_with_gradients = max(found.most_with_gradients, found.end_with_gradients)
        if category != GRADIENTS:
            found.end[category] = found.end.get(category, 0) + change
            level += change
            if level > best:
                best, found.fullest = level, dict(found.end)
    return found


def _lay_out(run: Sequence[_Segment]) -> tuple[list[dict[str, int]], int]:
    """The bytes by category at the fullest instant of each segment, one after the other; the most of all."""
    moments: list[dict[str, int]] = []
    level: dict[str, int] = {}
    total = most = 0
    for segment in run:
        moments.append(_sum(level, segment.fullest))
        level = _sum(level, segment.end)
        most = max(most, total + segment.most_with_gradients)
        total += segment.end_with_gradients
    return moments, most


def _sum(level: Mapping[str, int], change: Mapping[str, int]) -> dict[str, int]:
    return {name: level.get(name, 0) + change.get(name, 0) for name in (*level, *(c for c in change if c not in level))}

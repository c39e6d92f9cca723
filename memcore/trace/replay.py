"""Depth for free: the changes of a few traced units, laid out over all units of the model.

A unit's forward and its backward leave the same bytes behind wherever it stands, so the timeline of the whole model
is the traced segments in its order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from memcore.trace.tape import GRADIENTS, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A step's moments in order: the forward of each unit, the loss, the backward of each unit from the last.

    `alive[m]`: bytes by the tape's keys at the fullest instant of moment m, gradients aside. `with_gradients[m]`: the
    most bytes at any of its instants with the gradients made so far.
    """

    alive: tuple[tuple[int, ...], ...]
    with_gradients: tuple[int, ...]


@dataclass(slots=True)
class _Segment:
    """A run of changes seen from the level at its start: what it adds by key at its fullest and by its end,
    gradients aside, and the most that it adds at any instant, and by its end, with them."""

    fullest: list[int]
    end: list[int]
    most_with_gradients: int = 0
    end_with_gradients: int = 0


def replay(tape: Tape) -> Replayed:
    """Lay the traced units out in the model's order."""
    named: dict[str, list[int]] = {name: [] for name in tape.segments}
    for index, place in enumerate(tape.places):
        named[tape.segments[place]].append(index)
    count = max(tape.order) + 1
    forwards = [_segment(tape, named.get(f"forward {unit}", [])) for unit in range(count)]
    backwards = [named.get(f"backward {unit}", []) for unit in range(count)]
    last = [_segment(tape, indices) for indices in backwards]
    # What all units share, such as rotary tables, is given back by the last of them alone.
    earlier = [_segment(tape, [i for i in indices if _born_in(tape, i) != "before"]) for indices in backwards]
    first = _segment(tape, [*named.get("before", []), *named.get(f"forward {tape.order[0]}", [])])
    back = [last[unit] if tape.order.index(unit) == place else earlier[unit] for place, unit in enumerate(tape.order)]
    # What units leave behind for the end of the forward, such as autocast's copies, is given back for each of them.
    owners = [_born_in(tape, index) for index in named.get("loss", [])]
    times = {f"forward {unit}": tape.order.count(unit) for unit in range(count)}
    loss = _segment(tape, named.get("loss", []), [times.get(owner, 1) for owner in owners])
    return _lay_out([first, *(forwards[unit] for unit in tape.order[1:]), loss, *reversed(back)], len(tape.keys))


def _born_in(tape: Tape, index: int) -> str:
    return tape.segments[tape.born[index]]


def _segment(tape: Tape, indices: Sequence[int], times: Sequence[int] | None = None) -> _Segment:
    """Where a segment is fullest does not depend on the level at its start. `times`: how often each change counts."""
    end = [0] * len(tape.keys)
    found, level, best = _Segment(fullest=list(end), end=end), 0, 0
    states = {owner for owner, (category, _module) in enumerate(tape.keys) if category == GRADIENTS}
    for index, count in zip(indices, times or repeat(1), strict=False):
        change, owner = count * tape.changes[index], tape.owners[index]
        found.end_with_gradients += change
        found.most_with_gradients = max(found.most_with_gradients, found.end_with_gradients)
        if owner not in states:
            end[owner] += change
            level += change
            if level > best:
                best, found.fullest = level, list(end)
    return found


def _lay_out(run: Sequence[_Segment], num_keys: int) -> Replayed:
    """The bytes by key at the fullest instant of each segment, one after the other, and the most with gradients."""
    alive, most = [], []
    level, total = [0] * num_keys, 0
    for segment in run:
        alive.append(tuple(have + more for have, more in zip(level, segment.fullest, strict=True)))
        level = [have + more for have, more in zip(level, segment.end, strict=True)]
        most.append(total + segment.most_with_gradients)
        total += segment.end_with_gradients
    return Replayed(alive=tuple(alive), with_gradients=tuple(most))

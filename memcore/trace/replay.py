"""Depth for free: the changes of a few traced units, laid out over all units of the model.

A unit's forward and its backward leave the same bytes behind wherever it stands, so the timeline of the whole model
is the traced segments in its order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memcore.trace.tape import GRADIENTS, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A step's moments in order: the forward of each unit, the loss, the backward of each unit from the last; and what
    is reduced after it, of an engine that shards.

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
    """Lay the traced units out in the model's order, and find the fullest instant of each moment."""
    seen: dict[_Run, _Segment] = {}
    segments = []
    for _moment, run in runs(tape):
        if run not in seen:
            seen[run] = _segment(tape, run)
        segments.append(seen[run])
    return _lay_out(segments, len(tape.keys))


def timeline(tape: Tape) -> Iterator[tuple[str, str, str, int]]:
    """Every storage taken and given back in the step of the whole model, in order: the moment (with the number of the
    unit, which is the layer's where layers are units), category, module, and bytes."""
    for moment, run in runs(tape):
        for index, times in run:
            category, module = tape.keys[tape.owners[index]]
            for _each in range(times):
                yield moment, category, module, tape.changes[index]


# Changes of a moment, each with how often it counts.
_Run = tuple[tuple[int, int], ...]


def runs(tape: Tape) -> list[tuple[str, _Run]]:
    """The changes of each moment of the whole model."""
    named: dict[str, list[int]] = {name: [] for name in tape.segments}
    for index, place in enumerate(tape.places):
        named[tape.segments[place]].append(index)

    def once(*segments: str, keep: Callable[[int], bool] = lambda index: True) -> _Run:
        return tuple((index, 1) for name in segments for index in named.get(name, []) if keep(index))

    units = range(max(tape.order) + 1)
    forwards, last = [once(f"forward {unit}") for unit in units], [once(f"backward {unit}") for unit in units]
    # What all units share, such as rotary tables, is given back by the last of them alone.
    earlier = [once(f"backward {unit}", keep=lambda index: _born_in(tape, index) != "before") for unit in units]
    # What units leave behind for the end of the forward, such as autocast's copies, or of the backward, such as what
    # groups of ranks reduce together, is given back for each of them.
    times = {f"{what} {unit}": tape.order.count(unit) for unit in units for what in ("forward", "backward")}

    def of_all(segment: str) -> _Run:
        return tuple((index, times.get(_born_in(tape, index), 1)) for index in named.get(segment, []))

    back = [last[unit] if tape.order.index(unit) == place else earlier[unit] for place, unit in enumerate(tape.order)]
    return [
        ("forward[0]", once("before", f"forward {tape.order[0]}")),
        *((f"forward[{place}]", forwards[unit]) for place, unit in enumerate(tape.order) if place),
        ("loss", of_all("loss")),
        *((f"backward[{place}]", back[place]) for place in reversed(range(len(back)))),
        *([("reduce", of_all("reduce"))] if "reduce" in named else []),
    ]


def _born_in(tape: Tape, index: int) -> str:
    return tape.segments[tape.born[index]]


def _segment(tape: Tape, run: _Run) -> _Segment:
    """Where a segment is fullest does not depend on the level at its start."""
    end = [0] * len(tape.keys)
    found, level, best = _Segment(fullest=list(end), end=end), 0, 0
    states = {owner for owner, (category, _module) in enumerate(tape.keys) if category == GRADIENTS}
    for index, times in run:
        change, owner = times * tape.changes[index], tape.owners[index]
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

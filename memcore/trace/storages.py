"""The storages of the whole model's step one by one: which is taken when, and which is given back.

:mod:`memcore.trace.replay` lays a few traced units out over all of them and adds up their bytes. Here each storage of
each unit has a number of its own, as an allocator needs it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from memcore.trace.replay import runs
from memcore.trace.tape import GRADIENTS, KIND_ALONE, Tape


@dataclass(frozen=True, slots=True)
class Event:
    """A storage is taken (`num_bytes` of them on `stream`), or given back where that is 0. `gradient`: a parameter's
    gradient, which the training loop gives back."""

    storage: int
    num_bytes: int
    stream: int = 0
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class _Life:
    """A traced storage: the phase and unit of the segments that it is taken and given back in, None where never; its
    bytes, and its category and module."""

    born: tuple[str, int]
    gone: tuple[str, int] | None
    like: tuple[int, int]


def events(tape: Tape) -> Iterator[tuple[str, list[Event]]]:
    """Each moment of the step with its events in order."""
    layout = _Layout(tape)
    for moment, run in runs(tape):
        yield moment, layout.moment(moment, run)


def by_layer(tape: Tape) -> list[tuple[str, list[Event]]]:
    """The same by the step's own moments (:func:`memcore.terms.step_timeline`): a unit's by its first layer in the
    forward, by its last in the backward."""
    firsts = list(accumulate(tape.unit_sizes, initial=0))

    def label(moment: str) -> str:
        phase, _bracket, rest = moment.partition("[")
        if not rest:
            return "backward[reduce]" if phase == "reduce" else phase
        unit = int(rest[:-1])
        return f"{phase}[{firsts[unit] if phase == 'forward' else firsts[unit + 1] - 1}]"

    return [(label(moment), found) for moment, found in events(tape)]


class _Layout:
    """Lays the traced units out, and knows which storages are alive."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._units: dict[int, list[int]] = {}
        for place, unit in enumerate(tape.order):
            self._units.setdefault(unit, []).append(place)
        self._lives = _lives(tape)
        self._alike = _alike(self._lives)
        self._like: dict[tuple[tuple[str, int], tuple[int, int]], list[int]] = {}
        for storage, life in self._lives.items():
            self._like.setdefault((life.born, life.like), []).append(storage)
        # By traced storage and the place of the unit that took it.
        self._alive: dict[tuple[int, int], int] = {}
        self._next = 0

    def moment(self, moment: str, run: tuple[tuple[int, int], ...]) -> list[Event]:
        """The events of one moment: the changes of `run`, each with how often it counts."""
        phase, _bracket, rest = moment.partition("[")
        place = int(rest[:-1]) if rest else None
        found = []
        for index, times in run:
            storage, size = self._tape.storages[index], self._tape.changes[index]
            if storage == KIND_ALONE or not size:
                continue
            if size > 0:
                found.append(self._take(index, storage, size, place))
            else:
                found += [self._give_back(number) for number in self._meant(storage, phase, place, times)]
        return found

    def _take(self, index: int, storage: int, size: int, place: int | None) -> Event:
        self._next += 1
        self._alive[storage, self._home(storage, place)] = self._next
        gradient = self._tape.keys[self._tape.owners[index]][0] == GRADIENTS
        return Event(self._next, size, self._tape.streams[index], gradient)

    def _home(self, storage: int, place: int | None) -> int:
        """The place of the unit that takes a storage; 0 for what is taken outside all of them."""
        return 0 if place is None or self._lives[storage].born[1] < 0 else place

    def _give_back(self, key: tuple[int, int]) -> Event:
        return Event(self._alive.pop(key), 0)

    def _meant(self, storage: int, phase: str, place: int | None, times: int) -> list[tuple[int, int]]:
        """The storages that a change gives back in the unit at `place`: the traced one, or in a repeated unit the one
        that stands in its stead; those of all units where it counts as often."""
        (born, unit), gone = self._lives[storage].born, self._lives[storage].gone
        if place is None or gone is None or gone[1] < 0:
            places = [0] if unit < 0 else self._units[unit] if times > 1 else self._units[unit][-1:]
            keys = [(storage, each) for each in places]
        else:
            # The loss comes before the last unit's backward, what is before all units before the first one's forward.
            before = max(self._tape.order) + 1 if born == "loss" else -1
            home = place + (before if unit < 0 else unit) - gone[1]
            keys = [(storage, 0)]
            if (unit >= 0 or keys[0] not in self._alive) and 0 <= home < len(self._tape.order):
                keys = [(self._counterpart(storage, phase, home), home)]
        return [key for key in keys if key in self._alive]

    def _counterpart(self, storage: int, phase: str, home: int) -> int:
        """What the unit at a place takes in a traced storage's stead: the one that stands there among those of the same
        kind; else, as where units fetch for the one after next, one of the same bytes and module."""
        life, unit = self._lives[storage], self._tape.order[home]
        if life.born[1] == unit:
            return storage
        if life.born[1] >= 0:
            mine, theirs = self._alike[_kind(life), life.born[1]], self._alike.get((_kind(life), unit), [])
            place = mine.index(storage)
            if place < len(theirs):
                return theirs[place]
        born = (life.born[0] if life.born[1] >= 0 else phase, unit)
        return next((each for each in self._like.get((born, life.like), []) if (each, home) in self._alive), -1)


def _kind(life: _Life) -> tuple[str, str, int]:
    """What storages of two units have in common: the phases, and how far off the unit is that gives them back."""
    assert life.gone is not None, "it is given back"
    return life.born[0], life.gone[0], life.gone[1] - life.born[1]


def _lives(tape: Tape) -> dict[int, _Life]:
    born: dict[int, tuple[str, int]] = {}
    lives: dict[int, _Life] = {}
    columns = zip(tape.storages, tape.places, tape.changes, tape.owners, strict=True)
    for storage, place, size, owner in columns:
        segment = _segment(tape.segments[place])
        if storage == KIND_ALONE or not size:
            continue
        if size > 0:
            born[storage] = segment
            lives[storage] = _Life(segment, None, (size, owner))
        else:
            lives[storage] = _Life(born[storage], segment, lives[storage].like)
    return lives


def _segment(name: str) -> tuple[str, int]:
    """A segment's phase and unit; -1 where it is none's."""
    phase, _space, unit = name.partition(" ")
    return phase, int(unit) if unit else -1


def _alike(lives: dict[int, _Life]) -> dict[tuple[tuple[str, str, int], int], list[int]]:
    """For each kind of life and unit the storages that have it, in order of birth."""
    found: dict[tuple[tuple[str, str, int], int], list[int]] = {}
    for storage, life in lives.items():
        if life.gone is not None and life.born[1] >= 0 and life.gone[1] >= 0:
            found.setdefault((_kind(life), life.born[1]), []).append(storage)
    return found

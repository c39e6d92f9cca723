"""From what a recorder saw to a tape: each storage under the category and module that it belongs to.

Worker processes only, like the recorder.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from memcore.trace.recorder import Change
from memcore.trace.tape import GRADIENTS, HOST, KIND_ALONE, Tape


def tape_of(
    changes: Sequence[Change],
    gradients: Collection[int],
    forward_changes: int,
    told: Mapping[int, tuple[str, str]],
    **about: Any,
) -> Tape:
    """The changes as a tape. `gradients` are the storages of parameters' gradients: of what a fused loss makes of them
    in the forward, the first `forward_changes`, they are the loss's. `told`: categories and modules that are known of
    storages, those on the host left out. `about` are the tape's other fields."""
    owners = {**_owners(changes), **told}
    changes = _casts_in_order(changes, owners)
    host = {number for number, (category, _module) in told.items() if category == HOST}
    states = dict.fromkeys(gradients, (GRADIENTS, ""))
    segments: dict[str, int] = {}
    keys: dict[tuple[str, str], int] = {}
    born: dict[int | None, int] = {}
    storages = _Storages()
    columns: list[tuple[int, int, int, bool, int, int, int]] = []

    def add(change: Change, key: tuple[str, str], size: int, storage: int) -> None:
        place = segments.setdefault(change.segment, len(segments))
        birth = place if change.storage is None else born.setdefault(change.storage, place)
        owner = keys.setdefault(key, len(keys))
        columns.append((place, owner, birth, change.rounded, storage, change.stream, size))

    for index, change in enumerate(changes):
        number = change.storage
        if number in host:
            continue
        if index == forward_changes:
            for early in [each for each in changes[:index] if each.storage in states]:
                add(early, owners[early.storage or 0], -early.num_bytes, KIND_ALONE)
                add(early, states[early.storage or 0], early.num_bytes, KIND_ALONE)
        if number is None:
            add(change, ("temporary", change.module), change.num_bytes, storages.of(change))
        else:
            state = states.get(number) if index >= forward_changes else None
            add(change, state or owners[number], change.num_bytes, storages.of(change))
    places, numbers, births, rounded, which, streams, sizes = zip(*columns, strict=True)
    return Tape(
        segments=tuple(segments),
        keys=tuple(keys),
        places=places,
        owners=numbers,
        born=births,
        rounded=rounded,
        storages=which,
        streams=streams,
        changes=sizes,
        **about,
    )


def _casts_in_order(changes: Sequence[Change], owners: Mapping[int, tuple[str, str]]) -> list[Change]:
    """The changes with autocast's copies, all of which it lets go at once, given back in the order of their making: its
    own order is that of addresses, another in each run."""

    def is_cast(change: Change) -> bool:
        number = change.storage
        return change.num_bytes < 0 and number is not None and owners[number][0] == "weight_casts"

    ordered: list[Change] = []
    for casts, run in groupby(changes, is_cast):
        together = list(run)
        ordered += sorted(together, key=lambda change: change.storage or 0) if casts else together
    return ordered


class _Storages:
    """Numbers for storages, by first appearance; what an operation takes for a moment has one of its own."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._for_a_moment: list[int] = []
        self._next = 0

    def of(self, change: Change) -> int:
        """The number of the storage that a change takes or gives back."""
        if change.storage is not None:
            if change.storage not in self._numbers:
                self._numbers[change.storage] = self._new()
            return self._numbers[change.storage]
        if change.num_bytes > 0:
            self._for_a_moment.append(self._new())
            return self._for_a_moment[-1]
        # What operations take for a moment they give back in the same order.
        return self._for_a_moment.pop(0)

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


def _owners(changes: Sequence[Change]) -> dict[int, tuple[str, str]]:
    """For each storage its category, and the module that made it.

    Saved: made in a forward and alive after it. Loss: made between the last forward and the first backward.
    Recomputed: made in a backward that runs a forward again. Weight casts: a parameter in another dtype.
    """
    found: dict[int, tuple[str, str]] = {}
    born: dict[int, str] = {}
    for change in changes:
        number, segment = change.storage, change.segment
        if number is None:
            continue
        if number not in born:
            born[number] = segment
            found[number] = (_at_birth(change), change.module)
        elif change.num_bytes < 0 and found[number][0] == "saved" and segment == born[number]:
            found[number] = ("temporary", change.module)
    return found


def _at_birth(change: Change) -> str:
    if change.cast:
        return "weight_casts"
    if change.segment == "loss":
        return "loss"
    if change.segment.startswith("backward"):
        return "recomputed" if change.recomputed else "temporary"
    return "saved"

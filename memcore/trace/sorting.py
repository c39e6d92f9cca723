"""From what a recorder saw to a tape: each storage under the category and module that it belongs to.

Worker processes only, like the recorder.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from memcore.trace.recorder import Change
from memcore.trace.tape import GRADIENTS, HOST, Tape


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
    host = {number for number, (category, _module) in told.items() if category == HOST}
    states = dict.fromkeys(gradients, (GRADIENTS, ""))
    segments: dict[str, int] = {}
    keys: dict[tuple[str, str], int] = {}
    born: dict[int | None, int] = {}
    columns: list[tuple[int, int, int, bool, int]] = []

    def add(change: Change, key: tuple[str, str], size: int) -> None:
        place = segments.setdefault(change.segment, len(segments))
        birth = place if change.storage is None else born.setdefault(change.storage, place)
        columns.append((place, keys.setdefault(key, len(keys)), birth, change.rounded, size))

    for index, change in enumerate(changes):
        number = change.storage
        if number in host:
            continue
        if index == forward_changes:
            for early in [each for each in changes[:index] if each.storage in states]:
                add(early, owners[early.storage or 0], -early.num_bytes)
                add(early, states[early.storage or 0], early.num_bytes)
        if number is None:
            add(change, ("temporary", change.module), change.num_bytes)
        else:
            state = states.get(number) if index >= forward_changes else None
            add(change, state or owners[number], change.num_bytes)
    places, numbers, births, rounded, sizes = zip(*columns, strict=True)
    return Tape(
        segments=tuple(segments),
        keys=tuple(keys),
        places=places,
        owners=numbers,
        born=births,
        rounded=rounded,
        changes=sizes,
        **about,
    )


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

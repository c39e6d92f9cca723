"""What was recorded of a traced step: every storage taken and given back, in order, as plain data.

A tape speaks for one size of the step. Of the same model and recipe at another size only the bytes differ, see
:mod:`memcore.trace.sizes`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Kinds of storage. Parameters' gradients are states; the engine shares those out.
GRADIENTS = "gradients"
# Of an engine that shards: parameters put together from all ranks, and gradients on their way to them.
GATHERED, REDUCED = "gathered", "reduced"
# On the host: not on a tape.
HOST = "host"
# In place of a storage's number, where nothing is taken or given back.
KIND_ALONE = -1
CATEGORIES = ("saved", "recomputed", "temporary", "loss", "weight_casts", GATHERED, REDUCED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tape:
    """Changes of a traced step in order, `changes[i]` bytes taken (or given back, where negative).

    `places[i]` is the place of change i in `segments`, which are named "before", "forward p", "loss" and "backward
    p" for the p-th unit that ran, and "reduce" for what an engine that shards reduces last; `owners[i]` its place in
    `keys`, pairs of category and module; `born[i]` the place of the segment in which the storage was taken.
    `rounded[i]`: its bytes follow the sequence length rounded up to a kernel's block. `storages[i]` numbers the storage
    that change i takes or gives back, -1 where a storage only changes its kind; `streams[i]` the stream that it is
    taken on.

    A unit is what is recomputed together: a layer, or a segment of layers. `order[i]` is the unit that ran which
    unit i of the model is like, `unit_sizes[i]` the layers in it. `optimizer_step_bytes` is what the optimizer makes
    for a moment, None where its step was not run; `trained_bytes` those of one trained value. `positions` are those
    that the config states, 0 for none; `has_table` says that they are looked up in a table, which ends.
    """

    segments: tuple[str, ...]
    keys: tuple[tuple[str, str], ...]
    places: tuple[int, ...]
    owners: tuple[int, ...]
    born: tuple[int, ...]
    rounded: tuple[bool, ...]
    storages: tuple[int, ...]
    streams: tuple[int, ...]
    changes: tuple[int, ...]
    order: tuple[int, ...]
    unit_sizes: tuple[int, ...]
    traced_layers: int
    attention: str
    trained_bytes: int
    positions: int
    has_table: bool
    text_alone: bool
    optimizer_step_bytes: int | None
    versions: str


def dump_tape(tape: Tape) -> dict[str, Any]:
    """The tape as JSON data."""
    return asdict(tape)


def load_tape(data: Mapping[str, Any]) -> Tape:
    """The inverse of :func:`dump_tape`."""
    columns: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    columns["keys"] = tuple((category, module) for category, module in data["keys"])
    return Tape(**columns)

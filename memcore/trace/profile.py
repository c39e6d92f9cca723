"""What a trace found: bytes by category and module over the moments of a step, as plain data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from memcore.trace.replay import replay
from memcore.trace.tape import GRADIENTS, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class AliveRow:
    """Bytes of one category that one module has alive: see ActivationProfile for the moments. `module` is a path
    within a decoder layer, the same for all layers, or within the model."""

    category: str
    module: str
    bytes_at: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationProfile:
    """Bytes alive beside weights, gradients and optimizer states, at the fullest instant of each moment.

    The moments are the forward of each layer, the loss, and the backward of each layer from the last to the first:
    2 `num_layers` + 1. Of an engine that shards one more: what is reduced after the backward; `sharding` says among
    which ranks and how, as a request does (memcore.trace.request.Sharding). A parameter's gradient is a state from the
    moment it is taken.
    `with_gradients`: for each moment the most bytes at any of its instants with all gradients kept, in their
    parameters' dtype, as a plain training loop does. `optimizer_step_bytes`: what the optimizer makes for a moment,
    None where its step was not traced; `trained_bytes`: those of one value of a trained parameter. `kernels` says
    whose kernels' habits it speaks for, "cuda" or "cpu"; `attention` what was traced (a model may refuse the one asked
    for); `notes` what the user should know, in words. `traced_layers` of `num_layers` were run, the rest repeated.
    `versions` names the libraries that ran.
    """

    rows: tuple[AliveRow, ...]
    with_gradients: tuple[int, ...]
    optimizer_step_bytes: int | None
    trained_bytes: int
    kernels: str
    attention: str
    num_layers: int
    traced_layers: int
    versions: str
    sharding: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def sharded(self) -> bool:
        """Whether it is of an engine that shards: then it holds what that gathers and reduces too."""
        return self.sharding is not None

    def of(self, category: str) -> tuple[int, ...]:
        """Bytes of a category at each moment."""
        return self._sums(row.bytes_at for row in self.rows if row.category == category)

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes of all categories at each moment."""
        return self._sums(row.bytes_at for row in self.rows)

    def peak(self) -> int:
        """The most bytes at any moment, gradients aside."""
        return max(self.totals)

    def _sums(self, columns: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(map(sum, zip([0] * len(self.with_gradients), *columns, strict=True)))


def profile_of(
    tape: Tape, kernels: str, notes: Sequence[str], sharding: Mapping[str, Any] | None = None
) -> ActivationProfile:
    """The tape's changes over all layers of the model."""
    replayed = replay(tape)
    num_units = len(tape.unit_sizes)
    sharded = sharding is not None
    sizes = [*tape.unit_sizes, 1, *reversed(tape.unit_sizes), *([1] if sharded else [])]
    assert len(replayed.alive) == 2 * num_units + 1 + sharded, "a moment for each unit's forward and backward"

    def spread(moments: Iterable[int]) -> tuple[int, ...]:
        """Each unit's figure for each of its layers."""
        return tuple(each for each, size in zip(moments, sizes, strict=True) for _layer in range(size))

    columns = zip(tape.keys, zip(*replayed.alive, strict=True), strict=True)
    return ActivationProfile(
        rows=tuple(
            AliveRow(category=category, module=module, bytes_at=spread(column))
            for (category, module), column in columns
            if category != GRADIENTS and any(column)
        ),
        with_gradients=spread(replayed.with_gradients),
        optimizer_step_bytes=tape.optimizer_step_bytes,
        trained_bytes=tape.trained_bytes,
        kernels=kernels,
        attention=tape.attention,
        num_layers=sum(tape.unit_sizes),
        traced_layers=tape.traced_layers,
        versions=tape.versions,
        sharding=sharding,
        notes=tuple(notes),
    )


def dump_profile(profile: ActivationProfile) -> dict[str, Any]:
    """The profile as JSON data: of equal layers, figures grow by the same each, so their steps are kept in runs."""
    return {
        "rows": [[row.category, row.module, _runs(row.bytes_at)] for row in profile.rows],
        "with_gradients": _runs(profile.with_gradients),
        **{name: getattr(profile, name) for name in _PLAIN},
        "notes": list(profile.notes),
    }


def load_profile(data: Mapping[str, Any]) -> ActivationProfile:
    """The inverse of :func:`dump_profile`."""
    return ActivationProfile(
        rows=tuple(
            AliveRow(category=category, module=module, bytes_at=_spread(runs))
            for category, module, runs in data["rows"]
        ),
        with_gradients=_spread(data["with_gradients"]),
        **{name: data[name] for name in _PLAIN},
        notes=tuple(data["notes"]),
    )


_PLAIN = (
    "optimizer_step_bytes",
    "trained_bytes",
    "kernels",
    "attention",
    "num_layers",
    "traced_layers",
    "versions",
    "sharding",
)


def _runs(figures: tuple[int, ...]) -> list[list[int]]:
    """How often each step from one figure to the next comes in a row: ``[times, step]``."""
    steps = (after - before for before, after in pairwise((0, *figures)))
    return [[len(list(group)), step] for step, group in groupby(steps)]


def _spread(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    figures, level = [], 0
    for times, step in runs:
        for _each in range(times):
            level += step
            figures.append(level)
    return tuple(figures)

"""Which layers of a model are really run in a trace, and which others each of them stands for.

Worker processes only: imports torch and transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from memcore.activations.recompute import Checkpointing, checkpointing
from memcore.counting import is_vision
from memcore.errors import UserError
from memcore.i18n import gettext as _


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which layers run: `units` of consecutive layers, `picked` of them traced, `order[i]` the pick unit i is like.

    `recomputed[i]`: whether unit i is run again in the backward. `attention_only`: the attention alone is, in
    every layer. `saved_operations`: the groups of operations whose results are kept all the same.
    """

    layers: nn.ModuleList
    units: tuple[tuple[int, ...], ...]
    recomputed: tuple[bool, ...]
    picked: tuple[int, ...]
    order: tuple[int, ...]
    attention_only: bool
    saved_operations: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(len(unit) for unit in self.units)

    @property
    def traced_layers(self) -> int:
        """Layers that run."""
        return sum(len(self.units[unit]) for unit in self.picked)


def make_plan(model: nn.Module, checkpointing_kind: str, *, full_depth: bool, neighbours: bool = False) -> Plan:
    """Which of a model's layers to run. `neighbours`: a layer's step depends on the sizes of the layers beside it, as
    it does where they are gathered one after the other. Raises UserError for a model without a list of layers."""
    layers = _decoder_layers(model)
    wanted = checkpointing(checkpointing_kind, len(layers))
    units = _units(wanted)
    recomputed = tuple(wanted.groups[unit[0]] is not None for unit in units)
    likes = [_like(layers[index], lists) for index, lists in enumerate(_by_layer(model, len(layers)))]
    kinds: list[Any] = [(tuple(likes[i] for i in unit), again) for unit, again in zip(units, recomputed, strict=True)]
    if neighbours:
        beside = _beside(units, [sum(p.numel() for p in layer.parameters()) for layer in layers])
        kinds = list(zip(kinds, beside, strict=True))
        full_depth = full_depth or not _same_beside(beside, _pick(kinds))
    picked = tuple(range(len(units))) if full_depth else _pick(kinds)
    return Plan(
        layers=layers,
        units=units,
        recomputed=recomputed,
        picked=picked,
        order=picked if full_depth else _order(kinds, picked),
        attention_only=wanted.attention_only,
        saved_operations=wanted.saved_operations,
    )


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The module list of decoder layers: the longest one outside vision and audio towers."""
    lists = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not is_vision(name) and "audio" not in name
    ]
    if not lists:
        raise UserError(_("The model has no list of layers to trace."), "model.config")
    return max(lists, key=lambda found: (len(found), sum(p.numel() for p in found.parameters())))


def _units(wanted: Checkpointing) -> tuple[tuple[int, ...], ...]:
    units: list[list[int]] = []
    for index, group in enumerate(wanted.groups):
        if units and group is not None and group != index:
            units[-1].append(index)
        else:
            units.append([index])
    return tuple(tuple(unit) for unit in units)


def _configs(model: nn.Module) -> list[Any]:
    """The text configs that the model's modules read, each once."""
    found = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            text = config.get_text_config()
            found[id(text)] = text
    return list(found.values())


def _per_layer(config: Any, num_layers: int) -> Iterator[tuple[str, list[Any]]]:
    """A config's lists of one entry per layer, such as layer_types."""
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == num_layers:
            yield name, value


def _by_layer(model: nn.Module, num_layers: int) -> list[tuple[Any, ...]]:
    """For each layer its entries in the configs' lists."""
    lists = [value for config in _configs(model) for _name, value in _per_layer(config, num_layers)]
    return [tuple(str(value[index]) for value in lists) for index in range(num_layers)]


def _like(layer: nn.Module, listed: tuple[Any, ...]) -> tuple[Any, ...]:
    """What makes two layers alike: their modules, parameters and plain settings, and what the config lists of them."""
    modules = tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return (modules, shapes, listed)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """A module's own switches and names; its number is none of them, nor are figures that may follow from it."""
    return tuple(
        (name, value) for name, value in vars(module).items() if isinstance(value, bool | str) and name != "training"
    )


def _beside(units: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """For each unit the sizes of the layer before it, of its first and last, and of the layer after it."""
    ends = [(sizes[unit[0]], sizes[unit[-1]]) for unit in units]
    before, after = [0, *(last for _first, last in ends[:-1])], [*(first for first, _last in ends[1:]), 0]
    return [(left, *own, right) for left, own, right in zip(before, ends, after, strict=True)]


def _same_beside(beside: Sequence[tuple[int, int, int, int]], picked: Sequence[int]) -> bool:
    """Whether the picked units have next to them, among themselves, what they have in the model."""
    return all(
        beside[left][3] == beside[right][1] and beside[right][0] == beside[left][2] for left, right in pairwise(picked)
    )


def _pick(kinds: Sequence[Any]) -> tuple[int, ...]:
    """The first unit, one of each kind in between, and the last."""
    inner: dict[Any, int] = {}
    for index in range(1, len(kinds) - 1):
        inner.setdefault(kinds[index], index)
    return tuple(sorted({0, len(kinds) - 1, *inner.values()}))


def _order(kinds: Sequence[Any], picked: Sequence[int]) -> tuple[int, ...]:
    """For each unit the place, among the picked, of the one that it is like."""
    inner = {kinds[index]: place for place, index in enumerate(picked) if 0 < index < len(kinds) - 1}
    places = [inner.get(kind, 0) for kind in kinds]
    places[0], places[-1] = 0, len(picked) - 1
    return tuple(places)


def thin_out(model: nn.Module, plan: Plan, wrap: Callable[[int, list[nn.Module], bool], nn.Module]) -> None:
    """Leave only the picked units in the model: `wrap(place, layers, recomputed)` stands for each of them."""
    chosen = [plan.units[unit] for unit in plan.picked]
    units = [
        wrap(place, [plan.layers[i] for i in unit], plan.recomputed[index])
        for place, (index, unit) in enumerate(zip(plan.picked, chosen, strict=True))
    ]
    total = len(plan.layers)
    for config in _configs(model):
        # The model's own loop takes a unit for one layer, of its first layer's kind.
        for name, values in list(_per_layer(config, total)):
            setattr(config, name, [values[unit[0]] for unit in chosen])
        if getattr(config, "num_hidden_layers", None) == total:
            config.num_hidden_layers = len(units)
    for _index in range(total):
        del plan.layers[-1]
    plan.layers.extend(units)

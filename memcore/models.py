"""The catalogue of models, and inventories as data: the catalogue's own lie in memcore/data/inventories.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from memcore.inventory import Block, Inventory, Role, Shapes, Tensor, TensorKind
from memcore.lookup import find
from memcore.units import ceil_div


def dump_inventory(inventory: Inventory) -> dict[str, Any]:
    """The inventory as compact JSON data: each kind of block once, then the blocks by kind."""
    kinds: dict[tuple[Tensor, ...], int] = {}
    for block in inventory.blocks:
        kinds.setdefault(block.tensors, len(kinds))
    runs: list[list[Any]] = []
    for block in inventory.blocks:
        if runs and _continues(runs[-1], kinds[block.tensors], block):
            runs[-1][3] += 1
        else:
            runs.append([kinds[block.tensors], block.name, block.layer, 1])
    return {
        "model_class": inventory.model_class,
        "tied": inventory.tied,
        "fused_experts": inventory.fused_experts,
        "shapes": {f.name: getattr(inventory.shapes, f.name) for f in fields(Shapes)},
        "kinds": [
            [[t.name, list(t.shape), t.role, t.kind, t.experts_used, t.experts_held] for t in tensors]
            for tensors in kinds
        ],
        "blocks": runs,
    }


def _run_member(name: str, layer: int | None, offset: int) -> tuple[str, int | None]:
    """Name and layer of the block that is `offset` places after a run's first."""
    if offset == 0:
        return name, layer
    stem = name.rstrip("0123456789")
    return f"{stem}{int(name[len(stem) :]) + offset}", None if layer is None else layer + offset


def _continues(run: Sequence[Any], kind: int, block: Block) -> bool:
    """Whether the block is the next of a run: the same kind, and one more in name and layer."""
    run_kind, name, layer, count = run
    return kind == run_kind and name[-1:].isdigit() and _run_member(name, layer, count) == (block.name, block.layer)


def load_inventory(data: Mapping[str, Any]) -> Inventory:
    """The inverse of :func:`dump_inventory`."""
    kinds = [
        tuple(
            Tensor(
                name=name,
                shape=tuple(shape),
                role=Role(role),
                kind=TensorKind(kind),
                experts_used=used,
                experts_held=held,
            )
            for name, shape, role, kind, used, held in tensors
        )
        for tensors in data["kinds"]
    ]
    blocks: list[Block] = []
    for kind, name, layer, count in data["blocks"]:
        for offset in range(count):
            full, at = _run_member(name, layer, offset)
            blocks.append(Block(name=full, tensors=kinds[kind], layer=at))
    return Inventory(
        model_class=data["model_class"],
        tied=data["tied"],
        shapes=Shapes(**data["shapes"]),
        blocks=tuple(blocks),
        fused_experts=data["fused_experts"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueModel:
    """A model of the catalogue. `config` is None for a bare count, and then there is no inventory."""

    name: str
    family: str
    config: Mapping[str, Any] | None
    config_source: str
    n_params: int | None
    n_params_source: str | None
    n_params_precision: str | None
    n_active_params: int | None
    n_active_source: str | None
    note: str | None

    @property
    def cross_checked(self) -> bool:
        """Whether a published count stands behind the inventory's."""
        return self.n_params is not None

    @property
    def published_half_unit(self) -> int:
        """How far a published count that is rounded may be from the true one: half its last digit's unit."""
        if self.n_params is None or self.n_params_precision == "exact":
            return 0
        zeros = len(str(self.n_params)) - len(str(self.n_params).rstrip("0"))
        return ceil_div(10**zeros, 2)


def _read(name: str) -> Any:
    return json.loads(resources.files("memcore").joinpath("data", name).read_text(encoding="utf-8"))


@cache
def catalogue() -> dict[str, CatalogueModel]:
    """All models of the catalogue by name, in the catalogue's order."""
    return {entry["name"]: CatalogueModel(**entry) for entry in _read("catalogue.json")}


@cache
def _stored_inventories() -> Mapping[str, Mapping[str, Any]]:
    stored: Mapping[str, Mapping[str, Any]] = _read("inventories.json")
    return stored


@cache
def catalogue_inventory(name: str) -> Inventory | None:
    """The stored inventory of a catalogue model; None for a bare count."""
    stored = _stored_inventories().get(name)
    return None if stored is None else load_inventory(stored)


def catalogue_model(name: str) -> CatalogueModel:
    """The catalogue model of that name. Raises UserError with the nearest names for an unknown one."""
    return find(catalogue(), name, "model.name")

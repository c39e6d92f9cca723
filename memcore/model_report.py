"""A model's parameters, and the catalogue, as data for other programs.

Keys carry their units. Nothing here is translated: these are identifiers, not sentences.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from memcore.inventory import Block, Inventory, Role, Tensor
from memcore.models import CatalogueModel, catalogue_inventory, catalogue_model
from memcore.recipes import DType


def inventory_report(inventory: Inventory) -> dict[str, Any]:
    """A counted model as JSON data: parameters in all, by role, by part and by block, and what is largest.

    `blocks` has one entry for all blocks of a module list that are alike; `numbers` are their indices, and None
    stands for a module outside such lists.
    """
    return {
        "model_class": inventory.model_class,
        "total": inventory.n_params,
        "active": inventory.n_active,
        **by_shapes(inventory),
        "by_part": parameters_by_part(inventory),
        "bf16_bytes": inventory.n_params * DType.BF16.size,
        "layers": len(inventory.layers),
        "shapes": asdict(inventory.shapes),
        "blocks": block_kinds(inventory),
    }


def config_report(counted: Mapping[str, Any], inventory: Inventory) -> dict[str, Any]:
    """A counted config.json as JSON data: its inventory, the class defaults that counting filled in, by dotted
    name, and the method that its checkpoint is packed with, if any."""
    return {
        **inventory_report(inventory),
        "defaults_filled": dict(counted["defaults"]),
        "quantised_as": counted["quantised_as"],
    }


def model_report(name: str) -> dict[str, Any]:
    """A catalogue model as JSON data: published counts with their sources, and the inventory where there is one.

    Raises UserError with the nearest names for an unknown one.
    """
    model, inventory = catalogue_model(name), catalogue_inventory(name)
    return {
        **model_summary(model),
        "published_total": model.n_params,
        "published_total_precision": model.n_params_precision,
        "published_total_source": model.n_params_source,
        "published_active": model.n_active_params,
        "published_active_source": model.n_active_source,
        "config_source": model.config_source,
        "note": model.note,
        "inventory": None if inventory is None else inventory_report(inventory),
    }


def model_summary(model: CatalogueModel) -> dict[str, Any]:
    """A line of the catalogue. Parameters are the inventory's, else the published ones; `cross_checked` where
    both stand beside each other."""
    inventory = catalogue_inventory(model.name)
    return {
        "name": model.name,
        "family": model.family,
        "total": model.n_params if inventory is None else inventory.n_params,
        "active": model.n_active_params if inventory is None else inventory.n_active,
        "layers": None if inventory is None else len(inventory.layers),
        "cross_checked": inventory is not None and model.cross_checked,
    }


def parameters_by_part(inventory: Inventory) -> dict[str, int]:
    """Parameters of the text model, the vision tower and the projector between them, absent parts left out."""
    by_role = inventory.by_role()
    apart = {role.value: by_role[role] for role in (Role.VISION, Role.PROJECTOR) if role in by_role}
    return {"text": inventory.n_params - sum(apart.values()), **apart}


def block_kinds(inventory: Inventory) -> list[dict[str, Any]]:
    """Blocks that are alike, together, in module order: name, indices, parameters of each one, by role."""
    kinds: dict[tuple[str, tuple[Tensor, ...]], list[Block]] = {}
    for block in inventory.blocks:
        stem, _dot, number = block.name.rpartition(".")
        key = stem if number.isdigit() else block.name
        kinds.setdefault((key, block.tensors), []).append(block)
    return [
        {
            "name": stem,
            "numbers": _numbers(blocks) or None,
            "count": len(blocks),
            "decoder_layer": blocks[0].layer is not None,
            "parameters_each": blocks[0].numel,
            "by_role": _by_role(tensors),
        }
        for (stem, tensors), blocks in kinds.items()
    ]


def _numbers(blocks: list[Block]) -> list[int]:
    ends = [block.name.rpartition(".")[2] for block in blocks]
    return [int(end) for end in ends if end.isdigit()]


def _by_role(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    sums = dict.fromkeys(Role, 0)
    for tensor in tensors:
        sums[tensor.role] += tensor.numel
    return {role.value: count for role, count in sums.items() if count}


def by_shapes(inventory: Inventory | None) -> dict[str, Any]:
    """What only shapes tell: None throughout for a bare count."""
    if inventory is None:
        return dict.fromkeys(("by_role", "largest_layer", "largest_tensor", "tied"))
    layer, (name, tensor) = inventory.largest_layer, inventory.largest_tensor
    return {
        "by_role": {role.value: count for role, count in inventory.by_role().items()},
        "largest_layer": {"name": layer.name, "parameters": layer.numel},
        "largest_tensor": {"name": name, "shape": list(tensor.shape), "parameters": tensor.numel},
        "tied": inventory.tied,
    }

"""A mixture's experts as modules of their own, one after the other, as transformers kept them up to version 4.

Version 5 stacks them in three-dimensional parameters, which run in grouped products and which 4-bit loading leaves as
they are. Before, each expert's projections were linear modules, which it packs and which run on that expert's tokens
alone. The router is left as it is: that bitsandbytes packed it too is under one part in ten thousand of a Mixtral.
"""

from collections.abc import Iterator
from dataclasses import replace

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.inventory import EXPERT_TARGETS, Inventory, Role, Tensor, TensorKind


def expert_projections(fused_experts: str) -> tuple[str, str, str] | None:
    """What the gate, the other half and the projection back of an expert were called before they were stacked; None
    where that is not known. `fused_experts` as an Inventory has it."""
    names = EXPERT_TARGETS.get(fused_experts)
    if names is None:
        return None
    gate, up = (name for name, parameter in names.items() if parameter == "gate_up_proj")
    return gate, up, next(name for name, parameter in names.items() if parameter == "down_proj")


def separated(inventory: Inventory) -> Inventory:
    """The inventory with each expert's projections as linear weights of their own.

    Source: transformers 4.48, models/mixtral/modeling_mixtral.py, MixtralBlockSparseTop2MLP. Raises UserError for a
    model without stacked experts whose former names are known.
    """
    names = expert_projections(inventory.fused_experts)
    if names is None:
        message = _("model.experts is separate, but {model} has no experts that once were modules of their own.")
        raise UserError(message.format(model=inventory.model_class), "model.experts")
    blocks = tuple(
        replace(block, tensors=tuple(part for tensor in block.tensors for part in _parts(tensor, names)))
        for block in inventory.blocks
    )
    return replace(inventory, blocks=blocks, fused_experts="")


def _parts(tensor: Tensor, names: tuple[str, str, str]) -> Iterator[Tensor]:
    """A tensor as it is, or each expert's part of a stacked one: gate and other half are one after the other there."""
    if tensor.role is not Role.EXPERTS or len(tensor.shape) < 3:
        yield tensor
        return
    gate, up, down = names
    path, _dot, stacked = tensor.name.rpartition(".")
    halves = (gate, up) if stacked == "gate_up_proj" else (down,)
    count, rows, columns = tensor.shape
    for expert in range(count):
        for name in halves:
            yield replace(
                tensor,
                name=f"{path}.{expert}.{name}.weight",
                shape=(rows // len(halves), columns),
                kind=TensorKind.LINEAR,
            )

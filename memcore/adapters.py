"""The tensors that are trained beside a model that is frozen: LoRA's adapters, and whole copies of modules.

Symbol: r the rank.
"""

from dataclasses import replace
from math import prod

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.inventory import Inventory, Role, Tensor, TensorKind
from memcore.scenario import Lora


def lora_tensors(inventory: Inventory, lora: Lora) -> tuple[Tensor, ...]:
    """The adapters' own tensors: A (r x in) and B (out x r) for each targeted weight (arXiv 2106.09685)."""
    adapters = []
    for adapted in inventory.lora_modules(lora.targets):
        weight, rank = adapted.tensor, adapted.ranks * lora.rank
        *experts, rows, columns = weight.shape if weight.kind is not TensorKind.CONV1D else reversed(weight.shape)
        # Of stacked experts, all adapters lie in two tensors too (peft 0.21, tuners/lora/layer.py, ParamWrapper).
        rank *= prod(experts)
        adapters.append(replace(weight, name=f"{weight.name}.lora_A", shape=(rank, columns), kind=TensorKind.LINEAR))
        adapters.append(replace(weight, name=f"{weight.name}.lora_B", shape=(rows, rank), kind=TensorKind.LINEAR))
    return tuple(adapters)


def saved_modules(inventory: Inventory, lora: Lora) -> tuple[Tensor, ...]:
    """The copies of whole modules that are trained beside adapters (peft 0.21, utils/other.py, ModulesToSaveWrapper).

    Raises UserError where embedding and head are one: their copies would be two.
    """
    roles = {"embed_tokens": Role.EMBEDDING, "lm_head": Role.HEAD}
    wanted = {roles[name] for name in lora.modules_to_save}
    if wanted and inventory.tied:
        message = _("recipe.lora.modules_to_save is not predicted where embedding and head share one weight.")
        raise UserError(message, "recipe.lora.modules_to_save")
    return tuple(replace(t, name=f"{t.name}.modules_to_save") for t in inventory.tensors() if t.role in wanted)

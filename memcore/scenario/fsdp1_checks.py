"""What FSDP1's settings say of the rest of a scenario: what it refuses, and what does nothing."""

from typing import TYPE_CHECKING

from memcore.i18n import gettext as _
from memcore.scenario.fields import refuse
from memcore.scenario.parts import Method

if TYPE_CHECKING:
    from memcore.scenario.whole import Scenario


def check_fsdp1(scenario: "Scenario") -> None:
    """Raise UserError, naming the field."""
    recipe, config, work = scenario.recipe, scenario.fsdp1_config, scenario.workload
    if config.adapters is not None and recipe.method is Method.FULL:
        message = _("{field} does nothing when recipe.method is full: choose lora or qlora.")
        raise refuse("engine_config.adapters", message)
    if config.no_sync and work.grad_accum == 1:
        raise refuse("engine_config.no_sync", _("{field} does nothing when workload.grad_accum is 1."))
    if config.no_sync and config.cpu_offload:
        message = _("{field} is set, which FSDP1 cannot do with engine_config.cpu_offload.")
        raise refuse("engine_config.no_sync", message)
    if config.checkpoint_around_units and work.checkpointing in ("none", "attention"):
        message = _("{field} is set, which does nothing when workload.checkpointing is {kind}.")
        raise refuse("engine_config.checkpoint_around_units", message, kind=work.checkpointing)
    if config.autocast and recipe.method is not Method.FULL:
        message = _("{field} is of full training: for adapters there is recipe.lora.autocast.")
        raise refuse("engine_config.autocast", message)
    _check_flat_adapters(scenario)


def _check_flat_adapters(scenario: "Scenario") -> None:
    """Adapters within their layers' units: FSDP1 flattens tensors of one dtype (torch 2.13, distributed/fsdp/
    _flat_param.py, _validate_tensors_to_flatten), and without use_orig_params all trained or none."""
    recipe, config, field = scenario.recipe, scenario.fsdp1_config, "engine_config.adapters"
    if config.adapters != "inside" or recipe.lora is None:
        return
    if recipe.lora.adapter_dtype is not recipe.stored_dtype:
        message = _("{field} is inside, but adapters of {adapters} cannot be flattened with weights of {weights}.")
        raise refuse(field, message, adapters=recipe.lora.adapter_dtype.value, weights=recipe.stored_dtype.value)
    if not config.use_orig_params:
        message = _("{field} is inside, which needs engine_config.use_orig_params: frozen weights lie beside them.")
        raise refuse(field, message)

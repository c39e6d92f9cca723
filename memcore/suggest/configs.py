"""A budget's engine settings as the files that set them: a complete ds_config.json, or FSDP2 in Python."""

import json
from collections.abc import Mapping
from typing import Any

from memcore.budget import Budget
from memcore.engine_options import EngineName
from memcore.engines.fsdp2_units import own_blocks
from memcore.inventory import Inventory
from memcore.recipes import ConventionName, DType
from memcore.scenario import Device, Method, Scenario
from memcore.states import precision_of
from memcore.suggest.grid import settings_now

_TORCH_DTYPES = {DType.FP32: "torch.float32", DType.BF16: "torch.bfloat16", DType.FP16: "torch.float16"}
_AUTOCAST_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16"}


def ds_config(budget: Budget) -> dict[str, Any]:
    """The ds_config.json of a DeepSpeed scenario; :func:`memcore.ds_config.read_ds_config` reads the same budget from
    it. The optimizer and its learning rate are the program's to pass, and the batch over all GPUs follows."""
    zero = budget.scenario.zero_config.model_dump(mode="json", exclude_defaults=True) | settings_now(budget)
    return ds_config_of(budget.scenario, zero)


def ds_config_of(scenario: Scenario, zero: Mapping[str, Any]) -> dict[str, Any]:
    """The same with these settings of zero_optimization, among which the stage need not be."""
    sections = {"offload_optimizer": scenario.offload.optimizer, "offload_param": scenario.offload.parameters}
    offload = {name: {"device": device.value} for name, device in sections.items() if device is not Device.NONE}
    return {
        "train_micro_batch_size_per_gpu": scenario.workload.micro_batch,
        "gradient_accumulation_steps": scenario.workload.grad_accum,
        **_precision(scenario),
        "zero_optimization": {**zero, "stage": scenario.parallelism.stage, **offload},
    }


def _precision(scenario: Scenario) -> dict[str, Any]:
    """How DeepSpeed is told the dtypes (deepspeed 0.19.8, runtime/precision_config.py, DeepSpeedBF16Config;
    runtime/torch_autocast.py); it trains in FP32 where nothing is said."""
    dtypes, recipe = precision_of(scenario.recipe).convention, scenario.recipe
    if dtypes.compute_dtype is DType.FP32:
        return {}
    if dtypes.param_dtype is DType.FP32:
        return {"torch_autocast": {"enabled": True, "dtype": _AUTOCAST_DTYPES[dtypes.compute_dtype]}}
    name = dtypes.param_dtype.value
    section: dict[str, Any] = {"enabled": True}
    # In 16 bits throughout; only from stage 1 on (runtime/config.py, _do_error_check).
    if dtypes.master_dtype is None and scenario.parallelism.stage >= 1:
        section[f"{name}_master_weights_and_grads"] = True
        if name == "bf16" and dtypes.state_dtype is DType.BF16:
            section["bf16_optimizer_states"] = True
    accumulates = recipe.convention is ConventionName.DEEPSPEED_FP32_GRAD
    return {name: section, **({"data_types": {"grad_accum_dtype": "fp32"}} if accumulates else {})}


_FSDP2 = '''\
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model, device_type="cuda"):
    """Divide a transformers model in place, a unit per decoder layer, before the optimizer is made."""
    mesh = init_device_mesh(device_type, {mesh}, mesh_dim_names={names})
    policy = MixedPrecisionPolicy(param_dtype={compute}, reduce_dtype={reduce})
    model = model.to({param}){master}
    for layer in model.{layers}:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward={reshard})
{own}    # The root holds what is no layer's: it stays gathered until its own backward.
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
'''


_OWN_UNIT = """\
    fully_shard({modules}, mesh=mesh, mp_policy=policy, reshard_after_forward={reshard})
"""


def _own_units(budget: Budget, inventory: Inventory) -> str:
    """The lines for the units beside the layers."""
    own = [f'model.get_submodule("{block.name}")' for block in own_blocks(inventory, budget.scenario)]
    if not own:
        return ""
    config = budget.scenario.fsdp2_config
    head = _OWN_UNIT.format(modules=f"[{', '.join(own[1:])}]", reshard=config.reshards("head"))
    return _OWN_UNIT.format(modules=own[0], reshard=config.reshards("embedding")) + head


def fsdp2_code(budget: Budget) -> str | None:
    """Python that applies FSDP2 as predicted to a transformers model; None without shapes, for adapters, whose base is
    of another dtype than they are (fully_shard wants one dtype per unit), and where torchao has its part in it."""
    inventory, scenario = budget.inventory, budget.scenario
    if inventory is None or not inventory.layers or scenario.recipe.method is not Method.FULL or scenario.recipe.fp8:
        return None
    dtypes, parallelism = budget.states.precision.convention, scenario.parallelism
    replicated, config = parallelism.dp_replicate > 1, scenario.fsdp2_config
    layers = inventory.layers[0].name.rpartition(".")[0]
    excepted = config.reshards("block") and not config.reshards("last_block")
    return _FSDP2.format(
        mesh=(parallelism.dp_replicate, parallelism.dp_shard) if replicated else (parallelism.dp_shard,),
        names='("replicate", "shard")' if replicated else '("shard",)',
        compute=_TORCH_DTYPES[dtypes.compute_dtype],
        reduce=_TORCH_DTYPES[dtypes.reduce_dtype],
        param=_TORCH_DTYPES[dtypes.param_dtype],
        master="  # the FP32 master copy of the recipe is the optimizer's to keep" if dtypes.master_dtype else "",
        layers=layers,
        reshard=f"layer is not model.{layers}[-1]" if excepted else config.reshard_after_forward,
        own=_own_units(budget, inventory),
    )


def file_of(budget: Budget) -> tuple[str, str] | None:
    """The file that sets the budget's engine settings, its name and its text; None where there is none to write."""
    if budget.scenario.parallelism.engine is EngineName.DEEPSPEED:
        return "ds_config.json", json.dumps(ds_config(budget), indent=2)
    code = fsdp2_code(budget) if budget.scenario.parallelism.engine is EngineName.FSDP2 else None
    return None if code is None else ("fsdp2.py", code)

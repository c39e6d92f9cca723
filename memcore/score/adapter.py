"""The one adapter from a measured run to a scenario."""

from typing import Any

from memcore.configs import EXPERT_COUNTS
from memcore.engine_options import EngineName
from memcore.recipes import DType
from memcore.scenario import Scenario, parse_scenario
from memcore.score.gaps import (
    CHECKPOINTINGS,
    OPTIMIZERS,
    PREFETCHES,
    SAVED,
    SETTINGS,
    UNITS,
    attention_of,
    dtype_beside,
    gaps_of,
    is_float8,
)
from memcore.score.llm_c import is_llm_c, llm_c_data
from memcore.score.losses import loss_fields
from memcore.score.record import Run, RunSoftware

# The month of bitsandbytes 0.43.2, which no longer keeps the input of a product with a 4-bit weight.
_INPUTS_LET_GO = "2024-07"


def scenario_of(run: Run) -> Scenario:
    """The run as a scenario. Raises UserError where a scenario refuses it; a run with gaps has none."""
    assert not gaps_of(run), "what cannot be expressed is not to be left out"
    if is_llm_c(run):
        return parse_scenario(llm_c_data(run))
    return parse_scenario(
        {
            "model": {"config": dict(run.model.config), "experts": _experts(run), "code": _code(run)},
            "hardware": _hardware(run),
            "parallelism": _parallelism(run),
            "engine_config": _engine_config(run),
            "recipe": _recipe(run),
            "offload": _offload(run),
            "workload": _workload(run),
        }
    )


# Model types whose classes went on collecting keys and values while they recompute: transformers 4.48, of all classes
# of language models with such a cache, those without "use_cache=True is incompatible with gradient checkpointing".
CACHING = ("gpt_bigcode",)


def _is_transformers_4(run: Run) -> bool:
    version = run.software.transformers_version
    return version is not None and version[0] == 4


def _experts(run: Run) -> str:
    """transformers 4 kept each expert as a module of its own."""
    mixture = any(run.model.config.get(name) for name in EXPERT_COUNTS)
    return "separate" if mixture and _is_transformers_4(run) else "stacked"


def _code(run: Run) -> str:
    """Whose code computed the model: litgpt has its own."""
    return "litgpt" if run.software.framework == "litgpt" else "transformers"


def _hardware(run: Run) -> dict[str, Any]:
    expandable = bool((run.engine_config or {}).get("expandable_segments"))
    return {"gpu": run.hardware.gpu, "gpus": run.hardware.gpus, "expandable_segments": expandable}


def _parallelism(run: Run) -> dict[str, Any]:
    staged = run.parallelism.engine == EngineName.DEEPSPEED
    stage = {"zero_stage": run.parallelism.zero_stage} if staged else {}
    whole = {"dp_shard": 1, "dp_replicate": run.parallelism.dp} if _is_no_shard(run) else {}
    return {"engine": run.parallelism.engine, "dp": run.parallelism.dp, **stage, **whole}


def _is_no_shard(run: Run) -> bool:
    """FSDP1 without sharding: every rank holds all."""
    return run.parallelism.engine == EngineName.FSDP1 and run.parallelism.zero_stage == 0


def _engine_config(run: Run) -> dict[str, Any] | None:
    engine, given = EngineName(run.parallelism.engine), run.engine_config or {}
    own = {name: given[name] for name in SETTINGS.get(engine, ()) if given.get(name) is not None}
    if engine is EngineName.DEEPSPEED:
        return {"zero_optimization": own}
    if engine is EngineName.FSDP2:
        return {
            "reshard_after_forward": run.parallelism.reshard_after_forward,
            "cpu_offload": run.workload.offload != "none",
            "enable_fsdp_float8_all_gather": bool(given.get("fp8_all_gather")),
            **own,
        }
    if engine is EngineName.FSDP1:
        return {**own, **_fsdp1(run)}
    return own or None


def _fsdp1(run: Run) -> dict[str, Any]:
    recipe, lora, given = run.recipe, run.recipe.lora, run.engine_config or {}
    # Of NO_SHARD all is whole: not what the adapters' units are.
    whole = lora is not None and lora.sharded is False and not _is_no_shard(run)
    ahead = run.parallelism.prefetch == "backward_pre+forward"
    settings: dict[str, Any] = {
        "reshard_after_forward": run.parallelism.zero_stage != 2 and run.parallelism.reshard_after_forward is not False,
        "forward_prefetch": ahead or bool(given.get("forward_prefetch")),
        "backward_prefetch": PREFETCHES[run.parallelism.prefetch],
        "no_sync": bool(given.get("no_sync_accumulation")),
        "checkpoint_around_units": run.workload.checkpointing != "none" and _around_units(run.software),
        "autocast": lora is None and recipe.autocast,
        "cpu_offload": run.workload.offload != "none",
    }
    if lora is not None:
        settings["adapters"] = "ignored" if whole else UNITS[given.get("fsdp_units") or "block_root"]
    return settings


def _around_units(software: RunSoftware) -> bool:
    """Whether a model's loop calls layers through the checkpoint, which is then around what FSDP1 wrapped. From
    transformers 4.53 on a layer checkpoints itself (modeling_layers.py, GradientCheckpointingLayer); programs of their
    own wrap what is within a unit (torch 2.13, checkpoint_wrapper.py, apply_activation_checkpointing)."""
    version = software.transformers_version
    return software.framework == "hf_trainer" and version is not None and version < (4, 53)


def _recipe(run: Run) -> dict[str, Any]:
    recipe, lora = run.recipe, run.recipe.lora
    common: dict[str, Any] = {
        "method": recipe.method,
        "optimizer": {
            **OPTIMIZERS[recipe.optimizer],
            "implementation": recipe.optimizer_impl,
            "in_backward": recipe.optimizer_in_backward,
        },
        "convention": _convention(run),
        "param_dtype": recipe.param_dtype,
        "compute_dtype": dtype_beside(run),
        "reduce_dtype": _reduce_dtype(run),
        "fp8": (run.engine_config or {})["fp8_recipe"] if is_float8(run) else None,
    }
    if lora is not None:
        adapters = {name: getattr(lora, name) for name in ("rank", "targets", "dropout", "adapter_dtype")}
        # Autocast has something to cast where the adapters are not of the weights' dtype.
        casts = recipe.autocast and recipe.param_dtype == recipe.compute_dtype != lora.adapter_dtype
        adapters["modules_to_save"] = lora.modules_to_save or ()
        common |= {"lora": {**adapters, "autocast": casts}, **_packing(run)}
        if run.parallelism.engine != EngineName.DEEPSPEED:
            return common  # gradients and states are the adapters'
    if recipe.optimizer_state_dtype in set(DType):  # else the optimizer's own
        common["state_dtype"] = recipe.optimizer_state_dtype
    if common["convention"] != "deepspeed_fp32_grad":  # which keeps both
        common["grad_dtype"] = recipe.grad_dtype
    return {**common, "master_dtype": "fp32" if recipe.master_weights else "none"}


def _packing(run: Run) -> dict[str, Any]:
    recipe = run.recipe
    nf4 = recipe.quantization in ("nf4", "nf4_double_quant")
    return {
        "keeps_packed_inputs": nf4 and run.software.date < _INPUTS_LET_GO,
        "quantization": recipe.quantization,
        "quant_group_size": recipe.quant_group_size,
        "quantize_lm_head": bool(recipe.quantize_lm_head),
        "fp32_norms": recipe.norm_dtype == "fp32" != recipe.param_dtype,
    }


def _convention(run: Run) -> str:
    """The convention whose program the run's dtypes are of; the dtypes themselves are the run's."""
    recipe, engine = run.recipe, run.parallelism.engine
    if recipe.param_dtype != recipe.compute_dtype:
        return "amp_autocast" if recipe.autocast and engine != EngineName.FSDP1 else "fsdp2_mixed"
    if engine == EngineName.DEEPSPEED and recipe.param_dtype != "fp32":
        return "zero_paper" if recipe.grad_dtype == recipe.param_dtype else "deepspeed_fp32_grad"
    return {"fp32": "fp32", "bf16": "pure_bf16", "fp16": "pure_fp16"}[dtype_beside(run)]


def _reduce_dtype(run: Run) -> str:
    """The dtype that gradients are reduced in: FSDP2's is that of the computation where none is given."""
    given: str | None = (run.engine_config or {}).get("reduce_dtype")
    of_engine = (
        dtype_beside(run) if run.parallelism.engine in (EngineName.FSDP1, EngineName.FSDP2) else run.recipe.grad_dtype
    )
    return given or of_engine


def _offload(run: Run) -> dict[str, Any]:
    if run.workload.offload == "activations":
        return {"activations": "cpu"}
    away = run.parallelism.engine == EngineName.DEEPSPEED and run.workload.offload != "none"
    return {"optimizer": "cpu", "parameters": "cpu"} if away else {}


def _last_loss_held(run: Run) -> bool:
    """litgpt's loop holds its loss (finetune/lora.py, fit). Before its data loaders, the longest sample came first and
    alone (October 2023: get_batch(..., longest_seq_ix if iter_num == 0)), with no step of its size before it."""
    loaders = _code(run) == "litgpt" and run.software.date >= "2024-03"
    return loaders and bool(_packing(run)["keeps_packed_inputs"]) and run.workload.checkpointing == "none"


def _workload(run: Run) -> dict[str, Any]:
    work = run.workload
    saved = dict.fromkeys(SAVED[name] for name in work.sac_save or () if name in SAVED)
    return {
        "micro_batch": work.micro_batch,
        "seq_len": work.seq_len,
        "grad_accum": work.grad_accum,
        "attention": attention_of(run),
        "checkpointing": f"save({','.join(saved)})" if saved else CHECKPOINTINGS[work.checkpointing],
        "reentrant": work.checkpointing == "full_reentrant",
        **loss_fields(run),
        "last_loss_held": _last_loss_held(run),
        "use_cache": _is_transformers_4(run) and run.model.config.get("model_type") in CACHING,
        "compile": work.compile,
        "fused_kernels": work.fused_kernels,
    }

"""A run of llm.c as a scenario: the program is its own engine, whatever a record calls the way it is spread."""

from collections.abc import Iterator
from typing import Any

from memcore.engine_options import EngineName
from memcore.score.record import Run

# The month after commit ba4e2c0 of 30 June 2024: see memcore.activations.llm_c.
_LATER = "2024-07"
_ATTENTIONS = {"cudnn": "flash", "eager": "eager"}
# What its kernels do in one, of which none is a choice.
_KERNELS = {"bias_gelu", "layernorm"}


def is_llm_c(run: Run) -> bool:
    """Whether llm.c made the run."""
    return run.software.framework == "llm_c"


def llm_c_unknown(run: Run) -> Iterator[tuple[str, object]]:
    """The fields, and what they say, that a scenario of llm.c does not have."""
    recipe, work, spread = run.recipe, run.workload, run.parallelism
    same = (recipe.param_dtype, recipe.param_dtype, "fp32", 0.0, "none", "fused_ce", False, "none")
    said: dict[str, object] = {
        "recipe.compute_dtype": recipe.compute_dtype,
        "recipe.grad_dtype": recipe.grad_dtype,
        "recipe.optimizer_state_dtype": recipe.optimizer_state_dtype,
        "workload.dropout": work.dropout or 0.0,
        "workload.checkpointing": work.checkpointing,
        "workload.loss": work.loss,
        "workload.compile": work.compile,
        "workload.offload": work.offload,
    }
    yield from ((name, value) for (name, value), known in zip(said.items(), same, strict=True) if value != known)
    allowed: dict[str, tuple[object, tuple[object, ...]]] = {
        "parallelism.engine": (spread.engine, (EngineName.SINGLE, EngineName.DDP)),
        "parallelism.zero_stage": (spread.zero_stage, (0, 1)),
        "recipe.method": (recipe.method, ("full",)),
        "recipe.param_dtype": (recipe.param_dtype, ("fp32", "bf16", "fp16")),
        "recipe.optimizer": (recipe.optimizer, ("adamw",)),
        "workload.attention": (work.attention, tuple(_ATTENTIONS)),
    }
    yield from ((name, value) for name, (value, known) in allowed.items() if value not in known)
    if others := set(work.fused_kernels) - _KERNELS:
        yield "workload.fused_kernels", ", ".join(sorted(others))
    yield from ((f"engine_config.{name}", value) for name, value in (run.engine_config or {}).items())


def llm_c_data(run: Run) -> dict[str, Any]:
    """The run as a scenario's data. The program recomputes nothing where a record says so."""
    recipe, work = run.recipe, run.workload
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype"), recipe.param_dtype)
    return {
        "model": {"config": dict(run.model.config)},
        "hardware": {"gpu": run.hardware.gpu, "gpus": run.hardware.gpus},
        "parallelism": {
            "engine": EngineName.LLM_C.value,
            "zero_stage": run.parallelism.zero_stage,
            "dp": run.parallelism.dp,
        },
        "engine_config": {"recompute": 0, "layout": "2025-05" if run.software.date >= _LATER else "2024-05"},
        "recipe": {**dtypes, "state_dtype": "fp32", "master_dtype": "fp32" if recipe.master_weights else "none"},
        "workload": {
            "micro_batch": work.micro_batch,
            "seq_len": work.seq_len,
            "grad_accum": work.grad_accum,
            "attention": _ATTENTIONS[work.attention],
            "loss": "fused_ce",
        },
    }

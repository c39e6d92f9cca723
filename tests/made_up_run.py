"""A measured run of our own making, in the published format: a small Llama on one GPU, in BF16."""

from copy import deepcopy
from typing import Any

# q and o 64 x 64, k and v 64 x 32, three of 64 x 128, two norms: 36,992 in each of 2 layers; embedding and head
# 512 x 64 each; a norm.
N_PARAMS = 2 * 36_992 + 2 * 32_768 + 64
_RUN: dict[str, Any] = {
    "id": "made-up",
    "source": "some/repository#1",
    "split": "dev",
    "family": "small.full.bf16.g1",
    "regime": "single_gpu_full",
    "confidence": "high",
    "gold": True,
    "software": {"framework": "hf_trainer", "date": "2025-01", "torch": None, "transformers": None},
    "model": {
        "name": "small",
        "auto_class": "AutoModelForCausalLM",
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 512,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
        "n_params": N_PARAMS,
        "n_params_config": N_PARAMS,
    },
    "hardware": {"gpu": "A100-80GB", "gpus": 1},
    "parallelism": {
        "engine": "single", "zero_stage": 0, "dp": 1, "tp": 1, "sequence_parallel": False, "pp": 1, "vpp": None,
        "microbatches": None, "cp": 1, "ep": 1, "reshard_after_forward": None, "prefetch": None,
    },
    "recipe": {
        "method": "full", "param_dtype": "bf16", "norm_dtype": None, "compute_dtype": "bf16", "autocast": False,
        "grad_dtype": "bf16", "optimizer": "adamw", "optimizer_impl": "foreach", "optimizer_state_dtype": "bf16",
        "master_weights": False, "optimizer_in_backward": False, "quantization": None, "quant_group_size": None,
        "quantize_lm_head": None, "lora": None,
    },
    "workload": {
        "micro_batch": 2, "seq_len": 128, "grad_accum": 1, "attention": "flash", "checkpointing": "none",
        "sac_save": None, "loss": "unfused_fp32_logits", "loss_chunks": None, "logits_dtype": "fp32",
        "logits_retained": False, "dropout": 0.0, "compile": False, "loss_compiled": False, "fused_kernels": [],
        "offload": "none",
    },
    "engine_config": None,
    "measured": {
        "bytes": 12_000_000, "metric": "allocated", "steady_bytes": None, "rank": "0", "precision_bytes": 1,
        "others": [],
    },
    "assumptions": [],
}  # fmt: skip
_LORA = {
    "rank": 4,
    "targets": ["q_proj", "v_proj"],
    "dropout": 0.0,
    "trainable_params": None,
    "modules_to_save": None,
    "adapter_dtype": "fp32",
    "sharded": None,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"parallelism.engine": "ddp"},
    "fsdp2": {
        "parallelism.engine": "fsdp2", "parallelism.zero_stage": 3, "parallelism.reshard_after_forward": True,
        "parallelism.prefetch": "implicit", "recipe.param_dtype": "fp32", "recipe.grad_dtype": "fp32",
        "recipe.optimizer_state_dtype": "fp32", "engine_config": {"fsdp_units": "block_root", "reduce_dtype": "fp32"},
    },
    "fsdp1": {
        "parallelism.engine": "fsdp1", "parallelism.zero_stage": 3, "parallelism.reshard_after_forward": True,
        "parallelism.prefetch": "backward_post", "recipe.param_dtype": "fp32", "recipe.grad_dtype": "fp32",
        "recipe.optimizer_state_dtype": "fp32",
        "engine_config": {
            "fsdp_units": "block_root", "reduce_dtype": "fp32", "use_orig_params": True, "limit_all_gathers": True,
            "forward_prefetch": False,
        },
    },
    "deepspeed": {
        "parallelism.engine": "deepspeed", "parallelism.zero_stage": 3, "recipe.master_weights": True,
        "recipe.optimizer_state_dtype": "fp32",
        "engine_config": {
            "reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "overlap_comm": True,
            "contiguous_gradients": True, "reduce_scatter": True, "sub_group_size": 10**9,
            "stage3_prefetch_bucket_size": 1000, "stage3_param_persistence_threshold": 100,
            "stage3_max_live_parameters": 10**6, "stage3_max_reuse_distance": 10**6,
        },
    },
    "lora": {
        "recipe.method": "lora", "recipe.lora": _LORA, "recipe.grad_dtype": "fp32",
        "recipe.optimizer_state_dtype": "fp32",
    },
    "qlora": {
        "recipe.method": "qlora", "recipe.lora": _LORA, "recipe.grad_dtype": "fp32",
        "recipe.optimizer_state_dtype": "fp32", "recipe.quantization": "nf4", "recipe.quant_group_size": 64,
    },
}  # fmt: skip
KINDS = tuple(_CHANGES)


def made_up(kind: str = "single", **changes: Any) -> dict[str, Any]:
    """A run of an engine, on two GPUs where it is for several, or of adapters. `changes`: dots written as ``__``."""
    run = deepcopy(_RUN)
    if kind in ("ddp", "fsdp1", "fsdp2", "deepspeed"):
        run["hardware"]["gpus"] = run["parallelism"]["dp"] = 2
    given = {name.replace("__", "."): value for name, value in changes.items()}
    for path, value in {**_CHANGES[kind], **given}.items():
        put(run, path, value)
    return run


def put(run: dict[str, Any], path: str, value: Any) -> None:
    """Set the field at a dotted path."""
    *parts, name = path.split(".")
    for part in parts:
        run = run[part]
    run[name] = deepcopy(value)

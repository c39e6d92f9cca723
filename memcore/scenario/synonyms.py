"""What people call a value in other programs, and what it is written as here: hints beside a refusal, never read."""

import difflib
from collections.abc import Iterable, Mapping

from memcore.i18n import gettext as _
from memcore.i18n import mark

_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
_HOST = {"host": "cpu", "ram": "cpu"}
_DEVICES = {**_HOST, "disk": "nvme", "ssd": "nvme"}
# By field, in lower case. What a library's name stands for is in memcore.scenario.losses and memcore.score.gaps.
SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "workload.loss": {
        "liger": "fused",
        "fused_linear_ce": "fused",
        "fused_linear_cross_entropy": "fused",
        "unsloth": "fused_ce",
        "vocab_parallel_ce": "fused_ce",
        "chunked_head_and_ce": "chunked",
        "torchtune": "chunked",
        "ce": "unfused",
        "cross_entropy": "unfused",
        "default": "unfused",
        "unfused_fp32_logits": "unfused",
    },
    "workload.attention": {
        "sdpa": "flash",
        "flash_attention_2": "flash",
        "flash_attn": "flash",
        "flash2": "flash",
        "fa2": "flash",
        "cudnn": "flash",
        "flex": "flash",
        "flex_attention": "flash",
        "efficient": "memory_efficient",
        "sdpa_efficient": "memory_efficient",
        "xformers": "memory_efficient",
        "math": "eager",
        "plain": "eager",
    },
    "workload.checkpointing": {
        "selective": mark("attention (its scores) or save(attention,mm) (by operation)"),
        "selective_attention": "attention",
        "selective_op": "save(attention,mm)",
        "on": "full",
        "true": "full",
        "gradient_checkpointing": "full",
        "off": "none",
        "false": "none",
        "full_reentrant": mark("full, with workload.reentrant"),
        "reentrant": mark("full, with workload.reentrant"),
    },
    "workload.fused_kernels": {"liger": "rmsnorm, rope, swiglu", "unsloth": "rmsnorm, rope, swiglu, lora"},
    "recipe.convention": {
        "bf16": mark("pure_bf16 (all in BF16), amp_autocast or fsdp2_mixed (FP32 weights), or zero_paper (DeepSpeed)"),
        "fp16": mark("pure_fp16 (all in FP16), or zero_paper with FP16 dtypes (DeepSpeed)"),
        "amp": "amp_autocast",
        "autocast": "amp_autocast",
        "mixed": mark("amp_autocast (one GPU, DDP), fsdp2_mixed (FSDP) or zero_paper (DeepSpeed)"),
        "mixed_precision": mark("amp_autocast (one GPU, DDP), fsdp2_mixed (FSDP) or zero_paper (DeepSpeed)"),
        "fsdp": "fsdp2_mixed",
        "fsdp1": "fsdp2_mixed",
        "fsdp2": "fsdp2_mixed",
        "zero": "zero_paper",
        "deepspeed": "zero_paper",
    },
    "recipe.method": {"sft": "full", "finetune": "full", "peft": "lora", "adapters": "lora"},
    "recipe.quantization": {
        "4bit": "nf4",
        "bnb": "nf4",
        "bitsandbytes": "nf4",
        "gptq": "gptq_int4",
        "int4": "gptq_int4",
    },
    "recipe.optimizer.name": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": mark('adamw, with recipe.optimizer.implementation "fused"'),
        "adamw_8bit": mark("adamw, with recipe.optimizer.bits 8"),
        "adamw_bnb_8bit": mark("adamw, with recipe.optimizer.bits 8"),
        "adam_8bit": mark("adam, with recipe.optimizer.bits 8"),
        "paged_adamw": mark("adamw, with recipe.optimizer.paged"),
        "paged_adamw_8bit": mark("adamw, with recipe.optimizer.bits 8 and recipe.optimizer.paged"),
    },
    "parallelism.engine": {
        "fsdp": mark("fsdp2, or fsdp1 (FullyShardedDataParallel)"),
        "zero": "deepspeed",
        "none": "single",
        "torch": "single",
    },
    "offload.optimizer": _DEVICES,
    "offload.parameters": _DEVICES,
    "offload.activations": _HOST,
}


def hint(field: str, value: object, allowed: Iterable[str] = ()) -> str:
    """What was probably meant, as a sentence with a space before it; empty where nothing is near."""
    if not isinstance(value, str):
        return ""
    word = value.strip().lower().replace("-", "_")
    known = _DTYPES if field.endswith("_dtype") else SYNONYMS.get(field.rstrip("0123456789").rstrip("."), {})
    if word in known:
        return " " + _("For {given}, write {written}.").format(given=value[:40], written=_(known[word]))
    near = difflib.get_close_matches(word, list(allowed), n=1)
    return " " + _("The nearest is {near}.").format(near=near[0]) if near else ""

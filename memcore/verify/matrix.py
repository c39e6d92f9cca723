"""The runs that prove the engines' files: every stage and setting that decides memory, on one small model."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from memcore.scenario import parse_scenario
from memcore.verify.case import Case

# 33,563,136 parameters: large enough that no rounding counts, small enough for four ranks on two cores.
MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
TOKENS = 16
RANKS = (2, 4)
_BUCKETS = (1_000_000, 10_000_000)
# What stays small: the prefetcher one parameter ahead, nothing kept for later.
_SMALL = {
    "stage3_prefetch_bucket_size": 1_000_000,
    "stage3_max_live_parameters": 3_000_000,
    "stage3_max_reuse_distance": 3_000_000,
    "reduce_bucket_size": 1_000_000,
}


def matrix(ranks: int) -> list[Case]:
    """All cases for a number of ranks. DeepSpeed's come last: its stage 3 puts a linear function of its own in torch's
    place for the rest of the process, which keeps other tensors under autocast."""
    return [*_ddp(ranks), *_fsdp1(ranks), *_fsdp2(ranks), *_deepspeed(ranks)]


def in_ci() -> list[Case]:
    """Twelve of those for two ranks that touch every file of the engines."""
    named = {case.name: case for case in matrix(2)}
    return [named[name] for name in _IN_CI]


_IN_CI = (
    "DDP, autocast",
    "DDP, gradient_as_bucket_view",
    "FSDP1, checkpoints around units",
    "FSDP2, reshard",
    "FSDP2, no reshard, full checkpointing",
    "ZeRO-0, bucket 1e+06",
    "ZeRO-1, bucket 1e+06",
    "ZeRO-2, bucket 1e+07",
    "ZeRO-2, bucket 1e+06, overlap_comm, foreach",
    "ZeRO-3, prefetch 1e+06, live 3e+06, reuse 3e+06, persistence 1e+05",
    "ZeRO-3, prefetch 1e+06, live 1e+09, reuse 1e+09, persistence 0e+00",
    "ZeRO-3, prefetch 1e+06, live 3e+06, reuse 3e+06, 4 micro-steps",
)


def _case(ranks: int, name: str, parallelism: Mapping[str, Any], **parts: Any) -> Case:
    workload = {"micro_batch": 1, "seq_len": TOKENS, **parts.pop("workload", {})}
    data = {
        "model": {"config": dict(MODEL)},
        "hardware": {"gpus": ranks},
        "parallelism": parallelism,
        "workload": workload,
        **parts,
    }
    return Case(name=name, scenario=parse_scenario(data))


def _zero(ranks: int, name: str, stage: int, settings: Mapping[str, Any], **parts: Any) -> Case:
    parallelism = {"engine": "deepspeed", "zero_stage": stage}
    return _case(ranks, name, parallelism, engine_config={"zero_optimization": dict(settings)}, **parts)


def _deepspeed(ranks: int) -> Iterator[Case]:
    for stage, bucket, overlap in product(range(4), _BUCKETS, (False, True)):
        settings = {**_SMALL, "reduce_bucket_size": bucket, "overlap_comm": overlap}
        name = f"ZeRO-{stage}, bucket {bucket:.0e}" + (", overlap_comm" if overlap else "")
        yield _zero(ranks, name, stage, settings)
    for stage, implementation in product(range(4), ("foreach", "fused")):
        name = f"ZeRO-{stage}, bucket 1e+06, overlap_comm, {implementation}"
        recipe: dict[str, Any] = {"optimizer": {"name": "adamw", "implementation": implementation}}
        yield _zero(ranks, name, stage, {**_SMALL, "overlap_comm": True}, recipe=recipe)
    for prefetch, live, reuse, keep in product((0, 1_000_000), (3_000_000, 10**9), (3_000_000, 10**9), (0, 100_000)):
        name = f"ZeRO-3, prefetch {prefetch:.0e}, live {live:.0e}, reuse {reuse:.0e}, persistence {keep:.0e}"
        settings = {
            "reduce_bucket_size": 1_000_000,
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": reuse,
            "stage3_param_persistence_threshold": keep,
        }
        yield _zero(ranks, name, 3, settings)
    small = "ZeRO-3, prefetch 1e+06, live 3e+06, reuse 3e+06"
    yield _zero(ranks, f"{small}, sub_group_size 4e+06", 3, {**_SMALL, "sub_group_size": 4_000_000})
    for stage in (1, 2, 3):
        name = small if stage == 3 else f"ZeRO-{stage}, bucket 1e+06"
        yield _zero(ranks, f"{name}, 4 micro-steps", stage, _SMALL, workload={"grad_accum": 4})
        recipe = {"convention": "deepspeed_fp32_grad"}
        yield _zero(ranks, f"{name}, FP32 accumulation", stage, _SMALL, recipe=recipe)
        yield _zero(ranks, f"{name}, full checkpointing", stage, _SMALL, workload={"checkpointing": "full"})


def _fsdp1(ranks: int) -> Iterator[Case]:
    settings: dict[str, dict[str, Any]] = {
        "": {},
        ", SHARD_GRAD_OP": {"reshard_after_forward": False},
        ", flat parameters": {"use_orig_params": False},
        ", BACKWARD_POST": {"backward_prefetch": "post"},
        ", forward_prefetch": {"forward_prefetch": True},
    }
    engine, recipe = {"engine": "fsdp1"}, {"convention": "fsdp2_mixed"}
    for name, config in settings.items():
        yield _case(ranks, f"FSDP1{name}", engine, engine_config=config, recipe=recipe)
    for convention, name in (("fp32", "FP32"), ("pure_bf16", "BF16")):
        yield _case(ranks, f"FSDP1, {name}", engine, recipe={"convention": convention})
    work = {"checkpointing": "full", "reentrant": True}
    yield _case(ranks, "FSDP1, full checkpointing", engine, recipe=recipe, workload=work)
    around = {"checkpoint_around_units": True}
    yield _case(ranks, "FSDP1, checkpoints around units", engine, engine_config=around, recipe=recipe, workload=work)
    work = {"grad_accum": 4}
    yield _case(ranks, "FSDP1, 4 micro-steps", engine, recipe=recipe, workload=work)
    name, config = "FSDP1, 4 micro-steps, no_sync", {"no_sync": True}
    yield _case(ranks, name, engine, engine_config=config, recipe=recipe, workload=work)
    whole = {**engine, "dp_shard": 1, "dp_replicate": ranks}
    for convention, name in (("fsdp2_mixed", ""), ("pure_bf16", ", BF16")):
        yield _case(ranks, f"FSDP1, NO_SHARD{name}", whole, recipe={"convention": convention})
    # With FP32 gradients the CPU's addition would cast what is added first; a GPU's kernel does that as it adds.
    yield _case(ranks, "FSDP1, NO_SHARD, BF16, 4 micro-steps", whole, recipe={"convention": "pure_bf16"}, workload=work)
    name = "FSDP1, NO_SHARD, 4 micro-steps, no_sync"
    yield _case(ranks, name, whole, engine_config=config, recipe=recipe, workload=work)
    if ranks > 2:
        hybrid = {**engine, "dp_shard": ranks // 2, "dp_replicate": 2}
        yield _case(ranks, "FSDP1, HYBRID_SHARD", hybrid, recipe=recipe)


def _fsdp2(ranks: int) -> Iterator[Case]:
    for reshard, checkpointing, convention in product((True, False), ("none", "full"), ("fsdp2_mixed", "fp32")):
        name = "FSDP2, reshard" if reshard else "FSDP2, no reshard"
        name += ", full checkpointing" if checkpointing == "full" else ""
        yield _case(
            ranks,
            name + (", FP32" if convention == "fp32" else ""),
            {"engine": "fsdp2"},
            engine_config={"reshard_after_forward": reshard},
            recipe={"convention": convention},
            workload={"checkpointing": checkpointing},
        )
    recipe = {"convention": "fsdp2_mixed", "optimizer": {"name": "adamw", "implementation": "fused"}}
    yield _case(ranks, "FSDP2, reshard, fused", {"engine": "fsdp2"}, recipe=recipe)
    recipe = {"convention": "fsdp2_mixed"}
    yield _case(ranks, "FSDP2, reshard, 4 micro-steps", {"engine": "fsdp2"}, recipe=recipe, workload={"grad_accum": 4})
    if ranks > 2:
        hybrid = {"engine": "fsdp2", "dp_shard": ranks // 2, "dp_replicate": 2}
        yield _case(ranks, "FSDP2, HSDP", hybrid, recipe=recipe)


def _ddp(ranks: int) -> Iterator[Case]:
    for views, convention in product((False, True), ("fp32", "pure_bf16", "amp_autocast")):
        name = "DDP, gradient_as_bucket_view" if views else "DDP"
        name += {"fp32": "", "pure_bf16": ", BF16", "amp_autocast": ", autocast"}[convention]
        config = {"gradient_as_bucket_view": views}
        yield _case(ranks, name, {"engine": "ddp"}, engine_config=config, recipe={"convention": convention})
    yield _case(
        ranks, "DDP, 4 micro-steps", {"engine": "ddp"}, recipe={"convention": "fp32"}, workload={"grad_accum": 4}
    )

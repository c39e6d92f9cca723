"""What a scenario cannot express of a run, field by field: such a run is not predicted, since what a prediction
leaves out would be an error without a name.

Not among a scenario's fields, and rightly: where a run comes from (id, source, split, family, regime, confidence,
software, assumptions), and of its engine's settings those that move no tensor's bytes (`_ANY` below).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.i18n import gettext as _
from memcore.scenario import FP8_RECIPES, Quantization
from memcore.score.llm_c import is_llm_c, llm_c_unknown
from memcore.score.losses import loss_gaps
from memcore.score.record import Run, RunRecipe

_DTYPES = ("fp32", "bf16", "fp16")
_FSDP = (EngineName.FSDP1, EngineName.FSDP2)
_MAX_CHARS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A field of a run that a scenario cannot express, and what it says, in a few words."""

    field: str
    what: str


# The values of a field that a scenario expresses, where it has another name for them.
# cuDNN's and flex attention keep what flash attention does: queries, keys, values, result and log-sum-exp (torch 2.13,
# aten/src/ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_fprop; _higher_order_ops/flex_attention.py, FlexAttentionAutogradOp;
# of flex attention's block mask an entry per 128 by 128 scores is left out).
ATTENTIONS = {
    "flash": "flash",
    "cudnn": "flash",
    "flex": "flash",
    "eager": "eager",
    "sdpa_efficient": "memory_efficient",
}
# Frameworks whose models repeat grouped keys and values for each query head before the attention, as "memory_efficient"
# has them: torchtune 0.4, modules/attention.py, MultiHeadAttention.forward; torchtitan, models/llama3/model/model.py,
# repeat_kv (to 2025). cuDNN's attention takes them as they are (torchtitan, commit 46658697).
_REPEATING = ("torchtune", "torchtitan")
CHECKPOINTINGS = {"none": "none", "full": "full", "full_reentrant": "full", "selective_attention": "attention"}
# Of save lists: what a scenario has under another name, and what keeps nothing: reduce_scatter is tensor parallelism's,
# max and abs those of FP8's scales, whose tensors do not last in a compiled layer (what is saved is the scale alone).
SAVED = {"sdpa": "attention", "flex": "attention", "mm_alternate": "mm_alternate"}
_NEVER_KEPT = ("reduce_scatter", "max", "abs")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adam": {"name": "adam"},
    "adafactor": {"name": "adafactor"},
    "adamw_8bit": {"name": "adamw", "bits": 8},
    "adam_8bit": {"name": "adam", "bits": 8},
    "paged_adamw": {"name": "adamw", "paged": True},
    "paged_adamw_8bit": {"name": "adamw", "bits": 8, "paged": True},
}
FUSED_KERNELS = ("rmsnorm", "rope", "swiglu", "lora")
# An engine's settings that a scenario has under the same name.
SETTINGS = {
    EngineName.DEEPSPEED: (
        "reduce_bucket_size",
        "contiguous_gradients",
        "overlap_comm",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    ),
    EngineName.DDP: ("gradient_as_bucket_view",),
    EngineName.FSDP1: ("use_orig_params", "forward_prefetch"),
    EngineName.FSDP2: ("fsdp_units", "reshard_exception"),
}
# When FSDP1 gathers ahead in the backward, by the setting's name here.
PREFETCHES = {"backward_pre": "pre", "backward_pre+forward": "pre", "backward_post": "post", None: "none"}
# FSDP1's strategies by the stage that a record has for them, with what it may say of the resharding: FULL_SHARD or
# SHARD_GRAD_OP, the latter by a stage of its own, and NO_SHARD, which knows nothing of it.
FSDP1_STAGES = {3: (True, False, None), 2: (False, None), 0: (True, False, None)}
# The units of FSDP1 that a scenario has, and for adapters what they are then.
UNITS = {"block_root": "inside", "block_lora_leaf_root": "apart"}
# Settings of DeepSpeed that move no tensor's bytes: it gathers weights in place, in the flat group's own memory, and
# sends gradients from its bucket.
MOVES_NOTHING = ("allgather_bucket_size", "reduce_scatter")
# Other settings, at the values for which a scenario stands without naming them.
_ANY = object()
_IMPLIED: dict[str, dict[str, Any]] = {
    EngineName.DEEPSPEED: dict.fromkeys(MOVES_NOTHING, _ANY),
    EngineName.DDP: {"ddp_bucket_cap_mb": 25},  # torch 2.13, nn/parallel/distributed.py: the default
    # The limit on gathers holds the host back, not a block.
    EngineName.FSDP1: {"limit_all_gathers": _ANY},
}
_IMPLIED_ANYWHERE: dict[str, Any] = {
    "expandable_segments": _ANY,  # of the hardware in a scenario
    "fp8_all_gather": False,
    "async_tp": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "overlap_moe_comm": False,
    "expert_tensor_parallel": 1,
    "attention_softmax_fp32": False,
}


def attention_of(run: Run) -> str:
    """The scenario's attention that keeps what the run's did."""
    attention, framework = run.workload.attention, run.software.framework
    repeats = framework in _REPEATING and attention in ("flash", "flex")
    return "memory_efficient" if repeats else ATTENTIONS[attention]


def beyond_scope(run: Run) -> tuple[str, ...]:
    """The degrees of parallelism beside data parallelism that are above 1, such as ``tp = 2``."""
    degrees = {name: getattr(run.parallelism, name) for name in ("tp", "pp", "cp", "ep")}
    return tuple(f"{name} = {degree}" for name, degree in degrees.items() if degree > 1)


def gaps_of(run: Run) -> tuple[Gap, ...]:
    """Everything that a scenario cannot express of a run within the scope, in the record's order of fields."""
    if is_llm_c(run):
        return tuple(Gap(field=field, what=f"{field} = {str(said)[:_MAX_CHARS]}") for field, said in llm_c_unknown(run))
    return (*_model(run), *_parallelism(run), *_dtypes(run), *_training(run), *_adapters(run), *_workload(run))


def divides_weights(run: Run) -> bool:
    """Whether ranks share the weights out among them."""
    sharing = (2, 3) if run.parallelism.engine == EngineName.FSDP1 else (3,)
    return run.parallelism.zero_stage in sharing and run.parallelism.dp > 1


def is_float8(run: Run) -> bool:
    """Whether linear modules multiply in float8, by a recipe that a scenario has."""
    return run.recipe.compute_dtype == "fp8" and (run.engine_config or {}).get("fp8_recipe") in FP8_RECIPES


def dtype_beside(run: Run) -> str:
    """What is computed in but for such products: torchtitan's default, BF16 (config: mixed_precision_param)."""
    return "bf16" if is_float8(run) and run.software.framework == "torchtitan" else run.recipe.compute_dtype


def _unless(field: str, value: object, *expressed: object) -> Iterator[Gap]:
    """A gap where the value is none of those that are expressed."""
    if not any(value is each or (type(value) is type(each) and value == each) for each in expressed):
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield Gap(field=field, what=f"{field} = {shown[:_MAX_CHARS]}")


def _model(run: Run) -> Iterator[Gap]:
    yield from _unless("model.auto_class", run.model.auto_class, "AutoModelForCausalLM")
    rates = [
        value for name, value in run.model.config.items() if "drop" in name and isinstance(value, int | float)
    ] or [0.0]  # fmt: skip
    if run.workload.dropout is not None and run.workload.dropout not in rates:
        yield from _unless("workload.dropout", run.workload.dropout)


def _parallelism(run: Run) -> Iterator[Gap]:
    parallelism = run.parallelism
    if parallelism.engine not in set(EngineName):
        yield from _unless("parallelism.engine", parallelism.engine)
        return  # its settings are its own
    engine = EngineName(parallelism.engine)
    options, of_fsdp = ENGINE_OPTIONS[engine], engine in _FSDP
    older = engine is EngineName.FSDP1
    stages = FSDP1_STAGES if older else options.stages or (options.fixed_stage,)
    yield from _unless("parallelism.zero_stage", parallelism.zero_stage, *stages)
    yield from _unless("parallelism.sequence_parallel", parallelism.sequence_parallel, False)
    yield from _unless("parallelism.vpp", parallelism.vpp, None)
    yield from _unless("parallelism.microbatches", parallelism.microbatches, None)
    resharded: tuple[bool | None, ...] = (True, False) if of_fsdp else (None,)
    if older:
        resharded = FSDP1_STAGES.get(parallelism.zero_stage, resharded)
    yield from _unless("parallelism.reshard_after_forward", parallelism.reshard_after_forward, *resharded)
    ahead = {EngineName.FSDP1: tuple(PREFETCHES), EngineName.FSDP2: (None, "implicit")}
    yield from _unless("parallelism.prefetch", parallelism.prefetch, *ahead.get(engine, (None,)))
    yield from _settings(run, engine)


def _settings(run: Run, engine: EngineName) -> Iterator[Gap]:
    implied = {**_IMPLIED_ANYWHERE, **_IMPLIED.get(engine, {})}
    own_reduction = engine in (*_FSDP, EngineName.DEEPSPEED)
    implied["reduce_dtype"] = _ANY if own_reduction else run.recipe.grad_dtype
    # DDP's buckets and whole gradients are there in every micro-step, synchronised or not (torch 2.13, nn/parallel/
    # distributed.py, no_sync: the reducer's hooks return at once).
    waits = run.workload.grad_accum > 1 and engine not in (EngineName.FSDP1, EngineName.DDP)
    implied["no_sync_accumulation"] = False if waits else _ANY
    if engine is EngineName.FSDP1:
        units = (run.engine_config or {}).get("fsdp_units")
        implied["fsdp_units"] = units if units in list(UNITS) else "block_root"
    if is_float8(run):
        implied |= {"fp8_recipe": _ANY, "fp8_all_gather": _ANY}
    for name, value in (run.engine_config or {}).items():
        if name in SETTINGS.get(engine, ()) or (name in implied and implied[name] is _ANY) or value is None:
            continue
        expressed = (implied[name],) if name in implied else ()
        yield from _unless(f"engine_config.{name}", value, *expressed)


def _dtypes(run: Run) -> Iterator[Gap]:
    """What the weights, the computation and autocast between them say."""
    recipe, engine = run.recipe, run.parallelism.engine
    yield from _unless("recipe.param_dtype", recipe.param_dtype, *_DTYPES)
    norms = ["fp32"] if recipe.method == "qlora" and recipe.autocast else []
    yield from _unless("recipe.norm_dtype", recipe.norm_dtype, None, recipe.param_dtype, *norms)
    computed = dtype_beside(run)
    yield from _unless("recipe.compute_dtype", computed, *_DTYPES)
    same = recipe.param_dtype == computed
    cast = recipe.param_dtype == "fp32" and (recipe.autocast or engine in _FSDP)
    if not same and not cast:
        pair = {"stored": recipe.param_dtype, "computed": computed}
        yield Gap(
            field="recipe.compute_dtype", what=_("{stored} weights that compute in {computed}").format(**pair)
        )  # fmt: skip
    around = recipe.autocast and same and recipe.lora is not None and recipe.lora.adapter_dtype != recipe.compute_dtype
    if around and engine not in (EngineName.SINGLE, EngineName.DDP, EngineName.FSDP1):
        yield Gap(field="recipe.autocast", what=_("autocast around FP32 adapters under {engine}").format(engine=engine))


def _training(run: Run) -> Iterator[Gap]:
    """The optimizer, and what is kept of gradients and states."""
    recipe = run.recipe
    yield from _unless("recipe.optimizer", recipe.optimizer, *OPTIMIZERS)
    if recipe.method == "full" and run.parallelism.engine != EngineName.DEEPSPEED:
        # torch keeps a gradient in the dtype of its parameter.
        yield from _unless("recipe.grad_dtype", recipe.grad_dtype, recipe.param_dtype)
    if recipe.optimizer in OPTIMIZERS:
        yield from _unless("recipe.optimizer_state_dtype", recipe.optimizer_state_dtype, *_state_dtypes(run))


def _state_dtypes(run: Run) -> tuple[str, ...]:
    """The dtypes that the optimizer's states can have in a scenario."""
    optimizer, lora = OPTIMIZERS[run.recipe.optimizer], run.recipe.lora
    if optimizer.get("bits") == 8:
        return ("int8",)
    if optimizer.get("paged"):
        return ("fp32",)
    if optimizer["name"] == "adafactor":
        return ("fp32_factored",)
    if lora is not None and run.parallelism.engine != EngineName.DEEPSPEED:
        return (lora.adapter_dtype,)
    return _DTYPES


def _adapters(run: Run) -> Iterator[Gap]:
    recipe, lora = run.recipe, run.recipe.lora
    yield from _unless("recipe.method", recipe.method, "full", "lora", "qlora")
    yield from _packing(recipe)
    if recipe.method == "full" or lora is None:
        if (recipe.method == "full") != (lora is None):
            yield from _unless("recipe.lora", _("given") if lora else None)
        return
    whole_too = [False] if run.parallelism.engine == EngineName.FSDP1 else []
    yield from _unless("recipe.lora.sharded", lora.sharded, None, divides_weights(run), *whole_too)
    if run.parallelism.engine == EngineName.DEEPSPEED:
        yield from _unless("recipe.lora.adapter_dtype", lora.adapter_dtype, recipe.param_dtype)
    else:
        yield from _unless("recipe.lora.adapter_dtype", lora.adapter_dtype, *_DTYPES)
        yield from _unless("recipe.grad_dtype", recipe.grad_dtype, lora.adapter_dtype)
        yield from _unless("recipe.master_weights", recipe.master_weights, False)


def _packing(recipe: RunRecipe) -> Iterator[Gap]:
    """What a 4-bit base's record says of it, and what a record without one may say."""
    if recipe.method != "qlora":
        for name in ("quantization", "quant_group_size", "quantize_lm_head"):
            yield from _unless(f"recipe.{name}", getattr(recipe, name), None, False)
        return
    yield from _unless("recipe.quantization", recipe.quantization, *(each.value for each in Quantization))
    sizes = (-1, 32, 64, 128) if recipe.quantization == Quantization.GPTQ_INT4 else (64,)
    yield from _unless("recipe.quant_group_size", recipe.quant_group_size, None, *sizes)


def _workload(run: Run) -> Iterator[Gap]:
    work = run.workload
    yield from _unless("workload.attention", work.attention, *ATTENTIONS)
    if work.checkpointing == "selective_op":
        known = {*SAVED, *_NEVER_KEPT}
        if is_float8(run) and not work.compile:
            known -= {"max", "abs"}
        if not work.sac_save or not set(work.sac_save) <= known:
            yield from _unless("workload.sac_save", work.sac_save)
    else:
        yield from _unless("workload.checkpointing", work.checkpointing, *CHECKPOINTINGS)
        yield from _unless("workload.sac_save", work.sac_save, None)
    yield from (Gap(field=field, what=what[:_MAX_CHARS]) for field, what in loss_gaps(run))
    others = [name for name in work.fused_kernels if name not in FUSED_KERNELS]
    yield from _unless("workload.fused_kernels", others, [])
    offloads = {
        EngineName.SINGLE: ["activations"],
        **{each: ["params+grads+optimizer"] for each in _FSDP},
        EngineName.DEEPSPEED: ["params+optimizer"],
    }
    allowed = offloads.get(EngineName(run.parallelism.engine), []) if run.parallelism.engine in offloads else []
    yield from _unless("workload.offload", work.offload, "none", *allowed)

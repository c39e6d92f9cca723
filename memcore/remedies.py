"""What would make a term smaller: other settings of the same run, each with what it saves.

A remedy is another scenario. It is named only where that scenario is accepted and its peak is lower, so that nothing
is advised that the run has already; the saving is the difference of the two peaks in closed form. Where a peak is
without activations, which only a trace has then, the remedy is named without a figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from memcore.budget import Budget, predict
from memcore.changes import (
    Change,
    as_fsdp2,
    changed,
    engine_with,
    halved,
    in_8_bits,
    more_gpus,
    offloaded,
    one_group,
    optimizer_with,
    shards_on_host,
    trained_as,
    two_gpus,
    workload_with,
    zero_divided,
    zero_stage,
)
from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import Method, Scenario
from memcore.states import GRADIENT_STAGE, OPTIMIZER_STAGE, WEIGHT_STAGE
from memcore.terms import Category, Term
from memcore.units import ByteUnit, format_bytes

# As many as a cell of a table holds.
MOST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """`text`, without its full stop, and the change that it is; without `change` it is no setting of a scenario.
    `engines`: those that it is of, where it is not of all."""

    text: str
    change: Change | None = None
    engines: tuple[EngineName, ...] = ()


def remedies(budget: Budget, terms: Sequence[Term], unit: ByteUnit) -> list[str]:
    """What would make each of the terms smaller in this run, as sentences."""
    base, known = _by_formula(budget.scenario, budget), dict[tuple[str, bool], str]()

    def sentence(each: Remedy, of_trace: bool) -> str:
        key = (each.text, of_trace)
        if key not in known:
            known[key] = _sentence(each, of_trace, budget, base, unit)
        return known[key]

    found = []
    for term in terms:
        of_trace = bool(base.missing) and term.category in (Category.ACTIVATIONS, Category.LOSS)
        said = (sentence(each, of_trace) for each in TERM_REMEDIES[term.name])
        best = islice((each for each in said if each), MOST)
        found.append(" ".join(best) or _("No other setting of this run makes it smaller."))
    return found


def _sentence(each: Remedy, of_trace: bool, budget: Budget, base: Budget, unit: ByteUnit) -> str:
    """The remedy with what it saves; empty where it does not apply, or saves nothing."""
    if each.engines and budget.scenario.parallelism.engine not in each.engines:
        return ""
    if each.change is None:
        return f"{_(each.text)}."
    parts = each.change(budget.scenario)
    if parts is None:
        return ""
    try:
        scenario = changed(budget.scenario, parts)
        other = _by_formula(scenario, budget)
    except UserError:
        return ""
    if base.missing != other.missing or (of_trace and scenario != budget.scenario):
        return f"{_(each.text)}."
    saved = base.peak_bytes - other.peak_bytes
    if saved <= 0:
        return ""
    return _("{remedy}: {saved} less at the peak.").format(remedy=_(each.text), saved=format_bytes(saved, unit))


def _by_formula(scenario: Scenario, budget: Budget) -> Budget:
    return predict(scenario, replace(budget.evidence, profile=None, plan=None, reservation=None))


_STAGE_TEXTS = {
    OPTIMIZER_STAGE: mark("Choose ZeRO stage 1"),
    GRADIENT_STAGE: mark("Choose ZeRO stage 2"),
    WEIGHT_STAGE: mark("Choose ZeRO stage 3"),
}


def _divide(stage: int) -> tuple[Remedy, ...]:
    return (
        Remedy(text=_STAGE_TEXTS[stage], change=zero_stage(stage)),
        Remedy(text=mark("Choose FSDP2"), change=as_fsdp2),
        Remedy(text=mark("Take two GPUs, with FSDP2"), change=two_gpus),
        Remedy(text=mark("Divide among all GPUs, in one group"), change=one_group),
        Remedy(text=mark("Take twice as many GPUs"), change=more_gpus(stage)),
    )


_STATES = (
    *_divide(OPTIMIZER_STAGE),
    Remedy(text=mark("Keep optimizer states in 8 bits"), change=in_8_bits),
    Remedy(text=mark("Offload the optimizer to host memory"), change=offloaded("optimizer")),
    Remedy(text=mark("Keep the shards in host memory"), change=shards_on_host),
    Remedy(text=mark("Train adapters alone (LoRA)"), change=trained_as(Method.LORA)),
)
_WEIGHTS = (
    *_divide(WEIGHT_STAGE),
    Remedy(text=mark("Train adapters on a 4-bit base (QLoRA)"), change=trained_as(Method.QLORA)),
    Remedy(text=mark("Offload the weights to host memory"), change=offloaded("parameters")),
    Remedy(text=mark("Keep the shards in host memory"), change=shards_on_host),
)
_SHORTER = (
    Remedy(text=mark("Halve the micro-batch"), change=halved("micro_batch")),
    Remedy(text=mark("Halve the sequence"), change=halved("seq_len")),
)
_FLASH = (Remedy(text=mark("Use flash attention, which keeps no scores"), change=workload_with(attention="flash")),)
_RECOMPUTE = Remedy(text=mark("Recompute every layer (full checkpointing)"), change=workload_with(checkpointing="full"))
_FUSED_STEP = Remedy(
    text=mark("Choose the fused implementation, which makes none"), change=optimizer_with(implementation="fused")
)
_SMALLER_UNITS = Remedy(text=mark("Wrap smaller units"), engines=(EngineName.FSDP1, EngineName.FSDP2))
_LARGEST_PARAMETER = (Remedy(text=mark("It is as large as the model's largest parameter")),)
_BUCKET = (Remedy(text=mark("Halve reduce_bucket_size"), change=zero_divided(reduce_bucket_size=2)),)

# By the name of each term that an engine or the states use; a test holds them together.
TERM_REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    "weights": _WEIGHTS,
    "frozen_weights": _WEIGHTS,
    "fp32_norms": (Remedy(text=mark("Keep them in 16 bit: they are few, but what they give is in FP32 too")),),
    "quantised_weights": _WEIGHTS,
    "quantisation_scales": (
        Remedy(
            text=mark("Quantise the scales again (double quantisation)"),
            change=lambda _scenario: {"recipe": {"quantization": "nf4_double_quant"}},
        ),
    ),
    "adapter_weights": (Remedy(text=mark("Lower the rank, or name fewer target modules")), *_divide(WEIGHT_STAGE)),
    "secondary_weights": (Remedy(text=mark("Raise zero_hpz_partition_size to the GPUs of a node, or set it to 1")),),
    "gradients": (
        *_divide(GRADIENT_STAGE),
        Remedy(
            text=mark("Step in the backward, one gradient at a time"),
            change=optimizer_with(in_backward=True),
        ),
        Remedy(text=mark("Train adapters alone (LoRA)"), change=trained_as(Method.LORA)),
    ),
    "newest_slice": (_SMALLER_UNITS,),
    "unsharded_gradients": (
        Remedy(
            text=mark("Reduce after each micro-step: leave no_sync out"),
            change=engine_with(EngineName.FSDP1, no_sync=False),
        ),
    ),
    "fp32_gradients": (
        Remedy(
            text=mark("Accumulate in BF16"),
            change=lambda _scenario: {"recipe": {"convention": "zero_paper"}},
        ),
        *_divide(GRADIENT_STAGE),
    ),
    "accumulated_slice": _divide(GRADIENT_STAGE),
    "gradient_slice": _divide(GRADIENT_STAGE),
    "master_weights": _STATES,
    "momentum": _STATES,
    "variance": _STATES,
    "factored_variance": (Remedy(text=mark("It is small already")),),
    "for_loop_temporary": (_FUSED_STEP,),
    "foreach_temporary": (_FUSED_STEP,),
    "update_temporary": (
        Remedy(
            text=mark("Choose the for-loop implementation, one tensor after the other"),
            change=optimizer_with(implementation="for_loop"),
        ),
        *_divide(OPTIMIZER_STAGE),
    ),
    "step_gradient_copies": (
        Remedy(text=mark("Halve sub_group_size"), change=zero_divided(sub_group_size=2)),
        *_divide(OPTIMIZER_STAGE),
    ),
    "slice_padding": (Remedy(text=mark("Choose a number of GPUs that divides the parameters")),),
    "reduce_bucket": _BUCKET,
    "ddp_buckets": (
        Remedy(
            text=mark("Set gradient_as_bucket_view, which makes the gradients views of the buckets"),
            change=engine_with(EngineName.DDP, gradient_as_bucket_view=True),
        ),
    ),
    "gathered_parameters": (
        Remedy(
            text=mark("Lower stage3_max_live_parameters and stage3_max_reuse_distance together"),
            change=zero_divided(stage3_max_live_parameters=10**9, stage3_max_reuse_distance=10**9),
        ),
        Remedy(
            text=mark("Set reshard_after_forward"),
            change=engine_with(EngineName.FSDP2, reshard_after_forward=True, reshard_exception=None),
        ),
        Remedy(
            text=mark("Set reshard_after_forward"), change=engine_with(EngineName.FSDP1, reshard_after_forward=True)
        ),
        _SMALLER_UNITS,
    ),
    "gather_copies": (
        Remedy(
            text=mark("Halve stage3_prefetch_bucket_size"),
            change=zero_divided(stage3_prefetch_bucket_size=2),
        ),
    ),
    "newest_gradient": _LARGEST_PARAMETER,
    "reduce_flatten": _BUCKET,
    "norm_copy": _LARGEST_PARAMETER,
    "persistent_parameters": (
        Remedy(
            text=mark("Lower stage3_param_persistence_threshold"),
            change=zero_divided(stage3_param_persistence_threshold=10**9),
        ),
    ),
    "reduced_gradients": (_SMALLER_UNITS,),
    "saved_activations": (
        _RECOMPUTE,
        *_FLASH,
        *_SHORTER,
    ),
    "attention_scores": (
        *_FLASH,
        Remedy(text=mark("Recompute every layer (full checkpointing)"), change=workload_with(checkpointing="full")),
    ),
    "recomputed_activations": (*_FLASH, *_SHORTER),
    "recomputed_scores": _FLASH,
    "layer_temporaries": _SHORTER,
    "weight_casts": (
        Remedy(
            text=mark("Keep the weights in 16 bit, without an FP32 copy (pure BF16)"),
            change=lambda _scenario: {"recipe": {"convention": "pure_bf16"}},
        ),
    ),
    "final_norm": _SHORTER,
    "held_inputs": (Remedy(text=mark("Update bitsandbytes, or let the training loop drop its loss after each step")),),
    "logits_loss": (
        Remedy(
            text=mark("Compute the loss fused with the head, so that the logits are never whole"),
            change=workload_with(loss="fused", loss_chunks=None, logits_upcast=None, logits_retained=False),
        ),
        Remedy(
            text=mark("Compute the loss in chunks"),
            change=workload_with(loss="chunked", logits_upcast=None, shifted_copy=False),
        ),
        *_SHORTER,
    ),
    "cublas_workspace": (Remedy(text=mark("Set CUBLAS_WORKSPACE_CONFIG to a smaller one; it may cost speed")),),
    "runtime": (Remedy(text=mark("It cannot be avoided")),),
}

"""What each key of DeepSpeed's zero_optimization does to a scenario's memory, and what it costs.

Keys and defaults are those of deepspeed 0.19.8, runtime/zero/config.py, DeepSpeedZeroConfig.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memcore.budget import Budget
from memcore.buffers import with_zero
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import Scenario


class Effect(StrEnum):
    """What a key does to this scenario's memory."""

    ALLOCATED = "allocated"
    CAP = "cap"
    NO_EFFECT = "no_effect"
    NOT_PREDICTED = "not_predicted"


EFFECT_LABELS = {
    Effect.ALLOCATED: mark("allocated"),
    Effect.CAP: mark("cap"),
    Effect.NO_EFFECT: mark("without effect"),
    Effect.NOT_PREDICTED: mark("not predicted"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReading:
    """One key of the file or, where `given` is None, one that DeepSpeed fills in itself.

    `value` is what is in force; `cost_bytes` what it takes on the GPU at its most (None where it takes
    nothing of its own); `why` one sentence.
    """

    path: str
    given: Any
    value: Any
    effect: Effect
    cost_bytes: int | None
    why: str


# The keys of zero_optimization, as DeepSpeed spells them, with what each does. A test compares the table
# with the installed library's own config model.
_NONE, _SAVING, _UNKNOWN = "none", "saving", "not_predicted"
ZERO_KEYS: Mapping[str, str] = {
    "stage": "stage",
    "contiguous_gradients": "contiguous",
    "reduce_scatter": _NONE,
    "reduce_bucket_size": "bucket",
    "use_multi_rank_bucket_allreduce": _NONE,
    "allgather_partitions": _NONE,
    "allgather_bucket_size": "allgather",
    "overlap_comm": "overlap",
    "compute_grad_norm": _NONE,
    "load_from_fp32_weights": _NONE,
    "elastic_checkpoint": _NONE,
    "offload_param": "offload_param",
    "offload_optimizer": "offload_optimizer",
    "zenflow": _UNKNOWN,
    "sub_group_size": "sub_group",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": _NONE,
    "cpu_offload": "offload_optimizer",
    "stage3_prefetch_bucket_size": "prefetch",
    "stage3_param_persistence_threshold": "persistence",
    "stage3_model_persistence_threshold": "model_persistence",
    "stage3_max_live_parameters": "live",
    "stage3_max_reuse_distance": "reuse",
    "stage3_gather_16bit_weights_on_model_save": _SAVING,
    "stage3_gather_fp16_weights_on_model_save": _SAVING,
    "stage3_module_granularity_threshold": _UNKNOWN,
    "stage3_use_all_reduce_for_fetch_params": _UNKNOWN,
    "stage3_allgather_sequential": _UNKNOWN,
    "ignore_unused_parameters": _NONE,
    "legacy_stage1": _NONE,
    "round_robin_gradients": _NONE,
    "parameter_alignment": _NONE,
    "zero_hpz_partition_size": "hpz",
    "zero_quantized_weights": _UNKNOWN,
    "zero_quantized_nontrainable_weights": _UNKNOWN,
    "zero_quantized_gradients": _UNKNOWN,
    "memory_efficient_linear": _NONE,
    "pipeline_loading_checkpoint": _NONE,
    "override_module_apply": _NONE,
    "log_trace_cache_warnings": _NONE,
    "enable_sanity_checks": _NONE,
    "save_muon_momentum_buffer_in_memory": _NONE,
    "leaf_module": _UNKNOWN,
}


def explain_key(name: str, zero: Mapping[str, Any], scenario: Scenario, budget: Budget) -> KeyReading:
    """What one key of zero_optimization does at this stage, for this model."""
    value = in_force(name, zero, scenario)
    effect, cost, why = _RULES[ZERO_KEYS[name]](scenario, budget)
    return KeyReading(path=name, given=zero.get(name), value=value, effect=effect, cost_bytes=cost, why=why)


def in_force(name: str, zero: Mapping[str, Any], scenario: Scenario) -> Any:
    """The value that DeepSpeed works with: the file's, or its own default."""
    stage = scenario.parallelism.stage
    implied = {
        "stage": stage,
        "offload_optimizer": scenario.offload.optimizer.value,
        "offload_param": scenario.offload.parameters.value,
        "allgather_bucket_size": zero.get("allgather_bucket_size", 500_000_000),
    }
    if name in implied:
        return implied[name]
    value = getattr(scenario.zero_config, name, zero.get(name))
    # overlap_comm is on by default at stage 3 only (DeepSpeedZeroConfig.overlap_comm_valid).
    return stage == 3 if name == "overlap_comm" and value is None else value


Explained = tuple[Effect, int | None, str]
Rule = Callable[[Scenario, Budget], Explained]


def _largest(budget: Budget, *names: str) -> int:
    return sum(term.largest for term in budget.terms if term.name in names)


def _stage_of(scenario: Scenario) -> int:
    return scenario.parallelism.stage


def _at_stage_3(rule: Rule) -> Rule:
    """A rule for a key that the other stages do not read."""

    def guarded(scenario: Scenario, budget: Budget) -> Explained:
        if _stage_of(scenario) != 3:
            return Effect.NO_EFFECT, None, _("It is read at stage 3 only.")
        return rule(scenario, budget)

    return guarded


def decides_memory(name: str) -> bool:
    """Whether a key can take memory in a step, so that its default is worth showing."""
    return ZERO_KEYS[name] not in (_NONE, _SAVING, _UNKNOWN)


def _nothing(_scenario: Scenario, _budget: Budget) -> Explained:
    return Effect.NO_EFFECT, None, _("It changes how or when things are done, not how much memory they take.")


def _not_predicted(_scenario: Scenario, _budget: Budget) -> Explained:
    return Effect.NOT_PREDICTED, None, _("Its effect on memory is not predicted yet.")


@_at_stage_3
def _saving(_scenario: Scenario, _budget: Budget) -> Explained:
    return (
        Effect.NO_EFFECT,
        None,
        _("Nothing in a step; saving gathers 2 bytes per parameter into rank 0's host memory."),
    )


def _stage_rule(_scenario: Scenario, budget: Budget) -> Explained:
    return (
        Effect.ALLOCATED,
        budget.static.total_bytes,
        _("It decides which states are divided; the cost is what is left per GPU."),
    )


def _bucket_rule(scenario: Scenario, budget: Budget) -> Explained:
    cost = _largest(budget, "reduce_bucket")
    if not scenario.zero_config.contiguous_gradients and _stage_of(scenario):
        return Effect.CAP, cost, _("Without contiguous_gradients no buffer is made; it limits what is reduced at once.")
    if _stage_of(scenario) == 0:
        return Effect.CAP, cost, _("At stage 0 it limits what is flattened for one all-reduce.")
    if _stage_of(scenario) == 3:
        return (
            Effect.ALLOCATED,
            cost,
            _("A buffer of that many elements is made once and stays through the whole step."),
        )
    return Effect.ALLOCATED, cost, _("A buffer of that many elements is made at each backward, two with overlap_comm.")


def _overlap_rule(scenario: Scenario, budget: Budget) -> Explained:
    stage = _stage_of(scenario)
    if stage in (1, 2) and scenario.zero_config.overlap_comm:
        return Effect.ALLOCATED, _largest(budget, "reduce_bucket") // 2, _("It makes the bucket twice.")
    if stage == 1:
        return (
            Effect.NO_EFFECT,
            None,
            _("Off, gradients are reduced at the end of the backward only, all alive together until then."),
        )
    return Effect.NO_EFFECT, None, _("At this stage it makes no second bucket.")


def _contiguous_rule(scenario: Scenario, _budget: Budget) -> Explained:
    if _stage_of(scenario) == 0:
        return Effect.NO_EFFECT, None, _("Stage 0 has no contiguous gradients.")
    return Effect.ALLOCATED, None, _("On, gradients are copied into the bucket; its cost is the bucket's.")


def _allgather_rule(scenario: Scenario, _budget: Budget) -> Explained:
    if _stage_of(scenario) in (1, 2):
        return (
            Effect.CAP,
            None,
            _("It limits how much of the updated weights is gathered at once; the weights' own storage receives it."),
        )
    return Effect.NO_EFFECT, None, _("It is read at stages 1 and 2 only.")


@_at_stage_3
def _sub_group_rule(_scenario: Scenario, budget: Budget) -> Explained:
    why = _("The update goes that many elements at a time; the cost is their FP32 gradient.")
    return Effect.CAP, _largest(budget, "step_gradient_copies"), why


def _gather_rule(name: str) -> Rule:
    """A setting of the prefetcher: what it costs is what setting it to 0, and nothing else, would save."""

    @_at_stage_3
    def rule(_scenario: Scenario, budget: Budget) -> Explained:
        now = _largest(budget, "gathered_parameters")
        saved = now - _largest(with_zero(budget, {name: 0}), "gathered_parameters")
        if saved > 0:
            return Effect.CAP, saved, _("Setting it to 0, and nothing else, would save this much of what is gathered.")
        return Effect.CAP, 0, _("Lowering it alone saves nothing here: the other settings keep as much gathered.")

    return rule


@_at_stage_3
def _persistence_rule(_scenario: Scenario, budget: Budget) -> Explained:
    cost = _largest(budget, "persistent_parameters")
    return Effect.ALLOCATED, cost, _("Parameters of that size and below are never divided: every GPU holds them whole.")


@_at_stage_3
def _model_persistence_rule(_scenario: Scenario, _budget: Budget) -> Explained:
    return Effect.CAP, None, _("It limits how many elements may stay whole because of the persistence threshold.")


def _hpz_rule(scenario: Scenario, budget: Budget) -> Explained:
    cost = _largest(budget, "secondary_weights")
    if not cost:
        return Effect.NO_EFFECT, None, _("At 1, or below stage 3, there is no second copy of the weights.")
    return Effect.ALLOCATED, cost, _("A second copy of the weights, divided among that many GPUs.")


def _offload_rule(part: str) -> Rule:
    def rule(scenario: Scenario, budget: Budget) -> Explained:
        device = getattr(scenario.offload, part)
        if device.value == "none":
            return Effect.NO_EFFECT, None, _("Nothing is moved off the GPU.")
        states = budget.static.optimizer_bytes if part == "optimizer" else budget.static.weights_bytes
        why = _("Moved to {device}: it frees {size:.2f} GB per GPU.").format(device=device.value, size=states / 1e9)
        return Effect.ALLOCATED, 0, why

    return rule


_RULES: Mapping[str, Rule] = {
    _NONE: _nothing,
    _SAVING: _saving,
    _UNKNOWN: _not_predicted,
    "stage": _stage_rule,
    "bucket": _bucket_rule,
    "overlap": _overlap_rule,
    "contiguous": _contiguous_rule,
    "allgather": _allgather_rule,
    "sub_group": _sub_group_rule,
    "prefetch": _gather_rule("stage3_prefetch_bucket_size"),
    "live": _gather_rule("stage3_max_live_parameters"),
    "reuse": _gather_rule("stage3_max_reuse_distance"),
    "persistence": _persistence_rule,
    "model_persistence": _model_persistence_rule,
    "hpz": _hpz_rule,
    "offload_param": _offload_rule("parameters"),
    "offload_optimizer": _offload_rule("optimizer"),
}

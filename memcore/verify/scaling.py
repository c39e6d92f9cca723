"""A user's scenario, made small enough for this machine: its engine and settings on a small model of the same kind.

Settings in elements shrink with the model, so that they stand to it as before. Every reduction is said.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memcore.bench.slices import Slice, make_slice, room
from memcore.budget import Ask, Evidence, evidence_for, inventory_for
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.inventory import Inventory
from memcore.recipes import CONVENTIONS, ConventionName
from memcore.scenario import Device, Method, Scenario, parse_scenario, scenario_data
from memcore.verify.case import MAX_LOCAL_RANKS, Case

# Conventions of an engine that no run here has: it casts in FSDP's own policy or DeepSpeed's, never in FP16.
_NOT_RUN = {
    EngineName.FSDP2: (ConventionName.AMP_AUTOCAST,),
    EngineName.DEEPSPEED: (ConventionName.AMP_AUTOCAST,),
}
# These run for real in every engine; others keep tensors that are not torch's own.
_OPTIMIZERS = ("adam", "adamw", "sgd")
_MOST_LAYERS = 8
_IN_MODEL = (
    "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
)  # fmt: skip
_IN_WIDTH = "stage3_param_persistence_threshold"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """What a kind of device is given: parameters of a layer, words, and tokens."""

    layer_params: int
    words: int
    tokens: int


# With few tokens the engine's own terms are nearly all that there is.
_SMALL = {
    "cpu": _Room(layer_params=3_200_000, words=8192, tokens=16),
    "accelerator": _Room(layer_params=60_000_000, words=32_768, tokens=256),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """The case that runs, and what differs from the scenario asked for, as sentences."""

    case: Case
    reductions: tuple[str, ...]


def scale(scenario: Scenario, evidence: Evidence, ask: Ask, *, ranks: int, device: str) -> Scaled:
    """The scenario on `ranks` ranks of this machine's device. Raises UserError for what cannot be run here.

    `ask` counts the small model.
    """
    check_runnable(scenario, ranks, device)
    limits, whole = _SMALL["cpu" if device == "cpu" else "accelerator"], inventory_for(scenario.model, evidence)
    part = make_slice(
        scenario, evidence, device, dtype=CONVENTIONS[_convention(scenario)].compute_dtype.value,
        limits=replace(room(device), layer_params=limits.layer_params),
    )  # fmt: skip
    assert whole is not None, "a slice was made of it"
    layers = min(len(whole.layers), _MOST_LAYERS)
    config = part.config(layers, limits.tokens, min(whole.shapes.vocab_size, limits.words))
    data = _data(scenario, config, ranks, limits)
    small = inventory_for(parse_scenario(data).model, evidence_for(parse_scenario(data), ask))
    assert small is not None, "it has a config"
    _shrink_settings(data, scenario, small, whole)
    case = Case(name=engine_label(scenario), scenario=parse_scenario(data))
    return Scaled(case=case, reductions=tuple(_reductions(scenario, case, part, small, whole)))


def engine_label(scenario: Scenario) -> str:
    """The engine, with its stage where it has stages."""
    label = ENGINE_OPTIONS[scenario.parallelism.engine].label
    has_stages = bool(ENGINE_OPTIONS[scenario.parallelism.engine].stages)
    return f"{label} ZeRO-{scenario.parallelism.stage}" if has_stages else label


def crowding(ranks: int) -> str:
    """What fewer cores than ranks mean, as a sentence; empty where there are enough."""
    cores = os.cpu_count() or 1
    if cores >= ranks:
        return ""
    sentence = _("{ranks} ranks share {cores} cores: the run takes longer, its memory is the same.")
    return sentence.format(ranks=ranks, cores=cores)


def check_runnable(scenario: Scenario, ranks: int, device: str) -> None:
    """Raise UserError for what no real run here can show."""
    if not 1 <= ranks <= MAX_LOCAL_RANKS:
        sentence = _("{ranks} ranks cannot be run; from 1 to {most} can.")
        raise UserError(sentence.format(ranks=ranks, most=MAX_LOCAL_RANKS))
    if scenario.parallelism.engine is EngineName.LLM_C:
        raise UserError(_("llm.c is not run for proof."), "parallelism.engine")
    if scenario.recipe.method is not Method.FULL:
        raise UserError(_("Adapters are not run for proof yet; full training is."), "recipe.method")
    optimizer = scenario.recipe.optimizer
    if optimizer.name not in _OPTIMIZERS or optimizer.bits == 8 or optimizer.paged:
        sentence = _("No real run here has this optimizer; adam, adamw and sgd have one.")
        raise UserError(sentence, "recipe.optimizer.name")
    if optimizer.in_backward:
        raise UserError(_("A step in the backward is not run for proof yet."), "recipe.optimizer.in_backward")
    if scenario.workload.compile or scenario.workload.loss_compiled:
        raise UserError(_("What is compiled is not run for proof yet."), "workload.compile")
    if scenario.recipe.fp8 is not None:
        raise UserError(_("Products in float8 are not run for proof yet."), "recipe.fp8")
    parts = (scenario.offload.optimizer, scenario.offload.parameters)
    if device == "cpu" and (scenario.shards_on_host or any(part is not Device.NONE for part in parts)):
        raise UserError(_("Where the device is the CPU, offloading to it shows nothing."), "offload")


def _convention(scenario: Scenario) -> ConventionName:
    """The scenario's own, where a run of the engine has it and no dtype of it was changed; else the engine's."""
    recipe, engine = scenario.recipe, scenario.parallelism.engine
    options, left_out = ENGINE_OPTIONS[engine].conventions, (ConventionName.PURE_FP16, *_NOT_RUN.get(engine, ()))
    names = ("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype", "master_dtype", "state_dtype")
    is_own = all(getattr(recipe, name) is None for name in names)
    runs = is_own and recipe.convention in options and recipe.convention not in left_out
    return recipe.convention if runs else options[0]


def _data(scenario: Scenario, config: Mapping[str, Any], ranks: int, limits: _Room) -> dict[str, Any]:
    given = scenario_data(scenario)
    spread = scenario.parallelism
    parallelism: dict[str, Any] = {"engine": spread.engine.value}
    if spread.engine is EngineName.SINGLE and ranks > 1:
        raise UserError(_("Without an engine there is one rank."), "parallelism.engine")
    if ENGINE_OPTIONS[spread.engine].stages:
        parallelism["zero_stage"] = spread.stage
    if spread.engine is EngineName.FSDP2 and spread.dp_replicate > 1 and ranks % 2 == 0 and ranks > 2:
        parallelism |= {"dp_replicate": 2, "dp_shard": ranks // 2}
    work = scenario.workload
    return {
        **{name: part for name, part in given.items() if name == "engine_config"},
        "recipe": {
            "convention": _convention(scenario).value,
            "optimizer": scenario.recipe.optimizer.model_dump(mode="json", exclude_defaults=True)
            | {"name": scenario.recipe.optimizer.name.value},
        },
        "model": {"config": config},
        "hardware": {"gpus": ranks},
        "parallelism": parallelism,
        "workload": {
            "micro_batch": 1,
            "seq_len": limits.tokens,
            "grad_accum": min(work.grad_accum, 2),
            "checkpointing": "none" if work.checkpointing == "none" else "full",
        },
    }


def _shrink_settings(data: dict[str, Any], scenario: Scenario, small: Inventory, whole: Inventory) -> None:
    """DeepSpeed's settings in elements, in proportion to the model; the persistence threshold, for vectors, to its
    width."""
    if scenario.parallelism.engine is not EngineName.DEEPSPEED:
        return
    zero = scenario.zero_config.model_dump(mode="json", exclude_none=True)
    for name in _IN_MODEL:
        zero[name] = max(zero[name] * small.n_params // whole.n_params, min(zero[name], 1))
    zero[_IN_WIDTH] = zero[_IN_WIDTH] * small.shapes.hidden_size // whole.shapes.hidden_size
    zero["zero_hpz_partition_size"] = 1
    data["engine_config"] = {"zero_optimization": zero}


def _reductions(
    scenario: Scenario, case: Case, part: Slice, small: Inventory, whole: Inventory
) -> list[str]:  # fmt: skip
    found = part.width_reductions()
    sentence = _("{small:,} parameters in {few} layers and {words:,} words instead of {whole:,}, {layers} and {all:,}.")
    numbers = {"small": small.n_params, "few": len(small.layers), "words": small.shapes.vocab_size}
    rest = {"whole": whole.n_params, "layers": len(whole.layers), "all": whole.shapes.vocab_size}
    found.append(sentence.format(**numbers, **rest))
    ran, asked = case.scenario, scenario
    sentence = _(
        "{ranks} ranks instead of {gpus}, one sequence of {tokens} tokens each: the engine's terms stand alone."
    )
    found.append(sentence.format(ranks=case.ranks, gpus=asked.hardware.gpus, tokens=ran.workload.seq_len))
    if asked.model.experts == "separate":
        found.append(_("The experts are stacked, as the installed transformers has them, instead of separate."))
    if asked.parallelism.engine is EngineName.DEEPSPEED:
        found.append(_("DeepSpeed's settings in elements are smaller in the same proportion as the model."))
    if (convention := _convention(asked)) is not asked.recipe.convention:
        sentence = _("The dtypes of {ran} instead of {asked}, which no run of this engine here has.")
        labels = {"ran": CONVENTIONS[convention].label, "asked": CONVENTIONS[asked.recipe.convention].label}
        found.append(sentence.format(**labels))
    if ran.workload.checkpointing != asked.workload.checkpointing:
        found.append(_("Every layer is recomputed, instead of {kind}.").format(kind=asked.workload.checkpointing))
    if ran.workload.grad_accum != asked.workload.grad_accum:
        sentence = _("{ran} micro-steps instead of {asked}.")
        found.append(sentence.format(ran=ran.workload.grad_accum, asked=asked.workload.grad_accum))
    if ran.parallelism.dp_replicate != asked.parallelism.dp_replicate and asked.parallelism.engine is EngineName.FSDP2:
        sentence = _("{ran} groups that hold the same instead of {asked}.")
        found.append(sentence.format(ran=ran.parallelism.dp_replicate, asked=asked.parallelism.dp_replicate))
    return found

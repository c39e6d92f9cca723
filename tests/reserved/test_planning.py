"""Every term of a budget has its place in what the allocator is asked for, whatever the engine.

Run: pytest tests/reserved/test_planning.py (two minutes).
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from worker import ask

import memcore.engines
from memcore.allocator import reservation_plan
from memcore.allocator.planning import has_traced_gradients, is_traced
from memcore.budget import Budget, evidence_for, predict
from memcore.engines import Inputs
from memcore.scenario import parse_scenario
from memcore.terms import Category, EvidenceKind, Phase
from memcore.verify.matrix import MODEL

Options = dict[str, Any]
# A budget adds up what is at its fullest at other instants of a moment.
LOWEST, HIGHEST = 0.995, 1.05
FSDP1: dict[str, Options] = {
    "": {},
    "flat parameters": {"use_orig_params": False},
    "offload": {"cpu_offload": True},
    "kept": {"reshard_after_forward": False},
    "post": {"backward_prefetch": "post"},
}
ADAPTERS: dict[str, Options] = {"lora": {"method": "lora"}, "qlora": {"method": "qlora", "quantization": "nf4"}}
OPTIMIZERS: tuple[Options, ...] = (
    {"name": "adamw", "bits": 8},
    {"name": "adamw", "bits": 8, "paged": True},
    {"name": "adamw", "implementation": "for_loop"},
    {"name": "sgd"},
    {"name": "adafactor"},
)


def of_torch() -> Iterator[tuple[str, Options]]:
    for name, ranks, engine in (("single", 1, {}), ("ddp", 2, {}), ("ddp", 2, {"gradient_as_bucket_view": True})):
        data = {"parallelism": {"engine": name}, "ranks": ranks, "engine_config": engine}
        for convention in ("fp32", "amp_autocast"):
            yield f"{name} {convention} {engine}", {**data, "recipe": {"convention": convention}}
        for method, recipe in ADAPTERS.items():
            yield f"{name} {method} {engine}", {**data, "recipe": recipe}
    wide = {"convention": "pure_bf16", "grad_dtype": "fp32"}
    yield "single, wide gradients", {"parallelism": {"engine": "single"}, "ranks": 1, "recipe": wide}
    segments = {"checkpointing": "segments(2)"}
    yield "single, segments", {"parallelism": {"engine": "single"}, "ranks": 1, "workload": segments}
    for optimizer in OPTIMIZERS:
        recipe = {"convention": "zero_paper", "optimizer": optimizer}
        yield f"single {optimizer}", {"parallelism": {"engine": "single"}, "ranks": 1, "recipe": recipe}


def of_fsdp() -> Iterator[tuple[str, Options]]:
    one: Options = {"parallelism": {"engine": "fsdp1"}}
    for convention in ("fsdp2_mixed", "pure_bf16"):
        for name, config in FSDP1.items():
            yield f"fsdp1 {convention} {name}", {**one, "recipe": {"convention": convention}, "engine_config": config}
        for config in ({}, {"cpu_offload": True}, {"reshard_after_forward": False}):
            data = {"recipe": {"convention": convention}, "engine_config": config}
            yield f"fsdp2 {convention} {config}", {"parallelism": {"engine": "fsdp2"}, **data}
    for place in ("apart", "ignored"):
        for method, recipe in ADAPTERS.items():
            for offload in (False, True):
                config = {"adapters": place, "cpu_offload": offload}
                yield f"fsdp1 {method} {config}", {**one, "recipe": recipe, "engine_config": config}
    yield "hsdp", {"parallelism": {"engine": "fsdp2", "dp_shard": 2, "dp_replicate": 2}, "ranks": 4}


def of_deepspeed() -> Iterator[tuple[str, Options]]:
    for stage in range(4):
        data: Options = {"parallelism": {"engine": "deepspeed", "zero_stage": stage}}
        # A number of ranks that divides no tensor: slices are padded.
        yield f"zero-{stage}, 3 ranks", {**data, "ranks": 3}
        for overlap in (False, True):
            zero = {"overlap_comm": overlap, "reduce_bucket_size": 1_000_000}
            yield f"zero-{stage} {zero}", {**data, "engine_config": {"zero_optimization": zero}}
        for method, recipe in ADAPTERS.items():
            yield f"zero-{stage} {method}", {**data, "recipe": recipe}
        if stage:
            yield f"zero-{stage}, FP32 accumulation", {**data, "recipe": {"convention": "deepspeed_fp32_grad"}}
            yield f"zero-{stage}, offload", {**data, "offload": {"optimizer": "cpu"}}
        yield f"zero-{stage}, segments", {**data, "workload": {"checkpointing": "segments(2)"}}
    hpz = {"zero_optimization": {"zero_hpz_partition_size": 2}}
    yield "hpz", {"parallelism": {"engine": "deepspeed", "zero_stage": 3}, "ranks": 4, "engine_config": hpz}


def cases() -> Iterator[tuple[str, Options]]:
    """Each once, and over several micro-steps."""
    for name, data in (*of_torch(), *of_fsdp(), *of_deepspeed()):
        yield name, data
        yield f"{name}, 4 micro-steps", {**data, "workload": {**data.get("workload", {}), "grad_accum": 4}}
    for name, config in (("", {}), (", flat parameters", {"use_orig_params": False})):
        waits = {"engine_config": {**config, "no_sync": True}, "workload": {"grad_accum": 4}}
        for convention in ("fsdp2_mixed", "fp32"):
            data = {"parallelism": {"engine": "fsdp1"}, "recipe": {"convention": convention}, **waits}
            yield f"fsdp1 {convention}, no_sync{name}", data
    stepped = {"optimizer": {"name": "adamw", "in_backward": True}}
    yield "single, a step in the backward", {"parallelism": {"engine": "single"}, "ranks": 1, "recipe": stepped}


CASES = dict(cases())


@cache
def budget_of(name: str) -> Budget:
    data: Mapping[str, Any] = CASES[name]
    ranks = data.get("ranks", 2)
    scenario = parse_scenario(
        {
            "model": {"config": {**MODEL, "num_hidden_layers": 5}},
            "hardware": {"gpu": "A100-80GB", "gpus": ranks, "gpus_per_node": ranks},
            **{key: value for key, value in data.items() if key != "ranks" and value},
            "workload": {"micro_batch": 1, "seq_len": 16, **data.get("workload", {})},
        }
    )
    return predict(scenario, evidence_for(scenario, ask, traced=True))


@pytest.mark.parametrize("name", CASES)
class TestAPlan:
    def test_the_allocator_holds_what_tensors_take(self, name: str):
        budget = budget_of(name)
        assert budget.evidence.reservation is not None, budget.evidence.untraced
        allocated, reserved = budget.evidence.reservation.allocated, budget.evidence.reservation.reserved
        assert LOWEST <= allocated / budget.peak_bytes <= HIGHEST
        assert reserved >= budget.ladder.allocated
        assert budget.ladder.reserved == reserved

    def test_each_term_is_placed_once(self, name: str):
        """At each moment what is placed beside the trace's storages is the sum of the terms that are none of them."""
        budget = budget_of(name)
        plan, profile = budget.evidence.plan, budget.evidence.profile
        assert plan is not None
        assert profile is not None
        always = sum(plan.resident) + sum(plan.states) + sum(plan.workspaces) + sum(unit[0] for unit in plan.wrapped)
        for index, moment in enumerate(budget.timeline):
            placed = always + sum(level.get(moment.label, 0) for level in plan.levels)
            placed += sum(plan.update) if moment.phase is Phase.OPTIMIZER and moment.segment is None else 0
            beside = [term for term in budget.terms if not is_traced(term, gradients_traced=plan.gradients_traced)]
            assert placed == sum(term.at(index) for term in beside), moment.label

    def test_only_the_traces_own_are_left_to_it(self, name: str):
        budget = budget_of(name)
        plan = budget.evidence.plan
        assert plan is not None
        left = [term for term in budget.terms if is_traced(term, gradients_traced=plan.gradients_traced)]
        own = [term for term in left if term.evidence is not EvidenceKind.TRACE]
        assert {term.name for term in own} <= {"gradients", "newest_gradient"}


def test_the_cases_have_the_terms_of_all_engines():
    """Every name of a term in the engines' files is one of some case's."""
    folder = Path(memcore.engines.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    named = set(re.findall(r'(?:\bname=|\bterm\(\s*|\bpart_term\(\s*)"([a-z0-9_]+)"', text))
    named |= set(re.findall(r'"([a-z0-9_]+_temporary)"', text))
    assert {"unsharded_gradients", "newest_slice", "gathered_parameters", "slice_padding"} <= named
    # A term of the engine's start, which is no moment of a step.
    assert named - {term.name for name in CASES for term in budget_of(name).terms} == {"start_peak"}


def test_a_term_of_an_unknown_name_has_a_place():
    """Of gradients too: what the trace has is told by its evidence, not by what others are called."""
    budget = budget_of("single fp32 {}")
    inputs = Inputs(
        scenario=budget.scenario, states=budget.states, inventory=budget.inventory, timeline=budget.timeline
    )  # fmt: skip
    gradients = next(term for term in budget.terms if term.category is Category.GRADIENTS)
    strange = type(gradients)(
        name="strange",
        category=Category.GRADIENTS,
        bytes_at=gradients.bytes_at,
        formula=gradients.formula,
        source="",
    )
    assert has_traced_gradients(inputs, budget.terms, 4)
    assert not has_traced_gradients(inputs, budget.terms, 2)
    plan = reservation_plan(inputs, (*budget.terms, strange), budget.device, 10**11, 4)
    assert not plan.gradients_traced
    assert [max(level.values()) for level in plan.levels].count(gradients.largest) == 2

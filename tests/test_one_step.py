"""One step as charts show it: nothing lost, and the layers that are whole are those that the engine pays for.

Run: pytest tests/test_one_step.py
"""

from typing import Any

import pytest
from generated_scenarios import scenarios
from hypothesis import given, settings

from memcore.budget import Budget, predict
from memcore.errors import UserError
from memcore.explain import TERM_LABELS
from memcore.models import catalogue_inventory
from memcore.one_step import StepPart, WholeLayers, step_parts, whole_layers
from memcore.scenario import Scenario, parse_scenario
from memcore.terms import Phase

LLAMA = "meta-llama/Llama-3.1-8B"
LAYER, TABLE = 218_112_000, 128_256 * 4096


def of(engine: str, stage: int | None = None, model: str = LLAMA, **parts: Any) -> Budget:
    parallelism: dict[str, Any] = {"engine": engine} | ({} if stage is None else {"zero_stage": stage})
    gpus = 1 if engine == "single" else 8
    return predict(
        parse_scenario({"model": {"name": model}, "hardware": {"gpus": gpus}, "parallelism": parallelism, **parts})
    )


@settings(max_examples=60, deadline=None)
@given(scenario=scenarios(configs=False))
def test_the_parts_add_up_to_the_budget(scenario: Scenario):
    try:
        budget = predict(scenario)
    except UserError:  # adapters on modules that the model does not have
        return
    assert [sum(each) for each in zip(*step_parts(budget).values(), strict=True)] == list(budget.totals)


@pytest.mark.parametrize(
    ("engine", "stage", "parts"),
    [
        ("single", None, "weights optimizer gradients transients activations"),
        ("ddp", None, "weights optimizer gradients buckets transients activations"),
        ("fsdp1", None, "weights optimizer gradients gathered transients activations"),
        ("fsdp2", None, "weights optimizer gradients gathered transients activations"),
        ("deepspeed", 0, "weights optimizer gradients buckets transients activations"),
        ("deepspeed", 1, "weights optimizer gradients buckets transients activations"),
        ("deepspeed", 2, "weights optimizer gradients buckets transients activations"),
        ("deepspeed", 3, "weights optimizer gradients gathered buckets transients activations"),
    ],
)
def test_each_engine_shows_what_it_has(engine: str, stage: int | None, parts: str):
    assert [part.value for part in step_parts(of(engine, stage))] == parts.split()


def test_states_stay_and_transients_do_not():
    budget = of("deepspeed", 3)
    parts = step_parts(budget)
    assert len(set(parts[StepPart.WEIGHTS])) == len(set(parts[StepPart.OPTIMIZER])) == 1
    assert parts[StepPart.TRANSIENTS][0] == parts[StepPart.TRANSIENTS][-1] == 0
    update = next(i for i, moment in enumerate(budget.timeline) if moment.label == "optimizer")
    assert parts[StepPart.TRANSIENTS][update] > 0
    assert "reduce_bucket" in TERM_LABELS


def held(budget: Budget, found: WholeLayers) -> list[int]:
    """Elements of what is whole at each moment."""
    inventory = budget.inventory
    assert inventory is not None
    sizes = [block.numel for block in inventory.blocks]
    return [
        round(sum(share * size for share, size in zip(moment, sizes, strict=True)))
        for moment in zip(*found.shares, strict=True)
    ]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("zero", [{}, {"stage3_max_live_parameters": LAYER, "stage3_max_reuse_distance": 0}])
def test_zero_3_pays_for_the_layers_that_are_whole(zero: dict[str, int], checkpointing: str):
    """2 bytes per element that is gathered: to the byte at the turn, and at any other moment no more than what comes
    and goes during it, a layer and a table."""
    budget = of("deepspeed", 3, engine_config={"zero_optimization": zero}, workload={"checkpointing": checkpointing})
    found = whole_layers(budget)
    assert found is not None
    gathered = next(term for term in budget.terms if term.name == "gathered_parameters")
    for index, elements in enumerate(held(budget, found)):
        comes_and_goes = 0 if budget.timeline[index].phase is Phase.LOSS else LAYER + TABLE
        assert 0 <= elements - gathered.at(index) // 2 <= comes_and_goes


@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp2_pays_for_the_layers_that_are_whole_and_for_copies(reshards: bool):
    """Beside them, in the forward, the flat outputs that a layer and the one before it, or the root, were copied out
    of; at the backward's end the root's parameters while the first layer's gradients are reduced."""
    budget = of("fsdp2", engine_config={"reshard_after_forward": reshards})
    found = whole_layers(budget)
    assert found is not None
    assert budget.inventory is not None
    root = sum(block.numel for block in budget.inventory.blocks if block.layer is None)
    gathered = next(term for term in budget.terms if term.name == "gathered_parameters")
    for index, elements in enumerate(held(budget, found)):
        moment = budget.timeline[index]
        copies = LAYER + (LAYER if moment.segment else root) if moment.phase is Phase.FORWARD else 0
        assert gathered.at(index) // 2 - elements == copies, moment


def test_layers_slide():
    """With little kept, layer i is whole around its own forward and backward and not in the middle of the others'."""
    for budget in (
        of("fsdp2"),
        of("deepspeed", 3, engine_config={"zero_optimization": {
            "stage3_max_live_parameters": LAYER, "stage3_max_reuse_distance": 0}}),
    ):  # fmt: skip
        found = whole_layers(budget)
        assert found is not None
        for layer in (0, 10, 31):
            row = found.shares[found.names.index(str(layer))]
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                at = {m.segment: row[i] for i, m in enumerate(budget.timeline) if m.phase is phase}
                assert at[layer] > 0
                assert at[(layer + 16) % 32] == 0


def test_names_are_the_models_own():
    inventory = catalogue_inventory(LLAMA)
    found = whole_layers(of("deepspeed", 3))
    assert inventory is not None
    assert found is not None
    assert found.names == ("model.embed_tokens", *map(str, range(32)), "model.norm", "lm_head")


@pytest.mark.parametrize(("engine", "stage"), [("single", None), ("ddp", None), ("deepspeed", 0), ("deepspeed", 2)])
def test_nothing_is_gathered(engine: str, stage: int | None):
    assert whole_layers(of(engine, stage)) is None


def test_a_bare_count_has_no_layers():
    budget = predict(
        parse_scenario({"model": {"n_params": "7b"}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": 3}})
    )
    assert whole_layers(budget) is None
    assert StepPart.ACTIVATIONS in step_parts(budget)  # cuBLAS's workspace alone

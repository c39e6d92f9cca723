"""What an engine's own convention is; what an engine does not have is said; without a name it is the ZeRO paper's.

Run: pytest tests/test_own_convention.py. Bytes of a parameter with AdamW: torch 2.13, amp/autocast_mode.py and
distributed/fsdp/_fully_shard/_fsdp_api.py (FP32 parameters, gradients and states: 4 + 4 + 8); ZeRO, arXiv 1910.02054,
section 3.1 (2 + 2 + 12); peft loads the frozen base in 16 bit and keeps adapters in FP32.
"""

from typing import Any

import pytest
from test_link import read_data

from memcore.budget import predict
from memcore.engine_options import EngineName
from memcore.link import read_link, write_link
from memcore.notices import NoticeKind, notices
from memcore.scenario import Scenario, parse_scenario, scenario_data
from memcore.ui.plan.whole import scenario_from, widget_values
from memcore.units import GB, ByteUnit

LLAMA = {"name": "meta-llama/Llama-3.1-8B"}
PSI = 8_030_261_248
# llm.c trains GPT-2 alone.
ANY_MODELS = [engine.value for engine in EngineName if engine is not EngineName.LLM_C]
STAGE_2 = {"engine": "deepspeed", "zero_stage": 2}


def on(engine: str, **recipe: Any) -> Scenario:
    gpus = 1 if engine == "single" else 8
    recipe = {"convention": "engine"} | recipe
    parts = {"hardware": {"gpus": gpus}, "parallelism": {"engine": engine}, "recipe": recipe}
    return parse_scenario({"model": LLAMA, **parts})


def said(scenario: Scenario) -> list[str]:
    found = notices(predict(scenario), ByteUnit.GB)
    return [notice.text for notice in found if notice.kind is NoticeKind.CONVENTION]


@pytest.mark.parametrize(
    ("engine", "convention", "weights", "gradients", "optimizer"),
    [
        ("single", "amp_autocast", 4, 4, 8),
        ("ddp", "amp_autocast", 4, 4, 8),
        ("fsdp1", "fsdp2_mixed", 4, 4, 8),
        ("fsdp2", "fsdp2_mixed", 4, 4, 8),
        ("deepspeed", "zero_paper", 2, 2, 12),
    ],
)
def test_the_engines_own_convention(engine: str, convention: str, weights: int, gradients: int, optimizer: int):
    scenario = on(engine)
    assert scenario.recipe.convention == convention
    static = predict(scenario).static
    ranks = 8 if engine.startswith("fsdp") else 1
    assert static.weights_bytes == weights * PSI // ranks
    assert (static.gradients_bytes, static.optimizer_bytes) == (gradients * PSI // ranks, optimizer * PSI // ranks)
    assert said(scenario) == []


@pytest.mark.parametrize("engine", ANY_MODELS)
def test_a_base_under_adapters_is_loaded_in_16_bit(engine: str):
    scenario = on(engine, method="lora")
    (frozen,) = [state for state in predict(scenario).states.states if state.name == "frozen_weights"]
    assert frozen.total_bytes == 2 * PSI
    assert said(scenario) == []


@pytest.mark.parametrize("engine", ANY_MODELS)
def test_a_bare_count_is_the_papers_question(engine: str):
    data = {"model": {"n_params": "7b"}, "parallelism": {"engine": engine}, "recipe": {"convention": "engine"}}
    static = predict(parse_scenario(data)).static
    sizes = (static.weights_bytes, static.gradients_bytes, static.optimizer_bytes)
    assert sizes == (14 * GB, 14 * GB, 84 * GB)
    assert said(parse_scenario(data)) == []


@pytest.mark.parametrize(
    ("engine", "convention"), [("single", "pure_bf16"), ("ddp", "pure_bf16"), ("fsdp2", "fsdp2_mixed")]
)
def test_products_in_float8_take_bf16_weights(engine: str, convention: str):
    """Beside autocast they are not predicted; FSDP2 gathers FP32 shards for them as for others."""
    assert on(engine, fp8="rowwise").recipe.convention == convention
    assert edited(on(engine), w_recipe_fp8="rowwise").recipe == on(engine, fp8="rowwise").recipe


@pytest.mark.parametrize("convention", ["zero_paper", "pure_bf16", "megatron", "fp32"])
def test_a_convention_that_is_named_wins(convention: str):
    assert on("fsdp2", convention=convention).recipe.convention == convention


@pytest.mark.parametrize(
    ("engine", "convention", "own"),
    [
        ("single", "fsdp2_mixed", "amp_autocast"),
        ("single", "zero_paper", "amp_autocast"),
        ("ddp", "megatron", "amp_autocast"),
        ("fsdp1", "zero_paper", "fsdp2_mixed"),
        ("fsdp2", "zero_paper", "fsdp2_mixed"),
        ("fsdp2", "megatron", "fsdp2_mixed"),
        ("deepspeed", "fsdp2_mixed", "zero_paper"),
        ("deepspeed", "megatron", "zero_paper"),
    ],
)
def test_a_convention_that_no_loop_of_the_engine_has_is_said_with_the_engines_own(
    engine: str, convention: str, own: str
):
    (sentence,) = said(on(engine, convention=convention))
    assert convention in sentence
    assert f"its own is {own}" in sentence


@pytest.mark.parametrize(
    ("engine", "convention"),
    [("single", "pure_bf16"), ("ddp", "fp32"), ("fsdp2", "pure_bf16"), ("deepspeed", "amp_autocast")],
)
def test_other_conventions_of_an_engine_are_no_matter(engine: str, convention: str):
    assert said(on(engine, convention=convention)) == []


@pytest.mark.parametrize("engine", ANY_MODELS)
def test_data_and_link_name_the_convention(engine: str):
    scenario = on(engine)
    assert scenario_data(scenario)["recipe"]["convention"] == scenario.recipe.convention
    assert read_link(write_link(scenario)).scenario == scenario


@pytest.mark.parametrize("engine", ANY_MODELS)
def test_without_a_name_it_is_the_papers(engine: str):
    data = scenario_data(on(engine))
    del data["recipe"]
    read = read_data(data)
    assert read.ignored == ()
    assert read.scenario == parse_scenario(data) == on(engine, convention="zero_paper")


def edited(base: Scenario, **changes: Any) -> Scenario:
    """What becomes of a scenario when these widgets are changed."""
    return parse_scenario(scenario_from(widget_values(base) | changes, scenario_data(base)))


@pytest.mark.parametrize("engine", ANY_MODELS)
def test_an_engine_that_is_chosen_brings_its_own_convention(engine: str):
    base = parse_scenario({"model": LLAMA, "hardware": {"gpus": 8}, "parallelism": STAGE_2})
    assert edited(base, w_engine=engine).recipe == on(engine).recipe


def test_a_convention_that_was_chosen_stays_with_another_engine():
    base = parse_scenario({"model": LLAMA, "hardware": {"gpus": 8}, "parallelism": STAGE_2})
    assert edited(base, w_convention="zero_paper", w_engine="fsdp2").recipe.convention == "zero_paper"
    assert edited(on("fsdp2", convention="zero_paper"), w_engine="ddp").recipe.convention == "zero_paper"


def test_a_name_without_shapes_in_the_sidebar_is_a_bare_count():
    base = parse_scenario({"model": {"name": "ZeRO paper 7.5B"}, "hardware": {"gpus": 8}, "parallelism": STAGE_2})
    assert edited(base, w_engine="fsdp2").recipe.convention == "zero_paper"

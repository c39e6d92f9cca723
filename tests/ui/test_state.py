"""The sidebar's widgets and the scenario stand for each other: nothing is lost on the way, nothing is left behind.

Run: pytest tests/ui/test_state.py. No browser and no Streamlit session: these are the two functions between a
scenario and the widgets' values.
"""

import json
from typing import Any

import pytest
from generated_scenarios import TINY_LLAMA, scenarios
from hypothesis import given
from streamlit.testing.v1 import AppTest

from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.link import read_link, write_link
from memcore.scenario import Scenario, parse_scenario, scenario_data
from memcore.ui.plan.whole import scenario_from, widget_values
from memcore.ui.state import DEFAULT_SCENARIO


def canonical(scenario: Scenario) -> Scenario:
    """The scenario without settings that say what holds anyway: an engine's defaults, a ds_config's stage, which
    parallelism has, and its overlap_comm false."""
    data = scenario_data(scenario)
    if scenario.parallelism.engine is not EngineName.DEEPSPEED:
        return parse_scenario({name: part for name, part in data.items() if part != {}})
    zero = data.get("engine_config", {}).get("zero_optimization", {})
    zero.pop("stage", None)
    if scenario.parallelism.stage in (1, 2) and not zero.get("overlap_comm"):
        zero.pop("overlap_comm", None)
    if not zero:
        data.pop("engine_config", None)
    return parse_scenario(data)


def edited(base: dict[str, Any], **changes: Any) -> Scenario:
    """What becomes of a scenario when these widgets are changed."""
    scenario = parse_scenario(base)
    return parse_scenario(scenario_from(widget_values(scenario) | changes, scenario_data(scenario)))


@given(scenario=scenarios())
def test_widgets_give_back_the_scenario_that_set_them(scenario: Scenario):
    given_back = parse_scenario(scenario_from(widget_values(scenario), scenario_data(scenario)))
    assert given_back == canonical(scenario)


@given(scenario=scenarios())
def test_reading_the_widgets_twice_changes_nothing_more(scenario: Scenario):
    once = parse_scenario(scenario_from(widget_values(scenario), scenario_data(scenario)))
    assert parse_scenario(scenario_from(widget_values(once), scenario_data(once))) == once


@pytest.mark.parametrize(
    "loss",
    [
        {"logits_upcast": "model", "shifted_copy": True, "logits_retained": True},
        {"loss": "chunked", "loss_chunks": 9, "logits_upcast": "none"},
        {"loss": "fused", "logits_upcast": "loss", "shifted_copy": True},
    ],
)
def test_a_loss_comes_back_from_widgets_and_link(loss: dict[str, Any]):
    scenario = parse_scenario({**DEFAULT_SCENARIO, "workload": loss})
    assert parse_scenario(scenario_from(widget_values(scenario), scenario_data(scenario))) == scenario
    assert read_link(write_link(scenario)).scenario == scenario
    assert scenario_data(scenario)["workload"] == loss


def test_another_loss_leaves_nothing_behind_that_it_cannot_have():
    base = {**DEFAULT_SCENARIO, "workload": {"loss": "chunked", "loss_chunks": 9, "logits_upcast": "model"}}
    assert scenario_data(edited(base, w_loss="fused"))["workload"] == {"loss": "fused"}


def test_the_default_scenario_is_valid():
    assert parse_scenario(DEFAULT_SCENARIO).parallelism.engine is EngineName.DEEPSPEED


def test_gpus_per_node_below_eight_are_kept():
    base = {"model": {"n_params": 10**9}, "hardware": {"gpus": 4, "gpus_per_node": 2}}
    assert edited(base).hardware.gpus_per_node == 2


def test_more_gpus_fill_nodes_of_eight():
    assert edited({"model": {"n_params": 10**9}, "hardware": {"gpus": 4}}, w_gpus=32).hardware.gpus_per_node == 8


def test_the_adapters_dtype_is_kept_when_the_rank_is_changed():
    base = {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "recipe": {"method": "lora", "lora": {"adapter_dtype": "bf16"}},
    }
    lora = edited(base, w_rank=8).recipe.lora
    assert lora is not None
    assert (lora.adapter_dtype, lora.rank) == ("bf16", 8)


def test_explicit_dtypes_are_kept_when_the_convention_is_changed():
    base = {"model": {"n_params": 10**9}, "recipe": {"grad_dtype": "fp32"}}
    recipe = edited(base, w_convention="pure_bf16").recipe
    assert (recipe.convention, recipe.grad_dtype) == ("pure_bf16", "fp32")


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp1", "fsdp2"])
def test_an_engine_without_stages_drops_what_is_deepspeeds(engine: str):
    base = {
        "model": {"n_params": 10**9},
        "hardware": {"gpus": 8},
        "parallelism": {"zero_stage": 3},
        "engine_config": {"zero_optimization": {"zero_hpz_partition_size": 2, "sub_group_size": 7}},
        "offload": {"optimizer": "cpu", "parameters": "nvme"},
    }
    data = scenario_data(edited(base, w_engine=engine))
    assert "engine_config" not in data
    assert "offload" not in data
    assert "zero_stage" not in data.get("parallelism", {})


def test_a_lower_stage_drops_what_is_stage_threes():
    base = {
        "model": {"n_params": 10**9},
        "hardware": {"gpus": 8},
        "parallelism": {"zero_stage": 3},
        "engine_config": {"zero_optimization": {"zero_hpz_partition_size": 2, "sub_group_size": 7}},
    }
    zero = edited(base, w_stage=2).zero_config
    assert (zero.zero_hpz_partition_size, zero.sub_group_size) == (1, 7)


def test_another_engine_than_fsdp2_drops_the_replicas():
    base = {
        "model": {"n_params": 10**9},
        "hardware": {"gpus": 8},
        "parallelism": {"engine": "fsdp2", "dp_replicate": 2},
    }
    assert edited(base, w_engine="deepspeed", w_stage=1).parallelism.dp_shard == 8


def test_a_model_keeps_what_was_said_of_its_experts_and_another_does_not():
    base = {"model": {"name": "mistralai/Mixtral-8x7B-v0.1", "experts": "separate"}}
    assert edited(base, w_rank=8).model.experts == "separate"
    assert edited(base, w_name="openai-community/gpt2").model.experts == "stacked"


def test_full_training_drops_the_adapters_and_the_quantisation():
    base = {
        "model": {"name": "openai-community/gpt2"},
        "recipe": {"method": "qlora", "lora": {"rank": 4}, "quantization": "gptq_int4", "quant_group_size": -1},
    }
    recipe = edited(base, w_method="full").recipe
    assert (recipe.lora, recipe.quantization, recipe.quant_group_size) == (None, None, None)
    assert edited(base, w_rank=8).recipe.quant_group_size == -1
    assert edited(base, w_quantization="nf4").recipe.quant_group_size is None


def test_an_optimizer_that_is_not_torchs_drops_the_implementation():
    base = {"model": {"n_params": 10**9}, "recipe": {"optimizer": {"name": "adamw", "implementation": "fused"}}}
    assert edited(base, w_optimizer="lion").recipe.optimizer.implementation is None


@pytest.mark.parametrize(("text", "said"), [("", "No config is given yet"), ("  \n", "No config"), ("{", "not JSON")])
def test_a_config_text_that_is_no_config_is_refused_at_its_field(text: str, said: str):
    with pytest.raises(UserError, match=said) as refused:
        edited(DEFAULT_SCENARIO, w_source="config", w_config=text)
    assert refused.value.field == "model.config"


def test_a_pasted_config_becomes_the_model():
    model = edited(DEFAULT_SCENARIO, w_source="config", w_config=json.dumps(TINY_LLAMA)).model
    assert model.config == TINY_LLAMA
    assert model.name is None


def session() -> None:
    """A session that is given a scenario, then widgets to change, and keeps what it has then."""
    import streamlit as st

    from memcore.ui import state

    state.start()
    if given := st.session_state.pop("given", None):
        state.adopt(given)
    st.session_state.update(st.session_state.pop("change", {}))
    state.keep(state.edited())


@pytest.mark.parametrize("other", ["single", "ddp", "fsdp1", "fsdp2"])
def test_an_engine_that_is_chosen_again_has_the_settings_that_it_had(other: str):
    """Those of a ds_config that was applied too, which no widget shows."""
    zero = {"stage3_model_persistence_threshold": 12_345, "sub_group_size": 10**6, "zero_hpz_partition_size": 4}
    data = {**DEFAULT_SCENARIO, "parallelism": {"zero_stage": 3}, "engine_config": {"zero_optimization": zero}}
    given = parse_scenario(data)
    at = AppTest.from_function(session, default_timeout=30)
    at.session_state["given"] = given
    at.run()
    for engine in (other, "deepspeed"):
        at.session_state["change"] = {"w_engine": engine}
        at.run()
        assert not at.exception
        assert at.session_state["scenario"].parallelism.engine == engine
    assert at.session_state["scenario"] == given


def test_another_scenario_has_none_of_the_settings_of_the_one_before():
    zero = {"stage3_model_persistence_threshold": 12_345}
    data = {**DEFAULT_SCENARIO, "parallelism": {"zero_stage": 3}, "engine_config": {"zero_optimization": zero}}
    at = AppTest.from_function(session, default_timeout=30)
    for each in (data, {**DEFAULT_SCENARIO, "parallelism": {"engine": "fsdp2"}}):
        at.session_state["given"] = parse_scenario(each)
        at.run()
    at.session_state["change"] = {"w_engine": "deepspeed"}
    at.run()
    assert at.session_state["scenario"].engine_config is None

"""Each field of a scenario can be set in the sidebar, shown where it means something; the few that cannot are named.

Run: pytest tests/ui/test_plan_fields.py. The fields are found in the models themselves, so that a new one fails here
until it has a widget, or a reason why not.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from streamlit.testing.v1 import AppTest

from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.link import read_link, write_link
from memcore.recipes import DType
from memcore.scenario import Loss, Method, Quantization, Scenario, parse_scenario, scenario_data
from memcore.scenario.engine_configs import ENGINE_CONFIGS
from memcore.ui.plan.field import PlanField
from memcore.ui.plan.whole import FIELDS, scenario_from, widget_values

# Why a field has no widget.
WITHOUT_WIDGET = {
    "parallelism.dp_shard": "it is what the GPUs and the replicas leave",
    "parallelism.tp": "only 1 is predicted",
    "parallelism.pp": "only 1 is predicted",
    "parallelism.vpp": "only 1 is predicted",
    "parallelism.cp": "only 1 is predicted",
    "parallelism.ep": "only 1 is predicted",
    "deepspeed.zero_optimization.stage": "it is parallelism.zero_stage once more",
    "deepspeed.zero_optimization.stage3_model_persistence_threshold": "its default is more than a browser's numbers "
    "hold; a ds_config.json sets it",
}

LLAMA, MIXTRAL = {"name": "meta-llama/Llama-3.1-8B"}, {"name": "mistralai/Mixtral-8x7B-v0.1"}
MANY = {"gpus": 8}
STAGE_3 = {"engine": "deepspeed", "zero_stage": 3}
LORA: dict[str, Any] = {"method": "lora", "lora": {}}
QLORA = {"method": "qlora", "lora": {}, "convention": "pure_bf16"}
NF4 = {**QLORA, "quantization": "nf4"}
TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
# A scenario for each field, in which it is not at its default.
EXAMPLES: dict[str, dict[str, Any]] = {
    "model.name": {"model": {"name": "openai-community/gpt2"}},
    "model.n_params": {"model": {"n_params": 10**9}},
    "model.config": {"model": {"config": TINY}},
    "model.experts": {"model": {**MIXTRAL, "experts": "separate"}},
    "model.code": {"model": {**LLAMA, "code": "litgpt"}},
    "hardware.gpu": {"hardware": {"gpu": "A100-40GB"}},
    "hardware.gpus": {"hardware": MANY},
    "hardware.gpus_per_node": {"hardware": {"gpus": 8, "gpus_per_node": 4}},
    "hardware.expandable_segments": {"hardware": {"expandable_segments": True}},
    "parallelism.engine": {"hardware": MANY, "parallelism": {"engine": "fsdp2"}},
    "parallelism.zero_stage": {"hardware": MANY, "parallelism": STAGE_3},
    "parallelism.dp_replicate": {"hardware": MANY, "parallelism": {"engine": "fsdp1", "dp_replicate": 2}},
    "recipe.method": {"recipe": LORA},
    "recipe.convention": {"recipe": {"convention": "fp32"}},
    "recipe.param_dtype": {"recipe": {"param_dtype": "fp32"}},
    "recipe.compute_dtype": {"recipe": {"compute_dtype": "fp16"}},
    "recipe.grad_dtype": {"recipe": {"grad_dtype": "fp32"}},
    "recipe.reduce_dtype": {"hardware": MANY, "recipe": {"reduce_dtype": "fp32"}},
    "recipe.master_dtype": {"recipe": {"master_dtype": "none"}},
    "recipe.state_dtype": {"recipe": {"state_dtype": "bf16"}},
    "recipe.optimizer.name": {"recipe": {"optimizer": "lion"}},
    "recipe.optimizer.bits": {"recipe": {"optimizer": {"bits": 8}}},
    "recipe.optimizer.paged": {"recipe": {"optimizer": {"paged": True}}},
    "recipe.optimizer.implementation": {"recipe": {"optimizer": {"implementation": "fused"}}},
    "recipe.optimizer.momentum": {"recipe": {"optimizer": {"name": "sgd", "momentum": True}}},
    "recipe.optimizer.in_backward": {"recipe": {"optimizer": {"in_backward": True}}},
    "recipe.quantization": {"recipe": {**QLORA, "quantization": "gptq_int4"}},
    "recipe.quant_group_size": {"recipe": {**QLORA, "quantization": "gptq_int4", "quant_group_size": -1}},
    "recipe.quantize_lm_head": {"recipe": {**NF4, "quantize_lm_head": True}},
    "recipe.keeps_packed_inputs": {"recipe": {**NF4, "keeps_packed_inputs": True}},
    "recipe.fp32_norms": {"recipe": {**NF4, "fp32_norms": True, "lora": {"autocast": True}}},
    "recipe.lora.rank": {"recipe": {"method": "lora", "lora": {"rank": 8}}},
    "recipe.lora.targets": {"recipe": {"method": "lora", "lora": {"targets": ["q_proj", "v_proj"]}}},
    "recipe.lora.adapter_dtype": {"recipe": {"method": "lora", "lora": {"adapter_dtype": "bf16"}}},
    "recipe.lora.dropout": {"recipe": {"method": "lora", "lora": {"dropout": 0.05}}},
    "recipe.lora.autocast": {"recipe": {**NF4, "lora": {"autocast": True}}},
    "recipe.lora.modules_to_save": {
        "recipe": {"method": "lora", "lora": {"adapter_dtype": "bf16", "modules_to_save": ["lm_head"]}}
    },
    "recipe.fp8": {"recipe": {"fp8": "rowwise"}},
    "offload.optimizer": {"hardware": MANY, "parallelism": STAGE_3, "offload": {"optimizer": "nvme"}},
    "offload.parameters": {"hardware": MANY, "parallelism": STAGE_3, "offload": {"parameters": "cpu"}},
    "offload.activations": {"offload": {"activations": "cpu"}},
    "workload.micro_batch": {"workload": {"micro_batch": 3}},
    "workload.seq_len": {"workload": {"seq_len": 777}},
    "workload.grad_accum": {"workload": {"grad_accum": 4}},
    "workload.attention": {"workload": {"attention": "eager"}},
    "workload.checkpointing": {"workload": {"checkpointing": "segments(3)"}},
    "workload.reentrant": {"workload": {"checkpointing": "full", "reentrant": True}},
    "workload.loss": {"workload": {"loss": "fused_ce"}},
    "workload.loss_chunks": {"workload": {"loss": "chunked", "loss_chunks": 9}},
    "workload.logits_upcast": {"workload": {"logits_upcast": "model"}},
    "workload.shifted_copy": {"workload": {"shifted_copy": True}},
    "workload.logits_retained": {"workload": {"logits_retained": True}},
    "workload.use_cache": {"workload": {"use_cache": True}},
    "workload.last_loss_held": {
        "recipe": {**NF4, "keeps_packed_inputs": True},
        "workload": {"last_loss_held": True},
    },
    "workload.fused_kernels": {"workload": {"fused_kernels": ["rmsnorm"]}},
    "workload.compile": {"workload": {"compile": True}},
    "workload.loss_compiled": {"workload": {"loss_compiled": True}},
}
FSDP1: dict[str, tuple[Any, dict[str, Any]]] = {
    "reshard_after_forward": (False, {}),
    "use_orig_params": (False, {}),
    "backward_prefetch": ("none", {}),
    "forward_prefetch": (True, {}),
    "adapters": ("ignored", {"recipe": LORA}),
    "no_sync": (True, {"workload": {"grad_accum": 2}}),
    "checkpoint_around_units": (True, {"workload": {"checkpointing": "full"}}),
    "autocast": (True, {}),
    "cpu_offload": (True, {}),
}
FSDP2: dict[str, Any] = {
    "reshard_after_forward": False,
    "reshard_exception": "last_block",
    "fsdp_units": "block_embed_head",
    "cpu_offload": True,
}
ZERO: dict[str, tuple[Any, int]] = {
    "reduce_bucket_size": (10**6, 2),
    "contiguous_gradients": (False, 2),
    "overlap_comm": (True, 2),
    "sub_group_size": (10**6, 3),
    "stage3_prefetch_bucket_size": (0, 3),
    "stage3_max_live_parameters": (0, 3),
    "stage3_max_reuse_distance": (0, 3),
    "stage3_param_persistence_threshold": (0, 3),
    "zero_hpz_partition_size": (4, 3),
}


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": 50_304}
LLM_C: dict[str, Any] = {
    "model": {"config": GPT2}, "parallelism": {"engine": "llm_c"}, "workload": {"loss": "fused_ce"},
}  # fmt: skip


def of_engine(engine: str, config: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"hardware": MANY, "parallelism": {"engine": engine}, "engine_config": config, **rest}


EXAMPLES |= {
    "ddp.gradient_as_bucket_view": of_engine("ddp", {"gradient_as_bucket_view": True}),
    **{f"fsdp1.{name}": of_engine("fsdp1", {name: value}, **rest) for name, (value, rest) in FSDP1.items()},
    **{f"fsdp2.{name}": of_engine("fsdp2", {name: value}) for name, value in FSDP2.items()},
    "llm_c.recompute": {**LLM_C, "engine_config": {"recompute": 2}},
    "llm_c.layout": {**LLM_C, "engine_config": {"layout": "2024-05"}},
    "fsdp2.enable_fsdp_float8_all_gather": of_engine(
        "fsdp2", {"enable_fsdp_float8_all_gather": True}, recipe={"fp8": "tensorwise"}
    ),
    **{
        f"deepspeed.zero_optimization.{name}": {
            **of_engine("deepspeed", {"zero_optimization": {name: value}}),
            "parallelism": {"zero_stage": stage},
        }
        for name, (value, stage) in ZERO.items()
    },
}


def parts_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [part for each in get_args(annotation) for part in parts_of(each)]


def leaves(model: type[BaseModel], path: str) -> Iterator[str]:
    """All fields below a model, those of an engine's settings under the engine's name."""
    for name, field in model.model_fields.items():
        if name == "engine_config":
            for engine, config in ENGINE_CONFIGS.items():
                yield from leaves(config, f"{engine.value}.")
        elif parts := parts_of(field.annotation):
            yield from (leaf for part in parts for leaf in leaves(part, f"{path}{name}."))
        else:
            yield f"{path}{name}"


def example(name: str) -> Scenario:
    return parse_scenario({"model": LLAMA, **EXAMPLES[name]})


def path_of(name: str) -> tuple[str, ...]:
    """Where a field lies in a scenario's data."""
    first, *rest = name.split(".")
    return ("engine_config" if first in ENGINE_CONFIGS else first, *rest)


def without(name: str) -> dict[str, Any]:
    """The example without the field."""

    def less(data: dict[str, Any], names: list[str]) -> dict[str, Any]:
        if len(names) == 1 or not isinstance(data[names[0]], dict):
            return {key: value for key, value in data.items() if key != names[0]}
        return {**data, names[0]: less(data[names[0]], names[1:])}

    left = less(EXAMPLES[name], [*path_of(name)])
    if name == "recipe.method":
        del left["recipe"]["lora"]
    return {key: value for key, value in left.items() if value or key != "model"}


def test_each_field_has_a_widget_or_a_reason_why_not():
    assert sorted([*EXAMPLES, *WITHOUT_WIDGET]) == sorted(leaves(Scenario, ""))


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_example_sets_it(name: str):
    assert example(name) != parse_scenario({"model": LLAMA, **without(name)})


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_widget_alone_gives_it_back_and_so_does_the_link(name: str):
    scenario = example(name)
    assert parse_scenario(scenario_from(widget_values(scenario), {"model": LLAMA})) == scenario
    assert read_link(write_link(scenario)).scenario == scenario


# One widget changed beside it, as a user would.
CHANGES: list[dict[str, Any]] = [
    *({"w_engine": engine.value, "w_gpus": 8} for engine in EngineName),
    *({"w_stage": stage} for stage in range(4)),
    *({"w_method": method.value} for method in Method),
    *({"w_quantization": kind.value} for kind in Quantization),
    *({"w_loss": loss.value} for loss in Loss),
    *({"w_checkpointing": kind} for kind in ("none", "full", "attention")),
    *({"w_convention": name} for name in ("pure_bf16", "fp32")),
    *({"w_recipe_lora_adapter_dtype": dtype.value} for dtype in DType),
    {"w_recipe_param_dtype": "fp32"},
    {"w_code": "litgpt"},
    {"w_name": "openai-community/gpt2"},
    {"w_source": "count"},
    {"w_fused": ["rmsnorm"]},
]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.key)
def test_it_is_left_out_where_another_widget_rules_it_out(field: PlanField):
    """No refusal names a field whose widget is hidden."""
    name = next(name for name in EXAMPLES if path_of(name) == field.path)
    values, base = widget_values(example(name)), scenario_data(example(name))
    assert ".".join(field.path) not in {refused(values | change, base) for change in CHANGES}


def refused(values: dict[str, Any], base: dict[str, Any]) -> str:
    """The field that is refused in what the widgets say."""
    try:
        parse_scenario(scenario_from(values, base))
    except UserError as error:
        return error.field
    return ""


def sidebar() -> None:
    """The sidebar by itself, for a scenario that the session was given, with all of its parts open."""
    import streamlit as st

    from memcore.ui import state
    from memcore.ui.sidebar import Sidebar

    if given := st.session_state.pop("given", None):
        state.adopt(given)
        for section in ("parallelism", "recipe", "workload"):
            st.session_state[f"w_more_{section}"] = True
    state.start()
    Sidebar().draw()


@cache
def app() -> AppTest:
    return AppTest.from_function(sidebar, default_timeout=30).run()


def drawn(scenario: Scenario) -> set[str]:
    """Keys of the widgets that are drawn for a scenario."""
    at = app()
    at.session_state["given"] = scenario
    at.run()
    assert not at.exception
    return {element.key for element in at.sidebar if getattr(element, "key", None)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_widget_is_drawn(name: str):
    """Of the widgets that the field alone decides."""
    values, others = widget_values(example(name)), widget_values(parse_scenario({"model": LLAMA, **without(name)}))
    decided = {key for key, value in values.items() if value != others[key] and not key.startswith("w_more_")}
    assert decided & drawn(example(name))

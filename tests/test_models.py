"""The catalogue's inventories against fresh counts by transformers, published counts, and the peft library.

Run: pytest tests/test_models.py. It imports torch, transformers and peft; counting on the meta device takes a
fraction of a second for each model, whatever its size.
"""

import json
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from memcore.adapters import lora_tensors
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.inventory import Block, Inventory, Role, Tensor, TensorKind
from memcore.models import catalogue, catalogue_inventory, catalogue_model, dump_inventory, load_inventory
from memcore.scenario import Lora

SHAPED = [name for name, model in catalogue().items() if model.config is not None]
LLAMA = "meta-llama/Llama-3.1-8B"

# Published counts that the inventory does not meet, each with the reason in the catalogue's note.
DEEPSEEK_V3_ROUTER_BIASES = 58 * 256  # transformers keeps them as buffers, the checkpoint as tensors
ALLOWED_DIFFERENCE = {
    "deepseek-ai/DeepSeek-V3": -DEEPSEEK_V3_ROUTER_BIASES,
    "zai-org/GLM-4.5-Air-Base": 852_245_504,  # the README's 106 billion is cut, not rounded
    "GPT-3 175B": -395_740_672,  # the closed form of the paper's table; the table prints 175.0B
}

ALL, NO_EMBEDDING, NO_EMBEDDING_NOR_HEAD = (), (Role.EMBEDDING,), (Role.EMBEDDING, Role.HEAD)
# What each publisher's count of active parameters leaves out, and how close that reading comes.
ACTIVE_READINGS = {
    "Qwen/Qwen3-30B-A3B": (ALL, 0.02),
    "Qwen/Qwen3-235B-A22B": (ALL, 0.02),
    "mistralai/Mixtral-8x7B-v0.1": (ALL, 0.02),
    "mistralai/Mixtral-8x22B-v0.1": (ALL, 0.02),
    "deepseek-ai/DeepSeek-V3": (NO_EMBEDDING, 0.01),
    "deepseek-ai/DeepSeek-V2-Lite": (NO_EMBEDDING, 0.03),
    "zai-org/GLM-4.5-Air-Base": (NO_EMBEDDING_NOR_HEAD, 0.02),
    "openai/gpt-oss-20b": (NO_EMBEDDING, 0.01),
    "openai/gpt-oss-120b": (NO_EMBEDDING, 0.01),
}


@pytest.fixture(autouse=True)
def _quiet_transformers():
    # Small vocabularies with the class default of eos_token_id make transformers log a warning.
    transformers.logging.set_verbosity_error()


def stored(name: str) -> Inventory:
    inventory = catalogue_inventory(name)
    assert inventory is not None
    return inventory


def count(config: dict[str, Any]) -> tuple[Inventory, dict[str, Any]]:
    counted = count_config({"config": config})
    # What a worker sends back must survive JSON.
    return load_inventory(json.loads(json.dumps(counted["inventory"]))), counted


def public_config(public_cases: dict[str, Any], case_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    case = public_cases[case_id]
    return dict(case["input"]), case["right"]


def test_the_catalogue_has_59_models_with_shapes_and_the_papers_bare_counts():
    assert len(SHAPED) == 59
    bare = {name: model.n_params for name, model in catalogue().items() if model.config is None}
    assert bare == {
        "ZeRO paper 7B": 7 * 10**9,
        "ZeRO paper 7.5B": 75 * 10**8,
        "ZeRO paper 128B": 128 * 10**9,
        "ZeRO paper 1T": 10**12,
    }


@pytest.mark.parametrize("name", SHAPED)
def test_stored_inventory_equals_a_fresh_count(name: str):
    config = catalogue()[name].config
    assert config is not None
    fresh, _counted = count(dict(config))
    assert fresh == stored(name)


@pytest.mark.parametrize("name", SHAPED)
def test_count_equals_the_published_one(name: str):
    model, inventory = catalogue()[name], stored(name)
    if model.n_params is None:
        pytest.skip("no published count was found; the catalogue says so")
    if name in ALLOWED_DIFFERENCE:
        assert inventory.n_params - model.n_params == ALLOWED_DIFFERENCE[name]
        assert model.note
    elif model.n_params_precision == "exact":
        assert inventory.n_params == model.n_params
    else:
        assert abs(inventory.n_params - model.n_params) <= model.published_half_unit


def test_models_without_a_published_count_say_so():
    for name in SHAPED:
        model = catalogue()[name]
        assert model.config_source
        assert model.cross_checked == (model.n_params_source is not None)
        if not model.cross_checked:
            assert model.note
            assert "not cross-checked" in model.note


@pytest.mark.parametrize("name", SHAPED)
def test_inventory_is_consistent(name: str):
    inventory = stored(name)
    tensors = list(inventory.tensors())
    assert sum(inventory.by_role().values()) == sum(tensor.numel for tensor in tensors) == inventory.n_params
    assert load_inventory(json.loads(json.dumps(dump_inventory(inventory)))) == inventory
    assert [block.layer for block in inventory.layers] == list(range(inventory.shapes.num_layers))
    names = [f"{block.name}.{tensor.name}" for block in inventory.blocks for tensor in block.tensors]
    assert len(set(names)) == len(names)
    largest_name, largest = inventory.largest_tensor
    assert largest.numel == max(tensor.numel for tensor in tensors)
    assert largest_name in names
    assert 0 < inventory.n_active <= inventory.n_params
    assert (Role.HEAD in inventory.by_role()) != inventory.tied
    assert all(size > 0 for size in (inventory.shapes.hidden_size, inventory.shapes.num_heads))


@pytest.mark.parametrize("name", ACTIVE_READINGS)
def test_active_parameters_are_near_the_published_ones(name: str):
    inventory, published = stored(name), catalogue()[name].n_active_params
    assert published is not None
    left_out, tolerance = ACTIVE_READINGS[name]
    roles = inventory.by_role()
    assert inventory.n_active - sum(roles[role] for role in left_out) == pytest.approx(published, rel=tolerance)


def test_every_published_active_count_is_checked():
    assert {name for name in SHAPED if catalogue()[name].n_active_params} == set(ACTIVE_READINGS)


def test_dense_models_are_active_as_a_whole():
    assert stored(LLAMA).n_active == stored(LLAMA).n_params


def test_mixtral_active_by_hand():
    # Per layer: 2 of 8 experts of 3 x 4096 x 14336; everything else takes part.
    idle = 32 * 6 * 3 * 4096 * 14336
    assert stored("mistralai/Mixtral-8x7B-v0.1").n_active == 46_702_792_704 - idle


def test_llama_31_8b_by_hand():
    inventory, hidden = stored(LLAMA), 4096
    attention = hidden * hidden * 2 + hidden * 1024 * 2  # q and o; k and v with 8 of 32 heads
    mlp = 3 * hidden * 14336
    assert inventory.by_role() == {
        Role.EMBEDDING: 128256 * hidden,
        Role.ATTENTION: 32 * attention,
        Role.MLP: 32 * mlp,
        Role.NORM: (2 * 32 + 1) * hidden,
        Role.HEAD: 128256 * hidden,
    }
    assert inventory.largest_layer.numel == attention + mlp + 2 * hidden == 218_112_000
    assert inventory.largest_tensor == (
        "model.embed_tokens.weight",
        Tensor(name="weight", shape=(128256, hidden), role=Role.EMBEDDING, kind=TensorKind.EMBEDDING),
    )
    assert [block.name for block in inventory.blocks][:2] == ["model.embed_tokens", "model.layers.0"]
    assert [block.name for block in inventory.blocks][-2:] == ["model.norm", "lm_head"]
    assert not inventory.tied


def test_gpt2_tied_head_is_counted_once():
    inventory = stored("openai-community/gpt2")
    assert inventory.tied
    assert inventory.by_role()[Role.EMBEDDING] == 50257 * 768 + 1024 * 768
    assert inventory.n_params == 124_439_808


def test_block_names_with_digits_survive_dumping():
    tensors = (Tensor(name="weight", shape=(2, 3), role=Role.OTHER, kind=TensorKind.PARAMETER),)
    names = ["conv1", "conv2", "layers.9", "layers.10", "layers.11", "norm", "h2o"]
    layers = [None, None, 0, 1, 2, None, None]
    inventory = Inventory(
        model_class="Toy",
        tied=False,
        shapes=stored(LLAMA).shapes,
        blocks=tuple(Block(name=name, tensors=tensors, layer=layer) for name, layer in zip(names, layers, strict=True)),
    )
    assert load_inventory(dump_inventory(inventory)) == inventory


@pytest.mark.parametrize("names", [["layers.1", "layers.3"], ["layers.07"], ["norm", "norm2"]])
def test_block_names_that_are_not_in_sequence_survive_dumping(names: list[str]):
    tensors = (Tensor(name="weight", shape=(2, 3), role=Role.OTHER, kind=TensorKind.PARAMETER),)
    inventory = Inventory(
        model_class="Toy",
        tied=False,
        shapes=stored(LLAMA).shapes,
        blocks=tuple(Block(name=name, tensors=tensors) for name in names),
    )
    assert load_inventory(dump_inventory(inventory)) == inventory


def test_unknown_model_name_gives_the_nearest():
    with pytest.raises(UserError, match=r"model\.name is 'Llama-3\.1-8B', which is not in the catalogue"):
        catalogue_model("Llama-3.1-8B")


def test_gemma3_nested_config_with_defaults(public_cases: dict[str, Any]):
    config, right = public_config(public_cases, "cfg-gemma3-4b-nested")
    inventory, counted = count(config)
    roles = inventory.by_role()
    assert inventory.n_params == right["params_total"]
    assert roles[Role.VISION] == right["params_vision_tower"]
    assert roles[Role.PROJECTOR] == right["params_projector"]
    assert inventory.n_params - roles[Role.VISION] - roles[Role.PROJECTOR] == right["params_text"]
    assert inventory.tied
    assert roles[Role.EMBEDDING] == 262208 * 2560
    filled = {key: value for key, value in counted["defaults"].items() if key.startswith("text_config.")}
    for field, value in right["filled_from_class_defaults"].items():
        assert filled[f"text_config.{field}"] == value
    assert inventory.shapes.head_dim == 256
    assert len(inventory.layers) == 34


def test_gptj_null_n_inner_is_four_times_the_hidden_size(public_cases: dict[str, Any]):
    config, right = public_config(public_cases, "cfg-gptj-6b-ninner-null")
    inventory, _counted = count(config)
    assert inventory.n_params == right["params_total"]
    assert abs(inventory.n_params / right["published_on_card"] - 1) < right["accept_within"]
    assert inventory.shapes.intermediate_size == right["ffn"]
    assert inventory.by_role()[Role.HEAD] == right["lm_head"]["weight"] + right["lm_head"]["bias"]


def test_gpt_oss_config_of_a_packed_checkpoint(public_cases: dict[str, Any]):
    config, right = public_config(public_cases, "cfg-gpt-oss-20b-mxfp4")
    # The case describes the list in words.
    config["layer_types"] = ["sliding_attention", "full_attention"] * 12
    inventory, counted = count(config)
    experts = [tensor for tensor in inventory.tensors() if tensor.role is Role.EXPERTS]
    weights = [tensor for tensor in experts if tensor.name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert inventory.n_params == right["params_total"]
    assert sum(tensor.numel for tensor in weights) == right["expert_weight_params"]
    assert counted["quantised_as"] == "mxfp4"
    assert inventory.shapes.head_dim == 64
    assert {tensor.experts_used / tensor.experts_held for tensor in weights} == {4 / 32}


def test_qwen3_tied_embedding_is_counted_once(public_cases: dict[str, Any]):
    config, right = public_config(public_cases, "cfg-qwen3-06b-tied")
    inventory, counted = count(config)
    assert inventory.n_params == right["params_total"]
    assert inventory.by_role()[Role.EMBEDDING] == right["embedding_params"]
    assert counted["defaults"] == {}
    untied, _counted = count({**config, "tie_word_embeddings": False})
    assert untied.n_params == right["wrong_if_untied"]


def test_configs_of_measured_runs(measured_runs: dict[str, Any]):
    by_config: dict[str, set[int]] = defaultdict(set)
    for run in measured_runs["runs"].values():
        by_config[json.dumps(run["model"]["config"])].add(run["model"]["n_params_config"])
    assert len(by_config) >= 30
    for config, counts in by_config.items():
        inventory, _counted = count(json.loads(config))
        assert counts == {inventory.n_params}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "no_such_model"}, "does not know model_type 'no_such_model'"),
        (
            {"model_type": "mpt_moe", "auto_map": {"AutoConfig": "configuration.Config"}},
            "the config asks for remote code, which is never run",
        ),
        ({"model_type": "llama", "hidden_act": "no_such_activation"}, "cannot build a llama model from this config"),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}, "cannot build a llama model"),
        ({"model_type": "llama", "num_hidden_layers": 10**30}, "allowed is a whole number from 1 to"),
        ({"hidden_size": 64}, "model_type is missing"),
    ],
)
def test_configs_that_cannot_be_counted(config: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=sentence):
        count_config({"config": config})


def peft_adapters(name: str, targets: str | list[str], rank: int) -> list[tuple[int, ...]]:
    """The shapes of the adapters that peft itself builds, on the meta device."""
    config = catalogue()[name].config
    assert config is not None
    fields = {key: value for key, value in config.items() if key != "model_type"}
    # Fan-in order is found by peft itself, with a warning, for GPT-2's Conv1D.
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **fields)
        )
        adapted = get_peft_model(
            model, LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"), low_cpu_mem_usage=True
        )
    return [tuple(parameter.shape) for parameter in adapted.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("name", "targets", "rank", "by_hand"),
    [
        # q_proj 4096 x 4096 and v_proj 1024 x 4096, 32 layers: 32 x 16 x (4096 + 4096 + 4096 + 1024).
        (LLAMA, ["q_proj", "v_proj"], 16, 6_815_744),
        # ... and k, o, and the three MLP weights of 4096 x 14336.
        (LLAMA, "all-linear", 16, 41_943_040),
        # Conv1D c_attn 768 x 2304: 12 x 8 x (768 + 2304).
        ("openai-community/gpt2", ["c_attn"], 8, 294_912),
        ("openai-community/gpt2", "all-linear", 8, 1_179_648),
        ("google/gemma-2-2b", "all-linear", 4, None),
        ("microsoft/Phi-3-mini-4k-instruct", ["qkv_proj", "o_proj"], 32, None),
        ("microsoft/phi-1_5", ["dense", "fc1"], 8, None),
        # Stacked experts: gate and up projection as one of twice the rank, the router too.
        ("mistralai/Mixtral-8x7B-v0.1", "all-linear", 8, None),
        ("mistralai/Mixtral-8x7B-v0.1", ["q_proj", "w1", "w2", "w3"], 8, None),
        ("Qwen/Qwen3-30B-A3B", "all-linear", 8, None),
        ("Qwen/Qwen3-30B-A3B", ["gate_proj", "up_proj"], 16, None),
        ("deepseek-ai/DeepSeek-V3", "all-linear", 8, None),
        ("openai/gpt-oss-20b", "all-linear", 8, None),
    ],
)
def test_lora_adapters_are_those_that_peft_builds(
    name: str, targets: str | list[str], rank: int, by_hand: int | None
):  # fmt: skip
    ours = lora_tensors(stored(name), Lora(rank=rank, targets=(targets,) if isinstance(targets, str) else targets))
    theirs = peft_adapters(name, targets, rank)
    assert sorted(tensor.shape for tensor in ours) == sorted(theirs)
    if by_hand is not None:
        assert sum(tensor.numel for tensor in ours) == by_hand


def test_half_of_what_is_fused_cannot_be_adapted():
    """peft refuses it too."""
    with pytest.raises(ValueError, match="w3"):
        peft_adapters("mistralai/Mixtral-8x7B-v0.1", ["q_proj", "w1"], 8)
    with pytest.raises(UserError, match="w1, w3"):
        lora_tensors(stored("mistralai/Mixtral-8x7B-v0.1"), Lora(rank=8, targets=("q_proj", "w1")))


def test_lora_targets_that_name_nothing_are_refused():
    with pytest.raises(UserError, match=r"names 'c_attn', which this model does not have; it has down_proj, gate_proj"):
        lora_tensors(stored(LLAMA), Lora(targets=("q_proj", "c_attn")))

"""States against the real things: torch's and bitsandbytes' optimizers after a step, and hand arithmetic.

Run: pytest tests/test_states.py. It imports torch, transformers and bitsandbytes (all on the CPU).
"""

from collections.abc import Iterable
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers

from memcore.budget import predict
from memcore.counting import inventory_of
from memcore.errors import UserError
from memcore.inventory import Inventory, Role, Tensor, TensorKind
from memcore.models import catalogue_inventory
from memcore.optimizers import OPTIMIZERS, OptimizerName, bytes_8bit, paged_bytes
from memcore.scenario import Scenario, parse_scenario
from memcore.states import ModelStates, model_states, precision_of
from memcore.terms import Category

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 32}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
LLAMA_8B = "meta-llama/Llama-3.1-8B"


def real_model(config: dict[str, Any]) -> tuple[transformers.PreTrainedModel, Inventory]:
    """A small model on the CPU, its inventory, and gradients from a real backward."""
    transformers.logging.set_verbosity_error()
    fields = {key: value for key, value in config.items() if key != "model_type"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **fields)
    )
    tokens = torch.arange(16).reshape(1, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return model, inventory_of(model, model.config)


def scenario_of(config: dict[str, Any], **recipe: Any) -> Scenario:
    return parse_scenario({"model": {"config": config}, "recipe": {"convention": "fp32", **recipe}})


def predicted_values(states: ModelStates) -> int:
    return sum(state.elements for state in states.of(Category.OPTIMIZER))


def kept_values(*optimizers: torch.optim.Optimizer) -> int:
    """All values in the optimizers' states, but the step counters."""
    return sum(
        value.numel()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        ({"name": "adamw"}, torch.optim.AdamW),
        ({"name": "adam"}, torch.optim.Adam),
        ({"name": "sgd"}, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        ({"name": "sgd", "momentum": True}, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
        ({"name": "adafactor"}, torch.optim.Adafactor),
    ],
    ids=["adamw", "adam", "sgd", "sgd-momentum", "adafactor"],
)
def test_optimizer_states_are_those_of_torch(config: dict[str, Any], recipe: dict[str, Any], make: Any):
    model, inventory = real_model(config)
    optimizer = make(model.parameters())
    optimizer.step()
    states = model_states(scenario_of(config, optimizer=recipe), inventory.n_params, inventory)
    assert predicted_values(states) == kept_values(optimizer)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_muon_states_are_those_of_torch(config: dict[str, Any]):
    model, inventory = real_model(config)
    apart = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    apart.add(id(model.get_output_embeddings().weight))
    hidden = [p for p in model.parameters() if p.ndim == 2 and id(p) not in apart]
    rest = [p for p in model.parameters() if p.ndim != 2 or id(p) in apart]
    muon, adamw = torch.optim.Muon(hidden), torch.optim.AdamW(rest)
    muon.step()
    adamw.step()
    states = model_states(scenario_of(config, optimizer="muon"), inventory.n_params, inventory)
    assert predicted_values(states) == kept_values(muon, adamw)


def test_torch_muon_refuses_stacked_experts_which_go_to_adamw():
    with pytest.raises(ValueError, match="2D parameters"):
        torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 3, 4))])
    inventory = catalogue_inventory("openai/gpt-oss-20b")
    assert inventory is not None
    tensors = list(inventory.tensors())
    momentum, variance = OPTIMIZERS[OptimizerName.MUON].moments(tensors, inventory.n_params, False)
    matrices = sum(t.numel for t in tensors if len(t.shape) == 2 and t.role not in (Role.EMBEDDING, Role.HEAD))
    assert momentum.elements == inventory.n_params
    assert variance.elements == inventory.n_params - matrices


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 5, 7), (2, 3, 5, 7)])
def test_adafactor_factors_the_last_two_dimensions(shape: tuple[int, ...]):
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.ones(shape)
    optimizer = torch.optim.Adafactor([weight])
    optimizer.step()
    tensor = Tensor(name="experts", shape=shape, role=Role.EXPERTS, kind=TensorKind.PARAMETER)
    (state,) = OPTIMIZERS[OptimizerName.ADAFACTOR].moments([tensor], tensor.numel, False)
    assert state.elements == kept_values(optimizer)


def test_lion_keeps_one_value_for_each_parameter():
    states = model_states(parse_scenario({"model": {"n_params": 1000}, "recipe": {"optimizer": "lion"}}), 1000, None)
    assert [(state.name, state.total_bytes) for state in states.of(Category.OPTIMIZER)] == [
        ("master_weights", 4000),
        ("momentum", 4000),
    ]


def test_adafactor_on_a_flat_slice_keeps_every_value():
    inventory = catalogue_inventory(LLAMA_8B)
    assert inventory is not None
    scenario = {
        "model": {"name": LLAMA_8B},
        "hardware": {"gpus": 8},
        "parallelism": {"engine": "deepspeed", "zero_stage": 2},
        "recipe": {"optimizer": "adafactor"},
    }
    states = model_states(parse_scenario(scenario), inventory.n_params, inventory)
    assert states.of(Category.OPTIMIZER)[1].elements == 8_030_261_248


def unique_bytes(tensors: Iterable[object]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def test_qlora_states_of_llama_8b_by_hand():
    inventory = catalogue_inventory(LLAMA_8B)
    assert inventory is not None
    scenario = parse_scenario({"model": {"name": LLAMA_8B}, "recipe": {"method": "qlora"}})
    states = {state.name: state for state in model_states(scenario, inventory.n_params, inventory).states}
    packed = 32 * 218_103_808
    # Per weight: half a byte a value, one byte for each 64, four for each 64 x 256, and 1092 bytes of tables.
    assert states["quantised_weights"].total_bytes == packed // 2
    assert states["quantisation_scales"].total_bytes == packed // 64 + 4 * packed // 64 // 256 + 32 * 7 * 1092
    assert states["frozen_weights"].total_bytes == 2 * (8_030_261_248 - packed)
    assert states["adapter_weights"].elements == 41_943_040
    # peft keeps adapters in FP32, without a master copy: 4 + 4 + 8 bytes.
    assert "master_weights" not in states
    base = ("quantised_weights", "quantisation_scales", "frozen_weights")
    adapters = sum(state.total_bytes for name, state in states.items() if name not in base)
    assert adapters == 16 * 41_943_040


def test_lora_under_deepspeed_keeps_a_master_of_the_adapters():
    inventory = catalogue_inventory(LLAMA_8B)
    assert inventory is not None
    scenario = parse_scenario(
        {"model": {"name": LLAMA_8B}, "parallelism": {"engine": "deepspeed"}, "recipe": {"method": "lora"}}
    )
    states = model_states(scenario, inventory.n_params, inventory)
    assert states.total_bytes() == 0
    assert states.total_bytes(*Category) == 2 * 8_030_261_248 + 16 * 41_943_040


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_8_bit_states_are_those_of_bitsandbytes(name: str):
    config = {**GPT2, "n_embd": 128}
    model, inventory = real_model(config)
    kinds = {"adamw": bitsandbytes.optim.AdamW8bit, "lion": bitsandbytes.optim.Lion8bit}
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):  # as transformers' Trainer does
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    manager.register_parameters(model.parameters())
    optimizer = kinds[name](model.parameters())
    optimizer.step()
    held = 0
    for state in optimizer.state.values():
        # The quantisation maps (1 KiB each) are one tensor for all parameters.
        held += unique_bytes(value for key, value in state.items() if not key.startswith("qmap"))
    states = model_states(scenario_of(config, optimizer={"name": name, "bits": 8}), inventory.n_params, inventory)
    assert states.total_bytes(Category.OPTIMIZER) == held
    assert any(value.dtype is torch.uint8 for s in optimizer.state.values() for value in s.values()
               if isinstance(value, torch.Tensor))  # fmt: skip


def test_8_bit_rule_by_hand():
    inventory = catalogue_inventory(LLAMA_8B)
    assert inventory is not None
    tensors = [t for t in inventory.tensors() if t.name == "mlp.up_proj.weight"][:1]
    assert bytes_8bit(tensors, tensors[0].numel, False) == 58_720_256 + 4 * 229_376
    norms = [t for t in inventory.tensors() if t.role is Role.NORM][:1]
    assert bytes_8bit(norms, 4096, False) == 4096 + 4 * 16  # 4096 elements is not under the limit
    embedding = [t for t in inventory.tensors() if t.role is Role.EMBEDDING]
    assert bytes_8bit(embedding, embedding[0].numel, False) == 4 * 128256 * 4096
    assert bytes_8bit((), 1000, False) == 1000 + 4 * 4  # a bare count is one tensor


def test_only_tensors_of_100_000_elements_are_paged():
    inventory = catalogue_inventory(LLAMA_8B)
    assert inventory is not None
    tensors = list(inventory.tensors())
    norms = sum(tensor.numel for tensor in tensors if tensor.role is Role.NORM)
    embedding = 128256 * 4096
    assert paged_bytes(tensors, inventory.n_params, False, 32) == 4 * (inventory.n_params - norms)
    # In 8 bit one byte a value, but the embedding is kept in FP32; the absmax stay on the GPU.
    assert paged_bytes(tensors, inventory.n_params, False, 8) == inventory.n_params - norms + 3 * embedding
    assert paged_bytes((), 99_999, False, 32) == 0
    assert paged_bytes((), 100_000, False, 32) == 400_000


def test_paged_optimizers_keep_fp32_states_whatever_the_convention():
    recipe = {"convention": "pure_bf16", "optimizer": {"name": "adamw", "paged": True}}
    states = model_states(parse_scenario({"model": {"n_params": 10}, "recipe": recipe}), 10, None)
    assert states.total_bytes(Category.OPTIMIZER) == 8 * 10
    weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    optimizer = bitsandbytes.optim.AdamW32bit([weight])
    optimizer.step()
    assert optimizer.state[weight]["state1"].dtype is torch.float32


@pytest.mark.parametrize(
    ("convention", "expected"),
    [
        ("zero_paper", {"weights": 2, "gradients": 2, "master_weights": 4, "momentum": 4, "variance": 4}),
        ("megatron", {"weights": 2, "gradients": 4, "master_weights": 4, "momentum": 4, "variance": 4}),
        ("fsdp2_mixed", {"weights": 4, "gradients": 4, "momentum": 4, "variance": 4}),
        ("amp_autocast", {"weights": 4, "gradients": 4, "momentum": 4, "variance": 4}),
        ("pure_bf16", {"weights": 2, "gradients": 2, "momentum": 2, "variance": 2}),
        ("pure_fp16", {"weights": 2, "gradients": 2, "momentum": 2, "variance": 2}),
        ("fp32", {"weights": 4, "gradients": 4, "momentum": 4, "variance": 4}),
    ],
)
def test_bytes_per_parameter_of_each_state(convention: str, expected: dict[str, int]):
    scenario = parse_scenario({"model": {"n_params": 10}, "recipe": {"convention": convention}})
    states = model_states(scenario, 10, None)
    assert {state.name: state.element_bytes for state in states.states} == expected
    assert all(state.source for state in states.states)


def test_fp32_accumulation_keeps_two_gradients_at_stage_1():
    scenario = parse_scenario(
        {
            "model": {"n_params": 10},
            "parallelism": {"engine": "deepspeed", "zero_stage": 1},
            "recipe": {"convention": "deepspeed_fp32_grad"},
        }
    )
    assert {state.name: state.element_bytes for state in model_states(scenario, 10, None).states} == {
        "weights": 2, "gradients": 2, "fp32_gradients": 4, "master_weights": 4, "momentum": 4, "variance": 4,
    }  # fmt: skip


def test_an_explicit_dtype_makes_the_convention_custom():
    scenario = parse_scenario({"model": {"n_params": 10}, "recipe": {"grad_dtype": "fp32"}})
    precision = precision_of(scenario.recipe)
    assert precision.label == "custom, from ZeRO paper"
    assert model_states(scenario, 10, None).total_bytes(*Category) == 18 * 10


def test_repeating_the_conventions_own_dtype_does_not():
    scenario = parse_scenario({"model": {"n_params": 10}, "recipe": {"grad_dtype": "bf16", "master_dtype": "fp32"}})
    assert precision_of(scenario.recipe).label == "ZeRO paper"


def test_no_master_copy():
    scenario = parse_scenario({"model": {"n_params": 10}, "recipe": {"master_dtype": "none"}})
    assert precision_of(scenario.recipe).label == "custom, from ZeRO paper"
    assert model_states(scenario, 10, None).total_bytes(*Category) == 12 * 10


def test_8_bit_adamw_saves_six_bytes_a_parameter():
    scenario = parse_scenario(
        {"model": {"n_params": 256 * 4096}, "recipe": {"optimizer": {"name": "adamw", "bits": 8}}}
    )
    states = model_states(scenario, 256 * 4096, None)
    # 2 + 2 + master 4, and twice 1 + 4/256.
    assert states.total_bytes(*Category) == 256 * 4096 * 8 + 2 * (256 * 4096 + 4 * 4096)


def test_copies_of_embedding_and_head_are_trained_beside_the_adapters():
    """peft's ModulesToSaveWrapper: both of 128,256 x 4,096 values."""
    lora = {"adapter_dtype": "bf16", "modules_to_save": ["embed_tokens", "lm_head"]}
    scenarios = [
        parse_scenario(
            {"model": {"name": "meta-llama/Llama-3.1-8B"}, "recipe": {"method": "lora", "lora": each}}
        )
        for each in (lora, {**lora, "modules_to_save": []})
    ]  # fmt: skip
    with_copies, without = (predict(scenario).states for scenario in scenarios)
    assert with_copies.trained - without.trained == 2 * 128_256 * 4096
    assert with_copies.n_params == without.n_params
    # Weights, gradients and two moments of 2 bytes each; the originals stay.
    added = with_copies.total_bytes(*Category) - without.total_bytes(*Category)
    assert added == 8 * 2 * 128_256 * 4096


def test_copies_of_tied_weights_are_refused():
    lora = {"adapter_dtype": "bf16", "modules_to_save": ["lm_head"]}
    with pytest.raises(UserError):
        predict(parse_scenario({"model": {"name": "Qwen/Qwen3-0.6B"}, "recipe": {"method": "lora", "lora": lora}}))

"""Bytes of 4-bit bases against bitsandbytes' own tensors, and against published runs to the byte.

Run: pytest tests/test_packing.py. It imports torch, transformers and bitsandbytes (all on the CPU).
"""

from collections.abc import Iterable
from typing import Any

import bitsandbytes
import pytest
import torch

from memcore.counting import count_config
from memcore.errors import UserError
from memcore.inventory import Inventory, Role, Tensor, TensorKind
from memcore.models import catalogue_inventory, load_inventory
from memcore.packing import Packing, is_packed, packed_bytes
from memcore.scenario import Quantization, parse_scenario
from memcore.states import State, model_states
from memcore.units import round_up

DOUBLE = Packing(quantization=Quantization.NF4_DOUBLE_QUANT, group_size=64)
MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 32001,
}  # fmt: skip
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32001,
}  # fmt: skip
# Of a process on an A100: cuBLAS' workspace in the thread of the forward and in that of the backward, and six small
# tensors, a block of 512 bytes each, that all these runs have.
PROCESS_BYTES = 2 * 8_519_680 + 6 * 512


def unique_bytes(tensors: Iterable[object]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def packed_by_bitsandbytes(shape: tuple[int, int], double_quant: bool) -> list[object]:
    """Every tensor of a weight that bitsandbytes packed."""
    weight = bitsandbytes.nn.Params4bit(
        torch.randn(shape, dtype=torch.bfloat16),
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=double_quant,
    ).to("cpu")
    state = weight.quant_state
    nested = vars(state.state2).values() if state.nested else []
    return [weight.data, *vars(state).values(), *nested]


def linear(shape: tuple[int, int]) -> Tensor:
    return Tensor(name="up_proj.weight", shape=shape, role=Role.MLP, kind=TensorKind.LINEAR)


@pytest.mark.parametrize("shape", [(64, 64), (1024, 4096), (768, 2304), (100, 33), (14336, 64)])
@pytest.mark.parametrize("double_quant", [False, True])
def test_nf4_bytes_are_those_of_bitsandbytes(shape: tuple[int, int], double_quant: bool):
    held = [*packed_by_bitsandbytes(shape, double_quant), *packed_by_bitsandbytes(shape, double_quant)]
    kind = Quantization.NF4_DOUBLE_QUANT if double_quant else Quantization.NF4
    each = packed_bytes(linear(shape), Packing(quantization=kind, group_size=64))
    assert 2 * (each.values + each.scales) == unique_bytes(held)


def test_4_bit_loading_packs_linear_weights_but_the_head():
    inventory = catalogue_inventory("meta-llama/Llama-3.1-8B")
    assert inventory is not None
    packed = sum(tensor.numel for tensor in inventory.tensors() if is_packed(tensor, DOUBLE))
    # 32 layers of q, o (4096 x 4096), k, v (1024 x 4096) and three MLP weights of 4096 x 14336.
    assert packed == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)


def inventory_of(config: dict[str, Any]) -> Inventory:
    return load_inventory(count_config({"config": config})["inventory"])


def states_of(config: dict[str, Any], **recipe: Any) -> dict[str, State]:
    """States of the published runs' adapters, of rank 16 on the attention, on a base of 16 bits that is packed."""
    inventory = inventory_of(config)
    lora = {"rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    scenario = parse_scenario({"model": {"config": config}, "recipe": {"method": "qlora", "lora": lora, **recipe}})
    return {state.name: state for state in model_states(scenario, inventory.n_params, inventory).states}


# Bytes allocated between two steps, with the batch: token ids, mask and labels, eight bytes each. Source:
# foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv, with AutoGPTQ's weights.
GPTQ_RUNS = [
    pytest.param(MISTRAL, 128, 4 * 4096, 4_336_806_912, id="Mistral-7B, groups of 128"),
    pytest.param(MISTRAL, 128, 8 * 4096, 4_337_200_128, id="Mistral-7B, groups of 128, a larger batch"),
    pytest.param(LLAMA_70B, -1, 4 * 4096, 36_122_332_160, id="Llama-2-70B, whole columns"),
]


@pytest.mark.parametrize(("config", "group_size", "tokens", "measured"), GPTQ_RUNS)
def test_gptq_states_are_those_of_published_runs_to_the_byte(
    config: dict[str, Any], group_size: int, tokens: int, measured: int
):
    states = states_of(config, quantization="gptq_int4", quant_group_size=group_size)
    kept = sum(state.total_bytes for name, state in states.items() if name != "gradients")
    assert kept + 24 * tokens + PROCESS_BYTES == measured


def test_on_two_ranks_only_the_packed_values_are_divided():
    """The same Mistral on two GPUs under FSDP, 2 x 4096 tokens each: the run keeps its adapters in 8 bytes a value."""
    states = states_of(MISTRAL, quantization="gptq_int4", quant_group_size=128)
    divided = states["quantised_weights"].total_bytes + states["frozen_weights"].total_bytes
    kept = divided // 2 + states["quantisation_scales"].total_bytes + 8 * 13_631_488
    assert kept + 24 * 2 * 4096 + PROCESS_BYTES + 512 == 2_261_204_480


def test_nf4_states_are_those_of_a_published_run_to_the_byte():
    """Mistral-7B as above, with double quantisation. CUDA's allocator gives each tensor a multiple of 512 bytes; the
    bitsandbytes of that time had one table for all weights, two of the six small blocks."""
    states = states_of(MISTRAL, quantization="nf4_double_quant")
    kept = sum(state.total_bytes for name, state in states.items() if name != "gradients")
    packed = [tensor for tensor in inventory_of(MISTRAL).tensors() if is_packed(tensor, DOUBLE)]
    blocks = [tensor.numel // 64 for tensor in packed]
    parts = [part for n in blocks for part in (n, n // 64, 4, 64)]
    assert sum(parts) + 1024 * len(packed) == states["quantisation_scales"].total_bytes
    rounding = sum(round_up(part, 512) - part for part in parts) - 1024 * len(packed)
    assert kept + rounding + 24 * 4 * 4096 + PROCESS_BYTES == 4_306_496_512


def test_a_head_is_packed_where_every_linear_module_is():
    inventory = catalogue_inventory("meta-llama/Llama-3.1-8B")
    assert inventory is not None
    packing = Packing(quantization=Quantization.NF4, group_size=64, head=True)
    packed = sum(tensor.numel for tensor in inventory.tensors() if is_packed(tensor, packing))
    assert packed == 32 * 218_103_808 + 128_256 * 4096


def test_a_head_that_is_the_embedding_cannot_be_packed():
    with pytest.raises(UserError, match="this model's head is its embedding"):
        states_of({**MISTRAL, "tie_word_embeddings": True}, quantize_lm_head=True)

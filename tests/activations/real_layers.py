"""Small real transformers models, and what one of their decoder layers really keeps for its backward.

A layer's forward is run under ``torch.autograd.graph.saved_tensors_hooks``; each storage that autograd saves counts
once, parameters and buffers do not count, and neither does what the model hands to all its layers alike (rotary
tables, masks, positions): the closed form leaves it out.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

BATCH, SEQUENCE, LAYER = 2, 128, 1

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT: dict[str, Any] = {
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 8,
    "vocab_size": 512,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **_COMMON} for name in ("llama", "qwen2", "olmo2", "granite", "phi", "phi3")},
    **{name: {"model_type": name, "head_dim": 32, **_COMMON} for name in ("qwen3", "gemma2", "gemma3_text", "glm")},
    "starcoder2": {"model_type": "starcoder2", "residual_dropout": 0.0, "attention_dropout": 0.0, **_COMMON},
    "gpt_neox": {"model_type": "gpt_neox", **{k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}},
    "gpt2": {"model_type": "gpt2", "attn_pdrop": 0.0, "resid_pdrop": 0.0, **_GPT},
    "gptj": {"model_type": "gptj", "rotary_dim": 16, **_GPT},
    "mixtral": {"model_type": "mixtral", **_EXPERTS, **_COMMON},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 32, **_EXPERTS, **_COMMON, "rope_parameters": None},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        **_COMMON,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_COMMON,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
}


def build(config: dict[str, Any], attention: str, dtype: torch.dtype) -> nn.Module:
    """The real model with random weights, in training mode. `attention`: "sdpa" or "eager"."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = AutoConfig.for_model(**config)
        return AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=attention).train()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's decoder layers, adapters or not."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((stack for stack in lists if len(stack) == 2), key=lambda stack: sum(1 for _ in stack.parameters()))


def storages(value: object) -> Iterator[int]:
    """The storages of all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage().data_ptr()
    elif isinstance(value, dict):
        for inner in value.values():
            yield from storages(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from storages(inner)


def saved_bytes(model: nn.Module, vocabulary: int = 512) -> dict[int, int]:
    """Bytes of each storage that the second decoder layer keeps, by the storage's address."""
    left_out = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # an address means something only as long as its tensor lives
    inside = False

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal inside
        inside = True
        left_out.update(storages([args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}]))

    def leave(*_: object) -> None:
        nonlocal inside
        inside = False

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in left_out:
            alive.append(tensor)
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = decoder_layers(model)[LAYER]
    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.randint(0, vocabulary, (BATCH, SEQUENCE)), use_cache=False)
    for handle in handles:
        handle.remove()
    return kept

"""Small real transformers models, and what one of their decoder layers really keeps for its backward.

A layer's forward is run under ``torch.autograd.graph.saved_tensors_hooks``; each storage that autograd saves counts
once, parameters and buffers do not count, and neither does what the model hands to all its layers alike (rotary
tables, masks, positions): the closed form leaves it out.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import small_models
import torch
from small_models import COMMON, GPT
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

BATCH, SEQUENCE, LAYER = 2, 128, 1

_SHARED = (
    "llama", "qwen2", "olmo2", "phi3", "qwen3", "gemma2", "glm", "gpt_neox", "gpt2", "mixtral", "gpt_oss", "qwen3_moe",
    "deepseek_v3",
)  # fmt: skip
_GPTJ = {**GPT, "model_type": "gptj", "rotary_dim": 16, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_FOUND = {
    **{name: small_models.CONFIGS[name] for name in _SHARED},
    **{name: {**COMMON, "model_type": name} for name in ("granite", "phi")},
    "gemma3_text": {**COMMON, "model_type": "gemma3_text", "head_dim": 32},
    "starcoder2": {**COMMON, "model_type": "starcoder2", "residual_dropout": 0.0, "attention_dropout": 0.0},
    "gptj": _GPTJ,
}
# Two layers, the second of which is looked at; experts in both.
CONFIGS: dict[str, dict[str, Any]] = {
    name: {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": 2} for name, config in _FOUND.items()
}
CONFIGS["deepseek_v3"]["first_k_dense_replace"] = 0


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

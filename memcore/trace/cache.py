"""Keys and values that a forward hands out beside its logits, as for generation, layer by layer.

Worker processes only: imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# What attentions call the projections that keys and values come out of; where one makes them together with the queries,
# they are views of its whole result.
_PROJECTIONS = ("k_proj", "v_proj", "c_attn", "query_key_value", "qkv_proj", "Wqkv")


@contextmanager
def keys_and_values(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """What the model's projections to keys and values give inside the block.

    Source: transformers 4.48, models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward: `presents` collects
    each layer's `key_value`, a view of `c_attn`'s result, and the model's output holds them.
    """
    held: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _args, result: held.append(result))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _PROJECTIONS
    ]
    try:
        yield held
    finally:
        for hook in hooks:
            hook.remove()

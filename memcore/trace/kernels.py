"""How attention and dropout behave in a trace: the operations that run, and the bytes that only kernels know of.

Worker processes only: imports torch and transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from memcore.units import round_up

# transformers decides by these names what a model supports: "sdpa" must be in them, "flash" must not.
FLASH, MEMORY_EFFICIENT = "memcore_sdpa", "memcore_sdpa_repeated"
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001


def _attend(query: Any, key: Any, value: Any, *, repeat: bool, scaling: float | None) -> tuple[Any, None]:
    """Flash attention as torch runs it; it is causal by construction, so no mask is made.

    Attention dropout is left out: CUDA's flash kernel keeps no mask but makes the same random numbers again.
    """
    groups = query.shape[1] // key.shape[1]
    if repeat and groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    result = functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, is_causal=True, enable_gqa=not repeat and groups > 1
    )
    return result.transpose(1, 2).contiguous(), None


def _flash(_module: Any, query: Any, key: Any, value: Any, _mask: Any, **kwargs: Any) -> tuple[Any, None]:
    return _attend(query, key, value, repeat=False, scaling=kwargs.get("scaling"))


def _memory_efficient(_module: Any, query: Any, key: Any, value: Any, _mask: Any, **kwargs: Any) -> tuple[Any, None]:
    return _attend(query, key, value, repeat=True, scaling=kwargs.get("scaling"))


def register() -> None:
    """Make the two attentions known to transformers, each with a mask function that makes no mask."""
    for name, function in ((FLASH, _flash), (MEMORY_EFFICIENT, _memory_efficient)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *_args, **_kwargs: None)


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """Dropout that keeps a mask of one byte per value, as CUDA's does; the CPU's keeps one in the input's dtype."""
    original = functional.dropout

    def native(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0:
            return values
        return torch.native_dropout(values, p, True)[0]

    functional.dropout = native  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.dropout = original


def cuda_hidden(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that the flash backward takes for a moment beside its results.

    An FP32 accumulator for dq, rounded to blocks of 128 tokens, and the row sums of dout times out; with
    grouped keys, dk and dv for every query head. Source: torch 2.13, aten/src/ATen/native/transformers/cuda/
    flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d, dk_expanded, dv_expanded.
    """
    if func is not _FLASH_BACKWARD:
        return 0
    _grad, query, key, value = args[:4]
    batch, heads, tokens, size = query.shape
    rounded = round_up(tokens, 128)
    head_size = round_up(size, 32 if size <= 128 else 64)
    accumulator = 4 * batch * rounded * heads * head_size
    sums = 4 * batch * heads * rounded
    expanded = 0
    if key.shape[1] != heads:
        expanded = query.element_size() * batch * key.shape[2] * heads * (size + value.shape[3])
    return int(accumulator + sums + expanded)


def no_hidden(_func: Any, _args: tuple[Any, ...]) -> int:
    """Nothing: the CPU's kernels take what their results show."""
    return 0

"""How attention and dropout behave in a trace: the operations that run, and the bytes that only kernels know of.

Worker processes only: imports torch and transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from memcore.units import round_up

# transformers decides by these names what a model supports: "sdpa" must be in them, "flash" must not.
# The tokens that CUDA's flash backward works on at once.
FLASH_BLOCK = 128
FLASH, MEMORY_EFFICIENT = "memcore_sdpa", "memcore_sdpa_repeated"
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001


def _attend(query: Any, key: Any, value: Any, *, repeat: bool, scaling: float | None) -> tuple[Any, None]:
    """Flash attention as torch runs it; it is causal by construction, so no mask is made.

    Attention dropout is left out: CUDA's flash kernel keeps no mask but makes the same random numbers again.
    Values narrower than the keys (latent attention) are padded for the kernel, which knows one head size.
    """
    size = value.shape[-1]
    if size < query.shape[-1]:
        value = functional.pad(value, (0, query.shape[-1] - size))
    groups = query.shape[1] // key.shape[1]
    if repeat and groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    result = functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, is_causal=True, enable_gqa=not repeat and groups > 1
    )
    return result[..., :size].transpose(1, 2).contiguous(), None


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
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute, until the block ends."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


@contextmanager
def flash_taken(config: PretrainedConfig) -> Iterator[None]:
    """While a model is built: our flash attention is let in where the class has flash attention but not torch's own,
    which transformers takes ours for (gpt-oss, Gemma 2)."""
    classes: Any = AutoModelForCausalLM._model_mapping  # noqa: SLF001  no public way to ask
    model_class = classes.get(type(config), None)
    if model_class is None or not model_class._supports_flash_attn:  # noqa: SLF001
        yield
        return
    # The models within a model ask too; the class that they all have in common says it for all of them.
    common = [parent for parent in model_class.mro() if issubclass(parent, PreTrainedModel)][-2]
    with _replaced(common, "_supports_sdpa", True):
        yield


@contextmanager
def recomputed_attention(around: Callable[[Any], Any] = lambda function: function) -> Iterator[None]:
    """Every attention function that transformers hands to a model's layers runs through a checkpoint, within what
    `around` makes of it."""
    original = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = around(original(self, name, default))

        def attention(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return attention

    with _replaced(AttentionInterface, "get_interface", get_interface):
        yield


@contextmanager
def grouped_products() -> Iterator[None]:
    """Let experts' grouped products run on fake tensors of any dtype.

    The kernels take FP32 and 16 bit (torch 2.13, aten/src/ATen/native/GroupedMMUtils.h, _grouped_mm_validate_inputs),
    the shape function (torch/_meta_registrations.py, _meta_grouped_mm_common) BF16 alone.
    """
    shapes: Any = torch._meta_registrations  # noqa: SLF001

    def of_any_dtype(mat_a: torch.Tensor, mat_b: torch.Tensor, *_scales: Any, offs: Any = None, **kwargs: Any) -> Any:
        return shapes._create_grouped_mm_output_tensor(mat_a, mat_b, offs, kwargs.get("out_dtype"))  # noqa: SLF001

    with _replaced(shapes, "_meta_grouped_mm_common", of_any_dtype):
        yield


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """Dropout that keeps a mask of one byte per value, as CUDA's does; the CPU's keeps one in the input's dtype."""

    def native(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0:
            return values
        return torch.native_dropout(values, p, True)[0]

    with _replaced(functional, "dropout", native):
        yield


def cuda_hidden(func: Any, args: tuple[Any, ...]) -> list[tuple[int, bool]]:
    """Bytes that the flash backward takes for a moment beside its results, and whether they follow the sequence
    length rounded up to the kernel's block of `FLASH_BLOCK` tokens.

    An FP32 accumulator for dq, rounded to blocks of 128 tokens, and the row sums of dout times out; with
    grouped keys, dk and dv for every query head. Source: torch 2.13, aten/src/ATen/native/transformers/cuda/
    flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d, dk_expanded, dv_expanded.
    """
    if func is not _FLASH_BACKWARD:
        return []
    _grad, query, key, value = args[:4]
    batch, heads, tokens, size = query.shape
    rounded = round_up(tokens, FLASH_BLOCK)
    head_size = round_up(size, 32 if size <= 128 else 64)
    accumulator = 4 * batch * rounded * heads * head_size
    sums = 4 * batch * heads * rounded
    found = [(accumulator + sums, True)]
    if key.shape[1] != heads:
        found.append((query.element_size() * batch * key.shape[2] * heads * (size + value.shape[3]), False))
    return found


def cpu_hidden(func: Any, args: tuple[Any, ...]) -> list[tuple[int, bool]]:
    """Bytes of the copies that the CPU makes of a pointwise operation's operands where their dtypes differ.

    Source: torch 2.13, aten/src/ATen/TensorIterator.cpp, compute_types (cast_common_dtype_to_outputs); CUDA's kernels
    convert as they read. What comes and goes inside one call is left out (measured with torch 2.13: the flash forward
    takes a buffer per thread, 0.3 MB at 512 tokens, oneDNN's 16-bit products packed copies, as the processor's
    instructions ask): the real runs of tests/trace show where one of them is at a step's peak.
    """
    if torch.Tag.pointwise not in func.tags:
        return []
    floats = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    if len(floats) < 2 or len({tensor.dtype for tensor in floats}) == 1:
        return []
    common = torch.result_type(floats[0], floats[1])
    copied = sum(tensor.numel() for tensor in floats if tensor.dtype != common)
    if func._schema.is_mutable and args[0].dtype != common:  # noqa: SLF001  in place: the result is a copy too
        copied += args[0].numel()
    return [(copied * common.itemsize, False)]

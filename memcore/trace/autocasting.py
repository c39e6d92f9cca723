"""Autocast over FP32 weights in a trace: torch's own, with CUDA's lists of operations where it speaks for CUDA.

Worker processes only: imports torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

# What CUDA's autocast runs in FP32 and the CPU's does not, of what language models use. Source: torch 2.13,
# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE.
_IN_FP32 = (
    "exp", "log", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "logsumexp",
)  # fmt: skip
_TO_FP32 = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "linalg_vector_norm")
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@contextmanager
def cuda_lists() -> Iterator[None]:
    """CUDA's lists of operations for the CPU's autocast, until the block ends: for a whole step, since a recomputed
    forward turns autocast on again."""
    torch_library: Any = torch.library
    library = torch_library.Library("aten", "IMPL")
    try:
        for name in _IN_FP32:
            _register(library, name, _cast_first)
        for name in _TO_FP32:
            _register(library, name, _ask_for_fp32)
        yield
    finally:
        library._destroy()  # noqa: SLF001  else it would stay for the life of the process


def _register(library: Any, name: str, rule: Callable[..., Any]) -> None:
    base, _dot, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    library.impl(name, partial(rule, operation), "AutocastCPU")


def _cast_first(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on FP32 copies of its 16-bit tensors."""
    with _without_autocast():
        return operation(*map(_in_fp32, args), **{name: _in_fp32(value) for name, value in kwargs.items()})


def _ask_for_fp32(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation with an FP32 result, unless a dtype is asked for."""
    names = [argument.name for argument in operation._schema.arguments]  # noqa: SLF001
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dtype") is None and args[0].dtype in _SIXTEEN_BIT:
        given["dtype"] = torch.float32
    with _without_autocast():
        return operation(**given)


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _SIXTEEN_BIT else value


def _without_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001
    return torch._C._ExcludeDispatchKeyGuard(keys)  # noqa: SLF001

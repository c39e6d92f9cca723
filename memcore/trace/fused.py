"""Fused kernels in a trace: what each keeps for the backward, and what it writes in place, without the kernel itself.

Worker processes only: imports torch and transformers.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.trace.fused_lora import fuse_adapters

_SILU = (nn.SiLU, SiLUActivation)
_ROTARY = "apply_rotary_pos_emb"


@contextmanager
def fused(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """The kernels of those names in place of what a model's modules do, until the block ends. Raises UserError where a
    model has nothing of the kind."""
    for name in names:
        if name in _ON_MODULES and not _ON_MODULES[name](model):
            _nothing_to_fuse(name)
    if "rope" not in names:
        yield
        return
    own = {file: getattr(file, _ROTARY) for file in _modeling_files(model)}
    if not own:
        _nothing_to_fuse("rope")
    try:
        for file in own:
            setattr(file, _ROTARY, _rotated)
        yield
    finally:
        for file, function in own.items():
            setattr(file, _ROTARY, function)


def _nothing_to_fuse(name: str) -> None:
    message = _("{field} names {name}, but the model has nothing that this kernel replaces.")
    raise UserError(message.format(field="workload.fused_kernels", name=name), "workload.fused_kernels")


def _fuse_norms(model: nn.Module) -> bool:
    found = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in found:
        norm.forward = partial(_normed, norm)
    return bool(found)


def _normed(norm: Any, values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Norm.apply(values, norm.weight)  # type: ignore[no-untyped-call]
    return result


class _Norm(torch.autograd.Function):
    """The input and an FP32 figure for each row are kept; the gradient of the input takes the place of the output's.

    Source: fms-acceleration 0.6 (of December 2024), plugins/fused-ops-and-kernels, kernels/unsloth/rms_layernorm.py,
    Fast_RMS_Layernorm: the norm's own weight gets no gradient. Liger Kernel's (ops/rms_norm.py, in_place) keeps the
    same, and gives the weight one.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = values.view(-1, values.shape[-1])
        result = torch.empty_like(rows)
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device))
        return result.view(values.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        rows, _weight, _scale = ctx.saved_tensors
        return gradient.view(rows.shape).view(gradient.shape), None


def _fuse_gates(model: nn.Module) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    found: list[Any] = [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in parts) and isinstance(getattr(module, "act_fn", None), _SILU)
    ]
    for mlp in found:
        mlp.forward = partial(_gated, mlp)
    return bool(found)


def _gated(mlp: Any, values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = mlp.down_proj(_Gate.apply(mlp.gate_proj(values), mlp.up_proj(values)))  # type: ignore[no-untyped-call]
    return result


class _Gate(torch.autograd.Function):
    """Both inputs are kept, and their gradients take their places.

    Source: Liger Kernel 0.5, ops/swiglu.py, LigerSiLUMulFunction.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return gate.view_as(gate), up.view_as(up)


def _modeling_files(model: nn.Module) -> list[Any]:
    """The Python modules whose rotary function the model's layers call."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], _ROTARY)]


def _rotated(queries: Any, keys: Any, cos: torch.Tensor, sin: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
    """Source: fms-acceleration, kernels/unsloth/rope_embedding.py, fast_rope_embedding."""
    if cos.shape[-1] != queries.shape[-1]:
        _nothing_to_fuse("rope")
    return tuple(_Rotation.apply(heads.transpose(1, 2), cos, sin).transpose(1, 2) for heads in (queries, keys))  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    """Queries or keys are turned in place, in the forward and in the backward, and nothing is kept but the tables.

    Source: fms-acceleration, kernels/unsloth/rope_embedding.py, Fast_RoPE_Embedding.
    """

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.tables = cos.squeeze(), sin.squeeze()
        batch, tokens, count, size = heads.shape
        return heads.view(batch * tokens, count * size).view(heads.shape)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        batch, tokens, count, size = gradient.shape
        return gradient.reshape(batch * tokens, count * size).view(gradient.shape), None, None


_ON_MODULES = {"rmsnorm": _fuse_norms, "swiglu": _fuse_gates, "lora": fuse_adapters}

"""LoRA through peft's own modules, and a stand-in for linear modules whose weights are packed in 4 bits.

Worker processes only: imports torch and peft.
"""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from memcore.trace.request import Adapters
from memcore.units import ceil_div

_BLOCK = 64


def attach(model: nn.Module, adapters: Adapters, skipped: Sequence[nn.Module]) -> None:
    """Put adapters on a model's targets and freeze all the rest. `skipped`: modules that 4-bit loading leaves as
    they are (the head)."""
    config = LoraConfig(
        r=adapters.rank,
        lora_dropout=adapters.dropout,
        target_modules=list(adapters.targets) if "all-linear" not in adapters.targets else "all-linear",
        fan_in_fan_out=False,
    )
    if adapters.quantization is not None:
        _pack(model, adapters.quantization, skipped)
        config._register_custom_module({PackedLinear: AdaptedPacked})  # noqa: SLF001  peft's way in for own modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft mends the settings for Conv1D, and says so
        inject_adapter_in_model(config, model)


def _pack(model: nn.Module, quantization: str, skipped: Sequence[nn.Module]) -> None:
    """A stand-in for each linear module but those skipped, as transformers 5.24 does it (integrations/
    bitsandbytes.py, replace_with_bnb_linear)."""
    double = quantization == "nf4_double_quant"
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Conv1D) and not any(child is left for left in skipped):
                setattr(module, name, PackedLinear(child, double_quant=double))


class PackedLinear(nn.Linear):
    """A linear module whose weight is stored in 4 bits and unpacked, to the dtype of the computation, for each use.

    Source: bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit: the forward keeps the packed weight alone; the
    backward unpacks it again.
    """

    def __init__(self, packed: nn.Module, *, double_quant: bool) -> None:
        nn.Module.__init__(self)
        weight: Any = packed.weight
        columns_first = isinstance(packed, Conv1D)
        self.in_features = weight.shape[0] if columns_first else weight.shape[1]
        self.out_features = weight.shape[1] if columns_first else weight.shape[0]
        bytes_packed = torch.empty((ceil_div(weight.numel(), 2), 1), dtype=torch.uint8, device=weight.device)
        self.weight = nn.Parameter(bytes_packed, requires_grad=False)
        self.bias = cast(nn.Parameter, packed.bias)
        self.double_quant = double_quant

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """A product with the unpacked weight."""
        shape = (self.out_features, self.in_features)
        result: torch.Tensor = _Unpacked.apply(values, self.weight, self.bias, shape, self.double_quant)  # type: ignore[no-untyped-call]
        return result

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the dtype of the computation.

        Source: fms-acceleration of December 2024, fused_ops/unsloth_lora/utils.py, fast_dequantize.
        """
        shape = (self.out_features, self.in_features)
        weight = torch.empty(shape, dtype=dtype, device=self.weight.device)
        scales = _scales(weight, shape, self.double_quant, in_place=True)
        del scales
        return weight


class _Unpacked(torch.autograd.Function):
    """Source: bitsandbytes 0.50, backends/default/ops.py, _gemm_4bit_default_impl; on CUDA, a fused kernel takes its
    place where there are few tokens (backends/cuda/ops.py, _gemm_4bit_use_custom_cuda)."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        double_quant: bool,
    ) -> torch.Tensor:
        ctx.packed, ctx.shape, ctx.double_quant = packed, shape, double_quant
        scales = _scales(values, shape, double_quant, in_place=False)
        result = nn.functional.linear(values, torch.empty(shape, dtype=values.dtype), bias)
        del scales
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scales = _scales(gradients[0], ctx.shape, ctx.double_quant, in_place=True)
        weight = torch.empty(ctx.shape, dtype=gradients[0].dtype)
        del scales
        return torch.matmul(gradients[0], weight), None, None, None, None


def _scales(like: torch.Tensor, shape: tuple[int, int], double_quant: bool, *, in_place: bool) -> torch.Tensor | None:
    """The scales in FP32, where they are packed too: unpacked, and then moved by their offset."""
    if not double_quant:
        return None
    unpacked = torch.empty(ceil_div(shape[0] * shape[1], _BLOCK), dtype=torch.float32, device=like.device)
    return unpacked if in_place else torch.empty_like(unpacked)


class AdaptedPacked(LoraLinear):
    """peft's adapter on a packed linear module.

    Source: peft 0.21, tuners/lora/bnb.py, Linear4bit.forward: the base's result is cloned, and the adapter's is cast
    to its dtype before the two are added.
    """

    def forward(self, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """The base's result and the adapter's."""
        result: torch.Tensor = self.base_layer(x).clone()
        for name in self.active_adapters:
            first: Any = self.lora_A[name]
            cast = self._cast_input_dtype(x, first.weight.dtype)
            output = self.lora_B[name](first(self.lora_dropout[name](cast))) * self.scaling[name]
            result = result + output.to(result.dtype)
        return result

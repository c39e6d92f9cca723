"""Stand-ins for linear modules whose frozen weights are packed in 4 bits, and for peft's adapters on them.

Worker processes only: imports torch and peft. A packed weight's bytes are known from elsewhere (memcore.packing); what
a trace adds is what unpacking it takes for a moment.
"""

from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from memcore.packing import NF4_BLOCK
from memcore.units import ceil_div


class PackedLinear(nn.Linear):
    """A linear module whose weight is stored in 4 bits and unpacked, to the dtype of the computation, for each use.

    Source: bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit: the forward keeps the packed weight alone; the
    backward unpacks it again. nn/modules.py, Linear4bit.forward: the input is cast to the dtype of the computation,
    the result back to the input's. `packed_from`: the dtype that it is unpacked to, and then cast from, where that is
    not `computed`. `keeps_input`: as versions before 0.43.2 did (autograd/_functions.py: ``ctx.tensors = (A, B)``).
    """

    casts_back = True

    def __init__(
        self,
        packed: nn.Module,
        computed: torch.dtype,
        packed_from: torch.dtype | None = None,
        *,
        storage: torch.dtype = torch.uint8,
        double_quant: bool = False,
        keeps_input: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        weight: Any = packed.weight
        columns_first = isinstance(packed, Conv1D)
        self.in_features = weight.shape[0] if columns_first else weight.shape[1]
        self.out_features = weight.shape[1] if columns_first else weight.shape[0]
        values = ceil_div(weight.numel(), 2 * storage.itemsize)
        stored = torch.empty((values, 1), dtype=storage, device=weight.device)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = cast(nn.Parameter, packed.bias)
        self.computed, self.packed_from = computed, packed_from or computed
        self.double_quant, self.keeps_input = double_quant, keeps_input

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """A product with the unpacked weight."""
        result: torch.Tensor = _Unpacked.apply(values.to(self.computed), self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return result.to(values.dtype) if self.casts_back else result

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the dtype of the computation.

        Source: fms-acceleration of December 2024, fused_ops/unsloth_lora/utils.py, fast_dequantize.
        """
        weight = torch.empty((self.out_features, self.in_features), dtype=dtype, device=self.weight.device)
        scales = _scales(weight, self, in_place=True)
        del scales
        return weight


class PackedIntegers(PackedLinear):
    """The same with AutoGPTQ's integers.

    Source: AutoGPTQ 0.7, nn_modules/triton_utils/dequant.py, QuantLinearFunction and quant_matmul_248: forward and
    backward unpack the weight; nn_modules/qlinear/qlinear_tritonv2.py, QuantLinear.forward: the result stays in FP16.
    """

    casts_back = False


class _Unpacked(torch.autograd.Function):
    """Source: bitsandbytes 0.50, backends/default/ops.py, _gemm_4bit_default_impl; on CUDA, a fused kernel takes its
    place where there are few tokens (backends/cuda/ops.py, _gemm_4bit_use_custom_cuda)."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, module: PackedLinear
    ) -> torch.Tensor:
        # Attributes, as bitsandbytes has them: a checkpoint does not see them.
        ctx.packed, ctx.module = packed, module
        ctx.kept = values if module.keeps_input and ctx.needs_input_grad[0] else None
        scales = _scales(values, module, in_place=False)
        result = nn.functional.linear(values, _made(module, values.dtype), bias)
        del scales
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scales = _scales(gradients[0], ctx.module, in_place=True)
        weight = _made(ctx.module, gradients[0].dtype)
        del scales
        return torch.matmul(gradients[0], weight), None, None, None


def _made(module: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight, cast from the dtype that it is unpacked to."""
    unpacked = torch.empty((module.out_features, module.in_features), dtype=module.packed_from)
    return unpacked.to(dtype)


def _scales(like: torch.Tensor, module: PackedLinear, *, in_place: bool) -> torch.Tensor | None:
    """The scales in FP32, where they are packed too: unpacked, and then moved by their offset."""
    if not module.double_quant:
        return None
    size = ceil_div(module.out_features * module.in_features, NF4_BLOCK)
    unpacked = torch.empty(size, dtype=torch.float32, device=like.device)
    return unpacked if in_place else torch.empty_like(unpacked)


class AdaptedPacked(LoraLinear):
    """peft's adapter on a packed linear module.

    Source: peft 0.21, tuners/lora/bnb.py, Linear4bit.forward: the base's result is cloned. Without autocast the
    adapter's input is cast to its dtype, and its result to the base's before the two are added.
    """

    # Whether the step runs under the autocast that peft asks for, which is CUDA's.
    autocast = False

    def forward(self, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """The base's result and the adapter's."""
        result = self.based(x)
        for name in self.active_adapters:
            first: Any = self.lora_A[name]
            values = x if self.autocast else self._cast_input_dtype(x, first.weight.dtype)
            output = self.lora_B[name](first(self.lora_dropout[name](values))) * self.scaling[name]
            result = result + (output if self.autocast else output.to(result.dtype))
        return result

    def based(self, x: torch.Tensor) -> torch.Tensor:
        """The base's result, to which the adapter's is added."""
        result: torch.Tensor = self.base_layer(x).clone()
        return result


class AdaptedIntegers(AdaptedPacked):
    """The same on AutoGPTQ's module, whose result is not cloned. Source: peft 0.14, tuners/lora/gptq.py."""

    def based(self, x: torch.Tensor) -> torch.Tensor:
        """The base's result, to which the adapter's is added."""
        result: torch.Tensor = self.base_layer(x)
        return result

"""Linear modules whose products are in float8, as torchao swaps them in, in a trace.

Worker processes only: imports torch. Does what torchao 0.17 does, float8: float8_linear.py
(matmul_with_hp_or_float8_args), float8_utils.py (tensor_to_amax, amax_to_scale, to_fp8_saturated), float8_ops.py
(preprocess_addmm, addmm_float8_unwrapped), config.py (from_recipe_name) and fsdp_utils.py
(WeightWithDynamicFloat8CastTensor); torchao's own code, traced in the same way, takes the same bytes.

Input and weight are cast anew for each of the three products, and kept for the backward as they came, in 16 bits.
Only a weight that FSDP2 gathers in float8 is never there in another dtype.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch._dynamo  # what is compiled takes a product as one operation
from torch import nn

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario import FP8_MULTIPLE

_aten: Any = torch.ops.aten
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# float8_utils.py, EPS
_SMALLEST = 1e-12


class Float8(torch.Tensor):
    """Values in float8 with their scale, which pass for a tensor of `passes_for`. `dim`: the dimension that a scale is
    over, None for one scale in all. `fast`: products that it is the first factor of accumulate fast."""

    data8: torch.Tensor
    scale: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001  torch's way to have no say there

    @staticmethod
    def __new__(
        cls, data8: torch.Tensor, scale: torch.Tensor, passes_for: torch.dtype, dim: int | None, fast: bool
    ) -> "Float8":
        """A wrapper without memory of its own."""
        options = {"strides": data8.stride(), "storage_offset": data8.storage_offset(), "device": data8.device}
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001  torch's way to make one
        made: Float8 = make(cls, data8.size(), dtype=passes_for, requires_grad=data8.requires_grad, **options)
        made.data8, made.scale, made.dim8, made.fast = data8, scale, dim, fast
        return made

    def __init__(self, *_args: Any) -> None:
        self.dim8: int | None
        self.fast: bool

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8({tuple(self.shape)}, {self.data8.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["data8", "scale"], (self.dtype, self.dim8, self.fast)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], rest: tuple[Any, ...], *_outer: Any) -> "Float8":
        return Float8(inner["data8"], inner["scale"], *rest)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """A product, or what gives the same values in another arrangement."""
        if func is _aten.mm.default:
            return _multiplied(*args)
        assert func in _ARRANGING, f"{func} of float8 values"
        own, *rest = args
        scale = own.scale
        if scale.ndim > 1:  # by rows, which are flattened or transposed
            scale = scale.t() if func is _aten.t.default else scale.view(-1, 1)
        return Float8(func(own.data8, *rest, **(kwargs or {})), scale, own.dtype, own.dim8, own.fast)


_ARRANGING = frozenset(
    {_aten.detach.default, _aten.t.default, _aten.as_strided.default, _aten.view.default, _aten.alias.default}
)


def cast(values: torch.Tensor, to: torch.dtype, dim: int | None = None, *, fast: bool = False) -> Float8:
    """Values in float8 by one scale, or by one for each row across `dim`, which is then a power of 2."""
    most = torch.finfo(to).max
    scale = _scale(values, most, dim)
    scaled = values.to(torch.float32) * scale
    return Float8(scaled.clamp(min=-most, max=most).to(to), scale, values.dtype, dim, fast)


def _scale(values: torch.Tensor, most: float, dim: int | None) -> torch.Tensor:
    largest = values.abs().max() if dim is None else values.abs().amax(dim, keepdim=True)
    exact = (most / largest.to(torch.float64).clamp(min=_SMALLEST)).to(torch.float32)
    return exact if dim is None else exact.log2().floor().exp2()


def _multiplied(first: Float8, second: Float8) -> torch.Tensor:
    """A product in the dtype that the factors pass for: rows by columns, each copied where it is not laid out so."""
    rows = first.data8 if _in_rows(first.data8) else first.data8.contiguous()
    columns = second.data8.t().contiguous().t() if _in_rows(second.data8) else second.data8
    scales = [first.scale, second.scale]
    if first.dim8 is not None and second.dim8 is None:
        scales[1] = scales[1].repeat(columns.shape[1]).reshape(1, -1)
    inverse = [scale.reciprocal() for scale in scales]
    if first.dim8 is None or first.fast:
        return _product(rows, columns, inverse, first)
    # The kernel by rows is slow where it accumulates exactly: torchao scales the result itself.
    after = inverse[0] * inverse[1]
    ones = [torch.ones((), dtype=torch.float32, device=rows.device) for _each in inverse]
    result = _product(rows, columns, ones, first)
    result *= after
    return result


def _product(rows: torch.Tensor, columns: torch.Tensor, scales: list[torch.Tensor], like: Float8) -> torch.Tensor:
    multiply: Any = torch._scaled_mm  # noqa: SLF001  torch's name for it
    options = {"out_dtype": like.dtype, "use_fast_accum": like.fast}
    result: torch.Tensor = multiply(rows, columns, scale_a=scales[0], scale_b=scales[1], **options)
    return result


def _in_rows(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) > matrix.stride(1) and matrix.stride(1) == 1


@torch._dynamo.allow_in_graph  # noqa: SLF001  as torchao does
class _Product(torch.autograd.Function):
    """The product of a linear module and its two gradients, each of freshly cast factors."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        ctx.recipe = recipe
        by_row = recipe != "tensorwise"
        first = cast(values, _E4M3, -1 if by_row else None, fast=True)
        second = weight if isinstance(weight, Float8) else cast(weight, _E4M3, 0 if by_row else None)
        rows: torch.Tensor = first.reshape(-1, values.shape[-1])
        return torch.mm(rows, second).reshape(*values.shape[:-1], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        values, weight = ctx.saved_tensors
        rows, gradient = (each.reshape(-1, each.shape[-1]) for each in (values, gradients[0]))
        by_row, exact = ctx.recipe != "tensorwise", ctx.recipe == "rowwise_with_gw_hp"
        to = _E4M3 if by_row else _E5M2
        first = cast(gradient, to, -1 if by_row else None)
        own = isinstance(weight, Float8)
        second = weight if own else cast(weight, _E4M3, -1 if by_row and not exact else None)
        of_values = torch.mm(first, second.t()).reshape(values.shape)
        if exact:
            return of_values, torch.mm(gradient.t(), rows).t(), None
        across = 0 if by_row else None
        again, kept = cast(gradient, to, across), cast(rows, _E4M3, across)
        return of_values, torch.mm(again.t(), kept).t(), None


class Float8Linear(nn.Linear):
    """A linear module with such products; its bias is added in 16 bits."""

    recipe: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the base class's name
        """The product, and the bias."""
        result: torch.Tensor = _Product.apply(input, self.weight.t(), self.recipe)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias.to(result.dtype)


def convert(model: Any, recipe: str) -> None:
    """Every linear module of a model but its head, as torchtitan has it (quantization/float8.py, commit e7c0cae9).
    Raises UserError where a model has none, or one that float8 products cannot take."""
    head = model.get_output_embeddings()
    found: list[Any] = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    if not found:
        raise UserError(
            _("{field} is set, but the model has no linear module.").format(field="recipe.fp8"), "recipe.fp8"
        )
    for module in found:
        if module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE:
            message = _("{field} is set, but a linear module of {inputs} by {outputs} is no multiple of {multiple}.")
            said = message.format(
                field="recipe.fp8", inputs=module.in_features, outputs=module.out_features, multiple=FP8_MULTIPLE
            )
            raise UserError(said, "recipe.fp8")
        module.__class__ = Float8Linear
        module.recipe = recipe


def gather_in_float8(parameters: Iterable[Any]) -> None:
    """Let FSDP2 gather the weights of such modules in float8: each shard is cast by a scale that all ranks share.

    `parameters`: FSDP2's own, of which those hooks are asked for at each gather (torch 2.13, distributed/fsdp/
    _fully_shard/_fsdp_param.py, all_gather_inputs and init_unsharded_param).
    """
    for parameter in parameters:
        if isinstance(parameter._module_info.module, Float8Linear) and parameter._module_info.param_name == "weight":  # noqa: SLF001
            shard = parameter._sharded_local_tensor  # noqa: SLF001
            shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = _before(shard), _after
            parameter._init_extensions()  # noqa: SLF001  else they are looked for when it is made


def _before(shard: torch.Tensor) -> Callable[[Any], Any]:
    def before(_mesh: Any) -> Any:
        made = cast(shard, _E4M3)
        return (made.data8,), (made.scale,)

    assert len(inspect.signature(before).parameters) == 1, "FSDP2 counts them"
    return before


def _after(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """The gathered weight, which passes for one of the computation's dtype, and the storages that it is in."""
    (data8,), (scale,) = outputs, metadata
    if out is not None:
        out.scale = scale
        return None
    return Float8(data8, scale, dtype, None, False), (data8,)

"""Frozen weights packed in 4 bits: which weights, and the bytes of each as its library stores it.

The parts of a packed weight are not shared out alike: an engine that divides weights divides the packed values, and
each rank has the rest, scales above all, whole.
"""

from dataclasses import dataclass

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.inventory import Inventory, Role, Tensor, TensorKind
from memcore.scenario import Method, Quantization, Recipe
from memcore.units import ceil_div

# The values that share a scale. transformers 5.24 leaves bitsandbytes' block size at its default; AutoGPTQ's default.
NF4_BLOCK, GPTQ_GROUP = 64, 128

_SOURCES = {
    Quantization.NF4: "arXiv 2305.14314; bitsandbytes 0.50, functional.py, quantize_4bit: blocks of 64",
    Quantization.NF4_DOUBLE_QUANT: "arXiv 2305.14314; bitsandbytes 0.50, functional.py, quantize_4bit: blocks of 64, "
    "scales of 256",
    Quantization.GPTQ_INT4: "AutoGPTQ 0.7, nn_modules/qlinear/qlinear_tritonv2.py, QuantLinear: qweight, qzeros, "
    "scales, g_idx",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How frozen weights are packed: by which method, with how many values to a scale (-1: an output's whole
    column), and whether the head is packed too."""

    quantization: Quantization
    group_size: int
    head: bool = False

    @property
    def source(self) -> str:
        """Where the library stores it so."""
        return _SOURCES[self.quantization]


def packing_of(recipe: Recipe) -> Packing | None:
    """The recipe's packing; None where the weights are not packed."""
    if recipe.method is not Method.QLORA:
        return None
    quantization = recipe.quantization or Quantization.NF4_DOUBLE_QUANT
    usual = GPTQ_GROUP if quantization is Quantization.GPTQ_INT4 else NF4_BLOCK
    return Packing(
        quantization=quantization,
        group_size=recipe.quant_group_size or usual,
        head=recipe.quantize_lm_head,
    )


def is_packed(tensor: Tensor, packing: Packing | None) -> bool:
    """Whether this tensor is packed: linear weights; the head (and an embedding that is tied to it) only where that is
    asked for; experts in a stacked parameter never."""
    if packing is None or tensor.kind not in (TensorKind.LINEAR, TensorKind.CONV1D):
        return False
    return packing.head or tensor.role is not Role.HEAD


def packed_tensors(inventory: Inventory, packing: Packing) -> tuple[Tensor, ...]:
    """A model's packed tensors. Raises UserError where a head is asked for that the model has not."""
    if packing.head and not any(tensor.role is Role.HEAD for tensor in inventory.tensors()):
        message = _("recipe.quantize_lm_head is set, but this model's head is its embedding, which is not packed.")
        raise UserError(message, "recipe.quantize_lm_head")
    return tuple(tensor for tensor in inventory.tensors() if is_packed(tensor, packing))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBytes:
    """Bytes of a packed weight: the packed `values`, which can be divided among ranks, and the `scales` with all else
    that each rank has whole."""

    values: int
    scales: int


def packed_bytes(tensor: Tensor, packing: Packing) -> PackedBytes:
    """Bytes of one packed weight."""
    if packing.quantization is not Quantization.GPTQ_INT4:
        double = packing.quantization is Quantization.NF4_DOUBLE_QUANT
        return PackedBytes(values=ceil_div(tensor.numel, 2), scales=_nf4_scales(tensor.numel, double_quant=double))
    rows, columns = tensor.shape
    return _gptq(*((rows, columns) if tensor.kind is TensorKind.CONV1D else (columns, rows)), packing.group_size)


def _nf4_scales(numel: int, *, double_quant: bool) -> int:
    """What bitsandbytes keeps beside a weight's packed values.

    An absmax for each block of 64, in FP32, or one byte each with an FP32 absmax for each 256 of them, a 256-entry FP32
    table and an FP32 offset; and the 16-entry FP32 table of values. Source: bitsandbytes 0.50, functional.py,
    quantize_4bit and quantize_blockwise; a test builds some. Versions up to 0.45 share the table among all weights.
    """
    blocks = ceil_div(numel, NF4_BLOCK)
    return 4 * 16 + (blocks + 4 * ceil_div(blocks, 256) + 4 * 256 + 4 if double_quant else 4 * blocks)


def _gptq(inputs: int, outputs: int, group_size: int) -> PackedBytes:
    """What AutoGPTQ stores of a weight from `inputs` to `outputs` features.

    qweight, eight 4-bit values to an int32 along the inputs; for each group of inputs, qzeros packed alike along the
    outputs and scales in FP16; g_idx, the group of each input, as int32. Source: AutoGPTQ 0.7,
    nn_modules/qlinear/qlinear_tritonv2.py, QuantLinear.__init__.
    """
    groups = 1 if group_size == -1 else ceil_div(inputs, group_size)
    packed = 4 * ceil_div(inputs, 8) * outputs
    zeros = 4 * groups * ceil_div(outputs, 8)
    return PackedBytes(values=packed + zeros, scales=2 * groups * outputs + 4 * inputs)

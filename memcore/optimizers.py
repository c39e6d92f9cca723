"""What each optimizer keeps: one rule per optimizer, from its own code. Master weights are not here but
with the precision (:mod:`memcore.recipes`); temporaries of the step are with the engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from memcore.inventory import Role, Tensor
from memcore.units import ceil_div

# bitsandbytes 0.50, optim/optimizer.py: Optimizer2State.init_state (blocks of 256, tensors under
# min_8bit_size = 4096 elements in FP32) and get_state_buffer (only 1e5 elements and more are paged).
BLOCK_8BIT = 256
MIN_8BIT_ELEMENTS = 4096
MIN_PAGED_ELEMENTS = 100_000


class OptimizerName(StrEnum):
    """The optimizers that are known."""

    ADAMW = "adamw"
    ADAM = "adam"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One state that an optimizer keeps: how many values in all, over all ranks."""

    name: str
    elements: int


Tensors = Sequence[Tensor]
Rule = Callable[[Tensors, int, bool], list[Moment]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRule:
    """An optimizer's states.

    `moments(tensors, elements, flat)`: `tensors` are the trained parameters (empty where only their
    number `elements` is known); `flat` says that the engine hands the optimizer one flat slice
    instead of whole tensors. `default_implementation`: torch's own choice, None where it is foreach on a GPU.
    `needs_shapes`: a number of parameters is not enough to count them.
    """

    label: str
    moments: Rule
    source: str
    has_8bit: bool = False
    in_torch: bool = True
    default_implementation: str | None = None
    has_fused: bool = True
    needs_shapes: bool = False
    needs_whole_tensors: bool = False


def _adam(_tensors: Tensors, elements: int, _flat: bool) -> list[Moment]:
    return [Moment(name="momentum", elements=elements), Moment(name="variance", elements=elements)]


def _momentum(_tensors: Tensors, elements: int, _flat: bool) -> list[Moment]:
    return [Moment(name="momentum", elements=elements)]


def _adafactor(tensors: Tensors, elements: int, flat: bool) -> list[Moment]:
    """Row and column means over the last two dimensions; a flat slice has none, so it keeps every value."""
    if flat:
        return [Moment(name="variance", elements=elements)]
    factored = sum(_factors(tensor.shape) for tensor in tensors)
    return [Moment(name="factored_variance", elements=factored)]


def _factors(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return shape[0] if shape else 1
    leading = 1
    for size in shape[:-2]:
        leading *= size
    return leading * (shape[-2] + shape[-1])


def _muon(tensors: Tensors, elements: int, _flat: bool) -> list[Moment]:
    """One momentum for hidden matrices; embeddings, head, vectors and experts stacked in three dimensions,
    which torch's Muon refuses, keep AdamW's two."""
    hidden = sum(tensor.numel for tensor in tensors if is_hidden_matrix(tensor))
    return [Moment(name="momentum", elements=elements), Moment(name="variance", elements=elements - hidden)]


def is_hidden_matrix(tensor: Tensor) -> bool:
    """Whether Muon steps on it, and not AdamW."""
    return len(tensor.shape) == 2 and tensor.role not in (Role.EMBEDDING, Role.HEAD)


OPTIMIZERS = {
    OptimizerName.ADAMW: OptimizerRule(
        label="AdamW",
        moments=_adam,
        source="arXiv 1711.05101; torch 2.13, optim/adam.py, Adam._init_group: exp_avg and exp_avg_sq",
        has_8bit=True,
    ),
    OptimizerName.ADAM: OptimizerRule(
        label="Adam",
        moments=_adam,
        source="arXiv 1412.6980; torch 2.13, optim/adam.py, Adam._init_group: exp_avg and exp_avg_sq",
        has_8bit=True,
    ),
    OptimizerName.ADAFACTOR: OptimizerRule(
        label="Adafactor",
        moments=_adafactor,
        source="arXiv 1804.04235, section 3; torch 2.13, optim/_adafactor.py, Adafactor._init_group: row_var, col_var",
        needs_shapes=True,
        needs_whole_tensors=True,
        default_implementation="for_loop",
        has_fused=False,
    ),
    OptimizerName.LION: OptimizerRule(
        label="Lion",
        moments=_momentum,
        source="arXiv 2302.06675, program 1: one momentum",
        has_8bit=True,
        in_torch=False,
    ),
    OptimizerName.MUON: OptimizerRule(
        label="Muon",
        moments=_muon,
        source="torch 2.13, optim/_muon.py: one momentum_buffer for each hidden matrix; AdamW for the rest",
        needs_shapes=True,
        in_torch=False,
    ),
    OptimizerName.SGD: OptimizerRule(
        label="SGD",
        moments=_momentum,
        source="torch 2.13, optim/sgd.py: momentum_buffer where momentum is not 0, else nothing",
        has_8bit=True,
    ),
}


def bytes_8bit(tensors: Tensors, elements: int, flat: bool) -> int:
    """Bytes of one state in bitsandbytes' block-wise 8-bit form.

    One byte per value and an FP32 absmax per block of 256. Tensors under 4096 elements, and embeddings
    (transformers' Trainer overrides them to 32 bit), stay in FP32. A flat slice is one tensor.
    """
    if flat or not tensors:
        return elements + 4 * ceil_div(elements, BLOCK_8BIT)
    return sum(_bytes_8bit(tensor) for tensor in tensors)


def _bytes_8bit(tensor: Tensor) -> int:
    if tensor.numel < MIN_8BIT_ELEMENTS or tensor.role is Role.EMBEDDING:
        return 4 * tensor.numel
    return tensor.numel + 4 * ceil_div(tensor.numel, BLOCK_8BIT)


def paged_bytes(tensors: Tensors, elements: int, flat: bool, bits: int) -> int:
    """Bytes of one paged state that live in unified memory: the values of tensors with 1e5 elements and more.

    An 8-bit state's absmax is not paged.
    """
    if flat or not tensors:
        return elements * bits // 8 if elements >= MIN_PAGED_ELEMENTS else 0
    in_32_bit = bits == 32
    return sum(
        tensor.numel * (4 if in_32_bit or tensor.role is Role.EMBEDDING else 1)
        for tensor in tensors
        if tensor.numel >= MIN_PAGED_ELEMENTS
    )

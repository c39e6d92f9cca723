"""What the stages share. Symbols: Psi parameters, N ranks, B reduce_bucket_size in elements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memcore.engines.base import Inputs, backward_share, is_update, resident, step_temporary
from memcore.models import Tensor
from memcore.scenario import Device, ZeroConfig
from memcore.states import State
from memcore.terms import Category, Formula, Moment, Phase, Term, during, in_phases, product
from memcore.units import ceil_div, round_up
from memcore.zero import ALIGNMENT_ELEMENTS

STAGE_12 = "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py"
STAGE_3 = "deepspeed 0.19.8, runtime/zero/stage3.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The sizes that the terms share. `slice_elements` is one rank's padded share of the trained values."""

    inputs: Inputs
    config: ZeroConfig
    slice_elements: int
    grad_bytes: int

    @property
    def optimizer_offloaded(self) -> bool:
        """Whether the optimizer's states and its update are on the host."""
        return self.inputs.scenario.offload.optimizer is not Device.NONE

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The trained tensors in order; empty where they are not known one by one."""
        return trained_tensors(self.inputs)


def trained_tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    """The trained tensors in order: all of the model's; empty for a bare count and for adapters."""
    inventory = inputs.inventory
    known = inventory is not None and inputs.states.trained == inventory.n_params
    return tuple(inventory.tensors()) if known and inventory is not None else ()


def slice_elements(inputs: Inputs) -> int:
    """Elements of a rank's slice: the flat group padded to 2 N, or at stage 3 each tensor padded to N."""
    ranks, trained, tensors = inputs.ranks, inputs.states.trained, trained_tensors(inputs)
    if inputs.stage < 3:
        return round_up(trained, ALIGNMENT_ELEMENTS * ranks) // ranks
    return sum(ceil_div(tensor.numel, ranks) for tensor in tensors) if tensors else ceil_div(trained, ranks)


def kept(plan: Plan) -> list[Term]:
    """Weights and optimizer states, less what is offloaded to the host."""
    offload = plan.inputs.scenario.offload
    gone = {Category.OPTIMIZER} if plan.optimizer_offloaded else set()
    if offload.parameters is not Device.NONE:
        gone.add(Category.WEIGHTS)
    states = plan.inputs.states.of(Category.WEIGHTS, Category.OPTIMIZER)
    return [resident(plan.inputs, state) for state in states if state.category not in gone]


def padding(plan: Plan) -> list[Term]:
    """What rounding slices up adds over the theory's ceil(Psi / N), over all kept 4-byte and 2-byte states."""
    trained, ranks = plan.inputs.states.trained, plan.inputs.ranks
    extra = plan.slice_elements - ceil_div(trained, ranks) if plan.inputs.stage else 0
    width = sum(
        state.element_bytes or 0
        for state in plan.inputs.states.of(Category.WEIGHTS, Category.OPTIMIZER)
        if state.divided_from <= plan.inputs.stage and state.elements == trained
    )
    if extra <= 0 or plan.optimizer_offloaded or width == 0:
        return []
    return [
        Term(
            name="slice_padding",
            category=Category.OPTIMIZER,
            bytes_at=extra * width,
            formula=Formula(symbols=r"w\,(S - \lceil \Psi / N \rceil)", numbers=product(width, extra)),
            source=f"{STAGE_12}, nccl_start_alignment_factor; partition_parameters.py, _padding_size",
        )
    ]


def gradient_state(plan: Plan) -> State:
    """The gradients in the dtype that the backward makes them in."""
    return plan.inputs.states.of(Category.GRADIENTS)[0]


def fp32_accumulation(plan: Plan) -> State | None:
    """The second gradient of conventions that accumulate in FP32."""
    gradients = plan.inputs.states.of(Category.GRADIENTS)
    return gradients[1] if len(gradients) > 1 else None


def alive_gradients(inputs: Inputs, moment: Moment) -> bool:
    """Whether a reduced slice of the gradients is alive: until the step has cast it, if it must."""
    if moment.phase in (Phase.FORWARD, Phase.LOSS):
        return inputs.accumulates
    return moment.phase is Phase.BACKWARD or (moment.phase is Phase.OPTIMIZER and not is_update(moment))


def slice_term(plan: Plan, width: int, elements: int, alive: Callable[[Moment], bool], source: str) -> Term:
    """This rank's reduced gradients."""
    num_bytes = width * elements
    return Term(
        name="gradient_slice",
        category=Category.GRADIENTS,
        bytes_at=during(plan.inputs.timeline, lambda moment: num_bytes if alive(moment) else 0),
        formula=Formula(symbols=rf"{width}\,\Psi / N", numbers=product(width, elements)),
        source=source,
    )


def bucket(plan: Plan, copies: int, phases: tuple[Phase, ...], source: str) -> list[Term]:
    """The flat buffer that gradients are copied into; without contiguous_gradients there is none."""
    if not plan.config.contiguous_gradients:
        return []
    elements, width = plan.config.reduce_bucket_size, plan.grad_bytes
    return [
        Term(
            name="reduce_bucket",
            category=Category.COMMUNICATION,
            bytes_at=in_phases(plan.inputs.timeline, copies * elements * width, *phases),
            formula=Formula(
                symbols=rf"{copies} \times {width}\,B" if copies > 1 else rf"{width}\,B",
                numbers=product(copies, width, elements) if copies > 1 else product(width, elements),
            ),
            source=source,
        )
    ]


def copies_at(inputs: Inputs, readying: int, updating: int) -> tuple[int, ...]:
    """Bytes of gradient copies while the step readies the gradients, and what is left of them at its update."""

    def at(moment: Moment) -> int:
        if is_update(moment):
            return updating
        return readying if moment.phase is Phase.OPTIMIZER and moment.segment == "gradients" else 0

    return during(inputs.timeline, at)


def momentary_gradients(plan: Plan, source: str) -> list[Term]:
    """What the backward holds for a moment beside bucket and slice: the newest gradient before it is copied, and
    the bucket's contents a second time while they are reduced (flattened where they belong to several ranks,
    interleaved by rank at stage 3), from the layer on whose gradients fill the bucket for the first time."""
    if plan.inputs.ranks == 1:
        return []
    width, timeline = plan.grad_bytes, plan.inputs.timeline
    filled = min(plan.config.reduce_bucket_size, plan.inputs.states.trained)
    made = backward_share(plan.inputs)

    def at(moment: Moment) -> int:
        if moment.phase is not Phase.BACKWARD:
            return 0
        is_full = not isinstance(moment.segment, int) or made.get(moment.segment, filled) >= filled
        return width * filled if is_full else 0

    copy = Term(
        name="reduce_flatten",
        category=Category.COMMUNICATION,
        bytes_at=during(timeline, at),
        formula=Formula(symbols=rf"{width}\,\min(\Psi, B)", numbers=product(width, filled)),
        source=source,
    )
    return [copy, *_newest_gradient(plan)]


def _newest_gradient(plan: Plan) -> list[Term]:
    largest = _largest_by_layer(plan)
    if not largest:
        return []
    width = plan.grad_bytes

    def at(moment: Moment) -> int:
        inside = moment.phase is Phase.BACKWARD and isinstance(moment.segment, int)
        return width * largest[moment.segment] if inside and isinstance(moment.segment, int) else 0

    return [
        Term(
            name="newest_gradient",
            category=Category.GRADIENTS,
            bytes_at=during(plan.inputs.timeline, at),
            formula=Formula(symbols=rf"{width}\,\psi_{{max}}", numbers=product(width, max(largest))),
            source="torch 2.13, autograd: a whole gradient exists before any hook can take it",
        )
    ]


def _largest_by_layer(plan: Plan) -> list[int]:
    """Elements of the largest trained tensor in each layer's backward, head in the last, embedding in the first."""
    inventory = plan.inputs.inventory
    if inventory is None or not plan.tensors or not inventory.layers:
        return []
    largest = [0] * len(inventory.layers)
    seen_layer = False
    for block in inventory.blocks:
        seen_layer = seen_layer or block.layer is not None
        place = block.layer if block.layer is not None else (len(largest) - 1 if seen_layer else 0)
        largest[place] = max(largest[place], *(tensor.numel for tensor in block.tensors))
    return largest


def norm_copy(plan: Plan, source: str) -> list[Term]:
    """The gradients' norm is taken in FP64, one gradient (this rank's piece of it) at a time.

    8 bytes per value: get_grad_norm_direct casts to get_norm_dtype(), FP64 where the device has it. With many
    ranks it can bind: a piece of the embedding is then as large as the whole slice.
    """
    if not plan.tensors or plan.optimizer_offloaded:
        return []
    largest = max(tensor.numel for tensor in plan.tensors)
    piece = ceil_div(largest, plan.inputs.ranks) if plan.inputs.stage == 3 else min(largest, plan.slice_elements)
    return [
        Term(
            name="norm_copy",
            category=Category.OPTIMIZER,
            bytes_at=during(plan.inputs.timeline, lambda m: 8 * piece if m.segment == "norm" else 0),
            formula=Formula(symbols=r"8\,\psi_{max}", numbers=product(8, piece)),
            source=source,
        )
    ]


def temporaries(plan: Plan, values: int) -> list[Term]:
    """The optimizer's own temporaries for `values` values in one flat slice, where it runs on the GPU."""
    if plan.optimizer_offloaded:
        return []
    return step_temporary(plan.inputs, values, plan.inputs.states.trained_as.state_dtype.size, (values,))


def touched_elements(tensors: Sequence[Tensor], slice_size: int, ranks: int) -> list[int]:
    """For each rank the elements of all tensors that its slice of the flat group touches, whole."""
    touched = [0] * ranks
    start = 0
    for tensor in tensors:
        end = start + tensor.numel
        for rank in range(start // slice_size, min(ceil_div(end, slice_size), ranks)):
            touched[rank] += tensor.numel
        start = end
    return touched

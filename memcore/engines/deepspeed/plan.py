"""What the stages share. Symbols: Psi parameters, N ranks, B reduce_bucket_size in elements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memcore.engines.base import Inputs, backward_places, is_update, resident
from memcore.engines.deepspeed.reduction import Gradient, Instant, Segment, pieces_of
from memcore.engines.step_temporaries import step_temporary
from memcore.engines.zero3_order import execution_key
from memcore.inventory import Tensor
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
        formula=Formula(symbols=rf"{width}\,S_g", numbers=product(width, elements)),
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


def arriving_gradients(plan: Plan) -> list[Gradient]:
    """The trained tensors' gradients in the order of the backward, with the ranks that their pieces belong to."""
    inventory = plan.inputs.inventory
    if inventory is None or not plan.tensors or not inventory.layers:
        return []
    pieces = pieces_of([tensor.numel for tensor in plan.tensors], plan.slice_elements)
    found: list[Gradient] = []
    for block, segment in backward_places(inventory):
        own = sorted(zip(block.tensors, pieces, strict=False), key=lambda pair: execution_key(pair[0]))
        found += [Gradient(segment=segment, numel=tensor.numel, pieces=piece) for tensor, piece in own]
    return found[::-1]


def passing_gradients(plan: Plan, instants: Mapping[Segment, Instant], source: str) -> list[Term]:
    """What the backward holds for a moment beside bucket and slice: gradients in storages of their own, and copies of
    what is being reduced."""
    width, timeline = plan.grad_bytes, plan.inputs.timeline

    def term(name: str, category: Category, at: Callable[[Instant], int], symbols: str, where: str) -> list[Term]:
        by_segment: dict[object, int] = {segment: at(instant) for segment, instant in instants.items()}
        most = max(by_segment.values(), default=0)
        if not most:
            return []
        return [
            Term(
                name=name,
                category=category,
                bytes_at=during(timeline, lambda m: by_segment.get(m.segment, 0) if m.phase is Phase.BACKWARD else 0),
                formula=Formula(symbols=symbols, numbers=product(width, most // width)),
                source=where,
            )
        ]

    return [
        *term("reduce_flatten", Category.COMMUNICATION, lambda each: each.copies, rf"{width}\,\Psi_{{bucket}}", source),
        *term(
            "newest_gradient",
            Category.GRADIENTS,
            lambda each: width * each.gradients,
            rf"{width}\,\psi_{{max}}",
            "torch 2.13, autograd: a whole gradient exists before any hook can take it",
        ),
    ]


def unknown_copies(plan: Plan, source: str) -> list[Term]:
    """Where the tensors are not known one by one: the whole bucket a second time, while it is reduced."""
    if plan.inputs.ranks == 1:
        return []
    width = plan.grad_bytes
    filled = min(plan.config.reduce_bucket_size, plan.inputs.states.trained)
    return [
        Term(
            name="reduce_flatten",
            category=Category.COMMUNICATION,
            bytes_at=in_phases(plan.inputs.timeline, width * filled, Phase.BACKWARD),
            formula=Formula(symbols=rf"{width}\,\min(\Psi, B)", numbers=product(width, filled)),
            source=source,
        )
    ]


def norm_copy(plan: Plan, source: str) -> list[Term]:
    """The gradients' norm is taken in FP64, one gradient (this rank's piece of it) at a time.

    8 bytes per value: get_grad_norm_direct casts to get_norm_dtype(), FP64 where the device has it. With many
    ranks it can bind: a piece of the embedding is then as large as the whole slice.
    """
    if not plan.tensors or plan.optimizer_offloaded:
        return []
    largest = max(tensor.numel for tensor in plan.tensors)
    if plan.inputs.stage == 3:
        piece, symbols = ceil_div(largest, plan.inputs.ranks), r"8\,\lceil \psi_{max} / N \rceil"
    else:
        piece, symbols = min(largest, plan.slice_elements), r"8\,\min(\psi_{max}, S)"
    return [
        Term(
            name="norm_copy",
            category=Category.OPTIMIZER,
            bytes_at=during(plan.inputs.timeline, lambda m: 8 * piece if m.segment == "norm" else 0),
            formula=Formula(symbols=symbols, numbers=product(8, piece)),
            source=source,
        )
    ]


def temporaries(plan: Plan, values: int, in_a_row: Sequence[int] | None = None) -> list[Term]:
    """The optimizer's own temporaries for `values` values, in one flat slice or in tensors one after the other,
    where it runs on the GPU."""
    if plan.optimizer_offloaded:
        return []
    state_bytes = plan.inputs.states.trained_as.state_dtype.size
    return step_temporary(plan.inputs, values, state_bytes, in_a_row or (values,))

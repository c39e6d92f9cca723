"""Stages 1 and 2: the optimizer, and at stage 2 the gradients, in slices of one flat group.

The gradient slice is not Psi / N: copy_grads_in_partition keeps every tensor that the slice touches, whole. With
many ranks and a large embedding that is most of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from memcore.engines.base import growing_gradients, is_update, resident
from memcore.engines.deepspeed.plan import (
    STAGE_12,
    Plan,
    alive_gradients,
    arriving_gradients,
    bucket,
    copies_at,
    fp32_accumulation,
    gradient_state,
    norm_copy,
    passing_gradients,
    slice_term,
    temporaries,
    unknown_copies,
)
from memcore.engines.deepspeed.reduction import (
    Gradient,
    Instant,
    Segment,
    flattened,
    flattened_apart,
    reduce_as_they_come,
    touched,
)
from memcore.states import State
from memcore.terms import Category, Formula, Moment, Phase, Term, Timeline, during, in_phases, product

_SLICE = f"{STAGE_12}, copy_grads_in_partition"
_BUCKET = f"{STAGE_12}, setup_buckets"


def stage_1(plan: Plan) -> list[Term]:
    """Only the optimizer is divided. Without overlap_comm (the default) all gradients are whole until the end of
    the backward, then reduced through the bucket into this rank's slice; the first rank is the fullest."""
    inputs = plan.inputs
    accumulation = fp32_accumulation(plan)
    if accumulation is not None:
        return _bf16_optimizer(plan, accumulation)
    if plan.config.overlap_comm:
        return _reduced_as_they_come(plan, copies=2)
    state, width = gradient_state(plan), plan.grad_bytes
    if not plan.config.contiguous_gradients:
        # Reduced where they are: this rank's slice is a view of them until the step.
        in_place = growing_gradients(inputs, state, state.total_bytes, gone_at=is_update)
        return [in_place, *_step_copies(plan)]
    first_bucket = min(plan.config.reduce_bucket_size, inputs.states.trained) * width
    whole = growing_gradients(inputs, state, state.total_bytes, gone_at=lambda m: m.phase is Phase.OPTIMIZER)

    def at(moment: Moment, num_bytes: int) -> int:
        # The gradients in the bucket gave up their own storage to it when the slice is first allocated.
        return num_bytes - first_bucket if moment.segment == "reduce" else num_bytes

    kept = tuple(at(moment, whole.at(index)) for index, moment in enumerate(inputs.timeline))
    gradients = arriving_gradients(plan)
    elements = touched(gradients, 0) if gradients else plan.slice_elements
    reduced = slice_term(plan, width, elements, _from_the_reduction_on, _SLICE)
    phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) if inputs.accumulates else (Phase.BACKWARD,)
    return [replace(whole, bytes_at=kept), reduced, *bucket(plan, 1, phases, _BUCKET), *_step_copies(plan)]


def _from_the_reduction_on(moment: Moment) -> bool:
    return moment.segment == "reduce" or (moment.phase is Phase.OPTIMIZER and not is_update(moment))


def stage_2(plan: Plan) -> list[Term]:
    """Gradients are divided too."""
    return _reduced_as_they_come(plan, copies=2 if plan.config.overlap_comm else 1)


def _reduced_as_they_come(plan: Plan, copies: int) -> list[Term]:
    """Gradients go into the bucket as the backward makes them; what is this rank's goes on into its slice."""
    accumulation, passing = fp32_accumulation(plan), _passing(plan)
    buckets = bucket(plan, copies, (Phase.BACKWARD,), _BUCKET)
    if plan.optimizer_offloaded and accumulation is None:
        # Reduced slices are copied to pinned host memory as they come.
        return [*buckets, *passing.terms]
    if accumulation is not None:
        # One flat FP32 slice, on the GPU even when the optimizer is not; the update takes it as it is.
        width = accumulation.element_bytes
        assert width is not None, "gradients have one dtype"
        source = f"{STAGE_12}, _build_compact_grad_partition_buffer"
        kept = slice_term(plan, width, plan.slice_elements, lambda m: passing.has_slice(m) or is_update(m), source)
        return [kept, *buckets, *passing.terms, *_norm(plan), *temporaries(plan, plan.slice_elements)]
    kept = slice_term(plan, plan.grad_bytes, passing.slice_elements, passing.has_slice, _SLICE)
    accumulated = [_second_slice(kept, plan.inputs.timeline)] if plan.inputs.accumulates else []
    return [kept, *accumulated, *buckets, *passing.terms, *_step_copies(plan)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passing:
    """What passes through the fullest rank's backward: terms, its slice's elements, and when the slice is there."""

    terms: list[Term]
    slice_elements: int
    has_slice: Callable[[Moment], bool]


def _passing(plan: Plan) -> _Passing:
    inputs, gradients = plan.inputs, arriving_gradients(plan)
    source = f"{STAGE_12}, average_tensor, allreduce_bucket"
    if not gradients:
        return _Passing(
            terms=unknown_copies(plan, source),
            slice_elements=plan.slice_elements,
            has_slice=lambda moment: alive_gradients(inputs, moment),
        )
    runs = [_run(plan, gradients, rank) for rank in _candidates(gradients)]
    instants, elements = max(runs, key=lambda run: _fullest(plan, *run))

    def has_slice(moment: Moment) -> bool:
        if moment.phase is not Phase.BACKWARD or inputs.accumulates or moment.segment is None:
            return alive_gradients(inputs, moment)
        return moment.segment not in instants or instants[moment.segment].has_slice

    return _Passing(terms=passing_gradients(plan, instants, source), slice_elements=elements, has_slice=has_slice)


def _candidates(gradients: Sequence[Gradient]) -> set[int]:
    """Ranks of which one is the fullest: the one whose slice touches most, and those whose gradients come first and
    last."""
    elements: dict[int, int] = {}
    for gradient in gradients:
        for rank, _number in gradient.pieces:
            elements[rank] = elements.get(rank, 0) + gradient.numel
    return {max(elements, key=lambda rank: elements[rank]), min(elements), max(elements)}


def _run(plan: Plan, gradients: Sequence[Gradient], rank: int) -> tuple[Mapping[Segment, Instant], int]:
    width, limit = plan.grad_bytes, plan.config.reduce_bucket_size
    apart = fp32_accumulation(plan) is not None

    def copies(reduced: Sequence[Gradient]) -> int:
        if plan.inputs.ranks == 1:
            return 0
        if not apart:
            return width * flattened(reduced, limit)
        # Added to the FP32 slice piece by piece, each cast for that.
        own = max((number for each in reduced for owner, number in each.pieces if owner == rank), default=0)
        return width * flattened_apart(reduced, limit) + 4 * own

    instants = reduce_as_they_come(
        gradients, limit=limit, rank=rank, keeps_others=plan.inputs.stage == 1, copies=copies, width=width
    )
    return instants, touched(gradients, rank)


def _fullest(plan: Plan, instants: Mapping[Segment, Instant], elements: int) -> int:
    width = plan.grad_bytes
    return max(
        width * each.gradients + each.copies + (width * elements if each.has_slice else 0) for each in instants.values()
    )


def _second_slice(kept: Term, timeline: Timeline) -> Term:
    """With accumulation the new slice is made while the accumulated one is still there."""
    return replace(kept, name="accumulated_slice", bytes_at=in_phases(timeline, kept.largest, Phase.BACKWARD))


def _norm(plan: Plan) -> list[Term]:
    return norm_copy(plan, f"{STAGE_12}, get_grad_norm_direct")


def _step_copies(plan: Plan) -> list[Term]:
    """The step's flat gradient and its FP32 form, beside the slice. Only the last of them is left for the
    update, which adds the optimizer's own temporaries."""
    if plan.optimizer_offloaded:
        return []
    inputs, width = plan.inputs, plan.grad_bytes
    master = inputs.states.trained_as.master_dtype
    cast = master.size if master is not None and width < master.size else 0
    each = width + cast
    copies = Term(
        name="step_gradient_copies",
        category=Category.OPTIMIZER,
        bytes_at=copies_at(inputs, each * plan.slice_elements, (cast or width) * plan.slice_elements),
        formula=Formula(symbols=rf"{each}\,S", numbers=product(each, plan.slice_elements)),
        source=f"{STAGE_12}, step: flatten(averaged_gradients), then .to the master copy's dtype",
    )
    return [copies, *_norm(plan), *temporaries(plan, plan.slice_elements)]


def _bf16_optimizer(plan: Plan, accumulation: State) -> list[Term]:
    """ZeRO-1 with BF16 and FP32 accumulation is a class of its own (runtime/bf16_optimizer.py): a whole FP32
    gradient that stays, 16-bit gradients from the backward to the end of the step, and a flat 16-bit copy of all
    of them while they are reduced."""
    inputs, low = plan.inputs, gradient_state(plan)
    whole = low.total_bytes if inputs.ranks > 1 else 0
    copy = Term(
        name="reduce_flatten",
        category=Category.COMMUNICATION,
        bytes_at=during(inputs.timeline, lambda m: whole if m.segment == "reduce" else 0),
        formula=low.formula,
        source="deepspeed 0.19.8, runtime/engine.py, buffered_allreduce_fallback",
    )
    gradients = [growing_gradients(inputs, low, low.total_bytes), resident(inputs, accumulation)]
    return [*gradients, copy, *temporaries(plan, plan.slice_elements)]

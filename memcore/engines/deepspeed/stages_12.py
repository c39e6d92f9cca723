"""Stages 1 and 2: the optimizer, and at stage 2 the gradients, in slices of one flat group.

The gradient slice is not Psi / N: copy_grads_in_partition keeps every tensor that the slice touches, whole. With
many ranks and a large embedding that is most of it.
"""

from dataclasses import replace

from memcore.engines.base import growing_gradients, is_update, resident
from memcore.engines.deepspeed.plan import (
    STAGE_12,
    Plan,
    alive_gradients,
    bucket,
    copies_at,
    fp32_accumulation,
    gradient_state,
    momentary_gradients,
    norm_copy,
    slice_term,
    temporaries,
    touched_elements,
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
    reduced = slice_term(plan, width, _touched(plan)[0], _from_the_reduction_on, _SLICE)
    phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) if inputs.accumulates else (Phase.BACKWARD,)
    return [replace(whole, bytes_at=kept), reduced, *bucket(plan, 1, phases, _BUCKET), *_step_copies(plan)]


def _from_the_reduction_on(moment: Moment) -> bool:
    return moment.segment == "reduce" or (moment.phase is Phase.OPTIMIZER and not is_update(moment))


def _touched(plan: Plan) -> list[int]:
    """Elements of each rank's gradient slice, tensors whole; one figure for all where tensors are not known."""
    if not plan.tensors:
        return [plan.slice_elements]
    return touched_elements(plan.tensors, plan.slice_elements, plan.inputs.ranks)


def stage_2(plan: Plan) -> list[Term]:
    """Gradients are divided too."""
    return _reduced_as_they_come(plan, copies=2 if plan.config.overlap_comm else 1)


def _reduced_as_they_come(plan: Plan, copies: int) -> list[Term]:
    """Gradients go into the bucket as the backward makes them; what is this rank's goes on into its slice."""
    inputs, accumulation = plan.inputs, fp32_accumulation(plan)
    passing = [
        *bucket(plan, copies, (Phase.BACKWARD,), _BUCKET),
        *momentary_gradients(plan, f"{STAGE_12}, allreduce_bucket: flatten"),
    ]
    if accumulation is not None:
        # One flat FP32 slice, on the GPU even when the optimizer is not; the update takes it as it is.
        width = accumulation.element_bytes
        assert width is not None, "gradients have one dtype"
        source = f"{STAGE_12}, _build_compact_grad_partition_buffer"
        kept = slice_term(
            plan, width, plan.slice_elements, lambda m: alive_gradients(inputs, m) or is_update(m), source
        )
        return [kept, *passing, *_norm(plan), *temporaries(plan, plan.slice_elements)]
    if plan.optimizer_offloaded:
        # Reduced slices are copied to pinned host memory as they come.
        return passing
    elements = max(_touched(plan))
    kept = slice_term(plan, plan.grad_bytes, elements, lambda m: alive_gradients(inputs, m), _SLICE)
    accumulated = [_second_slice(kept, inputs.timeline)] if inputs.accumulates else []
    return [kept, *accumulated, *passing, *_step_copies(plan)]


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
    cast = 4 if inputs.states.trained_as.master_dtype is not None and width < 4 else 0
    each = width + cast
    copies = Term(
        name="step_gradient_copies",
        category=Category.OPTIMIZER,
        bytes_at=copies_at(inputs, each * plan.slice_elements, (cast or width) * plan.slice_elements),
        formula=Formula(symbols=rf"{each}\,\Psi / N", numbers=product(each, plan.slice_elements)),
        source=f"{STAGE_12}, step: flatten(averaged_gradients), then .to(float32)",
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

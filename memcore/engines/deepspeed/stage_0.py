"""Stage 0: nothing is divided; DeepSpeed still flattens and casts. Symbol: F elements that are flattened together."""

from memcore.engines.base import Inputs, growing_gradients, is_update, newest_gradient, slices_in_a_row
from memcore.engines.deepspeed.plan import Plan, copies_at, gradient_state, temporaries
from memcore.terms import Category, Formula, Term, during, product

# Gradients are flattened in groups of so many elements, whatever reduce_bucket_size says (deepspeed 0.19.8,
# runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
FLATTENED_TOGETHER = 500_000_000


def terms(plan: Plan) -> list[Term]:
    """Whole gradients; flattened for the all-reduce, one bucket at a time; cast and flattened for the step."""
    inputs, state, trained = plan.inputs, gradient_state(plan), plan.inputs.states.trained
    flattened = _flattened(plan)
    mixed = inputs.states.trained_as.master_dtype is not None
    flat = mixed and has_fused_adam(plan.inputs)
    found = [growing_gradients(inputs, state, state.total_bytes, gone_at=lambda m: flat and is_update(m))]
    if inputs.accumulates:
        found += newest_gradient(inputs, plan.grad_bytes)
    if inputs.ranks > 1:
        found.append(
            Term(
                name="reduce_bucket",
                category=Category.COMMUNICATION,
                bytes_at=during(inputs.timeline, lambda m: flattened * plan.grad_bytes if m.segment == "reduce" else 0),
                formula=Formula(
                    symbols=rf"{plan.grad_bytes}\,\min(\Psi, F)", numbers=product(plan.grad_bytes, flattened)
                ),
                source="deepspeed 0.19.8, runtime/engine.py, buffered_allreduce_fallback",
            )
        )
    if mixed:
        found.append(_step_copies(plan, flat))
    in_a_row = (trained,) if flat else slices_in_a_row(inputs)
    return [*found, *temporaries(plan, trained, in_a_row)]


def has_fused_adam(inputs: Inputs) -> bool:
    """Whether DeepSpeed's own FusedAdam steps: its default. Any other optimizer is wrapped without flattening
    (runtime/engine.py, _configure_fp16_optimizer)."""
    optimizer = inputs.scenario.recipe.optimizer
    return optimizer.implementation is None and optimizer.name in ("adam", "adamw") and optimizer.bits == 32


def _step_copies(plan: Plan, flat: bool) -> Term:
    """FP32 gradients for the update. Flat, they are cast and then flattened, and the 16-bit ones are let go of."""
    inputs, trained = plan.inputs, plan.inputs.states.trained
    readying = 8 if flat else 4
    file = "fused_optimizer.py, FP16_Optimizer" if flat else "unfused_optimizer.py, FP16_UnfusedOptimizer"
    return Term(
        name="step_gradient_copies",
        category=Category.OPTIMIZER,
        bytes_at=copies_at(inputs, readying * trained, 4 * trained),
        formula=Formula(symbols=r"(4 + 4)\,\Psi" if flat else r"4\,\Psi", numbers=product(readying, trained)),
        source=f"deepspeed 0.19.8, runtime/fp16/{file}.step",
    )


def _flattened(plan: Plan) -> int:
    """Elements of the largest group: each is closed by the tensor with which it exceeds the limit."""
    if not plan.tensors:
        return min(plan.inputs.states.trained, FLATTENED_TOGETHER)
    largest = current = 0
    for tensor in plan.tensors:
        current += tensor.numel
        largest = max(largest, current)
        current = 0 if current > FLATTENED_TOGETHER else current
    return largest

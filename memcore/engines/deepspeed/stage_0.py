"""Stage 0: nothing is divided; DeepSpeed still flattens and casts."""

from memcore.engines.base import growing_gradients, is_update
from memcore.engines.deepspeed.plan import Plan, copies_at, gradient_state, temporaries
from memcore.terms import Category, Formula, Term, during, product


def terms(plan: Plan) -> list[Term]:
    """Whole gradients; flattened for the all-reduce, one bucket at a time; cast and flattened for the step."""
    inputs, state, trained = plan.inputs, gradient_state(plan), plan.inputs.states.trained
    flattened = min(trained, plan.config.reduce_bucket_size)
    mixed = inputs.states.trained_as.master_dtype is not None
    found = [growing_gradients(inputs, state, state.total_bytes, gone_at=lambda m: mixed and is_update(m))]
    if inputs.ranks > 1:
        found.append(
            Term(
                name="reduce_bucket",
                category=Category.COMMUNICATION,
                bytes_at=during(inputs.timeline, lambda m: flattened * plan.grad_bytes if m.segment == "reduce" else 0),
                formula=Formula(
                    symbols=rf"{plan.grad_bytes}\,\min(\Psi, B)", numbers=product(plan.grad_bytes, flattened)
                ),
                source="deepspeed 0.19.8, runtime/engine.py, buffered_allreduce_fallback",
            )
        )
    if mixed:
        found.append(
            Term(
                name="step_gradient_copies",
                category=Category.OPTIMIZER,
                bytes_at=copies_at(inputs, 8 * trained, 4 * trained),
                formula=Formula(symbols=r"(4 + 4)\,\Psi", numbers=product(8, trained)),
                source="deepspeed 0.19.8, runtime/fp16/fused_optimizer.py, FP16_Optimizer.step: casts, then flattens",
            )
        )
    return [*found, *temporaries(plan, trained)]

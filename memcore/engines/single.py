"""One GPU, no engine: everything is whole, gradients live from the backward to the end of the step."""

from memcore.engines.base import Inputs, growing_gradients, newest_gradient, resident, slices_in_a_row, step_temporary
from memcore.terms import Category, Term


def terms(inputs: Inputs) -> list[Term]:
    """The terms of a plain training loop on one GPU."""
    states = inputs.states
    kept = [resident(inputs, state) for state in states.of(Category.WEIGHTS, Category.OPTIMIZER)]
    gradients = [growing_gradients(inputs, state, state.total_bytes) for state in states.of(Category.GRADIENTS)]
    state_bytes = states.trained_as.state_dtype.size
    if inputs.accumulates:
        gradients += newest_gradient(inputs, states.trained_as.grad_dtype.size)
    return [*kept, *gradients, *step_temporary(inputs, states.trained, state_bytes, slices_in_a_row(inputs))]

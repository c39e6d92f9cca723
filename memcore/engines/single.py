"""One GPU, no engine: everything is whole, gradients live from the backward to the end of the step."""

from memcore.engines.base import Inputs, growing_gradients, newest_gradient, resident, slices_in_a_row
from memcore.engines.in_backward import stepped_gradients, steps_on_one
from memcore.engines.step_temporaries import step_temporary
from memcore.terms import Category, Term


def terms(inputs: Inputs) -> list[Term]:
    """The terms of a plain training loop on one GPU."""
    states, trained_as = inputs.states, inputs.states.trained_as
    kept = [resident(inputs, state) for state in states.of(Category.WEIGHTS, Category.OPTIMIZER)]
    state_bytes = trained_as.state_dtype.size
    if inputs.scenario.recipe.optimizer.in_backward:
        return [*kept, *stepped_gradients(inputs, trained_as.grad_dtype.size), *steps_on_one(inputs, state_bytes)]
    gradients = [growing_gradients(inputs, state, state.total_bytes) for state in states.of(Category.GRADIENTS)]
    if inputs.accumulates:
        gradients += newest_gradient(inputs, trained_as.grad_dtype.size)
    return [*kept, *gradients, *step_temporary(inputs, states.trained, state_bytes, slices_in_a_row(inputs))]

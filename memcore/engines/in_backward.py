"""The optimizer's step in the backward: one gradient at a time, and what the step on its parameter makes.

Source: torchtune 0.4, training/memory.py, register_optim_in_bwd_hooks.
"""

from memcore.engines.base import Inputs, largest_tensors
from memcore.engines.step_temporaries import MADE_FOR_ONE
from memcore.inventory import Role
from memcore.optimizers import OptimizerName
from memcore.terms import Category, Formula, Moment, Phase, Term, during, product


def stepped_gradients(inputs: Inputs, width: int) -> list[Term]:
    """Gradients of `width` bytes a value: each is there while its parameter is stepped. A tied head's waits for the
    embedding's through the whole backward."""
    largest, waiting = largest_tensors(inputs), _waiting(inputs)

    def values(moment: Moment) -> int:
        if moment.phase is not Phase.BACKWARD:
            return 0
        return largest.get(moment.segment, 0) + (0 if moment.segment == "reduce" else waiting)

    most = max(map(values, inputs.timeline))
    return [
        Term(
            name="gradients",
            category=Category.GRADIENTS,
            bytes_at=during(inputs.timeline, lambda moment: width * values(moment)),
            formula=Formula(symbols=rf"{width}\,\psi_{{max}}", numbers=product(width, most)),
            source="torchtune 0.4, training/memory.py, register_optim_in_bwd_hooks",
        )
    ]


def steps_on_one(inputs: Inputs, state_bytes: int) -> list[Term]:
    """What the step on one parameter makes for a moment, in `state_bytes` bytes a value."""
    name = inputs.scenario.recipe.optimizer.name
    largest, each = largest_tensors(inputs), state_bytes * MADE_FOR_ONE.get((name, inputs.implementation), 0)
    if not each:
        return []
    adafactor = name is OptimizerName.ADAFACTOR

    def at(moment: Moment) -> int:
        return each * largest.get(moment.segment, 0) if moment.phase is Phase.BACKWARD else 0

    return [
        Term(
            name="update_temporary" if adafactor else f"{inputs.implementation}_temporary",
            category=Category.OPTIMIZER,
            bytes_at=during(inputs.timeline, at),
            formula=Formula(symbols=rf"{each}\,\psi_{{max}}", numbers=product(each, max(largest.values(), default=0))),
            source=f"torch 2.13, optim/{'_adafactor' if adafactor else 'adam'}.py",
        )
    ]


def _waiting(inputs: Inputs) -> int:
    """Values of a tied head's gradient."""
    inventory = inputs.inventory
    if inventory is None or not inventory.tied:
        return 0
    return max((tensor.numel for tensor in inventory.tensors() if tensor.role is Role.EMBEDDING), default=0)

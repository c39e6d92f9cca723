"""PyTorch FSDP2 (fully_shard): every state in slices, layers gathered one after the other.

Source: torch 2.13, distributed/fsdp/_fully_shard: _fsdp_param_group.py (unshard, reshard, post_backward) and
_fsdp_collectives.py (foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce). Symbols: U parameters
of the largest unit (a decoder layer), R those of the root (embedding, final norm, head).
"""

from memcore.engines.base import Inputs, largest_slice, resident, step_temporary
from memcore.models import Inventory
from memcore.terms import Category, Formula, Moment, Phase, Term, during, in_phases, product
from memcore.units import ceil_div
from memcore.zero import share

# While one unit computes: its own gathered parameters, the flat output of the gather that they are copied
# out of, and the next unit's output, prefetched.
GATHERED_UNITS = 3


def terms(inputs: Inputs) -> list[Term]:
    """The terms of one FSDP2 rank with a unit per decoder layer, resharded after the forward."""
    states, ranks = inputs.states, inputs.ranks
    kept = [resident(inputs, state) for state in states.of(Category.WEIGHTS, Category.OPTIMIZER)]
    gradients = [_gradient_slices(inputs, share(state, inputs.stage, ranks), resident(inputs, state)) for state in
                 states.of(Category.GRADIENTS)]  # fmt: skip
    state_bytes = states.trained_as.state_dtype.size
    step = step_temporary(inputs, ceil_div(states.trained, ranks), state_bytes, largest_slice(inputs, ranks))
    return [*kept, *gradients, *step, *_gathered(inputs)]


def _gradient_slices(inputs: Inputs, num_bytes: int, whole: Term) -> Term:
    """Slices of reduced gradients; they grow through the backward, counted here as all there."""
    phases = [Phase.BACKWARD, Phase.OPTIMIZER]
    if inputs.accumulates:
        phases += [Phase.FORWARD, Phase.LOSS]
    return Term(
        name=whole.name,
        category=whole.category,
        bytes_at=in_phases(inputs.timeline, num_bytes, *phases),
        formula=whole.formula,
        source=whole.source,
    )


def _gathered(inputs: Inputs) -> list[Term]:
    inventory = inputs.inventory
    if inventory is None or inputs.ranks == 1:
        return []
    precision = inputs.states.precision.convention
    unit, root = inventory.largest_layer.numel, _root_parameters(inventory)
    width = precision.compute_dtype.size
    gathered = width * (GATHERED_UNITS * unit + root)
    gradients = unit * (width + precision.reduce_dtype.size)
    computing = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)

    def reduced(moment: Moment) -> int:
        return gradients if moment.phase is Phase.BACKWARD else 0

    source = "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py"
    found = [
        Term(
            name="gathered_parameters",
            category=Category.COMMUNICATION,
            bytes_at=in_phases(inputs.timeline, gathered, *computing),
            formula=Formula(
                symbols=rf"{width}\,({GATHERED_UNITS}\,U + R)",
                numbers=f"{width} × ({GATHERED_UNITS} × {unit:,} + {root:,})",
            ),
            source=f"{source}, foreach_all_gather_copy_out",
        )
    ]
    if inputs.states.trained == inventory.n_params:
        found.append(
            Term(
                name="reduced_gradients",
                category=Category.COMMUNICATION,
                bytes_at=during(inputs.timeline, reduced),
                formula=Formula(
                    symbols=rf"({width} + {precision.reduce_dtype.size})\,U",
                    numbers=product(width + precision.reduce_dtype.size, unit),
                ),
                source=f"{source}, foreach_reduce",
            )
        )
    return found


def _root_parameters(inventory: Inventory) -> int:
    return sum(block.numel for block in inventory.blocks if block.layer is None)

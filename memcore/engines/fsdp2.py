"""PyTorch FSDP2 (fully_shard): every state in slices, layers gathered one after the other.

Source: torch 2.13, distributed/fsdp/_fully_shard: _fsdp_param_group.py (unshard, reshard, post_backward) and
_fsdp_collectives.py (foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce). Symbols: U parameters
of the largest unit (a decoder layer), R those of the root (embedding, final norm, head).
"""

from collections.abc import Callable
from dataclasses import replace

from memcore.engines.base import Inputs, growing_gradients, resident, slices_in_a_row, step_temporary
from memcore.models import Inventory
from memcore.scenario import Fsdp2Config
from memcore.states import State
from memcore.terms import Category, Formula, Moment, Phase, Term, during, product
from memcore.units import ceil_div
from memcore.zero import share

# While one unit computes: its own gathered parameters, the flat output of the gather that they are copied
# out of, and the next unit's output, prefetched.
GATHERED_UNITS = 3


def terms(inputs: Inputs) -> list[Term]:
    """The terms of one FSDP2 rank with a unit per decoder layer."""
    states, ranks = inputs.states, inputs.ranks
    kept = [resident(inputs, state) for state in states.of(Category.WEIGHTS, Category.OPTIMIZER)]
    gradients = [_gradient_slices(inputs, state) for state in states.of(Category.GRADIENTS)]
    state_bytes = states.trained_as.state_dtype.size
    step = step_temporary(inputs, ceil_div(states.trained, ranks), state_bytes, slices_in_a_row(inputs, ranks))
    return [*kept, *gradients, *step, *_gathered(inputs)]


def _gradient_slices(inputs: Inputs, state: State) -> Term:
    """Slices of reduced gradients: they grow through the backward and stay for the optimizer."""
    whole = resident(inputs, state)
    num_bytes = share(state, inputs.stage, inputs.ranks)
    return replace(growing_gradients(inputs, state, num_bytes), formula=whole.formula)


def _gathered(inputs: Inputs) -> list[Term]:
    """The layer that computes, what it is copied out of, the next one prefetched, and the root's parameters."""
    inventory = inputs.inventory
    if inventory is None or inputs.ranks == 1:
        return []
    precision = inputs.states.precision.convention
    unit, root, width = inventory.largest_layer.numel, _root_parameters(inventory), precision.compute_dtype.size
    config = inputs.scenario.engine_config
    reshards = not isinstance(config, Fsdp2Config) or config.reshard_after_forward
    elements = _units(inventory, reshards)
    bytes_at = during(inputs.timeline, lambda moment: width * (root + held if (held := elements(moment)) else 0))
    source = "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py"
    found = [
        Term(
            name="gathered_parameters",
            category=Category.COMMUNICATION,
            bytes_at=bytes_at,
            formula=Formula(
                symbols=rf"{width}\,(\Psi_{{units}} + R)",
                numbers=f"{width} × ({max(bytes_at) // width - root:,} + {root:,})",
            ),
            source=f"{source}, foreach_all_gather_copy_out",
        )
    ]
    if inputs.states.trained == inventory.n_params:
        both = width + precision.reduce_dtype.size
        found.append(
            Term(
                name="reduced_gradients",
                category=Category.COMMUNICATION,
                bytes_at=during(inputs.timeline, lambda m: both * unit if m.phase is Phase.BACKWARD else 0),
                formula=Formula(symbols=rf"({width} + {both - width})\,U", numbers=product(both, unit)),
                source=f"{source}, foreach_reduce",
            )
        )
    return found


def _units(inventory: Inventory, reshards: bool) -> Callable[[Moment], int]:
    """Elements of gathered layers at each moment, the root's own left out.

    Resharded, three units' worth while a layer computes and the last one's at the loss. Not resharded, every
    layer whose forward is done and whose backward is not, and in the forward the next one's two.
    """
    sizes = [layer.numel for layer in inventory.layers]
    unit, last = max(sizes), len(sizes) - 1

    def held(moment: Moment) -> int:
        if moment.phase is Phase.LOSS:
            return sizes[last] if reshards else sum(sizes)
        if moment.phase not in (Phase.FORWARD, Phase.BACKWARD):
            return 0
        if reshards:
            return min(GATHERED_UNITS, len(sizes)) * unit
        done = moment.segment + 1 if isinstance(moment.segment, int) else 1
        ahead = GATHERED_UNITS - 1 if moment.phase is Phase.FORWARD else 0
        return sum(sizes[:done]) + min(ahead, last + 1 - done) * unit

    return held


def _root_parameters(inventory: Inventory) -> int:
    return sum(block.numel for block in inventory.blocks if block.layer is None)

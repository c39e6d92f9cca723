"""PyTorch FSDP1 (FullyShardedDataParallel): every state in slices of flat tensors, a unit gathered after the other.

Source: torch 2.13, distributed/fsdp/_flat_param.py and _runtime_utils.py. What is gathered and reduced is in
memcore.engines.fsdp1_moving. What belongs to no parameter is not sharded: the scales of weights packed in 4 bits are
whole on every rank, and so are adapters that FSDP1 is told to ignore. With CPUOffload slices, their gradients and the
optimizer's states are on the host, where it steps.
"""

from dataclasses import replace

from memcore.engines.base import Inputs, growing_gradients, resident, slices_in_a_row
from memcore.engines.fsdp1_moving import flat_units, moving
from memcore.engines.fsdp2_units import Units, trained_tensors
from memcore.engines.step_temporaries import step_temporary
from memcore.states import State
from memcore.terms import Category, Formula, Moment, Phase, Term, during, product
from memcore.units import ceil_div

# States of what is not trained.
_FROZEN = ("frozen_weights", "quantised_weights", "quantisation_scales")


def terms(inputs: Inputs) -> list[Term]:
    """The terms of the first rank, which is the fullest, with a unit per decoder layer."""
    states, inventory = inputs.states, inputs.inventory
    units = None if inventory is None else flat_units(inputs, inventory)
    moved = [] if units is None or not units.layers else moving(inputs, units)
    gradients = [term for state in states.of(Category.GRADIENTS) for term in _gradients(inputs, state, units)]
    kept = [_kept(inputs, state) for state in states.of(Category.WEIGHTS, Category.OPTIMIZER)]
    if inputs.scenario.shards_on_host:
        return [*moved, *gradients, *(term for term in kept if term.name == "quantisation_scales")]
    ranks = 1 if ignores_adapters(inputs) else inputs.ranks
    in_a_row = _in_a_row(inputs, ranks)
    step = step_temporary(inputs, sum(in_a_row), states.trained_as.state_dtype.size, in_a_row)
    return [*kept, *gradients, *step, *moved]


def ignores_adapters(inputs: Inputs) -> bool:
    """Whether adapters are whole on every rank."""
    return inputs.scenario.fsdp1_config.adapters == "ignored"


def _flat_gradients(inputs: Inputs) -> bool:
    """Whether a unit's flat gradient is of frozen weights too: it is as long as the flat parameter."""
    return inputs.scenario.fsdp1_config.adapters == "inside"


def _in_a_row(inputs: Inputs, ranks: int) -> tuple[int, ...]:
    tensors = trained_tensors(inputs)
    if not tensors:
        return slices_in_a_row(inputs, ranks)
    return tuple(ceil_div(tensor.numel, ranks) for tensor in tensors)


def _kept(inputs: Inputs, state: State) -> Term:
    """A state's slices; of adapters that are ignored all."""
    if ignores_adapters(inputs) and state.name not in _FROZEN:
        return replace(resident(inputs, state, state.total_bytes), formula=state.formula)
    return resident(inputs, state)


def _gradients(inputs: Inputs, state: State, units: Units | None) -> list[Term]:
    """Slices of reduced gradients: while a layer computes those of the layers that are done. Of several micro-steps
    they stay, and a new slice comes beside them; with no_sync whole ones stay until the last."""
    num_bytes, scenario = _gradient_bytes(inputs, state, units), inputs.scenario
    waits = inputs.accumulates and scenario.fsdp1_config.no_sync
    grown = growing_gradients(inputs, state, num_bytes)
    done = None if units is None or inputs.accumulates else units.after(lambda layer: layer.shard)
    in_layers = 0 if units is None else sum(layer.shard for layer in units.layers)
    whole = 0 if units is None else in_layers + units.root.shard

    def at(index: int, moment: Moment) -> int:
        if scenario.shards_on_host and moment.phase is not Phase.BACKWARD:
            return 0  # copied to the host when they are reduced, but let go of at the backward's end
        if moment.phase in (Phase.INIT, Phase.IDLE):
            # zero_grad lets go of the parameters' views; the flat gradient goes in the next forward
            # (_runtime_utils.py, _reset_flat_param_grad_info_if_needed).
            return num_bytes if scenario.fsdp1_config.use_orig_params else 0
        if moment.phase is Phase.BACKWARD and done is not None and whole:
            values = done[moment.segment] if isinstance(moment.segment, int) and done else in_layers
            return num_bytes * values // whole
        return 0 if waits and moment.phase is not Phase.OPTIMIZER else grown.at(index)

    sliced = replace(grown, bytes_at=tuple(at(index, moment) for index, moment in enumerate(inputs.timeline)))
    if units is None or not inputs.accumulates:
        return [sliced]
    return [sliced, _newest_slice(inputs, units), *(_waiting(inputs, units) if waits else [])]


def _newest_slice(inputs: Inputs, units: Units) -> Term:
    """The slice that was just reduced, before it is added to those of the micro-steps before. One rank's own is added
    as autograd makes it, and only a cast of the sum is beside it."""
    dtypes, own = inputs.states.precision.convention, inputs.states.trained_as.grad_dtype
    as_it_is = inputs.ranks == 1 and dtypes.compute_dtype is dtypes.reduce_dtype is own
    added = inputs.ranks == 1 and not inputs.scenario.fsdp1_config.no_sync
    size = 0 if added and dtypes.compute_dtype is not dtypes.reduce_dtype is own else own.size

    def at(moment: Moment) -> int:
        if moment.phase is not Phase.BACKWARD:
            return 0
        if isinstance(moment.segment, int) and units.layers:
            own_values = units.layers[moment.segment].shard
            # The root's flat gradient is put together before the root is reached.
            return size * (max(own_values, units.root.shard) if as_it_is and not moment.segment else own_values)
        return size * units.root.shard

    bytes_at = during(inputs.timeline, at)
    return Term(
        name="newest_slice",
        category=Category.GRADIENTS,
        bytes_at=bytes_at,
        formula=Formula(symbols="S_i", numbers=product(max(bytes_at))),
        source="torch 2.13, distributed/fsdp/_runtime_utils.py, _accumulate_sharded_grad",
    )


def _gradient_bytes(inputs: Inputs, state: State, units: Units | None) -> int:
    if ignores_adapters(inputs):
        return state.total_bytes
    if _flat_gradients(inputs) and units is not None:
        values = sum(layer.shard for layer in units.layers)
        return values * inputs.states.trained_as.grad_dtype.size
    return resident(inputs, state).largest


def _waiting(inputs: Inputs, units: Units) -> list[Term]:
    """Whole gradients in the computation's dtype, unit by unit: they stay from the first micro-step to the last. Then
    one rank's become the optimizer's where they are."""
    num_bytes = sum(unit.gradients for unit in (*units.layers, units.root))
    size = inputs.states.trained_as.grad_dtype.size
    grown = units.after(lambda layer: size * layer.shard - layer.gradients)
    most = sum(size * layer.shard - layer.gradients for layer in units.layers)

    def at(moment: Moment) -> int:
        if moment.phase not in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
            return 0
        if inputs.ranks > 1 or moment.phase is not Phase.BACKWARD:
            return num_bytes
        return num_bytes + (grown[moment.segment] if isinstance(moment.segment, int) and grown else most)

    return [
        Term(
            name="unsharded_gradients",
            category=Category.GRADIENTS,
            bytes_at=during(inputs.timeline, at),
            formula=Formula(symbols=r"\sum G_i + G_R", numbers=product(num_bytes)),
            source="torch 2.13, distributed/fsdp/_runtime_utils.py, _post_backward_hook: without _sync_gradients",
        )
    ]

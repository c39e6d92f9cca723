"""PyTorch FSDP2 (fully_shard): every state in slices, layers gathered one after the other.

Source: torch 2.13, distributed/fsdp/_fully_shard. What is gathered and reduced is in memcore.engines.fsdp2_moving. With
CPUOffloadPolicy nothing else is on the GPU: slices, their gradients and the optimizer's states are on the host, where
it steps. Groups of ranks that hold the same (HSDP) divide by the ranks of one group.
"""

from dataclasses import replace

from memcore.engines.base import Inputs, growing_gradients, resident
from memcore.engines.fsdp2_moving import moving
from memcore.engines.fsdp2_units import Units, shard_values, trained_tensors, units_of
from memcore.engines.step_temporaries import step_temporary
from memcore.packing import is_packed, packing_of
from memcore.states import State
from memcore.terms import Category, Formula, Phase, Term
from memcore.units import ceil_div
from memcore.zero import share, share_formula


def terms(inputs: Inputs) -> list[Term]:
    """The terms of the first rank, which is the fullest, with a unit per decoder layer."""
    states = inputs.states
    units = None if inputs.inventory is None else units_of(inputs, inputs.inventory)
    moved = [] if units is None or not units.layers else moving(inputs, units)
    if inputs.scenario.fsdp2_config.cpu_offload:
        return moved
    kept = [_slices(inputs, state) for state in states.of(Category.WEIGHTS, Category.OPTIMIZER)]
    gradients = [_gradient_slices(inputs, state, units) for state in states.of(Category.GRADIENTS)]
    in_a_row = tuple(shard_values(tensor, inputs.ranks) for tensor in trained_tensors(inputs))
    in_a_row = in_a_row or (ceil_div(states.trained, inputs.ranks),)
    step = step_temporary(inputs, sum(in_a_row), states.trained_as.state_dtype.size, in_a_row)
    return [*kept, *gradients, *step, *moved]


def _slice_bytes(inputs: Inputs, state: State) -> tuple[int, Formula]:
    """A state's bytes on the first rank: tensor by tensor, where it has a value for each of theirs."""
    ranks, frozen = inputs.ranks, tuple(inputs.inventory.tensors()) if inputs.inventory else ()
    packing = packing_of(inputs.scenario.recipe)
    for tensors in (trained_tensors(inputs), frozen, [tensor for tensor in frozen if not is_packed(tensor, packing)]):
        values = sum(shard_values(tensor, ranks) for tensor in tensors)
        whole = sum(tensor.numel for tensor in tensors)
        if state.element_bytes is not None and whole == state.elements and values != ceil_div(whole, ranks):
            symbols = rf"{state.element_bytes}\,\sum_t \lceil n_t / N \rceil\,m_t"
            numbers = f"{state.element_bytes} × {values:,}"
            return values * state.element_bytes, Formula(symbols=symbols, numbers=numbers)
    return share(state, inputs.stage, ranks), share_formula(state, inputs.stage, ranks)


def _slices(inputs: Inputs, state: State) -> Term:
    """A state's slices."""
    if state.paged_bytes:
        return resident(inputs, state)
    num_bytes, formula = _slice_bytes(inputs, state)
    return replace(resident(inputs, state, num_bytes), formula=formula)


def _gradient_slices(inputs: Inputs, state: State, units: Units | None) -> Term:
    """Slices of reduced gradients: while a layer computes those of the layers that are done, at the end the root's."""
    num_bytes, formula = _slice_bytes(inputs, state)
    term = replace(growing_gradients(inputs, state, num_bytes), formula=formula)
    if units is None or not units.layers or inputs.accumulates or isinstance(term.bytes_at, int):
        return term
    done = units.after(lambda layer: layer.shard)
    head = units.head.shard
    each = num_bytes / max(1, sum(layer.shard for layer in units.layers) + units.first.shard + head)
    at = (
        round(each * (head + done[moment.segment]))
        if moment.phase is Phase.BACKWARD and isinstance(moment.segment, int)
        else usual
        for moment, usual in zip(inputs.timeline, term.bytes_at, strict=True)
    )
    return replace(term, bytes_at=tuple(at))

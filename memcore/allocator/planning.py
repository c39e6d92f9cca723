"""From a budget's terms to what a run asks of the allocator: which of them are tensors one by one, which are blocks."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest

from memcore.allocator.steps import Plan
from memcore.allocator.wrapping import wrapped_units
from memcore.engine_options import EngineName
from memcore.engines.base import Inputs, is_update
from memcore.engines.fsdp2_units import shard_values, trained_tensors
from memcore.hardware import Accelerator
from memcore.inventory import Tensor
from memcore.packing import is_packed, packing_of
from memcore.terms import Category, EvidenceKind, Term, Timeline
from memcore.trace.request import OWN_TENSORS

# Micro-steps repeat themselves from the second on.
_MOST_MICRO_STEPS = 3
# What comes before the first update: a copy of the weights.
_MASTER = "master_weights"
# What each of the two threads takes when it first multiplies matrices, see Plan.workspaces.
_WORKSPACE = "cublas_workspace"
# What the training loop's own gradients are in a budget: a trace has them tensor by tensor.
_WHOLE_GRADIENTS, _NEWEST_GRADIENT = "gradients", "newest_gradient"


def reservation_plan(
    inputs: Inputs, terms: Sequence[Term], device: Accelerator, capacity: int, trained_bytes: int
) -> Plan:  # fmt: skip
    """The plan of a scenario whose step was traced. `capacity`: what the device gives the allocator, in bytes.
    `trained_bytes`: those of one value of a traced gradient.

    Every term has a place: what the trace's storages are not is there all the time, or a block at its moments.
    """
    own = inputs.scenario.parallelism.engine in OWN_TENSORS
    gradients_traced = own and has_traced_gradients(inputs, terms, trained_bytes)
    sizes = _Sizes(inputs)
    resident: list[int] = []
    moments: list[tuple[int, ...]] = []
    update: tuple[int, ...] = ()
    levels: list[Mapping[str, int]] = []
    wrapped, in_units = wrapped_units(inputs, terms)
    for term in terms:
        if is_traced(term, gradients_traced=gradients_traced) or term.name == _WORKSPACE or term.name in in_units:
            continue
        if own and term.name == "foreach_temporary" and _at_update_alone(term, inputs.timeline):
            update = sizes.of("gradients", term.largest)
        elif not isinstance(term.bytes_at, int):
            levels.append(_levels(term, inputs.timeline))
        elif own and term.category is Category.OPTIMIZER and term.name != _MASTER:
            moments.append(sizes.of(term.name, term.bytes_at))
        else:
            resident += sizes.of(term.name, term.bytes_at) if own else (term.bytes_at,)
    return Plan(
        wrapped=wrapped,
        resident=tuple(resident),
        workspaces=(device.cublas_workspace_bytes,) * 2,
        levels=tuple(levels),
        # One parameter's states after the other's.
        states=tuple(size for size in chain.from_iterable(zip_longest(*moments, fillvalue=0)) if size),
        update=update,
        gradients_traced=gradients_traced,
        micro_steps=min(inputs.scenario.workload.grad_accum, _MOST_MICRO_STEPS),
        expandable=inputs.scenario.hardware.expandable_segments,
        capacity=capacity,
    )


def is_traced(term: Term, *, gradients_traced: bool) -> bool:
    """Whether a term's bytes are storages of the trace. An engine's own term is none, whatever its name."""
    if term.category is Category.GRADIENTS:
        return gradients_traced
    return term.evidence is EvidenceKind.TRACE and term.category is not Category.OPTIMIZER


def has_traced_gradients(inputs: Inputs, terms: Sequence[Term], trained_bytes: int) -> bool:
    """Whether the trace's gradients are the budget's: whole in the trace's dtype, and nothing that an engine makes of
    them (slices of several micro-steps, views of its buckets)."""
    names = {term.name for term in terms if term.category is Category.GRADIENTS}
    widths = {state.element_bytes for state in inputs.states.states if state.name == _WHOLE_GRADIENTS}
    return _WHOLE_GRADIENTS in names <= {_WHOLE_GRADIENTS, _NEWEST_GRADIENT} and widths == {trained_bytes}


def _at_update_alone(term: Term, timeline: Timeline) -> bool:
    return all(is_update(moment) or not term.at(index) for index, moment in enumerate(timeline))


def _levels(term: Term, timeline: Timeline) -> dict[str, int]:
    return {moment.label: size for index, moment in enumerate(timeline) if (size := term.at(index))}


class _Sizes:
    """A state's tensors on one rank."""

    def __init__(self, inputs: Inputs) -> None:
        self._states = {state.name: state for state in inputs.states.states}
        ranks = inputs.ranks if inputs.scenario.parallelism.engine is EngineName.FSDP2 else 1
        self._sets = [
            (sum(tensor.numel for tensor in tensors), [shard_values(tensor, ranks) for tensor in tensors])
            for tensors in _sets(inputs)
        ]

    def of(self, name: str, num_bytes: int) -> tuple[int, ...]:
        """A term's bytes tensor by tensor, in proportion to their values; as one where they are not known."""
        state = self._states.get(name)
        values = next((each for whole, each in self._sets if state is not None and whole == state.elements), [])
        total, done = sum(values), 0
        sizes: list[int] = []
        for value in values:
            before = num_bytes * done // total
            done += value
            sizes.append(num_bytes * done // total - before)
        return tuple(size for size in sizes if size) or (num_bytes,)


def _sets(inputs: Inputs) -> Iterator[Sequence[Tensor]]:
    """The sets of tensors that a state can be of."""
    every = tuple(inputs.inventory.tensors()) if inputs.inventory else ()
    packing = packing_of(inputs.scenario.recipe)
    yield trained_tensors(inputs)
    yield every
    yield [tensor for tensor in every if is_packed(tensor, packing)]
    yield [tensor for tensor in every if not is_packed(tensor, packing)]

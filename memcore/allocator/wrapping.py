"""What FSDP1's start leaves of the allocator: weights come from the host unit by unit, and are flattened and cut there.

Source: torch 2.13, distributed/fsdp/_init_utils.py, _init_param_handle_from_module: a unit's tensors are moved to the
device, broadcast from the first rank (_sync_module_params_and_buffers: asked for by fsdp_qlora, and by accelerate 1.15
with cpu_ram_efficient_loading), put together (_flat_param.py, flatten_tensors), and the rank's slice is cut off
(shard). The unit's tensors are let go of last, so that its slice cannot lie where they were: what they leave is cut up
by the slices of the units after it.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from memcore.adapters import lora_tensors
from memcore.allocator.caching import Block, CachingAllocator
from memcore.engine_options import EngineName
from memcore.engines.base import Inputs
from memcore.inventory import Inventory, Tensor
from memcore.packing import is_packed, packing_of
from memcore.scenario import Lora
from memcore.terms import Category, Term
from memcore.units import MIB

# A unit: what stays of it, then its tensors in their order, in bytes.
Unit = tuple[int, ...]
# Its tensors one by one: what stays of each, and the whole of it.
_Parts = list[tuple[int, int]]
# _init_utils.py, PARAM_BROADCAST_BUCKET_SIZE, and torch/csrc/distributed/c10d/comm.cpp, broadcast_coalesced.
_BROADCAST_BYTES, _IN_FLIGHT = 250 * MIB, 2
_ADAPTERS = "adapter_weights"


def wrap(allocator: CachingAllocator, units: Sequence[Sequence[int]]) -> None:
    """Start the units one after the other. The peaks of that are no step's."""
    for kept, *sizes in units:
        moved = [allocator.allocate(size) for size in sizes]
        _broadcast(allocator, sizes)
        flat = allocator.allocate(sum(sizes))
        if kept < sum(sizes):
            if kept:
                allocator.allocate(kept)
            allocator.release(flat)
        for block in moved:
            allocator.release(block)
    allocator.reset_peaks()


def _broadcast(allocator: CachingAllocator, sizes: Sequence[int]) -> None:
    """Buckets of several tensors are put together, two of them at once; one tensor is sent as it is."""
    sent: list[Block | None] = []
    for bucket in _buckets(sizes):
        if len(sent) == _IN_FLIGHT and (done := sent.pop(0)):
            allocator.release(done)
        sent.append(allocator.allocate(sum(bucket)) if len(bucket) > 1 else None)
    for block in filter(None, sent):
        allocator.release(block)


def _buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """A bucket is full with the tensor that reaches its size (reducer.cpp, compute_bucket_assignment_by_size)."""
    bucket: list[int] = []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) >= _BROADCAST_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def wrapped_units(inputs: Inputs, terms: Sequence[Term]) -> tuple[tuple[Unit, ...], frozenset[str]]:
    """FSDP1's units in the order in which they are wrapped, adapters of their own before their layer and the root last;
    and the names of the terms whose bytes they keep."""
    inventory, scenario = inputs.inventory, inputs.scenario
    if scenario.parallelism.engine is not EngineName.FSDP1 or inventory is None or scenario.shards_on_host:
        return (), frozenset()
    stays = {term.name: term.bytes_at for term in terms if term.category is Category.WEIGHTS}
    # Of each layer, and of the root.
    together, apart = ([_Parts() for _place in range(len(inventory.layers) + 1)] for _own in range(2))
    names = set()
    for state in inputs.states.of(Category.WEIGHTS):
        tensors, num_bytes = _tensors(inputs, inventory, state.name), stays.get(state.name)
        values = [tensor.numel for _place, tensor in tensors]
        if not values or sum(values) != state.elements or not isinstance(num_bytes, int):
            continue
        names.add(state.name)
        own = state.name == _ADAPTERS and scenario.fsdp1_config.adapters == "apart"
        sizes = zip(_in_proportion(num_bytes, values), _in_proportion(state.total_bytes, values), strict=True)
        for (place, _tensor), size in zip(tensors, sizes, strict=True):
            (apart if own else together)[place].append(size)
    order = [parts for place, unit in enumerate(together) for parts in (*([each] for each in apart[place]), unit)]
    return tuple(_unit(parts) for parts in order if parts), frozenset(names)


def _unit(parts: _Parts) -> Unit:
    return (sum(kept for kept, _whole in parts), *(whole for _kept, whole in parts))


def _tensors(inputs: Inputs, inventory: Inventory, name: str) -> list[tuple[int, Tensor]]:
    """The tensors of a state that FSDP1 flattens, each with the place of its unit; none where they are not known, or
    belong to no parameter."""
    recipe, root = inputs.scenario.recipe, len(inventory.layers)
    if name == _ADAPTERS:
        if inputs.scenario.fsdp1_config.adapters == "ignored":
            return []
        adapters = lora_tensors(inventory, recipe.lora or Lora())
        return [(number * root // len(adapters), tensor) for number, tensor in enumerate(adapters)]
    packing = packing_of(recipe)
    every = [
        (root if block.layer is None else block.layer, each) for block in inventory.blocks for each in block.tensors
    ]
    if name == "quantised_weights":
        return [(place, tensor) for place, tensor in every if is_packed(tensor, packing)]
    return [(place, tensor) for place, tensor in every if packing is None or not is_packed(tensor, packing)]


def _in_proportion(num_bytes: int, values: Sequence[int]) -> list[int]:
    """Bytes in whole numbers by the tensors' values: their sum is all of them."""
    ends = [num_bytes * done // sum(values) for done in accumulate(values)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]

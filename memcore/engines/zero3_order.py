"""The modules that a step enters under ZeRO-3, one after the other, with each parameter's size and its next use.

DeepSpeed hooks every module, containers too; sizes are in elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from memcore.inventory import Block, Inventory, Role, Tensor

_ORDER = {Role.ATTENTION: 1, Role.NORM: 2, Role.MLP: 3, Role.EXPERTS: 3}
_FIRST_NORMS = ("input_layernorm", "ln_1", "layer_norm1")
# The segment of the backward in which no layer is alive any more: that of the embedding.
END = ("end", 0)


@dataclass(frozen=True, slots=True)
class Visit:
    """A module that is entered: the parameters of its own, and the segment of the step that it is in.

    `reuse_distance`: for each parameter the elements of all modules between this one and the next that uses it; None
    where none does.
    """

    params: tuple[int, ...]
    segment: tuple[str, int]
    reuse_distance: tuple[int | None, ...] = ()


@lru_cache(maxsize=16)
def step_layout(inventory: Inventory, recomputed: tuple[bool, ...]) -> tuple[list[int], list[Visit]]:
    """The size of every parameter, and all modules that a step enters, in order."""
    modules, sizes = block_modules(inventory)
    visits = list(_step_order(modules, recomputed))
    # Elements of the modules behind this one, and of those from each parameter's next use on.
    after, ahead = 0, dict[int, int]()
    for index in reversed(range(len(visits))):
        params = visits[index].params
        distances = tuple(after - ahead[param] if param in ahead else None for param in params)
        visits[index] = replace(visits[index], reuse_distance=distances)
        after += sum(sizes[param] for param in params)
        ahead.update(dict.fromkeys(params, after))
    return sizes, visits


@dataclass(frozen=True, slots=True)
class Module:
    """A leaf module with its parameters, or a container without any, in a layer (or -1 before, L after them)."""

    params: tuple[int, ...]
    layer: int


def block_modules(inventory: Inventory) -> tuple[list[list[Module]], list[int]]:
    """The modules of each block in the order of execution, and the size of every parameter."""
    sizes: list[int] = []
    blocks: list[list[Module]] = []
    seen_layer = False
    last = len(inventory.layers) - 1
    for block in inventory.blocks:
        seen_layer = seen_layer or block.layer is not None
        layer = block.layer if block.layer is not None else (last if seen_layer else 0)
        blocks.append(list(_modules_of(block, layer, sizes)))
    return blocks, sizes


def _modules_of(block: Block, layer: int, sizes: list[int]) -> Iterator[Module]:
    """Each owning module once; before it, once, the containers around it, which are hooked as well."""
    if block.layer is not None:
        yield Module((), layer)
    containers: set[str] = set()
    owned: dict[str, list[Tensor]] = {}
    for tensor in sorted(block.tensors, key=execution_key):
        owned.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    for owner, tensors in owned.items():
        container = owner.partition(".")[0] if "." in owner else ""
        if container and container not in containers:
            containers.add(container)
            yield Module((), layer)
        first = len(sizes)
        sizes.extend(tensor.numel for tensor in tensors)
        yield Module(tuple(range(first, len(sizes))), layer)


def execution_key(tensor: Tensor) -> int:
    """Norm before attention, attention, norm before the MLP, MLP: registration order puts the norms last."""
    if tensor.role is Role.NORM and tensor.name.startswith(_FIRST_NORMS):
        return 0
    if "attn" in tensor.name:
        return 1
    return _ORDER.get(tensor.role, 4)


def _step_order(blocks: Sequence[Sequence[Module]], recomputed: Sequence[bool]) -> Iterator[Visit]:
    """The modules through the forward, then through the backward; each is left before the next is entered."""
    for block in blocks:
        for module in block:
            yield Visit(module.params, ("forward", module.layer))
    # A layer's block begins with its container; what lies before all layers comes when their backward is over.
    before = next((index for index, block in enumerate(blocks) if not block[0].params), 0)
    for index, block in reversed(list(enumerate(blocks))):
        layer = block[0].layer
        segment = END if index < before else ("backward", layer)
        if recomputed and not block[0].params and recomputed[layer]:
            for module in block:
                yield Visit(module.params, segment)
        for module in reversed(block):
            yield Visit(module.params, segment)

"""What FSDP2 gathers and reduces together: the sizes of its units, and of a rank's shard of a tensor.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param: ranks share out a tensor's rows,
and where they do not divide them each has as many as the first, padding included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from memcore.adapters import lora_tensors
from memcore.engines.base import Inputs
from memcore.inventory import Block, Inventory, Role, Tensor, TensorKind
from memcore.packing import is_packed, packing_of
from memcore.recipes import ConventionName
from memcore.scenario import Lora, Method, Scenario
from memcore.units import ceil_div


def shard_values(tensor: Tensor, ranks: int) -> int:
    """Values of a tensor on one of `ranks` ranks, padding included."""
    return ceil_div(tensor.shape[0], ranks) * (tensor.numel // tensor.shape[0])


def trained_tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    """The trained tensors; none where the model's are not known."""
    recipe = inputs.scenario.recipe
    if inputs.inventory is None:
        return ()
    if recipe.method is Method.FULL:
        return tuple(inputs.inventory.tensors())
    return lora_tensors(inputs.inventory, recipe.lora or Lora())


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Bytes of what is gathered together: `gathered` parameters in the computation's dtype, `gradients` whole ones,
    `reduced` the buffer that these are reduced in; `shard` trained values on this rank."""

    gathered: int = 0
    gradients: int = 0
    reduced: int = 0
    shard: int = 0

    def with_(self, other: "Unit") -> "Unit":
        """Both as one."""
        return Unit(
            gathered=self.gathered + other.gathered,
            gradients=self.gradients + other.gradients,
            reduced=self.reduced + other.reduced,
            shard=self.shard + other.shard,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """A unit per decoder layer, and the root's; `embedding` and `head` are empty where they are the root's too.
    `head_gradients`: of what follows the layers and is the root's, in bytes."""

    layers: tuple[Unit, ...]
    root: Unit
    head_gradients: int
    embedding: Unit = Unit()
    head: Unit = Unit()

    @property
    def first(self) -> Unit:
        """What is gathered before the layers, and reduced after them: the root's, or the embedding with it."""
        return self.root.with_(self.embedding)

    def after(self, of: Callable[[Unit], int]) -> tuple[int, ...]:
        """For each layer a figure's sum over those after it, whose backward is done before."""
        sums = accumulate(map(of, reversed(self.layers)), initial=0)
        return tuple(reversed(list(sums)[:-1]))


def units_of(
    inputs: Inputs, inventory: Inventory, *, flat_gradients: bool = False, in_place: bool = False
) -> Units:  # fmt: skip
    """The units of a model. Adapters are counted in equal parts to all layers. `flat_gradients`: a layer's
    gradients are of its frozen weights too. `in_place`: what is not cast is not gathered either."""
    full = inputs.scenario.recipe.method is Method.FULL
    of = partial(_unit, inputs, in_place=in_place)
    layers = [of(layer.tensors, trained=full or flat_gradients) for layer in inventory.layers]
    if not full:
        adapters = of(trained_tensors(inputs), trained=True)
        count = max(1, len(layers))
        each = Unit(**{name: getattr(adapters, name) // count for name in Unit.__dataclass_fields__})
        layers = [layer.with_(each) for layer in layers]
    unit = partial(of, trained=full)
    own = own_blocks(inventory, inputs.scenario)
    rest = [block for block in inventory.blocks if block.layer is None and block not in own]
    root = unit([tensor for block in rest for tensor in block.tensors])
    if own:
        embedding, *head = (block.tensors for block in own)
        after = [tensor for tensors in head for tensor in tensors]
        return Units(layers=tuple(layers), root=root, head_gradients=0, embedding=unit(embedding), head=unit(after))
    after = [tensor for block in _after_layers(inventory) for tensor in block.tensors]
    if inventory.tied:
        after += [tensor for tensor in inventory.tensors() if tensor.role is Role.EMBEDDING]
    return Units(layers=tuple(layers), root=root, head_gradients=unit(after).gradients)


def own_blocks(inventory: Inventory, scenario: Scenario) -> tuple[Block, ...]:
    """The embedding, then what follows the layers, where these are units of their own; else none.

    Tied weights are needed from the beginning to the end of the step, as the root's are.
    """
    if scenario.fsdp2_config.fsdp_units == "block_root" or inventory.tied:
        return ()
    return (inventory.blocks[0], *_after_layers(inventory))


def _after_layers(inventory: Inventory) -> tuple[Block, ...]:
    last = max((place for place, block in enumerate(inventory.blocks) if block.layer is not None), default=-1)
    return inventory.blocks[last + 1 :]


def _unit(inputs: Inputs, tensors: Sequence[Tensor], *, trained: bool, in_place: bool) -> Unit:
    """The unit of some tensors, all or none of them trained."""
    ranks, convention = inputs.ranks, inputs.states.precision.convention
    stored = (inputs.states.trained_as if trained else convention).param_dtype
    # Autocast casts what was gathered, layer by layer.
    autocast = inputs.scenario.recipe.convention is ConventionName.AMP_AUTOCAST
    computed = stored if autocast else convention.compute_dtype
    packing = None if trained else packing_of(inputs.scenario.recipe)
    packed = [tensor for tensor in tensors if is_packed(tensor, packing)]
    plain = [tensor for tensor in tensors if tensor not in packed]
    shard = sum(shard_values(tensor, ranks) for tensor in plain)
    packed_shard = sum(ceil_div(tensor.numel, 2 * ranks) for tensor in packed)
    narrower = (computed.size - 1) * sum(shard_values(tensor, ranks) for tensor in plain if _in_float8(inputs, tensor))
    return Unit(
        gathered=0 if in_place and stored is computed else ranks * (shard * computed.size + packed_shard - narrower),
        gradients=sum(tensor.numel for tensor in tensors) * computed.size if trained else 0,
        reduced=ranks * shard * convention.reduce_dtype.size if trained else 0,
        shard=shard if trained else 0,
    )


def _in_float8(inputs: Inputs, tensor: Tensor) -> bool:
    """Whether a weight is gathered in float8: see memcore.trace.float8, which has all linear modules but the head."""
    gathers = inputs.scenario.fsdp2_config.enable_fsdp_float8_all_gather
    return gathers and tensor.kind is TensorKind.LINEAR and tensor.role is not Role.HEAD

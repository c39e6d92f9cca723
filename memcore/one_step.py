"""One step of a budget as charts show it: what its bytes are, moment by moment, and which layers are whole."""

from dataclasses import dataclass
from enum import StrEnum

from memcore.activations import checkpointing
from memcore.budget import Budget
from memcore.engine_options import EngineName
from memcore.engines.deepspeed.stage_3 import gather_settings
from memcore.engines.fsdp1_moving import prefetches
from memcore.engines.fsdp2_units import own_blocks
from memcore.engines.zero3_gather import gathered_blocks
from memcore.engines.zero3_order import END
from memcore.inventory import Block, Inventory
from memcore.terms import Category, Moment, Phase, Term


class StepPart(StrEnum):
    """What the bytes of a step are; the order is the order of stacking."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    GATHERED = "gathered"
    BUCKETS = "buckets"
    TRANSIENTS = "transients"
    ACTIVATIONS = "activations"


_NAMED = {
    "gathered_parameters": StepPart.GATHERED,
    "persistent_parameters": StepPart.GATHERED,
    "reduce_bucket": StepPart.BUCKETS,
    "ddp_buckets": StepPart.BUCKETS,
    "newest_gradient": StepPart.TRANSIENTS,
}
_BY_CATEGORY = {
    Category.WEIGHTS: StepPart.WEIGHTS,
    Category.GRADIENTS: StepPart.GRADIENTS,
    Category.COMMUNICATION: StepPart.TRANSIENTS,
    Category.ACTIVATIONS: StepPart.ACTIVATIONS,
    Category.LOSS: StepPart.ACTIVATIONS,
    Category.WORKSPACE: StepPart.ACTIVATIONS,
}


def part_of(term: Term) -> StepPart:
    """A term's part: states and buffers by name or category; what an engine has for a moment only is a transient."""
    if term.category is Category.OPTIMIZER:
        return StepPart.OPTIMIZER if isinstance(term.bytes_at, int) else StepPart.TRANSIENTS
    return _NAMED.get(term.name, _BY_CATEGORY.get(term.category, StepPart.TRANSIENTS))


def step_parts(budget: Budget) -> dict[StepPart, tuple[int, ...]]:
    """Bytes of each part at each moment of the budget's timeline, parts without any left out; together they are the
    budget's totals."""
    moments = range(len(budget.timeline))
    sums = {part: [0] * len(moments) for part in StepPart}
    for term in budget.terms:
        row = sums[part_of(term)]
        for index in moments:
            row[index] += term.at(index)
    return {part: tuple(row) for part, row in sums.items() if any(row)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeLayers:
    """Which blocks of the model are gathered: `shares[i]` is how much of `names[i]` is, from 0 to 1, at each moment of
    the timeline. Blocks of a module list, the decoder layers, go by their index."""

    names: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]


def whole_layers(budget: Budget) -> WholeLayers | None:
    """Which layers are whole at each moment, where the engine gathers them; None where it does not, or without shapes.

    ZeRO stage 3: the prefetch queue's own run, whatever is gathered at some time during a moment. FSDP2: a layer while
    it computes, and in the backward the next one, fetched meanwhile; without resharding every layer whose backward is
    to come; the root's parameters through forward and backward (torch 2.13, distributed/fsdp/_fully_shard,
    _fsdp_param_group.py). FSDP1: the same, but that no layer is there at the loss, nor fetched ahead where its settings
    say so (distributed/fsdp/_runtime_utils.py).
    """
    inventory, parallelism = budget.inventory, budget.scenario.parallelism
    if inventory is None or not inventory.layers or parallelism.stage != 3 or parallelism.dp_shard == 1:
        return None
    shares_at = _fsdp_shares if parallelism.engine in (EngineName.FSDP1, EngineName.FSDP2) else _zero_3_shares
    by_moment = shares_at(budget, inventory)
    names = tuple(block.name if block.layer is None else str(block.layer) for block in inventory.blocks)
    return WholeLayers(names=names, shares=tuple(zip(*by_moment, strict=True)))


def _zero_3_shares(budget: Budget, inventory: Inventory) -> list[tuple[float, ...]]:
    recompute = checkpointing(budget.scenario.workload.checkpointing, len(inventory.layers))
    recomputed = tuple(group is not None for group in recompute.groups)
    held = gathered_blocks(inventory, gather_settings(budget.scenario.zero_config), recomputed)
    sizes = [block.numel for block in inventory.blocks]

    def at(moment: Moment) -> tuple[int, ...]:
        layer = moment.segment if isinstance(moment.segment, int) else -1
        segment = ("turn", 0) if moment.phase is Phase.LOSS else (moment.phase.value, layer)
        return held.get(END if moment.segment == "reduce" else segment, (0,) * len(sizes))

    return [tuple(part / size for part, size in zip(at(moment), sizes, strict=True)) for moment in budget.timeline]


def _fsdp_shares(budget: Budget, inventory: Inventory) -> list[tuple[float, ...]]:
    scenario, last = budget.scenario, len(inventory.layers) - 1
    older = scenario.parallelism.engine is EngineName.FSDP1
    config = scenario.fsdp2_config
    reshards = scenario.fsdp1_config.reshard_after_forward if older else config.reshards("block")
    ahead = int(not older or prefetches(scenario))
    early = int(older and scenario.fsdp1_config.forward_prefetch)
    own = () if older else own_blocks(inventory, scenario)
    kept_embedding = bool(own) and not config.reshards("embedding")

    def whole(moment: Moment) -> range:
        """The layers that are whole; at the end of the backward, none."""
        at_loss = -1 if older and reshards else last
        at = moment.segment if isinstance(moment.segment, int) else at_loss if moment.phase is Phase.LOSS else -1
        if not reshards:
            return range(at + 1 + (early if moment.phase is Phase.FORWARD and at >= 0 else 0))
        if moment.phase is Phase.BACKWARD:
            return range(max(at - ahead, 0), at + 1)
        return range(at, at + 1 + (early if at >= 0 else 0))

    # The root's parameters may be let go of before its gradients are reduced.
    gathered = [each > 0 for each in _gathered_bytes(budget)]

    def is_whole(block: Block, moment: Moment) -> bool:
        if block.layer is not None:
            return block.layer in whole(moment)
        if block in own[1:]:
            return moment.phase is Phase.LOSS
        if block in own[:1] and not kept_embedding:
            return moment.segment == "reduce" or (moment.phase is Phase.BACKWARD and moment.segment == 0)
        return True

    return [
        tuple(float(gathered[index] and is_whole(block, moment)) for block in inventory.blocks)
        for index, moment in enumerate(budget.timeline)
    ]


def _gathered_bytes(budget: Budget) -> tuple[int, ...]:
    gathered = next((term for term in budget.terms if term.name == "gathered_parameters"), None)
    return tuple(0 if gathered is None else gathered.at(index) for index in range(len(budget.timeline)))

"""What every engine is given, and the terms that several of them share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memcore.engine_options import ENGINE_OPTIONS
from memcore.inventory import Block, Inventory, Role, Tensor
from memcore.optimizers import OPTIMIZERS
from memcore.scenario import Scenario
from memcore.states import ModelStates, State
from memcore.terms import Category, Formula, Moment, Phase, Term, Timeline, during, product
from memcore.units import ceil_div
from memcore.zero import share, share_formula


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """All that decides an engine's terms. `inventory` is None for a bare count; then layers, and with
    them everything that is gathered layer by layer, are not estimated."""

    scenario: Scenario
    states: ModelStates
    inventory: Inventory | None
    timeline: Timeline

    @property
    def stage(self) -> int:
        """The ZeRO stage that the engine amounts to."""
        return self.scenario.parallelism.stage

    @property
    def ranks(self) -> int:
        """The ranks that share the states."""
        return self.scenario.parallelism.dp_shard

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay from one micro-step to the next."""
        return self.scenario.workload.grad_accum > 1

    @property
    def implementation(self) -> str:
        """The optimizer's implementation: the one asked for, its own or the engine's default; "other" where the
        optimizer is not one of torch's."""
        optimizer = self.scenario.recipe.optimizer
        if optimizer.bits == 8 or optimizer.paged or not OPTIMIZERS[optimizer.name].in_torch:
            return "other"
        usual = OPTIMIZERS[optimizer.name].default_implementation
        engine = ENGINE_OPTIONS[self.scenario.parallelism.engine]
        return optimizer.implementation or usual or engine.default_implementation


def resident(inputs: Inputs, state: State, bytes_per_rank: int | None = None) -> Term:
    """A state that is there during the whole step, less what is paged out of the allocator's sight."""
    whole = share(state, inputs.stage, inputs.ranks) if bytes_per_rank is None else bytes_per_rank
    paged = whole * state.paged_bytes // max(state.total_bytes, 1)
    formula = share_formula(state, inputs.stage, inputs.ranks)
    if paged:
        formula = Formula(symbols=rf"{formula.symbols} - U", numbers=f"{formula.numbers} - {paged:,}")
    return Term(
        name=state.name,
        category=state.category,
        bytes_at=whole - paged,
        formula=formula,
        source=state.source,
    )


def backward_share(inputs: Inputs) -> dict[int, int]:
    """Parameters whose gradients exist once the backward of layer i is done, by i.

    What lies after the layers (final norm, head) comes first in the backward, the embedding last. A tied embedding's
    gradient is there from the start: the head's share of it.
    """
    inventory, states = inputs.inventory, inputs.states
    if inventory is None or states.trained != inventory.n_params or not inventory.layers:
        return {}
    after = before = 0
    layers = inventory.layers
    seen_layer = False
    for block in inventory.blocks:
        if block.layer is not None:
            seen_layer = True
        elif seen_layer:
            after += block.numel
        else:
            before += block.numel
    done, alive = after, {}
    for index in reversed(range(len(layers))):
        done += layers[index].numel
        alive[index] = done
    # Tied, there is no head after the layers: its weight is the embedding's.
    if inventory.tied:
        head = max((t.numel for t in inventory.tensors() if t.role is Role.EMBEDDING), default=0)
        alive = {index: count + head for index, count in alive.items()}
        before -= head
    alive[0] += before
    return alive


def is_update(moment: Moment) -> bool:
    """Whether it is the optimizer's update itself, after the gradients were readied for it."""
    return moment.phase is Phase.OPTIMIZER and moment.segment is None


def growing_gradients(
    inputs: Inputs, state: State, bytes_per_rank: int, gone_at: Callable[[Moment], bool] = lambda moment: False
) -> Term:  # fmt: skip
    """Whole gradients: they grow through the backward, stay for the optimizer, and are freed after it.

    `gone_at`: the moments of the step at which an engine has put its own in their place.

    With gradient accumulation they are alive from the second micro-step's forward on. Freed means
    ``zero_grad(set_to_none=True)``, the default of torch and of Hugging Face's Trainer.
    """
    alive = backward_share(inputs)
    per_parameter = bytes_per_rank / max(inputs.states.trained, 1)

    def at(moment: Moment) -> int:
        if moment.phase in (Phase.INIT, Phase.IDLE):
            return 0
        if moment.phase in (Phase.FORWARD, Phase.LOSS):
            return bytes_per_rank if inputs.accumulates else 0
        if moment.phase is Phase.BACKWARD and not inputs.accumulates and isinstance(moment.segment, int) and alive:
            return min(round(alive[moment.segment] * per_parameter), bytes_per_rank)
        if gone_at(moment):
            return 0
        return bytes_per_rank

    return Term(
        name=state.name,
        category=Category.GRADIENTS,
        bytes_at=during(inputs.timeline, at),
        formula=state.formula,
        source=state.source,
    )


def backward_places(inventory: Inventory) -> Iterator[tuple[Block, int | str]]:
    """Each block with the segment of the backward in which its gradients come: the head's with the last layer's, the
    embedding's at the end, when no layer is alive any more."""
    last, seen_layer = len(inventory.layers) - 1, False
    for block in inventory.blocks:
        seen_layer = seen_layer or block.layer is not None
        yield block, block.layer if block.layer is not None else (last if seen_layer else "reduce")


def newest_gradient(inputs: Inputs, width: int) -> list[Term]:
    """The newest gradient, where another storage takes it up: a whole one exists before it is added or copied there.

    In `width` bytes a value; the largest of each segment of the backward.
    """
    largest = largest_tensors(inputs)
    if not largest:
        return []

    def at(moment: Moment) -> int:
        return width * largest.get(moment.segment, 0) if moment.phase is Phase.BACKWARD else 0

    return [
        Term(
            name="newest_gradient",
            category=Category.GRADIENTS,
            bytes_at=during(inputs.timeline, at),
            formula=Formula(symbols=rf"{width}\,\psi_{{max}}", numbers=product(width, max(largest.values()))),
            source="torch 2.13, autograd: a whole gradient exists before any hook can take it",
        )
    ]


def whole_tensors(inputs: Inputs) -> list[Tensor]:
    """The trained tensors in order, where they are all of the model's; none where they are not known."""
    inventory = inputs.inventory
    if inventory is None or inputs.states.trained != inventory.n_params:
        return []
    return list(inventory.tensors())


def largest_tensors(inputs: Inputs) -> dict[object, int]:
    """Values of the largest tensor whose gradient comes in each segment of the backward; empty where that is not
    known."""
    inventory = inputs.inventory
    if inventory is None or inputs.states.trained != inventory.n_params or not inventory.layers:
        return {}
    largest: dict[object, int] = {}
    for block, segment in backward_places(inventory):
        largest[segment] = max(largest.get(segment, 0), *(tensor.numel for tensor in block.tensors))
    return largest


def slices_in_a_row(inputs: Inputs, ranks: int = 1) -> tuple[int, ...]:
    """Values of each trained tensor on one of `ranks` ranks, in order; all as one where the tensors are not known."""
    sizes = [tensor.numel for tensor in whole_tensors(inputs)] or [inputs.states.trained]
    return tuple(ceil_div(size, ranks) for size in sizes)

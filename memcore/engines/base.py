"""What every engine is given, and the terms that several of them share."""

from dataclasses import dataclass

from memcore.engine_options import ENGINE_OPTIONS
from memcore.models import Inventory
from memcore.optimizers import OPTIMIZERS
from memcore.scenario import Scenario
from memcore.states import ModelStates, State
from memcore.terms import Category, Formula, Moment, Phase, Term, Timeline, during, in_phases, product
from memcore.zero import share


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
        """The optimizer's implementation: the one asked for, or the engine's default; "other" where the
        optimizer is not one of torch's."""
        optimizer = self.scenario.recipe.optimizer
        if optimizer.bits == 8 or optimizer.paged or not OPTIMIZERS[optimizer.name].in_torch:
            return "other"
        return optimizer.implementation or ENGINE_OPTIONS[self.scenario.parallelism.engine].default_implementation


def shared_formula(state: State, stage: int, ranks: int) -> Formula:
    """The state's formula with the division by the ranks, where there is one."""
    if stage < state.divided_from or ranks == 1:
        return state.formula
    if state.element_bytes is None:
        return Formula(symbols=rf"({state.formula.symbols}) / N", numbers=f"({state.formula.numbers}) / {ranks:,}")
    rounded = f"⌈{state.elements:,} / {ranks:,}⌉"
    return Formula(symbols=rf"{state.formula.symbols} / N", numbers=f"{state.element_bytes} × {rounded}")


def resident(inputs: Inputs, state: State, bytes_per_rank: int | None = None) -> Term:
    """A state that is there during the whole step, less what is paged out of the allocator's sight."""
    whole = share(state, inputs.stage, inputs.ranks) if bytes_per_rank is None else bytes_per_rank
    paged = whole * state.paged_bytes // max(state.total_bytes, 1)
    return Term(
        name=state.name,
        category=state.category,
        bytes_at=whole - paged,
        formula=shared_formula(state, inputs.stage, inputs.ranks),
        source=state.source,
    )


def backward_share(inputs: Inputs) -> dict[int, int]:
    """Parameters whose gradients exist once the backward of layer i is done, by i.

    What lies after the layers (final norm, head) comes first in the backward, the embedding last.
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
    alive[0] += before
    return alive


def growing_gradients(inputs: Inputs, state: State, bytes_per_rank: int, until_idle: bool = True) -> Term:
    """Whole gradients: they grow through the backward, stay for the optimizer, and are freed after it.

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
        if moment.phase is Phase.OPTIMIZER and not until_idle:
            return 0
        return bytes_per_rank

    return Term(
        name=state.name,
        category=Category.GRADIENTS,
        bytes_at=during(inputs.timeline, at),
        formula=state.formula,
        source=state.source,
    )


def foreach_temporary(inputs: Inputs, values: int, state_bytes: int) -> list[Term]:
    """torch's foreach Adam and AdamW: the square root of all variances at once, in the states' dtype.

    Source: torch 2.13, optim/adam.py, _multi_tensor_adam (exp_avg_sq_sqrt = torch._foreach_sqrt). `values`
    trained values per rank. The fused implementation makes none; the others are not claimed.
    """
    if inputs.implementation != "foreach" or inputs.scenario.recipe.optimizer.name not in ("adam", "adamw"):
        return []
    return [
        Term(
            name="foreach_temporary",
            category=Category.OPTIMIZER,
            bytes_at=in_phases(inputs.timeline, values * state_bytes, Phase.OPTIMIZER),
            formula=Formula(symbols=rf"{state_bytes}\,\Psi_t / N", numbers=product(state_bytes, values)),
            source="torch 2.13, optim/adam.py, _multi_tensor_adam: torch._foreach_sqrt(device_exp_avg_sqs)",
        )
    ]

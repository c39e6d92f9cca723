"""The scenario beside its alternatives: other stages, world sizes, cards, conventions and tools.

Everything here follows from :func:`memcore.budget.predict` and :func:`memcore.zero.account`; pages only draw it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memcore.budget import Budget, Missing, predict
from memcore.buffers import largest_module, with_zero
from memcore.engine_options import ENGINE_OPTIONS
from memcore.errors import UserError
from memcore.fewest_gpus import fewest_gpus
from memcore.hardware import Accelerator, accelerators
from memcore.models import catalogue
from memcore.recipes import CONVENTIONS, OTHER_TOOLS, Convention, ConventionName, OtherTool
from memcore.scenario import parse_scenario, scenario_data
from memcore.states import ModelStates, model_states
from memcore.terms import Category, Phase
from memcore.zero import STAGES, Accounting, Communication, account, communication, sharing_ranks, smallest_ranks

PAPER_MODELS = ("ZeRO paper 7.5B", "ZeRO paper 128B", "ZeRO paper 1T")
PAPER_RANKS = (1, 4, 16, 64, 256, 1024)
CURVE_RANKS = tuple(2**power for power in range(11))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """One ZeRO stage for the scenario's model and world size.

    `floor` is the paper's accounting; `peak_bytes` what the engine is predicted to reach, None where the
    scenario's engine has no such stage. `smallest` is the fewest GPUs that share whose usable memory holds the floor,
    `fewest` the fewest on which the whole peak fits.
    """

    stage: int
    floor: Accounting
    peak_bytes: int | None
    communication: Communication
    smallest: int | None
    fewest: int | None


def stage_rows(budget: Budget) -> list[StageRow]:
    """The four stages side by side."""
    return [_stage_row(budget, stage, _at_stage(budget, stage)) for stage in STAGES]


def _stage_row(budget: Budget, stage: int, at_stage: Budget | None) -> StageRow:
    scenario, states = budget.scenario, budget.states
    return StageRow(
        stage=stage,
        floor=account(states.states, stage, sharing_ranks(scenario.parallelism)),
        peak_bytes=None if at_stage is None else at_stage.peak_bytes,
        communication=communication(scenario, states, budget.device, stage),
        smallest=smallest_ranks(states.states, stage, budget.device.usable_bytes),
        fewest=None if at_stage is None else fewest_gpus(at_stage),
    )


def _at_stage(budget: Budget, stage: int) -> Budget | None:
    if stage == budget.scenario.parallelism.stage:
        return budget
    if stage not in ENGINE_OPTIONS[budget.scenario.parallelism.engine].stages:
        return None
    try:
        return with_zero(budget, {}, stage)
    except UserError:
        # The rest of the scenario (an offload, a convention) has no form at that stage.
        return None


def world_size_curve(states: ModelStates, stage: int) -> list[tuple[int, int]]:
    """Ranks and bytes per GPU of the model states, at powers of two up to 1,024."""
    return [(ranks, account(states.states, stage, ranks).total_bytes) for ranks in CURVE_RANKS]


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRow:
    """One accelerator: the largest model whose undivided states it holds, and what this model takes of it."""

    device: Accelerator
    largest_model: int
    share: float
    smallest_gpus: int | None


def card_rows(budget: Budget) -> list[CardRow]:
    """Every accelerator, for the states of the scenario's recipe; `smallest_gpus` divides them all (stage 3)."""
    states = budget.states
    total = account(states.states, 0, 1).total_bytes
    return [
        CardRow(
            device=device,
            # Whole-number arithmetic: with bytes per parameter as the fraction total / n_params.
            largest_model=device.usable_bytes * states.n_params // max(total, 1),
            share=total / device.usable_bytes,
            smallest_gpus=smallest_ranks(states.states, 3, device.usable_bytes),
        )
        for device in accelerators().values()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCost:
    """Bytes that one trained parameter costs in one kind of state, undivided."""

    name: str
    category: Category
    bytes_per_parameter: float


def parameter_costs(states: ModelStates) -> list[ParameterCost]:
    """What one parameter of the model costs, state by state. Adapters count per parameter of the base model."""
    return [
        ParameterCost(name=state.name, category=state.category, bytes_per_parameter=state.total_bytes / states.n_params)
        for state in states.states
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConventionRow:
    """A named convention, and what the scenario makes of it, per GPU.

    `trained_as`: the dtypes of what is trained under it, which adapters may have of their own; `bytes_per_parameter`
    what one trained parameter then costs with the scenario's optimizer. `floor` is None where no training loop with the
    scenario's engine has the convention, or it has no form at the stage; in the latter case the two before it are the
    convention's own, with Adam.
    """

    name: ConventionName
    convention: Convention
    trained_as: Convention
    bytes_per_parameter: float
    floor: Accounting | None


def convention_rows(budget: Budget) -> list[ConventionRow]:
    """Every convention applied to the scenario, its own dtypes aside."""
    return [_convention_row(budget, name, convention) for name, convention in CONVENTIONS.items()]


def _convention_row(budget: Budget, name: ConventionName, convention: Convention) -> ConventionRow:
    data = scenario_data(budget.scenario)
    recipe = {key: value for key, value in data.get("recipe", {}).items() if not key.endswith("_dtype")}
    data["recipe"] = {**recipe, "convention": name.value}
    try:
        other = parse_scenario(data)
        states = model_states(other, budget.states.n_params, budget.inventory)
    except UserError:
        each = convention.bytes_per_parameter()
        return ConventionRow(
            name=name, convention=convention, trained_as=convention, bytes_per_parameter=each, floor=None
        )
    scenario, parallelism = budget.scenario, other.parallelism
    # A bare count is of no engine's loop.
    shown = scenario.model.is_bare_count or name is scenario.recipe.convention or scenario.has_convention(name)
    return ConventionRow(
        name=name,
        convention=convention,
        trained_as=states.trained_as,
        bytes_per_parameter=states.bytes_per_trained,
        floor=account(states.states, parallelism.stage, parallelism.dp_shard) if shown else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRow:
    """What another tool answers for the model with AdamW: bytes per GPU by stage, None where it has none."""

    tool: OtherTool
    bytes_by_stage: tuple[float | None, ...]


def tool_rows(budget: Budget) -> list[ToolRow]:
    """Other tools on the same question: the model's parameters among the GPUs that share them."""
    count, ranks = budget.states.n_params, sharing_ranks(budget.scenario.parallelism)
    largest = largest_module(budget.inventory)
    return [
        ToolRow(
            tool=tool,
            bytes_by_stage=tuple(tool.bytes_per_gpu(count, stage, ranks, largest) for stage in STAGES),
        )
        for tool in OTHER_TOOLS
    ]


def paper_table() -> Iterator[tuple[str, int, Sequence[int]]]:
    """The ZeRO paper's table 1 from the formulas: model, ranks, bytes per GPU at stages 1 to 3 (AdamW, K = 12)."""
    for name in PAPER_MODELS:
        assert catalogue()[name].config is None, "the paper's models are bare counts"
        budget = predict(parse_scenario({"model": {"name": name}}))
        for ranks in PAPER_RANKS:
            yield name, ranks, [account(budget.states.states, stage, ranks).total_bytes for stage in (1, 2, 3)]


def closed_form(budget: Budget) -> Budget:
    """The same scenario with activations and loss in closed form, to lie beside a trace."""
    return predict(budget.scenario, replace(budget.evidence, profile=None))


# Terms that the closed form keeps apart and a trace does not.
_SAME_AS = {
    "attention_scores": "saved_activations",
    "recomputed_scores": "recomputed_activations",
    "final_norm": "logits_loss",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePair:
    """A phase's peak traced and in closed form, and how far the closed form is off, in per cent of the trace.

    `mostly`: the name of the term that accounts for most of the difference, and its share of it (closed form less
    trace); None where there is no difference.
    """

    phase: Phase
    traced: int
    closed: int
    mostly: tuple[str, int] | None

    @property
    def difference_percent(self) -> float:
        """Closed form less trace, in per cent of the trace."""
        return 100 * (self.closed - self.traced) / max(self.traced, 1)


def beside_closed_form(budget: Budget) -> list[PhasePair]:
    """Each phase's peak of a traced budget beside that of the closed form; empty where none stands."""
    other = closed_form(budget)
    if Missing.ACTIVATIONS in other.missing:
        return []
    at = other.phase_peaks()
    return [
        PhasePair(
            phase=phase,
            traced=budget.totals[index],
            closed=other.totals[at[phase]],
            mostly=_mostly(budget, index, other, at[phase]),
        )
        for phase, index in budget.phase_peaks().items()
    ]


def _mostly(traced: Budget, index: int, closed: Budget, closed_index: int) -> tuple[str, int] | None:
    differences: dict[str, int] = {}
    for budget, at, sign in ((traced, index, -1), (closed, closed_index, 1)):
        for term in budget.terms:
            name = _SAME_AS.get(term.name, term.name)
            differences[name] = differences.get(name, 0) + sign * term.at(at)
    largest = max(differences.items(), key=lambda pair: abs(pair[1]))
    return largest if largest[1] else None

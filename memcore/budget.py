"""The answer: terms laid over the moments of a step, the peak, and whether it fits.

:func:`predict` is pure: it starts no process, reads no clock, and gives the same bytes for the same
scenario and evidence. What it needs from outside (the inventory of an uploaded config) is fetched
beforehand by :func:`evidence_for`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from memcore.accuracy.band import Band, band_for
from memcore.activations import activation_terms, has_form, held_over
from memcore.allocator import Plan, Reservation, dump_plan, load_reservation, reservation_plan
from memcore.engine_options import EngineName
from memcore.engines import ENGINE_TERMS, Inputs, start_peak
from memcore.errors import UserError
from memcore.experts import separated
from memcore.hardware import Accelerator, accelerator
from memcore.i18n import gettext as _
from memcore.inventory import Inventory
from memcore.ladder import Ladder, ladder_of
from memcore.models import catalogue_inventory, catalogue_model, load_inventory
from memcore.scenario import Model, Scenario
from memcore.states import ModelStates, model_states
from memcore.terms import Category, EvidenceKind, Formula, Phase, Term, Timeline, product, step_timeline
from memcore.trace.profile import ActivationProfile, load_profile
from memcore.trace.request import OWN_TENSORS, trace_request
from memcore.trace.terms import SHARDED_TERMS, profile_terms, settle_states
from memcore.zero import Accounting, Communication, HostMemory, account, communication, host_memory

# Threads with a cuBLAS handle, and so a workspace: the training loop's and autograd's.
NUM_WORKSPACES = 2


class Verdict(StrEnum):
    """Whether the run fits the card."""

    FITS = "fits"
    UNCERTAIN = "uncertain"
    DOES_NOT_FIT = "does_not_fit"


class Missing(StrEnum):
    """What a budget leaves out, for the verdict to say so."""

    ACTIVATIONS = "activations"
    GATHERED_LAYERS = "gathered_layers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What was found out about a scenario beyond its own fields, as plain data.

    `inventory`: the counted parameters of an uploaded config. `config_defaults`: class defaults that
    counting filled in, by dotted name. `quantised_as`: how the config's checkpoint is stored, if packed.
    `profile`: a trace of the model's activations and loss, which then takes the closed forms' place;
    `untraced`: where one was asked for and could not be had, one sentence that says why. `reservation`: what the
    allocator reserved where the trace's storages went through it, as `plan` says.
    """

    inventory: Inventory | None = None
    config_defaults: Mapping[str, Any] | None = None
    quantised_as: str | None = None
    profile: ActivationProfile | None = None
    untraced: str = ""
    plan: Plan | None = None
    reservation: Reservation | None = None


FORMULAS = Evidence()


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The answer to a scenario, in bytes per GPU (the fullest rank).

    `totals` are the sums of all terms, one for each moment of `timeline`; the peak is the largest of them. `start`:
    what the engine's start takes where the whole model is made on the GPU first; None where that is not predicted.
    """

    scenario: Scenario
    device: Accelerator
    inventory: Inventory | None
    states: ModelStates
    timeline: Timeline
    terms: tuple[Term, ...]
    totals: tuple[int, ...]
    start: Term | None
    static: Accounting
    communication: Communication
    host: HostMemory
    ladder: Ladder
    verdict: Verdict
    missing: tuple[Missing, ...]
    evidence: Evidence
    band: Band

    @property
    def activations_from(self) -> EvidenceKind:
        """Where the figures of activations and loss come from."""
        return EvidenceKind.FORMULA if self.evidence.profile is None else EvidenceKind.TRACE

    @property
    def peak_index(self) -> int:
        """The moment of the peak; the first of equals."""
        return self.totals.index(max(self.totals))

    @property
    def peak_bytes(self) -> int:
        """The largest sum of all terms at any moment."""
        return max(self.totals)

    @property
    def binding_phase(self) -> Phase:
        """The phase that the peak falls in."""
        return self.timeline[self.peak_index].phase

    def phase_peaks(self) -> dict[Phase, int]:
        """For each phase, the index of the moment at which its sum is largest."""
        best: dict[Phase, int] = {}
        for index, moment in enumerate(self.timeline):
            if moment.phase not in best or self.totals[index] > self.totals[best[moment.phase]]:
                best[moment.phase] = index
        return best

    def at_peak(self) -> list[tuple[Term, int]]:
        """Terms with their share of the peak, largest first, those with none left out."""
        shares = [(term, term.at(self.peak_index)) for term in self.terms]
        return sorted(((term, num) for term, num in shares if num), key=lambda pair: -pair[1])

    def by_category(self, index: int) -> dict[Category, int]:
        """Bytes by category at a moment, in the order of `Category`, empty ones left out."""
        sums = dict.fromkeys(Category, 0)
        for term in self.terms:
            sums[term.category] += term.at(index)
        return {category: total for category, total in sums.items() if total}


def predict(scenario: Scenario, evidence: Evidence = FORMULAS) -> Budget:
    """The memory budget of one training run.

    Raises UserError where the scenario's model is a config whose inventory is not in the evidence.
    """
    device, evidence = accelerator(scenario.hardware.gpu), _fitting(evidence, scenario)
    inventory = inventory_for(scenario.model, evidence)
    states = model_states(scenario, inventory.n_params if inventory else _bare_count(scenario.model), inventory)
    timeline = step_timeline(len(inventory.layers) if inventory else 1)
    inputs = Inputs(scenario=scenario, states=states, inventory=inventory, timeline=timeline)
    layers = _layers(scenario, states, inventory, timeline, evidence.profile)
    band = _band(scenario, evidence.profile, layers)
    kept = held_over(scenario, states, inventory, timeline)
    found = (*_engine_terms(inputs, evidence.profile), *layers, *kept, *_workspace(scenario, device))
    terms = tuple(term for term in found if term.largest)
    totals = tuple(sum(term.at(index) for term in terms) for index in range(len(timeline)))
    reservation = _reservation(inputs, terms, device, evidence)
    ladder = ladder_of(terms, totals, device, scenario.hardware.gpus, reservation)
    return Budget(
        scenario=scenario,
        device=device,
        inventory=inventory,
        states=states,
        timeline=timeline,
        terms=terms,
        totals=totals,
        start=start_peak(inputs),
        static=account(states.states, scenario.parallelism.stage, scenario.parallelism.dp_shard),
        communication=communication(scenario, states, device),
        host=host_memory(scenario, states),
        ladder=ladder,
        verdict=judge(ladder, band.percent),
        missing=_missing(scenario, inventory, layers),
        evidence=evidence,
        band=band,
    )


def _fitting(evidence: Evidence, scenario: Scenario) -> Evidence:
    """The evidence, without a trace that shards otherwise than the scenario, as when settings are compared."""
    if evidence.profile is None or not evidence.profile.sharded:
        return evidence
    request = trace_request(scenario)
    fits = isinstance(request, dict) and request["sharding"] == evidence.profile.sharding
    return evidence if fits else replace(evidence, profile=None)


def _layers(
    scenario: Scenario,
    states: ModelStates,
    inventory: Inventory | None,
    timeline: Timeline,
    profile: ActivationProfile | None,
) -> list[Term]:
    """Activations and loss: traced where there is a profile, else in closed form."""
    if profile is None:
        return activation_terms(scenario, states, inventory, timeline)
    return profile_terms(profile, timeline)


def _engine_terms(inputs: Inputs, profile: ActivationProfile | None) -> list[Term]:
    """The engine's terms; with a profile, and an optimizer that steps on the model's own tensors, what it says of
    them."""
    parallelism = inputs.scenario.parallelism
    terms = ENGINE_TERMS[parallelism.engine](inputs)
    if profile is None or parallelism.engine not in OWN_TENSORS:
        return terms
    if profile.sharded:
        terms = [term for term in terms if term.name not in SHARDED_TERMS]
    state = next((state for state in inputs.states.of(Category.GRADIENTS) if state.name == "gradients"), None)
    return settle_states(
        terms,
        profile,
        inputs.timeline,
        gradient_bytes=None if state is None or inputs.accumulates else state.element_bytes,
        implementation=inputs.implementation,
    )


def _band(scenario: Scenario, profile: ActivationProfile | None, layers: list[Term]) -> Band:
    """The band that published runs with the scenario's engine, method and evidence give."""
    evidence = EvidenceKind.FORMULA if profile is None else EvidenceKind.TRACE
    return band_for(scenario.parallelism.engine.value, scenario.recipe.method.value, evidence if layers else None)


def judge(ladder: Ladder, band_percent: int) -> Verdict:
    """Fits where even the band's upper end fits, does not where even its lower end does not. The band is a share of
    what the allocator must hold."""
    band = ladder.held * band_percent // 100
    if ladder.needed + band <= ladder.usable:
        return Verdict.FITS
    return Verdict.UNCERTAIN if ladder.needed - band <= ladder.usable else Verdict.DOES_NOT_FIT


def inventory_for(model: Model, evidence: Evidence) -> Inventory | None:
    """The model's parameters: the catalogue's, or those counted; None for a bare count.

    Raises UserError for a config whose inventory is not in the evidence, and for experts that cannot be separate.
    """
    inventory = _counted(model, evidence)
    if model.experts == "stacked" or inventory is None:
        return inventory
    return separated(inventory)


def _counted(model: Model, evidence: Evidence) -> Inventory | None:
    if model.name is not None:
        return catalogue_inventory(model.name)
    if model.config is None:
        return None
    if evidence.inventory is None:
        raise UserError(_("The config's parameters have not been counted yet."), "model.config")
    return evidence.inventory


def _bare_count(model: Model) -> int:
    count = model.n_params if model.name is None else catalogue_model(model.name).n_params
    assert count is not None, "a model without shapes is a count"
    return count


def _workspace(scenario: Scenario, device: Accelerator) -> list[Term]:
    """A workspace for each of the two threads that multiply matrices: the training loop's, and autograd's."""
    if scenario.parallelism.engine is EngineName.LLM_C:
        return []  # its own is among its terms
    num_bytes = device.cublas_workspace_bytes
    return [
        Term(
            name="cublas_workspace",
            category=Category.WORKSPACE,
            bytes_at=NUM_WORKSPACES * num_bytes,
            formula=Formula(symbols="2\\,W", numbers=product(NUM_WORKSPACES, num_bytes)),
            source="torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize, and "
            "getCurrentCUDABlasHandle: each thread has a handle of its own",
        )
    ]


def _plan(inputs: Inputs, terms: tuple[Term, ...], device: Accelerator, profile: ActivationProfile) -> Plan:
    """What the scenario asks of the allocator, which has what the card gives but for what lies outside it."""
    outside = device.runtime(inputs.scenario.hardware.gpus).num_bytes
    return reservation_plan(inputs, terms, device, max(0, device.usable_bytes - outside), profile.trained_bytes)


def _reservation(
    inputs: Inputs, terms: tuple[Term, ...], device: Accelerator, evidence: Evidence
) -> Reservation | None:  # fmt: skip
    """What the evidence says the allocator reserved, where it was asked this very question."""
    if evidence.profile is None or evidence.plan is None:
        return None
    return evidence.reservation if evidence.plan == _plan(inputs, terms, device, evidence.profile) else None


def _missing(scenario: Scenario, inventory: Inventory | None, layers: list[Term]) -> tuple[Missing, ...]:
    missing = [] if layers else [Missing.ACTIVATIONS]
    divided = scenario.parallelism.stage == 3 and scenario.parallelism.dp_shard > 1
    if inventory is None and divided:
        missing.append(Missing.GATHERED_LAYERS)
    return tuple(missing)


Ask = Callable[[str, dict[str, Any]], Mapping[str, Any]]


def evidence_for(scenario: Scenario, ask: Ask, *, traced: bool = False) -> Evidence:
    """Fetch what :func:`predict` needs: a config's inventory; and a trace of the model, where `traced` asks for one
    or no closed form stands for the model's architecture or what the recipe does.

    `ask(task, payload)` has a worker do a task and raises UserError where that fails; it is called only for a
    scenario with a config, or to trace.
    """
    evidence = FORMULAS
    if scenario.model.config is not None:
        counted = ask("count_config", {"config": dict(scenario.model.config)})
        evidence = Evidence(
            inventory=load_inventory(counted["inventory"]),
            config_defaults=counted["defaults"],
            quantised_as=counted["quantised_as"],
        )
    inventory = inventory_for(scenario.model, evidence)
    unknown = inventory is not None and not has_form(inventory, scenario)
    if not traced and not unknown:
        return evidence
    request = trace_request(scenario)
    if isinstance(request, str):
        return replace(evidence, untraced=request)
    try:
        traced_evidence = replace(evidence, profile=load_profile(ask("trace", request)))
    except UserError as error:
        return replace(evidence, untraced=str(error))
    return _reserved(scenario, traced_evidence, request, ask)


def _reserved(scenario: Scenario, evidence: Evidence, request: dict[str, Any], ask: Ask) -> Evidence:
    """The evidence with what the allocator reserves when the trace's storages go through it."""
    assert evidence.profile is not None, "it was traced"
    budget = predict(scenario, evidence)
    inputs = Inputs(
        scenario=scenario, states=budget.states, inventory=budget.inventory, timeline=budget.timeline
    )  # fmt: skip
    plan = _plan(inputs, budget.terms, budget.device, evidence.profile)
    found = ask("reserve", {"trace": request, "plan": dump_plan(plan)})
    return replace(evidence, plan=plan, reservation=load_reservation(found))

"""Predicted beside measured: what the engine's terms say of a case, and what its ranks took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memcore.budget import Ask, Budget, Evidence, evidence_for, predict
from memcore.engine_options import EngineName
from memcore.engines import Inputs
from memcore.engines.fsdp1_moving import begun_at_loss, flat_units
from memcore.errors import UserError
from memcore.terms import Category, EvidenceKind, Phase, Term
from memcore.trace.profile import load_profile
from memcore.trace.request import trace_request
from memcore.verify.case import Case, RankFigures

# The loss is made within the model's forward; its gradients come within the backward.
_MOMENTS = {
    # What the step before left is there until the forward begins.
    "forward": (Phase.INIT, Phase.FORWARD, Phase.LOSS),
    "backward": (Phase.LOSS, Phase.BACKWARD),
    "optimizer": (Phase.OPTIMIZER,),
    "idle": (Phase.IDLE,),
}
PHASES = ("forward", "backward", "optimizer")
IDLE = "idle"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseProof:
    """One phase's peak on the fullest rank, in bytes: predicted with the share of each term, and measured.

    `staging`: what the communication backend held beside the measured peak.
    """

    name: str
    predicted: int
    measured: int
    staging: int
    terms: tuple[tuple[Term, int], ...]

    @property
    def error_percent(self) -> float:
        """Predicted over measured, less one."""
        return 100 * (self.predicted / self.measured - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A case's prediction and what every rank measured. `phases` in the step's order, what stays between steps last."""

    case: Case
    budget: Budget
    ranks: tuple[RankFigures, ...]
    phases: tuple[PhaseProof, ...]

    @property
    def resident(self) -> PhaseProof:
        """What is there between steps."""
        return self.phases[-1]

    @property
    def measured(self) -> Mapping[Phase, int]:
        """The measured peak of each phase."""
        return {Phase(phase.name): phase.measured for phase in self.phases}

    @property
    def other(self) -> int:
        """Bytes of the fullest process that are no tensor."""
        return max(rank.other for rank in self.ranks)


def case_evidence(case: Case, ask: Ask, device: str) -> Evidence:
    """What a prediction of the case needs: its inventory, and its layers traced with the kernels of the device that
    it runs on. Raises UserError where they cannot be traced."""
    evidence = evidence_for(case.scenario, ask)
    request = trace_request(case.scenario)
    if isinstance(request, str):
        raise UserError(request)
    kernels = "cpu" if device == "cpu" else "cuda"
    return replace(evidence, profile=load_profile(ask("trace", {**request, "kernels": kernels})))


def prove(case: Case, evidence: Evidence, ranks: Sequence[RankFigures], device: str) -> Proof:
    """Lay the prediction beside what the ranks measured."""
    budget = predict(case.scenario, evidence)
    if device == "cpu":
        budget = _without_workspace(budget)
    phases = tuple(_phase(name, _fullest(budget, name), ranks) for name in (*PHASES, IDLE))
    return Proof(case=case, budget=budget, ranks=tuple(ranks), phases=phases)


def _without_workspace(budget: Budget) -> Budget:
    """The same on a CPU, which has no cuBLAS."""
    terms = tuple(term for term in budget.terms if term.category is not Category.WORKSPACE)
    totals = tuple(sum(term.at(index) for term in terms) for index in range(len(budget.timeline)))
    return replace(budget, terms=terms, totals=totals)


Shares = tuple[tuple[Term, int], ...]


def _fullest(budget: Budget, phase: str) -> Shares:
    """The terms' shares at the moment of a phase at which their sum is largest."""
    moments = [index for index, moment in enumerate(budget.timeline) if moment.phase in _MOMENTS[phase]]
    return max((_shares(budget, phase, index) for index in moments), key=_sum)


def _shares(budget: Budget, phase: str, index: int) -> Shares:
    """At the loss, a forward has only the gradients that were there before, and nothing that FSDP1's backward begins
    with: those come with the backward."""
    at_loss = phase == "forward" and budget.timeline[index].phase is Phase.LOSS
    # The moment before the loss is the last layer's forward.
    places = [index - 1 if at_loss and term.category is Category.GRADIENTS else index for term in budget.terms]
    begun = _begun_at_loss(budget) if at_loss else {}
    shares = (
        (term, max(term.at(place) - (begun.get(term.name, 0) if term.evidence is EvidenceKind.TRACE else 0), 0))
        for term, place in zip(budget.terms, places, strict=True)
    )
    return tuple((term, share) for term, share in shares if share)


def _begun_at_loss(budget: Budget) -> Mapping[str, int]:
    if budget.scenario.parallelism.engine is not EngineName.FSDP1 or budget.inventory is None:
        return {}
    inputs = Inputs(
        scenario=budget.scenario, states=budget.states, inventory=budget.inventory, timeline=budget.timeline
    )
    return begun_at_loss(inputs, flat_units(inputs, budget.inventory))


def _sum(shares: Shares) -> int:
    return sum(share for _term, share in shares)


def _phase(name: str, shares: Shares, ranks: Sequence[RankFigures]) -> PhaseProof:
    fullest = max(ranks, key=lambda rank: rank.peaks[name])
    return PhaseProof(
        name=name,
        predicted=_sum(shares),
        measured=fullest.peaks[name],
        staging=fullest.staging.get(name, 0),
        terms=tuple(sorted(shares, key=lambda pair: -pair[1])),
    )

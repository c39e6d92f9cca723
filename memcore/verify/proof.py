"""Predicted beside measured: what the engine's terms say of a case, and what its ranks took."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memcore.budget import Ask, Budget, Evidence, evidence_for, predict
from memcore.errors import UserError
from memcore.terms import Category, Phase, Term
from memcore.trace.profile import load_profile
from memcore.trace.request import trace_request
from memcore.verify.case import Case, RankFigures

# The loss is made within the model's forward; its gradients come within the backward.
_MOMENTS = {
    "forward": (Phase.FORWARD, Phase.LOSS),
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
    terms = [term for term in budget.terms if device != "cpu" or term.category is not Category.WORKSPACE]
    phases = tuple(_phase(name, _fullest(budget, terms, name), ranks) for name in (*PHASES, IDLE))
    return Proof(case=case, budget=budget, ranks=tuple(ranks), phases=phases)


Shares = tuple[tuple[Term, int], ...]


def _fullest(budget: Budget, terms: Sequence[Term], phase: str) -> Shares:
    """The terms' shares at the moment of a phase at which their sum is largest."""
    moments = [index for index, moment in enumerate(budget.timeline) if moment.phase in _MOMENTS[phase]]
    return max((_shares(budget, terms, phase, index) for index in moments), key=_sum)


def _shares(budget: Budget, terms: Sequence[Term], phase: str, index: int) -> Shares:
    """At the loss, a forward has only the gradients that were there before: its own come with the backward."""
    at_loss = phase == "forward" and budget.timeline[index].phase is Phase.LOSS
    # The moment before the loss is the last layer's forward.
    places = [index - 1 if at_loss and term.category is Category.GRADIENTS else index for term in terms]
    shares = ((term, term.at(place)) for term, place in zip(terms, places, strict=True))
    return tuple((term, share) for term, share in shares if share)


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

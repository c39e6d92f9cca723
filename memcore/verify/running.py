"""A proof on its way through the heavy lane: ranks that run, then the prediction beside what they measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memcore.budget import Evidence
from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.jobs import HeavyJob, HeavyLane, JobResult, JobStatus, Progress, Step
from memcore.verify.case import Case, load_figures
from memcore.verify.proof import Proof, prove

# Imports on two cores, the ranks' meeting, and DeepSpeed's first operator; then about so much for each case and rank.
_START_S = {EngineName.DEEPSPEED: 35.0}
_START_S_OTHERS = 18.0
_RANK_S = 3.0
# DeepSpeed builds its operators the first time, which takes minutes.
_TIMEOUT_S = 420.0
_CASE_TIMEOUT_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """How a launch ended: a proof or a reason for each case, in order."""

    proofs: tuple[Proof, ...]
    reasons: Mapping[str, str]


def verify_step(cases: Sequence[Case], device: str, rendezvous: Mapping[str, Any] | None = None) -> Step:
    """One launch of all cases, which have one number of ranks."""
    starts = max(_START_S.get(case.scenario.parallelism.engine, _START_S_OTHERS) for case in cases)
    return Step(
        task="verify",
        payload={"cases": [case.data() for case in cases], "device": device, "rendezvous": dict(rendezvous or {})},
        estimate_s=starts + _RANK_S * sum(case.ranks for case in cases),
        timeout_s=_TIMEOUT_S + _CASE_TIMEOUT_S * len(cases),
    )


class RunningProof:
    """Cases that were started. Their owner looks now and then, or they are dropped.

    `evidence`: what each case's prediction needs. Raises UserError where the queue is full.
    """

    def __init__(
        self, lane: HeavyLane, cases: Sequence[Case], evidence: Sequence[Evidence], device: str,
        rendezvous: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.cases = tuple(cases)
        self.device = device
        self._evidence = tuple(evidence)
        self._lane = lane
        self._job: HeavyJob = lane.submit([verify_step(cases, device, rendezvous)], device=device)

    def cancel(self) -> None:
        """Stop soon."""
        self._job.cancel()

    def look(self) -> Progress:
        """How far it is."""
        return self._lane.look(self._job)

    def proven(self) -> Proven:
        """What came of it, once it has ended."""
        result = next(iter(self.look().results), None)
        if result is None or result.status is not JobStatus.DONE or result.value is None:
            return Proven(proofs=(), reasons={case.name: _sentence(result) for case in self.cases})
        given = {each["name"]: each for each in result.value["results"]}
        proofs = [
            prove(case, evidence, [load_figures(rank) for rank in given[case.name]["ranks"]], self.device)
            for case, evidence in zip(self.cases, self._evidence, strict=True)
            if "ranks" in given[case.name]
        ]
        reasons = {name: each["reason"] for name, each in given.items() if "reason" in each}
        return Proven(proofs=tuple(proofs), reasons=reasons)


def _sentence(result: JobResult | None) -> str:
    return result.message if result is not None else _("The calculation was cancelled.")

"""A run's prediction beside what was measured, or why there is none."""

from dataclasses import dataclass
from enum import StrEnum

from memcore.adapters import saved_modules
from memcore.budget import Ask, Budget, evidence_for, predict
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.score.adapter import scenario_of
from memcore.score.gaps import Gap, beyond_scope, gaps_of
from memcore.score.record import Metric, Run, name_of, parse_run
from memcore.terms import EvidenceKind

# The published format: a config's parameters lie within this share of the run's.
_MODEL_WITHIN = 0.005


class Status(StrEnum):
    """What became of a record."""

    PREDICTED = "predicted"
    NOT_PREDICTED = "not_predicted"
    OUT_OF_SCOPE = "out_of_scope"
    MALFORMED = "malformed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What became of one record. `reason`: a sentence, where it has no prediction; `gaps`: the fields that a scenario
    cannot express; `notes`: sentences on what the prediction and the run do not share."""

    run_id: str
    status: Status
    run: Run | None = None
    budget: Budget | None = None
    reason: str = ""
    gaps: tuple[Gap, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def predicted_bytes(self) -> int | None:
        """The figure of the prediction that is the like of the one measured, in bytes per GPU."""
        if self.budget is None or self.run is None:
            return None
        return comparable_bytes(self.budget, self.run.measured.metric)

    @property
    def error_pct(self) -> float | None:
        """The prediction's error in per cent of what was measured; above 0 where too much is predicted."""
        if self.predicted_bytes is None or self.run is None:
            return None
        measured = self.run.measured.bytes
        return 100 * (self.predicted_bytes - measured) / measured

    @property
    def evidence(self) -> EvidenceKind | None:
        """Where the prediction's activations come from: the closed forms, or a trace."""
        if self.budget is None:
            return None
        return self.budget.activations_from


def comparable_bytes(budget: Budget, metric: Metric) -> int:
    """The predicted figure for a metric, in bytes: the peak for what tensors take, and where the metric is unknown;
    what the allocator has reserved at the least; and what nvidia-smi shows."""
    ladder = budget.ladder
    return {"reserved": ladder.reserved, "nvidia_smi": ladder.device}.get(metric, budget.peak_bytes)


def score_run(data: object, number: int, ask: Ask, *, traced: bool = False) -> Score:
    """Score one record, the `number`-th of its file. `traced`: predict from a trace wherever one can be had."""
    try:
        run = parse_run(data)
    except UserError as error:
        return Score(run_id=name_of(data, number), status=Status.MALFORMED, reason=str(error))
    if beyond := beyond_scope(run):
        reason = _("Only data parallelism is within the scope; the run has {degrees}.").format(
            degrees=", ".join(beyond)
        )  # fmt: skip
        return Score(run_id=run.id, status=Status.OUT_OF_SCOPE, run=run, reason=reason)
    if gaps := gaps_of(run):
        reason = _("A scenario cannot express: {gaps}.").format(gaps="; ".join(gap.what for gap in gaps))
        return Score(run_id=run.id, status=Status.NOT_PREDICTED, run=run, reason=reason, gaps=gaps)
    try:
        budget = _predicted(run, ask, traced=traced)
    except UserError as error:
        gap = Gap(field=error.field or "model", what=str(error))
        return Score(run_id=run.id, status=Status.NOT_PREDICTED, run=run, reason=str(error), gaps=(gap,))
    return Score(run_id=run.id, status=Status.PREDICTED, run=run, budget=budget, notes=tuple(_notes(run, budget)))


def _predicted(run: Run, ask: Ask, *, traced: bool) -> Budget:
    """The run's budget. Raises UserError where there is none, or only one that leaves something out."""
    scenario = scenario_of(run)
    budget = predict(scenario, evidence_for(scenario, ask, traced=traced))
    counted, said = budget.states.n_params, run.model.n_params_config
    if abs(counted - said) > _MODEL_WITHIN * said:
        message = _("model.config builds {counted:,} parameters, but model.n_params_config is {said:,}.")
        raise UserError(message.format(counted=counted, said=said), "model.config")
    if budget.missing:
        message = _("The activations have no closed form here and were not traced: {reason}")
        raise UserError(message.format(reason=budget.evidence.untraced), "activations")
    return budget


def _notes(run: Run, budget: Budget) -> list[str]:
    notes = [budget.evidence.untraced] if budget.evidence.untraced else []
    said = run.recipe.lora.trainable_params if run.recipe.lora else None
    lora, inventory = budget.scenario.recipe.lora, budget.inventory
    copies = saved_modules(inventory, lora) if lora is not None and inventory is not None else ()
    counted = budget.states.trained - sum(tensor.numel for tensor in copies)
    if said is not None and said != counted:
        message = _("The scenario's adapters have {counted:,} parameters, the run's {said:,}.")
        notes.append(message.format(counted=counted, said=said))
    return notes

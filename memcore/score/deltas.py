"""Pairs of runs that differ in settings alone, of which the difference was published, beside the difference predicted.

Such a record names neither the model's config nor its batch. Predicted is what stands through the whole backward
whatever they are: the bucket that gradients are reduced through. What passes through it depends on the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from memcore.budget import predict
from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.recipes import ConventionName
from memcore.scenario import decode_json, parse_scenario
from memcore.score.gaps import MOVES_NOTHING, SETTINGS
from memcore.score.record import MAX_RUNS_CHARS, Metric, Positive, RunPart, Text, checked, name_of
from memcore.score.scoring import Status

# Stages that reduce gradients as they come; the others keep all of them, as large as the model.
_STAGES = (2, 3)
# The bucket is the same for any number of ranks that reduce, and for any model.
_RANKS, _PARAMETERS = 2, 1_000_000_000
_BUCKET = "reduce_bucket"


class DeltaSettings(RunPart):
    """The settings of one of two runs; None where nothing is said."""

    reduce_bucket_size: Positive | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    engine: Text | None = None


class Delta(RunPart):
    """Two runs, `baseline` and `variant`, and what the second took beyond the first, in bytes per GPU. `changed`: the
    settings in which they differ."""

    id: Text
    source: Text
    split: Text
    model: Text
    engine: Text
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None
    gpus: Positive | None
    changed: Annotated[list[Text], Field(min_length=1)]
    baseline: DeltaSettings
    variant: DeltaSettings
    delta_bytes: int
    baseline_bytes: Positive
    variant_bytes: Positive
    metric: Metric
    when: Literal["peak", "after_init", "after_first_forward"]
    precision_bytes: Positive
    assumptions: list[str]

    @property
    def changes(self) -> Mapping[str, tuple[object, object]]:
        """The value of each setting that differs, in the first run and in the second."""
        return {name: (getattr(self.baseline, name), getattr(self.variant, name)) for name in self.changed}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaScore:
    """What became of one such record. `reason`: a sentence, where it has no prediction; `predicted`: bytes per GPU,
    below 0 where the variant takes less."""

    delta_id: str
    status: Status
    delta: Delta | None = None
    predicted: int | None = None
    reason: str = ""

    @property
    def error_bytes(self) -> int | None:
        """Predicted less measured. In bytes: a measured difference may be none."""
        return None if self.predicted is None or self.delta is None else self.predicted - self.delta.delta_bytes


def read_deltas(text: str) -> Sequence[object]:
    """The list `deltas` of a file of runs; none where it has none. Raises UserError where it is no list."""
    data = decode_json(text, MAX_RUNS_CHARS)
    deltas = data.get("deltas", []) if isinstance(data, Mapping) else []
    if not isinstance(deltas, list):
        raise UserError(_('"deltas" of a file of runs is a list of records.'))
    return deltas


def parse_delta(data: object) -> Delta:
    """A record from its JSON data. Raises UserError with one sentence that names the first field at fault."""
    delta = checked(Delta, data)
    apart = delta.variant_bytes - delta.baseline_bytes
    if apart != delta.delta_bytes:
        message = _("variant_bytes less baseline_bytes is {apart:,}, but delta_bytes is {said:,}.")
        raise UserError(message.format(apart=apart, said=delta.delta_bytes), "delta_bytes")
    one, two = delta.baseline.model_dump(), delta.variant.model_dump()
    differ = sorted(name for name in one if one[name] != two[name])
    if differ != sorted(delta.changed):
        message = _("baseline and variant differ in {differ}, but changed is {said}.")
        raise UserError(message.format(differ=differ, said=sorted(delta.changed)), "changed")
    return delta


def score_deltas(records: Sequence[object]) -> list[DeltaScore]:
    """Score every record of a list."""
    return [score_delta(data, number) for number, data in enumerate(records, start=1)]


def score_delta(data: object, number: int) -> DeltaScore:
    """Score one record, the `number`-th of its list."""
    try:
        delta = parse_delta(data)
    except UserError as error:
        return DeltaScore(delta_id=name_of(data, number), status=Status.MALFORMED, reason=str(error))
    if reason := _unpredicted(delta):
        return DeltaScore(delta_id=delta.id, status=Status.NOT_PREDICTED, delta=delta, reason=reason)
    try:
        predicted = _bucket_bytes(delta, delta.variant) - _bucket_bytes(delta, delta.baseline)
    except UserError as error:
        return DeltaScore(delta_id=delta.id, status=Status.NOT_PREDICTED, delta=delta, reason=str(error))
    return DeltaScore(delta_id=delta.id, status=Status.PREDICTED, delta=delta, predicted=predicted)


def _unpredicted(delta: Delta) -> str:
    """Why the bucket alone does not say the difference; empty where it does."""
    if delta.engine != EngineName.DEEPSPEED or delta.zero_stage not in _STAGES:
        return _("Without the model only a bucket's difference is predicted: DeepSpeed's at stage 2 or 3.")
    known = (*SETTINGS[EngineName.DEEPSPEED], *MOVES_NOTHING)
    if others := [name for name in delta.changed if name not in known]:
        return _("What {settings} changes depends on the model, whose config is not said.").format(
            settings=", ".join(others)
        )
    if delta.when != "peak":
        return _("Only a peak's difference is predicted.")
    if delta.gpus == 1:
        return _("A single GPU reduces nothing.")
    return ""


def _bucket_bytes(delta: Delta, settings: DeltaSettings) -> int:
    """What the bucket takes under these settings, with 16-bit gradients."""
    given = settings.model_dump(exclude_none=True)
    read: dict[str, Any] = {name: value for name, value in given.items() if name in SETTINGS[EngineName.DEEPSPEED]}
    scenario = parse_scenario(
        {
            "model": {"n_params": _PARAMETERS},
            "hardware": {"gpus": delta.gpus or _RANKS},
            "parallelism": {"engine": delta.engine, "zero_stage": delta.zero_stage},
            "engine_config": {"zero_optimization": read},
            "recipe": {"convention": ConventionName.ZERO_PAPER.value},
        }
    )
    return sum(term.largest for term in predict(scenario).terms if term.name == _BUCKET)

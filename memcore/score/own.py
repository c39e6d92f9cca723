"""A team's own runs: taken from a file of records, from an export of scored ones, or from a proof on this machine."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from memcore.accuracy.scored import ScoredRun, published
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario import decode_json
from memcore.scenario.sentences import first_error
from memcore.score.record import MAX_RUNS_CHARS, read_runs
from memcore.score.running import MAX_OWN_RUNS
from memcore.score.scoring import Status
from memcore.terms import EvidenceKind
from memcore.verify.proof import Proof

_FORMAT = "memcore_own_runs"
_ROWS: TypeAdapter[list[ScoredRun]] = TypeAdapter(list[ScoredRun])


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a file holds: records that are still to be scored, or rows that were. `older`: the rows were predicted by
    another version of memcore than this one."""

    records: Sequence[object] = ()
    rows: tuple[ScoredRun, ...] = ()
    older: bool = False


def read_given(text: str) -> Given:
    """Read a file of one's own. Raises UserError for one that is neither kind, or too long."""
    data = decode_json(text, MAX_RUNS_CHARS)
    if isinstance(data, Mapping) and _FORMAT in data:
        given = Given(rows=_read_rows(data.get("runs")), older=data.get("predicted_as_of") != published().date)
    else:
        given = Given(records=read_runs(text))
    if max(len(given.records), len(given.rows)) > MAX_OWN_RUNS:
        message = _("The file has more than {most} runs; `python -m memcore score` takes any number.")
        raise UserError(message.format(most=MAX_OWN_RUNS))
    return given


def _read_rows(data: object) -> tuple[ScoredRun, ...]:
    try:
        rows = tuple(_ROWS.validate_json(json.dumps(data), strict=True))
    except ValidationError as error:
        raise first_error(error) from None
    for row in rows:
        sizes = (row.measured, row.n_params, row.seq_len, row.micro_batch, row.gpus)
        predictions = [each for each in (row.predicted, row.by_formula) if each is not None]
        if min([*sizes, *predictions]) <= 0:
            raise UserError(_("{run} has a size that is not above 0.").format(run=row.run_id[:80]))
    return rows


def rows_data(rows: Iterable[ScoredRun]) -> dict[str, Any]:
    """The rows as JSON data, which :func:`read_given` reads."""
    return {_FORMAT: 1, "predicted_as_of": published().date, "runs": [asdict(row) for row in rows]}


def export_rows(rows: Iterable[ScoredRun]) -> str:
    """The same as a file."""
    return json.dumps(rows_data(rows), indent=1, ensure_ascii=False)


def with_rows(old: Iterable[ScoredRun], new: Iterable[ScoredRun]) -> tuple[ScoredRun, ...]:
    """The old rows and the new ones, which take the place of those of the same name."""
    return tuple({row.run_id: row for row in (*old, *new)}.values())


def proof_row(proof: Proof, device: str) -> ScoredRun:
    """A proof's own small run: the largest peak of its phases, predicted and measured. `device`: where it ran."""
    scenario, budget = proof.case.scenario, proof.budget
    return ScoredRun(
        run_id=f"verify-{proof.case.name}-{device}".replace(" ", "-"),
        status=Status.PREDICTED.value,
        source="",
        family=proof.case.name,
        regime="verify",
        gold=False,
        model=_model_name(scenario.model.name, scenario.model.config),
        n_params=budget.states.n_params,
        gpu=device,
        gpus=scenario.hardware.gpus,
        engine=scenario.parallelism.engine.value,
        method=scenario.recipe.method.value,
        micro_batch=scenario.workload.micro_batch,
        seq_len=scenario.workload.seq_len,
        metric="allocated",
        measured=max(phase.measured for phase in proof.phases),
        predicted=max(phase.predicted for phase in proof.phases),
        evidence=EvidenceKind.TRACE.value,
        by_formula=None,
        device=device,
    )


def _model_name(name: str | None, config: Mapping[str, Any] | None) -> str:
    return name or str((config or {}).get("model_type", ""))

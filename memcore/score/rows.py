"""From a score to its row: the facts of the run and both its predictions."""

from memcore.accuracy.scored import ScoredRun
from memcore.budget import Ask
from memcore.score.scoring import Score, Status, score_run
from memcore.terms import EvidenceKind


def scored_run(data: object, number: int, ask: Ask) -> tuple[Score, ScoredRun | None]:
    """A record's score, traced wherever the model can be, and its row; None for a record that cannot be read."""
    score = score_run(data, number, ask, traced=True)
    if score.run is None:
        return score, None
    by_formula = score_run(data, number, ask) if score.status is Status.PREDICTED else None
    return score, row_of(score, by_formula)


def row_of(score: Score, by_formula: Score | None = None) -> ScoredRun:
    """The row of a score whose record could be read. `by_formula`: the same run scored without asking for a trace,
    which rests on closed forms where these stand for it."""
    run = score.run
    assert run is not None, "a record that cannot be read has no row"
    closed = by_formula is not None and by_formula.evidence is EvidenceKind.FORMULA
    return ScoredRun(
        run_id=run.id,
        status=score.status.value,
        source=run.source,
        family=run.family,
        regime=run.regime,
        gold=run.gold,
        model=run.model.name,
        n_params=run.model.n_params,
        gpu=run.hardware.gpu,
        gpus=run.hardware.gpus,
        engine=run.parallelism.engine if score.budget is None else score.budget.scenario.parallelism.engine.value,
        method=run.recipe.method,
        micro_batch=run.workload.micro_batch,
        seq_len=run.workload.seq_len,
        metric=run.measured.metric,
        measured=run.measured.bytes,
        predicted=score.predicted_bytes,
        evidence=score.evidence and score.evidence.value,
        by_formula=by_formula.predicted_bytes if closed and by_formula is not None else None,
    )

"""A scoreboard as JSON data, as rows of CSV, and as text."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from memcore.columns import table, wrap
from memcore.i18n import gettext as _
from memcore.score.deltas import Delta, DeltaScore
from memcore.score.scoring import Score, Status
from memcore.score.summary import Figures, by_group, by_regime, macro_median, reasons, rows_of, split, summarise
from memcore.terms import EvidenceKind
from memcore.units import ByteUnit, format_bytes

_COLUMNS = (
    "id", "status", "source", "family", "regime", "gold", "metric", "predicted_bytes", "measured_bytes", "error_pct",
    "evidence", "binding_phase", "reason",
)  # fmt: skip


def score_report(scores: Sequence[Score], deltas: Sequence[DeltaScore] = ()) -> dict[str, Any]:
    """The scoreboard as JSON data, in whole bytes per GPU; errors of runs in per cent of what was measured, of
    differences between two runs in bytes."""
    differences = [_difference(score) for score in deltas]
    return {"runs": [_record(score) for score in scores], "deltas": differences, "summary": summarise(scores)}


def score_csv(scores: Sequence[Score]) -> str:
    """The scoreboard as CSV, a row for each record."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    rows.writerows([_plain(_facts(score)[name]) for name in _COLUMNS] for score in scores)
    return text.getvalue().rstrip("\n")


def _facts(score: Score) -> dict[str, Any]:
    """What the record says, and what became of it, by column."""
    run, budget = score.run, score.budget
    return {
        "id": score.run_id,
        "status": score.status.value,
        "source": run and run.source,
        "family": run and run.family,
        "regime": run and run.regime,
        "gold": run and run.gold,
        "metric": run and run.measured.metric,
        "predicted_bytes": score.predicted_bytes,
        "measured_bytes": run and run.measured.bytes,
        "error_pct": score.error_pct,
        "evidence": score.evidence and score.evidence.value,
        "binding_phase": budget and budget.binding_phase.value,
        "reason": score.reason,
    }


def _plain(value: object) -> object:
    """A cell; text that a spreadsheet would take for a formula is quoted."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def _record(score: Score) -> dict[str, Any]:
    shares = score.budget.at_peak() if score.budget else []
    return {
        **_facts(score),
        "gaps": [{"field": gap.field, "what": gap.what} for gap in score.gaps],
        "notes": list(score.notes),
        "terms": [{"name": term.name, "category": term.category.value, "bytes": num} for term, num in shares],
    }


def _difference(score: DeltaScore) -> dict[str, Any]:
    delta = score.delta
    return {
        "id": score.delta_id,
        "status": score.status.value,
        "source": delta and delta.source,
        "model": delta and delta.model,
        "changed": None if delta is None else {name: list(values) for name, values in delta.changes.items()},
        "metric": delta and delta.metric,
        "predicted_bytes": score.predicted,
        "measured_bytes": None if delta is None else delta.delta_bytes,
        "error_bytes": score.error_bytes,
        "evidence": None if score.predicted is None else EvidenceKind.FORMULA.value,
        "reason": score.reason,
    }


def score_text(scores: Sequence[Score], unit: ByteUnit, by: str | None, deltas: Sequence[DeltaScore] = ()) -> str:
    """The scoreboard for a terminal: predictions, `by` a field of the runs, then what is not predicted and why, then
    differences between two runs, then the summary."""
    parts = []
    for name, part in split(scores, by).items() if by else [("", scores)]:
        predicted = [score for score in part if score.status is Status.PREDICTED]
        if predicted:
            parts += [name] * bool(name) + [_predictions(predicted, unit)]
    text = "\n\n".join([*parts, *_unpredicted(scores), *_differences(deltas, unit), _summary(scores)])
    # A file may come from anywhere: nothing of it is a terminal's command.
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def _predictions(scores: Sequence[Score], unit: ByteUnit) -> str:
    heading = [_("run"), _("predicted"), _("measured"), _("error"), _("metric"), _("evidence"), _("peak in")]
    rows = [heading]
    for score in scores:
        facts = _facts(score)
        sizes = [format_bytes(facts[f"{name}_bytes"], unit) for name in ("predicted", "measured")]
        others = [facts["metric"], facts["evidence"], facts["binding_phase"]]
        rows.append([score.run_id, *sizes, _percent(score.error_pct, signed=True), *others])
    return table(rows, "~>>><<<")


def _unpredicted(scores: Sequence[Score]) -> list[str]:
    """Runs without a prediction: those that could not be read, each; the rest by what cannot be expressed."""
    parts = []
    if malformed := [score for score in scores if score.status is Status.MALFORMED]:
        lines = [line for score in malformed for line in wrap(f"{score.run_id}: {score.reason}")]
        parts.append("\n".join([_("Records that cannot be read:"), *lines]))
    if found := reasons(scores):
        rows = [[_("what a scenario cannot express"), _("runs"), _("for this alone"), _("such as")]]
        for field, count in found.items():
            such = next(gap.what for score in scores for gap in score.gaps if gap.field == field)
            rows.append([field, str(count["records"]), str(count["alone"]), such])
        parts.append(table(rows, "<>>~"))
    if beyond := sum(score.status is Status.OUT_OF_SCOPE for score in scores):
        sentence = _("Out of scope, with tensor, pipeline, context or expert parallelism: {count} runs.")
        parts.append(sentence.format(count=beyond))
    return parts


def _differences(scores: Sequence[DeltaScore], unit: ByteUnit) -> list[str]:
    """Differences between two runs, and those that have no prediction, each with its reason."""
    rows = [[_("difference"), _("predicted"), _("measured"), _("off by"), _("what differs")]]
    for score in scores:
        if score.delta is not None and score.predicted is not None:
            sizes = (score.predicted, score.delta.delta_bytes, score.error_bytes or 0)
            rows.append([score.delta_id, *(signed_bytes(size, unit) for size in sizes), changes_text(score.delta)])
    lines = [line for score in scores if score.reason for line in wrap(f"{score.delta_id}: {score.reason}")]
    unread = ["\n".join([_("Differences without a prediction:"), *lines])] if lines else []
    return [table(rows, "~>>>~")] * (len(rows) > 1) + unread


def signed_bytes(num_bytes: int, unit: ByteUnit) -> str:
    """A difference in bytes with its sign; none has no sign."""
    sign = "+" if num_bytes > 0 else "-" if num_bytes < 0 else ""
    return sign + format_bytes(abs(num_bytes), unit)


def changes_text(delta: Delta) -> str:
    """What differs between the two runs, from the first to the second."""
    return ", ".join(f"{name} {_value(one)} -> {_value(two)}" for name, (one, two) in delta.changes.items())


def _value(value: object) -> str:
    return f"{value:.4g}" if type(value) is int else json.dumps(value)


def _summary(scores: Sequence[Score]) -> str:
    """Errors by what was measured, over all runs and in each regime."""
    heading = [_("regime"), _("measured as"), _("runs"), _("predicted"), _("median"), "90%", _("median, signed")]
    rows, of_regimes = rows_of(scores), by_regime(rows_of(scores))
    lines = [heading, *(_figures(_("all"), group, found) for group, found in by_group(rows).items() if found.n)]
    means = {group: macro_median(of_regimes, group) for group in by_group(rows)}
    lines += [
        [_("mean of regimes"), group, "", "", _percent(mean), "", ""]
        for group, mean in means.items()
        if mean is not None
    ]
    for regime, part in of_regimes.items():
        lines += [_figures(regime, group, found) for group, found in part.items() if found.predicted]
    return table(lines, "<<>>>>>")


def _figures(regime: str, group: str, found: Figures) -> list[str]:
    errors = [_percent(found.median_abs_pct), _percent(found.p90_abs_pct)]
    return [regime, group, str(found.n), str(found.predicted), *errors, _percent(found.median_signed_pct, signed=True)]


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1f}%" if signed else f"{value:.1f}%"

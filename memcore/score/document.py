"""The published runs' scores as documents: docs/accuracy.md, and the table of README.md. In English, as these are."""

from collections.abc import Iterable, Iterator, Sequence

from memcore.accuracy.band import WIDE_PERCENT, Band, earned_band
from memcore.accuracy.scored import OF_A_STEP, Published, ScoredRun
from memcore.score.deltas import DeltaScore
from memcore.score.reasons import kind_of, reason_of
from memcore.score.report import changes_text, signed_bytes
from memcore.score.scoring import Score, Status
from memcore.score.summary import Figures, by_group, by_regime, macro_median, reasons
from memcore.terms import EvidenceKind
from memcore.units import ByteUnit, format_bytes

MISS_PCT = 10.0
GROUP_LABELS = {
    "gold": "gold: exact bytes, every input stated",
    "allocated": "allocated or active",
    "reserved": "reserved",
    "reserved_fsdp2": "reserved, of these FSDP2",
    "other": "nvidia-smi, or not said",
}
_UNEXPLAINED = "No reason is known yet."
Row = Sequence[object]

_HEAD = """# Accuracy

{predicted} of {within} published runs with data parallelism have a prediction, as of {date}; {beyond} more are out of
scope, with tensor, pipeline, context or expert parallelism. This file, the figures of the error bands and the table in
README.md are written by `python -m scripts.score_published` from the records in `memcore/data/published_runs.json`.

Errors are in per cent of what was measured: of what tensors take where that was measured (allocated, active), of what
the allocator holds (reserved), of the whole process (nvidia-smi). Median and 90% are of absolute errors, "signed" is
the median with its sign. "Mean of regimes" is the mean of the regimes' medians, so that none counts for its number of
runs. No constant is fitted to these runs.
"""
_BANDS = """## Error bands

What a verdict carries. For an engine and a method with 5 or more predicted runs, nine of ten runs of the kind lie
within (split conformal prediction; below 9 runs: the largest error). Otherwise the band is {wide}%, and said to be
assumed. A verdict takes that of what tensors take, where it is earned: of what the allocator holds beyond them, wholly
free segments are given back before an allocation fails. A prediction by closed forms has its own, from the same runs
predicted without a trace.
"""


_DELTAS = """
## Differences between two runs

Pairs of runs that differ in settings alone, whose sources name neither the model's config nor its batch. Predicted is
the difference of what stands through the whole backward whatever these are: DeepSpeed's bucket, with 16-bit gradients.
"""


def accuracy_document(published: Published, scores: Sequence[Score], deltas: Sequence[DeltaScore]) -> str:
    """docs/accuracy.md."""
    rows = published.runs
    beyond = sum(row.status == Status.OUT_OF_SCOPE for row in rows)
    head = _HEAD.format(
        predicted=len(published.predicted), within=len(rows) - beyond, date=published.date, beyond=beyond
    )
    parts = [head, "## By what was measured\n", _by_group(rows), "\n## By regime\n", _by_regime(rows)]
    parts += ["\n" + _BANDS.format(wide=WIDE_PERCENT), _bands(rows)]
    parts += [f"\n## Misses above {MISS_PCT:.0f}%", *_misses(published.predicted)]
    parts += ["\n## Without a prediction\n", *_unpredicted(scores)]
    if deltas:
        parts += [
            _DELTAS,
            _table(["difference", "what differs", "predicted", "measured", "off by", "source"], map(_delta, deltas)),
        ]
    return "\n".join(parts).rstrip("\n") + "\n"


def readme_table(published: Published) -> str:
    """The table of README.md."""
    within = [row for row in published.runs if row.status != Status.OUT_OF_SCOPE]
    caption = f"As of {published.date}, {len(published.predicted)} of {len(within)} runs are predicted:"
    return f"{caption}\n\n{_by_group(published.runs)}"


def _by_group(rows: Sequence[ScoredRun]) -> str:
    regimes = by_regime(rows)
    lines = [
        [GROUP_LABELS[name], found.n, found.predicted, *_errors(found), _percent(macro_median(regimes, name))]
        for name, found in by_group(rows).items()
    ]
    return _table(["measured as", "runs", "predicted", "median", "90%", "signed", "mean of regimes"], lines)


def _by_regime(rows: Sequence[ScoredRun]) -> str:
    lines = [
        [regime, GROUP_LABELS[name], found.n, found.predicted, *_errors(found)]
        for regime, groups in by_regime(rows).items()
        for name, found in groups.items()
        if found.n and name not in ("gold", "reserved_fsdp2")
    ]
    return _table(["regime", "measured as", "runs", "predicted", "median", "90%", "signed"], lines)


def _bands(rows: Sequence[ScoredRun]) -> str:
    lines = []
    for engine, method in sorted({(row.engine, row.method) for row in rows if row.predicted is not None}):
        for evidence in (EvidenceKind.TRACE, EvidenceKind.FORMULA):
            bands = [earned_band(rows, engine, method, evidence, (figure,)) for figure in OF_A_STEP]
            bands.append(earned_band(rows, engine, method, evidence))
            lines.append([engine, method, evidence.value, *map(_band, bands)])
    return _table(["engine", "method", "evidence", "allocated", "reserved", "verdict"], lines)


def _band(band: Band) -> str:
    if not band.earned:
        return f"±{band.percent}%, assumed ({band.runs} runs)"
    return f"±{band.percent}% ({band.runs} runs)"


def _misses(rows: Iterable[ScoredRun]) -> Iterator[str]:
    """The runs that are missed, by their reason; those without one last."""
    found: dict[str, list[ScoredRun]] = {}
    for row in rows:
        if row.error_pct is not None and abs(row.error_pct) > MISS_PCT:
            found.setdefault(reason_of(row) or _UNEXPLAINED, []).append(row)
    if not found:
        yield "\nNone."
    for reason, missed in sorted(found.items(), key=lambda item: (item[0] == _UNEXPLAINED, -len(item[1]))):
        yield f"\n{reason}\n"
        yield _table(["run", "measured as", "predicted", "measured", "error", "source"], map(_miss, missed))


def _miss(row: ScoredRun) -> Row:
    assert row.predicted is not None
    sizes = (format_bytes(row.predicted, ByteUnit.GB), format_bytes(row.measured, ByteUnit.GB))
    return [f"`{row.run_id}`", kind_of(row), *sizes, _percent(row.error_pct, signed=True), _source(row.source)]


def _delta(score: DeltaScore) -> Row:
    delta = score.delta
    assert delta is not None, f"{score.delta_id}: {score.reason}"
    measured = signed_bytes(delta.delta_bytes, ByteUnit.GB)
    figures = [score.reason, measured, "-"]
    if score.predicted is not None and score.error_bytes is not None:
        figures = [signed_bytes(score.predicted, ByteUnit.GB), measured, signed_bytes(score.error_bytes, ByteUnit.GB)]
    return [f"`{delta.id}`", changes_text(delta), *figures, _source(delta.source)]


def _source(source: str) -> str:
    """A source without a colon before its path, which would read as a path of this project."""
    return source.partition("@")[0]


def _unpredicted(scores: Sequence[Score]) -> Iterator[str]:
    found = reasons(scores)
    if not found:
        yield "None."
        return
    lines = []
    for field, count in found.items():
        such = next(gap.what for score in scores for gap in score.gaps if gap.field == field)
        lines.append([f"`{field}`", count["records"], count["alone"], such.replace("|", "/")])
    yield _table(["what a scenario cannot express", "runs", "for this alone", "such as"], lines)


def _errors(found: Figures) -> list[str]:
    errors = [_percent(found.median_abs_pct), _percent(found.p90_abs_pct)]
    return [*errors, _percent(found.median_signed_pct, signed=True)]


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1f}%" if signed else f"{value:.1f}%"


def _table(heading: Row, lines: Iterable[Row]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)

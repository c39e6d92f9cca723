"""Cases, results and findings in words."""

from collections.abc import Iterable

from memcore.bench.case import Case, Part
from memcore.bench.findings import Findings, step_seconds
from memcore.bench.fits import PowerLaw
from memcore.bench.measurement import Measurement, Status
from memcore.bench.sweeps import Sweep, SweepKind
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.jobs import JobStatus, Progress
from memcore.units import ByteUnit, format_bytes

SWEEP_LABELS = {
    SweepKind.SEQUENCE: mark("Sequence length"),
    SweepKind.DEPTH: mark("Depth"),
    SweepKind.SEGMENTS: mark("Segment length"),
    SweepKind.FRONTIER: mark("Memory against time"),
}
PART_LABELS = {
    Part.ATTENTION: mark("attention alone"),
    Part.LAYERS: mark("whole layers"),
    Part.PROJECTIONS: mark("projections"),
}
ATTENTION_LABELS = {"plain": mark("plain"), "flash": mark("flash"), "memory_efficient": mark("memory-efficient")}
_STATUS_LABELS = {
    Status.UNAVAILABLE: mark("not available here"),
    Status.FAILED: mark("failed"),
    Status.CRASHED: mark("crashed"),
    Status.TIMED_OUT: mark("out of time"),
    Status.OUT_OF_MEMORY: mark("out of memory"),
    Status.CANCELLED: mark("cancelled"),
}
# What a sweep is for.
SWEEP_PURPOSES = {
    SweepKind.SEQUENCE: mark("Where attention is quadratic and where it is linear: alone, and within a whole layer."),
    SweepKind.DEPTH: mark("What O(L) becomes with sqrt(L) segments, on a textbook's layer and on the model's own."),
    SweepKind.SEGMENTS: mark("Which number of layers per segment takes the least, measured and predicted."),
    SweepKind.FRONTIER: mark("What each attention with each checkpointing takes in memory and in time."),
}
WAITS_FOR_OTHERS = mark("Another program measures on this device; this begins when that has ended.")


def case_label(case: Case) -> str:
    """A case in a few words."""
    parts = [_(PART_LABELS[case.part])]
    if case.part is not Part.PROJECTIONS:
        parts.append(_(ATTENTION_LABELS[case.attention]))
    if case.part is not Part.ATTENTION:
        parts += [_("L = {layers}").format(layers=case.num_layers), checkpointing_label(case.checkpointing)]
    parts.append(_("{tokens:,} tokens").format(tokens=case.tokens))
    return ", ".join(parts)


def checkpointing_label(kind: str) -> str:
    """A kind of checkpointing in a few words."""
    if kind == "none":
        return _("no checkpointing")
    if kind == "full":
        return _("full checkpointing")
    if kind == "attention":
        return _("selective checkpointing")
    if kind.startswith("save"):
        return _("checkpointing but for attention and products")
    return _("segments of {k}").format(k=kind.partition("(")[2].rstrip(")"))


def outcome(measurement: Measurement) -> str:
    """Why there are no figures; empty where there are."""
    if measurement.status is Status.DONE:
        return ""
    case = measurement.case
    if measurement.status is Status.UNAVAILABLE:
        return no_kernel(case.attention)
    if measurement.status is Status.OUT_OF_MEMORY and case.part is not Part.PROJECTIONS:
        sentence = _("out of memory at {tokens:,} tokens, {attention} attention")
        if case.attention == "plain":
            sentence = _("out of memory at {tokens:,} tokens, {attention} attention: that is the point")
        return sentence.format(tokens=case.tokens, attention=_(ATTENTION_LABELS[case.attention]))
    return measurement.reason or status_label(measurement)


def no_kernel(attention: str) -> str:
    """Why an attention cannot be measured on a device."""
    sentence = _("Not available here: torch has no {name} attention kernel for this device, dtype and head size.")
    return sentence.format(name=_(ATTENTION_LABELS[attention]))


def without_figures(measurements: Iterable[Measurement]) -> dict[str, list[str]]:
    """Why there are cases without figures: each reason once, with the cases that it holds for."""
    cases: dict[str, list[str]] = {}
    for each in measurements:
        if reason := outcome(each):
            cases.setdefault(reason, []).append(case_label(each.case))
    return cases


def status_label(measurement: Measurement) -> str:
    """How a case without figures ended, in a few words."""
    return _(_STATUS_LABELS[measurement.status])


def how_it_ended(progress: Progress) -> str:
    """What a run's end leaves undone, as a sentence; empty where nothing."""
    done = {"done": sum(each.status is not JobStatus.CANCELLED for each in progress.results), "all": progress.num_steps}
    if progress.status is JobStatus.CANCELLED:
        return _("Cancelled after {done} of {all} cases; what was measured stays.").format(**done)
    if progress.status is JobStatus.TIMED_OUT:
        return _("Out of time after {done} of {all} cases; what was measured stays.").format(**done)
    return ""


def found_here(sweep: Sweep, found: Findings, unit: ByteUnit) -> list[str]:
    """What a sweep found, one sentence for each finding."""
    sentences = {
        SweepKind.SEQUENCE: _over_the_sequence,
        SweepKind.DEPTH: _over_the_depth,
        SweepKind.SEGMENTS: _over_segments,
        SweepKind.FRONTIER: _along_the_frontier,
    }[sweep.kind](sweep, found, unit)
    if found.trace_percent is not None and found.trace_bytes is not None:
        sentence = _("The trace is nowhere further than {percent:.2f}% ({size}) from what was measured.")
        size = format_bytes(found.trace_bytes, unit)
        sentences.append(sentence.format(percent=found.trace_percent, size=size))
    return sentences


def _power(law: PowerLaw) -> dict[str, float]:
    return {"exponent": law.exponent, "low": law.low, "high": law.high}


def _over_the_sequence(sweep: Sweep, found: Findings, _unit: ByteUnit) -> list[str]:
    sentences = []
    for name, law in found.exponents.items():
        sentence = _(
            "Here {attention} attention's own bytes grow as the length to the power of {exponent:.2f} "
            "(95%: {low:.2f} to {high:.2f})."
        )
        sentences.append(sentence.format(attention=_(ATTENTION_LABELS[name]), **_power(law)))
    plain = found.layers.get("plain")
    lengths = [case.seq_len for case in sweep.cases if case.part is Part.LAYERS]
    if plain is not None and lengths:
        constant, linear, square = plain.shares(max(lengths))
        sentence = _(
            "Of a whole layer with plain attention, {square:.0f}% at {tokens:,} tokens is quadratic, {linear:.0f}% "
            "linear and {constant:.0f}% constant."
        )
        sentences.append(sentence.format(square=square, linear=linear, constant=constant, tokens=max(lengths)))
        if plain.takeover is not None:
            sentence = _("The quadratic part is the larger one from {length:,} tokens on.")
            sentences.append(sentence.format(length=plain.takeover))
    return sentences


def _over_the_depth(_sweep: Sweep, found: Findings, _unit: ByteUnit) -> list[str]:
    none, segments = found.exponents.get("none"), found.exponents.get("segments")
    if none is None or segments is None:
        return []
    sentence = _(
        "Where a layer keeps its input, memory here grows as L to the power of {none:.2f} without checkpointing and "
        "of {segments:.2f} (95%: {low:.2f} to {high:.2f}) in sqrt(L) segments."
    )
    numbers = {"low": segments.low, "high": segments.high}
    return [sentence.format(none=none.exponent, segments=segments.exponent, **numbers)]


def _over_segments(_sweep: Sweep, found: Findings, _unit: ByteUnit) -> list[str]:
    if found.segments is None:
        return []
    sentences = [_("The lowest peak measured here is that of segments of {k}.").format(k=found.segments.best)]
    if found.segments.excess_percent is not None:
        sentence = _("Predicted is {k}, whose peak is {percent:.1f}% above the lowest.")
        percent = found.segments.excess_percent
        sentences.append(sentence.format(k=found.segments.predicted, percent=percent))
    return sentences


def _along_the_frontier(_sweep: Sweep, found: Findings, unit: ByteUnit) -> list[str]:
    figures = [each.figures for each in found.frontier if each.figures is not None]
    if not figures:
        return []
    least, most = figures[0], figures[-1]
    sentence = _(
        "{count} variants are on the frontier: from {least} ({name}) at {times:.2f} times the time of the fastest, to "
        "{most} ({fastest})."
    )
    return [
        sentence.format(
            count=len(figures),
            least=format_bytes(least.peak_bytes, unit),
            name=case_label(found.frontier[0].case),
            times=step_seconds(least) / step_seconds(most),
            most=format_bytes(most.peak_bytes, unit),
            fastest=case_label(found.frontier[-1].case),
        )
    ]

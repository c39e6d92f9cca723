"""A sweep's results as JSON data and as text for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memcore.bench.case import dump_case
from memcore.bench.findings import Findings, step_seconds
from memcore.bench.measurement import DeviceFacts, Measurement, dump_measurement
from memcore.bench.sweeps import Sweep
from memcore.bench.words import case_label, found_here, outcome
from memcore.columns import table, wrap
from memcore.i18n import gettext as _
from memcore.units import ByteUnit, format_bytes, format_percent, format_seconds


def sweep_report(
    sweep: Sweep,
    device: DeviceFacts,
    measured: Mapping[str, Measurement],
    formulas: Mapping[str, int],
    found: Findings,
) -> dict[str, Any]:
    """Everything as JSON data: `exponents` as plain numbers by attention or checkpointing, their intervals in
    `intervals`."""
    return {
        "sweep": sweep.kind.value,
        "device": asdict(device),
        "reductions": sweep.notes(),
        "cases": [_case(sweep, index, measured, formulas) for index in range(len(sweep.cases))],
        "exponents": {name: law.exponent for name, law in found.exponents.items()},
        "intervals": {name: [law.low, law.high] for name, law in found.exponents.items()},
        "layers": {
            name: {**asdict(law), "takeover_tokens": law.takeover, "shares_percent": list(law.shares(_longest(sweep)))}
            for name, law in found.layers.items()
        },
        "segments": None if found.segments is None else asdict(found.segments),
        "frontier": [dump_case(each.case) for each in found.frontier],
        "trace_difference": {"percent": found.trace_percent, "bytes": found.trace_bytes},
        "findings": found_here(sweep, found, ByteUnit.GB),
    }


def _longest(sweep: Sweep) -> int:
    return max(case.seq_len for case in sweep.cases)


def _case(
    sweep: Sweep, index: int, measured: Mapping[str, Measurement], formulas: Mapping[str, int]
) -> dict[str, Any]:  # fmt: skip
    case = sweep.cases[index]
    found = measured.get(case.key)
    if found is None:
        return {"case": dump_case(case), "status": "not_measured", "formula_bytes": formulas.get(case.key)}
    data = dump_measurement(found)
    del data["device"]
    return {**data, "formula_bytes": formulas.get(case.key)}


def sweep_text(
    sweep: Sweep,
    device: DeviceFacts,
    measured: Mapping[str, Measurement],
    formulas: Mapping[str, int],
    found: Findings,
    unit: ByteUnit,
) -> str:
    """The same as a table, what was found in words, and every reduction."""
    heading = [_("case"), _("peak"), _("trace"), _("formula"), _("kept"), _("time"), _("gradients"), _("measured")]
    rows = [heading]
    for case in sweep.cases:
        each = measured.get(case.key)
        rows.append([case_label(case), *_cells(each, formulas.get(case.key), unit)])
    where = _("Measured on {device}, with torch {torch} and transformers {transformers}.")
    described = where.format(device=device.name, torch=device.torch, transformers=device.transformers)
    paragraphs = [described, table(rows, "~>>>>>>>")]
    reasons = {outcome(each) for case in sweep.cases if (each := measured.get(case.key)) is not None} - {""}
    paragraphs += _wrapped(found_here(sweep, found, unit))
    paragraphs += _wrapped([*sorted(reasons), *sweep.notes()])
    return "\n\n".join(paragraphs)


def _wrapped(sentences: Sequence[str]) -> list[str]:
    return ["\n".join(line for sentence in sentences for line in wrap(sentence))] if sentences else []


def _cells(found: Measurement | None, formula: int | None, unit: ByteUnit) -> list[str]:
    """The figures of a case beside its name; gaps where there are none."""
    expected = "" if formula is None else format_bytes(formula, unit)
    if found is None or found.figures is None:
        status = _("not measured") if found is None else _("none: see below")
        return [status, "", expected, "", "", "", "" if found is None else found.measured_at[:10]]
    figures = found.figures
    traced = figures.traced_bytes
    apart = figures.gradient_difference
    return [
        format_bytes(figures.peak_bytes, unit),
        "" if traced is None else format_percent(100 * (traced / figures.peak_bytes - 1)),
        expected,
        format_bytes(figures.kept_bytes, unit),
        format_seconds(step_seconds(figures)),
        "" if apart is None else f"{apart:.0e}",
        found.measured_at[:10],
    ]

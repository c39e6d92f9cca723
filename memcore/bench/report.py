"""A sweep's results as JSON data and as text for a terminal."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from memcore.bench.case import Case, dump_case
from memcore.bench.findings import Findings, spread_percent, step_seconds
from memcore.bench.measurement import DeviceFacts, Figures, Measurement, dump_measurement
from memcore.bench.results import Result
from memcore.bench.sweeps import Sweep
from memcore.bench.words import case_label, found_here, status_label, without_figures
from memcore.columns import table, wrap
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.units import ByteUnit, format_bytes, format_percent, format_seconds


def sweep_report(result: Result, formulas: Mapping[str, int], found: Findings) -> dict[str, Any]:
    """Everything as JSON data: `exponents` as plain numbers by attention or checkpointing, their intervals in
    `intervals`."""
    sweep = result.sweep
    return {
        "sweep": sweep.kind.value,
        "device": asdict(result.device),
        "reductions": sweep.notes(),
        "cases": [_case(case, result.measured.get(case.key), formulas.get(case.key)) for case in sweep.cases],
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


def _case(case: Case, found: Measurement | None, formula: int | None) -> dict[str, Any]:
    if found is None:
        return {"case": dump_case(case), "status": "not_measured", "formula_bytes": formula}
    data = dump_measurement(found)
    del data["device"]
    return {**data, "formula_bytes": formula}


def sweep_text(result: Result, formulas: Mapping[str, int], found: Findings, unit: ByteUnit) -> str:
    """The same as a table, what was found in words, and every reduction."""
    rows = case_rows(result, formulas, unit)
    lines = [[_(HEADINGS[name]) for name in _IN_TEXT], *([row[name] for name in _IN_TEXT] for row in rows)]
    paragraphs = [where_measured(result.device), table(lines, "~>>>>>>>")]
    missing = without_figures(result.tried())
    paragraphs += _wrapped(found_here(result.sweep, found, unit))
    paragraphs += _wrapped(f"{reason} ({'; '.join(cases)})" for reason, cases in missing.items())
    paragraphs += _wrapped(result.sweep.notes())
    return "\n\n".join(paragraphs)


def _wrapped(sentences: Iterable[str]) -> list[str]:
    lines = [line for sentence in sentences for line in wrap(sentence)]
    return ["\n".join(lines)] if lines else []


def where_measured(device: DeviceFacts) -> str:
    """The device and what ran on it, as a sentence."""
    sentence = _("Measured on {device}, with torch {torch} and transformers {transformers}.")
    named = f"{device.name} ({device.driver})" if device.driver else device.name
    return sentence.format(device=named, torch=device.torch, transformers=device.transformers)


# What a table has of each case, and its headings.
HEADINGS = {
    "case": mark("case"),
    "peak": mark("peak"),
    "trace": mark("trace"),
    "formula": mark("formula"),
    "kept": mark("kept"),
    "reserved": mark("reserved"),
    "time": mark("time"),
    "spread": mark("spread"),
    "forward": mark("forward"),
    "backward": mark("backward"),
    "recompute": mark("recompute"),
    "loss": mark("loss"),
    "gradients": mark("gradients"),
    "kernel": mark("kernel"),
    "measured": mark("measured"),
}
_IN_TEXT = ("case", "peak", "trace", "formula", "kept", "time", "gradients", "measured")


def case_rows(result: Result, formulas: Mapping[str, int], unit: ByteUnit) -> list[dict[str, str]]:
    """One row for each case, by the names of `HEADINGS`; gaps where there is no figure."""
    rows = []
    for case in result.sweep.cases:
        key = case.key
        found, formula = result.measured.get(key), formulas.get(key)
        row = dict.fromkeys(HEADINGS, "") | {"case": case_label(case)}
        row["formula"] = "" if formula is None else format_bytes(formula, unit)
        row["measured"] = "" if found is None else found.measured_at[:10]
        if found is None or found.figures is None:
            row["peak"] = _("not measured") if found is None else status_label(found)
        else:
            row |= _cells(found.figures, unit)
        rows.append(row)
    return rows


def _cells(figures: Figures, unit: ByteUnit) -> dict[str, str]:
    traced, again = figures.traced_bytes, figures.recompute
    differences = {"loss": figures.loss_difference, "gradients": figures.gradient_difference}
    return {
        "peak": format_bytes(figures.peak_bytes, unit),
        "trace": "" if traced is None else format_percent(100 * (traced / figures.peak_bytes - 1)),
        "kept": format_bytes(figures.kept_bytes, unit),
        "reserved": "" if figures.reserved_bytes is None else format_bytes(figures.reserved_bytes, unit),
        "time": format_seconds(step_seconds(figures)),
        "spread": f"±{spread_percent(figures):.0f}%",
        "forward": format_seconds(figures.forward.median),
        "backward": format_seconds(figures.backward.median),
        "recompute": "" if again is None else format_seconds(again.median),
        **{name: "" if apart is None else f"{apart:.0e}" if apart else "0" for name, apart in differences.items()},
        "kernel": figures.kernel.removeprefix("aten::"),
    }

"""What a sweep's charts show: measured points, and the lines beside them, as plain numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memcore.bench.case import Case, Part
from memcore.bench.findings import Findings, step_seconds
from memcore.bench.fits import PowerLaw
from memcore.bench.measurement import Measurement
from memcore.bench.results import Result
from memcore.bench.sweeps import SweepKind

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One variant: bytes over the size that the sweep varies, measured, traced and in closed form. `law`: what was
    fitted to the measured points, with the line from the first to the last."""

    attention: str
    checkpointing: str
    measured: Points
    traced: Points
    formula: Points
    law: PowerLaw | None
    fitted: Points


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """The lines of one chart, of what `part` runs."""

    part: Part
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a variant takes: seconds of a forward and backward, and bytes at the most."""

    attention: str
    checkpointing: str
    seconds: float
    num_bytes: int


def panels(result: Result, formulas: Mapping[str, int], found: Findings) -> list[Panel]:
    """The charts of a sweep over a size; none for memory against time."""
    kind = result.sweep.kind
    if kind is SweepKind.FRONTIER:
        return []
    grouped: dict[Part, dict[tuple[str, str], list[Case]]] = {}
    for case in result.sweep.cases:
        if case.key in result.measured and _size(kind, case) is not None:
            grouped.setdefault(case.part, {}).setdefault((case.attention, case.checkpointing_kind), []).append(case)
    return [
        Panel(
            part=part,
            lines=tuple(
                _line(attention, name, cases, result, formulas, _law(kind, part, attention, name, found))
                for (attention, name), cases in variants.items()
            ),
        )
        for part, variants in grouped.items()
    ]


def costs(measurements: Iterable[Measurement]) -> list[Cost]:
    """Time and memory of each measurement that has them."""
    return [
        Cost(
            attention=each.case.attention,
            checkpointing=each.case.checkpointing,
            seconds=step_seconds(each.figures),
            num_bytes=each.figures.peak_bytes,
        )
        for each in measurements
        if each.figures is not None
    ]


def _size(kind: SweepKind, case: Case) -> int | None:
    """The size that a sweep varies; None for a case that has none, such as segments' plain variant."""
    if kind is SweepKind.SEQUENCE:
        return case.seq_len
    if kind is SweepKind.DEPTH:
        return case.num_layers
    return case.segment_length


def _law(kind: SweepKind, part: Part, attention: str, checkpointing: str, found: Findings) -> PowerLaw | None:
    if kind is SweepKind.SEQUENCE and part is Part.ATTENTION:
        return found.exponents.get(attention)
    if kind is SweepKind.DEPTH and part is Part.PROJECTIONS:
        return found.exponents.get(checkpointing)
    return None


def _line(
    attention: str,
    checkpointing: str,
    cases: list[Case],
    result: Result,
    formulas: Mapping[str, int],
    law: PowerLaw | None,
) -> Line:
    sized = [(float(size), case.key) for case in cases if (size := _size(result.sweep.kind, case)) is not None]
    figures = {key: each.figures for key, each in result.measured.items() if each.figures is not None}
    traced = {key: each.traced_bytes for key, each in figures.items() if each.traced_bytes is not None}
    measured = tuple((size, float(figures[key].peak_bytes)) for size, key in sized if key in figures)
    ends = (measured[0][0], measured[-1][0]) if measured else ()
    return Line(
        attention=attention,
        checkpointing=checkpointing,
        measured=measured,
        traced=tuple((size, float(traced[key])) for size, key in sized if key in traced),
        formula=tuple((size, float(formulas[key])) for size, key in sized if key in formulas),
        law=law,
        fitted=tuple((size, law.at(size)) for size in ends) if law is not None else (),
    )

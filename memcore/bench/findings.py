"""What a sweep found: exponents, the parts of a whole layer's bytes, the best segment length, the frontier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memcore.bench.case import Case, Part
from memcore.bench.fits import PowerLaw, Quadratic, power_law, quadratic
from memcore.bench.measurement import Figures, Measurement
from memcore.bench.sweeps import Sweep, SweepKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The segment length with the lowest measured peak and the predicted one (None where nothing predicts), and by
    how many percent the peak at the predicted k lies above the lowest."""

    best: int
    predicted: int | None
    excess_percent: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What the measured cases of a sweep show; empty where they do not suffice.

    `exponents`: by attention of the sequence length, fitted on the attention's own bytes; by checkpointing ("none",
    "segments") of the depth. `layers`: the whole layer's bytes over the sequence length, by variant.
    `frontier`: the cases that no other beats in both memory and time, least memory first. `trace_percent`: the
    largest difference between a trace and its measurement, in percent, and in bytes.
    """

    exponents: Mapping[str, PowerLaw] = field(default_factory=dict)
    layers: Mapping[str, Quadratic] = field(default_factory=dict)
    segments: Segments | None = None
    frontier: tuple[Measurement, ...] = ()
    trace_percent: float | None = None
    trace_bytes: int | None = None


def findings(sweep: Sweep, measured: Mapping[str, Measurement], predicted_k: int | None = None) -> Findings:
    """What a sweep found, from its measured cases by key."""
    done = [
        (case, figures)
        for case in sweep.cases
        if case.key in measured and (figures := measured[case.key].figures) is not None
    ]
    apart = [
        (abs(figures.traced_bytes - figures.peak_bytes), figures.peak_bytes)
        for _case, figures in done
        if figures.traced_bytes is not None
    ]
    worst = max(apart, default=None, key=lambda pair: pair[0] / pair[1])
    return Findings(
        exponents=_exponents(sweep.kind, done),
        layers=_whole_layers(done) if sweep.kind is SweepKind.SEQUENCE else {},
        segments=_segments(done, predicted_k) if sweep.kind is SweepKind.SEGMENTS else None,
        frontier=_frontier(sweep, measured) if sweep.kind is SweepKind.FRONTIER else (),
        trace_percent=worst and 100 * worst[0] / worst[1],
        trace_bytes=worst and worst[0],
    )


Done = Sequence[tuple[Case, Figures]]


def variant(case: Case) -> str:
    """What a point belongs to: the attention, and the checkpointing where there is some."""
    return case.attention if case.checkpointing == "none" else f"{case.attention}, {case.checkpointing}"


def _exponents(kind: SweepKind, done: Done) -> dict[str, PowerLaw]:
    points: dict[str, list[tuple[float, float]]] = {}
    for case, figures in done:
        if kind is SweepKind.SEQUENCE and case.part is Part.ATTENTION:
            points.setdefault(case.attention, []).append((case.seq_len, figures.peak_bytes))
        elif kind is SweepKind.DEPTH and case.part is Part.PROJECTIONS:
            points.setdefault(case.checkpointing_kind, []).append((case.num_layers, figures.peak_bytes))
    laws = {name: power_law(each) for name, each in points.items()}
    return {name: law for name, law in laws.items() if law is not None}


def _whole_layers(done: Done) -> dict[str, Quadratic]:
    points: dict[str, list[tuple[float, float]]] = {}
    for case, figures in done:
        if case.part is Part.LAYERS:
            points.setdefault(variant(case), []).append((case.seq_len, figures.peak_bytes))
    laws = {name: quadratic(each) for name, each in points.items()}
    return {name: law for name, law in laws.items() if law is not None}


def _segments(done: Done, predicted_k: int | None) -> Segments | None:
    peaks = {length: figures.peak_bytes for case, figures in done if (length := case.segment_length) is not None}
    if not peaks:
        return None
    best = min(peaks, key=lambda k: (peaks[k], k))
    at_predicted = peaks.get(predicted_k) if predicted_k is not None else None
    excess = None if at_predicted is None else 100 * (at_predicted / peaks[best] - 1)
    return Segments(best=best, predicted=predicted_k, excess_percent=excess)


def step_seconds(figures: Figures) -> float:
    """The time of one forward and backward."""
    return figures.forward.median + figures.backward.median


def spread_percent(figures: Figures) -> float:
    """How far its repeats lie from the median, at the most, in percent."""
    median = step_seconds(figures)
    least, most = (getattr(figures.forward, each) + getattr(figures.backward, each) for each in ("least", "most"))
    return 100 * max(most - median, median - least) / median if median else 0.0


def _frontier(sweep: Sweep, measured: Mapping[str, Measurement]) -> tuple[Measurement, ...]:
    cost = {
        key: (each.figures.peak_bytes, step_seconds(each.figures))
        for case in sweep.cases
        if (key := case.key) in measured and (each := measured[key]).figures is not None
    }
    best = [
        key
        for key, (num_bytes, seconds) in cost.items()
        if not any(
            other[0] <= num_bytes and other[1] <= seconds and other != (num_bytes, seconds) for other in cost.values()
        )
    ]
    return tuple(measured[key] for key in sorted(best, key=lambda key: cost[key]))

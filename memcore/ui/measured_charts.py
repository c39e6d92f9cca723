"""Figures from what was measured, no Streamlit calls. Every axis has its unit."""

from collections.abc import Sequence

import plotly.graph_objects as go

from memcore.bench.case import Part
from memcore.bench.findings import Segments
from memcore.bench.lines import Cost, Line, Panel
from memcore.bench.sweeps import SweepKind
from memcore.bench.words import ATTENTION_LABELS, checkpointing_label
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.terms import Category
from memcore.ui.charts import layout
from memcore.ui.palette import CATEGORY_COLOURS, GREY, MEASURED_ATTENTION_COLOURS, VARIANT_COLOURS
from memcore.units import ByteUnit

_SIZES = {
    SweepKind.SEQUENCE: mark("tokens per sequence"),
    SweepKind.DEPTH: mark("layers (L)"),
    SweepKind.SEGMENTS: mark("layers per segment (k)"),
}
_TITLES = {
    Part.ATTENTION: mark("Attention alone"),
    Part.LAYERS: mark("Whole layers"),
    Part.PROJECTIONS: mark("The textbook's layer: a stack of projections"),
}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
# The names of kinds of checkpointing that take a number, without it.
_COUNTED = {"segments": mark("in segments"), "save": mark("checkpointing but for attention and products")}


def panel_title(panel: Panel) -> str:
    """What a panel's chart is of."""
    return _(_TITLES[panel.part])


def over_size(panel: Panel, kind: SweepKind, found: Segments | None, unit: ByteUnit) -> go.Figure:
    """Measured points over the size that a sweep varies, beside the trace (dotted), the closed form (dashed) and what
    was fitted (solid). Both axes are logarithmic, but for segments."""
    figure = go.Figure()
    for position, line in enumerate(panel.lines):
        _variant(figure, line, panel.part, VARIANT_COLOURS[position % len(VARIANT_COLOURS)], kind, unit)
    _keys(figure, panel)
    if found is not None:
        _best(figure, panel, found, unit)
    # Sizes that lie close together would write over one another.
    sizes = sorted({size for line in panel.lines for size, _num_bytes in line.measured})
    scale = "linear" if kind is SweepKind.SEGMENTS else "log"
    figure.update_xaxes(type=scale, title=_(_SIZES[kind]), tickvals=sizes, ticktext=[f"{size:,.0f}" for size in sizes])
    figure.update_yaxes(type=scale, title=_("peak ({unit})").format(unit=unit.value), tickformat=",~g")
    # On a logarithmic axis ticks at 1, 2 and 5.
    figure.update_yaxes(**({"rangemode": "tozero"} if scale == "linear" else {"dtick": "D2"}))
    return layout(figure, 420)


def _variant(figure: go.Figure, line: Line, part: Part, colour: str, kind: SweepKind, unit: ByteUnit) -> None:
    name = _line_label(line, part)
    if line.law is not None:
        power = _("{name}: {size}^{exponent:.2f} ({low:.2f} to {high:.2f})")
        size = "L" if kind is SweepKind.DEPTH else "s"
        numbers = {"exponent": line.law.exponent, "low": line.law.low, "high": line.law.high}
        name = power.format(name=name, size=size, **numbers)
    for points, dash in ((line.traced, "dot"), (line.formula, "dash"), (line.fitted, "solid")):
        if points:
            figure.add_scatter(
                x=[size for size, _num_bytes in points],
                y=[num_bytes / unit.size for _size, num_bytes in points],
                mode="lines",
                line={"color": colour, "dash": dash, "width": 1.5},
                showlegend=False,
                hoverinfo="skip",
            )
    figure.add_scatter(
        name=name,
        x=[size for size, _num_bytes in line.measured],
        y=[num_bytes / unit.size for _size, num_bytes in line.measured],
        mode="markers",
        marker={"color": colour, "size": 9},
        hovertemplate=f"%{{fullData.name}}<br>%{{x:,}}: %{{y:.4g}} {unit.value}<extra></extra>",
    )


def _line_label(line: Line, part: Part) -> str:
    words = [] if part is Part.PROJECTIONS else [_(ATTENTION_LABELS[line.attention])]
    if part is not Part.ATTENTION:
        known = _COUNTED.get(line.checkpointing)
        words.append(checkpointing_label(line.checkpointing) if known is None else _(known))
    return ", ".join(words)


def _keys(figure: go.Figure, panel: Panel) -> None:
    """What each kind of line is, once for all variants."""
    lines = panel.lines
    for name, dash, is_there in (
        (_("trace"), "dot", any(line.traced for line in lines)),
        (_("closed form"), "dash", any(line.formula for line in lines)),
        (_("fitted"), "solid", any(line.fitted for line in lines)),
    ):
        if is_there:
            figure.add_scatter(name=name, x=[None], y=[None], mode="lines", line={"color": GREY, "dash": dash})


def _best(figure: go.Figure, panel: Panel, found: Segments, unit: ByteUnit) -> None:
    """The best k measured, and the predicted one, ringed."""
    peaks = dict(panel.lines[0].measured)
    for name, k, colour, size in (
        (_("lowest measured: k = {k}"), found.best, CATEGORY_COLOURS[Category.OPTIMIZER], 16),
        (_("predicted: k = {k}"), found.predicted, CATEGORY_COLOURS[Category.LOSS], 22),
    ):
        if k is not None and k in peaks:
            figure.add_scatter(
                name=name.format(k=k),
                x=[k],
                y=[peaks[k] / unit.size],
                mode="markers",
                marker={"symbol": "circle-open", "size": size, "color": colour, "line": {"width": 2.5}},
                hoverinfo="skip",
            )


def memory_and_time(costs: Sequence[Cost], frontier: Sequence[Cost], unit: ByteUnit) -> go.Figure:
    """Peak against the time of a step, one mark for each variant, the frontier as a line."""
    figure = go.Figure()
    figure.add_scatter(
        name=_("frontier"),
        x=[1000 * cost.seconds for cost in frontier],
        y=[cost.num_bytes / unit.size for cost in frontier],
        mode="lines",
        line={"color": GREY, "dash": "dot"},
        hoverinfo="skip",
    )
    kinds = list(dict.fromkeys(cost.checkpointing for cost in costs))
    for cost in costs:
        figure.add_scatter(
            name=f"{_(ATTENTION_LABELS[cost.attention])}, {checkpointing_label(cost.checkpointing)}",
            x=[1000 * cost.seconds],
            y=[cost.num_bytes / unit.size],
            mode="markers",
            marker={
                "color": MEASURED_ATTENTION_COLOURS[cost.attention],
                "symbol": _SYMBOLS[kinds.index(cost.checkpointing) % len(_SYMBOLS)],
                "size": 12,
            },
            hovertemplate=f"%{{fullData.name}}<br>%{{x:,.4g}} ms, %{{y:.4g}} {unit.value}<extra></extra>",
        )
    figure.update_xaxes(title=_("forward and backward (ms)"))
    figure.update_yaxes(title=_("peak ({unit})").format(unit=unit.value), rangemode="tozero")
    return layout(figure, 480)

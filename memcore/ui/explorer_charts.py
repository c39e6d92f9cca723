"""Activations over sequence length, depth and segment length as figures."""

from collections.abc import Sequence

import plotly.graph_objects as go

from memcore.explain import ATTENTION_LABELS
from memcore.explore import Curve, Segments
from memcore.i18n import gettext as _
from memcore.terms import Category
from memcore.ui.charts import layout, log_range, usable_trace
from memcore.ui.palette import ATTENTION_COLOURS, CATEGORY_COLOURS, GREY, STAGE_COLOURS
from memcore.units import ByteUnit

# Memory-efficient attention keeps nearly what flash does: it shows on both sides of the line above it.
LINE_WIDTHS = {"flash": 2, "memory_efficient": 6, "eager": 2}


def sequence(curves: Sequence[Curve], for_tensors: int, current: int, unit: ByteUnit) -> go.Figure:
    """Activations over the sequence length, both logarithmic: plain against flash, with and without checkpointing."""
    kinds = {"none": _("no checkpointing"), "full": _("full checkpointing")}
    figure = go.Figure()
    # The first on top.
    for place, curve in reversed(list(enumerate(curves))):
        figure.add_scatter(
            name=f"{_(ATTENTION_LABELS[curve.attention])}, {kinds[curve.checkpointing]}",
            x=[size for size, _total in curve.points],
            y=[total / unit.size for _size, total in curve.points],
            mode="lines",
            legendrank=place,
            line={
                "color": ATTENTION_COLOURS[curve.attention],
                "width": LINE_WIDTHS[curve.attention],
                "dash": "dash" if curve.checkpointing == "full" else "solid",
            },
            hovertemplate=_("%{{fullData.name}}, %{{x:,}} tokens: %{{y:.2f}} {unit}").format(unit=unit.value)
            + "<extra></extra>",
        )
    sizes = [size for size, _total in curves[0].points]
    usable_trace(figure, sizes[0], sizes[-1], for_tensors, unit, _("for tensors"))
    figure.add_vline(x=current, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(
        type="log",
        title=_("tokens per sequence"),
        tickvals=sizes,
        ticktext=[f"{size:,}" for size in sizes],
        range=log_range(sizes),
    )
    figure.update_yaxes(type="log", dtick=1, tickformat=",~g", title=_("activations ({unit})").format(unit=unit.value))
    return layout(figure, 440)


def depth(curves: Sequence[Curve], current: int, unit: ByteUnit) -> go.Figure:
    """Activations over the number of layers, both logarithmic."""
    kinds = {
        "none": _("no checkpointing"),
        "full": _("full checkpointing"),
        "segments": _("segments of the best k"),
    }
    figure = go.Figure()
    for position, curve in enumerate(curves):
        figure.add_scatter(
            name=kinds[curve.checkpointing],
            x=[size for size, _total in curve.points],
            y=[total / unit.size for _size, total in curve.points],
            mode="lines+markers",
            line={"color": STAGE_COLOURS[position]},
            hovertemplate=_("%{{fullData.name}}, layers: %{{x}}, %{{y:.2f}} {unit}").format(unit=unit.value)
            + "<extra></extra>",
        )
    sizes = [size for size, _total in curves[0].points]
    figure.add_vline(x=current, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(type="log", title=_("layers"), tickvals=sizes)
    figure.update_yaxes(type="log", dtick=1, tickformat=",~g", title=_("activations ({unit})").format(unit=unit.value))
    return layout(figure, 400)


def segments(found: Segments, unit: ByteUnit) -> go.Figure:
    """Peak activations over the segment length k, the best whole k and the textbook's marked."""
    law = found.law
    sizes = list(range(1, len(law.peaks) + 1))
    figure = go.Figure()
    figure.add_scatter(
        name=_("this model's layer"),
        x=sizes,
        y=[peak / unit.size for peak in law.peaks],
        mode="lines",
        line={"color": CATEGORY_COLOURS[Category.ACTIVATIONS]},
        hovertemplate=f"k = %{{x}}: %{{y:.2f}} {unit.value}<extra></extra>",
    )
    for name, k, colour in (
        (_("best k = {k}"), law.best, CATEGORY_COLOURS[Category.OPTIMIZER]),
        (_("textbook k = {k}"), law.textbook, CATEGORY_COLOURS[Category.LOSS]),
    ):
        figure.add_scatter(
            name=name.format(k=k),
            x=[k],
            y=[law.peaks[k - 1] / unit.size],
            mode="markers",
            marker={"size": 12, "color": colour},
            hovertemplate=f"%{{fullData.name}}: %{{y:.2f}} {unit.value}<extra></extra>",
        )
    figure.update_xaxes(title=_("layers per segment (k)"))
    figure.update_yaxes(title=_("activations ({unit})").format(unit=unit.value), rangemode="tozero")
    return layout(figure, 380)

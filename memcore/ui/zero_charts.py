"""ZeRO's stages as figures: what each leaves, who holds which slice, and what more GPUs buy."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from memcore.compare import CURVE_RANKS, StageRow
from memcore.explain import CATEGORY_LABELS
from memcore.i18n import gettext as _
from memcore.i18n import ngettext
from memcore.terms import Category
from memcore.ui.charts import (
    STATE_CATEGORIES,
    at_edge,
    capacity_line,
    layout,
    log_range,
    stacked,
    usable_trace,
)
from memcore.ui.palette import CATEGORY_COLOURS, GREY, STAGE_COLOURS
from memcore.units import ByteUnit, format_bytes

# Ranks of the slice picture: more would not be seen apart.
MAX_DRAWN_RANKS = 8
# How far the axis goes on beyond the longest bar or farthest mark, for a column of figures.
ROOM_FOR_PEAKS = 1.45


def stages(rows: Sequence[StageRow], for_tensors: int, unit: ByteUnit) -> go.Figure:
    """Four stages side by side: the floor by category, the engine's predicted peak as a mark, and what the card has for
    tensors as a line."""
    labels = [f"ZeRO-{row.stage}" for row in rows]
    stacks = {
        Category.WEIGHTS: [row.floor.weights_bytes for row in rows],
        Category.GRADIENTS: [row.floor.gradients_bytes for row in rows],
        Category.OPTIMIZER: [row.floor.optimizer_bytes for row in rows],
    }
    figure = stacked(labels, stacks, unit)
    marked = [(f"ZeRO-{row.stage}", row.peak_bytes) for row in rows if row.peak_bytes is not None]
    figure.add_scatter(
        name=_("predicted peak of the engine"),
        y=[label for label, _peak in marked],
        x=[peak / unit.size for _label, peak in marked],
        mode="markers",
        cliponaxis=False,
        marker={"symbol": "diamond", "size": 12, "color": CATEGORY_COLOURS[Category.COMMUNICATION]},
        hovertemplate=f"%{{fullData.name}}: %{{x:.2f}} {unit.value}<extra></extra>",
    )
    for label, peak in marked:
        # In a column at the edge, where no capacity line crosses it.
        colour = CATEGORY_COLOURS[Category.COMMUNICATION]
        at_edge(figure, label, format_bytes(peak, unit, 1), font={"color": colour})
    capacity_line(figure, for_tensors, _("for tensors"), unit)
    most = max([for_tensors, *(row.floor.total_bytes for row in rows), *(peak for _label, peak in marked)])
    figure.update_xaxes(
        title=_("memory per GPU ({unit})").format(unit=unit.value), range=[0, ROOM_FOR_PEAKS * most / unit.size]
    )
    return layout(figure, 380)


def slices(rows: Sequence[StageRow], ranks: int, sharing: int) -> go.Figure:
    """Which rank holds which slice: for each stage a column of states by rank, filled where the rank holds it.

    Of `ranks` each `sharing` beside each other divide the states; the next ones hold the same again.
    """
    drawn = min(ranks, MAX_DRAWN_RANKS)
    group = min(sharing, drawn)
    figure = make_subplots(
        rows=1,
        cols=len(rows),
        subplot_titles=[f"ZeRO-{row.stage}" for row in rows],
        shared_yaxes=True,
        horizontal_spacing=0.03,
    )
    names = [_(CATEGORY_LABELS[category]) for category in STATE_CATEGORIES]
    for column in range(1, len(rows) + 1):
        # A trace that draws nothing: without one Plotly shows no axes.
        figure.add_scatter(x=[None], y=[None], showlegend=False, row=1, col=column)
    figure.update_xaxes(
        range=[-0.6, drawn - 0.4], tickvals=sorted({0, drawn - 1}), title=_("rank"), showgrid=False, zeroline=False
    )
    figure.update_yaxes(range=[2.6, -0.6], tickvals=[0, 1, 2], ticktext=names, showgrid=False, zeroline=False)
    # All shapes at once: Plotly checks the whole layout anew for each one that is added by itself.
    columns = enumerate((row.stage for row in rows), start=1)
    shapes = [shape for column, stage in columns for shape in _stage_cells(column, stage, drawn, group)]
    figure.update_layout(height=230, margin={"l": 8, "r": 8, "t": 32, "b": 8}, shapes=shapes)
    return figure


def _stage_cells(column: int, stage: int, drawn: int, group: int) -> list[dict[str, object]]:
    """For each state and rank the outline of its cell, and the part of it that the rank holds, filled."""
    cells = []
    for level, (category, divided_from) in enumerate(zip(STATE_CATEGORIES, (3, 2, 1), strict=True)):
        for rank in range(drawn):
            place = rank % group
            held = (0.0, 1.0) if stage < divided_from else (place / group, (place + 1) / group)
            cells.append(_cell(column, rank, level, held, CATEGORY_COLOURS[category]))
            cells.append(_cell(column, rank, level, (0.0, 1.0), None))
    return cells


def _cell(column: int, rank: int, level: int, part: tuple[float, float], colour: str | None) -> dict[str, object]:
    width, axis = 0.84, "" if column == 1 else str(column)
    return {
        "type": "rect",
        "xref": f"x{axis}",
        "yref": f"y{axis}",
        "x0": rank - width / 2 + width * part[0],
        "x1": rank - width / 2 + width * part[1],
        "y0": level - 0.38,
        "y1": level + 0.38,
        "line": {"color": GREY, "width": 1} if colour is None else {"width": 0},
        "fillcolor": "rgba(0,0,0,0)" if colour is None else colour,
    }


def world_sizes(
    curves: Mapping[int, Sequence[tuple[int, int]]], smallest: Mapping[int, int | None], usable: int, unit: ByteUnit
) -> go.Figure:
    """States per GPU against the number of GPUs, both logarithmic, with the fewest GPUs that hold them."""
    figure = go.Figure()
    for stage, points in curves.items():
        figure.add_scatter(
            name=f"ZeRO-{stage}",
            x=[ranks for ranks, _total in points],
            y=[total / unit.size for _ranks, total in points],
            mode="lines",
            line={"color": STAGE_COLOURS[stage], "width": 2},
            hovertemplate=_("ZeRO-{stage}, GPUs: %{{x}}, each %{{y:.2f}} {unit}").format(stage=stage, unit=unit.value)
            + "<extra></extra>",
        )
    for stage, ranks in smallest.items():
        if ranks is not None and ranks <= curves[stage][-1][0]:
            nearest = next(total for at, total in curves[stage] if at >= ranks)
            figure.add_scatter(
                name=ngettext(
                    "ZeRO-{stage}: the states fit from {ranks} GPU on",
                    "ZeRO-{stage}: the states fit from {ranks} GPUs on",
                    ranks,
                ).format(stage=stage, ranks=f"{ranks:,}"),
                x=[ranks],
                y=[max(nearest, 0) / unit.size if ranks in dict(curves[stage]) else usable / unit.size],
                mode="markers",
                marker={"color": STAGE_COLOURS[stage], "size": 11, "symbol": "circle-open", "line": {"width": 3}},
                hovertemplate="%{fullData.name}<extra></extra>",
            )
    usable_trace(figure, min(CURVE_RANKS), max(CURVE_RANKS), usable, unit)
    figure.update_xaxes(
        type="log",
        title=_("GPUs that share the states"),
        tickvals=list(CURVE_RANKS),
        range=log_range(CURVE_RANKS),
    )
    figure.update_yaxes(
        type="log", dtick=1, tickformat=",~g", title=_("model states per GPU ({unit})").format(unit=unit.value)
    )
    return layout(figure, 420)

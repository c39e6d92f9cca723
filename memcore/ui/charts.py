"""Figures from answers, no Streamlit calls. Every axis has its unit, every category its colour."""

import math
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from memcore.budget import Budget
from memcore.buffers import AboveFloor
from memcore.compare import CURVE_RANKS, CardRow, ParameterCost, StageRow
from memcore.explain import ATTENTION_LABELS, CATEGORY_LABELS, PHASE_LABELS, term_label
from memcore.explore import Curve, Segments
from memcore.i18n import gettext as _
from memcore.terms import Category, Phase
from memcore.ui.palette import ATTENTION_COLOURS, CATEGORY_COLOURS, GREY, STAGE_COLOURS, TERM_COLOURS
from memcore.units import ByteUnit, format_bytes
from memcore.zero import Accounting

CONFIG = {"displaylogo": False, "displayModeBar": False}
# Ranks of the slice picture: more would not be seen apart.
MAX_DRAWN_RANKS = 8
# How far an axis goes on beyond the longest bar, for the text at its end.
ROOM = 1.25

_STATE_CATEGORIES = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


def layout(figure: go.Figure, height: int, margin_top: int = 32) -> go.Figure:
    """The common look. The legend lies at the figure's lower edge: there it covers neither a capacity line's text
    nor, in however many rows it comes out on a narrow screen, the axis' title."""
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": margin_top, "b": 8},
        legend={
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0,
            "x": 0,
            "traceorder": "normal",
        },
        hoverlabel={"namelength": -1},
    )
    return figure


def _log_range(values: Sequence[int]) -> list[float]:
    """An axis' range, in powers of ten, with room for the label of its last tick."""
    return [math.log10(min(values)) - 0.03, math.log10(max(values)) + 0.08]


def _stacked(labels: Sequence[str], stacks: Mapping[Category, Sequence[int]], unit: ByteUnit) -> go.Figure:
    """Horizontal bars, one per label, stacked by category."""
    figure = go.Figure()
    for category, values in stacks.items():
        if any(values):
            figure.add_bar(
                name=_(CATEGORY_LABELS[category]),
                y=list(labels),
                x=[value / unit.size for value in values],
                orientation="h",
                marker_color=CATEGORY_COLOURS[category],
                hovertemplate=f"%{{fullData.name}}: %{{x:.2f}} {unit.value}<extra></extra>",
            )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    return figure


def _totals_at_bar_ends(
    figure: go.Figure, labels: Sequence[str], totals: Sequence[int], unit: ByteUnit, lines: Sequence[int]
) -> None:
    """Each bar's total to the right of its end, and to the right of a capacity line that would cross the text."""
    text_width = 0.1 * max([*lines, *totals])
    for label, total in zip(labels, totals, strict=True):
        at = total
        for line in sorted(lines):
            at = line if at <= line < at + text_width else at
        figure.add_annotation(
            x=at / unit.size, y=label, text=f" {format_bytes(total, unit, 1)}", xanchor="left", showarrow=False
        )


def _capacity_line(figure: go.Figure, num_bytes: int, label: str, unit: ByteUnit, lift: int = 0) -> None:
    figure.add_vline(
        x=num_bytes / unit.size,
        line={"color": GREY, "dash": "dash", "width": 2},
        annotation={"text": f"{label} {format_bytes(num_bytes, unit, 1)}", "font": {"color": GREY}, "yshift": lift},
        annotation_position="top",
    )


def phases(budget: Budget, unit: ByteUnit) -> go.Figure:
    """The budget stacked by category, each phase at its own peak, against the card's usable memory."""
    peaks = budget.phase_peaks()
    labels = [_(PHASE_LABELS[phase]) for phase in peaks]
    by_phase = [budget.by_category(index) for index in peaks.values()]
    stacks = {category: [sums.get(category, 0) for sums in by_phase] for category in Category}
    stacks[Category.RUNTIME] = [budget.ladder.runtime.largest] * len(labels)
    totals = [sum(values[row] for values in stacks.values()) for row in range(len(labels))]
    figure = _stacked(labels, stacks, unit)
    _totals_at_bar_ends(figure, labels, totals, unit, [budget.ladder.usable])
    _capacity_line(figure, budget.ladder.usable, _("usable"), unit)
    figure.update_xaxes(
        title=_("memory per GPU ({unit})").format(unit=unit.value),
        range=[0, ROOM * max([budget.ladder.usable, *totals]) / unit.size],
    )
    return layout(figure, 420)


def parameter_cost(costs: Sequence[ParameterCost], total_label: str) -> go.Figure:
    """One bar: the bytes of one parameter, state by state."""
    figure = go.Figure()
    for cost in costs:
        figure.add_bar(
            name=term_label(cost.name),
            showlegend=False,
            y=[total_label],
            x=[cost.bytes_per_parameter],
            orientation="h",
            marker={"color": CATEGORY_COLOURS[cost.category], "line": {"color": "white", "width": 1}},
            text=f"{term_label(cost.name).replace(' ', '<br>')}<br>{cost.bytes_per_parameter:.3g}",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate=_("%{fullData.name}: %{x:.4g} bytes per parameter") + "<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(showticklabels=False)
    figure.update_xaxes(title=_("bytes per parameter"))
    return layout(figure, 220)


def states_against_cards(total: Accounting, cards: Iterable[CardRow], unit: ByteUnit) -> go.Figure:
    """The undivided states of the model as one stacked bar, with the usable memory of cards as lines."""
    label = _("model states, one GPU")
    parts = (total.weights_bytes, total.gradients_bytes, total.optimizer_bytes)
    stacks = {category: [part] for category, part in zip(_STATE_CATEGORIES, parts, strict=True)}
    figure = _stacked([label], stacks, unit)
    drawn = list(cards)
    lines = [card.device.usable_bytes for card in drawn]
    _totals_at_bar_ends(figure, [label], [total.total_bytes], unit, lines)
    for index, card in enumerate(drawn):
        _capacity_line(figure, card.device.usable_bytes, card.device.name, unit, 14 * (index % 3))
    most = max([total.total_bytes, *lines])
    figure.update_yaxes(showticklabels=False)
    figure.update_xaxes(title=_("memory ({unit})").format(unit=unit.value), range=[0, ROOM * most / unit.size])
    return layout(figure, 300, margin_top=64)


def stages(rows: Sequence[StageRow], usable: int, unit: ByteUnit) -> go.Figure:
    """Four stages side by side: the floor by category, the engine's predicted peak as a mark, the card as a line."""
    labels = [f"ZeRO-{row.stage}" for row in rows]
    stacks = {
        Category.WEIGHTS: [row.floor.weights_bytes for row in rows],
        Category.GRADIENTS: [row.floor.gradients_bytes for row in rows],
        Category.OPTIMIZER: [row.floor.optimizer_bytes for row in rows],
    }
    figure = _stacked(labels, stacks, unit)
    marked = [(f"ZeRO-{row.stage}", row.peak_bytes) for row in rows if row.peak_bytes is not None]
    figure.add_scatter(
        name=_("predicted peak of the engine"),
        y=[label for label, _peak in marked],
        x=[peak / unit.size for _label, peak in marked],
        mode="markers+text",
        text=[format_bytes(peak, unit, 1) for _label, peak in marked],
        textposition="middle right",
        cliponaxis=False,
        marker={"symbol": "diamond", "size": 12, "color": CATEGORY_COLOURS[Category.COMMUNICATION]},
        hovertemplate=f"%{{fullData.name}}: %{{x:.2f}} {unit.value}<extra></extra>",
    )
    _capacity_line(figure, usable, _("usable"), unit)
    most = max([usable, *(row.floor.total_bytes for row in rows), *(peak for _label, peak in marked)])
    figure.update_xaxes(title=_("memory per GPU ({unit})").format(unit=unit.value), range=[0, ROOM * most / unit.size])
    return layout(figure, 380)


def slices(rows: Sequence[StageRow], ranks: int) -> go.Figure:
    """Which rank holds which slice: for each stage a column of states by rank, filled where the rank holds it."""
    drawn = min(ranks, MAX_DRAWN_RANKS)
    figure = make_subplots(
        rows=1,
        cols=len(rows),
        subplot_titles=[f"ZeRO-{row.stage}" for row in rows],
        shared_yaxes=True,
        horizontal_spacing=0.03,
    )
    names = [_(CATEGORY_LABELS[category]) for category in _STATE_CATEGORIES]
    for column in range(1, len(rows) + 1):
        # A trace that draws nothing: without one Plotly shows no axes.
        figure.add_scatter(x=[None], y=[None], showlegend=False, row=1, col=column)
    figure.update_xaxes(
        range=[-0.6, drawn - 0.4], tickvals=sorted({0, drawn - 1}), title=_("rank"), showgrid=False, zeroline=False
    )
    figure.update_yaxes(range=[2.6, -0.6], tickvals=[0, 1, 2], ticktext=names, showgrid=False, zeroline=False)
    # All shapes at once: Plotly checks the whole layout anew for each one that is added by itself.
    shapes = [shape for column, row in enumerate(rows, start=1) for shape in _stage_cells(column, row.stage, drawn)]
    figure.update_layout(height=230, margin={"l": 8, "r": 8, "t": 32, "b": 8}, shapes=shapes)
    return figure


def _stage_cells(column: int, stage: int, drawn: int) -> list[dict[str, object]]:
    """For each state and rank the outline of its cell, and the part of it that the rank holds, filled."""
    cells = []
    for level, (category, divided_from) in enumerate(zip(_STATE_CATEGORIES, (3, 2, 1), strict=True)):
        for rank in range(drawn):
            held = (0.0, 1.0) if stage < divided_from else (rank / drawn, (rank + 1) / drawn)
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
            hovertemplate=_("ZeRO-{stage}, %{{x}} GPUs: %{{y:.2f}} {unit}").format(stage=stage, unit=unit.value)
            + "<extra></extra>",
        )
    for stage, ranks in smallest.items():
        if ranks is not None and ranks <= curves[stage][-1][0]:
            nearest = next(total for at, total in curves[stage] if at >= ranks)
            figure.add_scatter(
                name=_("ZeRO-{stage} fits from {ranks} GPUs").format(stage=stage, ranks=f"{ranks:,}"),
                x=[ranks],
                y=[max(nearest, 0) / unit.size if ranks in dict(curves[stage]) else usable / unit.size],
                mode="markers",
                marker={"color": STAGE_COLOURS[stage], "size": 11, "symbol": "circle-open", "line": {"width": 3}},
                hovertemplate="%{fullData.name}<extra></extra>",
            )
    _usable_trace(figure, min(CURVE_RANKS), max(CURVE_RANKS), usable, unit)
    figure.update_xaxes(
        type="log",
        title=_("GPUs that share the states"),
        tickvals=list(CURVE_RANKS),
        range=_log_range(CURVE_RANKS),
    )
    figure.update_yaxes(
        type="log", dtick=1, tickformat=",~g", title=_("model states per GPU ({unit})").format(unit=unit.value)
    )
    return layout(figure, 420)


def above_floor(rows: Sequence[AboveFloor], unit: ByteUnit) -> go.Figure:
    """For each phase the states of the floor, and every term that the engine adds on top."""
    labels = [_(PHASE_LABELS[row.phase]) for row in rows]
    figure = go.Figure()
    figure.add_bar(
        name=_("states of the floor"),
        y=labels,
        x=[row.floor / unit.size for row in rows],
        orientation="h",
        marker_color=CATEGORY_COLOURS[Category.WEIGHTS],
        hovertemplate=f"%{{fullData.name}}: %{{x:.2f}} {unit.value}<extra></extra>",
    )
    names = dict.fromkeys(term.name for row in rows for term, _share in row.terms)
    for position, name in enumerate(names):
        shares = [sum(share for term, share in row.terms if term.name == name) for row in rows]
        figure.add_bar(
            name=term_label(name),
            y=labels,
            x=[share / unit.size for share in shares],
            orientation="h",
            marker_color=TERM_COLOURS[position % len(TERM_COLOURS)],
            hovertemplate=f"%{{fullData.name}}: %{{x:.2f}} {unit.value}<extra></extra>",
        )
    totals = [row.floor + sum(share for _term, share in row.terms) for row in rows]
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    _totals_at_bar_ends(figure, labels, totals, unit, [])
    figure.update_xaxes(
        title=_("memory per GPU ({unit})").format(unit=unit.value), range=[0, ROOM * max(totals) / unit.size]
    )
    return layout(figure, 400)


def sequence(curves: Sequence[Curve], usable: int, current: int, unit: ByteUnit) -> go.Figure:
    """Activations over the sequence length, both logarithmic: plain against flash, with and without checkpointing."""
    kinds = {"none": _("no checkpointing"), "full": _("full checkpointing")}
    figure = go.Figure()
    for curve in curves:
        figure.add_scatter(
            name=f"{_(ATTENTION_LABELS[curve.attention])}, {kinds[curve.checkpointing]}",
            x=[size for size, _total in curve.points],
            y=[total / unit.size for _size, total in curve.points],
            mode="lines",
            line={
                "color": ATTENTION_COLOURS[curve.attention],
                "dash": "dash" if curve.checkpointing == "full" else "solid",
            },
            hovertemplate=_("%{{fullData.name}}, %{{x:,}} tokens: %{{y:.2f}} {unit}").format(unit=unit.value)
            + "<extra></extra>",
        )
    sizes = [size for size, _total in curves[0].points]
    _usable_trace(figure, sizes[0], sizes[-1], usable, unit)
    figure.add_vline(x=current, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(
        type="log",
        title=_("tokens per sequence"),
        tickvals=sizes,
        ticktext=[f"{size:,}" for size in sizes],
        range=_log_range(sizes),
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
            hovertemplate=_("%{{fullData.name}}, %{{x}} layers: %{{y:.2f}} {unit}").format(unit=unit.value)
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


def _usable_trace(figure: go.Figure, first: float, last: float, usable: int, unit: ByteUnit) -> None:
    """The card's usable memory as a line that a logarithmic axis takes too."""
    figure.add_scatter(
        name=f"{_('usable')} {format_bytes(usable, unit, 1)}",
        x=[first, last],
        y=[usable / unit.size] * 2,
        mode="lines",
        line={"color": GREY, "dash": "dash", "width": 2},
        hoverinfo="skip",
    )


def step(budget: Budget, unit: ByteUnit) -> go.Figure:
    """Memory over one step: every moment in order, categories stacked, the card's line, the binding moment marked."""
    labels = [moment.label for moment in budget.timeline]
    moments = list(range(len(labels)))
    sums = [budget.by_category(index) for index in moments]
    figure = go.Figure()
    for category in Category:
        values = [each.get(category, 0) / unit.size for each in sums]
        if any(values):
            figure.add_scatter(
                name=_(CATEGORY_LABELS[category]),
                x=moments,
                y=values,
                customdata=labels,
                mode="lines",
                line={"width": 0, "color": CATEGORY_COLOURS[category], "shape": "hv"},
                fillcolor=CATEGORY_COLOURS[category],
                stackgroup="step",
                hovertemplate=f"%{{customdata}}, %{{fullData.name}}: %{{y:.2f}} {unit.value}<extra></extra>",
            )
    _usable_trace(figure, moments[0], moments[-1], budget.ladder.usable, unit)
    peak = budget.peak_index
    figure.add_annotation(
        x=peak,
        y=budget.peak_bytes / unit.size,
        text=f"{labels[peak]}: {format_bytes(budget.peak_bytes, unit, 1)}",
        showarrow=True,
        arrowcolor=GREY,
        ay=-28,
    )
    # Each phase named at its middle; the single moments at both ends would run into their neighbours.
    named = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
    places = [[i for i, moment in enumerate(budget.timeline) if moment.phase is phase] for phase in named]
    figure.update_xaxes(
        title=_("one step, moment by moment"),
        tickvals=[sum(each) / len(each) for each in places],
        ticktext=[_(PHASE_LABELS[phase]) for phase in named],
    )
    top = 1.15 * max(budget.peak_bytes, budget.ladder.usable) / unit.size
    figure.update_yaxes(title=_("memory per GPU ({unit})").format(unit=unit.value), range=[0, top])
    return layout(figure, 420)

"""Figures from answers, no Streamlit calls. Every axis has its unit, every category its colour."""

import math
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go

from memcore.budget import Budget
from memcore.buffers import AboveFloor
from memcore.compare import CardRow, ParameterCost
from memcore.explain import CATEGORY_LABELS, PHASE_LABELS, moment_label, term_label
from memcore.i18n import gettext as _
from memcore.terms import Category, Phase
from memcore.ui.palette import CATEGORY_COLOURS, GREY, TERM_COLOURS, shaded
from memcore.units import ByteUnit, format_bytes
from memcore.zero import Accounting

CONFIG = {"displaylogo": False, "displayModeBar": False}
# How far an axis goes on beyond the longest bar, for the text at its end.
ROOM = 1.25
# How much of the longest bar such a text takes at the most, which it does on a screen of 400 pixels.
TEXT_WIDTH = 0.22

STATE_CATEGORIES = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


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


def log_range(values: Sequence[int]) -> list[float]:
    """An axis' range, in powers of ten, with room for the label of its last tick."""
    return [math.log10(min(values)) - 0.03, math.log10(max(values)) + 0.08]


def stacked(labels: Sequence[str], stacks: Mapping[Category, Sequence[int]], unit: ByteUnit) -> go.Figure:
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


def totals_at_bar_ends(
    figure: go.Figure, labels: Sequence[str], totals: Sequence[int], unit: ByteUnit, lines: Sequence[int]
) -> None:
    """Each bar's total to the right of its end; where a capacity line would cross one of them, all in a column at the
    figure's edge."""
    most = max([*lines, *totals])
    crossed = any(total <= line < total + TEXT_WIDTH * most for total in totals for line in lines)
    for label, total in zip(labels, totals, strict=True):
        if crossed:
            at_edge(figure, label, format_bytes(total, unit, 1))
        else:
            text = f" {format_bytes(total, unit, 1)}"
            figure.add_annotation(x=total / unit.size, y=label, text=text, xanchor="left", showarrow=False)


def at_edge(figure: go.Figure, label: str, text: str, **more: object) -> None:
    """A text in a bar's row at the figure's right edge, beyond what is drawn."""
    figure.add_annotation(x=1, xref="paper", xanchor="right", y=label, text=text, showarrow=False, **more)


def capacity_line(
    figure: go.Figure, num_bytes: int, label: str, unit: ByteUnit, lift: int = 0, anchor: str = "center"
) -> None:
    """What a card holds, as a line across the bars, with its label above, `lift` pixels higher; `anchor`: which part
    of the label is at the line."""
    figure.add_vline(
        x=num_bytes / unit.size,
        line={"color": GREY, "dash": "dash", "width": 2},
        annotation={
            "text": f"{label} {format_bytes(num_bytes, unit, 1)}",
            "font": {"color": GREY},
            "yshift": lift,
            "xanchor": anchor,
        },
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
    figure = stacked(labels, stacks, unit)
    totals_at_bar_ends(figure, labels, totals, unit, [budget.ladder.usable])
    capacity_line(figure, budget.ladder.usable, _("usable"), unit)
    figure.update_xaxes(
        title=_("memory per GPU ({unit})").format(unit=unit.value),
        range=[0, ROOM * max([budget.ladder.usable, *totals]) / unit.size],
    )
    return layout(figure, 420)


def parameter_cost(costs: Sequence[ParameterCost], total_label: str) -> go.Figure:
    """One bar: the bytes of one parameter, state by state. A piece too small for its text has it in the legend, where
    the states of a category differ in shade."""
    figure = go.Figure()
    for position, cost in enumerate(costs):
        shade = sum(other.category is cost.category for other in costs[:position])
        figure.add_bar(
            name=f"{term_label(cost.name)} {cost.bytes_per_parameter:.3g}",
            y=[total_label],
            x=[cost.bytes_per_parameter],
            orientation="h",
            marker={"color": shaded(CATEGORY_COLOURS[cost.category], shade), "line": {"color": "white", "width": 1}},
            text=f"{term_label(cost.name).replace(' ', '<br>')}<br>{cost.bytes_per_parameter:.3g}",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate=_("%{fullData.name}: %{x:.4g} bytes per parameter") + "<extra></extra>",
        )
    # What would be smaller than this is left out.
    figure.update_layout(barmode="stack", uniformtext={"minsize": 10, "mode": "hide"})
    figure.update_yaxes(showticklabels=False)
    figure.update_xaxes(title=_("bytes per parameter"))
    return layout(figure, 300)


def states_against_cards(total: Accounting, cards: Iterable[CardRow], unit: ByteUnit) -> go.Figure:
    """The undivided states of the model as one stacked bar, with the usable memory of cards as lines."""
    label = _("model states, one GPU")
    parts = (total.weights_bytes, total.gradients_bytes, total.optimizer_bytes)
    stacks = {category: [part] for category, part in zip(STATE_CATEGORIES, parts, strict=True)}
    figure = stacked([label], stacks, unit)
    drawn = list(cards)
    lines = [card.device.usable_bytes for card in drawn]
    totals_at_bar_ends(figure, [label], [total.total_bytes], unit, lines)
    most = max([total.total_bytes, *lines])
    for index, card in enumerate(drawn):
        # A label around a line near the left edge would be cut off.
        anchor = "left" if card.device.usable_bytes < TEXT_WIDTH * most else "center"
        capacity_line(figure, card.device.usable_bytes, card.device.name, unit, 14 * (index % 3), anchor)
    figure.update_yaxes(showticklabels=False)
    figure.update_xaxes(title=_("memory ({unit})").format(unit=unit.value), range=[0, ROOM * most / unit.size])
    return layout(figure, 300, margin_top=64)


def above_floor(rows: Sequence[AboveFloor], unit: ByteUnit) -> go.Figure:
    """For each phase the states of the floor, and every term that the engine adds on top."""
    labels = [_(PHASE_LABELS[row.phase]) for row in rows]
    figure = go.Figure()
    figure.add_bar(
        name=_("states of the floor, as far as alive"),
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
    totals_at_bar_ends(figure, labels, totals, unit, [])
    figure.update_xaxes(
        title=_("memory per GPU ({unit})").format(unit=unit.value), range=[0, ROOM * max(totals) / unit.size]
    )
    return layout(figure, 400)


def usable_trace(
    figure: go.Figure, first: float, last: float, usable: int, unit: ByteUnit, label: str | None = None
) -> None:
    """The card's usable memory as a line that a logarithmic axis takes too; `label` where only a part of it is drawn
    against."""
    figure.add_scatter(
        name=f"{label or _('usable')} {format_bytes(usable, unit, 1)}",
        x=[first, last],
        y=[usable / unit.size] * 2,
        mode="lines",
        line={"color": GREY, "dash": "dash", "width": 2},
        hoverinfo="skip",
    )


def step(budget: Budget, unit: ByteUnit) -> go.Figure:
    """Memory over one step: every moment in order, categories stacked with what lies outside the allocator on top, the
    card's line, the binding moment marked."""
    labels = [moment_label(moment) for moment in budget.timeline]
    moments = list(range(len(labels)))
    outside = budget.ladder.runtime.largest
    sums = [{**budget.by_category(index), Category.RUNTIME: outside} for index in moments]
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
    usable_trace(figure, moments[0], moments[-1], budget.ladder.usable, unit)
    peak, top = budget.peak_index, budget.peak_bytes + outside
    figure.add_annotation(
        x=peak,
        y=top / unit.size,
        text=f"{labels[peak]}: {format_bytes(top, unit, 1)}",
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
    range_to = 1.15 * max(top, budget.ladder.usable) / unit.size
    figure.update_yaxes(title=_("memory per GPU ({unit})").format(unit=unit.value), range=[0, range_to])
    return layout(figure, 420)

"""One step of an engine as a figure: what its bytes are, moment by moment, and below it which layers are gathered."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from memcore.budget import Budget
from memcore.explain import PHASE_LABELS, moment_label
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.one_step import StepPart, WholeLayers, step_parts, whole_layers
from memcore.terms import Moment, Phase
from memcore.ui.charts import layout
from memcore.ui.palette import GREY, STEP_COLOURS
from memcore.units import ByteUnit, axis_unit, format_bytes, format_precisely

PART_LABELS = {
    StepPart.WEIGHTS: mark("weights"),
    StepPart.OPTIMIZER: mark("optimizer states"),
    StepPart.GRADIENTS: mark("gradients"),
    StepPart.GATHERED: mark("gathered layers"),
    StepPart.BUCKETS: mark("buckets"),
    StepPart.TRANSIENTS: mark("transients"),
    StepPart.ACTIVATIONS: mark("activations and loss"),
}
# Phases that are named at the axis; the single moments at both ends would run into their neighbours.
_NAMED = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
# What is no layer's moment is at least as wide as this part of all layers, so that it shows under many of them.
_LEAST_PART = 16
# The capacity line is drawn where it is at most this many times as high as the fullest moment.
_IN_RANGE = 1.5
_NO_LAYERS_HEIGHT, _LAYERS_HEIGHT = 420, 560


def step_of_engine(
    budget: Budget, unit: ByteUnit, measured: Mapping[Phase, int] | None = None, *, activations: bool = True
) -> go.Figure:
    """The parts of one step stacked over its moments, and the layers that are gathered at each of them.

    `measured`: the peak of a phase in bytes, drawn at that phase's fullest moment. `activations`: whether what is not
    the engine's is stacked on top; without it nothing measured is drawn, since that holds it all.
    """
    layers = whole_layers(budget)
    edges = _edges(budget.timeline)
    heights = [0.7, 0.3] if layers else [1]
    figure = make_subplots(rows=len(heights), row_heights=heights, shared_xaxes=True, vertical_spacing=0.04)
    parts = step_parts(budget)
    if not activations:
        parts.pop(StepPart.ACTIVATIONS, None)
    totals = [sum(each) for each in zip(*parts.values(), strict=True)]
    top = max([*totals, *(measured or {}).values()])
    # A small run's axis is in what its figures are in.
    size, label = axis_unit(top, unit)
    _areas(figure, budget, parts, totals, edges, unit, size)
    if activations:
        _measured(figure, budget, measured or {}, edges, unit, size)
    # Nothing outside the allocator is drawn, nor measured.
    for_tensors = budget.ladder.for_tensors
    if for_tensors <= _IN_RANGE * top:
        top = max(top, for_tensors)
        figure.add_scatter(
            name=f"{_('for tensors')} {format_bytes(for_tensors, unit, 1)}",
            x=[edges[0], edges[-1]],
            y=[for_tensors / size] * 2,
            mode="lines",
            line={"color": GREY, "dash": "dash", "width": 2},
            hoverinfo="skip",
            row=1,
            col=1,
        )
    figure.update_yaxes(
        title=_("memory per GPU ({unit})").format(unit=label), range=[0, 1.12 * top / size], row=1, col=1
    )
    if layers:
        _layers(figure, layers, budget, edges)
    _axis(figure, budget.timeline, edges, last_row=len(heights))
    return layout(figure, _LAYERS_HEIGHT if layers else _NO_LAYERS_HEIGHT).update_layout(margin_r=32)


def _edges(timeline: Sequence[Moment]) -> list[float]:
    """Where each moment begins on the axis, and where the last one ends: a layer's is 1 wide."""
    layers = sum(isinstance(moment.segment, int) for moment in timeline)
    widths = [1 if isinstance(moment.segment, int) else max(1, layers / 2 / _LEAST_PART) for moment in timeline]
    return [0, *accumulate(widths)]


def _areas(
    figure: go.Figure,
    budget: Budget,
    parts: Mapping[StepPart, Sequence[int]],
    totals: Sequence[int],
    edges: Sequence[float],
    unit: ByteUnit,
    size: int,
) -> None:
    labels = [moment_label(moment) for moment in budget.timeline]
    for part, values in parts.items():
        hover = [
            f"{label}<br>{_(PART_LABELS[part])}: {format_bytes(value, unit)}<br>{_('all')}: {format_bytes(total, unit)}"
            for label, value, total in zip(labels, values, totals, strict=True)
        ]
        figure.add_scatter(
            name=_(PART_LABELS[part]),
            x=edges,
            # The last moment needs an end as well.
            y=[value / size for value in (*values, values[-1])],
            text=[*hover, hover[-1]],
            mode="lines",
            line={"width": 0, "color": STEP_COLOURS[part], "shape": "hv"},
            fillcolor=STEP_COLOURS[part],
            stackgroup="step",
            hovertemplate="%{text}<extra></extra>",
            row=1,
            col=1,
        )


def _measured(
    figure: go.Figure,
    budget: Budget,
    measured: Mapping[Phase, int],
    edges: Sequence[float],
    unit: ByteUnit,
    size: int,
) -> None:
    """A mark for each phase that was measured. Its figure shows on hovering and stands in the table above: beside the
    mark it would run into the areas."""
    peaks = budget.phase_peaks()
    found = {phase: num_bytes for phase, num_bytes in measured.items() if phase in peaks}
    if not found:
        return
    figure.add_scatter(
        name=_("measured"),
        x=[(edges[peaks[phase]] + edges[peaks[phase] + 1]) / 2 for phase in found],
        y=[num_bytes / size for num_bytes in found.values()],
        text=[_at_point(num_bytes, unit) for num_bytes in found.values()],
        customdata=[_(PHASE_LABELS[phase]) for phase in found],
        mode="markers",
        cliponaxis=False,
        marker={"size": 10, "symbol": "diamond", "color": GREY, "line": {"width": 2, "color": "white"}},
        hovertemplate=_("measured, %{customdata}: %{text}") + "<extra></extra>",
        row=1,
        col=1,
    )


def _layers(figure: go.Figure, layers: WholeLayers, budget: Budget, edges: Sequence[float]) -> None:
    """A strip for each block, coloured while it is gathered, in the order of the model from the top."""
    colour = STEP_COLOURS[StepPart.GATHERED]
    labels = [moment_label(moment) for moment in budget.timeline]
    figure.add_heatmap(
        x=edges,
        y=list(range(len(layers.names))),
        z=[[share or None for share in row] for row in layers.shares],
        text=[[f"{label}: {name}" for label in labels] for name in layers.names],
        colorscale=[[0, "rgba(204, 121, 167, 0.25)"], [1, colour]],
        zmin=0,
        zmax=1,
        showscale=False,
        hoverongaps=False,
        hovertemplate=_("%{text}, %{z:.0%} gathered") + "<extra></extra>",
        row=2,
        col=1,
    )
    numbered = [(place, name) for place, name in enumerate(layers.names) if name.isdigit()]
    shown = [numbered[0], numbered[len(numbered) // 2], numbered[-1]]
    figure.update_yaxes(
        title=_("layer"),
        tickvals=[place for place, _name in shown],
        ticktext=[name for _place, name in shown],
        range=[len(layers.names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        row=2,
        col=1,
    )


def _axis(figure: go.Figure, timeline: Sequence[Moment], edges: Sequence[float], last_row: int) -> None:
    """Phases named at their middles, a line where each begins."""
    places = {phase: [i for i, moment in enumerate(timeline) if moment.phase is phase] for phase in _NAMED}
    for indices in places.values():
        figure.add_vline(x=edges[indices[0]], line={"color": GREY, "width": 1, "dash": "dot"}, row="all", col=1)
    figure.update_xaxes(
        range=[edges[0], edges[-1]],
        tickvals=[(edges[indices[0]] + edges[indices[-1] + 1]) / 2 for indices in places.values()],
        ticktext=[_(PHASE_LABELS[phase]) for phase in places],
        # The last name is wider than its phase: on a narrow screen it reaches beyond the axis.
        ticklabeloverflow="allow",
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(title=_("one step, moment by moment"), row=last_row, col=1)


def _at_point(num_bytes: int, unit: ByteUnit) -> str:
    """One decimal where that says something, else what a small run took."""
    return format_bytes(num_bytes, unit, 1) if num_bytes >= unit.size else format_precisely(num_bytes, unit)

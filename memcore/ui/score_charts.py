"""Predicted against measured, as a figure."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from memcore.accuracy.scored import Figure, ScoredRun
from memcore.accuracy.words import FIGURE_LABELS, error_text, run_label
from memcore.i18n import gettext as _
from memcore.ui.charts import layout
from memcore.ui.palette import FIGURE_COLOURS, GREY
from memcore.units import ByteUnit

# Room on either side of the points, in powers of ten.
_ROOM = 0.08
_HEIGHT = 520


def predicted_and_measured(runs: Sequence[ScoredRun], opened: str | None, unit: ByteUnit) -> go.Figure:
    """Each run's prediction over what was measured, both logarithmic, with the line on which they are equal. The run
    that is open has a ring."""
    figure = go.Figure()
    drawn = [run for run in runs if run.predicted is not None]
    sizes = [size / unit.size for run in drawn for size in (run.measured, run.predicted or 0)] or [1, 100]
    ends = [min(sizes) * 10**-_ROOM, max(sizes) * 10**_ROOM]
    figure.add_scatter(
        name=_("predicted = measured"), x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dash"},
        hoverinfo="skip",
    )  # fmt: skip
    for kind in (*Figure, None):
        part = [run for run in drawn if run.figure is kind]
        if part:
            _points(figure, part, kind, unit)
    for run in drawn:
        if run.run_id == opened:
            _ring(figure, run, unit)
    log_range = [math.log10(end) for end in ends]
    figure.update_xaxes(type="log", range=log_range, title=_("measured per GPU ({unit})").format(unit=unit.value))
    figure.update_yaxes(type="log", range=log_range, title=_("predicted per GPU ({unit})").format(unit=unit.value))
    ticks = [each * power for power in (0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000) for each in (1, 2, 5)]
    for axis in (figure.update_xaxes, figure.update_yaxes):
        axis(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    return layout(figure, _HEIGHT)


def _points(figure: go.Figure, runs: Sequence[ScoredRun], kind: Figure | None, unit: ByteUnit) -> None:
    figure.add_scatter(
        name=_("metric not known") if kind is None else _(FIGURE_LABELS[kind]),
        x=[run.measured / unit.size for run in runs],
        y=[(run.predicted or 0) / unit.size for run in runs],
        customdata=[[run.run_id, run_label(run), error_text(run.error_pct)] for run in runs],
        mode="markers",
        marker={"color": FIGURE_COLOURS[kind], "size": 9, "opacity": 0.85},
        hovertemplate=(
            "%{customdata[0]}<br>%{customdata[1]}<br>"
            + _("predicted %{{y:.4g}} {unit}, measured %{{x:.4g}} {unit}").format(unit=unit.value)
            + ": %{customdata[2]}<extra></extra>"
        ),
    )


def _ring(figure: go.Figure, run: ScoredRun, unit: ByteUnit) -> None:
    figure.add_scatter(
        name=_("open below"),
        x=[run.measured / unit.size],
        y=[(run.predicted or 0) / unit.size],
        mode="markers",
        marker={"color": GREY, "size": 17, "symbol": "circle-open", "line": {"width": 3}},
        hoverinfo="skip",
    )

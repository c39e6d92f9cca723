"""A chart's line and what is drawn against it agree with the verdict. Run: pytest tests/ui/test_capacity_lines.py"""

from dataclasses import replace

import plotly.graph_objects as go
import pytest

from memcore.budget import Budget, predict
from memcore.compare import stage_rows
from memcore.scenario import parse_scenario
from memcore.ui import charts
from memcore.ui.step_charts import step_of_engine
from memcore.ui.zero_charts import stages
from memcore.units import MIB, ByteUnit

UNIT = ByteUnit.GB


def on_a_card(spare: int) -> Budget:
    """Llama-3.1-8B at stage 2 on a card that has so many bytes more than tensors and CUDA context take together."""
    scenario = {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "hardware": {"gpu": "H100-80GB", "gpus": 8},
        "parallelism": {"engine": "deepspeed", "zero_stage": 2},
    }
    budget = predict(parse_scenario(scenario))
    usable = budget.peak_bytes + budget.ladder.runtime.largest + spare
    return replace(budget, ladder=replace(budget.ladder, usable=usable))


def stacked_top(figure: go.Figure) -> float:
    """The highest sum of what is stacked."""
    areas = [trace.y for trace in figure.data if trace.stackgroup]
    return max(map(sum, zip(*areas, strict=True)))


def line(figure: go.Figure) -> float:
    (found,) = [trace.y[0] for trace in figure.data if trace.type == "scatter" and trace.line.dash == "dash"]
    return float(found)


# CUDA context and NCCL take 1.4 GB: what tensors take alone lies below the card's line in all three.
@pytest.mark.parametrize("spare", [-700 * MIB, -64 * MIB, 64 * MIB])
def test_what_does_not_fit_lies_above_the_line(spare: int):
    budget = on_a_card(spare)
    assert budget.peak_bytes < budget.ladder.usable
    for figure in (charts.step(budget, UNIT), step_of_engine(budget, UNIT)):
        assert (stacked_top(figure) > line(figure)) == (spare < 0)
    figure = stages(stage_rows(budget), budget.ladder.for_tensors, UNIT)
    (marks,) = [trace for trace in figure.data if trace.type == "scatter"]
    peak = dict(zip(marks.y, marks.x, strict=True))["ZeRO-2"]
    (card,) = [shape.x0 for shape in figure.layout.shapes]
    assert (peak > card) == (spare < 0)
    bars = [trace for trace in charts.phases(budget, UNIT).data if trace.type == "bar"]
    longest = max(map(sum, zip(*(bar.x for bar in bars), strict=True)))
    assert (longest > budget.ladder.usable / UNIT.size) == (spare < 0)


def test_both_charts_of_home_have_the_same_top_which_is_the_verdicts():
    budget = on_a_card(2**30)
    bars = [trace for trace in charts.phases(budget, UNIT).data if trace.type == "bar"]
    longest = max(map(sum, zip(*(bar.x for bar in bars), strict=True)))
    assert stacked_top(charts.step(budget, UNIT)) == pytest.approx(longest)
    # The allocator's whole segments are a few MiB more.
    assert longest == pytest.approx(budget.ladder.needed / UNIT.size, abs=0.06)

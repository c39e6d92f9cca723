"""Figures show all that they are of, and name it. Run: pytest tests/ui/test_charts.py"""

from typing import Any

from memcore.budget import Budget, predict
from memcore.compare import parameter_costs
from memcore.explain import term_label
from memcore.explore import sequence_curves
from memcore.scenario import parse_scenario
from memcore.terms import Category, Phase
from memcore.ui.charts import parameter_cost, stacked, totals_at_bar_ends
from memcore.ui.explorer_charts import sequence
from memcore.ui.step_charts import step_of_engine
from memcore.units import ByteUnit


def of(model: str = "meta-llama/Llama-3.1-8B", **parts: Any) -> Budget:
    return predict(parse_scenario({"model": {"name": model}, **parts}))


def test_a_state_too_small_for_its_text_is_in_the_legend_in_a_shade_of_its_own():
    costs = parameter_costs(of(recipe={"method": "qlora", "quantization": "nf4"}).states)
    figure = parameter_cost(costs, "")
    assert len(costs) == 7
    assert [bar.name for bar in figure.data] == [
        f"{term_label(cost.name)} {cost.bytes_per_parameter:.3g}" for cost in costs
    ]
    assert all(bar.showlegend is not False for bar in figure.data)
    assert len({bar.marker.color for bar in figure.data}) == 7
    # A text that has no room at a size that can be read is left out.
    assert (figure.layout.uniformtext.mode, figure.layout.uniformtext.minsize) == ("hide", 10)


def test_no_capacity_line_crosses_a_total():
    """The line lies 5 GB beyond a bar's end, which a text of a fifth of the axis crosses, and 60 beyond it."""
    for line, at_edge in ((35, True), (90, False)):
        figure = stacked(["a", "b"], {Category.WEIGHTS: [30 * 10**9, 10**10]}, ByteUnit.GB)
        totals_at_bar_ends(figure, ["a", "b"], [30 * 10**9, 10**10], ByteUnit.GB, [line * 10**9])
        assert [each.text.strip() for each in figure.layout.annotations] == ["30.0 GB", "10.0 GB"]
        assert [each.xref == "paper" for each in figure.layout.annotations] == [at_edge] * 2
        assert [each.x for each in figure.layout.annotations] == ([1, 1] if at_edge else [30, 10])


def test_two_attentions_that_keep_nearly_the_same_are_both_seen():
    curves = sequence_curves(of(recipe={"convention": "pure_bf16"}))
    figure = sequence(curves, 85 * 10**9, 4096, ByteUnit.GB)
    lines = {trace.name: (place, trace) for place, trace in enumerate(figure.data)}
    for kind in ("no checkpointing", "full checkpointing"):
        below, wide = lines[f"memory-efficient, {kind}"]
        above, narrow = lines[f"flash, {kind}"]
        assert below < above
        assert wide.line.width >= 3 * narrow.line.width
    # The legend keeps the order of the curves.
    assert [trace.legendrank for trace in figure.data][: len(curves)] == list(reversed(range(len(curves))))


def test_a_small_runs_axis_is_in_what_its_figures_are_in():
    parts = {"hardware": {"gpus": 2}, "parallelism": {"engine": "ddp"}, "workload": {"seq_len": 64}}
    budget = predict(parse_scenario({"model": {"n_params": 10**6}, **parts}))
    assert budget.peak_bytes < 10**9
    for unit, size, label in ((ByteUnit.GB, 10**6, "MB"), (ByteUnit.GIB, 2**20, "MiB")):
        figure = step_of_engine(budget, unit, {Phase.OPTIMIZER: 30 * size})
        assert f"({label})" in figure.layout.yaxis.title.text
        measured = next(trace for trace in figure.data if trace.name == "measured")
        assert (list(measured.y), list(measured.text)) == ([30], [f"30.000 {label}"])
        areas = [trace for trace in figure.data if trace.stackgroup]
        tops = [sum(values) for values in zip(*(area.y for area in areas), strict=True)]
        assert max(tops) * size == budget.peak_bytes

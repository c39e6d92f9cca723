"""Figures of the ZeRO page hold what they say. Run: pytest tests/ui/test_zero_charts.py"""

import pytest

from memcore.budget import predict
from memcore.compare import stage_rows
from memcore.scenario import parse_scenario
from memcore.ui.zero_charts import slices, stages
from memcore.units import ByteUnit


def held_parts(sharing: int, ranks: int, level: int, stage: int) -> list[tuple[float, float]]:
    """For each rank that is drawn, from where to where it holds one kind of state, as shares of the whole."""
    data = {"model": {"n_params": 10**9}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": 3}}
    figure = slices(stage_rows(predict(parse_scenario(data))), ranks, sharing)
    axis = "x" if stage == 0 else f"x{stage + 1}"
    cells = [shape for shape in figure.layout.shapes if shape.xref == axis and round(shape.y0 + 0.38) == level]
    parts, outlines = cells[::2], cells[1::2]
    return [
        ((part.x0 - whole.x0) / (whole.x1 - whole.x0), (part.x1 - whole.x0) / (whole.x1 - whole.x0))
        for part, whole in zip(parts, outlines, strict=True)
    ]


@pytest.mark.parametrize(("sharing", "ranks"), [(2, 2), (8, 8), (2, 6), (4, 8), (1, 8), (64, 64), (4, 64)])
def test_a_rank_holds_its_groups_slice_and_the_next_group_the_same(sharing: int, ranks: int):
    drawn = held_parts(sharing, ranks, level=0, stage=3)
    assert len(drawn) == min(ranks, 8)
    group = min(sharing, 8)
    for rank, (first, last) in enumerate(drawn):
        assert (first, last) == pytest.approx((rank % group / group, (rank % group + 1) / group))


def test_what_a_stage_does_not_divide_is_whole_on_every_rank():
    for part in held_parts(8, 8, level=0, stage=2):
        assert part == pytest.approx((0, 1))


def test_no_capacity_line_crosses_a_peaks_figure():
    """They stand in a column at the edge, beyond all that is drawn."""
    data = {"model": {"name": "meta-llama/Llama-3.1-8B"}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": 3}}
    budget = predict(parse_scenario(data))
    rows = stage_rows(budget)
    figure = stages(rows, budget.ladder.usable, ByteUnit.GB)
    written = {each.y: each for each in figure.layout.annotations if each.y in {f"ZeRO-{stage}" for stage in range(4)}}
    assert [written[f"ZeRO-{row.stage}"].text for row in rows] == [f"{row.peak_bytes / 1e9:.1f} GB" for row in rows]
    assert {(each.xref, each.x, each.xanchor) for each in written.values()} == {("paper", 1, "right")}
    farthest = max(budget.ladder.usable, *(row.peak_bytes or 0 for row in rows)) / 1e9
    # A figure takes 50 of the 240 pixels that a screen of 400 leaves the plot.
    assert figure.layout.xaxis.range[1] * (1 - 50 / 240) > farthest

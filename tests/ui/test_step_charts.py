"""The figure of one step: every part drawn, adding up, in one unit, whatever the engine.

Run: pytest tests/ui/test_step_charts.py
"""

import json
import re
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
from plotly.graph_objects import Figure

from memcore.budget import Budget, predict
from memcore.i18n import use_language
from memcore.one_step import StepPart, step_parts
from memcore.scenario import parse_scenario
from memcore.terms import Phase
from memcore.ui.charts import step
from memcore.ui.palette import STEP_COLOURS
from memcore.ui.step_charts import PART_LABELS, step_of_engine
from memcore.units import ByteUnit

ENGINES = [
    ("single", None),
    ("ddp", None),
    ("fsdp1", None),
    ("fsdp2", None),
    *(("deepspeed", stage) for stage in range(4)),
]


def of(engine: str, stage: int | None = None, gpu: str = "H100-80GB", model: str = "meta-llama/Llama-3.1-8B") -> Budget:
    parallelism: dict[str, Any] = {"engine": engine} | ({} if stage is None else {"zero_stage": stage})
    hardware = {"gpu": gpu, "gpus": 1 if engine == "single" else 8}
    return predict(parse_scenario({"model": {"name": model}, "hardware": hardware, "parallelism": parallelism}))


def traces(figure: Figure) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data if trace.name}


@pytest.mark.parametrize("unit", ByteUnit)
@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_every_part_of_every_engine_is_drawn(engine: str, stage: int | None, unit: ByteUnit):
    budget = of(engine, stage)
    figure = step_of_engine(budget, unit)
    drawn = traces(figure)
    areas = {part: drawn[PART_LABELS[part]] for part in step_parts(budget)}
    heights = [sum(values) * unit.size for values in zip(*(area.y for area in areas.values()), strict=True)]
    assert heights == pytest.approx([*budget.totals, budget.totals[-1]])
    assert f"({unit.value})" in figure.layout.yaxis.title.text
    assert all(unit.value in text or "B" in text for area in areas.values() for text in area.text)
    assert set(PART_LABELS) == set(STEP_COLOURS) == set(StepPart)
    last = "xaxis2" if stage == 3 or engine.startswith("fsdp") else "xaxis"
    assert figure.layout[last].title.text


def test_without_activations_the_engine_alone_is_drawn():
    budget = of("deepspeed", 3)
    figure = step_of_engine(budget, ByteUnit.GB, {Phase.FORWARD: 10**10}, activations=False)
    drawn = traces(figure)
    assert PART_LABELS[StepPart.ACTIVATIONS] not in drawn
    assert "measured" not in drawn
    assert figure.layout.yaxis.range[1] * 1e9 < budget.peak_bytes


def test_what_was_measured_is_marked_at_the_phases_fullest_moment():
    budget = of("deepspeed", 2)
    measured = {Phase.BACKWARD: 40 * 10**9, Phase.OPTIMIZER: 99 * 10**9}
    figure = step_of_engine(budget, ByteUnit.GB, measured)
    points = traces(figure)["measured"]
    assert list(points.y) == [40, 99]
    assert list(points.text) == ["40.0 GB", "99.0 GB"]
    edges = traces(figure)[PART_LABELS[StepPart.WEIGHTS]].x
    peaks = budget.phase_peaks()
    for phase, x in zip(measured, points.x, strict=True):
        assert edges[peaks[phase]] < x < edges[peaks[phase] + 1]
    assert figure.layout.yaxis.range[1] > 99


def test_the_cards_line_is_drawn_where_it_is_in_range():
    """68 GB of 84.9 usable on an H100, and of 295 on a B300."""
    small, large = (
        step_of_engine(each, ByteUnit.GB) for each in (of("deepspeed", 2), of("deepspeed", 2, "B300-288GB"))
    )
    assert any("for tensors" in name for name in traces(small))
    assert not any("for tensors" in name for name in traces(large))


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_gathered_layers_have_their_strip(engine: str, stage: int | None):
    figure = step_of_engine(of(engine, stage), ByteUnit.GB)
    strips = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(strips) == (1 if stage == 3 or engine.startswith("fsdp") else 0)
    for strip in strips:
        assert len(strip.z) == 32 + 3  # the embedding, the last norm and the head
        assert len(strip.z[0]) == 2 * 32 + 7
        assert figure.layout.yaxis2.title.text == "layer"


@pytest.mark.parametrize("draw", [step_of_engine, step])
def test_a_figure_names_its_moments_in_the_language_of_the_page(draw: Callable[[Budget, ByteUnit], Figure]):
    def in_chinese() -> str:
        use_language("zh")
        return str(draw(of("deepspeed", 2), ByteUnit.GB).to_json())

    drawn = json.loads(copy_context().run(in_chinese))
    texts = [
        str(text)
        for each in [*drawn["data"], *drawn["layout"].get("annotations", [])]
        for field in ("name", "text", "customdata", "hovertemplate")
        for text in ([each.get(field)] if isinstance(each.get(field), str) else each.get(field) or [])
    ]
    assert texts
    assert not [text for text in texts if re.search(r"forward|backward|loss|optimizer|idle|init", text)]

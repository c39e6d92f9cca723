"""The buffers page's step and its settings for a goal, as a user meets them.

Run: pytest tests/pages/test_buffers_page.py
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from test_pages import change, charts, linked, opened

from memcore.budget import predict
from memcore.link import write_link
from memcore.scenario import Scenario, parse_scenario
from memcore.suggest import Goal, GoalKind, ds_config, fsdp2_code, suggest
from memcore.suggest.words import outcome
from memcore.ui.frame import PAGES
from memcore.ui.work import light_lane
from memcore.units import ByteUnit

BUFFERS = PAGES["buffers"][0]
HEADING = "Settings for your goal"
SCENARIO = {"model": {"name": "openai-community/gpt2"}, "hardware": {"gpus": 8}}


@pytest.fixture(scope="module", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    light_lane().close()
    light_lane.clear()


def of(engine: str = "deepspeed", stage: int | None = None, **parts: Any) -> Scenario:
    parallelism = {"engine": engine} | ({} if stage is None else {"zero_stage": stage})
    hardware = {"gpus": 1 if engine == "single" else 8}
    return parse_scenario({**SCENARIO, "hardware": hardware, "parallelism": parallelism, **parts})


def page(scenario: Scenario, **query: str) -> AppTest:
    return opened(BUFFERS, s=write_link(scenario), **query)


def headings(at: AppTest) -> list[str]:
    return [heading.value for heading in at.subheader]


def texts(at: AppTest) -> list[str]:
    return [markdown.value for markdown in at.main.markdown]


@pytest.mark.parametrize("goal", GoalKind)
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp2", None)])
def test_the_suggestion_is_shown_and_can_be_applied(engine: str, stage: int | None, goal: GoalKind):
    scenario = of(engine, stage)
    at = change(page(scenario), w_goal=goal.value)
    wanted = suggest(predict(scenario), Goal(kind=goal))
    assert wanted is not None
    assert outcome(wanted, ByteUnit.GB) in texts(at)
    code = at.code[0].value
    if engine == "fsdp2":
        assert f"{code}\n" == fsdp2_code(wanted.after)
    else:
        assert json.loads(code) == ds_config(wanted.after)
    button = next(button for button in at.button if button.label == "Apply to the plan")
    assert button.disabled == (wanted.changes == ())
    if wanted.changes:
        button.click().run()
        assert not at.exception
        assert predict(linked(at)).peak_bytes == wanted.after.peak_bytes
        assert "present settings are the best" in " ".join(texts(at))


def test_a_larger_bucket_can_be_asked_for():
    scenario = of(stage=3)
    at = change(page(scenario), w_least_bucket=200_000_000)
    assert json.loads(at.code[0].value)["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    change(at, w_goal=GoalKind.SPEED.value)
    assert not any(slider.key == "w_least_bucket" for slider in at.select_slider)
    # Asked for again, the bucket is still there.
    change(at, w_goal=GoalKind.MEMORY.value)
    assert json.loads(at.code[0].value)["zero_optimization"]["reduce_bucket_size"] == 200_000_000


@pytest.mark.parametrize(("engine", "stage"), [("single", None), ("ddp", None), ("deepspeed", 0)])
def test_without_settings_there_is_a_step_but_no_suggestion(engine: str, stage: int | None):
    at = page(of(engine, stage))
    assert HEADING not in headings(at)
    assert "One step, moment by moment" in headings(at)


def test_adapters_on_fsdp2_have_a_setting_but_no_code():
    at = page(of("fsdp2", recipe={"method": "lora"}))
    assert HEADING in headings(at)
    assert not at.code


@pytest.mark.parametrize("unit", ["GB", "GiB"])
def test_the_step_is_drawn_with_and_without_activations(unit: str):
    at = page(of(stage=3), unit=unit)
    figure = charts(at)[1]
    assert f"({unit})" in figure["layout"]["yaxis"]["title"]["text"]
    assert {"heatmap", "scatter"} == {trace["type"] for trace in figure["data"]}
    change(at, step_activations=False)
    less = charts(at)[1]
    assert len(less["data"]) == len(figure["data"]) - 1


def test_chinese_and_other_units_show_no_error():
    at = page(of(stage=3), lang="zh", unit="GiB")
    assert not at.exception
    assert at.code

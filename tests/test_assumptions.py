"""What figures rest on is said in one line, and an exported scenario holds all of it.

Run: pytest tests/test_assumptions.py
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from generated_scenarios import scenarios
from hypothesis import given, settings

import memcore
from memcore.assumptions import assumptions
from memcore.budget import predict
from memcore.report import budget_report
from memcore.scenario import Scenario, exported_data, parse_scenario
from memcore.units import ByteUnit

LLAMA = {"name": "meta-llama/Llama-3.1-8B"}


def line(model: dict[str, Any] | None = None, **workload: Any) -> list[str]:
    data = {"model": model or LLAMA, "parallelism": {"zero_stage": 2}, "workload": workload}
    return assumptions(predict(parse_scenario(data)), ByteUnit.GB).split(" · ")


def test_the_line_says_what_a_step_processes():
    parts = ["1 × 4,096 tokens", "1 micro-step", "flash attention", "no checkpointing", "loss unfused"]
    assert line()[6:11] == parts


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ({"micro_batch": 3, "seq_len": 512}, "3 × 512 tokens"),
        ({"grad_accum": 8}, "8 micro-steps"),
        ({"attention": "eager"}, "plain attention"),
        ({"loss": "fused"}, "loss fused with the head"),
        ({"checkpointing": "full"}, "full checkpointing"),
        ({"checkpointing": "segments(4)"}, "checkpointing in segments of 4"),
        ({"checkpointing": "every_nth(2)"}, "checkpointing of every layer in 2"),
        ({"checkpointing": "first(3)"}, "checkpointing of the first 3 layers"),
        ({"checkpointing": "save(attention,mm)"}, "checkpointing but for attention, matrix products"),
    ],
)
def test_what_is_set_is_in_the_line(workload: dict[str, Any], said: str):
    assert said in line(**workload)
    assert said not in line()


def test_a_bare_count_has_no_activations_to_speak_of():
    parts = line({"n_params": "7b"}, grad_accum=2)
    assert "2 micro-steps" in parts
    assert not any("attention" in part or "tokens" in part for part in parts)


def test_an_exported_scenario_names_its_defaults_and_the_version():
    data = exported_data(parse_scenario({"model": LLAMA}))
    assert data["memcore"] == memcore.__version__
    assert data["workload"]["seq_len"] == 4096
    assert data["recipe"]["optimizer"] == {
        "name": "adamw", "bits": 32, "paged": False, "implementation": None, "momentum": False, "in_backward": False,
    }  # fmt: skip
    assert budget_report(predict(parse_scenario({"model": LLAMA})))["scenario"] == data


@settings(max_examples=50, deadline=None)
@given(scenario=scenarios())
def test_an_exported_scenario_is_read_back(scenario: Scenario):
    assert parse_scenario(exported_data(scenario)) == scenario


def test_the_packages_version_is_the_projects():
    root = Path(__file__).resolve().parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == memcore.__version__

"""The trace against byte-exact figures of published GPU runs (shared/reference/tracing_facts.md, fact 17).

Run: pytest tests/trace/test_published.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memcore.budget import Budget, Evidence, predict
from memcore.counting import count_config
from memcore.models import load_inventory
from memcore.scenario import Scenario, parse_scenario
from memcore.terms import Category, EvidenceKind, Phase
from memcore.trace.profile import load_profile
from memcore.trace.request import trace_request
from memcore.trace.tracer import trace_task

RUN = "fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-full-g1-b4"


@pytest.fixture(scope="module")
def run(shared: Path) -> dict[str, Any]:
    path = shared / "measured" / "runs.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    (found,) = [run for run in runs if run["id"] == RUN]
    return dict(found)


def scenario_of(run: dict[str, Any], **workload: Any) -> Scenario:
    work = run["workload"]
    return parse_scenario(
        {
            "model": {"config": run["model"]["config"]},
            "hardware": {"gpu": "A100-80GB"},
            "recipe": {"convention": "pure_bf16", "optimizer": {"implementation": "foreach"}},
            "workload": {
                "micro_batch": work["micro_batch"],
                "seq_len": work["seq_len"],
                "attention": work["attention"],
                "checkpointing": "full",
                "loss": "unfused",
                "logits_retained": work["logits_retained"],
                **workload,
            },
        }
    )


def traced_budget(run: dict[str, Any], **workload: Any) -> Budget:
    scenario = scenario_of(run, **workload)
    request = trace_request(scenario)
    assert isinstance(request, dict)
    inventory = load_inventory(count_config({"config": run["model"]["config"]})["inventory"])
    return predict(scenario, Evidence(inventory=inventory, profile=load_profile(trace_task(request))))


def test_llama_3_8b_full_bf16_on_an_a100(run: dict[str, Any]):
    """80.318e9 bytes; the foreach optimizer step binds, and the traced activations stay below it."""
    measured = run["measured"]["bytes"]
    assert measured == pytest.approx(80.318e9, rel=1e-4)
    budget = traced_budget(run)
    assert budget.peak_bytes == pytest.approx(measured, rel=0.01)
    assert budget.binding_phase is Phase.OPTIMIZER
    traced = [term for term in budget.terms if term.evidence is EvidenceKind.TRACE]
    assert {term.category for term in traced} == {Category.ACTIVATIONS, Category.LOSS}
    assert all(
        budget.totals[index] < budget.peak_bytes
        for index in budget.phase_peaks().values()
        if index != budget.peak_index
    )


def test_without_checkpointing_the_same_run_would_not_be_bound_by_its_step(run: dict[str, Any]):
    """The other way round: the trace is what decides as soon as activations are kept."""
    budget = traced_budget(run, checkpointing="none")
    assert budget.binding_phase is not Phase.OPTIMIZER

"""The trace against byte-exact figures of published GPU runs (shared/reference/tracing_facts.md, fact 17).

Run: pytest tests/trace/test_published.py
"""

from typing import Any

import pytest
from published import published_inventory, published_scenario

from memcore.budget import Budget, Evidence, predict
from memcore.terms import Category, EvidenceKind, Phase
from memcore.trace.profile import load_profile
from memcore.trace.request import trace_request
from memcore.trace.tracer import trace_task

RUN = "fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-full-g1-b4"


@pytest.fixture(scope="module")
def run(measured_runs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = measured_runs["runs"][RUN]
    return found


def traced_budget(run: dict[str, Any], **workload: Any) -> Budget:
    scenario = published_scenario(run, **workload)
    request = trace_request(scenario)
    assert isinstance(request, dict)
    return predict(scenario, Evidence(inventory=published_inventory(run), profile=load_profile(trace_task(request))))


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

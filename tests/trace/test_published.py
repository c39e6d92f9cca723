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
from memcore.trace.task import trace_task

RUN = "fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-full-g1-b4"


@pytest.fixture(scope="module")
def run(measured_runs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = measured_runs["runs"][RUN]
    return found


def traced_budget(run: dict[str, Any], recipe: dict[str, Any] | None = None, **workload: Any) -> Budget:
    scenario = published_scenario(run, recipe, **workload)
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
    assert {term.category for term in traced} == {
        Category.ACTIVATIONS,
        Category.LOSS,
        Category.GRADIENTS,
        Category.OPTIMIZER,
    }
    assert all(
        budget.totals[index] < budget.peak_bytes
        for index in budget.phase_peaks().values()
        if index != budget.peak_index
    )


@pytest.mark.parametrize(("batch", "measured"), [(4, 20.170e9), (8, 33.153e9)])
def test_powerlm_3b_lora_on_an_a100(measured_runs: dict[str, Any], batch: int, measured: float):
    """peft's adapters with dropout under transformers' reentrant checkpointing; the loss binds, 12 bytes a logit."""
    run = measured_runs["runs"][f"fms-a_granite-PowerLM-3b-none-lora-g1-b{batch}"]
    assert run["measured"]["bytes"] == pytest.approx(measured, rel=1e-4)
    lora = {key: run["recipe"]["lora"][key] for key in ("rank", "targets", "dropout", "adapter_dtype")}
    budget = traced_budget(run, {"method": "lora", "lora": lora}, reentrant=True)
    assert budget.states.trained == run["recipe"]["lora"]["trainable_params"]
    assert budget.peak_bytes == pytest.approx(measured, rel=0.01)
    assert budget.binding_phase is Phase.LOSS


def test_without_checkpointing_the_same_run_would_not_be_bound_by_its_step(run: dict[str, Any]):
    """The other way round: the trace is what decides as soon as activations are kept."""
    budget = traced_budget(run, checkpointing="none")
    assert budget.binding_phase is not Phase.OPTIMIZER

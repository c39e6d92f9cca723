"""The trace against byte-exact figures of published GPU runs (shared/reference/tracing_facts.md, fact 17).

Run: pytest tests/trace/test_published.py
"""

from typing import Any

import pytest
from published import published_inventory, published_scenario

from memcore.budget import Budget, Evidence, predict
from memcore.score.adapter import scenario_of
from memcore.score.record import parse_run
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


# Bytes of the peak as published: foundation-model-stack/fms-acceleration, scripts/benchmarks/refs, A100-80GB.
GOLD = {
    "fms-a-Mistral-7B-v0.1-accelerated-peft-bnb-qlora-g1-b4": "a shifted copy, FP32 in the loss",
    "fms-a-Mistral-7B-v0.1-baseline-peft-bnb-qlora-g1-b4": "norms in FP32",
    "fms-a-gpt_bigcode-santacoder-none-full-g1-b8": "a shifted copy in 16 bit",
    "fms-a_granite-PowerLM-3b-none-lora-g1-b8": "a shifted copy, FP32 in the model",
    "fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-lora-g1-b8": "a cross entropy with its gradient in place",
    "fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-liger-lora-g1-b8": "fused with the head",
}


@pytest.mark.parametrize("name", GOLD)
def test_losses_and_norms_of_published_runs(measured_runs: dict[str, Any], name: str):
    run = parse_run(measured_runs["runs"][name])
    scenario = scenario_of(run)
    request = trace_request(scenario)
    assert isinstance(request, dict)
    inventory = published_inventory(measured_runs["runs"][name])
    budget = predict(scenario, Evidence(inventory=inventory, profile=load_profile(trace_task(request))))
    assert budget.peak_bytes == pytest.approx(run.measured.bytes, rel=0.002), GOLD[name]

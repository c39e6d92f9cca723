"""What is advised for a term is another setting of this run that takes less, with what it saves.

Run: pytest tests/test_remedies.py. Savings of states in closed form: ZeRO, arXiv 1910.02054, section 5.
"""

from typing import Any

import pytest
from generated_scenarios import scenarios
from hypothesis import given, settings

from memcore.budget import Budget, predict
from memcore.errors import UserError
from memcore.explain import TERM_LABELS
from memcore.remedies import MOST, TERM_REMEDIES, remedies
from memcore.scenario import Scenario, parse_scenario
from memcore.units import ByteUnit

LLAMA = {"name": "meta-llama/Llama-3.1-8B"}
BF16 = {"convention": "pure_bf16"}


def of(engine: str, stage: int | None = None, *, model: dict[str, Any] = LLAMA, **parts: Any) -> Budget:
    spread = {"engine": engine, **({} if stage is None else {"zero_stage": stage}), **parts.pop("spread", {})}
    parts = {"recipe": {"convention": "engine"}, **parts}
    gpus = 1 if engine == "single" else 8
    return predict(parse_scenario({"model": model, "hardware": {"gpus": gpus}, "parallelism": spread, **parts}))


def advice(budget: Budget, name: str) -> str:
    (term,) = [term for term in budget.terms if term.name == name]
    (text,) = remedies(budget, [term], ByteUnit.GB)
    return text


def test_every_term_with_a_label_has_remedies():
    assert set(TERM_REMEDIES) == set(TERM_LABELS)


@pytest.mark.parametrize(
    ("stage", "name", "first"),
    [
        (3, "master_weights", "Take twice as many GPUs"),
        (2, "weights", "Choose ZeRO stage 3"),
        (1, "gradients", "Choose ZeRO stage 2"),
        (0, "momentum", "Choose ZeRO stage 1"),
    ],
)
def test_what_is_not_divided_gets_the_stage_that_divides_it_and_what_is_more_gpus(stage: int, name: str, first: str):
    assert advice(of("deepspeed", stage, model={"n_params": "7b"}), name).startswith(first)


def test_a_saving_is_the_difference_of_the_two_peaks():
    """FSDP2 on 16 GPUs instead of 8: half of each rank's FP32 weights, momentum and variance, 12 x 8.03e9 / 16 bytes;
    the peak is in the backward, before most gradients are there."""
    assert "Take twice as many GPUs: 6.02 GB less at the peak." in advice(of("fsdp2"), "weights")


@pytest.mark.parametrize("name", ["weights", "momentum"])
def test_a_divided_state_is_not_told_to_be_divided(name: str):
    text = advice(of("fsdp2"), name)
    assert "ZeRO" not in text
    assert "FSDP2" not in text


def test_replicas_are_joined_first():
    assert advice(of("fsdp2", spread={"dp_replicate": 2}), "weights").startswith("Divide among all GPUs, in one group")


def test_one_gpu_is_told_of_two():
    assert advice(of("single", recipe=BF16), "weights").startswith("Take two GPUs, with FSDP2")


def test_what_is_set_is_not_advised():
    full = of("deepspeed", 2, workload={"checkpointing": "full"})
    assert "Recompute" not in advice(full, "saved_activations")
    assert "Recompute" in advice(of("deepspeed", 2), "saved_activations")
    assert "fused with the head" not in advice(of("deepspeed", 2, workload={"loss": "fused"}), "logits_loss")
    assert "8 bits" not in advice(of("fsdp2", recipe={"optimizer": {"bits": 8}}), "momentum")


@pytest.mark.parametrize(("engine", "settings_of"), [("fsdp2", "stage3"), ("deepspeed", "reshard")])
def test_no_engine_hears_of_anothers_settings(engine: str, settings_of: str):
    budget = of(engine, 3 if engine == "deepspeed" else None)
    texts = remedies(budget, budget.terms, ByteUnit.GB)
    assert not any(settings_of in text for text in texts)


def test_where_only_a_trace_has_activations_no_figure_is_made_up():
    """Autocast has no closed form: states alone can be compared."""
    text = advice(of("single"), "weights")
    assert text == "Take two GPUs, with FSDP2. Train adapters on a 4-bit base (QLoRA)."


@settings(max_examples=10, deadline=None)
@given(scenario=scenarios(configs=False))
def test_any_run_has_advice_for_each_term(scenario: Scenario):
    try:
        budget = predict(scenario)
    except UserError:  # adapters on modules that the model does not have
        return
    for text in remedies(budget, budget.terms, ByteUnit.GB):
        assert text.endswith(".")
        assert len(text.split(". ")) <= MOST

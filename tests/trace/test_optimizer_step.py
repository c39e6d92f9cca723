"""What an optimizer makes for a moment in its step: traced, against real steps on the CPU.

Run: pytest tests/trace/test_optimizer_step.py (half a minute).
"""

from typing import Any

import pytest
import torch
from allocator import allocator_peak
from small_models import CONFIGS, traced
from transformers import AutoConfig, AutoModelForCausalLM

from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.models import load_inventory
from memcore.scenario import parse_scenario
from memcore.trace.building import DTYPES
from memcore.trace.request import Step

KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, momentum=0.9, **how),
}
DEEP = {"num_hidden_layers": 7}


def real_peak(config: dict[str, Any], step: Step) -> int:
    """The most that the allocator holds during a later step, beyond gradients and states."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=DTYPES[step.dtype])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    how = {"foreach": step.implementation == "foreach", "fused": step.implementation == "fused"}
    optimizer = KINDS[step.name](model.parameters(), **how)
    optimizer.step()
    return allocator_peak(optimizer.step, lambda: None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["foreach", "fused", "for_loop"])
@pytest.mark.parametrize("name", KINDS)
def test_the_step_makes_what_the_real_one_makes(name: str, implementation: str, dtype: str):
    """foreach: for all parameters of all layers at once; for_loop: for one after the other; fused: nothing."""
    step = Step(name=name, implementation=implementation, momentum=name == "sgd", dtype=dtype)
    config = {**CONFIGS["llama"], **DEEP}
    profile = traced(config, step=step)
    assert profile.traced_layers < profile.num_layers
    assert profile.optimizer_step_bytes == pytest.approx(real_peak(config, step), abs=1024)
    if implementation == "fused":
        assert profile.optimizer_step_bytes == 0


@pytest.mark.parametrize("model", ["gpt2", "mixtral", "tied llama"])
def test_other_models_too(model: str):
    step = Step(name="adamw", implementation="foreach", momentum=False, dtype="fp32")
    assert traced(CONFIGS[model], step=step).optimizer_step_bytes == pytest.approx(
        real_peak(CONFIGS[model], step), abs=1024
    )


@pytest.mark.parametrize("implementation", ["foreach", "fused", "for_loop"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "tied llama"])
def test_the_closed_form_says_the_same(model: str, implementation: str):
    """For whole tensors on one GPU: to the byte but for the step counts of a few bytes."""
    step = Step(name="adamw", implementation=implementation, momentum=False, dtype="fp32")
    config = CONFIGS[model]
    recipe = {"convention": "fp32", "optimizer": {"implementation": implementation}}
    scenario = parse_scenario({"model": {"config": config}, "recipe": recipe})
    budget = predict(scenario, Evidence(inventory=load_inventory(count_config({"config": config})["inventory"])))
    closed = sum(term.largest for term in budget.terms if term.name == f"{implementation}_temporary")
    assert closed == pytest.approx(real_peak(config, step), abs=1024)

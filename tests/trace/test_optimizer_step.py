"""What an optimizer makes for a moment in its step: traced, against real steps on the CPU.

Run: pytest tests/trace/test_optimizer_step.py (half a minute).
"""

import warnings
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


def update_term(config: dict[str, Any], parallelism: dict[str, Any], optimizer: dict[str, Any]) -> int:
    data = {"model": {"config": config}, "parallelism": parallelism, "recipe": {"optimizer": optimizer}}
    scenario = parse_scenario({**data, "hardware": {"gpus": parallelism.get("dp", 1)}})
    budget = predict(scenario, Evidence(inventory=load_inventory(count_config({"config": config})["inventory"])))
    return sum(term.largest for term in budget.terms if term.name == "update_temporary")


def real_update(parameters: list[torch.nn.Parameter], *optimizers: torch.optim.Optimizer) -> int:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    for optimizer in optimizers:
        optimizer.step()
    # oneDNN packs operands of 16-bit products; torch warns that it can do more on other devices.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            return max(allocator_peak(each.step, lambda: None) for each in optimizers)


@pytest.mark.parametrize("implementation", ["foreach", "for_loop", None])
@pytest.mark.parametrize("model", ["llama", "gpt2", "tied llama"])
def test_adafactors_update(model: str, implementation: str | None):
    """Left to itself torch goes tensor by tensor. Beside the update are means of rows and columns and a vector's
    square, left out: 1% of a model as small as this."""
    config = CONFIGS[model]
    parameters = list(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).parameters())
    foreach = None if implementation is None else implementation == "foreach"
    real = real_update(parameters, torch.optim.Adafactor(parameters, foreach=foreach))
    optimizer = {"name": "adafactor"} | ({} if implementation is None else {"implementation": implementation})
    said = update_term(config, {"engine": "single"}, optimizer)
    assert said == pytest.approx(real, rel=0.015)
    if implementation is None:
        loop = {"name": "adafactor", "implementation": "for_loop"}
        assert said == update_term(config, {"engine": "single"}, loop)


def test_adafactors_update_of_a_flat_slice():
    """What DeepSpeed's stages hand it: one vector, whose square and update are there at once."""
    config = CONFIGS["llama"]
    whole = sum(each.numel() for each in AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).parameters())
    piece = torch.nn.Parameter(torch.ones(-(-whole // 2)))
    real = real_update([piece], torch.optim.Adafactor([piece]))
    said = update_term(config, {"engine": "deepspeed", "zero_stage": 2, "dp": 2}, {"name": "adafactor"})
    assert said == pytest.approx(real, rel=0.001)


@pytest.mark.parametrize("model", ["llama", "llama, 32000 words"])
def test_muons_update(model: str):
    """Of one matrix at a time, or AdamW's for embedding and head where that is more."""
    config = CONFIGS[model]
    named = dict(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).named_parameters())
    hidden = [each for name, each in named.items() if each.dim() == 2 and "embed" not in name and "head" not in name]
    others = [each for each in named.values() if all(each is not one for one in hidden)]
    optimizers = (torch.optim.Muon(hidden), torch.optim.AdamW(others, foreach=True))
    said = update_term(config, {"engine": "single"}, {"name": "muon"})
    assert said == pytest.approx(real_update(list(named.values()), *optimizers), rel=0.005)

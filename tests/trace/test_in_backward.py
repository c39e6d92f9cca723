"""The optimizer's step in the backward, against real steps on the CPU: one optimizer and one hook for each parameter.

Run: pytest tests/trace/test_in_backward.py
"""

from typing import Any

import pytest
import torch
from allocator import allocator_peak
from small_models import CONFIGS, traced
from transformers import AutoConfig, AutoModelForCausalLM

from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.models import load_inventory
from memcore.scenario import parse_scenario
from memcore.trace import kernels
from memcore.trace.profile import load_profile
from memcore.trace.request import Step, trace_request
from memcore.trace.task import trace_task

pytestmark = pytest.mark.usefixtures("one_torch_thread")
# So many words that the gradients of embedding and head are most of the step.
MODELS = {
    "llama, 32000 words": CONFIGS["llama, 32000 words"],
    "tied": {**CONFIGS["llama, 32000 words"], "tie_word_embeddings": True},
}
TOKENS = 33


def real_peak(config: dict[str, Any], implementation: str) -> int:
    """The most that the allocator holds in the second step, beyond weights and states."""
    kernels.register()
    torch.manual_seed(0)
    made = AutoConfig.for_model(**config)
    model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation=kernels.FLASH).train()
    how = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    optimizers = {parameter: torch.optim.AdamW([parameter], **how) for parameter in model.parameters()}

    def take(parameter: torch.nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(take)
    tokens = torch.arange(TOKENS).view(1, TOKENS)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return allocator_peak(step, lambda: None)


@pytest.mark.parametrize("implementation", ["foreach", "for_loop", "fused"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_real_step_takes_what_the_trace_says(name: str, implementation: str):
    config = MODELS[name]
    profile = traced(
        config, seq_len=TOKENS, dtype="fp32", step_in_backward=True,
        step=Step(name="adamw", implementation=implementation, momentum=False, dtype="fp32"),
    )  # fmt: skip
    assert max(profile.with_gradients) == pytest.approx(real_peak(config, implementation), rel=0.001, abs=4096)
    assert profile.optimizer_step_bytes == 0


def budget(*, in_backward: bool, traced: bool, implementation: str = "fused") -> Any:
    config = MODELS["llama, 32000 words"]
    scenario = parse_scenario(
        {
            "model": {"config": config},
            "hardware": {"gpu": "A100-80GB"},
            "recipe": {
                "convention": "pure_bf16",
                "optimizer": {"implementation": implementation, "in_backward": in_backward},
            },
            "workload": {"seq_len": TOKENS},
        }
    )
    request = trace_request(scenario)
    assert isinstance(request, dict)
    profile = load_profile(trace_task(request)) if traced else None
    inventory = load_inventory(count_config({"config": config})["inventory"])
    return predict(scenario, Evidence(inventory=inventory, profile=profile))


def test_one_gradient_at_a_time_is_all_that_the_closed_form_has():
    """19.2 million values, of which the head has 8,192,000; at the plain loop's end all of them are alive."""
    plain, stepped = (budget(in_backward=each, traced=False) for each in (False, True))
    head, values = 32_000 * 256, stepped.states.n_params
    saved = plain.peak_bytes - stepped.peak_bytes
    assert saved == pytest.approx(2 * (values - head), rel=0.05)


@pytest.mark.parametrize(("traced", "most"), [(False, 0.0), (True, 0.35)], ids=["formula", "trace"])
def test_the_foreach_step_makes_one_tensor_of_the_largest_parameter(traced: bool, most: float):
    """In the trace beside what is alive at that instant, in the closed form beside the most of that moment."""
    fused, foreach = (budget(in_backward=True, traced=traced, implementation=each) for each in ("fused", "foreach"))
    added = foreach.peak_bytes - fused.peak_bytes
    assert 2 * 32_000 * 256 * (1 - most) <= added <= 2 * 32_000 * 256


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"parallelism": {"engine": "ddp"}, "hardware": {"gpus": 2}}, "not predicted for ddp yet"),
        ({"workload": {"grad_accum": 2}}, "a gradient that waits is not freed"),
        ({"recipe": {"method": "lora", "optimizer": {"in_backward": True}}}, "full training of a model with shapes"),
        ({"model": {"n_params": 7_000_000_000}}, "full training of a model with shapes"),
    ],
)
def test_what_a_step_in_the_backward_cannot_do_is_refused(given: dict[str, Any], sentence: str):
    data = {"model": {"config": CONFIGS["llama"]}, "recipe": {"optimizer": {"in_backward": True}}, **given}
    with pytest.raises(UserError, match=sentence) as refusal:
        parse_scenario(data)
    assert refusal.value.field == "recipe.optimizer.in_backward"

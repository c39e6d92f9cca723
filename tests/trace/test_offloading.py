"""Saved activations on the host in a trace, against real steps on the CPU whose host is NumPy's memory.

Run: pytest tests/trace/test_offloading.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocator import allocator_peak
from small_models import CONFIGS, traced
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from memcore.errors import UserError
from memcore.scenario import parse_scenario, scenario_data
from memcore.trace import kernels

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DEEP = {**CONFIGS["llama"], "num_hidden_layers": 12}
SIZE = (2, 101)


class Away(saved_tensors_hooks):
    """torchtune's rules, written anew: five tensors wait for their copies; what came back goes after a later node."""

    def __init__(self) -> None:
        self.count, self.waiting, self.back, self.node = 0, {}, {}, None
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        self.count += 1
        if tensor.nbytes < 1024 or isinstance(tensor, torch.nn.Parameter | torch.nn.Buffer):
            return tensor
        self.waiting = {number: kept for number, kept in self.waiting.items() if number > self.count - 5}
        self.waiting[self.count] = tensor
        return self.count, tensor.detach().numpy().copy(), tensor.dtype

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        number, copy, dtype = packed
        node = torch._C._current_autograd_node()
        gone = list(self.back) if node is not self.node else []
        self.node = node
        if number in self.waiting:
            found = self.waiting[number]
        else:
            found = self.back[number] = torch.empty(copy.shape, dtype=dtype).copy_(torch.from_numpy(copy))

        def after(_inputs: Any, _outputs: Any) -> None:
            self.waiting = {}
            for each in gone:
                self.back.pop(each, None)

        node.register_hook(after)
        return found


def real_peak(*, recomputed: bool, away: bool) -> int:
    kernels.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**DEEP)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=kernels.FLASH
    ).train()
    if recomputed:
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    tokens = torch.arange(SIZE[0] * SIZE[1]).view(SIZE) % 512
    own: Callable[..., Any] = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Away():
            return own(*args, **kwargs)

    if away:
        model.model.forward = forward

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return allocator_peak(step, lambda: model.zero_grad(set_to_none=True))


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_real_step_takes_what_the_trace_says(recomputed: bool):
    profile = traced(
        DEEP, micro_batch=SIZE[0], seq_len=SIZE[1], dtype="fp32", checkpointing="full" if recomputed else "none",
        offloads_activations=True, kernels="cpu",
    )  # fmt: skip
    real = real_peak(recomputed=recomputed, away=True)
    assert max(profile.with_gradients) == pytest.approx(real, rel=0.005)
    assert recomputed or real < 0.8 * real_peak(recomputed=recomputed, away=False)


def test_at_most_five_layers_inputs_wait_on_the_gpu():
    """torchtune's max_fwd_stash_size; without it all twelve layers' inputs are kept: 2 x 101 x 256 x 4 bytes each."""
    each = SIZE[0] * SIZE[1] * 256 * 4
    here, away = (
        traced(DEEP, micro_batch=SIZE[0], seq_len=SIZE[1], dtype="fp32", checkpointing="full", offloads_activations=on)
        for on in (False, True)
    )
    assert here.of("saved")[11] >= 12 * each
    tables = 2 * 4 * SIZE[1] * 32
    assert away.of("saved")[11] <= 6 * each + tables + 4096


def test_it_is_asked_for_by_the_scenario():
    scenario = parse_scenario({"model": {"config": DEEP}, "offload": {"activations": "cpu"}})
    assert parse_scenario(scenario_data(scenario)) == scenario


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"parallelism": {"engine": "ddp"}, "hardware": {"gpus": 2}}, "not predicted for ddp yet"),
        ({"model": {"n_params": 7_000_000_000}}, "does nothing for a parameter count"),
    ],
)
def test_where_it_is_not_predicted_it_is_refused(given: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=sentence) as refusal:
        parse_scenario({"model": {"config": DEEP}, "offload": {"activations": "cpu"}, **given})
    assert refusal.value.field == "offload.activations"

"""Experts that run one after the other, against real steps of the code that transformers 4 had for them.

Run: pytest tests/trace/test_experts.py. The real router is told which experts to choose, an equal share of tokens each,
as the trace takes it.
"""

import warnings
from typing import Any

import pytest
import torch
from allocator import allocator_peak
from packed import pack
from peft import LoraConfig, get_peft_model
from small_models import CONFIGS, traced
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from memcore.counting import count_config
from memcore.errors import UserError
from memcore.experts import separated
from memcore.inventory import Role, TensorKind
from memcore.models import catalogue_inventory, load_inventory
from memcore.trace import kernels
from memcore.trace.building import DTYPES
from memcore.trace.request import Adapters

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MIXTRAL = CONFIGS["mixtral"]


class FormerExpert(nn.Module):
    """transformers 4.48, models/mixtral/modeling_mixtral.py, MixtralBlockSparseTop2MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.w2(nn.functional.silu(self.w1(hidden)) * self.w3(hidden))


class FormerBlock(nn.Module):
    """The same file's MixtralSparseMoeBlock, with the choice of experts made for it."""

    def __init__(self, now: Any, config: Any) -> None:
        super().__init__()
        self.gate, self.used, self.held = now.gate, config.num_experts_per_tok, config.num_local_experts
        self.experts = nn.ModuleList(
            FormerExpert(config.hidden_size, config.intermediate_size) for _ in range(self.held)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        shape = states.shape
        hidden = states.view(-1, shape[-1])
        _logits, weights, _chosen = self.gate(hidden)
        weights = weights.to(hidden.dtype)
        chosen = (torch.arange(hidden.shape[0] * self.used) % self.held).reshape(-1, self.used)
        result = torch.zeros_like(hidden)
        mask = nn.functional.one_hot(chosen, num_classes=self.held).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            idx, top_x = torch.where(mask[number])
            own = hidden[None, top_x].reshape(-1, shape[-1])
            made = expert(own) * weights[top_x, idx, None]
            result.index_add_(0, top_x, made.to(hidden.dtype))
        return result.reshape(shape)


def real_peak(dtype: str, checkpointing: str, size: tuple[int, int], quantization: str | None) -> int:
    """The most that the allocator holds during a real step, beyond what it held before."""
    kernels.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MIXTRAL)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[dtype], attn_implementation=kernels.FLASH
    ).train()  # fmt: skip
    for layer in model.model.layers:
        layer.mlp = FormerBlock(layer.mlp, config).to(DTYPES[dtype])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 5.24 on what its callers have always passed
        if quantization is not None:
            pack(model, quantization == "nf4_double_quant")
            model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        if checkpointing == "full":
            inner = model.get_base_model() if quantization else model
            inner.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    tokens = torch.randint(0, config.vocab_size, size)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=dtype == "fp32"):
            return allocator_peak(step, lambda: model.zero_grad(set_to_none=True))


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "size", "quantization"),
    [
        ("fp32", "none", (1, 192), None),
        ("fp32", "full", (2, 100), None),
        ("fp32", "none", (1, 192), "nf4"),
        ("bf16", "full", (2, 100), "nf4_double_quant"),
    ],
)
def test_traced_peak_is_the_real_one(dtype: str, checkpointing: str, size: tuple[int, int], quantization: str | None):
    adapters = Adapters(rank=8, targets=("q_proj", "v_proj"), dtype="fp32", quantization=quantization)
    profile = traced(
        MIXTRAL,
        micro_batch=size[0],
        seq_len=size[1],
        dtype=dtype,
        checkpointing=checkpointing,
        experts="separate",
        adapters=adapters if quantization else None,
    )
    real = real_peak(dtype, checkpointing, size, quantization)
    assert max(profile.with_gradients) == pytest.approx(real, rel=0.002)


def test_separate_experts_are_the_same_parameters_as_linear_weights():
    """Mixtral 8x7B: 46,702,792,704 parameters in all; an expert is three matrices of 4096 x 14336."""
    stacked = catalogue_inventory("mistralai/Mixtral-8x7B-v0.1")
    assert stacked is not None
    apart = separated(stacked)
    assert (apart.n_params, apart.n_active) == (46_702_792_704, stacked.n_active)
    packed = [t for t in apart.tensors() if t.role is Role.EXPERTS and t.kind is TensorKind.LINEAR]
    assert len(packed) == 32 * 8 * 3
    assert {tensor.numel for tensor in packed} == {4096 * 14336}
    assert {tensor.module for tensor in packed} == {"w1", "w2", "w3"}


def test_a_model_without_such_experts_is_refused():
    for given in (CONFIGS["llama"], CONFIGS["gpt_oss"]):
        inventory = load_inventory(count_config({"config": given})["inventory"])
        with pytest.raises(UserError, match="no experts that once were modules of their own"):
            separated(inventory)

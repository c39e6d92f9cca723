"""Each implementation of the loss: its trace against a real step on the CPU that runs what its library runs.

Run: pytest tests/trace/test_losses.py (a minute). A small Llama with 8,000 words in BF16, so that logits are
what takes memory; what is measured is the peak of the allocator's events, as in test_against_real_runs.py. The loss
functions here follow those of transformers 4.45.2 and 4.48.1 (modeling_llama.py, loss/loss_utils.py), torchtune
(modules/transformer.py), litgpt 0.5 (utils.py), unsloth and Liger Kernel, whose kernels are left out: they make no
tensor of their own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from allocator import allocator_peak
from small_models import CONFIGS, traced
from transformers import AutoConfig, AutoModelForCausalLM

from memcore.trace import kernels

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CONFIG = {**CONFIGS["llama"], "vocab_size": 8_000}
SIZE = (2, 96)
LIGER_CHUNK = 8  # ceil(8000 / 256) = 32 chunks of 6 tokens, rounded up to a power of two
Step = Callable[[Any, torch.Tensor], tuple[torch.Tensor, Any]]


def hidden_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    states: torch.Tensor = model.model(input_ids=tokens, use_cache=False)[0]
    return states


def old_transformers(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """4.45.2, LlamaForCausalLM.forward."""
    hidden_states = hidden_of(model, tokens)
    logits = model.lm_head(hidden_states)
    logits = logits.float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = tokens[..., 1:].contiguous()
    loss = F.cross_entropy(shift_logits.view(-1, shift_logits.shape[-1]), shift_labels.view(-1))
    return loss, logits


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor, *, upcast: bool) -> torch.Tensor:
    """4.48.1, ForCausalLMLoss; without the upcast, gpt_bigcode's."""
    logits = logits.float() if upcast else logits
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, shift_logits.shape[-1]), shift_labels.view(-1))


def transformers_4_48(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    hidden_states = hidden_of(model, tokens)
    logits = model.lm_head(hidden_states)
    return shifted_loss(logits, tokens, upcast=True), logits


def gpt_bigcode(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    hidden_states = hidden_of(model, tokens)
    logits = model.lm_head(hidden_states)
    return shifted_loss(logits, tokens, upcast=False), logits


def torchtune(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    logits = model.lm_head(hidden_of(model, tokens)).float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)), logits


def litgpt_pretraining(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    logits = model.lm_head(hidden_of(model, tokens))
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)), logits


def in_turn(chunks: Any, labels: Any) -> torch.Tensor:
    losses = [
        F.cross_entropy(chunk.reshape(-1, chunk.shape[-1]), its.reshape(-1), reduction="none")
        for chunk, its in zip(chunks, labels, strict=True)
    ]
    return torch.cat(losses).sum() / sum(its.numel() for its in labels)


def litgpt_full(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """95 tokens of each sequence in 5 chunks."""
    logits = model.lm_head(hidden_of(model, tokens))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.reshape(-1, logits.shape[-1])
        return in_turn(logits.split(38), targets.reshape(-1).split(38))

    return loss(logits[..., :-1, :], tokens[..., 1:]), logits


def litgpt_lora(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    logits = [model.lm_head(chunk) for chunk in hidden_of(model, tokens).split(12, dim=1)]
    return in_turn(logits, tokens.split(12, dim=1)), logits


class Unsloth(torch.autograd.Function):
    """Fast_CrossEntropyLoss without its kernels."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, torch.empty(len(logits)), labels)
        return torch.empty(len(logits))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logits, _sums, _labels = ctx.saved_tensors
        return logits.mul_(gradients[0].unsqueeze(1)), None


def fused_cross_entropy(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Into the place of transformers 4.45.2's, as fms-acceleration puts it."""
    hidden_states = hidden_of(model, tokens)
    logits = model.lm_head(hidden_states)
    logits = logits.float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = tokens[..., 1:].contiguous()
    losses: Any = Unsloth.apply(shift_logits.view(-1, shift_logits.shape[-1]), shift_labels.view(-1))  # type: ignore[no-untyped-call]
    return losses.sum() / shift_labels.numel(), logits


def megatron(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """VocabParallelCrossEntropy: a softmax in FP32 in one place."""
    output = model.lm_head(hidden_of(model, tokens))
    logits = output.float()
    losses: Any = Unsloth.apply(logits.view(-1, logits.shape[-1]), tokens.view(-1))  # type: ignore[no-untyped-call]
    return losses.sum() / tokens.numel(), output


class Liger(torch.autograd.Function):
    """fused_linear_cross_entropy_forward of 0.7 and of 0.3.1 (`old`), without their kernels."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, chunk: int, old: bool) -> torch.Tensor:
        grad_weight, grad_input = torch.zeros_like(weight), torch.zeros_like(states)
        loss = torch.zeros(len(states))
        for start in range(0, len(states), chunk):
            states_chunk = states[start : start + chunk]
            logits_chunk = states_chunk @ weight.t()
            if old:
                logits_chunk = logits_chunk.float()
                logits_chunk = logits_chunk.to(weight.dtype)
                grad_logits_chunk = logits_chunk * 0.5
                grad_input[start : start + chunk] = grad_logits_chunk @ weight
                torch.addmm(grad_weight, logits_chunk.t(), states_chunk, out=grad_weight, alpha=0.5)
            else:
                grad_logits_chunk = logits_chunk
                grad_input[start : start + chunk] = grad_logits_chunk @ weight
                grad_weight += torch.mm(grad_logits_chunk.t(), states_chunk).float()
        ctx.save_for_backward(grad_input, grad_weight)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        grad_input, grad_weight = ctx.saved_tensors
        return grad_input, grad_weight, None, None


def liger(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    states = hidden_of(model, tokens)
    loss: Any = Liger.apply(states.reshape(-1, states.shape[-1]), model.lm_head.weight, LIGER_CHUNK, False)  # type: ignore[no-untyped-call]
    return loss, None


def old_liger(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    hidden_states = hidden_of(model, tokens)
    shift_hidden_states = hidden_states[..., :-1, :].contiguous()
    flat = shift_hidden_states.view(-1, shift_hidden_states.shape[-1])
    loss: Any = Liger.apply(flat, model.lm_head.weight, LIGER_CHUNK, True)  # type: ignore[no-untyped-call]
    return loss, None


CASES: dict[str, tuple[Step, dict[str, Any]]] = {
    "transformers 4.45": (old_transformers, {"logits_upcast": "model", "shifted_copy": True}),
    "transformers 4.48": (transformers_4_48, {"logits_upcast": "loss", "shifted_copy": True}),
    "gpt_bigcode": (gpt_bigcode, {"logits_upcast": "none", "shifted_copy": True}),
    "torchtune": (torchtune, {"logits_upcast": "model"}),
    "litgpt pretraining": (litgpt_pretraining, {"logits_upcast": "none"}),
    "litgpt full": (
        litgpt_full,
        {"loss": "chunked_ce", "loss_chunks": 5, "logits_upcast": "none", "shifted_copy": True},
    ),
    "litgpt lora": (litgpt_lora, {"loss": "chunked", "loss_chunks": 8, "logits_upcast": "none"}),
    "unsloth": (fused_cross_entropy, {"loss": "fused_ce", "logits_upcast": "model", "shifted_copy": True}),
    "megatron": (megatron, {"loss": "fused_ce", "logits_upcast": "loss"}),
    "liger 0.7": (liger, {"loss": "fused"}),
    "liger 0.3": (old_liger, {"loss": "fused", "logits_upcast": "loss", "shifted_copy": True}),
}


def real_peak(step: Step, held: bool) -> int:
    kernels.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=kernels.FLASH)
    model.train()
    tokens = torch.randint(0, config.vocab_size, SIZE)

    def run() -> None:
        loss, outputs = step(model, tokens)
        if not held:
            del outputs
        loss.backward()

    return allocator_peak(run, lambda: model.zero_grad(set_to_none=True))


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize(
    ("name", "held"), [(name, held) for name in CASES for held in (False, True) if not (held and "liger" in name)]
)
def test_traced_peak_of_each_loss_is_the_real_one(name: str, held: bool):
    step, wanted = CASES[name]
    profile = traced(
        CONFIG, micro_batch=SIZE[0], seq_len=SIZE[1], dtype="bf16", logits_retained=held, **wanted
    )  # fmt: skip
    # oneDNN's products take memory of their own for a moment, which counts where the head's backward is the peak.
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        real = real_peak(step, held)
    assert abs(max(profile.with_gradients) - real) <= 1024, name

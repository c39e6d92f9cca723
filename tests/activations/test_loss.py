"""Logits and loss: measured on the CPU's own allocator, and worked out by hand from the cited sources.

Run: pytest tests/activations/test_loss.py (half a minute). What is measured is the peak of the allocator's events
in ``torch.profiler`` over the head's matrix product, transformers' own loss and their backward, in bytes per logit.
The hidden size is small beside the vocabulary, so that the gradients of head and hidden states are a small part,
which is allowed for.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from allocator import allocator_peak
from transformers.loss.loss_utils import ForCausalLMLoss

from memcore.activations.loss import loss_bytes
from memcore.budget import Budget, predict
from memcore.scenario import Workload, parse_scenario
from memcore.terms import Phase

TOKENS, VOCAB, HIDDEN = 256, 16_000, 16
LOGITS = TOKENS * VOCAB


class Head:
    """A language model's head in BF16, hidden states and labels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        self.states = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        self.labels = torch.randint(0, VOCAB, (1, TOKENS))

    def reset(self) -> None:
        self.weight.grad = self.states.grad = None

    def logits(self) -> torch.Tensor:
        return self.states @ self.weight.t()

    def loss(self) -> torch.Tensor:
        """The loss; the logits are held through the forward, as a model's own forward does, then let go of."""
        logits = self.logits()
        loss: torch.Tensor = ForCausalLMLoss(logits, self.labels, VOCAB)
        return loss

    def forward(self) -> None:
        self.loss()

    def released(self) -> None:
        self.loss().backward()

    def held(self) -> None:
        logits = self.logits()
        ForCausalLMLoss(logits, self.labels, VOCAB).backward()

    def _chunks(self) -> list[torch.Tensor]:
        return [chunk @ self.weight.t() for chunk in self.states.chunk(8, dim=1)]

    def _sum(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """As torchtune's CEWithChunkedOutputLoss without a compiler: one chunk after the other in FP32."""
        total = torch.zeros(())
        for chunk, labels in zip(chunks, self.labels.chunk(8, dim=1), strict=True):
            total = total + F.cross_entropy(chunk.reshape(-1, VOCAB).float(), labels.reshape(-1), reduction="sum")
        return total / TOKENS

    def _chunked_loss(self) -> torch.Tensor:
        return self._sum(self._chunks())

    def chunked_released(self) -> None:
        self._chunked_loss().backward()

    def chunked_held(self) -> None:
        chunks = self._chunks()
        self._sum(chunks).backward()
        del chunks


def per_logit(**workload: Any) -> float:
    """The closed form's bytes per logit, in BF16, without what does not grow with the vocabulary."""
    work = Workload(micro_batch=1, seq_len=TOKENS, **workload)
    return loss_bytes(work, VOCAB, HIDDEN, 2)[0] / LOGITS


# The gradients of the head (2 V h bytes) and of the hidden states, per logit.
SLACK = 2 * HIDDEN / TOKENS + 0.1


@pytest.mark.parametrize(
    ("run", "form"),
    [
        ("forward", 10.0),
        ("released", 12.0),
        ("held", 14.0),
        ("chunked_released", 6.5),
        ("chunked_held", 7.0),
    ],
)
def test_bytes_per_logit_as_measured(run: str, form: float):
    """torch 2.13, transformers 5.24: what the closed form and its docstring state."""
    head = Head()
    found = allocator_peak(getattr(head, run), head.reset) / LOGITS
    assert form <= found + 0.01
    assert found <= form + SLACK


@pytest.mark.parametrize(
    ("workload", "form"),
    [
        ({"loss": "unfused"}, 12.0),
        ({"loss": "unfused", "logits_retained": True}, 14.0),
        ({"loss": "chunked"}, 6.5),
        ({"loss": "chunked", "logits_retained": True}, 7.0),
    ],
)
def test_the_closed_form_says_what_was_measured(workload: dict[str, Any], form: float):
    assert per_logit(**workload) == form


def test_the_reference_note_is_the_held_case():
    """engine_facts.md: about 14 bytes per logit; 8192 tokens and 128,256 words take 14.7 GB."""
    work = Workload(seq_len=8192, loss="unfused", logits_retained=True)
    assert loss_bytes(work, 128_256, 4096, 2)[0] / 1e9 == pytest.approx(14.7, abs=0.05)


def test_chunked_by_hand():
    """16 tokens, 10 words, BF16: logits 2 x 160 and FP32 log-softmaxes 4 x 160; one chunk of 2 tokens in FP32
    beside them in the forward (4 x 20), two of its size in the backward where the logits are held (8 x 20)."""
    work = Workload(seq_len=16, loss="chunked")
    assert loss_bytes(work, 10, 4, 2)[0] == 320 + 640 + 80
    held = work.model_copy(update={"logits_retained": True})
    assert loss_bytes(held, 10, 4, 2)[0] == 320 + 640 + 160


def test_chunks_in_16_bit_by_hand():
    """As litgpt's LoRA has them, held: logits and log-softmaxes of 2 bytes each, and two gradients of one chunk."""
    work = Workload(seq_len=16, loss="chunked", loss_chunks=4, logits_upcast="none", logits_retained=True)
    assert loss_bytes(work, 10, 4, 2)[0] == 2 * 160 + 2 * 160 + 4 * 40


def test_fused_by_hand():
    """Liger's rule (ops/fused_linear_cross_entropy.py, 0.7) on its own example: BT = 4096 x 4, V = 32000, H = 4096
    gives chunks of 2048 tokens. The gradients of the hidden states and, where it is trained, of the head are made in
    the forward. With a trained head its gradient of one chunk, in BF16 and in FP32, is most beside a chunk's logits;
    with a frozen one the next chunk's logits, since the last ones are still held."""
    work = Workload(micro_batch=4, seq_len=4096, loss="fused")
    chunk, states, head = 2 * 2048 * 32_000, 2 * 16_384 * 4096, 32_000 * 4096
    assert loss_bytes(work, 32_000, 4096, 2)[0] == chunk + states + (2 + 2 + 4) * head
    assert loss_bytes(work, 32_000, 4096, 2, trains_head=False)[0] == 2 * chunk + states


def test_the_older_fused_loss_by_hand():
    """Liger 0.3.1: a chunk in BF16, its copy in FP32, and the last one's gradient: 8 bytes a logit of a chunk. Shifted
    hidden states are a copy."""
    work = Workload(micro_batch=4, seq_len=4096, loss="fused", logits_upcast="loss", shifted_copy=True)
    chunk, states, head = 2048 * 32_000, 2 * 16_384 * 4096, 2 * 32_000 * 4096
    assert loss_bytes(work, 32_000, 4096, 2)[0] == 8 * chunk + 2 * states + head


def test_fused_chunk_is_a_power_of_two_and_never_more_than_all_tokens():
    # ceil(128256 / 4096) = 32 chunks of ceil(8000 / 32) = 250 tokens, rounded up to 256.
    work = Workload(seq_len=8000, loss="fused")
    assert loss_bytes(work, 128_256, 4096, 2, trains_head=False)[0] == 2 * 2 * 256 * 128_256 + 2 * 8000 * 4096
    # A vocabulary no wider than the hidden size: one chunk of all 3 tokens, not of 4.
    work = Workload(seq_len=3, loss="fused")
    assert loss_bytes(work, 100, 128, 2, trains_head=False)[0] == 2 * 3 * 100 + 2 * 3 * 128


# --- as terms of a budget -----------------------------------------------------------------------------------------


def llama(**workload: Any) -> Budget:
    parts = {"recipe": {"convention": "pure_bf16"}, "workload": {"seq_len": 8192, **workload}}
    return predict(parse_scenario({"model": {"name": "meta-llama/Llama-3.1-8B"}, **parts}))


def logits_at(budget: Budget, phase: Phase) -> list[int]:
    (term,) = [term for term in budget.terms if term.name == "logits_loss"]
    return [term.at(index) for index, moment in enumerate(budget.timeline) if moment.phase is phase]


@pytest.mark.parametrize("loss", ["unfused", "chunked"])
def test_held_logits_stay_through_the_backward(loss: str):
    each = 2 * 8192 * 128_256
    held = logits_at(llama(loss=loss, logits_retained=True), Phase.BACKWARD)
    assert set(held[:-1]) == {each}
    assert set(logits_at(llama(loss=loss), Phase.BACKWARD)) == {0}
    assert set(logits_at(llama(loss=loss), Phase.OPTIMIZER)) == {0}


def test_a_fused_head_has_no_logits_to_hold():
    assert set(logits_at(llama(loss="fused", logits_retained=True), Phase.BACKWARD)) == {0}


def test_losses_are_ordered():
    """The less of the logits is there at once, the less it takes."""
    sizes = [max(logits_at(llama(loss=loss), Phase.LOSS)) for loss in ("unfused", "chunked", "fused")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 12 * 8192 * 128_256

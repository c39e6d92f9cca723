"""The loss of a traced step, for each implementation of it.

Worker processes only: imports torch.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from memcore.activations.loss import NUM_LOSS_CHUNKS, fused_chunk


def loss_of(model: Any, tokens: torch.Tensor, kind: str) -> tuple[torch.Tensor, Any]:
    """Run the model's forward and the loss: "unfused", "chunked" or "fused". Returns the loss, and the outputs, logits
    included, that a training loop may hold until the backward is done."""
    if kind == "unfused":
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        return output.loss, output
    return _chunked(model, tokens) if kind == "chunked" else (_fused(model, tokens), None)


def hidden_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The decoder's last hidden states."""
    states: torch.Tensor = model.get_decoder()(input_ids=tokens, use_cache=False)[0]
    return states


def _chunked(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The head on one chunk of tokens after the other, then the sum of their losses in FP32.

    Source: torchtune, modules/transformer.py, TransformerDecoder.chunked_output; modules/loss/
    ce_chunked_output_loss.py, CEWithChunkedOutputLoss, not compiled.
    """
    head = model.get_output_embeddings()
    logits = [head(chunk) for chunk in hidden_of(model, tokens).chunk(NUM_LOSS_CHUNKS, dim=1)]
    total: Any = 0.0
    for chunk, labels in zip(logits, tokens.chunk(NUM_LOSS_CHUNKS, dim=1), strict=True):
        flat = chunk.reshape(-1, chunk.shape[-1])
        total = total + functional.cross_entropy(flat.float(), labels.reshape(-1), reduction="sum")
        del flat
    return total / tokens.numel(), logits


def _fused(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    head: nn.Module = model.get_output_embeddings()
    states = hidden_of(model, tokens)
    loss: torch.Tensor = _FusedLinearLoss.apply(states.reshape(-1, states.shape[-1]), head.weight, tokens.reshape(-1))  # type: ignore[no-untyped-call]
    return loss


class _FusedLinearLoss(torch.autograd.Function):
    """Head and loss in one: the gradients are made in the forward, one chunk of logits at a time.

    Source: Liger Kernel, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward, on CUDA: one buffer
    for a chunk's logits, which their gradient overwrites; products go straight to where their results are kept.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens, (vocab, hidden) = states.shape[0], weight.shape
        chunk = fused_chunk(tokens, vocab, hidden)
        of_states = torch.zeros_like(states)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=states.device)
        logits = torch.empty((chunk, vocab), dtype=states.dtype, device=states.device)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            of_logits = logits[: part.stop - start]
            torch.mm(states[part], weight.t(), out=of_logits)
            torch.mm(of_logits, weight, out=of_states[part])
            if of_weight is not None:
                of_weight.addmm_(of_logits.t(), states[part])
        del logits, of_logits
        ctx.save_for_backward(of_states, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        of_states, of_weight = ctx.saved_tensors
        return of_states, of_weight, None

"""The loss of a traced step, for each implementation of it (memcore.scenario.losses says whose each is).

Worker processes only: imports torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from memcore.activations.loss import fused_chunk
from memcore.scenario import Loss, Upcast
from memcore.trace.request import Request

# What makes a compiled function of one.
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def loss_of(
    model: Any, tokens: torch.Tensor, request: Request, compiled: Compile = lambda function: function
) -> tuple[torch.Tensor, Any]:
    """Run the model's forward and the loss. Returns the loss, and the outputs, logits included, that a training loop
    may hold until the backward is done. `compiled` is for the loss function alone."""
    kind, upcast = Loss(request.loss), request.upcast
    of_logits = compiled(_of_logits)
    if kind is Loss.FUSED:
        return _fused(model, tokens, in_fp32=upcast is Upcast.LOSS, shifted_copy=request.shifted_copy), None
    if kind is Loss.CHUNKED:
        return _chunked(model, tokens, request.loss_chunks, upcast, of_logits)
    if kind is Loss.UNFUSED and upcast is Upcast.LOSS and not (request.shifted_copy or request.loss_compiled):
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        return output.loss, output
    with _decoder_output_held(model) if request.shifted_copy else nullcontext():
        logits = model(input_ids=tokens, use_cache=False).logits
        if upcast is Upcast.MODEL:
            logits = logits.float()
        return _cross_entropy(logits, tokens, request, of_logits), logits


@contextmanager
def _decoder_output_held(model: Any) -> Iterator[None]:
    """Keep what the decoder returns until the block ends: the transformers that copied shifted logits did so within the
    model's forward, whose variables hold the hidden states (4.45.2, modeling_llama.py, LlamaForCausalLM.forward)."""
    held: list[Any] = []
    hook = model.get_decoder().register_forward_hook(lambda _module, _args, output: held.append(output))
    try:
        yield
    finally:
        hook.remove()
        held.clear()


def hidden_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The decoder's last hidden states."""
    states: torch.Tensor = model.get_decoder()(input_ids=tokens, use_cache=False)[0]
    return states


def _of_logits(logits: torch.Tensor, labels: torch.Tensor, *, in_fp32: bool, reduction: str = "mean") -> torch.Tensor:
    """The cross entropy of some logits, cast to FP32 or as they are."""
    return functional.cross_entropy(logits.float() if in_fp32 else logits, labels, reduction=reduction)


def _cross_entropy(
    outputs: torch.Tensor, tokens: torch.Tensor, request: Request, of_logits: Callable[..., Any]
) -> torch.Tensor:
    """The loss function on all logits. What it makes of them is held until it returns.

    Sources: transformers 4.48.1, loss/loss_utils.py, ForCausalLMLoss; litgpt 0.5, utils.py, chunked_cross_entropy, of
    chunks the log-softmaxes of which autograd keeps.
    """
    kind, in_fp32 = Loss(request.loss), request.upcast is Upcast.LOSS
    if kind is Loss.UNFUSED and request.loss_compiled:
        flat, labels = outputs.view(-1, outputs.shape[-1]), tokens.view(-1)
        compiled: torch.Tensor = of_logits(flat, labels, in_fp32=in_fp32)
        return compiled
    whole = kind is not Loss.CHUNKED_CE
    logits = outputs.float() if request.upcast is Upcast.LOSS and whole else outputs
    shifted = logits[:, :-1].contiguous() if request.shifted_copy else logits
    labels = tokens[:, 1:].contiguous() if request.shifted_copy else tokens
    flat, labels = shifted.view(-1, logits.shape[-1]), labels.view(-1)
    if kind is Loss.FUSED_CE:
        loss: torch.Tensor = _FusedLoss.apply(flat, labels)  # type: ignore[no-untyped-call]
        return loss.sum() / labels.numel()
    if whole:
        return functional.cross_entropy(flat, labels)
    num = request.loss_chunks
    losses = [
        of_logits(chunk, its_labels, in_fp32=in_fp32, reduction="none")
        for chunk, its_labels in zip(flat.chunk(num), labels.chunk(num), strict=True)
    ]
    return torch.cat(losses).sum() / labels.numel()


def _chunked(
    model: Any, tokens: torch.Tensor, num_chunks: int, upcast: Upcast, of_logits: Callable[..., Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The head on one chunk of tokens after the other, then the sum of their losses.

    Source: torchtune, modules/transformer.py, TransformerDecoder.chunked_output; modules/loss/
    ce_chunked_output_loss.py, CEWithChunkedOutputLoss. litgpt's chunks are of 128 tokens each but for
    the last (model.py, GPT.forward: lm_head_chunk_size); here they are of equal length.
    """
    head = model.get_output_embeddings()
    logits = [head(chunk) for chunk in hidden_of(model, tokens).chunk(num_chunks, dim=1)]
    if upcast is Upcast.MODEL:
        logits = [chunk.float() for chunk in logits]
    total: Any = 0.0
    for chunk, labels in zip(logits, tokens.chunk(num_chunks, dim=1), strict=True):
        flat = chunk.reshape(-1, chunk.shape[-1])
        total = total + of_logits(flat, labels.reshape(-1), in_fp32=upcast is Upcast.LOSS, reduction="sum")
        del flat
    return total / tokens.numel(), logits


class _FusedLoss(torch.autograd.Function):
    """A cross entropy that keeps its logits, and writes their gradient over them.

    Source: unsloth, kernels/cross_entropy_loss.py, Fast_CrossEntropyLoss, as fms-acceleration has it; of Megatron-LM,
    core/tensor_parallel/cross_entropy.py, it is the softmax in FP32 that takes the logits' place.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = logits.shape[0]
        losses, sums = (torch.empty(tokens, dtype=torch.float32, device=logits.device) for _each in range(2))
        ctx.save_for_backward(logits, sums, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0], None


def _fused(model: Any, tokens: torch.Tensor, *, in_fp32: bool, shifted_copy: bool) -> torch.Tensor:
    head: nn.Module = model.get_output_embeddings()
    states = hidden_of(model, tokens)
    # Held beside their copy, as the forward does that this stands for.
    shifted, labels = (states[:, :-1].contiguous(), tokens[:, 1:].contiguous()) if shifted_copy else (states, tokens)
    flat = shifted.reshape(-1, states.shape[-1])
    loss: torch.Tensor = _FusedLinearLoss.apply(flat, head.weight, labels.reshape(-1), in_fp32)  # type: ignore[no-untyped-call]
    return loss


class _FusedLinearLoss(torch.autograd.Function):
    """Head and loss in one: the gradients are made in the forward, one chunk of logits at a time, whose gradient
    overwrites them. A chunk's last logits are held while the next ones are made.

    Source: Liger Kernel, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward: 0.7, and with
    `in_fp32` 0.3.1, where each chunk is cast to FP32 and back, and scaled into a copy.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, in_fp32: bool
    ) -> torch.Tensor:
        tokens, (vocab, hidden) = states.shape[0], weight.shape
        chunk = fused_chunk(tokens, vocab, hidden)
        of_states = torch.zeros_like(states)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=states.device)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            logits = states[part] @ weight.t()
            if in_fp32:
                computed = logits.dtype
                logits = logits.float()
                logits = logits.to(computed)
                of_logits = logits * 1.0
            else:
                of_logits = logits
            of_states[part] = of_logits @ weight
            if of_weight is not None and in_fp32:
                torch.addmm(of_weight, logits.t(), states[part], out=of_weight)
            elif of_weight is not None:
                of_weight += torch.mm(of_logits.t(), states[part]).float()
        ctx.save_for_backward(of_states, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        of_states, of_weight = ctx.saved_tensors
        return of_states, of_weight, None, None

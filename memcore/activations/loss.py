"""Logits and loss in closed form, for each implementation of the loss.

Symbols: T tokens of a micro-batch, V vocabulary, h hidden size, w bytes of the dtype of the computation, u bytes of the
logits that the cross entropy sees, T_c tokens of a chunk.
"""

from memcore.scenario import IN_CHUNKS, Loss, Upcast, Workload
from memcore.terms import Formula
from memcore.units import ceil_div

_FUSED_SOURCES = {
    True: "Liger Kernel 0.3.1, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward",
    False: "Liger Kernel 0.7, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward",
}
_SOURCES = {
    Loss.CHUNKED: "torchtune, modules/loss/ce_chunked_output_loss.py, CEWithChunkedOutputLoss, not compiled",
    Loss.CHUNKED_CE: "litgpt 0.5, utils.py, chunked_cross_entropy; torch log_softmax and its backward",
    Loss.UNFUSED: "transformers 5.24, loss/loss_utils.py, ForCausalLMLoss; torch log_softmax and its backward",
    Loss.FUSED_CE: "unsloth, kernels/cross_entropy_loss.py, Fast_CrossEntropyLoss",
}


def loss_bytes(
    workload: Workload, vocab: int, hidden: int, width: int, *, trains_head: bool = True, softcap: bool = False
) -> tuple[int, Formula, str]:
    """Bytes of logits and loss at their peak, the formula and its source.

    Unfused: in the forward the model's logits, an FP32 and a shifted copy where there are, and the log-softmax; in the
    backward log-softmax, its gradient and the logits' gradient, and the logits where the loop keeps them. Measured with
    torch 2.13, labels shifted: 10 bytes a logit in the forward, 12 at the peak, 14 with the outputs held. `softcap`:
    the logits pass a tanh, whose result stays for the backward. In chunks: the same of one chunk beside the
    log-softmaxes of all; measured in BF16 with 8 chunks, head included: 6.5 and 7.0. Fused cross entropy: the gradient
    is in the logits' place; it is cast back, or laid out over all tokens where they were shifted. Fused with the head:
    a chunk's logits and the last ones', their gradient, the gradient of the hidden states and, where the head is
    trained, the head's. Left out: a trained head's second gradient, which may be more where chunks in 16 bit are held.
    """
    tokens = workload.micro_batch * workload.seq_len
    if workload.loss is Loss.FUSED:
        return _fused(workload, tokens, vocab, hidden, width, trains_head=trains_head)
    each, in_chunk = _per_logit(workload, width)
    each += width if softcap else 0
    source = _SOURCES[workload.loss]
    if not in_chunk:
        return each * tokens * vocab, product_formula(rf"{each}\,T\,V", each, tokens, vocab), source
    num = workload.num_loss_chunks
    chunk = ceil_div(tokens, num)
    numbers = f"{each} × {tokens:,} × {vocab:,} + {in_chunk} × {chunk:,} × {vocab:,}"
    symbols = rf"{each}\,T\,V + {in_chunk}\,\lceil T / {num} \rceil\,V"
    return each * tokens * vocab + in_chunk * chunk * vocab, Formula(symbols=symbols, numbers=numbers), source


def held_width(workload: Workload, width: int) -> int:
    """Bytes of each logit that the loop holds through the backward."""
    if not workload.logits_retained or workload.loss is Loss.FUSED:
        return 0
    return max(width, 4) if workload.upcast is Upcast.MODEL else width


def _per_logit(workload: Workload, width: int) -> tuple[int, int]:
    """Bytes of each logit, and of each of one chunk's, at the fuller of two moments: the end of the loss function, and
    the first gradient of the logits."""
    upcast, copied = workload.upcast, workload.shifted_copy
    made = max(width, 4) if upcast is Upcast.MODEL else width
    seen = width if upcast is Upcast.NONE else max(width, 4)
    cast = seen if seen != made else 0
    held = held_width(workload, width)
    # A fused cross entropy's gradient is in the place of what it was given, which may be the model's own logits.
    beside = held if copied or cast else 0
    again = seen if copied else width if seen != width else 0
    moments = {
        Loss.UNFUSED: [(made + cast + copied * seen + seen, 0), (held + 3 * seen, 0)],
        Loss.CHUNKED_CE: [(made + copied * made + seen, cast), (held + seen, 2 * seen), (held + 2 * made, 0)],
        Loss.CHUNKED: [(made + seen, cast), (held + seen, 2 * seen)],
        Loss.FUSED_CE: [(made + cast + copied * seen, 0), (beside + seen + again, 0)],
    }[workload.loss]
    num = workload.num_loss_chunks if workload.loss in IN_CHUNKS else 1
    return max(moments, key=lambda moment: moment[0] * num + moment[1])


def _fused(
    workload: Workload, tokens: int, vocab: int, hidden: int, width: int, *, trains_head: bool
) -> tuple[int, Formula, str]:
    """Liger Kernel's loss, in the forward, where all is made."""
    chunk = fused_chunk(tokens, vocab, hidden)
    several, in_fp32 = chunk < tokens, workload.upcast is Upcast.LOSS
    head = vocab * hidden
    states = tokens * hidden * (2 if workload.shifted_copy else 1)
    logits = chunk * vocab
    if in_fp32:
        # A chunk and its FP32 copy, beside the last one's gradient; or the chunk, its gradient and the last one's.
        moments = [(width + (4 if width < 4 else 0) + (width if several else 0)) * logits]
        moments.append((3 if several else 2) * width * logits)
    else:
        moments = [(2 if several else 1) * width * logits]
        if trains_head:
            moments.append(width * logits + (width + (4 if width < 4 else 0)) * head)
    lasting = width * (states + (head if trains_head else 0))
    most = max(moments)
    symbols = r"w\,T\,h + " + (r"w\,V\,h + " if trains_head else "") + r"A_{chunk}"
    return lasting + most, Formula(symbols=symbols, numbers=f"{lasting:,} + {most:,}"), _FUSED_SOURCES[in_fp32]


def fused_chunk(tokens: int, vocab: int, hidden: int) -> int:
    """Tokens of one chunk of Liger Kernel's loss: as many chunks as the vocabulary is wider than the hidden size, each
    the next power of two of T / ceil(V / h)."""
    each = ceil_div(tokens, ceil_div(vocab, hidden))
    return min(1 << (each - 1).bit_length(), tokens)


def product_formula(symbols: str, *factors: int) -> Formula:
    """A formula whose numbers are one product."""
    return Formula(symbols=symbols, numbers=" × ".join(f"{factor:,}" for factor in factors))

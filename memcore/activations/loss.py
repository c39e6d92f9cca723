"""Logits and loss in closed form, for each implementation of the loss.

Symbols: T tokens of a micro-batch, V vocabulary, h hidden size, w bytes of the dtype of the computation.
"""

from memcore.scenario import Workload
from memcore.terms import Formula
from memcore.units import ceil_div

# Liger Kernel's fused linear cross-entropy makes the logits of a chunk of tokens at a time: as many chunks as
# the vocabulary is wider than the hidden size (liger_kernel/ops/fused_linear_cross_entropy.py).
_FUSED_SOURCE = "Liger Kernel, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward"
_CHUNKED_SOURCE = "torchtune, modules/loss/ce_chunked_output_loss.py, CEWithChunkedOutputLoss: 8 chunks, not compiled"
_UNFUSED_SOURCE = (
    "transformers 5.24, loss/loss_utils.py, ForCausalLMLoss: logits.float(); torch log_softmax and its backward"
)
NUM_LOSS_CHUNKS = 8


def loss_bytes(
    workload: Workload, vocab: int, hidden: int, width: int, *, trains_head: bool = True, softcap: bool = False
) -> tuple[int, Formula, str]:
    """Bytes of logits and loss at their peak, the formula and its source.

    Unfused: 12 bytes per logit in FP32 (log-softmax, its gradient, the logits' gradient), and the logits
    themselves where the loop keeps them; measured with torch 2.13: 10 in the forward, 12 at the peak, 14 with
    the outputs held. `softcap`: the logits pass a tanh, whose result stays for the backward. Chunked, without a
    compiler: the whole logits, every chunk's FP32 log-softmax, which autograd keeps, and one chunk's FP32 copy, or
    in the backward, where the logits are held, two gradients of a chunk; measured in BF16: 6.5 and 7.0. Fused: one
    chunk's logits, which their gradient overwrites, the gradient of the hidden states and, where the head is trained,
    the head's.
    """
    tokens = workload.micro_batch * workload.seq_len
    if workload.loss == "unfused":
        each = 12 + (width if workload.logits_retained else 0) + (width if softcap else 0)
        return each * tokens * vocab, product_formula(rf"{each}\,T\,V", each, tokens, vocab), _UNFUSED_SOURCE
    if workload.loss == "chunked":
        chunk = ceil_div(tokens, NUM_LOSS_CHUNKS)
        passing = 8 if workload.logits_retained else 4 if width < 4 else 0
        total = (width + 4) * tokens * vocab + passing * chunk * vocab
        numbers = f"{width + 4} × {tokens:,} × {vocab:,} + {passing} × {chunk:,} × {vocab:,}"
        symbols = rf"(w + 4)\,T\,V + {passing}\,\lceil T / {NUM_LOSS_CHUNKS} \rceil\,V"
        return total, Formula(symbols=symbols, numbers=numbers), _CHUNKED_SOURCE
    chunk = fused_chunk(tokens, vocab, hidden)
    total = width * (chunk * vocab + tokens * hidden)
    symbols, numbers = r"w\,(T_c\,V + T\,h)", f"{width} × ({chunk:,} × {vocab:,} + {tokens:,} × {hidden:,})"
    if trains_head:
        total += width * vocab * hidden
        symbols, numbers = rf"{symbols} + w\,V\,h", f"{numbers} + {width} × {vocab:,} × {hidden:,}"
    return total, Formula(symbols=symbols, numbers=numbers), _FUSED_SOURCE


def fused_chunk(tokens: int, vocab: int, hidden: int) -> int:
    """Tokens of one chunk: the next power of two of T / ceil(V / h)."""
    each = ceil_div(tokens, ceil_div(vocab, hidden))
    return min(1 << (each - 1).bit_length(), tokens)


def product_formula(symbols: str, *factors: int) -> Formula:
    """A formula whose numbers are one product."""
    return Formula(symbols=symbols, numbers=" × ".join(f"{factor:,}" for factor in factors))

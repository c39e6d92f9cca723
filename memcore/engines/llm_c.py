"""llm.c, a GPT-2 trainer in CUDA without PyTorch: every state is taken once, whole or, at stage 1, in slices.

Source: github.com/karpathy/llm.c f1e2ace6 (May 2025), train_gpt2.cu, gpt2_allocate_state: gradients whole on every rank
and never freed, reduced in place; momentum, variance and the FP32 copy by shard_num_parameters. Its step has a kernel
for each tensor (llmc/adamw.cuh), which makes nothing. Activations are in memcore.activations.llm_c.
"""

from memcore.engines.base import Inputs, resident
from memcore.terms import Category, Formula, Term, product
from memcore.units import MIB

_WORKSPACE_BYTES = 32 * MIB


def terms(inputs: Inputs) -> list[Term]:
    """The terms of one rank. Slices are equal, or there are none (llmc/zero.cuh, set_zero_configs)."""
    states = inputs.states
    whole = bool(states.n_params % inputs.ranks)
    kept = [resident(inputs, state, state.total_bytes if whole else None) for state in states.states]
    return [*kept, _workspace()]


def _workspace() -> Term:
    return Term(
        name="cublas_workspace",
        category=Category.WORKSPACE,
        bytes_at=_WORKSPACE_BYTES,
        formula=Formula(symbols="W", numbers=product(_WORKSPACE_BYTES)),
        source="llm.c f1e2ace6, llmc/cublas_common.h, cublaslt_workspace_size",
    )

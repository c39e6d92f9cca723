"""PyTorch DistributedDataParallel: every rank holds everything, and the reducer a second set of gradients.

Source: torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::initialize_buckets: each bucket owns one
flat tensor of its gradients, made when the model is wrapped. gradient_as_bucket_view=True (not the default)
makes the gradients views of it.
"""

from memcore.engines import single
from memcore.engines.base import Inputs
from memcore.terms import Category, Formula, Term, product


def terms(inputs: Inputs) -> list[Term]:
    """The terms of one DDP rank: those of a single GPU, and the reducer's buckets."""
    states = inputs.states
    dtype = states.trained_as.grad_dtype
    buckets = Term(
        name="ddp_buckets",
        category=Category.COMMUNICATION,
        bytes_at=states.trained * dtype.size,
        formula=Formula(symbols=rf"{dtype.size}\,\Psi_t", numbers=product(dtype.size, states.trained)),
        source="torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::initialize_buckets",
    )
    return [*single.terms(inputs), buckets]

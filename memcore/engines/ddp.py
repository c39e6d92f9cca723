"""PyTorch DistributedDataParallel: every rank holds everything, and the reducer a second set of gradients.

Source: torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::initialize_buckets: each bucket owns one
flat tensor of its gradients, made when the model is wrapped. gradient_as_bucket_view=True (not the default)
makes the gradients views of it.
"""

from memcore.engines import single
from memcore.engines.base import Inputs, newest_gradient
from memcore.scenario import DdpConfig
from memcore.terms import Category, Formula, Term, product


def terms(inputs: Inputs) -> list[Term]:
    """The terms of one DDP rank: those of a single GPU, and the reducer's buckets.

    As views of the buckets, gradients are never freed: the buckets stay, and nothing comes on top of them.
    """
    states, config = inputs.states, inputs.scenario.engine_config
    plain = single.terms(inputs)
    dtype = states.trained_as.grad_dtype
    if isinstance(config, DdpConfig) and config.gradient_as_bucket_view:
        plain = [term for term in plain if term.category is not Category.GRADIENTS]
        plain += newest_gradient(inputs, dtype.size)
    buckets = Term(
        name="ddp_buckets",
        category=Category.COMMUNICATION,
        bytes_at=states.trained * dtype.size,
        formula=Formula(symbols=rf"{dtype.size}\,\Psi_t", numbers=product(dtype.size, states.trained)),
        source="torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::initialize_buckets",
    )
    return [*plain, buckets]

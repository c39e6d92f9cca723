"""What each engine really allocates on one rank during a step. One file per engine; this is their register.

An engine turns the undivided states into terms: how its slices are padded, when gradients are alive, and
which buffers exist beside them. The paper's theory, without any of that, is :mod:`memcore.zero`.
"""

from collections.abc import Callable, Mapping

from memcore.engine_options import EngineName
from memcore.engines import ddp, deepspeed, fsdp1, fsdp2, llm_c, single
from memcore.engines.base import Inputs
from memcore.engines.starting import start_peak
from memcore.terms import Term

ENGINE_TERMS: Mapping[EngineName, Callable[[Inputs], list[Term]]] = {
    EngineName.SINGLE: single.terms,
    EngineName.DDP: ddp.terms,
    EngineName.FSDP1: fsdp1.terms,
    EngineName.FSDP2: fsdp2.terms,
    EngineName.DEEPSPEED: deepspeed.terms,
    EngineName.LLM_C: llm_c.terms,
}

__all__ = ["ENGINE_TERMS", "Inputs", "start_peak"]

"""DeepSpeed's ZeRO stages: slices, gradients through the backward, buckets, and the step's copies.

Read from deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py, fp16/fused_optimizer.py)
and held against real runs of it on two and four CPU ranks, gloo's own staging left out: docs/engines.md.
"""

from memcore.engines.base import Inputs
from memcore.engines.deepspeed import stage_0, stage_3, stages_12
from memcore.engines.deepspeed.plan import Plan, kept, padding, slice_elements
from memcore.terms import Term

_BY_STAGE = {0: stage_0.terms, 1: stages_12.stage_1, 2: stages_12.stage_2, 3: stage_3.terms}


def terms(inputs: Inputs) -> list[Term]:
    """The terms of one DeepSpeed rank at the scenario's stage: the fullest rank."""
    plan = Plan(
        inputs=inputs,
        config=inputs.scenario.zero_config,
        slice_elements=slice_elements(inputs) if inputs.stage else inputs.states.trained,
        grad_bytes=inputs.states.trained_as.grad_dtype.size,
    )
    return [*kept(plan), *padding(plan), *_BY_STAGE[inputs.stage](plan)]

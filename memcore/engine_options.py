"""What each engine can be asked for: the part of an engine that a scenario needs to be checked against.

What an engine then allocates is in :mod:`memcore.engines`, one file per engine.
"""

from dataclasses import dataclass
from enum import StrEnum

from memcore.recipes import ConventionName


class EngineName(StrEnum):
    """The engines that are predicted."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    LLM_C = "llm_c"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What a scenario may set for an engine.

    `stages`: the ZeRO stages that can be chosen; empty where the engine has none, and then
    `fixed_stage` says which one it amounts to (0 nothing divided, 3 everything divided).
    `conventions`: those that a training loop with it can have as its documentation writes it, its own first;
    `for_adapters` is its own where the weights are frozen, which are loaded in 16 bit then.
    """

    label: str
    conventions: tuple[ConventionName, ...]
    for_adapters: ConventionName = ConventionName.PURE_BF16
    stages: tuple[int, ...] = ()
    fixed_stage: int = 0
    shards: bool = False
    replicates: bool = False
    offloads: bool = False
    default_implementation: str = "foreach"


# torch's optimizers update the parameters themselves: 16-bit ones have no FP32 master copy, and full training in mixed
# precision keeps FP32 parameters, cast by autocast (torch 2.13, amp/autocast_mode.py) or by FSDP as it gathers them.
_IN_ONE_DTYPE = (ConventionName.FP32, ConventionName.PURE_BF16, ConventionName.PURE_FP16)
_CAST = (ConventionName.AMP_AUTOCAST, *_IN_ONE_DTYPE)
_GATHERED = (ConventionName.FSDP2_MIXED, *_IN_ONE_DTYPE)

ENGINE_OPTIONS = {
    EngineName.SINGLE: EngineOptions(label="single GPU", conventions=_CAST),
    EngineName.DDP: EngineOptions(label="PyTorch DDP", conventions=_CAST, replicates=True),
    EngineName.FSDP1: EngineOptions(
        label="PyTorch FSDP1", conventions=_GATHERED, fixed_stage=3, shards=True, replicates=True
    ),
    EngineName.FSDP2: EngineOptions(
        label="PyTorch FSDP2",
        # Without a MixedPrecisionPolicy FP32 weights are gathered, and autocast casts them.
        conventions=(*_GATHERED, ConventionName.AMP_AUTOCAST),
        fixed_stage=3,
        shards=True,
        replicates=True,
    ),
    EngineName.DEEPSPEED: EngineOptions(
        label="DeepSpeed",
        # By the sections bf16, data_types and torch_autocast of its file, or none of them (deepspeed 0.19.8,
        # runtime/engine.py, _configure_optimizer; runtime/torch_autocast.py).
        conventions=(
            ConventionName.ZERO_PAPER,
            ConventionName.DEEPSPEED_FP32_GRAD,
            ConventionName.AMP_AUTOCAST,
            ConventionName.FP32,
        ),
        # It casts adapters with the rest, and keeps a master copy of them.
        for_adapters=ConventionName.ZERO_PAPER,
        stages=(0, 1, 2, 3),
        shards=True,
        offloads=True,
        # DeepSpeed's own default is its FusedAdam (deepspeed 0.19.8, runtime/engine.py,
        # _configure_basic_optimizer), which makes no temporaries.
        default_implementation="fused",
    ),
    EngineName.LLM_C: EngineOptions(
        label="llm.c",
        # With -w 1, its default, and where it was compiled for FP32 (f1e2ace6, train_gpt2.cu and Makefile, PRECISION).
        conventions=(ConventionName.ZERO_PAPER, ConventionName.FP32),
        stages=(0, 1),
        shards=True,
        default_implementation="fused",
    ),
}


# In place of a convention's name: the one that a training loop with the engine has of its own.
ENGINES_OWN = "engine"


def own_convention(engine: EngineName, *, adapts: bool, bare: bool, fp8: bool) -> ConventionName:
    """What `ENGINES_OWN` stands for.

    `adapts`: the weights are frozen under adapters. `bare`: a number of parameters is all that is known, without
    layers to cast or gather. What is asked of it is the ZeRO paper's arithmetic, 2 + 2 + 12 bytes for any engine.
    `fp8`: products in float8, which take BF16 weights where autocast would cast FP32 ones.
    """
    if bare:
        return ConventionName.ZERO_PAPER
    options = ENGINE_OPTIONS[engine]
    own = options.for_adapters if adapts else options.conventions[0]
    return ConventionName.PURE_BF16 if fp8 and own is ConventionName.AMP_AUTOCAST else own

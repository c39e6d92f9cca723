"""What each engine can be asked for: the part of an engine that a scenario needs to be checked against.

What an engine then allocates is in :mod:`memcore.engines`, one file per engine.
"""

from dataclasses import dataclass
from enum import StrEnum


class EngineName(StrEnum):
    """The engines that are predicted."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What a scenario may set for an engine.

    `stages`: the ZeRO stages that can be chosen; empty where the engine has none, and then
    `fixed_stage` says which one it amounts to (0 nothing divided, 3 everything divided).
    """

    label: str
    stages: tuple[int, ...] = ()
    fixed_stage: int = 0
    shards: bool = False
    replicates: bool = False
    offloads: bool = False
    default_implementation: str = "foreach"


ENGINE_OPTIONS = {
    EngineName.SINGLE: EngineOptions(label="single GPU"),
    EngineName.DDP: EngineOptions(label="PyTorch DDP", replicates=True),
    EngineName.FSDP1: EngineOptions(label="PyTorch FSDP1", fixed_stage=3, shards=True, replicates=True),
    EngineName.FSDP2: EngineOptions(label="PyTorch FSDP2", fixed_stage=3, shards=True, replicates=True),
    EngineName.DEEPSPEED: EngineOptions(
        label="DeepSpeed",
        stages=(0, 1, 2, 3),
        shards=True,
        offloads=True,
        # DeepSpeed's own default is its FusedAdam (deepspeed 0.19.8, runtime/engine.py,
        # _configure_basic_optimizer), which makes no temporaries.
        default_implementation="fused",
    ),
}

"""An engine's own settings, as far as memory depends on them: one model per engine."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from memcore.engine_options import EngineName
from memcore.scenario.fields import (
    Degree,
    Part,
    Whole,
)
from memcore.units import MAX_PARAMS


class ZeroConfig(Part):
    """The keys of a ds_config's ``zero_optimization`` that are read today; sizes are in elements.

    Defaults are DeepSpeed 0.19.8's (runtime/zero/config.py, DeepSpeedZeroConfig).
    """

    stage: Annotated[Whole, Field(ge=0, le=3)] | None = None
    reduce_bucket_size: Annotated[Whole, Field(ge=1, le=MAX_PARAMS)] = 500_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    sub_group_size: Annotated[Whole, Field(ge=1, le=MAX_PARAMS)] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[Whole, Field(ge=0, le=MAX_PARAMS)] = 50_000_000
    stage3_max_live_parameters: Annotated[Whole, Field(ge=0, le=MAX_PARAMS)] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[Whole, Field(ge=0, le=MAX_PARAMS)] = 1_000_000_000
    stage3_param_persistence_threshold: Annotated[Whole, Field(ge=0, le=MAX_PARAMS)] = 100_000
    stage3_model_persistence_threshold: Annotated[Whole, Field(ge=0, le=2**63 - 1)] = 2**63 - 1
    zero_hpz_partition_size: Degree = 1


class DeepSpeedConfig(Part):
    """The part of a ds_config that decides memory."""

    zero_optimization: ZeroConfig = ZeroConfig()


class Fsdp1Config(Part):
    """How FSDP1 (FullyShardedDataParallel) is applied, a unit per decoder layer, with torch's names.

    Ranks that do not divide the states among them (`dp_shard` 1) have NO_SHARD, with whole flat tensors; groups of
    ranks that do (`dp_replicate` too) have HYBRID_SHARD. `reshard_after_forward`: FULL_SHARD, or else SHARD_GRAD_OP,
    of which NO_SHARD knows nothing. `use_orig_params`: parameters stay tensors of their own, views of a unit's flat
    one. `backward_prefetch`: the next unit is gathered before a unit's gradients are computed, after it, or not ahead;
    `forward_prefetch`: before a unit's forward too. `adapters`: each of their matrices a unit of its own, as peft's
    policy has it ("apart", the default), in its layer's unit ("inside"), or whole on every rank ("ignored").
    `no_sync`: of several micro-steps the last alone reduces gradients. `checkpoint_around_units`: a recomputed layer's
    checkpoint lies around its unit, which is gathered once more for it, as under Hugging Face's Trainer before
    transformers 5. `autocast`: the forward runs under torch's autocast besides, as accelerate has it. `cpu_offload`:
    shards, their gradients and optimizer states are on the host.
    """

    reshard_after_forward: bool = True
    use_orig_params: bool = True
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: bool = False
    adapters: Literal["apart", "inside", "ignored"] | None = None
    no_sync: bool = False
    checkpoint_around_units: bool = False
    autocast: bool = False
    cpu_offload: bool = False


class Fsdp2Config(Part):
    """How FSDP2 is applied, a unit per decoder layer. Without `reshard_after_forward` a layer stays gathered from
    its forward to its backward; with it `reshard_exception` names what stays so all the same. `fsdp_units`: all but the
    layers is the root's, or the embedding is a unit, and the final norm with the head one. `cpu_offload`: torch's
    CPUOffloadPolicy, which keeps shards, their gradients and optimizer states on the host.
    `enable_fsdp_float8_all_gather`: torchao's option of that name: the weights of recipe.fp8's modules are gathered in
    float8."""

    reshard_after_forward: bool = True
    reshard_exception: Literal["last_block", "head", "last_block+head"] | None = None
    fsdp_units: Literal["block_root", "block_embed_head"] = "block_root"
    cpu_offload: bool = False
    enable_fsdp_float8_all_gather: bool = False

    def reshards(self, unit: str) -> bool:
        """Whether a unit is resharded after its forward: a "block", the "last_block", the "embedding" or the "head"."""
        return self.reshard_after_forward and unit not in (self.reshard_exception or "").split("+")


class LlmcConfig(Part):
    """llm.c's options: `recompute` (-r): nothing, GELU, or GELU and norms are run again in the backward. `layout`: the
    program of May 2025, or as it was a year before."""

    recompute: Literal[0, 1, 2] = 1
    layout: Literal["2025-05", "2024-05"] = "2025-05"


class DdpConfig(Part):
    """DistributedDataParallel's arguments that decide memory."""

    gradient_as_bucket_view: bool = False


EngineConfig = DeepSpeedConfig | Fsdp1Config | Fsdp2Config | DdpConfig | LlmcConfig
ENGINE_CONFIGS: Mapping[EngineName, type[EngineConfig]] = {
    EngineName.DEEPSPEED: DeepSpeedConfig,
    EngineName.FSDP1: Fsdp1Config,
    EngineName.FSDP2: Fsdp2Config,
    EngineName.DDP: DdpConfig,
    EngineName.LLM_C: LlmcConfig,
}

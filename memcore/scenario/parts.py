"""The parts of a scenario, each with defaults but the model."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.hardware import accelerator
from memcore.i18n import gettext as _
from memcore.models import catalogue_model
from memcore.optimizers import OptimizerName
from memcore.recipes import CONVENTIONS, ConventionName, DType
from memcore.scenario.fields import (
    Degree,
    Part,
    Tokens,
    Whole,
    config_of,
    count_of,
    named_only,
    refuse,
)
from memcore.scenario.float8 import float8_recipe
from memcore.scenario.losses import DEFAULT_CHUNKS, Loss, Upcast, check_loss, usual_upcast
from memcore.scenario.synonyms import hint
from memcore.units import MAX_PARAMS

_SAVED = "attention|mm|mm_alternate|bmm|grouped_mm"
_CHECKPOINTING = re.compile(
    rf"none|full|attention|(segments|every_nth|first)\([1-9][0-9]{{0,3}}\)|save\(({_SAVED})(,({_SAVED}))*\)"
)
# Kinds for which reentrant means nothing: no layer is recomputed as a whole.
_NEVER_REENTRANT = ("none", "attention", "save")
# The modules whose adapters the fused kernel takes.
FUSED_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Method(StrEnum):
    """What is trained: every parameter, adapters, or adapters on a 4-bit base."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Device(StrEnum):
    """Where an offloaded part lives."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class Quantization(StrEnum):
    """4-bit storage of the frozen weights: bitsandbytes' NormalFloat4, its block scales in FP32 or quantised again; or
    integers as AutoGPTQ stores them."""

    NF4 = "nf4"
    NF4_DOUBLE_QUANT = "nf4_double_quant"
    GPTQ_INT4 = "gptq_int4"


class Model(Part):
    """Exactly one of a catalogue `name`, a bare parameter count `n_params`, or a Hugging Face `config`.

    `experts` of a mixture: "stacked" in one parameter and run together, as transformers 5 has them, or "separate"
    modules that run one after the other, as version 4 had them. `code`: whose code computes it.
    """

    name: str | None = Field(default=None, max_length=120)
    n_params: Annotated[int, BeforeValidator(count_of), Field(ge=1, le=MAX_PARAMS)] | None = None
    config: Annotated[Mapping[str, Any], AfterValidator(config_of)] | None = None
    experts: Literal["stacked", "separate"] = "stacked"
    code: Literal["transformers", "litgpt"] = "transformers"

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        given = [key for key in ("name", "n_params", "config") if getattr(self, key) is not None]
        if len(given) != 1:
            message = _("{field} needs exactly one of name, n_params and config; it has {given}.")
            raise refuse("model", message, given=", ".join(given) or _("none of them"))
        if self.name is not None:
            catalogue_model(self.name)
        return self

    @property
    def is_bare_count(self) -> bool:
        """Whether only a number of parameters is known, and no shapes."""
        return self.n_params is not None or (self.name is not None and catalogue_model(self.name).config is None)


def _node_size(gpus: int) -> int:
    """The largest number of GPUs up to 8 that divides all of them into whole nodes."""
    return next(size for size in range(min(8, gpus), 0, -1) if gpus % size == 0)


class Hardware(Part):
    """`gpu`: a name of the accelerator catalogue. `gpus`: all of them. `gpus_per_node`: at most 8 by default.
    `expandable_segments`: PyTorch's option of that name (PYTORCH_CUDA_ALLOC_CONF), which decides what its allocator
    reserves."""

    gpu: str = "H100-80GB"
    gpus: Degree = 1
    gpus_per_node: Degree = Field(default_factory=lambda data: _node_size(data.get("gpus", 1)))
    expandable_segments: bool = False

    @model_validator(mode="after")
    def _whole_nodes(self) -> Self:
        accelerator(self.gpu)
        if self.gpus_per_node > self.gpus or self.gpus % self.gpus_per_node:
            message = _("{field} is {per_node}, which does not divide hardware.gpus = {gpus} into whole nodes.")
            raise refuse("hardware.gpus_per_node", message, per_node=self.gpus_per_node, gpus=self.gpus)
        return self


class Parallelism(Part):
    """How the run is spread. `dp` is accepted as the product of `dp_shard` and `dp_replicate`.

    `dp_shard` ranks divide the states among them (ZeRO, FSDP); `dp_replicate` such groups hold the same.
    Tensor, pipeline, context and expert parallelism are not predicted yet: only 1 is accepted.
    """

    engine: EngineName = EngineName.SINGLE
    zero_stage: Annotated[Whole, Field(ge=0, le=3)] | None = None
    dp_shard: Degree = 1
    dp_replicate: Degree = 1
    tp: Degree = 1
    pp: Degree = 1
    vpp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1

    @property
    def dp(self) -> int:
        """All data-parallel ranks."""
        return self.dp_shard * self.dp_replicate

    @property
    def stage(self) -> int:
        """The ZeRO stage that the engine amounts to: FSDP2 divides everything, as stage 3 does."""
        return ENGINE_OPTIONS[self.engine].fixed_stage if self.zero_stage is None else self.zero_stage


class Optimizer(Part):
    """`bits` 8 is bitsandbytes' block-wise optimizer, `paged` its unified memory. `implementation` is
    torch's; None means the engine's own default. `momentum` is SGD's. `in_backward`: each parameter is stepped as soon
    as its gradient is complete, which is freed then."""

    name: OptimizerName = OptimizerName.ADAMW
    bits: Literal[8, 32] = 32
    paged: bool = False
    implementation: Literal["foreach", "fused", "for_loop"] | None = None
    momentum: bool = False
    in_backward: bool = False


class Lora(Part):
    """Adapters of `rank` on the linear modules named by `targets` ("all-linear": all but the head), their input
    dropped out at the rate `dropout`. `autocast`: the forward runs under torch's autocast, so that FP32 adapters
    compute in the dtype of the weights, as Hugging Face's Trainer has it with bf16 or fp16. `modules_to_save`: of the
    embedding and the head a whole copy is trained beside the adapters, and the original is kept, as peft has it."""

    rank: Annotated[Whole, Field(ge=1, le=65536)] = 16
    targets: tuple[Annotated[str, Field(min_length=1, max_length=80)], ...] = ("all-linear",)
    adapter_dtype: DType = DType.FP32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    autocast: bool = False
    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = ()

    @model_validator(mode="after")
    def _some_target(self) -> Self:
        if not self.targets:
            raise refuse("recipe.lora.targets", _('{field} is empty: name at least one module, or "all-linear".'))
        return self


class Recipe(Part):
    """How it is trained. `convention` fills the dtypes; an explicit dtype wins and makes it a custom one. Given as
    "engine" it is the engine's own (memcore.engine_options.own_convention).

    `quant_group_size`: how many values of a 4-bit base share a scale, -1 an output's whole column; None stands for the
    library's default (64 for NF4, which knows no other here, 128 for GPTQ). `quantize_lm_head`: the head is packed too,
    as where every linear module is replaced. `keeps_packed_inputs`: each product with an NF4 weight keeps its input for
    the backward, as bitsandbytes did before 0.43.2 (of July 2024). `fp32_norms`: the frozen norms are kept in FP32, as
    peft's prepare_model_for_kbit_training leaves them: their results, and what packed modules make of these, are too.
    `fp8`: linear modules multiply in float8 by this recipe of torchao (memcore.scenario.float8), None: they do not.
    `fp8`: linear modules multiply in float8.
    """

    method: Method = Method.FULL
    convention: ConventionName = ConventionName.ZERO_PAPER
    param_dtype: DType | None = None
    compute_dtype: DType | None = None
    grad_dtype: DType | None = None
    reduce_dtype: DType | None = None
    master_dtype: DType | Literal["none"] | None = None
    state_dtype: DType | None = None
    optimizer: Annotated[Optimizer, BeforeValidator(named_only)] = Optimizer()
    quantization: Quantization | None = None
    quant_group_size: Literal[-1, 32, 64, 128] | None = None
    quantize_lm_head: bool = False
    keeps_packed_inputs: bool = False
    fp32_norms: bool = False
    lora: Lora | None = None
    fp8: Annotated[str | None, BeforeValidator(float8_recipe)] = None

    @property
    def stored_dtype(self) -> DType:
        """What weights are stored in: the explicit dtype, or the convention's."""
        return self.param_dtype or CONVENTIONS[self.convention].param_dtype

    @property
    def computed_dtype(self) -> DType:
        """What is computed in, likewise."""
        return self.compute_dtype or CONVENTIONS[self.convention].compute_dtype


class Offload(Part):
    """What leaves the GPU, and to where."""

    optimizer: Device = Device.NONE
    parameters: Device = Device.NONE
    activations: Literal[Device.NONE, Device.CPU] = Device.NONE


class Workload(Part):
    """What one step processes. `micro_batch` sequences of `seq_len` tokens per GPU and micro-step.

    `checkpointing`: none, full (every layer), segments(k) (groups of k layers, one kept input each),
    every_nth(n) (each n-th layer recomputed), first(n), attention (its scores only), save(...) (every layer, but
    for the results of the operations named: attention, mm, mm_alternate (every second of them), bmm, grouped_mm).
    `reentrant`: torch's reentrant checkpoint. Of the loss, see memcore.scenario.losses: `loss_chunks`: into how many
    chunks its tokens are cut, where it has chunks (None: 8). `logits_upcast`: where logits become FP32 (None: what is
    usual for the loss). `shifted_copy`: logits are shifted against their labels by a copy, of a fused loss the hidden
    states. `logits_retained`: the loop keeps the model's output, logits included, until the backward is done.
    `use_cache`: the output holds every layer's keys and values too, as for generation, until the loss is known; Hugging
    Face's classes switch that off where they recompute, but for GPTBigCode's of transformers 4.
    `last_loss_held`: the loop's variables hold the last step's loss, and with it that step's graph, until the next loss
    is there.
    `fused_kernels`: which of a layer's operations run as one kernel each, which keeps less and writes gradients in
    place: rmsnorm, rope (rotary embeddings), swiglu (a gated SiLU), lora (adapters on q_proj, k_proj, v_proj, o_proj).
    `compile`: each decoder layer is compiled by itself (torch.compile), with its checkpoint inside.
    `loss_compiled`: so is the loss function, or that of a chunk.
    """

    micro_batch: Tokens = 1
    seq_len: Tokens = 4096
    grad_accum: Tokens = 1
    attention: Literal["flash", "eager", "memory_efficient"] = "flash"
    checkpointing: str = "none"
    reentrant: bool = False
    loss: Loss = Loss.UNFUSED
    loss_chunks: Annotated[Whole, Field(ge=1, le=65536)] | None = None
    logits_upcast: Upcast | None = None
    shifted_copy: bool = False
    logits_retained: bool = False
    use_cache: bool = False
    last_loss_held: bool = False
    fused_kernels: tuple[Literal["rmsnorm", "rope", "swiglu", "lora"], ...] = ()
    compile: bool = False
    loss_compiled: bool = False

    @model_validator(mode="after")
    def _known_checkpointing(self) -> Self:
        if not _CHECKPOINTING.fullmatch(self.checkpointing):
            message = _(
                "{field} is {value!r}; allowed are none, full, attention, segments(k), every_nth(n) and first(n) with "
                "a whole number above 0, and save(...) with some of attention, mm, mm_alternate, bmm and grouped_mm."
            )
            kinds = ("none", "full", "attention", "segments(k)", "every_nth(n)", "first(n)", "save(mm)")
            found = hint("workload.checkpointing", self.checkpointing, kinds)
            raise refuse("workload.checkpointing", message + found, value=self.checkpointing[:40])
        if {"mm", "mm_alternate"} <= set(self.checkpointing.rstrip(")").partition("(")[2].split(",")):
            message = _("{field} is {value}, of which mm saves every matrix product: leave mm or mm_alternate out.")
            raise refuse("workload.checkpointing", message, value=self.checkpointing)
        if self.reentrant and self.checkpointing.partition("(")[0] in _NEVER_REENTRANT:
            message = _("{field} is set, which does nothing when workload.checkpointing is {kind}.")
            raise refuse("workload.reentrant", message, kind=self.checkpointing)
        return self

    @model_validator(mode="after")
    def _known_loss(self) -> Self:
        check_loss(self)
        return self

    @property
    def num_loss_chunks(self) -> int:
        """Chunks of the loss, where it has any."""
        return self.loss_chunks or DEFAULT_CHUNKS

    @property
    def upcast(self) -> Upcast:
        """Where logits become FP32."""
        return self.logits_upcast or usual_upcast(self.loss)

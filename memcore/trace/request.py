"""From a scenario to what is traced for it, and whether it can be."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.i18n import gettext as _
from memcore.models import catalogue, catalogue_inventory, catalogue_model
from memcore.optimizers import OptimizerName
from memcore.recipes import Convention, ConventionName, DType
from memcore.scenario import (
    DEFAULT_CHUNKS,
    Device,
    Lora,
    Loss,
    Method,
    Quantization,
    Scenario,
    Upcast,
    Workload,
    parse_scenario,
    usual_upcast,
)
from memcore.states import precision_of

# Their optimizers step on the model's own tensors, whole, or on a shard of each; the others' on flat slices.
OWN_TENSORS = (EngineName.SINGLE, EngineName.DDP, EngineName.FSDP1, EngineName.FSDP2)
# torch's names of the dtypes that packed weights may be stored in.
_STORAGE = {DType.FP32: "float32", DType.BF16: "bfloat16", DType.FP16: "float16"}
# Their steps run on fake tensors; Adafactor's asks for a tensor's value.
_STEPPED = (OptimizerName.ADAM, OptimizerName.ADAMW, OptimizerName.SGD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """LoRA of `rank` on the modules that `targets` name, kept in `dtype`, with `dropout` before it; `quantization`:
    how the weights under it are packed, None where they are not, in tensors of `storage`, and with `packs_head` the
    head's too. `keeps_inputs`: their products keep what they read. `copies`: modules of which a copy is trained."""

    rank: int
    targets: tuple[str, ...]
    dtype: str
    quantization: str | None = None
    dropout: float = 0.0
    packs_head: bool = False
    keeps_inputs: bool = False
    storage: str = "uint8"
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The optimizer's step: its name, torch's implementation, SGD's momentum, and the dtype of what it updates."""

    name: str
    implementation: str
    momentum: bool
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """FSDP2 among `shard` ranks, in `replicate` groups that hold the same: shards are kept in `param_dtype`, gradients
    reduced in `reduce_dtype`. `cpu_offload`: shards, their gradients and optimizer states are on the host. `fsdp_units`
    and `reshard_exception`: see memcore.scenario.Fsdp2Config. `gathers_float8`: linear modules' weights, in float8."""

    shard: int
    replicate: int
    reshard_after_forward: bool
    param_dtype: str
    reduce_dtype: str
    cpu_offload: bool = False
    fsdp_units: str = "block_root"
    reshard_exception: str | None = None
    gathers_float8: bool = False

    def reshards(self, unit: str) -> bool:
        """Whether a unit is resharded after its forward: a "block", the "last_block", the "embedding" or the "head"."""
        return self.reshard_after_forward and unit not in (self.reshard_exception or "").split("+")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatSharding:
    """FSDP1 among `shard` ranks (one: NO_SHARD), in `replicate` groups that hold the same: flat shards are kept in
    `param_dtype`, and where `compute_dtype` is given gathered in that and gradients reduced in `reduce_dtype`.
    `adapters`: "apart" (each matrix a unit of its own), "inside" their layer's unit, or "ignored", whole on every
    rank. `around`: checkpoints lie around units, which are gathered again for the recomputation. The rest are FSDP1's
    own settings."""

    shard: int
    param_dtype: str
    compute_dtype: str | None
    reduce_dtype: str
    reshard_after_forward: bool
    use_orig_params: bool
    backward_prefetch: str
    adapters: str
    around: bool
    cpu_offload: bool = False
    replicate: int = 1
    forward_prefetch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to trace. `config` is a config.json's content; sizes in tokens; `dtype` that of the computation, which with
    `autocast` is not the weights': these are kept in `stored`, FP32 where that is None. `loss` is a kind of Loss, or
    "none" (the decoder alone); what goes with it, and `fused_kernels`, are as a Workload has them, `experts` and `code`
    as a Model, `fp32_norms` as a Recipe; `float8` is the recipe of products in float8, None for none.
    `step_in_backward`: each parameter is stepped, and its gradient freed, in the backward. `compiled`: each layer by
    torch.compile, on the CPU's `kernels` with an own kernel for each operation.
    `full_depth`: run every layer, to check the replay."""

    config: Mapping[str, Any]
    micro_batch: int
    seq_len: int
    dtype: str
    attention: str
    checkpointing: str
    loss: str
    code: str = "transformers"
    reentrant: bool = False
    loss_chunks: int = DEFAULT_CHUNKS
    logits_upcast: str | None = None
    shifted_copy: bool = False
    logits_retained: bool = False
    use_cache: bool = False
    fused_kernels: tuple[str, ...] = ()
    autocast: bool = False
    stored: str | None = None
    fp32_norms: bool = False
    adapters: Adapters | None = None
    float8: str | None = None
    step: Step | None = None
    step_in_backward: bool = False
    sharding: Sharding | FlatSharding | None = None
    experts: str = "stacked"
    compiled: bool = False
    offloads_activations: bool = False
    loss_compiled: bool = False
    kernels: str = "cuda"
    full_depth: bool = False

    @property
    def upcast(self) -> Upcast:
        """Where logits become FP32."""
        return Upcast(self.logits_upcast) if self.logits_upcast else usual_upcast(Loss(self.loss))


def read_request(payload: Mapping[str, Any]) -> Request:
    """A request from its data, as it comes to a worker."""
    given = {**payload, "fused_kernels": tuple(payload.get("fused_kernels", ()))}
    if given.get("adapters"):
        targets = tuple(given["adapters"]["targets"])
        copies = tuple(given["adapters"].get("copies", ()))
        given["adapters"] = Adapters(**{**given["adapters"], "targets": targets, "copies": copies})
    if given.get("step"):
        given["step"] = Step(**given["step"])
    if given.get("sharding"):
        kind = FlatSharding if "around" in given["sharding"] else Sharding
        given["sharding"] = kind(**given["sharding"])
    return Request(**given)


def trace_request(scenario: Scenario) -> dict[str, Any] | str:
    """The payload of the worker's task "trace", or one sentence that says why this scenario is not traced."""
    config = _config(scenario)
    if config is None:
        return _("A parameter count has no model to trace.")
    if scenario.parallelism.engine is EngineName.LLM_C:
        return _("llm.c is no PyTorch program: its own code says what it takes.")
    work, convention = scenario.workload, precision_of(scenario.recipe).convention
    around_adapters = scenario.recipe.lora is not None and scenario.recipe.lora.autocast
    request = Request(
        config=dict(config),
        micro_batch=work.micro_batch,
        seq_len=work.seq_len,
        dtype=convention.compute_dtype.value,
        attention=work.attention,
        code=scenario.model.code,
        checkpointing=work.checkpointing,
        reentrant=work.reentrant,
        loss=work.loss.value,
        loss_chunks=work.num_loss_chunks,
        logits_upcast=work.upcast.value,
        shifted_copy=work.shifted_copy,
        logits_retained=work.logits_retained,
        use_cache=work.use_cache,
        fused_kernels=work.fused_kernels,
        autocast=scenario.recipe.convention is ConventionName.AMP_AUTOCAST
        or around_adapters
        or scenario.fsdp1_config.autocast,
        stored=convention.param_dtype.value if around_adapters else None,
        fp32_norms=scenario.recipe.fp32_norms,
        adapters=_adapters(scenario, convention),
        float8=scenario.recipe.fp8,
        step=_step(scenario, convention),
        step_in_backward=scenario.recipe.optimizer.in_backward,
        sharding=_sharding(scenario, convention),
        experts=scenario.model.experts,
        compiled=work.compile,
        offloads_activations=scenario.offload.activations is not Device.NONE,
        loss_compiled=work.loss_compiled,
    )
    return asdict(request)


def catalogue_requests() -> Iterator[dict[str, Any]]:
    """For each model of the catalogue what is traced for it by default, with a sequence that it can take."""
    for name, model in catalogue().items():
        if model.config is not None:
            inventory = catalogue_inventory(name)
            longest = inventory.shapes.max_positions if inventory is not None else 0
            workload = {"seq_len": min(Workload().seq_len, longest or Workload().seq_len)}
            parallelism = {"engine": EngineName.DEEPSPEED.value}
            request = trace_request(
                parse_scenario({"model": {"name": name}, "parallelism": parallelism, "workload": workload})
            )
            assert isinstance(request, dict), "it has a config"
            yield request


def _adapters(scenario: Scenario, convention: Convention) -> Adapters | None:
    recipe = scenario.recipe
    if recipe.method is Method.FULL:
        return None
    lora = recipe.lora or Lora()
    cast = scenario.parallelism.engine is EngineName.DEEPSPEED
    quantization = recipe.quantization or Quantization.NF4_DOUBLE_QUANT
    return Adapters(
        rank=lora.rank,
        targets=lora.targets,
        dtype=(convention.param_dtype if cast else lora.adapter_dtype).value,
        quantization=quantization.value if recipe.method is Method.QLORA else None,
        dropout=lora.dropout,
        copies=lora.modules_to_save,
        packs_head=recipe.quantize_lm_head,
        keeps_inputs=recipe.keeps_packed_inputs,
        # FSDP1 flattens a unit's weights, which all have one dtype (bitsandbytes' bnb_4bit_quant_storage).
        storage=_STORAGE[convention.param_dtype] if scenario.parallelism.engine is EngineName.FSDP1 else "uint8",
    )


def _step(scenario: Scenario, convention: Convention) -> Step | None:
    """The optimizer's step where it is one of torch's and acts on the model's own tensors or their master copies."""
    optimizer = scenario.recipe.optimizer
    if scenario.parallelism.engine not in OWN_TENSORS or optimizer.name not in _STEPPED:
        return None
    if optimizer.bits == 8 or optimizer.paged or scenario.shards_on_host:
        return None
    updated = convention.master_dtype or convention.param_dtype
    if scenario.recipe.method is not Method.FULL:
        updated = (scenario.recipe.lora or Lora()).adapter_dtype
    elif updated is not convention.state_dtype:
        return None
    return Step(
        name=optimizer.name.value,
        implementation=optimizer.implementation or ENGINE_OPTIONS[scenario.parallelism.engine].default_implementation,
        momentum=optimizer.momentum,
        dtype=updated.value,
    )


def _sharding(scenario: Scenario, convention: Convention) -> Sharding | FlatSharding | None:
    if scenario.parallelism.engine is EngineName.FSDP1:
        return _flat_sharding(scenario, convention)
    parallelism, config = scenario.parallelism, scenario.fsdp2_config
    if parallelism.engine is not EngineName.FSDP2:
        return None
    return Sharding(
        shard=parallelism.dp_shard,
        replicate=parallelism.dp_replicate,
        reshard_after_forward=config.reshard_after_forward,
        param_dtype=convention.param_dtype.value,
        reduce_dtype=convention.reduce_dtype.value,
        cpu_offload=config.cpu_offload,
        fsdp_units=config.fsdp_units,
        reshard_exception=config.reshard_exception,
        gathers_float8=config.enable_fsdp_float8_all_gather,
    )


def _flat_sharding(scenario: Scenario, convention: Convention) -> FlatSharding:
    recipe, config = scenario.recipe, scenario.fsdp1_config
    full = recipe.method is Method.FULL
    trained = convention.param_dtype if full else (recipe.lora or Lora()).adapter_dtype
    cast = convention.compute_dtype not in (convention.param_dtype, trained) or (
        not full and trained is not convention.compute_dtype and (recipe.lora or Lora()).autocast
    )
    return FlatSharding(
        shard=scenario.parallelism.dp_shard,
        param_dtype=convention.param_dtype.value,
        compute_dtype=convention.compute_dtype.value if cast else None,
        reduce_dtype=convention.reduce_dtype.value,
        reshard_after_forward=config.reshard_after_forward,
        use_orig_params=config.use_orig_params,
        backward_prefetch=config.backward_prefetch,
        adapters="inside" if full else config.adapters or "apart",
        around=config.checkpoint_around_units,
        cpu_offload=config.cpu_offload,
        replicate=scenario.parallelism.dp_replicate,
        forward_prefetch=config.forward_prefetch,
    )


def _config(scenario: Scenario) -> Mapping[str, Any] | None:
    model = scenario.model
    return catalogue_model(model.name).config if model.name is not None else model.config

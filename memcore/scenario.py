"""The question: model, hardware, parallelism, recipe, offload and workload of one training run.

A Scenario is checked when it is made: what is invalid, what does nothing for the chosen engine, and what
is not predicted yet is refused with one sentence. :func:`parse_scenario` turns whatever is wrong with
outside data into a UserError.
"""

import json
import math
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from memcore.configs import check_config, normalise_config
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.errors import UserError
from memcore.hardware import accelerator
from memcore.i18n import gettext as _
from memcore.models import catalogue_model
from memcore.optimizers import OPTIMIZERS, OptimizerName
from memcore.recipes import CONVENTIONS, ConventionName, DType
from memcore.units import MAX_PARAMS, parse_count

MAX_GPUS = 1_000_000
MAX_TOKENS = 100_000_000
# Text of a scenario, config.json included, that is read at all.
MAX_SCENARIO_CHARS = 400_000

_CHECKPOINTING = re.compile(r"none|full|attention|(segments|every_nth|first)\([1-9][0-9]{0,3}\)")


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
    """4-bit storage of the frozen weights: NormalFloat4, its block scales in FP32 or quantised again."""

    NF4 = "nf4"
    NF4_DOUBLE_QUANT = "nf4_double_quant"


def _whole(value: object) -> object:
    """Take 8, 8.0 and "8" as whole numbers; leave the rest to pydantic's own refusal."""
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")  # noqa: TRY004  pydantic reports ValueError only
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _count(value: object) -> object:
    return parse_count(value) if isinstance(value, str) else _whole(value)


def _objects(value: object) -> object:
    """Let an optimizer be written as its name alone."""
    return {"name": value} if isinstance(value, str) else value


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    check_config(config)
    return normalise_config(config)


Whole = Annotated[int, BeforeValidator(_whole)]
Degree = Annotated[Whole, Field(ge=1, le=MAX_GPUS)]
Tokens = Annotated[Whole, Field(ge=1, le=MAX_TOKENS)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _refuse(field: str, message: str, **values: object) -> UserError:
    return UserError(message.format(field=field, **values), field)


class Model(_Part):
    """Exactly one of a catalogue `name`, a bare parameter count `n_params`, or a Hugging Face `config`."""

    name: str | None = Field(default=None, max_length=120)
    n_params: Annotated[int, BeforeValidator(_count), Field(ge=1, le=MAX_PARAMS)] | None = None
    config: Annotated[Mapping[str, Any], AfterValidator(_config)] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        given = [key for key in ("name", "n_params", "config") if getattr(self, key) is not None]
        if len(given) != 1:
            message = _("{field} needs exactly one of name, n_params and config; it has {given}.")
            raise _refuse("model", message, given=", ".join(given) or _("none of them"))
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


class Hardware(_Part):
    """`gpu`: a name of the accelerator catalogue. `gpus`: all of them. `gpus_per_node`: at most 8 by default."""

    gpu: str = "H100-80GB"
    gpus: Degree = 1
    gpus_per_node: Degree = Field(default_factory=lambda data: _node_size(data.get("gpus", 1)))

    @model_validator(mode="after")
    def _whole_nodes(self) -> Self:
        accelerator(self.gpu)
        if self.gpus_per_node > self.gpus or self.gpus % self.gpus_per_node:
            message = _("{field} is {per_node}, which does not divide hardware.gpus = {gpus} into whole nodes.")
            raise _refuse("hardware.gpus_per_node", message, per_node=self.gpus_per_node, gpus=self.gpus)
        return self


class Parallelism(_Part):
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


class Optimizer(_Part):
    """`bits` 8 is bitsandbytes' block-wise optimizer, `paged` its unified memory. `implementation` is
    torch's; None means the engine's own default. `momentum` is SGD's."""

    name: OptimizerName = OptimizerName.ADAMW
    bits: Literal[8, 32] = 32
    paged: bool = False
    implementation: Literal["foreach", "fused", "for_loop"] | None = None
    momentum: bool = False


class Lora(_Part):
    """Adapters of `rank` on the linear modules named by `targets` ("all-linear": all but the head)."""

    rank: Annotated[Whole, Field(ge=1, le=65536)] = 16
    targets: tuple[Annotated[str, Field(min_length=1, max_length=80)], ...] = ("all-linear",)
    adapter_dtype: DType = DType.FP32

    @model_validator(mode="after")
    def _some_target(self) -> Self:
        if not self.targets:
            raise _refuse("recipe.lora.targets", _('{field} is empty: name at least one module, or "all-linear".'))
        return self


class Recipe(_Part):
    """How it is trained. `convention` fills the dtypes; an explicit dtype wins and makes it a custom one."""

    method: Method = Method.FULL
    convention: ConventionName = ConventionName.ZERO_PAPER
    param_dtype: DType | None = None
    compute_dtype: DType | None = None
    grad_dtype: DType | None = None
    reduce_dtype: DType | None = None
    master_dtype: DType | Literal["none"] | None = None
    state_dtype: DType | None = None
    optimizer: Annotated[Optimizer, BeforeValidator(_objects)] = Optimizer()
    quantization: Quantization | None = None
    lora: Lora | None = None


class Offload(_Part):
    """What leaves the GPU, and to where."""

    optimizer: Device = Device.NONE
    parameters: Device = Device.NONE
    activations: Literal[Device.NONE, Device.CPU] = Device.NONE


class Workload(_Part):
    """What one step processes. `micro_batch` sequences of `seq_len` tokens per GPU and micro-step.

    `checkpointing`: none, full (every layer), segments(k) (groups of k layers, one kept input each),
    every_nth(n) (each n-th layer recomputed), first(n), attention (its scores only). `logits_retained`: the
    loop keeps the model's output, logits included, until the backward is done.
    """

    micro_batch: Tokens = 1
    seq_len: Tokens = 4096
    grad_accum: Tokens = 1
    attention: Literal["flash", "eager", "memory_efficient"] = "flash"
    checkpointing: str = "none"
    loss: Literal["unfused", "chunked", "fused"] = "unfused"
    logits_retained: bool = False

    @model_validator(mode="after")
    def _known_checkpointing(self) -> Self:
        if not _CHECKPOINTING.fullmatch(self.checkpointing):
            message = _(
                "{field} is {value!r}; allowed are none, full, attention, segments(k), every_nth(n) and first(n) "
                "with a whole number above 0."
            )
            raise _refuse("workload.checkpointing", message, value=self.checkpointing[:40])
        return self


class ZeroConfig(_Part):
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


class DeepSpeedConfig(_Part):
    """The part of a ds_config that decides memory."""

    zero_optimization: ZeroConfig = ZeroConfig()


class Fsdp2Config(_Part):
    """How FSDP2 is applied, a unit per decoder layer. Without `reshard_after_forward` a layer stays gathered from
    its forward to its backward."""

    reshard_after_forward: bool = True


class DdpConfig(_Part):
    """DistributedDataParallel's arguments that decide memory."""

    gradient_as_bucket_view: bool = False


EngineConfig = DeepSpeedConfig | Fsdp2Config | DdpConfig
_ENGINE_CONFIGS: Mapping[EngineName, type[EngineConfig]] = {
    EngineName.DEEPSPEED: DeepSpeedConfig,
    EngineName.FSDP2: Fsdp2Config,
    EngineName.DDP: DdpConfig,
}


class Scenario(_Part):
    """One training run. Every part has defaults but the model."""

    model: Model
    hardware: Hardware = Hardware()
    parallelism: Parallelism = Field(default_factory=Parallelism)
    engine_config: EngineConfig | None = None
    recipe: Recipe = Recipe()
    offload: Offload = Offload()
    workload: Workload = Workload()

    @model_validator(mode="before")
    @classmethod
    def _fill_parallelism(cls, data: Any) -> Any:
        """Fill what the engine and the number of GPUs imply, before the parts are made."""
        if not isinstance(data, Mapping):
            return data
        given = data.get("parallelism", {})
        hardware = data.get("hardware", {})
        if not isinstance(given, Mapping) or not isinstance(hardware, Mapping):
            return data
        config = data.get("engine_config")
        parallelism = _filled_parallelism(given, hardware.get("gpus", 1), config)
        return {**data, "parallelism": parallelism, "engine_config": _engine_config(config, parallelism["engine"])}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_parallelism(self)
        _check_engine(self)
        _check_recipe(self)
        _check_offload(self)
        return self

    @property
    def zero_config(self) -> ZeroConfig:
        """DeepSpeed's settings, its defaults where none were given."""
        config = self.engine_config
        return config.zero_optimization if isinstance(config, DeepSpeedConfig) else ZeroConfig()


def _integer(value: object) -> int | None:
    """The whole number that `Whole` makes of a value, or None where it is refused."""
    try:
        return int(str(_whole(value)))
    except (ValueError, OverflowError):
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _filled_parallelism(given: Mapping[str, Any], gpus: object, config: object) -> dict[str, Any]:
    filled = dict(given)
    number = _integer(gpus)
    several = number is not None and number > 1
    if filled.get("engine") is None:
        of_deepspeed = isinstance(config, DeepSpeedConfig) or "zero_optimization" in _mapping(config)
        staged = filled.get("zero_stage") is not None or of_deepspeed
        filled["engine"] = EngineName.DEEPSPEED if staged else EngineName.DDP if several else EngineName.SINGLE
    if not isinstance(filled["engine"], str) or filled["engine"] not in set(EngineName):
        return filled  # the field's own refusal names it
    options = ENGINE_OPTIONS[EngineName(filled["engine"])]
    if options.stages and filled.get("zero_stage") is None:
        zero = config.get("zero_optimization", {}) if isinstance(config, Mapping) else None
        stage = zero.get("stage") if isinstance(zero, Mapping) else None
        filled["zero_stage"] = 0 if stage is None else stage
    _fill_data_parallel(filled, gpus, options.shards)
    return filled


def _engine_config(given: object, engine: object) -> object:
    """The engine's own settings, read as that engine's; what its model refuses is named below engine_config."""
    if given is None or isinstance(given, BaseModel) or not isinstance(engine, str) or engine not in set(EngineName):
        return given
    if not isinstance(given, Mapping):
        message = _("{field} is {value}; allowed is an object with its fields.")
        raise _refuse("engine_config", message, value=repr(given)[:60])
    model = _ENGINE_CONFIGS.get(EngineName(engine))
    if model is None:
        raise _refuse("engine_config", _("{field} does nothing for {engine}: leave it out."), engine=engine)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        if error.errors()[0]["type"] == "extra_forbidden":
            message = _("{field} is not a setting of {engine} that is read here.")
            raise _refuse(f"engine_config.{error.errors()[0]['loc'][-1]}", message, engine=engine) from None
        raise _first_error(error, "engine_config") from None


def _fill_data_parallel(filled: dict[str, Any], gpus: object, shards: bool) -> None:
    """Split dp, or else all GPUs, into dp_shard and dp_replicate as the engine uses them."""
    dp = filled.pop("dp", None)
    for name in ("dp_shard", "dp_replicate"):
        if filled.get(name) is None:
            filled.pop(name, None)
    total = _integer(gpus if dp is None else dp)
    if dp is not None and (total is None or total < 1):
        message = _("{field} is {dp}; allowed is a whole number of 1 or more.")
        raise _refuse("parallelism.dp", message, dp=repr(dp)[:60])
    given = {name: _integer(filled[name]) for name in ("dp_shard", "dp_replicate") if name in filled}
    if total is None or None in given.values():
        return  # the field's own refusal names it
    # What is given stays; the rest of the ranks goes to the other.
    used, other = ("dp_shard", "dp_replicate") if shards else ("dp_replicate", "dp_shard")
    if used not in given:
        filled[used] = total // max(_integer(filled.get(other, 1)) or 1, 1)
    shard, replicate = (_integer(filled.setdefault(name, 1)) or 0 for name in ("dp_shard", "dp_replicate"))
    if dp is not None and shard * replicate != total:
        message = _("{field} is {dp}, but dp_shard x dp_replicate = {shard} x {replicate} = {product}.")
        raise _refuse("parallelism.dp", message, dp=total, shard=shard, replicate=replicate, product=shard * replicate)


def _check_parallelism(scenario: Scenario) -> None:
    parallelism, gpus = scenario.parallelism, scenario.hardware.gpus
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        if (value := getattr(parallelism, name)) != 1:
            raise _refuse(f"parallelism.{name}", _("{field} is {value}; only 1 is predicted so far."), value=value)
    if parallelism.dp != gpus:
        message = _("dp_shard x dp_replicate = {shard} x {replicate} = {dp}, but hardware.gpus is {gpus}.")
        raise _refuse(
            "parallelism.dp", message, shard=parallelism.dp_shard, replicate=parallelism.dp_replicate,
            dp=parallelism.dp, gpus=gpus,
        )  # fmt: skip
    options, engine = ENGINE_OPTIONS[parallelism.engine], parallelism.engine.value
    if parallelism.engine is EngineName.SINGLE and gpus != 1:
        message = _("{field} is single, but hardware.gpus is {gpus}: choose ddp, fsdp2 or deepspeed.")
        raise _refuse("parallelism.engine", message, gpus=gpus)
    if parallelism.zero_stage is not None and not options.stages:
        message = _("{field} is {value}, but {engine} has no ZeRO stages: leave it out, or choose deepspeed.")
        raise _refuse("parallelism.zero_stage", message, value=parallelism.zero_stage, engine=engine)
    for name, used in (("dp_shard", options.shards), ("dp_replicate", options.replicates)):
        if (value := getattr(parallelism, name)) != 1 and not used:
            message = _("{field} is {value}, which does nothing for {engine}: only 1 is allowed.")
            raise _refuse(f"parallelism.{name}", message, value=value, engine=engine)


def _check_engine(scenario: Scenario) -> None:
    parallelism, engine = scenario.parallelism, scenario.parallelism.engine.value
    config = scenario.engine_config
    if config is None:
        return
    if not isinstance(config, _ENGINE_CONFIGS.get(parallelism.engine, type(None))):
        raise _refuse("engine_config", _("{field} is of another engine than {engine}: leave it out."), engine=engine)
    zero = scenario.zero_config
    if zero.stage is not None and zero.stage != parallelism.zero_stage:
        message = _("{field} is {value}, but parallelism.zero_stage is {stage}: they must be the same.")
        raise _refuse("engine_config.zero_optimization.stage", message, value=zero.stage, stage=parallelism.zero_stage)
    hpz, field = zero.zero_hpz_partition_size, "engine_config.zero_optimization.zero_hpz_partition_size"
    if hpz > 1 and parallelism.zero_stage != 3:
        message = _("{field} is {value}, which does nothing below ZeRO stage 3.")
        raise _refuse(field, message, value=hpz)
    if parallelism.dp_shard % hpz:
        message = _("{field} is {value}, which does not divide the {ranks} data-parallel ranks.")
        raise _refuse(field, message, value=hpz, ranks=parallelism.dp_shard)


def _check_recipe(scenario: Scenario) -> None:
    recipe, bare = scenario.recipe, scenario.model.is_bare_count
    if recipe.method is Method.FULL and recipe.lora is not None:
        raise _refuse("recipe.lora", _("{field} does nothing when recipe.method is full: choose lora or qlora."))
    if recipe.method is not Method.QLORA and recipe.quantization is not None:
        message = _("{field} is {value}, which does nothing when recipe.method is {method}: choose qlora.")
        raise _refuse("recipe.quantization", message, value=recipe.quantization, method=recipe.method)
    if recipe.method is not Method.FULL and bare:
        message = _("{field} is {value}, which needs the model's shapes: give a catalogue name or a config.json.")
        raise _refuse("recipe.method", message, value=recipe.method)
    CONVENTIONS[recipe.convention].check_stage(scenario.parallelism.stage)
    _check_optimizer(scenario)


def _check_optimizer(scenario: Scenario) -> None:
    optimizer, rule = scenario.recipe.optimizer, OPTIMIZERS[scenario.recipe.optimizer.name]
    name = optimizer.name.value
    if rule.needs_shapes and scenario.model.is_bare_count:
        message = _(
            "{field} is {name}, whose states depend on the model's shapes: give a catalogue name or a config.json."
        )
        raise _refuse("recipe.optimizer.name", message, name=name)
    if optimizer.bits == 8 and not rule.has_8bit:
        raise _refuse("recipe.optimizer.bits", _("{field} is 8, but {name} has no 8-bit form."), name=name)
    if optimizer.paged and not rule.has_8bit:
        raise _refuse("recipe.optimizer.paged", _("{field} is set, but {name} has no paged form."), name=name)
    if optimizer.implementation is not None and (optimizer.bits == 8 or optimizer.paged or not rule.in_torch):
        message = _("{field} is {value}, which does nothing for this optimizer: it is not one of torch's.")
        raise _refuse("recipe.optimizer.implementation", message, value=optimizer.implementation)
    if optimizer.momentum and optimizer.name is not OptimizerName.SGD:
        raise _refuse("recipe.optimizer.momentum", _("{field} does nothing for {name}: it is SGD's."), name=name)
    if rule.needs_whole_tensors and scenario.parallelism.engine is EngineName.FSDP2:
        message = _("{field} is {name}, which is not predicted for FSDP2's divided tensors yet.")
        raise _refuse("recipe.optimizer.name", message, name=name)


def _check_offload(scenario: Scenario) -> None:
    offload, parallelism = scenario.offload, scenario.parallelism
    if offload.activations is not Device.NONE:
        raise _refuse("offload.activations", _("{field} is cpu; only none is predicted so far."))
    stage, engine = parallelism.zero_stage or 0, parallelism.engine.value
    for name, device, lowest in (("optimizer", offload.optimizer, 1), ("parameters", offload.parameters, 3)):
        if device is Device.NONE:
            continue
        if not ENGINE_OPTIONS[parallelism.engine].offloads:
            message = _("{field} is {value}, which {engine} does not do here: choose deepspeed.")
            raise _refuse(f"offload.{name}", message, value=device, engine=engine)
        needed = 3 if device is Device.NVME else lowest
        if stage < needed:
            message = _("{field} is {value}, which needs ZeRO stage {needed} or above; the stage is {stage}.")
            raise _refuse(f"offload.{name}", message, value=device, needed=needed, stage=stage)
    if offload.optimizer is not Device.NONE and scenario.recipe.optimizer.bits == 8:
        message = _(
            "{field} is {value}, but DeepSpeed's CPU optimizer keeps 32-bit states: set recipe.optimizer.bits to 32."
        )
        raise _refuse("offload.optimizer", message, value=offload.optimizer)


def parse_scenario(data: object) -> Scenario:
    """A Scenario from outside data: JSON text, or what JSON decodes to.

    Raises UserError with one sentence that names the first field at fault, its value and what is allowed.
    """
    if isinstance(data, str | bytes):
        data = decode_json(data)
    if not isinstance(data, Mapping):
        raise UserError(_("A scenario is a JSON object with a model; this is {kind}.").format(kind=_kind(data)))
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise _first_error(error) from None
    except RecursionError:
        raise UserError(_("The scenario is nested too deeply to be read.")) from None


def decode_json(text: str | bytes, limit: int = MAX_SCENARIO_CHARS) -> Any:
    """JSON text to data. Raises UserError where it is too long, not JSON, or holds NaN or infinity."""
    if len(text) > limit:
        message = _("The text is {size:,} characters long; up to {limit:,} are read.")
        raise UserError(message.format(size=len(text), limit=limit))

    def no_constant(name: str) -> None:
        raise ValueError(name)

    def finite(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            raise ValueError(digits)
        return number

    try:
        return json.loads(text, parse_constant=no_constant, parse_float=finite)
    except (ValueError, RecursionError) as error:
        where = f" ({error.msg}, line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(_("This is not JSON{where}.").format(where=where)) from None


def _kind(value: object) -> str:
    names = {list: _("a list"), str: _("text"), bool: _("true or false"), type(None): _("null")}
    return names.get(type(value), _("a number"))


def _first_error(error: ValidationError, prefix: str = "") -> UserError:
    """The first refusal as one sentence; `prefix` is the path of the part that was read."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, UserError) and inner.field:
        return inner
    parts = [prefix, *first["loc"]] if prefix else list(first["loc"])
    field = ".".join(str(part) for part in parts if not (isinstance(part, str) and "[" in part))
    if isinstance(inner, UserError):
        return UserError(str(inner), field)
    value = first.get("input")
    shown = repr(value)[:60] if not isinstance(value, Mapping) else _("an object")
    if first["type"] == "extra_forbidden":
        message = _("{field} is not a field of a scenario.")
    elif first["type"] == "missing":
        message = _("{field} is missing.")
    else:
        message = _("{field} is {value}; allowed is {allowed}.")
    return UserError(message.format(field=field, value=shown, allowed=_allowed(first)), field)


def _allowed(error: Any) -> str:
    """What a field takes, in words, from pydantic's error."""
    context, kind = error.get("ctx", {}), error["type"]
    if "expected" in context:
        # Members of an enumeration come as <Device.CPU: 'cpu'>.
        return re.sub(r"<[^:>]*: ([^>]*)>", r"\1", str(context["expected"]).replace("'", ""))
    if "ge" in context:
        return _("a whole number of {least:,} or more").format(least=context["ge"])
    if "le" in context:
        return _("at most {most:,}").format(most=context["le"])
    if kind.startswith(("int_", "finite", "value_error")):
        return _("a whole number")
    if kind.startswith("tuple"):
        return _("a list")
    if kind.startswith("bool"):
        return _("true or false")
    if kind.startswith("string"):
        return _("a text of up to {most} characters").format(most=context.get("max_length", 120))
    return _("an object with its fields")


def scenario_data(scenario: Scenario) -> dict[str, Any]:
    """The scenario as JSON data, without what is at its default. :func:`parse_scenario` reads it back."""
    return scenario.model_dump(mode="json", exclude_defaults=True)

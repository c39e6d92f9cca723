"""What the parts of a scenario say of each other: contradictions, what does nothing, what is not predicted yet."""

from typing import TYPE_CHECKING

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.i18n import gettext as _
from memcore.optimizers import OPTIMIZERS, OptimizerName
from memcore.recipes import CONVENTIONS, DType
from memcore.scenario.engine_configs import ENGINE_CONFIGS
from memcore.scenario.fields import refuse
from memcore.scenario.fsdp1_checks import check_fsdp1
from memcore.scenario.kernel_checks import check_compile, check_fp8, check_fused_kernels
from memcore.scenario.llm_c_checks import check_llm_c
from memcore.scenario.parts import Device, Method, Quantization

if TYPE_CHECKING:
    from memcore.scenario.whole import Scenario


def check(scenario: "Scenario") -> None:
    """Raise UserError, naming the field, its value and what is allowed."""
    _check_model(scenario)
    _check_parallelism(scenario)
    _check_engine(scenario)
    check_fsdp1(scenario)
    _check_recipe(scenario)
    _check_offload(scenario)
    check_fused_kernels(scenario)
    check_compile(scenario)
    check_fp8(scenario)
    check_llm_c(scenario)


def _check_model(scenario: "Scenario") -> None:
    """litgpt's code has one attention, and none of the modules that other libraries' kernels replace."""
    model, work = scenario.model, scenario.workload
    if model.code == "transformers":
        return
    if model.is_bare_count:
        message = _("{field} does nothing for a parameter count: give a catalogue name or a config.json.")
        raise refuse("model.code", message)
    if work.attention != "flash":
        message = _("{field} is {value}; litgpt's code has flash attention alone.")
        raise refuse("workload.attention", message, value=work.attention)
    if work.fused_kernels:
        raise refuse("workload.fused_kernels", _("{field} has no kernel that litgpt's code runs: leave it out."))


def _check_parallelism(scenario: "Scenario") -> None:
    parallelism, gpus = scenario.parallelism, scenario.hardware.gpus
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        if (value := getattr(parallelism, name)) != 1:
            raise refuse(f"parallelism.{name}", _("{field} is {value}; only 1 is predicted so far."), value=value)
    if parallelism.dp != gpus:
        message = _("dp_shard x dp_replicate = {shard} x {replicate} = {dp}, but hardware.gpus is {gpus}.")
        raise refuse(
            "parallelism.dp", message, shard=parallelism.dp_shard, replicate=parallelism.dp_replicate,
            dp=parallelism.dp, gpus=gpus,
        )  # fmt: skip
    options, engine = ENGINE_OPTIONS[parallelism.engine], parallelism.engine.value
    if parallelism.engine is EngineName.SINGLE and gpus != 1:
        message = _("{field} is single, but hardware.gpus is {gpus}: choose ddp, fsdp1, fsdp2 or deepspeed.")
        raise refuse("parallelism.engine", message, gpus=gpus)
    if parallelism.zero_stage is not None and not options.stages:
        message = _("{field} is {value}, but {engine} has no ZeRO stages: leave it out, or choose deepspeed.")
        raise refuse("parallelism.zero_stage", message, value=parallelism.zero_stage, engine=engine)
    for name, used in (("dp_shard", options.shards), ("dp_replicate", options.replicates)):
        if (value := getattr(parallelism, name)) != 1 and not used:
            message = _("{field} is {value}, which does nothing for {engine}: only 1 is allowed.")
            raise refuse(f"parallelism.{name}", message, value=value, engine=engine)


def _check_engine(scenario: "Scenario") -> None:
    parallelism, engine = scenario.parallelism, scenario.parallelism.engine.value
    config = scenario.engine_config
    if config is None:
        return
    if not isinstance(config, ENGINE_CONFIGS.get(parallelism.engine, type(None))):
        raise refuse("engine_config", _("{field} is of another engine than {engine}: leave it out."), engine=engine)
    _check_units(scenario)
    zero = scenario.zero_config
    if zero.stage is not None and zero.stage != parallelism.zero_stage:
        message = _("{field} is {value}, but parallelism.zero_stage is {stage}: they must be the same.")
        raise refuse("engine_config.zero_optimization.stage", message, value=zero.stage, stage=parallelism.zero_stage)
    hpz, field = zero.zero_hpz_partition_size, "engine_config.zero_optimization.zero_hpz_partition_size"
    if hpz > 1 and parallelism.zero_stage != 3:
        message = _("{field} is {value}, which does nothing below ZeRO stage 3.")
        raise refuse(field, message, value=hpz)
    if parallelism.dp_shard % hpz:
        message = _("{field} is {value}, which does not divide the {ranks} data-parallel ranks.")
        raise refuse(field, message, value=hpz, ranks=parallelism.dp_shard)


def _check_units(scenario: "Scenario") -> None:
    """FSDP2's exception from resharding is from some, and of a unit that there is."""
    config, field = scenario.fsdp2_config, "engine_config.reshard_exception"
    if config.reshard_exception is None:
        return
    if not config.reshard_after_forward:
        message = _("{field} is {value}, which does nothing without reshard_after_forward: nothing is resharded.")
        raise refuse(field, message, value=config.reshard_exception)
    if "head" in config.reshard_exception and config.fsdp_units == "block_root":
        message = _("{field} is {value}, but the head is the root's: set engine_config.fsdp_units to block_embed_head.")
        raise refuse(field, message, value=config.reshard_exception)


def _check_recipe(scenario: "Scenario") -> None:
    recipe, bare = scenario.recipe, scenario.model.is_bare_count
    if recipe.method is Method.FULL and recipe.lora is not None:
        raise refuse("recipe.lora", _("{field} does nothing when recipe.method is full: choose lora or qlora."))
    if recipe.method is not Method.QLORA and recipe.quantization is not None:
        message = _("{field} is {value}, which does nothing when recipe.method is {method}: choose qlora.")
        raise refuse("recipe.quantization", message, value=recipe.quantization, method=recipe.method)
    if recipe.method is not Method.FULL and bare:
        message = _("{field} is {value}, which needs the model's shapes: give a catalogue name or a config.json.")
        raise refuse("recipe.method", message, value=recipe.method)
    if scenario.model.experts == "separate" and bare:
        raise refuse("model.experts", _("{field} is separate, which does nothing for a parameter count."))
    CONVENTIONS[recipe.convention].check_stage(scenario.parallelism.stage)
    _check_packing(scenario)
    _check_last_loss(scenario)
    _check_norms(scenario)
    _check_copies(scenario)
    _check_autocast(scenario)
    _check_optimizer(scenario)


def _check_packing(scenario: "Scenario") -> None:
    """What is said of a 4-bit base, and where there is none."""
    recipe, engine, packed = scenario.recipe, scenario.parallelism.engine.value, scenario.recipe.method is Method.QLORA
    for name in ("quant_group_size", "quantize_lm_head", "keeps_packed_inputs"):
        if getattr(recipe, name) and not packed:
            message = _("{field} is set, which does nothing when recipe.method is {method}: choose qlora.")
            raise refuse(f"recipe.{name}", message, method=recipe.method)
    integers = recipe.quantization is Quantization.GPTQ_INT4
    if packed and not integers and recipe.quant_group_size not in (None, 64):
        message = _("{field} is {value}; NF4 is predicted with 64 values to a scale alone.")
        raise refuse("recipe.quant_group_size", message, value=recipe.quant_group_size)
    if integers and recipe.keeps_packed_inputs:
        raise refuse("recipe.keeps_packed_inputs", _("{field} is set, which is bitsandbytes': choose nf4."))
    if integers and recipe.quantize_lm_head:
        raise refuse("recipe.quantize_lm_head", _("{field} is set, but AutoGPTQ packs the layers' weights alone."))
    # For FSDP1 fms-acceleration makes parameters of qweight and qzeros (plugins/accelerated-peft, autogptq_utils.py,
    # register_tensors_as_parameters_patch_rule: PATCH_FOR_FSDP_TRITON_V2).
    if integers and scenario.parallelism.stage == 3 and scenario.parallelism.engine is not EngineName.FSDP1:
        message = _("recipe.quantization is gptq_int4, whose weights are buffers: {engine} does not divide those.")
        raise refuse("recipe.quantization", message, engine=engine)
    if recipe.quantize_lm_head and scenario.workload.loss == "fused":
        message = _("{field} is set, but the fused loss reads the head's own weight, which is not there: it is packed.")
        raise refuse("recipe.quantize_lm_head", message)


def _check_last_loss(scenario: "Scenario") -> None:
    """Of a graph whose backward is done nothing is left but what functions keep as attributes."""
    work, field = scenario.workload, "workload.last_loss_held"
    if not work.last_loss_held:
        return
    if not scenario.recipe.keeps_packed_inputs:
        raise refuse(field, _("{field} is set, which does nothing unless recipe.keeps_packed_inputs is."))
    if work.checkpointing != "none":
        message = _("{field} is set, which is predicted without checkpointing alone; it is {kind}.")
        raise refuse(field, message, kind=work.checkpointing)


def _check_norms(scenario: "Scenario") -> None:
    """FP32 norms where something takes their FP32 results: packed modules, and autocast for the head."""
    recipe, field = scenario.recipe, "recipe.fp32_norms"
    if not recipe.fp32_norms:
        return
    around = recipe.lora is not None and recipe.lora.autocast
    if recipe.method is not Method.QLORA or not around:
        raise refuse(field, _("{field} is set, which is predicted for qlora under recipe.lora.autocast alone."))
    if scenario.parallelism.engine is EngineName.FSDP1:
        raise refuse(field, _("{field} is set, but FSDP1 flattens weights of one dtype alone."))
    if scenario.workload.fused_kernels or scenario.model.code == "litgpt":
        raise refuse(field, _("{field} is set, which is predicted for the plain code of transformers alone."))


def _check_copies(scenario: "Scenario") -> None:
    """Trained copies of whole modules, of the adapters' dtype, where an engine leaves them as they are."""
    recipe, field, engine = scenario.recipe, "recipe.lora.modules_to_save", scenario.parallelism.engine
    if recipe.lora is None or not recipe.lora.modules_to_save:
        return
    if engine not in (EngineName.SINGLE, EngineName.DDP):
        raise refuse(field, _("{field} is set, which is not predicted for {engine} yet."), engine=engine.value)
    if recipe.method is not Method.LORA or recipe.lora.adapter_dtype is not recipe.stored_dtype:
        message = _("{field} is set, which is predicted for lora with adapters in the dtype of the weights alone.")
        raise refuse(field, message)
    if scenario.model.code == "litgpt":
        raise refuse(field, _("{field} is set, which is peft's: litgpt has no such copies."))


def _check_autocast(scenario: "Scenario") -> None:
    """Autocast around adapters where there is something to cast: FP32 adapters on 16-bit weights."""
    recipe, field = scenario.recipe, "recipe.lora.autocast"
    if recipe.lora is None or not recipe.lora.autocast:
        return
    if scenario.parallelism.engine not in (EngineName.SINGLE, EngineName.DDP, EngineName.FSDP1):
        message = _("{field} is set, which is not predicted for {engine} yet.")
        raise refuse(field, message, engine=scenario.parallelism.engine.value)
    if recipe.lora.adapter_dtype is not DType.FP32 or DType.FP32 in (recipe.stored_dtype, recipe.computed_dtype):
        raise refuse(field, _("{field} is set, which does nothing but for FP32 adapters on 16-bit weights."))


def _check_optimizer(scenario: "Scenario") -> None:
    optimizer, rule = scenario.recipe.optimizer, OPTIMIZERS[scenario.recipe.optimizer.name]
    name = optimizer.name.value
    if rule.needs_shapes and scenario.model.is_bare_count:
        message = _(
            "{field} is {name}, whose states depend on the model's shapes: give a catalogue name or a config.json."
        )
        raise refuse("recipe.optimizer.name", message, name=name)
    if optimizer.bits == 8 and not rule.has_8bit:
        raise refuse("recipe.optimizer.bits", _("{field} is 8, but {name} has no 8-bit form."), name=name)
    if optimizer.paged and not rule.has_8bit:
        raise refuse("recipe.optimizer.paged", _("{field} is set, but {name} has no paged form."), name=name)
    if optimizer.implementation is not None and (optimizer.bits == 8 or optimizer.paged or not rule.in_torch):
        message = _("{field} is {value}, which does nothing for this optimizer: it is not one of torch's.")
        raise refuse("recipe.optimizer.implementation", message, value=optimizer.implementation)
    if optimizer.implementation == "fused" and not rule.has_fused:
        raise refuse("recipe.optimizer.implementation", _("{field} is fused, but {name} has no fused form."), name=name)
    if optimizer.momentum and optimizer.name is not OptimizerName.SGD:
        raise refuse("recipe.optimizer.momentum", _("{field} does nothing for {name}: it is SGD's."), name=name)
    if optimizer.in_backward:
        _check_in_backward(scenario)
    if rule.needs_whole_tensors and scenario.parallelism.engine in (EngineName.FSDP1, EngineName.FSDP2):
        message = _("{field} is {name}, which is not predicted for FSDP's divided tensors yet.")
        raise refuse("recipe.optimizer.name", message, name=name)


def _check_in_backward(scenario: "Scenario") -> None:
    """A step in the backward has one gradient at a time, whole and complete."""
    field, engine = "recipe.optimizer.in_backward", scenario.parallelism.engine
    if engine is not EngineName.SINGLE:
        raise refuse(field, _("{field} is set, which is not predicted for {engine} yet."), engine=engine.value)
    if scenario.recipe.method is not Method.FULL or scenario.model.is_bare_count:
        raise refuse(field, _("{field} is set, which is predicted for full training of a model with shapes alone."))
    if scenario.workload.grad_accum > 1:
        message = _("{field} is set, but workload.grad_accum is {steps}: a gradient that waits is not freed.")
        raise refuse(field, message, steps=scenario.workload.grad_accum)


def _check_offload(scenario: "Scenario") -> None:
    offload, parallelism = scenario.offload, scenario.parallelism
    optimizer = scenario.recipe.optimizer
    if scenario.shards_on_host and (optimizer.bits == 8 or optimizer.paged):
        message = _("{field} is set, but {name} of 8 bits, or paged, runs on a GPU alone.")
        raise refuse("engine_config.cpu_offload", message, name=optimizer.name.value)
    stage, engine = parallelism.zero_stage or 0, parallelism.engine.value
    if offload.activations is not Device.NONE and parallelism.engine is not EngineName.SINGLE:
        message = _("{field} is cpu, which is not predicted for {engine} yet.")
        raise refuse("offload.activations", message, engine=engine)
    if offload.activations is not Device.NONE and scenario.model.is_bare_count:
        message = _("{field} does nothing for a parameter count: give a catalogue name or a config.json.")
        raise refuse("offload.activations", message)
    for name, device, lowest in (("optimizer", offload.optimizer, 1), ("parameters", offload.parameters, 3)):
        if device is Device.NONE:
            continue
        if not ENGINE_OPTIONS[parallelism.engine].offloads:
            message = _("{field} is {value}, which {engine} does not do here: choose deepspeed.")
            raise refuse(f"offload.{name}", message, value=device, engine=engine)
        needed = 3 if device is Device.NVME else lowest
        if stage < needed:
            message = _("{field} is {value}, which needs ZeRO stage {needed} or above; the stage is {stage}.")
            raise refuse(f"offload.{name}", message, value=device, needed=needed, stage=stage)
    if offload.optimizer is not Device.NONE and optimizer.bits == 8:
        message = _(
            "{field} is {value}, but DeepSpeed's CPU optimizer keeps 32-bit states: set recipe.optimizer.bits to 32."
        )
        raise refuse("offload.optimizer", message, value=offload.optimizer)

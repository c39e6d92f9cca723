"""What fused, float8 and compiled kernels say of the rest of a scenario: what is refused, and what does nothing."""

from typing import TYPE_CHECKING

from memcore.engine_options import EngineName
from memcore.hardware import accelerator
from memcore.i18n import gettext as _
from memcore.recipes import ConventionName, DType
from memcore.scenario.fields import refuse
from memcore.scenario.float8 import FP8_CAPABILITY, FP8_MULTIPLE
from memcore.scenario.parts import FUSED_TARGETS, Lora, Method, Quantization

if TYPE_CHECKING:
    from memcore.scenario.whole import Scenario


def check_fused_kernels(scenario: "Scenario") -> None:
    """What fused adapters ask for is what their code does: see memcore.trace.fused_lora."""
    names, recipe, field = scenario.workload.fused_kernels, scenario.recipe, "workload.fused_kernels"
    if len(set(names)) < len(names):
        raise refuse(field, _("{field} names a kernel twice."))
    if names and scenario.model.is_bare_count:
        raise refuse(field, _("{field} does nothing for a parameter count: give a catalogue name or a config.json."))
    if "lora" not in names:
        return
    if recipe.method is Method.FULL:
        raise refuse(field, _("{field} names lora, which does nothing when recipe.method is full."))
    lora = recipe.lora or Lora()
    if others := [target for target in lora.targets if target not in FUSED_TARGETS]:
        message = _(
            "{field} names lora, which is predicted for adapters on {allowed} alone; there are some on {others}."
        )
        raise refuse(field, message, allowed=", ".join(FUSED_TARGETS), others=", ".join(others)[:80])
    if recipe.quantization is Quantization.NF4:
        raise refuse(field, _("{field} names lora, which unpacks 4-bit weights of double quantisation alone."))
    plain = scenario.parallelism.engine in (EngineName.SINGLE, EngineName.DDP)  # others cast adapters themselves
    if plain and lora.adapter_dtype is not recipe.computed_dtype and not lora.autocast:
        message = _("{field} names lora, which takes {dtype} adapters under autocast alone: set recipe.lora.autocast.")
        raise refuse(field, message, dtype=lora.adapter_dtype.value.upper())


def check_compile(scenario: "Scenario") -> None:
    """What torch compiles whole, as a trace does: see memcore.trace.compiling."""
    work, field = scenario.workload, "workload.compile"
    if not work.compile:
        return
    if scenario.model.is_bare_count:
        raise refuse(field, _("{field} does nothing for a parameter count: give a catalogue name or a config.json."))
    engine = scenario.parallelism.engine
    if engine not in (EngineName.SINGLE, EngineName.DDP, EngineName.FSDP2):
        raise refuse(field, _("{field} is set, which is not predicted for {engine} yet."), engine=engine.value)
    if scenario.recipe.method is Method.QLORA:
        raise refuse(field, _("{field} is set, which is not predicted for weights packed in 4 bits yet."))
    if work.fused_kernels:
        raise refuse(field, _("{field} is set, which is not predicted with workload.fused_kernels yet."))
    if scenario.model.code != "transformers":
        raise refuse(field, _("{field} is set, which is predicted for transformers' code alone."))
    if work.reentrant or work.checkpointing == "attention":
        message = _("{field} is set, but torch compiles no reentrant checkpoint, and none of the attention alone.")
        raise refuse(field, message)


def check_fp8(scenario: "Scenario") -> None:
    """Float8 products as a trace has them: see memcore.trace.float8."""
    recipe, parallelism, field = scenario.recipe, scenario.parallelism, "recipe.fp8"
    _check_fp8_gather(scenario)
    if recipe.fp8 is None:
        return
    if scenario.model.is_bare_count:
        raise refuse(field, _("{field} does nothing for a parameter count: give a catalogue name or a config.json."))
    if parallelism.engine not in (EngineName.SINGLE, EngineName.DDP, EngineName.FSDP2) or scenario.shards_on_host:
        message = _("{field} is set, which is predicted for a single GPU, DDP, and FSDP2 without offloading alone.")
        raise refuse(field, message)
    if (
        recipe.method is not Method.FULL
        or scenario.model.code != "transformers"
        or scenario.model.experts == "separate"
    ):
        message = _("{field} is set, which is predicted for full training of transformers' code of today alone.")
        raise refuse(field, message)
    if recipe.computed_dtype is not DType.BF16 or recipe.convention is ConventionName.AMP_AUTOCAST:
        message = _("{field} is set, which is predicted beside computation in BF16, without autocast, alone.")
        raise refuse(field, message)
    device = accelerator(scenario.hardware.gpu)
    if device.compute_capability is None or float(device.compute_capability) < FP8_CAPABILITY:
        message = _("{field} is set, but {gpu} is not known to multiply in float8: choose an NVIDIA GPU from Ada on.")
        raise refuse(field, message, gpu=device.label)
    tokens = scenario.workload.micro_batch * scenario.workload.seq_len
    if tokens % FP8_MULTIPLE:
        message = _("{field} is set, which takes multiples of {multiple} tokens; there are {tokens} in a micro-batch.")
        raise refuse(field, message, multiple=FP8_MULTIPLE, tokens=tokens)


def _check_fp8_gather(scenario: "Scenario") -> None:
    recipe, field = scenario.recipe.fp8, "engine_config.enable_fsdp_float8_all_gather"
    if not scenario.fsdp2_config.enable_fsdp_float8_all_gather:
        return
    if recipe != "tensorwise":
        message = _("{field} is set, which torchao has for recipe.fp8 = tensorwise alone; it is {recipe}.")
        raise refuse(field, message, recipe=recipe or _("none of them"))
    if scenario.parallelism.dp_shard == 1:
        raise refuse(field, _("{field} is set, which does nothing but among several ranks."))

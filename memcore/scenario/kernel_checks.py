"""What fused kernels and compiled layers say of the rest of a scenario: what is refused, and what does nothing."""

from typing import TYPE_CHECKING

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.scenario.fields import refuse
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

"""The question: one training run, checked when it is made.

What is invalid, what does nothing for the chosen engine, and what is not predicted yet is refused with one
sentence. :func:`parse_scenario` turns whatever is wrong with outside data into a UserError.
"""

from memcore.scenario.engine_configs import DdpConfig, DeepSpeedConfig, Fsdp1Config, Fsdp2Config, LlmcConfig, ZeroConfig
from memcore.scenario.fields import MAX_GPUS, MAX_TOKENS
from memcore.scenario.float8 import FP8_CAPABILITY, FP8_MULTIPLE, FP8_RECIPES
from memcore.scenario.losses import DEFAULT_CHUNKS, IN_CHUNKS, OWN_KERNELS, Loss, Upcast, usual_upcast
from memcore.scenario.parts import (
    Device,
    Hardware,
    Lora,
    Method,
    Model,
    Offload,
    Optimizer,
    Parallelism,
    Quantization,
    Recipe,
    Workload,
)
from memcore.scenario.reading import (
    MAX_SCENARIO_CHARS,
    decode_config,
    decode_json,
    exported_data,
    movable_data,
    parse_scenario,
    scenario_data,
)
from memcore.scenario.whole import Scenario

__all__ = [
    "DEFAULT_CHUNKS",
    "FP8_CAPABILITY",
    "FP8_MULTIPLE",
    "FP8_RECIPES",
    "IN_CHUNKS",
    "MAX_GPUS",
    "MAX_SCENARIO_CHARS",
    "MAX_TOKENS",
    "OWN_KERNELS",
    "DdpConfig",
    "DeepSpeedConfig",
    "Device",
    "Fsdp1Config",
    "Fsdp2Config",
    "Hardware",
    "LlmcConfig",
    "Lora",
    "Loss",
    "Method",
    "Model",
    "Offload",
    "Optimizer",
    "Parallelism",
    "Quantization",
    "Recipe",
    "Scenario",
    "Upcast",
    "Workload",
    "ZeroConfig",
    "decode_config",
    "decode_json",
    "exported_data",
    "movable_data",
    "parse_scenario",
    "scenario_data",
    "usual_upcast",
]

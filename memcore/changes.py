"""Other settings of the same run, one at a time: the changes that remedies are.

Each takes the scenario and gives the parts that change, or None where the change does not apply or is made already.
"""

from collections.abc import Callable, Mapping
from typing import Any

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.optimizers import OPTIMIZERS
from memcore.scenario import Device, Method, Scenario, movable_data, parse_scenario

# The parts of a scenario that change, None for one that is left out.
Parts = Mapping[str, Mapping[str, Any] | None]
Change = Callable[[Scenario], Parts | None]


def changed(scenario: Scenario, parts: Parts) -> Scenario:
    """The scenario with these parts changed. Raises UserError where that is none."""
    data = movable_data(scenario)
    for name, part in parts.items():
        data[name] = None if part is None else {**(data.get(name) or {}), **part}
    return parse_scenario({name: part for name, part in data.items() if part is not None})


# Dividing states: by a stage where the engine has stages, else by FSDP2; what is divided already goes among more GPUs.


def zero_stage(stage: int) -> Change:
    """DeepSpeed's next stage that divides this state."""

    def change(scenario: Scenario) -> Parts | None:
        spread = scenario.parallelism
        if not ENGINE_OPTIONS[spread.engine].stages or spread.stage >= stage or spread.dp < 2:
            return None
        return {"parallelism": {"zero_stage": stage}}

    return change


def as_fsdp2(scenario: Scenario) -> Parts | None:
    """What DDP keeps whole, divided."""
    if scenario.parallelism.engine is not EngineName.DDP:
        return None
    spread = {"engine": EngineName.FSDP2.value, "dp_shard": scenario.parallelism.dp, "dp_replicate": 1}
    return {"parallelism": spread, "engine_config": None}


def two_gpus(scenario: Scenario) -> Parts | None:
    """A run on one GPU, divided between two."""
    if scenario.parallelism.engine is not EngineName.SINGLE:
        return None
    return {"hardware": {"gpus": 2}, "parallelism": {"engine": "fsdp2"}, "offload": None}


def more_gpus(divided_from: int) -> Change:
    """Twice the GPUs, where what is divided from this stage on is."""

    def change(scenario: Scenario) -> Parts | None:
        spread = scenario.parallelism
        if not ENGINE_OPTIONS[spread.engine].shards or spread.stage < divided_from:
            return None
        gpus = {"gpus": 2 * scenario.hardware.gpus}
        return {"hardware": gpus, "parallelism": {"dp_shard": 2 * spread.dp_shard}}

    return change


def one_group(scenario: Scenario) -> Parts | None:
    """No replicas: all ranks divide."""
    spread = scenario.parallelism
    if not ENGINE_OPTIONS[spread.engine].shards or spread.dp_replicate == 1:
        return None
    return {"parallelism": {"dp_shard": spread.dp, "dp_replicate": 1}}


# What leaves the GPU, and what is trained


def offloaded(part: str) -> Change:
    """A part in host memory."""

    def change(scenario: Scenario) -> Parts | None:
        return {"offload": {part: Device.CPU.value}} if getattr(scenario.offload, part) is Device.NONE else None

    return change


def shards_on_host(scenario: Scenario) -> Parts | None:
    """FSDP's shards in host memory."""
    fsdp = scenario.parallelism.engine in (EngineName.FSDP1, EngineName.FSDP2)
    return {"engine_config": {"cpu_offload": True}} if fsdp and not scenario.shards_on_host else None


def trained_as(method: Method) -> Change:
    """A method that trains fewer parameters."""

    def change(scenario: Scenario) -> Parts | None:
        kinds = [Method.FULL, Method.LORA, Method.QLORA]
        if kinds.index(method) <= kinds.index(scenario.recipe.method):
            return None
        return {"recipe": {"method": method.value}}

    return change


def optimizer_with(**fields: Any) -> Change:
    """The optimizer with these fields."""

    def change(scenario: Scenario) -> Parts | None:
        now = scenario.recipe.optimizer.model_dump(mode="json")
        return None if now == now | fields else {"recipe": {"optimizer": now | fields}}

    return change


def in_8_bits(scenario: Scenario) -> Parts | None:
    """The optimizer's 8-bit form, where it has one."""
    rule = OPTIMIZERS[scenario.recipe.optimizer.name]
    return optimizer_with(bits=8, implementation=None)(scenario) if rule.has_8bit else None


# What one step processes, and how


def workload_with(**fields: Any) -> Change:
    """The workload with these fields."""

    def change(scenario: Scenario) -> Parts | None:
        return {"workload": fields} if any(getattr(scenario.workload, n) != v for n, v in fields.items()) else None

    return change


def halved(name: str) -> Change:
    """A field of the workload, halved."""

    def change(scenario: Scenario) -> Parts | None:
        now = getattr(scenario.workload, name)
        return {"workload": {name: now // 2}} if now > 1 else None

    return change


# The engines' own settings


def zero_divided(**halved: int) -> Change:
    """DeepSpeed's settings divided by these."""

    def change(scenario: Scenario) -> Parts | None:
        if scenario.parallelism.engine is not EngineName.DEEPSPEED:
            return None
        zero = scenario.zero_config.model_dump(mode="json", exclude_none=True)
        smaller = {name: zero[name] // by for name, by in halved.items()}
        return {"engine_config": {"zero_optimization": zero | smaller}}

    return change


def engine_with(engine: EngineName, **fields: Any) -> Change:
    """An engine's settings with these fields."""

    def change(scenario: Scenario) -> Parts | None:
        return {"engine_config": fields} if scenario.parallelism.engine is engine else None

    return change

"""The settings among which one is suggested: a few values of each, from the model's own sizes and the defaults.

Sizes are in elements. Symbols: Psi parameters, h hidden size.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from memcore.budget import Budget
from memcore.engine_options import EngineName
from memcore.engines import Inputs
from memcore.inventory import Inventory
from memcore.scenario import DeepSpeedConfig, Device, Fsdp2Config, Scenario, ZeroConfig
from memcore.suggest.traffic import overlaps_communication

Settings = Mapping[str, int | bool]
Grid = Mapping[str, tuple[int | bool, ...]]
# Least buckets that can be asked for, in elements, and the one that is unless another is asked for.
DEFAULT_LEAST_BUCKET = 10**7
LEAST_BUCKETS = tuple(first * 10**power for power in (6, 7, 8) for first in (1, 2, 5))
# Sizes that are tried whatever the model: powers of ten, and DeepSpeed's default bucket.
_BUCKETS = (10**7, 10**8, 500_000_000)
_SUB_GROUPS = (10**7, 10**8, 10**9)
_DEFAULTS = ZeroConfig()


def inputs_of(budget: Budget, scenario: Scenario | None = None) -> Inputs:
    """What the engine is given: for the budget's scenario, or for one that differs in the engine's settings only."""
    return Inputs(
        scenario=scenario or budget.scenario,
        states=budget.states,
        inventory=budget.inventory,
        timeline=budget.timeline,
    )


def settings_now(budget: Budget) -> dict[str, int | bool]:
    """The settings in force of those that a suggestion may change; empty where there is nothing to choose."""
    scenario = budget.scenario
    if scenario.parallelism.engine is EngineName.FSDP2:
        reshards = scenario.fsdp2_config.reshard_after_forward
        return {"reshard_after_forward": reshards} if budget.inventory and scenario.parallelism.dp_shard > 1 else {}
    if scenario.parallelism.engine is not EngineName.DEEPSPEED or _has_no_bucket(budget):
        return {}
    given = {name: getattr(scenario.zero_config, name) for name in _names(budget)}
    return {**given, "overlap_comm": overlaps_communication(inputs_of(budget))}


def _has_no_bucket(budget: Budget) -> bool:
    """Stage 0, and stage 1 with BF16 and FP32 accumulation, a class of its own that reads no bucket's size
    (deepspeed 0.19.8, runtime/bf16_optimizer.py)."""
    stage = budget.scenario.parallelism.stage
    return stage == 0 or (stage == 1 and budget.states.trained_as.accumulate_dtype is not None)


def _names(budget: Budget) -> list[str]:
    """The settings of zero_optimization that decide memory or time at the scenario's stage."""
    names = ["overlap_comm", "reduce_bucket_size"]
    if budget.scenario.parallelism.stage < 3:
        return names
    if budget.inventory is not None and budget.scenario.parallelism.dp_shard > 1:
        names += [
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
        ]
    # Offloaded, sub-groups take the host's memory, which is not judged here.
    return names if budget.scenario.offload.optimizer is not Device.NONE else [*names, "sub_group_size"]


def settings_grid(budget: Budget, least_bucket: int | None = None) -> Grid:
    """The values of each setting that are tried, the present one among them; of buckets only `least_bucket`, if one is
    given, and larger ones.

    Empty where the engine has nothing to choose.
    """
    now = settings_now(budget)
    model = _model_sizes(budget.inventory)
    grid: dict[str, tuple[int | bool, ...]] = {}
    for name, value in now.items():
        if isinstance(value, bool):
            grid[name] = (value, not value)
        elif name == "reduce_bucket_size":
            most = max(budget.states.trained, 1)
            sizes = {value, *(min(size, most) for size in (*_BUCKETS, *model.get(name, ())))}
            if least_bucket is not None:
                sizes = {least_bucket, *(size for size in sizes if size >= least_bucket)}
            grid[name] = tuple(sorted(sizes))
        else:
            usual = _SUB_GROUPS if name == "sub_group_size" else (getattr(_DEFAULTS, name),)
            grid[name] = tuple(sorted({value, *usual, *model.get(name, ())}))
    return grid


def _model_sizes(inventory: Inventory | None) -> dict[str, tuple[int, ...]]:
    """Values that follow from the model, by setting.

    Buckets: Hugging Face's "auto" (h^2; transformers 5.24, integrations/deepspeed.py), the largest parameter, which
    would else bypass the bucket, and some layers. The prefetcher: nothing, or a layer ahead; one or two layers alive,
    half the model or all of it; a parameter kept over a layer, over half the model or all of it, or always (between
    two uses at most 3 Psi pass: forward, its repetition, backward). No parameter kept whole.
    """
    if inventory is None:
        return {}
    layer, psi, hidden = inventory.largest_layer.numel, inventory.n_params, inventory.shapes.hidden_size
    largest = inventory.largest_tensor[1].numel
    buckets = (largest, layer, 2 * layer, 4 * layer)
    return {
        "reduce_bucket_size": (hidden**2, *buckets) if hidden else buckets,
        "stage3_prefetch_bucket_size": (0, layer),
        "stage3_max_live_parameters": (layer, 2 * layer, psi // 2, psi),
        "stage3_max_reuse_distance": (0, layer, psi // 2, psi, 3 * psi),
        "stage3_param_persistence_threshold": (0,),
        "sub_group_size": (layer,),
    }


def candidates(grid: Grid) -> Iterator[dict[str, int | bool]]:
    """Every combination of the grid's values."""
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def with_settings(scenario: Scenario, settings: Settings) -> Scenario:
    """The scenario with those settings of its engine, the others kept. The values must be allowed ones."""
    if scenario.parallelism.engine is EngineName.FSDP2:
        given = {**scenario.fsdp2_config.model_dump(), **settings}
        if not given["reshard_after_forward"]:
            given["reshard_exception"] = None  # nothing is left to be excepted from
        return scenario.model_copy(update={"engine_config": Fsdp2Config.model_validate(given)})
    zero = scenario.zero_config.model_copy(update=settings)
    return scenario.model_copy(update={"engine_config": DeepSpeedConfig(zero_optimization=zero)})

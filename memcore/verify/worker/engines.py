"""A scenario's training step under the real engine: model, wrapping, optimizer, and the loop's three calls.

Ranks only: imports torch, transformers and, for its stages, deepspeed.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from memcore.engine_options import EngineName
from memcore.loading import build_model, load_config
from memcore.recipes import ConventionName
from memcore.scenario import DdpConfig, Scenario
from memcore.states import precision_of
from memcore.suggest.configs import ds_config_of
from memcore.trace import kernels
from memcore.trace.building import DTYPES, IMPLEMENTATIONS
from memcore.trace.fsdp_units import own_units

_LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The training loop's calls. `forward` returns the loss; `step` comes after each backward and knows itself
    whether it is the last of the micro-steps; `close` lets go of everything."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    step: Callable[[bool], None]
    parameters: Callable[[], list[torch.Tensor]]
    optimizer: Any
    close: Callable[[], None]


def start(scenario: Scenario, device: torch.device) -> Training:
    """Build the model and hand it to the engine, as the engine's documentation says to."""
    builders = {
        EngineName.SINGLE: _loop,
        EngineName.DDP: _ddp,
        EngineName.FSDP1: _fsdp1,
        EngineName.FSDP2: _fsdp2,
        EngineName.DEEPSPEED: _deepspeed,
    }
    torch.manual_seed(0)
    return builders[scenario.parallelism.engine](scenario, _model(scenario, device), _batch(scenario, device))


def _config(scenario: Scenario) -> Mapping[str, Any]:
    assert scenario.model.config is not None, "a case's model is a config"
    return scenario.model.config


def _model(scenario: Scenario, device: torch.device) -> nn.Module:
    kernels.register()
    config = load_config(_config(scenario))
    config.use_cache = False
    config._attn_implementation = IMPLEMENTATIONS[scenario.workload.attention]  # noqa: SLF001  told before it is built
    dtype = DTYPES[precision_of(scenario.recipe).convention.param_dtype.value]
    model: nn.Module = build_model(config, device=str(device), dtype=dtype)
    if scenario.workload.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": scenario.workload.reentrant})  # type: ignore[operator]
    return model.train()


def _batch(scenario: Scenario, device: torch.device) -> dict[str, torch.Tensor]:
    work, words = scenario.workload, load_config(_config(scenario)).get_text_config().vocab_size
    ids = torch.arange(work.micro_batch * work.seq_len, device=device).remainder(words)
    ids = ids.view(work.micro_batch, work.seq_len)
    return {"input_ids": ids, "labels": ids}


def _optimizer(scenario: Scenario, model: nn.Module, implementation: str | None) -> torch.optim.Optimizer:
    asked = scenario.recipe.optimizer
    choice: dict[str, Any] = {
        "foreach": {"foreach": True}, "fused": {"fused": True}, "for_loop": {"foreach": False}, None: {"foreach": True}
    }[implementation]  # fmt: skip
    parameters = [each for each in model.parameters() if each.requires_grad]
    match asked.name.value:
        case "adam":
            return torch.optim.Adam(parameters, lr=_LEARNING_RATE, **choice)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, **choice)
        case "sgd":
            return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9 if asked.momentum else 0.0, **choice)
    raise ValueError(f"no real run has the optimizer {asked.name.value}")


def _loop(scenario: Scenario, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Training:
    """The plain PyTorch loop, of a model that an engine may have wrapped."""
    optimizer = _optimizer(scenario, model, scenario.recipe.optimizer.implementation)
    casts = scenario.recipe.convention is ConventionName.AMP_AUTOCAST
    kind = next(model.parameters()).device.type

    def forward() -> Any:
        # DeepSpeed switches the cache of casts off for the whole process.
        with torch.autocast(kind, torch.bfloat16, cache_enabled=True) if casts else nullcontext():
            return model(**batch).loss

    def step(last: bool) -> None:
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return Training(
        forward=forward,
        backward=lambda loss: loss.backward(),
        step=step,
        parameters=lambda: list(model.parameters()),
        optimizer=optimizer,
        close=lambda: None,
    )


def _ddp(scenario: Scenario, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Training:
    config = scenario.engine_config
    views = isinstance(config, DdpConfig) and config.gradient_as_bucket_view
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    return _loop(scenario, wrapped, batch)


def _fsdp1(scenario: Scenario, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy

    config, convention = scenario.fsdp1_config, precision_of(scenario.recipe).convention
    mixed = None
    if convention.compute_dtype is not convention.param_dtype:
        computed = DTYPES[convention.compute_dtype.value]
        mixed = MixedPrecision(
            param_dtype=computed, reduce_dtype=DTYPES[convention.reduce_dtype.value], buffer_dtype=computed
        )
    layers = set(map(id, decoder_layers(model)))
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    spread, device = scenario.parallelism, next(model.parameters()).device
    names = ["NO_SHARD"] if spread.dp_shard == 1 else ["SHARD_GRAD_OP", "FULL_SHARD"]
    mesh = None
    if spread.dp_replicate > 1 and spread.dp_shard > 1:
        names = ["_HYBRID_SHARD_ZERO2", "HYBRID_SHARD"]
        shape = (spread.dp_replicate, spread.dp_shard)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[names[-1 if config.reshard_after_forward else 0]],
        device_mesh=mesh,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in layers),
        mixed_precision=mixed,
        cpu_offload=CPUOffload(offload_params=config.cpu_offload),
        backward_prefetch=prefetch[config.backward_prefetch],
        forward_prefetch=config.forward_prefetch,
        use_orig_params=config.use_orig_params,
        device_id=device,
    )
    if config.checkpoint_around_units and scenario.workload.checkpointing == "full":
        around_units(decoder_layers(wrapped), reentrant=scenario.workload.reentrant)
    training = _loop(scenario, wrapped, batch)
    if not (config.no_sync and scenario.workload.grad_accum > 1):
        return training
    return waiting(training, wrapped.no_sync, scenario.workload.grad_accum)


def around_units(layers: list[nn.Module], *, reentrant: bool) -> None:
    """A checkpoint around each of the units instead of within it, as a model's loop before transformers 4.53 has it."""
    for unit in layers:
        inner: Any = unit.module
        inner.gradient_checkpointing = False
        call = unit.forward

        def forward(hidden: torch.Tensor, *args: Any, call: Any = call, **kwargs: Any) -> Any:
            return checkpoint(partial(call, **kwargs), hidden, *args, use_reentrant=reentrant)

        unit.forward = forward


def waiting(training: Training, no_sync: Callable[[], Any], micro_steps: int) -> Training:
    """The same loop with forward and backward of all micro-steps but the last within `no_sync`."""
    done = 0

    def synced() -> Any:
        return nullcontext() if (done + 1) % micro_steps == 0 else no_sync()

    def forward() -> Any:
        with synced():
            return training.forward()

    def backward(loss: Any) -> None:
        nonlocal done
        with synced():
            training.backward(loss)
        done += 1

    return replace(training, forward=forward, backward=backward)


def _fsdp2(scenario: Scenario, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    spread, config = scenario.parallelism, scenario.fsdp2_config
    kind = next(model.parameters()).device.type
    shape: tuple[int, ...] = (spread.dp_shard,)
    names: tuple[str, ...] = ("shard",)
    if spread.dp_replicate > 1:
        shape, names = (spread.dp_replicate, spread.dp_shard), ("replicate", "shard")
    given: dict[str, Any] = {"mesh": init_device_mesh(kind, shape, mesh_dim_names=names)}
    convention = precision_of(scenario.recipe).convention
    if convention.compute_dtype is not convention.param_dtype:
        given["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES[convention.compute_dtype.value], reduce_dtype=DTYPES[convention.reduce_dtype.value]
        )
    if config.cpu_offload:
        given["offload_policy"] = CPUOffloadPolicy()
    layers = decoder_layers(model)
    for layer in layers:
        unit = "last_block" if layer is layers[-1] else "block"
        fully_shard(layer, reshard_after_forward=config.reshards(unit), **given)
    for unit, modules in own_units(model, layers, config.fsdp_units).items():
        fully_shard(modules, reshard_after_forward=config.reshards(unit), **given)
    fully_shard(model, reshard_after_forward=config.reshard_after_forward, **given)
    return _loop(scenario, model, batch)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers: its longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def deepspeed_config(scenario: Scenario) -> dict[str, Any]:
    """The ds_config.json of a scenario, with DeepSpeed's own optimizer where no other was asked for."""
    config = {
        **ds_config_of(scenario, scenario.zero_config.model_dump(mode="json", exclude_none=True)),
        # torch's own optimizers are welcome.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if scenario.recipe.optimizer.implementation is None:
        name = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[scenario.recipe.optimizer.name.value]
        config["optimizer"] = {"type": name, "params": {"lr": _LEARNING_RATE}}
    return config


def _deepspeed(scenario: Scenario, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Training:
    import deepspeed

    implementation = scenario.recipe.optimizer.implementation
    client = None if implementation is None else _optimizer(scenario, model, implementation)
    engine, *_others = deepspeed.initialize(model=model, config=deepspeed_config(scenario), optimizer=client)

    def close() -> None:
        engine.destroy()
        engine.optimizer = None

    return Training(
        forward=lambda: engine(**batch).loss,
        backward=engine.backward,
        step=lambda _last: engine.step(),
        parameters=lambda: list(model.parameters()),
        optimizer=engine.optimizer,
        close=close,
    )


def init_distributed(engine: EngineName, device: torch.device) -> None:
    """Join the other ranks, over gloo on the CPU and NCCL on GPUs."""
    if engine is EngineName.DEEPSPEED:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl", verbose=False)
    elif not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")

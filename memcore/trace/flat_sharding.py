"""FSDP1 in a trace: torch's own ``FullyShardedDataParallel`` on fake tensors, among as many ranks as the user has.

Worker processes only: imports torch. As in :mod:`memcore.trace.sharding` the process group is torch's fake one. Source:
torch 2.13, distributed/fsdp: _flat_param.py (a unit's parameters are one flat tensor, whole only in a storage that is
resized), _runtime_utils.py (when it is gathered, let go of, and reduced).

A unit is a decoder layer, or all that is recomputed together; with adapters apart each of their linear modules is one
too; all else is the root's. What a CUDA rank does otherwise: gathers and reductions run on streams of their own, and
the host waits for the second last of them (limit_all_gathers). The allocated bytes fall when the host gives a block
back, so they are the same.
"""
# ruff: noqa: SLF001  FSDP1 has no public way to ask

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    _flat_param,
    _runtime_utils,
    fully_sharded_data_parallel,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from memcore.trace.building import DTYPES
from memcore.trace.recorder import Recorder
from memcore.trace.replacing import replaced
from memcore.trace.request import FlatSharding
from memcore.trace.tape import GATHERED, REDUCED
from memcore.trace.units import Unit

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def shard(root: nn.Module, sharding: FlatSharding, mesh: DeviceMesh) -> nn.Module:
    """FSDP1 around a model on fake tensors, in place of the model."""
    mixed = None
    if sharding.compute_dtype is not None:
        computed = DTYPES[sharding.compute_dtype]
        mixed = MixedPrecision(
            param_dtype=computed, reduce_dtype=DTYPES[sharding.reduce_dtype], buffer_dtype=computed
        )  # fmt: skip
    with _mended(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frozen weights beside trained ones take gradients too: what is asked for
        sharded = FullyShardedDataParallel(
            root,
            sharding_strategy=_strategy(sharding),
            device_mesh=mesh if _is_hybrid(sharding) else None,
            auto_wrap_policy=CustomPolicy(_is_unit(root, sharding)),
            ignored_states=ignored(root, sharding) or None,
            mixed_precision=mixed,
            cpu_offload=CPUOffload(offload_params=sharding.cpu_offload),
            backward_prefetch=_PREFETCH[sharding.backward_prefetch],
            forward_prefetch=sharding.forward_prefetch,
            use_orig_params=sharding.use_orig_params,
            device_id=torch.device("cpu"),
        )
        # At the first forward else, with storages that are taken and given back for good.
        _runtime_utils._lazy_init(sharded, sharded)
    _know_order(sharded)
    return sharded


def _is_hybrid(sharding: FlatSharding) -> bool:
    return sharding.shard > 1 and sharding.replicate > 1


def _strategy(sharding: FlatSharding) -> ShardingStrategy:
    if sharding.shard == 1:
        return ShardingStrategy.NO_SHARD
    if _is_hybrid(sharding):
        resharding, kept = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
    else:
        resharding, kept = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    return resharding if sharding.reshard_after_forward else kept


def _know_order(sharded: FullyShardedDataParallel) -> None:
    """The order of forwards, by which units are gathered ahead in them, as the first step would have left it: modules
    run in the order in which they are made (_exec_order_utils.py, record_pre_forward)."""
    order = sharded._exec_order_data
    for state in FullyShardedDataParallel.fsdp_modules(sharded):
        if (handle := state._handle) is not None:
            handle._pre_forward_order_index = len(order.handles_pre_forward_order)
            order.handles_pre_forward_order.append(handle)
    order._iter = 1


def ignored(root: nn.Module, sharding: FlatSharding) -> list[nn.Parameter]:
    """The parameters that FSDP1 leaves whole on every rank."""
    if sharding.adapters != "ignored":
        return []
    return [parameter for parameter in root.parameters() if parameter.requires_grad]


def kept(sharded: nn.Module, sharding: FlatSharding) -> list[torch.Tensor]:
    """This rank's flat shards, and what is not sharded. A sharded parameter's own tensor is another from time to
    time."""
    states = FullyShardedDataParallel.fsdp_modules(sharded)
    flat = [state._handle.flat_param._local_shard for state in states if state._handle]
    host = [state._handle.flat_param._cpu_grad for state in states if state._handle and sharding.cpu_offload]
    return [*flat, *host, *ignored(sharded, sharding)]


def _is_unit(root: nn.Module, sharding: FlatSharding) -> Callable[[nn.Module], bool]:
    """Decoder layers; where the checkpoint is within the unit, what is recomputed together. Adapters apart: every
    module without children that holds a trained weight (peft 0.21, utils/other.py, fsdp_auto_wrap_policy)."""
    layers = [unit for unit in root.modules() if isinstance(unit, Unit)]
    chosen = {id(layer) for unit in layers for layer in unit.layers} if sharding.around else set(map(id, layers))

    def is_unit(module: nn.Module) -> bool:
        if id(module) in chosen:
            return True
        weight = getattr(module, "weight", None)
        leaf = not any(True for _child in module.children())
        return sharding.adapters == "apart" and leaf and weight is not None and bool(weight.requires_grad)

    return is_unit


@contextmanager
def observed(root: nn.Module, recorder: Recorder, reduce: Callable[[], None]) -> Iterator[None]:
    """Let the recorder know what FSDP1 does, until the block ends. `reduce` is called when the backward of all units
    is done."""
    layers = [unit for unit in root.modules() if isinstance(unit, Unit)]
    inner = {id(module) for unit in layers for module in unit.modules()}
    whole = {id(module): unit for unit in layers for module in (unit, *unit.layers)}

    def unit_of(sharded: Any) -> Unit | None:
        """The unit that FSDP1 is around, or in whose checkpoint it is."""
        return whole.get(id(sharded)) or whole.get(id(sharded._fsdp_wrapped_module))

    def place(handle: Any) -> str:
        return "layer" if id(handle._fully_sharded_module) in inner else "root"

    def unshard(original: Any, state: Any, handle: Any, *args: Any) -> Any:
        if not handle:
            return original(state, handle, *args)
        with recorder.telling(GATHERED, place(handle)):
            return original(state, handle, *args)

    def pre_backward(original: Any, state: Any, module: Any, handle: Any, *args: Any) -> Any:
        if (unit := unit_of(module)) is not None:
            unit.before_backward(lambda: None)
        return original(state, module, handle, *args)

    def pre_forward(original: Any, state: Any, *args: Any) -> Any:
        # A unit's gather belongs to the unit.
        if (unit := unit_of(state)) is not None:
            unit.before_forward()
        return original(state, *args)

    def post_forward(original: Any, *args: Any) -> Any:
        # What follows the last unit begins when that is let go of.
        recorder.next_segment, following = None, recorder.next_segment
        result = original(*args)
        recorder.next_segment = following
        return result

    def post_backward(original: Any, state: Any, handle: Any, *args: Any) -> Any:
        gradient = handle.flat_param.grad
        if place(handle) == "root":
            reduce()
        if gradient is not None:
            recorder.tell(gradient, REDUCED, place(handle))
        del gradient
        with recorder.telling(REDUCED, place(handle)):
            return original(state, handle, *args)

    def reduced(original: Any, state: Any, handle: Any, gradient: torch.Tensor) -> Any:
        recorder.is_gradient(gradient)
        return original(state, handle, gradient)

    def resize(original: Any, tensor: torch.Tensor, *args: Any) -> Any:
        recorder.before_resize(tensor)
        result = original(tensor, *args)
        recorder.after_resize(tensor)
        return result

    def finish(original: Any, *args: Any) -> None:
        reduce()
        original(*args)

    with _mended(), ExitStack() as stack:
        for owner, name, replacement in (
            (fully_sharded_data_parallel, "_pre_forward", pre_forward),
            (fully_sharded_data_parallel, "_post_forward", post_forward),
            # Its end counts as an operation.
            (torch.autograd.profiler, "record_function", lambda _original, _name: nullcontext()),
            (_runtime_utils, "_unshard", unshard),
            (_runtime_utils, "_pre_backward_hook", pre_backward),
            (_runtime_utils, "_post_backward_hook", post_backward),
            (_runtime_utils, "_post_reduce_grad_callback", reduced),
            (_runtime_utils, "_post_backward_final_callback", finish),
            (_flat_param, "_alloc_storage", resize),
            (_flat_param, "_free_storage", resize),
        ):
            stack.enter_context(replaced(owner, name, replacement))
        yield


@contextmanager
def _mended() -> Iterator[None]:
    """Tell storages apart by themselves, since those of fake tensors have no addresses; and copy to the device what is
    on the host, which on fake tensors is the same."""

    def same(_original: Any, one: torch.Tensor, other: torch.Tensor) -> bool:
        return _storage(one) == _storage(other)

    def allocated(_original: Any, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().nbytes() > 0

    def reshard(_original: Any, state: Any) -> None:
        handle = state._handle
        if handle is None or _storage(handle.flat_param) == _storage(handle.flat_param._local_shard):
            return
        _runtime_utils._reshard(state, handle, _runtime_utils._should_free_in_backward(state, handle))

    def to_device(original: Any, handle: Any) -> bool:
        ran = bool(original(handle))
        if not handle._offload_params or handle._uses_param_mixed_precision:
            return ran
        handle.flat_param.data = handle.flat_param.data.clone()
        return True

    stream: Any = torch.cpu.Stream
    with (
        replaced(torch.Tensor, "pin_memory", lambda _original, tensor: tensor),
        replaced(_flat_param.FlatParamHandle, "pre_unshard", to_device),
        replaced(_flat_param, "_same_storage", same),
        replaced(_flat_param, "_data_ptr_allocated", allocated),
        replaced(_runtime_utils, "_catch_all_reshard", reshard),
    ):
        # The CPU's has no such method, since it has nothing to wait for.
        stream.synchronize = lambda _stream: None
        try:
            yield
        finally:
            del stream.synchronize


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number

"""FSDP2 in a trace: torch's own ``fully_shard`` on fake tensors, among as many ranks as the user has.

Worker processes only: imports torch. The process group is torch's fake one (torch 2.13, testing/_internal/
distributed/fake_pg.py): this process is rank 0 of any number, and collectives do nothing.

A unit of FSDP2 is a decoder layer, inside its checkpoint where it is recomputed, as transformers has it; all else
(embedding, final norm, head) is the root's, or in units of its own (memcore.trace.fsdp_units). What a CUDA rank does
otherwise: gathers and reductions run on streams of their own. But blocks are taken and given back by the same Python
references in the same order, and events keep none of them longer, so the allocated bytes are the same; only what the
allocator reserves grows by a pool per stream.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcore.trace.building import DTYPES
from memcore.trace.fsdp_units import own_units
from memcore.trace.recorder import Recorder
from memcore.trace.replacing import replaced
from memcore.trace.request import FlatSharding, Sharding
from memcore.trace.tape import GATHERED, HOST, REDUCED
from memcore.trace.units import Unit
from memcore.units import ceil_div, round_up


@contextmanager
def ranks(sharding: Sharding | FlatSharding) -> Iterator[DeviceMesh]:
    """All ranks of a run in this process, until the block ends. To be entered outside a fake tensor mode."""
    world = sharding.shard * sharding.replicate
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        if sharding.replicate > 1:
            names = ("dp_replicate", "dp_shard")
            yield init_device_mesh("cpu", (sharding.replicate, sharding.shard), mesh_dim_names=names)
        else:
            yield init_device_mesh("cpu", (world,))
    finally:
        torch.distributed.destroy_process_group()


class Root(nn.Module):
    """The step's forward as one module, the root of FSDP2's units: with the loss, or what goes into one outside."""

    def __init__(self, model: Any, run: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, tokens: torch.Tensor) -> Any:
        """Forward and loss."""
        return self._run(tokens)


def shard(root: Root, sharding: Sharding, compute_dtype: str | None, mesh: DeviceMesh) -> None:
    """Apply FSDP2 to a model on fake tensors. `compute_dtype` None: the shards' own."""
    computed = None if compute_dtype is None else DTYPES[compute_dtype]
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=DTYPES[sharding.reduce_dtype])
    offload = CPUOffloadPolicy(pin_memory=False) if sharding.cpu_offload else OffloadPolicy()
    apply = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    layers = _layers(root)
    with replaced(_fsdp_param, "_chunk_with_empty", _first_chunk):
        for layer in layers:
            apply(layer, reshard_after_forward=sharding.reshards("last_block" if layer is layers[-1] else "block"))
        for name, modules in own_units(root.model, layers, sharding.fsdp_units).items():
            apply(modules, reshard_after_forward=sharding.reshards(name))
        # The root's default: kept from its forward to its backward, which follows at once.
        apply(root, reshard_after_forward=None if sharding.reshard_after_forward else False)
    if sharding.gathers_float8:
        from memcore.trace.float8 import gather_in_float8  # torch's compiler takes a second to import

        gather_in_float8(parameter for layer in layers for parameter in _group(layer).fsdp_params)


def _first_chunk(_original: Any, tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Rank 0's part of a tensor, in place of the list of all ranks' parts, of which a rank uses its own and the
    first (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_common.py, _chunk_with_empty)."""
    return [tensor.narrow(dim, 0, ceil_div(tensor.shape[dim], num_chunks))]


@contextmanager
def observed(root: Root, recorder: Recorder, reduce: Callable[[], None], *, units: str, on_cpu: bool) -> Iterator[None]:
    """Let the recorder know what FSDP2 does, until the block ends. `reduce` is called when the gradients of the root,
    or of an embedding by itself, are about to be reduced: the end of the backward. `on_cpu`: with what the CPU's
    kernels take for a moment."""
    layers = _layers(root)
    groups = {"root": _group(root)} if _group(root) is not None else {}
    groups |= {name: _group(modules[0]) for name, modules in own_units(root.model, layers, units).items()}
    of_others = {id(each): name for name, group in groups.items() for each in group.fsdp_params}

    def place(parameters: Sequence[Any]) -> str:
        return of_others.get(id(parameters[0]), "layer")

    def gather(original: Any, parameters: Any, *args: Any) -> Any:
        with recorder.telling(GATHERED, place(parameters)):
            return original(parameters, *args)

    def copy_out(parameters: Any, original: Any) -> None:
        with recorder.telling(GATHERED, place(parameters)):
            original()

    def reduction(original: Any, parameters: Any, gradients: Any, *args: Any) -> Any:
        for gradient in gradients:
            recorder.tell(gradient, REDUCED, place(parameters))
        del gradient
        with recorder.telling(REDUCED, place(parameters)):
            return original(parameters, gradients, *args)

    def copy_in(original: Any, gradients: Any, into: torch.Tensor, world: int) -> None:
        if on_cpu:
            recorder.for_a_moment(_copies(gradients, into, world))
        original(gradients, into, world)

    def resize(original: Any, tensor: torch.Tensor) -> None:
        recorder.before_resize(tensor)
        original(tensor)
        recorder.after_resize(tensor)

    def at_end(original: Any, *args: Any) -> None:
        reduce()
        original(*args)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (_fsdp_param_group, "foreach_all_gather", gather),
            (_fsdp_param_group, "foreach_reduce", reduction),
            (_fsdp_collectives, "foreach_reduce_scatter_copy_in", copy_in),
            (_fsdp_param, "alloc_storage", resize),
            (_fsdp_param, "free_storage", resize),
            # None of their inputs has a gradient: torch comes to them in this order once all else is done.
            (groups.get("root", groups.get("embedding")), "post_backward", at_end),
        ):
            stack.enter_context(replaced(owner, name, replacement))
        for unit in _units(root):
            for layer in unit.layers:
                stack.enter_context(replaced(_group(layer), "pre_backward", unit.before_backward))
        for each in [*groups.values(), *map(_group, layers)]:
            stack.enter_context(replaced(each, "wait_for_unshard", partial(copy_out, each.fsdp_params)))
        if _group(layers[0]).fsdp_params[0].offload_to_cpu:
            stack.enter_context(_on_host(recorder))
        yield


@contextmanager
def _on_host(recorder: Recorder) -> Iterator[None]:
    """Shards and their gradients on the host, which on fake tensors is this device too: what is copied from there is
    made here, and what is copied there is not counted.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, all_gather_inputs (one shard after the other is
    copied, then cast); _fsdp_collectives.py, foreach_reduce (gradients go to the host one after the other, out of one
    buffer).
    """

    def to_device(parameter: Any) -> list[torch.Tensor]:
        copy = parameter._sharded_param_data.clone()  # noqa: SLF001  what torch copies itself
        return [copy if parameter.param_dtype is None else copy.to(parameter.param_dtype)]

    def to_host(original: Any, parameter: Any, gradient: torch.Tensor) -> Any:
        with recorder.telling(HOST, ""):
            return original(parameter, gradient.clone())

    kind: Any = _fsdp_param.FSDPParam
    inputs = kind.all_gather_inputs
    kind.all_gather_inputs = property(to_device)
    try:
        with replaced(kind, "to_sharded_dtensor", to_host):
            yield
    finally:
        kind.all_gather_inputs = inputs


def _copies(gradients: Sequence[torch.Tensor], into: torch.Tensor, world: int) -> int:
    """Bytes of the copies that the CPU makes of gradients on their way into one buffer: padded ones of all whose rows
    the ranks do not divide, and of one after the other in the buffer's dtype.

    Source: torch 2.13, aten/src/ATen/native/TensorShape.cpp, _pad_chunk and _chunk_cat_out. CUDA has a kernel that
    needs neither (aten/src/ATen/native/cuda/TensorShape.cu, _chunk_cat_out_cuda_contiguous).
    """
    padded = [round_up(len(each), world) * (each.numel() // len(each)) * each.element_size() for each in gradients]
    uneven = sum(size for size, each in zip(padded, gradients, strict=True) if len(each) % world)
    return uneven + (max(padded) if into.dtype != gradients[0].dtype else 0)


def _units(root: Root) -> list[Unit]:
    return [module for module in root.modules() if isinstance(module, Unit)]


def _layers(root: Root) -> list[nn.Module]:
    return [layer for unit in _units(root) for layer in unit.layers]


def _group(module: Any) -> Any:
    """A unit's parameters, as FSDP2 has them together; None for a root that has none left."""
    return module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001  no public way to ask

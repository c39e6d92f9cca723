"""Records every storage that fake tensors take and give back, with the segment of the step it falls in.

Worker processes only: imports torch.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Bytes that an operation's kernel takes beside its results, and whether they follow the rounded sequence length.
Hidden = Callable[[Any, tuple[Any, ...]], list[tuple[int, bool]]]

# What autograd does in place on tensors that nobody else holds, but with a new result where a dispatch mode
# watches: sums of gradients that arrive at one tensor from several sides (torch 2.13, torch/csrc/autograd/
# input_buffer.cpp, accumulate: isTensorSubclassLike), and the scattering of a gradient into zeros (torch/csrc/
# autograd/FunctionsManual.cpp, index_backward; aten/src/ATen/native/TensorAdvancedIndexing.cpp, gather_backward).
_IN_PLACE_UNWATCHED = frozenset(
    {
        torch.ops.aten.add.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.scatter_add.default,
        torch.ops.aten.index_add.default,
    }
)
_DEVICE = torch.ops.prim.device.default
_SUM = torch.ops.aten.add.Tensor
_CAST = torch.ops.aten._to_copy.default  # noqa: SLF001
_current_node: Callable[[], Any] = torch._C._current_autograd_node  # noqa: SLF001  torch's only way to ask
_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # noqa: SLF001


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor; any other as it is."""
    return getattr(tensor, "_local_tensor", tensor)


@dataclass(slots=True)
class Change:
    """Bytes taken (or given back, where negative) in a segment of the step, by a module. `storage` numbers the
    storage, None for what an operation takes for a moment. `recomputed`: taken while autograd records, which in a
    backward is a forward that runs again. `cast`: a parameter in another dtype. `rounded`: the bytes follow the rounded
    sequence length. `stream`: the number of the stream that it is taken on, by first appearance."""

    segment: str
    storage: int | None
    num_bytes: int
    module: str
    recomputed: bool = False
    cast: bool = False
    rounded: bool = False
    stream: int = 0


class Recorder(TorchDispatchMode):
    """A dispatch mode that sees each operation's results. A storage counts from its first appearance until
    Python lets go of it, which for fake tensors is when the allocator would.

    `known`: storages that are not counted (weights, buffers and input). `hidden`: see there. `paths` names the
    modules; in a backward the module is the one whose forward made the autograd node that runs. Operations on tensors
    that hold others (shards, float8 values) come again as operations on those.
    """

    def __init__(
        self,
        known: list[torch.Tensor],
        hidden: Hidden,
        paths: Mapping[int, str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {local_tensor(tensor).untyped_storage()._cdata for tensor in known}  # noqa: SLF001  its identity
        self._hidden = hidden
        self._paths = paths
        self._running: list[str] = []
        self._made_by: dict[int, str] = {}
        self._alive: dict[int, int] = {}
        self._next = 0
        self.segment = "before"
        # The segment that begins with the next operation; what is given back until then belongs to the one before.
        self.next_segment: str | None = None
        self.changes: list[Change] = []
        # The storages that are, or become, parameters' gradients.
        self.gradients: set[int] = set()
        # The category and module of storages that are told, not found.
        self.told: dict[int, tuple[str, str]] = {}
        self._telling: tuple[str, str] | None = None
        # The number of changes when the backward began.
        self.forward_changes = 0
        # For a sum made in the backward the older of its operands: a gradient that waited for the other.
        self._waited: dict[int, int] = {}
        # A storage whose successor may be itself, and the change in which the successor was taken.
        self._succeeded: tuple[int, Change] | None = None
        self._same_as: dict[int, int] = {}
        self._looking = True
        # On fake tensors streams are torch.cpu's, which do nothing but say which is the current one.
        self._streams: dict[int, int] = {id(torch.cpu.current_stream()): 0}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether functions stay compiled where this mode watches."""
        return True

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is done inside the block takes nothing."""
        self._looking = False
        try:
            yield
        finally:
            self._looking = True

    def see(self, tensor: torch.Tensor) -> None:
        """A tensor that was made unseen takes its bytes from here on."""
        self._begin_segment()
        self._see(tensor, self._module())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is done inside the block."""

        def enter(module: nn.Module, _args: Any) -> None:
            self._running.append(self._paths.get(id(module), "other"))

        def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
            self._running.pop()

        # Always: a recomputed forward is left by an exception as soon as it has made all that is wanted.
        hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation, then count the storages that are new among its results."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        # Torch asks every fake tensor for its device, twice as often as it computes.
        if func is _DEVICE:
            return args[0].fake_device
        if not self._looking:
            return func(*args, **(kwargs or {}))
        self._begin_segment()
        module = self._module()
        results = func(*args, **(kwargs or {}))
        momentary = [(size, rounded) for size, rounded in self._hidden(func, args) if size]
        for size, rounded in momentary:
            self.changes.append(Change(self.segment, None, size, module, rounded=rounded, stream=self._stream()))
        if isinstance(results, torch.Tensor):
            change = self._see(results, module)
            if change is not None:
                change.cast = func is _CAST and args[0].untyped_storage()._cdata in self._known  # noqa: SLF001
                if func in _IN_PLACE_UNWATCHED and not torch.is_grad_enabled():
                    self._expect_in_place(args[0], change)
                if func is _SUM and not torch.is_grad_enabled():
                    self._remember_operands(args, change)
        else:
            for tensor in tree_leaves(results):
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor, module)
        for size, rounded in momentary:
            self.changes.append(Change(self.segment, None, -size, module, rounded=rounded))
        return results

    def _begin_segment(self) -> None:
        self._succeeded = None
        if self.next_segment is not None:
            self.segment, self.next_segment = self.next_segment, None

    def _stream(self) -> int:
        """The current stream's number."""
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))

    def _module(self) -> str:
        """Whose work the operation is."""
        if self._running:
            module = self._running[-1]
            # The newest node, if this operation is the first to be run for it, is its own.
            self._made_by.setdefault(_next_number() - 1, module)
            return module
        node = _current_node()
        return "loss" if node is None else self._made_by.get(node._sequence_nr(), "other")  # noqa: SLF001

    def _see(self, tensor: torch.Tensor, module: str) -> Change | None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        if key in self._alive or key in self._known:
            return None
        size = storage.nbytes()
        if not size:
            return None
        self._take(key, size, module)
        weakref.finalize(storage, self._free, key, size, module)
        return self.changes[-1]

    def _take(self, key: int, size: int, module: str) -> None:
        number = self._next
        self._next += 1
        self._alive[key] = number
        again, stream = torch.is_grad_enabled(), self._stream()
        self.changes.append(Change(self.segment, number, size, module, recomputed=again, stream=stream))
        if self._telling is not None:
            self.told[number] = self._telling

    def _expect_in_place(self, operand: torch.Tensor, taken: Change) -> None:
        """The result is in the operand's place if the operand goes before the next operation: nobody held it. A view
        never is: it holds the tensor that it is a view of."""
        storage = operand.untyped_storage()
        number = None if operand._is_view() else self._alive.get(storage._cdata)  # noqa: SLF001
        whole = storage.nbytes() == operand.numel() * operand.element_size() == taken.num_bytes
        if number is not None and whole:
            self._succeeded = (number, taken)

    def _remember_operands(self, args: tuple[Any, ...], taken: Change) -> None:
        storages = (arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor))  # noqa: SLF001
        numbers = [self._alive[key] for key in storages if key in self._alive]
        if numbers and taken.storage is not None:
            self._waited[taken.storage] = min(numbers)

    def _free(self, key: int, size: int, module: str) -> None:
        number = self._alive.pop(key, None)
        if number is None:
            return
        if self._succeeded is not None and self._succeeded[0] == number:
            _number, taken = self._succeeded
            assert taken.storage is not None
            self._same_as[taken.storage] = self._same_as.get(number, number)
            taken.num_bytes = 0
            self._succeeded = None
            return
        number = self._same_as.get(number, number)
        self.changes.append(Change(self.segment, number, -size, module))

    def before_resize(self, tensor: torch.Tensor) -> None:
        """A tensor's storage is given back, or taken anew, while the tensor stays."""
        storage = tensor.untyped_storage()
        number = self._alive.pop(storage._cdata, None)  # noqa: SLF001
        if number is not None:
            number = self._same_as.get(number, number)
            self.changes.append(Change(self.segment, number, -storage.nbytes(), self._module()))

    def after_resize(self, tensor: torch.Tensor) -> None:
        """The same, done: it counts as another storage from here on."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._take(storage._cdata, storage.nbytes(), self._module())  # noqa: SLF001

    def for_a_moment(self, num_bytes: int) -> None:
        """So many bytes are taken, and given back at once; nothing where they are 0."""
        module = self._module()
        if not num_bytes:
            return
        for size in (num_bytes, -num_bytes):
            self.changes.append(Change(self.segment, None, size, module))

    @contextmanager
    def telling(self, category: str, module: str) -> Iterator[None]:
        """What is taken inside the block is of that category and module."""
        before, self._telling = self._telling, (category, module)
        try:
            yield
        finally:
            self._telling = before

    def tell(self, tensor: torch.Tensor, category: str, module: str) -> None:
        """A tensor's storage is of that category and module."""
        number = self._alive.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        if number is not None:
            self.told[self._same_as.get(number, number)] = (category, module)

    def begin_backward(self) -> None:
        """From here on gradients are states."""
        self.forward_changes = len(self.changes)

    def is_gradient(self, tensor: torch.Tensor | None) -> None:
        """Mark a parameter's gradient: a state, not an activation."""
        number = None if tensor is None else self._alive.get(local_tensor(tensor).untyped_storage()._cdata)  # noqa: SLF001
        while number is not None:
            self.gradients.add(self._same_as.get(number, number))
            # A tied weight's gradient from the head waits through the backward for the embedding's.
            number = self._waited.get(number)

"""Records every storage that fake tensors take and give back, with the segment of the step it falls in.

Worker processes only: imports torch.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Hidden = Callable[[Any, tuple[Any, ...]], int]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees each operation's results. A storage counts from its first appearance until
    Python lets go of it, which for fake tensors is when the allocator would.

    `known`: storages that are not counted (weights and buffers). `hidden` gives the bytes that an
    operation's kernel takes for a moment beside its results, which no tensor shows.
    """

    def __init__(self, known: list[torch.Tensor], hidden: Hidden) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}  # noqa: SLF001  a storage's identity
        self._hidden = hidden
        self._alive: dict[int, int] = {}
        self._next = 0
        self.segment = "before"
        # (segment, storage number, change in bytes), in order.
        self.events: list[tuple[str, int, int]] = []
        self.gradients: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation, then count the storages that are new among its results."""
        results = func(*args, **(kwargs or {}))
        momentary = self._hidden(func, args)
        if momentary:
            self._change(-1, momentary)
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        if momentary:
            self._change(-1, -momentary)
        return results

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        if key in self._alive or key in self._known:
            return
        size = storage.nbytes()
        if size:
            number = self._next
            self._next += 1
            self._alive[key] = number
            self._change(number, size)
            weakref.finalize(storage, self._free, key, number, size)

    def _free(self, key: int, number: int, size: int) -> None:
        self._alive.pop(key, None)
        if number not in self.gradients:
            self._change(number, -size)

    def _change(self, number: int, size: int) -> None:
        self.events.append((self.segment, number, size))

    def is_gradient(self, tensor: torch.Tensor | None) -> None:
        """Mark a parameter's gradient: from here on it is a state, not an activation."""
        if tensor is None:
            return
        number = self._alive.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        if number is not None and number not in self.gradients:
            self.gradients.add(number)
            self._change(number, -tensor.untyped_storage().nbytes())

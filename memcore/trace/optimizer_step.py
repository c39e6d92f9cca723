"""What torch's optimizers make for a moment in their step, from the step itself on fake tensors.

Worker processes only: imports torch.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memcore.trace.request import Step


def step_transient(parameters: Sequence[tuple[tuple[int, ...], int]], step: Step, dtype: torch.dtype) -> int:
    """The most bytes that the optimizer's second step takes beside gradients and states.

    `parameters`: shapes in order, and how many tensors each of them stands for. What torch's foreach operations make,
    they make for all tensors at once, value by value, so one tensor of all values stands for them; what is made for
    one tensor after the other is the largest's.
    """
    if step.implementation == "foreach":
        sizes = [sum(_values(shape) * count for shape, count in parameters)]
    else:
        sizes = [_values(shape) for shape, _count in parameters]
    stepped = []
    for values in sizes:
        parameter = nn.Parameter(torch.empty(values, dtype=dtype))
        parameter.grad = torch.empty_like(parameter)
        stepped.append(parameter)
    optimizer = _optimizer(stepped, step)
    optimizer.step()
    with _Peak() as recorder:
        optimizer.step()
    most: int = recorder.most
    return most


def _values(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _optimizer(parameters: Iterable[nn.Parameter], step: Step) -> torch.optim.Optimizer:
    foreach = step.implementation == "foreach"
    match step.name:
        case "sgd":
            momentum = 0.9 if step.momentum else 0.0
            return torch.optim.SGD(parameters, momentum=momentum, foreach=foreach, fused=step.implementation == "fused")
        case _:
            kind: Any = torch.optim.Adam if step.name == "adam" else torch.optim.AdamW
            made: torch.optim.Optimizer = kind(parameters, foreach=foreach, fused=step.implementation == "fused")
            return made


class _Peak(TorchDispatchMode):
    """The most bytes of results alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._level = 0
        self._known: set[int] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, list) else [results]:
            if isinstance(result, torch.Tensor):
                self._see(result, args)
        return results

    def _see(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  a storage's identity
        if key in self._known or any(_storage_of(arg) == key for arg in args):
            return
        self._known.add(key)
        self._level += storage.nbytes()
        self.most = max(self.most, self._level)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._level -= size


def _storage_of(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None  # noqa: SLF001

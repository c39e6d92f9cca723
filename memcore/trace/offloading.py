"""Saved activations that are kept on the host from the forward to the backward.

Source: torchtune 0.5, training/_activation_offloading.py, OffloadActivations with streams; the head's own are left on
the GPU (training/_activation_offloading.py, get_act_offloading_ctx_manager).

Worker processes only: imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

# Tensors of fewer bytes stay, and so many of the latest wait for their copies: min_offload_size, max_fwd_stash_size.
_LEAST_BYTES, _WAITING = 1024, 5
_current_node: Any = torch._C._current_autograd_node  # noqa: SLF001  torch's only way to ask


@contextmanager
def offloaded(decoder: nn.Module) -> Iterator[None]:
    """What autograd saves of a decoder's forward is on the host, until the block ends."""
    own = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Host():
            return own(*args, **kwargs)

    decoder.forward = forward
    try:
        yield
    finally:
        decoder.forward = own


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor on the host: its number, and what it is made anew from."""

    number: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Host(saved_tensors_hooks):
    """A copy starts as autograd saves a tensor, and the tensor goes when four more were saved after it. What is brought
    back goes once a later node has run."""

    def __init__(self) -> None:
        self._saved = 0
        self._waiting: dict[int, torch.Tensor] = {}
        self._back: dict[int, torch.Tensor] = {}
        self._node: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._saved += 1
        small = tensor.numel() * tensor.element_size() < _LEAST_BYTES
        if small or isinstance(tensor, nn.Parameter | nn.Buffer):
            return tensor
        for number in [each for each in self._waiting if each <= self._saved - _WAITING]:
            del self._waiting[number]
        self._waiting[self._saved] = tensor
        return _Copy(self._saved, tensor.shape, tensor.stride(), tensor.dtype)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Copy):
            kept: torch.Tensor = packed
            return kept
        node, done = _current_node(), []
        if node is not self._node:
            self._node, done = node, list(self._back)
        tensor = self._waiting.get(packed.number)
        if tensor is None:
            tensor = torch.empty_strided(packed.shape, packed.strides, dtype=packed.dtype)
            self._back[packed.number] = tensor

        def after(_gradients: Any, _given: Any) -> None:
            self._waiting.clear()
            for number in done:
                self._back.pop(number, None)

        if node is not None:
            node.register_hook(after)
        return tensor

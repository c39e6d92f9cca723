"""Fused adapters of an attention's projections in a trace: what they keep, and what they write in place.

Source of all: fms-acceleration of December 2024, plugins/fused-ops-and-kernels, fused_ops/unsloth_lora/
bnb/fast_lora.py (LoRA_QKV, LoRA_W) and utils.py (matmul_lora, fast_dequantize); models/utils.py puts them in place.

Worker processes only: imports torch.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

_QKV, _OUTPUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
_DEVICE = "cpu"  # of fake tensors


def fuse_adapters(model: nn.Module) -> bool:
    """Fuse the adapters of each attention's query, key and value where all three have one, and of its output.

    Returns whether there are any."""
    found = False
    for module in list(model.modules()):
        projections = [getattr(module, name, None) for name in _QKV]
        if all(map(_is_adapted, projections)):
            together = _Together(projections)
            for place, projection in enumerate(projections):
                _run_instead(projection, partial(together, place=place))
            found = True
        output = getattr(module, _OUTPUT, None)
        if _is_adapted(output):
            _run_instead(output, partial(_alone, output))
            found = True
    return found


def _is_adapted(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("lora_A", "lora_B", "base_layer"))


def _run_instead(module: Any, forward: Any) -> None:
    module.forward = forward


class _Together:
    """Three projections as one: the first that is called works all of them out, the others give theirs away."""

    def __init__(self, projections: Sequence[Any]) -> None:
        self._projections = projections
        self._results: dict[int, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor, *_args: Any, place: int, **_kwargs: Any) -> torch.Tensor:
        if place == 0:
            self._results = dict(enumerate(_adapted(self._projections, values)))
        return self._results.pop(place)


def _alone(projection: Any, values: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return _adapted([projection], values)[0]


def _adapted(projections: Sequence[Any], values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    adapters = [part[name].weight for each in projections for name in each.active_adapters[:1]
                for part in (each.lora_A, each.lora_B)]  # fmt: skip
    results: tuple[torch.Tensor, ...] = _Adapted.apply(values, projections, *adapters)  # type: ignore[no-untyped-call]
    return results


class _Adapted(torch.autograd.Function):
    """Projections of one input, with their adapters. Kept are the input and, for each, what dropout leaves of it; the
    input's gradient takes the place of the input where there are several."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=_DEVICE)  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, values: torch.Tensor, projections: Sequence[Any], *adapters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows = values.view(-1, values.shape[-1])
        results, inputs = [], []
        for place, projection in enumerate(projections):
            name = projection.active_adapters[0]
            first, second = (adapter.t() for adapter in adapters[2 * place : 2 * place + 2])
            weight = _whole(projection.base_layer, rows.dtype)
            result = torch.matmul(rows, weight.t())
            del weight
            dropped = projection.lora_dropout[name](rows)
            result += (dropped @ first.to(rows.dtype)) @ (projection.scaling[name] * second.to(rows.dtype))
            if projection.base_layer.bias is not None:
                result += projection.base_layer.bias
            results.append(result.view(*values.shape[:-1], -1))
            inputs.append(dropped)
        ctx.projections = projections
        ctx.save_for_backward(values, *adapters, *inputs)
        return tuple(results)

    @staticmethod
    @torch.amp.custom_bwd(device_type=_DEVICE)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        projections, (values, *kept) = ctx.projections, ctx.saved_tensors
        inputs = kept[2 * len(projections) :]
        pairs = list(zip(*[iter(kept[: 2 * len(projections)])] * 2, strict=True))
        rows = values.view(-1, values.shape[-1])
        given = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        of_adapters: list[torch.Tensor] = []
        for gradient, dropped, (first, second) in zip(given, inputs, pairs, strict=True):
            of_first = dropped.t() @ (gradient @ second)
            of_second = (first @ dropped.t()) @ gradient
            of_first *= 1.0
            of_second *= 1.0
            of_adapters += [of_first.t(), of_second.t()]
        of_rows: Any = None
        for gradient, dropped, projection, (first, second) in zip(given, inputs, projections, pairs, strict=True):
            weight = _whole(projection.base_layer, rows.dtype)
            if of_rows is not None:
                of_rows += gradient @ weight
            elif len(projections) > 1:
                of_rows = torch.matmul(gradient, weight, out=rows)
            else:
                of_rows = gradient @ weight
            del weight
            scale = projection.scaling[projection.active_adapters[0]]
            of_rows += (dropped != 0) * (gradient @ second.to(rows.dtype) @ (scale * first.to(rows.dtype)))
        return of_rows.view(values.shape), None, *of_adapters


def _whole(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """A weight as it is multiplied with: unpacked where it is packed."""
    unpacked = getattr(base, "unpacked", None)
    weight: torch.Tensor = base.weight if unpacked is None else unpacked(dtype)
    return weight

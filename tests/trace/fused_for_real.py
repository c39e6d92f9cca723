"""Fused kernels as plain loops over rows, with real numbers: what a kernel library's code keeps and writes in place.

Written anew from the mathematics; a row's own temporaries are all that they take beside it.
"""

from typing import Any

import torch
from torch import nn


def fuse(model: nn.Module, names: tuple[str, ...], rotary: Any) -> None:
    """Put the kernels of those names into a real Llama; `rotary` is the module whose function the layers call."""
    for module in model.modules():
        if "rmsnorm" in names and type(module).__name__ == "LlamaRMSNorm":
            module.forward = _bound(Norm, module)
        if "swiglu" in names and type(module).__name__ == "LlamaMLP":
            module.forward = _gated(module)
        if "lora" in names and type(module).__name__ == "LlamaAttention":
            _fuse_attention(module)
    if "rope" in names:
        rotary.apply_rotary_pos_emb = rotated


def _bound(function: Any, norm: Any) -> Any:
    return lambda values: function.apply(values, norm.weight, norm.variance_epsilon)


class Norm(torch.autograd.Function):
    """y = w x / rms(x): keeps x and 1 / rms(x); dx is written over dy, and w gets no gradient."""

    @staticmethod
    def forward(ctx: Any, values: Any, weight: Any, epsilon: float) -> Any:
        rows = values.view(-1, values.shape[-1])
        scales, result = torch.empty(len(rows)), torch.empty_like(rows)
        for row, out, index in zip(rows, result, range(len(rows)), strict=True):
            scales[index] = torch.rsqrt(row.float().square().mean() + epsilon)
            torch.mul(row, weight, out=out).mul_(scales[index])
        ctx.save_for_backward(rows, weight, scales)
        return result.view(values.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows, weight, scales = ctx.saved_tensors
        given = gradient.view(rows.shape)
        for row, over, scale in zip(rows, given, scales, strict=True):
            normed, weighted = row * scale, over * weight
            over.copy_(scale * (weighted - normed * (weighted * normed).mean()))
        return given.view(gradient.shape), None, None


class Gate(torch.autograd.Function):
    """silu(a) b: keeps a and b; their gradients are written over them."""

    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        result = torch.empty_like(gate)
        for a, b, out in zip(gate.flatten(0, 1), up.flatten(0, 1), result.flatten(0, 1), strict=True):
            out.copy_(nn.functional.silu(a) * b)
        ctx.save_for_backward(gate, up)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gate, up = ctx.saved_tensors
        for a, b, over in zip(gate.flatten(0, 1), up.flatten(0, 1), gradient.flatten(0, 1), strict=True):
            sigmoid = torch.sigmoid(a)
            of_up, of_gate = over * a * sigmoid, over * b * sigmoid * (1 + a * (1 - sigmoid))
            a.copy_(of_gate)
            b.copy_(of_up)
        return gate.view_as(gate), up.view_as(up)


def _gated(mlp: Any) -> Any:
    return lambda values: mlp.down_proj(Gate.apply(mlp.gate_proj(values), mlp.up_proj(values)))


class Rotation(torch.autograd.Function):
    """Pairs of values turned in place, and their gradients turned back in place."""

    @staticmethod
    def forward(ctx: Any, heads: Any, cos: Any, sin: Any) -> Any:
        ctx.tables = cos.squeeze(0), sin.squeeze(0)
        result = heads.view(heads.shape[0] * heads.shape[1], -1).view(heads.shape)
        _turn(result, *ctx.tables, 1)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        result = gradient.reshape(gradient.shape[0] * gradient.shape[1], -1).view(gradient.shape)
        _turn(result, *ctx.tables, -1)
        return result, None, None


def _turn(heads: Any, cos: Any, sin: Any, sign: int) -> None:
    half = heads.shape[-1] // 2
    for sequence in heads:
        for token, c, s in zip(sequence, cos[:, :half], sin[:, :half], strict=True):
            first, second = token[:, :half].clone(), token[:, half:].clone()
            token[:, :half] = first * c - sign * second * s
            token[:, half:] = second * c + sign * first * s


def rotated(queries: Any, keys: Any, cos: Any, sin: Any) -> Any:
    """What takes the place of the model's rotary function."""
    return tuple(Rotation.apply(heads.transpose(1, 2), cos, sin).transpose(1, 2) for heads in (queries, keys))


class Projected(torch.autograd.Function):
    """y = x W' + s (d(x) A') B' for several W, A and B: keeps x and each d(x); dx is written over x, where several."""

    @staticmethod
    def forward(ctx: Any, values: Any, drops: Any, scale: float, *weights: Any) -> Any:
        rows = values.view(-1, values.shape[-1])
        triples = [weights[place : place + 3] for place in range(0, len(weights), 3)]
        dropped = [drop(rows) for drop in drops]
        results = []
        for kept, (whole, first, second) in zip(dropped, triples, strict=True):
            result = rows @ whole.t()
            result += (kept @ first.t()) @ (scale * second.t())
            results.append(result.view(*values.shape[:-1], -1))
        ctx.scale = scale
        ctx.save_for_backward(values, *weights, *dropped)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values, *rest = ctx.saved_tensors
        count, scale = len(gradients), ctx.scale
        weights, dropped = rest[: 3 * count], rest[3 * count :]
        rows = values.view(-1, values.shape[-1])
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        found: list[Any] = []
        for place in range(count):
            _whole, first, second = weights[3 * place : 3 * place + 3]
            of_first = scale * (dropped[place].t() @ (flat[place] @ second)).t()
            of_second = scale * ((first @ dropped[place].t()) @ flat[place]).t()
            found += [None, of_first, of_second]
        result: Any = None
        for place in range(count):
            whole, first, second = weights[3 * place : 3 * place + 3]
            if place:
                result += flat[place] @ whole
            else:
                result = torch.mm(flat[0], whole, out=rows) if count > 1 else flat[0] @ whole
            result += (dropped[place] != 0) * (flat[place] @ second @ (scale * first))
        return result.view(values.shape), None, None, *found


def _fuse_attention(attention: Any) -> None:
    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    waiting: list[Any] = []

    def first(values: Any, *_args: Any, **_kwargs: Any) -> Any:
        waiting.extend(_project(three, values))
        return waiting.pop(0)

    def later(_values: Any, *_args: Any, **_kwargs: Any) -> Any:
        return waiting.pop(0)

    for module, forward in zip(three, (first, later, later), strict=True):
        module.forward = forward
    output = attention.o_proj
    output.forward = lambda values, *_args, **_kwargs: _project([output], values)[0]


def _project(modules: list[Any], values: Any) -> Any:
    weights = [
        weight
        for each in modules
        for weight in (each.base_layer.weight, each.lora_A["default"].weight, each.lora_B["default"].weight)
    ]
    drops = [each.lora_dropout["default"] for each in modules]
    return Projected.apply(values, drops, modules[0].scaling["default"], *weights)

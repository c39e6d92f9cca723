"""litgpt's adapters, within the joint projection and on other linear modules.

Source: Lightning-AI/litgpt, lora.py, LoRAQKVLinear and LoRALinear, of October 2023 (0cc02afa).

Worker processes only: imports torch.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.trace.litgpt import Attention, Sizes
from memcore.trace.request import Adapters

# Weights are packed in 4 bits from FP16, whatever the dtype of the computation. Source: lightning 2.1, fabric/plugins/
# precision/bitsandbytes.py, _Linear4bit._quantize_weight.
PACKED_FROM = torch.float16
# transformers' names of the parts of the joint projection, and of litgpt's other modules.
_PARTS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
# litgpt has an adapter for queries and one for values where no more is asked for: of a joint projection's own adapter
# they have the size.
_JOINT = ("query_key_value", "qkv_proj", "c_attn")
_OTHERS = {
    "proj": ("o_proj", "dense", "down_proj", "fc2", "dense_4h_to_h"),
    "fc": ("fc1", "dense_h_to_4h"),
    "fc_1": ("gate_proj",),
    "fc_2": ("up_proj",),
    "lm_head": ("lm_head", "embed_out"),
}


def attach_litgpt(model: Any, adapters: Adapters) -> None:
    """Put adapters on a model's targets and freeze all the rest. Raises UserError for a target that is none."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    targets = set(adapters.targets)
    known = {*_PARTS, *_JOINT, "all-linear", *(name for names in _OTHERS.values() for name in names)}
    if unknown := sorted(targets - known):
        message = _("litgpt's code has no adapter on {names}.")
        raise UserError(message.format(names=", ".join(unknown)[:80]), "recipe.lora.targets")
    for module in list(model.modules()):
        if isinstance(module, Attention):
            wanted = _wanted(targets)
            if any(wanted):
                module.attn = JointAdapted(module.attn, adapters, module.sizes, wanted)
            _wrap(module, "proj", ("o_proj", "dense"), targets, adapters)
        elif hasattr(module, "fc") or hasattr(module, "fc_1"):
            for name in ("fc", "fc_1", "fc_2", "proj"):
                _wrap(module, name, _OTHERS[name], targets - {"o_proj", "dense"}, adapters)
    _wrap(model, "lm_head", _OTHERS["lm_head"], targets - {"all-linear"}, adapters)


def _wanted(targets: set[str]) -> tuple[bool, bool, bool]:
    if "all-linear" in targets:
        return True, True, True
    joint = bool(targets & set(_JOINT))
    return joint or "q_proj" in targets, "k_proj" in targets, joint or "v_proj" in targets


def _wrap(owner: Any, name: str, names: tuple[str, ...], targets: set[str], adapters: Adapters) -> None:
    base = getattr(owner, name, None)
    if isinstance(base, nn.Linear) and targets & {"all-linear", *names}:
        setattr(owner, name, Adapted(base, adapters))


class Adapted(nn.Module):
    """A linear module and its adapter."""

    def __init__(self, base: Any, adapters: Adapters) -> None:
        super().__init__()
        self.linear = base
        self.lora_dropout = nn.Dropout(adapters.dropout) if adapters.dropout else nn.Identity()
        self.lora_A = nn.Parameter(torch.empty((adapters.rank, base.in_features), device="meta"))
        self.lora_B = nn.Parameter(torch.empty((base.out_features, adapters.rank), device="meta"))

    @property
    def weight(self) -> Any:
        """The base's own."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's result and the adapter's."""
        pretrained = self.linear(x)
        lora = (self.lora_dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * 2.0
        result: torch.Tensor = pretrained + lora
        return result


class JointAdapted(nn.Module):
    """The joint projection and one adapter for those of its parts that are `wanted`; the others get zeros."""

    def __init__(self, base: Any, adapters: Adapters, sizes: Sizes, wanted: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.linear = base
        self.lora_dropout = nn.Dropout(adapters.dropout) if adapters.dropout else nn.Identity()
        widths = (sizes.heads * sizes.head, sizes.groups * sizes.head, sizes.groups * sizes.head)
        self.shapes = [width for width, is_wanted in zip(widths, wanted, strict=True) if is_wanted]
        self.equal, self.whole = sizes.heads == sizes.groups, base.out_features
        rank = adapters.rank
        self.lora_A = nn.Parameter(torch.empty((rank * len(self.shapes), base.in_features), device="meta"))
        self.lora_B = nn.Parameter(torch.empty((sum(self.shapes), rank), device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's result and the adapters'."""
        pretrained = self.linear(x)
        after_a = functional.linear(self.lora_dropout(x), self.lora_A)
        after_b = self._by_part(after_a.transpose(-2, -1), self.lora_B.unsqueeze(-1)).transpose(-2, -1)
        lora = self._padded(after_b) * 2.0
        result: torch.Tensor = pretrained + lora
        return result

    def _by_part(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.equal:
            return functional.conv1d(values, weight, groups=len(self.shapes))
        pairs = zip(values.chunk(len(self.shapes), dim=1), torch.split(weight, self.shapes), strict=True)
        return torch.cat([functional.conv1d(part, its_own) for part, its_own in pairs], dim=1)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.shapes) == 3:
            return x
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], self.whole))
        result = result.view(-1, self.whole)
        places = torch.zeros(sum(self.shapes), dtype=torch.int64, device=x.device)
        result = result.index_copy(1, places, x.reshape(-1, sum(self.shapes)))
        return result.view((*x.shape[:-1], self.whole)).transpose(0, 1)

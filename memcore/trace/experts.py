"""Stand-ins for a mixture's experts as modules of their own that run one after the other.

Worker processes only: imports torch.
"""

from typing import Any

import torch
from torch import nn

from memcore.experts import expert_projections
from memcore.units import ceil_div


def separate(model: nn.Module, fused_experts: str) -> None:
    """Put modules in place of a model's stacked experts. `fused_experts` as an Inventory has it."""
    names = expert_projections(fused_experts)
    assert names is not None, "other models are refused before they are traced"
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                setattr(module, name, SeparateExperts(child, names))


class Expert(nn.Module):
    """One expert. Source: transformers 4.48, models/mixtral/modeling_mixtral.py, MixtralBlockSparseTop2MLP."""

    def __init__(self, stacked: Any, names: tuple[str, str, str]) -> None:
        super().__init__()
        self._names = names
        _count, hidden, inner = stacked.down_proj.shape
        options = {"bias": False, "device": stacked.down_proj.device, "dtype": stacked.down_proj.dtype}
        for name, (rows, columns) in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            setattr(self, name, nn.Linear(columns, rows, **options))
        self.act_fn = stacked.act_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The gated MLP."""
        gate, up, down = (getattr(self, name) for name in self._names)
        result: torch.Tensor = down(self.act_fn(gate(hidden)) * up(hidden))
        return result


class SeparateExperts(nn.ModuleList):
    """A layer's experts, each on an equal share of the tokens' choices: which ones it gets, fake tensors cannot know.

    Source: transformers 4.48, models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock.forward.
    """

    def __init__(self, stacked: Any, names: tuple[str, str, str]) -> None:
        super().__init__(Expert(stacked, names) for _expert in range(stacked.down_proj.shape[0]))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of what the chosen experts make of each token. `chosen`: their numbers, token by token."""
        weights = weights.to(hidden.dtype)
        result = torch.zeros_like(hidden)
        mask = nn.functional.one_hot(chosen, num_classes=len(self)).permute(2, 1, 0)
        share = ceil_div(chosen.numel(), len(self))
        for expert in self:
            # As torch.where gives them: for each of the expert's tokens its place among the choices, and the token.
            places, tokens = torch.empty((share, 2), dtype=torch.int64, device=hidden.device).unbind(1)
            own = hidden[None, tokens].reshape(-1, hidden.shape[-1])
            made = expert(own) * weights[tokens, places, None]
            result.index_add_(0, tokens, made.to(hidden.dtype))
        del mask
        return result

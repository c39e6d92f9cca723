"""The model as litgpt's code computes it, for a trace: one joint projection for queries, keys and values, and adapters
within it.

Source: Lightning-AI/litgpt, from October 2023 (0cc02afa) to May 2024 (5dabf5f6): model.py and lora.py. Names of
variables matter: what a function still holds is alive.

Worker processes only: imports torch and transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from transformers import PretrainedConfig

from memcore.errors import UserError
from memcore.i18n import gettext as _

# The model types that are built here, of those that litgpt has.
MODEL_TYPES = ("gpt_neox", "llama", "mistral", "phi")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What decides a model's form. `rotated`: values of a head that are turned. `gated`: an MLP with a gate.
    `parallel`: attention and MLP read the same input, `one_norm` through the same norm."""

    hidden: int
    layers: int
    heads: int
    groups: int
    head: int
    inner: int
    words: int
    rotated: int
    bias: bool
    head_bias: bool
    rms: bool
    gated: bool
    parallel: bool
    one_norm: bool


def sizes_of(config: PretrainedConfig) -> Sizes:
    """A config's sizes. Raises UserError for a model that is not built here."""
    kind = config.model_type
    if kind not in MODEL_TYPES:
        message = _(
            "{field} is litgpt, whose code is traced for gpt_neox, llama, mistral and phi alone; the model is of type "
            "{kind}."
        )
        raise UserError(message.format(field="model.code", kind=kind), "model.code")
    rms, heads = kind in ("llama", "mistral"), config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    share = 1.0 if rms else parameters.get("partial_rotary_factor") or 1.0
    return Sizes(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        groups=getattr(config, "num_key_value_heads", None) or heads,
        head=head,
        inner=config.intermediate_size,
        words=config.vocab_size,
        rotated=int(share * head),
        bias=not rms,
        head_bias=kind == "phi",
        rms=rms,
        gated=rms,
        parallel=not rms,
        one_norm=kind == "phi",
    )


def build_litgpt(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device, its weights in `dtype`."""
    with torch.device("meta"):
        return GPT(config, sizes_of(config)).to(dtype)


class GPT(nn.Module):
    """The language model, with what a trace asks of a transformers model."""

    def __init__(self, config: PretrainedConfig, sizes: Sizes) -> None:
        super().__init__()
        self.config = config
        self.lm_head: nn.Module = nn.Linear(sizes.hidden, sizes.words, bias=sizes.head_bias)
        self.transformer = _Decoder(sizes)

    def get_input_embeddings(self) -> nn.Module:
        """The table of words."""
        return self.transformer.wte

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        """All but the head."""
        return self.transformer

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_kwargs: Any) -> Any:
        """Logits, and with labels the loss on all of them."""
        logits = self.lm_head(self.transformer(input_ids)[0])
        if labels is None:
            return SimpleNamespace(loss=None, logits=logits)
        loss = functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
        return SimpleNamespace(loss=loss, logits=logits)


class _Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.words, sizes.hidden)
        self.h = nn.ModuleList(_Block(sizes) for _each in range(sizes.layers))
        self.ln_f = _norm(sizes)
        self._rotated = sizes.rotated

    def forward(self, input_ids: torch.Tensor, **_kwargs: Any) -> tuple[torch.Tensor]:
        shape = (input_ids.size(1), self._rotated)
        # FP32: the tables are made anew for the longest sequence, outside of what sets the weights' dtype.
        cos, sin = (torch.empty(shape, dtype=torch.float32, device=input_ids.device) for _each in range(2))
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        return (x,)


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1 = _norm(sizes)
        self.attn = Attention(sizes)
        self.norm_2 = None if sizes.one_norm else _norm(sizes)
        self.mlp = _Gated(sizes) if sizes.gated else _Plain(sizes)
        self._parallel = sizes.parallel

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x_normed = self.norm_1(x)
        attention_output = self.attn(x_normed, cos, sin)
        if self._parallel:
            x_normed = x_normed if self.norm_2 is None else self.norm_2(x)
            x = self.mlp(x_normed) + attention_output + x
        else:
            assert self.norm_2 is not None, "one norm is for parallel blocks"
            x = attention_output + x
            x = self.mlp(self.norm_2(x)) + x
        return x


class Attention(nn.Module):
    """`attn` is the joint projection: each group's queries, its key and its value, group by group."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        joint = (sizes.heads + 2 * sizes.groups) * sizes.head
        self.attn: nn.Module = nn.Linear(sizes.hidden, joint, bias=sizes.bias)
        self.proj: nn.Module = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=sizes.bias)
        self.sizes = sizes

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attention of tokens to those before them."""
        batch, tokens, _hidden = x.size()
        groups, head, rotated = self.sizes.groups, self.sizes.head, self.sizes.rotated
        qkv = self.attn(x)
        each = self.sizes.heads // groups
        qkv = qkv.view(batch, tokens, groups, each + 2, head).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        if each > 1:
            k = k.expand(batch, groups, each, tokens, head)
            v = v.expand(batch, groups, each, tokens, head)
        q = q.reshape(batch, -1, tokens, head)
        k = k.reshape(batch, -1, tokens, head)
        v = v.reshape(batch, -1, tokens, head)
        q_roped = _rotate(q[..., :rotated], cos, sin)
        k_roped = _rotate(k[..., :rotated], cos, sin)
        q = torch.cat((q_roped, q[..., rotated:]), dim=-1)
        k = torch.cat((k_roped, k[..., rotated:]), dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = y.reshape(batch, tokens, -1)
        result: torch.Tensor = self.proj(y)
        return result


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    x1 = x[..., :half]
    x2 = x[..., half:]
    rotated = torch.cat((-x2, x1), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.to(dtype=x.dtype)


class _Plain(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc: nn.Module = nn.Linear(sizes.hidden, sizes.inner, bias=sizes.bias)
        self.proj: nn.Module = nn.Linear(sizes.inner, sizes.hidden, bias=sizes.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        x = functional.gelu(x)
        result: torch.Tensor = self.proj(x)
        return result


class _Gated(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc_1: nn.Module = nn.Linear(sizes.hidden, sizes.inner, bias=sizes.bias)
        self.fc_2: nn.Module = nn.Linear(sizes.hidden, sizes.inner, bias=sizes.bias)
        self.proj: nn.Module = nn.Linear(sizes.inner, sizes.hidden, bias=sizes.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_fc_1 = self.fc_1(x)
        x_fc_2 = self.fc_2(x)
        x = functional.silu(x_fc_1) * x_fc_2
        result: torch.Tensor = self.proj(x)
        return result


def _norm(sizes: Sizes) -> nn.Module:
    made: Callable[[int], nn.Module] = _RMSNorm if sizes.rms else nn.LayerNorm
    return made(sizes.hidden)


class _RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + 1e-5)
        x_normed = x_normed.to(dtype=dtype)
        return x_normed * self.weight

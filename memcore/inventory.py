"""A model's parameter inventory: every parameter tensor of the real model class, in module order, with what it is for.

It is counted once on torch's meta device (:mod:`memcore.counting`, in a worker process or by
``scripts/build_inventories.py``) and kept as data, so that nothing here needs torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

from memcore.errors import UserError
from memcore.i18n import gettext as _


class Role(StrEnum):
    """What a parameter is for."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    NORM = "norm"
    HEAD = "head"
    VISION = "vision"
    PROJECTOR = "projector"
    OTHER = "other"


class TensorKind(StrEnum):
    """The kind of module that owns a parameter; it decides what LoRA and 4-bit quantisation can touch."""

    LINEAR = "linear"
    CONV1D = "conv1d"
    EMBEDDING = "embedding"
    BIAS = "bias"
    NORM = "norm"
    PARAMETER = "parameter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter tensor. `name` is relative to its block; experts carry how many of them a token uses."""

    name: str
    shape: tuple[int, ...]
    role: Role
    kind: TensorKind
    experts_used: int = 1
    experts_held: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def active(self) -> int:
        """Elements that take part for one token."""
        return self.numel * self.experts_used // self.experts_held

    @property
    def module(self) -> str:
        """The owning module's last name, as LoRA targets name it: ``q_proj``."""
        parts = self.name.split(".")
        return parts[-2] if len(parts) > 1 else parts[-1]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive parameters of one module: a decoder layer (`layer` is its index) or what lies between."""

    name: str
    tensors: tuple[Tensor, ...]
    layer: int | None = None

    @cached_property
    def numel(self) -> int:
        """Number of elements of all its tensors."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The sizes and habits that activations depend on; 0 where the architecture has no such size.

    `norm`: what the layer's norm keeps for its backward, one of "rms" (an FP32 copy and the normalised
    values), "rms_fp32" (both in FP32) and "layer" (its input). `activation_kept`: tensors of the MLP's
    inner width that the activation function keeps. `softmax_fp32`: whether plain attention's softmax runs
    in FP32, `softcap` whether its scores pass a tanh first, `final_softcap` whether the logits do,
    `router_fp32` whether the experts' router reads its input in FP32. `parallel`: whether attention and MLP
    read the same input. The first two are found by running the module itself on a small tensor.
    """

    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    max_positions: int = 0
    norm: str = "rms"
    activation_kept: int = 1
    softmax_fp32: bool = True
    softcap: bool = False
    final_softcap: bool = False
    router_fp32: bool = False
    rotary: bool = True
    parallel: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0


# What LoRA's targets mean where experts are fused into stacked parameters (peft 0.21, utils/
# transformers_weight_conversion.py, _MOE_TARGET_MODULE_MAPPING): a projection's name before, and the parameter now.
EXPERT_TARGETS: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A weight that LoRA adapts, with `ranks` times the rank."""

    tensor: Tensor
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All parameters of a model, in module order, each shared tensor once. `fused_experts`: by whose names LoRA's
    targets mean stacked experts, "mixtral" or "qwen2_moe"; empty where they do not."""

    model_class: str
    tied: bool
    shapes: Shapes
    blocks: tuple[Block, ...]
    fused_experts: str = ""

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter tensor in module order."""
        for block in self.blocks:
            yield from block.tensors

    @cached_property
    def n_params(self) -> int:
        """All parameters."""
        return sum(block.numel for block in self.blocks)

    @property
    def n_active(self) -> int:
        """Parameters that take part for one token: all of them but the experts that are not chosen."""
        return sum(tensor.active for tensor in self.tensors())

    @cached_property
    def layers(self) -> tuple[Block, ...]:
        """The decoder layers, in order."""
        return tuple(block for block in self.blocks if block.layer is not None)

    @cached_property
    def learns_positions(self) -> bool:
        """Whether positions are looked up in a table that is trained, and so ends: such as GPT-2's and OPT's, whose
        first two rows are of no position (transformers 5, OPTLearnedPositionalEmbedding)."""
        tables = (
            tensor.shape[0]
            for block in self.blocks
            for tensor in block.tensors
            if tensor.kind is TensorKind.EMBEDDING
            and tensor.role is not Role.VISION
            and any(word in f"{block.name}.{tensor.name}" for word in ("wpe", "position"))
        )
        return any(self.shapes.max_positions <= rows <= self.shapes.max_positions + 2 for rows in tables)

    @property
    def largest_layer(self) -> Block:
        """The decoder layer with the most parameters (the largest block where there are no layers)."""
        return max(self.layers or self.blocks, key=lambda block: block.numel)

    @property
    def largest_tensor(self) -> tuple[str, Tensor]:
        """The largest parameter, with its full name."""
        pairs = ((f"{block.name}.{tensor.name}", tensor) for block in self.blocks for tensor in block.tensors)
        return max(pairs, key=lambda pair: pair[1].numel)

    def by_role(self) -> dict[Role, int]:
        """Parameters by role, roles without any left out, in the order of `Role`."""
        sums = dict.fromkeys(Role, 0)
        for tensor in self.tensors():
            sums[tensor.role] += tensor.numel
        return {role: count for role, count in sums.items() if count}

    def lora_modules(self, targets: Sequence[str]) -> list[AdaptedWeight]:
        """The weights that LoRA's targets name.

        ``all-linear`` means every linear weight but the head (peft 0.21, tuners_utils.py,
        _maybe_include_all_linear_layers). Where experts are fused into stacked parameters, names of what they were
        before mean those (utils/transformers_weight_conversion.py, _convert_peft_config_moe), and ``all-linear`` means
        them too. Raises UserError where a target names nothing, or half of what is fused.
        """
        linear = self._linear()
        fused = EXPERT_TARGETS.get(self.fused_experts, {})
        chosen = list(targets)
        if fused and "all-linear" in targets:
            chosen = sorted({*targets, *(m for m, t in linear if t.role is not Role.HEAD), *fused} - {"all-linear"})

        def named(module: str, tensor: Tensor, target: str) -> bool:
            return tensor.role is not Role.HEAD if target == "all-linear" else module == target

        plain = [target for target in chosen if target not in fused]
        for target in plain:
            if not any(named(*each, target) for each in linear):
                names = ", ".join(sorted({module for module, _tensor in linear} | set(fused))[:12])
                message = _("recipe.lora.targets names {target!r}, which this model does not have; it has {names}.")
                raise UserError(message.format(target=target[:40], names=names), "recipe.lora.targets")
        adapted = [AdaptedWeight(each[1]) for each in linear if any(named(*each, target) for target in plain)]
        return [*adapted, *self._adapted_experts({target for target in chosen if target in fused}, fused)]

    def _linear(self) -> list[tuple[str, Tensor]]:
        """Every linear weight with its module's last name, which of a block with one module is the block's."""
        return [
            (tensor.module if "." in tensor.name else block.name.rpartition(".")[2], tensor)
            for block in self.blocks
            for tensor in block.tensors
            if tensor.kind in (TensorKind.LINEAR, TensorKind.CONV1D)
        ]

    def _adapted_experts(self, chosen: set[str], fused: Mapping[str, str]) -> Iterator[AdaptedWeight]:
        """Stacked experts, and their router, among the targets; what is fused of two has twice the rank."""
        parts: dict[str, set[str]] = {}
        for name, parameter in fused.items():
            parts.setdefault(parameter, set()).add(name)
        for parameter, names in parts.items():
            if not names & chosen:
                continue
            if not names <= chosen:
                message = _("recipe.lora.targets names {given}, but this model keeps {all_of_them} as one: name all.")
                given, together = ", ".join(sorted(names & chosen)), ", ".join(sorted(names))
                raise UserError(message.format(given=given, all_of_them=together), "recipe.lora.targets")
            for tensor in self.tensors():
                if f".{tensor.name}".endswith(f".{parameter}"):
                    yield AdaptedWeight(tensor, ranks=len(names))

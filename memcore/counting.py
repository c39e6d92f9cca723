"""Count a config's parameters on torch's meta device. Imports torch and transformers: only worker processes
and scripts import this module.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN
from transformers.pytorch_utils import Conv1D

from memcore.configs import EXPERT_COUNTS, SHAPE_NAMES, check_config, named_class, normalise_config, packed_as
from memcore.inventory import Block, Inventory, Role, Shapes, Tensor, TensorKind
from memcore.loading import build_model, load_config, setting, text_config_of
from memcore.models import dump_inventory

_USED_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)
# Model types whose plain attention takes its softmax in the dtype of the computation, where others take
# FP32 (transformers 5.24, their modeling files' eager_attention_forward).
_SOFTMAX_IN_COMPUTE_DTYPE = ("gpt2", "gpt_oss")
# Model types whose router casts its input to FP32 (their modeling files' router or gate).
_ROUTER_IN_FP32 = ("deepseek_v2", "deepseek_v3", "glm4_moe")
# Attention and MLP of one layer read the same input (their modeling files' decoder layers).
_ALWAYS_PARALLEL = ("phi", "gptj", "codegen", "cohere", "cohere2", "falcon")
_REPORTED_DEFAULTS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "hidden_size",
    "intermediate_size", "num_hidden_layers", "max_position_embeddings", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip


def count_config(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Count ``payload["config"]``, a config.json's content.

    Returns the inventory as data, the class defaults that were filled in, by dotted name, and notes in
    words. Raises UserError for a config that transformers does not know or cannot build.
    """
    raw = payload["config"]
    check_config(raw)
    config = load_config(raw)
    model = build_model(config, named_class(raw))
    return {
        "inventory": dump_inventory(inventory_of(model, config)),
        "defaults": _filled_defaults(normalise_config(raw), config),
        "quantised_as": packed_as(raw),
    }


def inventory_of(model: PreTrainedModel, config: PretrainedConfig) -> Inventory:
    """Every parameter of a transformers model, in module order, shared tensors once."""
    text = text_config_of(config)
    reader = _Reader(model, text)
    named = [(reader.place(name), name, parameter) for name, parameter in model.named_parameters()]
    shapes = _shapes(model, text)
    main = _main_stack([place for place, _name, _parameter in named], shapes.num_layers)
    blocks = []
    for (stem, index), group in groupby(named, key=lambda entry: entry[0]):
        tensors = tuple(reader.tensor(name, stem, index, parameter) for _place, name, parameter in group)
        block = stem if index is None else f"{stem}.{index}"
        blocks.append(Block(name=block, tensors=tensors, layer=index if stem == main else None))
    head, embedding = _head(model), _embedding(model)
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    return Inventory(
        model_class=type(model).__name__,
        tied=tied,
        shapes=shapes,
        blocks=tuple(blocks),
        fused_experts=fused_experts(config.model_type),
    )


def fused_experts(model_type: str) -> str:
    """By whose names peft knows the model's stacked experts (peft 0.21, utils/transformers_weight_conversion.py)."""
    pattern = "mixtral" if model_type == "mixtral" else _MODEL_TO_CONVERSION_PATTERN.get(model_type, "")
    return pattern if pattern in ("mixtral", "qwen2_moe") else ""


def _head(model: PreTrainedModel) -> nn.Module | None:
    return cast(nn.Module | None, model.get_output_embeddings())  # type: ignore[no-untyped-call]


def _embedding(model: PreTrainedModel) -> nn.Module | None:
    """The text's embedding; None for a model that has several or none, of which transformers raises."""
    try:
        return cast(nn.Module | None, model.get_input_embeddings())
    except NotImplementedError:
        return None


def _main_stack(places: list[tuple[str, int | None]], num_layers: int) -> str:
    """The module list of decoder layers: among those of as many layers as the text's config has, if any, the one with
    the most parameters, vision towers aside."""
    stacks = [stem for stem, index in places if index is not None and not is_vision(stem)]
    deep = {stem for stem, index in places if index == num_layers - 1} - {
        stem for stem, index in places if index is not None and index >= num_layers
    }
    return max([stem for stem in stacks if stem in deep] or stacks, key=stacks.count, default="")


def is_vision(name: str) -> bool:
    """Whether a module of that path belongs to a vision tower."""
    return "vision" in name or "visual" in name or "image_" in name


class _Reader:
    """Places and classifies the parameters of one model."""

    def __init__(self, model: PreTrainedModel, config: PretrainedConfig) -> None:
        self._modules = dict(model.named_modules())
        self._head = _head(model)
        self._used = _experts(config, _USED_EXPERTS)
        self._held = _experts(config, EXPERT_COUNTS)

    def place(self, name: str) -> tuple[str, int | None]:
        """The block of a parameter: the outermost module list and the index in it, or the owning module's path."""
        parts = name.split(".")
        for position in range(1, len(parts)):
            stem = ".".join(parts[:position])
            if isinstance(self._modules.get(stem), nn.ModuleList) and parts[position].isdigit():
                return stem, int(parts[position])
        return ".".join(parts[:-1]), None

    def tensor(self, name: str, stem: str, index: int | None, parameter: nn.Parameter) -> Tensor:
        """The parameter as a Tensor, named relative to its block."""
        path = name.rpartition(".")[0]
        owner = self._modules[path]
        role = self._role(path, owner)
        within = name.removeprefix(stem if index is None else f"{stem}.{index}").removeprefix(".")
        routed = role is Role.EXPERTS and self._is_routed(path, owner)
        return Tensor(
            name=within,
            shape=tuple(parameter.shape),
            role=role,
            kind=_kind(owner, name.rpartition(".")[2], parameter),
            experts_used=self._used if routed else 1,
            experts_held=self._held if routed else 1,
        )

    def _is_routed(self, path: str, owner: nn.Module) -> bool:
        lowest = path.rpartition(".")[2]
        return not any(word in lowest for word in ("router", "gate")) or "experts" in path

    def _role(self, path: str, owner: nn.Module) -> Role:
        """By the owning module first, then by the words in its path."""
        if owner is self._head:
            return Role.HEAD
        if "projector" in path or "merger" in path:
            return Role.PROJECTOR
        if is_vision(path):
            return Role.VISION
        if isinstance(owner, nn.Embedding):
            return Role.EMBEDDING
        last = path.rpartition(".")[2]
        if _is_norm(owner) or "norm" in last or last.startswith("ln_"):
            return Role.NORM
        if "expert" in path and "shared" not in path:
            return Role.EXPERTS
        if "router" in last or (last == "gate" and "mlp" in path):
            return Role.EXPERTS
        if "attn" in path or "attention" in path:
            return Role.ATTENTION
        return Role.MLP if any(word in path for word in ("mlp", "feed_forward", "ffn", "fc", "dense")) else Role.OTHER


def _kind(owner: nn.Module, name: str, parameter: nn.Parameter) -> TensorKind:
    if isinstance(owner, nn.Embedding):
        return TensorKind.EMBEDDING
    if isinstance(owner, (nn.Linear, Conv1D)):
        if name == "bias":
            return TensorKind.BIAS
        return TensorKind.LINEAR if isinstance(owner, nn.Linear) else TensorKind.CONV1D
    if _is_norm(owner):
        return TensorKind.NORM
    return TensorKind.PARAMETER


def _experts(config: PretrainedConfig, names: Iterable[str]) -> int:
    """A number of experts, where each layer has its own the first's; DBRX has them in a part (ffn_config)."""
    for source in (config, getattr(config, "ffn_config", None)):
        if found := setting(source, names, int) if source is not None else 0:
            return cast(int, found)
        if each := setting(source, names, list) if source is not None else []:
            return int(each[0])
    return 1


def _kv_heads(config: PretrainedConfig, found: int) -> int:
    """Key and value heads; Falcon's go by its kind (transformers 5.24, modeling_falcon.py, FalconAttention)."""
    if config.model_type != "falcon":
        return found
    own = config.new_decoder_architecture or not config.multi_query
    return int(config.num_kv_heads) if own else 1


def _shapes(model: PreTrainedModel, config: PretrainedConfig) -> Shapes:
    def read(names: tuple[str, ...], kind: type = int) -> Any:
        return setting(config, names, kind)

    found = {field: read(names) for field, names in SHAPE_NAMES.items()}
    found["num_kv_heads"] = _kv_heads(config, found["num_kv_heads"])
    if not found["head_dim"] and found["num_heads"]:
        found["head_dim"] = found["hidden_size"] // found["num_heads"]
    if not found["intermediate_size"]:
        # GPT-2's n_inner null means four times the hidden size (transformers, modeling_gpt2.py, GPT2Block).
        found["intermediate_size"] = 4 * found["hidden_size"]
    return Shapes(
        **found,
        norm=_norm_kind(model),
        activation_kept=_activation_kept(read(("hidden_act", "hidden_activation", "activation_function"), str)),
        softmax_fp32=config.model_type not in _SOFTMAX_IN_COMPUTE_DTYPE,
        softcap=bool(getattr(config, "attn_logit_softcapping", None)),
        final_softcap=bool(getattr(config, "final_logit_softcapping", None)),
        router_fp32=config.model_type in _ROUTER_IN_FP32,
        rotary=hasattr(config, "rope_parameters") or hasattr(config, "rotary_dim"),
        parallel=config.model_type in _ALWAYS_PARALLEL or bool(getattr(config, "use_parallel_residual", False)),
        hidden_dropout=float(read(("resid_pdrop", "hidden_dropout", "residual_dropout", "hidden_dropout_prob"), float)),
        attention_dropout=float(read(("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"), float)),
    )


def _norm_kind(model: PreTrainedModel) -> str:
    """Run one of the model's norms on a small 16-bit tensor and see what it keeps for its backward."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[no-untyped-call]
    norms: dict[type[nn.Module], nn.Module] = {}
    for module in (text or model).modules():
        if _is_norm(module) and next(module.parameters(), None) is not None:
            norms.setdefault(type(module), module)
    for norm in norms.values():
        try:
            kept = _kept_tensors(*_small(norm))
        except Exception:  # noqa: S112  a gated norm wants more than one tensor, and says so in any way
            continue
        if torch.float32 not in kept:
            return "layer"
        return "rms_fp32" if kept.count(torch.float32) > 1 else "rms"
    return "layer"


def _is_norm(module: nn.Module) -> bool:
    """A leaf, since some models carry the word in the names of all their classes (RobertaPreLayerNorm)."""
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def _small(norm: nn.Module) -> tuple[nn.Module, int]:
    """A norm that computes in BF16 on the CPU, and how many values it takes."""
    copied = deepcopy(norm).to_empty(device="cpu").to(torch.bfloat16)
    return copied, next(copied.parameters()).numel()


def _activation_kept(name: str) -> int:
    """Run an activation function on a small 16-bit tensor and count the tensors of its size that it keeps."""
    return len(_kept_tensors(ACT2FN[name], 64)) if name in ACT2FN else 1


def _kept_tensors(function: Callable[[torch.Tensor], torch.Tensor], size: int) -> list[torch.dtype]:
    """The dtypes of the full-size tensors that a function of one tensor saves for its backward."""
    values = torch.randn(2, size, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == values.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(values)
    return [tensor.dtype for tensor in kept.values()]


def _filled_defaults(given: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Class defaults that decide shapes and that the given config left out, by dotted name."""
    named = {} if given.get("model_type") == config.model_type else {"model_type": config.model_type}
    return {**named, **dict(_missing(given, config.to_dict(), config.attribute_map))}


def _missing(
    given: Mapping[str, Any], full: Mapping[str, Any], aliases: Mapping[str, str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    for key, value in full.items():
        inner = given.get(key)
        if isinstance(value, Mapping) and key.endswith("_config"):
            yield from _missing(inner if isinstance(inner, Mapping) else {}, value, {}, f"{prefix}{key}.")
        elif key in _REPORTED_DEFAULTS and key not in given and aliases.get(key) not in given and value is not None:
            yield f"{prefix}{key}", value

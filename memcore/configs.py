"""A Hugging Face config.json as input: what is refused before it reaches a worker, and the short form
that goes into a link."""

import math
import re
from collections.abc import Mapping
from typing import Any

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.other_files import kind_of_file

MAX_DEPTH = 6
MAX_ENTRIES = 4000
# No published model comes near these; a config beyond them is a typing error or an attack on the worker.
MAX_LAYERS = 4096
MAX_EXPERTS = 16384
MAX_SIZE = 100_000_000
MAX_LINK_TEXT = 64

# A model's sizes and the names that config.json has for them, the one that most classes use first.
SHAPE_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions"),
}

# What classes call the number of experts that a router chooses among.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

_LAYER_KEYS = re.compile(
    r"(num_hidden_layers|num_layers|n_layers?|num_decoder_layers|num_encoder_layers|encoder_layers|decoder_layers)"
)
_EXPERT_KEYS = re.compile(r"(num_(local_|routed_)?experts|n_routed_experts|n_shared_experts|moe_num_experts)")
_SIZE_KEYS = re.compile(
    r"(hidden_size|d_model|n_embd|dim|vocab_size|head_dim|num_attention_heads|num_key_value_heads|num_heads|n_heads?"
    r"|intermediate_size|ffn_dim|d_ff|n_inner|max_position_embeddings|n_positions|moe_intermediate_size"
    r"|kv_lora_rank|q_lora_rank|qk_nope_head_dim|qk_rope_head_dim|v_head_dim)"
)
# Keys that change no tensor's shape, and long text: they do not travel in a link.
_DROPPED = re.compile(
    r"_(?!remove_final_layer_norm).*|.*_token_id|.*_token_index|transformers_version|dtype|torch_dtype|id2label|label2id"
    r"|task_specific_params|initializer_range|use_cache|.*_path|generation_config|custom_pipelines|return_dict"
    r"|output_(attentions|hidden_states|scores|router_logits|past)|rms_norm_eps|layer_norm_eps|layer_norm_epsilon"
    r"|norm_eps|finetuning_task|tokenizer_class|prefix|problem_type"
)
# Text that is kept: short identifiers, and longer ones of a letter or sign for each layer (Nemotron-H).
_KEPT_TEXT = re.compile(rf"[A-Za-z0-9_.+*|#,-]{{0,{MAX_LINK_TEXT}}}")
_LAYERS_TEXT = re.compile(rf"[A-Z*|#-]{{0,{MAX_LAYERS}}}")
# Lists of names and numbers of any length, of which only a short form is kept.
_SHORTENED = ("id2label", "label2id", "quantization_config", "compression_config")
_USUAL_LABELS = 2
# What a config calls a checkpoint that is stored in another form than the counted one, in the order looked for.
_PACKED_KEYS = ("quantization_config", "compression_config", "quantization")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise UserError, naming the field, where a config cannot be one of a model that can be counted."""
    model_type = config.get("model_type")
    if not _is_name(model_type) and not (model_type is None and named_class(config)):
        if model_type is None and (sentence := kind_of_file(config)) is not None:
            raise UserError(sentence, "model.config")
        if config.get("auto_map"):
            raise UserError(_("The config asks for remote code (auto_map), which is never run."), "model.config")
        message = _("model.config.model_type is {value}; it must be the text that transformers knows the model by.")
        raise UserError(message.format(value=_shown(model_type)), "model.config.model_type")
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        message = _("model.config.quantization_config is {value}; it must be an object with quant_method.")
        raise UserError(message.format(value=_shown(quantization)), "model.config.quantization_config")
    _check_entries(config, "model.config", MAX_DEPTH, [MAX_ENTRIES])


def _is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", value) is not None


def named_class(config: Mapping[str, Any]) -> str:
    """The class that a config names; "" where it names none. Files of before 2020 have that and no model_type."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list | tuple) and named else None
    return first if isinstance(first, str) and _is_name(first) else ""


def _check_entries(value: object, path: str, depth: int, left: list[int]) -> None:
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        message = _("{path} is nested too deeply or has too many entries to be a model's config.")
        raise UserError(message.format(path=path), path)
    # Infinity is in published files, as an upper limit that shapes no tensor; normalising leaves it out.
    if isinstance(value, float) and not math.isfinite(value) and value != math.inf:
        message = _("{path} is {value}, which is not a number that JSON has.")
        raise UserError(message.format(path=path, value=_shown(value)), path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in _SHORTENED:
                continue
            _check_size(str(key), inner, f"{path}.{str(key)[:60]}")
            _check_entries(inner, f"{path}.{str(key)[:60]}", depth - 1, left)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_entries(inner, path, depth - 1, left)


def _check_size(key: str, value: object, path: str) -> None:
    for pattern, most in ((_LAYER_KEYS, MAX_LAYERS), (_EXPERT_KEYS, MAX_EXPERTS), (_SIZE_KEYS, MAX_SIZE)):
        if not pattern.fullmatch(key) or value is None or isinstance(value, Mapping):
            continue
        least = 0 if pattern is _EXPERT_KEYS or key.endswith("lora_rank") else 1
        # Some architectures give one size for each layer; deeper lists are refused for their depth.
        for size in value if isinstance(value, list | tuple) else [value]:
            if isinstance(size, list | tuple):
                continue
            if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= most:
                message = _("{path} is {value}; allowed is a whole number from {least} to {most:,}.")
                raise UserError(message.format(path=path, value=_shown(size), least=least, most=most), path)


def _shown(value: object) -> str:
    return _("missing") if value is None else repr(value)[:60]


def normalise_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what changes no tensor's shape, and without text that is not a short identifier.

    What is left decides the model; it is what a link carries, so that no free text or file name does.
    Of a quantised checkpoint only the method's name is kept. Normalising twice changes nothing more.
    """
    kept = {key: _kept(key, value) for key, value in config.items() if not _DROPPED.fullmatch(key)}
    if config.get("auto_map"):
        # That it asks for code, not which.
        kept["auto_map"] = True
    if (packed := _packed_by(config)) is not None:
        kept = {key: value for key, value in kept.items() if key not in _PACKED_KEYS}
        kept["quantization_config"] = {"quant_method": packed}
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and len(labels) != _USUAL_LABELS:
        # What a classifier's head is as wide as.
        kept["num_labels"] = len(labels)
    return {key: value for key, value in kept.items() if value is not ...}


def packed_as(config: Mapping[str, Any]) -> str | None:
    """How a config's checkpoint is stored, where it is packed: the method's name, also of a part's own section."""
    own = _packed_by(config)
    parts = (packed_as(part) for key, part in config.items() if key not in _PACKED_KEYS and isinstance(part, Mapping))
    return own or next((found for found in parts if found), None)


def _packed_by(config: Mapping[str, Any]) -> str | None:
    """The method that a config's own section names. Without one, loading in 4 or 8 bits is bitsandbytes', as
    transformers reads it (5.24, quantizers/auto.py, AutoQuantizationConfig.from_dict)."""
    for key in _PACKED_KEYS:
        section = config.get(key)
        if not isinstance(section, Mapping) or not section:
            continue
        if key == "quantization":
            # MLX's own form.
            return "mlx" if "bits" in section else None
        if section.get("load_in_4bit") or section.get("load_in_8bit"):
            return str(section.get("quant_method") or "bitsandbytes")[:60]
        named = (section.get(name) for name in ("quant_method", "quant_algo", "format"))
        return next((text for text in named if isinstance(text, str) and _is_name(text)), "unnamed")
    return None


def _kept(key: str, value: object) -> Any:
    if isinstance(value, Mapping):
        return normalise_config(value)
    if isinstance(value, list | tuple):
        kept = [_kept(key, inner) for inner in value]
        return ... if ... in kept else kept
    if value == math.inf:
        return ...
    if isinstance(value, str):
        is_short = _KEPT_TEXT.fullmatch(value) or (key.endswith("_pattern") and _LAYERS_TEXT.fullmatch(value))
        return value if is_short else ...
    return value

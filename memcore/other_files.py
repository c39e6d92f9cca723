"""JSON files that lie beside a config.json, or take its place elsewhere: told apart, each with what to give instead."""

from collections.abc import Mapping
from typing import Any

from memcore.i18n import gettext as _
from memcore.i18n import mark

# For each kind of file: sets of keys, one of which it has whole, and the sentence.
_KINDS: tuple[tuple[tuple[frozenset[str], ...], str], ...] = (
    (
        (frozenset({"peft_type"}), frozenset({"base_model_name_or_path", "target_modules"})),
        mark(
            "This is an adapter's config (adapter_config.json, rank {rank}), not a model's: give the config.json of "
            "its base model and set LoRA in the recipe."
        ),
    ),
    (
        (frozenset({"zero_optimization"}), frozenset({"train_micro_batch_size_per_gpu"})),
        mark("This is a ds_config, not a model's config: the communication buffers page reads it."),
    ),
    (
        (frozenset({"weight_map"}),),
        mark("This is the index of a checkpoint's files: give the config.json that lies beside it."),
    ),
    (
        (frozenset({"_class_name"}), frozenset({"_diffusers_version"})),
        mark("This is the config of a part of a diffusion pipeline, which is not counted: give a parameter count."),
    ),
    (
        (frozenset({"dim", "n_layers", "n_heads"}),),
        mark(
            "This is a params.json, the form of Meta's and Mistral's own code: give the config.json of the model in "
            "transformers' form."
        ),
    ),
    (
        (frozenset({"d_model", "n_layer", "ssm_cfg"}),),
        mark(
            "This is a config of mamba_ssm's own form: give that of the model in transformers' form (its name ends "
            "with -hf)."
        ),
    ),
    (
        (frozenset({"tokenizer_class"}), frozenset({"added_tokens_decoder"}), frozenset({"added_tokens", "model"})),
        mark("This is a tokenizer's file: give the config.json that lies beside it."),
    ),
    (
        (
            frozenset({"image_processor_type"}), frozenset({"feature_extractor_type"}), frozenset({"processor_class"}),
            frozenset({"image_mean", "image_std"}),
        ),
        mark("This is a preprocessor's config: give the config.json that lies beside it."),
    ),
    (
        (frozenset({"eos_token_id", "transformers_version"}), frozenset({"do_sample"}), frozenset({"max_new_tokens"})),
        mark("This is a generation_config.json: give the config.json that lies beside it."),
    ),
)  # fmt: skip


# A file with one of these is a model's config, whatever else it has.
_SIZES = ("hidden_size", "num_hidden_layers", "n_embd", "intermediate_size")


def kind_of_file(data: Mapping[str, Any]) -> str | None:
    """One sentence on a file that is no model's config, and what to give instead; None where it is not known."""
    if any(key in data for key in _SIZES):
        return None
    for alternatives, sentence in _KINDS:
        if any(keys <= data.keys() for keys in alternatives):
            rank = data.get("r")
            return _(sentence).format(rank=rank if isinstance(rank, int) else "?")
    return None

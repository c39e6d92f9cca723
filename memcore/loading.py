"""From a config.json's content to transformers' config object and model. Imports torch and transformers: only worker
processes and scripts import this module.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from memcore.configs import named_class
from memcore.errors import UserError
from memcore.i18n import gettext as _

# Tried in order; the class that the config itself names comes first.
_AUTO_CLASSES = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForImageTextToText,
    transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForMultimodalLM,
    transformers.AutoModel,
)
# Sizes that a class with a part for text reads there.
_TAKEN = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


def load_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """The config object of a config.json's content. Raises UserError for what transformers cannot read."""
    fields = {key: value for key, value in _unpacked(raw).items() if key not in ("model_type", "auto_map")}
    model_type = _type_of(raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        if model_type not in transformers.CONFIG_MAPPING:
            raise _unknown(model_type, remote=bool(raw.get("auto_map"))) from None
        raise _cannot_build(model_type, error) from None
    _check_taken(raw, config)
    return config


def _unpacked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config as that of an unpacked checkpoint, in its parts too."""
    return {
        key: _unpacked(value) if isinstance(value, Mapping) and key.endswith("_config") else value
        for key, value in raw.items()
        if key != "quantization_config"
    }


def _type_of(raw: Mapping[str, Any]) -> str:
    """The model type that a config gives; where transformers does not know it, or there is none, that of the class
    that the config names, if that is one of transformers' own (Kimi K2 names DeepSeek-V3's)."""
    given, name = raw.get("model_type"), named_class(raw)
    own = getattr(getattr(transformers, name, None), "config_class", None)
    if given in transformers.CONFIG_MAPPING or (given is not None and own is None):
        return str(given)
    if own is None:
        message = _("model.config.model_type is missing, and transformers {version} has no class {name!r}.")
        raise UserError(message.format(version=transformers.__version__, name=name), "model.config.model_type")
    return str(own.model_type)


def _unknown(model_type: str, *, remote: bool) -> UserError:
    if remote:
        message = _(
            "transformers {version} does not know model_type {name!r}, and the config asks for remote code, "
            "which is never run."
        )
    else:
        message = _("transformers {version} does not know model_type {name!r}.")
    sentence = message.format(version=transformers.__version__, name=model_type)
    return UserError(sentence, "model.config.model_type")


def _check_taken(raw: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raise UserError where a size is given at the top, and the class, which reads it in a part, took a default there:
    files of models that their authors' own code reads, under a model_type that transformers has since given to its own
    form (LLaVA)."""
    text = text_config_of(config)
    if text is config:
        return
    given = [part for part in raw.values() if isinstance(part, Mapping)]
    for key in _TAKEN:
        size, taken = raw.get(key), setting(text, (key,), int)
        elsewhere = any(key in part for part in given)
        if isinstance(size, int) and taken and size != taken and not elsewhere:
            message = _(
                "model.config.{key} is {value}, but transformers' {name} class reads it in a part of its own and would "
                "take {taken}: the file is of another form than transformers'."
            )
            raise UserError(
                message.format(key=key, value=size, name=config.model_type, taken=taken), f"model.config.{key}"
            )


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that is the language model's; the config itself where there are several or none."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def _cannot_build(model_type: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    message = _("transformers cannot build a {name} model from this config: {reason}")
    return UserError(message.format(name=model_type, reason=reason), "model.config")


def _without_library(config: PretrainedConfig, error: ImportError) -> UserError:
    """Some vision towers are another library's (Gemma 3n's: timm)."""
    found = re.search(r"requires the (\S+) library", str(error))
    if found is None or text_config_of(config) is config:
        return _cannot_build(config.model_type, error)
    message = _(
        "A {name} model needs the {library} library, which is not installed here. Its text model alone can be counted: "
        "give the object under text_config as the config."
    )
    return UserError(message.format(name=config.model_type, library=found[1]), "model.config")


def build_model(
    config: PretrainedConfig,
    architecture: str = "",
    device: str = "meta",
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """The model of a config on a device; on the meta device nothing is allocated, whatever its size.

    The class that the config names, where it is transformers' own for that model type, else the first
    of `_AUTO_CLASSES` that has one. Raises UserError where it cannot be built.
    """
    own = getattr(transformers, architecture, None)
    options = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(own, type) and issubclass(own, PreTrainedModel) and own.config_class is type(config):
                return cast(PreTrainedModel, own._from_config(config, **options))  # type: ignore[no-untyped-call]  # noqa: SLF001
            for auto in _AUTO_CLASSES:
                if type(config) in auto._model_mapping:  # noqa: SLF001  no public way to ask
                    return cast(PreTrainedModel, auto.from_config(config, **options))  # type: ignore[no-untyped-call]
    except ImportError as error:
        raise _without_library(config, error) from None
    except Exception as error:
        raise _cannot_build(config.model_type, error) from None
    message = _("transformers {version} has no model that trains for model_type {name!r}.")
    raise UserError(message.format(version=transformers.__version__, name=config.model_type), "model.config")


def setting(config: PretrainedConfig, names: Iterable[str], kind: type) -> Any:
    """The first of a config's settings that is of the kind, else the kind's zero.

    Of a setting that varies by layer it is the first layer's: transformers 5.24 refuses to read the whole config's.
    """
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            value = getattr(config.per_layer_config[0], name, None)
        if isinstance(value, kind):
            return value
    return kind()

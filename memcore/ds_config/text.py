"""A user's text as a ds_config: JSON, JSON with comments as DeepSpeed reads it, a program's dict, accelerate's YAML."""

import json
from collections.abc import Mapping
from typing import Any, cast

from memcore.ds_config.accelerate import ds_config_of, read_yaml
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.loose_json import as_json
from memcore.scenario import decode_json

MAX_DS_CONFIG_CHARS = 200_000
_PROGRAM = ("import torch", "import deepspeed")


def read_text(text: str | bytes) -> tuple[Mapping[str, Any], list[str]]:
    """The settings that a text holds, and a sentence for each thing that a strict reader would not take."""
    shown = (text.decode("utf-8", "replace") if isinstance(text, bytes) else text).removeprefix("\ufeff")
    if any(word in shown for word in _PROGRAM) or ("def " in shown[:2000] and "{" not in shown[:200]):
        raise UserError(_("This is a program, not a ds_config: paste the JSON file that it passes to DeepSpeed."))
    notes: list[str] = []
    try:
        raw, strict = decode_json(text, MAX_DS_CONFIG_CHARS), shown
    except UserError:
        raw, strict = _loosely(text, shown, notes)
    if not isinstance(raw, Mapping):
        raise UserError(_("A ds_config is a JSON object; this is not one."))
    raw = _inner(raw, notes)
    notes += [
        _("{key} is there more than once, which DeepSpeed refuses; the last is read.").format(key=key)
        for key in _repeated(strict)
    ]
    return raw, notes


def _inner(raw: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """The file itself, or the ds_config that a trainer's own file holds under some key."""
    inner = {key: value for key, value in raw.items() if isinstance(value, Mapping) and "zero_optimization" in value}
    if "zero_optimization" in raw or len(inner) != 1:
        return raw
    ((key, found),) = inner.items()
    notes.append(_("Read is what stands under {key}; DeepSpeed itself takes only that.").format(key=key[:60]))
    return cast(Mapping[str, Any], found)


def _loosely(text: str | bytes, shown: str, notes: list[str]) -> tuple[Any, str]:
    """The data of what is not JSON, and its text as JSON. Raises the strict reader's UserError where it is neither."""
    if len(shown) <= MAX_DS_CONFIG_CHARS:
        strict = as_json(shown)
        if strict is not None and strict != shown:
            try:
                found = decode_json(strict, MAX_DS_CONFIG_CHARS)
            except UserError:
                found = None
            if found is not None:
                message = _(
                    "The file is not strict JSON (comments, commas or quotes): DeepSpeed itself reads comments, "
                    "Hugging Face's libraries refuse the file."
                )
                notes.append(message)
                return found, strict
        yaml = read_yaml(shown)
        if yaml is not None:
            made = ds_config_of(yaml)
            notes.append(_("This is accelerate's YAML: read is the ds_config that accelerate makes of it."))
            return made, json.dumps(made)
    return decode_json(text, MAX_DS_CONFIG_CHARS), shown


def _repeated(text: str) -> list[str]:
    """Keys that one object of the text has more than once (config_utils.py, dict_raise_error_on_duplicate_keys)."""
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _value in pairs]
        found.extend(key[:60] for key in dict.fromkeys(keys) if keys.count(key) > 1)
        return {}

    try:
        json.loads(text, object_pairs_hook=look)
    except (ValueError, RecursionError):
        return []
    return found

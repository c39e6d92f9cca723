"""accelerate's YAML, as `accelerate config` writes it: the ds_config that it stands for.

What accelerate makes of it is that of accelerate 1.15, utils/dataclasses.py, DeepSpeedPlugin.__post_init__ and
set_mixed_precision. Read is YAML of keys with plain values, one level of sections deep, by YAML 1.1's rules (PyYAML's).
"""

import re
from collections.abc import Mapping
from typing import Any

from memcore.errors import UserError
from memcore.i18n import gettext as _

_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][\w.-]*):(?:[ \t]+(?P<value>.*))?")
_COMMENT = re.compile(r"(?:^|[ \t]+)#.*$")
_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("null", "~", ""), None),
}
_WHOLE = re.compile(r"[+-]?[0-9][0-9_]*")
# A point and a sign are needed: 5e8 is text.
_FLOAT = re.compile(r"[+-]?(?:[0-9][0-9_]*)?\.[0-9_]*(?:[eE][+-][0-9]+)?")


def read_yaml(text: str) -> Mapping[str, Any] | None:
    """Keys and values, sections as mappings of their own; None for what is not of that kind."""
    found: dict[str, Any] = {}
    section: dict[str, Any] | None = None
    for line in text.splitlines():
        bare = _COMMENT.sub("", line).rstrip()
        if not bare or bare == "---":
            continue
        match = _LINE.fullmatch(bare)
        if match is None:
            if section is not None and bare.lstrip().startswith("- "):
                # A list under its key: nothing that accelerate's DeepSpeed section holds.
                continue
            return None
        value, key = (match["value"] or "").strip(), match["key"]
        if not match["indent"]:
            section = None if value else {}
            found[key] = _scalar(value) if section is None else section
        elif section is None:
            return None
        else:
            section[key] = _scalar(value)
    return found or None


def _scalar(text: str) -> Any:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text) and any(each.isdigit() for each in text):
        return float(text.replace("_", ""))
    return text


def ds_config_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The ds_config that accelerate makes of its YAML. Raises UserError for a YAML that holds no such settings."""
    plugin = given.get("deepspeed_config")
    if isinstance(given.get("deepspeed"), str) or (isinstance(plugin, Mapping) and "deepspeed_config_file" in plugin):
        raise UserError(_("This YAML only names a ds_config: paste that JSON file itself."))
    if not isinstance(plugin, Mapping) or not plugin:
        message = _(
            "This YAML holds no deepspeed_config section: paste a ds_config, or accelerate's YAML for DeepSpeed."
        )
        raise UserError(message)
    offload = {
        section: {"device": plugin.get(f"{section}_device", "none")}
        for section in ("offload_optimizer", "offload_param")
    }
    precision = given.get("mixed_precision", "no")
    # PyYAML reads a bare no as false.
    halves = {"fp16": precision == "fp16", "bf16": precision in ("bf16", "fp8")}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": plugin.get("gradient_clipping", "auto"),
        "zero_optimization": {
            "stage": plugin.get("zero_stage", 2),
            **offload,
            "stage3_gather_16bit_weights_on_model_save": bool(plugin.get("zero3_save_16bit_model", False)),
        },
        **{name: {"enabled": enabled} for name, enabled in halves.items()},
    }

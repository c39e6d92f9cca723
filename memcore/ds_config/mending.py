"""What DeepSpeed would refuse, or read under another name, in a zero_optimization: rewritten, a sentence for each.

Types and limits are those of deepspeed 0.19.8: runtime/zero/config.py, offload_config.py, leaf_module_config.py,
runtime/zenflow/zenflow_config.py; what they take for a switch or a number is pydantic's. "auto" stays: DeepSpeed
leaves such a key at its default (config_utils.py, DeepSpeedConfigModel).
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from memcore.i18n import gettext as _

AUTO = "auto"

# Keys that DeepSpeed reads under their field's name as well (populate_by_name).
_FIELD_NAMES = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
DEPRECATED = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
SWITCHES = frozenset(
    {
        "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions",
        "overlap_comm", "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint",
        "stage3_gather_16bit_weights_on_model_save", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
        "parameter_alignment", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
    }
)  # fmt: skip
_WORDS = {True: ("1", "on", "t", "true", "y", "yes"), False: ("0", "off", "f", "false", "n", "no")}
_WHOLE_TEXT = re.compile(r"\s*[+-]?[0-9]{1,40}\s*")


def switch(given: Any) -> bool | None:
    """true or false in any of the spellings that DeepSpeed reads; None for what it refuses."""
    if isinstance(given, int | float) and given in (0, 1):
        return bool(given)
    if isinstance(given, str):
        return next((value for value, words in _WORDS.items() if given.lower() in words), None)
    return None


def number(given: Any) -> int | float | None:
    """A finite number, or text that reads as one; whole numbers stay exact."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    if isinstance(given, int):
        return given
    if isinstance(given, str) and _WHOLE_TEXT.fullmatch(given):
        return int(given)
    try:
        value = float(given)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _is_whole(given: Any) -> bool:
    """Whether DeepSpeed takes it for a whole number of 0 or more."""
    value = number(given)
    spelled = not isinstance(given, str) or _WHOLE_TEXT.fullmatch(given) is not None
    return spelled and value is not None and value == int(value) and 0 <= value < 2**63


def _is_share(given: Any) -> bool:
    value = number(given)
    return value is not None and 0 <= value <= 1


def _is_inner_share(given: Any) -> bool:
    value = number(given)
    return value is not None and 0 < value < 1


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _is_switch(given: Any) -> bool:
    return switch(given) is not None


def _is_names(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(name, str) and name for name in given)


# For each section its keys: what DeepSpeed takes, and its default.
_Section = Mapping[str, tuple[Callable[[Any], bool], Any]]
_OFFLOAD: _Section = {
    "device": (lambda given: given in ("none", "cpu", "nvme"), "none"),
    "nvme_path": (lambda given: given is None or isinstance(given, str), None),
    "pin_memory": (_is_switch, True),
}
_SECTIONS: Mapping[str, _Section] = {
    "offload_param": {
        **_OFFLOAD,
        "buffer_count": (_is_whole, 5),
        "buffer_size": (_is_whole, 100_000_000),
        "max_in_cpu": (_is_whole, 1_000_000_000),
    },
    "offload_optimizer": {
        **_OFFLOAD,
        "buffer_count": (_is_whole, 4),
        "pipeline_read": (_is_switch, False),
        "pipeline_write": (_is_switch, False),
        "fast_init": (_is_switch, False),
        "ratio": (_is_share, 1.0),
        "super_offload": (_is_switch, False),
        "cpuadam_cores_perc": (_is_share, 0.8),
    },
    "zenflow": {
        "topk_ratio": (_is_inner_share, 0.1),
        "select_strategy": (_is_text, AUTO),
        "select_interval": (lambda given: _is_text(given) or _is_whole(given), AUTO),
        "update_interval": (lambda given: _is_text(given) or _is_whole(given), AUTO),
        "overlap_step": (_is_switch, False),
        "offload": (_is_switch, False),
        "auto_ratio": (_is_share, 0.99),
        "full_warm_up_rounds": (_is_whole, 0),
        "pt_reserved_cores_perc": (_is_share, 0.5),
        "steps_per_epoch": (lambda given: given is None or _is_whole(given), None),
    },
    "leaf_module": {name: (_is_names, []) for name in ("classes", "names", "name_suffixes")},
}
_SIZES_NOT_READ = ("allgather_bucket_size", "stage3_module_granularity_threshold")


def by_alias(zero: Mapping[str, Any]) -> dict[str, Any]:
    """The section under the names that DeepSpeed documents: `prefetch_bucket_size` is the stage3_ one."""
    own = {f"stage3_{key}" if key in _FIELD_NAMES else key: value for key, value in zero.items()}
    return {**own, **{key: value for key, value in zero.items() if key in own}}


def mend(zero: dict[str, Any], stage: int) -> list[str]:
    """Rewrite a section in place so that DeepSpeed takes it; sizes and the stage have been mended before."""
    notes: list[str] = []
    _replace_deprecated(zero)
    for name in SWITCHES & zero.keys():
        _mend_switch(zero, name, notes)
    for name in _SIZES_NOT_READ:
        if name in zero and zero[name] != AUTO:
            _mend_size(zero, name, notes)
    for name, keys in _SECTIONS.items():
        if name in zero and zero[name] != AUTO:
            _mend_section(zero, name, keys, notes)
    # Both are asserted by DeepSpeedZeroConfig's validators.
    if zero.get("compute_grad_norm") is False and stage not in (1, 2):
        _refused(zero, "compute_grad_norm", True, notes)
    if zero.get("legacy_stage1") is True:
        # runtime/engine.py, _configure_zero_optimizer.
        _refused(zero, "legacy_stage1", False, notes)
    optimizer = zero.get("offload_optimizer")
    if isinstance(optimizer, dict) and stage != 3 and (number(optimizer.get("ratio", 1)) or 0) < 1:
        _refused(optimizer, "ratio", 1.0, notes, "offload_optimizer.")
    elif isinstance(optimizer, dict) and number(optimizer.get("ratio", 1)) != 1 and _is_share(optimizer["ratio"]):
        message = _("zero_optimization.{key} is {value}: a part is not predicted, all of it is taken to be moved.")
        notes.append(message.format(key="offload_optimizer.ratio", value=shown(optimizer["ratio"])))
    if isinstance(optimizer, dict) and switch(optimizer.get("super_offload")):
        message = _("zero_optimization.{key} is {value}: its effect on memory is not predicted.")
        notes.append(message.format(key="offload_optimizer.super_offload", value=shown(optimizer["super_offload"])))
    return notes


def _replace_deprecated(zero: dict[str, Any]) -> None:
    """The new key for each old one, where it is not there itself."""
    for old in ("cpu_offload", "cpu_offload_param"):
        if switch(zero.pop(old, None)) and not isinstance(zero.get(DEPRECATED[old]), dict):
            zero[DEPRECATED[old]] = {"device": "cpu"}
    old = "stage3_gather_fp16_weights_on_model_save"
    if old in zero:
        zero.setdefault(DEPRECATED[old], zero.pop(old))
        zero.pop(old, None)
    pinned = switch(zero.pop("cpu_offload_use_pin_memory", None))
    for section in (zero.get("offload_optimizer"), zero.get("offload_param")):
        if pinned is not None and isinstance(section, dict):
            section.setdefault("pin_memory", pinned)


def _mend_switch(zero: dict[str, Any], name: str, notes: list[str]) -> None:
    given = zero[name]
    value = switch(given)
    if value is not None:
        zero[name] = value
    elif given != AUTO and not (given is None and name == "overlap_comm"):
        del zero[name]
        message = _("zero_optimization.{key} is {value}; allowed is true or false. Its default is used.")
        notes.append(message.format(key=name, value=shown(given)))


def _mend_size(zero: dict[str, Any], name: str, notes: list[str]) -> None:
    given = zero[name]
    value = number(given)
    if value is None or not 0 <= value < 2**63:
        del zero[name]
        message = _("zero_optimization.{key} is {value}; allowed is a whole number from {least}. Its default is used.")
        notes.append(message.format(key=name, value=shown(given), least=0))
    elif _is_whole(given):
        zero[name] = int(value)
    else:
        _refused(zero, name, int(value), notes)


def _mend_section(zero: dict[str, Any], name: str, keys: _Section, notes: list[str]) -> None:
    section = zero[name]
    if not isinstance(section, dict):
        # null is what DeepSpeed itself has there.
        del zero[name]
        if section is not None:
            message = _("zero_optimization.{key} is {value}, which DeepSpeed refuses: write {read}.")
            notes.append(message.format(key=name, value=shown(section), read="{}"))
        return
    for key in list(section):
        if key not in keys:
            message = _("zero_optimization.{key} is not a key of DeepSpeed 0.19.8, which refuses it.")
            notes.append(message.format(key=f"{name}.{key[:60]}"))
            del section[key]
        elif key == "device" and not keys[key][0](section[key]):
            message = _("zero_optimization.{key}.device is {value}; allowed are none, cpu and nvme.")
            notes.append(message.format(key=name, value=shown(section[key])))
            del section[key]
        elif not keys[key][0](section[key]) and section[key] != AUTO:
            _refused(section, key, keys[key][1], notes, f"{name}.")


def _refused(part: dict[str, Any], key: str, value: Any, notes: list[str], path: str = "") -> None:
    """Put what is allowed in the place of what is not."""
    message = _("zero_optimization.{key} is {value}, which DeepSpeed refuses: write {read}.")
    notes.append(message.format(key=f"{path}{key}", value=shown(part[key]), read=value))
    part[key] = value


def shown(given: Any) -> str:
    """A value in a sentence: cut, and never the whole of something nested."""
    return "{...}" if isinstance(given, Mapping) else "[...]" if isinstance(given, list) else repr(given)[:40]

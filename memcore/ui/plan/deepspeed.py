"""DeepSpeed's settings in the sidebar."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import ZeroConfig
from memcore.ui.plan.field import PlanField
from memcore.ui.plan.number import number
from memcore.ui.plan.values import Values, engine_in


def deepspeed_values(zero: ZeroConfig) -> dict[str, Any]:
    """The value of each widget."""
    return {
        "w_bucket": zero.reduce_bucket_size,
        "w_overlap": bool(zero.overlap_comm),
        "w_hpz": zero.zero_hpz_partition_size,
    }


def deepspeed_config(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's own settings, those at their defaults left out, what no widget edits as `base` has it."""
    stage = values["w_stage"]
    zero = {key: value for key, value in base.get("zero_optimization", {}).items() if key != "stage"}
    own = {"reduce_bucket_size": values["w_bucket"]}
    if stage in (1, 2):
        own["overlap_comm"] = values["w_overlap"]
    if stage == 3:
        own["zero_hpz_partition_size"] = values["w_hpz"]
    else:
        zero.pop("zero_hpz_partition_size", None)
    defaults = ZeroConfig()
    changed = {key: value for key, value in own.items() if value != (getattr(defaults, key) or False)}
    kept = {key: value for key, value in zero.items() if key not in own}
    return {"zero_optimization": kept | changed} if kept | changed else {}


def draw_deepspeed(stage: int) -> None:
    """The widgets of a stage."""
    about = _("In elements, not bytes.")
    number("reduce_bucket_size", most=10**12, step=10_000_000, key="w_bucket", help=about)
    if stage in (1, 2):
        st.toggle("overlap_comm", key="w_overlap")
    if stage == 3:
        number("zero_hpz_partition_size", most=1_000_000, key="w_hpz")


def _is_deepspeed(values: Values) -> bool:
    return engine_in(values) is EngineName.DEEPSPEED


def _has_buffer(values: Values) -> bool:
    return bool(values["w_stage"])


def _divides_weights(values: Values) -> bool:
    return bool(values["w_stage"] == 3)


def _of_stage_3(name: str, about: str, *, least: int = 0, step: int = 10_000_000) -> PlanField:
    """A size that only stage 3 reads. At the others it is kept, since it does no harm."""
    return PlanField(
        part=ZeroConfig,
        name=name,
        label=name,
        help=about,
        allowed=_is_deepspeed,
        shown=_divides_weights,
        least=least,
        step=step,
    )


ZERO_FIELDS = (
    PlanField(
        part=ZeroConfig,
        name="contiguous_gradients",
        label="contiguous_gradients",
        help=mark("Gradients are copied into a buffer of the bucket's size as they come; off, there is none."),
        allowed=_is_deepspeed,
        shown=_has_buffer,
    ),
    _of_stage_3(
        "sub_group_size",
        mark("In elements. The optimizer's step takes that many at a time, with their gradients in FP32."),
        least=1,
    ),
    _of_stage_3("stage3_prefetch_bucket_size", mark("In elements. How much is gathered ahead of the module at work.")),
    _of_stage_3(
        "stage3_max_live_parameters",
        mark("In elements. With so many parameters gathered, no more are gathered ahead."),
    ),
    _of_stage_3(
        "stage3_max_reuse_distance",
        mark("In elements. A parameter that is needed again before so many others stays gathered."),
    ),
    _of_stage_3(
        "stage3_param_persistence_threshold",
        mark("In elements. Parameters of at most this size are never divided."),
        step=10_000,
    ),
)

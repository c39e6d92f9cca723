"""DeepSpeed's settings in the sidebar."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.i18n import gettext as _
from memcore.scenario import ZeroConfig
from memcore.ui.plan.values import Values


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
    st.number_input(
        "reduce_bucket_size",
        min_value=1,
        max_value=10**12,
        step=10_000_000,
        key="w_bucket",
        help=_("In elements, not bytes."),
    )
    if stage in (1, 2):
        st.toggle("overlap_comm", key="w_overlap")
    if stage == 3:
        st.number_input("zero_hpz_partition_size", min_value=1, max_value=1_000_000, step=1, key="w_hpz")

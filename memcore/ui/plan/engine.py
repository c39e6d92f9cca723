"""The engine in the sidebar, and its own settings."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.i18n import gettext as _
from memcore.scenario import DdpConfig, Scenario
from memcore.ui.plan.deepspeed import ZERO_FIELDS, deepspeed_config, deepspeed_values, draw_deepspeed
from memcore.ui.plan.field import more
from memcore.ui.plan.fsdp import FSDP1_FIELDS, draw_fsdp, fsdp_config, fsdp_values
from memcore.ui.plan.llm_c import LLM_C_FIELDS
from memcore.ui.plan.values import Values, engine_in, values_now

# Engines of which groups of ranks that hold the same can be chosen.
_REPLICAS = (EngineName.FSDP1, EngineName.FSDP2)


def engine_values(scenario: Scenario) -> dict[str, Any]:
    """The value of each widget, those of other engines too."""
    parallelism, config = scenario.parallelism, scenario.engine_config
    return {
        "w_engine": parallelism.engine.value,
        "w_stage": parallelism.stage,
        "w_replicate": parallelism.dp_replicate if parallelism.engine in _REPLICAS else 1,
        "w_bucket_view": isinstance(config, DdpConfig) and config.gradient_as_bucket_view,
        **deepspeed_values(scenario.zero_config),
        **fsdp_values(scenario),
    }


def chosen_parallelism(values: Values) -> dict[str, Any]:
    """The scenario's parallelism."""
    engine = engine_in(values)
    chosen: dict[str, Any] = {"engine": engine.value}
    if stages := ENGINE_OPTIONS[engine].stages:
        chosen["zero_stage"] = min(values["w_stage"], max(stages))
    if engine in _REPLICAS:
        chosen["dp_replicate"] = values["w_replicate"]
    return chosen


def chosen_engine_config(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's own settings, what no widget edits as `base` has it."""
    engine = engine_in(values)
    if engine in (EngineName.FSDP1, EngineName.FSDP2):
        return fsdp_config(values, engine)
    if engine is EngineName.DDP and values["w_bucket_view"]:
        return {"gradient_as_bucket_view": True}
    return deepspeed_config(values, base) if engine is EngineName.DEEPSPEED else {}


def draw_engine() -> None:
    """The widgets of the chosen engine."""
    engines = {name.value: options.label for name, options in ENGINE_OPTIONS.items()}
    engines[EngineName.SINGLE.value] = _("single GPU")
    st.selectbox(_("Engine"), list(engines), key="w_engine", format_func=engines.__getitem__)
    engine = engine_in(values_now())
    if stages := ENGINE_OPTIONS[engine].stages:
        if st.session_state["w_stage"] not in stages:
            st.session_state["w_stage"] = max(stages)
        st.segmented_control(_("ZeRO stage"), list(stages), key="w_stage", required=True)
    if engine is EngineName.DEEPSPEED:
        draw_deepspeed(st.session_state["w_stage"])
    if engine is EngineName.DDP:
        st.toggle("gradient_as_bucket_view", key="w_bucket_view")
    if engine in (EngineName.FSDP1, EngineName.FSDP2):
        draw_fsdp(engine)
    more("parallelism", ENGINE_FIELDS)


ENGINE_FIELDS = (*ZERO_FIELDS, *FSDP1_FIELDS, *LLM_C_FIELDS)

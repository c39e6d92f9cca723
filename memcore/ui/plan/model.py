"""The model in the sidebar: a catalogue name, a parameter count or a config.json, and whose code computes it."""

import json
from typing import Any

import streamlit as st

from memcore.configs import normalise_config
from memcore.errors import UserError
from memcore.experts import expert_projections
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.models import catalogue, catalogue_inventory
from memcore.scenario import Model, decode_config
from memcore.settings import settings
from memcore.ui.plan.field import PlanField, draw
from memcore.ui.plan.values import CATALOGUE, CONFIG, COUNT, Values
from memcore.ui.work import fetch
from memcore.units import format_count

DEFAULT_NAME = "meta-llama/Llama-3.1-8B"
# What a config calls the number of its experts, family by family.
_NUM_EXPERTS = ('"num_local_experts"', '"num_experts"', '"n_routed_experts"')


def model_values(model: Model) -> dict[str, Any]:
    """The value of each widget."""
    return {
        "w_source": CATALOGUE if model.name is not None else COUNT if model.n_params is not None else CONFIG,
        "w_name": model.name or DEFAULT_NAME,
        "w_count": f"{model.n_params:,}" if model.n_params is not None else "7b",
        "w_config": json.dumps(model.config, indent=1) if model.config is not None else "",
        "w_code": model.code,
    }


def chosen_model(values: Values) -> dict[str, Any]:
    """The scenario's model. Raises UserError where no config can be read."""
    if values["w_source"] == COUNT:
        return {"n_params": values["w_count"]}
    code = {} if values["w_code"] == "transformers" else {"code": values["w_code"]}
    return {**_with_shapes(values), **code}


def _with_shapes(values: Values) -> dict[str, Any]:
    if values["w_source"] == CATALOGUE:
        return {"name": values["w_name"]}
    if not values["w_config"].strip():
        raise UserError(_("No config is given yet: upload a config.json, or paste its text."), "model.config")
    try:
        return {"config": decode_config(values["w_config"])}
    except UserError as error:
        raise UserError(str(error), "model.config") from None


def _had_separate_experts(values: Values) -> bool:
    """Whether the model is a mixture whose experts once were modules of their own; of a config as far as it says."""
    if values["w_source"] == CATALOGUE:
        inventory = catalogue_inventory(values["w_name"])
        return inventory is not None and expert_projections(inventory.fused_experts) is not None
    return values["w_source"] == CONFIG and any(name in values["w_config"] for name in _NUM_EXPERTS)


def _experts(_values: Values) -> dict[str, str]:
    return {"stacked": _("stacked in one parameter"), "separate": _("modules of their own")}


def draw_model() -> None:
    """The widgets."""
    sources = {CATALOGUE: _("Catalogue"), COUNT: _("Count"), CONFIG: _("Config")}
    st.segmented_control(
        _("Given as"), list(sources), key="w_source", required=True, format_func=sources.__getitem__, width="stretch"
    )
    source = st.session_state["w_source"]
    if source == CATALOGUE:
        st.selectbox(_("Model"), list(catalogue()), key="w_name")
        _about_model(st.session_state["w_name"])
    elif source == COUNT:
        st.text_input(_("Parameters"), key="w_count", max_chars=40, help=_("For example 7b, 7e9 or 6,738,415,616."))
        st.caption(_("A count has no shapes: activations, loss and gathered layers are not estimated from it."))
    else:
        _config()
    if source != COUNT:
        codes = ["transformers", "litgpt"]
        st.selectbox(_("Model code"), codes, key="w_code", help=_("Whose code computes it: they keep other tensors."))
    draw(MODEL_FIELDS)


def _about_model(name: str) -> None:
    """The count, and in the help where it and the config come from."""
    model, inventory = catalogue()[name], catalogue_inventory(name)
    parts = []
    if inventory is not None:
        parts.append(_("{count} parameters").format(count=f"{inventory.n_params:,}"))
        if inventory.n_active != inventory.n_params:
            parts.append(_("{count} active per token").format(count=format_count(inventory.n_active)))
    parts.append(_("cross-checked") if model.cross_checked else _("not cross-checked"))
    sources = [_("Config: {source}").format(source=model.config_source)]
    if model.n_params_source:
        sources.append(_("Count: {source}").format(source=model.n_params_source))
    st.caption(" · ".join(parts), help="  \n".join(sources))


def _config() -> None:
    st.file_uploader(
        _("Upload config.json"), type=["json"], key="upload", on_change=_take_upload, max_upload_size=1,
        label_visibility="collapsed",
    )  # fmt: skip
    if settings().may_look_up:
        st.text_input(_("or fetch by hub id"), key="hub_id", placeholder="owner/name", max_chars=200, on_change=_fetch)
    st.text_area(_("or paste its text"), key="w_config", height=160, max_chars=settings().max_upload_chars)
    if failure := st.session_state.pop("config_failure", None):
        st.error(failure, icon=":material/error:")
    if unused := _unused_keys(st.session_state["w_config"]):
        st.caption(_("Not used: {keys}.").format(keys=", ".join(unused)))


def _take_upload() -> None:
    uploaded = st.session_state.get("upload")
    if uploaded is not None:
        text = uploaded.getvalue()[: settings().max_upload_chars + 1]
        st.session_state["w_config"] = text.decode("utf-8-sig", "replace")


def _fetch() -> None:
    try:
        if hub_id := st.session_state.get("hub_id", "").strip():
            st.session_state["w_config"] = json.dumps(fetch(hub_id), indent=1)
    except UserError as error:
        st.session_state["config_failure"] = str(error)


def _unused_keys(text: str) -> list[str]:
    """Keys of the pasted config that decide nothing here, so that leaving them out is said."""
    try:
        config = decode_config(text)
    except UserError:
        return []
    if not isinstance(config, dict):
        return []
    return sorted(str(key)[:60] for key in config.keys() - normalise_config(config).keys())[:20]


MODEL_FIELDS = (
    PlanField(
        part=Model,
        name="experts",
        label=mark("Experts"),
        help=mark(
            "How a mixture's experts are held: stacked in one parameter and run together, as transformers 5 has them, "
            "or each in modules of its own that run one after the other, as version 4 had them. Only the latter are "
            "packed in 4 bits."
        ),
        allowed=_had_separate_experts,
        choices=_experts,
    ),
)

"""What leaves the GPU, in the sidebar: optimizer states and weights with engines that can, saved activations with
one GPU."""

from typing import Any

import streamlit as st

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.i18n import gettext as _
from memcore.scenario import Device, Offload
from memcore.ui.plan.values import Values, engine_in, has_shapes, values_now


def offload_values(offload: Offload) -> dict[str, Any]:
    """The value of each widget."""
    return {
        "w_offload_optimizer": offload.optimizer.value,
        "w_offload_parameters": offload.parameters.value,
        "w_offload_activations": offload.activations is Device.CPU,
    }


def chosen_offload(values: Values) -> dict[str, Any]:
    """The scenario's offload."""
    if _activations_can(values):
        return {"activations": "cpu" if values["w_offload_activations"] else "none"}
    if not states_can(values):
        return {}
    return {"optimizer": values["w_offload_optimizer"], "parameters": values["w_offload_parameters"]}


def states_can(values: Values) -> bool:
    """Whether the engine can offload optimizer states and weights."""
    return ENGINE_OPTIONS[engine_in(values)].offloads


def _activations_can(values: Values) -> bool:
    return engine_in(values) is EngineName.SINGLE and has_shapes(values)


def draw_offload() -> None:
    """The widgets of states and weights."""
    devices = {
        Device.NONE.value: _("stay on the GPU"),
        Device.CPU.value: _("to host memory"),
        Device.NVME.value: "NVMe",
    }
    st.selectbox(_("Optimizer states"), list(devices), key="w_offload_optimizer", format_func=devices.__getitem__)
    st.selectbox(_("Weights"), list(devices), key="w_offload_parameters", format_func=devices.__getitem__)


def draw_saved_activations() -> None:
    """The widget of what autograd saves, where it can leave the GPU."""
    if _activations_can(values_now()):
        about = _("torchtune's OffloadActivations: what autograd saves waits in host memory for the backward.")
        st.toggle(_("Saved activations to host memory"), key="w_offload_activations", help=about)

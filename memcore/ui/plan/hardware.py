"""The GPUs in the sidebar."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.engine_options import EngineName
from memcore.hardware import accelerators
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import Hardware
from memcore.ui.plan.field import PlanField, draw
from memcore.ui.plan.number import number
from memcore.ui.plan.values import Values, engine_in, values_now


def hardware_values(hardware: Hardware) -> dict[str, Any]:
    """The value of each widget."""
    return {
        "w_gpu": hardware.gpu,
        "w_gpus": hardware.gpus,
        # 8 stands for the most, so that it still does when the number of GPUs is changed.
        "w_node": 8 if hardware.gpus_per_node == min(8, hardware.gpus) else hardware.gpus_per_node,
    }


def chosen_hardware(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario's hardware, what no widget edits as `base` has it."""
    gpus = 1 if engine_in(values) is EngineName.SINGLE else values["w_gpus"]
    return {**base, "gpu": values["w_gpu"], "gpus": gpus, "gpus_per_node": min(values["w_node"], gpus)}


def draw_hardware() -> None:
    """The widgets."""
    labels = {name: device.label for name, device in accelerators().items()}
    st.selectbox(_("Accelerator"), list(labels), key="w_gpu", format_func=labels.__getitem__)
    single = engine_in(values_now()) is EngineName.SINGLE
    left, right = st.columns(2)
    number(_("GPUs"), most=1_000_000, key="w_gpus", disabled=single, place=left)
    number(_("per node"), most=1_000_000, key="w_node", disabled=single, place=right)
    draw(HARDWARE_FIELDS)


HARDWARE_FIELDS = (
    PlanField(
        part=Hardware,
        name="expandable_segments",
        label="expandable_segments",
        help=mark(
            "Of PYTORCH_CUDA_ALLOC_CONF: the caching allocator's segments grow, instead of one for each large block. "
            "It decides what is reserved beside what tensors take."
        ),
    ),
)

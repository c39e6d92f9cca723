"""The loss in the sidebar: what runs as one, its chunks, where its logits become FP32, what is copied and held."""

from typing import Any

import streamlit as st

from memcore.explain import LOSS_LABELS, UPCAST_LABELS
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import DEFAULT_CHUNKS, IN_CHUNKS, OWN_KERNELS, Loss, Upcast, Workload
from memcore.ui.plan.field import PlanField
from memcore.ui.plan.number import number
from memcore.ui.plan.values import USUAL, Values, has_shapes, is_nf4


def loss_values(workload: Workload) -> dict[str, Any]:
    """The value of each widget of the loss."""
    return {"w_loss": workload.loss.value, "w_loss_chunks": workload.num_loss_chunks}


def chosen_loss(values: Values) -> dict[str, Any]:
    """The workload's fields from the widgets' values; of those that do nothing for the loss, the defaults."""
    loss, chunks = Loss(values["w_loss"]), values["w_loss_chunks"]
    return {
        "loss": loss.value,
        "loss_chunks": chunks if loss in IN_CHUNKS and chunks != DEFAULT_CHUNKS else None,
    }


def draw_loss() -> None:
    """The widgets."""
    labels = {name: _(label) for name, label in LOSS_LABELS.items()}
    st.selectbox(_("Loss"), list(labels), key="w_loss", format_func=labels.__getitem__)
    if Loss(st.session_state["w_loss"]) in IN_CHUNKS:
        number(_("Chunks of the loss"), most=65_536, key="w_loss_chunks")


def _upcasts(values: Values) -> dict[str, str]:
    fused = values["w_loss"] == Loss.FUSED
    known = {each.value: _(UPCAST_LABELS[each]) for each in Upcast if not (fused and each is Upcast.MODEL)}
    return {USUAL: _("as its newest libraries do"), **known}


def _can_copy(values: Values) -> bool:
    return bool(values["w_loss"] != Loss.CHUNKED)


def _can_compile(values: Values) -> bool:
    """Not kernels of their own, nor what copies."""
    copies = values["w_workload_shifted_copy"] and _can_copy(values)
    return values["w_loss"] not in OWN_KERNELS and not copies


def _holds_inputs(values: Values) -> bool:
    """Something is left of a graph whose backward is done: inputs that packed products keep."""
    return bool(is_nf4(values) and values["w_recipe_keeps_packed_inputs"] and values["w_checkpointing"] == "none")


LOSS_FIELDS = (
    PlanField(
        part=Workload,
        name="logits_upcast",
        label=mark("Logits to FP32"),
        help=mark(
            "Where 16-bit logits become FP32: in the model's forward, in the loss beside the others, or nowhere."
        ),
        choices=_upcasts,
    ),
    PlanField(
        part=Workload,
        name="shifted_copy",
        label=mark("Shifted by a copy"),
        help=mark("As transformers before 4.49 does; newer ones shift labels."),
        allowed=_can_copy,
    ),
    PlanField(
        part=Workload,
        name="loss_compiled",
        label=mark("Loss compiled"),
        help=mark("The loss function, by torch.compile."),
        allowed=_can_compile,
    ),
    PlanField(
        part=Workload,
        name="logits_retained",
        label=mark("Logits held"),
        help=mark("The training loop keeps the model's output until the backward is done."),
        shown=lambda values: values["w_loss"] != Loss.FUSED,
    ),
    PlanField(
        part=Workload,
        name="use_cache",
        label="use_cache",
        help=mark(
            "The model's output holds every layer's keys and values too, as for generation, until the loss is known."
        ),
        shown=has_shapes,
    ),
    PlanField(
        part=Workload,
        name="last_loss_held",
        label=mark("Last step's loss held"),
        help=mark(
            "The training loop's variables hold a step's loss until the next one is there, and with it the inputs that "
            "packed products keep."
        ),
        allowed=_holds_inputs,
    ),
)

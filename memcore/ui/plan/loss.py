"""The loss in the sidebar: what runs as one, its chunks, where its logits become FP32, what is copied and held."""

from typing import Any

import streamlit as st

from memcore.explain import LOSS_LABELS, UPCAST_LABELS
from memcore.i18n import gettext as _
from memcore.scenario import DEFAULT_CHUNKS, IN_CHUNKS, OWN_KERNELS, Loss, Upcast, Workload
from memcore.ui.plan.values import Values

# What is usual for the loss, as a value that a select box can hold.
USUAL = "usual"


def loss_values(workload: Workload) -> dict[str, Any]:
    """The value of each widget of the loss."""
    return {
        "w_loss": workload.loss.value,
        "w_loss_chunks": workload.num_loss_chunks,
        "w_upcast": workload.logits_upcast.value if workload.logits_upcast else USUAL,
        "w_shifted": workload.shifted_copy,
        "w_retained": workload.logits_retained,
        "w_loss_compiled": workload.loss_compiled,
    }


def chosen_loss(values: Values) -> dict[str, Any]:
    """The workload's fields from the widgets' values; of those that do nothing for the loss, the defaults."""
    loss = Loss(values["w_loss"])
    chunks, upcast = values["w_loss_chunks"], values["w_upcast"]
    return {
        "loss": loss.value,
        "loss_chunks": chunks if loss in IN_CHUNKS and chunks != DEFAULT_CHUNKS else None,
        "logits_upcast": upcast if upcast in _upcasts(loss) else None,
        "shifted_copy": values["w_shifted"] and loss is not Loss.CHUNKED,
        "logits_retained": values["w_retained"] and loss is not Loss.FUSED,
        "loss_compiled": values["w_loss_compiled"] and loss not in OWN_KERNELS,
    }


def draw_loss() -> None:
    """The widgets."""
    labels = {name: _(label) for name, label in LOSS_LABELS.items()}
    st.selectbox(_("Loss"), list(labels), key="w_loss", format_func=labels.__getitem__)
    loss = Loss(st.session_state["w_loss"])
    if loss in IN_CHUNKS:
        st.number_input(_("Chunks of the loss"), min_value=1, max_value=65_536, step=1, key="w_loss_chunks")
    upcasts = {USUAL: _("as its newest libraries do"), **{name: _(UPCAST_LABELS[name]) for name in _upcasts(loss)}}
    if st.session_state["w_upcast"] not in upcasts:
        st.session_state["w_upcast"] = USUAL
    st.selectbox(_("Logits to FP32"), list(upcasts), key="w_upcast", format_func=upcasts.__getitem__)
    if loss is not Loss.CHUNKED:
        st.checkbox(
            _("Shifted by a copy"),
            key="w_shifted",
            help=_("As transformers before 4.49 does; newer ones shift labels."),
        )
    if loss not in OWN_KERNELS:
        st.checkbox(_("Loss compiled"), key="w_loss_compiled", help=_("The loss function, by torch.compile."))
    if loss is not Loss.FUSED:
        st.checkbox(
            _("Logits held"),
            key="w_retained",
            help=_("The training loop keeps the model's output until the backward is done."),
        )


def _upcasts(loss: Loss) -> list[str]:
    return [each.value for each in Upcast if not (loss is Loss.FUSED and each is Upcast.MODEL)]

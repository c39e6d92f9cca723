"""What one step processes, in the sidebar, and what of it is recomputed."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.explain import ATTENTION_LABELS, FUSED_LABELS, OPERATION_LABELS
from memcore.i18n import gettext as _
from memcore.scenario import Workload
from memcore.ui.plan.field import more
from memcore.ui.plan.loss import LOSS_FIELDS, chosen_loss, draw_loss, loss_values
from memcore.ui.plan.number import number
from memcore.ui.plan.offload import draw_saved_activations
from memcore.ui.plan.values import Values

# Kinds of checkpointing that take a number of layers.
_COUNTED = ("segments", "every_nth", "first")
# Kinds that recompute whole layers, which torch's reentrant checkpoint can do too.
_REENTRANT = ("full", *_COUNTED)


def workload_values(workload: Workload) -> dict[str, Any]:
    """The value of each widget."""
    kind, _bracket, rest = workload.checkpointing.rstrip(")").partition("(")
    return {
        "w_micro": workload.micro_batch,
        "w_seq": workload.seq_len,
        "w_accum": workload.grad_accum,
        "w_attention": workload.attention,
        "w_checkpointing": kind,
        "w_k": int(rest) if kind in _COUNTED else 2,
        "w_saved": rest.split(",") if kind == "save" else ["attention", "mm"],
        "w_reentrant": workload.reentrant,
        **loss_values(workload),
        "w_fused": list(workload.fused_kernels),
        "w_compile": workload.compile,
    }


def chosen_workload(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario's workload, what no widget edits as `base` has it."""
    return {
        **base,
        "micro_batch": values["w_micro"],
        "seq_len": values["w_seq"],
        "grad_accum": values["w_accum"],
        "attention": values["w_attention"],
        "checkpointing": _checkpointing(values),
        "reentrant": values["w_reentrant"] and values["w_checkpointing"] in _REENTRANT,
        **chosen_loss(values),
        "fused_kernels": values["w_fused"],
        "compile": values["w_compile"],
    }


def _checkpointing(values: Values) -> str:
    kind: str = values["w_checkpointing"]
    if kind in _COUNTED:
        return f"{kind}({values['w_k']})"
    # With nothing saved, every layer is recomputed as a whole.
    if kind == "save":
        return f"save({','.join(values['w_saved'])})" if values["w_saved"] else "full"
    return kind


def draw_workload() -> None:
    """The widgets."""
    left, right = st.columns(2)
    number(_("Micro-batch"), most=100_000_000, key="w_micro", place=left)
    number(_("Tokens"), most=100_000_000, step=1024, key="w_seq", help=_("Per sequence."), place=right)
    attentions = {name: _(label) for name, label in ATTENTION_LABELS.items()}
    st.selectbox(_("Attention"), list(attentions), key="w_attention", format_func=attentions.__getitem__)
    _draw_checkpointing()
    draw_saved_activations()
    draw_loss()
    kernels = {name: _(label) for name, label in FUSED_LABELS.items()}
    st.multiselect(
        _("Fused kernels"),
        list(kernels),
        key="w_fused",
        format_func=kernels.__getitem__,
        help=_("Of a kernel library, such as Liger or Unsloth: they keep less, and write gradients in place."),
    )
    st.toggle("torch.compile", key="w_compile", help=_("Each decoder layer is compiled by itself, as torchtitan does."))
    number(
        _("Gradient accumulation steps"),
        most=100_000_000,
        key="w_accum",
        help=_("Above 1, gradients stay alive from one micro-step to the next."),
    )
    more("workload", LOSS_FIELDS)


def _draw_checkpointing() -> None:
    kinds = {
        "none": _("none"),
        "full": _("full: every layer"),
        "segments": _("segments of k layers"),
        "every_nth": _("every n-th layer"),
        "first": _("the first n layers"),
        "attention": _("attention scores only"),
        "save": _("by operation: all but what is saved"),
    }
    st.selectbox(_("Checkpointing"), list(kinds), key="w_checkpointing", format_func=kinds.__getitem__)
    chosen = st.session_state["w_checkpointing"]
    if chosen in _COUNTED:
        number(_("Layers (k or n)"), most=9999, key="w_k")
    if chosen == "save":
        operations = {name: _(label) for name, label in OPERATION_LABELS.items()}
        st.multiselect(_("Saved"), list(operations), key="w_saved", format_func=operations.__getitem__)
    if chosen in _REENTRANT:
        st.checkbox(_("Reentrant"), key="w_reentrant", help=_("torch's older checkpoint: use_reentrant=True."))

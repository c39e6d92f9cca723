"""The optimizer in the sidebar."""

from typing import Any

import streamlit as st

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.optimizers import OPTIMIZERS, OptimizerName
from memcore.scenario import Optimizer
from memcore.ui.plan.values import Values, adapts, engine_in, has_shapes, values_now

# The engine's own choice, as a value that a select box can hold.
_ENGINE_DEFAULT = "default"


def optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    """The value of each widget."""
    return {
        "w_optimizer": optimizer.name.value,
        "w_8bit": optimizer.bits == 8,
        "w_paged": optimizer.paged,
        "w_momentum": optimizer.momentum,
        "w_in_backward": optimizer.in_backward,
        "w_implementation": optimizer.implementation or _ENGINE_DEFAULT,
    }


def chosen_optimizer(values: Values) -> dict[str, Any]:
    """The recipe's optimizer."""
    switches = [("w_8bit", "bits", 8), ("w_paged", "paged", True), ("w_momentum", "momentum", True)]
    if _can_step_early(values):
        switches.append(("w_in_backward", "in_backward", True))
    optimizer = {"name": values["w_optimizer"], **{field: value for key, field, value in switches if values[key]}}
    if values["w_implementation"] != _ENGINE_DEFAULT and OPTIMIZERS[OptimizerName(values["w_optimizer"])].in_torch:
        optimizer["implementation"] = values["w_implementation"]
    return optimizer


def _can_step_early(values: Values) -> bool:
    """One GPU's gradients are complete when they are made, unless micro-steps wait for each other."""
    alone = engine_in(values) is EngineName.SINGLE and values["w_accum"] == 1
    return alone and has_shapes(values) and not adapts(values)


def draw_optimizer() -> None:
    """The widgets."""
    names = {name.value: rule.label for name, rule in OPTIMIZERS.items()}
    st.selectbox(_("Optimizer"), list(names), key="w_optimizer", format_func=names.__getitem__)
    name = OptimizerName(st.session_state["w_optimizer"])
    rule = OPTIMIZERS[name]
    if rule.has_8bit or st.session_state["w_8bit"] or st.session_state["w_paged"]:
        left, right = st.columns(2)
        left.toggle(_("8-bit"), key="w_8bit")
        right.toggle(_("paged"), key="w_paged")
    if name is OptimizerName.SGD or st.session_state["w_momentum"]:
        st.toggle(_("momentum"), key="w_momentum")
    if _can_step_early(values_now()):
        st.toggle(
            _("Step in the backward"),
            key="w_in_backward",
            help=_("Each parameter is stepped as soon as its gradient is there, which is freed then."),
        )
    if rule.in_torch:
        choices = [_ENGINE_DEFAULT, "foreach", *(["fused"] if rule.has_fused else []), "for_loop"]
        if st.session_state["w_implementation"] not in choices:
            st.session_state["w_implementation"] = _ENGINE_DEFAULT
        labels = {_ENGINE_DEFAULT: _("the engine's default")}
        st.selectbox(
            _("Implementation"), choices, key="w_implementation", format_func=lambda choice: labels.get(choice, choice)
        )

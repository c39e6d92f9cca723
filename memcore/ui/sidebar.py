"""The sidebar: how figures are shown, the shared plan section by section, and what is wrong in each."""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from memcore.errors import UserError
from memcore.explain import EVIDENCE_LABELS
from memcore.i18n import LANGUAGES
from memcore.i18n import gettext as _
from memcore.terms import EvidenceKind
from memcore.ui import state
from memcore.ui.plan.engine import draw_engine
from memcore.ui.plan.hardware import draw_hardware
from memcore.ui.plan.model import draw_model
from memcore.ui.plan.offload import draw_offload, states_can
from memcore.ui.plan.recipe import draw_recipe
from memcore.ui.plan.values import values_now
from memcore.ui.plan.workload import draw_workload
from memcore.units import ByteUnit


class Sidebar:
    """Draws the widgets, and keeps a place under each section for what is wrong there."""

    def __init__(self) -> None:
        self._places: dict[str, DeltaGenerator] = {}

    def draw(self) -> None:
        """All sections, in the sidebar."""
        with st.sidebar:
            _view()
            for name, title, draw, is_open in (
                ("model", _("Model"), draw_model, True),
                ("hardware", _("Hardware"), draw_hardware, True),
                ("parallelism", _("Engine"), draw_engine, True),
                ("recipe", _("Recipe"), draw_recipe, False),
                ("offload", _("Offload"), draw_offload, False),
                ("workload", _("Workload"), draw_workload, True),
            ):
                if name != "offload" or states_can(values_now()):
                    with st.expander(title, expanded=is_open):
                        draw()
                self._places[name] = st.empty()

    def show(self, error: UserError) -> None:
        """The sentence beside the section whose field it names."""
        section = error.field.split(".")[0]
        if section not in self._places:
            section = "parallelism" if section == "engine_config" else "model"
        self._places[section].error(str(error), icon=":material/error:")


def _view() -> None:
    left, right = st.columns(2)
    left.segmented_control(_("Unit"), [unit.value for unit in ByteUnit], key=state.UNIT, required=True)
    right.segmented_control(
        _("Language"), list(LANGUAGES), key=state.LANGUAGE, required=True, format_func=LANGUAGES.__getitem__
    )
    kinds = {kind: _(EVIDENCE_LABELS[EvidenceKind(kind)]) for kind in state.EVIDENCES}
    st.segmented_control(
        _("Activations from"),
        list(kinds),
        key=state.EVIDENCE,
        required=True,
        format_func=kinds.__getitem__,
        help=_("formula: closed form, at once. trace: the real model's code on fake tensors, in about a second."),
    )

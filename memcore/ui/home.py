"""Home: the whole budget of one scenario, and does it fit."""

import streamlit as st

from memcore.budget import Budget
from memcore.explain import explain_term, remedy, term_label
from memcore.i18n import gettext as _
from memcore.questions import QUESTIONS, Question
from memcore.report import budget_rows
from memcore.ui import charts, state
from memcore.ui.cards import beside_trace, downloads, figures, headroom_text, how_computed, opening, text_table
from memcore.ui.frame import open_page
from memcore.units import ByteUnit, format_bytes

LARGEST = 3


def render(budget: Budget, unit: ByteUnit) -> None:
    """The page's body."""
    opening(_("GPU memory of a training run"), budget, unit)
    ladder = budget.ladder
    figures(
        [
            (
                _("Peak, allocated"),
                format_bytes(ladder.allocated, unit),
                _("What tensors take at the peak: torch.cuda.max_memory_allocated."),
            ),
            (
                _("Reserved, at least"),
                format_bytes(ladder.reserved, unit),
                _("The same in the allocator's 2 MiB segments; fragmentation comes on top."),
            ),
            (
                _("On the device"),
                format_bytes(ladder.device, unit),
                _("With CUDA context and NCCL: what nvidia-smi shows."),
            ),
            (_("Headroom"), headroom_text(budget, unit), _("Usable memory of the card less that.")),
        ]
    )
    st.plotly_chart(charts.phases(budget, unit), config=charts.CONFIG, alt=_("Memory per GPU by phase and category"))
    _largest(budget, unit)
    st.subheader(_("Over the step"))
    st.plotly_chart(charts.step(budget, unit), config=charts.CONFIG, alt=_("Memory over one step"))
    beside_trace(budget, unit)
    how_computed(explain_term(term, unit) for term, _share in budget.at_peak())
    rows = budget_rows(budget)
    downloads(budget, rows, "budget")
    _walk_through(unit)


def _largest(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("The largest terms at the peak"))
    text_table(
        [
            {
                _("Term"): term_label(term.name),
                _("Size"): format_bytes(share, unit),
                _("What would shrink it"): remedy(term),
            }
            for term, share in budget.at_peak()[:LARGEST]
        ],
        _("The three largest terms and their remedies"),
    )


def _walk_through(unit: ByteUnit) -> None:
    st.subheader(_("The questions that everybody asks"))
    for number, question in enumerate(QUESTIONS, start=1):
        with st.container(border=True):
            st.markdown(f"**{number}. {_(question.title)}**")
            st.markdown(question.answered(unit))
            if st.button(_("Open this scenario"), key=f"question_{number}", on_click=_adopt, args=(question,)):
                open_page(question.page)


def _adopt(question: Question) -> None:
    state.adopt(question.scenario)

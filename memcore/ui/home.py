"""Home: the whole budget of one scenario, and does it fit; how far to trust that; a team's own runs."""

import streamlit as st

from memcore.accuracy.scored import ScoredRun, source_link
from memcore.accuracy.words import band_sentence, error_text, metric_label, nearest_gist, nearest_runs, run_label
from memcore.budget import Budget
from memcore.explain import EVIDENCE_LABELS, explain_term, term_label
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.questions import QUESTIONS, Question
from memcore.remedies import remedies
from memcore.report import budget_rows
from memcore.terms import EvidenceKind
from memcore.ui import charts, memory_report, own_runs, scoreboard, state
from memcore.ui.cards import beside_trace, downloads, figures, how_computed, opening, text_table
from memcore.ui.frame import open_page
from memcore.units import ByteUnit, format_bytes
from memcore.verdict_words import explain_ladder, ladder_figures, what_a_trace_adds

LARGEST = 3
VIEW_LABELS = {
    state.ANSWER: mark("This scenario"),
    state.PUBLISHED: mark("Published runs"),
    state.OWN: mark("Your own runs"),
}


def render(budget: Budget, unit: ByteUnit) -> None:
    """The page's body."""
    opening(_("GPU memory of a training run"), budget, unit)
    own_runs.calibration_line(budget, unit)
    _beside(budget, unit)
    st.session_state.setdefault(state.VIEW, state.ANSWER)
    view = st.segmented_control(
        _("View"), list(VIEW_LABELS), key=state.VIEW, required=True, label_visibility="collapsed",
        format_func=lambda name: _(VIEW_LABELS[name]),
    )  # fmt: skip
    if view == state.PUBLISHED:
        scoreboard.render(unit)
    elif view == state.OWN:
        own_runs.render(budget, unit)
    else:
        _answer(budget, unit)


def _beside(budget: Budget, unit: ByteUnit) -> None:
    """The error band and the published runs most like the scenario; the gist on the outside."""
    nearest = nearest_runs(budget)
    gist = _("Error band ±{band}%").format(band=budget.band.percent)
    if more := nearest_gist(budget, nearest):
        gist += f" · {more}"
    with st.expander(gist, key="nearest", icon=":material/balance:"):
        st.markdown(band_sentence(budget))
        if nearest:
            rows = [_near(run, budget.activations_from, unit) for run in nearest]
            text_table(rows, _("The published runs most like this scenario"))
            st.caption(
                _(
                    "Nearest by doublings of parameters and of the sequence between the two; another engine, or "
                    "another method, counts as four doublings."
                )
            )
        else:
            st.markdown(_("No published run has a prediction to lie beside it."))


def _near(run: ScoredRun, evidence: EvidenceKind, unit: ByteUnit) -> dict[str, object]:
    return {
        _("Published run"): run_label(run),
        _("Predicted ({evidence})").format(evidence=_(EVIDENCE_LABELS[evidence])): format_bytes(
            run.predicted_by(evidence) or 0, unit
        ),
        _("Measured"): format_bytes(run.measured, unit),
        _("Error"): error_text(run.error_of(evidence)),
        _("Measured as"): metric_label(run.metric),
        _("Source"): f"[{run.source.partition('@')[0]}]({source_link(run.source)})",
    }


def _answer(budget: Budget, unit: ByteUnit) -> None:
    figures(ladder_figures(budget.ladder, unit))
    if more := what_a_trace_adds(budget):
        st.caption(more)
    st.plotly_chart(charts.phases(budget, unit), config=charts.CONFIG, alt=_("Memory per GPU by phase and category"))
    _largest(budget, unit)
    st.subheader(_("Over the step"))
    st.plotly_chart(charts.step(budget, unit), config=charts.CONFIG, alt=_("Memory over one step"))
    beside_trace(budget, unit)
    terms = [explain_term(term, unit, share) for term, share in budget.at_peak()]
    how_computed([*terms, *explain_ladder(budget, unit)])
    rows = budget_rows(budget)
    downloads(budget, rows, "budget")
    memory_report.render(budget, unit)
    _walk_through(unit)


def _largest(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("The largest terms at the peak"))
    largest = budget.at_peak()[:LARGEST]
    smaller = remedies(budget, [term for term, _share in largest], unit)
    text_table(
        [
            {
                _("Term"): term_label(term.name),
                _("Size"): format_bytes(share, unit),
                _("What would shrink it"): text,
            }
            for (term, share), text in zip(largest, smaller, strict=True)
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

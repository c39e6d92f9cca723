"""What every page shows in the same way: assumptions, verdict, figures, explanations, downloads."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence

import streamlit as st

from memcore.alive import alive_by_module
from memcore.assumptions import assumptions
from memcore.budget import Budget, Verdict
from memcore.compare import PhasePair, beside_closed_form
from memcore.explain import (
    EVIDENCE_LABELS,
    NO_CLOSED_FORM,
    PHASE_LABELS,
    Explanation,
    about_trace,
    alive_rows,
    difference,
    moment_label,
    term_label,
)
from memcore.i18n import gettext as _
from memcore.notices import notices
from memcore.report import budget_report
from memcore.scenario import exported_data
from memcore.ui.palette import VERDICT_ICONS
from memcore.units import ByteUnit, format_bytes
from memcore.verdict_words import headline, host_sentence, reasons

# As long as a figure with its unit.
UNBROKEN_CHARS = 9


def opening(title: str, budget: Budget, unit: ByteUnit) -> None:
    """The page's title, what its figures rest on, and the verdict."""
    st.title(title)
    st.caption(assumptions(budget, unit))
    known = notices(budget, unit)
    stops = [notice for notice in known if notice.stops]
    for notice in stops:
        st.error(notice.text, icon=":material/block:")
    show = {Verdict.FITS: st.success, Verdict.UNCERTAIN: st.warning, Verdict.DOES_NOT_FIT: st.error}
    box, icon = (st.info, ":material/memory:") if stops else (show[budget.verdict], VERDICT_ICONS[budget.verdict])
    box(f"**{headline(budget, unit)}** {reasons(budget, unit)}", icon=icon)
    if host := host_sentence(budget, unit):
        st.info(host, icon=":material/dns:")
    for notice in known:
        if not notice.stops:
            st.warning(notice.text, icon=":material/info:")


def figures(rows: Sequence[tuple[str, str, str]]) -> None:
    """At most four figures in equal cards: label, value, help."""
    with st.grid(len(rows), min_column_width=180):
        for label, value, explanation in rows:
            st.metric(label, value, help=explanation, border=True)


def how_computed(explanations: Iterable[Explanation]) -> None:
    """ "How is this computed?": for each figure the formula, the user's numbers in it, the result and the source."""
    with st.expander(_("How is this computed?"), icon=":material/calculate:"):
        for each in explanations:
            st.markdown(f"**{each.label}** · {each.evidence}")
            if each.how:
                st.markdown(each.how)
            else:
                st.latex(each.symbols)
            st.text(f"= {each.numbers} = {each.result}")
            if each.at_peak:
                st.markdown(_("That is its largest; at the peak: {size}.").format(size=each.at_peak))
            if each.legend:
                st.caption(" · ".join(f"${symbol}$ {meaning}" for symbol, meaning in each.legend))
            st.caption(_("Source: {source}").format(source=each.source))


def terms_at_peak(budget: Budget, unit: ByteUnit) -> None:
    """Every term with its share of the peak, which the shares add up to, and what the allocator holds for them."""
    rows = [
        {
            _("Term"): term_label(term.name),
            _("At the peak"): format_bytes(share, unit),
            _("Evidence"): _(EVIDENCE_LABELS[term.evidence]),
        }
        for term, share in budget.at_peak()
    ]
    sums = {
        _("Allocated at the peak, the sum of all terms"): budget.ladder.allocated,
        _("The same in whole segments of the allocator"): budget.ladder.held,
    }
    if budget.ladder.reservation is not None:
        sums[_("Reserved after some steps, cache included")] = budget.ladder.reserved
    for label, size in sums.items():
        rows.append({_("Term"): label, _("At the peak"): format_bytes(size, unit), _("Evidence"): ""})
    text_table(rows, _("Every term at the peak"))


def downloads(budget: Budget, rows: Sequence[Mapping[str, object]], name: str) -> None:
    """The page's table as CSV, the whole answer and the scenario as JSON."""
    with st.container(horizontal=True):
        st.download_button(
            _("Table (CSV)"),
            lambda: _csv(rows),
            f"memcore-{name}.csv",
            "text/csv",
            on_click="ignore",
            icon=":material/table:",
        )
        st.download_button(
            _("Budget (JSON)"), lambda: json.dumps(budget_report(budget), indent=1, ensure_ascii=False),
            f"memcore-{name}.json", "application/json", on_click="ignore", icon=":material/data_object:",
        )  # fmt: skip
        st.download_button(
            _("Scenario (JSON)"), lambda: json.dumps(exported_data(budget.scenario), indent=1),
            "scenario.json", "application/json", on_click="ignore", icon=":material/tune:",
        )  # fmt: skip


def _csv(rows: Sequence[Mapping[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def table(rows: Sequence[Mapping[str, object]], alt: str) -> None:
    """A long table that scrolls and sorts."""
    st.dataframe(list(rows), hide_index=True, alt=alt)


def text_table(rows: Sequence[Mapping[str, object]], alt: str) -> None:
    """A short table whose texts are read whole: sentences wrap, figures stay with their unit."""
    st.table(
        [{_unbroken(name): _unbroken(cell) for name, cell in row.items()} for row in rows],
        hide_index=True,
        border="horizontal",
        alt=alt,
    )


def _unbroken(text: object) -> object:
    """A text short enough to be one figure or name, with spaces and hyphens at which no line is broken."""
    if isinstance(text, str) and len(text) <= UNBROKEN_CHARS:
        return text.replace(" ", "\N{NO-BREAK SPACE}").replace("-", "\N{NON-BREAKING HYPHEN}")
    return text


def beside_trace(budget: Budget, unit: ByteUnit) -> None:
    """Where activations were traced: each phase's peak beside the closed form's, and how far that is off."""
    profile = budget.evidence.profile
    if profile is None:
        return
    pairs = beside_closed_form(budget)
    st.subheader(_("Trace and closed form") if pairs else _("Trace"))
    if pairs:
        _beside(pairs, unit)
    else:
        st.markdown(_(NO_CLOSED_FORM))
    st.caption(about_trace(profile))
    _alive(budget, unit)


def _alive(budget: Budget, unit: ByteUnit) -> None:
    found = alive_by_module(budget)
    if found is None:
        return
    st.subheader(_("Alive at {moment}, by module").format(moment=moment_label(found.moment)))
    text_table(
        [
            {_("Module"): module, _("Size"): size, _("Kept as"): kept_as}
            for module, size, kept_as in alive_rows(found, unit)
        ],
        _("What each module has alive at the fullest moment"),
    )
    st.caption(_("All layers together, beside weights, gradients and optimizer states."))


def _beside(pairs: Sequence[PhasePair], unit: ByteUnit) -> None:
    text_table(
        [
            {
                _("Phase"): _(PHASE_LABELS[pair.phase]),
                _("traced"): format_bytes(pair.traced, unit),
                _("closed form"): format_bytes(pair.closed, unit),
                _("difference, mostly in"): difference(pair),
            }
            for pair in pairs
        ],
        _("Each phase traced and in closed form"),
    )

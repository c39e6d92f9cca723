"""Scored runs on a page: predicted against measured as a figure and as a table, filters, and the one that is opened.

The published runs and a team's own are shown alike. What is drawn comes from rows of data; only the run that is opened
is predicted again, for its terms.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from memcore.accuracy.scored import Figure, ScoredRun, source_link
from memcore.accuracy.words import engine_label, error_text, evidence_label, method_label, metric_label, run_label
from memcore.explain import explain_term
from memcore.i18n import gettext as _
from memcore.i18n import mark, ngettext
from memcore.score.adapter import scenario_of
from memcore.score.reasons import reason_of
from memcore.score.scoring import Score, score_run
from memcore.score.summary import GROUPS, figures
from memcore.terms import EvidenceKind
from memcore.ui import charts, state
from memcore.ui.cards import figures as cards
from memcore.ui.cards import how_computed, table, terms_at_peak
from memcore.ui.score_charts import predicted_and_measured
from memcore.ui.work import light_lane
from memcore.units import ByteUnit, format_bytes

RecordOf = Callable[[str], Mapping[str, Any] | None]
FILTERS = {
    "regime": mark("Regime"),
    "engine": mark("Engine"),
    "method": mark("Method"),
    "metric": mark("Measured as"),
    "family": mark("Family"),
}
CARD_LABELS = {
    "gold": mark("Exact bytes"),
    "allocated": mark("Allocated"),
    "reserved": mark("Reserved"),
    "reserved_fsdp2": mark("Reserved, FSDP2"),
    "activations": mark("Layers alone"),
}
# No published run is of layers alone.
_CARDS: dict[str, Callable[[ScoredRun], bool]] = {
    **GROUPS,
    "activations": lambda run: run.figure is Figure.ACTIVATIONS,
}
# What is shown of an opened run without a record to predict again.
_NO_RECORD = mark("Its terms are not kept with it: score its record again to see them.")
_FROM_HERE = {
    "bench": mark(
        "Measured by the activation explorer: what layers take beyond weights and inputs, and with it each weight's "
        "gradient for a moment, which the closed form leaves out."
    ),
    "verify": mark("Measured by the real engine on a small model; the proof has its terms."),
}


def board(name: str, runs: Sequence[ScoredRun], record_of: RecordOf, unit: ByteUnit) -> None:
    """The figures of the runs, their chart and table, and the run that is opened. `name` tells the widgets of one
    board from another's; `record_of` gives a run's record where there is one."""
    chosen = _filtered(name, runs)
    _medians(runs, chosen)
    predicted = [run for run in chosen if run.predicted is not None]
    if not predicted:
        st.info(_("None of these runs has a prediction."), icon=":material/filter_alt_off:")
        return
    opened = st.session_state.get(_key(name))
    st.plotly_chart(
        predicted_and_measured(predicted, opened, unit), config=charts.CONFIG, key=f"{name}_chart",
        on_select=lambda: _open_point(name), selection_mode="points",
        alt=_("Predicted against measured memory of each run"),
    )  # fmt: skip
    _rows(name, predicted, unit)
    ids = [run.run_id for run in predicted]
    if opened not in ids:
        st.session_state[_key(name)] = None
    label = _("Open a run")
    st.selectbox(label, ids, index=None, key=_key(name), placeholder=_("Select a point, a row, or a run here"))
    run = next((run for run in predicted if run.run_id == st.session_state.get(_key(name))), None)
    if run is not None:
        _opened(name, run, record_of(run.run_id), unit)


def _key(name: str) -> str:
    return f"w_{name}_run"


def _filtered(name: str, runs: Sequence[ScoredRun]) -> list[ScoredRun]:
    """The runs that the filters leave; a filter with nothing chosen leaves all."""
    labels: dict[str, Callable[[str], str]] = {
        "engine": engine_label,
        "method": method_label,
        "metric": metric_label,
    }
    left = list(runs)
    with st.grid(len(FILTERS), min_column_width=130):
        for field, label in FILTERS.items():
            values = sorted({getattr(run, field) for run in runs})
            key = f"w_{name}_{field}"
            # A file of one's own may have been replaced since something was chosen.
            st.session_state[key] = [each for each in st.session_state.get(key, []) if each in values]
            wanted = st.multiselect(_(label), values, key=key, format_func=labels.get(field, str))
            left = [run for run in left if not wanted or getattr(run, field) in wanted]
    return left


def _medians(runs: Sequence[ScoredRun], chosen: Sequence[ScoredRun]) -> None:
    """A card for each group that the board has runs of, with the errors of those chosen."""
    rows = []
    for group, label in CARD_LABELS.items():
        if not any(map(_CARDS[group], runs)):
            continue
        found = figures(filter(_CARDS[group], chosen))
        if found.median_abs_pct is None or found.p90_abs_pct is None:
            value, explained = "-", _("None of these runs is predicted.")
        else:
            value = f"{found.median_abs_pct:.1f}%"
            explained = ngettext(
                "The error of {runs} run.", "Median error of {runs} runs; nine of ten are within {most:.1f}%.",
                found.predicted,
            ).format(runs=found.predicted, most=found.p90_abs_pct)  # fmt: skip
        rows.append((_(label), value, explained))
    if rows:
        st.caption(_("Median error of the runs that are shown, by what was measured of them"))
        cards(rows)


def _open_point(name: str) -> None:
    """The chart's callback: open the run of the point that was selected."""
    points = st.session_state[f"{name}_chart"]["selection"]["points"]
    if points and points[0].get("customdata"):
        st.session_state[_key(name)] = points[0]["customdata"][0]


def _open_row(name: str, ids: Sequence[str]) -> None:
    """The table's callback: open the run of the row that was selected."""
    rows = st.session_state[f"{name}_table"]["selection"]["rows"]
    if rows and rows[0] < len(ids):
        st.session_state[_key(name)] = ids[rows[0]]


def _rows(name: str, runs: Sequence[ScoredRun], unit: ByteUnit) -> None:
    worst = sorted(runs, key=lambda run: -abs(run.error_pct or 0))
    st.dataframe(
        [_row(run, unit) for run in worst], hide_index=True, height=300, key=f"{name}_table",
        on_select=lambda: _open_row(name, [run.run_id for run in worst]), selection_mode="single-row",
        alt=_("Every run with its prediction, the furthest off first"),
        column_config={
            _("Run"): st.column_config.TextColumn(width="medium"),
            **dict.fromkeys(_size_headings(unit), st.column_config.NumberColumn(format="%.4g")),
            _("Error (%)"): st.column_config.NumberColumn(format="%+.1f"),
            _("Source"): st.column_config.LinkColumn(display_text=_("open"), width="small"),
        },
    )  # fmt: skip


def _size_headings(unit: ByteUnit) -> tuple[str, str]:
    return _("Predicted ({unit})").format(unit=unit.value), _("Measured ({unit})").format(unit=unit.value)


def _row(run: ScoredRun, unit: ByteUnit) -> dict[str, object]:
    sizes = ((run.predicted or 0) / unit.size, run.measured / unit.size)
    return {
        _("Run"): run.run_id,
        **dict(zip(_size_headings(unit), sizes, strict=True)),
        _("Error (%)"): round(run.error_pct or 0, 1),
        _("Evidence"): evidence_label(run.evidence),
        _("Measured as"): metric_label(run.metric),
        _("Engine"): engine_label(run.engine),
        _("Method"): method_label(run.method),
        _("Source"): source_link(run.source) or None,
        _("Regime"): run.regime,
    }


def _opened(name: str, run: ScoredRun, record: Mapping[str, Any] | None, unit: ByteUnit) -> None:
    """A run's facts, and the terms of its prediction, which is made anew."""
    with st.container(border=True, key=f"{name}_opened"):
        st.markdown(f"**{run.run_id}** · {run_label(run)}")
        st.markdown(_said(run, unit))
        if link := source_link(run.source):
            st.markdown(_("Measured in [{source}]({link}).").format(source=run.source, link=link))
        if reason := reason_of(run):
            st.info(reason, icon=":material/lightbulb:")
        if record is None:
            instead = _FROM_HERE.get(run.regime, _NO_RECORD)
            st.caption(_(instead))
            return
        with st.spinner(_("Predicting this run …")):
            score = score_run(record, 1, light_lane().ask, traced=True)
        _terms(name, score, unit)


def _said(run: ScoredRun, unit: ByteUnit) -> str:
    sentence = _("Predicted {predicted} ({evidence}), measured {measured} ({metric}): {error}.")
    said = sentence.format(
        predicted=format_bytes(run.predicted or 0, unit),
        evidence=evidence_label(run.evidence),
        measured=format_bytes(run.measured, unit),
        metric=metric_label(run.metric),
        error=error_text(run.error_pct),
    )
    if run.by_formula is None or run.evidence == EvidenceKind.FORMULA:
        return said
    sentence = _("By closed forms alone {predicted}: {error}.")
    error = error_text(run.error_of(EvidenceKind.FORMULA))
    return f"{said} {sentence.format(predicted=format_bytes(run.by_formula, unit), error=error)}"


def _terms(name: str, score: Score, unit: ByteUnit) -> None:
    if score.budget is None or score.run is None:
        st.warning(score.reason, icon=":material/error:")
        return
    terms_at_peak(score.budget, unit)
    how_computed(explain_term(term, unit, share) for term, share in score.budget.at_peak())
    if score.run.assumptions:
        with st.expander(_("What the source does not state"), icon=":material/help:"):
            st.markdown("\n".join(f"- {each}" for each in score.run.assumptions))
    for note in score.notes:
        st.caption(note)
    st.button(
        _("Open this scenario"), key=f"{name}_adopt", icon=":material/open_in_new:", on_click=_adopt, args=(score,)
    )  # fmt: skip


def _adopt(score: Score) -> None:
    assert score.run is not None
    state.adopt(scenario_of(score.run))
    state.show_answer()


def complaints(rows: Sequence[tuple[str, str]]) -> None:
    """Records without a prediction, each with its reason."""
    if rows:
        st.subheader(_("Without a prediction"))
        table([{_("Run"): run_id, _("Why"): reason} for run_id, reason in rows], _("Records without a prediction"))

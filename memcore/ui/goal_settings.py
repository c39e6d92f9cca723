"""Settings for the user's goal: the buffers page's section on what to set, why, and the file that sets it."""

import streamlit as st

from memcore.budget import Budget
from memcore.i18n import gettext as _
from memcore.suggest import LEAST_BUCKETS, Goal, GoalKind, Suggestion, file_of, suggest
from memcore.suggest.grid import DEFAULT_LEAST_BUCKET, settings_now
from memcore.suggest.words import GOAL_LABELS, outcome, reason, shown, traffic_rows
from memcore.ui import state
from memcore.ui.cards import text_table
from memcore.ui.palette import VERDICT_ICONS
from memcore.units import ByteUnit
from memcore.verdict_words import verdict_sentence

_GOAL, _LEAST_BUCKET = "w_goal", "w_least_bucket"
_LANGUAGES = {"ds_config.json": "json", "fsdp2.py": "python"}


def settings_for_goal(budget: Budget, unit: ByteUnit) -> None:
    """The section; nothing where the engine has nothing to choose."""
    now = settings_now(budget)
    if not now:
        return
    st.subheader(_("Settings for your goal"))
    with st.spinner(_("Comparing the settings")):
        suggestion = _suggested(budget, _goal(has_bucket="reduce_bucket_size" in now))
    st.markdown(outcome(suggestion, unit))
    st.markdown(f"{VERDICT_ICONS[suggestion.after.verdict]} {verdict_sentence(suggestion.after, unit)}")
    if suggestion.changes:
        text_table(_change_rows(suggestion, unit), _("What changes"))
    text_table(
        [
            {_("Compared, one after the other"): label, _("Now"): before, _("Suggested"): after}
            for label, before, after in _compared(suggestion, unit)
        ],
        _("What the settings are judged by"),
    )
    st.caption(
        _("{count} combinations were compared by the same prediction; of equals, the one that changes least.").format(
            count=f"{suggestion.tried:,}"
        )
    )
    _take_over(suggestion)


def _goal(*, has_bucket: bool) -> Goal:
    """The goal that the widgets say."""
    st.session_state.setdefault(_GOAL, GoalKind.MEMORY.value)
    st.session_state.setdefault(_LEAST_BUCKET, DEFAULT_LEAST_BUCKET)
    labels = {kind.value: _(label) for kind, label in GOAL_LABELS.items()}
    with st.grid(2, min_column_width=280):
        chosen = st.segmented_control(
            _("Goal"), list(labels), key=_GOAL, required=True, format_func=labels.__getitem__
        )  # fmt: skip
        kind = GoalKind(chosen or GoalKind.MEMORY)
        if kind is GoalKind.SPEED or not has_bucket:
            return Goal(kind=kind)
        least = st.select_slider(
            _("with a reduce bucket of at least (elements)"), LEAST_BUCKETS, key=_LEAST_BUCKET,
            format_func=lambda count: f"{count:,}",
        )  # fmt: skip
    return Goal(kind=kind, least_bucket=least)


def _suggested(budget: Budget, goal: Goal) -> Suggestion:
    """The suggestion, kept between runs: a page is drawn again at every click."""
    traced = budget.evidence.profile is not None
    return _kept(budget, budget.scenario.model_dump_json(), goal.kind.value, goal.least_bucket, traced)


@st.cache_resource(max_entries=64, show_spinner=False)
def _kept(_budget: Budget, scenario: str, kind: str, least_bucket: int, traced: bool) -> Suggestion:
    suggestion = suggest(_budget, Goal(kind=GoalKind(kind), least_bucket=least_bucket))
    assert suggestion is not None  # there is something to choose
    return suggestion


def _change_rows(suggestion: Suggestion, unit: ByteUnit) -> list[dict[str, object]]:
    return [
        {
            # Broken after any part of the name, so that a narrow screen shows all columns.
            _("Setting"): change.setting.replace("_", "_\N{ZERO WIDTH SPACE}"),
            _("Now"): shown(change.now),
            _("Suggested"): shown(change.suggested),
            _("Why"): reason(change, suggestion, unit),
        }
        for change in suggestion.changes
    ]


def _compared(suggestion: Suggestion, unit: ByteUnit) -> list[tuple[str, str, str]]:
    """Peak first for the least memory; for speed it decides between equals."""
    peak, *speed = traffic_rows(suggestion, unit)
    return [peak, *speed] if suggestion.goal.kind is GoalKind.MEMORY else [*speed, peak]


def _take_over(suggestion: Suggestion) -> None:
    """The file to copy or download, and the button that puts the settings into the plan."""
    file = file_of(suggestion.after)
    if file is not None:
        name, text = file
        st.code(text, language=_LANGUAGES[name])
    with st.container(horizontal=True):
        if file is not None:
            st.download_button(name, text, name, on_click="ignore", icon=":material/download:", key="goal_file")
        st.button(
            _("Apply to the plan"),
            on_click=state.adopt,
            args=(suggestion.after.scenario,),
            icon=":material/input:",
            disabled=not suggestion.changes,
        )

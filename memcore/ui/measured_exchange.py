"""Where measurements of the activation explorer go, and come from: a team's own runs, and files."""

import json
from collections.abc import Mapping

import streamlit as st

from memcore.bench.results import Result
from memcore.bench.store import MAX_EXPORT_CHARS, Store
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.i18n import ngettext
from memcore.scenario import decode_json
from memcore.score.points import point_rows, predictable
from memcore.settings import settings
from memcore.ui import own_rows, state
from memcore.ui.frame import open_page
from memcore.ui.work import light_lane

# Of this session: the points that were taken last, by what is shown of them, and what was said of an import.
_TAKEN, _TAKEN_IN = "points_taken", "sweep_taken_in"


def take(result: Result, formulas: Mapping[str, int]) -> None:
    """A button that makes the shown points runs of one's own, and what came of it."""
    count = predictable(result.measured.values(), formulas)
    st.button(
        _("Take these points as own runs ({count})").format(count=count), key="measured_take",
        icon=":material/scoreboard:", disabled=not count, on_click=_take, args=(result,),
        help=_(
            "Each point with a trace or a closed form becomes a run of your own on home's scoreboard, in place of an "
            "earlier one of the same case and device."
        ),
    )  # fmt: skip
    taken, sentence = st.session_state.get(_TAKEN, (None, ""))
    if taken == _shown(result):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(sentence)
            if st.button(_("Show them"), key="measured_show", icon=":material/arrow_forward:", on_click=state.show_own):
                open_page("home")


def _shown(result: Result) -> tuple[object, ...]:
    return result.sweep.kind, result.device, tuple(result.measured)


def _take(result: Result) -> None:
    """The button's callback."""
    try:
        found = point_rows(result.measured.values(), light_lane().ask)
    except UserError as error:
        st.session_state[_TAKEN] = (_shown(result), str(error))
        return
    own_rows.keep(found)
    said = ngettext(
        "{count} point is among your own runs now.", "{count} points are among your own runs now.", len(found)
    ).format(count=len(found))
    if left := len(result.measured) - len(found):
        others = ngettext(
            "{count} other has no figures or no prediction.", "{count} others have no figures or no prediction.", left
        )
        said += " " + others.format(count=left)
    st.session_state[_TAKEN] = (_shown(result), said)


def exchange(store: Store) -> None:
    """Measurements as a file, and another machine's."""
    with st.expander(_("Export and import"), key="measured_exchange", icon=":material/swap_vert:"):
        st.download_button(
            _("All measurements (JSON)"),
            lambda: json.dumps(store.export(), ensure_ascii=False),
            "memcore-measurements.json",
            "application/json",
            on_click="ignore",
            icon=":material/download:",
        )
        if settings().may_take_in:
            st.file_uploader(
                _("Measurements of another machine"), "json", key="measure_import", on_change=_take_in, args=(store,)
            )
        if _TAKEN_IN in st.session_state:
            st.markdown(st.session_state.pop(_TAKEN_IN))


def _take_in(store: Store) -> None:
    """A callback: keep what an export has."""
    given = st.session_state["measure_import"]
    if given is None:
        return
    try:
        count = store.take_in(decode_json(given.getvalue().decode("utf-8", "replace"), MAX_EXPORT_CHARS))
        said = ngettext("{count} measurement was taken in.", "{count} measurements were taken in.", count).format(
            count=count
        )
    except UserError as error:
        said = str(error)
    st.session_state[_TAKEN_IN] = said

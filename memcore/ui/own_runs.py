"""The view of home for a team's own runs: scored from a file, a verification or a measurement, and as a calibration.

The rows stay in the session. Scoring is a thread of the server that a fragment of its own looks at every second.
"""

import json

import streamlit as st

from memcore.accuracy.calibration import calibrated, calibration_for
from memcore.accuracy.words import calibration_sentence
from memcore.budget import Budget
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.i18n import ngettext, use_language
from memcore.score.own import export_rows, proof_row, read_given
from memcore.score.published import published_records
from memcore.score.running import RunningScores, Scored
from memcore.ui import verifying
from memcore.ui.measuring import device_facts
from memcore.ui.own_rows import forget, keep, rows
from memcore.ui.run_board import board, complaints
from memcore.ui.state import LANGUAGE
from memcore.ui.work import light_lane
from memcore.units import ByteUnit

_LOOK_S = 1.0
# Of this session: what is being scored, the records of all runs so far, what could not be predicted, and what was said
# of the last file.
_RUNNING, _RECORDS, _COMPLAINTS = "scores_running", "own_records", "own_complaints"
_SAID = "own_said"
_UPLOAD, APPLY = "own_upload", "w_calibrate"


def render(budget: Budget, unit: ByteUnit) -> None:
    """The view's body."""
    st.caption(
        _(
            "Runs of your own: in the format of the published ones, exported here before, verified here, or measured "
            "in the activation explorer. They stay in this session, where nobody else sees them."
        )
    )
    st.file_uploader(_("Measured runs (JSON)"), "json", key=_UPLOAD, on_change=_take, disabled=_is_running())
    st.download_button(
        _("An example of the format (JSON)"), _example, "runs.json", "application/json", on_click="ignore",
        icon=":material/description:",
    )  # fmt: skip
    _take_proofs()
    if said := st.session_state.get(_SAID):
        st.warning(said, icon=":material/error:")
    if _is_running():
        _progress()
    elif rows():
        _calibration(budget, unit)
        records = st.session_state.get(_RECORDS, {})
        board("own", rows(), records.get, unit)
        _exchange()
    if not _is_running():
        complaints([(each.run_id, each.reason) for each in st.session_state.get(_COMPLAINTS, ())])


def _example() -> str:
    """A file of one published run whose bytes are exact."""
    record = next(record for record in published_records().values() if record["gold"])
    return json.dumps({"schema_version": 1, "runs": [record]}, indent=1)


def _is_running() -> bool:
    return _RUNNING in st.session_state


# Taking runs in


def _take() -> None:
    """The uploader's callback: score the records of a file, or take over rows that were scored before."""
    given = st.session_state[_UPLOAD]
    st.session_state.pop(_SAID, None)
    if given is None:
        return
    try:
        found = read_given(given.getvalue().decode("utf-8-sig", "replace"))
    except UserError as error:
        st.session_state[_SAID] = str(error)
        return
    if found.older:
        st.session_state[_SAID] = _(
            "These runs were predicted by another version of memcore: score their records again for this one's errors."
        )
    if found.records:
        st.session_state[_RUNNING] = RunningScores(found.records, light_lane().ask)
    else:
        keep(found.rows)


def _take_proofs() -> None:
    """A button for what was verified in this session, if anything was."""
    proofs = verifying.proofs()
    label = _("Take what was verified here ({count})").format(count=len(proofs))
    if proofs and st.button(label, key="own_proofs", icon=":material/verified:"):
        kind = device_facts().kind
        keep(tuple(proof_row(proof, kind) for proof in proofs))


@st.fragment(run_every=_LOOK_S)
def _progress() -> None:
    """How far the session's file is. When it has ended the page is drawn again, without this."""
    use_language(st.session_state[LANGUAGE])
    running: RunningScores | None = st.session_state.get(_RUNNING)
    if running is None:
        return
    found = running.look()
    if found.ended:
        keep(found.rows)
        st.session_state[_RECORDS] = {**st.session_state.get(_RECORDS, {}), **found.records}
        st.session_state[_COMPLAINTS] = found.complaints
        del st.session_state[_RUNNING]
        st.rerun()
    with st.container(border=True, key="own_progress"):
        st.progress(found.done / max(found.num_records, 1), _how_far(found))
        st.button(_("Cancel"), key="own_cancel", icon=":material/stop:", on_click=running.cancel)


def _how_far(found: Scored) -> str:
    if found.waits:
        return _("Other runs are being scored on this server first.")
    sentence = ngettext("{done} of {all} run is scored.", "{done} of {all} runs are scored.", found.num_records).format(
        done=found.done, all=found.num_records
    )
    if found.estimate_s is None:
        return sentence
    return sentence + " " + _("About {seconds:.0f} s left.").format(seconds=found.estimate_s)


# What they say of the scenario


def _calibration(budget: Budget, unit: ByteUnit) -> None:
    by = calibration_for(budget, rows())
    if by is None:
        st.info(
            _(
                "No run among these has the scenario's engine, method and evidence (formula or trace) and ran on a "
                "GPU: none calibrates its prediction."
            ),
            icon=":material/tune:",
        )
        return
    st.toggle(
        _("Calibrate predictions by these runs"), key=APPLY,
        help=_("Shown beside the prediction, never in its place; the verdict stays that of the prediction."),
    )  # fmt: skip
    st.markdown(calibration_sentence(budget, calibrated(budget, by), unit))


def calibration_line(budget: Budget, unit: ByteUnit) -> None:
    """Below the verdict: the calibrated figure, where the session asks for one and its runs give it."""
    if not st.session_state.get(APPLY):
        return
    by = calibration_for(budget, rows())
    if by is not None:
        st.info(calibration_sentence(budget, calibrated(budget, by), unit), icon=":material/tune:")


def _exchange() -> None:
    kept = rows()  # read here: the file is written outside the session
    with st.container(horizontal=True):
        st.download_button(
            _("Own runs (JSON)"), lambda: export_rows(kept), "memcore-own-runs.json", "application/json",
            on_click="ignore", icon=":material/download:",
        )  # fmt: skip
        st.button(_("Forget these runs"), key="own_forget", icon=":material/delete:", on_click=_forget)


def _forget() -> None:
    forget()
    for name in (_RECORDS, _COMPLAINTS, _SAID):
        st.session_state.pop(name, None)

"""The proof on this server's own device, on the ZeRO and buffers pages: the real engine beside its prediction.

Runs in the heavy lane; a fragment of its own looks at it every second, as for sweeps.
"""

from importlib.util import find_spec

import streamlit as st

from memcore.bench.words import WAITS_FOR_OTHERS
from memcore.budget import Budget
from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.i18n import ngettext, use_language
from memcore.jobs import Progress
from memcore.settings import settings
from memcore.ui import charts
from memcore.ui.cards import table
from memcore.ui.measuring import device_facts, heavy_lane
from memcore.ui.state import LANGUAGE
from memcore.ui.step_charts import step_of_engine
from memcore.ui.work import light_lane
from memcore.units import ByteUnit
from memcore.verify.case import MAX_LOCAL_RANKS, WITHOUT_DEEPSPEED
from memcore.verify.proof import Proof, case_evidence
from memcore.verify.report import notes, phase_rows, proof_headings, term_headings, term_rows, verdict
from memcore.verify.running import RunningProof
from memcore.verify.scaling import Scaled, crowding, engine_label, scale

ANCHOR = "verified"
_LOOK_S = 1.0
# Of this session: the proof that runs, with what was made smaller for it; the last that ended, by engine and stage;
# the number of ranks that was just asked for.
_RUNNING, _ENDED, _ASKED, _FAILED = "proof_running", "proofs_ended", "proof_asked", "proof_failed"
_RANKS = "w_verify_ranks"
_CHOICES = (1, 2, 4, MAX_LOCAL_RANKS)


def render(budget: Budget, unit: ByteUnit) -> None:
    """What a real run of the scenario's engine took here, and the button that runs it."""
    st.header(_("Verified on this machine"), anchor=ANCHOR)
    st.caption(
        _(
            "Runs the real engine with these settings on a small model of the same kind, one process for each rank, "
            "and lays what every rank took beside what is predicted for that run."
        )
    )
    if settings().measuring:
        _controls(budget)
    else:
        st.info(_("Measuring is switched off on this server."), icon=":material/lock:")
    _result(budget, unit)


def proofs() -> list[Proof]:
    """What was verified in this session: the last proof of each engine and stage."""
    return [proof for proof, _scaled in st.session_state.get(_ENDED, {}).values()]


def _controls(budget: Budget) -> None:
    ranks = st.session_state.pop(_ASKED, None)
    if ranks is not None:
        _start(budget, ranks)
    running = st.session_state.get(_RUNNING)
    engine = budget.scenario.parallelism.engine
    missing = engine is EngineName.DEEPSPEED and find_spec("deepspeed") is None
    choices = [1] if engine is EngineName.SINGLE else [each for each in _CHOICES if each > 1]
    if st.session_state.get(_RANKS) not in choices:
        st.session_state[_RANKS] = choices[0]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.segmented_control(_("Ranks"), choices, key=_RANKS, required=True) or choices[0]
        name = _("single GPU") if engine is EngineName.SINGLE else engine_label(budget.scenario)
        st.button(
            _("Verify {engine} on this machine").format(engine=name),
            key="verify_start",
            icon=":material/verified:",
            disabled=missing or running is not None,
            on_click=_ask,
            args=(chosen,),
        )
    if missing:
        st.info(_(WITHOUT_DEEPSPEED), icon=":material/download:")
    crowded = crowding(chosen)
    if crowded and running is None:
        st.caption(crowded)
    if running is not None:
        _progress()


def _ask(ranks: int) -> None:
    """The button's callback: the page starts the run once it is drawn so far."""
    st.session_state[_ASKED] = ranks


def _start(budget: Budget, ranks: int) -> None:
    st.session_state.pop(_FAILED, None)
    try:
        with st.spinner(_("Making the model small enough for this machine …")):
            device = device_facts()
            scaled = scale(budget.scenario, budget.evidence, light_lane().ask, ranks=ranks, device=device.kind)
            evidence = case_evidence(scaled.case, light_lane().ask, device.kind)
        running = RunningProof(heavy_lane(), [scaled.case], [evidence], device.kind)
    except UserError as error:
        st.warning(str(error), icon=":material/error:")
        return
    st.session_state[_RUNNING] = (running, scaled)


@st.fragment(run_every=_LOOK_S)
def _progress() -> None:
    """How far the session's proof is. When it has ended the page is drawn again, without this."""
    use_language(st.session_state[LANGUAGE])
    found: tuple[RunningProof, Scaled] | None = st.session_state.get(_RUNNING)
    if found is None:
        return
    running, scaled = found
    progress = running.look()
    if progress.status is not None:
        _keep(running, scaled)
        del st.session_state[_RUNNING]
        st.rerun()
    with st.container(border=True, key="verify_progress"):
        st.progress(progress.share, _how_far(progress, scaled))
        st.button(_("Cancel"), key="verify_cancel", icon=":material/stop:", on_click=running.cancel)


def _how_far(progress: Progress, scaled: Scaled) -> str:
    numbers = {"name": scaled.case.name, "ranks": scaled.case.ranks, "seconds": progress.estimate_s}
    if progress.place:
        sentence = _("{name}: {place} before this one; about {seconds:.0f} s until it has ended.")
        return sentence.format(place=progress.place, **numbers)
    if progress.waits_for_others:
        return f"{scaled.case.name}: {_(WAITS_FOR_OTHERS)}"
    sentence = ngettext(
        "{name} runs on {ranks} rank; about {seconds:.0f} s left.",
        "{name} runs on {ranks} ranks; about {seconds:.0f} s left.",
        scaled.case.ranks,
    )
    return sentence.format(**numbers)


def _keep(running: RunningProof, scaled: Scaled) -> None:
    """The proof, or the sentence that says why there is none."""
    proven = running.proven()
    if proven.proofs:
        ended = st.session_state.setdefault(_ENDED, {})
        ended[scaled.case.name] = (proven.proofs[0], scaled)
    else:
        st.session_state[_FAILED] = proven.reasons[scaled.case.name]


def _result(budget: Budget, unit: ByteUnit) -> None:
    """This session's last proof of the engine and stage that are chosen."""
    if failed := st.session_state.get(_FAILED):
        st.warning(failed, icon=":material/error:")
    found = st.session_state.get(_ENDED, {}).get(engine_label(budget.scenario))
    if found is None:
        if settings().measuring:
            st.info(_("Nothing of this engine was verified in this session yet."), icon=":material/hourglass_empty:")
        return
    proof, scaled = found
    device = device_facts()
    st.markdown(f"**{verdict(proof)}**")
    table(
        [dict(zip(proof_headings(), row, strict=True)) for row in phase_rows(proof, unit)],
        _("Predicted and measured peak of each phase"),
    )
    st.plotly_chart(
        step_of_engine(proof.budget, unit, proof.measured),
        config=charts.CONFIG,
        alt=_("One step as predicted, and the measured peak of each phase"),
        key="verified_step",
    )
    with st.expander(_("Term by term"), icon=":material/table:"):
        table(
            [dict(zip(term_headings(proof), row, strict=True)) for row in term_rows(proof, unit)],
            _("Share of each term at each phase's peak"),
        )
    st.markdown("\n".join(f"- {sentence}" for sentence in (*notes(proof, device, unit), *scaled.reductions)))

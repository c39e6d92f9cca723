"""The measured part of the activation explorer: sweeps of real kernels on this server's device, and what is known.

A sweep runs in the heavy lane. A fragment of its own looks at it every second, which is also how the lane knows that
somebody is still there: the rest of the page is drawn again only when the sweep has ended.
"""

import streamlit as st

from memcore.bench.curves import formula_bytes, predicted_k
from memcore.bench.findings import Findings, findings
from memcore.bench.lines import costs, panels
from memcore.bench.measurement import DeviceFacts
from memcore.bench.report import HEADINGS, case_rows, where_measured
from memcore.bench.results import Result, known_results, with_run
from memcore.bench.running import RunningSweep, State, find_device, measuring_lane
from memcore.bench.slices import make_slice
from memcore.bench.store import Store
from memcore.bench.sweeps import SweepKind, plan
from memcore.bench.words import (
    SWEEP_LABELS,
    SWEEP_PURPOSES,
    WAITS_FOR_OTHERS,
    case_label,
    found_here,
    how_it_ended,
    without_figures,
)
from memcore.budget import Budget
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.i18n import use_language
from memcore.jobs import HeavyLane
from memcore.settings import settings
from memcore.ui import charts, measured_charts
from memcore.ui.cards import table
from memcore.ui.measured_exchange import exchange, take
from memcore.ui.state import LANGUAGE
from memcore.ui.work import light_lane
from memcore.units import ByteUnit, format_bytes

ANCHOR = "measured"
# How often a page looks at its sweep.
_LOOK_S = 1.0
# Of this session: the sweep that runs, the last one that ended, and the one that was just asked for. The widget that
# keeps its value over page switches is the kind of sweep.
_RUNNING, _ENDED, _ASKED = "sweep_running", "sweep_ended", "sweep_asked"
_KIND = "w_sweep"


@st.cache_resource(show_spinner=False)
def heavy_lane() -> HeavyLane:
    """The one heavy lane of this server, shared by all sessions."""
    return measuring_lane()


@st.cache_resource(show_spinner=False)
def device_facts() -> DeviceFacts:
    """The device that measures here. Takes seconds the first time."""
    return find_device(heavy_lane())


def _store() -> Store:
    return Store(settings().store_path)


def render(budget: Budget, unit: ByteUnit) -> None:
    """What was measured of the scenario's layers, and the buttons that measure."""
    st.header(_("Measured on real kernels"), anchor=ANCHOR)
    if settings().measuring:
        st.caption(
            _(
                "Runs the model's own layers, made small enough for this server's device, forward and backward in a "
                "process of its own. The reductions are said below the results."
            )
        )
        _buttons(budget)
    else:
        st.info(
            _("Measuring is switched off on this server; shown is what was measured before or elsewhere."),
            icon=":material/lock:",
        )
    st.session_state.setdefault(_KIND, SweepKind.SEQUENCE.value)
    chosen = st.segmented_control(
        _("Results"), [kind.value for kind in SweepKind], key=_KIND, required=True, format_func=_kind_label
    )
    try:
        _results(budget, SweepKind(chosen or SweepKind.SEQUENCE), unit)
    except UserError as error:
        st.warning(str(error), icon=":material/database_off:")
    exchange(_store())


def _kind_label(kind: str) -> str:
    return _(SWEEP_LABELS[SweepKind(kind)])


# Starting, and looking on


def _buttons(budget: Budget) -> None:
    """One button for each sweep, while none runs; then how far it is."""
    kind = st.session_state.pop(_ASKED, None)
    if kind is not None:
        _start(budget, kind)
    running: RunningSweep | None = st.session_state.get(_RUNNING)
    with st.container(horizontal=True):
        for each in SweepKind:
            st.button(
                _("Measure: {sweep}").format(sweep=_(SWEEP_LABELS[each])),
                key=f"measure_{each.value}",
                help=_(SWEEP_PURPOSES[each]),
                icon=":material/play_arrow:",
                disabled=running is not None,
                on_click=_ask,
                args=(each,),
            )
    again = _("Also what this device has measured already")
    st.checkbox(again, key="w_measure_again", help=_("Otherwise that is taken from the store."))
    if running is not None:
        _progress()


def _ask(kind: SweepKind) -> None:
    """A button's callback: the page starts the sweep once it is drawn so far."""
    st.session_state[_ASKED] = kind
    st.session_state[_KIND] = kind.value


def _start(budget: Budget, kind: SweepKind) -> None:
    try:
        with st.spinner(_("Looking for the device that measures …")):
            device = device_facts()
        sweep = plan(kind, make_slice(budget.scenario, budget.evidence, device.kind))
        reuse = not st.session_state.get("w_measure_again", False)
        running = RunningSweep(heavy_lane(), _store(), sweep, device, reuse=reuse)
    except UserError as error:
        st.warning(str(error), icon=":material/error:")
        return
    st.session_state[_RUNNING] = running


@st.fragment(run_every=_LOOK_S)
def _progress() -> None:
    """How far the session's sweep is. When it has ended the page is drawn again, without this."""
    # A fragment runs by itself, in a context of its own.
    use_language(st.session_state[LANGUAGE])
    running: RunningSweep | None = st.session_state.get(_RUNNING)
    if running is None:
        return
    state = running.look()
    if state.progress.status is not None:
        st.session_state[_ENDED] = st.session_state.pop(_RUNNING)
        st.rerun()
    with st.container(border=True, key="sweep_progress"):
        _how_far(running, state)
        st.button(_("Cancel"), key="measure_cancel", icon=":material/stop:", on_click=running.cancel)


def _how_far(running: RunningSweep, state: State) -> None:
    """The place in the queue, or a bar for the sweep and one for the case that runs."""
    progress = state.progress
    label = _(SWEEP_LABELS[running.sweep.kind])
    if progress.place:
        sentence = _("{sweep}: {place} before this one; about {seconds:.0f} s until it has ended.")
        st.progress(0.0, sentence.format(sweep=label, place=progress.place, seconds=progress.estimate_s))
    elif progress.waits_for_others:
        st.progress(0.0, f"{label}: {_(WAITS_FOR_OTHERS)}")
    else:
        sentence = _("{sweep}: {done} of {all} cases; about {seconds:.0f} s left.")
        numbers = {"done": len(progress.results), "all": progress.num_steps, "seconds": progress.estimate_s}
        st.progress(progress.share, sentence.format(sweep=label, **numbers))
        if state.running is not None:
            st.progress(progress.case_share, case_label(state.running))


# What is known


def _results(budget: Budget, kind: SweepKind, unit: ByteUnit) -> None:
    """The sweep as a device measured it: in words, charts and a table."""
    st.caption(_(SWEEP_PURPOSES[kind]))
    known = known_results(_store(), budget.scenario, budget.evidence, kind)
    ended: RunningSweep | None = st.session_state.get(_ENDED)
    if ended is not None and ended.sweep.kind is kind:
        _last_run(ended)
        run = Result(sweep=ended.sweep, device=ended.device, measured=ended.look().measured)
        known = with_run(known, run, budget.scenario, budget.evidence)
    if not known:
        st.info(_("Nothing of this sweep has been measured for this model yet."), icon=":material/hourglass_empty:")
        return
    result = _choose(known, unit)
    formulas = formula_bytes(result.sweep, light_lane().ask)
    found = findings(result.sweep, result.measured, predicted_k(result.sweep, light_lane().ask))
    st.markdown("\n".join(f"- {sentence}" for sentence in found_here(result.sweep, found, unit)))
    _charts(result, formulas, found, unit)
    _notes(result)
    _table(result, formulas, unit)
    take(result, formulas)


def _last_run(ended: RunningSweep) -> None:
    """How this session's last run ended, where that was not as it should."""
    progress = ended.look().progress
    sentence = how_it_ended(progress)
    if sentence:
        st.warning(sentence, icon=":material/info:")
    if progress.complaint:
        st.warning(progress.complaint, icon=":material/database_off:")


def _choose(known: list[Result], unit: ByteUnit) -> Result:
    """The device whose measurements are shown: the latest, or the one chosen."""
    results = {each.device: each for each in known}
    devices = list(results)
    device = devices[0]
    if len(devices) > 1:
        key = f"measured_on_{known[0].sweep.kind.value}"
        device = st.selectbox(_("Measured on"), devices, format_func=lambda each: _device_label(results[each]), key=key)
    else:
        st.markdown(f"**{_device_label(results[device])}**")
    size = _("{memory} of memory.").format(memory=format_bytes(device.total_bytes, unit, 1))
    st.caption(f"{where_measured(device)} {size}")
    return results[device]


def _device_label(result: Result) -> str:
    first, last = result.dates
    days = first if first == last else _("{first} to {last}").format(first=first, last=last)
    return f"{result.device.name} · {days}"


def _charts(result: Result, formulas: dict[str, int], found: Findings, unit: ByteUnit) -> None:
    kind = result.sweep.kind
    if kind is SweepKind.FRONTIER:
        figure = measured_charts.memory_and_time(costs(result.measured.values()), costs(found.frontier), unit)
        st.plotly_chart(figure, config=charts.CONFIG, alt=_("Memory against time"), key="measured_frontier")
    for panel in panels(result, formulas, found):
        st.subheader(measured_charts.panel_title(panel))
        figure = measured_charts.over_size(panel, kind, found.segments, unit)
        key = f"measured_{kind.value}_{panel.part.value}"
        st.plotly_chart(figure, config=charts.CONFIG, alt=measured_charts.panel_title(panel), key=key)
    if kind is not SweepKind.FRONTIER:
        st.caption(
            _(
                "Measured and traced peaks hold each weight's gradient for the moment at which it is made; the closed "
                "form is of activations alone."
            )
        )


def _notes(result: Result) -> None:
    """Cases without figures with their reason, and every reduction."""
    missing = without_figures(result.tried())
    if missing:
        st.subheader(_("Without figures"))
        for reason, cases in missing.items():
            st.markdown("\n".join([f"- {reason}", *(f"    - {case}" for case in cases)]))
    st.subheader(_("What was made smaller"))
    st.markdown("\n".join(f"- {note}" for note in result.sweep.notes()))


def _table(result: Result, formulas: dict[str, int], unit: ByteUnit) -> None:
    with st.expander(
        _("Every case, with its times and its results beside the plain variant's"),
        key="measured_cases",
        icon=":material/table:",
    ):
        rows = case_rows(result, formulas, unit)
        table([{_(HEADINGS[name]): cell for name, cell in row.items()} for row in rows], _("Every case measured"))
        st.caption(
            _(
                "Peak: beyond weights and inputs, with each gradient given back once complete. Trace: how far off the "
                "peak it is. Loss and gradients: relative differences from the plain variant's: checkpointing and "
                "flash change memory, not results."
            )
        )

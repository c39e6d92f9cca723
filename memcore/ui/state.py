"""What a session remembers: the scenario, the widgets that edit it, and how it is shown.

Streamlit drops the value of a widget that a page did not draw, so :func:`keep_alive` takes each value up
again at the top of every run. Widgets hold what the sidebar can edit; the rest of a scenario that came
by link or file stays in it untouched.
"""

from typing import Any

import streamlit as st

from memcore.errors import UserError
from memcore.i18n import LANGUAGES, use_language
from memcore.link import read_link, write_link
from memcore.scenario import Scenario, parse_scenario, scenario_data
from memcore.terms import EvidenceKind
from memcore.ui.plan.model import DEFAULT_NAME
from memcore.ui.plan.values import engine_in, values_now
from memcore.ui.plan.whole import scenario_from, widget_values
from memcore.units import ByteUnit

DEFAULT_SCENARIO: dict[str, Any] = {
    "model": {"name": DEFAULT_NAME},
    "hardware": {"gpu": "H100-80GB", "gpus": 8},
    "parallelism": {"engine": "deepspeed", "zero_stage": 2},
}
_SCENARIO, _NOTICES = "scenario", "notices"
# Each engine's own settings as they last were, for what no widget edits: another engine's scenario does not hold it.
_SETTINGS = "engine_settings"
# Home's views, and the one that is open.
VIEW = "w_view"
ANSWER, PUBLISHED, OWN = "answer", "published", "own"
UNIT, LANGUAGE, EVIDENCE = "w_unit", "w_language", "w_evidence"
EVIDENCES = (EvidenceKind.FORMULA.value, EvidenceKind.TRACE.value)


def start() -> list[str]:
    """Ready the session for a run: the language and unit, the scenario of the link it came by, live widgets.

    Returns sentences to show once: what was ignored in the link.
    """
    state = st.session_state
    if _SCENARIO not in state:
        state[_NOTICES] = _begin()
    keep_alive()
    use_language(state[LANGUAGE])
    notices: list[str] = state.pop(_NOTICES, [])
    return notices


def _begin() -> list[str]:
    state, query = st.session_state, st.query_params
    state.setdefault(LANGUAGE, query.get("lang") if query.get("lang") in LANGUAGES else "en")
    state.setdefault(UNIT, query.get("unit") if query.get("unit") in set(ByteUnit) else ByteUnit.GB.value)
    state.setdefault(EVIDENCE, query.get("evidence") if query.get("evidence") in EVIDENCES else EVIDENCES[0])
    use_language(state[LANGUAGE])
    link = query.get("s")
    read = read_link(link) if link else None
    adopt(read.scenario if read and read.scenario else parse_scenario(DEFAULT_SCENARIO))
    return list(read.ignored) if read else []


def keep_alive() -> None:
    """Take up every widget's value again, before any widget is drawn."""
    state = st.session_state
    state.update({key: state[key] for key in list(state) if isinstance(key, str) and key.startswith("w_")})


def adopt(scenario: Scenario) -> None:
    """Make a scenario the session's own and set every widget to it. For callbacks and the first run."""
    st.session_state[_SETTINGS] = {}
    keep(scenario)
    st.session_state.update(widget_values(scenario))


def scenario() -> Scenario:
    """The last good scenario."""
    kept: Scenario = st.session_state[_SCENARIO]
    return kept


def edited() -> Scenario:
    """The scenario as the widgets now have it. Raises UserError; then the last good one stays."""
    base = scenario_data(scenario())
    engine = engine_in(values_now())
    if engine is not scenario().parallelism.engine:
        base["engine_config"] = st.session_state[_SETTINGS].get(engine, {})
    return parse_scenario(scenario_from(values_now(), base))


def show_own() -> None:
    """Have home show the session's own runs. For callbacks."""
    st.session_state[VIEW] = OWN


def show_answer() -> None:
    """Have home show the scenario's own answer. For callbacks."""
    st.session_state[VIEW] = ANSWER


def keep(good: Scenario) -> None:
    """Remember a scenario that was checked and budgeted."""
    st.session_state[_SCENARIO] = good
    st.session_state[_SETTINGS][good.parallelism.engine] = scenario_data(good).get("engine_config", {})


def put_into_url() -> None:
    """Put the last good scenario, and how it is shown, into the URL."""
    try:
        link = write_link(scenario())
    except UserError:
        link = ""
    chosen = st.session_state
    query = {"s": link, "unit": chosen[UNIT], "lang": chosen[LANGUAGE], "evidence": chosen[EVIDENCE]}
    usual = ("", ByteUnit.GB.value, "en", EVIDENCES[0])
    wanted = {key: value for key, value in query.items() if value not in usual}
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


def traced() -> bool:
    """Whether activations and loss are to be traced from the real model."""
    return bool(st.session_state[EVIDENCE] == EvidenceKind.TRACE.value)


def unit() -> ByteUnit:
    """The unit that figures are shown in."""
    return ByteUnit(st.session_state[UNIT])

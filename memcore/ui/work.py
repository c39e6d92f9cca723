"""What the dashboard has done outside the server process: counting and fetching configs, and tracing models."""

import json
from typing import Any

import streamlit as st

from memcore.budget import Budget, evidence_for, predict
from memcore.jobs import LightLane
from memcore.scenario import Scenario
from memcore.settings import settings
from memcore.trace.request import catalogue_requests, trace_request
from memcore.trace.sizes import preparation


@st.cache_resource(show_spinner=False)
def light_lane() -> LightLane:
    """The one light lane of this server, shared by all sessions."""
    lane = LightLane(settings().light_lane)
    lane.warm()
    if settings().warm_catalogue:
        lane.prepare([("trace", request) for request in catalogue_requests()])
    return lane


def fetch(hub_id: str) -> dict[str, Any]:
    """Fetch a config by hub id in a worker. Raises UserError with what went wrong."""
    config: dict[str, Any] = light_lane().ask("fetch_config", {"hub_id": hub_id})["config"]
    return config


def budget_of(scenario: Scenario, *, traced: bool = False) -> Budget:
    """The scenario's budget, on request with a trace of its model. Raises UserError."""
    evidence = evidence_for(scenario, light_lane().ask, traced=traced)
    if evidence.profile is not None:
        _prepare_other_sizes(scenario)
    return predict(scenario, evidence)


def _prepare_other_sizes(scenario: Scenario) -> None:
    """Have the model traced, while nobody waits, so that a slider's next move is answered at once."""
    request = trace_request(scenario)
    if isinstance(request, str):
        return
    sizes = {"micro_batch": min(request["micro_batch"], 2), "seq_len": 0}
    key = json.dumps({**request, **sizes}, sort_keys=True)
    if key not in _prepared():
        _prepared()[key] = None
        light_lane().prepare(preparation(request))


@st.cache_resource(show_spinner=False)
def _prepared() -> dict[str, None]:
    """What has been prepared since the server started."""
    return {}

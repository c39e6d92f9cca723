"""What the dashboard has done outside the server process: counting configs and fetching them."""

from typing import Any

import streamlit as st

from memcore.budget import Budget, evidence_for, predict
from memcore.errors import UserError
from memcore.jobs import JobStatus, LightLane
from memcore.scenario import Scenario
from memcore.settings import settings


@st.cache_resource(show_spinner=False)
def light_lane() -> LightLane:
    """The one light lane of this server, shared by all sessions."""
    lane = LightLane(settings().light_lane)
    lane.warm()
    return lane


def _ask(task: str, payload: dict[str, Any]) -> dict[str, Any]:
    result = light_lane().run(task, payload)
    if result.status is not JobStatus.DONE or result.value is None:
        raise UserError(result.message, result.field or "model.config")
    return result.value


def fetch(hub_id: str) -> dict[str, Any]:
    """Fetch a config by hub id in a worker. Raises UserError with what went wrong."""
    config: dict[str, Any] = _ask("fetch_config", {"hub_id": hub_id})["config"]
    return config


def budget_of(scenario: Scenario, *, traced: bool = False) -> Budget:
    """The scenario's budget, on request with a trace of its model. Raises UserError."""
    return predict(scenario, evidence_for(scenario, _ask, traced=traced))

"""What the dashboard has done outside the server process: counting configs and fetching them."""

from typing import Any

import streamlit as st

from memcore.budget import Budget, evidence_for, predict
from memcore.jobs import LightLane
from memcore.scenario import Scenario
from memcore.settings import settings


@st.cache_resource(show_spinner=False)
def light_lane() -> LightLane:
    """The one light lane of this server, shared by all sessions."""
    lane = LightLane(settings().light_lane)
    lane.warm()
    return lane


def fetch(hub_id: str) -> dict[str, Any]:
    """Fetch a config by hub id in a worker. Raises UserError with what went wrong."""
    config: dict[str, Any] = light_lane().ask("fetch_config", {"hub_id": hub_id})["config"]
    return config


def budget_of(scenario: Scenario, *, traced: bool = False) -> Budget:
    """The scenario's budget, on request with a trace of its model. Raises UserError."""
    return predict(scenario, evidence_for(scenario, light_lane().ask, traced=traced))

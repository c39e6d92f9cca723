"""What the sidebar's widgets say, by key."""

from collections.abc import Mapping
from typing import Any, cast

import streamlit as st

Values = Mapping[str, Any]


def values_now() -> Values:
    """Those of the current session."""
    return cast(Values, st.session_state)

"""The rows of a team's own runs, as a session keeps them."""

from collections.abc import Iterable

import streamlit as st

from memcore.accuracy.scored import ScoredRun
from memcore.score.own import with_rows

_ROWS = "own_rows"


def rows() -> tuple[ScoredRun, ...]:
    """The session's own runs."""
    kept: tuple[ScoredRun, ...] = st.session_state.get(_ROWS, ())
    return kept


def keep(found: Iterable[ScoredRun]) -> None:
    """Add runs, in place of those of the same name."""
    st.session_state[_ROWS] = with_rows(rows(), found)


def forget() -> None:
    """Have none."""
    st.session_state.pop(_ROWS, None)

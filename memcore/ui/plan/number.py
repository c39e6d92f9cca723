"""A number's widget that can be emptied: what was there comes back, with a word about it."""

from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from memcore.i18n import gettext as _


def number(
    label: str,
    *,
    key: str,
    most: float,
    least: float = 1,
    step: float = 1,
    place: DeltaGenerator | None = None,
    help: str | None = None,  # noqa: A002  as the widget's own argument is called
    disabled: bool = False,
) -> None:
    """The widget. Without a value of its own Streamlit gives None for an emptied field, and not the least one, which
    would be another scenario's answer."""
    box: Any = place or st
    box.number_input(
        label,
        min_value=least,
        max_value=most,
        value=None,
        step=step,
        key=key,
        help=help,
        disabled=disabled,
        on_change=_restore,
        args=(key,),
    )
    value = st.session_state[key]
    if st.session_state.pop(_emptied(key), False):
        box.warning(_("This needs a number: {value} stays.").format(value=f"{value:,}"))
    st.session_state[_last(key)] = value


def _restore(key: str) -> None:
    if st.session_state[key] is None:
        st.session_state[key] = st.session_state[_last(key)]
        st.session_state[_emptied(key)] = True


def _last(key: str) -> str:
    return f"last_{key}"


def _emptied(key: str) -> str:
    return f"emptied_{key}"

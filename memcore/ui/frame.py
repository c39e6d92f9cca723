"""The frame of every page: set-up, navigation, the shared sidebar, the scenario's budget, then the page's body.

Each page file makes one call: ``page("static", render)``. Nothing below it needs to know about Streamlit's
reruns, links or errors.
"""

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import streamlit as st
from streamlit.errors import StreamlitAPIException

from memcore.budget import Budget
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.settings import settings
from memcore.ui import state
from memcore.ui.sidebar import Sidebar
from memcore.ui.work import budget_of
from memcore.units import ByteUnit

# The pages in order: file, label, icon.
PAGES = {
    "home": ("app.py", mark("Home"), ":material/home:"),
    "static": ("pages/1_Static_accounting.py", mark("Static accounting"), ":material/functions:"),
    "zero": ("pages/2_ZeRO_stages.py", mark("ZeRO stages"), ":material/view_column:"),
    "buffers": ("pages/3_Communication_buffers.py", mark("Communication buffers"), ":material/swap_horiz:"),
    "activations": ("pages/4_Activation_explorer.py", mark("Activation explorer"), ":material/stacked_line_chart:"),
}
# Three stacked bars. A picture of our own: an icon's name would have each browser fetch it from another host.
PAGE_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#0072B2" d="M1 10h14v5H1z"/>'
    '<path fill="#E69F00" d="M1 7h14v3H1z"/><path fill="#009E73" d="M1 1h14v6H1z"/></svg>'
)
# Wide enough, in pixels, for three choices side by side.
SIDEBAR_WIDTH = 340
Body = Callable[[Budget, ByteUnit], None]


def page(name: str, body: Body) -> None:
    """Draw a page: the frame, then `body` with the budget of the session's scenario and the unit to show."""
    notices = state.start()
    st.set_page_config(
        page_title=f"memcore · {_(PAGES[name][1])}",
        page_icon=PAGE_ICON,
        layout="wide",
        initial_sidebar_state=SIDEBAR_WIDTH,
    )
    _settle_memory()
    _navigation()
    sidebar = Sidebar()
    sidebar.draw()
    for notice in notices:
        st.warning(notice, icon=":material/link_off:")
    budget = _budget(sidebar)
    state.put_into_url()
    if budget is not None:
        body(budget, state.unit())


def _budget(sidebar: Sidebar) -> Budget | None:
    """The budget of what the widgets say; where that is refused, the sentence at its field and the last good one."""
    try:
        scenario = state.edited()
        budget = budget_of(scenario, traced=state.traced())
    except UserError as error:
        sidebar.show(error)
        try:
            last = budget_of(state.scenario(), traced=state.traced())
        except UserError:
            st.info(_("There is nothing to show yet; the sidebar says what to mend."), icon=":material/undo:")
            return None
        st.info(_("Shown is the last scenario that was valid; the sidebar says what to mend."), icon=":material/undo:")
        return last
    state.keep(scenario)
    return budget


def open_page(name: str) -> None:
    """Switch to a page by its name in `PAGES`."""
    st.switch_page(PAGES[name][0])


def _navigation() -> None:
    with st.sidebar:
        for file, label, icon in PAGES.values():
            try:
                st.page_link(file, label=_(label), icon=icon, width="stretch")
            except StreamlitAPIException:
                # A page that is run by itself, without app.py, knows no other pages.
                return


@cache
def _settle_memory() -> None:
    """Streamlit collects garbage after every run; in hosted mode what is loaded by now is left out of that.

    Not while developing: a reloaded module's old version would stay for ever.
    """
    if settings().hosted:
        gc.collect()
        gc.freeze()


def root() -> Path:
    """The folder that holds app.py."""
    return Path(__file__).parents[2]

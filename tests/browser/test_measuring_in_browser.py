"""Measuring in a real browser: start a sweep, watch it, cancel it, run one to its end, reload and find the result.

Run: pytest tests/browser/test_measuring_in_browser.py. The model is small, so that a sweep takes seconds on a CPU.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from generated_scenarios import TINY_LLAMA
from test_browser import PATHS, Server, Tab, chromium  # noqa: F401  chromium is the fixture

from memcore.link import write_link
from memcore.scenario import parse_scenario

CONFIG = {**TINY_LLAMA, "num_hidden_layers": 3}
SCENARIO = parse_scenario({"model": {"config": CONFIG}, "recipe": {"convention": "fp32"}})
FOUND = "The lowest peak measured here is that of segments of"


@pytest.fixture(scope="module")
def server(
    chromium: Any,  # noqa: F811  no server where there is no browser
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MEMCORE_STORE", str(folder / "measurements.sqlite"))
        started = Server(folder / "server.log")
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.stop()


@pytest.fixture
def tab(chromium: Any, server: Server) -> Iterator[Tab]:  # noqa: F811
    opened = Tab(chromium)
    opened.open(f"{server.url}{PATHS['activations']}?s={write_link(SCENARIO)}")
    yield opened
    opened.close()


def start(tab: Tab, sweep: str) -> Any:
    """Press a sweep's button; the box that shows how far it is."""
    tab.page.get_by_role("button", name=f"Measure: {sweep}").click()
    box = tab.page.locator(".st-key-sweep_progress")
    box.get_by_text(f"{sweep}: ").wait_for()
    return box


def test_a_sweep_is_watched_and_cancelled_and_the_device_is_free_after(tab: Tab, server: Server):
    box = start(tab, "Sequence length")
    box.get_by_text(re.compile(r"\b[1-9]\d* of 25 cases")).wait_for()
    box.locator("[data-testid=stProgress]").nth(1).wait_for()
    tab.page.locator(".st-key-measure_cancel button").click()
    box.wait_for(state="detached")
    tab.page.get_by_text("Cancelled after").wait_for()
    box = start(tab, "Segment length")
    tab.page.get_by_text(FOUND).wait_for()
    box.wait_for(state="detached")
    tab.page.locator("[data-testid=stPlotlyChart]").last.scroll_into_view_if_needed()
    tab.assert_nothing_red()
    tab.page.reload()
    tab.settle()
    tab.page.locator(".st-key-w_sweep [role=radio]").nth(2).click()
    tab.page.get_by_text(FOUND).wait_for()
    tab.page.locator(".st-key-measured_segments_layers svg.main-svg").first.wait_for()
    tab.assert_nothing_red()


def test_a_closed_tab_leaves_the_server_well(chromium: Any, server: Server):  # noqa: F811
    tab = Tab(chromium)
    tab.open(f"{server.url}{PATHS['activations']}?s={write_link(SCENARIO)}")
    start(tab, "Sequence length")
    tab.close()
    other = Tab(chromium)
    try:
        other.open(f"{server.url}{PATHS['activations']}?s={write_link(SCENARIO)}")
        box = start(other, "Memory against time")
        box.get_by_text("Memory against time: 1 before this one").wait_for()
        other.page.locator(".st-key-measure_cancel button").click()
        box.wait_for(state="detached")
        other.assert_nothing_red()
    finally:
        other.close()


def test_the_servers_log_is_clean(server: Server):
    """Last: nothing that the tests above did left a complaint."""
    lines = server.log.read_text().splitlines()
    assert [line for line in lines if re.search(r"Traceback|WARNING|ERROR|[Ee]xception|deprecat", line)] == []

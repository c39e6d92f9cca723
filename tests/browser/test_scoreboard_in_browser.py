"""The scoreboard in a real browser: a point and a row open their run, a file of one's own is scored and taken along.

Run: pytest tests/browser/test_scoreboard_in_browser.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_run import made_up
from test_browser import Server, Tab, chromium, server  # noqa: F401  the fixtures

from memcore.accuracy.scored import published


@pytest.fixture
def tab(chromium: Any, server: Server) -> Iterator[Tab]:  # noqa: F811
    opened = Tab(chromium)
    opened.open(server.url)
    yield opened
    opened.close()


def test_a_point_opens_its_run_and_a_row_another(tab: Tab):
    tab.choose("w_view", 1)
    points = tab.page.locator(".st-key-published_chart .scatterlayer .points path")
    points.first.wait_for()
    assert points.count() == len(published().predicted)
    # Points lie over one another: the last drawn is not covered.
    points.last.click(force=True)
    opened = tab.page.locator(".st-key-published_opened")
    opened.get_by_text("Allocated at the peak, the sum of all terms").wait_for(timeout=90_000)
    first = tab.text_of("w_published_run")
    assert first in {run.run_id for run in published().predicted}
    assert opened.get_by_role("link").first.get_attribute("href").startswith("https://github.com/")
    # The table is a canvas: its first row's box is at the left, below the heading.
    table = tab.page.locator(".st-key-published_table [data-testid=stDataFrame]")
    table.scroll_into_view_if_needed()
    table.click(position={"x": 15, "y": 52})
    worst = max(published().predicted, key=lambda run: abs(run.error_pct or 0)).run_id
    opened.get_by_text(worst).first.wait_for()
    tab.settle()
    assert tab.text_of("w_published_run") == worst
    tab.assert_nothing_red()


def test_a_file_of_ones_own_is_scored_and_comes_back_from_its_export(tab: Tab, tmp_path: Path):
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([made_up(), {"id": "broken"}, made_up(id="second")]), encoding="utf-8")
    tab.choose("w_view", 2)
    tab.page.locator(".st-key-own_upload input[type=file]").set_input_files(file)
    points = tab.page.locator(".st-key-own_chart .scatterlayer .points path")
    points.nth(1).wait_for(timeout=90_000)
    assert points.count() == 2
    tab.page.get_by_text("Without a prediction").wait_for()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Own runs (JSON)").click()
    export = tmp_path / "own.json"
    download.value.save_as(export)
    tab.page.get_by_role("button", name="Forget these runs").click()
    points.first.wait_for(state="detached")
    tab.page.locator(".st-key-own_upload input[type=file]").set_input_files(export)
    points.nth(1).wait_for()
    tab.assert_nothing_red()

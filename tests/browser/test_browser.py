"""What only a browser shows: values over page switches, the URL, reload, a paste, the dark scheme, the console.

Run: pytest tests/browser/test_browser.py. Starts one server on a free port and a headless Chromium; skipped where no
Chromium is found, but not in CI (environment variable CI set), where that is a failure.

The first request of the fresh server is a deep link: with Streamlit's pages/ folder a page switch after one silently
resets widgets unless their values are taken up again at the top of every run.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from generated_scenarios import TINY_LLAMA

from memcore.link import read_link, write_link
from memcore.scenario import parse_scenario
from memcore.ui.frame import PAGES

ROOT = Path(__file__).resolve().parents[2]
# The path of each page below the server's address: Streamlit drops a page file's number and extension.
PATHS = {name: re.sub(r"^[0-9]+_", "", Path(file).stem) if name != "home" else "" for name, (file, *_) in PAGES.items()}
SCENARIO = parse_scenario(
    {
        "model": {"n_params": 13 * 10**9},
        "hardware": {"gpu": "A100-80GB", "gpus": 16, "gpus_per_node": 4},
        "parallelism": {"engine": "deepspeed", "zero_stage": 3},
        "recipe": {"optimizer": "lion"},
    }
)
TIMEOUT_MS = 30_000
# Sandboxed and offline machines; nothing here is about what Chromium fetches for itself.
LAUNCH = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
# On a page's own path Streamlit first looks for its server below that path, and then above it.
STREAMLITS_OWN_SEARCH = re.compile(r"/[^/]+/_stcore/(health|host-config)$")


class Server:
    """A server process of its own, on a free port, with its output in a file."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        self.log = log
        command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(port)]
        with log.open("w") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def wait_until_healthy(self) -> None:
        for _attempt in range(300):
            assert self._process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(f"{self.url}_stcore/health", timeout=2) as reply:
                    if reply.read() == b"ok":
                        return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _without_browser(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; in CI the browser tests must run")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _without_browser("playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        binary = next((found for name in names if (found := shutil.which(name))), own if Path(own).exists() else None)
        if binary is None:
            _without_browser("no chromium is installed")
        browser = playwright.chromium.launch(executable_path=binary, args=LAUNCH.split())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server") / "server.log")
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.stop()


class Tab:
    """A browser tab on the dashboard, with what its console said and what it asked of other hosts."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self._context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.complaints: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)

    def _console(self, message: Any) -> None:
        address = urlsplit(message.location.get("url", "")).path
        if message.type == "error" and not STREAMLITS_OWN_SEARCH.search(address):
            self.complaints.append(f"{message.text} {message.location}")

    def _request(self, request: Any) -> None:
        """The dashboard works without a network: nothing is asked of another host."""
        if urlsplit(request.url).hostname not in ("127.0.0.1", None):
            self.complaints.append(f"asked another host: {request.url}")

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.settle()

    def settle(self) -> None:
        """Wait until no script has run for a while and the verdict is drawn."""
        self.page.wait_for_selector("[data-testid=stMain] [data-testid=stAlert]")
        quiet = 0
        while quiet < 3:
            self.page.wait_for_timeout(100)
            state = self.page.locator("[data-testid=stApp]").get_attribute("data-test-script-state")
            quiet = quiet + 1 if state == "notRunning" else 0

    def switch(self, number: int) -> None:
        """Follow the sidebar's link with that number, and wait until the page that it leads to is drawn."""
        title = self.page.locator("h1").first.inner_text()
        self.page.locator("[data-testid=stSidebar] [data-testid=stPageLink] a").nth(number).click()
        wanted = list(PATHS.values())[number]
        self.page.wait_for_url(lambda url: urlsplit(url).path == f"/{wanted}")
        self.page.wait_for_function("title => document.querySelector('h1')?.innerText !== title", arg=title)
        self.settle()

    def enter(self, key: str, text: str) -> None:
        """Type into an input, and wait until the answer has changed."""
        before = self.verdict()
        self.page.locator(f".st-key-{key} input").fill(text)
        self.page.locator(f".st-key-{key} input").press("Enter")
        self.wait_for_another_verdict(before)

    def choose(self, key: str, number: int) -> None:
        """Choose a segment of a segmented control."""
        self.page.locator(f".st-key-{key} [role=radio]").nth(number).click()
        self.page.locator(f".st-key-{key} [role=radio][aria-checked=true]").nth(0).wait_for()
        self.settle()

    def wait_for_another_verdict(self, before: str) -> None:
        first = "document.querySelector('[data-testid=stMain] [data-testid=stAlert]')"
        self.page.wait_for_function(f"before => {first} && {first}.innerText !== before", arg=before)
        self.settle()

    def text_of(self, key: str) -> str:
        """What an input says: a text, a number or a chosen option."""
        return self.page.locator(f".st-key-{key} input").first.input_value()

    def chosen(self, key: str) -> str:
        """The chosen segment of a segmented control."""
        return self.page.locator(f".st-key-{key} [aria-checked=true]").inner_text().strip()

    def values(self) -> dict[str, str]:
        texts = {key: self.text_of(key) for key in ("w_count", "w_gpu", "w_gpus", "w_node", "w_engine")}
        return texts | {key: self.chosen(key) for key in ("w_source", "w_stage", "w_unit", "w_language")}

    def assert_values(self, wanted: dict[str, str], when: str) -> None:
        """The widgets show these values, if not at once then after the browser has caught up."""
        for _attempt in range(50):
            if (shown := self.values()) == wanted:
                return
            self.page.wait_for_timeout(100)
        assert shown == wanted, when

    def verdict(self) -> str:
        return self.page.locator("[data-testid=stMain] [data-testid=stAlert]").first.inner_text()

    def parameters(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).query).items()}

    def assert_nothing_red(self) -> None:
        assert self.page.locator("[data-testid=stException]").count() == 0
        assert self.page.locator("[data-testid=stAlertContentError]").count() == 0
        assert self.complaints == []

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def tab(chromium: Any, server: Server) -> Iterator[Tab]:
    opened = Tab(chromium)
    yield opened
    opened.close()


def test_a_deep_link_survives_all_page_switches_and_a_reload(tab: Tab, server: Server):
    """The server's first request. Hardly a value of the link is a default."""
    start = list(PATHS).index("zero")
    tab.open(f"{server.url}{PATHS['zero']}?s={write_link(SCENARIO)}&unit=GiB&lang=zh")
    wanted = {"w_count": "13,000,000,000", "w_gpus": "16", "w_node": "4", "w_stage": "3", "w_unit": "GiB"}
    # A number's box shows its lowest value until the browser has taken over the server's.
    deadline = time.monotonic() + 20
    while tab.values() | wanted != tab.values() and time.monotonic() < deadline:
        time.sleep(0.1)
    values, verdict = tab.values(), tab.verdict()
    assert values | wanted | {"w_language": "中文"} == values
    assert tab.parameters() == {"s": write_link(SCENARIO), "unit": "GiB", "lang": "zh"}
    others = [number for number in range(len(PATHS)) if number != start]
    for number in [*others, start, *reversed(others), start]:
        tab.switch(number)
        tab.assert_values(values, f"after the switch to page {number}")
        assert tab.verdict() == verdict
        assert read_link(tab.parameters()["s"]).scenario == SCENARIO
        assert (tab.parameters()["unit"], tab.parameters()["lang"]) == ("GiB", "zh")
        tab.assert_nothing_red()
    for number in [*others, start]:
        tab.switch(number)
        tab.page.reload()
        tab.settle()
        tab.assert_values(values, f"after the reload of page {number}")
        assert tab.verdict() == verdict
    tab.assert_nothing_red()


def test_an_edit_is_kept_and_put_into_the_url(tab: Tab, server: Server):
    tab.open(server.url)
    tab.enter("w_gpus", "64")
    tab.choose("w_source", 1)
    tab.enter("w_count", "30b")
    verdict = tab.verdict()
    for number in [*range(1, len(PATHS)), 0]:
        tab.switch(number)
        assert (tab.text_of("w_gpus"), tab.text_of("w_count")) == ("64", "30b")
        assert tab.verdict() == verdict
        scenario = read_link(tab.parameters()["s"]).scenario
        assert scenario is not None
        assert (scenario.hardware.gpus, scenario.model.n_params) == (64, 30 * 10**9)
    tab.assert_nothing_red()


def test_a_pasted_config_is_counted(tab: Tab, server: Server):
    tab.open(f"{server.url}{PATHS['static']}")
    tab.choose("w_source", 2)
    area = tab.page.locator(".st-key-w_config textarea")
    area.fill(json.dumps(TINY_LLAMA))
    area.press("Control+Enter")
    tab.page.get_by_text("202 K", exact=False).first.wait_for()
    tab.settle()
    scenario = read_link(tab.parameters()["s"]).scenario
    assert scenario is not None
    assert scenario.model.config == TINY_LLAMA
    tab.switch(0)
    assert "202 K" in tab.page.locator("[data-testid=stMain] [data-testid=stCaptionContainer]").first.inner_text()
    tab.assert_nothing_red()


def test_a_question_opens_its_page_and_stays(tab: Tab, server: Server):
    tab.open(server.url)
    before = tab.verdict()
    tab.page.locator(".st-key-question_3 button").click()
    tab.page.wait_for_url(lambda url: urlsplit(url).path == f"/{PATHS['zero']}")
    tab.wait_for_another_verdict(before)
    assert tab.text_of("w_count") == "7,000,000,000"
    assert "A100-40GB" in tab.verdict()
    tab.switch(0)
    assert "A100-40GB" in tab.verdict()
    tab.assert_nothing_red()


@pytest.mark.parametrize(("scheme", "is_dark"), [("dark", True), ("light", False)])
def test_the_browsers_colour_scheme_is_followed(chromium: Any, server: Server, scheme: str, is_dark: bool):
    tab = Tab(chromium, color_scheme=scheme)
    try:
        for path in PATHS.values() if is_dark else [""]:
            tab.open(f"{server.url}{path}")
            colour = tab.page.locator("[data-testid=stApp]").evaluate("e => getComputedStyle(e).backgroundColor")
            red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
            assert (red + green + blue < 3 * 80) == is_dark, colour
            tab.page.locator("[data-testid=stPlotlyChart] svg.main-svg").first.wait_for()
        tab.assert_nothing_red()
    finally:
        tab.close()


def test_a_phone_scrolls_in_one_direction(chromium: Any, server: Server):
    tab = Tab(chromium)
    try:
        tab.page.set_viewport_size({"width": 390, "height": 844})
        for path in PATHS.values():
            tab.open(f"{server.url}{path}")
            too_wide = "e => e.scrollWidth - e.clientWidth"
            assert tab.page.locator("[data-testid=stMain]").evaluate(too_wide) <= 1
        tab.assert_nothing_red()
    finally:
        tab.close()


def test_the_servers_log_is_clean(server: Server):
    """Last: nothing that the tests above did left a complaint."""
    lines = server.log.read_text().splitlines()
    assert [line for line in lines if re.search(r"Traceback|WARNING|ERROR|[Ee]xception|deprecat", line)] == []

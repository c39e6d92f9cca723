"""Take the pictures of docs/images: ``python scripts/screenshots.py``.

Starts the dashboard on a free port, opens each page in headless Chromium and writes its first screen, light; then
what the buffers page says of docs/examples/ds_config.json. Run it after a change that shows.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
EXAMPLE = ROOT / "docs" / "examples" / "ds_config.json"
WIDTH, HEIGHT = 1400, 900
START_TIMEOUT_S = 60
# All grey placeholders gone, and a chart drawn: elements load their own code after the page has loaded.
IS_DRAWN = """() => document.querySelector("h1") && document.querySelector(".main-svg")
    && !document.querySelector("[data-testid=stSkeleton]")"""
# Then fonts and transitions.
SETTLE_MS = 1500
# As root Chromium has no sandbox, and on a machine without a GPU nor without a network it must not look for either.
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def main() -> None:
    """Write one picture for each page."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with dashboard() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM_OPTIONS)
        shots = {name: (path, None) for name, path in pages().items()}
        shots["ds_config"] = ("Communication_buffers", give_ds_config)
        for name, (path, act) in shots.items():
            target = IMAGES / f"{name}.png"
            target.write_bytes(picture(browser, f"{address}/{path}", act))
            print(f"{target.relative_to(ROOT)} {target.stat().st_size:,} bytes")
        browser.close()


def give_ds_config(page: Page) -> None:
    """Paste the example file, and scroll to what the page says of it."""
    box = page.get_by_label("or paste its text")
    box.fill(EXAMPLE.read_text(encoding="utf-8"))
    box.press("Control+Enter")
    page.get_by_text("Corrected file").wait_for(timeout=1000 * START_TIMEOUT_S)
    page.get_by_role("heading", name="Your ds_config.json").evaluate("heading => heading.scrollIntoView()")


def pages() -> dict[str, str]:
    """Each page's short name and its path in the URL, which Streamlit takes from the file's name."""
    paths = [re.sub(r"^\d+_", "", file.stem) for file in sorted((ROOT / "pages").glob("*.py"))]
    return {"home": "", **{path.lower(): path for path in paths}}


@contextmanager
def dashboard() -> Iterator[str]:
    """The dashboard's address while it runs; it ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(port)]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"MEMCORE_HUB_LOOKUP": "0"}, stdout=subprocess.DEVNULL
    ) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/_stcore/health")
            yield address
        finally:
            server.terminate()


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            # The body, not the status: any path is answered with 200.
            if urllib.request.urlopen(url, timeout=5).read() == b"ok":
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the dashboard did not start within {START_TIMEOUT_S} s")


def picture(browser: Browser, url: str, act: Callable[[Page], None] | None) -> bytes:
    """The first screen of a page as PNG, or the screen that it shows after `act`."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    page = context.new_page()
    page.goto(url)
    page.wait_for_function(IS_DRAWN, timeout=1000 * START_TIMEOUT_S)
    if act is not None:
        act(page)
    page.wait_for_timeout(SETTLE_MS)
    shot = page.screenshot()
    context.close()
    return shot


if __name__ == "__main__":
    main()

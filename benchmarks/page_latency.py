"""How long one rerun of each page takes in the server: what a user waits for after a click, the browser aside.

Run: python benchmarks/page_latency.py [--json] [--reruns 20]

Each page is run through Streamlit's AppTest in this process, with the default scenario, after two runs to warm up.
A click should take under 100 ms. With torch in the process every rerun would take several times longer (Streamlit
collects garbage after each), so the output also says whether it is there. It asserts nothing.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from streamlit.testing.v1 import AppTest  # noqa: E402  the package is found from the folder above

from memcore.ui.frame import PAGES  # noqa: E402

TARGET_MS = 100
WARM_UP_RUNS = 2
TIMEOUT_S = 120


def measured(reruns: int) -> list[dict[str, object]]:
    """For each page the milliseconds of its reruns."""
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT_S).run()
    rows: list[dict[str, object]] = []
    for name, (file, *_rest) in PAGES.items():
        if file != "app.py":
            at.switch_page(file)
        for _run in range(WARM_UP_RUNS):
            at.run()
        seconds = []
        for _run in range(reruns):
            start = time.perf_counter()
            at.run()
            seconds.append(time.perf_counter() - start)
        rows.append(
            {
                "page": name,
                "median_ms": round(1e3 * statistics.median(seconds), 1),
                "slowest_ms": round(1e3 * max(seconds), 1),
                "failed": bool(at.exception),
            }
        )
    return rows


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the same figures")
    parser.add_argument("--reruns", type=int, default=20, help="runs of each page that are timed (20)")
    args = parser.parse_args()
    report = {
        "target_ms": TARGET_MS,
        "reruns": args.reruns,
        "pages": measured(args.reruns),
        "torch_in_process": "torch" in sys.modules,
        "transformers_in_process": "transformers" in sys.modules,
        "python": platform.python_version(),
        "streamlit": version("streamlit"),
    }
    print(json.dumps(report, indent=1) if args.json else table(report))


def table(report: dict[str, object]) -> str:
    """The report for reading."""
    pages = report["pages"]
    assert isinstance(pages, list)
    width = max(len(page["page"]) for page in pages)
    lines = [f"{'page':{width}}  median ms  slowest ms"]
    for page in pages:
        slow = "" if page["median_ms"] <= TARGET_MS else f"  above {TARGET_MS} ms"
        failed = "  failed" if page["failed"] else ""
        lines.append(f"{page['page']:{width}}  {page['median_ms']:9}  {page['slowest_ms']:10}{slow}{failed}")
    in_process = [
        f"{package} in the process: {'yes' if report[f'{package}_in_process'] else 'no'}"
        for package in ("torch", "transformers")
    ]
    return "\n".join([*lines, *in_process])


if __name__ == "__main__":
    main()

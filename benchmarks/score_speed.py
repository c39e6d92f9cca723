"""How long all published runs take to be scored, cold and warm, beside predicting them one command at a time.

Run: python benchmarks/score_speed.py [--json] [--runs 262]

Each time is that of the whole command ``python -m memcore score``, its start and its workers' imports included,
on the records that the package holds: cold with no trace kept from before, warm with those that the cold one kept. It
should take under three minutes cold on two processors, and under 20 seconds warm. `ratio` is how many times longer a
loop over ``python -m memcore predict --trace`` would take, by one run's time. It asserts nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memcore.accuracy.scored import published  # noqa: E402  the package is found from the folder above
from memcore.scenario import scenario_data  # noqa: E402
from memcore.score.adapter import scenario_of  # noqa: E402
from memcore.score.published import published_records  # noqa: E402
from memcore.score.record import parse_run  # noqa: E402

COLD_TARGET_S, WARM_TARGET_S = 180, 20


def seconds(cache: str, *arguments: str) -> tuple[float, str]:
    """The time of a command with a folder for its traces, and what it wrote."""
    command = [sys.executable, "-m", "memcore", *arguments]
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"MEMCORE_CACHE_DIR": cache}, capture_output=True, text=True, check=False
    )
    if not done.stdout:
        sys.exit(done.stderr)
    return time.perf_counter() - start, done.stdout


def measured(runs: int) -> dict[str, Any]:
    """All times, and the ratio."""
    records = [json.loads(json.dumps(record)) for record in list(published_records().values())[:runs]]
    predicted = {run.run_id for run in published().predicted}
    one = next(record for record in records if record["id"] in predicted)
    with tempfile.TemporaryDirectory(prefix="memcore-benchmark-") as folder:
        file, scenario = Path(folder) / "runs.json", Path(folder) / "scenario.json"
        file.write_text(json.dumps({"runs": records}), encoding="utf-8")
        scenario.write_text(json.dumps(scenario_data(scenario_of(parse_run(one)))), encoding="utf-8")
        cold_s, written = seconds(f"{folder}/kept", "score", str(file), "--json")
        warm_s, again = seconds(f"{folder}/kept", "score", str(file), "--json")
        alone_s, _answer = seconds("", "predict", str(scenario), "--json")
    found = json.loads(written)["summary"]["records"]["predicted"]
    return {
        "runs": len(records),
        "predicted": found,
        "processors": os.cpu_count(),
        "cold_s": round(cold_s, 1),
        "cold_target_s": COLD_TARGET_S,
        "warm_s": round(warm_s, 1),
        "warm_target_s": WARM_TARGET_S,
        "one_alone_s": round(alone_s, 1),
        "ratio": round(found * alone_s / cold_s, 1),
        "same_answers": written == again,
    }


def main() -> None:
    """Measure, and print a list or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the same figures")
    parser.add_argument("--runs", type=int, default=1000, help="how many of the published runs (all)")
    args = parser.parse_args()
    report = measured(args.runs)
    print(json.dumps(report) if args.json else "\n".join(f"{key:16} {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()

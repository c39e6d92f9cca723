"""Run the whole matrix of engine cases on this machine, and write its table.

    python -m scripts.prove_engines             measure all cases and write the data and docs/engines.md
    python -m scripts.prove_engines --table     write docs/engines.md from the data alone, after a change of an engine

Measuring takes about half an hour on two cores. Needs requirements-dev.txt. Writes tests/data/engines_cpu.json.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memcore.jobs import HeavyLane, HeavyLimits, LightLane, finish
from memcore.verify.case import load_figures
from memcore.verify.matrix import RANKS, matrix
from memcore.verify.proof import Proof, case_evidence, prove
from memcore.verify.report import phase_label, signed
from memcore.verify.running import verify_step

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "engines_cpu.json"
TABLE = ROOT / "docs" / "engines.md"
_HOUR_S = 3600.0


def measure() -> dict[str, Any]:
    """Every case on every number of ranks: one launch for each number."""
    found: dict[str, Any] = {}
    lane = HeavyLane(HeavyLimits(case_timeout_s=2 * _HOUR_S, job_timeout_s=4 * _HOUR_S, heartbeat_s=_HOUR_S))
    try:
        for ranks in RANKS:
            result = finish(lane, lane.submit([verify_step(matrix(ranks), "cpu")], device="cpu")).results[0]
            if result.value is None:
                raise SystemExit(result.message)
            for each in result.value["results"]:
                if "reason" in each:
                    raise SystemExit(f"{each['name']}: {each['reason']}")
            found[str(ranks)] = {each["name"]: each["ranks"] for each in result.value["results"]}
    finally:
        lane.close()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    return {
        "about": "Bytes of tensors on each rank, by phase and step, from `python -m scripts.prove_engines`; "
        "memcore.verify.case.load_figures says what each figure is.",
        "measured": f"{datetime.now(UTC):%Y-%m-%d}, {versions}, gloo, {platform.machine()}",
        "cases": found,
    }


def proofs(data: dict[str, Any]) -> Iterator[Proof]:
    """Each case's figures beside its prediction."""
    lane = LightLane()
    try:
        for ranks in RANKS:
            for case in matrix(ranks):
                figures = [load_figures(each) for each in data["cases"][str(ranks)][case.name]]
                yield prove(case, case_evidence(case, lane.ask, "cpu"), figures, "cpu")
    finally:
        lane.close()


def table(data: dict[str, Any], found: list[Proof]) -> str:
    """docs/engines.md."""
    worst = {phase.name: max(abs(_phase(proof, phase.name)) for proof in found) for phase in found[0].phases}
    lines = [
        "# Engines beside their predictions",
        "",
        f"{len(found)} real runs on CPU ranks ({data['measured']}), each beside",
        "what `predict` says of the same scenario: predicted over measured, less one, on the fullest rank. Written by",
        "`python -m scripts.prove_engines`; the figures are in `tests/data/engines_cpu.json`, the model and the",
        "settings in `memcore/verify/matrix.py`. Measured are tensors alone, from the second step on; what gloo stages",
        "beside them is left out, and oneDNN is off.",
        "",
        "Furthest off: " + ", ".join(f"{phase_label(name)} {error:.2f}%" for name, error in worst.items()) + ".",
        "",
    ]
    for ranks in RANKS:
        rows = [proof for proof in found if proof.case.ranks == ranks]
        names = [phase.name for phase in rows[0].phases]
        lines += [f"## {ranks} ranks", ""]
        lines += ["| case | " + " | ".join(phase_label(name) for name in names) + " | measured peak |"]
        lines += ["|---|" + "---:|" * (len(names) + 1)]
        for proof in rows:
            errors = " | ".join(signed(_phase(proof, name)) for name in names)
            peak = max(phase.measured for phase in proof.phases)
            lines.append(f"| {proof.case.name} | {errors} | {peak / 1e6:.1f} MB |")
        lines.append("")
    return "\n".join(lines)


def _phase(proof: Proof, name: str) -> float:
    return next(phase.error_percent for phase in proof.phases if phase.name == name)


def main() -> None:
    """Measure where asked for, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="write the table from the data that is there")
    if not parser.parse_args().table:
        DATA.write_text(json.dumps(measure(), separators=(",", ":")) + "\n", encoding="utf-8")
    data = json.loads(DATA.read_text(encoding="utf-8"))
    TABLE.write_text(table(data, list(proofs(data))), encoding="utf-8")


if __name__ == "__main__":
    main()

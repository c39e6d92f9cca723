"""The program of one rank: ``torchrun -m memcore.verify.worker.rank CASES.json FOLDER``.

Runs real training steps, case by case, and writes what this node's ranks measured. Started by
:mod:`memcore.verify.worker.launch`, with the meter loaded before all else where it runs on the CPU.
"""

import ctypes
import gc
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

_FAILED = 3


def die_with_torchrun() -> None:
    """Have this process killed when torchrun is gone, which puts ranks into sessions of their own."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # torchrun may have gone before this was said. Then another has this process for a child, who is not the
    # launcher's child.
    status = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace")
    parent_of_parent = status.rpartition(")")[2].split()[1]
    if parent_of_parent != os.environ["MEMCORE_VERIFY_LAUNCHER"]:
        os._exit(1)


def main(cases_file: Path, folder: Path) -> None:
    """Run all cases. Ends the process, with another status than 0 after a case that failed."""
    # Imports take seconds, in which the launcher may go.
    import torch
    import torch.distributed as dist

    from memcore.engine_options import EngineName
    from memcore.scenario import parse_scenario
    from memcore.verify.worker.engines import init_distributed
    from memcore.verify.worker.meter import meter_of
    from memcore.verify.worker.steps import measure

    _be_quiet(torch)
    cases = json.loads(cases_file.read_text(encoding="utf-8"))
    device, meter = meter_of(os.environ["MEMCORE_VERIFY_DEVICE"], int(os.environ["LOCAL_RANK"]))
    engines = {EngineName(case["engine"]) for case in cases}
    # DeepSpeed adds to what torch has set up, not the other way round.
    init_distributed(max(engines, key=lambda engine: engine is EngineName.DEEPSPEED), device)
    # Libraries hold a million objects that stay: collecting garbage between phases need not look at them.
    gc.collect()
    gc.freeze()
    results: list[dict[str, Any]] = []
    for case in cases:
        _say(folder, case["name"])
        try:
            found = measure(parse_scenario(case["scenario"]), device, meter)
        except Exception as error:  # whatever it was, the launcher says so, and goes on with the other cases
            traceback.print_exc()
            _write(folder / f"failed-{dist.get_rank()}.json", {"case": case["name"], "reason": _first_line(error)})
            os._exit(_FAILED)
        results.append({"name": case["name"], "ranks": found})
        if os.environ["LOCAL_RANK"] == "0":
            _write(folder / "results.json", results)
    dist.barrier()
    os._exit(0)


def _be_quiet(torch: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # oneDNN packs operands of 16-bit products in buffers of its own, which no GPU has.
    torch.backends.mkldnn.enabled = False


def _say(folder: Path, name: str) -> None:
    """Which case runs: the launcher reads it where a rank dies."""
    if os.environ["LOCAL_RANK"] == "0":
        (folder / "running").write_text(name, encoding="utf-8")


def _write(file: Path, data: object) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(file)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()}"[:400]


if __name__ == "__main__":
    die_with_torchrun()
    main(Path(sys.argv[1]), Path(sys.argv[2]))

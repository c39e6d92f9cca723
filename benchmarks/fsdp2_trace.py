"""How long a trace of FSDP2 takes at 8, 64 and 1,024 ranks, in one worker process.

Run: python benchmarks/fsdp2_trace.py [--json]

The model is built, sharded by torch's own fully_shard among as many ranks, run forward and backward on fake tensors,
and replayed over all layers. Warm times are of the worker's task with nothing kept, the median of five, after another
model was traced; the cold time is that of a worker's first trace, its start and imports included; `any_size` that of an
answer at a size that was not traced, once the model was prepared for it; `full_depth` that of every layer traced. FP32
shards, computed in BF16, full checkpointing, 8,192 tokens. It asserts nothing.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memcore.jobs import JobStatus, LaneLimits, LightLane  # noqa: E402  the package is found from the folder above
from memcore.scenario import parse_scenario  # noqa: E402
from memcore.trace.request import trace_request  # noqa: E402

LLAMA_8B, LLAMA_405B, OTHER = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B", "Qwen/Qwen2.5-7B"
RUNS, LIMIT_S = 5, 600


def payload(name: str, gpus: int, tokens: int = 8192) -> dict[str, Any]:
    """The task's payload for a catalogue model on so many GPUs."""
    scenario = {
        "model": {"name": name},
        "hardware": {"gpus": gpus},
        "parallelism": {"engine": "fsdp2"},
        "recipe": {"convention": "fsdp2_mixed"},
        "workload": {"seq_len": tokens, "checkpointing": "full"},
    }
    request = trace_request(parse_scenario(scenario))
    assert isinstance(request, dict), "the catalogue has its config"
    return request


def seconds(lane: LightLane, task: str, requests: list[dict[str, Any]]) -> float:
    """The median time of a task in the lane's worker."""
    taken = []
    for request in requests:
        result = lane.run(task, request)
        if result.status is not JobStatus.DONE:
            sys.exit(f"trace failed: {result.message}")
        taken.append(result.seconds)
    return statistics.median(taken)


def measured() -> dict[str, float]:
    """All times in seconds."""
    os.environ["MEMCORE_CACHE_DIR"] = ""
    anew = {"trace_anew": "memcore.trace.task:trace_anew"}
    lane = LightLane(LaneLimits(timeout_s=LIMIT_S, cache_entries=0), extra_tasks=anew, quiet=True)
    start = time.perf_counter()
    seconds(lane, "trace_anew", [payload(OTHER, 64)])
    report = {"cold_s": time.perf_counter() - start}
    for name, model in (("llama_8b", LLAMA_8B), ("llama_405b", LLAMA_405B)):
        for gpus in (8, 64, 1024):
            report[f"{name}_{gpus}_ranks_s"] = seconds(lane, "trace_anew", [payload(model, gpus)] * RUNS)
    report["llama_8b_64_ranks_full_depth_s"] = seconds(
        lane, "trace_anew", [{**payload(LLAMA_8B, 64), "full_depth": True}]
    )
    lane.run("trace_sizes", payload(LLAMA_8B, 64))
    report["any_size_s"] = seconds(lane, "trace", [payload(LLAMA_8B, 64, 8192 + more) for more in range(RUNS)])
    lane.close()
    return {name: round(value, 3) for name, value in report.items()}


def main() -> None:
    """Measure, and print a list or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the same figures")
    args = parser.parse_args()
    report = measured()
    print(json.dumps(report) if args.json else "\n".join(f"{key:32} {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()

"""How long a trace takes in a warm worker, beside torch's own memory tracker on the same step.

Run: python benchmarks/trace_speed.py [--json] [--skip-memtracker]; --growth [200] for the worker's memory.

A trace builds the model, runs its forward, backward and optimizer step on fake tensors and replays them over all
layers; times are those of the worker's task, the median of five, after another model was traced and with nothing kept.
The cold time is that of a worker's first trace, its start and imports included; `any_size_s` that of an answer at a
size that was not traced, once the model was prepared for it. torch.distributed._tools.mem_tracker.MemTracker builds
the same model at full depth and runs the same step, and the optimizer's, once. Both peaks are of weights, gradients and
activations over forward and backward. It asserts nothing.
"""

import argparse
import gc
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
from memcore.models import catalogue_model  # noqa: E402
from memcore.trace.profile import load_profile  # noqa: E402

LLAMA_8B, LLAMA_405B, OTHER = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B", "Qwen/Qwen2.5-7B"
TOKENS, RUNS, LIMIT_S = 8192, 5, 600
EQUAL_WITHIN = 0.001


def payload(name: str, **wanted: Any) -> dict[str, Any]:
    """The task's payload for a catalogue model."""
    return {
        "config": dict(catalogue_model(name).config or {}),
        "micro_batch": 1,
        "seq_len": TOKENS,
        "dtype": "bf16",
        "attention": "flash",
        "checkpointing": "none",
        "loss": "unfused",
        "kernels": "cpu",
        "step": {"name": "adamw", "implementation": "foreach", "momentum": False, "dtype": "bf16"},
        **wanted,
    }


def seconds(lane: LightLane, request: dict[str, Any], runs: int = RUNS) -> tuple[float, dict[str, Any]]:
    """The median time of a trace in the lane's worker, and what it found."""
    taken = []
    for _run in range(runs):
        result = lane.run("trace_anew", request)
        if result.status is not JobStatus.DONE or result.value is None:
            sys.exit(f"trace failed: {result.message}")
        taken.append(result.seconds)
    return statistics.median(taken), result.value


def any_size(lane: LightLane) -> float:
    """The median time of an answer at a new size each, after the model was prepared for any."""
    lane.run("trace_sizes", payload(LLAMA_8B))
    return statistics.median(lane.run("trace", payload(LLAMA_8B, seq_len=TOKENS + n)).seconds for n in range(RUNS))


def tracker_step() -> tuple[float, int]:
    """Time and peak of the 8B step under torch's MemTracker."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from memcore.loading import build_model, load_config
    from memcore.trace import kernels

    kernels.register()
    start = time.perf_counter()
    config = load_config(catalogue_model(LLAMA_8B).config or {})
    config._attn_implementation = kernels.FLASH  # noqa: SLF001  how transformers is told before a model is built
    config.use_cache = False
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = build_model(config, device="cpu", dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.zeros((1, TOKENS), dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            peak = max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
            optimizer.step()
    return time.perf_counter() - start, peak


def speed(*, skip_tracker: bool) -> dict[str, Any]:
    """All times, and the ratio to MemTracker."""
    os.environ["MEMCORE_CACHE_DIR"] = ""
    anew = {"trace_anew": "memcore.trace.task:trace_anew"}
    lane = LightLane(LaneLimits(timeout_s=LIMIT_S, cache_entries=0), extra_tasks=anew, quiet=True)
    start = time.perf_counter()
    seconds(lane, payload(OTHER), runs=1)
    report: dict[str, Any] = {"cold_s": time.perf_counter() - start}
    report["llama_8b_s"], traced = seconds(lane, payload(LLAMA_8B))
    report["llama_8b_checkpointed_s"], _value = seconds(lane, payload(LLAMA_8B, checkpointing="full"))
    report["llama_405b_s"], _value = seconds(lane, payload(LLAMA_405B))
    report["llama_405b_checkpointed_s"], _value = seconds(lane, payload(LLAMA_405B, checkpointing="full"))
    report["llama_405b_at_most_s"] = 1.3 * report["llama_8b_s"] + 0.3
    report["any_size_s"] = any_size(lane)
    lane.close()
    if not skip_tracker:
        report["memtracker_8b_s"], peak = tracker_step()
        weights = 2 * (catalogue_model(LLAMA_8B).n_params or 0)
        ours = weights + max(load_profile(traced).with_gradients)
        report |= {"speedup": report["memtracker_8b_s"] / report["llama_8b_s"], "traced_bytes": ours}
        report |= {"memtracker_bytes": peak, "peak_equal": abs(ours - peak) <= EQUAL_WITHIN * peak}
        if not report["peak_equal"]:
            report["peak_reason"] = f"MemTracker's peak is {(peak - ours) / 1e6:+,.1f} MB beside the trace's"
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in report.items()}


def growth(traces: int) -> dict[str, Any]:
    """Resident MiB of a process that does a worker's task again and again, over the traces."""
    from memcore.trace.task import trace_anew

    names = (LLAMA_8B, OTHER, "google/gemma-3-1b-pt", "Qwen/Qwen3-30B-A3B", "openai-community/gpt2")
    sizes: dict[int, float] = {}
    for number in range(1, traces + 1):
        trace_anew(payload(names[number % len(names)], seq_len=512 + number))
        if number % max(traces // 10, 1) == 0:
            gc.collect()
            sizes[number] = resident_mib()
    marks = list(sizes)
    middle = marks[len(marks) // 2]
    return {"resident_mib": sizes, "grown_in_second_half_mib": round(sizes[marks[-1]] - sizes[middle], 1)}


def resident_mib() -> float:
    """This process's resident memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    raise AssertionError("Linux tells it")


def main() -> None:
    """Measure, and print a list or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the same figures")
    parser.add_argument("--skip-memtracker", action="store_true", help="leave torch's tracker out (it takes minutes)")
    parser.add_argument("--growth", type=int, nargs="?", const=200, help="the memory over so many traces (200)")
    args = parser.parse_args()
    report = growth(args.growth) if args.growth else speed(skip_tracker=args.skip_memtracker)
    print(json.dumps(report) if args.json else "\n".join(f"{key:26} {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()

"""What measuring adds to what is measured: the harness's step beside the bare forward and backward that it wraps.

Run: python benchmarks/bench_overhead.py [--json] [--rounds 5] [--model meta-llama/Llama-3.1-8B]

Bare is the same layers from transformers, run by a plain loop: time by a clock around forward and backward, peak by the
allocator's events in torch.profiler. The harness is memcore.bench's own task, which reports both. They take turns, so
that a busy machine slows both; times are medians over the rounds. The harness should add under 5% to the time and
nothing to the peak. It asserts nothing.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  the package is found from the folder above
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from memcore.bench.case import Case, dump_case  # noqa: E402
from memcore.bench.slices import make_slice  # noqa: E402
from memcore.bench.sweeps import SweepKind, plan  # noqa: E402
from memcore.bench.worker.measure import measure_task  # noqa: E402
from memcore.budget import FORMULAS  # noqa: E402
from memcore.loading import build_model, load_config  # noqa: E402
from memcore.scenario import parse_scenario  # noqa: E402
from memcore.trace import kernels  # noqa: E402

REPEATS = 7


class Bare:
    """The case's layers in a plain loop."""

    def __init__(self, case: Case) -> None:
        kernels.register()
        config = load_config(deepcopy(dict(case.config or {})))
        config._attn_implementation = kernels.FLASH  # noqa: SLF001  how transformers is told before a model is built
        config.use_cache = False
        model: Any = build_model(config, device="cpu", dtype=torch.float32)
        self.decoder = model.train().get_decoder()
        self.tokens = torch.randint(0, config.vocab_size, (case.micro_batch, case.seq_len))
        self.gradient = torch.randn_like(self.decoder(input_ids=self.tokens, use_cache=False)[0])
        self.step()

    def step(self) -> None:
        """One forward and backward, with a gradient of its own as a loss would make it."""
        hidden = self.decoder(input_ids=self.tokens, use_cache=False)[0]
        torch.autograd.backward(hidden, torch.empty_like(hidden).copy_(self.gradient))

    def forget(self) -> None:
        """Let go of the gradients."""
        for parameter in self.decoder.parameters():
            parameter.grad = None

    def seconds(self) -> float:
        """The median time of a step."""
        taken = []
        for _repeat in range(REPEATS):
            self.forget()
            start = time.perf_counter()
            self.step()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def peak_bytes(self) -> int:
        """The most that the allocator holds during a step, beyond what it held before."""
        self.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                self.step()
        held = most = 0
        events: Any = recorded.profiler
        for event in events.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most


def overhead(model: str, rounds: int) -> dict[str, Any]:
    """Both times and peaks, and what the harness adds."""
    scenario = parse_scenario({"model": {"name": model}})
    cases = plan(SweepKind.FRONTIER, make_slice(scenario, FORMULAS, "cpu")).cases
    case = next(case for case in cases if case.attention == "flash" and case.checkpointing == "none")
    bare, payload = Bare(case), {"case": dump_case(case)}
    bare_s, harness_s, figures = [], [], {}
    for _round in range(rounds):
        bare_s.append(bare.seconds())
        figures = measure_task(payload)["figures"]
        harness_s.append(figures["forward"]["median"] + figures["backward"]["median"])
    plain, wrapped, peak = statistics.median(bare_s), statistics.median(harness_s), bare.peak_bytes()
    return {
        "model": model,
        "layers": case.num_layers,
        "tokens": case.seq_len,
        "bare_s": round(plain, 4),
        "harness_s": round(wrapped, 4),
        "added_time_percent": round(100 * (wrapped / plain - 1), 2),
        "bare_peak_bytes": peak,
        "harness_peak_bytes": figures["with_gradients_bytes"],
        "added_peak_bytes": figures["with_gradients_bytes"] - peak,
    }


def main() -> None:
    """Measure, and print a list or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the same figures")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (5)")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="whose layers run")
    args = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for one another tell more of the machine than of either
    report = overhead(args.model, args.rounds)
    print(json.dumps(report) if args.json else "\n".join(f"{key:20} {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()

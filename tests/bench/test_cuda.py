"""Measuring on a CUDA device. Skipped where there is none. Run: pytest tests/bench/test_cuda.py"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_bench import attention_case, layers_case

from memcore.bench.case import Case, dump_case
from memcore.bench.findings import findings
from memcore.bench.fits import power_law
from memcore.bench.measurement import Status
from memcore.bench.running import RunningSweep, find_device
from memcore.bench.slices import make_slice
from memcore.bench.store import Store
from memcore.bench.sweeps import Sweep, SweepKind, plan
from memcore.bench.worker.measure import measure_task
from memcore.budget import FORMULAS
from memcore.jobs import HeavyLane
from memcore.jobs.heavy import finish
from memcore.scenario import parse_scenario

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
LENGTHS = (512, 1024, 2048, 4096, 8192)


def on_cuda(case: Case, **changes: Any) -> Case:
    return Case(**{**dump_case(case), "part": case.part, "device": "cuda", "dtype": "bf16", **changes})


def figures(case: Case) -> dict[str, Any]:
    found = measure_task({"case": dump_case(case)})
    assert found["status"] == "done", found
    return dict(found["figures"])


def attention(name: str, length: int) -> Case:
    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
    return on_cuda(attention_case(attention=name, seq_len=length, **sizes))


@pytest.fixture
def lane() -> Iterator[HeavyLane]:
    lane = HeavyLane(quiet=True)
    yield lane
    lane.close()


def test_the_flash_kernel_really_runs():
    assert figures(attention("flash", 1024))["kernel"] == "aten::_scaled_dot_product_flash_attention"
    assert figures(attention("memory_efficient", 1024))["kernel"] == "aten::_scaled_dot_product_efficient_attention"


def test_flash_in_fp32_is_not_available_here():
    found = measure_task({"case": dump_case(on_cuda(attention("flash", 1024), dtype="fp32"))})
    assert found["status"] == "unavailable"
    assert found["reason"].startswith("Not available here")


@pytest.mark.parametrize(("name", "low", "high"), [("plain", 1.8, 2.1), ("flash", 0.85, 1.15)])
def test_plain_is_quadratic_and_flash_linear(name: str, low: float, high: float):
    law = power_law([(length, figures(attention(name, length))["peak_bytes"]) for length in LENGTHS])
    assert law is not None
    assert low < law.exponent < high


@pytest.mark.parametrize("checkpointing", ["none", "full", "segments(2)"])
@pytest.mark.parametrize("name", ["plain", "flash"])
def test_the_trace_is_within_2_percent(name: str, checkpointing: str):
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
    }
    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "config": config, "seq_len": 2048}
    found = figures(on_cuda(layers_case(attention=name, checkpointing=checkpointing, **sizes)))
    assert found["peak_bytes"] == pytest.approx(found["traced_bytes"], rel=0.02)
    assert found["with_gradients_bytes"] == pytest.approx(found["traced_with_gradients_bytes"], rel=0.02)
    assert found["gradient_difference"] is None or found["gradient_difference"] < 0.05


def test_out_of_memory_is_caught_and_the_device_usable_afterwards(lane: HeavyLane, tmp_path: Any):
    device = find_device(lane)
    assert device.kind == "cuda"
    large, small = attention("plain", 2**19), attention("flash", 1024)
    part = make_slice(parse_scenario({"model": {"name": "meta-llama/Llama-3.1-8B"}}), FORMULAS, "cuda")
    sweep = Sweep(kind=SweepKind.FRONTIER, part=part, cases=(large, small))
    running = RunningSweep(lane, Store(tmp_path / "store.sqlite"), sweep, device, reuse=False)
    finish(lane, running._job)
    measured = running.look().measured
    assert measured[large.key].status is Status.OUT_OF_MEMORY
    assert measured[small.key].status is Status.DONE


def test_a_one_click_sweep_at_the_real_width(lane: HeavyLane, tmp_path: Any):
    part = make_slice(parse_scenario({"model": {"name": "meta-llama/Llama-3.1-8B"}}), FORMULAS, "cuda")
    assert part.divisor == 1
    sweep = plan(SweepKind.SEQUENCE, part)
    running = RunningSweep(lane, Store(tmp_path / "store.sqlite"), sweep, find_device(lane), reuse=False)
    finish(lane, running._job)
    found = findings(sweep, running.look().measured)
    assert found.exponents["plain"].exponent > 1.8
    assert 0.85 < found.exponents["flash"].exponent < 1.15

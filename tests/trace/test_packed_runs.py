"""4-bit bases, separate experts and a held cache against byte-exact published runs on A100s: the whole way of a score.

Run: pytest tests/trace/test_packed_runs.py
"""

from typing import Any

import pytest
from worker import ask

from memcore.score import score_run

# Within so many per cent, and what decides each.
RUNS = {
    # AutoGPTQ's integers, in FP16 with FP32 adapters under autocast.
    "fms-a-Llama-2-70B-GPTQ-accelerated-peft-autogptq-qlora-g1-b4": 0.1,
    "fms-a-Llama-2-70B-GPTQ-accelerated-peft-autogptq-qlora-g2-b2": 0.1,
    "fms-a-Mistral-7B-v0.1-GPTQ-accelerated-peft-autogptq-qlora-g2-b2": 0.1,
    # Experts in modules of their own: stacked and left as they are, they would take 2.8 times as much.
    "fms-a-Mixtral-8x7B-Instruct-v0.1-accelerated-peft-bnb-qlora-g1-b4": 0.1,
    "fms-a-Mixtral-8x7B-Instruct-v0.1-accelerated-peft-bnb-qlora-g2-b2": 0.5,
    # Keys and values of all layers in the model's output, here in BF16; without them it would be 12% less.
    "fms-a-gpt_bigcode-santacoder-none-full-g1-b8": 0.1,
    # Norms give FP32 under autocast, and so do packed modules and all that follows: keys, values and residuals.
    "fms-a-gpt_bigcode-santacoder-accelerated-peft-bnb-qlora-g1-b8": 1.0,
}


@pytest.mark.parametrize("run_id", RUNS)
def test_published_peak(measured_runs: dict[str, Any], run_id: str):
    score = score_run(measured_runs["runs"][run_id], 1, ask, traced=True)
    assert score.error_pct is not None, score.reason
    assert abs(score.error_pct) < RUNS[run_id]

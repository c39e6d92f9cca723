"""The DeepSpeed engine file against real runs of DeepSpeed 0.19.8 on two CPU ranks (tests/data/deepspeed_cpu.json).

Run: pytest tests/test_deepspeed_measured.py. Each phase's peak within 3.5%, what stays between steps within 1.5%; the
gathered sets of ZeRO-3 to the element. cuBLAS, which the CPU has not, is left out; closed-form activations of
16 tokens are in.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.engines.zero3_gather import GatherSettings, simulate
from memcore.inventory import Inventory
from memcore.models import load_inventory
from memcore.scenario import parse_scenario

MEASURED = json.loads((Path(__file__).parent / "data" / "deepspeed_cpu.json").read_text(encoding="utf-8"))
NEVER_DIVIDED = 8_704  # the norms: 17 of 512 values


@pytest.fixture(scope="module")
def inventory() -> Inventory:
    return load_inventory(count_config({"config": MEASURED["config"]})["inventory"])


@pytest.mark.parametrize("case", MEASURED["cases"], ids=lambda case: case["name"])
def test_each_phases_peak(case: dict[str, Any], inventory: Inventory):
    data = {
        "model": {"config": MEASURED["config"]},
        "hardware": {"gpu": "A100-80GB", "gpus": 2},
        "parallelism": {"engine": "deepspeed", "zero_stage": case["zero_stage"]},
        "engine_config": {"zero_optimization": case["zero_optimization"]},
        "recipe": {
            "convention": case["convention"],
            "optimizer": {"name": "adamw", "implementation": case["implementation"]},
        },
        "workload": {"micro_batch": 1, "seq_len": 16, "grad_accum": case["grad_accum"]},
    }
    budget = predict(parse_scenario(data), Evidence(inventory=inventory))
    on_gpu_only = sum(term.largest for term in budget.terms if term.name == "cublas_workspace")
    peaks = {phase.value: budget.totals[index] - on_gpu_only for phase, index in budget.phase_peaks().items()}
    for phase, measured in case["bytes_per_parameter"].items():
        predicted = peaks[phase] / inventory.n_params
        assert predicted == pytest.approx(measured, rel=0.015 if phase == "idle" else 0.035), phase


@pytest.mark.parametrize(
    "row", MEASURED["gathered"], ids=lambda row: f"{row['max_live']}-{row['max_reuse']}-{row['prefetch']}"
)
def test_what_zero_3_gathers_to_the_element(row: dict[str, int], inventory: Inventory):
    settings = GatherSettings(
        prefetch_bucket=row["prefetch"], max_live=row["max_live"], max_reuse=row["max_reuse"], persistence=100_000
    )
    gathered = simulate(inventory, settings, (False,) * 8)
    assert gathered.persistent == NEVER_DIVIDED
    assert gathered.turn + NEVER_DIVIDED == row["start_of_backward"]
    assert max(gathered.forward) + NEVER_DIVIDED == row["forward"]
    assert max(gathered.backward) + NEVER_DIVIDED == row["backward"]

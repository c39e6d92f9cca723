"""The closed form of FSDP2 against real runs of torch 2.13 on one, two and four CPU ranks (tests/data/fsdp2_cpu.json).

Run: pytest tests/test_fsdp2_measured.py. So few tokens that gathers, gradients and states are nearly all there is;
cuBLAS, which the CPU has not, is left out. Runs in which the CPU makes copies that CUDA does not, of gradients reduced
in another dtype or of rows that the ranks do not divide, are the trace's to compare with (tests/trace/test_fsdp2.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.models import load_inventory
from memcore.scenario import parse_scenario
from memcore.terms import Category

REAL = json.loads((Path(__file__).parent / "data" / "fsdp2_cpu.json").read_text(encoding="utf-8"))
RUNS = [
    run
    for run in REAL["runs"]
    if run["tokens"] <= 64 and run["weights"] == run["compute"] == run["reduce"] and not run["lora_rank"]
]


def described(run: dict[str, Any]) -> str:
    """A short name for a real run."""
    plain = ("ranks", "replicate", "weights", "compute", "reduce", "checkpointing", "optimizer")
    words = [str(run[name]) for name in plain]
    return "-".join([*words, "resharded" if run["reshard_after_forward"] else "kept", *map(str, run["model"])])


def scenario_of(run: dict[str, Any]) -> dict[str, Any]:
    """The scenario of a real run."""
    convention = {("fp32", "bf16"): "fsdp2_mixed", ("fp32", "fp32"): "fp32", ("bf16", "bf16"): "pure_bf16"}
    return {
        "model": {"config": {**REAL["config"], **run["model"]}},
        "hardware": {"gpus": run["ranks"]},
        "parallelism": {"engine": "fsdp2", "dp_replicate": run["replicate"]},
        "engine_config": {"reshard_after_forward": run["reshard_after_forward"]},
        "recipe": {
            "convention": convention[run["weights"], run["compute"]],
            "reduce_dtype": run["reduce"],
            "optimizer": {"name": "adamw", "implementation": run["optimizer"]},
        },
        "workload": {"seq_len": run["tokens"], "checkpointing": run["checkpointing"]},
    }


@pytest.mark.parametrize("run", RUNS, ids=described)
def test_each_phases_peak(run: dict[str, Any]):
    data = scenario_of(run)
    inventory = load_inventory(count_config({"config": data["model"]["config"]})["inventory"])
    budget = predict(parse_scenario(data), Evidence(inventory=inventory))
    start = budget.totals[0]
    peaks = {phase.value: budget.totals[index] - start for phase, index in budget.phase_peaks().items()}
    # Gradients and the step's own, where the real figure is above the step's start.
    step = sum(term.largest for term in budget.terms if term.name.endswith("_temporary"))
    assert peaks["forward"] == pytest.approx(run["forward"], rel=0.03)
    assert peaks["backward"] == pytest.approx(run["backward"], rel=0.03)
    assert step == pytest.approx(run["optimizer_step"], rel=0.001, abs=16)
    states = sum(term.largest for term in budget.terms if term.category is Category.OPTIMIZER) - step
    assert states <= run["states"]

"""Scored runs of our own making."""

from dataclasses import replace
from typing import Any

from memcore.accuracy.scored import ScoredRun

GB = 10**9
_RUN = ScoredRun(
    run_id="made-up", status="predicted", source="owner/name@abcdef1:docs/run.md", family="small", regime="fsdp",
    gold=False, model="small", n_params=7 * GB, gpu="A100-80GB", gpus=8, engine="fsdp2", method="full", micro_batch=1,
    seq_len=4096, metric="reserved", measured=10 * GB, predicted=10 * GB, evidence="trace", by_formula=None,
)  # fmt: skip


def scored(error_pct: float = 0.0, **changes: Any) -> ScoredRun:
    """A run of that error, in per cent."""
    return replace(_RUN, **{"predicted": round(10 * GB * (1 + error_pct / 100)), **changes})


def several(*errors_pct: float, **changes: Any) -> list[ScoredRun]:
    return [scored(error, run_id=f"run-{number}", **changes) for number, error in enumerate(errors_pct)]

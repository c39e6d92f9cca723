"""The workers' task "reserve": a traced step's storages through the allocator. Worker processes only: imports torch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from memcore.allocator.steps import load_plan, reserve
from memcore.trace.request import read_request
from memcore.trace.storages import by_layer
from memcore.trace.task import kept_answer, kept_tape


def reserve_task(payload: dict[str, Any]) -> dict[str, Any]:
    """``{"trace": a trace's request, "plan": a plan's data}`` in, a reservation's data out. Raises UserError where it
    cannot be traced."""
    return kept_answer(payload, Path(__file__).parent, lambda: _reserved(payload))


def _reserved(payload: dict[str, Any]) -> dict[str, Any]:
    tape = kept_tape(read_request(payload["trace"]))
    return asdict(reserve(load_plan(payload["plan"]), by_layer(tape)))

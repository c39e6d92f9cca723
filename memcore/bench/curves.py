"""The closed form's figure for a case, to stand beside the measured one, and the segment length that it predicts.

A slice's layers are counted like any uploaded config (by `ask`, in a worker), and then go through the same closed
forms as a whole scenario.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from memcore.activations import checkpointing
from memcore.bench.case import ATTENTIONS, Case, Part
from memcore.bench.sweeps import Sweep, SweepKind
from memcore.budget import Budget, evidence_for, predict
from memcore.errors import UserError
from memcore.explore import activations_at_most, segments
from memcore.recipes import DType
from memcore.scenario import parse_scenario

Ask = Callable[[str, dict[str, Any]], Mapping[str, Any]]

_CONVENTIONS = {"fp32": "fp32", "bf16": "pure_bf16", "fp16": "pure_fp16"}


def formula_bytes(sweep: Sweep, ask: Ask) -> dict[str, int]:
    """What the closed form says of each case's peak, by the case's key; cases without one are left out."""
    found = {}
    for case in sweep.cases:
        num_bytes = _of_stack(case) if case.part is Part.PROJECTIONS else _of_layers(case, ask)
        if num_bytes:
            found[case.key] = num_bytes
    return found


def predicted_k(sweep: Sweep, ask: Ask) -> int | None:
    """The segment length with the lowest peak, in closed form; None for another sweep, or without a closed form."""
    if sweep.kind is not SweepKind.SEGMENTS:
        return None
    budget = _budget(sweep.cases[0], ask)
    found = None if budget is None else segments(budget)
    return None if found is None else found.law.best


def _of_stack(case: Case) -> int:
    """A stack of layers that keep their input: c (segments + longest segment), and c L without checkpointing.

    Source: arXiv 1604.06174, section 4.
    """
    one = DType(case.dtype).size * case.tokens * case.hidden_size
    groups = checkpointing(case.checkpointing, case.num_layers).groups
    if groups[0] is None:
        return one * case.num_layers
    num_segments = len(set(groups))
    return one * (num_segments + ceil(case.num_layers / num_segments))


def _of_layers(case: Case, ask: Ask) -> int:
    budget = _budget(case, ask) if case.part is Part.LAYERS else None
    return 0 if budget is None else activations_at_most(budget)


def _budget(case: Case, ask: Ask) -> Budget | None:
    """The case's layers as a scenario of their own; None where it cannot be answered."""
    data = {
        "model": {"config": dict(case.config or {})},
        "recipe": {"convention": _CONVENTIONS[case.dtype]},
        "workload": {
            "micro_batch": case.micro_batch,
            "seq_len": case.seq_len,
            "attention": ATTENTIONS[case.attention],
            "checkpointing": case.checkpointing,
        },
    }
    try:
        scenario = parse_scenario(data)
        return predict(scenario, evidence_for(scenario, ask))
    except UserError:
        return None

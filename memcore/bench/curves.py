"""The closed form's figure for a case, to stand beside the measured one, and the segment length that it predicts.

A slice's layers are counted like any uploaded config (by `ask`, in a worker), and then go through the same closed
forms as a whole scenario.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """What is known of a case without running it: its parameters, and its peak in bytes, None where no closed form
    stands for it."""

    n_params: int
    peak_bytes: int | None


def closed_form(case: Case, ask: Ask) -> Closed | None:
    """The case in closed form; None for attention alone, and for layers that cannot be counted."""
    if case.part is Part.PROJECTIONS:
        return Closed(n_params=case.num_layers * case.hidden_size**2, peak_bytes=_of_stack(case))
    budget = _budget(case, ask) if case.part is Part.LAYERS else None
    if budget is None or budget.inventory is None:
        return None
    counted = sum(block.numel for block in budget.inventory.layers)
    return Closed(n_params=counted, peak_bytes=activations_at_most(budget) or None)


def formula_bytes(sweep: Sweep, ask: Ask) -> dict[str, int]:
    """What the closed form says of each case's peak, by the case's key; cases without one are left out."""
    found = ((case.key, closed_form(case, ask)) for case in sweep.cases)
    return {key: form.peak_bytes for key, form in found if form is not None and form.peak_bytes is not None}


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

"""What a report says of why memory ran out, and what in a scenario is as large as what was asked for.

A request is written after PyTorch rounded it (torch 2.13, CUDACachingAllocator.cpp, get_allocation_size): up to 1 MiB
to 2 MiB, under 10 MiB to 20 MiB, beyond that up to the next 2 MiB.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from memcore.budget import Budget
from memcore.engine_options import EngineName
from memcore.inventory import Inventory
from memcore.reported.text import Quantity, Report
from memcore.units import MIB, ceil_div, round_up


class Cause(StrEnum):
    """Why a request failed, as far as the message alone shows."""

    TOO_LITTLE = "too_little"
    IN_PIECES = "in_pieces"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Something of a scenario that one request is made for: what it is, and its bytes."""

    name: str
    width: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """`unallocated`: reserved and not allocated; `outside`: of the card, neither reserved nor free, so context, NCCL
    and other processes; `needed`: allocated and asked for together; None where the report does not tell. `matches`:
    what the request may have been for, in the scenario that it is held against."""

    report: Report
    cause: Cause
    unallocated: int | None
    reserved: int | None
    outside: int | None
    needed: int | None
    matches: tuple[Candidate, ...] = ()
    budget: Budget | None = None


def find(report: Report, budget: Budget | None = None) -> Findings:
    """What a report shows, by itself and beside a scenario's budget."""
    of = report.of
    allocated, reserved, asked = of(Quantity.ALLOCATED), of(Quantity.RESERVED), of(Quantity.ASKED)
    unallocated = of(Quantity.UNALLOCATED)
    if allocated is not None and reserved is None and unallocated is not None:
        reserved = allocated + unallocated
    if allocated is not None and reserved is not None and unallocated is None:
        unallocated = max(0, reserved - allocated)
    matches = () if budget is None or asked is None else tuple(_matches(report, budget))
    return Findings(
        report=report,
        cause=_cause(report, unallocated),
        unallocated=unallocated,
        reserved=reserved,
        outside=_outside(report, reserved),
        needed=None if allocated is None or asked is None else allocated + asked,
        matches=matches,
        budget=budget,
    )


def _cause(report: Report, unallocated: int | None) -> Cause:
    asked, free = report.of(Quantity.ASKED), report.of(Quantity.FREE)
    if asked is None or free is None:
        return Cause.UNKNOWN
    if free >= asked:
        # What the card calls free it did not give: a limit of the process, or the driver's own pieces.
        return Cause.REFUSED
    if unallocated is None:
        return Cause.UNKNOWN
    return Cause.IN_PIECES if free + unallocated >= asked else Cause.TOO_LITTLE


def _outside(report: Report, reserved: int | None) -> int | None:
    if reserved is None:
        return None
    capacity, free, process = (report.of(name) for name in (Quantity.CAPACITY, Quantity.FREE, Quantity.PROCESS))
    if process is not None:
        return max(0, process - reserved)
    return None if capacity is None or free is None else max(0, capacity - free - reserved)


def _matches(report: Report, budget: Budget) -> Iterator[Candidate]:
    """Candidates that PyTorch would have written as the report does, each size once."""
    shown = report.amounts[Quantity.ASKED]
    seen: set[int] = set()
    for candidate in candidates(budget):
        written = as_requested(candidate.num_bytes)
        if candidate.num_bytes not in seen and abs(written - shown.num_bytes) <= shown.within:
            seen.add(candidate.num_bytes)
            yield candidate


def as_requested(num_bytes: int) -> int:
    """What PyTorch asks the card for, for a tensor of that size."""
    if num_bytes <= MIB:
        return 2 * MIB
    return 20 * MIB if num_bytes < 10 * MIB else round_up(num_bytes, 2 * MIB)


def candidates(budget: Budget) -> Iterator[Candidate]:
    """The single large tensors of a step, in FP32 and in 16 bits, per GPU."""
    for name, elements in _sizes(budget):
        for width in (4, 2):
            yield Candidate(name=name, width=width, num_bytes=elements * width)


def _sizes(budget: Budget) -> Iterator[tuple[str, int]]:
    trained, ranks = budget.states.trained, budget.scenario.parallelism.dp_shard
    engine = budget.scenario.parallelism.engine
    if ranks > 1:
        yield "slice", ceil_div(trained, ranks)
    yield "all", trained
    if engine is EngineName.DEEPSPEED:
        yield "bucket", budget.scenario.zero_config.reduce_bucket_size
    if budget.inventory is not None:
        yield from _tensor_sizes(budget, budget.inventory, ranks)


def _tensor_sizes(budget: Budget, inventory: Inventory, ranks: int) -> Iterator[tuple[str, int]]:
    work, shapes = budget.scenario.workload, inventory.shapes
    tokens = work.micro_batch * work.seq_len
    yield "scores", shapes.num_heads * work.micro_batch * work.seq_len**2
    yield "logits", tokens * shapes.vocab_size
    yield "logits_shifted", work.micro_batch * (work.seq_len - 1) * shapes.vocab_size
    yield "inner", tokens * shapes.intermediate_size
    yield "hidden", tokens * shapes.hidden_size
    layer, tensor = inventory.largest_layer.numel, inventory.largest_tensor[1].numel
    yield "layer", layer
    yield "tensor", tensor
    if ranks > 1:
        yield "layer_slice", ceil_div(layer, ranks)
        yield "tensor_slice", ceil_div(tensor, ranks)

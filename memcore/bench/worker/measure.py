"""Measure one case: memory, time, which kernel ran, and whether the result is the plain variant's.

Worker processes only: imports torch and transformers.
"""

from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import monotonic
from typing import Any

import torch

from memcore.bench.case import ATTENTIONS, Case, Part, load_case
from memcore.bench.measurement import Figures, Seconds, Status
from memcore.bench.worker.attention import UnavailableError, kernel_that_ran
from memcore.bench.worker.device import Clock, Peak, operations_of, peak_of, synchronize
from memcore.bench.worker.subjects import Recompute, Subject, make_subject
from memcore.errors import UserError
from memcore.trace.replay import replay, timeline
from memcore.trace.request import Request
from memcore.trace.tape import GRADIENTS, Tape
from memcore.trace.task import kept_tape

# A step is timed until one of these is reached, but at least twice.
_MOST_REPEATS, _LEAST_REPEATS, _MOST_SECONDS = 7, 3, 1.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a step computes: its loss, the sum of its summands' sizes, and the gradient of each leaf that has one."""

    loss: float
    scale: float
    gradients: list[torch.Tensor | None]


# The plain variant's answer to what was measured last: variants of one slice come one after the other.
_plain: dict[str, _Answer | None] = {}


def measure_task(payload: dict[str, Any]) -> dict[str, Any]:
    """The worker's task: a case's data in; status, reason and figures out."""
    case = load_case(payload["case"])
    try:
        figures = _measure(case)
    except UnavailableError as unavailable:
        return {"status": Status.UNAVAILABLE.value, "reason": str(unavailable), "figures": None}
    return {"status": Status.DONE.value, "reason": "", "figures": asdict(figures)}


def _measure(case: Case) -> Figures:
    plain = _plain_answer(case)
    recompute = Recompute(Clock(case.device))
    subject = make_subject(case, recompute)
    with subject.running():
        answer = _answer(subject)
        differences = (None, None) if plain is None else _differences(plain, answer)
        if _is_plain(case):
            _plain[_slice_key(case)] = answer
        del plain, answer
        kept = _peak(subject)
        kernel = _kernel(subject, kept)
        with _gradients_dropped(subject):
            dropped = _peak(subject) if subject.parameters else kept
        forward, backward, again = _times(subject)
    traced = _traced(case)
    return Figures(
        peak_bytes=dropped.most,
        with_gradients_bytes=kept.most,
        reserved_bytes=kept.reserved,
        kept_bytes=kept.kept,
        forward=forward,
        backward=backward,
        recompute=again,
        kernel=kernel,
        loss_difference=differences[0],
        gradient_difference=differences[1],
        traced_bytes=traced and traced[0],
        traced_with_gradients_bytes=traced and traced[1],
    )


# One step


def _step(subject: Subject, mark: Callable[[], None]) -> torch.Tensor:
    output = subject.forward()
    mark()
    gradient = subject.gradient(output)
    subject.recompute.on = True
    torch.autograd.backward(output, gradient)
    return output


def _forget(subject: Subject) -> None:
    for leaf in subject.leaves:
        leaf.grad = None
    subject.recompute.reset()


def _peak(subject: Subject) -> Peak:
    _forget(subject)
    found = peak_of(subject.case.device, lambda mark: _discard(_step(subject, mark)))
    _forget(subject)
    return found


def _discard(_output: torch.Tensor) -> None:
    """A step's output is of no use to who measures it."""


@contextmanager
def _gradients_dropped(subject: Subject) -> Any:
    """Each parameter's gradient is given back as soon as it is complete."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooked: list[Any] = list(subject.parameters)
    handles = [parameter.register_post_accumulate_grad_hook(drop) for parameter in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kernel(subject: Subject, seen: Peak) -> str:
    """The attention operation that ran; none in a stack of projections."""
    if subject.case.part is Part.PROJECTIONS:
        return ""
    # Only the CPU's memory is read with the profiler.
    device, run = subject.case.device, lambda mark: _discard(_step(subject, mark))
    operations = seen.operations or operations_of(device, run)
    _forget(subject)
    return kernel_that_ran(subject.case.attention, operations)


# Time


def _times(subject: Subject) -> tuple[Seconds, Seconds, Seconds | None]:
    """Forward, backward, and the forwards within it. The steps before have warmed everything up."""
    clock = Clock(subject.case.device)
    forward: list[float] = []
    backward: list[float] = []
    again: list[float] = []
    begun_s = monotonic()
    while len(forward) < _MOST_REPEATS and (len(forward) < _LEAST_REPEATS or monotonic() - begun_s < _MOST_SECONDS):
        _forget(subject)
        synchronize(subject.case.device)
        between: list[Any] = []
        begin = clock.now()
        _step(subject, lambda between=between: between.append(clock.now()))  # type: ignore[misc]
        end = clock.now()
        synchronize(subject.case.device)
        forward.append(clock.seconds(begin, between[0]))
        backward.append(clock.seconds(between[0], end))
        if (seconds := subject.recompute.seconds()) is not None:
            again.append(seconds)
    _forget(subject)
    return _seconds(forward), _seconds(backward), _seconds(again) if again else None


def _seconds(times: list[float]) -> Seconds:
    return Seconds(median=median(times), least=min(times), most=max(times), repeats=len(times))


# The plain variant


def _is_plain(case: Case) -> bool:
    return case == _plain_of(case)


def _plain_of(case: Case) -> Case:
    attention = case.attention if case.part is Part.PROJECTIONS else "plain"
    return replace(case, attention=attention, checkpointing="none")


def _slice_key(case: Case) -> str:
    return _plain_of(case).key


def _plain_answer(case: Case) -> _Answer | None:
    """What the plain variant of a case computes; None where it cannot run, or is the case itself."""
    if _is_plain(case):
        _plain.clear()
        return None
    key = _slice_key(case)
    if key not in _plain:
        _plain.clear()
        subject = make_subject(_plain_of(case), Recompute(Clock(case.device)))
        try:
            with subject.running():
                _plain[key] = _answer(subject)
        except (UnavailableError, MemoryError, RuntimeError):  # most likely for want of memory
            _plain[key] = None
    return _plain[key]


def _answer(subject: Subject) -> _Answer:
    """One step's loss and gradients. It warms up what is made only once."""
    output = _step(subject, lambda: None).detach()
    assert subject.target is not None
    products = output.double() * subject.target.double()
    gradients = [None if leaf.grad is None else leaf.grad.detach() for leaf in subject.leaves]
    _forget(subject)
    return _Answer(float(products.sum()), float(products.abs().sum()), gradients)


def _differences(plain: _Answer, other: _Answer) -> tuple[float, float]:
    """Relative differences: of the loss, to the sum of its summands' sizes; of all gradients, as one vector."""
    whole = apart = 0.0
    for one, two in zip(plain.gradients, other.gradients, strict=True):
        if one is not None and two is not None:
            whole += float(one.double().square().sum())
            apart += float((one.double() - two.double()).square().sum())
    return abs(other.loss - plain.loss) / plain.scale, (apart / whole) ** 0.5


# The trace


def _traced(case: Case) -> tuple[int, int] | None:
    """What the trace says of the case's peak, without and with gradients; None where there is no trace of it."""
    if case.part is not Part.LAYERS or case.device not in ("cpu", "cuda"):
        return None
    assert case.config is not None
    request = Request(
        config=deepcopy(dict(case.config)),
        micro_batch=case.micro_batch,
        seq_len=case.seq_len,
        dtype=case.dtype,
        attention=ATTENTIONS[case.attention],
        checkpointing=case.checkpointing,
        loss="none",
        kernels=case.device,
    )
    try:
        tape = kept_tape(request)
    except UserError:
        return None
    if tape.attention != request.attention:
        return None
    return _peak_with_gradients_dropped(tape), max(replay(tape).with_gradients)


def _peak_with_gradients_dropped(tape: Tape) -> int:
    """The peak of a traced step where each gradient is given back once complete: after the next taking, since a
    product's backward takes its weight's gradient before its input's."""
    level = most = new_gradients = 0
    for _moment, category, _module, change in timeline(tape):
        if category == GRADIENTS:
            new_gradients += max(change, 0)
            most = max(most, level + new_gradients)
            continue
        level += change
        most = max(most, level + new_gradients)
        if change > 0:
            new_gradients = 0
    return most

"""What a recorder sees of a few operations, and the tape of it.

Run: pytest tests/trace/test_recorder.py
"""

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcore.trace.kernels import cpu_hidden
from memcore.trace.recorder import Recorder
from memcore.trace.sorting import tape_of
from memcore.trace.tape import Tape


def taped(run: Callable[[Recorder], object]) -> Tape:
    recorder = Recorder([], cpu_hidden, {})
    with FakeTensorMode(), recorder.recording():
        kept = run(recorder)
    tape = tape_of(
        recorder.changes,
        recorder.gradients,
        len(recorder.changes),
        recorder.told,
        order=(),
        unit_sizes=(),
        traced_layers=0,
        attention="",
        trained_bytes=4,
        positions=0,
        has_table=False,
        text_alone=False,
        optimizer_step_bytes=None,
        versions="",
    )
    del kept
    return tape


def test_a_moment_of_no_bytes_takes_nothing():
    """FSDP2 in FP32 copies nothing where the CPU copies for others; and the CPU casts no values of an empty operand."""

    def run(recorder: Recorder) -> object:
        recorder.for_a_moment(0)
        mixed = torch.zeros(0, dtype=torch.bfloat16) * torch.zeros(0)
        return mixed, torch.zeros(100)

    assert taped(run).changes == (400,)


def test_operands_of_two_dtypes_are_copied_for_a_moment():
    """100 values of 2 bytes become 4 bytes each on a CPU: 400 bytes, beside the result's 400."""

    def run(recorder: Recorder) -> object:
        low, high = torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100)
        return low, high, low * high

    tape = taped(run)
    assert sorted(tape.changes) == [-400, 200, 400, 400, 400]
    assert sum(tape.changes) == 1000


def test_a_storage_that_took_anothers_place_is_given_back_as_the_first():
    """A sum that autograd makes in place, then emptied as a sharded parameter's storage is: each storage on a tape is
    taken before it is given back."""

    def run(recorder: Recorder) -> object:
        with torch.no_grad():
            one, other = torch.zeros(100), torch.zeros(100)
            total = one + other
            del one
            recorder.before_resize(total)
        return total, other

    tape = taped(run)
    given_back = [storage for storage, size in zip(tape.storages, tape.changes, strict=True) if size < 0]
    taken = [storage for storage, size in zip(tape.storages, tape.changes, strict=True) if size > 0]
    assert given_back == [taken[0]]
    assert sum(tape.changes) == 400

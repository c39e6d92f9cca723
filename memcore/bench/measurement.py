"""What was measured: the figures of one case on one device, or why there are none."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from memcore.bench.case import Case, dump_case
from memcore.jobs import JobResult, JobStatus


class Status(StrEnum):
    """How measuring a case ended. Unavailable: the device or the dtype has no such kernel."""

    DONE = "done"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CANCELLED = "cancelled"


# How these end says something of the case; how the others end, of the day.
KEPT = (Status.DONE, Status.UNAVAILABLE, Status.OUT_OF_MEMORY, Status.TIMED_OUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """Where it was measured. `kind` is "cpu" or the accelerator's; `driver` its driver or runtime, if it has one;
    `total_bytes` of memory; `torch` and `transformers` are versions."""

    kind: str
    name: str
    driver: str
    total_bytes: int
    torch: str
    transformers: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """A time measured several times: median, smallest and largest."""

    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False)

    median: float
    least: float
    most: float
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one case gave. All bytes are beyond what was there before the step: weights and inputs.

    `peak_bytes`: the most at any instant of forward and backward, parameters' gradients left out once they are
    complete. `with_gradients_bytes`: the same with all of them kept, as a plain training loop does.
    `reserved_bytes`: what the allocator then held of the device, where it has such a figure. `kept_bytes`: alive
    after the forward. `recompute`: the forwards that run again within the backward. `kernel`: the attention
    operation that the profiler saw run. `loss_difference` and `gradient_difference`: against the plain variant,
    relative, None where that did not run. `traced_bytes` and `traced_with_gradients_bytes`: what the trace says of
    the first two, where there is one.
    """

    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False)

    peak_bytes: int
    with_gradients_bytes: int
    reserved_bytes: int | None
    kept_bytes: int
    forward: Seconds
    backward: Seconds
    recompute: Seconds | None
    kernel: str
    loss_difference: float | None
    gradient_difference: float | None
    traced_bytes: int | None
    traced_with_gradients_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A case, how measuring it ended, where and when, and the figures where there are any.

    `reason` is a sentence where there are none. `measured_at` is UTC, ISO 8601, to the second.
    """

    case: Case
    status: Status
    device: DeviceFacts
    measured_at: str
    reason: str = ""
    figures: Figures | None = None


def measurement_of(case: Case, result: JobResult, device: DeviceFacts, measured_at: str) -> Measurement:
    """What a job's result says of its case."""
    if result.status is not JobStatus.DONE or result.value is None:
        status = Status(result.status.value)
        return Measurement(case=case, status=status, reason=result.message, device=device, measured_at=measured_at)
    figures = result.value["figures"]
    return Measurement(
        case=case,
        status=Status(result.value["status"]),
        reason=result.value["reason"],
        figures=None if figures is None else load_figures(figures),
        device=device,
        measured_at=measured_at,
    )


def load_figures(data: object) -> Figures:
    """Figures from JSON data. Raises `ValueError` for data that is none."""
    return _FIGURES.validate_python(data)


def dump_measurement(measurement: Measurement) -> dict[str, Any]:
    """The measurement as JSON data."""
    return {**asdict(measurement), "case": dump_case(measurement.case), "status": measurement.status.value}


def load_measurement(data: object) -> Measurement:
    """The inverse of :func:`dump_measurement`. Raises `ValueError` for other data, which an export may be."""
    return _MEASUREMENT.validate_python(data)


_FIGURES = TypeAdapter(Figures)
_MEASUREMENT = TypeAdapter(Measurement)

"""How a job can end, and what a lane may use."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memcore.i18n import gettext as _
from memcore.units import GIB, MIB


class JobStatus(StrEnum):
    """How a job ended."""

    DONE = "done"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CANCELLED = "cancelled"
    BUSY = "busy"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """How a job ended, and what came of it.

    `value` is the task's answer, the caller's own copy, and None unless `status` is done.
    `message` is a sentence for the user in the caller's language, empty when done. When `status` is
    failed, `field` is the dotted path of the scenario's field at fault, or empty.
    `seconds` is how long the job ran in a worker: waiting does not count, and a repeated answer tells
    how long it took the first time. 0.0 for what never ran.
    """

    status: JobStatus
    value: dict[str, Any] | None = None
    message: str = ""
    field: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneLimits:
    """What a lane may use.

    `workers` processes at once; `queue` jobs waiting for one; `timeout_s` for a job that names no
    limit of its own, counted from when a worker takes it; `memory_bytes` of private memory per worker;
    `cache_entries` answers kept, of `cache_bytes` together; `reply_bytes` for one answer as JSON.

    Raises `ValueError` for a limit that leaves nothing to work with.
    """

    workers: int = 1
    queue: int = 16
    timeout_s: float = 60.0
    memory_bytes: int = 6 * GIB
    cache_entries: int = 256
    cache_bytes: int = 64 * MIB
    reply_bytes: int = 8 * MIB

    def __post_init__(self) -> None:
        check_limits(
            self,
            above_zero=("workers", "timeout_s", "memory_bytes", "reply_bytes"),
            zero_or_more=("queue", "cache_entries", "cache_bytes"),
        )


def check_limits(limits: object, *, above_zero: Sequence[str], zero_or_more: Sequence[str]) -> None:
    """Raise `ValueError` for a limit that leaves nothing to work with."""
    for name in above_zero:
        if not getattr(limits, name) > 0:
            raise ValueError(f"{name} is {getattr(limits, name)}; it must be above 0")
    for name in zero_or_more:
        if getattr(limits, name) < 0:
            raise ValueError(f"{name} is {getattr(limits, name)}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a flight ended, before it is put in words: the worker's reply line, or else a reason."""

    status: JobStatus
    reply: bytes = b""
    reason: str = ""
    seconds: float = 0.0
    worker_fit: bool = False


def in_words(outcome: Outcome, timeout_s: float, memory_bytes: int) -> JobResult:
    """The outcome in the caller's words: made in the caller's thread, which knows the language."""
    reply = json.loads(outcome.reply) if outcome.reply else {}
    return JobResult(
        status=outcome.status,
        value=reply.get("value"),
        message=_message(outcome.status, reply.get("message") or outcome.reason, timeout_s, memory_bytes),
        field=reply.get("field", ""),
        seconds=outcome.seconds,
    )


def _message(status: JobStatus, text: str, timeout_s: float, memory_bytes: int) -> str:
    match status:
        case JobStatus.DONE:
            return ""
        case JobStatus.FAILED:
            return text
        case JobStatus.CRASHED:
            return _("The calculation stopped unexpectedly ({reason}).").format(reason=text)
        case JobStatus.TIMED_OUT:
            return _("The calculation took longer than {seconds:g} s and was stopped.").format(seconds=timeout_s)
        case JobStatus.OUT_OF_MEMORY:
            sentence = _("The calculation needed more than {gib:.3g} GiB of memory and was stopped.")
            return sentence.format(gib=memory_bytes / GIB)
        case JobStatus.CANCELLED:
            return _("The calculation was cancelled.")
        case JobStatus.BUSY:
            return _("The server is busy with other calculations. Please try again in a moment.")

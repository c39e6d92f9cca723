"""A job of the heavy lane: cases one after the other, and how far they are."""

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from memcore.i18n import language
from memcore.jobs.process import encode_request
from memcore.jobs.results import JobResult, JobStatus, Outcome, check_limits, in_words
from memcore.units import GIB, MIB

_MOST_OF_A_CASE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyLimits:
    """What the heavy lane may use.

    `queue` jobs waiting for each device; `case_timeout_s` for one case, the start of its worker included;
    `job_timeout_s` for all cases of a job; `memory_bytes` of private memory per worker; `heartbeat_s`: a job that
    nobody has looked at for so long is dropped (a browser looks once a minute for a tab in the background);
    `reply_bytes` for one case's answer as JSON.

    Raises `ValueError` for a limit that leaves nothing to work with.
    """

    queue: int = 8
    case_timeout_s: float = 60.0
    job_timeout_s: float = 300.0
    memory_bytes: int = 8 * GIB
    heartbeat_s: float = 90.0
    reply_bytes: int = MIB

    def __post_init__(self) -> None:
        above_zero = ("case_timeout_s", "job_timeout_s", "memory_bytes", "heartbeat_s", "reply_bytes")
        check_limits(self, above_zero=above_zero, zero_or_more=("queue",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One case of a job: a task of the worker, its payload, how long it will take, about, and how long it may, where
    that is not the lane's limit for a case."""

    task: str
    payload: dict[str, Any]
    estimate_s: float = 5.0
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a job is.

    `place`: jobs before it, 0 when it runs or has ended. `estimate_s` until it ends, about, those before it
    included. `results` of the cases that ended, in order. `status` is None until the job has ended: done when
    every case ran, however each of them ended; else cancelled or timed_out. `has_begun`: its first case has the device
    to itself. `waits_for_others`: it is the first here, but another program measures on the device. `case_share`: how
    much of the running case is done, about, from 0 to 1. `complaint`: the sentence of a result that could not be passed
    on.
    """

    place: int
    estimate_s: float
    num_steps: int
    results: tuple[JobResult, ...]
    status: JobStatus | None
    has_begun: bool
    waits_for_others: bool
    case_share: float
    complaint: str

    @property
    def share(self) -> float:
        """How much of the job is done, about, from 0 to 1; the running case counts by its share."""
        done = len(self.results) + self.case_share
        return min(done / self.num_steps, 1.0) if self.num_steps else 1.0


OnResult = Callable[[int, JobResult], None]


class HeavyJob:
    """A job on its way. Its owner looks at it; the lane moves it on. Safe to use from any thread."""

    def __init__(self, steps: Sequence[Step], on_result: OnResult | None, limits: HeavyLimits) -> None:
        self._context = copy_context()  # results are put in words in the language of who asked
        self.requests = [encode_request(task=each.task, payload=each.payload, language=language()) for each in steps]
        self._estimates_s = [each.estimate_s for each in steps]
        self._timeouts_s = [each.timeout_s or limits.case_timeout_s for each in steps]
        # Cases with a limit of their own come on top of what all the others may take together.
        self._whole_timeout_s = limits.job_timeout_s + sum(each.timeout_s or 0.0 for each in steps)
        self._on_result = on_result
        self._limits = limits
        self._results: list[JobResult] = []
        self._complaint = ""
        self.waits_for_others = False
        self._seen_s = time.monotonic()
        self._begun_s: float | None = None
        self._case_begun_s = 0.0
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._status: JobStatus | None = None

    # The owner's side

    def cancel(self) -> None:
        """Stop soon, waiting or running."""
        self._cancelled.set()

    def seen(self) -> None:
        """Its owner is still there."""
        self._seen_s = time.monotonic()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long; whether it has ended. Counts as being seen."""
        self.seen()
        return self._ended.wait(timeout_s)

    def progress(self, place: int, before_s: float) -> Progress:
        """How far it is, behind `place` jobs that need about `before_s`. The lane asks; owners ask the lane."""
        results = tuple(self._results)
        return Progress(
            place=place,
            estimate_s=before_s + self.estimate_s(),
            num_steps=len(self.requests),
            results=results,
            status=self._status,
            has_begun=self._begun_s is not None,
            waits_for_others=self.waits_for_others,
            case_share=self._case_share(len(results)),
            complaint=self._complaint,
        )

    # The lane's side

    def estimate_s(self) -> float:
        """Seconds until it ends once it runs, about: what is left, corrected by what the cases so far have taken."""
        if self._ended.is_set():
            return 0.0
        done = len(self._results)
        left = self._pace(done) * sum(self._estimates_s[done:])
        return max(left - self.case_seconds(), 0.0) if self._begun_s is not None else left

    def _pace(self, done: int) -> float:
        """What the first cases have taken over what was expected."""
        expected = sum(self._estimates_s[:done])
        return sum(result.seconds for result in self._results[:done]) / expected if expected else 1.0

    def _case_share(self, done: int) -> float:
        """How much of the case that runs is done; never all of it, whatever was expected."""
        if self._begun_s is None or done == len(self._estimates_s):
            return 0.0
        expected = self._pace(done) * self._estimates_s[done]
        return min(self.case_seconds() / expected, _MOST_OF_A_CASE) if expected else 0.0

    def verdict(self) -> JobStatus | None:
        """Why it must not go on; None while it may."""
        if self._cancelled.is_set() or time.monotonic() - self._seen_s > self._limits.heartbeat_s:
            return JobStatus.CANCELLED
        if self._begun_s is not None and time.monotonic() - self._begun_s > self._whole_timeout_s:
            return JobStatus.TIMED_OUT
        return None

    def case_verdict(self) -> JobStatus | None:
        """Why the running case must not go on."""
        if (status := self.verdict()) is not None:
            return status
        return JobStatus.TIMED_OUT if self.case_seconds() > self._timeouts_s[len(self._results)] else None

    def begin_case(self) -> None:
        """The next case is about to run."""
        self._case_begun_s = time.monotonic()
        if self._begun_s is None:
            self._begun_s = self._case_begun_s

    def case_seconds(self) -> float:
        """How long the running case has run."""
        return time.monotonic() - self._case_begun_s

    def end_case(self, outcome: Outcome) -> None:
        """Keep how a case ended, and pass it on."""
        result = self._context.run(in_words, outcome, self._timeout_s(), self._limits.memory_bytes)
        if self._on_result is not None and outcome.status is not JobStatus.CANCELLED:
            try:
                self._context.run(self._on_result, len(self._results), result)
            except Exception as error:  # whatever it was, the measuring goes on
                self._complaint = str(error) or type(error).__name__
        self._results.append(result)

    def lost_its_last_case(self) -> bool:
        """Whether the job was stopped in its last case."""
        return bool(self._results) and self._results[-1].status is JobStatus.CANCELLED

    def _timeout_s(self) -> float:
        whole = self.verdict() is JobStatus.TIMED_OUT
        return self._whole_timeout_s if whole else self._timeouts_s[len(self._results)]

    def end(self, status: JobStatus) -> None:
        """Let its owner go."""
        if not self._ended.is_set():
            self._status = status
            self._ended.set()

"""The runner: takes jobs from every session's thread and has them done in warm worker processes.

Not multiprocessing: under Streamlit `__main__` is the user's script, and a spawned child would run it
again. A worker is ``python -m memcore.jobs.worker``; JSON lines go in and come out. Its session is its
own, so that one signal ends it with everything it started. POSIX only.

Not guaranteed: a task is not fenced in. It can reach the network and the files that the server can, and
a process it forks (rather than starts anew) can delay the notice of its crash until the time limit.
"""

import atexit
import hashlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memcore.errors import UserError
from memcore.i18n import language
from memcore.jobs.kept import KeptOutcomes
from memcore.jobs.process import POLL_S, Seat, encode_request
from memcore.jobs.results import JobResult, JobStatus, LaneLimits, Outcome, in_words

# Idle work that is remembered; what was prepared last comes first.
IDLE_QUEUE = 256
# How long `close` waits for each worker to be gone.
_CLOSE_S = 5.0


class LightLane:
    """Warm worker processes for short jobs, shared by all sessions and safe to call from any thread.

    `extra_tasks` adds to :data:`memcore.jobs.tasks.TASKS`, name to "module:function". `quiet` throws away
    what workers write to stderr, such as the traceback of a crashed task. Nothing starts before the first
    job; what has started ends with :meth:`close`, with the interpreter, or, should the server be killed,
    by itself.
    """

    def __init__(
        self, limits: LaneLimits | None = None, *, extra_tasks: Mapping[str, str] | None = None, quiet: bool = False
    ) -> None:
        self._limits = limits or LaneLimits()
        self._new_seat = partial(
            Seat,
            memory_bytes=self._limits.memory_bytes,
            reply_bytes=self._limits.reply_bytes,
            tasks=extra_tasks,
            quiet=quiet,
        )
        self._changed = threading.Condition()  # guards everything below
        self._threads: list[threading.Thread] = []  # one per worker process, up to the pool's size
        self._waiting: deque[_Flight] = deque()
        self._idle_work: deque[_Flight] = deque()  # for when nobody waits
        self._flights: dict[str, _Flight] = {}  # waiting or running, by key: whom a new caller can join
        self._num_running = 0
        self._kept = KeptOutcomes(self._limits.cache_entries, self._limits.cache_bytes)
        self._closed = False
        atexit.register(self.close)

    def run(
        self,
        task: str,
        payload: dict[str, Any],
        *,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
    ) -> JobResult:
        """Have a task done and wait for its result. However the job ends, that is a result.

        Equal questions in one language are worked out once: an answer that is kept is given again, and
        who asks while the job waits or runs gets its result too. It then goes on until the last of its
        callers has cancelled, under the longest of their time limits.

        `timeout_s` limits the job from when a worker takes it, the start of the worker included, not
        the wait for one. Setting `cancel` returns soon from either.

        Raises `TypeError` or `ValueError` for a payload that is not JSON.
        """
        request = encode_request(task=task, payload=payload, language=language())
        limit_s = self._limits.timeout_s if timeout_s is None else timeout_s
        if cancel is not None and cancel.is_set():
            return self._result(Outcome(JobStatus.CANCELLED), limit_s)
        taken = self._take(request, limit_s)
        if isinstance(taken, Outcome):
            return self._result(taken, limit_s)
        return self._result(self._wait(taken, cancel), taken.timeout_s)

    def ask(self, task: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Have a task done and return its answer. Raises UserError with the sentence, and the field at fault if it is
        known, where the job ends in any other way."""
        result = self.run(task, payload)
        if result.status is not JobStatus.DONE or result.value is None:
            raise UserError(result.message, result.field)
        return result.value

    def warm(self, imports: Sequence[str] = ()) -> None:
        """Start a worker in the background and have it import these modules, for a quick first job.

        Returns at once. A module that cannot be imported is left to the job that needs it.
        """
        request = encode_request(imports=list(imports), language=language())
        self._take(request, self._limits.timeout_s, detached=True)

    def prepare(self, jobs: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Have tasks done, in order, when nobody waits for anything else: for what they leave in the worker, since
        their answers are not given. Ahead of what was prepared before. Returns at once."""
        flights = []
        for task, payload in jobs:
            request = encode_request(task=task, payload=payload, language=language())
            flight = _Flight(hashlib.sha256(request).hexdigest(), request, detached=True)
            flight.timeout_s = self._limits.timeout_s
            flights.append(flight)
        with self._changed:
            if self._closed:
                return
            self._idle_work.extendleft(reversed(flights))
            while len(self._idle_work) > IDLE_QUEUE:
                self._idle_work.pop()
            self._have_a_thread()
            self._changed.notify()

    def close(self) -> None:
        """End all workers. What waits or runs is cancelled, and so is every later job."""
        with self._changed:
            self._closed = True
            while self._waiting:
                self._settle(self._waiting.popleft(), Outcome(JobStatus.CANCELLED))
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(_CLOSE_S)
        atexit.unregister(self.close)

    # The caller's side

    def _take(self, request: bytes, timeout_s: float, *, detached: bool = False) -> "_Flight | Outcome":
        """The flight that will answer a request, joined or new, or the outcome that is known already."""
        key = hashlib.sha256(request).hexdigest()
        with self._changed:
            if self._closed:
                return Outcome(JobStatus.CANCELLED)
            if (kept := self._kept.get(key)) is not None:
                return kept
            flight = self._flights.get(key)
            if flight is None:
                if self._num_running + len(self._waiting) >= self._limits.workers + self._limits.queue:
                    return Outcome(JobStatus.BUSY)
                self._have_a_thread()
                flight = self._flights[key] = _Flight(key, request, detached)
                self._waiting.append(flight)
                self._changed.notify()
            flight.num_callers += 1
            flight.timeout_s = max(flight.timeout_s, timeout_s)
            return flight

    def _have_a_thread(self) -> None:
        """Start one more thread if all have work and the pool allows. Before a flight counts on it."""
        num_resting = len(self._threads) - self._num_running
        if len(self._waiting) >= num_resting and len(self._threads) < self._limits.workers:
            thread = threading.Thread(target=self._serve, name="memcore-light-lane", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _wait(self, flight: "_Flight", cancel: threading.Event | None) -> "Outcome":
        try:
            while not flight.landed.wait(None if cancel is None else POLL_S):
                if cancel is not None and cancel.is_set():
                    return Outcome(JobStatus.CANCELLED, seconds=flight.seconds())
        finally:
            self._leave(flight)
        assert flight.outcome is not None
        return flight.outcome

    def _leave(self, flight: "_Flight") -> None:
        """One caller goes; after the last, nobody wants the flight and nobody can join it any more."""
        with self._changed:
            flight.num_callers -= 1
            if flight.num_callers or flight.landed.is_set():
                return
            flight.abandoned = True
            self._flights.pop(flight.key, None)
            if flight in self._waiting:
                self._waiting.remove(flight)

    def _result(self, outcome: Outcome, timeout_s: float) -> JobResult:
        return in_words(outcome, timeout_s, self._limits.memory_bytes)

    # The threads' side: each owns one worker process

    def _serve(self) -> None:
        seat = self._new_seat()
        try:
            while (flight := self._next_flight()) is not None:
                outcome = Outcome(JobStatus.CRASHED)
                try:
                    seat.leave_if_ended()
                    outcome = self._fly(flight, seat)
                finally:
                    with self._changed:
                        self._num_running -= 1
                        self._settle(flight, outcome)
        finally:
            seat.leave()

    def _next_flight(self) -> "_Flight | None":
        """Wait for a flight to run; None when the lane closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._idle_work)
            if self._closed:
                return None
            self._num_running += 1
            return self._waiting.popleft() if self._waiting else self._idle_work.popleft()

    def _fly(self, flight: "_Flight", seat: Seat) -> "Outcome":
        """Run a flight's job in a worker."""
        flight.started_s = time.monotonic()

        def verdict() -> JobStatus | None:
            if self._closed or flight.abandoned:
                return JobStatus.CANCELLED
            return JobStatus.TIMED_OUT if flight.seconds() > flight.timeout_s else None

        return seat.outcome(flight.request, verdict, flight.seconds)

    def _settle(self, flight: "_Flight", outcome: "Outcome") -> None:
        """Let a flight's callers go with its outcome. Called with the lock held."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        if outcome.status is JobStatus.DONE and not flight.detached:
            self._kept.put(flight.key, outcome)
        flight.outcome = outcome
        flight.landed.set()


@dataclass(eq=False, slots=True)
class _Flight:
    """A job on its way, with all the callers who wait for it."""

    key: str
    request: bytes
    detached: bool  # runs without callers, for its effect on the worker: its answer is not kept
    timeout_s: float = 0.0
    num_callers: int = 0
    abandoned: bool = False
    started_s: float | None = None
    outcome: Outcome | None = None
    landed: threading.Event = field(default_factory=threading.Event)

    def seconds(self) -> float:
        """How long the job has been running."""
        return 0.0 if self.started_s is None else time.monotonic() - self.started_s

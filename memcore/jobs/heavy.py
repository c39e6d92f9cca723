"""The heavy lane: one job per device at a time, each in a worker process of its own, and one queue for the server.

For what takes seconds to minutes and must not be disturbed, such as measuring. A job is cases one after the
other; a case that crashes, runs out of memory or time, or is killed has that for its result, and the next case
gets a new worker. The job's worker ends with it, which frees the device.
"""

import atexit
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import sleep

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.jobs.device_lock import device_lock
from memcore.jobs.heavy_job import HeavyJob, HeavyLimits, OnResult, Progress, Step
from memcore.jobs.process import POLL_S, Seat
from memcore.jobs.results import JobStatus

# How long `close` waits for each device's worker to be gone.
_CLOSE_S = 5.0


class HeavyLane:
    """Jobs of all sessions, first come, first served on each device. Safe to call from any thread.

    `locks`: the folder through which programs of this machine wait for one another's jobs; None waits for nobody.
    `extra_tasks` adds to :data:`memcore.jobs.tasks.TASKS`. `quiet` throws away what workers write to stderr.
    """

    def __init__(
        self,
        limits: HeavyLimits | None = None,
        *,
        locks: Path | None = None,
        extra_tasks: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        self.limits = limits or HeavyLimits()
        self._locks = locks
        self._new_seat = partial(
            Seat,
            memory_bytes=self.limits.memory_bytes,
            reply_bytes=self.limits.reply_bytes,
            tasks=extra_tasks,
            quiet=quiet,
        )
        self._changed = threading.Condition()  # guards everything below
        self._waiting: dict[str, deque[HeavyJob]] = {}
        self._running: dict[str, HeavyJob | None] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._closed = False
        atexit.register(self.close)

    def submit(self, steps: Sequence[Step], *, device: str, on_result: OnResult | None = None) -> HeavyJob:
        """Put a job in the queue of a device. `on_result` is called with each case's place and result as it ends.

        The job is dropped when nobody has looked at it for the limit's `heartbeat_s`.
        Raises UserError where the queue is full, `TypeError` or `ValueError` for a payload that is not JSON.
        """
        job = HeavyJob(steps, on_result, self.limits)
        with self._changed:
            waiting = self._waiting.setdefault(device, deque())
            self._drop_unwanted(waiting)
            if self._closed or len(waiting) >= self.limits.queue + (self._running.get(device) is None):
                raise UserError(_("The server is busy with other measurements. Please try again in a moment."))
            waiting.append(job)
            if device not in self._threads:
                self._threads[device] = threading.Thread(
                    target=self._serve, args=(device,), name=f"memcore-heavy-{device}", daemon=True
                )
                self._threads[device].start()
            self._changed.notify_all()
        return job

    def look(self, job: HeavyJob) -> Progress:
        """How far a job is. Its owner looks now and then, or it is dropped."""
        job.seen()
        with self._changed:
            for device, waiting in self._waiting.items():
                if job in waiting:
                    self._drop_unwanted(waiting)
                    running = self._running.get(device)
                    before = [running] if running is not None else []
                    before += [other for other in waiting if waiting.index(other) < waiting.index(job)]
                    return job.progress(len(before), sum(each.estimate_s() for each in before))
        return job.progress(0, 0.0)

    def close(self) -> None:
        """End all workers. What waits or runs is cancelled, and later jobs are refused."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting.values():
                while waiting:
                    waiting.popleft().end(JobStatus.CANCELLED)
            for running in self._running.values():
                if running is not None:
                    running.cancel()
            self._changed.notify_all()
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(_CLOSE_S)
        atexit.unregister(self.close)

    def _drop_unwanted(self, waiting: deque[HeavyJob]) -> None:
        """End waiting jobs that were cancelled, or that nobody looks at any more. Called with the lock held."""
        for job in [job for job in waiting if job.verdict() is not None]:
            waiting.remove(job)
            job.end(JobStatus.CANCELLED)

    # The threads' side: each owns one device

    def _serve(self, device: str) -> None:
        while (job := self._next_job(device)) is not None:
            status = JobStatus.CRASHED
            try:
                status = self._alone(job, device)
            finally:
                with self._changed:
                    self._running[device] = None
                job.end(status)

    def _next_job(self, device: str) -> HeavyJob | None:
        """Wait for a job to run; None when the lane closes."""
        with self._changed:
            waiting = self._waiting[device]
            while not self._closed:
                self._drop_unwanted(waiting)
                if waiting:
                    self._running[device] = waiting.popleft()
                    return self._running[device]
                self._changed.wait()
            return None

    def _alone(self, job: HeavyJob, device: str) -> JobStatus:
        """Run a job while no other program measures on its device; how it ended."""
        with device_lock(self._locks, device) as lock:
            while not lock.take():
                job.waits_for_others = True
                if (status := job.verdict()) is not None:
                    return status
                sleep(POLL_S)
            job.waits_for_others = False
            return self._work(job)

    def _work(self, job: HeavyJob) -> JobStatus:
        """Run a job's cases; how it ended."""
        seat = self._new_seat()
        try:
            for request in job.requests:
                if (status := job.verdict()) is not None:
                    return status
                job.begin_case()
                job.end_case(seat.outcome(request, job.case_verdict, job.case_seconds))
            return JobStatus.CANCELLED if job.lost_its_last_case() else JobStatus.DONE
        finally:
            with suppress(OSError):
                seat.leave()


def finish(lane: HeavyLane, job: HeavyJob) -> Progress:
    """Wait for a job's end, as a program does that has nothing else to show."""
    while not job.wait(POLL_S):
        pass
    return lane.look(job)

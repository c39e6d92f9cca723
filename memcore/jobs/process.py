"""One worker process, as the server sees it: ask, wait, end."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from memcore.jobs.results import JobStatus, Outcome
from memcore.units import MIB

# How late, at most, a running job notices that it was cancelled or is out of time.
POLL_S = 0.05

# A worker's report of a failure, for which there is room however small the limit on answers is.
_REPORT_BYTES = 64 * 2**10

# The worker finds the package, and tests their tasks, from here, wherever the server was started.
_ROOT = Path(__file__).resolve().parents[2]


class StoppedError(Exception):
    """A worker did not come to reply, for this reason."""

    def __init__(self, status: JobStatus, reason: str = "") -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class Worker:
    """The server's end of one worker process. One thread uses it."""

    def __init__(self, start_text: str, reply_bytes: int, *, quiet: bool) -> None:
        self._process = subprocess.Popen(  # noqa: S603 (our own module; no shell)
            [sys.executable, "-m", "memcore.jobs.worker", start_text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            bufsize=0,
            cwd=_ROOT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin_fd = self._process.stdin.fileno()
        self._stdout_fd = self._process.stdout.fileno()
        self._reply_bytes = reply_bytes + _REPORT_BYTES
        # A worker that reads nothing, stopped or still starting, must not hold up its time limit.
        os.set_blocking(self._stdin_fd, False)

    def is_idle(self) -> bool:
        """Whether it waits for a request. One that has ended since has its output end instead."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout_fd, selectors.EVENT_READ)
            return not selector.select(0)

    def ask(self, request: bytes, verdict: Callable[[], JobStatus | None]) -> bytes:
        """The reply line to a request line.

        Raises `StoppedError` with a status that `verdict` returned meanwhile, or because the worker
        ended. The worker is then of no more use.
        """
        unsent, reply = memoryview(request), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin_fd, selectors.EVENT_WRITE)
            selector.register(self._stdout_fd, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                ready = [key.fd for key, _events in selector.select(POLL_S)]
                if self._stdin_fd in ready:
                    unsent = unsent[self._send(unsent) :]
                    if not unsent:
                        selector.unregister(self._stdin_fd)
                if self._stdout_fd in ready:
                    reply += self._receive()
                    if len(reply) > self._reply_bytes:
                        raise StoppedError(JobStatus.CRASHED, "oversized reply")
                if not reply.endswith(b"\n") and (status := verdict()) is not None:
                    raise StoppedError(status)
        return bytes(reply)

    def _send(self, unsent: memoryview) -> int:
        try:
            return os.write(self._stdin_fd, unsent)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise StoppedError(JobStatus.CRASHED, self.end()) from None

    def _receive(self) -> bytes:
        chunk = os.read(self._stdout_fd, MIB)
        if not chunk:
            raise StoppedError(JobStatus.CRASHED, self.end())
        return chunk

    def end(self) -> str:
        """End the process and all that it started; what it ended with, such as "signal 9"."""
        process = self._process
        # Only while the process is not reaped is its group's number surely still its own.
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # what some systems say of a zombie
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if process.returncode < 0:
            return f"signal {-process.returncode}"
        return f"exit code {process.returncode}"


class Seat:
    """Where one worker sits: started when a request needs it, ended when it is of no more use. One thread uses it.

    `memory_bytes`, `reply_bytes` and `tasks` are what the worker is told (memcore.jobs.worker, WorkerStart). `quiet`
    throws away what it writes to stderr.
    """

    def __init__(self, *, memory_bytes: int, reply_bytes: int, tasks: Mapping[str, str] | None, quiet: bool) -> None:
        start = {"memory_bytes": memory_bytes, "reply_bytes": reply_bytes, "tasks": dict(tasks or {})}
        self._start_text = json.dumps(start)
        self._reply_bytes = reply_bytes
        self._quiet = quiet
        self._worker: Worker | None = None

    def outcome(
        self, request: bytes, verdict: Callable[[], JobStatus | None], seconds: Callable[[], float]
    ) -> Outcome:  # fmt: skip
        """How a request ended, whatever that was. `seconds` reads the job's clock."""
        outcome = Outcome(JobStatus.CRASHED)
        try:
            self._worker = self._worker or Worker(self._start_text, self._reply_bytes, quiet=self._quiet)
            outcome = _outcome_of(self._worker, request, verdict, seconds)
        except Exception as error:  # whatever it was, callers wait for an outcome
            outcome = Outcome(JobStatus.CRASHED, reason=type(error).__name__)
        finally:
            if not outcome.worker_fit:
                self.leave()
        return outcome

    def leave_if_ended(self) -> None:
        """Let go of a worker that has ended since its last request."""
        if self._worker is not None and not self._worker.is_idle():
            self.leave()

    def leave(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def _outcome_of(
    worker: Worker, request: bytes, verdict: Callable[[], JobStatus | None], seconds: Callable[[], float]
) -> Outcome:
    try:
        reply = worker.ask(request, verdict)
    except StoppedError as stopped:
        return Outcome(stopped.status, reason=stopped.reason, seconds=seconds())
    status = JobStatus(json.loads(reply)["status"])
    # After running out of memory a worker's heap is no place for the next job.
    worker_fit = status is not JobStatus.OUT_OF_MEMORY
    return Outcome(status, reply=reply, seconds=seconds(), worker_fit=worker_fit)


def encode_request(**request: object) -> bytes:
    """A request line. Equal requests have equal lines, so that the line identifies the job."""
    return json.dumps(request, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"

"""The worker process: one request per line on stdin, one reply per line on what was stdout.

Started as ``python -m memcore.jobs.worker START``, where START is the JSON text of the keywords of
:class:`WorkerStart`. It imports nothing heavy until a task does, keeps its imports between tasks, and
ends, with all the processes its tasks started, as soon as stdin ends: no server, no worker.
"""

import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from queue import SimpleQueue
from typing import Any, BinaryIO

from memcore.errors import UserError
from memcore.i18n import use_language
from memcore.jobs.results import JobStatus
from memcore.jobs.tasks import TASKS, load_task

_REASON_CHARS = 200
_SENTENCE_CHARS = 2000

# Allocators below Python report exhaustion as a RuntimeError or an OSError with one of these texts.
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc")


class ReplyTooLargeError(Exception):
    """A task's answer exceeds the lane's limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """What a worker is told once, when it starts.

    `memory_bytes` limits its private memory and `reply_bytes` one reply; `tasks` adds to
    :data:`memcore.jobs.tasks.TASKS`, name to "module:function".
    """

    memory_bytes: int
    reply_bytes: int
    tasks: Mapping[str, str]


def main(start: WorkerStart) -> None:
    """Answer requests until stdin ends. Never returns: the end of stdin ends the process."""
    faulthandler.enable()
    limit_resources(start.memory_bytes)
    requests, replies = take_pipes()
    waiting: SimpleQueue[bytes] = SimpleQueue()
    # A thread of its own, so that the end of stdin is noticed in the middle of a task too.
    threading.Thread(target=_read_requests, args=(requests, waiting), daemon=True).start()
    while True:
        replies.write(answer(waiting.get(), start))
        replies.flush()


def limit_resources(memory_bytes: int) -> None:
    """Cap this process's private memory, and write no core dumps.

    RLIMIT_DATA and not RLIMIT_AS: it counts private writable memory (heap, anonymous maps, thread
    stacks), not the many GiB of address space that a CUDA build only maps or reserves. It does not
    count shared memory. Where the system has no such limit, the worker runs without one and says so.
    """
    for kind, limit in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0)):
        _soft, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError) as error:
            print(f"memcore worker: limit not set: {error}", file=sys.stderr)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep private copies of stdin and stdout, and give tasks an empty stdin and stderr as stdout.

    At the level of file descriptors, so that a C library's output and a child process's cannot get
    between the replies either.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _read_requests(requests: BinaryIO, waiting: SimpleQueue[bytes]) -> None:
    try:
        for line in requests:
            waiting.put(line)
    finally:
        _leave()


def _leave() -> None:
    """End this process now, whatever its main thread does, and the processes its tasks started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def answer(line: bytes, start: WorkerStart) -> bytes:
    """The reply line to a request line: the task's value, or how it failed. Raises nothing."""
    try:
        value = _perform(json.loads(line), {**TASKS, **start.tasks})
        return _encode_value(value, start.reply_bytes)
    except UserError as error:
        return _encode(status=JobStatus.FAILED, message=str(error)[:_SENTENCE_CHARS], field=error.field)
    except BaseException as error:  # SystemExit too: a task's end is not the worker's
        if _is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # frees what the task held, to have room to reply
            print(f"memcore worker: {_first_line(error)}", file=sys.stderr)
            return _encode(status=JobStatus.OUT_OF_MEMORY)
        traceback.print_exc()
        return _encode(status=JobStatus.CRASHED, message=_first_line(error))


def _perform(request: dict[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    use_language(request["language"])
    if "imports" in request:
        for module in request["imports"]:
            import_module(module)
        return {}
    value = load_task(request["task"], table)(request["payload"])
    if not isinstance(value, dict):
        raise TypeError(f"a task returns a dict, not {type(value).__name__}")
    return value


def _encode_value(value: dict[str, Any], reply_bytes: int) -> bytes:
    reply = _encode(status=JobStatus.DONE, value=value)
    if len(reply) > reply_bytes:
        raise ReplyTooLargeError(f"{len(reply)} bytes, where {reply_bytes} are allowed")
    return reply


def _encode(**reply: object) -> bytes:
    return json.dumps(reply).encode("ascii") + b"\n"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(part in text for part in _OUT_OF_MEMORY_TEXTS)


def _first_line(error: BaseException) -> str:
    """The exception's class and first line, without the traceback that only the log shows."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")[:_REASON_CHARS]


if __name__ == "__main__":
    main(WorkerStart(**json.loads(sys.argv[1])))

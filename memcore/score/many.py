"""Many records, several at once, in their order: the work is that of the lane's workers, threads only wait for them."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import TypeVar

Result = TypeVar("Result")
# How often a caller hears how far it is, at the least.
_BETWEEN_S = 0.5


def many(
    work: Callable[[object, int], Result], records: Sequence[object], *, at_once: int, heard: Callable[[int], None]
) -> list[Result]:
    """What `work` makes of each record and its number. `heard` is told, now and then, how many are done."""
    pool = ThreadPoolExecutor(max_workers=at_once)
    try:
        # Sentences are in the language of who asked; a context is one thread's at a time.
        jobs = [
            pool.submit(copy_context().run, work, record, number) for number, record in enumerate(records, start=1)
        ]  # fmt: skip
        left = set(jobs)
        while left:
            _done, left = wait(left, timeout=_BETWEEN_S, return_when=FIRST_COMPLETED)
            heard(len(jobs) - len(left))
        return [job.result() for job in jobs]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

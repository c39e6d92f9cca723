"""Runs of one's own on their way to be scored, one after the other, in a thread of the server.

Tracing is done by the light lane's workers; the thread only waits for them and adds up.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from memcore.accuracy.scored import ScoredRun
from memcore.budget import Ask
from memcore.i18n import gettext as _
from memcore.score.rows import scored_run

# A file of more is for the command line.
MAX_OWN_RUNS = 1000
# As for measurements: a job that nobody has looked at for so long is dropped.
HEARTBEAT_S = 90.0
_WAIT_S = 0.2
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Complaint:
    """Why a record has no prediction, or could not be read, in one sentence."""

    run_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What came of the records so far: `rows` of those that could be read, their `records` by id, and what was wrong
    with the rest. `waits`: other runs are being scored on this server first. `estimate_s` until the end, about; None
    while that cannot be said."""

    done: int
    num_records: int
    rows: tuple[ScoredRun, ...]
    records: Mapping[str, Mapping[str, Any]]
    complaints: tuple[Complaint, ...]
    waits: bool
    ended: bool
    estimate_s: float | None


class RunningScores:
    """Records that are being scored. Their owner looks now and then, or they are dropped."""

    def __init__(self, records: Sequence[object], ask: Ask) -> None:
        self._records, self._ask = records, ask
        self._lock = threading.Lock()  # guards what follows
        self._rows: list[ScoredRun] = []
        self._kept: dict[str, Mapping[str, Any]] = {}
        self._complaints: list[Complaint] = []
        self._done = 0
        self._began_s: float | None = None
        self._looked_s = time.monotonic()
        self._stop = threading.Event()
        # Sentences are in the language of who asked.
        self._thread = threading.Thread(target=copy_context().run, args=(self._score,), daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop after the record that is being scored."""
        self._stop.set()

    def look(self) -> Scored:
        """How far it is."""
        with self._lock:
            self._looked_s = time.monotonic()
            return Scored(
                done=self._done,
                num_records=len(self._records),
                rows=tuple(self._rows),
                records=dict(self._kept),
                complaints=tuple(self._complaints),
                waits=self._began_s is None,
                ended=not self._thread.is_alive(),
                estimate_s=self._estimate_s(),
            )

    def _estimate_s(self) -> float | None:
        if self._began_s is None or not self._done:
            return None
        return (time.monotonic() - self._began_s) / self._done * (len(self._records) - self._done)

    def _unwanted(self) -> bool:
        with self._lock:
            return self._stop.is_set() or time.monotonic() - self._looked_s > HEARTBEAT_S

    def _score(self) -> None:
        while not _one_at_a_time.acquire(timeout=_WAIT_S):
            if self._unwanted():
                return
        try:
            with self._lock:
                self._began_s = time.monotonic()
            for number, record in enumerate(self._records, start=1):
                if self._unwanted():
                    return
                self._keep(record, number)
        finally:
            _one_at_a_time.release()

    def _keep(self, record: object, number: int) -> None:
        score, row = scored_run(record, number, self._ask)
        with self._lock:
            self._done = number
            reason = score.reason
            if row is not None and isinstance(record, Mapping):
                if row.run_id in self._kept:
                    reason = _("A run of this id came before; this one is left out.")
                else:
                    self._rows.append(row)
                    self._kept[row.run_id] = record
            if reason:
                self._complaints.append(Complaint(run_id=score.run_id, reason=reason))

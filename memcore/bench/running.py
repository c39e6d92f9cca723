"""A sweep on its way through the heavy lane: cases that are known come from the store, the rest is measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from memcore.bench.case import Case, dump_case
from memcore.bench.measurement import KEPT, DeviceFacts, Measurement, measurement_of
from memcore.bench.store import Store
from memcore.bench.sweeps import Sweep, estimate_s
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.jobs import HeavyJob, HeavyLane, JobResult, JobStatus, Progress, Step, finish
from memcore.settings import settings

# What the first case takes longer: its worker imports torch and transformers.
_START_S = 3.0


def measuring_lane() -> HeavyLane:
    """The lane that measures, with the limits of this process. Its lock is beside the store."""
    return HeavyLane(settings().heavy_lane, locks=settings().store_path.parent, quiet=True)


def find_device(lane: HeavyLane) -> DeviceFacts:
    """The device that measures here. Takes a few seconds. Raises UserError."""
    # A queue of its own: which device it is is what it asks.
    results = finish(lane, lane.submit([Step(task="device", payload={})], device="unknown")).results
    if not results or results[0].status is not JobStatus.DONE or results[0].value is None:
        reason = results[0].message if results else _("The calculation was cancelled.")
        raise UserError(_("The device that measures could not be found: {reason}").format(reason=reason))
    return DeviceFacts(**results[0].value)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """How far a sweep is. `measured` by the case's key, those from the store included; `running`: the case that
    runs now."""

    progress: Progress
    measured: Mapping[str, Measurement]
    running: Case | None


class RunningSweep:
    """A sweep that was started. Its owner looks at it now and then, or it is dropped."""

    def __init__(self, lane: HeavyLane, store: Store, sweep: Sweep, device: DeviceFacts, *, reuse: bool) -> None:
        """Start it. With `reuse`, cases that this device has measured before are not measured again.

        Raises UserError where the queue is full.
        """
        self.sweep = sweep
        self.device = device
        self._lane = lane
        self._store = store
        self._measured: Mapping[str, Measurement] = store.by_device(sweep.cases).get(device, {}) if reuse else {}
        self._cases = [case for case in sweep.cases if case.key not in self._measured]
        steps = [
            Step(
                task="measure",
                payload={"case": dump_case(case)},
                estimate_s=estimate_s(case) + (_START_S if place == 0 else 0),
            )
            for place, case in enumerate(self._cases)
        ]
        self._job: HeavyJob = lane.submit(steps, device=device.kind, on_result=self._keep)

    def _keep(self, index: int, result: JobResult) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        measurement = measurement_of(self._cases[index], result, self.device, now)
        # First here, then in the file: a file that is locked loses nothing that is on the screen.
        self._measured = {**self._measured, measurement.case.key: measurement}
        if measurement.status in KEPT:
            self._store.add([measurement])

    def cancel(self) -> None:
        """Stop it soon. What was measured stays."""
        self._job.cancel()

    def look(self) -> State:
        """How far it is."""
        progress = self._lane.look(self._job)
        done = len(progress.results)
        runs = progress.has_begun and progress.status is None and done < len(self._cases)
        return State(progress=progress, measured=self._measured, running=self._cases[done] if runs else None)

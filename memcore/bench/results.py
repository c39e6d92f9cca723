"""What is known of a sweep, by the device that measured it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memcore.bench.case import DEVICE_KINDS
from memcore.bench.measurement import DeviceFacts, Measurement
from memcore.bench.slices import make_slice
from memcore.bench.store import Store
from memcore.bench.sweeps import Sweep, SweepKind, plan
from memcore.budget import Evidence
from memcore.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A sweep as one device measured it; `measured` by the case's key, and not of every case."""

    sweep: Sweep
    device: DeviceFacts
    measured: Mapping[str, Measurement]

    @property
    def dates(self) -> tuple[str, str]:
        """The first and the last day on which it was measured."""
        days = sorted(each.measured_at[:10] for each in self.measured.values())
        return days[0], days[-1]

    def tried(self) -> list[Measurement]:
        """What came of each case that was tried, in the sweep's order."""
        return [self.measured[case.key] for case in self.sweep.cases if case.key in self.measured]


def known_results(store: Store, scenario: Scenario, evidence: Evidence, kind: SweepKind) -> list[Result]:
    """What the store has of a scenario's sweep, wherever it was measured; the newest first.

    Raises UserError for a scenario without layers, and where the store cannot be read.
    """
    sweeps = [plan(kind, make_slice(scenario, evidence, device)) for device in DEVICE_KINDS]
    found = store.by_device([case for sweep in sweeps for case in sweep.cases])
    planned = dict(zip(DEVICE_KINDS, sweeps, strict=True))
    return [
        Result(sweep=planned[device.kind], device=device, measured=measured)
        for device, measured in found.items()
        if device.kind in planned
    ]


def with_run(results: Sequence[Result], run: Result, scenario: Scenario, evidence: Evidence) -> list[Result]:
    """The results with those of a run, which may have cases that are not kept, if it was of this scenario's sweep."""
    if run.sweep != plan(run.sweep.kind, make_slice(scenario, evidence, run.device.kind)) or not run.measured:
        return list(results)
    own = next((each.measured for each in results if each.device == run.device), {})
    others = [each for each in results if each.device != run.device]
    return [Result(sweep=run.sweep, device=run.device, measured={**own, **run.measured}), *others]

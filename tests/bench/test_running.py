"""Sweeps through real workers into a real store. Run: pytest tests/bench/test_running.py"""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_bench import attention_case, layers_case, projections_case
from test_findings import sweep

from memcore.bench.case import Case
from memcore.bench.measurement import DeviceFacts, Measurement, Status
from memcore.bench.running import RunningSweep, State, find_device
from memcore.bench.store import Store
from memcore.bench.sweeps import SweepKind
from memcore.jobs import HeavyLane, HeavyLimits, JobStatus
from memcore.units import GIB

# Seconds long on any CPU, in little memory.
LONG = projections_case(num_layers=64, hidden_size=1024, seq_len=4096)
QUICK = attention_case(seq_len=128)
ALSO_QUICK = attention_case(seq_len=128, attention="flash")
LIMITS = HeavyLimits(memory_bytes=3 * GIB)


@pytest.fixture
def lane() -> Iterator[HeavyLane]:
    lane = HeavyLane(LIMITS, quiet=True)
    yield lane
    lane.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "measurements.sqlite", lock_s=0.2)


@pytest.fixture(scope="module")
def device() -> DeviceFacts:
    lane = HeavyLane(LIMITS, quiet=True)
    found = find_device(lane)
    lane.close()
    if found.kind != "cpu":
        pytest.skip("an accelerator is measured here, not the CPU")
    return found


def start(lane: HeavyLane, store: Store, device: DeviceFacts, *cases: Case, reuse: bool = False) -> RunningSweep:
    return RunningSweep(lane, store, sweep(SweepKind.FRONTIER, *cases), device, reuse=reuse)


def finished(running: RunningSweep) -> State:
    while (state := running.look()).progress.status is None:
        time.sleep(0.05)
    return state


def worker_pid() -> int:
    """The worker of this module's lane, known by its limit: other tests of this process may have theirs."""
    limit = f'"memory_bytes": {LIMITS.memory_bytes}'.encode()
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid() and limit in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except OSError:
                continue
        time.sleep(0.05)
    raise AssertionError("no worker was started")


def kept(store: Store, cases: list[Case]) -> dict[str, Measurement]:
    """What the store has of the cases, of whatever device."""
    return {key: each for found in store.by_device(cases).values() for key, each in found.items()}


def statuses(state: State, *cases: Case) -> list[Status]:
    return [state.measured[case.key].status for case in cases]


def test_a_sweep_is_measured_kept_and_known_the_next_time(lane, store, device):
    state = finished(start(lane, store, device, QUICK, ALSO_QUICK))
    assert state.progress.status is JobStatus.DONE
    assert statuses(state, QUICK, ALSO_QUICK) == [Status.DONE, Status.DONE]
    assert kept(store, [QUICK, ALSO_QUICK]) == state.measured
    again = finished(start(lane, store, device, QUICK, layers_case(), reuse=True))
    assert again.progress.num_steps == 1
    assert again.measured[QUICK.key] == state.measured[QUICK.key]
    assert statuses(again, layers_case()) == [Status.DONE]
    assert again.measured[QUICK.key].measured_at.startswith("20")


def test_progress_names_the_case_that_runs(lane, store, device):
    running = start(lane, store, device, QUICK, LONG)
    while len(running.look().progress.results) < 1:
        time.sleep(0.05)
    state = running.look()
    assert state.running == LONG
    assert state.progress.estimate_s > 1
    running.cancel()
    state = finished(running)
    assert state.progress.status is JobStatus.CANCELLED
    assert statuses(state, QUICK) == [Status.DONE]
    assert set(kept(store, [QUICK, LONG])) == {QUICK.key}


def test_sigkill_in_mid_case_loses_that_case_alone(lane, store, device):
    running = start(lane, store, device, QUICK, LONG, ALSO_QUICK)
    while len(running.look().progress.results) < 1:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(worker_pid(), signal.SIGKILL)
    state = finished(running)
    assert statuses(state, QUICK, LONG, ALSO_QUICK) == [Status.DONE, Status.CRASHED, Status.DONE]
    assert "signal 9" in state.measured[LONG.key].reason
    # That the worker was killed says nothing of the case.
    assert set(kept(store, [QUICK, LONG, ALSO_QUICK])) == {QUICK.key, ALSO_QUICK.key}


def test_out_of_memory_is_a_result_that_is_kept(lane, store, device):
    large = attention_case(seq_len=16_384)  # its scores are 4.3 GB, above the limit
    flash = attention_case(seq_len=16_384, attention="flash", num_heads=1, num_kv_heads=1)
    state = finished(start(lane, store, device, large, QUICK))
    assert statuses(state, large, QUICK) == [Status.OUT_OF_MEMORY, Status.DONE]
    assert kept(store, [large])[large.key].status is Status.OUT_OF_MEMORY
    state = finished(start(lane, store, device, flash))
    assert statuses(state, flash) == [Status.DONE]


def test_a_locked_store_loses_nothing_that_is_on_the_screen(lane, store, device, tmp_path):
    finished(start(lane, store, device, QUICK))
    with sqlite3.connect(tmp_path / "measurements.sqlite", isolation_level=None) as other:
        other.execute("begin exclusive")
        state = finished(start(lane, store, device, ALSO_QUICK, QUICK))
        other.execute("rollback")
    assert statuses(state, ALSO_QUICK, QUICK) == [Status.DONE, Status.DONE]
    assert "in use by another program" in state.progress.complaint
    state = finished(start(lane, store, device, ALSO_QUICK))
    assert set(kept(store, [ALSO_QUICK])) == {ALSO_QUICK.key}


def test_what_another_device_measured_later_hides_nothing(lane, store, device):
    state = finished(start(lane, store, device, QUICK))
    later = replace(state.measured[QUICK.key], device=replace(device, name="a GPU"), measured_at="2099-01-01T00:00:00Z")
    store.add([later])
    again = finished(start(lane, store, device, QUICK, reuse=True))
    assert again.progress.num_steps == 0
    assert again.measured == state.measured


def test_two_programs_do_not_measure_on_one_device_at_once(store, device, tmp_path):
    """Two lanes with one folder of locks stand for two programs: the lock is on an open file, not on a process."""
    first, second = (HeavyLane(LIMITS, locks=tmp_path, quiet=True) for _ in range(2))
    try:
        one = start(first, store, device, LONG)
        while one.look().running is None:
            time.sleep(0.05)
        other = start(second, store, device, QUICK)
        end_s = time.monotonic() + 10
        while not (state := other.look()).progress.waits_for_others and time.monotonic() < end_s:
            time.sleep(0.05)
        assert state.progress.waits_for_others
        assert state.running is None
        one.cancel()
        assert statuses(finished(other), QUICK) == [Status.DONE]
    finally:
        first.close()
        second.close()

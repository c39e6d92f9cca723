"""The device that is measured: its name, its clock, and what its allocator says.

Worker processes only: imports torch and transformers.
"""

import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

from memcore.bench.measurement import DeviceFacts

_BACKWARD = "memcore: the backward begins"


def find_device() -> str:
    """The kind of accelerator that measures here, else "cpu".

    Only one whose allocator keeps statistics of its peak: of those of torch 2.13 Apple's does not.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None or found.type == "mps" else found.type


def device_task(_payload: dict[str, Any]) -> dict[str, Any]:
    """The worker's task: the device that measures here, as the data of a `DeviceFacts`."""
    return asdict(device_facts(find_device()))


def device_facts(kind: str) -> DeviceFacts:
    """Name, driver and memory of a device, and the versions that measure."""
    if kind == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        name, driver, total = f"{_cpu_name()}, {torch.get_num_threads()} threads", "", pages
    else:
        module: Any = torch.get_device_module(kind)
        properties = module.get_device_properties(0)
        name, driver, total = str(properties.name), _runtime(), int(properties.total_memory)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return DeviceFacts(kind=kind, name=name, driver=driver, total_bytes=total, **versions)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names[0] if names else platform.processor()) or platform.machine()


def _runtime() -> str:
    version: Any = torch.version
    found = [f"{label} {text}" for label in ("cuda", "hip", "xpu") if (text := getattr(version, label, None))]
    return ", ".join(found).replace("cuda", "CUDA").replace("hip", "ROCm").replace("xpu", "XPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Bytes beyond what was there before: the most at once, those alive when the backward began, and what the
    allocator held of the device at the most. `operations`: names of what ran, where the same run shows them."""

    most: int
    kept: int
    reserved: int | None
    operations: frozenset[str] = frozenset()


# A step to measure: it calls what it is given between its forward and its backward.
Run = Callable[[Callable[[], None]], None]


def peak_of(kind: str, run: Run) -> Peak:
    """Run once and read the allocator."""
    return _cpu_peak(run) if kind == "cpu" else _accelerator_peak(run)


def _cpu_peak(run: Run) -> Peak:
    """From the events of the CPU's allocator, which the profiler records."""

    def mark() -> None:
        with record_function(_BACKWARD):
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run(mark)
    results: Any = recorded.profiler
    held = most = kept = 0
    names = set()
    for event in results.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            held += event.nbytes()
            most = max(most, held)
        elif name == _BACKWARD:
            kept = held
        else:
            names.add(name)
    return Peak(most=most, kept=kept, reserved=None, operations=frozenset(names))


def _accelerator_peak(run: Run) -> Peak:
    """From the statistics of the accelerator's allocator."""
    memory: Any = torch.accelerator
    memory.synchronize()
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    kept = 0

    def mark() -> None:
        nonlocal kept
        kept = memory.memory_allocated() - before

    run(mark)
    memory.synchronize()
    return Peak(most=memory.max_memory_allocated() - before, kept=kept, reserved=memory.max_memory_reserved())


def operations_of(kind: str, run: Run) -> set[str]:
    """Run once and name the operations, and on an accelerator the kernels, that the profiler saw."""
    own = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}
    activities = [ProfilerActivity.CPU, *own.get(kind, [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=activities) as recorded:
            run(lambda: None)
            synchronize(kind)
    results: Any = recorded.profiler
    return {event.name() for event in results.kineto_results.events()}


def synchronize(kind: str) -> None:
    """Wait until the device has done what it was given."""
    if kind != "cpu":
        torch.accelerator.synchronize()


class Clock:
    """Points in a device's time, and the seconds between two of them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def now(self) -> Any:
        """A point in time: on an accelerator, when it comes to this in its queue."""
        if self._kind == "cpu":
            return time.perf_counter()
        event = torch.Event(self._kind, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from one point to a later one, which the device has passed."""
        if self._kind == "cpu":
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1000

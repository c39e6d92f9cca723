"""What counts a rank's memory: the accelerator's own statistics, or on the CPU the library made of meter.c.

Ranks, and for :func:`build_meter` the worker that starts them: imports torch.
"""

import ctypes
import hashlib
import inspect
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from memcore.errors import UserError
from memcore.i18n import gettext as _

_SOURCE = Path(__file__).with_name("meter.c")
_COMPILERS = ("cc", "gcc", "clang")


def build_meter(folder: Path) -> Path:
    """The library in `folder`, compiled where it is not there yet. Raises UserError where that cannot be done."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"meter-{digest}.so"
    if library.is_file():
        return library
    compiler = os.environ.get("CC") or next((name for name in _COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise UserError(_("Counting memory on the CPU needs a C compiler (gcc or clang), and there is none."))
    folder.mkdir(parents=True, exist_ok=True)
    # Made under another name first: two programs may do this at once.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / library.name
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(made), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (no shell)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["?"])[-1][:200]
            sentence = _("The counter of the CPU's memory could not be compiled ({reason}).")
            raise UserError(sentence.format(reason=reason))
        made.replace(library)
    return library


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Bytes on one rank: tensors now and at the most since the last reset; what the communication backend held
    beside them at the most; and what the process holds that is no tensor."""

    tensors: int
    most_tensors: int
    staging: int
    other: int


class Meter(Protocol):
    """What counts."""

    def reset(self) -> None:
        """Forget the most so far."""

    def read(self) -> Reading:
        """The figures now."""


class CpuMeter:
    """The counters of meter.c, which was loaded before all else."""

    def __init__(self) -> None:
        library: Any = ctypes.CDLL(None)
        self._library = library
        for name in ("tensors", "most_tensors", "most_both", "heap", "lost"):
            getattr(library, f"meter_{name}").restype = ctypes.c_int64

    def reset(self) -> None:
        """Forget the most so far."""
        self._library.meter_reset()

    def read(self) -> Reading:
        """The figures now. Raises `RuntimeError` where blocks were lost count of."""
        library = self._library
        if library.meter_lost():
            raise RuntimeError("more blocks at once than the meter has room for")
        most = library.meter_most_tensors()
        return Reading(
            tensors=library.meter_tensors(),
            most_tensors=most,
            staging=library.meter_most_both() - most,
            other=library.meter_heap(),
        )

    def mark_collectives(self, *modules: Any) -> None:
        """Have what is allocated while a collective of these modules is called count as the backend's: a function that
        can be told not to wait (`async_op`)."""
        for module in modules:
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if "async_op" in inspect.signature(function).parameters:
                    setattr(module, name, self._marked(function))

    def _marked(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._library.meter_collective(1)
            try:
                return collective(*args, **kwargs)
            finally:
                self._library.meter_collective(-1)

        return marked


class AcceleratorMeter:
    """The statistics of the accelerator's caching allocator."""

    def __init__(self, device: Any) -> None:
        self._torch: Any = torch.accelerator
        self._device = device

    def reset(self) -> None:
        """Forget the most so far."""
        self._torch.synchronize(self._device)
        self._torch.reset_peak_memory_stats(self._device)

    def read(self) -> Reading:
        """The figures now; other: what the device's driver says is in use beyond what the allocator reserved."""
        memory = self._torch
        memory.synchronize(self._device)
        free, total = memory.get_memory_info(self._device)
        return Reading(
            tensors=memory.memory_allocated(self._device),
            most_tensors=memory.max_memory_allocated(self._device),
            staging=0,
            other=max(total - free - memory.memory_reserved(self._device), 0),
        )


def meter_of(kind: str, local_rank: int) -> tuple[torch.device, Meter]:
    """The device of one of this machine's ranks, and what counts its memory."""
    if kind == "cpu":
        meter = CpuMeter()
        meter.mark_collectives(dist, distributed_c10d)
        return torch.device("cpu"), meter
    device = torch.device(kind, local_rank)
    torch.accelerator.set_device_index(device)
    return device, AcceleratorMeter(device)

"""A case's training steps on one rank, measured phase by phase. Ranks only: imports torch and transformers."""

import gc
from typing import Any

import torch
import torch.distributed as dist

from memcore.scenario import Scenario
from memcore.verify.worker.engines import Training, start
from memcore.verify.worker.meter import Meter

# The first step differs: buffers and states come into being. Two more must agree.
STEPS = 3


def measure(scenario: Scenario, device: torch.device, meter: Meter) -> list[dict[str, Any]]:
    """What each rank measured, in bytes beyond what the process held before: `init`, the steps' phases, and what is
    there between steps."""
    known = _storages()
    _settle()
    measured = _Measured(meter)
    with measured.phase("init"):
        training = start(scenario, device)
    for number in range(1, STEPS + 1):
        _step(training, scenario.workload.grad_accum, measured, "" if number > 1 else "first_")
        _settle()
        measured.rests(number)
    held = _by_category(training)
    training.close()
    del training
    _let_go_of_all_but(known)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank(), **measured.data(), "held": held})
    return found


class _Phase:
    def __init__(self, measured: "_Measured", name: str) -> None:
        self._measured, self._name = measured, name

    def __enter__(self) -> None:
        _settle()
        self._measured.meter.reset()

    def __exit__(self, *_error: object) -> None:
        self._measured.keep(self._name)


class _Measured:
    """The largest figures of each phase, by step."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        meter.reset()
        self._before = meter.read().tensors
        self._peaks: dict[str, list[int]] = {}
        self._staging: dict[str, int] = {}
        self._idle: list[int] = []
        self._other = 0

    def phase(self, name: str) -> _Phase:
        """Measure a phase of the step: the most that it takes at any instant."""
        return _Phase(self, name)

    def keep(self, name: str) -> None:
        """Keep what a phase took; of several micro-steps of one step the most."""
        reading = self.meter.read()
        most, steps = reading.most_tensors - self._before, self._peaks.setdefault(name, [])
        if len(steps) <= max(len(self._idle) - (not name.startswith(("init", "first_"))), 0):
            steps.append(most)
        steps[-1] = max(steps[-1], most)
        self._staging[name] = max(self._staging.get(name, 0), reading.staging)

    def rests(self, _number: int) -> None:
        """The step is over: keep what stays."""
        self.meter.reset()
        reading = self.meter.read()
        self._idle.append(reading.tensors - self._before)
        self._other = reading.other

    def data(self) -> dict[str, Any]:
        """Bytes by phase and step from the second on, staging beside them, what stays, and what is no tensor."""
        return {"peaks": self._peaks, "staging": self._staging, "idle": self._idle, "other": self._other}


def _step(training: Training, micro_steps: int, measured: _Measured, prefix: str) -> None:
    for number in range(1, micro_steps + 1):
        last = number == micro_steps
        with measured.phase(f"{prefix}forward"):
            loss = training.forward()
        with measured.phase(f"{prefix}backward"):
            training.backward(loss, last)
        del loss
        with measured.phase(f"{prefix}optimizer"):
            training.step(last)


def _settle() -> None:
    """Free what nobody holds, and wait for the other ranks, so that phases do not overlap."""
    gc.collect()
    dist.barrier()


def _storages() -> set[int]:
    return {each.untyped_storage().data_ptr() for each in _tensors()}


def _tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]


def _let_go_of_all_but(known: set[int]) -> None:
    """Free what the engine left behind: hooks and caches hold on to parameters after it is destroyed."""
    gc.collect()
    for each in _tensors():
        storage = each.untyped_storage()
        if storage.data_ptr() not in known:
            storage.resize_(0)
    gc.collect()


def _by_category(training: Training) -> dict[str, int]:
    """Bytes of the parameters, their gradients and the optimizer's tensors that this rank holds."""
    seen: set[int] = set()

    def total(tensors: list[torch.Tensor]) -> int:
        num_bytes = 0
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                num_bytes += storage.nbytes()
        return num_bytes

    parameters = training.parameters()
    partitions = [each.ds_tensor for each in parameters if hasattr(each, "ds_tensor")]
    gradients = [each.grad for each in parameters if each.grad is not None]
    return {
        "weights": total([*partitions, *parameters]),
        "gradients": total(gradients),
        "optimizer": total(_states(training.optimizer)),
    }


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _states(optimizer: Any) -> list[torch.Tensor]:
    """The optimizer's own tensors: its states, and the values it updates where these are not the parameters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return [*(each for group in inner.param_groups for each in group["params"]), *states]

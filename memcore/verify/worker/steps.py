"""A case's training steps on one rank, measured phase by phase. Ranks only: imports torch and transformers."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from memcore.scenario import Scenario
from memcore.verify.worker.engines import Training, start
from memcore.verify.worker.meter import Meter

# The first step differs: buffers and states come into being. Three more must agree.
STEPS = 4


def measure(scenario: Scenario, device: torch.device, meter: Meter) -> list[dict[str, Any]]:
    """What each rank measured, in bytes beyond what the process held before: see memcore.verify.case.load_figures."""
    known = _storages()
    _settle()
    meter.reset()
    log = _Log(meter)
    with log.phase("init"):
        training = start(scenario, device)
    for _number in range(STEPS):
        log.begin_step()
        _step(training, scenario.workload.grad_accum, log)
        _settle()
        log.rests()
    held = _by_category(training)
    training.close()
    del training
    _let_go_of_all_but(known)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank(), **log.data(), "held": held})
    return found


class _Log:
    """The figures of initialisation, and of each step by phase."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._before = meter.read().tensors
        self._steps: list[dict[str, int]] = [{}]
        self._staging: dict[str, int] = {}
        self._other = 0

    def begin_step(self) -> None:
        """What comes belongs to the next step."""
        self._steps.append({})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keep the most that a phase takes at any instant; of several micro-steps' the most."""
        _settle()
        self._meter.reset()
        yield
        reading, step = self._meter.read(), self._steps[-1]
        step[name] = max(step.get(name, 0), reading.most_tensors - self._before)
        self._staging[name] = max(self._staging.get(name, 0), reading.staging)

    def rests(self) -> None:
        """The step is over: keep what stays."""
        reading = self._meter.read()
        self._steps[-1]["idle"] = reading.tensors - self._before
        self._other = reading.other

    def data(self) -> dict[str, Any]:
        """All of it: `init`, then the `steps`; `staging` by phase; `other` than tensors."""
        init, *steps = self._steps
        return {**init, "steps": steps, "staging": self._staging, "other": self._other}


def _step(training: Training, micro_steps: int, log: _Log) -> None:
    for number in range(1, micro_steps + 1):
        last = number == micro_steps
        with log.phase("forward"):
            loss = training.forward()
        with log.phase("backward"):
            training.backward(loss)
        del loss
        with log.phase("optimizer"):
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

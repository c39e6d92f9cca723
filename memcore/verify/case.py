"""What is verified: one scenario, small enough to really run here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcore.i18n import mark
from memcore.scenario import Scenario, scenario_data

MAX_LOCAL_RANKS = 8
WITHOUT_DEEPSPEED = mark("DeepSpeed is not installed: run `pip install deepspeed` and try again.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A scenario whose model is a config, on as many ranks as it has GPUs. `name` tells it from others of a launch."""

    name: str
    scenario: Scenario

    @property
    def ranks(self) -> int:
        """Processes, one for each GPU of the scenario."""
        return self.scenario.hardware.gpus

    def data(self) -> dict[str, Any]:
        """As JSON data, for a rank."""
        engine = self.scenario.parallelism.engine.value
        return {"name": self.name, "ranks": self.ranks, "engine": engine, "scenario": scenario_data(self.scenario)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What one rank measured of a case, in bytes beyond what its process held before.

    `peaks` by phase: the most at any instant, of "forward", "backward" and "optimizer" and what stays "idle" between
    steps, from the second step on. Of several steps it is the least: a backend's thread may hold on to a tensor for
    longer in one of them, by chance; `spread_percent`: by how much they differ at the most. `first`: the same of the
    first step. `init`: the most while the engine is started. `staging` by phase: what the communication backend held
    beside the peak. `other`: the process's memory that is no tensor. `held`: weights, gradients and the optimizer's
    tensors between steps.
    """

    rank: int
    init: int
    first: Mapping[str, int]
    peaks: Mapping[str, int]
    spread_percent: float
    staging: Mapping[str, int]
    other: int
    held: Mapping[str, int]


def load_figures(data: Mapping[str, Any]) -> RankFigures:
    """From what a rank wrote (memcore.verify.worker.steps)."""
    first, *steps = data["steps"]
    by_phase = {phase: [step[phase] for step in steps] for phase in first}
    return RankFigures(
        rank=data["rank"],
        init=data["init"],
        first=first,
        peaks={phase: min(values) for phase, values in by_phase.items()},
        spread_percent=max(100 * (max(values) / min(values) - 1) for values in by_phase.values()),
        staging=data["staging"],
        other=data["other"],
        held=data["held"],
    )

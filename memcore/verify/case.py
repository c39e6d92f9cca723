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
        return {"name": self.name, "scenario": scenario_data(self.scenario)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What one rank measured of a case, in bytes beyond what its process held before.

    `peaks` by phase: the most at any instant, of "init", "forward", "backward" and "optimizer" from the second step
    on, and with the prefix "first_" of the first step; `spread_percent`: by how much the steps differ at the most.
    `idle`: between steps. `staging` by phase: what the communication backend held beside the peak. `other`: the
    process's memory that is no tensor. `held`: weights, gradients and optimizer's tensors between steps.
    """

    rank: int
    peaks: Mapping[str, int]
    staging: Mapping[str, int]
    idle: int
    other: int
    held: Mapping[str, int]
    spread_percent: float


def load_figures(data: Mapping[str, Any]) -> RankFigures:
    """From what a rank wrote."""
    steps = [*(values for values in data["peaks"].values() if len(values) > 1), data["idle"][1:]]
    spread = max(100 * (max(values) - min(values)) / max(values) for values in steps)
    return RankFigures(
        rank=data["rank"],
        peaks={phase: max(values) for phase, values in data["peaks"].items()},
        staging=data["staging"],
        idle=max(data["idle"][1:]),
        other=data["other"],
        held=data["held"],
        spread_percent=spread,
    )

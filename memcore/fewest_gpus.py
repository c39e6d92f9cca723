"""On how few GPUs the whole peak fits, and not the states alone: by predicting it on other numbers of them."""

from bisect import bisect_left
from dataclasses import replace

from memcore.budget import Budget, Evidence, Verdict, predict
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.errors import UserError
from memcore.scenario import Parallelism, Scenario, parse_scenario, scenario_data

# Up to a node one GPU at a time, then whole nodes.
NODE_GPUS, MOST_GPUS = 8, 1024


def fewest_gpus(budget: Budget) -> int | None:
    """The fewest GPUs on which the scenario fits, its error band included; None where it does on none that is tried.

    Each GPU's batch stays, and so does the number of replicas: more GPUs share. A trace that shards is of the
    scenario's own ranks alone: for others there is the closed form, or, where none stands, no answer.
    """
    own, evidence = budget.scenario.hardware.gpus, _evidence_elsewhere(budget)
    numbers = _numbers(budget.scenario) if evidence is not None else [own]

    def fits(gpus: int) -> bool:
        if gpus == own or evidence is None:
            return budget.verdict is Verdict.FITS
        try:
            return predict(with_gpus(budget.scenario, gpus), evidence).verdict is Verdict.FITS
        except UserError:
            return False  # so many ranks cannot be grouped as the scenario asks for

    # One GPU has no collectives' buffers: it may fit where two do not.
    if fits(numbers[0]):
        return numbers[0]
    # The scenario's own number is predicted already: only one side of it is left to search.
    place = numbers.index(own)
    low, high = (1, place) if fits(own) else (place + 1, len(numbers) - 1)
    if low > high or not fits(numbers[high]):
        return None
    return numbers[bisect_left(numbers, True, low, high, key=fits)]


def with_gpus(scenario: Scenario, gpus: int) -> Scenario:
    """The scenario on another number of GPUs, as many replicas as before of what is divided."""
    data, parallelism = scenario_data(scenario), scenario.parallelism
    replicas = parallelism.dp_replicate if _divides(parallelism) else gpus
    data["hardware"] = {**data.get("hardware", {}), "gpus": gpus}
    data["hardware"].pop("gpus_per_node", None)
    data["parallelism"] = {**data["parallelism"], "dp_shard": gpus // replicas, "dp_replicate": replicas}
    return parse_scenario(data)


def _numbers(scenario: Scenario) -> list[int]:
    parallelism, own = scenario.parallelism, scenario.hardware.gpus
    if parallelism.engine is EngineName.SINGLE:
        return [own]
    replicas = parallelism.dp_replicate if _divides(parallelism) else 1
    numbers = {own, *range(1, NODE_GPUS), *range(NODE_GPUS, MOST_GPUS + 1, NODE_GPUS)}
    return sorted(number for number in numbers if number % replicas == 0)


def _divides(parallelism: Parallelism) -> bool:
    """Whether the engine divides states where there are ranks enough, and does not hold them whole on each."""
    whole = parallelism.dp_shard == 1 < parallelism.dp_replicate
    return ENGINE_OPTIONS[parallelism.engine].shards and not whole


def _evidence_elsewhere(budget: Budget) -> Evidence | None:
    """The evidence for other numbers of ranks; None where without its trace parts would be missing."""
    profile = budget.evidence.profile
    if profile is None or not profile.sharded:
        return budget.evidence
    evidence = replace(budget.evidence, profile=None)
    return evidence if predict(budget.scenario, evidence).missing == budget.missing else None

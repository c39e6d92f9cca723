"""How a ZeRO stage shares states out: the paper's theory, for any number of ranks, and what it moves.

Symbols: N_s ranks that share (dp_shard), N_r groups that hold the same (dp_replicate), Psi parameters.
Source: arXiv 1910.02054, section 5 (states) and section 7 (communication volume). What an engine
really allocates beside this floor is in :mod:`memcore.engines`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memcore.engine_options import ENGINE_OPTIONS
from memcore.hardware import NETWORK_BYTES_PER_S, NETWORK_SOURCE, Accelerator
from memcore.scenario import Device, Parallelism, Scenario
from memcore.states import ModelStates, State
from memcore.terms import Category, Formula
from memcore.units import ceil_div

STAGES = (0, 1, 2, 3)
MAX_SEARCHED_RANKS = 65_536
# Ranks of a parameter's flat slice start at a multiple of this many elements, so DeepSpeed pads a group to
# 2 N of them (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, nccl_start_alignment_factor).
ALIGNMENT_ELEMENTS = 2


def share(state: State, stage: int, ranks: int) -> int:
    """Bytes of a state on each of `ranks` ranks at a stage: all of it, its slice rounded up, or nothing
    where it exists only for a moment."""
    if stage >= state.fleeting_from:
        return 0
    if stage < state.divided_from or ranks == 1:
        return state.total_bytes
    if state.element_bytes is not None:
        return ceil_div(state.elements, ranks) * state.element_bytes
    return ceil_div(state.total_bytes, ranks)


def share_formula(state: State, stage: int, ranks: int) -> Formula:
    """The formula of :func:`share`: the state's own, divided by the ranks where it is."""
    if stage >= state.fleeting_from:
        return Formula(symbols="0", numbers="0")
    if stage < state.divided_from or ranks == 1:
        return state.formula
    if state.element_bytes is None:
        return Formula(symbols=rf"({state.formula.symbols}) / N", numbers=f"⌈({state.formula.numbers}) / {ranks:,}⌉")
    rounded = f"⌈{state.elements:,} / {ranks:,}⌉"
    return Formula(symbols=rf"{state.formula.symbols} / N", numbers=f"{state.element_bytes} × {rounded}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """Bytes of model states per GPU."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def account(states: Sequence[State], stage: int, ranks: int) -> Accounting:
    """The paper's accounting: what each of `ranks` GPUs holds at a stage. Nothing is offloaded or paged out."""
    sums = {
        category: sum(share(state, stage, ranks) for state in states if state.category is category)
        for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)
    }
    return Accounting(
        weights_bytes=sums[Category.WEIGHTS],
        gradients_bytes=sums[Category.GRADIENTS],
        optimizer_bytes=sums[Category.OPTIMIZER],
    )


def smallest_ranks(states: Sequence[State], stage: int, capacity_bytes: int) -> int | None:
    """The fewest ranks with which the states alone fit, up to 65,536; None where no number is enough."""
    if account(states, stage, MAX_SEARCHED_RANKS).total_bytes > capacity_bytes:
        return None
    low, high = 1, MAX_SEARCHED_RANKS
    while low < high:
        middle = (low + high) // 2
        if account(states, stage, middle).total_bytes <= capacity_bytes:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes that offloading moves off the GPUs of one node: into its memory, and onto its NVMe."""

    cpu_bytes: int
    nvme_bytes: int
    unified_bytes: int


def host_memory(scenario: Scenario, states: ModelStates) -> HostMemory:
    """What one node's host holds. ZeRO-Offload keeps the optimizer's slices and an FP32 gradient slice
    there (16 bytes per parameter), parameter offload the 16-bit slices too: 18 in all, over all ranks.

    Source: deepspeed 0.19.8, runtime/zero/stage3.py, estimate_zero3_model_states_mem_needs, before its
    buffer factor; stage_1_and_2.py, initialize_optimizer_states (the pinned FP32 gradient slice). FSDP2's
    CPUOffloadPolicy keeps every state there (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_api.py).
    """
    parallelism, offload, node = scenario.parallelism, scenario.offload, scenario.hardware.gpus_per_node
    placed = {Device.CPU: 0, Device.NVME: 0}

    def slices(*chosen: State) -> int:
        return node * sum(share(state, parallelism.stage, parallelism.dp_shard) for state in chosen)

    if offload.optimizer is not Device.NONE:
        placed[offload.optimizer] += slices(*states.of(Category.OPTIMIZER))
        placed[Device.CPU] += node * ceil_div(states.trained, parallelism.dp_shard) * 4
    if offload.parameters is not Device.NONE:
        placed[offload.parameters] += slices(*states.of(Category.WEIGHTS))
    if scenario.shards_on_host:
        placed[Device.CPU] += slices(*states.states)
    paged = sum(state.paged_bytes for state in states.states)
    divided = parallelism.dp_shard if parallelism.stage >= 1 else 1
    return HostMemory(
        cpu_bytes=placed[Device.CPU],
        nvme_bytes=placed[Device.NVME],
        unified_bytes=node * ceil_div(paged, divided),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One kind of communication in a step. `elements` values of `element_bytes` are moved `times` times
    among `ranks` GPUs; `bytes_per_gpu` is what a ring sends from each: (ranks - 1) / ranks of them.
    `link_bytes_per_s` is the slowest link that these GPUs cross."""

    name: str
    elements: int
    element_bytes: int
    times: int
    ranks: int
    spans_nodes: bool
    link_bytes_per_s: int

    @property
    def bytes_per_gpu(self) -> int:
        """Bytes that one GPU sends in a step."""
        return self.elements * self.element_bytes * self.times * (self.ranks - 1) // self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """All communication of one step. `volume_in_parameters` is the paper's count, in units of Psi.

    The link is the slowest that any of the collectives crosses.
    """

    collectives: tuple[Collective, ...]
    link_name: str
    link_bytes_per_s: int
    link_source: str

    @property
    def bytes_per_gpu(self) -> int:
        """Bytes that one GPU sends in a step."""
        return sum(collective.bytes_per_gpu for collective in self.collectives)

    @property
    def seconds(self) -> float:
        """Time with each collective on its own slowest link, at its full rate, nothing hidden."""
        return sum(collective.bytes_per_gpu / collective.link_bytes_per_s for collective in self.collectives)

    def volume_in_parameters(self, n_params: int) -> float:
        """Values moved per GPU and step, in multiples of the model's parameters: 2 or 3 in the paper. One GPU moves
        nothing."""
        moving = [collective for collective in self.collectives if collective.ranks > 1]
        return sum(collective.elements * collective.times for collective in moving) / n_params


def communication(
    scenario: Scenario, states: ModelStates, device: Accelerator, stage: int | None = None
) -> Communication:  # fmt: skip
    """What a step moves at a stage (the scenario's own by default).

    Stages 0 and 1 reduce gradients once per step; from stage 2 on, each micro-step does. Stage 3 gathers
    the weights for each micro-step's forward and backward; stages 1 and 2 gather them once, after the
    update. An all-reduce counts as a reduce-scatter and an all-gather. Ranks that share lie beside each
    other, so a group no larger than a node stays within it; its replicas lie across.
    """
    parallelism = scenario.parallelism
    stage = parallelism.stage if stage is None else stage
    ranks, replicas = _group(parallelism, stage)
    micro_steps = scenario.workload.grad_accum
    within, link = scenario.hardware.gpus_per_node, device.link

    def moved(name: str, elements: int, element_bytes: int, times: int, size: int, stride: int = 1) -> Collective:
        spans = size * stride > within
        return Collective(
            name=name,
            elements=elements,
            element_bytes=element_bytes,
            times=times,
            ranks=size,
            spans_nodes=spans,
            link_bytes_per_s=NETWORK_BYTES_PER_S if spans else link.bytes_per_s,
        )

    reduce_bytes = states.trained_as.reduce_dtype.size
    weight_bytes = states.precision.convention.compute_dtype.size
    reductions = micro_steps if stage >= 2 else 1
    collectives = [moved("reduce_scatter", states.trained, reduce_bytes, reductions, ranks)]
    if stage == 0:
        collectives.append(moved("all_gather", states.trained, reduce_bytes, 1, ranks))
    elif stage == 3:
        collectives.append(moved("all_gather", states.n_params, weight_bytes, 2 * micro_steps, ranks))
    else:
        collectives.append(moved("all_gather", states.trained, weight_bytes, 1, ranks))
    if replicas > 1:
        slice_elements = ceil_div(states.trained, ranks)
        collectives.append(moved("all_reduce", slice_elements, reduce_bytes, 2 * reductions, replicas, stride=ranks))
    if ranks * replicas > within:
        return Communication(
            collectives=tuple(collectives),
            link_name="network",
            link_bytes_per_s=NETWORK_BYTES_PER_S,
            link_source=NETWORK_SOURCE,
        )
    return Communication(
        collectives=tuple(collectives),
        link_name=link.name,
        link_bytes_per_s=link.bytes_per_s,
        link_source=link.source,
    )


def sharing_ranks(parallelism: Parallelism) -> int:
    """The ranks among which a stage divides: a shard group's, or all of an engine that itself divides nothing."""
    return parallelism.dp_shard if ENGINE_OPTIONS[parallelism.engine].shards else parallelism.dp


def _group(parallelism: Parallelism, stage: int) -> tuple[int, int]:
    """Ranks that share and groups that hold the same; where nothing is divided all ranks reduce together."""
    ranks = parallelism.dp if stage == 0 else sharing_ranks(parallelism)
    return ranks, parallelism.dp // ranks


def hpz_secondary_bytes(n_params: int, element_bytes: int, hpz_ranks: int) -> int:
    """ZeRO++ hpZ: a second, 16-bit copy of the weights divided within a node, kept beside the primary
    slices for the backward's gathers. Source: arXiv 2306.10209, section 3.2; 0 for a group of one.
    """
    return ceil_div(n_params, hpz_ranks) * element_bytes if hpz_ranks > 1 else 0

"""What stands between ZeRO's floor and the real peak, and what it costs in bandwidth.

All from :func:`memcore.budget.predict`; the buffers page only draws it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memcore.activations.recompute import checkpointing
from memcore.budget import Budget, predict
from memcore.engine_options import ENGINE_OPTIONS
from memcore.errors import UserError
from memcore.hardware import NETWORK_BYTES_PER_S, Accelerator
from memcore.inventory import Block, Inventory, Role, TensorKind
from memcore.recipes import DEEPSPEED_ESTIMATOR
from memcore.scenario import Method, parse_scenario, scenario_data
from memcore.states import GRADIENT_STAGE
from memcore.terms import Category, Phase, Term
from memcore.units import GB
from memcore.zero import sharing_ranks

# One direction of a PCI Express 4.0 x16 slot: 16 GT/s x 16 lanes x 128/130 / 8 (PCI-SIG, base specification 4.0).
PCIE4_BYTES_PER_S = 31_500_000_000
_STATES = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


def with_zero(budget: Budget, changes: Mapping[str, object], stage: int | None = None) -> Budget:
    """The scenario's budget with other settings of zero_optimization, or at another stage.

    Raises UserError where the rest of the scenario has no form there.
    """
    data = scenario_data(budget.scenario)
    zero = data.get("engine_config", {}).get("zero_optimization", {})
    if changes:
        data["engine_config"] = {"zero_optimization": {**zero, **changes}}
    if stage is not None:
        data["parallelism"] = {**data["parallelism"], "zero_stage": stage}
        if stage != 3 and data.get("engine_config"):
            data["engine_config"]["zero_optimization"].pop("zero_hpz_partition_size", None)
    return predict(parse_scenario(data), budget.evidence)


@dataclass(frozen=True, kw_only=True, slots=True)
class AboveFloor:
    """One phase's peak: the states up to the theory's floor, and each term, or part of one, that the engine adds."""

    phase: Phase
    floor: int
    terms: tuple[tuple[Term, int], ...]


def above_floor(budget: Budget) -> list[AboveFloor]:
    """The stack between floor and peak by phase. Activations and loss are left out: they are not the engine's."""
    rows = []
    for phase, index in budget.phase_peaks().items():
        engine = [
            (term, term.at(index)) for term in budget.terms if term.category in (*_STATES, Category.COMMUNICATION)
        ]
        extra = [(term, share) for term, share in engine if share and not _is_state(budget, term)]
        states = [(term, share) for term, share in engine if _is_state(budget, term)]
        total = sum(share for _term, share in states)
        floor = min(total, budget.static.total_bytes)
        if total > floor:
            # A gradient slice keeps whole tensors where the theory divides them: what that adds is not the floor's.
            slices = [term for term, _share in states if term.name == "gradient_slice"] or [states[-1][0]]
            extra.insert(0, (slices[0], total - floor))
        rows.append(AboveFloor(phase=phase, floor=floor, terms=tuple(extra)))
    return rows


def _is_state(budget: Budget, term: Term) -> bool:
    """States by their own names; a stage that divides gradients keeps them as one slice per rank."""
    divided = budget.scenario.parallelism.stage >= GRADIENT_STAGE
    return (divided and term.name == "gradient_slice") or term.name in {state.name for state in budget.states.states}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDifference:
    """Peak of a term at ZeRO-2 and at ZeRO-3, each at its own peak moment."""

    name: str
    at_two: int
    at_three: int


def two_against_three(budget: Budget) -> tuple[Budget, Budget, list[StageDifference]] | None:
    """The scenario at ZeRO-2 and ZeRO-3, and the terms that differ; None where one of them has no form."""
    if 3 not in ENGINE_OPTIONS[budget.scenario.parallelism.engine].stages:
        return None
    try:
        two, three = with_zero(budget, {}, 2), with_zero(budget, {}, 3)
    except UserError:
        return None
    shares = [{term.name: share for term, share in each.at_peak()} for each in (two, three)]
    names = dict.fromkeys([*shares[0], *shares[1]])
    rows = [
        StageDifference(name=name, at_two=shares[0].get(name, 0), at_three=shares[1].get(name, 0)) for name in names
    ]
    return two, three, sorted((row for row in rows if row.at_two != row.at_three), key=lambda r: r.at_two - r.at_three)


def largest_module(inventory: Inventory | None) -> int:
    """Parameters of the largest module that owns some itself, as DeepSpeed's estimator counts a layer: a bias counts,
    and so do all stacked experts. 0 without shapes."""
    sums: dict[tuple[str, str], int] = {}
    for block in inventory.blocks if inventory else ():
        for tensor in block.tensors:
            owner = (block.name, tensor.name.rpartition(".")[0])
            sums[owner] = sums.get(owner, 0) + tensor.numel
    return max(sums.values(), default=0)


def estimator_bytes(budget: Budget) -> dict[int, int]:
    """What DeepSpeed's own estimator answers per GPU at stages 2 and 3, without offload."""
    ranks, largest = sharing_ranks(budget.scenario.parallelism), largest_module(budget.inventory)
    answers = {
        stage: DEEPSPEED_ESTIMATOR.bytes_per_gpu(budget.states.n_params, stage, ranks, largest) for stage in (2, 3)
    }
    return {stage: round(answer) for stage, answer in answers.items() if answer is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobEffect:
    """What lowering settings of the prefetcher saves: gathered bytes now and then."""

    changes: Mapping[str, int]
    before: int
    after: int


GATHER_KNOBS = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")


def knob_effects(budget: Budget, wanted: Mapping[str, int]) -> list[KnobEffect]:
    """Each wanted setting alone, then all of them together: lowering one often saves nothing."""
    before = gathered_bytes(budget)
    single = [{name: value} for name, value in wanted.items()]
    return [
        KnobEffect(changes=changes, before=before, after=gathered_bytes(with_zero(budget, changes)))
        for changes in [*single, dict(wanted)]
    ]


def gathered_bytes(budget: Budget) -> int:
    """The most that is gathered at any moment, and the bucket that is always there."""
    return sum(term.largest for term in budget.terms if term.name in ("gathered_parameters", "reduce_bucket"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """A step's communication over one kind of link at its full rate, beside the step's computation."""

    link: str
    bytes_per_s: int
    seconds: float
    compute_seconds: float | None

    @property
    def can_hide(self) -> bool | None:
        """Whether it could disappear behind the computation, both at their full rates; None where that is unknown."""
        return None if self.compute_seconds is None else self.seconds <= self.compute_seconds


def link_times(budget: Budget) -> list[LinkTime]:
    """The step's bytes over the card's own link, PCIe 4.0 x16 and a 400 Gbit/s network port."""
    moved, compute = budget.communication.bytes_per_gpu, compute_seconds(budget, budget.device)
    links = [
        (budget.device.link.name, budget.device.link.bytes_per_s),
        ("PCIe 4.0 x16", PCIE4_BYTES_PER_S),
        (f"network, {NETWORK_BYTES_PER_S * 8 // GB} Gbit/s", NETWORK_BYTES_PER_S),
    ]
    return [
        LinkTime(link=name, bytes_per_s=rate, seconds=moved / rate, compute_seconds=compute)
        for name, rate in dict(links).items()
    ]


def compute_seconds(budget: Budget, device: Accelerator) -> float | None:
    """The least time of a step's matrix products: 6 flops per active parameter and token (forward 2, backward
    4), 4 where the base is frozen, and 2 more for each parameter whose products are run again, at the card's peak.

    Source: arXiv 2001.08361, section 2.1; attention's own products are left out. None without a known peak.
    """
    if not device.peak_dense_bf16_flops_per_s:
        return None
    work = budget.scenario.workload
    active = budget.inventory.n_active if budget.inventory else budget.states.n_params
    each = 6 if budget.scenario.recipe.method is Method.FULL else 4
    tokens = work.micro_batch * work.seq_len * work.grad_accum
    return tokens * (each * active + 2 * _recomputed_params(budget)) / device.peak_dense_bf16_flops_per_s


def _recomputed_params(budget: Budget) -> int:
    """Active parameters of what is run again in the backward. A bare count has no layers: full recomputes all of it."""
    kind, inventory = budget.scenario.workload.checkpointing, budget.inventory
    if inventory is None:
        return budget.states.n_params if kind == "full" else 0
    found = checkpointing(kind, len(inventory.layers))
    layers = [layer for layer, group in zip(inventory.layers, found.groups, strict=True) if group is not None]
    return sum(_recomputed_of(layer, found.saved_operations) for layer in layers)


def _recomputed_of(layer: Block, saved: Sequence[str]) -> int:
    """Active parameters of a layer's products that are made again: those whose results are saved are not.

    "mm_alternate" saves the first, third, fifth of its linear products, those that add a bias not counted.
    """
    biased = {tensor.module for tensor in layer.tensors if tensor.kind is TensorKind.BIAS}
    again = products = 0
    for tensor in layer.tensors:
        stacked = tensor.kind is TensorKind.PARAMETER and tensor.experts_held > 1
        # A router's parameter is multiplied as a linear module's weight is.
        linear = tensor.kind in (TensorKind.LINEAR, TensorKind.CONV1D) or (tensor.role is Role.EXPERTS and not stacked)
        plain = linear and tensor.module not in biased
        products += plain
        kept = "mm" in saved if linear else stacked and "grouped_mm" in saved
        if plain and "mm_alternate" in saved:
            kept = products % 2 == 1
        again += 0 if kept else tensor.active
    return again

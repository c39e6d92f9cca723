"""Stage 3: everything in slices; weights are gathered while they are used.

Symbols: M sub_group_size, N_h the ranks of hpZ's second copy.
"""

from collections.abc import Sequence

from memcore.activations import checkpointing
from memcore.engines.deepspeed.plan import (
    STAGE_3,
    Plan,
    arriving_gradients,
    bucket,
    copies_at,
    fp32_accumulation,
    norm_copy,
    passing_gradients,
    slice_term,
    temporaries,
    unknown_copies,
)
from memcore.engines.deepspeed.reduction import Gradient, reduce_as_they_come
from memcore.engines.zero3_gather import GatherSettings, simulate
from memcore.scenario import ZeroConfig
from memcore.terms import Category, Formula, Phase, Term, by_layer, product
from memcore.units import ceil_div
from memcore.zero import hpz_secondary_bytes


def terms(plan: Plan) -> list[Term]:
    """Everything is divided. The bucket and the gradient slice stay; the update goes one sub-group at a time."""
    inputs = plan.inputs
    accumulation = fp32_accumulation(plan)
    width = accumulation.element_bytes if accumulation else plan.grad_bytes
    assert width is not None, "gradients have one dtype"
    found = bucket(plan, 1, tuple(Phase), f"{STAGE_3}, DeepSpeedZeroOptimizer_Stage3.__init__ (ipg_buckets)")
    found += _passing(plan)
    if not plan.optimizer_offloaded:
        group = _sub_group(plan)
        # Flattened in their own dtype, then cast to the master copy's; the cast of what has it already is no copy.
        master = inputs.states.trained_as.master_dtype
        last = master.size if master is not None else 4
        each = width + last if width < last else width
        found += [
            slice_term(
                plan, width, plan.slice_elements, lambda moment: True, f"{STAGE_3}, grad_partitions_flat_buffer"
            ),
            Term(
                name="step_gradient_copies",
                category=Category.OPTIMIZER,
                bytes_at=copies_at(inputs, each * group, max(width, last) * group),
                formula=Formula(symbols=rf"{each}\,\min(M, S)", numbers=product(each, group)),
                source=f"{STAGE_3}, _prepare_fp32_grad_for_sub_group: flatten(...).to(...)",
            ),
            *norm_copy(plan, f"{STAGE_3}, get_grad_norm_direct"),
            *temporaries(plan, group),
        ]
    return [*found, *_gathered(plan), *_secondary(plan)]


def _passing(plan: Plan) -> list[Term]:
    """Gradients on their way into the bucket, and the bucket's contents a second time, sorted by rank, while they are
    reduced."""
    source = f"{STAGE_3}, __avg_scatter_grads; runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced"
    gradients = arriving_gradients(plan)
    if plan.inputs.ranks == 1 or not gradients:
        return unknown_copies(plan, source)
    width, cast = plan.grad_bytes, 4 if fp32_accumulation(plan) is not None else 0

    def copies(reduced: Sequence[Gradient]) -> int:
        # All of it, but for a single gradient that divides evenly; and this rank's part in the accumulation's dtype.
        elements, ranks = sum(each.numel for each in reduced), plan.inputs.ranks
        in_place = len(reduced) == 1 and elements % ranks == 0
        return (0 if in_place else width * elements) + cast * ceil_div(elements, ranks)

    instants = reduce_as_they_come(
        gradients,
        limit=plan.config.reduce_bucket_size,
        rank=0,
        keeps_others=False,
        copies=copies,
        width=width,
        makes_slice=False,
    )
    return passing_gradients(plan, instants, source)


def _sub_group(plan: Plan) -> int:
    """Elements of the largest sub-group: it is closed once it reaches sub_group_size, so it overshoots by up to
    one parameter's share (stage3.py, _create_fp16_sub_groups)."""
    limit, ranks = plan.config.sub_group_size, plan.inputs.ranks
    if not plan.tensors:
        return min(limit, plan.slice_elements)
    largest = current = 0
    for tensor in plan.tensors:
        current += ceil_div(tensor.numel, ranks)
        largest = max(largest, current)
        current = 0 if current >= limit else current
    return largest


def _gathered(plan: Plan) -> list[Term]:
    """Weights that are whole while they are used, from the prefetcher's own queue; and those that always are."""
    inputs, inventory = plan.inputs, plan.inputs.inventory
    if inventory is None or inputs.ranks == 1:
        return []
    settings = gather_settings(plan.config)
    recompute = checkpointing(inputs.scenario.workload.checkpointing, len(inventory.layers))
    gathered = simulate(inventory, settings, tuple(group is not None for group in recompute.groups))
    width = inputs.states.precision.convention.compute_dtype.size

    def term(name: str, elements: int | tuple[int, ...], symbol: str, source: str) -> Term:
        most = elements if isinstance(elements, int) else max(elements)
        return Term(
            name=name,
            category=Category.COMMUNICATION,
            bytes_at=width * elements if isinstance(elements, int) else tuple(width * each for each in elements),
            formula=Formula(symbols=rf"{width}\,\Psi_{{{symbol}}}", numbers=product(width, most)),
            source=f"deepspeed 0.19.8, runtime/zero/{source}",
        )

    whole = by_layer(inputs.timeline, gathered.forward, gathered.turn, gathered.backward, gathered.end)
    flat = by_layer(inputs.timeline, gathered.forward_flat, 0, gathered.backward_flat, gathered.end_flat)
    fetched = "partitioned_param_coordinator.py, fetch_sub_module and release_sub_module, simulated"
    return [
        term("gathered_parameters", whole, "gathered", fetched),
        term("gather_copies", flat, "together", "partition_parameters.py, AllGatherCoalescedHandle.wait: torch.cat"),
        term(
            "persistent_parameters",
            gathered.persistent,
            "small",
            "parameter_offload.py, mark_persistent_parameters",
        ),
    ]


def gather_settings(config: ZeroConfig) -> GatherSettings:
    """The settings of the prefetcher in a ds_config."""
    return GatherSettings(
        prefetch_bucket=config.stage3_prefetch_bucket_size,
        max_live=config.stage3_max_live_parameters,
        max_reuse=config.stage3_max_reuse_distance,
        persistence=config.stage3_param_persistence_threshold,
        model_persistence=config.stage3_model_persistence_threshold,
    )


def _secondary(plan: Plan) -> list[Term]:
    states, group = plan.inputs.states, plan.config.zero_hpz_partition_size
    width = states.precision.convention.compute_dtype.size
    num_bytes = hpz_secondary_bytes(states.n_params, width, group)
    if not num_bytes:
        return []
    return [
        Term(
            name="secondary_weights",
            category=Category.WEIGHTS,
            bytes_at=num_bytes,
            formula=Formula(symbols=rf"{width}\,\Psi / N_h", numbers=f"{width} × ⌈{states.n_params:,} / {group:,}⌉"),
            source="arXiv 2306.10209, section 3.2; deepspeed 0.19.8, partition_parameters.py, _partition_param_sec",
        )
    ]

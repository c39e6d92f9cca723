"""DeepSpeed's ZeRO stages: slices, gradients through the backward, buckets, and the step's copies.

Read from deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py,
fp16/fused_optimizer.py. Symbols: Psi parameters, N ranks, B reduce_bucket_size (elements),
G sub_group_size, L and P stage 3's max_live_parameters and prefetch_bucket_size. Figures that it was
held against (tests/test_engines.py): 2 ranks, 33.6M parameters (B per parameter): ZeRO-2 step 12.0, ZeRO-1
backward 11.1, ZeRO-3 step 8.8, ZeRO-0 resident 14, backward 18, step 24.
"""

from collections.abc import Callable
from dataclasses import dataclass

from memcore.activations import checkpointing
from memcore.engines.base import Inputs, growing_gradients, is_update, resident, step_temporary
from memcore.engines.zero3_gather import GatherSettings, simulate
from memcore.scenario import Device, ZeroConfig
from memcore.states import State
from memcore.terms import Category, Formula, Moment, Phase, Term, during, in_phases, product
from memcore.units import ceil_div, round_up
from memcore.zero import ALIGNMENT_ELEMENTS, hpz_secondary_bytes

_STAGE_12 = "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py"
_STAGE_3 = "deepspeed 0.19.8, runtime/zero/stage3.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The sizes that the terms share. `slice_elements` is one rank's padded share of the trained values."""

    inputs: Inputs
    config: ZeroConfig
    slice_elements: int
    grad_bytes: int

    @property
    def optimizer_offloaded(self) -> bool:
        return self.inputs.scenario.offload.optimizer is not Device.NONE


def terms(inputs: Inputs) -> list[Term]:
    """The terms of one DeepSpeed rank at the scenario's stage."""
    trained, ranks = inputs.states.trained, inputs.ranks
    plan = _Plan(
        inputs=inputs,
        config=inputs.scenario.zero_config,
        slice_elements=_slice_elements(inputs, trained) if inputs.stage else trained,
        grad_bytes=inputs.states.trained_as.grad_dtype.size,
    )
    by_stage = {0: _stage_0, 1: _stage_1, 2: _stage_2, 3: _stage_3}
    return [*_kept(plan), *_padding(plan, trained, ranks), *by_stage[inputs.stage](plan)]


def _slice_elements(inputs: Inputs, trained: int) -> int:
    """Elements of a rank's slice: the flat group padded to 2 N, or at stage 3 each tensor padded to N."""
    ranks = inputs.ranks
    if inputs.stage < 3:
        return round_up(trained, ALIGNMENT_ELEMENTS * ranks) // ranks
    if inputs.inventory is None or inputs.states.trained != inputs.inventory.n_params:
        return ceil_div(trained, ranks)
    return sum(ceil_div(tensor.numel, ranks) for tensor in inputs.inventory.tensors())


def _kept(plan: _Plan) -> list[Term]:
    """Weights and optimizer states, less what is offloaded to the host."""
    offload = plan.inputs.scenario.offload
    gone = {Category.OPTIMIZER} if plan.optimizer_offloaded else set()
    if offload.parameters is not Device.NONE:
        gone.add(Category.WEIGHTS)
    states = plan.inputs.states.of(Category.WEIGHTS, Category.OPTIMIZER)
    return [resident(plan.inputs, state) for state in states if state.category not in gone]


def _padding(plan: _Plan, trained: int, ranks: int) -> list[Term]:
    """What rounding slices up adds over the theory's ceil(Psi / N), over all kept 4-byte and 2-byte states."""
    extra = plan.slice_elements - ceil_div(trained, ranks) if plan.inputs.stage else 0
    width = sum(
        state.element_bytes or 0
        for state in plan.inputs.states.of(Category.WEIGHTS, Category.OPTIMIZER)
        if state.divided_from <= plan.inputs.stage and state.elements == trained
    )
    if extra <= 0 or plan.optimizer_offloaded or width == 0:
        return []
    return [
        Term(
            name="slice_padding",
            category=Category.OPTIMIZER,
            bytes_at=extra * width,
            formula=Formula(symbols=r"w\,(S - \lceil \Psi / N \rceil)", numbers=product(width, extra)),
            source=f"{_STAGE_12}, nccl_start_alignment_factor; partition_parameters.py, _padding_size",
        )
    ]


def _gradient_state(plan: _Plan) -> State:
    return plan.inputs.states.of(Category.GRADIENTS)[0]


def _fp32_accumulation(plan: _Plan) -> State | None:
    """The second gradient of conventions that accumulate in FP32."""
    gradients = plan.inputs.states.of(Category.GRADIENTS)
    return gradients[1] if len(gradients) > 1 else None


def _alive_gradients(inputs: Inputs, moment: Moment) -> bool:
    """Whether a reduced slice of the gradients is alive: until the step has cast it, if it must."""
    if moment.phase in (Phase.FORWARD, Phase.LOSS):
        return inputs.accumulates
    return moment.phase is Phase.BACKWARD or (moment.phase is Phase.OPTIMIZER and not is_update(moment))


def _slice_term(plan: _Plan, width: int, alive: Callable[[Moment], bool], source: str) -> Term:
    num_bytes = width * plan.slice_elements
    return Term(
        name="gradient_slice",
        category=Category.GRADIENTS,
        bytes_at=during(plan.inputs.timeline, lambda moment: num_bytes if alive(moment) else 0),
        formula=Formula(symbols=rf"{width}\,\Psi / N", numbers=product(width, plan.slice_elements)),
        source=source,
    )


def _bucket(plan: _Plan, copies: int, phases: tuple[Phase, ...], source: str) -> list[Term]:
    """The flat buffer that gradients are copied into; without contiguous_gradients there is none."""
    if not plan.config.contiguous_gradients:
        return []
    elements, width = plan.config.reduce_bucket_size, plan.grad_bytes
    return [
        Term(
            name="reduce_bucket",
            category=Category.COMMUNICATION,
            bytes_at=in_phases(plan.inputs.timeline, copies * elements * width, *phases),
            formula=Formula(
                symbols=rf"{copies} \times {width}\,B" if copies > 1 else rf"{width}\,B",
                numbers=product(copies, width, elements) if copies > 1 else product(width, elements),
            ),
            source=source,
        )
    ]


def _stage_0(plan: _Plan) -> list[Term]:
    """Whole gradients; flattened for the all-reduce, one bucket at a time; cast and flattened for the step."""
    inputs, state, trained = plan.inputs, _gradient_state(plan), plan.inputs.states.trained
    flattened = min(trained, plan.config.reduce_bucket_size)
    mixed = inputs.states.trained_as.master_dtype is not None
    found = [growing_gradients(inputs, state, state.total_bytes, gone_at=lambda m: mixed and is_update(m))]
    if inputs.ranks > 1:
        found.append(
            Term(
                name="reduce_bucket",
                category=Category.COMMUNICATION,
                bytes_at=during(inputs.timeline, lambda m: flattened * plan.grad_bytes if m.segment == "reduce" else 0),
                formula=Formula(
                    symbols=rf"{plan.grad_bytes}\,\min(\Psi, B)", numbers=product(plan.grad_bytes, flattened)
                ),
                source="deepspeed 0.19.8, runtime/engine.py, buffered_allreduce_fallback",
            )
        )
    if mixed:
        found.append(
            Term(
                name="step_gradient_copies",
                category=Category.OPTIMIZER,
                bytes_at=_copies_at(inputs, 8 * trained, 4 * trained),
                formula=Formula(symbols=r"(4 + 4)\,\Psi", numbers=product(8, trained)),
                source="deepspeed 0.19.8, runtime/fp16/fused_optimizer.py, FP16_Optimizer.step: casts, then flattens",
            )
        )
    return [*found, *step_temporary(inputs, trained, inputs.states.trained_as.state_dtype.size, trained)]


def _stage_1(plan: _Plan) -> list[Term]:
    """Only the optimizer is divided. Without overlap_comm (the default) all gradients are whole until the
    end of the backward, then reduced through the bucket into this rank's slice."""
    inputs = plan.inputs
    accumulation = _fp32_accumulation(plan)
    if accumulation is not None:
        return _bf16_optimizer(plan, accumulation)
    if plan.config.overlap_comm:
        return _reduced_as_they_come(plan, copies=2)
    state, width = _gradient_state(plan), plan.grad_bytes
    if not plan.config.contiguous_gradients:
        # Reduced where they are: this rank's slice is a view of them until the step.
        in_place = growing_gradients(inputs, state, state.total_bytes, gone_at=is_update)
        return [in_place, *_step_copies(plan)]
    first_bucket = min(plan.config.reduce_bucket_size, inputs.states.trained) * width
    whole = growing_gradients(inputs, state, state.total_bytes, gone_at=lambda m: m.phase is Phase.OPTIMIZER)

    def at(moment: Moment, num_bytes: int) -> int:
        # The gradients in the bucket gave up their own storage to it when the slice is first allocated.
        return num_bytes - first_bucket if moment.segment == "reduce" else num_bytes

    kept = tuple(at(moment, whole.at(index)) for index, moment in enumerate(inputs.timeline))
    gradients = Term(
        name=whole.name, category=whole.category, bytes_at=kept, formula=whole.formula, source=whole.source
    )
    reduced = _slice_term(
        plan, width, lambda m: m.segment in ("reduce", "gradients"), f"{_STAGE_12}, copy_grads_in_partition"
    )
    bucket = _bucket(plan, 1, (Phase.BACKWARD,), f"{_STAGE_12}, setup_buckets")
    return [gradients, reduced, *bucket, *_step_copies(plan)]


def _stage_2(plan: _Plan) -> list[Term]:
    return _reduced_as_they_come(plan, copies=2 if plan.config.overlap_comm else 1)


def _reduced_as_they_come(plan: _Plan, copies: int) -> list[Term]:
    """Gradients go into the bucket as the backward makes them; what is this rank's goes on into its slice."""
    inputs, accumulation = plan.inputs, _fp32_accumulation(plan)
    width = accumulation.element_bytes if accumulation else plan.grad_bytes
    assert width is not None, "gradients have one dtype"
    bucket = _bucket(plan, copies, (Phase.BACKWARD,), f"{_STAGE_12}, setup_buckets")
    if accumulation is not None:
        # One flat FP32 slice, on the GPU even when the optimizer is not; the update takes it as it is.
        source = f"{_STAGE_12}, _build_compact_grad_partition_buffer"
        kept = _slice_term(plan, width, lambda m: _alive_gradients(inputs, m) or is_update(m), source)
        return [kept, *bucket, *_temporaries(plan)]
    if plan.optimizer_offloaded:
        # Reduced slices are copied to pinned host memory as they come.
        return bucket
    source = f"{_STAGE_12}, copy_grads_in_partition"
    return [_slice_term(plan, width, lambda m: _alive_gradients(inputs, m), source), *bucket, *_step_copies(plan)]


def _copies_at(inputs: Inputs, readying: int, updating: int) -> tuple[int, ...]:
    """Bytes of gradient copies while the step readies the gradients, and what is left of them at its update."""
    kept = {Phase.OPTIMIZER: readying}
    return during(inputs.timeline, lambda m: updating if is_update(m) else kept.get(m.phase, 0))


def _temporaries(plan: _Plan) -> list[Term]:
    """The optimizer's own temporaries, where it runs on the GPU."""
    state_bytes = plan.inputs.states.trained_as.state_dtype.size
    return (
        []
        if plan.optimizer_offloaded
        else step_temporary(plan.inputs, plan.slice_elements, state_bytes, plan.slice_elements)
    )


def _step_copies(plan: _Plan) -> list[Term]:
    """The step's flat gradient and its FP32 form, beside the slice. Only the last of them is left for the
    update, which adds the optimizer's own temporaries."""
    if plan.optimizer_offloaded:
        return []
    inputs, width = plan.inputs, plan.grad_bytes
    cast = 4 if inputs.states.trained_as.master_dtype is not None and width < 4 else 0
    each = width + cast
    copies = Term(
        name="step_gradient_copies",
        category=Category.OPTIMIZER,
        bytes_at=_copies_at(inputs, each * plan.slice_elements, (cast or width) * plan.slice_elements),
        formula=Formula(symbols=rf"{each}\,\Psi / N", numbers=product(each, plan.slice_elements)),
        source=f"{_STAGE_12}, step: flatten(averaged_gradients), then .to(float32)",
    )
    return [copies, *_temporaries(plan)]


def _bf16_optimizer(plan: _Plan, accumulation: State) -> list[Term]:
    """ZeRO-1 with BF16 and FP32 accumulation is a class of its own: a whole FP32 gradient that stays, and
    16-bit gradients that are zeroed after the step, not freed."""
    gradients = [resident(plan.inputs, state) for state in (_gradient_state(plan), accumulation)]
    return [*gradients, *_temporaries(plan)]


def _stage_3(plan: _Plan) -> list[Term]:
    """Everything is divided. The bucket and the gradient slice stay; the update goes one sub-group at a time."""
    inputs, config = plan.inputs, plan.config
    accumulation = _fp32_accumulation(plan)
    width = accumulation.element_bytes if accumulation else plan.grad_bytes
    assert width is not None, "gradients have one dtype"
    always = tuple(Phase)
    found = _bucket(plan, 1, always, f"{_STAGE_3}, DeepSpeedZeroOptimizer_Stage3.__init__ (ipg_buckets)")
    if not plan.optimizer_offloaded:
        slice_source = f"{_STAGE_3}, grad_partitions_flat_buffer"
        group = min(config.sub_group_size, plan.slice_elements)
        state_bytes = inputs.states.trained_as.state_dtype.size
        # Flattened in their own dtype, then cast; the cast of what is FP32 already is no copy.
        each = width + 4 if width < 4 else width
        found += [
            _slice_term(plan, width, lambda moment: True, slice_source),
            Term(
                name="step_gradient_copies",
                category=Category.OPTIMIZER,
                bytes_at=_copies_at(inputs, each * group, 4 * group),
                formula=Formula(symbols=rf"{each}\,\min(G, \Psi / N)", numbers=product(each, group)),
                source=f"{_STAGE_3}, _prepare_fp32_grad_for_sub_group: flatten(...).to(...)",
            ),
            *step_temporary(inputs, group, state_bytes, group),
        ]
    return [*found, *_gathered(plan), *_secondary(plan)]


def _gathered(plan: _Plan) -> list[Term]:
    """Weights that are whole while they are used, from the prefetcher's own queue; and those that always are."""
    inputs, inventory = plan.inputs, plan.inputs.inventory
    if inventory is None or inputs.ranks == 1:
        return []
    settings = gather_settings(plan.config)
    recompute = checkpointing(inputs.scenario.workload.checkpointing, len(inventory.layers))
    gathered = simulate(inventory, settings, tuple(group is not None for group in recompute.groups))
    width = inputs.states.precision.convention.compute_dtype.size

    def at(moment: Moment) -> int:
        if moment.phase is Phase.LOSS:
            return width * gathered.turn
        if not isinstance(moment.segment, int):
            return 0
        by_layer = {Phase.FORWARD: gathered.forward, Phase.BACKWARD: gathered.backward}[moment.phase]
        return width * by_layer[moment.segment]

    bytes_at = during(inputs.timeline, at)
    source = "deepspeed 0.19.8, runtime/zero"
    return [
        Term(
            name="gathered_parameters",
            category=Category.COMMUNICATION,
            bytes_at=bytes_at,
            formula=Formula(symbols=rf"{width}\,\Psi_{{gathered}}", numbers=product(width, max(bytes_at) // width)),
            source=f"{source}/partitioned_param_coordinator.py, fetch_sub_module and release_sub_module, simulated",
        ),
        Term(
            name="persistent_parameters",
            category=Category.COMMUNICATION,
            bytes_at=width * gathered.persistent,
            formula=Formula(symbols=rf"{width}\,\Psi_{{small}}", numbers=product(width, gathered.persistent)),
            source=f"{source}/parameter_offload.py, mark_persistent_parameters",
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


def _secondary(plan: _Plan) -> list[Term]:
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
            formula=Formula(symbols=rf"{width}\,\Psi / H", numbers=f"{width} × ⌈{states.n_params:,} / {group:,}⌉"),
            source="arXiv 2306.10209, section 3.2; deepspeed 0.19.8, partition_parameters.py, _partition_param_sec",
        )
    ]

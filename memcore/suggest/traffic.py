"""What settings cost in time: what a step waits for, what it sends, and how often it starts a collective.

No seconds: those would need a bandwidth, a latency and a degree of overlap that nobody has measured on the user's
machine. Instead four counts are compared, one after the other; a smaller one is faster:

1. bytes that no computation runs beside. They lengthen the step by their whole time, and what runs beside
   computation may cost nothing (arXiv 2006.15704, section 3.2.3).
2. bytes sent. Over any link they bound the step's time from below.
3. collectives started. Each has its latency, and a small one leaves the link idle (the same, section 3.2.2).
4. pieces of the optimizer's update, each with its own kernels.

What the order implies: a bucket is filled until the last one, which nothing is left to run beside, would grow.

Source of what is gathered and reduced when: deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (as run
by :mod:`memcore.engines.zero3_gather`), stage3.py and stage_1_and_2.py (overlap_comm chooses the stream;
reduce_independent_p_g_buckets_and_remove_grads); torch 2.13, distributed/fsdp/_fully_shard.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from memcore.activations import checkpointing
from memcore.engine_options import EngineName
from memcore.engines import Inputs
from memcore.engines.deepspeed.plan import slice_elements, trained_tensors
from memcore.engines.deepspeed.stage_3 import gather_settings
from memcore.engines.fsdp2_units import own_blocks
from memcore.engines.zero3_gather import simulate
from memcore.units import ceil_div


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Traffic:
    """One step's communication as one GPU of those that share the states sends it; the smaller, the faster.

    `exposed_bytes` of `sent_bytes` have nothing computed beside them; `launches` collectives; `updates` pieces that
    the optimizer's update goes in.
    """

    exposed_bytes: int = 0
    sent_bytes: int = 0
    launches: int = 0
    updates: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            exposed_bytes=self.exposed_bytes + other.exposed_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            launches=self.launches + other.launches,
            updates=self.updates + other.updates,
        )


def traffic(inputs: Inputs) -> Traffic:
    """All of a step's traffic under DeepSpeed or FSDP2."""
    if inputs.scenario.parallelism.engine is EngineName.FSDP2:
        return _fsdp2(inputs)
    return gather_traffic(inputs) + reduce_traffic(inputs) + update_traffic(inputs)


def gather_traffic(inputs: Inputs) -> Traffic:
    """Weights: below stage 3 gathered once after the update, in one piece, with nothing to run beside. At stage 3
    gathered for each micro-step, and once after the update, as one, those that every rank keeps whole. These are not
    counted as exposed: they are few, and are kept for the latency that it saves (deepspeed 0.19.8,
    runtime/zero/config.py, param_persistence_threshold: "latency-bound messages")."""
    states, ranks = inputs.states, inputs.ranks
    width = states.precision.convention.compute_dtype.size
    if ranks == 1 or inputs.stage == 0:
        return Traffic()
    if inputs.stage < 3:
        sent = _sent(inputs, states.trained, width)
        return Traffic(exposed_bytes=sent, sent_bytes=sent, launches=1)
    if inputs.inventory is None:
        return Traffic()
    recompute = checkpointing(inputs.scenario.workload.checkpointing, len(inputs.inventory.layers))
    recomputed = tuple(group is not None for group in recompute.groups)
    found = simulate(inputs.inventory, gather_settings(inputs.scenario.zero_config), recomputed)
    micro_steps, overlaps = inputs.scenario.workload.grad_accum, overlaps_communication(inputs)
    awaited = found.awaited if overlaps else found.fetched
    return Traffic(
        exposed_bytes=_sent(inputs, micro_steps * awaited, width),
        sent_bytes=_sent(inputs, micro_steps * found.fetched + found.persistent, width),
        launches=micro_steps * found.gathers + bool(found.persistent),
    )


def reduce_traffic(inputs: Inputs) -> Traffic:
    """Gradients: a collective whenever the next one would not go into the bucket, and one for what is left.

    Beside the backward all but the last run, where overlap_comm is on; else none. Stage 1 reduces once for all
    micro-steps.
    """
    states = inputs.states
    if inputs.ranks == 1:
        return Traffic()
    bucket, width = inputs.scenario.zero_config.reduce_bucket_size, states.trained_as.reduce_dtype.size
    sizes = [tensor.numel for tensor in reversed(trained_tensors(inputs))]
    flushes, last = (
        _flushes(sizes, bucket) if sizes else (ceil_div(states.trained, bucket), min(states.trained, bucket))
    )
    times = inputs.scenario.workload.grad_accum if inputs.stage >= 2 else 1
    exposed = last if overlaps_communication(inputs) else states.trained
    return Traffic(
        exposed_bytes=_sent(inputs, times * exposed, width),
        sent_bytes=_sent(inputs, times * states.trained, width),
        launches=times * flushes,
    )


def update_traffic(inputs: Inputs) -> Traffic:
    """At stage 3 the sub-groups: one is closed once it holds sub_group_size elements (_create_fp16_sub_groups)."""
    if inputs.stage < 3:
        return Traffic(updates=1)
    limit, tensors = inputs.scenario.zero_config.sub_group_size, trained_tensors(inputs)
    if not tensors:
        return Traffic(updates=ceil_div(slice_elements(inputs), limit))
    filled, closed = 0, 0
    for tensor in tensors:
        filled += ceil_div(tensor.numel, inputs.ranks)
        if filled >= limit:
            filled, closed = 0, closed + 1
    return Traffic(updates=closed + bool(filled))


def overlaps_communication(inputs: Inputs) -> bool:
    """Whether overlap_comm is in force: on by default at stage 3 only (DeepSpeedZeroConfig.overlap_comm_valid)."""
    given = inputs.scenario.zero_config.overlap_comm
    return inputs.stage == 3 if given is None else given


def _flushes(sizes: Iterable[int], bucket: int) -> tuple[int, int]:
    """How often the bucket is reduced as gradients of these sizes come, and the elements of the last time."""
    filled, flushed = 0, 0
    for size in sizes:
        if filled and filled + size > bucket:
            filled, flushed = 0, flushed + 1
        filled += size
    return flushed + bool(filled), filled


def _brimful(elements: int, bucket: int) -> list[int]:
    whole, rest = divmod(elements, bucket)
    return [rest] * bool(rest) + [bucket] * whole


def _fsdp2(inputs: Inputs) -> Traffic:
    """The root is gathered once, each other unit for its forward and, if it was resharded, for its backward; then each
    is reduced. Nothing runs beside the gather of what comes first and of the first layer, nor beside what is reduced
    last."""
    inventory, states = inputs.inventory, inputs.states
    if inventory is None or inputs.ranks == 1:
        return Traffic(updates=1)
    precision, config = states.precision.convention, inputs.scenario.fsdp2_config
    own = own_blocks(inventory, inputs.scenario)
    head = sum(block.numel for block in own[1:])
    kinds = [*["block"] * (len(inventory.layers) - 1), "last_block", *(["embedding", "head"] if own else [])]
    sizes = [*(layer.numel for layer in inventory.layers), *([own[0].numel, head] if own else [])]
    again = [size for size, kind in zip(sizes, kinds, strict=True) if config.reshards(kind)]
    root = inventory.n_params - sum(sizes)
    first = root + (own[0].numel if own else 0)
    micro_steps = inputs.scenario.workload.grad_accum
    gather, reduce = precision.compute_dtype.size, states.trained_as.reduce_dtype.size
    exposed = _sent(inputs, first + sizes[0], gather) + _sent(inputs, min(first, states.trained), reduce)
    gathered = inventory.n_params + sum(again)
    units = len(sizes) + bool(root)
    return Traffic(
        exposed_bytes=micro_steps * exposed,
        sent_bytes=micro_steps * (_sent(inputs, gathered, gather) + _sent(inputs, states.trained, reduce)),
        launches=micro_steps * (2 * units + len(again)),
        updates=1,
    )


def _sent(inputs: Inputs, elements: int, element_bytes: int) -> int:
    """What a ring sends from each GPU: (N - 1) / N of it."""
    return elements * element_bytes * (inputs.ranks - 1) // inputs.ranks

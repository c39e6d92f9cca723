"""Each storage of the whole model's step by itself: as a trace of every layer has them.

Run: pytest tests/trace/test_storages.py (half a minute).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from small_models import of_depth, requested

from memcore.trace.replay import timeline
from memcore.trace.request import Adapters, FlatSharding, Sharding
from memcore.trace.storages import by_layer, events
from memcore.trace.tape import Tape
from memcore.trace.tracer import record


def in_order(tape: Tape) -> Iterator[tuple[int, int, int]]:
    """Every event of the step: the storage by order of birth, its bytes, its stream."""
    numbers: dict[int, int] = {}
    for _moment, found in events(tape):
        for event in found:
            yield numbers.setdefault(event.storage, len(numbers)), event.num_bytes, event.stream


RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpointing": "full", "reentrant": True},
    "in segments": {"checkpointing": "segments(2)"},
    "autocast": {"autocast": True, "dtype": "bf16", "kernels": "cuda"},
    "adapters": {"adapters": Adapters(rank=4, targets=("all-linear",), dtype="fp32", quantization="nf4")},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "tied llama", "gemma3_text", "mixtral", "deepseek_v3"])
def test_a_few_layers_tell_the_storages_of_all(name: str, recipe: str):
    """Which storage is given back when, as well as how large it is."""
    request = requested(of_depth(name, 8), seq_len=48, **RECIPES[recipe])
    thin, full = record(request), record(replace(request, full_depth=True))
    assert name != "llama" or thin.traced_layers < full.traced_layers == 8
    assert list(in_order(thin)) == list(in_order(full))


@pytest.mark.parametrize("recipe", RECIPES)
def test_they_add_up_to_the_tapes_own_changes(recipe: str):
    tape = record(requested(of_depth("llama", 6), seq_len=48, **RECIPES[recipe]))
    alive: dict[int, int] = {}
    for _moment, found in events(tape):
        for event in found:
            if event.num_bytes:
                alive[event.storage] = event.num_bytes
            else:
                del alive[event.storage]
    assert sum(alive.values()) == sum(size for *_where, size in timeline(tape))


def test_moments_are_the_steps_own():
    """A segment of two layers is in its forward at its first layer, in its backward at its last."""
    tape = record(requested(of_depth("llama", 4), checkpointing="segments(2)"))
    labels = [moment for moment, _events in by_layer(tape)]
    assert labels == ["forward[0]", "forward[2]", "loss", "backward[3]", "backward[1]"]


def test_fsdp2_gathers_and_reduces_on_streams_of_its_own():
    """torch 2.13, _fsdp_collectives.py: what is gathered is allocated on the copy-in stream, what reductions give on
    theirs; all else is on the default stream."""
    sharding = Sharding(shard=4, replicate=1, reshard_after_forward=True, param_dtype="fp32", reduce_dtype="fp32")
    tape = record(requested(of_depth("llama", 4), dtype="bf16", sharding=sharding))
    streams: dict[int, set[str]] = {}
    for owner, stream, size in zip(tape.owners, tape.streams, tape.changes, strict=True):
        if size > 0:
            streams.setdefault(stream, set()).add(tape.keys[owner][0])
    assert len(streams) == 3
    assert streams[0] >= {"saved", "temporary", "loss", "gathered"}
    others = [found for stream, found in streams.items() if stream]
    assert {"gathered"} in others
    assert any(found <= {"reduced", "gradients"} for found in others)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fsdp1_fetches_the_unit_after_next_and_gives_each_back(checkpointing: str):
    """torch's FullyShardedDataParallel gathers for the backward one unit ahead: what a unit fetches goes two units
    later, also where the units are repeated."""
    flat = FlatSharding(
        shard=4, param_dtype="bf16", compute_dtype="bf16", reduce_dtype="bf16", reshard_after_forward=True,
        use_orig_params=False, backward_prefetch="pre", adapters="inside", around=True,
    )  # fmt: skip
    tape = record(requested(of_depth("llama", 8), dtype="bf16", sharding=flat, checkpointing=checkpointing))
    alive: dict[int, int] = {}
    gradients = 0
    for _moment, found in events(tape):
        for event in found:
            gradients += event.num_bytes if event.gradient else 0
            alive[event.storage] = event.num_bytes
            if not event.num_bytes:
                del alive[event.storage]
    assert sum(alive.values()) == gradients == sum(size for *_where, size in timeline(tape)) > 0

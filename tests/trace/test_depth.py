"""A trace of a few layers, replayed over all, equals a trace of every layer: to the byte, at every moment.

Run: pytest tests/trace/test_depth.py (a minute and a half).
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import KINDS, of_depth, traced

from memcore.trace.profile import ActivationProfile, dump_profile, load_profile
from memcore.trace.replay import replay, timeline
from memcore.trace.request import Adapters
from memcore.trace.tape import GRADIENTS, Tape

ARCHITECTURES = (
    "llama", "tied llama", "qwen3", "gpt2, dropout", "gpt_neox", "gemma3_text", "smollm3", "mixtral", "gpt_oss",
    "deepseek_v3", "qwen3_next",
)  # fmt: skip


def at_the_loss(profile: ActivationProfile) -> dict[str, int]:
    """What the loss itself has alive, by module."""
    rows = (row for row in profile.rows if row.category == "loss")
    return {row.module: row.bytes_at[profile.num_layers] for row in rows}


def assert_same(config: dict[str, Any], **wanted: Any) -> ActivationProfile:
    replayed = traced(config, **wanted)
    full = traced(config, full_depth=True, **wanted)
    assert full.traced_layers == full.num_layers == replayed.num_layers
    assert replayed.totals == full.totals
    assert replayed.with_gradients == full.with_gradients
    # Temporary or saved is a matter of what follows a layer, so that categories may shift at a boundary of kinds;
    # what a whole step saves, recomputes and spends on the loss may not.
    assert at_the_loss(replayed) == at_the_loss(full)
    return replayed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replayed_depth_is_full_depth(name: str, kind: str):
    replayed = assert_same(of_depth(name, 9), checkpointing=kind, seq_len=48)
    assert replayed.num_layers == 9


@pytest.mark.parametrize("attention", ["eager", "memory_efficient"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_other_attentions_and_bf16_too(name: str, attention: str):
    assert_same(of_depth(name, 8), attention=attention, dtype="bf16", micro_batch=2, seq_len=33, kernels="cuda")


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "gpt2"])
def test_shallow_models(name: str, num_layers: int):
    """The first layer is then the last as well, or there is nothing between them."""
    for kind in ("none", "full", "segments(1)", "first(1)"):
        assert_same(of_depth(name, num_layers), checkpointing=kind, seq_len=32)


def test_few_layers_run():
    """Depth costs nothing: the first, the last, and one of each kind between."""
    assert traced(of_depth("llama", 40)).traced_layers == 3
    assert traced(of_depth("gemma3_text", 40)).traced_layers == 4
    assert traced(of_depth("llama", 40), checkpointing="segments(4)").traced_layers == 12


def test_a_last_segment_that_is_shorter():
    """Seven layers in segments of three: 3, 3 and 1."""
    assert_same(of_depth("llama", 7), checkpointing="segments(3)")


def test_the_decoder_alone_has_no_loss():
    profile = assert_same(of_depth("llama", 6), loss="none")
    assert max(profile.of("loss")) < max(traced(of_depth("llama", 6)).of("loss"))


def test_profiles_survive_their_data():
    profile = traced(of_depth("gemma3_text", 12))
    assert load_profile(dump_profile(profile)) == profile


def test_every_recipe_replays():
    """Adapters, packed weights, autocast's copies, saved operations, reentrant checkpoints and other losses."""
    config, lora = of_depth("llama", 7), Adapters(rank=4, targets=("all-linear",), dtype="fp32")
    for kernels, kinds in (("cpu", ("none", "full")), ("cuda", ("segments(2)",))):
        for kind in kinds:
            assert_same(config, kernels=kernels, checkpointing=kind, adapters=lora, dtype="bf16")
            assert_same(config, kernels=kernels, checkpointing=kind, adapters=replace(lora, quantization="nf4"))
            assert_same(config, kernels=kernels, checkpointing=kind, autocast=True, dtype="bf16")
        assert_same(config, kernels=kernels, checkpointing="save(attention,mm)", micro_batch=2)
        assert_same(config, kernels=kernels, checkpointing="full", reentrant=True)
        assert_same(config, kernels=kernels, code="litgpt", dtype="bf16", adapters=replace(lora, dtype="bf16"))
        assert_same(config, kernels=kernels, fused_kernels=("rmsnorm", "rope", "swiglu"), dtype="bf16")
        assert_same(config, kernels=kernels, loss="chunked")
        assert_same(config, kernels=kernels, loss="fused")


# --- the replay by itself -------------------------------------------------------------------------------------------

KEYS = (("saved", "mlp"), ("temporary", "mlp"), (GRADIENTS, ""))
CHANGES = st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 2), st.booleans()), max_size=8)


def tape_of(segments: dict[str, list[tuple[int, int, bool]]], order: list[int]) -> Tape:
    """A tape of changes by segment: bytes, key, and whether the storage is shared by all units."""
    names = ("before", *(name for name in segments if name != "before"))
    rows = [(names.index(name), *change) for name, changes in segments.items() for change in changes]
    return Tape(
        segments=names,
        keys=KEYS,
        places=tuple(place for place, _size, _key, _shared in rows),
        owners=tuple(key for _place, _size, key, _shared in rows),
        born=tuple(0 if shared else place for place, _size, _key, shared in rows),
        rounded=(False,) * len(rows),
        storages=tuple(range(len(rows))),
        streams=(0,) * len(rows),
        changes=tuple(size for _place, size, _key, _shared in rows),
        order=tuple(order),
        unit_sizes=(1,) * len(order),
        traced_layers=max(order) + 1,
        attention="flash",
        trained_bytes=4,
        positions=0,
        has_table=False,
        text_alone=False,
        optimizer_step_bytes=None,
        versions="none",
    )


@given(
    units=st.lists(st.tuples(CHANGES, CHANGES), min_size=1, max_size=3),
    before=CHANGES,
    loss=CHANGES,
    picks=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_replay_is_the_plain_walk_through_all_changes(units: Any, before: Any, loss: Any, picks: list[int]):
    """Segments are summed up once and added; walking every change in order must give the same levels."""
    order = [pick % len(units) for pick in picks]
    order = [sorted(set(order)).index(pick) for pick in order]
    segments = {"before": before, "loss": loss}
    for place in set(order):
        segments |= {f"forward {place}": units[place][0], f"backward {place}": units[place][1]}
    replayed = replay(tape_of(segments, order))
    forwards = [[*(before if place == 0 else []), *units[unit][0]] for place, unit in enumerate(order)]
    backwards = [
        [change for change in units[unit][1] if order.index(unit) == place or not change[2]]
        for place, unit in enumerate(order)
    ]
    run = [*forwards, loss, *reversed(backwards)]
    level = everything = 0
    told = [(size, category) for _moment, category, _module, size in timeline(tape_of(segments, order))]
    assert told == [(size, KEYS[key][0]) for changes in run for size, key, _shared in changes]
    for changes, alive, with_gradients in zip(run, replayed.alive, replayed.with_gradients, strict=True):
        best, most = level, everything
        for size, key, _shared in changes:
            everything += size
            most = max(most, everything)
            level += 0 if KEYS[key][0] == GRADIENTS else size
            best = max(best, level)
        assert sum(alive) == best
        assert with_gradients == most


def test_what_units_leave_for_the_end_of_the_forward_is_given_back_for_each_of_them():
    """Five layers like the second of three, each with 10 bytes that live until the loss."""
    segments = {
        "before": [],
        "forward 0": [(1, 0, False)],
        "forward 1": [(10, 0, False)],
        "forward 2": [(1, 0, False)],
        "loss": [(-10, 0, False)],
    }
    tape = tape_of(segments, [0, 1, 1, 1, 1, 1, 2])
    first = tape.segments.index("forward 1")
    born = tuple(first if change == -10 else place for change, place in zip(tape.changes, tape.born, strict=True))
    replayed = replay(replace(tape, born=born))
    assert [sum(alive) for alive in replayed.alive] == [1, 11, 21, 31, 41, 51, 52, 52, *[2] * 7]

"""A trace of a few layers, replayed over all, equals a trace of every layer: to the byte, at every moment.

Run: pytest tests/trace/test_depth.py (a minute and a half).
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import CONFIGS, KINDS, traced

from memcore.trace.profile import ActivationProfile, dump_profile, load_profile
from memcore.trace.replay import GRADIENTS, TracedStep, TracedUnit, replay

ARCHITECTURES = (
    "llama", "tied llama", "qwen3", "gpt2, dropout", "gpt_neox", "gemma3_text", "smollm3", "mixtral", "gpt_oss",
    "deepseek_v3", "qwen3_next",
)  # fmt: skip


def of_depth(name: str, num_layers: int) -> dict[str, Any]:
    """A model's config with another number of layers, whose kinds go on as they began."""
    config = dict(CONFIGS[name])
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][i % 3] for i in range(num_layers)]
    return config


def totals(profile: ActivationProfile) -> list[int]:
    return [sum(moment.values()) for moment in (*profile.forward, profile.loss, *profile.backward)]


def assert_same(config: dict[str, Any], **wanted: Any) -> ActivationProfile:
    replayed = traced(config, **wanted)
    full = traced(config, full_depth=True, **wanted)
    assert full.traced_layers == full.num_layers == replayed.num_layers
    assert totals(replayed) == totals(full)
    assert replayed.with_gradients == full.with_gradients
    # Temporary or saved is a matter of what follows a layer, so that categories may shift at a boundary of kinds;
    # what a whole step saves, recomputes and spends on the loss may not.
    assert replayed.loss == full.loss
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
    assert profile.loss.get("loss", 0) < traced(of_depth("llama", 6)).loss["loss"]


def test_profiles_survive_their_data():
    profile = traced(of_depth("gemma3_text", 12))
    assert load_profile(dump_profile(profile)) == profile


# --- the replay by itself -------------------------------------------------------------------------------------------

EVENTS = st.lists(st.tuples(st.integers(-9, 9), st.sampled_from(["saved", "temporary", GRADIENTS])), max_size=8)


@given(
    units=st.lists(st.tuples(EVENTS, EVENTS, EVENTS), min_size=1, max_size=3),
    before=EVENTS,
    loss=EVENTS,
    picks=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_replay_is_the_plain_walk_through_all_events(units: Any, before: Any, loss: Any, picks: list[int]):
    """Segments are summed up once and added; walking every event in order must give the same levels."""
    order = [pick % len(units) for pick in picks]
    step = TracedStep(
        before=tuple(before),
        units=tuple(
            TracedUnit(forward=tuple(ahead), backward=tuple(back), repeated=tuple(more)) for ahead, back, more in units
        ),
        loss=tuple(loss),
    )
    replayed = replay(step, order)
    forwards = [[*(before if place == 0 else []), *units[unit][0]] for place, unit in enumerate(order)]
    backwards = [units[unit][1 if order.index(unit) == place else 2] for place, unit in enumerate(order)]
    run = [*forwards, loss, *reversed(backwards)]
    found = [*replayed.forward, replayed.loss, *reversed(replayed.backward)]
    level = everything = most = 0
    for events, moment in zip(run, found, strict=True):
        best = level
        for change, category in events:
            everything += change
            most = max(most, everything)
            level += 0 if category == GRADIENTS else change
            best = max(best, level)
        assert sum(moment.values()) == best
    assert replayed.with_gradients == most

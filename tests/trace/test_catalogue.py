"""Every catalogue model traces, or says in one sentence what it does instead; a trace that fails harms nobody.

Run: pytest tests/trace/test_catalogue.py (half a minute).
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from small_models import CONFIGS

from memcore.jobs import JobResult, JobStatus, LaneLimits, LightLane
from memcore.models import catalogue, catalogue_inventory, catalogue_model
from memcore.scenario import parse_scenario
from memcore.trace.profile import load_profile
from memcore.trace.request import trace_request

WITH_CONFIG = [name for name in catalogue() if catalogue_model(name).config is not None]
LIMIT_S = 180
SHORT = {"openai-community/gpt2", "openai-community/gpt2-xl"}
TEXT_ALONE = {"google/gemma-3-4b-pt", "google/gemma-3-12b-pt", "google/gemma-3-27b-pt"}


@pytest.fixture(scope="module")
def lane() -> Iterator[LightLane]:
    lane = LightLane(LaneLimits(workers=2, timeout_s=120, cache_entries=0), quiet=True)
    yield lane
    lane.close()


def ask(lane: LightLane, config: dict[str, Any], *, timeout_s: float | None = None, **wanted: Any) -> JobResult:
    defaults = {
        "micro_batch": 1,
        "seq_len": 128,
        "dtype": "bf16",
        "attention": "flash",
        "checkpointing": "none",
        "loss": "unfused",
    }
    return lane.run("trace", {"config": config, **defaults, **wanted}, timeout_s=timeout_s)


def assert_one_sentence(result: JobResult) -> str:
    assert result.status is JobStatus.FAILED
    assert result.message.endswith(".") or ": " in result.message
    assert "\n" not in result.message
    assert len(result.message) < 400
    return result.message


def test_every_model_traces_or_says_why_not(lane: LightLane):
    start = time.monotonic()
    refused, fallen_back, text_alone = set(), set(), set()
    for name in WITH_CONFIG:
        data = {"model": {"name": name}, "recipe": {"convention": "pure_bf16"}, "workload": {"seq_len": 2048}}
        request = trace_request(parse_scenario(data))
        assert isinstance(request, dict)
        result = lane.run("trace", request)
        if result.status is not JobStatus.DONE:
            assert "1,024 positions" in assert_one_sentence(result)
            refused.add(name)
            continue
        assert result.value is not None
        profile = load_profile(result.value)
        inventory = catalogue_inventory(name)
        assert inventory is not None
        assert profile.num_layers == len(inventory.layers)
        assert len(profile.totals) == 2 * profile.num_layers + 1
        assert profile.traced_layers <= 4
        # At the least, each layer keeps its input in 16 bit; the most is below a card's memory many times over.
        assert profile.peak() > 2 * 2048 * inventory.shapes.hidden_size * profile.num_layers
        if profile.attention != "flash":
            assert any("plain attention" in note for note in profile.notes)
            fallen_back.add(name)
        if any("text model alone" in note for note in profile.notes):
            text_alone.add(name)
    assert refused == SHORT
    assert fallen_back == set()
    assert text_alone == TEXT_ALONE
    assert time.monotonic() - start < LIMIT_S


@pytest.mark.parametrize("name", sorted(SHORT))
def test_learned_positions_end_where_the_table_ends(lane: LightLane, name: str):
    config = dict(catalogue_model(name).config or {})
    assert ask(lane, config, seq_len=1024).status is JobStatus.DONE
    refused = ask(lane, config, seq_len=1025)
    message = assert_one_sentence(refused)
    assert "1,024" in message
    assert "1,025" in message
    assert refused.field == "workload.seq_len"


def test_rotary_positions_go_on_with_a_note(lane: LightLane):
    config = CONFIGS["llama"]
    inside, beyond = (ask(lane, config, seq_len=tokens) for tokens in (1024, 1025))
    assert inside.value is not None
    assert beyond.value is not None
    assert inside.value["notes"] == []
    assert "1,024" in beyond.value["notes"][0]


@pytest.mark.parametrize(
    "wanted",
    [
        {"micro_batch": 0},
        {"seq_len": 0},
        {"seq_len": 10**9},
        {"micro_batch": 10**9},
        {"micro_batch": 10**5, "seq_len": 10**5},
    ],
    ids=str,
)
def test_absurd_sizes_get_one_sentence(lane: LightLane, wanted: dict[str, Any]):
    assert_one_sentence(ask(lane, CONFIGS["llama"], **wanted))


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 7},
        {"num_hidden_layers": 0},
        {"hidden_size": 2**40},
        {"model_type": "vit"},
        {"model_type": "no such model"},
        {"hidden_act": "no such function"},
    ],
    ids=str,
)
def test_a_config_whose_trace_raises_gets_one_sentence_and_the_next_one_is_traced(
    lane: LightLane, change: dict[str, Any]
):  # fmt: skip
    good = ask(lane, CONFIGS["llama"])
    assert_one_sentence(ask(lane, {**CONFIGS["llama"], **change}))
    again = ask(lane, CONFIGS["llama"])
    assert again.status is JobStatus.DONE
    assert again.value == good.value


def test_more_checkpointed_layers_than_there_are(lane: LightLane):
    result = ask(lane, CONFIGS["llama"], checkpointing="segments(5)")
    assert "4 layers" in assert_one_sentence(result)
    assert result.field == "workload.checkpointing"


def test_a_trace_beyond_its_time_ends_and_the_next_one_is_traced(lane: LightLane):
    deep = dict(catalogue_model("meta-llama/Llama-3.1-405B").config or {})
    good = ask(lane, CONFIGS["llama"])
    late = ask(lane, deep, full_depth=True, timeout_s=0.2)
    assert late.status is JobStatus.TIMED_OUT
    assert late.message
    assert ask(lane, CONFIGS["llama"]).value == good.value

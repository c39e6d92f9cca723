"""A link reproduces its scenario, stays under 4,096 characters, and whatever else is in a link is said, never raised.

Run: pytest tests/test_link.py
"""

import base64
import json
import tracemalloc
import zlib
from typing import Any

import pytest
from generated_scenarios import TINY_LLAMA, scenarios
from hypothesis import given
from hypothesis import strategies as st

from memcore.errors import UserError
from memcore.link import _DICTIONARY, MAX_IGNORED, MAX_LINK_CHARS, ReadLink, read_link, write_link
from memcore.models import catalogue
from memcore.scenario import Scenario, parse_scenario

PLAIN: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "hardware": {"gpu": "A100-80GB", "gpus": 16},
    "parallelism": {"engine": "deepspeed", "zero_stage": 3},
    "recipe": {"optimizer": {"name": "lion"}},
    "workload": {"grad_accum": 4},
}


def packed(text: bytes, version: str = "1") -> str:
    """A link that holds any text, made as :func:`write_link` makes one."""
    packer = zlib.compressobj(9, zdict=_DICTIONARY)
    body = packer.compress(text) + packer.flush()
    return f"{version}.{base64.urlsafe_b64encode(body).decode().rstrip('=')}"


def read_data(data: object) -> ReadLink:
    return read_link(packed(json.dumps(data).encode()))


def assert_ignored_whole(link: str, *words: str) -> None:
    """Nothing is taken from the link, and one sentence says so."""
    read = read_link(link)
    assert read.scenario is None
    assert len(read.ignored) == 1
    assert all(word in read.ignored[0] for word in words)


@given(scenario=scenarios())
def test_a_link_gives_back_its_scenario(scenario: Scenario):
    link = write_link(scenario)
    assert read_link(link) == ReadLink(scenario=scenario)
    assert len(link) <= MAX_LINK_CHARS
    assert link.isascii()


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_model_of_the_catalogue_by_name_and_by_config(name: str):
    for model in ({"name": name}, {"config": catalogue()[name].config}):
        if model != {"config": None}:
            scenario = parse_scenario({**PLAIN, "model": model})
            link = write_link(scenario)
            assert read_link(link) == ReadLink(scenario=scenario)
            assert len(link) <= MAX_LINK_CHARS


@pytest.mark.parametrize("key", ["größe", "尺寸", "\x00", "half of a pair: \ud800"])
def test_a_config_with_strange_keys_still_makes_a_link(key: str):
    read = read_link(write_link(parse_scenario({"model": {"config": {**TINY_LLAMA, key: 3}}})))
    assert read.ignored == ()
    assert read.scenario is not None
    assert read.scenario.model.config is not None
    assert TINY_LLAMA.items() <= read.scenario.model.config.items()


def test_a_scenario_too_large_for_a_link_is_refused():
    # Keys that compress badly.
    keys = {f"{number * 7_654_321 % 1_000_003:x}{number**5:x}": number**7 for number in range(500)}
    scenario = parse_scenario({"model": {"config": {**TINY_LLAMA, **keys}}})
    with pytest.raises(UserError, match="share it as JSON"):
        write_link(scenario)


class TestIgnoredLinks:
    @given(junk=st.text(max_size=200))
    def test_any_text_is_said_and_never_raised(self, junk: str):
        read = read_link(junk)
        assert read.scenario is None
        assert read.ignored

    @given(junk=st.binary(max_size=200))
    def test_any_bytes_packed_as_a_link_are_said(self, junk: bytes):
        assert read_link(packed(junk)).ignored

    @pytest.mark.parametrize("link", ["x", "1", "1.", ".abc", "²." + "a" * 20, "1." + "a" * MAX_LINK_CHARS])
    def test_not_a_link(self, link: str):
        assert_ignored_whole(link, "was cut off")

    @pytest.mark.parametrize("link", ["1.abc", "1.äöü", "1.%%%%", "1." + "A" * 100, "1.<script>"])
    def test_damaged(self, link: str):
        assert_ignored_whole(link, "damaged")

    def test_every_cut_of_a_link(self):
        link = write_link(parse_scenario(PLAIN))
        for length in range(1, len(link)):
            read = read_link(link[:length])
            assert read.scenario is None
            assert len(read.ignored) == 1

    def test_another_version_names_both(self):
        assert_ignored_whole(packed(json.dumps(PLAIN).encode(), "2"), "version 2", "reads version 1")

    def test_a_long_version_is_shown_short(self):
        assert len(read_link("9" * 500 + ".abc").ignored[0]) < 120

    @pytest.mark.parametrize("bomb", [b" " * 50_000_000, b"[" * 190_000, b'{"model":' * 20_000, b"1" * 100_000])
    def test_bombs(self, bomb: bytes):
        link = packed(bomb)
        if len(link) > MAX_LINK_CHARS:
            link = packed(bomb[: len(bomb) // 20])
        assert read_link(link).scenario is None

    def test_a_bomb_is_not_unpacked_further_than_its_limit(self):
        layers = zlib.compress(b"\0" * 3_000_000, 9)
        link = f"1.{base64.urlsafe_b64encode(layers).decode()}"
        assert len(link) <= MAX_LINK_CHARS
        tracemalloc.start()
        assert read_link(link).scenario is None
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        tracemalloc.stop()

    @pytest.mark.parametrize("data", [[], "text", 3, None, True])
    def test_not_an_object(self, data: object):
        assert read_data(data).scenario is None

    @pytest.mark.parametrize("number", [b"NaN", b"-Infinity"])
    def test_numbers_that_json_does_not_have(self, number: bytes):
        text = b'{"model": {"config": {"model_type": "llama", "rope_theta": ' + number + b"}}}"
        assert read_link(packed(text)).scenario is None

    @pytest.mark.parametrize("number", [b"Infinity", b"1e999", b"[0.0, Infinity]"])
    def test_infinity_in_a_config_is_left_out(self, number: bytes):
        text = b'{"model": {"config": {"model_type": "llama", "time_step_limit": ' + number + b"}}}"
        scenario = read_link(packed(text)).scenario
        assert scenario is not None
        assert scenario.model.config == {"model_type": "llama"}


class TestUnusableFields:
    """One field that cannot be used is said, left at its default, and the rest is kept."""

    @pytest.mark.parametrize(
        ("part", "field", "value"),
        [
            ("hardware", "gpu", "H900"),
            ("hardware", "gpus_per_node", 3),
            ("parallelism", "zero_stage", 9),
            ("parallelism", "tp", 2),
            ("parallelism", "dp_shard", 5),
            ("recipe", "method", "magic"),
            ("recipe", "convention", None),
            ("recipe", "grad_dtype", "int3"),
            ("recipe", "unknown", 1),
            ("offload", "optimizer", "moon"),
            ("workload", "checkpointing", "<script>"),
            ("workload", "seq_len", -1),
            ("workload", "micro_batch", 1e300),
        ],
    )
    def test_a_field(self, part: str, field: str, value: object):
        read = read_data({**PLAIN, part: {**PLAIN.get(part, {}), field: value}})
        (sentence,) = read.ignored
        assert field in sentence or "dp_shard" in sentence
        without = {**PLAIN, part: {key: kept for key, kept in PLAIN.get(part, {}).items() if key != field}}
        assert read.scenario == parse_scenario(without)

    @pytest.mark.parametrize("part", ["hardware", "parallelism", "recipe", "offload", "workload", "engine_config"])
    def test_a_whole_part_of_the_wrong_kind(self, part: str):
        read = read_data({**PLAIN, part: [1, 2]})
        assert len(read.ignored) == 1
        kept = {key: value for key, value in PLAIN.items() if key != part}
        assert read.scenario == parse_scenario(
            {**kept, "recipe": {"convention": "zero_paper", **kept.get("recipe", {})}}
        )

    def test_an_unknown_part(self):
        read = read_data({**PLAIN, "free_text": "hello"})
        assert read.scenario == parse_scenario(PLAIN)
        assert len(read.ignored) == 1

    def test_the_number_of_gpus_takes_the_ranks_with_it_but_not_the_engine(self):
        data = json.loads(json.dumps(PLAIN))
        data["parallelism"]["dp_shard"] = 16
        data["hardware"]["gpus"] = "many"
        read = read_data(data)
        assert read.scenario is not None
        assert read.scenario.hardware.gpus == 1
        assert read.scenario.parallelism.zero_stage == 3
        assert read.scenario.recipe.optimizer.name == "lion"

    @pytest.mark.parametrize("model", [{"name": "no such model"}, {}, {"n_params": -3}, {"config": {"x": 1}}, 7, None])
    def test_without_a_usable_model_there_is_no_scenario(self, model: object):
        read = read_data({**PLAIN, "model": model})
        assert read.scenario is None
        assert len(read.ignored) == 1

    def test_many_unusable_fields_end_soon(self):
        read = read_data({**PLAIN, **{f"part{number}": number for number in range(50)}})
        assert read.scenario is None
        assert len(read.ignored) == MAX_IGNORED

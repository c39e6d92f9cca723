"""Every page as a user meets it, through Streamlit's AppTest: figures, widgets, bad input, links, uploads.

Run: pytest tests/pages/test_pages.py. No browser: what only a browser shows is in tests/browser. Pages are found by
enumeration, so that a new one is held to the same rules.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from generated_scenarios import TINY_LLAMA, TINY_LLAMA_PARAMS, scenarios
from hypothesis import given, settings
from streamlit.testing.v1 import AppTest

from memcore.assumptions import assumptions
from memcore.budget import Budget, evidence_for, predict
from memcore.compare import stage_rows
from memcore.errors import UserError
from memcore.i18n import use_language
from memcore.jobs import LightLane
from memcore.link import read_link, write_link
from memcore.questions import QUESTIONS
from memcore.scenario import Scenario, parse_scenario
from memcore.ui.frame import PAGES
from memcore.ui.state import DEFAULT_SCENARIO
from memcore.ui.work import light_lane
from memcore.units import ByteUnit, format_bytes
from memcore.verdict_words import verdict_sentence

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for file, _label, _icon in PAGES.values()]
STATIC, ZERO = PAGES["static"][0], PAGES["zero"][0]
DEFAULT = parse_scenario(DEFAULT_SCENARIO)
# A first job waits for its worker to import torch and transformers.
TIMEOUT_S = 60


@pytest.fixture(scope="module", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    light_lane().close()
    light_lane.clear()


def opened(file: str = "app.py", **query: str) -> AppTest:
    """The app on one of its pages, reached by a link with these parameters."""
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT_S)
    at.query_params.update(query)
    at.run()
    if file != "app.py":
        at.switch_page(file).run()
    assert not at.exception
    return at


def change(at: AppTest, **values: Any) -> AppTest:
    """Set widgets by key, one after the other, as a user does."""
    for key, value in values.items():
        at.get_by_key(key).set_value(value).run()
        assert not at.exception
    return at


def verdict(at: AppTest) -> str:
    """The first coloured sentence of the page; warnings about what the verdict rests on follow it."""
    boxes = (element.value for element in at.main if element.type in ("success", "warning", "error"))
    return next(boxes).replace("**", "")


def refusals(at: AppTest) -> list[str]:
    return [error.value for error in at.sidebar.error]


def figures(at: AppTest) -> list[str]:
    return [metric.value for metric in at.metric]


def charts(at: AppTest) -> list[dict[str, Any]]:
    return [json.loads(chart.proto.spec) for chart in at.get("plotly_chart")]


def parameter(at: AppTest, name: str) -> str:
    """A parameter of the URL. AppTest gives a list for what was set from outside."""
    value = at.query_params[name]
    return value[0] if isinstance(value, list) else value


def linked(at: AppTest) -> Scenario:
    """The scenario in the URL."""
    scenario = read_link(parameter(at, "s")).scenario
    assert scenario is not None
    return scenario


def answer(scenario: Scenario) -> Budget:
    """What the page should show: traced where no closed form stands."""
    return predict(scenario, evidence_for(scenario, light_lane().ask))


def assert_shows(at: AppTest, budget: Budget, unit: ByteUnit = ByteUnit.GB) -> None:
    """The opening of whatever page is open is this budget's, and the URL carries its scenario."""
    assert verdict(at) == verdict_sentence(budget, unit)
    assert assumptions(budget, unit) in [caption.value for caption in at.main.caption]
    assert linked(at) == budget.scenario


def test_each_file_of_the_pages_folder_is_a_page():
    assert sorted(FILES) == sorted(["app.py", *(f"pages/{path.name}" for path in ROOT.glob("pages/*.py"))])


class TestEveryPage:
    @pytest.mark.parametrize("file", FILES)
    def test_answers_in_its_first_screen(self, file: str):
        at = opened(file)
        assert len(at.title) == 1
        assert 1 <= len(at.metric) <= 4
        assert_shows(at, predict(DEFAULT))
        assert not refusals(at)

    @pytest.mark.parametrize("file", FILES)
    def test_runs_alone(self, file: str):
        at = AppTest.from_file(str(ROOT / file), default_timeout=TIMEOUT_S).run()
        assert not at.exception
        assert verdict(at) == verdict_sentence(predict(DEFAULT), ByteUnit.GB)

    @pytest.mark.parametrize("unit", ["GB", "GiB"])
    @pytest.mark.parametrize("file", FILES)
    def test_charts_say_their_unit(self, file: str, unit: str):
        drawn = charts(opened(file, unit=unit))
        assert drawn
        for chart in drawn:
            axes = [value for key, value in chart["layout"].items() if key.startswith(("xaxis", "yaxis"))]
            titles = [axis["title"]["text"] for axis in axes if axis.get("title", {}).get("text")]
            assert titles, "an axis without a title"
            other = {"GB": "GiB", "GiB": "(GB)"}[unit]
            assert not any(other in title for title in titles)
        first = json.dumps(drawn[0]["layout"])
        assert f"({unit})" in first or "bytes" in first

    @pytest.mark.parametrize("file", FILES)
    def test_charts_have_a_text_alternative(self, file: str):
        at = opened(file)
        assert all(chart.proto.alt for chart in at.get("plotly_chart"))

    @pytest.mark.parametrize("file", FILES)
    def test_speaks_chinese(self, file: str):
        at = opened(file, lang="zh")
        assert not at.exception
        assert len(at.metric) == len(opened(file).metric)
        assert parameter(at, "lang") == "zh"

    @settings(max_examples=12)
    @given(scenario=scenarios(configs=False))
    def test_draws_any_scenario_or_says_why_not(self, scenario: Scenario):
        try:
            budget = predict(scenario)
        except UserError:
            budget = None  # made-up LoRA targets
        at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT_S)
        at.query_params["s"] = write_link(scenario)
        at.run()
        for file in FILES:
            if file != "app.py":
                at.switch_page(file).run()
            assert not at.exception, (file, scenario)
            if budget is None:
                assert len(refusals(at)) == 1
                assert not at.metric
            else:
                assert not refusals(at), (file, scenario)
                assert verdict(at) == verdict_sentence(budget, ByteUnit.GB)


def test_an_architecture_without_a_closed_form_is_traced():
    """OLMo's norms have no weights and compute in FP32: the closed form is 20% off, so the trace takes its place."""
    config = {"model_type": "olmo", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
              "num_attention_heads": 4, "vocab_size": 512}  # fmt: skip
    at = opened(PAGES["activations"][0], s=write_link(parse_scenario({"model": {"config": config}})))
    assert any("none stands for this model" in info.value for info in at.main.info)
    assert any("3 of 3 layers ran" in caption.value for caption in at.main.caption)
    assert charts(at)


class TestTrace:
    """A small model, so that each trace takes a moment."""

    SMALL = parse_scenario({"model": {"name": "Qwen/Qwen3-0.6B"}, "workload": {"seq_len": 512}})

    @pytest.mark.parametrize("file", ["app.py", PAGES["activations"][0]])
    def test_what_is_alive_is_shown_by_module(self, file: str):
        at = opened(file, s=write_link(self.SMALL), evidence="trace")
        assert any(header.value == "Alive at loss, by module" for header in at.main.subheader)
        modules = [cell for table in at.main.table for cell in table.value.get("Module", [])]
        assert "loss" in modules
        assert any("3 of 28 layers ran" in caption.value for caption in at.main.caption)

    def test_saved_operations_are_traced_without_being_asked(self):
        at = change(opened(PAGES["activations"][0], s=write_link(self.SMALL)), w_checkpointing="save")
        assert linked(at).workload.checkpointing == "save(attention,mm)"
        assert at.get_by_key("w_saved").value == ["attention", "mm"]
        assert any("3 of 28 layers ran" in caption.value for caption in at.main.caption)
        at.get_by_key("w_saved").set_value(["bmm"]).run()
        assert linked(at).workload.checkpointing == "save(bmm)"
        at.get_by_key("w_saved").set_value([]).run()
        assert linked(at).workload.checkpointing == "full"

    def test_reentrant_is_offered_where_it_means_something(self):
        at = change(opened(s=write_link(self.SMALL)), w_checkpointing="full")
        at = change(at, w_reentrant=True)
        assert linked(at).workload.reentrant
        at = change(at, w_checkpointing="none")
        assert not linked(at).workload.reentrant
        assert not refusals(at)

    def test_the_next_size_is_answered_without_a_trace(self, monkeypatch: pytest.MonkeyPatch):
        """Once the sizes are prepared, the worker's own count of traces stays as it is."""
        prepared: list[list[tuple[str, dict[str, Any]]]] = []
        monkeypatch.setattr(LightLane, "prepare", lambda self, jobs: prepared.append(list(jobs)))
        st.cache_resource.clear()
        at = opened(s=write_link(self.SMALL), evidence="trace")
        change(at, w_seq=640)
        assert [[name for name, _payload in jobs] for jobs in prepared] == [["trace"] * 3 + ["trace_sizes"]]
        change(at, w_micro=2)
        assert [len(jobs) for jobs in prepared] == [4, 7]


class TestFigures:
    def test_home(self):
        ladder = predict(DEFAULT).ladder
        sizes = (ladder.allocated, ladder.needed, ladder.usable - ladder.needed)
        assert figures(opened()) == [*map(format_bytes, sizes[:2]), f"+{format_bytes(sizes[2])}"]

    def test_static_accounting(self):
        budget = predict(DEFAULT)
        per_gpu = format_bytes(budget.static.total_bytes)
        assert figures(opened(STATIC)) == ["16", format_bytes(16 * budget.states.n_params), per_gpu, "8.03 B"]

    def test_zero_stages(self):
        wanted = [format_bytes(row.floor.total_bytes) for row in stage_rows(predict(DEFAULT))]
        assert figures(opened(ZERO)) == wanted

    def test_zero_stages_of_one_gpu_are_one(self):
        at = opened(ZERO, s=write_link(parse_scenario({"model": {"n_params": 10**9}})))
        assert figures(at) == ["16 GB"]
        fewest = at.table[0].value
        assert list(fewest["GPUs that share the states alone"]) == ["1"] * 4
        assert list(fewest["GPUs for the whole peak"]) == ["1", "—", "—", "—"]

    def test_the_homes_chart_adds_up_to_the_phase_peaks(self):
        budget = predict(DEFAULT)
        bars = [trace for trace in charts(opened())[0]["data"] if trace["type"] == "bar"]
        drawn = [sum(lengths) for lengths in zip(*(bar["x"] for bar in bars), strict=True)]
        outside = budget.ladder.runtime.largest
        totals = [(budget.totals[index] + outside) / 1e9 for index in budget.phase_peaks().values()]
        assert drawn == pytest.approx(totals)

    def test_below_zero_headroom_has_its_sign(self):
        at = opened(s=write_link(parse_scenario({"model": {"n_params": 70 * 10**9}})))
        assert figures(at)[-1].startswith("−")
        assert verdict(at).startswith("Does not fit")


# Until another is chosen, the dashboard takes the convention that the engine has of its own.
OWN = {"recipe": {"convention": "engine"}}


class TestWidgets:
    """A changed widget changes the answer to that of the changed scenario."""

    @pytest.mark.parametrize(
        ("widgets", "parts"),
        [
            ({"w_engine": "fsdp2"}, {"parallelism": {"engine": "fsdp2"}, **OWN}),
            ({"w_engine": "ddp"}, {"parallelism": {"engine": "ddp"}, **OWN}),
            ({"w_engine": "single"}, {"parallelism": {"engine": "single"}, "hardware": {"gpu": "H100-80GB"}, **OWN}),
            ({"w_stage": 3}, {"parallelism": {"zero_stage": 3}}),
            ({"w_method": "qlora"}, {"recipe": {"method": "qlora", "lora": {}, "quantization": "nf4_double_quant"}}),
            ({"w_8bit": True}, {"recipe": {"optimizer": {"bits": 8}}}),
            ({"w_optimizer": "sgd"}, {"recipe": {"optimizer": "sgd"}}),
            ({"w_convention": "fp32"}, {"recipe": {"convention": "fp32"}}),
            ({"w_gpu": "A100-40GB"}, {"hardware": {"gpu": "A100-40GB", "gpus": 8}}),
            ({"w_gpus": 64}, {"hardware": {"gpus": 64}}),
            ({"w_name": "Qwen/Qwen3-32B"}, {"model": {"name": "Qwen/Qwen3-32B"}}),
            ({"w_source": "count", "w_count": "13b"}, {"model": {"n_params": 13 * 10**9}}),
            ({"w_bucket": 1000}, {"engine_config": {"zero_optimization": {"reduce_bucket_size": 1000}}}),
            ({"w_overlap": True}, {"engine_config": {"zero_optimization": {"overlap_comm": True}}}),
            ({"w_offload_optimizer": "cpu"}, {"offload": {"optimizer": "cpu"}}),
            ({"w_accum": 4}, {"workload": {"grad_accum": 4}}),
        ],
        ids=lambda value: next(iter(value)),
    )
    def test_one(self, widgets: dict[str, Any], parts: dict[str, Any]):
        at = change(opened(), **widgets)
        budget = answer(parse_scenario({**DEFAULT_SCENARIO, **parts}))
        assert_shows(at, budget)
        assert figures(at)[0] == format_bytes(budget.ladder.allocated)
        default = predict(DEFAULT)
        assert (budget.totals, budget.ladder.usable) != (default.totals, default.ladder.usable)

    def test_unit(self):
        at = change(opened(), w_unit="GiB")
        assert_shows(at, predict(DEFAULT), ByteUnit.GIB)
        assert figures(at)[0] == format_bytes(predict(DEFAULT).ladder.allocated, ByteUnit.GIB)
        assert parameter(at, "unit") == "GiB"

    def test_language(self):
        at = change(opened(), w_language="zh")
        use_language("zh")
        try:
            assert verdict(at) == verdict_sentence(predict(DEFAULT), ByteUnit.GB)
        finally:
            use_language("en")
        assert parameter(at, "lang") == "zh"

    def test_values_are_kept_on_the_other_pages(self):
        at = change(opened(), w_gpus=32, w_stage=1, w_source="count", w_count="3b", w_unit="GiB")
        at.session_state["w_more_workload"] = True
        change(at.run(), w_workload_shifted_copy=True)
        for file in (*FILES[1:], "app.py"):
            at.switch_page(file).run()
            assert at.get_by_key("w_gpus").value == 32
            assert at.get_by_key("w_count").value == "3b"
            assert at.get_by_key("w_workload_shifted_copy").value
            assert linked(at).parallelism.zero_stage == 1
            assert linked(at).workload.shifted_copy
            assert parameter(at, "unit") == "GiB"

    @pytest.mark.parametrize("number", range(1, len(QUESTIONS) + 1))
    def test_a_question_opens_its_scenario_on_its_page(self, number: int):
        question = QUESTIONS[number - 1]
        at = opened()
        at.button(key=f"question_{number}").click().run()
        assert not at.exception
        assert_shows(at, predict(question.scenario))
        assert at.get_by_key("w_gpu").value == question.scenario.hardware.gpu

    def test_a_question_shows_its_answer(self):
        shown = [text.value for text in opened().markdown]
        for question in QUESTIONS:
            assert question.answered(ByteUnit.GB) in shown


def test_a_pasted_out_of_memory_message_is_explained_beside_the_scenario():
    """hiyouga/LlamaFactory#1221, whose request is 4 bytes for an eighth of 6,738,415,616 parameters."""
    scenario = {
        "model": {"n_params": 6_738_415_616},
        "hardware": {"gpu": "V100-32GB", "gpus": 8},
        "parallelism": {"engine": "deepspeed", "zero_stage": 2},
    }
    at = opened(s=write_link(parse_scenario(scenario)))
    message = (
        "CUDA out of memory. Tried to allocate 3.14 GiB (GPU 0; 31.75 GiB total capacity; 28.28 GiB already allocated; "
        "1.95 GiB free; 28.28 GiB reserved in total by PyTorch)"
    )
    change(at, memory_report_text=message)
    said = " ".join(element.value for element in at.main.markdown)
    assert "fragmentation is not the cause" in said
    assert "this GPU's slice of all trained parameters" in said
    change(at, memory_report_text="Killed")
    assert any("No memory report is known" in error.value for error in at.main.error)


class TestRefusedInput:
    """One sentence at the field; the last good scenario and its figures stay."""

    def assert_refused(self, at: AppTest, good: Scenario, *words: str) -> None:
        assert not at.exception
        (sentence,) = refusals(at)
        assert sentence[0] != " "
        for word in words:
            assert word in sentence
        assert "Traceback" not in sentence
        assert_shows(at, answer(good))
        assert any("last scenario that was valid" in info.value for info in at.main.info)

    @pytest.mark.parametrize("text", ["-3", "abc", "1e400", "", "0", "7 bees", "９", "1" * 40, "<b>7b</b>"])
    def test_a_count(self, text: str):
        at = change(opened(), w_source="count", w_count="5b")
        good = parse_scenario({**DEFAULT_SCENARIO, "model": {"n_params": 5 * 10**9}})
        assert_shows(at, predict(good))
        self.assert_refused(change(at, w_count=text), good)

    def test_a_count_that_is_mended_is_taken(self):
        at = change(opened(), w_source="count", w_count="abc")
        assert refusals(at)
        change(at, w_count="7e9")
        assert not refusals(at)
        assert linked(at).model.n_params == 7 * 10**9

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "No config"),
            ("hello", "not JSON"),
            ("{'model_type': 'llama'", "not JSON"),
            ('{"model_type": "llama", "rope_theta": NaN}', "rope_theta is nan"),
            ('{"peft_type": "LORA", "r": 8}', "an adapter's config"),
            ("[1, 2]", "model.config"),
            ("3", "model.config"),
            ("{}", "model_type is missing"),
            ('{"model_type": 7}', "model_type is 7"),
            ('{"auto_map": {"AutoModel": "x.Y"}}', "remote code"),
            ("[" * 5000, "not JSON"),
            ("1" * 5000, "JSON"),
            (json.dumps({**TINY_LLAMA, "hidden_size": -64}), "hidden_size is -64"),
            (json.dumps({**TINY_LLAMA, "hidden_size": "64"}), "hidden_size is '64'"),
            (json.dumps({**TINY_LLAMA, "hidden_size": 64.5}), "hidden_size is 64.5"),
            (json.dumps({**TINY_LLAMA, "num_hidden_layers": 1e30}), "num_hidden_layers is 1e+30"),
            (json.dumps({**TINY_LLAMA, "num_hidden_layers": 10**30}), "num_hidden_layers"),
            (json.dumps({**TINY_LLAMA, "vocab_size": True}), "vocab_size is True"),
            (json.dumps({**TINY_LLAMA, "a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}}), "nested"),
        ],
        ids=lambda text: text[:30] or "empty",
    )
    def test_a_config_that_is_refused_at_once(self, text: str, words: str):
        at = change(opened(STATIC), w_source="config", w_config=text)
        self.assert_refused(at, DEFAULT, words)
        assert figures(at) == figures(opened(STATIC))

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"model_type": "nonsense"}, "does not know model_type 'nonsense'"),
            ({"model_type": "nonsense", "auto_map": {"AutoModel": "a.B"}}, "does not know model_type 'nonsense'"),
            ({**TINY_LLAMA, "num_attention_heads": 5}, "cannot build"),
            ({**TINY_LLAMA, "hidden_act": "no_such_function"}, "cannot build"),
            ({**TINY_LLAMA, "rope_scaling": "yes"}, "cannot build"),
            ({**TINY_LLAMA, "key \ud800 with half a pair": 1, "num_attention_heads": 5}, "cannot build"),
        ],
        ids=["unknown", "auto_map", "heads", "activation", "rope", "surrogate"],
    )
    def test_a_config_that_the_worker_refuses(self, config: dict[str, Any], words: str):
        at = change(opened(), w_source="config", w_config=json.dumps(config))
        self.assert_refused(at, DEFAULT, words)

    @pytest.mark.parametrize(
        ("widgets", "words"),
        [
            ({"w_gpus": 12}, "hardware.gpus_per_node is 8, which does not divide hardware.gpus = 12"),
            ({"w_offload_parameters": "cpu"}, "needs ZeRO stage 3"),
            ({"w_method": "lora", "w_targets": ""}, "recipe.lora.targets is empty"),
            ({"w_method": "lora", "w_targets": "no_such_proj"}, "no_such_proj"),
            ({"w_stage": 3, "w_hpz": 3}, "zero_hpz_partition_size is 3, which does not divide the 8"),
        ],
        ids=["nodes", "offload", "no target", "unknown target", "hpz"],
    )
    def test_widgets_that_contradict_each_other(self, widgets: dict[str, Any], words: str):
        *first, (key, value) = widgets.items()
        at = change(opened(), **dict(first))
        good = linked(at)
        self.assert_refused(change(at, **{key: value}), good, words)

    def test_a_refused_scenario_does_not_leave_the_url_empty_on_another_page(self):
        at = change(opened(), w_gpus=12)
        at.switch_page(ZERO).run()
        assert linked(at) == DEFAULT
        assert len(refusals(at)) == 1


class TestConfigs:
    """Pasted and uploaded configs are counted in a worker process."""

    def test_pasted(self):
        at = change(opened(STATIC), w_source="config", w_config=json.dumps({**TINY_LLAMA, "use_cache": True}))
        assert not refusals(at)
        assert figures(at)[3] == "202 K"
        assert f"Out of {TINY_LLAMA_PARAMS:,}." in [metric.help for metric in at.metric]
        assert linked(at).model.config == TINY_LLAMA
        assert any("Not used: use_cache" in caption.value for caption in at.sidebar.caption)

    def test_uploaded(self):
        at = change(opened(STATIC), w_source="config")
        # With the byte order mark that editors on Windows write.
        at.file_uploader(key="upload").upload("config.json", b"\xef\xbb\xbf" + json.dumps(TINY_LLAMA).encode()).run()
        assert not at.exception
        assert not refusals(at)
        assert linked(at).model.config == TINY_LLAMA

    def test_uploaded_that_is_no_text(self):
        at = change(opened(), w_source="config")
        at.file_uploader(key="upload").upload("config.json", bytes(range(256))).run()
        assert not at.exception
        assert len(refusals(at)) == 1

    def test_by_link(self):
        at = opened(STATIC, s=write_link(parse_scenario({"model": {"config": TINY_LLAMA}})))
        assert figures(at)[3] == "202 K"
        assert json.loads(at.get_by_key("w_config").value) == TINY_LLAMA

    @pytest.mark.parametrize(
        "config",
        [
            {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
            {
                "model_type": "llava",
                "text_config": TINY_LLAMA,
                "vision_config": {
                    "model_type": "clip_vision_model",
                    "hidden_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "intermediate_size": 64,
                    "image_size": 28,
                    "patch_size": 14,
                },
            },
        ],
        ids=["bert", "llava"],
    )
    def test_other_kinds_of_model_are_counted(self, config: dict[str, Any]):
        at = change(opened(STATIC), w_source="config", w_config=json.dumps(config))
        assert not refusals(at)
        assert linked(at).model.config == config


class TestLinks:
    def test_a_link_sets_every_widget(self):
        scenario = parse_scenario(
            {
                "model": {"n_params": 13 * 10**9},
                "hardware": {"gpu": "A100-40GB", "gpus": 4, "gpus_per_node": 2},
                "parallelism": {"engine": "fsdp2", "dp_replicate": 2},
            }
        )
        at = opened(ZERO, s=write_link(scenario), unit="GiB")
        assert_shows(at, predict(scenario), ByteUnit.GIB)
        wanted = {"w_count": "13,000,000,000", "w_gpu": "A100-40GB", "w_gpus": 4, "w_node": 2, "w_replicate": 2}
        assert {key: at.get_by_key(key).value for key in wanted} == wanted

    @pytest.mark.parametrize("link", ["junk", "2.abcdef", "1.%%%", "<script>alert(1)</script>", "1.", "ü" * 9000])
    def test_a_link_that_cannot_be_read_is_said_and_the_default_shown(self, link: str):
        at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT_S)
        at.query_params["s"] = link
        at.run()
        assert not at.exception
        (notice,) = [warning.value for warning in at.main.warning]
        assert "ignored" in notice
        assert linked(at) == DEFAULT
        at.run()
        assert not at.main.warning, "said once"

    def test_a_link_with_a_field_that_cannot_be_used(self):
        link = write_link(DEFAULT)
        broken = read_link(link)
        assert broken.scenario == DEFAULT
        at = opened(s=link, unit="furlong", lang="tlh")
        assert_shows(at, predict(DEFAULT))
        assert "unit" not in at.query_params
        assert "lang" not in at.query_params

    def test_a_link_whose_model_cannot_be_counted_here(self):
        scenario = parse_scenario({"model": {"config": {"model_type": "from_the_future"}}})
        at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT_S)
        at.query_params["s"] = write_link(scenario)
        at.run()
        assert not at.exception
        assert len(refusals(at)) == 1
        assert "from_the_future" in refusals(at)[0]
        assert not at.main.error
        assert len(at.main.info) == 1
        assert not refusals(change(at, w_source="catalogue"))
        assert at.metric

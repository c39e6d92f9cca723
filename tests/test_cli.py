"""The command line. Run: pytest tests/test_cli.py"""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from memcore import cli, columns, model_text
from memcore.cli import main
from memcore.hardware import accelerators
from memcore.i18n import language
from memcore.models import catalogue, catalogue_inventory

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE: Mapping[str, Any] = {
    "model": {"n_params": 7_000_000_000},
    "hardware": {"gpu": "A100-80GB", "gpus": 8},
    "parallelism": {"engine": "deepspeed", "zero_stage": 1, "dp": 8},
    "recipe": {"method": "full", "convention": "zero_paper"},
    "workload": {"micro_batch": 1, "seq_len": 4096},
}
TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}
# 2 embeddings, 2 layers of 4 attention and 3 MLP matrices and 2 norms, a last norm
TINY_LLAMA_PARAMS = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture(scope="module", autouse=True)
def _one_worker() -> Iterator[None]:
    """All tests share the process's warm worker; it ends with this file."""
    yield
    cli._lane().close()
    cli._lane.cache_clear()


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_json(data: object) -> str:
        path = tmp_path / "input.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        return str(path)

    return write_json


def single(n_params: int) -> dict[str, Any]:
    return {"model": {"n_params": n_params}, "hardware": {"gpu": "A100-80GB"}}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence on standard error of a command that must end with 2 and write nothing else."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err.strip()


class TestPredict:
    def test_the_example_fits_with_the_papers_states(self, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["predict", write(EXAMPLE), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["static"]["total_bytes"] == 38_500_000_000
        assert sum(term["bytes"] for term in report["terms"]) == report["peak_bytes"]

    # 16 bytes per parameter and the temporaries of the step against 79.1 GiB
    @pytest.mark.parametrize(("n_params", "status"), [(2_000_000_000, 0), (4_100_000_000, 3), (7_000_000_000, 1)])
    def test_the_exit_status_is_the_verdict(
        self, write: Any, n_params: int, status: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["predict", write(single(n_params))]) == status
        words = {0: "Fits", 3: "Tight", 1: "Does not fit"}
        assert capsys.readouterr().out.startswith(words[status])

    def test_reads_standard_input(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(EXAMPLE).encode())))
        assert main(["predict", "-"]) == 0
        assert capsys.readouterr().out.startswith("Fits")

    def test_takes_a_file_with_a_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "windows.json"
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(EXAMPLE).encode())
        assert main(["predict", str(path)]) == 0

    def test_writes_the_unit_that_is_asked_for(self, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
        def tables(unit: str) -> str:
            main(["predict", write(EXAMPLE), "--unit", unit])
            text = capsys.readouterr().out
            return text[text.index("Model states") : text.index("Communication:")]

        assert "38.5 GB" in tables("GB")
        assert "GiB" not in tables("GB")
        assert "35.86 GiB" in tables("GiB")
        assert " GB" not in tables("GiB")

    def test_a_config_is_counted(self, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["predict", write({"model": {"config": TINY_LLAMA}}), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["parameters"]["total"] == TINY_LLAMA_PARAMS
        assert report["defaults_filled"]["num_key_value_heads"] == 4
        assert main(["predict", write({"model": {"config": TINY_LLAMA}})]) == 0
        assert "num_key_value_heads = 4" in capsys.readouterr().out


class TestWhatIsBesideAVerdict:
    """A sequence beyond a table of positions: no run, and no trace."""

    GPT2: Mapping[str, Any] = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    TOO_LONG: Mapping[str, Any] = {"model": {"config": GPT2}, "workload": {"seq_len": 33}}

    def test_what_cannot_run_comes_before_the_verdict_and_is_no_verdict(
        self, write: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for command in (["predict"], ["predict", "--trace"]):
            assert main([*command, write(self.TOO_LONG)]) == 2
            told = capsys.readouterr()
            assert told.out.startswith("It cannot run: workload.seq_len is 33, and the model has a table of 32")
            assert "Fits: " in told.out
            assert told.err.count("\n") == 1
        assert main(["predict", write({**self.TOO_LONG, "workload": {"seq_len": 32}})]) == 0

    def test_a_trace_that_is_not_had_is_said_and_has_its_own_status(
        self, write: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write(EXAMPLE)
        assert main(["predict", path, "--trace"]) == 2
        told = capsys.readouterr()
        assert "* Not traced: " in told.out
        assert told.err.startswith("Not traced: ")
        assert main(["predict", path]) == 0
        assert main(["predict", path, "--trace", "--json"]) == 2
        report = json.loads(capsys.readouterr().out.partition("\n{")[2].join(("{", "")))
        assert [each["kind"] for each in report["warnings"]] == ["not_traced"]
        assert report["activations_from"] == "formula"

    def test_what_the_start_takes_is_data_and_a_warning(self, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
        """70 billion weights of 4 bytes, whole, before FSDP2 divides them."""
        scenario = {
            "model": {"name": "meta-llama/Llama-3.1-70B"},
            "hardware": {"gpu": "H100-80GB", "gpus": 64},
            "parallelism": {"engine": "fsdp2"},
            "recipe": {"convention": "fsdp2_mixed"},
        }
        main(["predict", write(scenario), "--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["start"]["bytes"] >= 4 * report["parameters"]["total"]
        assert [each["kind"] for each in report["warnings"]] == ["start"]
        main(["predict", write(scenario)])
        assert "* Made whole on the GPU first" in capsys.readouterr().out


class TestTrace:
    """One small model: its gradients are all that a step leaves behind."""

    SCENARIO: Mapping[str, Any] = {
        "model": {"config": TINY_LLAMA},
        "recipe": {"convention": "fp32"},
        "workload": {"seq_len": 128, "micro_batch": 2},
    }

    def told(self, write: Any, capsys: pytest.CaptureFixture[str], *options: str, **parts: Any) -> str:
        main(["trace", write({**self.SCENARIO, **parts}), *options])
        return capsys.readouterr().out

    def test_every_storage_that_is_taken_is_given_back_but_for_gradients(self, write: Any, capsys: Any) -> None:
        lines = [line.split(",") for line in self.told(write, capsys, "--events").splitlines()]
        levels: dict[str, int] = {}
        for _moment, category, _module, size in lines:
            levels[category] = levels.get(category, 0) + int(size)
        assert levels.pop("gradients") == 4 * TINY_LLAMA_PARAMS
        assert set(levels.values()) == {0}
        moments = list(dict.fromkeys(moment for moment, *_rest in lines))
        assert moments == ["forward[0]", "forward[1]", "loss", "backward[1]", "backward[0]"]
        assert {"mlp.up_proj", "self_attn", "input_layernorm", "lm_head"} <= {module for _m, _c, module, _s in lines}

    def test_events_add_up_to_the_profile(self, write: Any, capsys: Any) -> None:
        events = json.loads(self.told(write, capsys, "--events", "--json"))
        report = json.loads(self.told(write, capsys, "--json"))
        level = most = 0
        for _moment, category, _module, size in events:
            level += 0 if category == "gradients" else size
            most = max(most, level)
        alive = sum(row["bytes"] for row in report["alive"]["modules"])
        assert most == alive
        assert report["by_phase"][0].keys() == {"phase", "traced_bytes", "closed_form_bytes", "mostly_in"}

    def test_the_text_names_the_modules(self, write: Any, capsys: Any) -> None:
        out = self.told(write, capsys)
        assert "2 of 2 layers ran" in out
        assert "Alive at" in out
        assert "mlp.gate_proj" in out
        assert max(map(len, out.splitlines())) <= 100

    def test_a_count_has_nothing_to_trace(self, write: Any, capsys: Any) -> None:
        assert "no model to trace" in refusal(capsys, "trace", write(single(10**9)))


class TestModels:
    def test_the_table_has_every_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["models"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in lines[2:]] == list(catalogue())
        assert main(["models", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == len(catalogue())

    def test_one_model_comes_with_its_inventory_and_sources(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["models", "deepseek-ai/DeepSeek-V3"]) == 0
        text = capsys.readouterr().out
        for expected in ("671,026,404,352", "model.layers 3-60", "gate_up_proj", "README_WEIGHTS.md"):
            assert expected in text

    def test_a_config_is_counted_with_its_defaults(self, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
        config = TINY_LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        assert main(["models", "--config", write(config), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["total"] == TINY_LLAMA_PARAMS
        assert report["by_part"] == {"text": TINY_LLAMA_PARAMS}
        assert report["bf16_bytes"] == 2 * TINY_LLAMA_PARAMS
        assert report["quantised_as"] == "gptq"
        assert main(["models", "--config", write(config)]) == 0
        text = capsys.readouterr().out
        assert "gptq" in text
        assert f"{TINY_LLAMA_PARAMS:,}" in text

    def test_a_config_that_is_nearly_json_is_counted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "config.json"
        text = json.dumps(TINY_LLAMA | {"limit": 0.5}).replace("0.5", "Infinity").replace("{", "{ // by hand\n")
        file.write_text("\ufeff" + text.replace("}", ",}"), encoding="utf-8")
        assert main(["models", "--config", str(file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["total"] == TINY_LLAMA_PARAMS

    def test_gemma_3_is_counted_by_part_with_its_defaults(
        self, write: Any, public_cases: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        case = public_cases["cfg-gemma3-4b-nested"]
        right = case["right"]
        assert main(["models", "--config", write(case["input"]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["total"] == right["params_total"]
        assert report["by_part"] == {
            "text": right["params_text"],
            "vision": right["params_vision_tower"],
            "projector": right["params_projector"],
        }
        filled = {key.removeprefix("text_config."): value for key, value in report["defaults_filled"].items()}
        assert filled.items() >= right["filled_from_class_defaults"].items()


class TestGpus:
    def test_the_table_has_every_accelerator(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["gpus"]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in accelerators())
        assert main(["gpus", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [each["usable_bytes"] for each in found] == [each.usable_bytes for each in accelerators().values()]


class TestBadInput:
    def test_files_that_cannot_be_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "does not exist" in refusal(capsys, "predict", str(tmp_path / "none.json"))
        assert "is a directory" in refusal(capsys, "predict", str(tmp_path))
        assert "does not exist" in refusal(capsys, "models", "--config", str(tmp_path / "none.json"))

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "not text in UTF-8"),
            ('{"model": {"name": "größer"}}'.encode("latin-1"), "not text in UTF-8"),
            (json.dumps(EXAMPLE).encode("utf-16"), "not text in UTF-8"),
            (b"\x00\x01\x02", "not JSON"),
            (b"", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b"[1, 2]", "a scenario is a json object"),
            (b" " * 2_000_000, "longer than"),
            (b'{"model": {"n_params": NaN}}', "not JSON"),
            (b'{"model": {"n_params": -1}}', "model.n_params"),
            (b'{"model": {"name": "x"}, "hardware": {"gpu": "A100-80GB"}}', "not in the catalogue"),
            (b'{"model": {"n_params": 1}, "a\\u001b]0;b\\n": 1}', "is not a field"),
            (b'{"model": {"config": {"hidden_size": 8}}}', "model_type"),
        ],
    )
    def test_content_that_is_no_scenario(
        self, tmp_path: Path, content: bytes, sentence: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "scenario.json"
        path.write_bytes(content)
        message = refusal(capsys, "predict", str(path))
        assert sentence.lower() in message.lower()
        assert message.isprintable()

    def test_a_config_that_cannot_be_counted(self, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
        unknown = {"model_type": "no_such_model"}
        assert "no_such_model" in refusal(capsys, "models", "--config", write(unknown))
        assert "no_such_model" in refusal(capsys, "predict", write({"model": {"config": unknown}}))
        assert "JSON object" in refusal(capsys, "models", "--config", write([1]))
        assert "model_type" in refusal(capsys, "models", "--config", write({}))

    def test_command_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "command" in refusal(capsys)
        assert "SCENARIO.json" in refusal(capsys, "predict")
        assert "MB" in refusal(capsys, "gpus", "--unit", "MB")
        assert "--lang" in refusal(capsys, "gpus", "--lang", "xx")
        assert "Llama-2" in refusal(capsys, "models", "llama-2")
        assert "not allowed with" in refusal(capsys, "models", "gpt2", "--config", "config.json")

    def test_closed_standard_input_and_output(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert "standard input cannot be read" in refusal(capsys, "predict", "-")
        monkeypatch.setattr(sys, "stdout", None)
        assert "output cannot be written" in refusal(capsys, "gpus")
        monkeypatch.setattr(sys, "stderr", None)
        assert main(["gpus"]) == 2

    def test_help_is_no_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        assert main(["predict", "--help"]) == 0
        assert "SCENARIO.json" in capsys.readouterr().out


class TestText:
    @pytest.mark.parametrize("language_code", ["en", "zh"])
    @pytest.mark.parametrize("name", catalogue())
    def test_no_model_needs_more_than_100_columns(
        self, name: str, language_code: str, write: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["models", name, "--lang", language_code])
        scenario = {
            "model": {"name": name},
            "hardware": {"gpu": "MI250X-128GB", "gpus": 1024},
            "parallelism": {"engine": "deepspeed", "zero_stage": 3},
            "offload": {"optimizer": "cpu"},
        }
        # What learned 1,024 or 2,048 positions cannot run, and is answered all the same.
        assert main(["predict", write(scenario), "--lang", language_code]) in (0, 1, 2, 3)
        text = capsys.readouterr().out
        assert name in text
        assert max(columns._width(line) for line in text.splitlines()) <= 100

    @pytest.mark.parametrize("argv", [["models"], ["gpus"], ["gpus", "--unit", "GiB"], ["gpus", "--lang", "zh"]])
    def test_no_table_needs_more_than_100_columns(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(argv) == 0
        assert max(columns._width(line) for line in capsys.readouterr().out.splitlines()) <= 100

    def test_the_text_tells_peak_usable_memory_and_sources(
        self, write: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["predict", write(EXAMPLE)])
        text = capsys.readouterr().out
        for expected in (
            "Fits",
            "error band 20%, assumed",
            "2 × 7,000,000,000 = 14 GB",
            "84.98 GB",
            "arXiv 1910.02054",
        ):
            assert expected in text

    def test_lines_break_at_spaces_between_chinese_characters_and_in_long_words(self) -> None:
        assert columns.wrap("one two three", 7) == ["one two", "three"]
        assert columns.wrap("显存不够用了", 4) == ["显存", "不够", "用了"]
        assert columns.wrap("a" * 25, 10) == ["a" * 10, "a" * 10, "a" * 5]
        assert columns.wrap("", 10) == [""]

    def test_numbers_are_written_as_ranges(self) -> None:
        assert model_text._ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"

    def test_an_output_that_is_not_utf_8_still_gets_its_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        assert main(["models", "meta-llama/Llama-2-7b-hf"]) == 0
        assert b"4,096" in written.getvalue()

    def test_the_language_ends_with_the_command(self) -> None:
        main(["gpus", "--lang", "zh"])
        assert language() == "en"


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_text: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_text", lambda _path, _limit: "{}")
    monkeypatch.setattr(cli, "parse_scenario", interrupt)
    assert main(["predict", "-"]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_program_does_not_read_as_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "accelerators", lambda: 1 / 0)
    assert main(["gpus"]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


class TestProcess:
    def run(self, *argv: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False, **options)

    def test_predict_imports_nothing_heavy(self, write: Any) -> None:
        path = write({"model": {"name": "meta-llama/Llama-3.1-8B"}})
        code = (
            "import sys; from memcore.cli import main; main(['predict', sys.argv[1]]); "
            "heavy = {'torch', 'transformers', 'streamlit', 'pandas', 'plotly', 'numpy'}; "
            "sys.exit(' '.join(heavy & set(sys.modules)))"
        )
        finished = self.run("-c", code, path)
        assert finished.stderr.strip() == ""
        assert "Llama-3.1-8B" in finished.stdout

    def test_the_module_passes_the_exit_status_on(self, write: Any) -> None:
        assert self.run("-m", "memcore", "predict", write(single(7_000_000_000))).returncode == 1

    def test_a_reader_that_goes_away_gets_no_traceback(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as closed:
            finished = subprocess.run(
                [sys.executable, "-m", "memcore", "models"],
                cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
            )  # fmt: skip
        assert finished.returncode == 2
        assert finished.stderr.count("\n") == 1
        assert "cannot be written" in finished.stderr


def test_inventories_are_what_the_table_counts(capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "--json"])
    for row in json.loads(capsys.readouterr().out):
        inventory = catalogue_inventory(row["name"])
        assert inventory is None or row["total"] == inventory.n_params

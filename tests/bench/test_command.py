"""``python -m memcore bench`` on a small model, through real workers. Run: pytest tests/bench/test_command.py

Each one-click sweep runs once, whole; what an engineer would check by eye is checked here.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_bench import SCENARIO

from memcore.bench.sweeps import SweepKind
from memcore.bench.worker.device import find_device
from memcore.cli import main
from memcore.score.own import read_given
from memcore.settings import settings

pytestmark = pytest.mark.skipif(find_device() != "cpu", reason="an accelerator is measured here, not the CPU")
MOST_S = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "scenario.json").write_text(json.dumps(SCENARIO), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMCORE_STORE", str(folder / "measurements.sqlite"))
        settings.cache_clear()
        yield folder
    settings.cache_clear()


@pytest.fixture(scope="module")
def sweeps(folder: Path) -> Any:
    """The JSON of each sweep, measured when it is first asked for."""
    kept: dict[str, dict[str, Any]] = {}

    def sweep(kind: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        if kind not in kept:
            begun_s = time.monotonic()
            assert main(["bench", "--sweep", kind, str(folder / "scenario.json"), "--json"]) == 0
            output = capsys.readouterr()
            kept[kind] = json.loads(output.out)
            kept[kind]["seconds"] = time.monotonic() - begun_s
            kept[kind]["progress"] = output.err.splitlines()
        return kept[kind]

    return sweep


@pytest.mark.parametrize("kind", [kind.value for kind in SweepKind])
class TestEverySweep:
    def test_it_ends_in_time_with_a_figure_or_a_reason_for_each_case(self, kind: str, sweeps: Any, capsys: Any):
        found = sweeps(kind, capsys)
        assert found["seconds"] < MOST_S
        assert {case["status"] for case in found["cases"]} <= {"done", "unavailable"}
        for case in found["cases"]:
            assert bool(case["figures"]) != bool(case["reason"])
        assert found["progress"][0].startswith("1 of ")

    def test_the_trace_is_what_was_measured(self, kind: str, sweeps: Any, capsys: Any):
        traced = [
            (case["figures"]["traced_bytes"], case["figures"]["peak_bytes"])
            for case in sweeps(kind, capsys)["cases"]
            if case["figures"] and case["case"]["part"] == "layers"
        ]
        assert traced
        for trace, peak in traced:
            assert trace is not None
            assert abs(trace - peak) <= max(peak / 100, 2**20)

    def test_no_variant_changes_the_result(self, kind: str, sweeps: Any, capsys: Any):
        for case in sweeps(kind, capsys)["cases"]:
            if case["figures"] and case["figures"]["gradient_difference"] is not None:
                assert case["figures"]["gradient_difference"] < 1e-5


class TestLaws:
    def test_attention_alone_is_quadratic_plain_and_linear_with_flash(self, sweeps: Any, capsys: Any):
        found = sweeps("sequence", capsys)
        assert found["exponents"]["plain"] > 1.8
        assert 0.85 <= found["exponents"]["flash"] <= 1.15
        assert found["intervals"]["plain"][0] < found["exponents"]["plain"] < found["intervals"]["plain"][1]
        layer = found["layers"]["plain"]
        assert sum(layer["shares_percent"]) == pytest.approx(100)
        # Scores of 4 heads in FP32 and the softmax's copies against 128 wide tensors: takes over early.
        assert 16 < layer["takeover_tokens"] < 512

    def test_sqrt_segments_take_the_root_of_the_depth(self, sweeps: Any, capsys: Any):
        found = sweeps("depth", capsys)
        assert 0.4 <= found["exponents"]["segments"] <= 0.6
        assert 0.9 <= found["exponents"]["none"] <= 1.1

    def test_the_predicted_k_is_as_good_as_the_best(self, sweeps: Any, capsys: Any):
        found = sweeps("segments", capsys)["segments"]
        assert found["predicted"] is not None
        assert found["excess_percent"] <= 2

    def test_the_frontier_begins_with_flash_and_full_checkpointing(self, sweeps: Any, capsys: Any):
        first = sweeps("frontier", capsys)["frontier"][0]
        assert (first["attention"], first["checkpointing"]) == ("flash", "full")


class TestStore:
    def test_known_cases_are_not_measured_again_and_say_when(self, folder: Path, sweeps: Any, capsys: Any):
        sweeps("segments", capsys)
        assert main(["bench", "--sweep", "segments", str(folder / "scenario.json"), "--known"]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        assert time.strftime("%Y-%m-", time.gmtime()) in output.out
        assert "segments of 2" in output.out

    def test_an_export_is_taken_in_elsewhere(
        self, folder: Path, sweeps: Any, capsys: Any, monkeypatch: Any, tmp_path: Path
    ):
        sweeps("segments", capsys)
        assert main(["bench", "--export"]) == 0
        (tmp_path / "export.json").write_text(capsys.readouterr().out, encoding="utf-8")
        monkeypatch.setenv("MEMCORE_STORE", str(tmp_path / "other.sqlite"))
        settings.cache_clear()
        assert main(["bench", "--import", str(tmp_path / "export.json")]) == 0
        assert "measurements were taken in" in capsys.readouterr().out
        assert main(["bench", "--import", str(tmp_path / "export.json"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"taken_in": 0}
        monkeypatch.undo()
        settings.cache_clear()


class TestOwnRuns:
    def test_what_was_measured_is_written_as_runs_that_the_scoreboard_reads(
        self, folder: Path, sweeps: Any, capsys: Any
    ):  # fmt: skip
        cases = [case for case in sweeps("segments", capsys)["cases"] if case["figures"]]
        known = ["bench", "--sweep", "segments", str(folder / "scenario.json"), "--known", "--own-runs"]
        assert main(known) == 0
        rows = read_given(capsys.readouterr().out).rows
        peaks = [(case["figures"]["peak_bytes"], case["figures"]["traced_bytes"]) for case in cases]
        assert sorted((row.measured, row.predicted) for row in rows) == sorted(map(tuple, peaks))
        assert {(row.regime, row.device, row.evidence) for row in rows} == {("bench", "cpu", "trace")}
        assert main(["bench", "--export", "--own-runs"]) == 0
        assert set(rows) <= set(read_given(capsys.readouterr().out).rows)

    def test_with_nothing_measured_there_is_one_sentence(self, capsys: Any, monkeypatch: Any, tmp_path: Path):
        with monkeypatch.context() as patch:
            patch.setenv("MEMCORE_STORE", str(tmp_path / "none.sqlite"))
            settings.cache_clear()
            assert main(["bench", "--export", "--own-runs"]) == 2
        settings.cache_clear()
        assert capsys.readouterr().err == "Nothing that was measured has a prediction to lie beside.\n"


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--sweep", "depth"], "Give a scenario or --model"),
            (["--sweep", "depth", "scenario.json", "--model", "openai-community/gpt2"], "and not both"),
            (["--sweep", "width", "scenario.json"], "invalid choice"),
            (["scenario.json"], "required"),
            (["--export", "--model", "openai-community/gpt2"], "go with --sweep alone"),
            (["--import", "scenario.json", "--known"], "go with --sweep alone"),
            (["--import", "scenario.json"], "no export of measurements"),
            (["--import", "scenario.json", "--own-runs"], "goes with --sweep or --export"),
            (["--sweep", "depth", "--model", "no such model"], "no such model"),
        ],
    )
    def test_one_sentence(self, folder: Path, capsys: Any, monkeypatch: Any, arguments: list[str], sentence: str):
        monkeypatch.chdir(folder)
        assert main(["bench", *arguments]) == 2
        message = capsys.readouterr().err
        assert sentence in message
        assert message.count("\n") == 1

    def test_measuring_can_be_switched_off(self, folder: Path, capsys: Any, monkeypatch: Any):
        monkeypatch.setenv("MEMCORE_MEASURING", "0")
        settings.cache_clear()
        try:
            assert main(["bench", "--sweep", "depth", str(folder / "scenario.json")]) == 2
        finally:
            monkeypatch.undo()
            settings.cache_clear()
        assert "switched off" in capsys.readouterr().err

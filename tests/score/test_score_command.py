"""``python -m memcore score``. Run: pytest tests/score/test_score_command.py"""

import json
from pathlib import Path
from typing import Any

import pytest
from made_up_run import made_up

from memcore.cli import EXIT_BAD_INPUT, main


def file_of(folder: Path, *runs: Any) -> str:
    path = folder / "runs.json"
    path.write_text(json.dumps({"schema_version": 1, "runs": runs}), encoding="utf-8")
    return str(path)


def test_ones_own_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    beyond = made_up(parallelism__tp=2, hardware__gpus=2)
    path = file_of(tmp_path, made_up(), beyond)
    assert main(["score", path, "--no-trace", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["allocated"]["predicted"] == 1
    assert main(["score", path, "--no-trace", "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["score", path, "--by", "family", "--unit", "GiB", "--lang", "zh", "--no-trace"]) == 0
    assert "small.full.bf16.g1" in capsys.readouterr().out


def test_the_rest_is_scored_where_a_record_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = file_of(tmp_path, {"id": "broken"}, made_up(model__config={"model_type": "no_such"}), made_up())
    assert main(["score", path, "--no-trace", "--json"]) == 3
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["status"] for run in runs] == ["malformed", "not_predicted", "predicted"]
    assert "no_such" in runs[1]["reason"]


@pytest.mark.parametrize(("options", "evidence"), [([], "trace"), (["--no-trace"], "formula")])
def test_a_run_is_traced_unless_told_otherwise(
    options: list[str], evidence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["score", file_of(tmp_path, made_up()), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["evidence"] == evidence


@pytest.mark.parametrize("arguments", [["no-such.json"], ["--csv", "--json"], ["--by", "gpu"], []])
def test_bad_input(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = file_of(tmp_path, made_up())
    given = arguments if not arguments or arguments[0].endswith("json") else [path, *arguments]
    assert main(["score", *given]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err


def test_a_file_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    assert main(["score", str(path)]) == EXIT_BAD_INPUT
    assert "runs" in capsys.readouterr().err

"""``python -m memcore verify`` through real ranks. Run: pytest tests/verify/test_verify_command.py"""

import json
from pathlib import Path
from typing import Any

import pytest

from memcore.cli import EXIT_BAD_INPUT, main
from memcore.settings import settings


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["verify", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_scenario_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps({"model": {"name": "Qwen/Qwen2.5-7B"}, "hardware": {"gpus": 8}}), encoding="utf-8")
    found = answer(capsys, str(file), "--ranks", "2", "--engine", "ddp", "--convention", "pure_bf16")
    assert found["ranks"] == 2
    assert found["engine"] == "ddp"
    assert abs(found["resident_error_pct"]) <= 0.5
    assert set(found["phase_error_pct"]) == {"forward", "backward", "optimizer"}
    assert all(abs(error) <= 3 for error in found["phase_error_pct"].values())
    assert found["steady"]
    assert found["process_overhead_bytes"] > 0
    assert len(found["per_rank"]) == 2
    for phase in found["phases"].values():
        assert sum(term["bytes"] for term in phase["terms"]) == phase["predicted_bytes"]
        assert phase["staging_bytes"] >= 0
    assert any("2 ranks instead of 8" in sentence for sentence in found["reductions"])


def test_in_words(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--engine", "single", "--ranks", "1", "--convention", "fp32", "--lang", "zh"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 100
    assert "%" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine", "ddp", "--ranks", "9"], "from 1 to 8"),
        (["--engine", "deepspeed", "--stage", "3", "--set", "reduce_bucket_size"], "NAME=VALUE"),
        (["--engine", "deepspeed", "--stage", "3", "--set", "no_such_key=1"], "no_such_key"),
        (["--engine", "ddp", "--nnodes", "2"], "--port is needed"),
        (["--model", "no/such-model"], "no/such-model"),
        (["x.json", "--model", "meta-llama/Llama-3.1-8B"], "not both"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", *arguments]) == EXIT_BAD_INPUT
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert len(complaint.strip().splitlines()) == 1


def test_where_measuring_is_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("MEMCORE_MEASURING", "0")
    settings.cache_clear()
    try:
        assert main(["verify", "--engine", "ddp"]) == EXIT_BAD_INPUT
        assert "switched off" in capsys.readouterr().err
    finally:
        settings.cache_clear()

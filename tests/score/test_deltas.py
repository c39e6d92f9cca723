"""Differences between two runs, predicted and measured. Run: pytest tests/score/test_deltas.py"""

import json
from pathlib import Path
from typing import Any

import pytest
from made_up_run import made_up

from memcore.cli import main
from memcore.score.deltas import score_delta, score_deltas
from memcore.score.published import published_deltas
from memcore.score.scoring import Status

MIB = 2**20
DELTA: dict[str, Any] = {
    "id": "half-a-bucket", "source": "owner/name#1", "split": "dev", "model": "a model of theirs",
    "engine": "deepspeed", "zero_stage": 2, "gpus": None, "changed": ["reduce_bucket_size"],
    "baseline": {"reduce_bucket_size": 2_000_000, "overlap_comm": False},
    "variant": {"reduce_bucket_size": 1_000_000, "overlap_comm": False},
    "delta_bytes": -2_100_000, "baseline_bytes": 10_000_000, "variant_bytes": 7_900_000, "metric": "unknown",
    "when": "peak", "precision_bytes": 1, "assumptions": [],
}  # fmt: skip


def scored(**changes: Any) -> Any:
    return score_delta({**DELTA, **changes}, 1)


def test_the_published_differences_are_predicted_within_a_few_units_of_their_last_digit():
    """deepspeedai/DeepSpeed#1302 prints MiB: two buckets of 5e8 FP16 values, one, and what smaller ones take."""
    for score in score_deltas(published_deltas()):
        assert score.status is Status.PREDICTED, score.reason
        assert abs(score.error_bytes or 0) <= 3 * MIB


@pytest.mark.parametrize(
    ("settings", "other", "num_bytes"),
    [
        ({}, {"reduce_bucket_size": 1_000_000}, -2_000_000),
        ({"overlap_comm": True}, {"reduce_bucket_size": 1_000_000}, -4_000_000),
        ({}, {"overlap_comm": True}, 4_000_000),
        ({}, {"contiguous_gradients": False}, -4_000_000),
        ({}, {"reduce_scatter": False}, 0),
    ],
)
def test_it_is_the_buckets_by_hand(settings: dict[str, Any], other: dict[str, Any], num_bytes: int):
    """2 bytes for each value; overlap_comm has a second bucket, and without contiguous_gradients there is none."""
    known = {"reduce_bucket_size": 2_000_000, "overlap_comm": False, "contiguous_gradients": True}
    baseline = {**known, "reduce_scatter": True, **settings}
    for gpus in (None, 8):
        score = scored(baseline=baseline, variant={**baseline, **other}, changed=list(other), gpus=gpus)
        assert score.predicted == num_bytes
        assert score.error_bytes == num_bytes + 2_100_000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "fsdp2", "zero_stage": None}, "only a bucket's difference"),
        ({"zero_stage": 1}, "only a bucket's difference"),
        ({"when": "after_init"}, "Only a peak's difference"),
        ({"gpus": 1}, "reduces nothing"),
        ({"changed": ["zero_stage"], "baseline": {"zero_stage": 2}, "variant": {"zero_stage": 3}}, "on the model"),
    ],
)
def test_what_depends_on_the_model_has_a_reason_and_no_figure(changes: dict[str, Any], reason: str):
    score = scored(**changes)
    assert (score.status, score.predicted, score.error_bytes) == (Status.NOT_PREDICTED, None, None)
    assert reason in score.reason


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"id": "broken"}, "source is missing."),
        ({**DELTA, "delta_bytes": 7}, "variant_bytes less baseline_bytes is -2,100,000, but delta_bytes is 7."),
        ({**DELTA, "changed": ["overlap_comm"]}, "differ in ['reduce_bucket_size']"),
        ({**DELTA, "changed": []}, "changed"),
        ({**DELTA, "baseline": {"reduce_bucket_size": 0}}, "baseline.reduce_bucket_size"),
        ({**DELTA, "more": 1}, "more is not a field"),
        (None, "allowed is an object"),
    ],
)
def test_a_record_that_cannot_be_read_is_said_as_a_runs_is(data: Any, sentence: str):
    score = score_delta(data, 4)
    assert score.status is Status.MALFORMED
    assert sentence in score.reason
    assert score.delta_id == (data["id"] if data else "#4")


class TestCommand:
    def answer(self, folder: Path, *options: str, deltas: Any) -> int:
        path = folder / "runs.json"
        path.write_text(json.dumps({"runs": [made_up()], "deltas": deltas}), encoding="utf-8")
        return main(["score", str(path), "--no-trace", *options])

    def test_after_the_runs_and_under_a_key_of_their_own(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        assert self.answer(tmp_path, "--json", deltas=[]) == 0
        without = json.loads(capsys.readouterr().out)
        assert self.answer(tmp_path, "--json", deltas=[DELTA]) == 0
        found = json.loads(capsys.readouterr().out)
        (delta,) = found.pop("deltas")
        assert {**found, "deltas": []} == without
        figures = ("predicted_bytes", "measured_bytes", "error_bytes")
        assert [delta[name] for name in figures] == [-2_000_000, -2_100_000, 100_000]
        assert delta["changed"] == {"reduce_bucket_size": [2_000_000, 1_000_000]}
        assert self.answer(tmp_path, deltas=[DELTA]) == 0
        text = capsys.readouterr().out
        assert text.index("made-up") < text.index("half-a-bucket") < text.index("regime")
        assert "reduce_bucket_size 2e+06 -> 1e+06" in text

    def test_the_rest_is_scored_and_csv_is_of_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        assert self.answer(tmp_path, deltas=[DELTA, {"id": "broken"}]) == 3
        text = capsys.readouterr().out
        assert "half-a-bucket" in text
        assert "broken: source is missing." in text
        assert self.answer(tmp_path, "--csv", deltas=[DELTA]) == 0
        assert "half-a-bucket" not in capsys.readouterr().out

    def test_what_is_no_list_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        assert self.answer(tmp_path, deltas={}) == 2
        assert '"deltas" of a file of runs is a list' in capsys.readouterr().err

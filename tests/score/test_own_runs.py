"""A team's own runs: files, exports, proofs, and the job that scores them. Run: pytest tests/score/test_own_runs.py"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from counted import ask
from made_up_run import made_up
from scored_runs import scored, several
from worker import ask as answer

from memcore.accuracy.band import WIDE_PERCENT, band_for, earned_band
from memcore.accuracy.calibration import calibration_for
from memcore.budget import predict
from memcore.errors import UserError
from memcore.score import running
from memcore.score.own import export_rows, proof_row, read_given, with_rows
from memcore.score.running import MAX_OWN_RUNS, RunningScores, Scored
from memcore.terms import EvidenceKind
from memcore.verify.case import RankFigures
from memcore.verify.matrix import matrix
from memcore.verify.proof import case_evidence, prove

WAIT_S = 60


def rank_figures(peaks: dict[str, int]) -> RankFigures:
    """One rank's, made up: the peaks of some phases."""
    known = {**dict.fromkeys(("forward", "backward", "optimizer", "idle"), 1), **peaks}
    return RankFigures(rank=0, init=1, first=known, peaks=known, spread_percent=0.0, staging={}, other=0, held={})


def until(job: RunningScores, holds: Callable[[Scored], bool]) -> Scored:
    deadline = time.monotonic() + WAIT_S
    while not holds(found := job.look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def ended(job: RunningScores) -> Scored:
    return until(job, lambda found: found.ended)


class TestFiles:
    def test_records_are_still_to_be_scored(self):
        given = read_given(json.dumps({"runs": [made_up(), {"id": "broken"}]}))
        assert [record["id"] for record in given.records] == ["made-up", "broken"]
        assert given.rows == ()

    def test_an_export_comes_back_as_it_was(self):
        rows = (scored(), scored(predicted=None, evidence=None), *several(1.0, 2.0, by_formula=3, device="cpu"))
        given = read_given(export_rows(rows))
        assert (given.rows, given.records, given.older) == (rows, (), False)

    def test_rows_of_another_version_are_told_from_this_ones(self):
        data = {**json.loads(export_rows([scored()])), "predicted_as_of": "2020-01-01"}
        assert read_given(json.dumps(data)).older

    @pytest.mark.parametrize(
        "change",
        [{"measured": 0}, {"measured": "10"}, {"predicted": -1}, {"predicted": 1.5}, {"n_params": 0}, {"seq_len": 0},
         {"run_id": 3}],
    )  # fmt: skip
    def test_a_row_that_no_run_has_is_refused(self, change: dict[str, Any]):
        data = json.loads(export_rows([scored()]))
        data["runs"][0] |= change
        with pytest.raises(UserError):
            read_given(json.dumps(data))

    @pytest.mark.parametrize(
        "text", ["", "{}", "[", '{"memcore_own_runs": 1}', '{"memcore_own_runs": 1, "runs": [{}]}', "7"]
    )
    def test_another_file_is_refused_with_a_sentence(self, text: str):
        with pytest.raises(UserError):
            read_given(text)

    def test_more_than_a_page_scores_is_for_the_command_line(self):
        with pytest.raises(UserError, match="memcore score"):
            read_given(json.dumps([{}] * (MAX_OWN_RUNS + 1)))

    def test_a_run_that_is_scored_again_takes_the_place_of_its_old_row(self):
        old, new = several(1.0, 2.0), several(9.0)
        assert with_rows(old, new) == (new[0], old[1])


class TestJob:
    def test_the_rest_is_scored_where_records_are_wrong(self):
        bad_bytes = made_up(id="bad", measured__bytes=0)
        compiled = made_up(id="compiled", workload__compile=True)
        beyond = made_up(id="beyond", parallelism__tp=2, hardware__gpus=2)
        records = [made_up(), {"id": "broken"}, bad_bytes, None, compiled, beyond, made_up(id="second")]
        found = ended(RunningScores(records, ask))
        assert (found.done, found.num_records) == (7, 7)
        assert [row.run_id for row in found.rows] == ["made-up", "compiled", "beyond", "second"]
        assert [row.run_id for row in found.rows if row.predicted] == ["made-up", "second"]
        assert [each.run_id for each in found.complaints] == ["broken", "bad", "#4", "compiled", "beyond"]
        assert all(each.reason.endswith(".") for each in found.complaints)
        assert set(found.records) == {row.run_id for row in found.rows}

    def test_of_two_runs_of_one_id_the_second_is_said_to_be_left_out(self):
        found = ended(RunningScores([made_up(), made_up(workload__micro_batch=4)], ask))
        assert [row.micro_batch for row in found.rows] == [2]
        assert [each.reason for each in found.complaints] == ["A run of this id came before; this one is left out."]

    def test_it_is_cancelled_between_two_records(self):
        asked, go_on = threading.Event(), threading.Event()

        def slow(task: str, payload: dict[str, Any]) -> Any:
            asked.set()
            assert go_on.wait(WAIT_S)
            return ask(task, payload)

        job = RunningScores([made_up(), made_up(id="second")], slow)
        assert asked.wait(WAIT_S)
        job.cancel()
        go_on.set()
        assert [row.run_id for row in ended(job).rows] == ["made-up"]

    def test_one_file_at_a_time_and_a_waiting_one_can_be_cancelled(self):
        go_on = threading.Event()

        def slow(task: str, payload: dict[str, Any]) -> Any:
            assert go_on.wait(WAIT_S)
            return ask(task, payload)

        first = RunningScores([made_up()], slow)
        until(first, lambda found: not found.waits)
        second, third = RunningScores([made_up()], ask), RunningScores([made_up()], ask)
        assert second.look().waits
        third.cancel()
        assert ended(third).done == 0
        go_on.set()
        assert ended(first).done == ended(second).done == 1

    def test_a_file_that_nobody_looks_at_is_dropped(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(running, "HEARTBEAT_S", 0.0)
        job = RunningScores([made_up()] * 3, ask)
        job._thread.join(WAIT_S)
        assert job.look().done < 3

    def test_how_long_it_takes_is_said_after_the_first(self):
        found = ended(RunningScores([made_up()], ask))
        assert found.estimate_s == 0


def test_runs_of_ones_own_do_not_move_the_published_band():
    """Neither a proof on the CPU nor a file: the band is read from the published runs alone."""
    before = band_for("ddp", "full", EvidenceKind.FORMULA)
    read_given(export_rows(several(*[0.1] * 50, engine="ddp", by_formula=10**10)))
    assert band_for("ddp", "full", EvidenceKind.FORMULA) == before
    assert before.percent == WIDE_PERCENT


def test_a_proof_on_the_cpu_is_a_run_of_ones_own_that_calibrates_no_gpu():
    """What a proof's ranks measured is made up: a tenth more than is predicted."""
    case = matrix(2)[0]
    evidence = case_evidence(case, answer, "cpu")
    exact = prove(case, evidence, [rank_figures({})], "cpu")
    peaks = {phase.name: round(phase.predicted * 1.1) for phase in exact.phases}
    row = proof_row(prove(case, evidence, [rank_figures(peaks)] * case.ranks, "cpu"), "cpu")
    assert row.error_pct == pytest.approx(100 / 1.1 - 100, abs=0.01)
    assert (row.engine, row.evidence, row.device) == (case.scenario.parallelism.engine.value, "trace", "cpu")
    budget = predict(case.scenario, evidence)
    assert calibration_for(budget, [row]) is None
    on_gpu = calibration_for(budget, [replace(row, device="cuda")])
    assert on_gpu is not None
    assert on_gpu.ratio == pytest.approx(1.1)
    assert earned_band([row] * 50, row.engine, row.method, EvidenceKind.TRACE).percent == WIDE_PERCENT

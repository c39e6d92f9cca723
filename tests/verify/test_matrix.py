"""The engines' files against real runs: twelve cases run here and now, all of the matrix from the figures kept of it.

Run: pytest tests/verify/test_matrix.py -s (prints the table; two to four minutes, DeepSpeed builds its operators the
first time). The whole matrix is run by ``python -m scripts.prove_engines``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memcore.budget import evidence_for, predict
from memcore.jobs import HeavyLane, HeavyLimits, LightLane, finish
from memcore.verify.case import Case, RankFigures, load_figures
from memcore.verify.matrix import RANKS, in_ci, matrix
from memcore.verify.proof import IDLE, Proof, case_evidence, prove
from memcore.verify.running import verify_step

RESIDENT_PERCENT, PHASE_PERCENT, START_PERCENT = 0.5, 3.0, 1.0
MOST_S = 360.0
KEPT = json.loads((Path(__file__).parents[1] / "data" / "engines_cpu.json").read_text(encoding="utf-8"))
README = Path(__file__).parents[2] / "README.md"


def test_the_readme_says_how_many_runs():
    runs = sum(len(cases) for cases in KEPT["cases"].values())
    assert f"{runs} real runs of DeepSpeed" in README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def light() -> Iterator[LightLane]:
    lane = LightLane()
    yield lane
    lane.close()


@pytest.fixture(scope="module")
def run_now() -> dict[str, Any]:
    """What the twelve cases' ranks measured, in one launch."""
    lane = HeavyLane(HeavyLimits(heartbeat_s=900))
    try:
        result = finish(lane, lane.submit([verify_step(in_ci(), "cpu")], device="cpu")).results[0]
    finally:
        lane.close()
    assert result.value is not None, result.message
    return {"seconds": result.seconds, **{each["name"]: each for each in result.value["results"]}}


def check(proof: Proof) -> None:
    for phase in proof.phases:
        limit = RESIDENT_PERCENT if phase.name == IDLE else PHASE_PERCENT
        assert abs(phase.error_percent) <= limit, f"{proof.case.name}, {phase.name}: {phase.error_percent:+.2f}%"


@pytest.mark.parametrize("case", in_ci(), ids=lambda case: case.name)
def test_a_case_run_now(case: Case, run_now: dict[str, Any], light: LightLane):
    assert "ranks" in run_now[case.name], run_now[case.name].get("reason")
    ranks = [load_figures(each) for each in run_now[case.name]["ranks"]]
    proof = prove(case, case_evidence(case, light.ask, "cpu"), ranks, "cpu")
    print(f"\n{case.name:66s}", *(f"{phase.name} {phase.error_percent:+.2f}%" for phase in proof.phases))
    check(proof)


def test_the_launch_takes_less_than_six_minutes(run_now: dict[str, Any]):
    assert run_now["seconds"] < MOST_S


EVERY_CASE = [case for ranks in RANKS for case in matrix(ranks)]


def kept(case: Case) -> list[RankFigures]:
    return [load_figures(each) for each in KEPT["cases"][str(case.ranks)][case.name]]


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: f"{case.ranks} ranks, {case.name}")
class TestTheFiguresKept:
    def test_each_phase_and_what_stays(self, case: Case, light: LightLane):
        check(prove(case, case_evidence(case, light.ask, "cpu"), kept(case), "cpu"))

    def test_the_start(self, case: Case, light: LightLane):
        start = predict(case.scenario, evidence_for(case.scenario, light.ask)).start
        assert start is not None
        measured = max(rank.init for rank in kept(case))
        assert start.largest == pytest.approx(measured, rel=START_PERCENT / 100)

    def test_neither_start_nor_first_step_is_the_peak(self, case: Case):
        for rank in kept(case):
            most = max(rank.peaks.values())
            assert rank.init <= most
            assert max(rank.first.values()) <= most * 1.0001

    def test_what_was_held_is_part_of_what_stays(self, case: Case):
        for rank in kept(case):
            assert sum(rank.held.values()) <= rank.peaks[IDLE] * 1.0001


def test_the_figures_kept_are_of_the_matrix():
    assert {ranks: list(cases) for ranks, cases in KEPT["cases"].items()} == {
        str(ranks): [case.name for case in matrix(ranks)] for ranks in RANKS
    }


def test_what_is_documented_is_what_is_kept():
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert KEPT["measured"] in text
    for case in EVERY_CASE:
        assert f"| {case.name} |" in text

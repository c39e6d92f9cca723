"""All published runs, by the closed forms: each is predicted, or a sentence says why not. The current figures are
printed (pytest -s), and not held to limits: those would be fitted to the runs.

Run: pytest -s tests/score/test_published_runs.py
"""

from typing import Any

import pytest
from counted import ask

from memcore.score import Score, Status, score_run, summarise
from memcore.score.report import score_text
from memcore.units import ByteUnit


@pytest.fixture(scope="module")
def scores(measured_runs: dict[str, Any]) -> list[Score]:
    return [score_run(data, number, ask) for number, data in enumerate(measured_runs["runs"].values(), start=1)]


def test_every_run_is_predicted_or_has_a_reason(scores: list[Score]):
    for score in scores:
        assert score.status is not Status.MALFORMED, (score.run_id, score.reason)
        assert (score.error_pct is None) == bool(score.reason), score.run_id
    print("\n" + score_text(scores, ByteUnit.GB, "regime"))


def test_the_summary_counts_every_run_once(scores: list[Score]):
    found = summarise(scores)
    within = found["records"]["predicted"] + found["records"]["not_predicted"]
    assert sum(found["records"].values()) == len(scores)
    assert sum(found[group]["n"] for group in ("allocated", "reserved", "other")) == within
    for group in ("gold", "allocated", "reserved", "other"):
        assert sum(regime[group]["n"] for regime in found["regimes"].values()) == found[group]["n"]

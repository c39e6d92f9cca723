"""What scripts/score_published.py writes is what the project holds, and what it holds is within the targets.

Run: pytest tests/score/test_generated.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
from made_up_run import KINDS, made_up
from worker import ask

from memcore.accuracy.scored import ScoredRun, published
from memcore.score.document import readme_table
from memcore.score.published import pack, published_deltas, published_records, unpack
from memcore.score.reasons import one_sided_without_reason, unused_reasons
from memcore.score.record import parse_run
from memcore.score.rows import scored_run
from memcore.score.summary import by_group
from scripts.score_published import BEGIN, END, between_markers

ROOT = Path(__file__).resolve().parents[2]
# The bounds that the errors of a group hold, in per cent.
TARGETS = {
    ("gold", "median_abs_pct"): 2.0,
    ("gold", "p90_abs_pct"): 6.0,
    ("allocated", "median_abs_pct"): 4.0,
    ("allocated", "p90_abs_pct"): 12.0,
    ("reserved", "median_abs_pct"): 7.0,
}
# The share of runs within the scope that are predicted, at the least.
PREDICTED = 0.95


def test_a_run_of_each_kind_is_scored_as_the_files_say():
    """One of each source, engine and method; ``python -m scripts.score_published --check`` scores them all."""
    records = published_records()
    kept: dict[tuple[str, str, str], ScoredRun] = {}
    for run in published().runs:
        kept.setdefault((run.source, run.engine, run.method), run)
    for number, expected in enumerate(kept.values()):
        _score, row = scored_run(records[expected.run_id], number, ask)
        assert row == expected, f"{expected.run_id}: run python -m scripts.score_published"


def test_the_readme_has_the_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert between_markers(readme, readme_table(published())) == readme


def test_the_records_are_those_that_were_published(measured_runs: dict[str, Any]):
    assert list(published_records().values()) == list(measured_runs["runs"].values())
    assert list(published_deltas()) == list(measured_runs["deltas"].values())


@pytest.mark.parametrize(("group", "figure"), TARGETS)
def test_the_errors_are_within_their_bounds(group: str, figure: str):
    found = getattr(by_group(published().runs)[group], figure)
    assert found <= TARGETS[group, figure]


def test_most_runs_are_predicted():
    groups = by_group(published().runs)
    parts = [groups[name] for name in ("allocated", "reserved", "other")]
    share = sum(part.predicted for part in parts) / sum(part.n for part in parts)
    assert share >= PREDICTED


def test_what_misses_to_one_side_has_a_reason():
    assert list(one_sided_without_reason(published().runs)) == []


def test_no_reason_is_without_its_runs():
    assert unused_reasons(published().runs) == []


def test_records_are_kept_whole():
    """Facts alone, in a file that a browser would load at once."""
    records = [made_up(kind, id=f"run-{kind}") for kind in KINDS]
    assert unpack(pack(records)) == records
    assert [list(each) for each in unpack(pack(records))] == [list(each) for each in records]
    assert unpack(pack([])) == []
    for record in published_records().values():
        parse_run(json.loads(json.dumps(record)))
    assert (ROOT / "memcore" / "data" / "published_runs.json").stat().st_size < 200_000


def test_a_table_goes_between_its_markers():
    text = f"before\n{BEGIN}\nold\n{END}\nafter"
    assert between_markers(text, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter"
    with pytest.raises(AssertionError):
        between_markers("no place", "new")

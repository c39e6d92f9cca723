"""Reasons for misses: found by family, regime and metric, and missed where they are needed.

Run: pytest tests/score/test_reasons.py
"""

from collections.abc import Mapping

import pytest
from scored_runs import scored, several

from memcore.score import reasons
from memcore.score.reasons import one_sided_without_reason, reason_of, unused_reasons


def known(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, str]) -> None:
    monkeypatch.setattr(reasons, "REASONS", found)


def test_the_nearest_key_stands(monkeypatch: pytest.MonkeyPatch):
    found = {"fsdp": "regime", "fsdp/reserved": "metric", "small": "family", "run-0": "run"}
    known(monkeypatch, found)
    assert reason_of(several(0.0)[0]) == "run"
    assert reason_of(scored()) == "family"
    assert reason_of(scored(family="another")) == "metric"
    assert reason_of(scored(family="another", metric="active")) == "regime"
    assert reason_of(scored(family="another", regime="ddp")) is None


def test_a_regime_that_misses_to_one_side_needs_a_reason(monkeypatch: pytest.MonkeyPatch):
    known(monkeypatch, {})
    runs = several(-9.0, -20.0, -8.5, -12.0, 1.0)
    assert list(one_sided_without_reason(runs)) == [
        "fsdp reserved: 5 runs with a median error of -9.0%, and 4 of them have no reason.",
    ]
    known(monkeypatch, {"fsdp/reserved": "Because."})
    assert list(one_sided_without_reason(runs)) == []


def test_a_regime_with_few_runs_of_each_kind_is_taken_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    known(monkeypatch, {})
    runs = [*several(-9.0, -20.0, -12.0), *several(-9.0, -10.0, metric="allocated")]
    assert list(one_sided_without_reason(runs)) == [
        "fsdp: 5 runs with a median error of -10.0%, and 5 of them have no reason.",
    ]


@pytest.mark.parametrize("errors", [(-9.0, -20.0, -8.5, -12.0), (-8.0,) * 9, (-20.0, -20.0, 0.0, 20.0, 20.0)])
def test_few_runs_small_misses_and_both_sides_need_none(errors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch):
    known(monkeypatch, {})
    assert list(one_sided_without_reason(several(*errors))) == []


def test_a_reason_that_no_run_has_is_named(monkeypatch: pytest.MonkeyPatch):
    known(monkeypatch, {"fsdp": "", "fsdp/allocated": "", "small": "", "gone": ""})
    assert unused_reasons([scored()]) == ["fsdp/allocated", "gone"]

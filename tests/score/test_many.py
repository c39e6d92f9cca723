"""Many records at once, and how far they are. Run: pytest tests/score/test_many.py"""

import io
import sys
import threading

import pytest

from memcore import columns
from memcore.columns import BAR_COLUMNS, ProgressBar
from memcore.i18n import language, use_language
from memcore.score.many import many

WAIT_S = 20


def test_results_are_in_the_records_order():
    told: list[int] = []
    second_is_done = threading.Event()

    def work(record: object, number: int) -> tuple[object, int]:
        if number == 1:
            assert second_is_done.wait(WAIT_S)
        if number == 2:
            second_is_done.set()
        return record, number

    assert many(work, ["a", "b", "c"], at_once=2, heard=told.append) == [("a", 1), ("b", 2), ("c", 3)]
    assert told == sorted(told)
    assert told[-1] == 3
    assert many(work, [], at_once=2, heard=told.append) == []


def test_no_more_at_once_than_is_allowed():
    running, most = set(), []

    def work(_record: object, number: int) -> None:
        running.add(number)
        most.append(len(running))
        running.discard(number)

    many(work, [None] * 50, at_once=1, heard=lambda _done: None)
    assert max(most) == 1


def test_an_error_ends_it():
    with pytest.raises(ZeroDivisionError):
        many(lambda _record, number: 1 // (number - 2), [None] * 3, at_once=1, heard=lambda _done: None)


def test_sentences_are_in_the_callers_language():
    use_language("zh")
    try:
        assert many(lambda _record, _number: language(), [None] * 3, at_once=2, heard=lambda _done: None) == ["zh"] * 3
    finally:
        use_language("en")


class Stderr(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(columns, "monotonic", lambda: now[0])
    return now


def test_a_terminal_has_one_line_that_is_drawn_anew_and_taken_away(clock: list[float], monkeypatch: pytest.MonkeyPatch):
    written = Stderr(terminal=True)
    monkeypatch.setattr(sys, "stderr", written)
    bar = ProgressBar(100)
    for done in (25, 50, 100):
        clock[0] += 10
        bar.show(done, f"{done} of 100.")
    assert written.getvalue() == (
        f"\r[{'#' * 6}{'-' * 18}] 25 of 100. About 30 s left.\x1b[K"
        f"\r[{'#' * 12}{'-' * 12}] 50 of 100. About 20 s left.\x1b[K"
        "\r\x1b[K"
    )
    assert BAR_COLUMNS == 24


def test_elsewhere_there_is_a_line_now_and_then(clock: list[float], monkeypatch: pytest.MonkeyPatch):
    written = Stderr(terminal=False)
    monkeypatch.setattr(sys, "stderr", written)
    bar = ProgressBar(100)
    for done in range(100):
        clock[0] += 1
        bar.show(done, f"{done} of 100.")
    lines = written.getvalue().splitlines()
    assert len(lines) == 20
    assert not any("\r" in line or "\x1b" in line for line in lines)
    assert "left" not in lines[0]
    assert "left" in lines[1]


def test_without_standard_error_nothing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", None)
    ProgressBar(0).show(0, "")

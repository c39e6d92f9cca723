"""Home's scoreboard and a team's own runs, as users meet them. Run: pytest tests/pages/test_scoreboard_page.py"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from made_up_run import made_up
from scored_runs import several
from streamlit.testing.v1 import AppTest
from test_pages import TIMEOUT_S, change, charts, opened, verdict
from test_verifying_page import PAGES_WITH_PROOF, Ended, no_lane_stays, page, press

from memcore.accuracy.band import Band
from memcore.accuracy.scored import Published, published
from memcore.accuracy.words import error_text, nearest_gist, nearest_runs
from memcore.budget import predict
from memcore.link import write_link
from memcore.scenario import parse_scenario
from memcore.score.own import export_rows
from memcore.score.published import published_records
from memcore.terms import EvidenceKind
from memcore.trace.request import trace_request
from memcore.ui import state, verifying
from memcore.ui.state import DEFAULT_SCENARIO
from memcore.ui.work import light_lane
from memcore.units import ByteUnit, format_bytes
from memcore.verdict_words import verdict_sentence

__all__ = ["no_lane_stays"]  # a fixture that is meant here too
DEFAULT = parse_scenario(DEFAULT_SCENARIO)


@pytest.fixture(scope="module", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    light_lane().close()
    light_lane.clear()


def view(name: str, at: AppTest | None = None) -> AppTest:
    return change(at or opened(), **{state.VIEW: name})


def said(at: AppTest) -> str:
    return "\n".join(each.value for each in (*at.markdown, *at.caption, *at.info, *at.warning))


def points(at: AppTest) -> int:
    return sum(len(trace["x"]) for trace in charts(at)[0]["data"] if trace.get("customdata"))


class TestBesideTheVerdict:
    def test_the_nearest_published_runs_with_their_errors_and_sources(self):
        at = opened()
        nearest = nearest_runs(predict(DEFAULT))
        labels = [each.label for each in at.expander]
        budget = predict(DEFAULT)
        assert any(nearest_gist(budget, nearest) in label and "±20%" in label for label in labels)
        table = next(each.value for each in at.table if "Published run" in each.value.columns)
        assert list(table["Error"]) == [error_text(run.error_of(EvidenceKind.FORMULA)) for run in nearest]
        assert all("](https://github.com/" in cell for cell in table["Source"])
        assert "memcore verify" in said(at)

    def test_every_page_stands_without_any_published_run(self, monkeypatch: pytest.MonkeyPatch):
        import memcore.accuracy.words as words

        none = Published(date="2026-01-01", runs=())
        for module in ("memcore.accuracy.words", "memcore.ui.scoreboard"):
            monkeypatch.setattr(f"{module}.published", lambda: none)
        assert words.nearest_runs(predict(DEFAULT)) == []
        at = opened()
        assert "No published run has a prediction" in said(at)
        at = view(state.PUBLISHED, at)
        assert "None of these runs has a prediction" in said(at)

    def test_an_earned_band_is_said_with_its_runs(self, monkeypatch: pytest.MonkeyPatch):
        from memcore.accuracy.scored import Figure

        band = Band(percent=7, runs=33, families=4, figure=Figure.CARD)
        monkeypatch.setattr("memcore.budget.band_for", lambda *_each: band)
        at = opened()
        assert "error band 7% (33 published runs)" in said(at)
        assert "nine of ten runs like the 33 published ones" in said(at)


class TestScoreboard:
    def test_every_predicted_run_is_a_point_on_logarithmic_axes_with_their_unit(self):
        at = view(state.PUBLISHED, opened(unit="GiB"))
        assert points(at) == len(published().predicted)
        layout = charts(at)[0]["layout"]
        for axis in ("xaxis", "yaxis"):
            assert layout[axis]["type"] == "log"
            assert "(GiB)" in layout[axis]["title"]["text"]
        line = charts(at)[0]["data"][0]
        assert line["x"] == line["y"]
        assert len(at.metric) == 4

    @pytest.mark.parametrize("field", ["regime", "engine", "method", "metric", "family"])
    def test_filters(self, field: str):
        value = getattr(published().predicted[0], field)
        at = change(view(state.PUBLISHED), **{f"w_published_{field}": [value]})
        wanted = [run for run in published().predicted if getattr(run, field) == value]
        assert points(at) == len(wanted)
        table = next(each.value for each in at.dataframe if "Run" in each.value.columns)
        assert sorted(table["Run"]) == sorted(run.run_id for run in wanted)

    def test_an_opened_run_has_the_terms_of_its_prediction(self):
        """They add up to what its row says, which is the figure that is compared for an allocated peak."""
        run = min(
            (run for run in published().predicted if run.metric == "allocated"), key=lambda run: run.n_params
        )  # fmt: skip
        at = change(view(state.PUBLISHED), w_published_run=run.run_id)
        table = next(each.value for each in at.table if "At the peak" in each.value.columns)
        assert len(table) > 3
        sizes = dict(zip(table["Term"], table["At the peak"], strict=True))
        total = sizes["Allocated at the peak, the sum of all terms"].replace("\N{NO-BREAK SPACE}", " ")
        assert total == format_bytes(run.predicted or 0, ByteUnit.GB)
        assert error_text(run.error_pct) in said(at)
        assert "https://github.com/" in said(at)
        at = at.button(key="published_adopt").click().run(timeout=TIMEOUT_S)
        assert not at.exception
        assert not at.sidebar.error
        assert at.session_state[state.VIEW] == state.ANSWER
        assert at.session_state["w_engine"] == run.engine

    def test_it_is_drawn_from_data(self, monkeypatch: pytest.MonkeyPatch):
        """Nothing is predicted for the points."""
        monkeypatch.setattr("memcore.ui.run_board.score_run", lambda *_each, **_named: 1 / 0)
        assert points(view(state.PUBLISHED)) == len(published().predicted)


def upload(at: AppTest, text: str) -> AppTest:
    at.file_uploader(key="own_upload").upload("runs.json", text.encode()).run(timeout=TIMEOUT_S)
    until = time.monotonic() + TIMEOUT_S
    while "own_cancel" in [each.key for each in at.button] and time.monotonic() < until:
        time.sleep(0.5)
        at = at.run(timeout=TIMEOUT_S)
    assert not at.exception
    return at


class TestOwnRuns:
    def test_a_file_is_scored_and_what_is_wrong_is_said_one_by_one(self):
        records: list[Any] = [made_up(), {"id": "broken"}, made_up(id="bad", measured__bytes=0)]
        at = upload(view(state.OWN), json.dumps({"runs": records}))
        assert points(at) == 1
        table = next(each.value for each in at.dataframe if "Why" in each.value.columns)
        assert list(table["Run"]) == ["broken", "bad"]

    def test_another_file_gets_one_sentence(self):
        at = upload(view(state.OWN), "{}")
        assert "list of records" in said(at)

    def test_a_calibration_is_shown_beside_the_prediction_and_marked(self):
        rows = several(0.0, 0.0, 0.0, engine="deepspeed", by_formula=5 * 10**9)
        at = upload(view(state.OWN), export_rows(rows))
        at = view(state.ANSWER, change(at, w_calibrate=True))
        budget = predict(DEFAULT)
        assert verdict(at) == verdict_sentence(budget, ByteUnit.GB)
        line = next(each.value for each in at.info if "Calibrated by 3 of your own runs" in each.value)
        assert format_bytes(budget.ladder.needed, ByteUnit.GB) in line
        at = view(state.ANSWER, change(view(state.OWN, at), w_calibrate=False))
        assert not [each for each in at.info if "Calibrated" in each.value]

    def test_what_was_verified_here_is_taken(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(verifying, "RunningProof", Ended)
        at = press(page(PAGES_WITH_PROOF[0], engine="ddp"))
        at.switch_page("app.py").run(timeout=TIMEOUT_S)
        at = view(state.OWN, at)
        at = at.button(key="own_proofs").click().run(timeout=TIMEOUT_S)
        assert not at.exception
        assert points(at) == 1
        assert "none calibrates" in said(at)

    def test_runs_of_another_kind_calibrate_nothing(self):
        at = upload(view(state.OWN), export_rows(several(0.0, engine="ddp", by_formula=1)))
        assert "none calibrates" in said(at)


@pytest.mark.parametrize("run", published().predicted, ids=lambda run: run.run_id)
def test_every_published_scenario_can_be_opened(run: Any):
    """The sidebar's widgets give back the scenario that was put into them; settings that are all the engine's own
    may be left out."""
    from memcore.scenario import scenario_data
    from memcore.score.adapter import scenario_of
    from memcore.score.record import parse_run
    from memcore.ui.plan.whole import scenario_from, widget_values

    scenario = scenario_of(parse_run(json.loads(json.dumps(published_records()[run.run_id]))))
    data = scenario_data(scenario)
    again = parse_scenario(scenario_from(widget_values(scenario), data))
    # What is left out is at its default: the same is traced, and the rest is the same.
    assert trace_request(again) == trace_request(scenario)
    parts = ("model", "hardware", "parallelism", "recipe", "offload")
    assert [getattr(again, part) for part in parts] == [getattr(scenario, part) for part in parts]
    assert len(write_link(scenario)) < 4096

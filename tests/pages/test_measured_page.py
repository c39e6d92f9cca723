"""The measured part of the activation explorer as users meet it: results from a store, sweeps, two users at once.

Run: pytest tests/pages/test_measured_page.py. Most results are made up, with a law that is known; two sweeps are real.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isqrt
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from test_pages import TIMEOUT_S, charts, opened

from memcore.bench.case import Case, Part
from memcore.bench.measurement import DeviceFacts, Measurement, Status
from memcore.bench.slices import make_slice
from memcore.bench.store import Store
from memcore.bench.sweeps import SweepKind, plan
from memcore.budget import FORMULAS
from memcore.link import write_link
from memcore.scenario import parse_scenario
from memcore.settings import settings
from memcore.ui.frame import PAGES
from memcore.ui.measuring import heavy_lane
from memcore.ui.state import DEFAULT_SCENARIO
from memcore.ui.work import light_lane

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from small_bench import CONFIG, CPU, measured

PAGE = PAGES["activations"][0]
GPU = replace(CPU, kind="cuda", name="a GPU elsewhere", driver="CUDA 12.8")
SMALL = parse_scenario({"model": {"config": {**CONFIG, "num_hidden_layers": 3}}, "recipe": {"convention": "fp32"}})


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    path = tmp_path / "measurements.sqlite"
    monkeypatch.setenv("MEMCORE_STORE", str(path))
    settings.cache_clear()
    yield Store(path)
    heavy_lane().close()
    heavy_lane.clear()
    settings.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    light_lane().close()
    light_lane.clear()


def limited(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"MEMCORE_{name}", value)
    settings.cache_clear()


def explorer(kind: SweepKind = SweepKind.SEQUENCE, **query: str) -> AppTest:
    """The page, with a sweep's results chosen."""
    at = opened(PAGE, **query)
    if kind is not SweepKind.SEQUENCE:
        at.get_by_key("w_sweep").set_value(kind.value).run()
    assert not at.exception
    return at


def cases(kind: SweepKind, device: DeviceFacts = CPU) -> tuple[Case, ...]:
    """The cases of the default scenario's sweep."""
    return plan(kind, make_slice(parse_scenario(DEFAULT_SCENARIO), FORMULAS, device.kind)).cases


def peak_of(case: Case) -> int:
    """A peak that follows the law that a sweep is to show."""
    if case.part is Part.ATTENTION:
        return case.seq_len**2 if case.attention == "plain" else 700 * case.seq_len
    if case.part is Part.PROJECTIONS:
        return 1000 * (case.num_layers if case.checkpointing == "none" else 2 * isqrt(case.num_layers))
    return 10_000 * case.seq_len * (2 if case.checkpointing == "none" else 1)


def results(kind: SweepKind, device: DeviceFacts = CPU) -> list[Measurement]:
    return [measured(case, peak_of(case), device=device) for case in cases(kind, device)]


def words(at: AppTest) -> str:
    return "\n".join(
        element.value for element in (*at.main.markdown, *at.main.caption, *at.main.info, *at.main.warning)
    )


def progress_texts(at: AppTest) -> list[str]:
    return [bar.proto.text for bar in at.get("progress")]


def watched(at: AppTest, until: Callable[[AppTest], bool], seconds: float = 60.0) -> AppTest:
    """Run the page again, as its fragment does in a browser, until something is there."""
    end_s = time.monotonic() + seconds
    while not until(at):
        assert time.monotonic() < end_s, words(at)
        time.sleep(0.2)
        at.run()
        assert not at.exception
    return at


def begins(kind: SweepKind) -> AppTest:
    at = explorer(s=write_link(SMALL))
    at.button(key=f"measure_{kind.value}").click().run()
    assert not at.exception
    return at


class TestWhatIsKnown:
    def test_nothing_is_said_to_be_measured_before_it_is(self):
        at = explorer()
        assert "Nothing of this sweep has been measured for this model yet." in words(at)
        assert len([button for button in at.main.button if str(button.key).startswith("measure_")]) == len(SweepKind)

    def test_exponents_points_date_and_device_are_those_of_the_store(self, store: Store):
        store.add(results(SweepKind.SEQUENCE))
        at = explorer()
        said = words(at)
        assert f"{CPU.total_bytes / 1e9:,.1f} GB of memory." in said
        assert "plain attention's own bytes grow as the length to the power of 2.00 (95%: 2.00 to 2.00)" in said
        assert "flash attention's own bytes grow as the length to the power of 1.00 (95%: 1.00 to 1.00)" in said
        assert "a CPU · 2026-01-02" in said
        assert "with torch 2.13.0" in said
        alone = next(chart for chart in charts(at) if "s^2.00" in json.dumps(chart))
        assert alone["layout"]["xaxis"]["type"] == alone["layout"]["yaxis"]["type"] == "log"
        points = next(trace for trace in alone["data"] if "s^2.00" in trace.get("name", ""))
        assert dict(zip(points["x"], points["y"], strict=True)) == pytest.approx(
            {case.seq_len: case.seq_len**2 / 1e9 for case in cases(SweepKind.SEQUENCE) if case.part is Part.ATTENTION}
        )

    @pytest.mark.parametrize("kind", SweepKind)
    def test_every_sweep_has_charts_with_units_reductions_and_a_table(self, kind: SweepKind, store: Store):
        before = len(charts(explorer(kind)))
        store.add(results(kind))
        at = explorer(kind)
        own = charts(at)[before:]
        assert len(own) == (2 if kind in (SweepKind.SEQUENCE, SweepKind.DEPTH) else 1)
        for chart in own:
            assert "GB" in chart["layout"]["yaxis"]["title"]["text"]
            assert chart["layout"]["xaxis"]["title"]["text"]
        assert "- Width: a hidden size of 512 instead of 4,096" in words(at)
        assert any(len(frame.value) == len(cases(kind)) for frame in at.dataframe)

    def test_depth_is_linear_without_and_a_root_with_segments(self, store: Store):
        store.add(results(SweepKind.DEPTH))
        assert "as L to the power of 1.00 without checkpointing and of 0.50" in words(explorer(SweepKind.DEPTH))

    def test_the_best_segment_length_is_the_one_measured(self, store: Store):
        found = results(SweepKind.SEGMENTS)
        store.add(
            [replace(each, figures=replace(each.figures, peak_bytes=number)) for number, each in enumerate(found, 1)]
        )
        assert "The lowest peak measured here is that of segments of 1." in words(explorer(SweepKind.SEGMENTS))

    def test_cases_without_figures_say_why(self, store: Store):
        first, second, *rest = results(SweepKind.SEQUENCE)
        no_memory = replace(first, status=Status.OUT_OF_MEMORY, figures=None)
        no_kernel = replace(
            second, status=Status.UNAVAILABLE, reason="Not available here: no such kernel.", figures=None
        )
        store.add([no_memory, no_kernel, *rest])
        said = words(explorer())
        assert (
            "out of memory at 256 tokens, plain attention: that is the point\n    - attention alone, plain, 256 tokens"
            in said
        )
        assert "this device, dtype and head size.\n    - attention alone, flash, 256 tokens" in said

    def test_what_was_measured_elsewhere_can_be_chosen(self, store: Store):
        store.add(results(SweepKind.SEQUENCE, GPU))
        store.add([replace(each, measured_at="2026-02-03T00:00:00Z") for each in results(SweepKind.SEQUENCE)])
        at = explorer()
        assert "Measured on a CPU" in words(at)
        chosen = at.get_by_key("measured_on_sequence")
        assert len(chosen.options) == 2
        chosen.select_index(1).run()
        assert not at.exception
        assert "Measured on a GPU elsewhere (CUDA 12.8)" in words(at)

    def test_switched_off_it_shows_what_the_store_has(self, store: Store, monkeypatch: pytest.MonkeyPatch):
        limited(monkeypatch, MEASURING="0")
        store.add(results(SweepKind.SEQUENCE, GPU))
        at = explorer()
        assert "Measuring is switched off on this server" in words(at)
        assert not [button for button in at.main.button if str(button.key).startswith("measure_")]
        assert "a GPU elsewhere · 2026-01-02" in words(at)

    def test_another_language(self, store: Store):
        store.add(results(SweepKind.FRONTIER))
        at = explorer(SweepKind.FRONTIER, lang="zh")
        assert "在真实内核上测量" in [header.value for header in at.main.header]
        assert "frontier" not in words(at)

    def test_a_file_that_is_no_store_is_one_sentence(self, store: Store, tmp_path: Path):
        (tmp_path / "measurements.sqlite").write_bytes(b"not a database" * 1000)
        at = explorer()
        assert "cannot be used" in words(at)
        at.button(key="measure_segments").click().run()
        assert not at.exception


class TestOwnRuns:
    def taken(self, at: AppTest) -> AppTest:
        at.button(key="measured_take").click().run()
        assert not at.exception
        return at

    def test_one_click_makes_points_runs_of_ones_own_on_the_scoreboard(self, store: Store):
        store.add(results(SweepKind.SEQUENCE))
        at = explorer()
        assert at.button(key="measured_take").label == "Take these points as own runs (15)"
        at = self.taken(self.taken(at))
        assert "15 points are among your own runs now. 10 others have no figures or no prediction." in words(at)
        at.button(key="measured_show").click().run()
        assert not at.exception
        table = next(each.value for each in at.dataframe if "Evidence" in each.value.columns)
        assert len(table) == 15
        assert {tuple(row) for row in table[["Evidence", "Regime", "Engine"]].to_numpy()} == {
            ("trace", "bench", "single GPU")
        }
        assert "none calibrates" in words(at)
        at.switch_page("app.py").run()
        at.get_by_key("w_own_run").set_value(table["Run"][0]).run()
        assert not at.exception
        assert "Measured by the activation explorer" in words(at)

    def test_measured_again_a_point_takes_its_own_place(self, store: Store):
        store.add(results(SweepKind.SEGMENTS))
        at = self.taken(explorer(SweepKind.SEGMENTS))
        case = cases(SweepKind.SEGMENTS)[0]
        store.add([measured(case, 7, measured_at="2026-03-04T05:06:07Z")])
        kept = self.taken(at.run()).session_state["own_rows"]
        assert len(kept) == len(cases(SweepKind.SEGMENTS))
        assert [row.measured for row in kept].count(7) == 1

    def test_without_a_prediction_there_is_nothing_to_take(self, store: Store):
        assert not [each for each in explorer().main.button if each.key == "measured_take"]
        store.add([each for each in results(SweepKind.SEQUENCE) if each.case.part is Part.ATTENTION])
        assert explorer().button(key="measured_take").disabled


class TestExchange:
    def give(self, at: AppTest, content: bytes) -> str:
        at.file_uploader(key="measure_import").upload("measurements.json", content).run()
        assert not at.exception
        return words(at)

    def test_an_export_is_taken_in_and_shown(self, store: Store, tmp_path: Path):
        other = Store(tmp_path / "other.sqlite")
        other.add(results(SweepKind.SEQUENCE, GPU))
        said = self.give(explorer(), json.dumps(other.export()).encode())
        assert f"{len(cases(SweepKind.SEQUENCE))} measurements were taken in." in said
        assert "a GPU elsewhere · 2026-01-02" in said
        assert store.export() == other.export()

    def test_anything_else_is_one_sentence(self):
        assert "This is no export of measurements" in self.give(explorer(), b"{}")
        assert "JSON" in self.give(explorer(), bytes(range(256)))

    def test_a_hosted_server_takes_nothing_in(self, monkeypatch: pytest.MonkeyPatch):
        limited(monkeypatch, HOSTED="1")
        at = explorer()
        assert not [each for each in at.file_uploader if each.key == "measure_import"]


class TestSweeps:
    def test_a_sweep_runs_to_its_end_and_another_user_finds_it(self, store: Store):
        at = begins(SweepKind.SEGMENTS)
        assert progress_texts(at)[0].startswith("Segment length: 0 of 4 cases; about ")
        assert all(at.button(key=f"measure_{kind.value}").disabled for kind in SweepKind)
        watched(at, lambda at: not progress_texts(at))
        assert "The lowest peak measured here is that of segments of" in words(at)
        assert "The trace is nowhere further than 0.00%" in words(at)
        assert len(store.everything()) == 4
        other = explorer(SweepKind.SEGMENTS, s=write_link(SMALL))
        assert "The lowest peak measured here is that of segments of" in words(other)
        other.button(key="measure_segments").click().run()
        watched(other, lambda at: not progress_texts(at))
        assert len(store.everything()) == 4, "a known case is taken from the store"

    def test_two_users_wait_for_one_another_and_who_leaves_is_dropped(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ):
        limited(monkeypatch, HEAVY_HEARTBEAT_S="4")
        first = begins(SweepKind.SEQUENCE)
        watched(first, lambda at: len(progress_texts(at)) == 2)
        second = begins(SweepKind.SEGMENTS)
        assert progress_texts(second)[0].startswith("Segment length: 1 before this one; about ")
        # The first user leaves: nobody looks at that sweep any more.
        watched(second, lambda at: not progress_texts(at), TIMEOUT_S)
        assert "The lowest peak measured here is that of segments of" in words(second)
        first.run()
        assert "Cancelled after" in words(first)

    def test_cancelled_what_was_measured_stays(self, store: Store):
        at = begins(SweepKind.SEQUENCE)
        watched(at, lambda at: len(store.everything()) > 0)
        at.button(key="measure_cancel").click().run()
        watched(at, lambda at: not progress_texts(at))
        assert "Cancelled after" in words(at)
        assert 0 < len(store.everything()) < 25
        assert not at.button(key="measure_sequence").disabled


def test_a_bare_count_has_nothing_to_measure():
    scenario = parse_scenario({"model": {"n_params": 7_000_000_000}})
    at = opened(PAGE, s=write_link(scenario))
    assert not [each for each in at.main.button if str(each.key).startswith("measure_")]

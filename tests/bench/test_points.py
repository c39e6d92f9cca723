"""Measured points as runs of one's own. Run: pytest tests/bench/test_points.py

Measurements are made up; closed forms are those of a small model that is counted here.
"""

from dataclasses import replace

import pytest
from small_bench import CPU, SCENARIO, attention_case, layers_case, measured, projections_case
from worker import ask

from memcore.accuracy.band import WIDE_PERCENT, earned_band
from memcore.accuracy.calibration import calibrated, calibration_for
from memcore.accuracy.scored import Figure, ScoredRun
from memcore.bench.case import Case
from memcore.bench.measurement import DeviceFacts, Measurement, Status
from memcore.budget import Budget, evidence_for, predict
from memcore.scenario import parse_scenario
from memcore.score.own import export_rows, read_given
from memcore.score.points import point_rows, predictable
from memcore.terms import Category, EvidenceKind

GPU = replace(CPU, kind="cuda", name="a GPU")
# By hand, of one layer of the small model: q and o, k and v, the MLP's three, two norms.
LAYER_PARAMS = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128


def point(case: Case, peak: int, traced: int | None, device: DeviceFacts = CPU) -> Measurement:
    found = measured(case, peak, device=device)
    assert found.figures is not None
    return replace(found, figures=replace(found.figures, traced_bytes=traced))


def row_of(measurement: Measurement) -> ScoredRun:
    (row,) = point_rows([measurement], ask)
    return row


class TestRows:
    def test_layers_are_predicted_by_their_trace_as_what_ran(self):
        row = row_of(point(layers_case(), peak=1_100_000, traced=1_000_000))
        assert (row.measured, row.predicted, row.evidence) == (1_100_000, 1_000_000, "trace")
        assert row.by_formula not in (None, row.predicted)
        assert (row.regime, row.engine, row.method, row.device, row.gpus) == ("bench", "single", "full", "cpu", 1)
        assert (row.n_params, row.micro_batch, row.seq_len) == (4 * LAYER_PARAMS, 1, 128)
        assert row.figure is Figure.ACTIVATIONS

    def test_without_a_trace_the_closed_form_predicts(self):
        row = row_of(point(layers_case(), peak=1_100_000, traced=None))
        assert row.evidence == "formula"
        assert row.predicted == row.by_formula

    def test_a_stack_keeps_its_inputs(self):
        """Two segments of two layers: two inputs kept, two made again (arXiv 1604.06174, section 4)."""
        case = projections_case(checkpointing="segments(2)")
        row = row_of(point(case, peak=1_100_000, traced=None))
        assert row.predicted == 4 * (4 * 1024 * 64)
        assert row.n_params == 4 * 64 * 64
        assert row.evidence == "formula"

    def test_what_has_no_figures_or_no_prediction_is_no_run(self):
        failed = measured(layers_case(), status=Status.FAILED)
        points = [point(attention_case(), 1000, None), replace(failed, figures=None), point(layers_case(), 1000, 1000)]
        assert len(point_rows(points, ask)) == predictable(points, {}) == 1
        assert point_rows([], ask) == ()

    def test_what_is_measured_again_takes_the_place_of_what_was_before(self):
        first, again = (point(layers_case(), peak, 1000) for peak in (1000, 1010))
        elsewhere, longer = point(layers_case(), 1020, 1000, GPU), point(layers_case(seq_len=256), 1030, 1000)
        found = point_rows([first, elsewhere, longer, again], ask)
        assert sorted(row.measured for row in found) == [1010, 1020, 1030]
        newer = replace(again, device=replace(CPU, torch="2.14.0"))
        assert row_of(newer).run_id == row_of(first).run_id

    def test_an_export_comes_back_as_it_was(self):
        rows = point_rows([point(layers_case(), 1000, 1000), point(projections_case(), 10, None)], ask)
        given = read_given(export_rows(rows))
        assert (given.rows, given.older) == (rows, False)


class TestCalibration:
    """A point that a tenth more was measured of than is traced."""

    def budget(self, *, traced: bool) -> Budget:
        scenario = parse_scenario(SCENARIO)
        return predict(scenario, evidence_for(scenario, ask, traced=traced))

    def rows(self, device: DeviceFacts) -> list[ScoredRun]:
        return [row_of(point(layers_case(), peak=1_100_000, traced=1_000_000, device=device))] * 3

    def test_a_gpus_layers_correct_the_activations_and_nothing_else(self):
        budget = self.budget(traced=True)
        by = calibration_for(budget, self.rows(GPU))
        assert by is not None
        assert (by.ratio, by.runs, by.figure) == (pytest.approx(1.1), 3, Figure.ACTIVATIONS)
        peaks = [
            total + 0.1 * budget.by_category(index).get(Category.ACTIVATIONS, 0)
            for index, total in enumerate(budget.totals)
        ]
        found = calibrated(budget, by)
        assert found.allocated == pytest.approx(max(peaks), abs=1)
        assert budget.peak_bytes < found.allocated < 1.1 * budget.peak_bytes
        assert found.needed - budget.ladder.needed == found.allocated - budget.peak_bytes

    def test_a_whole_step_comes_first(self):
        step = replace(self.rows(GPU)[0], metric="reserved", regime="single")
        by = calibration_for(self.budget(traced=True), [*self.rows(GPU), step])
        assert by is not None
        assert (by.runs, by.figure) == (1, Figure.CARD)

    def test_they_say_nothing_of_a_closed_form_or_of_another_engine_or_method(self):
        assert calibration_for(self.budget(traced=False), self.rows(GPU)) is None
        other = {"parallelism": {"engine": "ddp"}, "hardware": {"gpus": 2}}
        lora = {"recipe": {"method": "lora", "lora": {"rank": 8}}}
        for changed in (other, lora):
            scenario = parse_scenario({**SCENARIO, **changed})
            assert calibration_for(replace(self.budget(traced=True), scenario=scenario), self.rows(GPU)) is None

    def test_a_cpu_corrects_no_gpu(self):
        assert calibration_for(self.budget(traced=True), self.rows(CPU)) is None

    @pytest.mark.parametrize("device", [CPU, GPU])
    def test_they_give_no_band(self, device: DeviceFacts):
        for evidence in (EvidenceKind.TRACE, EvidenceKind.FORMULA):
            assert earned_band(self.rows(device) * 50, "single", "full", evidence).percent == WIDE_PERCENT

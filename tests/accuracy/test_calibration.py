"""A team's own runs as a calibration. Run: pytest tests/accuracy/test_calibration.py"""

from typing import Any

import pytest
from scored_runs import GB, several

from memcore.accuracy.calibration import calibrated, calibration_for
from memcore.accuracy.scored import Figure
from memcore.accuracy.words import calibration_sentence
from memcore.budget import Budget, Verdict, predict
from memcore.scenario import parse_scenario
from memcore.units import ByteUnit


def budget(**hardware: Any) -> Budget:
    """By closed forms, under FSDP2, in full."""
    data = {"model": {"name": "meta-llama/Llama-3.1-8B"}, "hardware": {"gpus": 8, **hardware}}
    return predict(parse_scenario({**data, "parallelism": {"engine": "fsdp2"}}))


def own(*by_formula: int, **changes: Any) -> list[Any]:
    """Runs measured at 10 GB, predicted by closed forms at so many GB."""
    runs = several(*[0.0] * len(by_formula), **changes)
    from dataclasses import replace

    return [replace(run, by_formula=size * GB) for run, size in zip(runs, by_formula, strict=True)]


def test_it_is_the_median_of_measured_over_predicted():
    """10 GB over 8, 16 and 5: 1.25, 0.625 and 2."""
    found = calibration_for(budget(), own(8, 16, 5))
    assert found is not None
    assert (found.ratio, found.runs, found.figure) == (pytest.approx(1.25), 3, Figure.CARD)


@pytest.mark.parametrize(
    "other", [{"engine": "ddp"}, {"method": "lora"}, {"device": "cpu"}, {"metric": "unknown"}]
)  # fmt: skip
def test_runs_of_another_kind_do_not_count(other: dict[str, Any]):
    assert calibration_for(budget(), own(8, 16, 5, **other)) is None
    found = calibration_for(budget(), [*own(8), *own(5, 5, 5, 5, **other)])
    assert found is not None
    assert (found.ratio, found.runs) == (pytest.approx(1.25), 1)


def test_a_traced_run_says_nothing_of_a_closed_form():
    assert calibration_for(budget(), several(1.0, 2.0)) is None


def test_what_tensors_take_comes_first():
    found = calibration_for(budget(), [*own(5, 5), *own(8, metric="allocated")])
    assert found is not None
    assert (found.figure, found.runs) == (Figure.TENSORS, 1)


def test_the_prediction_stays_and_the_calibrated_figure_is_marked_with_its_runs():
    raw = budget()
    by = calibration_for(raw, own(5, 5))
    assert by is not None
    found = calibrated(raw, by)
    assert raw == budget()
    assert found.allocated == 2 * raw.ladder.allocated
    assert found.needed == 2 * raw.ladder.held + raw.ladder.runtime.largest
    sentence = calibration_sentence(raw, found, ByteUnit.GB)
    assert sentence.startswith("Calibrated by 2 of your own runs (PyTorch FSDP2, full training;")
    assert f"{raw.ladder.needed / 1e9:.2f} GB" in sentence


def test_the_calibrated_verdict_is_that_of_the_calibrated_figures():
    raw = budget()
    assert raw.verdict is Verdict.FITS
    by = calibration_for(raw, own(1))
    assert by is not None
    assert calibrated(raw, by).verdict is Verdict.DOES_NOT_FIT

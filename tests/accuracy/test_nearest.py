"""The published runs most like a scenario, and their sources. Run: pytest tests/accuracy/test_nearest.py"""

import pytest
from scored_runs import GB, scored

from memcore.accuracy.nearest import NUM_NEAREST, Like, distance, nearest
from memcore.accuracy.scored import published, source_link
from memcore.accuracy.words import error_text, nearest_gist, nearest_runs, run_label
from memcore.budget import predict
from memcore.scenario import parse_scenario
from memcore.terms import EvidenceKind

FORMULA, TRACE = EvidenceKind.FORMULA, EvidenceKind.TRACE
ONE = Like(engine="fsdp2", method="full", n_params=7 * GB, seq_len=4096)


def test_a_doubling_of_parameters_or_sequence_is_one():
    assert distance(ONE, scored()) == 0
    assert distance(ONE, scored(n_params=14 * GB)) == distance(ONE, scored(n_params=int(3.5 * GB))) == 1
    assert distance(ONE, scored(seq_len=16384)) == 2
    assert distance(ONE, scored(engine="ddp")) == distance(ONE, scored(method="lora")) == 4
    assert distance(ONE, scored(engine="ddp", method="lora", seq_len=2048)) == 9


def test_the_nearest_come_first_one_of_each_family_and_only_predicted_ones():
    runs = [
        scored(run_id="far", family="a", seq_len=65536),
        scored(run_id="near", family="b"),
        scored(run_id="same family", family="b", seq_len=8192),
        scored(run_id="not predicted", family="c", predicted=None),
        scored(run_id="middle", family="d", n_params=14 * GB),
        scored(run_id="other engine", family="e", engine="ddp"),
    ]
    assert [run.run_id for run in nearest(ONE, runs, TRACE)] == ["near", "middle", "far"]
    assert [run.run_id for run in nearest(ONE, runs, TRACE, 9)][-1] in ("far", "other engine")
    assert nearest(ONE, [], TRACE) == []


def test_any_scenario_has_some_of_the_published_runs_beside_it():
    budget = predict(parse_scenario({"model": {"n_params": 10**9}}))
    found = nearest_runs(budget)
    assert len(found) == NUM_NEAREST
    assert all(run in published().predicted for run in found)


def test_runs_beside_a_closed_form_are_those_that_it_predicts_with_its_own_errors():
    """A traced prediction's error says nothing of a closed form: 3% beside 30%."""
    runs = [
        scored(run_id="traced alone", family="a"),
        scored(run_id="both", family="b", seq_len=8192, predicted=103 * GB, measured=100 * GB, by_formula=130 * GB),
    ]
    (found,) = nearest(ONE, runs, FORMULA)
    assert found.run_id == "both"
    assert (found.error_of(FORMULA), found.error_of(TRACE)) == pytest.approx((30.0, 3.0))


def test_the_gist_has_the_errors_of_the_scenarios_own_engine_and_method_alone():
    model = {"name": "meta-llama/Llama-3.1-8B"}
    run = {"parallelism": {"engine": "ddp"}, "recipe": {"convention": "pure_bf16"}}
    budget = predict(parse_scenario({"model": model, "hardware": {"gpus": 8}, **run}))
    others = [scored(by_formula=10 * GB, measured=8 * GB)]
    own = scored(engine="ddp", by_formula=11 * GB, measured=10 * GB)
    assert "%" not in nearest_gist(budget, others)
    assert nearest_gist(budget, [*others, own]).endswith(": +10.0%")
    assert nearest_gist(predict(parse_scenario({"model": {"n_params": 10**9}})), [own]) == ""


@pytest.mark.parametrize(
    ("source", "link"),
    [
        ("owner/name@0abc123:docs/a.md", "https://github.com/owner/name/blob/0abc123/docs/a.md"),
        ("owner/name@0abc123:commit-message", "https://github.com/owner/name/commit/0abc123"),
        ("owner/name#12", "https://github.com/owner/name/issues/12"),
        ("a note", ""),
        ("", ""),
    ],
)
def test_a_source_is_a_page(source: str, link: str):
    assert source_link(source) == link


def test_every_published_run_has_a_page_for_its_source():
    assert all(source_link(run.source) for run in published().runs)


def test_words():
    assert run_label(scored(model="Llama", seq_len=8192)) == (
        "Llama (7 B), PyTorch FSDP2, full training, 1 × 8,192 tokens, 8 × A100-80GB"
    )
    assert run_label(scored(engine="fsdp1", method="qlora")).startswith("small (7 B), PyTorch FSDP1, QLoRA")
    assert [error_text(each) for each in (1.24, -3.0, -0.04, None)] == ["+1.2%", "−3.0%", "0.0%", "-"]

"""The error band: earned by runs of one engine and method, or wide. Run: pytest tests/accuracy/test_band.py"""

from dataclasses import replace
from typing import Any

import pytest
from scored_runs import GB, scored, several

from memcore.accuracy import words
from memcore.accuracy.band import FEWEST_RUNS, WIDE_PERCENT, Band, earned_band, within
from memcore.accuracy.scored import Figure, published
from memcore.accuracy.words import band_sentence
from memcore.budget import Evidence, Verdict, judge, predict
from memcore.scenario import parse_scenario
from memcore.terms import EvidenceKind

TRACE, FORMULA = EvidenceKind.TRACE, EvidenceKind.FORMULA


def band(runs: Any, evidence: EvidenceKind | None = TRACE, engine: str = "fsdp2", method: str = "full") -> Band:
    return earned_band(runs, engine, method, evidence)


class TestQuantile:
    """Split conformal prediction, by hand: of n, number ceil(0.9 (n + 1))."""

    @pytest.mark.parametrize(
        ("count", "number"), [(5, 5), (8, 8), (9, 9), (10, 10), (18, 18), (19, 18), (29, 27), (30, 28), (99, 90)]
    )
    def test_which_of_the_errors_it_is(self, count: int, number: int):
        assert within([float(each) for each in range(count, 0, -1)]) == number

    def test_it_promises_nine_of_ten(self):
        """Of n + 1 equally likely places for the next error, at least nine of ten lie at or below it."""
        for count in range(9, 200):
            rank = within([float(each) for each in range(1, count + 1)])
            assert rank / (count + 1) >= 0.9


class TestEarned:
    def test_it_is_the_errors_rounded_up_to_whole_per_cents(self):
        found = band(several(-3.2, 1.0, 2.0, 0.1, 0.2))
        assert found == Band(percent=4, runs=5, families=1, figure=Figure.CARD, covers_all=True)
        assert band(several(*[0.001] * 5)).percent == 1

    def test_fewer_than_five_runs_give_the_wide_one(self):
        few = band(several(*[1.0] * (FEWEST_RUNS - 1)))
        assert (few.percent, few.runs, few.earned) == (WIDE_PERCENT, FEWEST_RUNS - 1, False)
        assert band([]).percent == WIDE_PERCENT == 20

    @pytest.mark.parametrize(
        "other",
        [{"engine": "deepspeed"}, {"method": "lora"}, {"evidence": "formula"}, {"metric": "unknown"}, {"device": "cpu"},
         {"predicted": None, "evidence": None}],
    )  # fmt: skip
    def test_runs_of_another_kind_neither_widen_nor_narrow_it(self, other: dict[str, Any]):
        runs = several(*[2.0] * 5)
        assert band([*runs, *several(*[30.0] * 50, **other)]) == band(runs)
        assert not band(several(*[0.1] * 50, **other)).earned

    def test_what_tensors_take_comes_before_what_the_allocator_holds(self):
        tensors, card = several(*[1.0] * 5, metric="active"), several(*[7.0] * 9, metric="nvidia_smi")
        assert (band([*tensors, *card]).percent, band([*tensors, *card]).figure) == (1, Figure.TENSORS)
        assert (band([*tensors[:4], *card]).percent, band([*tensors[:4], *card]).figure) == (7, Figure.CARD)
        held = earned_band([*tensors, *card], "fsdp2", "full", TRACE, (Figure.CARD,))
        assert (held.percent, held.runs) == (7, 9)

    def test_a_closed_form_has_a_band_of_its_own(self):
        runs = several(*[1.0] * 6, by_formula=12 * GB)
        assert (band(runs).percent, band(runs, FORMULA).percent) == (1, 20)
        assert band(several(*[1.0] * 6), FORMULA).runs == 0

    def test_what_leaves_the_activations_out_has_none(self):
        assert not band(several(*[1.0] * 9), None).earned


class TestBudgets:
    def scenario(self, **model: Any) -> Any:
        return parse_scenario({"model": model or {"name": "meta-llama/Llama-3.1-8B"}, "parallelism": {"engine": "ddp"}})

    def test_a_verdict_is_judged_by_the_band_of_its_engine_and_method(self):
        budget = predict(self.scenario())
        assert budget.band == earned_band(published().runs, "ddp", "full", FORMULA)
        assert budget.verdict is judge(budget.ladder, budget.band.percent)

    def test_ddp_has_too_few_published_runs_and_says_what_would_say_more(self):
        """Three runs are published."""
        budget = predict(self.scenario())
        assert sum(run.engine == "ddp" for run in published().runs) < FEWEST_RUNS
        assert budget.band.percent == WIDE_PERCENT
        sentence = band_sentence(budget)
        assert "±20%, assumed" in sentence
        assert "memcore verify" in sentence

    def test_a_bare_count_says_why_it_has_none(self):
        assert "without its activations" in band_sentence(predict(self.scenario(n_params=10**9)))

    def test_every_earned_band_is_in_words_with_its_runs(self):
        scenario = self.scenario()
        for figure in Figure:
            for covers_all in (True, False):
                earned = Band(percent=7, runs=12, families=3, figure=figure, covers_all=covers_all)
                said = band_sentence(replace(predict(scenario), band=earned))
                assert "±7%" in said
                assert "12" in said
                assert words.FIGURE_LABELS[figure] in said
                assert ("reserves beyond that" in said) == (figure is Figure.TENSORS)

    def test_what_is_reserved_has_a_band_of_its_own_beside_that_of_tensors(self):
        """Single GPUs with LoRA: 17 published runs say what tensors took, 16 what was reserved."""
        held = earned_band(published().runs, "single", "lora", TRACE, (Figure.CARD,))
        scenario = parse_scenario(
            {"model": {"name": "meta-llama/Llama-3.1-8B"}, "recipe": {"method": "lora", "convention": "pure_bf16"}}
        )
        earned = band(published().runs, TRACE, "single", "lora")
        traced: Any = object()
        budget = predict(scenario)
        by_trace = replace(budget, evidence=replace(budget.evidence, profile=traced), band=earned)
        assert held.earned
        assert f"±{held.percent}%, by {held.runs} published runs" in band_sentence(by_trace)

    def test_the_band_is_part_of_a_pure_answer(self):
        scenario = self.scenario()
        assert predict(scenario, Evidence()) == predict(scenario, Evidence())
        assert predict(scenario).verdict in set(Verdict)


def test_published_runs_come_back_as_they_were_written():
    import json

    from memcore.accuracy.scored import Published, dump_published, load_published

    runs = (scored(1.0), scored(predicted=None, evidence=None, status="not_predicted"))
    kept = Published(date="2026-01-31", runs=runs)
    assert load_published(json.loads(dump_published(kept))) == kept
    assert kept.predicted == runs[:1]

"""The questions that everybody asks are answered with the worked examples' numbers, from their own scenarios.

Run: pytest tests/test_questions.py. GB is 1e9 bytes. Numbers are those of shared/reference/worked_examples.md.
"""

import re

import pytest

from memcore.budget import Verdict, predict
from memcore.i18n import LANGUAGES, use_language
from memcore.questions import EIGHT_SMALL_CARDS, QUESTIONS, Question
from memcore.terms import Phase
from memcore.ui.frame import PAGES
from memcore.units import ByteUnit

NUMBERS = [
    ("2", "2", "12", "16"),
    ("112 GB",),
    ("14 GB", "10.5 GB", "38.5 GB"),
    ("14 GB",),
    ("8,192",),
]


@pytest.mark.parametrize(("question", "numbers"), list(zip(QUESTIONS, NUMBERS, strict=True)))
def test_an_answer_has_the_worked_examples_numbers(question: Question, numbers: tuple[str, ...]):
    answer = question.answered(ByteUnit.GB)
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", answer), f"{number} in {answer}"


@pytest.mark.parametrize("language", list(LANGUAGES))
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_whole_in_each_language_and_unit(question: Question, language: str):
    use_language(language)
    try:
        for unit in ByteUnit:
            answer = question.answered(unit)
            assert not re.search(r"[{}]", answer)
            # "40 GB" is the name of a card.
            figures = re.findall(r"[\d.]+ (GB|GiB)\b", answer.replace("40 GB", ""))
            assert set(figures) <= {unit.value}, answer
    finally:
        use_language("en")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_opens_a_page(question: Question):
    assert question.page in PAGES


def test_one_card_does_not_hold_seven_b():
    assert predict(QUESTIONS[1].scenario).verdict is Verdict.DOES_NOT_FIT


def test_eight_small_cards_are_tight_and_the_backward_binds():
    """The best demonstration: 38.5 GB is reached at the end of the backward, and the optimizer step is lower."""
    budget = predict(EIGHT_SMALL_CARDS.scenario)
    assert budget.verdict is Verdict.UNCERTAIN
    assert budget.binding_phase is Phase.BACKWARD
    peaks = budget.phase_peaks()
    assert budget.totals[peaks[Phase.OPTIMIZER]] < budget.totals[peaks[Phase.BACKWARD]]
    assert budget.peak_bytes >= 39.5e9
    answer = EIGHT_SMALL_CARDS.answered(ByteUnit.GB)
    assert "tight" in answer
    assert "end of the backward" in answer


def test_the_real_peak_of_stage_three_is_above_its_floor():
    budget = predict(QUESTIONS[3].scenario)
    assert budget.peak_bytes > budget.static.total_bytes == 14e9


def test_the_three_answers_about_activations_fall_from_plain_attention_to_checkpointing():
    """Sizes in one unit, so that they can be compared: N x N scores, flash attention, each layer's input."""
    answer = QUESTIONS[4].answered(ByteUnit.GB)
    plain, flash, checkpointed = (float(size) for size in re.findall(r"([\d.]+) GB", answer))
    # All activations, of which the scores are the most: 32 layers of 32 heads, two bytes a pair twice.
    assert plain > 32 * 32 * 8192**2 * 4 / 1e9
    assert f"with them all layers' activations take {plain:g} GB" in answer
    assert plain > 5 * flash > 25 * checkpointed
    assert "quadratic" in answer
    assert "linear" in answer

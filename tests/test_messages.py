"""Translations are complete, compiled and switched per context. Run: pytest tests/test_messages.py"""

import contextvars
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from memcore.budget import predict
from memcore.i18n import LANGUAGES, gettext, language, mark, ngettext, use_language
from memcore.scenario import parse_scenario
from memcore.units import ByteUnit
from memcore.verdict_words import verdict_sentence

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "update_messages.py"))
TRANSLATED = SCRIPT["TRANSLATED"]


def verdict() -> str:
    budget = predict(parse_scenario({"model": {"n_params": "7b"}, "hardware": {"gpu": "A100-80GB"}}))
    return verdict_sentence(budget, ByteUnit.GB)


def in_language(code: str, call: Any) -> Any:
    """What `call` returns in a context of its own, whose language ends with it."""

    def run() -> Any:
        use_language(code)
        return call()

    return contextvars.copy_context().run(run)


def test_every_language_but_english_has_a_catalogue():
    assert {"en", *TRANSLATED} == set(LANGUAGES)


@pytest.mark.parametrize("code", TRANSLATED)
def test_the_compiled_file_is_what_the_translations_compile_to(code: str):
    assert SCRIPT["po_path"](code).with_suffix(".mo").read_bytes() == SCRIPT["compiled"](code)


@pytest.mark.parametrize("code", TRANSLATED)
def test_every_message_is_translated_with_its_placeholders(code: str):
    assert list(SCRIPT["problems"](code)) == [], "run: python scripts/update_messages.py"


def test_the_extraction_finds_sentences_of_every_kind():
    found = {message.id for message in SCRIPT["extract"]()}
    assert "How is this computed?" in found  # _("...") of a page
    assert "Does not fit" in found  # mark("...") of a table
    assert ("{count} other", "{count} others") in found  # ngettext("...", "...", n)
    assert "The {phase} binds." in " ".join(str(message) for message in found)


def test_placeholders_are_compared_with_conversion_and_format():
    placeholders = SCRIPT["placeholders"]
    assert placeholders("{b} {a:,} {c!r}") == placeholders("{c!r}，{a:,}，{b}")
    assert placeholders("{a:,}") != placeholders("{a}")
    assert placeholders("{a!r}") != placeholders("{a}")
    assert placeholders("{a} {a}") != placeholders("{a}")


@pytest.mark.parametrize("code", TRANSLATED)
def test_no_half_translated_sentence(code: str):
    """A translation has no English sentence left in it, and none of the English full stops."""
    for message in SCRIPT["read"](code):
        if message.id and message.string and len(str(message.id).split()) > 4:
            text = re.sub(r"\{[^}]*\}", "", str(message.string))
            assert re.search(r"[\u4e00-\u9fff]", text), message.id
            assert not re.search(r"[\u4e00-\u9fff]\s*[.,;:?!](\s|$)", text), f"{message.id!r} ends in English"


def test_the_language_changes_the_verdict():
    english, chinese = in_language("en", verdict), in_language("zh", verdict)
    assert english.startswith("Does not fit")
    assert re.search(r"[\u4e00-\u9fff]", chinese)
    assert not re.search(r"[\u4e00-\u9fff]", english)
    # The same figures in both.
    numbers = re.compile(r"\d+(?:\.\d+)?(?= GB)")
    assert sorted(numbers.findall(english)) == sorted(numbers.findall(chinese))


def test_an_unknown_language_is_english():
    assert in_language("xx", verdict) == in_language("en", verdict)
    assert in_language("xx", language) == "en"


def test_two_contexts_have_two_languages_at_once():
    chinese, english = contextvars.copy_context(), contextvars.copy_context()
    chinese.run(use_language, "zh")
    english.run(use_language, "en")
    assert chinese.run(verdict) != english.run(verdict)
    assert chinese.run(language) == "zh"
    assert english.run(language) == "en"


def test_a_message_without_translation_is_itself():
    assert in_language("zh", lambda: gettext("no such message")) == "no such message"
    assert in_language("zh", lambda: ngettext("one thing", "{n} things", 2)) == "{n} things"
    assert mark("Weights") == "Weights"

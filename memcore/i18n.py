"""Translations: every sentence that a user sees goes through :func:`gettext`.

The language belongs to the current context (one per Streamlit session or command), so that two users
of one server can read two languages at once. Message ids are the English sentences themselves.
"""

import gettext as _gettext
from contextvars import ContextVar
from functools import cache
from pathlib import Path

LANGUAGES = {"en": "EN", "zh": "中文"}

_LOCALES = Path(__file__).parent / "locale"
_language: ContextVar[str] = ContextVar("memcore_language", default="en")


def language() -> str:
    """The code of the current context's language, a key of `LANGUAGES`."""
    return _language.get()


def use_language(code: str) -> None:
    """Set the current context's language; an unknown code means English."""
    _language.set(code if code in LANGUAGES else "en")


@cache
def _translations(code: str) -> _gettext.NullTranslations:
    return _gettext.translation("memcore", _LOCALES, [code], fallback=True)


def gettext(message: str) -> str:
    """The message in the current language, or itself where it has no translation."""
    return _translations(_language.get()).gettext(message)


def ngettext(singular: str, plural: str, n: int) -> str:
    """The form of the message that fits the number `n`, in the current language."""
    return _translations(_language.get()).ngettext(singular, plural, n)


def mark(message: str) -> str:
    """The message itself: marks a constant for translation where it is shown, not where it is written."""
    return message

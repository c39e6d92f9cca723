"""Collect the sentences that users see, and compile their translations.

``python scripts/update_messages.py`` takes every message out of the code, adds the new ones to each language's
memcore.po, drops those that are gone and compiles memcore.mo beside it. Then fill in what it lists and run it
again. With ``--check`` it changes nothing and ends with 1 where something is missing or stale.
"""

import argparse
import io
import string
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_file
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parent.parent
LOCALES = ROOT / "memcore" / "locale"
TRANSLATED = ("zh",)
KEYWORDS = {"_": None, "gettext": None, "mark": None, "ngettext": (1, 2)}


def main() -> int:
    """Update or check every language; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where something is missing")
    check = parser.parse_args().check
    found: list[str] = []
    for language in TRANSLATED:
        if not check:
            update(language)
        found += [f"{language}: {problem}" for problem in problems(language)]
    print("\n".join(found) or "All messages are translated.")
    return 1 if found and check else 0


def extract() -> Catalog:
    """Every message of the code, in the order of its files."""
    template = _empty(None)
    pages, modules = (ROOT / "pages").glob("*.py"), (ROOT / "memcore").rglob("*.py")
    for path in [ROOT / "app.py", *sorted(pages), *sorted(modules)]:
        for _line, message, _comments, context in extract_from_file("python", path, keywords=KEYWORDS):
            # File names only: line numbers would change with every edit.
            template.add(message, locations=[(path.relative_to(ROOT).as_posix(), 0)], context=context)
    return template


def _empty(language: str | None) -> Catalog:
    return Catalog(
        locale=language,
        project="memcore",
        version="1",
        header_comment="# Translations for memcore. Edit the msgstr lines, then run scripts/update_messages.py.",
        msgid_bugs_address="CONTRIBUTING.md",
        last_translator="memcore",
        language_team=str(language),
        charset="utf-8",
        fuzzy=False,
    )


def po_path(language: str) -> Path:
    """The file that translators edit."""
    return LOCALES / language / "LC_MESSAGES" / "memcore.po"


def read(language: str) -> Catalog:
    """A language's translations; an empty catalogue where it has none yet."""
    path = po_path(language)
    if not path.exists():
        return _empty(language)
    with path.open("rb") as file:
        return read_po(file, locale=language)


def update(language: str) -> None:
    """Bring a language's .po to the code's messages, keeping its translations, and compile it."""
    catalog = read(language)
    before = {message.id: message.string for message in catalog if message.id}
    catalog.update(extract(), no_fuzzy_matching=True, update_creation_date=False)
    catalog.obsolete.clear()
    for message in catalog:
        # Set from a percent sign or a brace in the English text; the check below is stricter.
        message.flags -= {"python-format", "python-brace-format"}
    if before != {message.id: message.string for message in catalog if message.id}:
        catalog.revision_date = datetime.now(UTC)
    path = po_path(language)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        write_po(file, catalog, width=110, include_lineno=False)
    path.with_suffix(".mo").write_bytes(compiled(language))


def compiled(language: str) -> bytes:
    """What a language's .po compiles to; unfinished translations are left out."""
    out = io.BytesIO()
    write_mo(out, read(language))
    return out.getvalue()


def problems(language: str) -> Iterator[str]:
    """One line for each message that is missing, wrong or stale."""
    catalog = read(language)
    wanted = {message.id for message in extract() if message.id}
    for message_id in sorted(wanted - {message.id for message in catalog}, key=str):
        yield f"not in memcore.po: {message_id!r}"
    for message in catalog:
        if not message.id:
            continue
        if message.id not in wanted:
            yield f"no longer in the code: {message.id!r}"
        elif message.fuzzy or not all(_texts(message.string)):
            yield f"not translated: {message.id!r}"
        elif any(placeholders(text) != placeholders(_texts(message.id)[-1]) for text in _texts(message.string)):
            yield f"other placeholders than in English: {message.id!r} {message.string!r}"
    mo = po_path(language).with_suffix(".mo")
    if not mo.exists() or mo.read_bytes() != compiled(language):
        yield "memcore.mo is not what memcore.po compiles to"


def _texts(text: str | Iterable[str] | None) -> list[str]:
    """The forms of a message: one, or singular and plural."""
    return [text or ""] if isinstance(text, str | None) else list(text)


def placeholders(text: str) -> list[tuple[str, str, str]]:
    """The fields of a message, with conversion and format: of ``{size:,}`` and ``{name!r}``."""
    fields = string.Formatter().parse(text)
    return sorted((name, conversion or "", form or "") for _text, name, form, conversion in fields if name is not None)


if __name__ == "__main__":
    sys.exit(main())

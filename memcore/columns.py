"""Plain text in aligned columns, for a terminal: Chinese characters take two columns each."""

import re
import sys
import unicodedata
from collections.abc import Sequence
from contextlib import suppress

WIDTH = 100  # columns of text output


def say(text: str) -> None:
    """A line on standard error, where there is one: how far a command is."""
    if sys.stderr is not None and text:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], align: str, *, heading: bool = True) -> str:
    """Rows as aligned columns of at most `WIDTH` in all. `align` has a sign for each column: ``<`` and ``>``, and
    ``~`` for the one, left-aligned, that is wrapped where there is no room."""
    widths = [max(_width(cell) for cell in column) for column in zip(*rows, strict=True)]
    gaps = 2 * (len(widths) - 1)
    if "~" in align:
        flexible = align.index("~")
        widths[flexible] = min(widths[flexible], WIDTH - gaps - sum(widths) + widths[flexible])
    lines = []
    for row in rows:
        cells = [
            wrap(cell, width) if sign == "~" else [cell] for cell, width, sign in zip(row, widths, align, strict=True)
        ]
        for index in range(max(len(cell) for cell in cells)):
            parts = [cell[index] if index < len(cell) else "" for cell in cells]
            lines.append("  ".join(map(_padded, parts, widths, align)).rstrip())
        if heading and row is rows[0]:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _padded(text: str, width: int, sign: str) -> str:
    blank = " " * (width - _width(text))
    return blank + text if sign == ">" else text + blank


def _width(text: str) -> int:
    """Columns of a terminal that the text takes: Chinese characters take two each."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns: broken at spaces and between Chinese characters, and within a word only
    where it is longer than a line."""
    lines, line = [], ""
    for token in re.findall(r"\s+|[^\s\u2e80-\U0010ffff]+|[\u2e80-\U0010ffff]", text):
        for start in range(0, len(token), width):
            piece = " " if token.isspace() else token[start : start + width]
            if line and _width(line + piece.rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            if line or piece != " ":
                line += piece
    return [*lines, line.rstrip()]

"""Plain text in aligned columns, for a terminal: Chinese characters take two columns each."""

import re
import sys
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from memcore.i18n import gettext as _

WIDTH = 100  # columns of text output
BAR_COLUMNS = 24
# How often a progress bar is drawn, and how often it is written where it cannot be drawn.
_TERMINAL_S, _LINE_S = 0.2, 5.0
# The share that is done before a bar says how long the rest takes.
_FORETOLD_FROM = 0.05


def say(text: str) -> None:
    """A line on standard error, where there is one: how far a command is."""
    if sys.stderr is not None and text:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


class ProgressBar:
    """How far a command is, on standard error: on a terminal one line that is drawn anew, elsewhere a line every
    few seconds."""

    def __init__(self, total: int) -> None:
        self._total = max(total, 1)
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._began_s = self._said_s = monotonic()

    def show(self, done: int, sentence: str) -> None:
        """`done` of all, with the sentence behind the bar and about how long it will take. The last of all takes the
        line away again."""
        now = monotonic()
        if self._terminal and done >= self._total:
            self._write("\r\x1b[K")
        elif now - self._said_s >= (_TERMINAL_S if self._terminal else _LINE_S):
            self._said_s = now
            line = f"{self._bar(done)} {sentence} {self._left(done, now)}".rstrip()
            self._write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")

    def _bar(self, done: int) -> str:
        full = BAR_COLUMNS * done // self._total
        return f"[{'#' * full}{'-' * (BAR_COLUMNS - full)}]"

    def _left(self, done: int, now: float) -> str:
        if done < _FORETOLD_FROM * self._total:
            return ""
        seconds = (now - self._began_s) / done * (self._total - done)
        return _("About {seconds:.0f} s left.").format(seconds=seconds)

    def _write(self, text: str) -> None:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(text)
                sys.stderr.flush()


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

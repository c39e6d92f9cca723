"""What a command reads and writes: files, standard input, output and complaints."""

import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from memcore.errors import UserError
from memcore.i18n import gettext as _

_MESSAGE_CHARS = 1000
_UTF8_BYTES_PER_CHAR = 4


def read_text(path: str, limit: int) -> str:
    """The text of a file, or of standard input for "-"; at most `limit` characters of it."""
    name, most = named(path), limit * _UTF8_BYTES_PER_CHAR
    try:
        if path == "-":
            content = _standard_input().read(most + 1)
        else:
            with Path(path).open("rb") as file:
                content = file.read(most + 1)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(_("{path} does not exist.").format(path=name)) from None
    except IsADirectoryError:
        raise UserError(_("{path} is a directory; give a JSON file.").format(path=name)) from None
    except UnicodeDecodeError:
        raise UserError(_("{path} is not text in UTF-8.").format(path=name)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(_("{path} cannot be read ({reason}).").format(path=name, reason=reason)) from None
    if len(text) > limit:
        raise UserError(
            _("{path} is longer than the {limit:,} characters that are read.").format(path=name, limit=limit)
        )
    return text


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise ValueError(_("it is closed"))
    return sys.stdin.buffer


def named(path: str) -> str:
    """The path as it is named in a sentence."""
    return _("standard input") if path == "-" else path[:200] or '""'


def json_text(data: object) -> str:
    """JSON text. ASCII only, so that any encoding of the output can carry it."""
    return json.dumps(data, indent=2, allow_nan=False)


def write(text: str) -> None:
    """Write the output, whole or with a UserError: a pipe may be closed, a disk full."""
    if sys.stdout is None:
        raise UserError(_("The output cannot be written ({reason}).").format(reason=_("it is closed")))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(f"{text}\n" if text else "")
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        # What is left in the buffer would fail again, with a traceback, when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(_("The output cannot be written ({reason}).").format(reason=reason)) from None


def complain(message: str, *, whole: bool = False) -> None:
    """Write to standard error, if there is one: a sentence as one line that no terminal takes for a command."""
    if sys.stderr is None:
        return
    if not whole:
        message = "".join(each if each.isprintable() else "?" for each in message)[:_MESSAGE_CHARS] + "\n"
    with suppress(OSError, ValueError):
        sys.stderr.write(message)
        sys.stderr.flush()

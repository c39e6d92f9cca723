"""JSON as people keep and paste it: with comments and trailing commas, or as the dict of a Python program.

Files with comments are read by DeepSpeed (hjson) and by editors, not by Hugging Face's libraries (json).
"""

import ast
import json
import re

_TOKENS = re.compile(
    r"""(?P<space>\s+)
      | (?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)
      | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<mark>[{}\[\](),:])
      | (?P<word>(?:[^\s{}\[\](),:"'\#/]|/(?![/*]))+)""",
    re.DOTALL | re.VERBOSE,
)
# What stands before a dict in a program.
_ASSIGNED = re.compile(r"\s*[A-Za-z_][\w.\[\]\"']*\s*(?::\s*[\w\[\], ]+)?=\s*(?=\{)")
_COLON = re.compile(r"\s*:")
# A block of Markdown around it.
_FENCES = re.compile(r"\A\s*```\w*[ \t]*(?=\n)|(?<=\n)[ \t]*```\s*\Z")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_BRACKETS = {"(": "[", ")": "]"}
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*)?\.?[0-9_]*(?:[eE][+-]?[0-9]+)?")


def as_json(text: str) -> str | None:
    """The text as JSON writes it, line by line where it was; None for what is cut into no such tokens.

    Comments and commas before a closing bracket are left out, keys and texts in single quotes or keys without any are
    quoted, Python's True, False, None, tuples and digits with underscores are rewritten. The result need not be JSON.
    """
    text = _FENCES.sub("", text)
    assigned = _ASSIGNED.match(text)
    position = assigned.end() if assigned else 0
    written: list[str] = ["\n" * text.count("\n", 0, position)]
    comma = None
    while position < len(text):
        found = _TOKENS.match(text, position)
        if found is None:
            return None
        position = found.end()
        piece, kind = found.group(), found.lastgroup
        if kind in ("space", "comment"):
            written.append("\n" * piece.count("\n") or " ")
            continue
        piece = _BRACKETS.get(piece, piece)
        if comma is not None and piece in ("}", "]"):
            written[comma] = ""
        is_key = kind == "word" and _COLON.match(text, position) is not None
        written.append(json.dumps(piece) if is_key else _written(piece, kind))
        comma = len(written) - 1 if piece == "," else None
    return "".join(written)


def _written(token: str, kind: str | None) -> str:
    if kind == "text" and token.startswith("'"):
        try:
            return json.dumps(ast.literal_eval(token))
        except (ValueError, SyntaxError):
            return token
    if kind == "word" and token[-1:].isdigit() and _NUMBER.fullmatch(token):
        return _number(token)
    return _PYTHON.get(token, token) if kind == "word" else token


def _number(token: str) -> str:
    """A number without what JSON does not write: underscores, a plus sign, a point without a digit before it."""
    digits = token.replace("_", "").removeprefix("+")
    return re.sub(r"^(-?)\.", r"\g<1>0.", digits)

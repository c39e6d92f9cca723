"""Every sentence that a user sees goes through gettext: a bare one in the source is found here.

Run: pytest tests/test_strings.py

Three searches over the syntax trees. In the files that write for users: texts of two words and more anywhere, and
single words where they are shown (an element's label, a heading of a table, a trace's name, a label in a table of
labels). In every file: the sentence of a UserError. And each argument of _() must be one that the collector of
messages can read: a constant, or the name of one that is marked.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRITING_FOR_USERS = [
    ROOT / "app.py",
    *sorted(ROOT.glob("pages/*.py")),
    *sorted((ROOT / "memcore" / "ui").rglob("*.py")),
    *(ROOT / "memcore" / name for name in ("explain.py", "verdict_words.py", "questions.py", "console.py", "cli.py")),
]
EVERYWHERE = sorted((ROOT / "memcore").rglob("*.py"))

TRANSLATING = {"_", "gettext", "ngettext", "mark"}
# Calls whose first argument, or all of whose arguments, are shown.
FIRST_SHOWN = {
    "title", "header", "subheader", "caption", "markdown", "text", "write", "success", "warning", "error", "info",
    "toast", "button", "download_button", "link_button", "selectbox", "multiselect", "segmented_control", "pills",
    "radio", "number_input", "text_input", "text_area", "slider", "select_slider", "toggle", "checkbox",
    "file_uploader", "expander", "popover", "status", "spinner", "progress", "tab",
}  # fmt: skip
ALL_SHOWN = {"metric", "opening", "figures", "table", "text_table", "tabs"}
SHOWN_KEYWORDS = {
    "label", "help", "placeholder", "alt", "page_title", "title", "name", "text", "hovertemplate", "texttemplate",
    "annotation_text", "ticktext", "subplot_titles", "description",
}  # fmt: skip
# Tables of constants whose values are shown.
LABEL_TABLES = re.compile(r".*_(LABELS|REMEDIES|NAMES|TEXTS)")
# Arguments that are never shown, whatever they hold.
NEVER_SHOWN = {
    "key", "icon", "width", "type", "format", "mime", "file_name", "page_icon", "layout", "textposition",
}  # fmt: skip
# What is the same in every language: units, names, what a program calls itself.
ALLOWED = {
    "GB", "GiB", "GB (1e9 bytes)", "GiB (2^30 bytes)", "NVMe", "LoRA", "QLoRA", "ZeRO-", "ZeRO\N{NON-BREAKING HYPHEN}",
    "HSDP", "k", "ZeRO paper", "memcore", "python -m memcore", "Ψ", "s", "ms", "x", "y",
    "owner/name",
    ", line ",  # after the json module's own words, which are English
}  # fmt: skip
# Identifiers: settings, files, icons, CSS and types; one word with a sign in it that no label has.
IDENTIFIER = re.compile(r"\S*[_./:#{}()\[\]=<>\\]\S*", re.ASCII)
# Where a figure comes from: a paper or a file of source code. Titles and paths are not translated.
CITATION = re.compile(r"(arXiv|deepspeed|torch|transformers|bitsandbytes|peft) [0-9.]+, .*")
_WORDS = re.compile(r"[^\W\d_]{2,}[,.:;]? +\(?[^\W\d_]{2,}")


def bare_strings(source: str) -> list[str]:
    """What a user would read untranslated, as "line: text"."""
    return [f"{line}: {text}" for line, text in sorted(set(_bare(ast.parse(source))))]


def _bare(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _outside_translations(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _WORDS.search(_visible(node.value)):
                yield from _unless_allowed(node)
        elif isinstance(node, ast.Call):
            for shown in _shown_arguments(node):
                yield from _words_in(shown)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and LABEL_TABLES.fullmatch(target.id) for target in targets):
                for value in node.value.values:
                    yield from _words_in(value)
        elif isinstance(node, ast.Dict) and any(_is_translation(key) for key in node.keys):
            for part in (*node.keys, *node.values):
                if part is not None:
                    yield from _words_in(part)


def _outside_translations(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but docstrings, annotations, what is inside _() and what is never shown."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if id(node) in docstrings or _is_translation(node):
            continue
        yield node
        if isinstance(node, ast.Call):
            waiting += [node.func, *node.args, *(k for k in node.keywords if k.arg not in NEVER_SHOWN)]
        else:
            waiting += ast.iter_child_nodes(node)


def _is_translation(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TRANSLATING


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _shown_arguments(node: ast.Call) -> Iterator[ast.expr]:
    name = _called(node)
    if name in ALL_SHOWN:
        yield from node.args
    elif name in FIRST_SHOWN:
        yield from node.args[:1]
    keywords = SHOWN_KEYWORDS - {"name"} if name == "PlanField" else SHOWN_KEYWORDS  # a field's own name, not its label
    yield from (keyword.value for keyword in node.keywords if keyword.arg in keywords)


def _words_in(shown: ast.expr) -> Iterator[tuple[int, str]]:
    """Bare texts, single words too, in what is shown: in it, not in the arguments of calls that make it."""
    if isinstance(shown, ast.Constant) and isinstance(shown.value, str) and re.search(r"[^\W\d_]", shown.value):
        yield from _unless_allowed(shown)
    elif isinstance(shown, ast.JoinedStr | ast.Tuple | ast.List | ast.Set):
        for part in shown.values if isinstance(shown, ast.JoinedStr) else shown.elts:
            yield from _words_in(part)
    elif isinstance(shown, ast.Dict):
        for part in (*shown.keys, *shown.values):
            if part is not None:
                yield from _words_in(part)
    elif isinstance(shown, ast.IfExp):
        yield from _words_in(shown.body)
        yield from _words_in(shown.orelse)
    elif isinstance(shown, ast.BinOp):
        yield from _words_in(shown.left)
        yield from _words_in(shown.right)
    elif isinstance(shown, ast.ListComp | ast.GeneratorExp):
        yield from _words_in(shown.elt)
    elif isinstance(shown, ast.Call) and _called(shown) in ("format", "join"):
        yield from _words_in(shown.func.value)  # type: ignore[attr-defined]


def _visible(text: str) -> str:
    """The text without Plotly's %{fields} and tags."""
    return re.sub(r"%\{[^}]*\}|<[^>]*>", " ", text)


def _unless_allowed(node: ast.Constant) -> Iterator[tuple[int, str]]:
    visible = _visible(str(node.value)).strip(" ,.:;·=+()%*\n0123456789")
    if {visible, node.value} & ALLOWED or not re.search(r"[^\W\d_]", visible) or IDENTIFIER.fullmatch(visible):
        return
    if CITATION.fullmatch(str(node.value)):
        return
    yield node.lineno, str(node.value)


def bare_sentences_of_errors(source: str) -> list[str]:
    """Sentences of UserError that are not translated, directly or through a name of the same function."""
    tree = ast.parse(source)
    found = []
    for function in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))):
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                assigned.setdefault(node.targets[0].id, []).append(node.value)
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and _called(node) in ("UserError", "_refuse") and node.args:
                sentence = node.args[0 if _called(node) == "UserError" else 1]
                named = [name.id for name in ast.walk(sentence) if isinstance(name, ast.Name)]
                meant = [sentence, *(value for name in named for value in assigned.get(name, []))]
                found += [f"{line}: {text}" for each in meant for line, text in _words_in(each)]
    return sorted(set(found))


def unreadable_messages(source: str) -> list[str]:
    """Arguments of _() that the collector of messages cannot read, as "line: code"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if _is_translation(node) and isinstance(node, ast.Call):
            texts = node.args[:2] if _called(node) == "ngettext" else node.args[:1]
            marks = _called(node) == "mark"
            found += [f"{node.lineno}: {ast.unparse(text)}" for text in texts if not _is_readable(text, marks)]
    return found


def _is_readable(text: ast.expr, marks: bool) -> bool:
    """A constant text; for _() also the name of one that was marked: a variable, an attribute or an entry."""
    if isinstance(text, ast.Constant):
        return isinstance(text.value, str)
    return not marks and isinstance(text, ast.Name | ast.Attribute | ast.Subscript)


@pytest.mark.parametrize("path", WRITING_FOR_USERS, ids=lambda path: path.name)
def test_what_users_read_is_translated(path: Path):
    assert bare_strings(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_errors_are_translated(path: Path):
    assert bare_sentences_of_errors(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_can_be_collected(path: Path):
    if path.name == "i18n.py":
        return
    assert unreadable_messages(path.read_text(encoding="utf-8")) == []


PLANTED = '''
"""A docstring is not shown."""
import streamlit as st
from memcore.i18n import gettext as _, mark

TERM_LABELS = {"weights": "Planted weights", "momentum": mark("Momentum"), "lora": "LoRA"}

def page(unit):
    """Nor is this one."""
    st.title("Planted")
    st.metric(_("Good"), "12 GB", help="Planted help")
    st.caption(f"Planted {unit} text")
    st.caption(_("Good {unit}").format(unit=unit))
    st.selectbox(_("Good"), ["zero_paper"], key="w_good", help=_("Good.") if unit else "Planted branch")
    st.toggle("overlap_comm", key="some key")
    table([{_("Good"): 1, "Planted heading": 2}], "Planted alternative")
    rows = [{_("Good"): "Planted cell", "Planted": _("Good")}]
    figure.add_bar(name="Planted trace", hovertemplate="%{x:.2f} Planted<extra></extra>")
    figure.update_xaxes(title=f"memory ({unit})")
    return "a planted sentence in passing"
'''


def test_the_search_finds_what_is_planted():
    found = [text.partition(": ")[2] for text in bare_strings(PLANTED)]
    planted = [text for text in found if "lanted" in text]
    assert set(found) - set(planted) == {"memory (", " text"}
    wanted = {
        "Planted weights", "Planted", "Planted help", "Planted ", "Planted branch", "Planted heading",
        "Planted alternative", "Planted cell", "Planted trace", "%{x:.2f} Planted<extra></extra>",
        "a planted sentence in passing",
    }  # fmt: skip
    assert wanted <= set(planted)


@pytest.mark.parametrize(
    "code",
    [
        'def f(x):\n    raise UserError("It is wrong.", "model")',
        'def f(x):\n    raise UserError(f"{x} is wrong.")',
        'def f(x):\n    raise UserError("{x} is wrong.".format(x=x))',
        'def f(x):\n    message = "{x} is wrong."\n    raise UserError(message.format(x=x), "model")',
        'def f(x):\n    raise _refuse("recipe.lora", "{field} is wrong.")',
        'def f(x):\n    raise UserError(_("Right.") if x else "Wrong.")',
    ],
)
def test_the_search_finds_a_bare_sentence_of_an_error(code: str):
    assert len(bare_sentences_of_errors(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        'def f(x):\n    raise UserError(_("It is wrong."), "model.config")',
        'def f(x):\n    message = _("{x} is wrong.")\n    raise UserError(message.format(x=x, y="some name"), "model")',
        'def f(x):\n    raise UserError(str(x), "model config")',
    ],
)
def test_the_search_passes_a_translated_sentence_of_an_error(code: str):
    assert bare_sentences_of_errors(code) == []


@pytest.mark.parametrize(
    "code", ['_(f"{x} words")', '_("{x}".format(x=x))', '_("a" + b)', '_("a" if x else "b")', "mark(name)", "_(f(x))"]
)
def test_the_search_finds_a_message_that_cannot_be_collected(code: str):
    assert len(unreadable_messages(code)) == 1


@pytest.mark.parametrize("code", ['_("a " "b")', "_(LABELS[x])", "_(row.title)", "_(label)", 'ngettext("a", "b", n)'])
def test_the_search_passes_messages_that_can_be_collected(code: str):
    assert unreadable_messages(code) == []

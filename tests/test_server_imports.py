"""What may import what: torch stays out of the server, streamlit in memcore/ui, and modules import only upwards.

Run: pytest tests/test_server_imports.py

Streamlit collects garbage after every run, and with torch in the process each click takes several times longer; so
this is a matter of speed. Checked in processes of their own, since other tests of a session may import torch.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "bitsandbytes", "peft", "accelerate", "deepspeed", "datasets")
# The only modules that may import them: a module, or all of a package. They run in workers and scripts.
WORKER_ONLY = (
    "memcore.counting",
    "memcore.loading",
    "memcore.hub",
    "memcore.trace",
    "memcore.allocator.task",
    "memcore.bench.worker",
    "memcore.verify.worker",
)
# Importing it runs the command line.
NEVER_IMPORTED = ("memcore.__main__",)

VISIT_ALL_PAGES = """
import json, sys
from streamlit.testing.v1 import AppTest
from memcore.ui.frame import PAGES
for language in ("en", "zh"):
    at = AppTest.from_file(sys.argv[1], default_timeout=60)
    at.query_params["lang"] = language
    at.run()
    for file, *_ in PAGES.values():
        if file != "app.py":
            at.switch_page(file).run()
        assert not at.exception, at.exception
        assert at.metric, file
# A config is counted too: in a worker.
at.get_by_key("w_source").set_value("config").run()
at.get_by_key("w_config").set_value('{"model_type": "llama", "num_hidden_layers": 1}').run()
assert not at.sidebar.error, at.sidebar.error
print(json.dumps(sorted(sys.modules)))
"""
IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = sorted((ROOT / "memcore").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def is_worker_only(name: str) -> bool:
    return any(name == only or name.startswith(f"{only}.") for only in WORKER_ONLY)


def loaded(code: str, *arguments: str) -> set[str]:
    """The top-level packages in a fresh process after this code has run."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def imported(path: Path) -> Iterator[str]:
    """Names of all modules that a file imports when it runs, wherever in it; not what only annotations need."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            known = modules()
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


def test_a_server_that_has_shown_every_page_has_no_torch():
    packages = loaded(VISIT_ALL_PAGES, str(ROOT / "app.py"))
    assert "streamlit" in packages
    assert not packages.intersection(HEAVY)


def test_only_modules_for_workers_import_torch():
    names = [name for name in modules() if not is_worker_only(name) and name not in NEVER_IMPORTED]
    assert len(names) > 20
    assert not loaded(IMPORT_ALL, *names).intersection(HEAVY)


def test_the_check_would_notice_torch():
    assert "torch" in loaded(IMPORT_ALL, "memcore.counting")


def test_only_the_dashboard_imports_streamlit():
    importing = {name for name, path in modules().items() if any(_is_streamlit(used) for used in imported(path))}
    assert importing
    assert all(name.startswith("memcore.ui") for name in importing)


def _is_streamlit(name: str) -> bool:
    return name.partition(".")[0] == "streamlit"


@pytest.mark.parametrize("path", [ROOT / "app.py", *sorted(ROOT.glob("pages/*.py"))], ids=lambda path: path.name)
def test_a_page_file_holds_one_call_to_the_frame(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring, *imports, call = tree.body
    assert ast.get_docstring(tree), docstring
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert ast.unparse(call.value.func) == "page"


def architecture() -> list[str]:
    """The modules in the order of ARCHITECTURE.md's list."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = re.findall(r"^    (memcore/\S+)\.py\b", text, re.MULTILINE)
    return [path.replace("/", ".").removesuffix(".__init__") for path in paths]


def test_the_architectures_list_has_every_module_once():
    assert sorted(architecture()) == sorted(modules())


@pytest.mark.parametrize("name", list(modules()))
def test_a_module_imports_only_those_above_it_in_the_architectures_list(name: str):
    order = architecture()
    if name not in order:
        pytest.skip("the list's own test says that it is missing there")
    above = order[: order.index(name)]
    own = {used for used in imported(modules()[name]) if used.partition(".")[0] == "memcore"}
    assert own <= {*above}, f"{name} imports what is not above it: {sorted(own - {*above})}"

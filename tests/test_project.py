"""The files around the code say what is true. Run: pytest tests/test_project.py"""

import ast
import json
import os
import re
import runpy
import struct
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from memcore.cli import main
from memcore.settings import HEAVY_PREFIX, LIGHT_PREFIX, PREFIX, Settings, read_settings
from memcore.ui.frame import PAGES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RUN = runpy.run_path(str(ROOT / "run.py"))
MAX_IMAGE_BYTES = 400_000
# Written in two halves, so that this file does not hold what it looks for.
PRIVATE = ["/wo" + "rk/", "/tmp" + "/w", "pypi" + ".org", "registry" + ".npmjs"]


def pinned(requirements: str) -> dict[str, str]:
    """Package to version, of a requirements file with those that it names. Fails for a line that is no exact pin."""
    found = {}
    for line in RUN["_lines"](requirements):
        match = re.fullmatch(r"([A-Za-z0-9_-]+)==([0-9]+(?:\.[0-9]+)+)", line)
        assert match, f"{requirements}: {line!r} is not an exact pin"
        found[match[1]] = match[2]
    return found


def section(text: str, title: str) -> str:
    """The part of a document below a heading, up to the next one."""
    match = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"there is no section {title!r}"
    return match[1]


def first_column(table: str) -> list[str]:
    rows = re.findall(r"^\| `?([^|`]+?)`? \|", table, re.MULTILINE)
    return rows[1:]  # without the heading; the line under it has no spaces


def tracked_files() -> list[Path]:
    """All files that git knows, and those that it would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


class TestDependencies:
    def test_the_readme_gives_a_reason_for_each_and_for_no_other(self):
        assert first_column(section(README, "Dependencies")) == list(pinned("requirements-dev.txt"))

    def test_what_runs_is_part_of_what_tests(self):
        assert pinned("requirements.txt").items() <= pinned("requirements-dev.txt").items()

    @pytest.mark.parametrize("folder", ["memcore", "pages", "scripts", "tests", "benchmarks"])
    def test_every_import_is_pinned(self, folder: str):
        names = {"yaml": "PyYAML", "babel": "Babel"}
        own = {"memcore", "benchmarks", "scripts", "tests", *(path.stem for path in ROOT.glob("**/*.py"))}
        allowed = pinned("requirements.txt" if folder in ("memcore", "pages") else "requirements-dev.txt")
        # An engine to prove against, imported where its ranks run: the dashboard goes without.
        optional = {ROOT / "memcore" / "verify" / "worker" / "engines.py": {"deepspeed"}}
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
                for package in {name.partition(".")[0] for name in found} - sys.stdlib_module_names - own:
                    known = package in optional.get(path, ()) or names.get(package, package) in allowed
                    assert known, f"{path} imports {package}"


class TestArchitecture:
    def modules(self) -> list[str]:
        """The modules of the house, in its order."""
        return re.findall(r"^    (memcore/[\w/]+\.py)", section(ARCHITECTURE, "The house"), re.MULTILINE)

    def test_every_module_is_named_once(self):
        existing = [path.relative_to(ROOT).as_posix() for path in (ROOT / "memcore").rglob("*.py")]
        assert sorted(self.modules()) == sorted(existing)

    @pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
    def test_the_paths_that_a_document_names_exist(self, document: Path):
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w/.~-])(?:\.ci|docs|memcore|pages|scripts|tests|benchmarks)/[\w./-]*\w", text))
        named |= set(re.findall(r"`(\w+\.(?:py|md|txt))`", text)) - {"config.json", "scenario.json"}
        assert [name for name in sorted(named) if not (ROOT / name).exists()] == []

    @pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
    def test_links_lead_somewhere(self, document: Path):
        for target, heading in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", document.read_text(encoding="utf-8")):
            path = document.parent / target
            assert path.is_file(), target
            if heading:
                assert f"\n## {heading.capitalize()}\n" in path.read_text(encoding="utf-8")


class TestScripts:
    @pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.name)
    def test_it_is_started_as_its_documentation_says(self, script: Path):
        """One that imports the package is not found by its file's path alone."""
        command = re.search(rf"python (?:-m scripts\.{script.stem}|scripts/{script.name})", docstring_of(script))
        assert command
        imports = "from memcore" in script.read_text(encoding="utf-8")
        assert command[0].startswith("python -m") == imports
        for document in DOCUMENTS:
            wrong = f"python scripts/{script.name}" if imports else f"python -m scripts.{script.stem}"
            assert wrong not in document.read_text(encoding="utf-8")


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


class TestReadme:
    def test_the_example_is_what_the_command_writes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        part = section(README, "Command line")
        scenario = re.search(r"```json\n(.*?)```", part, re.DOTALL)
        shown = re.search(r"```text\n(.*?)```", part, re.DOTALL)
        assert scenario
        assert shown
        path = tmp_path / "scenario.json"
        path.write_text(json.dumps(json.loads(scenario[1])), encoding="utf-8")
        assert main(["predict", str(path)]) == 0
        assert capsys.readouterr().out.startswith(shown[1])

    def test_every_command_and_page_is_listed(self, capsys: pytest.CaptureFixture[str]):
        assert main(["--help"]) == 0
        commands = re.findall(r"^    (\S+) {2,}\S", capsys.readouterr().out, re.MULTILINE)
        listed = re.findall(r"^\| `python -m memcore ([\w-]+)", section(README, "Command line"), re.MULTILINE)
        assert set(listed) == set(commands)
        assert first_column(section(README, "Pages")) == [label for _file, label, _icon in PAGES.values()]

    def test_settings_are_those_that_are_read(self):
        rows = re.findall(r"^\| `(\w+)` \| ?(\S*) \|", section(README, "Settings"), re.MULTILINE)
        defaults = Settings()
        for name, default in rows:
            if name == RUN["TORCH_INDEX_VARIABLE"]:
                continue
            holders: dict[str, Any] = {LIGHT_PREFIX: defaults.light_lane, HEAVY_PREFIX: defaults.heavy_lane}
            prefix = next((prefix for prefix in holders if name.startswith(prefix)), PREFIX)
            holder, field = holders.get(prefix, defaults), name.removeprefix(prefix).lower()
            assert field in {each.name for each in fields(holder)}, name
            value = getattr(holder, field)
            assert default == str(int(value) if isinstance(value, bool) else value), name
            read_settings({name: default})

    @pytest.mark.parametrize("image", re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README))
    def test_the_screenshots_are_there_and_small(self, image: str):
        data = (ROOT / image).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", data[16:24])
        assert width >= 800
        assert height >= 500
        assert len(data) < MAX_IMAGE_BYTES


class TestFiles:
    def test_nothing_private_is_written_down(self):
        for path in tracked_files():
            content = path.read_bytes().decode("utf-8", "replace")
            assert [word for word in PRIVATE if word in content] == [], path

    def test_scripts_can_be_run(self):
        assert os.access(ROOT / ".ci" / "run", os.X_OK)
        subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)

    def test_every_benchmark_writes_json(self):
        for path in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
            command = [sys.executable, path, "--help"]
            helped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
            assert helped.returncode == 0, helped.stderr
            assert "--json" in helped.stdout, path.name

    @pytest.mark.parametrize("script", ["update_messages", "screenshots", "build_inventories"])
    def test_scripts_import(self, script: str):
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="not_main")


class TestRun:
    @pytest.mark.parametrize(
        ("argv", "command", "rest"),
        [
            ([], "start", []),
            (["--", "--server.port", "8600"], "start", ["--server.port", "8600"]),
            (["start", "--", "--server.port", "8600"], "start", ["--server.port", "8600"]),
            (["test", "-x", "-k", "zero"], "test", ["-x", "-k", "zero"]),
            (["test", "--", "tests/test_zero.py"], "test", ["tests/test_zero.py"]),
            (["--torch-index", "x", "check"], "check", []),
        ],
    )
    def test_arguments_go_where_they_belong(self, argv: list[str], command: str, rest: list[str]):
        options, passed_on = RUN["_arguments"](argv)
        assert (options.command, passed_on) == (command, rest)

    def test_an_unknown_command_is_refused(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit, match="2"):
            RUN["_arguments"](["tests"])
        assert "tests" in capsys.readouterr().err

    def test_it_needs_the_standard_library_only(self):
        finished = subprocess.run(
            [sys.executable, "-S", "-I", ROOT / "run.py", "--help"], capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0, finished.stderr
        assert "--torch-index" in finished.stdout

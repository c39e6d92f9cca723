"""Set up and start the project: ``python3 run.py``, ``python3 run.py test``, ``python3 run.py check``.

Needs only Python 3.11 or newer: it makes a virtual environment in .venv beside this file and installs there
what the requirements files name, again whenever their content changes.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

# Before anything that an older Python, which may well be asked to run this, stumbles over.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"memcore needs Python 3.11 or newer; this is Python {sys.version.split()[0]}.")

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# What was installed last: the hash of each requirements file, and the index that torch came from if one was named.
STAMP = VENV / "installed.json"
TORCH_INDEX_VARIABLE = "MEMCORE_TORCH_INDEX"

COMMANDS = {
    "start": "the dashboard; further arguments go to streamlit",
    "test": "the tests; further arguments go to pytest",
    "check": "linter, formatter and type checker",
}
# The whole suite runs in a process for each processor, but few: tests measure. A file's tests share what they set up.
SIDE_BY_SIDE = ("--numprocesses=logical", "--maxprocesses=4", "--dist=loadfile")
CHECKS = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"])


def main() -> int:
    """Run the command of the command line and return its exit status."""
    options, rest = _arguments(sys.argv[1:])
    _install("requirements.txt" if options.command == "start" else "requirements-dev.txt", options.torch_index)
    if options.command == "start":
        return _run("streamlit", "run", "app.py", *rest)
    if options.command == "test":
        return _run("pytest", *(rest or SIDE_BY_SIDE))
    statuses = [_run(*check) for check in CHECKS]
    return int(any(statuses))


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This program's own arguments, and those after the command or after ``--``, which go on."""
    parser = argparse.ArgumentParser(
        usage="run.py [--torch-index URL] [start|test|check] [--] [further arguments]",
        description="Sets up .venv and runs: " + "; ".join(f"{name}: {what}" for name, what in COMMANDS.items()) + ".",
    )
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), default="start")
    parser.add_argument(
        "--torch-index",
        metavar="URL",
        default=os.environ.get(TORCH_INDEX_VARIABLE),
        help=f"package index to take torch from, such as the CPU one (or set {TORCH_INDEX_VARIABLE})",
    )
    end = next((index for index, argument in enumerate(argv) if argument in {*COMMANDS, "--"}), len(argv))
    own, rest = argv[: end + 1], argv[end + 1 :]
    if own and own[-1] == "--":
        own.pop()
    elif rest and rest[0] == "--":
        rest.pop(0)
    return parser.parse_args(own), rest


def _install(requirements: str, torch_index: str | None) -> None:
    """Bring .venv to what a requirements file asks for; quick where it is there already."""
    installed = _read_stamp()
    torch_index = torch_index or installed.get("torch_index")
    pin = next(line for line in _lines(requirements) if line.startswith("torch=="))
    wanted = {requirements: _hash(requirements)}
    if torch_index:
        wanted |= {"torch_index": torch_index, "torch_from_index": pin}
    if PYTHON.exists() and wanted.items() <= installed.items():
        return
    if not _is_usable():
        installed = {}
        print(f"Making {VENV} ...", flush=True)
        _make_venv()
    print(f"Installing {requirements}; the first time this takes some minutes ...", flush=True)
    if torch_index and (torch_index, pin) != (installed.get("torch_index"), installed.get("torch_from_index")):
        # By force: pip takes any build of the same version for the one that is wanted.
        _pip("--index-url", torch_index, "--force-reinstall", "--no-deps", pin)
    _pip("-r", requirements)
    STAMP.write_text(json.dumps(installed | wanted, indent=1), encoding="utf-8")


def _read_stamp() -> dict[str, str]:
    try:
        return dict(json.loads(STAMP.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _lines(requirements: str) -> list[str]:
    """The lines of a requirements file, with those of the files that it names."""
    found: list[str] = []
    for line in (ROOT / requirements).read_text(encoding="utf-8").splitlines():
        found += _lines(line.removeprefix("-r ").strip()) if line.startswith("-r ") else [line]
    return found


def _hash(requirements: str) -> str:
    return hashlib.sha256("\n".join(_lines(requirements)).encode()).hexdigest()


def _is_usable() -> bool:
    """Whether .venv is whole: an interrupted set-up leaves one without pip, and its Python may be gone."""
    code = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", code], check=False, capture_output=True).returncode == 0  # noqa: S603


def _make_venv() -> None:
    try:
        venv.create(VENV, clear=True, with_pip=True)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"The virtual environment could not be made ({error}). On Debian and Ubuntu, install python3-venv.")


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:  # noqa: S603
        sys.exit("The packages could not be installed; pip says why above.")


def _run(module: str, *arguments: str) -> int:
    """Run a module of .venv in the project's folder."""
    return subprocess.run([str(PYTHON), "-m", module, *arguments], cwd=ROOT, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

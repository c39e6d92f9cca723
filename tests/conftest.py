"""Settings that all tests share. Run everything with: pytest (from the repository's root)."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Servers and workers that tests start keep traces and measurements where no user has any, and do not trace the whole
# catalogue.
_KEPT = tempfile.TemporaryDirectory(prefix="memcore-tests-")
os.environ["MEMCORE_CACHE_DIR"] = _KEPT.name
os.environ["MEMCORE_STORE"] = str(Path(_KEPT.name) / "measurements.sqlite")
os.environ["MEMCORE_WARM_CATALOGUE"] = "0"

# The same examples on every run: a failure in CI is then a failure here. No deadline, since a shared machine
# may stall for seconds.
settings.register_profile(
    "memcore",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("memcore")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference material beside the repository; tests that need it are skipped without it."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


@pytest.fixture(scope="session")
def measured_runs(shared: Path) -> dict[str, Any]:
    """Published runs ("runs") and differences between runs ("deltas"), each by its id."""
    path = shared / "measured" / "runs.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    found = json.loads(path.read_text(encoding="utf-8"))
    return {kind: {entry["id"]: entry for entry in found[kind]} for kind in ("runs", "deltas")}


@pytest.fixture(scope="session")
def public_cases(shared: Path) -> dict[str, dict[str, Any]]:
    """Inputs that break other tools, with the right answers, by id."""
    found = json.loads((shared / "public_cases.json").read_text(encoding="utf-8"))
    return {case["id"]: case for case in found}


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Threads that wait for one another make real runs ten times slower where the machine has other work."""
    import torch  # most tests do without

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

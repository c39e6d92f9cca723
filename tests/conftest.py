"""Settings that all tests share. Run everything with: pytest (from the repository's root)."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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

"""One job per device among all programs of this machine: an advisory lock on a file, which a program that ends lets
go of however it ends. POSIX only, like the workers."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DeviceLock:
    """The lock of one device in one folder."""

    def __init__(self, file: int | None) -> None:
        self._file = file

    def take(self) -> bool:
        """Take it if no other program has it; whether it is now ours."""
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


@contextmanager
def device_lock(folder: Path | None, device: str) -> Iterator[DeviceLock]:
    """A device's lock, to be taken within the block and let go of at its end.

    Without a folder, or in one that cannot be written, nobody else is waited for.
    """
    file = _opened(folder, device)
    try:
        yield DeviceLock(file)
    finally:
        if file is not None:
            os.close(file)


def _opened(folder: Path | None, device: str) -> int | None:
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Workers do not inherit it: the lock is this process's own.
        return os.open(folder / f"{re.sub(r'[^a-z0-9]', '_', device)}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        return None

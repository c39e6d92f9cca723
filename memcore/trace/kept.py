"""Tapes that are kept from one trace to the next: in memory, and as files that outlive the process.

Worker processes only. What cannot be read or written is as good as not kept; no trace fails for it.
"""

import json
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

_MOST_IN_MEMORY = 24


class KeptFiles:
    """JSON objects by key, as compressed files of one folder, of `max_bytes` together; those used longest ago go
    first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def get(self, key: str) -> Any:
        """The object of that key; None where there is none that can be read."""
        path = self._path(key)
        try:
            found = json.loads(zlib.decompress(path.read_bytes()))
            os.utime(path)
        except (OSError, ValueError, zlib.error):
            return None
        return found

    def put(self, key: str, value: Any) -> None:
        """Keep an object."""
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 6)
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Another worker may be writing the same: each file appears whole, or not at all.
            with NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
                file.write(data)
            Path(file.name).replace(self._path(key))
            self._let_go()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json.z"

    def _let_go(self) -> None:
        entries = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in self._folder.iterdir())
        total = sum(size for _time, size, _file in entries)
        for _time, size, file in entries:
            if total <= self._max_bytes:
                return
            file.unlink(missing_ok=True)
            total -= size


class Kept:
    """Objects by key, the latest few in memory, all in files where there is a folder for them."""

    def __init__(self, files: KeptFiles | None) -> None:
        self._files = files
        self._memory: OrderedDict[str, Any] = OrderedDict()

    def get(self, key: str) -> Any:
        """The object of that key, or None."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        found = self._files.get(key) if self._files else None
        if found is not None:
            self._remember(key, found)
        return found

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep an object."""
        self._remember(key, value)
        if self._files:
            self._files.put(key, value)

    def _remember(self, key: str, value: Any) -> None:
        self._memory[key] = value
        while len(self._memory) > _MOST_IN_MEMORY:
            self._memory.popitem(last=False)

"""Retention of live recordings: removes the oldest files, by age and by total bytes.

Duty: removes files that recorders wrote, recognised by their names, and no other file of the folder. Several processes
may do so at once. Files with a time in the future were written before the clock was set back: they count as the oldest,
of unknown age. A reader with an open file is not affected.
"""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# As `live_files` and `knowledge_recorder` name them.
_NAME = re.compile(r"\d{8}T\d{6}\.\d{9}Z(-worker-\d+|-knowledge)?-\d{6}\.parquet")

# The remedy for a reader whose files are removed.
REMEDY = (
    "ask a copy, from which it removes none (`cp -al TABLES COPY` copies no data), or record with a longer retention"
)

_CLOCKS_S = 3600.0  # tolerated difference between the clocks of this machine and of the file system


class Retention(NamedTuple):
    """Limits of recorded files; None: no limit."""

    age_s: float | None = None
    total_bytes: int | None = None

    def remove_old(self, folder: Path) -> int:
        """Remove files beyond the limits; returns their number. Raises OSError if a file cannot be removed."""
        if self == Retention():
            return 0
        now_s = time.time()
        oldest_s = now_s - self.age_s if self.age_s is not None else 0.0
        found = sorted(_recorded(folder), key=lambda file: (file[0] <= now_s + _CLOCKS_S, file))
        total = sum(size for _, size, _ in found)
        removed = 0
        for written_s, size, path in found:
            if written_s >= oldest_s and (self.total_bytes is None or total <= self.total_bytes):
                continue
            path.unlink(missing_ok=True)
            total -= size
            removed += 1
        return removed


def is_recorded(name: str) -> bool:
    """Return whether a file's name is that of a recorder's file, which retention may remove."""
    return _NAME.fullmatch(name) is not None


def _recorded(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield (time of writing in seconds, bytes, path) of each recorded file."""
    for path in folder.glob("*/*.parquet"):
        if is_recorded(path.name):
            with suppress(FileNotFoundError):
                state = path.stat()
                yield state.st_mtime, state.st_size, path

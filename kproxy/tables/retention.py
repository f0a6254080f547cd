"""Which files of live recordings stay: the oldest go, by age and by the bytes of all.

Duty: remove files that recorders wrote, known by their names, and nothing else that lies in the folder. Several
processes may do so at once. Files of a time to come were written before the clock was set back: they are the oldest,
of an age that nobody knows. Refuses to know who reads them: a reader that has a file open goes on.
"""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# As `live_files` and `knowledge_recorder` name them.
_NAME = re.compile(r"\d{8}T\d{6}\.\d{9}Z(-worker-\d+|-knowledge)?-\d{6}\.parquet")

_CLOCKS_S = 3600.0  # by which clocks of this machine and of the files' may differ


class Retention(NamedTuple):
    """None: no bound."""

    age_s: float | None = None
    total_bytes: int | None = None

    def remove_old(self, folder: Path) -> int:
        """Remove what is too old or too much; returns how many files. OSError: a folder is not ours."""
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


def _recorded(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """(when it was written, bytes, path)"""
    for path in folder.glob("*/*.parquet"):
        if _NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                state = path.stat()
                yield state.st_mtime, state.st_size, path

"""The captures of an ingest, in a file of the driver: its memory does not grow with the number of captures.

Duty: lists the captures that paths match, numbers them in the order of the paths, keeps the size and the fingerprint of
each, and finds the captures that the tables already have. Iteration yields one capture at a time.

Memory: SQLite's cache, 2 MB. Disk: some 300 bytes for each capture, in a temporary file. Rotated files are one
capture, whose paths are in memory; the package of a storage has a list of names in memory while it lists a folder.

Does not use Spark, and does not read packets.
"""

import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kproxy.capture.formats.storage import STDIN, name_of
from kproxy.convert.job import Job, Settings, captures_of
from kproxy.errors import CaptureError

_TABLES = """
PRAGMA cache_size = -2000;
PRAGMA temp_store = FILE;
PRAGMA journal_mode = OFF;
CREATE TABLE listed (place INTEGER, path BLOB);
CREATE TABLE captures (
    number INTEGER PRIMARY KEY, source TEXT, paths TEXT, size INTEGER DEFAULT 0, largest INTEGER DEFAULT 0, content TEXT
);
CREATE TABLE known (source TEXT PRIMARY KEY, files TEXT, content TEXT) WITHOUT ROWID;
"""


class Catalogue:
    """The captures that paths match, as `convert.job.captures_of` returns them; raises the errors of that function."""

    def __init__(self, paths: Sequence[Path | str], settings: Settings) -> None:
        (self.like,) = captures_of([STDIN], replace(settings, rotated=False))  # the settings that all captures share
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.executescript(_TABLES)
        if settings.rotated and paths:
            (job,) = captures_of(paths, settings)
            self._db.execute("INSERT INTO captures (number, source, paths) VALUES (0, ?, ?)", _row(job.paths))
            return
        self._db.create_function("source", 1, lambda path: _row([os.fsdecode(path)])[0])
        self._db.create_function("paths", 1, lambda path: _row([os.fsdecode(path)])[1])
        self._db.execute("BEGIN")
        for place, path in enumerate(paths):
            found = settings.storage.listed(str(path))
            self._db.executemany("INSERT INTO listed VALUES (?, ?)", ((place, os.fsencode(each)) for each in found))
        numbers = "row_number() OVER (ORDER BY place, path) - 1"
        self._db.execute(
            f"INSERT INTO captures (number, source, paths) SELECT {numbers}, source(path), paths(path) FROM listed"
        )
        self._db.execute("DROP TABLE listed")
        twice = "SELECT min(number), max(number) FROM captures GROUP BY source HAVING count(*) > 1 LIMIT 1"
        for pair in self._db.execute(twice):
            captures_of([self.job(number).paths[0] for number in pair], settings)

    def __len__(self) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM captures").fetchone()
        return int(count)

    def job(self, number: int) -> Job:
        """Return the capture with a number."""
        source, paths = self._db.execute("SELECT source, paths FROM captures WHERE number = ?", (number,)).fetchone()
        return replace(self.like, source=source, paths=tuple(json.loads(paths)))

    def size(self, number: int) -> int:
        """Return the bytes of a capture; 0 before `note` has recorded them."""
        return int(self._db.execute("SELECT size FROM captures WHERE number = ?", (number,)).fetchone()[0])

    def every(self) -> Iterator[tuple[int, Job, int]]:
        """Yield (number, capture, bytes) of each capture."""
        for number, source, paths, size in self._db.execute("SELECT number, source, paths, size FROM captures"):
            yield number, replace(self.like, source=source, paths=tuple(json.loads(paths))), size

    def note(self, seen: Iterable[tuple[int, int, int, str | None]]) -> None:
        """Record captures as (number, bytes, bytes of the largest file, fingerprint or None)."""
        change = "UPDATE captures SET size = ?2, largest = ?3, content = ?4 WHERE number = ?1"
        self._db.executemany(change, seen)

    def large(self, file_bytes: int, bytes_: int) -> list[int]:
        """Return the numbers of captures larger than `bytes_`, or with a file larger than `file_bytes`."""
        found = "SELECT number FROM captures WHERE largest > ? OR size > ? ORDER BY number"
        return [number for (number,) in self._db.execute(found, (file_bytes, bytes_))]

    def leave_known(self, lines: Iterable[str], folder: str) -> list[CaptureError]:
        """Drop the captures that the tables in `folder` already have. lines: the output of `lines` in earlier runs.

        Return an error for each capture whose name the tables have with other contents; it is dropped too.
        """
        stored = (json.loads(line) for line in lines)
        rows = ((each["source"], json.dumps(each["files"]), each["content"]) for each in stored)
        self._db.executemany("INSERT OR REPLACE INTO known VALUES (?, ?, ?)", rows)
        both = (
            "SELECT source, paths, files, captures.content, known.content FROM captures JOIN known USING (source) "
            "WHERE captures.content IS NOT NULL"
        )
        refused = []
        for source, text, files, ours, theirs in self._db.execute(both):
            paths = json.loads(text)
            if ours != theirs or [name_of(path) for path in paths] != json.loads(files):
                fault = (
                    f"{folder} has tables of another capture that is called {source}, or of less of it: "
                    "rename the capture, or name another folder"
                )
                refused.append(CaptureError(paths[0], fault))
        self._db.execute("DELETE FROM captures WHERE content IS NOT NULL AND source IN (SELECT source FROM known)")
        return refused

    def lines(self, failed: Collection[int]) -> Iterator[str]:
        """Yield the lines that tables store about their captures: JSON, one line per capture that did not fail."""
        for number, source, paths, content in self._db.execute("SELECT number, source, paths, content FROM captures"):
            if number not in failed:
                files = [name_of(path) for path in json.loads(paths)]
                yield json.dumps({"source": source, "files": files, "content": content}) + "\n"


def _row(paths: Sequence[str]) -> tuple[str, str]:
    """Return source and paths as the database stores them: JSON also takes names that are not valid UTF-8."""
    return name_of(paths[0]), json.dumps(paths)

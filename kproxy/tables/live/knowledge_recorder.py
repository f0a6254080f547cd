"""Rows of insight about live traffic -> files of a dataset, in addition to the files of the recorder.

Duty: writes the same tables as a conversion of captures. Rows are few, so one process writes all of them, on any
thread. Files appear complete, after ROLL_S or ROLL_ROWS. The recorder of the same proxy locks the dataset's folder;
this recorder has a working folder of its own inside it. If the disk fails, rows are lost, counted and logged, and the
next files are tried. Memory: TOGETHER rows that are no batch yet, and `writer.RUN_ROWS` of each table. Does not compute
rows.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from kproxy import __version__
from kproxy.errors import KproxyError
from kproxy.tables import schema, writer
from kproxy.tables.knowledge import KnowledgeColumns

ROLL_ROWS = 128 * 1024  # of all tables
ROLL_S = 60.0
TOGETHER = 1024

log = logging.getLogger("kproxy.recorder")


class KnowledgeRecorder:
    """Takes rows; `tick` and `close` write files. Call it from one thread at a time."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """settings: stored in the manifest of the dataset."""
        self.dropped = 0  # rows that are in no file
        self._dataset = writer.Dataset(folder)
        self._settings = settings
        self._columns = KnowledgeColumns()
        self._sources: set[str] = set()
        now_ns = time.time_ns()
        begun = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 10**9))
        self._name = f"{begun}.{now_ns % 10**9:09}Z-knowledge"
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        """Begin new files."""
        self._work: Path | None = None  # working folder, created for the first row
        self._sorters: dict[str, writer.Sorter] = {}
        self._rows = 0
        self._begun_s = time.monotonic()

    def add(self, table: str, source: str | None, row: Any) -> None:
        """Add a row, a NamedTuple with the table's columns."""
        self._columns.append(table, source, row)
        self._rows += 1
        if source is not None:
            self._sources.add(source)
        if self._columns.rows >= TOGETHER:
            self._guarded(self._hand_on)
        if self._rows >= ROLL_ROWS:
            self._guarded(self._roll)

    def tick(self) -> None:
        """Write files if ROLL_S have passed."""
        if time.monotonic() - self._begun_s >= ROLL_S:
            self._guarded(self._roll)

    def close(self) -> None:
        """Write files of all remaining rows."""
        self._guarded(self._roll)

    def _hand_on(self) -> None:
        if self._work is None:
            self._work = self._dataset.begin_beside("record-knowledge")
            self._sorters = {table.name: writer.Sorter(table, self._work) for table in schema.KNOWLEDGE}
        for table, batch in self._columns.batches():
            self._sorters[table.name].add(batch)

    def _roll(self) -> None:
        if not self._rows:
            self._begin()
            return
        self._hand_on()
        assert self._work is not None
        files = {}
        for name, sorter in self._sorters.items():
            sorter.spill()
            if sorter.runs:
                path = self._work / f"{name}.parquet"
                writer.write(schema.TABLES[name], sorter.runs, path)
                files[f"{name}/{self._name}-{self._number:06}.parquet"] = path
        sources: dict[str, list[str]] = {source: [] for source in sorted(self._sources)}
        manifest = {"kproxy": __version__, "pyarrow": pa.__version__, "settings": self._settings, "sources": sources}
        self._dataset.publish(files, manifest)
        self._number += 1
        self._begin()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do `work`; if it fails, drop, count and log the rows that are in no file yet."""
        try:
            work()
        except (OSError, KproxyError) as fault:
            log.error("%d rows of insight are lost: %s", self._rows, fault)
            self._give_up()
        except Exception:
            log.exception("a defect of kproxy's recorder: %d rows of insight are lost", self._rows)
            self._give_up()

    def _give_up(self) -> None:
        self.dropped += self._rows
        self._columns = KnowledgeColumns()
        self._dataset.abandon()
        self._begin()

"""Portions -> files of a dataset, and rows of `quality` about events that were not recorded.

Duty: makes columns of packed rows, sorts and writes them. Files appear complete. Processes that write to one folder use
names with the number of their worker. Bounded by `writer.RUN_ROWS` rows per table in memory; the rest of a file's rows
is on the disk. The owner decides when to write a file, and on which thread; only `Quality` has a lock.
"""

import os
import time
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from kproxy import __version__
from kproxy.tables import schema, writer
from kproxy.tables.arrays import batch
from kproxy.tables.live.claim import claim
from kproxy.tables.live.portions import Batches
from kproxy.tables.names import Names
from kproxy.tables.schema import Table

ROLL_ROWS = 128 * 1024  # of any table
ROLL_S = 60.0
EMPTY = "empty.parquet"  # without rows, so that engines read a table before its first row; retention keeps it

_DROPPED = "events that are in no table: the recorder fell behind, or the disk failed"
_FAULT = "bytes of a Kafka connection that are not what the protocol says"


class Quality:
    """Counts of events that were not recorded, or are faulty; used by the relay's and the recorder's thread."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}  # events that are in no table, by source; only grows
        self._lock = Lock()
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}  # since the last file

    def drop(self, source: str, events: int, kind: str = "recorder_dropped", sentence: str = _DROPPED) -> None:
        now_ns = time.time_ns()
        with self._lock:
            self.dropped[source] = self.dropped.get(source, 0) + events
        self.note(source, kind, now_ns, sentence, events)

    def note(self, source: str, kind: str, now_ns: int, sentence: str, count: int = 1) -> None:
        row = {"source": source, "kind": kind, "count": count, "first_ns": now_ns, "last_ns": now_ns}
        self.add([row | {"sentence": sentence}])

    def add(self, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            for row in rows:
                known = self._rows.setdefault((row["source"], row["kind"]), row)
                if known is not row:
                    known["count"] += row["count"]
                    if row.get("bytes") is not None:
                        known["bytes"] = (known.get("bytes") or 0) + row["bytes"]
                    known["first_ns"] = min(known["first_ns"], row["first_ns"])
                    known["last_ns"] = max(known["last_ns"], row["last_ns"])

    def take(self) -> list[dict[str, Any]]:
        """Return and remove the rows; the caller passes them to `add` again if it cannot write them."""
        with self._lock:
            rows, self._rows = list(self._rows.values()), {}
        return rows


class Files:
    """Sorts rows and writes them as files; all on one thread."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], quality: Quality, worker: int | None, *, beside: bool = False
    ) -> None:
        self.exchanges = 0  # in files
        self._worker = worker
        self._beside = beside
        self._work_name = "record" if worker is None else f"record-{worker}"
        self._dataset = writer.Dataset(folder)
        self._settings = settings
        self._quality = quality
        self._claim: int | None = None  # a descriptor of the folder, locked
        now_ns = time.time_ns()
        begun = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 10**9))
        self._name = f"{begun}.{now_ns % 10**9:09}Z"  # prefix of this run's file names; a number follows
        if worker is not None:
            self._name += f"-worker-{worker}"
        self._number = 0
        self._sources: set[str] = set()
        self._names = Names()
        self._clear()

    def _clear(self) -> None:
        """Begin new files."""
        self._told: list[dict[str, Any]] = []  # rows of `quality` in these files
        self._work: Path | None = None  # working folder, created for the first row
        self._sorters: dict[str, writer.Sorter] = {}
        self._begun_s = time.monotonic()
        self._counts: dict[str, int] = {}  # rows, by table
        self._events: dict[str, int] = {}  # by source

    def claim(self) -> None:
        if self._worker is None:  # the parent locks it for all workers
            self._claim = claim(self._dataset.folder, beside=self._beside)
        work = self._dataset.begin_beside(self._work_name)  # removes files of a killed run
        files = {}
        for name, table in schema.BY_NAME.items():
            if name != schema.RECORDS.name and not (self._dataset.folder / name).exists():
                files[f"{name}/{EMPTY}"] = work / f"{name}.parquet"
                writer.write(table, [], files[f"{name}/{EMPTY}"])
        self._dataset.publish(files, self._manifest())

    def release(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    @property
    def due(self) -> bool:
        return time.monotonic() - self._begun_s >= ROLL_S

    @property
    def full(self) -> bool:
        return max(self._counts.values(), default=0) >= ROLL_ROWS

    def add(self, rows: Batches) -> None:
        for source, events in rows.events.items():
            self._events[source] = self._events.get(source, 0) + events
        for source, now_ns in rows.faults:
            self._quality.note(source, "fault", now_ns, _FAULT)
        self._names.add(rows.names)
        for name, of_table in rows.batches:
            self._sort(schema.TABLES[name], of_table)

    def _sort(self, table: Table, batch: pa.RecordBatch) -> None:
        if self._work is None:
            work = self._work = self._dataset.begin_beside(self._work_name)
            self._sorters = {name: writer.Sorter(each, work) for name, each in schema.TABLES.items()}
        self._sorters[table.name].add(batch)
        self._counts[table.name] = self._counts.get(table.name, 0) + batch.num_rows

    def roll(self) -> None:
        """Write files of all rows, if there are any."""
        self._told = self._quality.take()
        if self._told:
            self._sort(schema.QUALITY, batch(schema.QUALITY.schema, self._told))
        if self._work is None:
            self._clear()
            return
        files = {}
        for name, sorter in self._sorters.items():
            sorter.spill()
            if sorter.runs:
                path = self._work / f"{name}.parquet"
                writer.write(schema.TABLES[name], sorter.runs, path, self._names.fill)
                files[f"{name}/{self._name}-{self._number:06}.parquet"] = path
        self._sources |= self._events.keys()
        self._dataset.publish(files, self._manifest())
        self._number += 1
        self.exchanges += self._counts.get(schema.EXCHANGES.name, 0)
        self._clear()

    def give_up(self) -> int:
        """Drop the rows that are in no file; returns the number of their events."""
        self._quality.add(self._told)
        for source, events in self._events.items():
            self._quality.drop(source, events)
        lost = sum(self._events.values())
        self._clear()
        self._dataset.abandon()
        return lost

    def _manifest(self) -> dict[str, Any]:
        return {
            "kproxy": __version__,
            "pyarrow": pa.__version__,
            "settings": self._settings,
            "sources": {source: [] for source in sorted(self._sources)},
        }

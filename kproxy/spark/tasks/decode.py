"""The decoding task: captures, or the packets of whole connections -> rows of the tables, as pieces.

Duty: `whole` reads some captures from front to end, each once. None of their connections continues in another task, so
their rows are final. `decode` takes rows of `places`, sorted by capture, by connection and by their order in the
capture; `convert.parts.deferred` decodes them.

Memory: one capture's open connections, or the memory of `deferred`; RUN_ROWS rows per table. `pipeline` assigns
captures and connections to tasks.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from kproxy.capture.quality import Quality
from kproxy.convert import machine
from kproxy.convert.job import Job
from kproxy.convert.parts.deferred import Deferred
from kproxy.convert.parts.places import PLACE
from kproxy.convert.rows import Rows
from kproxy.errors import CaptureError
from kproxy.spark.tasks import pieces
from kproxy.spark.tasks.places import EXCERPTS, listed, named_conflicting
from kproxy.spark.tasks.sorters import Sorters
from kproxy.tables import arrays, schema


def whole(unit: Sequence[tuple[int, Job]]) -> Iterator[pa.RecordBatch]:
    """Yield the pieces of some captures. An unreadable capture yields its error and no rows."""
    machine.retain()
    with TemporaryDirectory(prefix="kproxy-") as place, machine.seldom_collected():
        folder = Path(place)
        together = Sorters(unit[0][1], folder, ".all")
        for number, job in unit:
            mine = Sorters(job, folder, f".{number}")
            quality = Quality()
            rows = Rows(mine.add, job.records, keeps=job.is_known)
            try:
                for _ in rows.read(job, quality):
                    pass
            except CaptureError as fault:
                yield pieces.failed(number, fault)
                mine.remove()
                continue
            for table, parts in mine.tables():
                for part in parts:
                    filled = rows.names.fill(part)
                    if table is schema.RECORDS and job.records is not None:
                        filled = job.records.of(filled)
                    for batch in filled.to_batches():
                        together.add(table, batch)
            together.feed(mine)
            mine.remove()
            yield pieces.words(number, pieces.COUNTS, [job.source, listed(quality)])
            if rows.names:
                yield pieces.words(number, pieces.NAMES, [job.source, rows.names.as_json()])
        yield from together.pieces()


def decode(jobs: Mapping[int, Job]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function from rows of `places` to pieces. jobs: the captures that several tasks read, by number."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        machine.retain()
        with TemporaryDirectory(prefix="kproxy-") as folder, machine.seldom_collected():
            decoder = _Decoder(jobs, Path(folder))
            for batch in batches:
                decoder.take(batch)
            yield from decoder.finish()

    return run


class _Decoder:
    """Decodes one connection at a time. The packets are sorted by capture, connection and order in the capture."""

    def __init__(self, jobs: Mapping[int, Job], folder: Path) -> None:
        self._jobs = jobs
        self._sorters = Sorters(next(iter(jobs.values())), folder, "")
        self._deferred: dict[int, Deferred] = {}  # by capture
        self._capture = -1
        self._connection: int | None = None

    def take(self, batch: pa.RecordBatch) -> None:
        numbers = [batch.column(name).to_pylist() for name in ("capture", "connection", "part", "file")]
        for index, (capture, connection, part, file) in enumerate(zip(*numbers, strict=True)):
            if capture != self._capture:
                self._finish()
                self._deferred[capture] = Deferred(self._jobs[capture], self._sorters.add)
            deferred = self._deferred[capture]
            if (capture, connection) != (self._capture, self._connection):
                deferred.begin(())
                self._capture, self._connection = capture, connection
            packets, inline = batch.column("packets")[index], batch.column("bytes")[index]
            if file == EXCERPTS:
                deferred.say(pickle.loads(packets.as_py()))
            else:
                places = np.frombuffer(packets.as_buffer(), PLACE).copy()
                deferred.take(part // 2, part % 2, file, places, inline.as_py())

    def finish(self) -> Iterator[pa.RecordBatch]:
        """End the last connection; yield all rows, and the counts of the connections."""
        self._finish()
        for capture, deferred in self._deferred.items():
            yield pieces.words(capture, pieces.READ, deferred.read_bytes)
            if deferred.unsplittable:
                yield pieces.words(capture, pieces.UNSPLITTABLE, deferred.unsplittable)
            if deferred.conflicting:
                yield pieces.words(capture, pieces.CONFLICTING, named_conflicting(deferred.conflicting))
            if deferred.corrections:
                yield pieces.words(
                    capture, pieces.CORRECTIONS, [astuple(correction) for correction in deferred.corrections]
                )
            rows = deferred.rows
            if rows.names:
                yield pieces.words(capture, pieces.NAMES, [self._jobs[capture].source, rows.names.as_json()])
            if rows.logs is not None and (rows.logs.decided or rows.logs.doubted):
                logs = [list(rows.logs.decided.items()), sorted(rows.logs.doubted)]
                yield pieces.words(capture, pieces.LOGS, logs)
            yield pieces.words(capture, pieces.COUNTS, [self._jobs[capture].source, listed(deferred.quality)])
        yield from self._sorters.pieces()

    def _finish(self) -> None:
        """End the last connection of the current capture."""
        if self._capture in self._deferred:
            deferred = self._deferred[self._capture]
            deferred.finish()
            if deferred.connections:
                self._sorters.add(schema.CONNECTIONS, arrays.batch(schema.CONNECTIONS.schema, deferred.connections))
                deferred.connections.clear()

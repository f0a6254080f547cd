"""Live events -> files of a dataset, on a thread of its own: what `--record` does.

Duty: take what sessions tell without keeping a relay waiting, and make of it the tables that captures become. A relay
only appends to a queue; where the queue is full its events are dropped, counted, and told in `quality`. The thread
turns events into rows a few at a time and lets go of the interpreter in between; sorting, compressing and syncing need
no interpreter. Files appear whole, after ROLL_S or ROLL_ROWS: a killed kproxy loses what no file has yet, nothing else.

Bounded by: QUEUE_BYTES of events that wait (as estimated here), `writer.RUN_ROWS` rows per table in memory, the rest of
a file's rows on the disk, and ROLL_ROWS rows of one table while its file is written. The disk is its owner's: nothing
here removes old files. Refuses to know sockets, and what a proxy is.
"""

import fcntl
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Event as Signal
from threading import Lock, Thread
from typing import Any

import pyarrow as pa

from kproxy import __version__
from kproxy.errors import KproxyError
from kproxy.tables import schema, writer
from kproxy.tables.columns import ExchangeColumns
from kproxy.tables.partitions import BatchColumns, PartitionColumns, Positions, TopicNames
from kproxy.tables.schema import Table
from kproxy.wire.bodies import Found
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import (
    BROKER,
    CLIENT,
    NONE,
    REQUEST_NOT_SEEN,
    ClientNamed,
    Closed,
    Desync,
    Event,
    Exchange,
    Unanswered,
)
from kproxy.wire.interest import DESCRIBE_TOPIC_PARTITIONS, METADATA

QUEUE_BYTES = 64 << 20
ROLL_ROWS = 128 * 1024  # of any table
ROLL_S = 60.0

# What waits, as CPython keeps it, rounded up; texts come on top.
_EVENT_BYTES = 1000
_PARTITION_BYTES = 800
_BATCH_BYTES = 800

# The thread competes with the relays for the interpreter: it works for about a tenth of a millisecond, then lets go.
_TURN_EVENTS = 32
_PAUSE_S = 0.0005
_SWITCH_S = 0.0002  # how long one thread may keep the interpreter from another that asks
_IDLE_S = 0.05
_BATCH_ROWS = 4 * 1024

_DROPPED = "events that are in no table: the recorder fell behind, or the disk failed"
_FAULT = "bytes of a Kafka connection that are not what the protocol says"

log = logging.getLogger("kproxy.recorder")


class Recorder:
    """A sink that writes tables; `close` writes what still waits."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`settings`: what the dataset says of how it was made."""
        self.folder = folder
        self._quality = _Quality()
        self._files = _Files(folder, settings, self._quality)
        self._thread = Thread(target=self._run, name="recorder", daemon=True)
        self._stopping = Signal()
        self._queue: deque[tuple[_Tally, list[Event], int]] = deque()
        self._put_bytes = 0  # written by the loop's thread only, and
        self._taken_bytes = 0  # by the recorder's
        self._behind = False

    @property
    def dropped(self) -> dict[str, int]:
        """Events that are in no table, by source."""
        return self._quality.dropped

    def start(self) -> None:
        """Claim the folder; KproxyError where it cannot be written to, or another kproxy writes to it."""
        self._files.claim()
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._thread.start()
        log.info("recording into %s", self.folder)

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        tally = _Tally(info)
        queue = self._queue
        self.dropped.setdefault(info.source, 0)

        def take(events: list[Event]) -> None:
            size = _weight(events)
            if self._put_bytes - self._taken_bytes + size > QUEUE_BYTES:
                self._overrun(info.source, len(events))
                return
            self._put_bytes += size
            queue.append((tally, events.copy(), size))

        return take

    def close(self) -> None:
        """Write everything that was told so far. Blocks for as long as that takes."""
        if self._thread.is_alive():
            self._stopping.set()
            self._thread.join()
            lost = sum(self.dropped.values())
            log.info("recorded %d exchanges into %s; %d events dropped", self._files.exchanges, self.folder, lost)
        self._files.release()

    def _overrun(self, source: str, events: int) -> None:
        self._quality.drop(source, events)
        if not self._behind:  # one line per burst
            self._behind = True
            log.warning("recording falls behind: events are dropped, and kproxy_recorder_dropped_total counts them")

    # --- the recorder's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(_IDLE_S)  # looked at before the queue is, so that the last look sees all
            self._take_all(stopping)
        self._guarded(self._files.roll)

    def _take_all(self, stopping: bool) -> None:
        """What waits now; what comes meanwhile waits for the next time, since each turn costs the relay a little."""
        queue, files = self._queue, self._files
        left = len(queue)
        while left:
            events = 0
            while left and events < _TURN_EVENTS:
                tally, told, size = queue.popleft()
                self._guarded(files.add, tally, told)
                self._taken_bytes += size
                events += len(told)
                left -= 1
            if not stopping:
                time.sleep(_PAUSE_S)
            self._guarded(files.flush)
        self._behind = False
        self._guarded(files.flush)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """What fails costs the rows that are in no file yet; the proxy goes on, and so does the next file."""
        try:
            work(*arguments)
        except (OSError, KproxyError) as fault:
            log.error("%d events are lost: %s", self._files.give_up(), fault)
        except Exception:
            log.exception("a defect of kproxy's recorder: %d events are lost", self._files.give_up())


class _Quality:
    """What could not be recorded as it should have been, counted by both threads."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}  # events that are in no table, by source; only grows
        self._lock = Lock()
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}  # since the last file

    def drop(self, source: str, events: int) -> None:
        now_ns = time.time_ns()
        with self._lock:
            self.dropped[source] = self.dropped.get(source, 0) + events
        self.note(source, "recorder_dropped", now_ns, _DROPPED, events)

    def note(self, source: str, kind: str, now_ns: int, sentence: str, count: int = 1) -> None:
        row = {"source": source, "kind": kind, "count": count, "first_ns": now_ns, "last_ns": now_ns}
        self.add([row | {"sentence": sentence}])

    def add(self, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            for row in rows:
                known = self._rows.setdefault((row["source"], row["kind"]), row)
                if known is not row:
                    known["count"] += row["count"]
                    known["first_ns"] = min(known["first_ns"], row["first_ns"])
                    known["last_ns"] = max(known["last_ns"], row["last_ns"])

    def take(self) -> list[dict[str, Any]]:
        """The rows since the last time; whoever fails to write them gives them back."""
        with self._lock:
            rows, self._rows = list(self._rows.values()), {}
        return rows


class _Files:
    """Rows, and the files that they become; all of it on one thread."""

    def __init__(self, folder: Path, settings: dict[str, Any], quality: _Quality) -> None:
        self.exchanges = 0  # in files
        self._dataset = writer.Dataset(folder)
        self._settings = settings
        self._quality = quality
        self._claim: int | None = None  # a descriptor of the folder, locked
        now_ns = time.time_ns()
        begun = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 10**9))
        self._name = f"{begun}.{now_ns % 10**9:09}Z"  # of this run's files, with their number
        self._number = 0
        self._sources: set[str] = set()
        self._names = TopicNames()
        self._clear()

    def _clear(self) -> None:
        """Begin new files."""
        self._exchanges = ExchangeColumns()
        self._partitions = PartitionColumns()
        self._batches = BatchColumns()
        self._connections: list[dict[str, Any]] = []
        self._told: list[dict[str, Any]] = []  # of quality
        self._work: Path | None = None  # where the files are made, once there are rows for them
        self._sorters: dict[str, writer.Sorter] = {}
        self._since: float | None = None  # monotonic, of the first event
        self._counts: dict[str, int] = {}  # rows handed to the sorters, by table
        self._events: dict[str, int] = {}  # by source

    def claim(self) -> None:
        folder = self._dataset.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim = os.open(folder, os.O_RDONLY)
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KproxyError(f"{folder}: another kproxy records into it; give each a folder of its own") from None
        except OSError as fault:
            raise KproxyError(f"{folder}: cannot be written to: {fault.strerror or fault}") from None
        self._dataset.begin("record")  # sweeps away what a killed run left
        self._dataset.publish({}, self._manifest())

    def release(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def add(self, tally: "_Tally", events: list[Event]) -> None:
        if self._since is None:
            self._since = time.monotonic()
        source = tally.info.source
        self._events[source] = self._events.get(source, 0) + len(events)
        for event in events:
            if isinstance(event, Exchange):
                self._exchange(tally, event)
            elif isinstance(event, Unanswered):
                self._exchange(tally, event.exchange)
            elif isinstance(event, Desync):
                tally.faults += 1
                self._quality.note(source, "fault", event.now_ns, _FAULT)
            elif isinstance(event, Closed):
                self._connections.append(tally.row(event))

    def _exchange(self, tally: "_Tally", exchange: Exchange) -> None:
        tally.count(exchange)
        self._exchanges.append(tally.info, exchange)
        if exchange.request_body is not None or exchange.response_body is not None:
            self._partitions.append(tally.info, exchange, tally.positions)
            self._batches.append(tally.info, exchange)
            if exchange.plan.api_key in (METADATA, DESCRIBE_TOPIC_PARTITIONS):
                self._names.learn(exchange.response_body)

    def flush(self) -> None:
        """Hand full batches of rows on, and write the files if it is time."""
        self._sort(_BATCH_ROWS)
        late = self._since is not None and time.monotonic() - self._since >= ROLL_S
        if late or max(self._counts.values(), default=0) >= ROLL_ROWS:
            self.roll()

    def _sort(self, least: int) -> None:
        for table, columns in (
            (schema.EXCHANGES, self._exchanges),
            (schema.PARTITIONS, self._partitions),
            (schema.BATCHES, self._batches),
        ):
            if columns.rows >= least:
                self._to_sorter(table, columns.batch())
        if len(self._connections) >= least:
            rows, self._connections = self._connections, []
            self._to_sorter(schema.CONNECTIONS, pa.RecordBatch.from_pylist(rows, schema.CONNECTIONS.schema))

    def _to_sorter(self, table: Table, batch: pa.RecordBatch) -> None:
        if self._work is None:
            work = self._work = self._dataset.begin("record")
            self._sorters = {name: writer.Sorter(each, work) for name, each in schema.TABLES.items()}
        self._sorters[table.name].add(batch)
        self._counts[table.name] = self._counts.get(table.name, 0) + batch.num_rows

    def roll(self) -> None:
        """Make files of all rows so far."""
        self._sort(1)
        self._told += self._quality.take()
        if self._told:
            self._to_sorter(schema.QUALITY, pa.RecordBatch.from_pylist(self._told, schema.QUALITY.schema))
        if self._work is None:
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
        """Forget the rows that are in no file; returns how many events they were."""
        self._quality.add(self._told)
        for source, events in self._events.items():
            self._quality.drop(source, events)
        lost = sum(self._events.values())
        self._clear()
        self._dataset.abandon()
        return lost

    def _manifest(self) -> dict[str, Any]:
        """Earlier recordings and conversions into the folder stay named."""
        try:
            before = json.loads((self._dataset.folder / writer.MANIFEST).read_text())["sources"]
        except (OSError, ValueError, KeyError):
            before = {}
        return {
            "kproxy": __version__,
            "pyarrow": pa.__version__,
            "settings": self._settings,
            "sources": before | {source: before.get(source, []) for source in sorted(self._sources)},
        }


class _Tally:
    """One connection: what its own row counts, and how far its consumer has come."""

    def __init__(self, info: ConnectionInfo) -> None:
        self.info = info
        self.positions: Positions = {}
        self.faults = 0
        self._requests = 0
        self._answers = 0

    def count(self, exchange: Exchange) -> None:
        self._requests += exchange.outcome is not REQUEST_NOT_SEEN
        self._answers += exchange.response_end != NONE

    def row(self, closed: Closed) -> dict[str, Any]:
        """What TCP does is not seen from here; those columns are null."""
        info = self.info
        software_name, software_version = closed.software or (None, None)
        return {
            "source": info.source,
            "cluster": info.cluster,
            "connection": info.id,
            "time": info.opened_ns // 1000,
            "start_ns": info.opened_ns,
            "end_ns": closed.now_ns,
            "client_address": info.client_address,
            "client_port": info.client_port,
            "broker_address": info.broker_address,
            "broker_port": info.broker_port,
            "broker_id": info.broker_id,
            "requests": self._requests,
            "answers": self._answers,
            "client_bytes": closed.received_bytes[CLIENT],
            "broker_bytes": closed.received_bytes[BROKER],
            "software_name": software_name,
            "software_version": software_version,
            "sasl_mechanism": closed.sasl_mechanism,
            "sasl_tokens": closed.sasl_tokens,
            "tls": "plain",
            "start_seen": True,
            "end_seen": True,
            "close": _close(closed.cause),
            "gaps": 0,
            "gap_bytes": 0,
            "resyncs": 0,
            "faults": self.faults,
        }


def _close(cause: str) -> str:
    """As captures tell it, where they could: an end of ours (a drain, a fault) has our name."""
    return {"closed": "fin", "reset": "reset"}.get(cause.partition("_")[2], cause)


def _weight(events: list[Event]) -> int:
    """About how much memory events hold. On the relay's path: kept short."""
    size = 0
    for event in events:
        exchange = event.exchange if isinstance(event, Unanswered) else event
        size += _EVENT_BYTES
        if isinstance(exchange, Exchange):
            size += len(exchange.client_id or "") + len(exchange.group_id or "") + len(exchange.transactional_id or "")
            size += len(exchange.errors) * 8
            if exchange.request_body is not None:
                size += _weight_of(exchange.request_body)
            if exchange.response_body is not None:
                size += _weight_of(exchange.response_body)
        elif isinstance(event, ClientNamed):
            size += len(event.client_id or "") + len(event.name) + len(event.version)
        elif isinstance(event, Closed) and event.software:
            size += sum(map(len, event.software))
    return size


def _weight_of(body: Found) -> int:
    size = len(body.partitions) * _PARTITION_BYTES + len(body.batches) * _BATCH_BYTES
    for partition in body.partitions:
        size += len(partition.topic or "") + len(partition.group_id or "") + len(partition.metadata or "")
    return size

"""Live events -> files of a dataset: what `--record` does.

Duty: record the events of sessions, as the tables that captures become. A relay packs what its events say into rows:
that costs it hardly more than to keep them, and far less than two threads that take turns at Python. The rest,
columns, sorting, compressing and syncing, is a thread's, and nearly all of it outside the interpreter. Where the
thread falls behind, events are dropped, counted, and reported in `quality`. Files appear whole, after ROLL_S or
ROLL_ROWS: a killed kproxy loses what no file has yet, and nothing else.

Bounded by: QUEUE_BYTES of packed rows that wait, `writer.RUN_ROWS` rows per table in memory, the rest of a file's rows
on the disk, and ROLL_ROWS rows of one table while its file is written; where bodies are read, `names.MAX_NAMES`
topics, and `partitions.MAX_POSITIONS` partitions per connection. The disk is its owner's: nothing here removes old
files. Refuses to know sockets, and what a proxy is.
"""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event as Signal
from threading import Lock, Thread
from traceback import extract_tb
from typing import Any, Protocol

import pyarrow as pa

from kproxy import __version__
from kproxy.errors import KproxyError
from kproxy.tables import schema, writer
from kproxy.tables.arrays import batch
from kproxy.tables.claim import claim
from kproxy.tables.columns import ExchangeColumns
from kproxy.tables.knowledge import KnowledgeColumns
from kproxy.tables.names import Names
from kproxy.tables.partitions import BatchColumns, PartitionColumns, Positions
from kproxy.tables.schema import Table
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import (
    BROKER,
    CLIENT,
    NONE,
    REQUEST_NOT_SEEN,
    Closed,
    Desync,
    Event,
    Exchange,
    Unanswered,
)

QUEUE_BYTES = 64 << 20
ROLL_ROWS = 128 * 1024  # of any table
ROLL_S = 60.0

# The thread works in portions, so that a relay never waits long for the interpreter.
PORTION_ROWS = 4 * 1024
PORTION_BYTES = 4 << 20
_IDLE_S = 0.05
_SWITCH_S = 0.0002  # how long one thread may keep the interpreter from another that asks

_KNOWN_BYTES = 2000  # of a row of insight, beside its texts, about
_CONNECTION_BYTES = 2000  # of a row that is not packed, about
_NAME_BYTES = 300  # of a topic

_DEFECT_KINDS = 32  # what is counted apart; the rest together
_REPORT_S = 60.0  # between two lines about one kind of failure

_DROPPED = "events that are in no table: the recorder fell behind, or the disk failed"
_FAILED = "events that are in no table: kproxy could not make rows of them; its log names each kind of failure"
_FAULT = "bytes of a Kafka connection that are not what the protocol says"

log = logging.getLogger("kproxy.recorder")


class Recorder:
    """A sink that writes tables; `close` writes what still waits."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, worker: int | None = None) -> None:
        """`settings`: what the dataset says of how it was made; `worker`: one of several that write to the folder."""
        self.folder = folder
        self._quality = _Quality()
        self._files = _Files(folder, settings, self._quality, worker)
        self._thread = Thread(target=self._run, name="recorder", daemon=True)
        self._stopping = Signal()
        self._lock = Lock()  # of the following
        self._open: _Portion | None = _Portion()  # None: there is no room
        self._waiting: deque[_Portion] = deque()
        self._waiting_bytes = 0
        self._defects = _Defects()

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

    def note(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows of `quality` that somebody else has counted; those of one source and kind are added up."""
        self._quality.add([dict(row) for row in rows])

    def connected(self, info: ConnectionInfo, tcp: "Tcp | None" = None) -> Callable[[list[Event]], None]:
        """tcp: what is seen of the connection's TCP, where kproxy is not an end of it."""
        tally = _Tally(info, tcp)
        lock = self._lock
        self.dropped.setdefault(info.source, 0)

        def take(events: list[Event]) -> None:
            with lock:
                portion = self._open
                if portion is None:
                    self._quality.drop(info.source, len(events))
                    return
                for fault in portion.add(tally, events):  # a defect of ours must not cost a connection
                    self._quality.drop(info.source, 1, "recorder_failed", _FAILED)
                    self._defects.note(fault)
                if portion.full:
                    self._hand_over(portion)

        return take

    def rows(self, source: str) -> Callable[[str, Sequence[Any]], None]:
        """What takes rows of insight, which are tuples with a table's columns, by the name of their table."""
        self.dropped.setdefault(source, 0)

        def take(table: str, rows: Sequence[Any]) -> None:
            with self._lock:
                portion = self._open
                if portion is None:
                    self._quality.drop(source, len(rows))
                    return
                portion.know(source, table, rows)
                if portion.full:
                    self._hand_over(portion)

        return take

    def close(self) -> None:
        """Write every event so far. Blocks for as long as that takes."""
        if self._thread.is_alive():
            self._stopping.set()
            self._thread.join()
            lost = sum(self.dropped.values())
            log.info("recorded %d exchanges into %s; %d events dropped", self._files.exchanges, self.folder, lost)
            self._defects.report()
        self._files.release()

    def _hand_over(self, portion: "_Portion") -> None:
        self._waiting.append(portion)
        self._waiting_bytes += portion.size
        self._open = _Portion() if self._waiting_bytes < QUEUE_BYTES else None
        if self._open is None:  # one line per burst
            log.warning("recording falls behind: events are dropped, and kproxy_recorder_dropped_total counts them")

    # --- the recorder's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        files = self._files
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(_IDLE_S)  # looked at before the rows are, so that the last look sees all
            if stopping or files.due:
                with self._lock:
                    if self._open is not None and self._open.events:
                        self._hand_over(self._open)
            while self._waiting:
                self._take(self._waiting.popleft())
            if files.due:
                self._guarded(files.roll)
        self._guarded(files.roll)

    def _take(self, portion: "_Portion") -> None:
        size = portion.size
        self._guarded(self._files.add, portion)
        with self._lock:
            self._waiting_bytes -= size
            if self._open is None and not self._waiting:
                self._open = _Portion()
        if self._files.full:
            self._guarded(self._files.roll)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """What fails costs the rows that are in no file yet; the proxy goes on, and so does the next file."""
        try:
            work(*arguments)
        except (OSError, KproxyError) as fault:
            log.error("%d events are lost: %s", self._files.give_up(), fault)
        except Exception:
            log.exception("a defect of kproxy's recorder: %d events are lost", self._files.give_up())


class Tcp(Protocol):
    """What packets show of a connection."""

    def columns(self) -> dict[str, Any]:
        """Of its row of `connections`, when it has ended."""
        ...

    def sent_again(self, exchange: Exchange) -> int:
        """Segments that were sent again during an exchange."""
        ...


class _Portion:
    """Packed rows of all tables, as their events come."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}  # by source
        self.exchanges = ExchangeColumns()
        self.partitions = PartitionColumns()
        self.batches = BatchColumns()
        self.connections: list[dict[str, Any]] = []
        self.faults: list[tuple[str, int]] = []  # source and time
        self.names = Names()
        self.knowledge = KnowledgeColumns()
        self._known_bytes = 0

    def know(self, source: str, table: str, rows: Sequence[Any]) -> None:
        """Rows of insight."""
        for row in rows:
            self.knowledge.append(table, source, row)
            self._known_bytes += _KNOWN_BYTES + sum(len(value) for value in row if isinstance(value, str))
        self.events[source] = self.events.get(source, 0) + len(rows)

    @property
    def size(self) -> int:
        """Bytes, about."""
        packed = self.exchanges.size + self.partitions.size + self.batches.size
        names = len(self.names) * _NAME_BYTES
        return packed + len(self.connections) * _CONNECTION_BYTES + names + self._known_bytes

    @property
    def full(self) -> bool:
        rows = self.exchanges.rows + self.partitions.rows + self.batches.rows + self.knowledge.rows
        return rows >= PORTION_ROWS or self.size >= PORTION_BYTES

    def add(self, tally: "_Tally", events: list[Event]) -> list[Exception]:
        """Pack events, each whole or not at all; returns what went wrong, one exception per event that is left out."""
        source = tally.info.source
        failures: list[Exception] = []
        for event in events:
            try:
                if isinstance(event, Exchange):
                    self._exchange(tally, event)
                elif isinstance(event, Unanswered):
                    self._exchange(tally, event.exchange)
                elif isinstance(event, Desync):
                    tally.faults += 1
                    self.faults.append((source, event.now_ns))
                elif isinstance(event, Closed):
                    self.connections.append(tally.row(event))
            except Exception as fault:
                failures.append(fault)
        self.events[source] = self.events.get(source, 0) + len(events) - len(failures)
        return failures

    def _exchange(self, tally: "_Tally", exchange: Exchange) -> None:
        if exchange.request_body is not None or exchange.response_body is not None:
            before = self.partitions.mark(), self.batches.mark()
            try:
                self.partitions.append(tally.info, exchange, tally.positions)
                self.batches.append(tally.info, exchange)
                self.names.learn(exchange.response_body)
                self._row(tally, exchange)
            except Exception:
                self.partitions.rewind(before[0])
                self.batches.rewind(before[1])
                raise
        else:
            self._row(tally, exchange)  # one row: whole or not at all
        tally.count(exchange)

    def _row(self, tally: "_Tally", exchange: Exchange) -> None:
        if tally.tcp is None:
            self.exchanges.append(tally.info, exchange)
        else:
            self.exchanges.append(tally.info, exchange, tally.tcp.sent_again(exchange))


class _Defects:
    """Counts events that kproxy failed to pack, by what went wrong and where, and logs each kind.

    The first of a kind is logged with its traceback, later ones as a count, one line per _REPORT_S. _DEFECT_KINDS kinds
    are told apart.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, list[float]] = {}  # [events, events at the last line, time of the last line]

    def note(self, fault: Exception) -> None:
        last = extract_tb(fault.__traceback__)[-1]
        kind = f"{type(fault).__name__} in {last.name}, line {last.lineno}"
        if kind not in self._kinds and len(self._kinds) >= _DEFECT_KINDS:
            kind = "other failures"
        now_s = time.monotonic()
        known = self._kinds.setdefault(kind, [0, 0, now_s - _REPORT_S])
        known[0] += 1
        if known[0] == 1:
            said = "a defect of kproxy's recorder, %s: this event is in no table, nor any like it"
            log.error(said, kind, exc_info=fault)
        elif now_s - known[2] >= _REPORT_S:
            log.error("a defect of kproxy's recorder, %s: %d events so far are in no table", kind, known[0])
        else:
            return
        known[1:] = known[0], now_s

    def report(self) -> None:
        """Log the totals that no line has said yet."""
        for kind, (events, reported, _) in self._kinds.items():
            if events > reported:
                log.error("a defect of kproxy's recorder, %s: %d events in all are in no table", kind, events)


class _Quality:
    """What could not be recorded as it should have been, counted by both threads."""

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
        """The rows since the last time; whoever fails to write them gives them back."""
        with self._lock:
            rows, self._rows = list(self._rows.values()), {}
        return rows


class _Files:
    """Rows, and the files that they become; all of it on one thread."""

    def __init__(self, folder: Path, settings: dict[str, Any], quality: _Quality, worker: int | None) -> None:
        self.exchanges = 0  # in files
        self._worker = worker
        self._work_name = "record" if worker is None else f"record-{worker}"
        self._dataset = writer.Dataset(folder)
        self._settings = settings
        self._quality = quality
        self._claim: int | None = None  # a descriptor of the folder, locked
        now_ns = time.time_ns()
        begun = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 10**9))
        self._name = f"{begun}.{now_ns % 10**9:09}Z"  # of this run's files, with their number
        if worker is not None:
            self._name += f"-worker-{worker}"
        self._number = 0
        self._sources: set[str] = set()
        self._names = Names()
        self._clear()

    def _clear(self) -> None:
        """Begin new files."""
        self._told: list[dict[str, Any]] = []  # of quality
        self._work: Path | None = None  # where the files are made, once there are rows for them
        self._sorters: dict[str, writer.Sorter] = {}
        self._begun_s = time.monotonic()
        self._counts: dict[str, int] = {}  # rows, by table
        self._events: dict[str, int] = {}  # by source

    def claim(self) -> None:
        if self._worker is None:  # else its parent has claimed it, for all workers
            self._claim = claim(self._dataset.folder)
        self._dataset.begin(self._work_name)  # sweeps away what a killed run left
        self._dataset.publish({}, self._manifest())

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

    def add(self, portion: _Portion) -> None:
        for source, events in portion.events.items():
            self._events[source] = self._events.get(source, 0) + events
        for source, now_ns in portion.faults:
            self._quality.note(source, "fault", now_ns, _FAULT)
        self._names.add(portion.names.told())
        for table, columns in (
            (schema.EXCHANGES, portion.exchanges),
            (schema.PARTITIONS, portion.partitions),
            (schema.BATCHES, portion.batches),
        ):
            if columns.rows:
                self._sort(table, columns.batch())
        for table, told in portion.knowledge.batches():
            self._sort(table, told)
        if portion.connections:
            self._sort(schema.CONNECTIONS, batch(schema.CONNECTIONS.schema, portion.connections))

    def _sort(self, table: Table, batch: pa.RecordBatch) -> None:
        if self._work is None:
            work = self._work = self._dataset.begin(self._work_name)
            self._sorters = {name: writer.Sorter(each, work) for name, each in schema.TABLES.items()}
        self._sorters[table.name].add(batch)
        self._counts[table.name] = self._counts.get(table.name, 0) + batch.num_rows

    def roll(self) -> None:
        """Make files of all rows so far, if there are any."""
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
        """Forget the rows that are in no file; returns how many events they were."""
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


class _Tally:
    """One connection: what its own row counts, and how far its consumer has come."""

    def __init__(self, info: ConnectionInfo, tcp: Tcp | None) -> None:
        self.info = info
        self.tcp = tcp
        self.positions: Positions = {}
        self.faults = 0
        self._requests = 0
        self._answers = 0

    def count(self, exchange: Exchange) -> None:
        self._requests += exchange.outcome is not REQUEST_NOT_SEEN
        self._answers += exchange.response_end != NONE

    def row(self, closed: Closed) -> dict[str, Any]:
        """What TCP does is not seen from a proxy; those columns are null."""
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
            **({} if self.tcp is None else self.tcp.columns()),
        }


def _close(cause: str) -> str:
    """How the connection ended, in the words of captures; an end of ours (a drain, a fault) has its own."""
    return {"closed": "fin", "reset": "reset"}.get(cause.partition("_")[2], cause)

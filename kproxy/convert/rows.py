"""The flows of captures -> rows of the tables: shared by `kproxy convert` and Spark.

Duty: reads captures, listens to their flows, and emits rows in batches. The input of insight becomes rows of a separate
table (`kept_frames`), since insight must read it in one order. Memory: MOST_ROWS rows per table, and BATCH_BYTES of
frames. Does not write files, or distribute flows among processes or machines.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kproxy.capture.columns.later import Later
from kproxy.capture.connections.flow import DISCARD, Flow, Handlers
from kproxy.capture.connections.flows import Flows
from kproxy.capture.connections.receivers import Kafka
from kproxy.capture.decrypt import decrypt
from kproxy.capture.dissection.keys import SHARDS
from kproxy.capture.dissection.uncut import uncut
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from kproxy.convert.job import Job
from kproxy.convert.kept_frames import BATCH_BYTES, KEPT_FRAMES, KeptFrameColumns
from kproxy.insight import registry
from kproxy.insight.knowledge import APIS, ONLY_FAILED
from kproxy.tables import schema, writer
from kproxy.tables.arrays import batch
from kproxy.tables.columns import ExchangeColumns
from kproxy.tables.knowledge import KnowledgeColumns
from kproxy.tables.names import Names
from kproxy.tables.partitions import BatchColumns, PartitionColumns, Positions
from kproxy.tables.records import Chosen, RecordColumns
from kproxy.tables.schema import Table
from kproxy.wire.bodies import RECORDS, Found, Logs
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import NONE, REQUEST_NOT_SEEN, Desync, Event, Exchange, Gap, Unanswered
from kproxy.wire.observing.kept import MAX_FRAME, Kept
from kproxy.wire.offline.bulk import Bulk
from kproxy.zookeeper.session import Event as ZooKeeperEvent

BATCH_ROWS = writer.RUN_ROWS  # one batch is one sorted run
DURATIONS = frozenset(  # of exchanges and connections
    (
        *("latency_ns", "queue_ns", "muted_ns", "total_ns", "sending_ns", "broker_ns", "receiving_ns"),
        *("loss_ns", "closed_window_ns", "handshake_rtt_ns"),
    )
)
MOST_ROWS = 2 * BATCH_ROWS  # limit within a window; at its end all APIs are at the same time, so runs hardly overlap
CONNECTION_ROWS = 1024  # these rows are dicts, which take ten times the memory
KEPT_BYTES = 16 << 20  # kept frames of pending requests, per shard
KEPT_FRAME_BYTES = MAX_FRAME


class Rows:
    """The rows of some flows; `add` receives them in batches of about BATCH_ROWS."""

    def __init__(
        self,
        add: Callable[[Table, pa.RecordBatch], None],
        chosen: Chosen | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """chosen: topics whose records become rows, too. keeps: the input of insight becomes rows of `KEPT_FRAMES`."""
        self.exchanges = ExchangeColumns()
        self.records = None if chosen is None else RecordColumns(chosen)
        self.partitions = PartitionColumns()
        self.batches = BatchColumns()
        self.names = Names()  # filled in when files are written
        self.kept_frames = KeptFrameColumns(self.names) if keeps else None
        self.logs = Logs() if keeps else None
        self._registry = KnowledgeColumns()
        self._kept: list[Kept] = []
        self._flows: Flows | None = None  # the latest result of `flows`
        self._add = add
        self._connection_rows: list[dict[str, Any]] = []
        self._tallies: dict[Flow, _Tally] = {}
        self.continued: list[Counted] = []  # ended connections that began with another reader

    def read(
        self,
        job: Job,
        quality: Quality,
        *,
        shards: Collection[int] = range(SHARDS),
        first: bool = True,
        follow: Callable[[], bool] | None = None,
    ) -> Iterator[Capture]:
        """Read a whole capture and decode its flows, or the flows of some shards; yields after each window.

        first: also count packets of no flow. follow: called at the end of a growing file; returns whether to go on.
        """
        capture = Capture(job.paths, quality if first else Quality(), follow=follow, storage=job.storage)
        flows = self.flows(job, quality, shards=shards, first=first)
        flows.keep_encrypted = job.key_log is not None
        for window in uncut(capture.windows()):
            flows.keep_encrypted |= bool(capture.secrets)
            flows.window(window)
            self.flush(BATCH_ROWS)
            yield capture
        flows.finish()
        if flows.encrypted:
            decrypt(flows, job.paths, job.key_log, job.storage)
        self.flush(1)
        self.note(quality)

    def flows(
        self,
        job: Job,
        quality: Quality,
        *,
        shards: Collection[int] = range(SHARDS),
        first: bool = True,
        only: Collection[bytes] | None = None,
        apart: bool = False,
    ) -> Flows:
        """Return flows whose rows come here. only: keys of the connections to decode. apart: see `Flows`."""
        keeps = self.kept_frames is not None
        flows = Flows(
            job.source,
            quality,
            Handlers(self.decided, self.many, self.ended, self.zookeeper if keeps else None, self.unconnected),
            cluster=job.cluster,
            ports=job.ports,
            zookeeper_ports=job.zookeeper_ports,
            shards=shards,
            first=first,
            only=only,
            apart=apart,
            detail=job.detail if self.records is None else RECORDS,
            room=None if self.records is None else self.records.room,
            kept=_kept if keeps else None,
            logs=self.logs,
        )
        self._kept += flows.kept
        self._flows = flows
        return flows

    def note(self, quality: Quality) -> None:
        """Count chosen batches without rows, and frames for insight that were not kept."""
        for kept in self._kept:
            if count := sum(kept.left_out.values()):
                quality.note("not_kept", count=count)
                kept.left_out.update(dict.fromkeys(kept.left_out, 0))
        if self.records is not None:
            for kind, count, size in self.records.missing():
                quality.note(kind, count=count, size=size)

    def hand_on_records(self) -> None:
        assert self.records is not None
        self._add(schema.RECORDS, self.records.batch())

    def zookeeper(self, info: ConnectionInfo) -> Callable[[list[ZooKeeperEvent]], None]:
        """Return the listener of a ZooKeeper connection."""
        ends = registry.Ends(info.client_address, info.client_port, info.broker_address, info.broker_port, info.id)

        def listen(events: list[ZooKeeperEvent]) -> None:
            for event in events:
                for row in registry.rows(event, info.cluster, ends):
                    self._registry.append(schema.REGISTRY.name, info.source, row)
            if self._registry.rows >= CONNECTION_ROWS:
                self._flush_registry()

        return listen

    def logged(self, info: ConnectionInfo, exchange: Exchange, found: Found) -> None:
        """Take the batches of coordinators' logs in a response, and the names of topics, which identify these logs."""
        assert self.logs is not None and self.kept_frames is not None
        if found.names:
            self.logs.learn(found.names)
        if found.logged:
            self.kept_frames.append_logged(info, exchange, found.logged)
            found.logged = ()  # free the memory of the copies for the next ones
            if self.kept_frames.size >= BATCH_BYTES:
                self.flush(BATCH_ROWS)

    def decided(self, flow: Flow) -> "_Tally":
        tally = self._tallies[flow] = _Tally(flow, self)
        return tally

    def many(self, flows: Sequence[Flow], bulk: Bulk) -> None:
        """Take exchanges of some flows, all at once."""
        tallies = [self._tallies[flow] for flow in flows]
        infos = [tally.info for tally in tallies]
        counts = np.bincount(bulk.connection, minlength=len(flows))
        for tally, count in zip(tallies, counts.tolist(), strict=True):
            tally.requests += count
            tally.answers += count
        sent_again = np.zeros(len(bulk.connection), np.int64)
        for number, flow in enumerate(flows):
            if counts[number] and flow.talk.retransmitted_ns:
                mine = bulk.connection == number
                times = np.array(flow.talk.retransmitted_ns)
                sent_again[mine] = np.searchsorted(times, bulk.columns["response_end"][mine], "right")
                sent_again[mine] -= np.searchsorted(times, bulk.columns["request_start"][mine], "left")
        self.exchanges.extend(infos, bulk, sent_again, _stalled(flows, bulk))
        if bulk.request_body is not None or bulk.response_body is not None:
            self.partitions.extend(infos, bulk, [tally.positions for tally in tallies])
            self.batches.extend(infos, bulk)
        self.flush(MOST_ROWS)

    def ended(self, flow: Flow) -> None:
        counted = self.counted(flow)
        self.forget(flow)
        if flow.continues:
            self.continued.append(counted)
        else:
            self._connection_rows.append(counted.row())

    def unconnected(self, flow: Flow) -> None:
        self._connection_rows.append(Counted(flow, 0, 0, 0, 0).row())

    def counted(self, flow: Flow) -> "Counted":
        """Return the counts of a connection that ends here, or goes on with another reader."""
        return self._tallies[flow].counted()

    def positions(self, flow: Flow) -> Positions:
        """Return the positions of a connection's consumer."""
        return self._tallies[flow].positions

    def forget(self, flow: Flow) -> None:
        """Drop the state of a connection that ended, or that another reader goes on with."""
        del self._tallies[flow]

    def count_anew(self, flow: Flow, positions: Positions) -> None:
        """Reset the counts of a connection, which another reader reports; keep the positions of its consumer."""
        tally = self._tallies[flow]
        positions.update(tally.positions)
        fresh = self.decided(flow)
        fresh.positions = positions
        receiver = flow.talk.receiver
        kafka = receiver.talk if isinstance(receiver, Later) else receiver
        assert isinstance(kafka, Kafka)
        kafka.listener = fresh

    def flush(self, least: int) -> None:
        """Emit the rows of each table with at least `least` rows."""
        for table, columns in (
            (schema.EXCHANGES, self.exchanges),
            (schema.PARTITIONS, self.partitions),
            (schema.BATCHES, self.batches),
        ):
            if columns.rows >= least:
                self._add(table, self._with_times(columns.batch()))
        if self.records is not None and self.records.rows >= least:
            self.hand_on_records()
        if self.kept_frames is not None and (self.kept_frames.rows >= least or self.kept_frames.size >= BATCH_BYTES):
            self._add(KEPT_FRAMES, self.kept_frames.batch())
        if self._registry.rows >= min(least, CONNECTION_ROWS):
            self._flush_registry()
        if len(self._connection_rows) >= min(least, CONNECTION_ROWS):
            connections = schema.CONNECTIONS
            self._add(connections, self._with_times(batch(connections.schema, self._connection_rows)))
            self._connection_rows.clear()

    def _with_times(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows unchanged, or without durations if packets have no times."""
        if self._flows is None or self._flows.has_times:
            return rows
        columns = [
            pa.nulls(len(rows), field.type) if field.name in DURATIONS else rows[field.name] for field in rows.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

    def _flush_registry(self) -> None:
        for table, rows in self._registry.batches():
            self._add(table, rows)


def _kept() -> Kept:
    return Kept(APIS, only_failed=ONLY_FAILED, max_frame_bytes=KEPT_FRAME_BYTES, limit_bytes=KEPT_BYTES)


def _stalled(flows: Sequence[Flow], bulk: Bulk) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield (index, delays) of exchanges that lost segments or closed windows delayed."""
    columns = bulk.columns
    first_ns = np.full(len(flows), 1 << 62)
    np.minimum.at(first_ns, bulk.connection, columns["request_start"])
    last_ns = np.array([flow.talk.stalls.last_ns for flow in flows])
    for number in np.flatnonzero(last_ns > first_ns).tolist():
        flow = flows[number]
        stalls = flow.talk.stalls
        mine = np.flatnonzero(bulk.connection == number)
        delayed = stalls.overlap(columns["request_start"][mine], columns["response_end"][mine])
        for row in mine[delayed].tolist():
            times = [int(columns[name][row]) for name in _ENDS]
            waited_ns = int(columns["queue_ns"][row] + columns["muted_ns"][row])
            if held := stalls.of(flow.client, times, waited_ns):
                yield row, held


_ENDS = ("request_start", "request_end", "response_start", "response_end")


class _Tally:
    """The listener of one connection: rows of its exchanges, and the counts of its own row."""

    def __init__(self, flow: Flow, rows: Rows) -> None:
        assert flow.info is not None
        self._flow = flow
        self.info = flow.info
        self._rows = rows
        self.positions: Positions = {}
        self.requests = 0
        self.answers = 0
        self._resyncs = 0
        self._faults = 0

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Exchange:
                self.answers += event.response_end != NONE
                self.requests += event.outcome is not REQUEST_NOT_SEEN
                self._exchange(event)
            elif type(event) is Unanswered:
                self.requests += 1
                self._exchange(event.exchange)
            elif type(event) is Gap:
                self._resyncs += event.resync
            elif type(event) is Desync:
                self._faults += 1

    def _exchange(self, exchange: Exchange) -> None:
        rows = self._rows
        flow = self._flow
        rows.exchanges.append(self.info, exchange, flow.sent_again(exchange), flow.stalled(exchange))
        if exchange.request_body is not None or exchange.response_body is not None:
            rows.partitions.append(self.info, exchange, self.positions)
            rows.batches.append(self.info, exchange)
            rows.names.learn(exchange.response_body)
            if rows.records is not None:
                rows.records.append(self.info, exchange, rows.hand_on_records)
            if rows.kept_frames is not None and exchange.response_body is not None:
                rows.logged(self.info, exchange, exchange.response_body)
        if exchange.plan.kept is not None and rows.kept_frames is not None:
            rows.kept_frames.append(self.info, exchange)
            if rows.kept_frames.size >= BATCH_BYTES:
                rows.flush(BATCH_ROWS)
        if rows.exchanges.rows >= BATCH_ROWS or rows.partitions.rows >= BATCH_ROWS or rows.batches.rows >= BATCH_ROWS:
            rows.flush(BATCH_ROWS)

    def counted(self) -> "Counted":
        session = self._flow.session
        counted = Counted(self._flow, self.requests, self.answers, self._resyncs, self._faults)
        if session is not None:
            counted.software, counted.sasl_mechanism = session.software, session.sasl_mechanism
            counted.is_surprised = session.is_surprised
            self._flow.sasl_tokens = session.sasl_tokens
        return counted


@dataclass
class Counted:
    """The counts for the row of a connection, from its beginning or from a handover on."""

    flow: Flow
    requests: int
    answers: int
    resyncs: int
    faults: int
    software: tuple[str, str] | None = None
    sasl_mechanism: str | None = None
    is_surprised: bool = False

    def join(self, before: "Counted") -> None:
        """Add the counts of the same connection up to the handover from which this one counts."""
        self.flow.join(before.flow)
        self.requests += before.requests
        self.answers += before.answers
        self.resyncs += before.resyncs
        self.faults += before.faults
        self.software = self.software or before.software
        self.sasl_mechanism = self.sasl_mechanism or before.sasl_mechanism

    def let_go(self) -> None:
        """Drop everything but the counts, which can then be sent to another process."""
        self.flow.session = self.flow.later = None
        self.flow.talk.receiver = DISCARD

    def row(self) -> dict[str, Any]:
        info = self.flow.info
        assert info is not None
        return {
            "source": info.source,
            "cluster": info.cluster,
            "connection": info.id,
            "time": self.flow.first_ns // 1000,
            "client_address": info.client_address,
            "client_port": info.client_port,
            "broker_address": info.broker_address,
            "broker_port": info.broker_port,
            "broker_id": info.broker_id,
            "requests": self.requests,
            "answers": self.answers,
            "software_name": self.software[0] if self.software else None,
            "software_version": self.software[1] if self.software else None,
            "sasl_mechanism": self.sasl_mechanism,
            "sasl_tokens": self.flow.sasl_tokens,
            "resyncs": self.resyncs,
            "faults": self.faults,
            **self.flow.columns(),
        }


def quality_batch(source: str, quality: Quality) -> pa.RecordBatch:
    rows = [
        {
            "source": source,
            "kind": row.kind,
            "count": row.count,
            "bytes": row.bytes,
            "first_ns": None if row.first_ns == NONE else row.first_ns,
            "last_ns": None if row.last_ns == NONE else row.last_ns,
            "sentence": row.sentence,
        }
        for row in quality
    ]
    return batch(schema.QUALITY.schema, rows)

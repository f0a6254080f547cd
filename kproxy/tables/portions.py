"""Events -> packed rows of all tables, a portion at a time: what recorders keep until somebody writes it.

Duty: pack what events say at once, each event whole or not at all. That costs a relay hardly more than to keep the
events, and far less memory. A portion is bounded by its owner, who looks at `full`. Refuses to know files, threads and
when a portion is written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from kproxy.tables import schema
from kproxy.tables.arrays import batch
from kproxy.tables.columns import ExchangeColumns
from kproxy.tables.knowledge import KnowledgeColumns
from kproxy.tables.names import Names
from kproxy.tables.partitions import BatchColumns, PartitionColumns, Positions
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

# Who writes portions works on one at a time, so that a relay never waits long for the interpreter.
PORTION_ROWS = 4 * 1024
PORTION_BYTES = 4 << 20

_KNOWN_BYTES = 2000  # of a row of insight, beside its texts, about
_CONNECTION_BYTES = 2000  # of a row that is not packed, about
_NAME_BYTES = 300  # of a topic


class Tcp(Protocol):
    """What packets show of a connection."""

    @property
    def info(self) -> ConnectionInfo:
        """As known now: its broker and its cluster may become known later than the connection."""
        ...

    def columns(self) -> dict[str, Any]:
        """Of its row of `connections`, when it has ended."""
        ...

    def sent_again(self, exchange: Exchange) -> int:
        """Segments that were sent again during an exchange."""
        ...

    def stalled(self, exchange: Exchange) -> Sequence[int]:
        """How long lost bytes and closed windows held it up, as columns.STALLED; nothing: they did not."""
        ...


class Batches(NamedTuple):
    """What was a portion, by column: what another process can be sent."""

    events: dict[str, int]  # by source
    faults: list[tuple[str, int]]  # source and time
    names: dict[str, Any]  # as `Names.told` has them
    batches: list[tuple[str, pa.RecordBatch]]  # by table


class Portion:
    """Packed rows of all tables, as their events come."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}  # by source
        self.exchanges = ExchangeColumns()
        self.partitions = PartitionColumns()
        self.batches_read = BatchColumns()
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
        packed = self.exchanges.size + self.partitions.size + self.batches_read.size
        names = len(self.names) * _NAME_BYTES
        return packed + len(self.connections) * _CONNECTION_BYTES + names + self._known_bytes

    @property
    def full(self) -> bool:
        rows = self.exchanges.rows + self.partitions.rows + self.batches_read.rows + self.knowledge.rows
        return rows >= PORTION_ROWS or self.size >= PORTION_BYTES

    def batches(self) -> Batches:
        """The rows so far, which are forgotten here. It takes milliseconds: not for a relay's loop."""
        of_tables = [
            (table.name, columns.batch())
            for table, columns in (
                (schema.EXCHANGES, self.exchanges),
                (schema.PARTITIONS, self.partitions),
                (schema.BATCHES, self.batches_read),
            )
            if columns.rows
        ]
        of_tables += [(table.name, told) for table, told in self.knowledge.batches()]
        if self.connections:
            of_tables.append((schema.CONNECTIONS.name, batch(schema.CONNECTIONS.schema, self.connections)))
        return Batches(self.events, self.faults, self.names.told(), of_tables)

    def add(self, tally: "Tally", events: list[Event]) -> list[Exception]:
        """Pack events, each whole or not at all; returns what went wrong, one exception per event that is left out."""
        if tally.tcp is not None:
            tally.info = tally.tcp.info
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
                elif isinstance(event, ClientNamed):
                    tally.software = event.name, event.version
            except Exception as fault:
                failures.append(fault)
        self.events[source] = self.events.get(source, 0) + len(events) - len(failures)
        return failures

    def _exchange(self, tally: "Tally", exchange: Exchange) -> None:
        if exchange.request_body is not None or exchange.response_body is not None:
            before = self.partitions.mark(), self.batches_read.mark()
            try:
                self.partitions.append(tally.info, exchange, tally.positions)
                self.batches_read.append(tally.info, exchange)
                self.names.learn(exchange.response_body)
                self._row(tally, exchange)
            except Exception:
                self.partitions.rewind(before[0])
                self.batches_read.rewind(before[1])
                raise
        else:
            self._row(tally, exchange)  # one row: whole or not at all
        tally.count(exchange)

    def _row(self, tally: "Tally", exchange: Exchange) -> None:
        tcp = tally.tcp
        if tcp is None:
            self.exchanges.append(tally.info, exchange)
        else:
            self.exchanges.append(tally.info, exchange, tcp.sent_again(exchange), tcp.stalled(exchange))


class Tally:
    """One connection: what its own row counts, and how far its consumer has come."""

    def __init__(self, info: ConnectionInfo, tcp: Tcp | None) -> None:
        self.info = info
        self.tcp = tcp
        self.positions: Positions = {}
        self.faults = 0
        self.software: tuple[str, str] | None = None  # name and version of the client's, for as long as it is open
        self._requests = 0
        self._answers = 0

    def count(self, exchange: Exchange) -> None:
        self._requests += exchange.outcome is not REQUEST_NOT_SEEN
        self._answers += exchange.response_end != NONE

    def row_so_far(self, now_ns: int) -> dict[str, Any]:
        """Of a connection that is open: its bytes are not known here."""
        so_far = {"client_bytes": None, "broker_bytes": None, "end_seen": False, "close": None}
        return self.row(Closed(CLIENT, now_ns)) | so_far

    def row(self, closed: Closed) -> dict[str, Any]:
        """What TCP does is not seen from a proxy; those columns are null."""
        info = self.info
        software_name, software_version = closed.software or self.software or (None, None)
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
            "tls": "tls_decrypted" if info.ends_tls else "plain",
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

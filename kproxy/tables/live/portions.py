"""Events -> packed rows of all tables, in portions that a recorder keeps until it writes them.

Duty: packs each event at once, completely or not at all. Packing costs a relay hardly more than keeping the events, and
takes far less memory. The owner of a portion bounds it by checking `full`. Does not write files, and uses no threads.
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
    SIDES,
    ClientNamed,
    Closed,
    Desync,
    Event,
    Exchange,
    Unanswered,
)

# The recorder's thread converts one portion at a time, so a relay never waits long for the interpreter.
PORTION_ROWS = 4 * 1024
PORTION_BYTES = 4 << 20

_KNOWN_BYTES = 2000  # approximate size of a row of insight without its texts
_CONNECTION_BYTES = 2000  # approximate size of a row that is not packed
_NAME_BYTES = 300  # approximate size of a topic's name


class Tcp(Protocol):
    """The TCP properties of a connection, seen in its packets."""

    @property
    def info(self) -> ConnectionInfo:
        """Return the current description: broker and cluster may become known later than the connection."""
        ...

    def columns(self) -> dict[str, Any]:
        """Return the TCP columns of its row of `connections`, after its end."""
        ...

    def sent_again(self, exchange: Exchange) -> int:
        """Return the number of segments that were retransmitted during an exchange."""
        ...

    def stalled(self, exchange: Exchange) -> Sequence[int]:
        """Return the delays by lost segments and closed windows, in ns as in columns.STALLED; empty without delay."""
        ...


class Batches(NamedTuple):
    """The rows of a portion as columns, which can be sent to another process."""

    events: dict[str, int]  # by source
    faults: list[tuple[str, int]]  # source and time
    names: dict[str, Any]  # from `Names.as_json`
    batches: list[tuple[str, pa.RecordBatch]]  # by table


class Portion:
    """Packed rows of all tables."""

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
        """Add rows of insight."""
        for row in rows:
            self.knowledge.append(table, source, row)
            self._known_bytes += _KNOWN_BYTES + sum(len(value) for value in row if isinstance(value, str))
        self.events[source] = self.events.get(source, 0) + len(rows)

    @property
    def size(self) -> int:
        """Return the approximate bytes of the rows."""
        packed = self.exchanges.size + self.partitions.size + self.batches_read.size
        names = len(self.names) * _NAME_BYTES
        return packed + len(self.connections) * _CONNECTION_BYTES + names + self._known_bytes

    @property
    def full(self) -> bool:
        rows = self.exchanges.rows + self.partitions.rows + self.batches_read.rows + self.knowledge.rows
        return rows >= PORTION_ROWS or self.size >= PORTION_BYTES

    def batches(self) -> Batches:
        """Return the rows as columns, and use the portion no more. Takes milliseconds: not for a relay's loop."""
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
        return Batches(self.events, self.faults, self.names.as_json(), of_tables)

    def add(self, tally: "Tally", events: list[Event]) -> list[Exception]:
        """Pack events, each completely or not at all; returns one exception per event that is left out."""
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
            self._row(tally, exchange)  # a single row needs no rewind
        tally.count(exchange)

    def _row(self, tally: "Tally", exchange: Exchange) -> None:
        tcp = tally.tcp
        if tcp is None:
            self.exchanges.append(tally.info, exchange)
        else:
            self.exchanges.append(tally.info, exchange, tcp.sent_again(exchange), tcp.stalled(exchange))


class Tally:
    """The counts of one connection for its row, and the positions of its consumer."""

    def __init__(self, info: ConnectionInfo, tcp: Tcp | None) -> None:
        self.info = info
        self.tcp = tcp
        self.positions: Positions = {}
        self.faults = 0
        self.software: tuple[str, str] | None = None  # name and version of the client's software, while open
        self._requests = 0
        self._answers = 0

    def count(self, exchange: Exchange) -> None:
        self._requests += exchange.outcome is not REQUEST_NOT_SEEN
        self._answers += exchange.response_end != NONE

    def row_so_far(self, now_ns: int) -> dict[str, Any]:
        """Return the row of an open connection; its bytes are unknown here."""
        so_far = {"client_bytes": None, "broker_bytes": None, "end_seen": False, "close": None}
        so_far |= {"closed_by": None, "closed_ns": None}
        return self.row(Closed(CLIENT, now_ns)) | so_far

    def row(self, closed: Closed) -> dict[str, Any]:
        """Return the row of a closed connection; its TCP columns are null in a proxy, which does not see packets."""
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
            "closed_by": _closed_by(closed.cause),
            "closed_ns": closed.now_ns,
            "gaps": 0,
            "gap_bytes": 0,
            "resyncs": 0,
            "faults": self.faults,
            **({} if self.tcp is None else self.tcp.columns()),
        }


def _close(cause: str) -> str:
    """Return the end of a connection as captures name it; an end by kproxy (a drain, a fault) keeps its own name."""
    return {"closed": "fin", "reset": "reset"}.get(cause.partition("_")[2], cause)


def _closed_by(cause: str) -> str:
    side, _, how = cause.partition("_")
    return side if side in SIDES and how in ("closed", "reset") else "neither"

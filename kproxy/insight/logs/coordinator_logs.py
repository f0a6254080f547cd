"""Records of the coordinators' logs, __consumer_offsets and __transaction_state, if a client fetches these.

Duty: take each record once, although replicas, mirrors and tools may all fetch it; `read_ranges` has the offsets read.
Records beyond all of them are new, others are history. Offsets in a transaction take effect when its marker and all
offsets up to it have been read. Records of committed offsets and transactions become rows at once. Records about
groups wait for HOLD_NS, because most of their contents also appear on the wire, before or after the record: then
`Groups` knows which ones are new.

Times of rows are those of records, by the coordinator's clock, so history has its true time. Clients choose some of
them: a time beyond 64 bits of nanoseconds counts as missing. Bounds: MAX_PARTITIONS of logs, the least recently seen
forgotten; MAX_WAITING records that wait, with WAITING_BYTES, beyond which the first is released; those of
`read_ranges`; DECOMPRESSED_BYTES of one batch. Refuses to know what a record does to a group.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar
from uuid import UUID

from kproxy.errors import KproxyError
from kproxy.insight.logs.read_ranges import Marker, OpenTransactions, Range, ReadRanges
from kproxy.insight.membership.embedded import listed
from kproxy.insight.rows import CommittedOffset, Transaction
from kproxy.protocol.log_records import LogRecord, decode_record
from kproxy.protocol.records import Batch, Record, read_batches

OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
LOGS = (OFFSETS, TRANSACTIONS)
HOLD_NS = 2 * 10**9
MAX_PARTITIONS = 4096
MAX_WAITING = 50_000
WAITING_BYTES = 16 << 20  # as they are in the log; decoded they take about three times as much
MAX_LISTED = 1000  # partitions of one transaction
DECOMPRESSED_BYTES = 16 << 20
MS = 1_000_000
MAX_NUMBER = (1 << 63) - 1  # of an int64 column
MAX_MS = MAX_NUMBER // MS
NO_PRODUCER = -1
ABORT, COMMIT = 0, 1  # types of markers

# Names of states in Kafka's tools, by the number in the log (TransactionState).
STATES = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)
Time = TypeVar("Time", int, None)
_OF_OFFSETS = frozenset(("OffsetCommitKey", "LegacyOffsetCommitKey"))


class Logged(NamedTuple):
    """A record batch of a log, as in a Fetch response."""

    at_ns: int  # the response's first byte
    topic: str
    partition: int
    batch: bytes
    broker_id: int | None = None  # the broker that returned it
    connection: int | None = None
    number: int | None = None
    source: str | None = None


class Entry(NamedTuple):
    """A record of a log, decoded."""

    logged: Logged
    offset: int
    time_ns: int  # when it was written, by the coordinator's clock
    record: LogRecord
    is_history: bool  # later records were read before it
    size_bytes: int


class CoordinatorLogs:
    """The logs of one cluster. `feed` yields rows; `due` yields records of groups that have waited long enough."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self._left_out = 0  # batches and records that could not be read or kept
        self._read: dict[tuple[str, int], ReadRanges] = {}
        self._open = OpenTransactions()
        self._waiting: deque[Entry] = deque()
        self._waiting_bytes = 0

    @property
    def left_out(self) -> int:
        """Return the number of batches and records not read or kept, and of pending offsets whose end stays unknown."""
        return self._left_out + self._open.left_out

    def unnamed(self) -> None:
        """Count a batch of a topic whose name is not known: it may belong to a log."""
        self._left_out += 1

    def feed(self, logged: Logged) -> Iterator[CommittedOffset | Transaction]:
        """Yield the rows of a batch. Feed batches in the order of time."""
        try:
            batches, _ = read_batches(logged.batch)
        except KproxyError:
            self._left_out += 1
            return
        for batch in batches:
            header = batch.header
            if not 0 <= header.base_offset <= header.last_offset <= MAX_NUMBER:  # no checksum covers baseOffset
                self._left_out += 1
                continue
            read = self._read_of(logged)
            if read.is_shorter(header.base_offset, header.leader_epoch):
                self._open.shorten(read, header.base_offset)
            taken = read.take(header.base_offset, header.last_offset, header.leader_epoch)
            if taken is not None:
                yield from self._batch(logged, batch, *taken)
                yield from self._open.settle(read, taken[0])

    def _read_of(self, logged: Logged) -> ReadRanges:
        key = logged.topic, logged.partition
        read = self._read.pop(key, None) or ReadRanges()
        self._read[key] = read
        if len(self._read) > MAX_PARTITIONS:
            for each in self._read.pop(next(iter(self._read))).ranges:
                self._open.forget(each)
        return read

    def due(self, now_ns: int | None = None) -> Iterator[Entry]:
        """Yield the records of groups that have waited for HOLD_NS; now_ns None: all."""
        while self._waiting and (
            now_ns is None
            or self._waiting[0].logged.at_ns + HOLD_NS <= now_ns
            or len(self._waiting) > MAX_WAITING
            or self._waiting_bytes > WAITING_BYTES
        ):
            entry = self._waiting.popleft()
            self._waiting_bytes -= entry.size_bytes
            yield entry

    def _batch(
        self, logged: Logged, batch: Batch, where: Range, is_history: bool
    ) -> Iterator[CommittedOffset | Transaction]:
        header = batch.header
        producer = header.producer_id if header.is_transactional else NO_PRODUCER
        whose = logged._replace(batch=b"")  # a waiting entry must not keep the whole batch
        try:
            for record in batch.records(DECOMPRESSED_BYTES):
                if header.is_control:
                    yield from self._open.end(where, producer, _marker(logged, record))
                    continue
                try:
                    entry = Entry(
                        whose,
                        record.offset,
                        ns_of(record.timestamp, logged.at_ns),
                        decode_record(logged.topic, record),
                        is_history,
                        len(record.key or b"") + len(record.value or b""),
                    )
                except KproxyError:
                    self._left_out += 1
                    continue
                if logged.topic == TRANSACTIONS:
                    yield self._transaction(entry)
                elif entry.record.key_message.name in _OF_OFFSETS:
                    row = self._offset(entry, producer)
                    if row.change == "pending":
                        self._open.pend(where, producer, row)
                    yield row
                else:
                    self._waiting.append(entry)
                    self._waiting_bytes += entry.size_bytes
        except KproxyError:  # it does not decompress
            self._left_out += 1
            if producer != NO_PRODUCER:
                self._open.doubt(where, producer)

    def _offset(self, entry: Entry, producer: int) -> CommittedOffset:
        key, value = entry.record.key, entry.record.value or {}
        is_pending = producer != NO_PRODUCER
        return CommittedOffset(
            ns_of(value.get("commitTimestamp") or -1, entry.time_ns),
            self.cluster,
            key["group"],
            key["topic"],
            key["partition"],
            value.get("offset"),
            _or_none(value.get("leaderEpoch", -1)),
            value.get("metadata") or None,
            "removed" if entry.record.value is None else "pending" if is_pending else "committed",
            _or_none(producer),
            ns_of(value.get("expireTimestamp", -1), None),
            entry.logged.partition,
            entry.offset,
            entry.logged.connection,
            entry.logged.number,
        )

    def _transaction(self, entry: Entry) -> Transaction:
        value = entry.record.value or {}
        number = value.get("transactionStatus", STATES.index("Dead"))
        parts = [
            (each["topic"], index)
            for each in value.get("transactionPartitions") or ()
            for index in each["partitionIds"]
        ]
        return Transaction(
            ns_of(value.get("transactionLastUpdateTimestampMs") or -1, entry.time_ns),
            self.cluster,
            entry.record.key["transactionalId"],
            STATES[number] if 0 <= number < len(STATES) else str(number),
            _or_none(value.get("producerId", -1)),
            _or_none(value.get("producerEpoch", -1)),
            value.get("transactionTimeoutMs"),
            ns_of(value.get("transactionStartTimestampMs", -1), None),
            listed(parts, MAX_LISTED) or None,
            len(parts),
            entry.logged.broker_id,
            entry.logged.partition,
            entry.offset,
            entry.logged.connection,
            entry.logged.number,
        )


def named(topic: str | None, topic_id: UUID | None, names: Mapping[UUID, str]) -> str | None:
    """Return the log that a batch belongs to; None: another topic, or its name is not known."""
    name = topic if topic is not None or topic_id is None else names.get(topic_id)
    return name if name in LOGS else None


def _marker(logged: Logged, record: Record) -> Marker:
    """Return the marker in a control record: its producer's transaction was committed or aborted."""
    kind = -1 if record.key is None or len(record.key) < 4 else int.from_bytes(record.key[2:4], "big")
    change = {COMMIT: "committed", ABORT: "aborted"}.get(kind)
    at = ns_of(record.timestamp, logged.at_ns)
    return Marker(change, at, record.offset, logged.connection, logged.number)


def ns_of(ms: int, otherwise_ns: Time) -> int | Time:
    """Convert a record's time in ms since the Unix epoch to ns; otherwise_ns if it is negative or too large."""
    return ms * MS if 0 <= ms <= MAX_MS else otherwise_ns


def _or_none(value: int) -> int | None:
    return value if value >= 0 else None

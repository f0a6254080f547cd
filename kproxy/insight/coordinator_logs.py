"""What coordinators write to their logs, __consumer_offsets and __transaction_state, where somebody fetches these.

Duty: each record once, whoever fetches it: replicas, mirrors, tools. A partition of a log is known from one offset to
another; what is read beyond its end is new, what is read before its beginning is history, in order from where that
begins. Offsets that a transaction commits count when its marker is read. Committed offsets and transactions are rows
as they are; what is said of groups waits HOLD_NS, since most of it is seen on the wire too, and sooner or later than
the record: `Groups` then knows what is new.

Times of rows are those of records, by the coordinator's clock: history is in its place. Clients choose some of them;
one that nanoseconds in 64 bits do not reach is as if it were not there. Bounds: MAX_PARTITIONS of
logs, those heard of least recently forgotten; MAX_WAITING records that wait, with WAITING_BYTES, beyond which the
first do not; MAX_PENDING offsets of transactions, beyond which the oldest whose end was not read is forgotten;
DECOMPRESSED_BYTES of one batch. Refuses to know what a record does to a group.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar
from uuid import UUID

from kproxy.errors import KproxyError
from kproxy.insight.embedded import listed
from kproxy.insight.rows import CommittedOffset, Transaction
from kproxy.protocol.log_records import LogRecord, decode_record
from kproxy.protocol.records import Batch, Record, read_batches

OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
LOGS = (OFFSETS, TRANSACTIONS)
HOLD_NS = 2 * 10**9
MAX_PARTITIONS = 4096
MAX_WAITING = 50_000
WAITING_BYTES = 16 << 20  # as they are in the log; decoded they take about three times as much
MAX_PENDING = 100_000
MAX_LISTED = 1000  # partitions of one transaction
DECOMPRESSED_BYTES = 16 << 20
MS = 1_000_000
MAX_NUMBER = (1 << 63) - 1  # of a column
MAX_MS = MAX_NUMBER // MS
NO_PRODUCER = -1
ABORT, COMMIT = 0, 1  # types of markers

# As Kafka's tools call them, by the number in the log (TransactionState).
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
    """A batch of a log, as an answer of Fetch had it."""

    at_ns: int  # the answer's first byte
    topic: str
    partition: int
    batch: bytes
    broker_id: int | None = None  # who was asked
    connection: int | None = None
    number: int | None = None
    source: str | None = None


class Entry(NamedTuple):
    """A record of a log, decoded."""

    logged: Logged
    offset: int
    time_ns: int  # when it was written, by the coordinator's clock
    record: LogRecord
    is_history: bool  # later ones were read before
    size_bytes: int


class _Seen:
    """What was read of one partition: [first, after), and of what is before it [.., old)."""

    __slots__ = ("after", "epoch", "first", "old")

    def __init__(self, first: int) -> None:
        self.first = self.after = first
        self.old = -1
        self.epoch = -1

    def takes(self, base: int, last: int, epoch: int) -> bool | None:
        """Whether a batch is history; None: it was read before."""
        if base < self.after and epoch > self.epoch >= 0 and base >= self.first:
            self.after = base  # a new leader had less: what followed is gone
        if base >= self.after:
            self.after, self.epoch = last + 1, max(epoch, self.epoch)
            return False
        if last < self.first and base >= self.old:
            self.old = last + 1
            return True
        return None


class CoordinatorLogs:
    """Of one cluster. `feed` gives rows; `due` the records of groups whose time has come."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.left_out = 0  # batches and records that could not be read or kept
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._pending: dict[tuple[int, int], list[CommittedOffset]] = {}  # by log partition and producer
        self._pending_count = 0
        self._waiting: deque[Entry] = deque()
        self._waiting_bytes = 0

    def feed(self, logged: Logged) -> Iterator[CommittedOffset | Transaction]:
        """The rows of a batch; `logged` in the order of time."""
        try:
            batches, _ = read_batches(logged.batch)
        except KproxyError:
            self.left_out += 1
            return
        for batch in batches:
            header = batch.header
            if not 0 <= header.base_offset <= header.last_offset <= MAX_NUMBER:  # the checksum leaves the first out
                self.left_out += 1
                continue
            key = logged.topic, logged.partition
            seen = self._seen.pop(key, None) or _Seen(header.base_offset)
            self._seen[key] = seen
            if len(self._seen) > MAX_PARTITIONS:
                del self._seen[next(iter(self._seen))]
            is_history = seen.takes(header.base_offset, header.last_offset, header.leader_epoch)
            if is_history is not None:
                yield from self._batch(logged, batch, is_history)

    def due(self, now_ns: int | None = None) -> Iterator[Entry]:
        """Records of groups that have waited for HOLD_NS, or all."""
        while self._waiting and (
            now_ns is None
            or self._waiting[0].logged.at_ns + HOLD_NS <= now_ns
            or len(self._waiting) > MAX_WAITING
            or self._waiting_bytes > WAITING_BYTES
        ):
            entry = self._waiting.popleft()
            self._waiting_bytes -= entry.size_bytes
            yield entry

    def _batch(self, logged: Logged, batch: Batch, is_history: bool) -> Iterator[CommittedOffset | Transaction]:
        header = batch.header
        producer = header.producer_id if header.is_transactional else NO_PRODUCER
        whose = logged._replace(batch=b"")  # an entry that waits does not keep all others
        try:
            for record in batch.records(DECOMPRESSED_BYTES):
                if header.is_control:
                    yield from self._ended(logged, producer, record)
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
                    self.left_out += 1
                    continue
                if logged.topic == TRANSACTIONS:
                    yield self._transaction(entry)
                elif entry.record.key_message.name in _OF_OFFSETS:
                    yield self._offset(entry, producer)
                else:
                    self._waiting.append(entry)
                    self._waiting_bytes += entry.size_bytes
        except KproxyError:  # it does not decompress
            self.left_out += 1

    def _offset(self, entry: Entry, producer: int) -> CommittedOffset:
        key, value = entry.record.key, entry.record.value or {}
        is_pending = producer != NO_PRODUCER
        row = CommittedOffset(
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
        if is_pending:
            self._pend((entry.logged.partition, producer), row)
        return row

    def _pend(self, whose: tuple[int, int], row: CommittedOffset) -> None:
        """Keep it until its transaction ends. Ends may never be read: where there is no room, the oldest one goes."""
        if self._pending_count >= MAX_PENDING:
            oldest = next(iter(self._pending))
            if oldest == whose:
                self.left_out += 1
                return
            count = len(self._pending.pop(oldest))
            self._pending_count -= count
            self.left_out += count
        self._pending.setdefault(whose, []).append(row)
        self._pending_count += 1

    def _ended(self, logged: Logged, producer: int, marker: Record) -> Iterator[CommittedOffset]:
        """What a transaction committed counts, or never will."""
        pending = self._pending.pop((logged.partition, producer), [])
        self._pending_count -= len(pending)
        kind = -1 if marker.key is None or len(marker.key) < 4 else int.from_bytes(marker.key[2:4], "big")
        change = {COMMIT: "committed", ABORT: "aborted"}.get(kind)
        if change is None:
            return
        at = ns_of(marker.timestamp, logged.at_ns)
        for row in pending:
            yield row._replace(
                time_ns=at,
                change=change,
                log_offset=marker.offset,
                connection=logged.connection,
                number=logged.number,
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
    """The log that a batch is of; None: it is none, or nothing says which."""
    name = topic if topic is not None or topic_id is None else names.get(topic_id)
    return name if name in LOGS else None


def ns_of(ms: int, otherwise_ns: Time) -> int | Time:
    """A time of a record, which is milliseconds since the epoch, in nanoseconds; there may be none, or nonsense."""
    return ms * MS if 0 <= ms <= MAX_MS else otherwise_ns


def _or_none(value: int) -> int | None:
    return value if value >= 0 else None

"""What bodies say of topic-partitions -> Arrow batches of the `partitions` and `batches` tables.

Duty: one row per topic-partition and direction, and one per record batch; how far a fetch lags behind its partition.
The names of topics that a body calls by their ids are looked up when a file is written, since the answer that tells a
name may come later, and on any connection: `TopicNames` collects them.

Bounded by the owner, who takes `batch()` before there are too many `rows`; positions of MAX_POSITIONS partitions per
connection and MAX_NAMES topics. Refuses to know files, and where events come from.
"""

from base64 import urlsafe_b64encode
from struct import Struct
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kproxy.protocol.compression import codec_name
from kproxy.protocol.error_codes import error_name
from kproxy.tables.columns import NULL, Words, named, numbers
from kproxy.tables.schema import BATCHES, PARTITIONS, Table
from kproxy.wire.bodies import Batch, Found, Partition
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import NONE, Exchange
from kproxy.wire.interest import FETCH, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH, PRODUCE, SHARE_FETCH

MAX_POSITIONS = 64 * 1024
MAX_NAMES = 256 * 1024

APIS = frozenset(
    (PRODUCE, FETCH, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH, SHARE_FETCH)
)  # those that the tables tell of
_CARRY = frozenset(((PRODUCE, "request"), (FETCH, "response"), (SHARE_FETCH, "response")))  # whose bodies carry records

Positions = dict[
    tuple[str | UUID | None, int], int
]  # of one connection: (topic, partition) -> the next offset it wants


class TopicNames:
    """Names of topics by their ids, from whatever body has both."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def learn(self, found: Found | None) -> None:
        for partition in found.partitions if found is not None else ():
            if partition.topic_id is not None and partition.topic:
                self.add(topic_id(partition.topic_id), partition.topic)

    def add(self, identity: str, name: str) -> None:
        """Of two names the first in the alphabet stays, so that it does not matter who comes first."""
        known = self.names.get(identity)
        if known is None:
            if len(self.names) < MAX_NAMES:
                self.names[identity] = name
        elif name < known:
            self.names[identity] = name

    def fill(self, rows: pa.Table) -> pa.Table:
        """Rows with a topic's name wherever only its id was there."""
        if not self.names or "topic_id" not in rows.schema.names:
            return rows
        known = pa.array(sorted(self.names), pa.string())
        names = pa.array([self.names[identity] for identity in sorted(self.names)], pa.string())
        told = names.take(pc.index_in(rows["topic_id"], value_set=known))
        return rows.set_column(rows.schema.get_field_index("topic"), "topic", pc.coalesce(rows["topic"], told))


class _Rows:
    """Packed rows of integers, strings as indices of words, as those of the exchanges."""

    def __init__(self, table: Table, packed: tuple[str, ...]) -> None:
        self._table = table
        self._names = packed
        self._row = Struct(f"<{len(packed)}q")
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._packed = bytearray()
        self._words = Words()

    def _add(self, *values: int) -> None:
        self._packed += self._row.pack(*values)
        self.rows += 1

    def batch(self) -> pa.RecordBatch:
        """The rows so far, in the order of their arrival; they are forgotten here."""
        packed = np.frombuffer(bytes(self._packed), "<i8").reshape(-1, len(self._names))
        columns = {}
        for index, name in enumerate(self._names):
            kind = self._table.schema.field(name).type
            values = np.ascontiguousarray(packed[:, index])
            if pa.types.is_string(kind):
                columns[name] = self._words.column(values)
            else:
                columns[name] = numbers(kind, values)
            if name == "error_code":
                columns["error"] = named(values, error_name)
        self._clear()
        return pa.RecordBatch.from_arrays(
            [columns[field.name] for field in self._table.schema], schema=self._table.schema
        )

    def _keys(self, info: ConnectionInfo, exchange: Exchange, direction: str, partition: Partition) -> tuple[int, ...]:
        word = self._words.index
        start = exchange.request_start if direction == "request" else exchange.response_start
        return (
            word(info.source),
            info.id,
            _known(exchange.number),
            start // 1000,
            word(exchange.plan.api),
            word(direction),
            word(partition.topic),
            word(None if partition.topic_id is None else topic_id(partition.topic_id)),
            partition.partition,
        )


_KEYS = ("source", "connection", "number", "time", "api", "direction", "topic", "topic_id", "partition")


class PartitionColumns(_Rows):
    """Rows of `partitions`."""

    def __init__(self) -> None:
        own = [name for name in PARTITIONS.schema.names if name not in _KEYS and name != "error"]
        super().__init__(PARTITIONS, _KEYS + tuple(own))

    def append(self, info: ConnectionInfo, exchange: Exchange, positions: Positions) -> None:
        """The rows of both bodies of an exchange. `positions` belong to its connection and are kept up to date."""
        if exchange.plan.api_key not in APIS:
            return
        for direction, found in (("request", exchange.request_body), ("response", exchange.response_body)):
            for partition in found.partitions if found is not None else ():
                lag_records, lag_ns = NULL, NULL
                if exchange.plan.api_key == FETCH:
                    lag_records, lag_ns = _lag(exchange, direction, partition, positions)
                self._partition(info, exchange, direction, partition, lag_records, lag_ns)

    def _partition(
        self, info: ConnectionInfo, exchange: Exchange, direction: str, partition: Partition, lag: int, lag_ns: int
    ) -> None:
        word = self._words.index
        code = partition.error_code
        carries = (exchange.plan.api_key, direction) in _CARRY
        self._add(
            *self._keys(info, exchange, direction, partition),
            partition.bytes if carries else NULL,
            partition.batches if carries else NULL,
            _known(partition.records) if carries else NULL,
            word(_codecs(partition.codecs)) if partition.batches else word(None),
            _known(partition.magic),
            NULL if code is None else code,
            _known(partition.offset),
            _known(partition.high_watermark),
            _known(partition.last_stable_offset),
            _known(partition.log_start_offset),
            _known(partition.leader_epoch),
            lag,
            lag_ns,
            word(partition.metadata),
            word(partition.group_id),
        )


class BatchColumns(_Rows):
    """Rows of `batches`."""

    def __init__(self) -> None:
        super().__init__(BATCHES, _KEYS + tuple(name for name in BATCHES.schema.names if name not in _KEYS))

    def append(self, info: ConnectionInfo, exchange: Exchange) -> None:
        for direction, found in (("request", exchange.request_body), ("response", exchange.response_body)):
            for batch in found.batches if found is not None else ():
                self._batch(info, exchange, direction, batch)

    def _batch(self, info: ConnectionInfo, exchange: Exchange, direction: str, batch: Batch) -> None:
        word = self._words.index
        header = batch.header
        self._add(
            *self._keys(info, exchange, direction, batch.partition),
            header.base_offset,
            header.last_offset,
            _known(header.record_count),
            header.size_bytes,
            word(codec_name(header.codec)),
            header.magic,
            word(header.timestamp_type),
            _known(header.base_timestamp),
            _known(header.max_timestamp),
            _known(header.producer_id),
            _known(header.producer_epoch),
            _known(header.base_sequence),
            header.is_transactional,
            header.is_control,
            NULL,  # the checksum is over bytes that are not looked at
            batch.partial,
        )


def topic_id(identity: UUID) -> str:
    """As Kafka writes it."""
    return urlsafe_b64encode(identity.bytes).decode().rstrip("=")


def _lag(exchange: Exchange, direction: str, partition: Partition, positions: Positions) -> tuple[int, int]:
    """(records between what a consumer has now and the end of the log, age of the newest record it got).

    A fetch session (KIP-227) leaves out of the request what has not changed, so the position may be older than it.
    """
    key = (partition.topic or partition.topic_id, partition.partition)
    if direction == "request":
        if key in positions or len(positions) < MAX_POSITIONS:
            positions[key] = partition.offset
        return NULL, NULL
    age = NULL
    if partition.batches and partition.max_timestamp > 0:
        age = exchange.response_start - partition.max_timestamp * 1_000_000
    following = partition.last_offset + 1 if partition.batches else positions.get(key, NONE)
    if following < 0 or partition.high_watermark < 0:
        return NULL, age
    return max(0, partition.high_watermark - following), age


def _codecs(bits: int) -> str:
    return "+".join(codec_name(codec) for codec in range(8) if bits >> codec & 1)


def _known(value: int) -> int:
    return NULL if value == NONE else value

"""Topic-partitions and batches of bodies -> Arrow batches of the `partitions` and `batches` tables.

Duty: one row per topic-partition and direction, and one per record batch; the lag of a fetch behind its partition; the
end of a log (`end_offset`) from responses of its leader. These are a Fetch whose request named no rack, so that no
follower answered it (KIP-392), a ListOffsets for the latest offset (read_uncommitted), and a Produce, by its base
offset and the number of records in its request. Names of topics that a body identifies by id are filled in when a file
is written: see `names`.

Bounded by the owner, which calls `batch()` before there are too many `rows`; positions of MAX_POSITIONS partitions per
connection. Does not write files.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from kproxy.protocol.apis import (
    FETCH,
    LIST_OFFSETS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    PRODUCE,
    SHARE_FETCH,
    TXN_OFFSET_COMMIT,
)
from kproxy.protocol.compression import codec_name
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.records import BatchHeader
from kproxy.protocol.shown.render import uuid_text
from kproxy.tables import arrays
from kproxy.tables.arrays import array, distinct, listed
from kproxy.tables.columns import PackedRows, Words, in_order, named, numbers
from kproxy.tables.schema import BATCHES, FLAG, I64, PARTITIONS, TEXT, TIME, Table
from kproxy.wire.bodies import BLANK, Found, Partition
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT, NONE, Exchange
from kproxy.wire.offline.bulk import NULL, Bodies, Bulk

MAX_POSITIONS = 64 * 1024
# Characters kept of a topic's and a group's name. A hostile body may have a name of 32 KB with 65,536 partitions, which
# would make rows of 2 GB. Kafka limits topic names to 249 characters.
MAX_NAME = 500
MAX_TIMESTAMP_MS = ((1 << 63) - 1) // 1_000_000  # later ones (a producer that writes µs) overflow int64 nanoseconds
MAX_OFFSET = (1 << 63) - 1

APIS = frozenset(
    (PRODUCE, FETCH, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH, TXN_OFFSET_COMMIT, SHARE_FETCH, OFFSET_DELETE)
)  # the topic-partitions of these APIs are rows; for OffsetDelete only deleted ones
_CARRY = frozenset(((PRODUCE, CLIENT), (FETCH, BROKER), (SHARE_FETCH, BROKER)))  # bodies with records

Positions = dict[
    tuple[str | UUID | None, int], int
]  # of one connection: (topic, partition) -> the next offset it wants


# LATER and lower values in `Positions` stand for offsets that an earlier part of the capture determines. Rows that
# depend on such an offset have the same number as lag, until `with_offsets` replaces it.
LATER = -(1 << 62)

Own = dict[str, np.ndarray | int]  # columns by name


class BodyRows:
    """Rows of bodies; strings are indices of words, a topic is the index of its (name, id)."""

    def __init__(self, table: Table, own: tuple[str, ...]) -> None:
        self._table = table
        self._names = (*_COMMON, *own)
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._packed = PackedRows(self._names)
        self.words = Words()
        self.topics = _Topics()

    def common(self, info: ConnectionInfo, exchange: Exchange, direction: int) -> tuple[int, ...]:
        """Return the values that all rows of one body share: the first columns of _COMMON."""
        words = self.words
        start = exchange.response_start if direction == BROKER else exchange.request_start
        source, cluster, api = words[info.source], words[info.cluster], words[exchange.plan.api]
        return source, cluster, info.id, exchange.number, api, start, direction

    def add(self, infos: Sequence[ConnectionInfo], bulk: Bulk, direction: int, of: np.ndarray, own: Own) -> None:
        """Add rows by column. of: the index of each row's exchange. own: all columns that `common` does not return."""
        words, by_name = self.words, bulk.columns
        used, inverse = distinct(bulk.connection[of])
        used_infos = [infos[index] for index in used.tolist()]
        ids = np.array([(words[info.source], words[info.cluster], info.id) for info in used_infos], np.int64)
        columns: Own = {
            "source": ids[inverse, 0],
            "cluster": ids[inverse, 1],
            "connection": ids[inverse, 2],
            "number": by_name["number"][of],
            "api": words[bulk.plan.api],
            "start": by_name["response_start" if direction == BROKER else "request_start"][of],
            "direction": direction,
            **own,
        }
        self._packed.extend(columns, len(of))
        self.rows += len(of)

    def of_topics(self, found: Bodies) -> np.ndarray:
        """Return the index of each row's topic."""
        return np.take(np.array([self.topics[topic] for topic in found.topics], np.int64), found.topic)

    @property
    def size(self) -> int:
        """Return the approximate bytes of the rows."""
        return self._packed.size + self.words.size + self.topics.size

    def mark(self) -> tuple[int, int]:
        """Return the current end of the rows, for `rewind`."""
        return self.rows, len(self._packed.packed)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Remove the rows that were packed one by one since `mark`, including an incomplete one."""
        self.rows, size = mark
        del self._packed.packed[size:]

    def batch(self) -> pa.RecordBatch:
        """Return and remove the rows."""
        columns = self._columns(self._raw())
        self._clear()
        return pa.RecordBatch.from_arrays(
            [columns[field.name] for field in self._table.schema], schema=self._table.schema
        )

    def _raw(self) -> dict[str, np.ndarray]:
        """Return the packed columns, in the order of `time`, then of arrival."""
        raw = self._packed.columns()
        return in_order(raw, raw["start"] // 1000)

    def _columns(self, raw: dict[str, np.ndarray]) -> dict[str, pa.Array]:
        kinds = {field.name: field.type for field in self._table.schema}
        topics = listed(TEXT, [_name(topic) for topic, _ in self.topics])
        ids = listed(TEXT, [None if id_ is None else topic_id(id_) for _, id_ in self.topics])
        of_topics = array(I64, raw["of_topic"])
        columns = {
            "connection": numbers(I64, raw["connection"]),
            "time": numbers(TIME, raw["start"] // 1000),
            "direction": listed(TEXT, ["request", "response"]).take(array(I64, raw["direction"])),
            "topic": topics.take(of_topics),
            "topic_id": ids.take(of_topics),
        }
        for name, values in raw.items():
            if name in kinds and name not in columns:
                text = pa.types.is_string(kinds[name])
                columns[name] = (
                    self.words.column(values) if text else numbers(kinds[name], values, name in _NONE_IS_NULL)
                )
        return columns


class _Topics(dict[tuple[str | None, UUID | None], int]):
    """Topics, by name and id, as indices in the order of their arrival."""

    size = 0  # characters

    def __missing__(self, topic: tuple[str | None, UUID | None]) -> int:
        self.size += len(topic[0] or "")
        index = self[topic] = len(self)
        return index


_COMMON = (
    "source",
    "cluster",
    "connection",
    "number",
    "api",
    "start",
    "direction",
    "of_topic",
    "partition",
)  # columns of every row
_NONE_IS_NULL = frozenset(
    (
        "number",
        "bytes",
        "batches",
        "records",
        "magic",
        "offset",
        "high_watermark",
        "last_stable_offset",
        "log_start_offset",
        "leader_epoch",
        "end_offset",
        "base_timestamp",
        "max_timestamp",
        "timestamp",
        "key_bytes",
        "value_bytes",
        "producer_id",
        "producer_epoch",
        "base_sequence",
    )
)


class PartitionColumns(BodyRows):
    """Rows of `partitions`."""

    def __init__(self) -> None:
        super().__init__(
            PARTITIONS,
            (
                "bytes",
                "batches",
                "records",
                "codecs",
                "magic",
                "error_code",
                "offset",
                "high_watermark",
                "last_stable_offset",
                "log_start_offset",
                "leader_epoch",
                "lag_records",
                "lag_ns",
                "metadata",
                "group_id",
                "end_offset",
            ),
        )

    def append(self, info: ConnectionInfo, exchange: Exchange, positions: Positions) -> None:
        """Add the rows of both bodies of an exchange, and update `positions`, which belong to its connection."""
        key = exchange.plan.api_key
        if key not in APIS:
            return
        packed, words, topics = self._packed, self.words, self.topics
        lag_records = lag_ns = NULL
        for direction, found in ((CLIENT, exchange.request_body), (BROKER, exchange.response_body)):
            if found is None:
                continue
            carries = (key, direction) in _CARRY
            source, cluster, connection, number, api, start, _ = self.common(info, exchange, direction)
            end_offset, asked = NONE, _asked(exchange) if direction == BROKER else None
            last_topic = last_id = of_topic = None
            partitions = found.partitions if key != OFFSET_DELETE else _deleted(exchange, found)
            for partition in partitions:
                if key == FETCH:
                    lag_records, lag_ns = _lag(exchange, direction, partition, positions)
                if asked is not None:
                    end_offset = partition.high_watermark if key == FETCH else _end(key, partition, asked)
                code, topic, identity = partition.error_code, partition.topic, partition.topic_id
                if of_topic is None or topic is not last_topic or identity is not last_id:  # to hash an id is slow
                    last_topic, last_id, of_topic = topic, identity, topics[topic, identity]
                metadata, group_id = partition.metadata, partition.group_id
                packed.packed += packed.pack(
                    source,
                    cluster,
                    connection,
                    number,
                    api,
                    start,
                    direction,
                    of_topic,
                    partition.partition,
                    partition.bytes if carries else NONE,
                    partition.batches if carries else NONE,
                    partition.records if carries else NONE,
                    partition.codecs,
                    partition.magic,
                    NULL if code is None else code,
                    partition.offset,
                    partition.high_watermark,
                    partition.last_stable_offset,
                    partition.log_start_offset,
                    partition.leader_epoch,
                    lag_records,
                    lag_ns,
                    0 if metadata is None else words[metadata],
                    0 if group_id is None else words[_name(group_id)],
                    end_offset,
                )
            self.rows += len(partitions)

    def extend(self, infos: Sequence[ConnectionInfo], bulk: Bulk, positions: Sequence[Positions]) -> None:
        """Add the rows of both bodies of many exchanges; `infos` and `positions` are by index of connection."""
        key = bulk.plan.api_key
        if key not in APIS:
            return
        bodies = [(CLIENT, bulk.request_body), (BROKER, bulk.response_body)]
        lags = _lags(bulk, positions) if key == FETCH else {}
        for direction, found in bodies:
            if found is None or not len(found.of):
                continue
            own: Own = dict(found.numbers)
            own["of_topic"] = self.of_topics(found)
            if (key, direction) not in _CARRY:
                own["bytes"] = own["batches"] = own["records"] = NONE
            own["lag_records"], own["lag_ns"] = lags.get(direction, (NULL, NULL))
            texts = found.texts
            own["metadata"] = self._coded(texts["metadata"]) if "metadata" in texts else 0
            own["group_id"] = self._coded(map(_name, texts["group_id"])) if "group_id" in texts else 0
            own["end_offset"] = _ends(bulk) if direction == BROKER else NONE
            self.add(infos, bulk, direction, found.of, own)

    def _coded(self, texts: Iterable[str | None]) -> np.ndarray:
        return np.array([self.words[text] for text in texts], np.int64)

    def _columns(self, raw: dict[str, np.ndarray]) -> dict[str, pa.Array]:
        columns = super()._columns(raw)
        codecs, inverse = distinct(raw["codecs"])
        columns["codec"] = listed(TEXT, [_codecs(int(bits)) for bits in codecs]).take(array(I64, inverse))
        columns["error"] = named(raw["error_code"], error_name)
        return columns


class BatchColumns(BodyRows):
    """Rows of `batches`: the fields of a batch header; its attributes are decoded for all rows at once."""

    def __init__(self) -> None:
        super().__init__(BATCHES, (*BatchHeader._fields, "partial", "crc_valid"))

    def append(self, info: ConnectionInfo, exchange: Exchange) -> None:
        for direction, found in ((CLIENT, exchange.request_body), (BROKER, exchange.response_body)):
            if found is None or not found.batches:
                continue
            common = self.common(info, exchange, direction)
            packed = self._packed
            last_topic = last_id = of_topic = None
            for topic, identity, partition, header, partial, crc_valid, _ in found.batches:
                valid = NULL if crc_valid is None else crc_valid
                if of_topic is None or topic is not last_topic or identity is not last_id:  # to hash an id is slow
                    last_topic, last_id, of_topic = topic, identity, self.topics[topic, identity]
                packed.packed += packed.pack(*common, of_topic, partition, *header, partial, valid)
            self.rows += len(found.batches)

    def extend(self, infos: Sequence[ConnectionInfo], bulk: Bulk) -> None:
        """Add the rows of both bodies of many exchanges; `infos` are by index of connection."""
        for direction, found in ((CLIENT, bulk.request_body), (BROKER, bulk.response_body)):
            if found is None or not len(found.batches):
                continue
            own: Own = {name: found.batches[name] for name in BatchHeader._fields}
            own["of_topic"] = self.of_topics(found)[found.batch_of]
            own["partition"] = found.numbers["partition"][found.batch_of]
            own |= {"partial": 0, "crc_valid": NULL}
            self.add(infos, bulk, direction, found.of[found.batch_of], own)

    def _columns(self, raw: dict[str, np.ndarray]) -> dict[str, pa.Array]:
        kinds, index = distinct(raw["magic"] << 16 | raw["attributes"] & 0xFFFF)
        headers = [_EMPTY._replace(magic=int(kind) >> 16, attributes=int(kind) & 0xFFFF) for kind in kinds]
        inverse = array(I64, index)
        raw |= {
            "last_offset": _sum(raw["base_offset"], raw["last_offset_delta"]),
            "records": raw["record_count"],
            "bytes": raw["length"] + PREFIX_BYTES,
        }
        columns = super()._columns(raw)
        columns["codec"] = listed(TEXT, [codec_name(header.codec) for header in headers]).take(inverse)
        columns["timestamp_type"] = listed(TEXT, [header.timestamp_type for header in headers]).take(inverse)
        columns["transactional"] = listed(FLAG, [header.is_transactional for header in headers]).take(inverse)
        columns["control"] = listed(FLAG, [header.is_control for header in headers]).take(inverse)
        return columns


_EMPTY = BatchHeader(*(0 for _ in BatchHeader._fields))
PREFIX_BYTES = _EMPTY.size_bytes  # bytes of a batch that its field `length` does not count


def topic_id(identity: UUID) -> str:
    """Return a topic id in Kafka's notation: URL-safe base64 without padding."""
    return uuid_text(identity)


def _name(text: str | None) -> str | None:
    return text if text is None else text[:MAX_NAME]


def _sum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the sums of two int64 columns; NULL where a sum overflows int64."""
    sums = one + other
    return np.where(((one ^ sums) & (other ^ sums)) < 0, NULL, sums)


def _lag(exchange: Exchange, direction: int, partition: Partition, positions: Positions) -> tuple[int, int]:
    """Return (records from the consumer's position to the end of the log, age of its newest record in nanoseconds).

    In a fetch session (KIP-227) a request omits unchanged partitions, so the position may come from an earlier request.
    Either value is NULL if it is unknown or overflows int64: a producer may write any int64 as timestamp or offset.
    """
    key = (partition.topic or partition.topic_id, partition.partition)
    if direction == CLIENT:
        if key in positions or len(positions) < MAX_POSITIONS:
            positions[key] = max(partition.offset, NONE)
        return NULL, NULL
    age = NULL
    if partition.batches and 0 < partition.max_timestamp <= MAX_TIMESTAMP_MS:
        age = exchange.response_start - partition.max_timestamp * 1_000_000
    following = partition.last_offset + 1 if partition.batches else positions.get(key, NONE)
    if following <= LATER and not partition.batches and partition.high_watermark >= 0:
        return following, age
    if not 0 <= following <= MAX_OFFSET or partition.high_watermark < 0:
        return NULL, age
    return max(0, partition.high_watermark - following), age


def _lags(bulk: Bulk, positions: Sequence[Positions]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return `_lag` of many fetches, as columns by direction; updates the positions of their connections."""
    asked, got = bulk.request_body, bulk.response_body
    assert asked is not None and got is not None
    if not len(asked.of) + len(got.of):
        return {}
    topics: dict[Any, int] = {}
    keys, offsets, orders = [], [], []
    for direction, found in ((CLIENT, asked), (BROKER, got)):
        keys.append(np.stack((bulk.connection[found.of], found.topic_keys(topics), found.numbers["partition"])))
        offsets.append(np.maximum(found.numbers["offset"], NONE))
        orders.append(2 * found.of + direction)
    key = np.concatenate(keys, axis=1)
    order = np.lexsort((np.concatenate(orders), *key[::-1]))
    is_asked = order < len(asked.of)
    key = key[:, order]
    begins = np.ones(len(order), bool)
    begins[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    first = np.flatnonzero(begins)
    which = np.cumsum(begins) - 1
    # index of the last preceding request; valid if it is of the same partition
    before = np.maximum.accumulate(np.where(is_asked, np.arange(len(order)), -1))
    known = before >= first[which]
    names = list(topics)
    told = [
        (positions[connection], (names[topic], partition)) for connection, topic, partition in key[:, first].T.tolist()
    ]
    at_first = np.array(
        [
            NONE if is_known else of_connection.get(name, NONE)
            for is_known, (of_connection, name) in zip(known[first].tolist(), told, strict=True)
        ],
        np.int64,
    )
    following = np.where(known, np.concatenate(offsets)[order][before], at_first[which])
    last = np.append(first[1:], len(order)) - 1
    for (of_connection, name), is_known, offset in zip(
        told, known[last].tolist(), following[last].tolist(), strict=True
    ):
        if is_known and (name in of_connection or len(of_connection) < MAX_POSITIONS):
            of_connection[name] = offset

    wanted = np.empty(len(order), np.int64)
    wanted[order] = following
    wanted = wanted[len(asked.of) :]
    numbers = got.numbers
    carries = numbers["batches"] > 0
    following = np.where(carries, numbers["last_offset"] + 1, wanted)
    mark = numbers["high_watermark"]
    lag = np.where((following < 0) | (mark < 0), NULL, np.maximum(0, mark - following))
    lag = np.where(~carries & (following <= LATER) & (mark >= 0), following, lag)
    dated = carries & (numbers["max_timestamp"] > 0) & (numbers["max_timestamp"] <= MAX_TIMESTAMP_MS)
    age = bulk.columns["response_start"][got.of] - np.where(dated, numbers["max_timestamp"], 0) * 1_000_000
    return {BROKER: (lag, np.where(dated, age, NULL))}


def _asked(exchange: Exchange) -> Collection[Any] | None:
    """Return the part of a request that `_end` needs to find log ends in its response; None if that has none."""
    key, asked = exchange.plan.api_key, exchange.request_body
    if asked is None:
        return None
    if key == FETCH:
        return None if asked.has_rack else ()
    if key == PRODUCE:
        return {(*partition[:2], partition.partition): partition.records for partition in asked.partitions}
    if key == LIST_OFFSETS and not asked.isolation_level and asked.replica_id < 0:
        return frozenset(asked.latest)
    return None


def _end(key: int, partition: Partition, asked: Any) -> int:
    """Return the end of a log from a ListOffsets or Produce response; NONE if unknown. asked: from `_asked`."""
    if key == LIST_OFFSETS:
        return partition.offset if (partition.topic, partition.partition) in asked else NONE
    records: int = asked.get(
        (*partition[:2], partition.partition), 0
    )  # compressed message sets count 0 too: they hide their count
    return partition.offset + records if records > 0 and 0 <= partition.offset <= MAX_OFFSET - records else NONE


def _ends(bulk: Bulk) -> np.ndarray | int:
    """Return log ends of many responses, as a column; none of them is a ListOffsets (`capture/columns/programs.py`)."""
    key, asked, got = bulk.plan.api_key, bulk.request_body, bulk.response_body
    if asked is None or got is None:
        return NONE
    if key == FETCH:
        return np.where(bulk.columns["has_rack"][got.of] > 0, NONE, got.numbers["high_watermark"])
    if key != PRODUCE:
        return NONE
    offset, records = got.numbers["offset"], _records_of(asked, got)
    told = (records > 0) & (offset >= 0) & (offset <= MAX_OFFSET - records)
    return np.where(told, offset + np.where(told, records, 0), NONE)


def _records_of(asked: Bodies, got: Bodies) -> np.ndarray:
    """Return the number of records sent to each topic-partition of many responses; 0 if unknown."""
    topics: dict[Any, int] = {}
    sent, told = (np.stack((each.of, each.topic_keys(topics), each.numbers["partition"])) for each in (asked, got))
    records: np.ndarray = np.maximum(asked.numbers["records"], 0)
    if np.array_equal(sent, told):
        return records
    _, place = np.unique(np.concatenate((sent, told), axis=1), axis=1, return_inverse=True)
    place = place.reshape(-1)
    found = np.zeros(int(place.max(initial=-1)) + 1, np.int64)
    found[place[: len(records)]] = records
    rest: np.ndarray = found[place[len(records) :]]
    return rest


def _deleted(exchange: Exchange, found: Found) -> list[Partition]:
    """Return the topic-partitions whose committed offsets an OffsetDelete deleted."""
    return [
        BLANK._replace(topic=topic, partition=partition, error_code=0, group_id=exchange.group_id)
        for topic, partition in found.deleted
        if isinstance(topic, str)
    ]


def with_offsets(rows: pa.RecordBatch, connection: int, offsets: Sequence[int]) -> pa.RecordBatch:
    """Fill in the lags of a connection's rows of PARTITIONS that depend on offsets of earlier parts.

    offsets: the first is for rows with the lag LATER, the second for LATER - 1, and so on.
    """
    lags = arrays.numbers(rows["lag_records"], 0)
    places = np.flatnonzero((lags <= LATER) & (arrays.numbers(rows["connection"], 0) == connection))
    if not len(places):
        return rows
    found = np.array(offsets, np.int64)[LATER - lags[places]]
    marks = arrays.numbers(rows["high_watermark"], 0)[places]
    values, missing = lags.copy(), arrays.nulls(rows["lag_records"])
    values[places], missing[places] = np.maximum(0, marks - found), found < 0
    place = rows.schema.get_field_index("lag_records")
    return rows.set_column(place, rows.schema.field(place), array(I64, values, missing))


def _codecs(bits: int) -> str | None:
    return "+".join(codec_name(codec) for codec in range(8) if bits >> codec & 1) or None

"""Events -> Arrow batches of the `exchanges` table.

Duty: packs an exchange as one row of integers: numbers as they are, strings as indices into the words of this batch.
Packing costs a microsecond, and one numpy step extracts each column from the rows. Exchanges that arrive by column stay
columns. Bounded by the owner, which calls `batch()` before there are too many `rows`. The live recorder and the
conversion of captures share this module.

Does not write files.
"""

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any

import numpy as np
import pyarrow as pa

from kproxy.protocol.apis import FETCH, PRODUCE, SHARE_FETCH
from kproxy.protocol.error_codes import error_name
from kproxy.tables.arrays import array, distinct, listed
from kproxy.tables.schema import EXCHANGES, I16, I64, TEXT
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import ANSWERED, FULL, NONE, Exchange
from kproxy.wire.interest import ApiPlan
from kproxy.wire.offline.bulk import NULL, Bulk

_INFO_BYTES = 600  # approximately


class Words(dict[str | None, int]):
    """Strings as indices, in the order of their arrival; index 0 is null."""

    def __init__(self) -> None:
        super().__init__({None: 0})
        self.size = 0  # characters

    def __missing__(self, word: str) -> int:
        self.size += len(word)
        index = self[word] = len(self)
        return index

    def column(self, indices: np.ndarray) -> pa.Array:
        return listed(TEXT, list(self)).take(array(I64, indices))


class PackedRows:
    """Rows of integers, added one by one or many at a time by column."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.pack = Struct(f"<{len(names)}q").pack
        self.packed = bytearray()  # rows added one by one; the caller appends its `pack` results here
        self._many: list[tuple[int, dict[str, np.ndarray | int], int]] = []  # (packed bytes before, columns, rows)

    @property
    def size(self) -> int:
        """Return the approximate bytes of the rows."""
        return len(self.packed) + sum(count for _, _, count in self._many) * 8 * len(self._names)

    def extend(self, columns: dict[str, np.ndarray | int], count: int) -> None:
        """Add `count` rows by column; a plain number is the value of all rows."""
        self._many.append((len(self.packed), columns, count))

    def columns(self) -> dict[str, np.ndarray]:
        """Return all rows by column, in the order of their addition."""
        packed = np.frombuffer(bytes(self.packed), "<i8").reshape(-1, len(self._names))
        total = len(packed) + sum(count for _, _, count in self._many)
        found = {name: np.empty(total, np.int64) for name in self._names}
        taken = row = 0
        for before, columns, count in [*self._many, (len(self.packed), {}, 0)]:
            before //= 8 * len(self._names)
            if before > taken:
                for index, column in enumerate(found.values()):
                    column[row : row + before - taken] = packed[taken:before, index]
                row += before - taken
                taken = before
            for name in columns:
                if name in found:
                    found[name][row : row + count] = columns[name]
            row += count
        return found


def in_order(columns: dict[str, np.ndarray], time: np.ndarray) -> dict[str, np.ndarray]:
    """Sort rows by a time, stable. It is cheapest here, while all columns are integers."""
    order = np.argsort(time, kind="stable")
    return {name: column[order] for name, column in columns.items()}


_ENDS = ("request_start_ns", "request_end_ns", "response_start_ns", "response_end_ns")
# Delays in nanoseconds by lost segments and by closed windows: of the request, of the first byte of its response, and
# of the rest of the response.
STALLED = ("sending_loss", "waiting_loss", "receiving_loss", "sending_closed", "waiting_closed", "receiving_closed")
# Columns of a packed row, in order. The first index is the connection's, the second the API's.
_PACKED = (
    "connection",
    "api",
    "number",
    "request_start_ns",
    "request_end_ns",
    "response_start_ns",
    "response_end_ns",
    "queue_ns",
    "muted_ns",
    "replica_id",
    "correlation_id",
    "client_id",
    "request_bytes",
    "response_bytes",
    "outcome",
    "error_code",
    "errors",
    "throttle_ms",
    "in_flight",
    "acks",
    "max_wait_ms",
    "topics",
    "partitions",
    "records",
    "group_id",
    "transactional_id",
    "decoded",
    "retransmissions",
)
_TIMES = frozenset(_ENDS)
_WORDS = frozenset(("client_id", "outcome", "group_id", "transactional_id", "decoded"))
_NONE_IS_NULL = frozenset(
    (
        "number",
        "request_start_ns",
        "request_end_ns",
        "response_start_ns",
        "response_end_ns",
        "queue_ns",
        "muted_ns",
        "replica_id",
        "request_bytes",
        "response_bytes",
        "throttle_ms",
        "topics",
        "partitions",
        "records",
        "retransmissions",
    )
)


class ExchangeColumns:
    """Rows of `exchanges`, until `batch` returns them."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._packed = PackedRows(_PACKED)
        self._words = Words()
        self._apis: dict[int, int] = {}
        self._plans: list[Any] = []
        self._infos: list[ConnectionInfo] = []
        self._connections: dict[int, int] = {}
        self._stalled: list[tuple[int, Sequence[int]]] = []  # (row, durations): few rows have one

    @property
    def size(self) -> int:
        """Return the approximate bytes of the rows."""
        return self._packed.size + self._words.size + len(self._infos) * _INFO_BYTES

    def append(
        self,
        info: ConnectionInfo,
        exchange: Exchange,
        retransmissions: int = NONE,
        stalled: Sequence[int] = (),
    ) -> None:
        """Add a row for an exchange, answered or not.

        retransmissions: NONE if TCP is not seen. stalled: delays by TCP in nanoseconds, in the order of STALLED; empty
        if there were none.
        """
        connection = self._connection(info)
        api = self._api(exchange.plan)
        words = self._words
        code = exchange.error_code
        acks = exchange.acks
        max_wait_ms = exchange.max_wait_ms
        asked = exchange.request_body
        topics, partitions, records = carried(exchange)
        packed = self._packed
        packed.packed += packed.pack(
            connection,
            api,
            exchange.number,
            exchange.request_start,
            exchange.request_end,
            exchange.response_start,
            exchange.response_end,
            exchange.queue_ns,
            exchange.muted_ns,
            NONE if asked is None else asked.replica_id,
            exchange.correlation_id,
            words[exchange.client_id],
            exchange.request_bytes,
            exchange.response_bytes,
            words[exchange.outcome],
            NULL if code is None else code,
            len(exchange.errors),
            exchange.throttle_ms,
            exchange.in_flight,
            NULL if acks is None else acks,
            NULL if max_wait_ms is None else max_wait_ms,
            topics,
            partitions,
            records,
            words[exchange.group_id],
            words[exchange.transactional_id],
            words[exchange.decoded],
            retransmissions,
        )
        if stalled:
            self._stalled.append((self.rows, stalled))
        self.rows += 1

    def extend(
        self,
        infos: Sequence[ConnectionInfo],
        bulk: Bulk,
        retransmissions: np.ndarray,
        stalled: Iterable[tuple[int, Sequence[int]]] = (),
    ) -> None:
        """Add a row for each of many exchanges. infos: by index of connection. stalled: (index of exchange, delays)."""
        words = self._words
        by_name = bulk.columns
        used, inverse = distinct(bulk.connection)
        prefixes = [
            (words[client_id], _or_null(acks), _or_null(max_wait_ms), words[group_id], words[transactional_id])
            for client_id, acks, max_wait_ms, group_id, transactional_id in bulk.prefixes
        ]
        topics, partitions, records = _carried(bulk)
        columns: dict[str, Any] = {
            **{f"{name}_ns" if f"{name}_ns" in _TIMES else name: column for name, column in by_name.items()},
            "connection": np.array([self._connection(infos[index]) for index in used.tolist()])[inverse],
            "api": self._api(bulk.plan),
            "outcome": words[ANSWERED],
            "errors": (by_name["error_code"] != 0) & (by_name["error_code"] != NULL),
            "topics": topics,
            "partitions": partitions,
            "records": records,
            "decoded": words[FULL],
            "retransmissions": retransmissions,
        }
        of_prefixes = np.array(prefixes, np.int64)[bulk.prefix]
        for index, name in enumerate(("client_id", "acks", "max_wait_ms", "group_id", "transactional_id")):
            columns[name] = of_prefixes[:, index]
        self._packed.extend(columns, len(bulk.connection))
        self._stalled += [(self.rows + place, each) for place, each in stalled]
        self.rows += len(bulk.connection)

    def _connection(self, info: ConnectionInfo) -> int:
        connection = self._connections.get(id(info))  # `_infos` keeps it alive, so its id() stays unique
        if connection is None:
            connection = self._connections[id(info)] = len(self._infos)
            self._infos.append(info)
        return connection

    def _api(self, plan: ApiPlan) -> int:
        api = self._apis.get(id(plan))
        if api is None:
            api = self._apis[id(plan)] = len(self._plans)
            self._plans.append(plan)
        return api

    def batch(self) -> pa.RecordBatch:
        """Return and remove the rows, in the order of `time`, then of their arrival."""
        raw = self._packed.columns()
        first_ns = np.where(raw["request_start_ns"] != NONE, raw["request_start_ns"], raw["response_start_ns"])
        raw["time"] = first_ns // 1000
        raw |= {name: np.zeros(len(first_ns), np.int64) for name in STALLED}
        for row, stalled in self._stalled:
            for name, ns in zip(STALLED, stalled, strict=True):
                raw[name][row] = ns
        raw = in_order(raw, raw["time"])
        columns: dict[str, pa.Array] = {}
        for name, values in raw.items():
            if name in _WORDS:
                columns[name] = self._words.column(values)
            elif name in EXCHANGES.schema.names and name not in ("connection", "api"):
                columns[name] = numbers(EXCHANGES.schema.field(name).type, values, name in _NONE_IS_NULL)
        columns["latency_ns"] = _difference(raw["response_start_ns"], raw["request_end_ns"])
        columns["total_ns"] = _difference(raw["response_end_ns"], raw["request_start_ns"])
        columns |= _parts(raw)
        columns["error"] = named(raw["error_code"], error_name)
        self._of_connections(columns, array(I64, raw["connection"]))
        self._of_apis(columns, array(I64, raw["api"]))
        self._clear()
        return pa.RecordBatch.from_arrays(
            [columns[field.name].cast(field.type) for field in EXCHANGES.schema], schema=EXCHANGES.schema
        )

    def _of_connections(self, columns: dict[str, pa.Array], indices: pa.Array) -> None:
        columns["connection"] = listed(I64, [info.id for info in self._infos]).take(indices)
        for name in (
            "source",
            "cluster",
            "client_address",
            "client_port",
            "broker_address",
            "broker_port",
            "broker_id",
        ):
            kind = EXCHANGES.schema.field(name).type
            columns[name] = listed(kind, [getattr(info, name) for info in self._infos]).take(indices)

    def _of_apis(self, columns: dict[str, pa.Array], indices: pa.Array) -> None:
        plans = self._plans
        seen = [plan.api_key != NONE for plan in plans]
        keys = [plan.api_key if there else None for plan, there in zip(plans, seen, strict=True)]
        versions = [plan.api_version if there else None for plan, there in zip(plans, seen, strict=True)]
        columns["api_key"] = listed(I16, keys).take(indices)
        columns["api"] = listed(TEXT, [plan.api for plan in plans]).take(indices)
        columns["api_version"] = listed(I16, versions).take(indices)


def carried(exchange: Exchange) -> tuple[int, int, int]:
    """Return (topics, partitions, records) of a Produce request or a fetch response; NONE for unknown counts."""
    key = exchange.plan.api_key
    found = exchange.request_body if key == PRODUCE else exchange.response_body if key in (FETCH, SHARE_FETCH) else None
    if found is None:
        return NONE, NONE, NONE
    topics, records = set(), 0
    for partition in found.partitions:
        topics.add(partition.topic or partition.topic_id)
        if records != NONE:
            records = NONE if partition.records == NONE else records + partition.records
    return len(topics), len(found.partitions), records


def _carried(bulk: Bulk) -> tuple[Any, Any, Any]:
    """Return `carried` of many exchanges, by column."""
    key = bulk.plan.api_key
    found = bulk.request_body if key == PRODUCE else bulk.response_body if key in (FETCH, SHARE_FETCH) else None
    if found is None:
        return NONE, NONE, NONE
    count = len(bulk.connection)
    topics: dict[Any, int] = {}
    topic = found.topic_keys(topics)
    pairs, _ = distinct(found.of * max(len(topics), 1) + topic)
    records = np.zeros(count, np.int64)
    np.add.at(records, found.of, found.numbers["records"])
    return np.bincount(pairs // max(len(topics), 1), minlength=count), np.bincount(found.of, minlength=count), records


def _or_null(number: int | None) -> int:
    return NULL if number is None else number


def numbers(kind: pa.DataType, values: np.ndarray, none_is_null: bool = False) -> pa.Array:
    """Return a column of numbers or flags; null where a value is NULL, or NONE with `none_is_null`."""
    missing = values == (NONE if none_is_null else NULL)
    return array(kind, np.where(missing, 0, values), missing) if missing.any() else array(kind, values)


def _parts(raw: dict[str, np.ndarray]) -> dict[str, pa.Array]:
    """Return the parts of total_ns other than queue_ns and muted_ns; null for exchanges without response.

    Queue and mutes are one span that starts at the request's first byte, see `wire.muting`. In captures a response may
    begin before its request ends: then the broker's part is zero.
    """
    begun, asked, start, end = (raw[name] for name in _ENDS)
    missing = (begun == NONE) | (asked == NONE) | (start == NONE) | (end == NONE) | (raw["queue_ns"] == NONE)
    loss, closed = np.array([raw[name] for name in STALLED[:3]]), np.array([raw[name] for name in STALLED[3:]])
    begun = np.minimum(begun + raw["queue_ns"] + raw["muted_ns"], start)
    sent = np.maximum(begun, np.minimum(asked, start))
    spent = (sent - begun, start - sent, end - start)
    parts = dict(zip(("sending_ns", "broker_ns", "receiving_ns"), spent - loss - closed, strict=True))
    found = {name: array(I64, np.where(missing, 0, values), missing) for name, values in parts.items()}
    missing = missing | (raw["retransmissions"] == NONE)  # TCP was not seen
    for name, some in (("loss_ns", loss), ("closed_window_ns", closed)):
        found[name] = array(I64, np.where(missing, 0, some.sum(axis=0)), missing)
    return found


def _difference(later: np.ndarray, earlier: np.ndarray) -> pa.Array:
    missing = (later == NONE) | (earlier == NONE)
    return array(I64, np.where(missing, 0, later - earlier), missing)


_NO_CODE = -(1 << 15) - 1  # below every int16


def named(codes: np.ndarray, name: Callable[[int], str]) -> pa.Array:
    """Return a column with the name of each code; null for NULL."""
    known, inverse = distinct(np.where(codes == NULL, _NO_CODE, codes))
    names = listed(TEXT, [None if code == _NO_CODE else name(int(code)) for code in known])
    return names.take(array(I64, inverse))

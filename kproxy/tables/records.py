"""Records of batches -> Arrow batches of the `records` table: chosen topics, and a limited part of keys and values.

Duty: selects topics, limits or hashes their bytes, and makes the rows. The name of a topic that a body identifies by id
may become known later, so rows with only an id are kept, and selected when they are written (`Chosen.of`).

Bounded by: BATCH_BYTES for a copy of one batch, and ROOM_BYTES for all copies (`bodies.Room`); DECOMPRESSED_BYTES of
one batch; ROWS rows, or KEPT_BYTES of their shown bytes, until the owner takes them; BODY_BYTES of shown bytes from one
body, since rows of one time are sorted in memory. Batches beyond a limit, and undecodable ones, are counted with their
bytes. ROOM_BYTES is shared, so batches beyond it depend on the copies held at that time. Does not write files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kproxy.errors import KproxyError, ProtocolError
from kproxy.protocol.records import Batch, Record
from kproxy.protocol.shown.secrets import SECRET_TOPICS
from kproxy.tables.arrays import listed
from kproxy.tables.partitions import BodyRows
from kproxy.tables.schema import BYTES, HEADERS, RECORDS, TEXT
from kproxy.wire import bodies
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT, NONE, Exchange

BATCH_BYTES = 16 << 20  # brokers take 1 MiB unless they are configured otherwise
ROOM_BYTES = 64 << 20
DECOMPRESSED_BYTES = 16 << 20
ROWS = 16 * 1024
KEPT_BYTES = 8 << 20
BODY_BYTES = 32 << 20
HASH_BYTES = 16
SHOWN_BYTES = 64

Show = Callable[[bytes | None], bytes | None]


def hashed(data: bytes | None) -> bytes | None:
    return None if data is None else blake2b(data, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True)
class Chosen:
    """The topics whose records are rows, and the part of keys, values and headers that is shown."""

    topics: tuple[str, ...]  # names or ids; * ? [] as in a shell
    shown_bytes: int | None = SHOWN_BYTES  # the first bytes; None: all
    hashed: bool = False  # show 16 bytes of BLAKE2b instead: equal values stay equal

    def is_chosen(self, name: str | None) -> bool:
        return name is not None and any(fnmatchcase(name, topic) for topic in self.topics)

    def may_be_chosen(self, name: str | None, identity: UUID | None) -> bool:
        return self.is_chosen(name) if name is not None else identity is not None

    def show(self, data: bytes | None) -> bytes | None:
        if self.hashed:
            return hashed(data)
        return data if data is None or self.shown_bytes is None else data[: self.shown_bytes]

    def of(self, rows: pa.Table) -> pa.Table:
        """Return the rows of chosen topics; call it after names were filled in."""
        told = [
            listed(TEXT, [name for name in pc.unique(rows[column]).to_pylist() if self.is_chosen(name)])
            for column in ("topic", "topic_id")
        ]
        return rows.filter(
            pc.or_(pc.is_in(rows["topic"], value_set=told[0]), pc.is_in(rows["topic_id"], value_set=told[1]))
        )


def chosen(topics: str, values: str) -> Chosen:
    """Return the choice of two options: topics separated by commas; a number of bytes, `hash` or `all`.

    Raises KproxyError for other values.
    """
    names = tuple(name.strip() for name in topics.split(",") if name.strip())
    if not names:
        raise KproxyError("no topic is named: give names, like orders,billing.*")
    if values in ("hash", "all"):
        return Chosen(names, None, values == "hash")
    if not values.isdecimal():
        raise KproxyError(f"{values!r} is not what records can show: give a number of bytes, hash or all")
    return Chosen(names, int(values))


class RecordColumns(BodyRows):
    """Rows of `records`."""

    def __init__(self, chosen: Chosen) -> None:
        super().__init__(RECORDS, ("base_offset", "offset", "timestamp", "bytes", "key_bytes", "value_bytes"))
        self._chosen = chosen
        self.room = bodies.Room(lru_cache(4096)(chosen.may_be_chosen), BATCH_BYTES, ROOM_BYTES)
        self.left_out = 0  # batches beyond what one body may show
        self.left_out_bytes = 0
        self.unread = 0  # batches that could not be read, or not to their end
        self.unread_bytes = 0

    def _clear(self) -> None:
        super()._clear()
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._header_ends: list[int] = [0]
        self._header_names: list[bytes] = []
        self._header_values: list[bytes | None] = []
        self._kept_bytes = 0

    def missing(self) -> Iterator[tuple[str, int, int]]:
        """Yield (kind of `quality`, batches, bytes) of chosen batches without rows."""
        left_out = self.left_out + self.room.left_out
        if left_out:
            yield "records_left_out", left_out, self.left_out_bytes + self.room.left_out_bytes
        if self.unread:
            yield "records_unread", self.unread, self.unread_bytes

    @property
    def size(self) -> int:
        return super().size + self._kept_bytes

    @property
    def is_full(self) -> bool:
        return self.rows >= ROWS or self._kept_bytes >= KEPT_BYTES

    def append(self, info: ConnectionInfo, exchange: Exchange, hand_on: Callable[[], None]) -> None:
        """Add the records of an exchange; `hand_on` is called when the rows are full, and must take `batch()`."""
        for direction, found in ((CLIENT, exchange.request_body), (BROKER, exchange.response_body)):
            self._body_bytes = 0
            for batch in () if found is None else found.batches:
                if batch.copy is None:
                    continue
                try:
                    if not self._append(info, exchange, direction, batch, batch.copy.data, hand_on):
                        self.left_out += 1
                        self.left_out_bytes += batch.header.size_bytes
                except ProtocolError:
                    self.unread += 1
                    self.unread_bytes += batch.header.size_bytes

    def _append(
        self,
        info: ConnectionInfo,
        exchange: Exchange,
        direction: int,
        batch: bodies.Batch,
        content: bytearray,
        hand_on: Callable[[], None],
    ) -> bool:
        """Add the records of a batch; return False if BODY_BYTES are exceeded."""
        secret = batch.topic in SECRET_TOPICS or batch.topic_id in SECRET_TOPICS
        show = self._chosen.show
        show_value = hashed if secret else show
        common: tuple[int, ...] = ()
        for record in Batch(batch.header, memoryview(content)).records(DECOMPRESSED_BYTES):
            if self._body_bytes >= BODY_BYTES:
                return False
            if self.is_full:
                hand_on()
                common = ()
            if not common:  # the first record of this batch, or the first after `hand_on`
                common = self.common(info, exchange, direction)
                of_topic = self.topics[batch.topic, batch.topic_id]
            self._packed.packed += self._packed.pack(
                *common,
                of_topic,
                batch.partition,
                batch.header.base_offset,
                record.offset,
                record.timestamp,
                _size(record),
                NONE if record.key is None else len(record.key),
                NONE if record.value is None else len(record.value),
            )
            self.rows += 1
            key, value = show(record.key), show_value(record.value)
            self._keys.append(key)
            self._values.append(value)
            kept = len(key or b"") + len(value or b"") + _ROW_BYTES
            for name, header in record.headers:
                cut = name.encode()[: self._chosen.shown_bytes]  # no partial character: this column is text
                shown_name, shown = cut.decode(errors="ignore").encode(), show_value(header)
                self._header_names.append(shown_name)
                self._header_values.append(shown)
                kept += len(shown_name) + len(shown or b"") + _ROW_BYTES
            self._header_ends.append(len(self._header_names))
            self._kept_bytes += kept
            self._body_bytes += kept
        return True

    def _raw(self) -> dict[str, np.ndarray]:
        """Return the packed columns in the order of arrival, which is the order of keys and values."""
        return self._packed.columns()

    def _columns(self, raw: dict[str, np.ndarray]) -> dict[str, pa.Array]:
        columns = super()._columns(raw)
        columns["key"] = listed(BYTES, self._keys)
        columns["value"] = listed(BYTES, self._values)
        pairs = [listed(TEXT, self._header_names), listed(BYTES, self._header_values)]
        structs = pa.Array.from_buffers(HEADERS.value_type, len(self._header_names), [None], children=pairs)
        ends = pa.py_buffer(np.array(self._header_ends, np.int32))
        columns["headers"] = pa.Array.from_buffers(HEADERS, self.rows, [None, ends], children=[structs])
        return columns


_ROW_BYTES = 120  # approximate memory of a row's objects


def _size(record: Record) -> int:
    size = len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name.encode()) + len(value or b"")
    return size

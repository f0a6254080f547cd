"""Records in Produce and Fetch: message sets v0 and v1, record batches v2, read and written.

    base offset (int64) | length (int32) | leader epoch or crc (4) | magic (int8) | ...

Three depths of reading: `read_header` reads the first 61 bytes and never the payload, `read_batches` cuts a buffer into
whole batches, and `Batch.records` decompresses and yields one record at a time. Memory is the buffer, one decompressed
batch (bounded, see `compression`) and one record. A batch keeps a view of the buffer, so use it before the buffer is
filled again.

A Fetch may end in an incomplete batch: that is a count of trailing bytes, never a fault. Checksums are reported, never
enforced; the messages inside a compressed message set are covered by the checksum of the message around them. In
message sets an uncompressed message is a batch of its own, and a compressed one is a batch with its count and first
offset inside it. There is one level of compression: a compressed message inside another is Malformed.

Refuses to know the content of keys and values, except the type of a control record.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from struct import Struct
from typing import NamedTuple

from kproxy.errors import Malformed, Unsupported
from kproxy.protocol.compression import MAX_DECOMPRESSED_BYTES, NONE, ZSTD, compress, decompress
from kproxy.protocol.primitives import (
    Buffer,
    read_varint,
    read_varlong,
    write_varint,
    write_varlong,
)

HEADER_BYTES = 61  # of a batch v2; a message has fewer

CONTROL_TYPES = (
    "ABORT",
    "COMMIT",
    "LEADER_CHANGE",
    "SNAPSHOT_HEADER",
    "SNAPSHOT_FOOTER",
    "KRAFT_VERSION",
    "KRAFT_VOTERS",
)

_PREFIX_BYTES = 12  # offset and length, which the length does not count
_MAGIC_AT = 16
_V2_SUMMED = _MAGIC_AT + 5  # the checksum of a batch v2 covers everything from here on
V2 = Struct(">qiibIhiqqqhii")
# Of a batch v2: length, magic, attributes and record count.
V2_COUNTS = Struct(">8xi4xb4xh34xi")
_MESSAGE = Struct(">qiIbb")  # offset, length, crc, magic, attributes; v1 goes on with a timestamp
_INT64 = Struct(">q")
_INT32 = Struct(">i")
_UINT32 = Struct(">I")
_INT16_PAIR = Struct(">hh")
_MESSAGE_BYTES = (_MESSAGE.size, _MESSAGE.size + 8)  # before the key, by magic
LEAST_LENGTH = (14, 22, HEADER_BYTES - _PREFIX_BYTES)  # by magic, without the prefix

_ZERO_STEP = 1 << 16

CODEC = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
CONTROL = 0x20
_DELETE_HORIZON = 0x40

_new = tuple.__new__  # a named tuple at half the cost of naming its fields

_INT32_MAX = (1 << 31) - 1
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


class Record(NamedTuple):
    offset: int
    timestamp: int  # milliseconds; -1: none
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class BatchHeader(NamedTuple):
    """The header of a batch v2 in the order of the wire, and as much of it as a message has.

    A compressed message states only its last offset: that is the base offset here, and the record count is -1.
    """

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole batch, including this header."""
        return self.length + _PREFIX_BYTES

    @property
    def codec(self) -> int:
        return self.attributes & CODEC

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record; sequences continue at 0 after the largest int32; -1: none."""
        if self.base_sequence == -1:
            return -1
        last = self.base_sequence + self.last_offset_delta
        return last - (1 << 31) if last > _INT32_MAX else last

    @property
    def timestamp_type(self) -> str:
        if self.magic == 0:
            return "NoTimestampType"
        return "LogAppendTime" if self.attributes & _LOG_APPEND_TIME else "CreateTime"

    @property
    def is_transactional(self) -> bool:
        return self.magic == 2 and bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return self.magic == 2 and bool(self.attributes & CONTROL)

    @property
    def delete_horizon(self) -> int | None:
        """The time from which tombstones and markers of this compacted batch may be removed (KIP-534), or None."""
        return self.base_timestamp if self.magic == 2 and self.attributes & _DELETE_HORIZON else None


class Batch:
    """A whole batch: its header, and its checksum and records, computed on request."""

    def __init__(self, header: BatchHeader, view: memoryview) -> None:
        self.header = header
        self.view = view

    @cached_property
    def crc_valid(self) -> bool:
        """Whether the checksum matches; in a batch v2 it covers the attributes and all bytes after them."""
        return crc_valid(self.header, self.view)

    @cached_property
    def base_offset(self) -> int:
        """The offset of the first record. A compressed message set is decompressed to find it."""
        header = self.header
        if header.magic == 2 or header.codec == NONE:
            return header.base_offset
        first, last = self._inner_offsets(MAX_DECOMPRESSED_BYTES)
        return first + self._shift(last)

    def records(self, limit_bytes: int = MAX_DECOMPRESSED_BYTES) -> Iterator[Record]:
        """Yield the records one by one; raises Malformed at the faulty record, after those before it."""
        header = self.header
        if header.magic == 2:
            if header.record_count == 0:  # all compacted away; nothing to decompress
                return
            payload: Buffer = self.view[HEADER_BYTES:]
            if header.codec != NONE:
                payload = decompress(header.codec, payload, limit_bytes=limit_bytes)
            yield from _read_records(header, payload)
        elif header.codec == NONE:
            yield _read_message(header, self.view, header.base_offset, header.base_timestamp)
        else:
            shift = self._shift(self._inner_offsets(limit_bytes)[1]) if header.magic else 0
            stamped = header.timestamp_type == "LogAppendTime"
            for message in self._inner(limit_bytes):
                inner = message.header
                timestamp = header.base_timestamp if stamped and inner.magic == 1 else inner.base_timestamp
                yield _read_message(inner, message.view, inner.base_offset + shift, timestamp)

    def _inner(self, limit_bytes: int) -> Iterator["Batch"]:
        """Yield the messages inside a compressed one; there must be at least one."""
        outer = self.header
        value = _read_message(outer, self.view, outer.base_offset, outer.base_timestamp).value
        if value is None:
            raise Malformed("a compressed message has no value")
        if outer.codec == ZSTD:
            raise Unsupported("zstd in a message set: it came with record batches v2 (KIP-110)")
        plain = memoryview(decompress(outer.codec, value, magic=outer.magic, limit_bytes=limit_bytes))
        pos = 0
        for pos, header in iterate_headers(plain):
            if header.magic == 2 or header.codec != NONE:
                raise Malformed("inside a compressed message only uncompressed messages may stand")
            yield Batch(header, plain[pos : pos + header.size_bytes])
            pos += header.size_bytes
        if pos == 0:  # like Kafka's reader, ignore an incomplete message after others
            raise Malformed(f"a compressed message holds {len(plain)} bytes that are no message")

    def _inner_offsets(self, limit_bytes: int) -> tuple[int, int]:
        """Return the offsets of the first and the last inner message, as written."""
        first = last = None
        for message in self._inner(limit_bytes):
            last = message.header.base_offset
            first = last if first is None else first
        assert first is not None and last is not None  # _inner yields at least one or raises
        return first, last

    def _shift(self, last_inner_offset: int) -> int:
        """Return the number that makes inner offsets absolute.

        Inner offsets of v1 are relative, and the outer offset is that of the last record. Some versions of librdkafka
        leave the outer offset at 0.
        """
        outer = self.header.base_offset
        if self.header.magic == 0 or outer == 0:
            return 0
        if outer < last_inner_offset:
            raise Malformed(f"a compressed message at offset {outer} holds one at relative offset {last_inner_offset}")
        return outer - last_inner_offset


def read_header(buffer: Buffer, pos: int, end: int) -> BatchHeader | None:
    """Return the header at `pos`, or None while too few bytes are before `end`. Raises Malformed or Unsupported."""
    if end - pos <= _MAGIC_AT:
        return None
    magic = buffer[pos + _MAGIC_AT]
    if magic == 2:
        if end - pos < HEADER_BYTES:
            return None
        header = _new(BatchHeader, V2.unpack_from(buffer, pos))
        if header.record_count < 0:
            raise Malformed(f"a batch of {header.record_count} records")
    elif magic > 2:
        raise Unsupported(f"records of magic {magic}: 0, 1 and 2 are known")
    else:
        if end - pos < _MESSAGE_BYTES[magic]:
            return None
        offset, length, crc, magic, attributes = _MESSAGE.unpack_from(buffer, pos)
        timestamp = _INT64.unpack_from(buffer, pos + _MESSAGE.size)[0] if magic else -1
        count = -1 if attributes & CODEC else 1
        header = BatchHeader(offset, length, -1, magic, crc, attributes, 0, timestamp, timestamp, -1, -1, -1, count)
    if header.length < LEAST_LENGTH[magic]:
        raise Malformed(f"a batch of magic {magic} and {header.length} bytes: {LEAST_LENGTH[magic]} is the least")
    return header


def crc32c(data: Buffer, before: int = 0) -> int:
    """Return the CRC-32C of bytes, continuing from the one of the bytes before them.

    Its package is imported by the first call: on import it looks up its own version, which loads importlib.metadata and
    email, 15 ms of CPU time in each process that reads batches and checks none.
    """
    from crc32c import crc32c as summed

    return summed(data, before)


def crc_valid(header: BatchHeader, content: memoryview) -> bool:
    """Whether the checksum of a whole batch matches its content."""
    if header.magic == 2:
        return crc32c(content[_V2_SUMMED:]) == header.crc
    return zlib.crc32(content[_MAGIC_AT:]) == header.crc


class Checksum:
    """The checksum of a batch whose bytes arrive in pieces, in order."""

    __slots__ = ("_add", "_crc", "_expected", "_skip", "left")

    def __init__(self, header: BatchHeader) -> None:
        self.left = header.size_bytes
        self._add: Callable[[Buffer, int], int] = crc32c if header.magic == 2 else zlib.crc32
        self._skip = _V2_SUMMED if header.magic == 2 else _MAGIC_AT
        self._crc = 0
        self._expected = header.crc

    def add(self, piece: memoryview) -> None:
        self.left -= len(piece)
        if self._skip:
            skipped = min(self._skip, len(piece))
            self._skip -= skipped
            piece = piece[skipped:]
        self._crc = self._add(piece, self._crc)

    @property
    def is_valid(self) -> bool:
        return not self.left and self._crc == self._expected


def iterate_headers(buffer: Buffer, start: int = 0, end: int | None = None) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each batch that ends by `end`."""
    end = len(buffer) if end is None else end
    while (header := read_header(buffer, start, end)) is not None and header.size_bytes <= end - start:
        yield start, header
        start += header.size_bytes


def read_batches(buffer: Buffer) -> tuple[list[Batch], int]:
    """Return the whole batches of a buffer, and the number of bytes after them: an incomplete batch, or zeros.

    A segment that a broker allocated in advance (`log.preallocate`) ends in zeros.

    The buffer is the `records` of one partition in a Produce or a Fetch: record batches of magic 2, or messages of
    magic 0 and 1. A `Batch` has its `header` (offsets, producer, codec; times in milliseconds), `crc_valid`, and
    `records()`, which yields (offset, timestamp in ms, key, value, headers) one by one, decompressed. It keeps a view
    of the buffer. Raises Malformed or Unsupported, and so does `records()`. Format:
    https://kafka.apache.org/documentation/#messageformat
    """
    view = memoryview(buffer)
    batches: list[Batch] = []
    end = 0
    try:
        for pos, header in iterate_headers(view):
            end = pos + header.size_bytes
            batches.append(Batch(header, view[pos:end]))
    except Malformed:
        if not is_zero(view[end:]):
            raise
    return batches, len(view) - end


def is_zero(view: memoryview) -> bool:
    """Whether all bytes are zero, like the unused part of a preallocated segment."""
    pieces = (view[at : at + _ZERO_STEP] for at in range(0, len(view), _ZERO_STEP))
    return all(bytes(piece).count(0) == len(piece) for piece in pieces)


def control_type(record: Record) -> str:
    """Return the type of a control record, from its key: an int16 version and an int16 type. Raises Malformed."""
    if record.key is None or len(record.key) < 4:
        raise Malformed("a control record without a type in its key")
    _, type_ = _INT16_PAIR.unpack_from(record.key)
    return CONTROL_TYPES[type_] if 0 <= type_ < len(CONTROL_TYPES) else f"unknown_{type_}"


def _read_message(header: BatchHeader, view: memoryview, offset: int, timestamp: int) -> Record:
    key, pos = _read_int32_bytes(view, _MESSAGE_BYTES[header.magic])
    value, pos = _read_int32_bytes(view, pos)
    if pos != len(view):
        raise Malformed(f"{len(view) - pos} bytes after the value of a message")
    return Record(_int64(offset, "offset"), timestamp, key, value)


def _read_int32_bytes(view: memoryview, pos: int) -> tuple[bytes | None, int]:
    if len(view) - pos < 4:
        raise Malformed("a message is cut short")
    size = _INT32.unpack_from(view, pos)[0]
    pos += 4
    if size < 0:  # -1 by the specification; Kafka's reader accepts any
        return None, pos
    if size > len(view) - pos:
        raise Malformed(f"a key or value of {size} bytes in a message that has {len(view) - pos} left")
    return bytes(view[pos : pos + size]), pos + size


def _read_records(header: BatchHeader, payload: Buffer) -> Iterator[Record]:
    pos, end = 0, len(payload)
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    log_append_time = header.max_timestamp if header.attributes & _LOG_APPEND_TIME else None
    for _ in range(header.record_count):
        size, pos = read_varint(payload, pos)
        stop = pos + size
        if size < 0 or stop > end:
            raise Malformed(f"a record of {size} bytes where {end - pos} are left")
        timestamp, pos = read_varlong(payload, pos + 1)  # after the attributes, which are unused
        offset, pos = read_varint(payload, pos)
        key, pos = _read_varint_bytes(payload, pos, stop)
        value, pos = _read_varint_bytes(payload, pos, stop)
        count, pos = read_varint(payload, pos)
        if count:
            if not 0 <= count * 2 <= stop - pos:
                raise Malformed(f"{count} headers in {stop - pos} bytes")
            headers = []
            for _ in range(count):
                name, pos = _read_varint_bytes(payload, pos, stop)
                if name is None:
                    raise Malformed("a record's header has no key")
                header_value, pos = _read_varint_bytes(payload, pos, stop)
                headers.append((name.decode("utf-8", "replace"), header_value))  # like Java's reader
        if pos != stop:
            raise Malformed(f"a record of {size} bytes takes {pos - stop + size}")
        yield Record(
            _int64(base_offset + offset, "offset"),
            _int64(base_timestamp + timestamp, "timestamp") if log_append_time is None else log_append_time,
            key,
            value,
            tuple(headers) if count else (),
        )
    if pos != end:
        raise Malformed(f"{end - pos} bytes after the last of {header.record_count} records")


def _read_varint_bytes(payload: Buffer, pos: int, stop: int) -> tuple[bytes | None, int]:
    size, pos = read_varint(payload, pos)
    if size < 0:
        return None, pos
    end = pos + size
    if end > stop:
        raise Malformed(f"{size} bytes in a record that has {stop - pos} left")
    return bytes(payload[pos:end]), end


def _int64(value: int, what: str) -> int:
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise Malformed(f"a record's {what} leaves the range of int64")
    return value


# ------------------------------------------------------------------------------------------------------------- writing


def write_batch(
    records: Sequence[Record],
    *,
    codec: int = NONE,
    base_offset: int | None = None,
    leader_epoch: int = -1,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    is_transactional: bool = False,
    is_control: bool = False,
    log_append_time: int | None = None,
    delete_horizon: int | None = None,
) -> bytes:
    """Return a batch v2 of one or more records, offsets ascending; the base offset is the first record's by default."""
    first, last = records[0], records[-1]
    if base_offset is None:
        base_offset = first.offset
    base_timestamp = first.timestamp if delete_horizon is None else delete_horizon
    payload = bytearray()
    for record in records:
        body = bytearray(b"\0")
        body += write_varlong(record.timestamp - base_timestamp)
        body += write_varint(record.offset - base_offset)
        _write_varint_bytes(body, record.key)
        _write_varint_bytes(body, record.value)
        body += write_varint(len(record.headers))
        for name, value in record.headers:
            _write_varint_bytes(body, name.encode())
            _write_varint_bytes(body, value)
        payload += write_varint(len(body))
        payload += body
    attributes = (
        codec
        | (_LOG_APPEND_TIME if log_append_time is not None else 0)
        | (_TRANSACTIONAL if is_transactional else 0)
        | (CONTROL if is_control else 0)
        | (_DELETE_HORIZON if delete_horizon is not None else 0)
    )
    compressed = compress(codec, bytes(payload))
    header = BatchHeader(
        base_offset,
        HEADER_BYTES - _PREFIX_BYTES + len(compressed),
        leader_epoch,
        2,
        0,
        attributes,
        last.offset - base_offset,
        base_timestamp,
        max(record.timestamp for record in records) if log_append_time is None else log_append_time,
        producer_id,
        producer_epoch,
        base_sequence,
        len(records),
    )
    out = bytearray(V2.pack(*header)) + compressed
    _UINT32.pack_into(out, _MAGIC_AT + 1, crc32c(memoryview(out)[_MAGIC_AT + 5 :]))
    return bytes(out)


def write_message_set(
    records: Sequence[Record], *, magic: int, codec: int = NONE, log_append_time: int | None = None
) -> bytes:
    """Return a message set v0 or v1 of at least one record, compressed as one message if a codec is given."""
    flag = _LOG_APPEND_TIME if log_append_time is not None and magic else 0
    first, last = records[0], records[-1]
    relative_to = first.offset if codec != NONE and magic else 0
    messages = b"".join(
        _write_message(
            record.offset - relative_to,
            magic,
            flag,
            record.timestamp if log_append_time is None else log_append_time,
            record.key,
            record.value,
        )
        for record in records
    )
    if codec == NONE:
        return messages
    if codec == ZSTD:
        raise Unsupported("zstd in a message set: it came with record batches v2 (KIP-110)")
    timestamp = max(record.timestamp for record in records) if log_append_time is None else log_append_time
    return _write_message(last.offset, magic, codec | flag, timestamp, None, compress(codec, messages, magic=magic))


def _write_message(
    offset: int, magic: int, attributes: int, timestamp: int, key: bytes | None, value: bytes | None
) -> bytes:
    body = b"".join(
        (
            bytes((magic, attributes)),
            _INT64.pack(timestamp) if magic else b"",
            *(_INT32.pack(-1) if part is None else _INT32.pack(len(part)) + part for part in (key, value)),
        )
    )
    return _INT64.pack(offset) + _INT32.pack(len(body) + 4) + _UINT32.pack(zlib.crc32(body)) + body


def _write_varint_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out += write_varint(-1)
    else:
        out += write_varint(len(value))
        out += value

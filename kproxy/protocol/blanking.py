"""Replaces the content of records in batches, keys, values and header values, by zeros.

Duty: offsets, times, sizes, counts, codec and producer stay the same, and checksums are valid, so that every reader
accepts the result. An uncompressed batch keeps its size; a compressed one is compressed again, and is smaller. Batches
of control records are unchanged: they contain no user data.

Memory: a batch, decompressed and bounded (`compression`). Time: bounded by an `Allowance`, since a kilobyte can hold
millions of records; a compressed message of an old format may hold no compressed messages, as in brokers. Refuses to
know the frames around batches.
"""

import zlib
from dataclasses import dataclass
from struct import Struct

from kproxy.errors import Malformed, TooLarge
from kproxy.protocol.compression import NONE, compress, decompress
from kproxy.protocol.primitives import Buffer, read_varint, read_varlong
from kproxy.protocol.records import HEADER_BYTES, BatchHeader, crc32c, iterate_headers, read_header

_LENGTH_AT = 8
# By magic: start of the checksum, of the bytes that it covers, and of the content.
_CRC_AT = (12, 12, 17)
_SUMMED_AT = (16, 16, 21)
_CONTENT_AT = (18, 26, HEADER_BYTES)
_RECORD_BYTES = 7  # smallest record of magic 2
_PREFIX_BYTES = 12  # bytes before those that the length counts
_INT32 = Struct(">i")
_UINT32 = Struct(">I")


@dataclass
class Allowance:
    """The remaining budget for unpacking, shared by several calls. Raises TooLarge when it is used up."""

    records: int
    unpacked_bytes: int
    batch_bytes: int = 16 << 20  # per batch, unpacked

    def unpack(self, codec: int, payload: Buffer, magic: int) -> bytes:
        limit_bytes = min(self.batch_bytes, self.unpacked_bytes)
        try:
            plain = decompress(codec, payload, magic=magic, limit_bytes=limit_bytes)
        except Malformed:  # charge the maximum: the output so far is unknown
            self.unpacked_bytes -= limit_bytes
            raise
        self.unpacked_bytes -= len(plain)
        return plain

    def take(self, records: int) -> None:
        if records > self.records:
            raise TooLarge(f"{records} records, where {self.records} more are looked at")
        self.records -= max(0, records)


def blank(records: Buffer, allowance: Allowance) -> bytes:
    """Return the batches of a Produce or a Fetch, blanked. Raises Malformed or Unsupported if they cannot be."""
    return _blank(records, allowance, is_inner=False)


def _blank(records: Buffer, allowance: Allowance, *, is_inner: bool) -> bytes:
    view = memoryview(records)
    out = bytearray()
    end = 0
    for pos, header in iterate_headers(view):
        end = pos + header.size_bytes
        if is_inner and (header.magic == 2 or header.codec != NONE):
            raise Malformed("a compressed message holds batches, or messages that are compressed")
        out += _batch(header, view[pos:end], allowance)
    if end < len(view):  # a Fetch may end in an incomplete batch
        cut = view[end:]
        head = cut[:16] if read_header(cut, 0, len(cut)) is None else cut[: _CONTENT_AT[cut[16]]]
        out += bytes(head) + bytes(len(cut) - len(head))
    return bytes(out)


def _batch(header: BatchHeader, batch: memoryview, allowance: Allowance) -> bytes:
    if header.is_control:
        return bytes(batch)
    start = _CONTENT_AT[header.magic]
    payload: Buffer = batch[start:]
    if header.magic == 2:
        content = bytearray(payload if header.codec == NONE else _decompressed(header, payload, allowance))
        allowance.take(min(header.record_count, len(content) // _RECORD_BYTES))
        _blank_records(header.record_count, content)
        done = bytes(content) if header.codec == NONE else compress(header.codec, bytes(content))
    else:
        allowance.take(1)
        content = bytearray(payload)
        key, value = _message_spans(content)
        if header.codec == NONE:
            _zero(content, *key)
            _zero(content, value[0], len(content))
            done = bytes(content)
        else:
            plain = allowance.unpack(header.codec, content[value[0] : value[1]], header.magic)
            inner = compress(header.codec, _blank(plain, allowance, is_inner=True), magic=header.magic)
            _zero(content, *key)
            done = bytes(content[: value[0] - 4]) + _INT32.pack(len(inner)) + inner
    out = bytearray(batch[:start]) + done
    _INT32.pack_into(out, _LENGTH_AT, len(out) - _PREFIX_BYTES)
    summed = memoryview(out)[_SUMMED_AT[header.magic] :]
    checksum = crc32c(summed) if header.magic == 2 else zlib.crc32(summed)
    summed.release()
    _UINT32.pack_into(out, _CRC_AT[header.magic], checksum)
    return bytes(out)


def _decompressed(header: BatchHeader, payload: Buffer, allowance: Allowance) -> bytes:
    return allowance.unpack(header.codec, payload, header.magic) if header.record_count else b""


def _blank_records(count: int, content: bytearray) -> None:
    """Replace the content of records of magic 2 by zeros; lengths stay the same."""
    pos = 0
    for _ in range(count):
        size, pos = read_varint(content, pos)
        stop = pos + size
        if size < 0 or stop > len(content):
            raise Malformed(f"a record of {size} bytes where {len(content) - pos} are left")
        _, pos = read_varlong(content, pos + 1)
        _, pos = read_varint(content, pos)
        pos = _blank_varint_bytes(content, pos, stop)
        pos = _blank_varint_bytes(content, pos, stop)
        headers, pos = read_varint(content, pos)
        if not 0 <= headers * 2 <= stop - pos:
            raise Malformed(f"{headers} headers in {stop - pos} bytes")
        for _ in range(headers):
            name, pos = read_varint(content, pos)
            pos = _blank_varint_bytes(content, pos + max(0, name), stop)
        if pos != stop:
            raise Malformed(f"a record of {size} bytes takes {pos - stop + size}")
    _zero(content, pos, len(content))  # bytes beyond the record count


def _blank_varint_bytes(content: bytearray, pos: int, stop: int) -> int:
    size, pos = read_varint(content, pos)
    end = pos + max(0, size)
    if end > stop:
        raise Malformed(f"{size} bytes in a record that has {stop - pos} left")
    _zero(content, pos, end)
    return end


def _message_spans(content: bytearray) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the positions of a message's key and value: (start, end) of each."""
    spans, pos = [], 0
    for _ in range(2):
        if len(content) - pos < 4:
            raise Malformed("a message is cut short")
        size = max(0, _INT32.unpack_from(content, pos)[0])
        pos += 4
        if size > len(content) - pos:
            raise Malformed(f"a key or value of {size} bytes in a message that has {len(content) - pos} left")
        spans.append((pos, pos + size))
        pos += size
    return spans[0], spans[1]


def _zero(content: bytearray, start: int, end: int) -> None:
    content[start:end] = bytes(end - start)

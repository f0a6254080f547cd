"""Integers of variable length and tag sections over (buffer, position), read, skipped and written.

Fixed-size values are left to `struct`. Readers return the value and the position after it, and raise only Malformed. A
buffer is anything that returns integers by index: bytes, bytearray, memoryview.
"""

from kproxy.errors import Malformed

Buffer = bytes | bytearray | memoryview


def read_uvarint(buffer: Buffer, pos: int) -> tuple[int, int]:
    """Return an unsigned varint of at most 32 bits, such as lengths, tags and counts.

    Java drops the bits beyond 32, and so reads another number: a tag of 2**32 as tag 0.
    """
    try:
        value = buffer[pos]
        pos += 1
        if value > 127:
            value &= 127
            for shift in (7, 14, 21, 28):
                byte = buffer[pos]
                pos += 1
                value |= (byte & 127) << shift
                if byte < 128:
                    break
            else:
                raise Malformed("a varint of more than five bytes")
            if value > 0xFFFF_FFFF:
                raise Malformed("a varint of more than 32 bits")
    except IndexError:
        raise Malformed("a varint is cut short") from None
    return value, pos


def read_varint(buffer: Buffer, pos: int) -> tuple[int, int]:
    """Return a zigzag varint of at most 32 bits, such as the lengths in a record."""
    value, pos = read_uvarint(buffer, pos)
    return (value >> 1) ^ -(value & 1), pos


def read_varlong(buffer: Buffer, pos: int) -> tuple[int, int]:
    """Return a zigzag varint of at most 64 bits, such as a record's timestamp delta."""
    value = shift = 0
    try:
        while True:
            byte = buffer[pos]
            pos += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return (value >> 1) ^ -(value & 1), pos
            shift += 7
            if shift > 63:
                raise Malformed("a varint of more than ten bytes")
    except IndexError:
        raise Malformed("a varint is cut short") from None


def write_uvarint(value: int) -> bytes:
    if 0 <= value < 128:
        return _ONE_BYTE[value]
    if not 0 <= value < 1 << 32:
        raise Malformed(f"{value} does not fit an unsigned varint")
    return _write(value)


def write_varint(value: int) -> bytes:
    return _write((value << 1) ^ (value >> 31))


def write_varlong(value: int) -> bytes:
    return _write((value << 1) ^ (value >> 63))


def skip_tags(buffer: Buffer, pos: int, end: int) -> int:
    """Return the position after the tag section that begins at `pos`."""
    count, pos = read_uvarint(buffer, pos)
    if count * 2 > end - pos:
        raise Malformed(f"{count} tagged fields in {end - pos} bytes")
    try:
        for _ in range(count):
            size = buffer[pos + 1]
            if buffer[pos] < 128 > size:  # read in place: a section can have a tag for every two bytes
                pos += 2 + size
            else:
                _, pos = read_uvarint(buffer, pos)
                size, pos = read_uvarint(buffer, pos)
                pos += size
            if pos > end:
                raise Malformed("a tagged field is cut short")
    except IndexError:
        raise Malformed("a tagged field is cut short") from None
    return pos


def _write(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE = tuple(bytes((value,)) for value in range(128))

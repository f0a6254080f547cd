"""ZooKeeper's records ("jute") as values: read and written by the layouts from `tools/make_zookeeper.py`.

An int has 4 bytes, a long 8, a bool 1; a string and a buffer have a length of 4 bytes before them, -1 for null; a
vector has the count of its elements. All are big-endian (`org.apache.jute.BinaryOutputArchive`). A record becomes a
dict by the names of its fields.

Bounds: a length or a count must fit into the remaining bytes, so values take no more elements than the frame has. The
only exception is Malformed. Refuses to know frames and operations.
"""

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from struct import Struct
from typing import Any

from kproxy.errors import Malformed

Values = dict[str, Any]
Reader = Callable[[memoryview, int], tuple[Any, int]]

_INT, _LONG, _BOOL = Struct(">i"), Struct(">q"), Struct(">?")
_FIXED = {"int": _INT, "long": _LONG, "bool": _BOOL}


@cache
def layouts() -> dict[str, Any]:
    """Return the layouts and numbers of ZooKeeper, from the official jars."""
    text = (files("kproxy.zookeeper") / "layouts.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@cache
def names_of(kind: str) -> dict[int, str]:
    """Return number -> name. kind: operations, errors, event_types, event_states, create_modes or watch_modes."""
    return {number: name for name, number in layouts()[kind].items()}


def read(record: str, buffer: memoryview, pos: int) -> tuple[Values, int]:
    """Return the record at `pos`, and its end. Raises Malformed."""
    values: Values = {}
    for name, reader in _readers(record):
        values[name], pos = reader(buffer, pos)
    return values, pos


def read_first(record: str, buffer: memoryview, pos: int) -> Values:
    """Return the fields of the record at `pos` before its first vector, as far as the bytes suffice."""
    values: Values = {}
    kinds = dict(layouts()["records"][record])
    for name, reader in _readers(record):
        if kinds[name].startswith("[]"):
            break
        try:
            values[name], pos = reader(buffer, pos)
        except Malformed:
            break
    return values


def write(record: str, values: Values) -> bytes:
    """Return the bytes of a record. Raises Malformed for a value that its field cannot have."""
    try:
        return b"".join(_written(kind, values[name]) for name, kind in layouts()["records"][record])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as fault:
        raise Malformed(f"{record}: {fault!r}") from None
    except Exception as fault:  # struct.error is not a ValueError
        raise Malformed(f"{record}: {fault}") from None


@cache
def _readers(record: str) -> tuple[tuple[str, Reader], ...]:
    return tuple((name, _reader(kind)) for name, kind in layouts()["records"][record])


@cache
def _reader(kind: str) -> Reader:
    if kind in _FIXED:
        return _fixed(_FIXED[kind])
    if kind == "buffer":
        return _read_buffer
    if kind == "string":
        return _read_string
    if kind.startswith("[]"):
        return _vector(_reader(kind.removeprefix("[]")))
    return lambda buffer, pos: read(kind, buffer, pos)


def _fixed(form: Struct) -> Reader:
    size = form.size

    def reader(buffer: memoryview, pos: int) -> tuple[Any, int]:
        if pos + size > len(buffer):
            raise Malformed("cut short")
        return form.unpack_from(buffer, pos)[0], pos + size

    return reader


_read_int = _fixed(_INT)


def _read_buffer(buffer: memoryview, pos: int) -> tuple[bytes | None, int]:
    length, pos = _read_int(buffer, pos)
    if length == -1:
        return None, pos
    if not 0 <= length <= len(buffer) - pos:
        raise Malformed(f"a length of {length}, and {len(buffer) - pos} bytes are left")
    return bytes(buffer[pos : pos + length]), pos + length


def _read_string(buffer: memoryview, pos: int) -> tuple[str | None, int]:
    value, pos = _read_buffer(buffer, pos)
    return None if value is None else value.decode(errors="replace"), pos


def _vector(element: Reader) -> Reader:
    def reader(buffer: memoryview, pos: int) -> tuple[list[Any] | None, int]:
        count, pos = _read_int(buffer, pos)
        if count == -1:
            return None, pos
        if not 0 <= count <= (len(buffer) - pos) // 4:  # no element has fewer than 4 bytes
            raise Malformed(f"a vector of {count}, and {len(buffer) - pos} bytes are left")
        values = []
        for _ in range(count):
            value, pos = element(buffer, pos)
            values.append(value)
        return values, pos

    return reader


def _written(kind: str, value: Any) -> bytes:
    if kind in _FIXED:
        return _FIXED[kind].pack(value)
    if value is None:
        return _INT.pack(-1)
    if kind == "string":
        value = value.encode()
    if kind in ("string", "buffer"):
        return _INT.pack(len(value)) + bytes(value)
    if kind.startswith("[]"):
        return _INT.pack(len(value)) + b"".join(_written(kind.removeprefix("[]"), each) for each in value)
    return write(kind, value)

"""A large push (OTLP in protobuf) split into several small messages with the same contents, each quick to parse.

A message is split between the elements of its lists: resources, scopes, metrics, data points. Each piece repeats the
other fields of the enclosing messages: a metric's name, a sum's temporality. Field numbers come from OpenTelemetry's
descriptors, the format is https://protobuf.dev/programming-guides/encoding/.

Bounds: PIECE_BYTES of a piece, plus OTHER_BYTES of other fields at each level; MAX_FIELDS of a level, the rest skipped;
PER_STEP fields per step of the generator. A message that cannot be split so is Malformed. Refuses to know the meaning
of metrics.
"""

from collections.abc import Iterator
from typing import Any, Final

from kproxy.errors import Malformed
from kproxy.protocol.primitives import write_uvarint

PIECE_BYTES = 32 * 1024
OTHER_BYTES = 8 * 1024
MAX_FIELDS = 20_000
PER_STEP = 500

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_KINDS = ("Gauge", "Sum")
_LISTS: Final = {
    "MetricsData": ("resource_metrics",),
    "ResourceMetrics": ("scope_metrics",),
    "ScopeMetrics": ("metrics",),
    "Metric": ("gauge", "sum"),  # one of the two
    "Gauge": ("data_points",),
    "Sum": ("data_points",),
}


def pieces(data: bytes) -> Iterator[bytes | None]:
    """Yield messages of MetricsData; None: the caller may let the event loop run. Raises Malformed."""
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    return _cut(memoryview(data), MetricsData.DESCRIPTOR)


def _cut(message: memoryview, descriptor: Any) -> Iterator[bytes | None]:
    """Yield the message in pieces; None after PER_STEP fields. Raises Malformed."""
    lists = {descriptor.fields_by_name[name].number: name for name in _LISTS.get(descriptor.name, ())}
    if not lists:
        raise Malformed(f"a {descriptor.name} of the pushed metrics has {len(message)} bytes")
    others = bytearray()
    elements: list[tuple[int, int, int, int]] = []  # field number; offsets of the field, its value, and its end
    for count, found in enumerate(_fields(message)):
        if count % PER_STEP == PER_STEP - 1:
            yield None
        if count > MAX_FIELDS:
            if descriptor.name in _KINDS:  # fields for all points may follow them
                raise Malformed(f"a {descriptor.name} of the pushed metrics has more than {MAX_FIELDS} points")
            break  # the reader of the pieces has the same bound
        number, start, value, end = found
        if number in lists and value:
            elements.append(found)
            continue
        if len(others) + end - start > OTHER_BYTES:
            raise Malformed(f"a {descriptor.name} of the pushed metrics has {OTHER_BYTES} bytes beside its list")
        others += message[start:end]
    fixed = bytes(others)
    held = bytearray(fixed)
    for number, start, value, end in elements:
        if len(held) > len(fixed) and len(held) - len(fixed) + end - start > PIECE_BYTES:
            yield bytes(held)
            held = bytearray(fixed)
        if end - start > PIECE_BYTES:
            inner = descriptor.fields_by_name[lists[number]].message_type
            around = fixed + bytes([number << 3 | _LENGTH])
            for piece in _cut(message[value:end], inner):
                yield None if piece is None else around + write_uvarint(len(piece)) + piece
        else:
            held += message[start:end]
    if len(held) > len(fixed) or not elements:
        yield bytes(held)


def _fields(message: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, start, start of the value, end) of each field; value 0: the field has no length prefix."""
    at, size = 0, len(message)
    while at < size:
        start = at
        tag, at = _read_varint(message, at)
        kind, value = tag & 7, 0
        if kind == _LENGTH:
            length, value = _read_varint(message, at)
            at = value + length
        elif kind == _VARINT:
            _, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise Malformed(f"the pushed metrics have a field of wire type {kind}")
        if at > size or tag < 8:
            raise Malformed("the pushed metrics end within a field, or have one without a number")
        yield tag >> 3, start, value, at


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(message):
            raise Malformed("the pushed metrics end within a field")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Malformed("the pushed metrics have a number of more than ten bytes")

"""A large push (OTLP in protobuf) as several small messages that together say the same, each quick to parse.

A message is cut between the elements of its lists: resources, scopes, metrics, data points. Each piece has the other
fields of what encloses it again: a metric's name, a sum's temporality. Numbers of fields are those of OpenTelemetry's
descriptors, the format is https://protobuf.dev/programming-guides/encoding/.

Bounds: PIECE_BYTES of a piece, beside OTHER_BYTES of other fields at each level; MAX_FIELDS of a level, behind which
nothing is read; a step of the generator walks PER_STEP fields. What cannot be cut so is Malformed. Refuses to know what
metrics mean.
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
    "Metric": ("gauge", "sum"),  # of which it has one
    "Gauge": ("data_points",),
    "Sum": ("data_points",),
}


def pieces(data: bytes) -> Iterator[bytes | None]:
    """Messages of MetricsData; None: a step of work is done, and more is to come. Raises Malformed."""
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    return _cut(memoryview(data), MetricsData.DESCRIPTOR)


def _cut(message: memoryview, descriptor: Any) -> Iterator[bytes | None]:
    """The same message in pieces."""
    lists = {descriptor.fields_by_name[name].number: name for name in _LISTS.get(descriptor.name, ())}
    if not lists:
        raise Malformed(f"a {descriptor.name} of the pushed metrics has {len(message)} bytes")
    others = bytearray()
    elements: list[tuple[int, int, int, int]] = []  # number of the field; where it, its value and the next one begin
    for count, found in enumerate(_fields(message)):
        if count % PER_STEP == PER_STEP - 1:
            yield None
        if count > MAX_FIELDS:
            if descriptor.name in _KINDS:  # what kind it is may stand behind its points
                raise Malformed(f"a {descriptor.name} of the pushed metrics has more than {MAX_FIELDS} points")
            break  # who reads the pieces looks at no more
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
    """Number of each field, where it begins, where its value does (0: it is none of a length), and where it ends."""
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

"""Removes topics from the subscriptions and assignments in DescribeGroups answers (classic groups).

A subscription or an assignment of a consumer (ConsumerProtocolSubscription, ConsumerProtocolAssignment) is encoded
again without the topics that the client may not see. Data of an assignor (`userData`) may name topics in any format, so
kproxy removes it. It also removes a consumer's bytes that do not decode. Bytes of other members, such as Connect's,
name no topics and stay.

A frame here begins with its 4-byte size. Raises Malformed. Does not evaluate rules.
"""

from collections.abc import Callable
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.protocol.apis import DESCRIBE_GROUPS
from kproxy.protocol.codec import Slices, data_in_slices, encoded_in_slices, locate_in_slices
from kproxy.protocol.primitives import read_uvarint, write_uvarint
from kproxy.protocol.schema import schema
from kproxy.wire.frames import Edit, patched_in_slices

_SLICE_BYTES = 4 * 1024  # bytes read between two yields
_SLICE_TOPICS = 256
_BODY = 8  # after the size and the correlation id
_CONSUMER = b"consumer"
_KIND = "groups.protocolType"
# Fields with bytes of members -> (message, its arrays of topics, whose elements are names or have one).
_BYTES: dict[str, tuple[str, tuple[str, ...]]] = {
    "groups.members.memberMetadata": ("ConsumerProtocolSubscription", ("topics", "ownedPartitions")),
    "groups.members.memberAssignment": ("ConsumerProtocolAssignment", ("assignedPartitions",)),
}
_PATHS = (_KIND, *_BYTES)

SeesTopic = Callable[[str], bool]  # whether the client may see a topic


def hide_in_members(version: int, frame: memoryview, sees: SeesTopic) -> Slices[bytes | None]:
    """Return the answer without topics that the client may not see, in slices; None if it has none."""
    compact = version in schema().apis[DESCRIBE_GROUPS].response.flexible_versions
    edits: list[Edit] = []
    is_consumers = False
    spans = yield from locate_in_slices(DESCRIBE_GROUPS, version, "response", _PATHS)(frame, _BODY, len(frame))
    left_bytes = _SLICE_BYTES
    for index, start, end in spans:
        left_bytes -= end - start
        if left_bytes < 0:
            left_bytes = _SLICE_BYTES
            yield
        if index == 0:
            begin = read_uvarint(frame, start)[1] if compact else start + 2
            is_consumers = frame[begin:end] == _CONSUMER
        elif is_consumers:
            begin = read_uvarint(frame, start)[1] if compact else start + 4
            data = bytes(frame[begin:end])
            left = (yield from _without(*_BYTES[_PATHS[index]], data, sees)) if data else data
            if left != data:
                size = write_uvarint(len(left) + 1) if compact else len(left).to_bytes(4, "big")
                edits.append((start, end, size + left))
    return (yield from patched_in_slices(frame, edits)) if edits else None


def _without(message: str, arrays: tuple[str, ...], data: bytes, sees: SeesTopic) -> Slices[bytes]:
    """Return a member's bytes without hidden topics; b"" if they do not decode."""
    try:
        body = yield from data_in_slices(message, data)
        for array in arrays:
            if array in body:
                seen = []
                for number, each in enumerate(body[array], 1):
                    if number % _SLICE_TOPICS == 0:
                        yield
                    if sees(_topic_of(each)):
                        seen.append(each)
                body[array] = seen
        if body["userData"]:
            body["userData"] = None
        return (yield from encoded_in_slices(message, int.from_bytes(data[:2], "big"), body))
    except ProtocolError:
        return b""


def _topic_of(element: Any) -> str:
    return str(element if isinstance(element, str) else element["topic"])

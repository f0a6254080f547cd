"""Removes names from lists that a client may not see, and denied topics from Metadata requests.

Patches (`wire/frames.py`): only elements of one array are removed or added, and the array's count and the frame's size
change; all other bytes stay the same. Metadata is the only request that is answered in part if it names denied topics,
as every broker does: clients request many topics at once, and need the brokers in any case. The broker receives the
remaining topics, and the answer gets an error for each denied topic.

All work is done in slices, since a list can be as long as a cluster has topics: each function is a generator that
yields after some tenths of a millisecond.

A frame here begins with its 4-byte size. Raises Malformed. Does not evaluate rules.
"""

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any
from uuid import UUID

from kproxy.protocol.apis import CREATE_TOPICS, DESCRIBE_GROUPS, DESCRIBE_TOPIC_PARTITIONS, METADATA, OFFSET_FETCH
from kproxy.protocol.codec import Slices, Span, decoded_in_slices, locate_in_slices, response_in_slices
from kproxy.protocol.primitives import Buffer, read_uvarint, write_uvarint
from kproxy.protocol.schema import api_name, schema
from kproxy.proxy.filters.policy.members import hide_in_members
from kproxy.proxy.filters.policy.resources import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, acl_kind, resource_kind
from kproxy.wire.frames import Edit, patched_in_slices

_TOPIC_DENIED = 29  # TOPIC_AUTHORIZATION_FAILED

# By API: the array of the answer, the field with the name of an element, and the kind.
LISTED: dict[str, tuple[tuple[str, str], str]] = {
    "Metadata": (("topics", "name"), TOPIC),
    "ListGroups": (("groups", "groupId"), GROUP),
    "ListTransactions": (("transactionStates", "transactionalId"), TRANSACTIONAL_ID),
    "DescribeTopicPartitions": (("topics", "name"), TOPIC),
    "DescribeLogDirs": (("results.topics", "name"), TOPIC),
    "ListPartitionReassignments": (("topics", "name"), TOPIC),
    "OffsetFetch": (("topics", "name"), TOPIC),
    "DescribeShareGroupOffsets": (("groups.topics", "topicName"), TOPIC),
    # Topics beyond the request, if another client has begun the session anew: see share_sessions.py.
    "ShareFetch": (("responses", "topicId"), TOPIC),
}
_RESOURCE, _TYPE = "resourceName", "resourceType"
_EXPRESSION = "Regex"  # suffix of fields with a regular expression of topics
# By API: (array, field) of answers to other requests whose elements may name topics that the client may not see. The
# field has the name; "": the elements themselves are names.
MENTIONED: dict[str, tuple[tuple[str, str], ...]] = {
    "ConsumerGroupDescribe": (
        ("groups.members.subscribedTopicNames", ""),
        ("groups.members.assignment.topicPartitions", "topicName"),
        ("groups.members.targetAssignment.topicPartitions", "topicName"),
    ),
    "ControlledShutdown": (("remainingPartitions", "topicName"),),
    "DeleteAcls": (("filterResults.matchingAcls", _RESOURCE),),
    "DescribeAcls": (("resources", _RESOURCE),),
    "DescribeGroups": (),  # see `policy_members`
    "DescribeTransactions": (("transactionStates.topics", "topic"),),
    "ListConfigResources": (("configResources", _RESOURCE),),
    "ShareGroupDescribe": (
        ("groups.members.subscribedTopicNames", ""),
        ("groups.members.assignment.topicPartitions", "topicName"),
    ),
    "StreamsGroupDescribe": (
        ("groups.topology.subtopologies.sourceTopics", ""),
        ("groups.topology.subtopologies.repartitionSinkTopics", ""),
        ("groups.topology.subtopologies.stateChangelogTopics", "name"),
        ("groups.topology.subtopologies.repartitionSourceTopics", "name"),
        ("groups.topologyDescription.subtopologies.nodes.sourceTopics", ""),
        ("groups.topologyDescription.globalStores.source.sourceTopics", ""),
        ("groups.topologyDescription.globalStores.processor.sourceTopics", ""),
    ),
    "StreamsGroupHeartbeat": (
        ("partitionsByUserEndpoint.activePartitions", "topic"),
        ("partitionsByUserEndpoint.standbyPartitions", "topic"),
    ),
}
_KINDS_OF = {"DeleteAcls": acl_kind, "DescribeAcls": acl_kind, "ListConfigResources": resource_kind}
# By API: nullable fields that name a topic. A member's expression can be the name of a topic, so clients see it only if
# they may see every topic.
_NULLED = {
    "ConsumerGroupDescribe": ("groups.members.subscribedTopicRegex",),
    "StreamsGroupDescribe": (
        "groups.topologyDescription.subtopologies.nodes.sinkTopic",
        "groups.topologyDescription.globalStores.source.sinkTopic",
        "groups.topologyDescription.globalStores.processor.sinkTopic",
    ),
}
_FIRST_OF_GROUPS, _FIRST_BY_ID = 8, 10

_SLICE_SPANS = 512  # spans judged between two yields

_REQUEST, _RESPONSE = 12, 8  # begin of a body: after the size, key, version, correlation id; after size, correlation id

Keep = Callable[[list[str | UUID]], bool]  # (names of an element) -> whether to keep it
Sees = Callable[[str, str], bool]  # (kind, name) -> whether the client may see it
_SpansOf = Callable[[Buffer, int, int], Slices[list[Span]]]


@cache
def _places(api_key: int, version: int) -> tuple[str, tuple[str, ...], bool]:
    """Return (array, fields with names of its elements, whether counts are compact) of a list's answer."""
    (array, name), _ = LISTED[api_name(api_key)]
    names: tuple[str, ...] = (f"{array}.{name}",)
    if api_key == OFFSET_FETCH and version >= _FIRST_OF_GROUPS:
        array = "groups.topics"
        names = (f"{array}.topicId" if version >= _FIRST_BY_ID else f"{array}.name",)
    elif api_key == METADATA:
        names = (f"{array}.name", f"{array}.topicId")
    return array, names, version in schema().apis[api_key].response.flexible_versions


def kind_of_list(api_key: int) -> str:
    """Return the kind of the names in a list."""
    return LISTED[api_name(api_key)][1]


def filter_list(api_key: int, version: int, frame: memoryview, keep: Keep) -> Slices[bytes | None]:
    """Return the answer without the elements that `keep` (of their names or ids) rejects; None if all stay."""
    array, names, compact = _places(api_key, version)
    spans_of = _located(api_key, version, "response", array, names)
    edits, _ = yield from _removed(spans_of, frame, _RESPONSE, names, compact, keep)
    return (yield from patched_in_slices(frame, edits)) if edits else None


def hide_mentioned(
    api_key: int, version: int, frame: memoryview, sees: Sees, sees_every_topic: bool
) -> Slices[bytes | None]:
    """Return the answer without names that the client may not see; None if it may see all."""
    if api_key == DESCRIBE_GROUPS:
        return (yield from hide_in_members(version, frame, partial(sees, TOPIC)))
    api = api_name(api_key)
    flexible = version in schema().apis[api_key].response.flexible_versions
    now: bytes | None = None
    for array, name in MENTIONED[api]:
        names = (f"{array}.{name}",) if name else ()
        if name == _RESOURCE:
            names = (*names, f"{array}.{_TYPE}")
        view = frame if now is None else memoryview(now)
        spans_of = _located(api_key, version, "response", array, names)
        keep = partial(_sees_resource, sees, _KINDS_OF[api]) if name == _RESOURCE else partial(_sees_topic, sees)
        edits, _ = yield from _removed(spans_of, view, _RESPONSE, names, flexible, keep)
        now = (yield from patched_in_slices(view, edits)) if edits else now
    for path in _NULLED.get(api, ()):
        view = frame if now is None else memoryview(now)
        nulled: list[Edit] = []
        spans = yield from locate_in_slices(api_key, version, "response", (path,))(view, _RESPONSE, len(view))
        for number, (_, start, end) in enumerate(spans, 1):
            if number % _SLICE_SPANS == 0:
                yield
            topic = _read_name(view, start, end, flexible)
            if isinstance(topic, str) and not (sees_every_topic if path.endswith(_EXPRESSION) else sees(TOPIC, topic)):
                nulled.append((start, end, b"\0"))
        now = (yield from patched_in_slices(view, nulled)) if nulled else now
    return now


def hide_settings(version: int, frame: memoryview, sees: Callable[[str], bool]) -> Slices[bytes | None]:
    """Return a CreateTopics answer without settings of topics that the client may not see; None if it may see all."""
    header, body = yield from decoded_in_slices(frame[4:], CREATE_TOPICS, version)
    hidden = []
    for number, topic in enumerate(body["topics"], 1):
        if number % _SLICE_SPANS == 0:
            yield
        if "configs" in topic and not sees(topic["name"]):
            hidden.append(topic)
    for topic in hidden:
        topic.update(numPartitions=-1, replicationFactor=-1, configs=[], topicConfigErrorCode=_TOPIC_DENIED)
    if not hidden:
        return None
    edited = yield from response_in_slices(CREATE_TOPICS, version, header, body)
    return len(edited).to_bytes(4, "big") + edited


def _sees_topic(sees: Sees, found: list[Any]) -> bool:
    return sees(TOPIC, found[0])


def _sees_resource(sees: Sees, kind_of: Callable[[int], str], found: list[Any]) -> bool:
    """Return whether a client may see a resource. found: its name and its type, in any order.

    Version 0 of ListConfigResources has no types, and lists only resources of the cluster. The name in an access rule
    may be a prefix, or "*", which reveals no name.
    """
    name = next(one for one in found if isinstance(one, str))
    kind = next((kind_of(one) for one in found if isinstance(one, int)), CLUSTER)
    return kind == CLUSTER or name == "*" or sees(kind, name)


def cursor_of(version: int, side: str, frame: memoryview) -> Slices[tuple[str, int, int] | None]:
    """Return (topic, start, end) of the cursor of DescribeTopicPartitions; None if there is no cursor."""
    path = "cursor.topicName" if side == "request" else "nextCursor.topicName"
    begin = _REQUEST if side == "request" else _RESPONSE
    spans_of = locate_in_slices(DESCRIBE_TOPIC_PARTITIONS, version, side, (path,))
    for _, start, end in (yield from spans_of(frame, begin, len(frame))):
        name = _read_name(frame, start, end, compact=True)
        if isinstance(name, str):
            return name, start, end
    return None


def with_cursor(frame: memoryview, start: int, end: int, topic: str) -> Slices[bytes]:
    """Return the frame with another topic in the span that `cursor_of` returned."""
    text = topic.encode()
    return (yield from patched_in_slices(frame, [(start, end, write_uvarint(len(text) + 1) + text)]))


def metadata_request(
    version: int, frame: memoryview, keep: Keep | None, *, clear_auto_creation: bool
) -> Slices[bytes | None]:
    """Return the request without the topics that `keep` rejects, and with the flag cleared; None if unchanged."""
    compact = version in schema().apis[METADATA].request.flexible_versions
    edits: list[Edit] = []
    if keep is not None:
        names = ("topics.name", "topics.topicId")
        spans_of = _located(METADATA, version, "request", "topics", names)
        edits, _ = yield from _removed(spans_of, frame, _REQUEST, names, compact, keep)
    if clear_auto_creation:
        flag = locate_in_slices(METADATA, version, "request", ("allowAutoTopicCreation",))
        for _, start, end in (yield from flag(frame, _REQUEST, len(frame))):
            if frame[start]:
                edits.append((start, end, b"\0"))
    return (yield from patched_in_slices(frame, edits)) if edits else None


def metadata_answer(
    version: int, frame: memoryview, keep: Keep, errors: Collection[tuple[str | UUID, int]]
) -> Slices[bytes | None]:
    """Return the answer without the topics that `keep` rejects, and with an error for each (name or id, code)."""
    array, names, compact = _places(METADATA, version)
    spans_of = _located(METADATA, version, "response", array, names)
    removed = yield from _removed(spans_of, frame, _RESPONSE, names, compact, keep, count=False)
    edits, (start, end, left) = removed
    if not edits and not errors:
        return None
    added = yield from _error_entries(version, errors, spans_of)
    if added:
        edits.append((end, end, added))
    edits.append(_count(frame, start, left + len(errors), compact))
    return (yield from patched_in_slices(frame, edits))


def _error_entries(version: int, errors: Collection[tuple[str | UUID, int]], spans_of: _SpansOf) -> Slices[bytes]:
    """Return encoded elements of the array of topics, with errors."""
    if not errors:
        return b""
    topics = []
    for number, (topic, code) in enumerate(errors, 1):
        if number % _SLICE_SPANS == 0:
            yield
        entry: dict[str, Any] = {"errorCode": code, "partitions": []}
        if isinstance(topic, str):
            entry["name"] = topic
        else:
            entry["topicId"] = topic
            entry["name"] = None if version >= 12 else ""
        topics.append(entry)
    body = {"topics": topics, "brokers": []}
    frame = b"\0\0\0\0" + (yield from response_in_slices(METADATA, version, {"correlationId": 0}, body))
    spans = yield from spans_of(frame, _RESPONSE, len(frame))
    first = next(start for index, start, _ in spans if index == 1)
    last = next(end for index, _, end in reversed(spans) if index == 1)
    return bytes(frame[first:last])


@cache
def _located(api_key: int, version: int, side: str, array: str, names: tuple[str, ...]) -> _SpansOf:
    return locate_in_slices(api_key, version, side, (array, f"{array}[]", *names))


def _removed(
    spans_of: _SpansOf,
    frame: memoryview,
    begin: int,
    names: tuple[str, ...],
    compact: bool,
    keep: Keep,
    *,
    count: bool = True,
) -> Slices[tuple[list[Edit], tuple[int, int, int]]]:
    """Return (edits that remove elements, (start, end, remaining elements) of the array). count: edit counts, too."""
    edits: list[Edit] = []
    last = (begin, begin, 0)
    left = gone = 0
    found: list[Any] = []
    spans = yield from spans_of(frame, begin, len(frame))
    for number, (index, start, end) in enumerate(spans, 1):
        if number % _SLICE_SPANS == 0:
            yield
        if index == 0:
            if gone and count:
                edits.append(_count(frame, start, left, compact))
            last = start, end, left
            left = gone = 0
        elif index == 1:
            if not names:
                found = [_read_name(frame, start, end, compact)]
            if keep(found):
                left += 1
            else:
                gone += 1
                if edits and edits[-1][1] == start and not edits[-1][2]:
                    start = edits.pop()[0]  # merge adjacent edits
                edits.append((start, end, b""))
            found = []
        else:
            value = _read_name(frame, start, end, compact, names[index - 2])
            if value is not None:
                found.append(value)
    return edits, last


def _read_name(frame: memoryview, start: int, end: int, compact: bool, path: str = "") -> str | UUID | int | None:
    if path.endswith(_TYPE):
        return frame[start]
    if path.endswith("topicId"):
        topic_id = UUID(bytes=bytes(frame[start:end]))
        return topic_id if topic_id.int else None
    if compact:
        length, start = read_uvarint(frame, start)
        is_null = length == 0
    else:
        is_null = frame[start] > 127
        start += 2
    return None if is_null else str(frame[start:end], "utf-8", "replace")


def _count(frame: memoryview, start: int, count: int, compact: bool) -> Edit:
    if compact:
        return start, read_uvarint(frame, start)[1], write_uvarint(count + 1)
    return start, start + 4, count.to_bytes(4, "big")

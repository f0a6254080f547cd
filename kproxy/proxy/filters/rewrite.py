"""Patches to the bytes of an answer: kproxy's addresses replace brokers', and offered versions are capped.

Pure: takes a frame and a map, returns new bytes or None (unchanged). The schema locates fields, and only their spans
change, so that unknown tags, trailing bytes and all else stay the same. Every length that encloses a change is
adjusted: the string's own, a tagged field's, the frame's. Raises Malformed, nothing else. Does not read requests.

A frame here begins with its 4-byte size; the correlation id follows.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from struct import Struct
from types import MappingProxyType

from kproxy.errors import Malformed
from kproxy.protocol.apis import API_VERSIONS, FETCH, METADATA, PRODUCE
from kproxy.protocol.codec import TAG_SIZE, Span, api_versions_version, encode_response, locate
from kproxy.protocol.primitives import Buffer, read_uvarint, write_uvarint
from kproxy.protocol.schema import ADDRESS_CARRIERS, address_path, schema
from kproxy.wire.frames import Edit, patched

# (node id, the broker's host, its port) -> the address that the client receives
Advertise = Callable[[int, str, int], tuple[str, int]]
Locate = Callable[[Buffer, int, int], list[Span]]


_BODY = 8  # size and correlation id
_INT8 = Struct(">b")
_INT16 = Struct(">h")
_INT32 = Struct(">i")
_MAX_INT16 = 0x7FFF
_NO_VERSIONS: frozenset[int] = frozenset()
_CONTROLLERS = 2  # DescribeCluster's EndpointType: the answer lists controllers, which are not proxied

# Without topic ids from Metadata (version 10) a client cannot use versions that identify topics only by id.
_FIRST_METADATA_WITH_TOPIC_IDS = 10
_LAST_WITH_TOPIC_NAMES = 12  # the version of Produce, and of Fetch


def rewrite_addresses(api_key: int, version: int, frame: memoryview, advertise: Advertise) -> bytes | None:
    """Return the answer with `advertise`'s host and port for every broker; None if it names no broker."""
    spans_of, compact = _addresses(api_key, version)
    edits: list[Edit] = []
    tag_sizes: list[tuple[int, int]] = []
    node_id = 0
    host = None
    for index, start, end in spans_of(frame, _BODY, len(frame)):
        if index == TAG_SIZE:
            tag_sizes.append((start, end))
        elif index == 0:
            (node_id,) = _INT32.unpack_from(frame, start)
        elif index == 1:
            host = (start, end)
        elif index == 2 and host is not None:
            upstream_host = _read_string(frame, *host, compact)
            if upstream_host:  # "no such coordinator" is node -1 with an empty host: nothing to hide
                (upstream_port,) = _INT32.unpack_from(frame, start)
                ours, port = advertise(node_id, upstream_host, upstream_port)
                edits.append((*host, _string(ours, compact)))
                edits.append((start, end, _INT32.pack(port)))
            host = None
        elif index == 3 and frame[start] == _CONTROLLERS:
            return None
    return _edited(frame, edits, tag_sizes) if edits else None


def cap_versions(
    version: int,
    frame: memoryview,
    further: Mapping[int, int] = MappingProxyType({}),
    refused: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> bytes | None:
    """Return an ApiVersions answer without unreadable versions of ApiVersions and of APIs with addresses in answers.

    All other APIs and the tagged features stay as they are. An entry is removed only if the broker's lowest version is
    above kproxy's highest. None if nothing changes. further: the highest version of other APIs, by key. refused:
    versions to leave out at the upper end of a range, by key; if that leaves no version, they stay. The lower end stays
    since librdkafka infers features of brokers from old versions.
    """
    version = api_versions_version(frame, _BODY, len(frame), version)
    compact = version in schema().apis[API_VERSIONS].response.flexible_versions
    offers: list[tuple[int, int, int, int, int, int]] = []  # api key, lowest, highest and its place, the entry's place
    count_at = _BODY
    api_key = lowest = highest = at = 0
    for index, start, end in _offers(version)(frame, _BODY, len(frame)):
        if index == 0:
            (api_key,) = _INT16.unpack_from(frame, start)
        elif index == 1:
            (lowest,) = _INT16.unpack_from(frame, start)
        elif index == 2:
            (highest,), at = _INT16.unpack_from(frame, start), start
        elif index == 3:
            offers.append((api_key, lowest, highest, at, start, end))
        else:
            count_at = start
    allowed = [_highest_of(lowest, highest, refused.get(key, _NO_VERSIONS)) for key, lowest, highest, *_ in offers]
    ranges = {key: (lowest, last) for (key, lowest, *_), last in zip(offers, allowed, strict=True)}
    caps = {**further, **version_caps(ranges)}
    edits: list[Edit] = []
    removed = 0
    for (api_key, lowest, highest, at, start, end), last_allowed in zip(offers, allowed, strict=True):
        last = min(last_allowed, caps.get(api_key, last_allowed))
        if lowest > last:
            edits.append((start, end, b""))
            removed += 1
        elif highest > last:
            edits.append((at, at + 2, _INT16.pack(last)))
    if removed:
        count_end = read_uvarint(frame, count_at)[1] if compact else count_at + 4
        left = len(offers) - removed
        edits.append((count_at, count_end, _count(left, compact)))
    return patched(frame, edits) if edits else None


def add_offers(version: int, frame: memoryview, apis: Iterable[int]) -> tuple[bytes | None, bool]:
    """Return (an ApiVersions answer that offers these APIs too, whether the broker itself offers all of them).

    Versions are those of the schema. The answer is None if nothing is added. An answer with an error stays as it is.
    """
    if any(frame[_BODY : _BODY + 2]):
        return None, False
    offered: list[int] = []
    count_at, end = _BODY, 0
    for index, start, stop in _offers(version)(frame, _BODY, len(frame)):
        if index == 0:
            offered.append(*_INT16.unpack_from(frame, start))
        elif index == 3:
            end = stop
        elif index == 4:
            count_at = start
    missing = sorted(set(apis).difference(offered))
    if not missing:
        return None, True
    compact = version in schema().apis[API_VERSIONS].response.flexible_versions
    count_end = read_uvarint(frame, count_at)[1] if compact else count_at + 4
    count = _count(len(offered) + len(missing), compact)
    entries = b"".join(_offer(version, api_key) for api_key in missing)
    at = end or count_end
    return patched(frame, [(count_at, count_end, count), (at, at, entries)]), False


def version_caps(offers: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the highest version that clients may use, by API, with a broker that offers these (lowest, highest)."""
    caps = dict(_highest_readable())
    if METADATA in offers and min(offers[METADATA][1], caps[METADATA]) < _FIRST_METADATA_WITH_TOPIC_IDS:
        caps[PRODUCE] = caps[FETCH] = _LAST_WITH_TOPIC_NAMES
    return caps


def _highest_of(lowest: int, highest: int, refused: frozenset[int]) -> int:
    """Return the highest version of a range that is not refused; the range's own if all of them are."""
    return next((version for version in range(highest, lowest - 1, -1) if version not in refused), highest)


@cache
def _addresses(api_key: int, version: int) -> tuple[Locate, bool]:
    """Return (plan that locates node id, host, port and endpoint type, whether strings are compact)."""
    path = address_path(api_key, version)
    message = schema().apis[api_key].response
    fields = message.fields
    if path:
        (carrier,) = (field for field in fields if field.name == path)
        fields = carrier.fields
    (node_id,) = (field.name for field in fields if field.name in ("nodeId", "brokerId"))
    within = f"{path}." if path else ""
    names = (within + node_id, f"{within}host", f"{within}port", "endpointType")
    return locate(api_key, version, "response", names), version in message.flexible_versions


@cache
def _offers(version: int) -> Locate:
    paths = ("apiKeys.apiKey", "apiKeys.minVersion", "apiKeys.maxVersion", "apiKeys[]", "apiKeys")
    return locate(API_VERSIONS, version, "response", paths)


@cache
def _offer(version: int, api_key: int) -> bytes:
    """Return an entry of an ApiVersions answer: an API in the versions of the schema."""
    versions = schema().apis[api_key].request.versions
    offer = {"apiKey": api_key, "minVersion": versions[0], "maxVersion": versions[-1]}
    frame = bytes(4) + encode_response(
        API_VERSIONS, version, {"correlationId": 0}, {"errorCode": 0, "apiKeys": [offer]}
    )
    ((start, end),) = [span[1:] for span in _offers(version)(frame, _BODY, len(frame)) if span[0] == 3]
    return frame[start:end]


@cache
def _highest_readable() -> dict[int, int]:
    """Return the highest version that kproxy can rewrite, for each API that it must rewrite."""
    return {key: schema().apis[key].response.versions[-1] for key in (*ADDRESS_CARRIERS, API_VERSIONS)}


def _read_string(frame: memoryview, start: int, end: int, compact: bool) -> str:
    start = read_uvarint(frame, start)[1] if compact else start + 2
    return str(frame[start:end], "utf-8", "replace")


def _count(count: int, compact: bool) -> bytes:
    """Return the encoded number of an array's elements."""
    return write_uvarint(count + 1) if compact else _INT32.pack(count)


def _string(text: str, compact: bool) -> bytes:
    data = text.encode()
    if len(data) > _MAX_INT16:
        raise Malformed(f"a host of {len(data)} bytes does not fit into an answer")
    return (write_uvarint(len(data) + 1) if compact else _INT16.pack(len(data))) + data


def _edited(frame: memoryview, edits: list[Edit], tag_sizes: list[tuple[int, int]]) -> bytes:
    """Return the frame with its edits, and with every enclosing length adjusted."""
    for start, end in reversed(tag_sizes):  # inner fields come later, and their growth counts for the outer
        size, _ = read_uvarint(frame, start)
        inside = [edit for edit in edits if end <= edit[0] < end + size]
        size += sum(len(new) - (stop - begin) for begin, stop, new in inside)
        edits.append((start, end, write_uvarint(size)))
    return patched(frame, edits)

"""Helpers for tests of bodies: feed a body in pieces, and compute its contents from a complete decode."""

import gzip
import json
import random

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol.records import Batch, iterate_headers
from kproxy.wire import bodies
from kproxy.wire.bodies import BodyWalker
from tests.protocol.messages import VECTORS, Layout, layouts

LOGS = [
    (log["name"], bytes.fromhex(log["hex"]))
    for log in map(json.loads, gzip.decompress(VECTORS.with_name("records-dev.jsonl.gz").read_bytes()).splitlines())
]
STREAMED = (1, 78)
LAYOUTS = [layout for layout in layouts() if layout.side == "response" and layout.api_key in STREAMED]
CARRIERS = [layout for layout in LAYOUTS if layout.api_key == 78 or layout.version >= 16]
DETAILED = [layout for layout in layouts() if layout.api_key in (0, 1, 2, 8, 9, 78)]


def walk(layout: Layout, frame: bytes, sizes, neutralise: bool = False) -> tuple[BodyWalker, bytes]:
    """Feed a frame's body in chunks, each in the middle of a buffer; return the walker and the bytes to forward."""
    walker = BodyWalker(layout.api_key, layout.version, neutralise=neutralise)
    sent = bytearray(frame[:4])
    pos = 4
    while pos < len(frame):
        part = frame[pos : pos + next(sizes)]
        chunk = memoryview(b"\xff\x01" + part + b"\x00\xff\x7f")
        begin = 2
        for start, end, replacement in walker.feed(chunk, 2, 2 + len(part)) or ():
            assert begin <= start <= end <= 2 + len(part)
            sent += chunk[begin:start]
            sent += replacement
            begin = end
        sent += chunk[begin : 2 + len(part)]
        pos += len(part)
    walker.finish()
    return walker, bytes(sent)


def random_sizes(seed: int):
    dice = random.Random(seed)
    largest = dice.choice((1, 2, 5, 40, 3000))
    while True:
        yield dice.randint(1, largest)


def looks(walker: bodies.Found) -> tuple:
    return walker.throttle_ms, walker.error_code, walker.errors


def details(layout: Layout, frame: bytes, sizes, detail: int) -> tuple[BodyWalker, list, list]:
    walker = BodyWalker(layout.api_key, layout.version, layout.side, detail=detail)
    partitions, batches = [], []
    pos = layout.start
    while pos < len(frame):
        size = next(sizes)
        part = frame[pos : pos + size]  # earlier bytes are gone
        more = frame[pos + size : pos + size + next(sizes)] if pos % 2 else b""
        piece = memoryview(b"\xff\x01" + part + more + b"\x00\xff")
        walker.feed(piece, 2, 2 + len(part), 2 + len(part) + len(more))
        partitions += walker.partitions
        batches += walker.batches
        walker.partitions.clear()
        walker.batches.clear()
        pos += size
    walker.finish()
    return walker, partitions, batches


def expected_details(layout: Layout, body: dict) -> tuple[list[dict], list]:
    """Return partitions and batches from the complete decode; field names are repeated here on purpose."""
    partitions, batches = [], []
    for group in body.get("groups") or [body]:
        for topic in group.get("topics") or group.get("topicData") or group.get("responses") or []:
            about = {
                "topic": topic.get("name", topic.get("topic")),
                "topic_id": topic.get("topicId"),
                "group_id": group.get("groupId"),
            }
            for key in ("partitions", "partitionData", "partitionResponses"):
                for one in topic.get(key, ()):
                    partition, found = expected_partition(layout, one)
                    partitions.append(about | partition)
                    batches += found
    return partitions, batches


def expected_forgotten(layout: Layout, body: dict) -> list[tuple] | None:
    if (layout.api_key, layout.side) != (1, "request") or body.get("sessionEpoch", 0) <= 0:
        return None
    left = body["forgottenTopicsData"]
    return [(one.get("topic") or one.get("topicId"), partition) for one in left for partition in one["partitions"]]


def expected_partition(layout: Layout, one: dict) -> tuple[dict, list]:
    def first(*names: str, default=-1):
        return next((one[name] for name in names if name in one), default)

    records = first("records", default=None) or b""
    found = []
    try:
        for pos, header in iterate_headers(records):
            found.append((header, Batch(header, memoryview(records)[pos : pos + header.size_bytes]).crc_valid))
    except ProtocolError:
        pass
    headers = [header for header, _ in found]
    counts = [header.record_count for header in headers if not header.is_control]
    partition = {
        "partition": first("index", "partition", "partitionIndex"),
        "error_code": first("errorCode", default=None),
        "offset": first("fetchOffset", "baseOffset", "committedOffset", "offset"),
        "high_watermark": first("highWatermark"),
        "last_stable_offset": first("lastStableOffset"),
        "log_start_offset": first("logStartOffset"),
        "leader_epoch": first("currentLeaderEpoch", "committedLeaderEpoch", "leaderEpoch"),
        "metadata": first("committedMetadata", "metadata", default=None),
        "bytes": len(records),
        "batches": len(found),
        "records": -1 if -1 in counts else sum(counts),
        "codecs": sum({1 << header.codec for header in headers}),
        "magic": headers[-1].magic if headers else -1,
        "first_offset": headers[0].base_offset if headers else -1,
        "last_offset": headers[-1].last_offset if headers else -1,
        "max_timestamp": max([-1, *(header.max_timestamp for header in headers)]),
    }
    return partition, found


def check_details(layout: Layout, frame: bytes, body: dict, seeds) -> int:
    partitions, batches = expected_details(layout, body)
    for seed in seeds:
        for detail in (bodies.TOPICS, bodies.BATCHES, bodies.CHECKED):
            walker, got, got_batches = details(layout, frame, random_sizes(seed), detail)
            assert walker.fault is None
            assert [one._asdict() for one in got] == partitions
            whole = [(batch.header, batch.crc_valid) for batch in got_batches if not batch.partial]
            expected = {
                bodies.TOPICS: [],
                bodies.BATCHES: [(header, None) for header, _ in batches],
                bodies.CHECKED: batches,
            }
            assert whole == expected[detail]
            assert walker.forgotten == expected_forgotten(layout, body)
            check_whole(layout, frame, walker, got, got_batches, detail)
        check_sums(layout, frame, got, random_sizes(seed))
    return len(partitions)


def check_sums(layout: Layout, frame: bytes, partitions: list, sizes) -> None:
    if layout.api_key in (1, 8):  # Fetch and OffsetCommit have the positions of consumers: read in full
        walker, got, _ = details(layout, frame, sizes, bodies.SUMS)
        assert (walker.fault, walker.sums, got) == (None, [], partitions)
        return
    names = bodies.Sums._fields
    expected = [tuple(getattr(one, name) for name in names) for one in partitions if one.bytes]
    walker = details(layout, frame, sizes, bodies.SUMS)[0]
    assert (walker.fault, walker.sums) == (None, expected)
    read = bodies.body_reader(layout.api_key, layout.version, layout.side, bodies.SUMS)
    assert [*read(memoryview(frame), layout.start, len(frame)).sums] == expected


def check_whole(layout: Layout, frame: bytes, walker: BodyWalker, partitions: list, batches: list, detail: int) -> None:
    """Check that a complete body gives the same result as its pieces."""
    read = bodies.body_reader(layout.api_key, layout.version, layout.side, detail)
    try:
        found = read(memoryview(b"\xff" + frame + b"\xff\x00"), 1 + layout.start, 1 + len(frame))
    except Malformed:
        assert walker.fault is not None
        return
    assert walker.fault is None
    assert looks(found) == looks(walker)
    assert [*found.partitions] == partitions
    assert [*found.batches] == batches

"""Bodies read by the core have the rows that the session reads, or are left to the session."""

import random
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture.columns import pairs, programs
from kproxy.protocol import codec
from kproxy.protocol.apis import LIST_OFFSETS
from kproxy.protocol.records import Record, write_batch, write_message_set
from kproxy.protocol.schema import Field
from kproxy.wire import bodies
from kproxy.wire.offline.bulk import NULL
from tests import captures
from tests.capture.dialogues import Share
from tests.native import reads_by_core
from tests.protocol.messages import Layout, Vector, layouts, vectors

pytestmark = reads_by_core
DETAILS = (bodies.ERRORS, bodies.TOPICS, bodies.BATCHES)
TELLING = [layout for layout in layouts() if layout.api_key in (0, 1, 2, 8, 9, 78)]


def laid_out(frames: list[bytes], dice: random.Random, oddness: float) -> tuple[bytearray, list[tuple[int, int]]]:
    """Bytes that contain frames with gaps between them; (begin, end) of each piece.

    oddness: the share of frames that are split into pieces.
    """
    data = bytearray(b"\xff" * 512)
    pieces = []
    for frame in frames:
        start = 0
        while start < len(frame):
            size = dice.choice((1, 9, 70, 500, 5000)) if dice.random() < oddness else len(frame)
            piece = frame[start : start + size]
            pieces.append((len(data), len(data) + len(piece)))
            data += piece + dice.randbytes(dice.randrange(70))
            start += size
    return data, pieces


def compare(
    layout: Layout, frames: list[bytes], detail: int, dice: random.Random, oddness: float = 0.5
) -> tuple[int, int]:
    """Compares both ways of reading; returns how many bodies the core read, and how many topic-partitions."""
    program = programs.reading(layout.api_key, layout.version, layout.side, detail)
    if program is None:
        return 0, 0
    data, pieces = laid_out(frames, dice, oddness)
    core = import_module("kproxy_core")
    values, rows = core.read_bodies(program, bytes(data), pieces, [len(frame) for frame in frames], layout.start)
    found = pairs.bodies_of(rows)
    assert (np.diff(found.of) >= 0).all() and (np.diff(found.batch_of) >= 0).all()
    count = 0
    for number, (frame, read) in enumerate(zip(frames, values, strict=True)):
        if read is None:
            continue
        count += 1
        one = bodies.body_reader(layout.api_key, layout.version, layout.side, detail)(frame, layout.start, len(frame))
        at_once = captures.found(found, number)
        assert at_once.partitions == list(one.partitions)
        assert at_once.batches == list(one.batches)
        throttle_ms, error_code, replica_id, has_rack = read
        if layout.side == "response":
            code = None if error_code == NULL else error_code
            assert (throttle_ms, code) == (one.throttle_ms, one.error_code)
            assert set(one.errors) <= {code}
            if detail == bodies.ERRORS:  # sessions scan these
                scan = codec.response_scan(layout.api_key or 0, layout.version)
                assert scan(frame, layout.start, len(frame))[:3] == (one.throttle_ms, one.error_code, one.errors)
        else:
            assert (replica_id, bool(has_rack)) == (one.replica_id, one.has_rack)
    return count, len(found.of)


@pytest.mark.parametrize("detail", DETAILS)
def test_golden_vectors_read_by_the_core_equal_those_read_one_by_one(detail: int) -> None:
    frames = defaultdict(list)
    for vector in vectors():
        if vector.layout.side != "data":
            frames[vector.layout.api_key, vector.layout.version, vector.layout.side].append(vector)
    counts = [
        compare(each[0].layout, [vector.frame for vector in each], detail, random.Random(1)) for each in frames.values()
    ]
    assert sum(count for count, _ in counts) > 800
    assert sum(rows for _, rows in counts) > 300 or not detail


def some_records(dice: random.Random, oddness: float) -> bytes:
    """The records of a partition: batches, and among odd ones a message set or a truncated batch."""
    records = [Record(offset, 1_700_000_000_000 + offset, None, b"v" * dice.randrange(300)) for offset in range(3)]
    data = b"".join(write_batch(records, codec=dice.randrange(5)) for _ in range(dice.randrange(4)))
    if dice.random() < oddness:
        data += write_message_set(records, magic=dice.randrange(2))
    return data[: -dice.randrange(1, 70)] if data and dice.random() < oddness else data


@pytest.mark.parametrize("batches", ((1, 1, 1), (2, 2, 2), (3, 3, 3), (2, 0, 1), (0, 0, 0)))
def test_batches_belong_to_their_own_body(batches: tuple[int, ...]) -> None:
    """When read round by round, the first batches of all bodies come first."""
    layout = next(each for each in TELLING if (each.api_key, each.version, each.side) == (1, 12, "response"))
    frames = []
    for number, count in enumerate(batches):
        records = b"".join(
            write_batch([Record(100 * number + each, 1_700_000_000_000, None, b"v")]) for each in range(count)
        )
        frames.append(layout.encode({"responses": [{"topic": "t", "partitions": [{"records": records}]}]}))
    assert compare(layout, frames, bodies.BATCHES, random.Random(1), 0.0) == (len(frames), len(frames))


@pytest.mark.parametrize(("partitions", "batches", "is_read"), ((4096, 1, True), (4097, 0, False), (1, 4097, False)))
def test_large_bodies_are_left_to_the_session(partitions: int, batches: int, is_read: bool) -> None:
    """The session bounds the topic-partitions and batches of all pending requests."""
    layout = next(each for each in TELLING if (each.api_key, each.version, each.side) == (0, 9, "request"))
    batch = write_batch([Record(0, 1_700_000_000_000, None, b"v")])
    found = [{"index": index, "records": batch * batches} for index in range(partitions)]
    frame = layout.encode({"topicData": [{"name": "t", "partitionData": found}]})
    rows = partitions if is_read else 0
    assert compare(layout, [frame], bodies.BATCHES, random.Random(1), 0.0) == (int(is_read), rows)


def test_addresses_that_do_not_end_inside_a_response_are_left_to_the_session() -> None:
    """Sessions scan responses for the addresses of brokers, and a response in which these are malformed is a fault."""
    layout = next(each for each in TELLING if (each.api_key, each.version, each.side) == (1, 18, "response"))
    nodes = [{"nodeId": 1, "host": "broker", "port": 9092}]
    good = layout.encode({"responses": [], "nodeEndpoints": nodes})
    bad = good.replace(b"\x07broker", b"\x7fbroker")
    assert compare(layout, [good, bad], bodies.ERRORS, random.Random(1)) == (1, 0)


NAMES = ("orders", "payments", "a", "Grüße", "x" * 200, "")


def filled(value: Any, dice: random.Random, oddness: float) -> Any:
    """A body with other values, as real ones have. oddness: how likely a field has a value that columns leave to the
    session."""
    if isinstance(value, dict):
        return {name: content(name, inner, dice, oddness) for name, inner in value.items()}
    return [filled(inner, dice, oddness) for inner in value] if isinstance(value, list) else value


def content(name: str, value: Any, dice: random.Random, oddness: float) -> Any:
    if name == "records":
        return some_records(dice, oddness)
    if name in ("topic", "name", "groupId") and isinstance(value, str):
        return dice.choice(NAMES)
    if name.endswith("rrorCode"):
        return 6 if dice.random() < oddness else 0
    return filled(value, dice, oddness)


@pytest.mark.parametrize(("oddness", "least"), ((0.0, 1.0), (0.1, 0.5)))
@pytest.mark.parametrize("side", ("request", "response"))
def test_bodies_read_by_the_core_equal_those_read_one_by_one(side: str, oddness: float, least: float) -> None:
    """In any version, with any number of topics and partitions. Without odd values only requests of ListOffsets are
    left to the session: no column has what they request."""
    share, rows = Share(), 0
    layouts_read = [each for each in TELLING if each.side == side and (each.api_key, side) != (LIST_OFFSETS, "request")]

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(layouts_read), st.integers(0, 1 << 32))
    def holds(layout: Layout, seed: int) -> None:
        nonlocal rows
        dice = random.Random(seed)
        usual = [
            without_tags(layout.decode(vector.frame)[1], layout.message.fields, layout.version)
            for vector in vectors()
            if vector.layout == layout
        ]
        frames = [layout.encode(filled(body, dice, oddness)) for body in usual for _ in range(4)]
        for detail in DETAILS:
            count, found = compare(layout, frames, detail, dice, 5 * oddness)
            share.add(count, len(frames))
            rows += found

    holds()
    assert float(share) >= least, share
    assert rows > share.all / 10


def without_tags(value: Any, fields: Iterable[Field], version: int) -> Any:
    """A body without tagged fields, whether the schema knows them or not."""
    if isinstance(value, list):
        return [without_tags(inner, fields, version) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        each.name: without_tags(value[each.name], each.fields, version)
        for each in fields
        if each.name in value and version not in each.tagged_versions
    }


def test_damaged_bodies_read_by_the_core_equal_those_read_one_by_one() -> None:
    """Bits are flipped and ends truncated: bodies that are read by the core give what the session gives."""
    share = Share()

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from([vector for vector in vectors() if vector.layout in TELLING]), st.integers(0, 1 << 32))
    def holds(vector: Vector, seed: int) -> None:
        dice = random.Random(seed)
        layout = vector.layout
        body = without_tags(layout.decode(vector.frame)[1], layout.message.fields, layout.version)
        frames = []
        for _ in range(8):
            frame = bytearray(layout.encode(filled(body, dice, 0.0)))
            for _ in range(dice.randrange(3)):
                frame[dice.randrange(layout.start, len(frame))] ^= 1 << dice.randrange(8)
            frames.append(bytes(frame[: len(frame) - dice.choice((0, 0, dice.randrange(9)))]))
        frames = [frame for frame in frames if len(frame) >= layout.start]
        for detail in DETAILS:
            count, _ = compare(layout, frames, detail, dice)
            share.add(count, len(frames))

    holds()
    assert float(share) > 0.3, share

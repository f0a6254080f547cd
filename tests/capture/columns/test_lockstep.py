"""Bodies read in lockstep have the rows that they have one by one, or are left to the reader of single bodies."""

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture.columns import lockstep
from kproxy.protocol.apis import LIST_OFFSETS
from kproxy.protocol.records import Record, write_batch, write_message_set
from kproxy.protocol.schema import Field
from kproxy.wire import bodies
from kproxy.wire.bulk import NULL
from tests import captures
from tests.capture.dialogues import Share
from tests.protocol.messages import Layout, Vector, layouts, vectors

DETAILS = (bodies.ERRORS, bodies.TOPICS, bodies.BATCHES)
TELLING = [layout for layout in layouts() if layout.api_key in (0, 1, 2, 8, 9, 78)]


def laid_out(frames: list[bytes], dice: random.Random, oddness: float) -> tuple[bytearray, list[tuple[int, int, int]]]:
    """Bytes that contain frames with gaps between them; (position in all frames, offset, length) of each piece.

    oddness: the share of frames that are split into pieces.
    """
    data = bytearray(b"\xff" * 512)
    pieces = []
    position = 0
    for frame in frames:
        start = 0
        while start < len(frame):
            size = dice.choice((1, 9, 70, 500, 5000)) if dice.random() < oddness else len(frame)
            piece = frame[start : start + size]
            pieces.append((position, len(data), len(piece)))
            data += piece + dice.randbytes(dice.randrange(70))
            position += len(piece)
            start += size
    return data + bytes(64), pieces


def read(
    layout: Layout, frames: list[bytes], detail: int, data: bytes, pieces: list[tuple[int, int, int]]
) -> lockstep.Read | None:
    reader = lockstep.reader(layout.api_key, layout.version, layout.side, detail)
    if reader is None:
        return None
    columns = np.array(pieces, np.int64)

    def seat(position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = np.searchsorted(columns[:, 0], position, "right") - 1
        return columns[place, 1] - columns[place, 0], columns[place, 0] + columns[place, 2]

    begin = np.cumsum([0, *map(len, frames)])[:-1]
    size = np.array([len(frame) for frame in frames])
    shift, limit = seat(begin + layout.start)
    whole = np.frombuffer(bytes(data), np.uint8)
    return reader.read(whole, begin + layout.start, np.minimum(limit, begin + size), begin + size, shift, seat)


def compare(
    layout: Layout, frames: list[bytes], detail: int, dice: random.Random, oddness: float = 0.5
) -> tuple[int, int]:
    """Compares both ways of reading; returns how many bodies were read in lockstep, and how many topic-partitions."""
    found = read(layout, frames, detail, *laid_out(frames, dice, oddness))
    if found is None:
        return 0, 0
    if found.bodies is not None:
        assert (np.diff(found.bodies.of) >= 0).all() and (np.diff(found.bodies.batch_of) >= 0).all()
    count = rows = 0
    for number, frame in enumerate(frames):
        if found.left[number] or found.short[number]:
            continue
        count += 1
        one = bodies.body_reader(layout.api_key, layout.version, layout.side, detail)(frame, layout.start, len(frame))
        if found.bodies is not None:
            at_once = captures.found(found.bodies, number)
            assert at_once.partitions == list(one.partitions)
            assert detail < bodies.BATCHES or at_once.batches == list(one.batches)
            rows += len(at_once.partitions)
        if layout.side == "response":
            code = None if found.error_code[number] == NULL else found.error_code[number]
            assert (found.throttle_ms[number], code) == (one.throttle_ms, one.error_code)
            assert set(one.errors) <= {code}
    return count, rows


@pytest.mark.parametrize("detail", DETAILS)
def test_golden_vectors_read_in_lockstep_equal_those_read_one_by_one(detail: int) -> None:
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


NAMES = ("orders", "payments", "a", "Grüße", "x" * 200, "")


def filled(value: Any, dice: random.Random, oddness: float) -> Any:
    """A body with other values, as real ones have. oddness: how likely a field has a value that columns leave to the
    other reader."""
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
def test_bodies_read_in_lockstep_equal_those_read_one_by_one(side: str, oddness: float, least: float) -> None:
    """In any version, with any number of topics and partitions. Without odd values only requests of ListOffsets are
    left to the other reader: no column has what they request."""
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


def test_damaged_bodies_read_in_lockstep_equal_those_read_one_by_one() -> None:
    """Bits are flipped and ends truncated: bodies that are read in lockstep give what the other reader gives."""
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

"""Read side by side, bodies say what they say one by one, or are left to be read so."""

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture import lockstep
from kproxy.protocol.records import Record, write_batch, write_message_set
from kproxy.wire import bodies
from kproxy.wire.bulk import NULL
from tests import captures
from tests.protocol.messages import Layout, layouts, vectors

DETAILS = (bodies.ERRORS, bodies.TOPICS, bodies.BATCHES)
TELLING = [layout for layout in layouts() if layout.api_key in (0, 1, 2, 8, 9, 78)]


def laid_out(frames: list[bytes], dice: random.Random) -> tuple[bytearray, list[tuple[int, int, int]]]:
    """Bytes that hold frames cut into pieces, with something between them; (where in all frames, where, how long)."""
    data = bytearray(b"\xff" * 512)
    pieces = []
    position = 0
    for frame in frames:
        start = 0
        while start < len(frame):
            size = dice.choice((1, 9, 70, 500, 5000)) if dice.random() < 0.5 else len(frame)
            piece = frame[start : start + size]
            pieces.append((position, len(data), len(piece)))
            data += piece + dice.randbytes(dice.randrange(70))
            position += len(piece)
            start += size
    return data + bytes(64), pieces


def read(layout: Layout, frames: list[bytes], detail: int, dice: random.Random) -> tuple[lockstep.Read, bytes] | None:
    reader = lockstep.reader(layout.api_key, layout.version, layout.side, detail)
    if reader is None:
        return None
    data, pieces = laid_out(frames, dice)
    columns = np.array(pieces, np.int64)

    def seat(position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = np.searchsorted(columns[:, 0], position, "right") - 1
        return columns[place, 1] - columns[place, 0], columns[place, 0] + columns[place, 2]

    begin = np.cumsum([0, *map(len, frames)])[:-1]
    size = np.array([len(frame) for frame in frames])
    shift, limit = seat(begin + layout.start)
    whole = np.frombuffer(bytes(data), np.uint8)
    return reader.read(whole, begin + layout.start, np.minimum(limit, begin + size), begin + size, shift, seat), data


def same(layout: Layout, frames: list[bytes], detail: int, dice: random.Random) -> tuple[int, int]:
    """Hold both ways of reading against each other; how many were read side by side, and how many topic-partitions."""
    answer = read(layout, frames, detail, dice)
    if answer is None:
        return 0, 0
    found, _ = answer
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
def test_golden_vectors(detail: int) -> None:
    frames = defaultdict(list)
    for vector in vectors():
        if vector.layout.side != "data":
            frames[vector.layout.api_key, vector.layout.version, vector.layout.side].append(vector)
    counts = [
        same(each[0].layout, [vector.frame for vector in each], detail, random.Random(1)) for each in frames.values()
    ]
    assert sum(count for count, _ in counts) > 800
    assert sum(rows for _, rows in counts) > 300 or not detail


def some_records(dice: random.Random) -> bytes:
    """What may lie in a partition: mostly batches, at times a message set, or one that is cut."""
    records = [Record(offset, 1_700_000_000_000 + offset, None, b"v" * dice.randrange(300)) for offset in range(3)]
    data = b"".join(write_batch(records, codec=dice.randrange(5)) for _ in range(dice.randrange(4)))
    if dice.random() < 0.1:
        data += write_message_set(records, magic=dice.randrange(2))
    return data[: -dice.randrange(1, 70)] if data and dice.random() < 0.1 else data


NAMES = ("orders", "payments", "a", "Grüße", "x" * 200, "")


def filled(value: Any, dice: random.Random) -> Any:
    """A body with other contents: what real ones have, and now and then an error."""
    if isinstance(value, dict):
        return {name: content(name, inner, dice) for name, inner in value.items()}
    return [filled(inner, dice) for inner in value] if isinstance(value, list) else value


def content(name: str, value: Any, dice: random.Random) -> Any:
    if name == "records":
        return some_records(dice)
    if name in ("topic", "name", "groupId") and isinstance(value, str):
        return dice.choice(NAMES)
    if name.endswith("rrorCode"):
        return dice.choice((0, 0, 0, 0, 6))
    return filled(value, dice)


@pytest.mark.parametrize("side", ("request", "response"))
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_bodies_side_by_side(side: str, seed: int) -> None:
    """Of any version, with any number of topics and partitions, split anywhere."""
    dice = random.Random(seed)
    layout = dice.choice([layout for layout in TELLING if layout.side == side])
    frames = []
    for vector in vectors():
        if vector.layout == layout:
            for _ in range(4):
                frames.append(layout.encode(filled(without_tags(vector.layout.decode(vector.frame)[1]), dice)))
    for detail in DETAILS:
        same(layout, frames, detail, dice)


def without_tags(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_tags(inner) for name, inner in value.items() if name not in ("_tags", "_trailing")}
    return [without_tags(inner) for inner in value] if isinstance(value, list) else value


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_harmed_bodies(seed: int) -> None:
    """Bits are flipped and ends cut off: whatever is read side by side is what the other reader reads."""
    dice = random.Random(seed)
    vector = dice.choice([vector for vector in vectors() if vector.layout in TELLING])
    frames = []
    for _ in range(8):
        frame = bytearray(vector.frame)
        for _ in range(dice.randrange(3)):
            frame[dice.randrange(vector.layout.start, len(frame))] ^= 1 << dice.randrange(8)
        frames.append(bytes(frame[: len(frame) - dice.choice((0, 0, dice.randrange(9)))]))
    frames = [frame for frame in frames if len(frame) >= vector.layout.start]
    for detail in DETAILS:
        same(vector.layout, frames, detail, dice)

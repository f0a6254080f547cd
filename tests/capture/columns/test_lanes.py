"""Frames found from lane to lane equal those of each direction's concatenated bytes."""

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture.columns import lanes
from kproxy.capture.columns.lanes import FAR, Lanes, Part, Segments
from kproxy.wire import frames

MOST = 4 + frames.MAX_REQUEST  # of a request; the size of a response is only limited by its four bytes
ENDS = (b"", b"\0\0\0", b"\0\0\0\7\0\3\0\1", b"\0\0\0\3\0\3\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4))


@dataclass
class Talk:
    flip: int


@dataclass
class Direction:
    """The bytes of a lane, its segments (index, begin, end), and the complete frames in it."""

    data: bytes
    segments: list[tuple[int, int, int]]
    base: int = 0  # where it begins among all lanes

    def begins(self, side, skip):
        """The beginnings of its frames after `skip` bytes, and the end of the last one, read one by one."""
        found = [skip]
        while len(self.data) - (position := found[-1]) >= lanes.HEADS[side]:
            size = 4 + int.from_bytes(self.data[position : position + 4], signed=True)
            least = 4 + (frames.MIN_REQUEST, frames.MIN_RESPONSE)[side]
            if not least <= size <= (MOST, 1 << 31)[side] or position + size > len(self.data):
                break
            found.append(position + size)
        return found

    def segment(self, position):
        """(index of the segment that contains a byte, offset in it)"""
        return next(
            (place, position - low) for place, (_, low, high) in enumerate(self.segments) if low <= position < high
        )


def directions(dice, large):
    """The bytes of a window, its segments, its parts, and its directions by number and side (0: the client's)."""
    whole, rows, parts, found = bytearray(dice.randbytes(dice.randrange(9))), [], [], {}
    for number in range(dice.randrange(1, 4)):
        flip, low = dice.randrange(2), len(rows)
        cut = []
        for side in (0, 1):
            bodies = [dice.randbytes(dice.choice((8, 8, 9, 30, 200, *large))) for _ in range(dice.randrange(7))]
            data = bytearray(b"".join(len(body).to_bytes(4) + body for body in bodies) + dice.choice(ENDS))
            borders = {0, len(data)}
            starts = np.cumsum([0, *(4 + len(body) for body in bodies)]).tolist()
            for start, body in zip(starts, bodies, strict=False):
                # its body contains bytes that look like a frame that ends with it
                if len(body) >= 30 and dice.random() < 0.5:
                    inner = start + 12
                    end = dice.choice([stop for stop in starts if stop >= inner + 12])
                    data[inner : inner + 4] = (end - inner - 4).to_bytes(4)
                    borders.add(inner)
            for position in starts:
                if dice.random() < 0.6:
                    borders.add(position)
                if dice.random() < 0.4:
                    borders.add(dice.randrange(len(data) + 1))
            borders = sorted(borders)
            direction = found[number, side] = Direction(bytes(data), [])
            cut.append([(side, direction, a, b) for a, b in pairwise(borders)])
        while any(cut):
            side, direction, begin, end = dice.choice([each for each in cut if each]).pop(0)
            if dice.random() < 0.2:
                rows.append((side ^ flip, len(whole), len(whole)))  # a segment that was read before
            direction.segments.append((len(rows), begin, end))
            rows.append((side ^ flip, len(whole), len(whole) + end - begin))
            whole += direction.data[begin:end] + dice.randbytes(dice.choice((0, 0, 1, 60)))
        parts.append(Part(Talk(flip), low, len(rows), 0))
    whole += bytes(4)  # a packet's padding, or the next one's header
    position = 0
    for _, direction in sorted(found.items()):
        direction.base = position
        position += len(direction.data)
    side, start, end = (np.array(column, np.int64) for column in zip(*rows, strict=True)) if rows else ((),) * 3
    return bytes(whole), Segments(side, start, end, np.zeros(len(rows), np.int64)), parts, found


def read(dice, large=()):
    whole, segments, parts, found = directions(dice, large)
    if not any(direction.data for direction in found.values()):
        return None, found
    return Lanes(memoryview(whole), segments, parts), found


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_frames_and_places_equal_those_of_the_concatenated_bytes(seed):
    made, found = read(random.Random(seed))
    if made is None:
        return
    for (number, side), one in found.items():
        if not one.data:
            assert not made.frames(number, side, 0)
            continue
        for skip in {0, *one.begins(side, 0)[:2], len(one.data)}:
            begins = one.begins(side, skip)
            assert list(made.frames(number, side, skip)) == [one.base + position for position in begins]
            for begin, end in pairwise(begins):
                place, into = one.segment(begin)
                assert made.place(number, side, one.base + begin) == (one.segments[place][0], into)
                if side:
                    assert made.correlation_id(one.base + begin) == int.from_bytes(
                        one.data[begin + 4 : begin + 8], signed=True
                    )
                assert made.seat(np.array([one.base + end - 1]))[1].tolist() == [
                    one.base + one.segments[one.segment(end - 1)[0]][2]
                ]
        assert made.place(number, side, one.base + len(one.data)) == (FAR, 0)


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_the_fields_read_of_a_frame_are_contiguous(seed):
    """In a copy if they span segments, unless the limit of copies is reached."""
    dice = random.Random(seed)
    made, found = read(dice)
    if made is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        room = dice.choice((0, 100, 1000))
        patch.setattr(lanes, "JOINED_BYTES", len(made.joined) + room)
        for (_, side), one in found.items():
            begins = one.begins(side, 0) if one.data else []
            if len(begins) < 2:
                continue
            columns = np.array(begins) + one.base
            some = made.columns(columns[:-1], columns[1:], side)
            heads = made.gather(some, np.arange(len(some.begin)), np.dtype("V8")).tolist()
            copied = len(made.joined)
            for row, (begin, end) in enumerate(pairwise(begins)):
                places = [one.segment(at) for at in (begin, begin + lanes.HEADS[side] - 1, end - 1)]
                segments = [some.first[row], some.head[row], some.last[row]]
                assert segments == [one.segments[place][0] for place, _ in places]
                assert (some.size[row], some.begin[row]) == (end - begin, one.base + begin)
                data = made.joined if some.is_joined[row] else made.whole
                there = bytes(data[int(some.at[row]) : int(some.limit[row])])
                look = min(end - begin, lanes._LOOK[side])
                if some.is_joined[row]:
                    assert there == one.data[begin:end] and one.segments[places[0][0]][2] < begin + look
                else:
                    assert there == one.data[begin : min(end, one.segments[places[0][0]][2])]
                    assert len(there) >= look or copied + end - begin > lanes.JOINED_BYTES
                assert len(there) < 8 or heads[row] == there[:8]
            assert copied <= lanes.JOINED_BYTES


@given(st.integers(0, 1 << 32), st.sampled_from(((), (1 << 17,))))
@settings(max_examples=50, deadline=None)
def test_frames_that_fill_their_segments_are_skipped_in_runs(seed, large):
    """Except where segments are so large that few of them begin a frame."""
    dice = random.Random(seed)
    made, found = read(dice, large)
    if made is None:
        return
    expected, hops, shift = [], [], 0
    for (_, side), one in sorted(found.items()):
        for place, (_, low, high) in enumerate(one.segments):
            borders = [begin for _, begin, _ in one.segments[place + 1 :]] + [len(one.data)]
            next_one = one.begins(side, low)[1:2]
            whole = high - low >= 4 and next_one and next_one[0] in borders
            expected.append(shift + place + 1 + borders.index(next_one[0]) if whole else 0)
        behind = shift + len(one.segments)
        # otherwise the next frame is incomplete
        hops += [place if place <= behind else 0 for place in made._following[shift:behind]]
        shift = behind
    few = made.stop > lanes.LARGE * shift
    assert hops == ([0] * shift if few else expected)

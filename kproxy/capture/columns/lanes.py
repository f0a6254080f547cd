"""The bytes of connections by direction, and the frames in them, by column.

Duty: a lane is one direction of one connection, its segments in sequence. Positions count the bytes of all lanes in a
row; a position leads to its segment, and to the bytes. Complete frames are found lane by lane; parts of a frame that
must be read in one piece and are in several segments are copied.

Memory: some columns of the segments, and JOINED_BYTES of copies. Refuses to know pairing, and contents of frames after
the header.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from kproxy.wire import frames
from kproxy.wire.captured import CapturedSession
from kproxy.wire.client_side import MAX_USUAL_PREFIX
from kproxy.wire.events import BROKER
from kproxy.wire.state import Usual
from kproxy.wire.structures import taken

JOINED_BYTES = 16 << 20
LARGE = 1 << 14  # bytes of a segment, of which few begin a frame
FAR = 1 << 62

HEADS = (frames.REQUEST_HEAD_BYTES, frames.RESPONSE_HEAD_BYTES)
_LEAST = (4 + frames.MIN_REQUEST, 4 + frames.MIN_RESPONSE)  # with the four bytes of their size
_MOST = (4 + frames.MAX_REQUEST, 1 << 31)
_LOOK = (MAX_USUAL_PREFIX, HEADS[BROKER])  # bytes of a frame that are looked at in one piece


class Talk(Protocol):
    """A Kafka connection of a capture."""

    session: CapturedSession
    openings: dict[int, Usual]  # how requests began that its session has read, by key and version
    flip: int  # 1 where side 0 of the segments is the broker's

    def receive(self, side: int, view: memoryview, now_ns: int) -> None: ...


Place = tuple[int, int]  # a segment, and how far into it


@dataclass(slots=True)
class Part:
    """A connection's segments: those from `low` to `high`."""

    talk: Talk
    low: int
    high: int
    clock_ns: int  # the time before them, and then after them


@dataclass(slots=True)
class Segments:
    """Segments by column, those of a connection together and in order."""

    side: np.ndarray
    start: np.ndarray
    end: np.ndarray
    time_ns: np.ndarray

    def rows(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """(side, start, end, time_ns) of some."""
        columns = (self.side, self.start, self.end, self.time_ns)
        return zip(*(column[low:high].tolist() for column in columns), strict=True)


@dataclass(slots=True)
class Frames:
    """Whole frames of one direction, by column: those of a part together and in order."""

    begin: np.ndarray  # in a count of the bytes of all lanes, one after the other
    size: np.ndarray  # with its four bytes
    lane: np.ndarray  # the place of its first segment among those of all lanes
    first: np.ndarray  # the segment with its first byte
    head: np.ndarray  # that with the last byte of its header
    last: np.ndarray  # that with its last byte
    at: np.ndarray  # where it is; in `joined`, if it is there
    limit: np.ndarray  # up to where it is there
    is_joined: np.ndarray

    def some(self, which: np.ndarray) -> "Frames":
        return Frames(*(getattr(self, each.name)[which] for each in fields(self)))


class Lanes:
    """The bytes of one direction after the other, of each part: segments, and the frames in them."""

    def __init__(self, whole: memoryview, segments: Segments, parts: Sequence[Part]) -> None:
        self.whole = whole
        self.data = np.frombuffer(whole, np.uint8)
        self.joined = bytearray(MAX_USUAL_PREFIX)  # so that it can be looked at before there is anything
        index = np.concatenate([np.arange(part.low, part.high) for part in parts])
        flips = np.repeat(
            [2 * number + part.talk.flip for number, part in enumerate(parts)],
            [part.high - part.low for part in parts],
        )
        left = segments.end[index] > segments.start[index]  # some were read in an earlier round
        index, flips = index[left], flips[left]
        lane = flips ^ segments.side[index]
        order = np.argsort(lane.astype(np.uint16) if len(parts) < 1 << 15 else lane, kind="stable")
        self.segment = index[order]
        self.start = segments.start[self.segment]
        self.end = segments.end[self.segment]
        stop = np.cumsum(self.end - self.start)
        self.begin = stop - (self.end - self.start)
        self.bounds = np.searchsorted(lane[order], np.arange(2 * len(parts) + 1)).tolist()
        self.stop = int(stop[-1])
        self._lane = lane[order]
        self._lists = _numbers(self.begin), _numbers(self.start), _numbers(self.end)
        self._following = self._hop()
        self._chains = self._chain()

    def frames(self, number: int, side: int, skip: int) -> "array[int]":
        """Where the whole frames begin that a part has from a side behind `skip` bytes, and where the last ends."""
        begins, starts, ends = self._lists
        found = array("q")
        low, high = self.bounds[2 * number + side : 2 * number + side + 2]
        if low == high:
            return found
        places, firsts, lasts = self._chains
        stop = begins[high] if high < len(begins) else self.stop
        append = found.append
        position, place = begins[low] + skip, low
        if skip:
            place = bisect_right(begins, position, low, high) - 1
        while position < stop:
            append(position)
            link = bisect_left(places, place) if position == begins[place] else len(places)
            if link < len(places) and places[link] == place:  # most frames begin where a segment begins
                last = lasts[link]
                found.extend(firsts[link + 1 : last + 1])
                place = places[last]
                position = begins[place]
                if self._following[place] == high:
                    position = stop
                    continue
            if stop - position < HEADS[side]:
                break
            at = starts[place] + position - begins[place]
            head = self.whole[at : at + 4] if at + 4 <= ends[place] else self.join(place, at, 4)
            size = 4 + int.from_bytes(head, signed=True)
            if not _LEAST[side] <= size <= _MOST[side] or size > stop - position:
                break
            position += size
            place = bisect_right(begins, position, place, high) - 1
        else:
            if position == stop:
                append(position)
        return found

    def _hop(self) -> np.ndarray:
        """Where a frame that begins with a segment ends with one: the place of the next; else 0, or if few begin."""
        length = self.end - self.start
        if self.stop > LARGE * len(length):  # to look at all would touch a page for each
            return np.zeros(len(length), np.int64)
        room = len(self.data) - 4
        size = (
            np.ndarray((room + 1,), ">i4", self.data, strides=(1,))[np.minimum(self.start, room)].astype(np.int64) + 4
        )
        stop = self.begin + size
        place = np.searchsorted(self.begin, stop)
        begin = np.append(self.begin, self.stop)
        lane = self._lane
        least, most = (np.array(values)[lane & 1] for values in (_LEAST, _MOST))
        sound = (length >= 4) & (size >= least) & (size <= most) & (begin[place] == stop)
        following: np.ndarray = np.where(sound, place, 0)
        return following

    def _chain(self) -> tuple["array[int]", "array[int]", "array[int]"]:
        """(places where frames seem to begin that end where the next one begins, their positions, chains' last links)

        A seeming frame inside another one is no link. A single link is a guess, but a chain is none: from the beginning
        of a frame it leads through beginnings of frames.
        """
        following, count = self._following, len(self.start)
        sound = np.flatnonzero((following > 0) & (self._lane[following - 1] == self._lane))
        inside = np.bincount(sound + 1, minlength=count + 1) - np.bincount(following[sound], minlength=count + 1)
        places = sound[np.cumsum(inside)[sound] == 0]
        if not len(places):
            return array("q"), array("q"), array("q")
        lane = self._lane[places]
        last = np.ones(len(places), bool)
        last[:-1] = (following[places[:-1]] != places[1:]) | (lane[:-1] != lane[1:])
        ends = np.flatnonzero(last)
        lasts = ends[np.searchsorted(ends, np.arange(len(places)))]
        return _numbers(places), _numbers(self.begin[places]), _numbers(lasts)

    def place(self, number: int, side: int, position: int) -> Place:
        """Where a position is of what a part has from a side."""
        begins, _, _ = self._lists
        low, high = self.bounds[2 * number + side : 2 * number + side + 2]
        place = bisect_right(begins, position, low, high) - 1
        if place == high - 1 and position == (begins[high] if high < len(begins) else self.stop):
            return FAR, 0
        return int(self.segment[place]), position - begins[place]

    def correlation_id(self, position: int) -> int:
        """Of the answer that begins there."""
        begins, starts, ends = self._lists
        place = bisect_right(begins, position) - 1
        at = starts[place] + position - begins[place]
        head = self.whole[at : at + 8] if at + 8 <= ends[place] else self.join(place, at, 8)
        return int(frames.RESPONSE_HEAD.unpack(head)[1])

    def join(self, place: int, at: int, size: int) -> bytes:
        """`size` bytes that begin in a segment at `at`."""
        _, starts, ends = self._lists
        whole = self.whole
        pieces = [whole[at : min(at + size, ends[place])]]
        left = size - len(pieces[0])
        while left:
            place += 1
            start = starts[place]
            pieces.append(whole[start : min(start + left, ends[place])])
            left -= len(pieces[-1])
        return b"".join(pieces)

    def columns(self, begin: np.ndarray, end: np.ndarray, side: int) -> Frames:
        """Frames by column."""
        size = end - begin
        lane = np.searchsorted(self.begin, begin, "right") - 1
        last = np.searchsorted(self.begin, end, "left") - 1
        at = self.start[lane] + begin - self.begin[lane]
        limit = np.minimum(at + size, self.end[lane])
        head = lane.copy()
        over = np.flatnonzero(at + HEADS[side] > limit)
        head[over] = np.searchsorted(self.begin, begin[over] + HEADS[side], "left") - 1
        segment = self.segment
        found = Frames(
            begin, size, lane, segment[lane], segment[head], segment[last], at, limit, np.zeros(len(at), bool)
        )
        self.join_some(found, np.flatnonzero(limit - at < np.minimum(size, _LOOK[side])))
        return found

    def seat(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(where in the bytes the segments of positions lie, compared with those; the positions where they end)"""
        place = np.searchsorted(self.begin, position, "right") - 1
        shift = self.start[place] - self.begin[place]
        return shift, self.end[place] - shift

    def join_some(self, found: Frames, which: np.ndarray) -> None:
        """Copies of some frames, each in one piece, as far as the budget allows."""
        begins, starts, _ = self._lists
        for index, size in zip(which.tolist(), found.size[which].tolist(), strict=True):
            if len(self.joined) + size <= JOINED_BYTES:
                place = int(found.lane[index])
                at = starts[place] + int(found.begin[index]) - begins[place]
                found.at[index] = len(self.joined)
                self.joined += self.join(place, at, size)
                found.limit[index] = len(self.joined)
                found.is_joined[index] = True

    def gather(self, found: Frames, which: np.ndarray, layout: np.dtype, offset: int = 0) -> np.ndarray:
        """This many bytes of each of some frames; after the available bytes any others."""
        at = found.at[which] + offset
        is_joined = found.is_joined[which]
        if is_joined.all():
            return self._taken(np.frombuffer(self.joined, np.uint8), at, layout)
        rows = self._taken(self.data, at, layout)
        if is_joined.any():
            rows[is_joined] = self._taken(np.frombuffer(self.joined, np.uint8), at[is_joined], layout)
        return rows

    @staticmethod
    def _taken(data: np.ndarray, at: np.ndarray, layout: np.dtype) -> np.ndarray:
        room = len(data) - layout.itemsize
        return np.zeros(len(at), layout) if room < 0 else taken(data, np.minimum(at, room), layout)


def _numbers(column: np.ndarray) -> "array[int]":
    """The same as something whose numbers are taken one by one, or copied by the slice, at little cost."""
    return array("q", np.ascontiguousarray(column, np.int64).tobytes())

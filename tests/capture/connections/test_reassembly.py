"""Whatever a network and a capture do to a byte stream, it is delivered unchanged or with a reported gap."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kproxy.capture.connections.reassembly import (
    BEHIND,
    FURTHEST,
    KEPT_STRAYS,
    MASK,
    MAX_QUEUED,
    PATIENCE,
    Budget,
    Conversation,
)
from kproxy.capture.dissection.packets import ACK, FIN

BIG = 65535


class Receiver:
    """Records the deliveries of a conversation, per side, with gaps as zeros."""

    def __init__(self):
        self.streams = (bytearray(), bytearray())
        self.gaps = []
        self.closed = []
        self.order = []
        self.times = []

    def receive(self, side, view, now_ns):
        assert len(view)
        self.streams[side].extend(view)
        self.order.append(side)
        self.times.append(now_ns)

    def gap(self, side, count, now_ns):
        assert count > 0
        self.gaps.append((side, len(self.streams[side]), count))
        self.streams[side].extend(bytes(count))
        self.times.append(now_ns)

    def close(self, side, now_ns):
        assert side not in self.closed
        self.closed.append(side)


def conversation(isn=(0, 0)):
    receiver = Receiver()
    talk = Conversation(receiver)
    for side in (0, 1):
        talk.open(side, isn[side])
    return talk, receiver


@st.composite
def segmented(draw):
    """(stream, segments (offset, bytes) that cover it, with overlaps, repetitions and in any order)."""
    stream = draw(st.binary(min_size=1, max_size=300))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(stream) - 1)), max_size=20)) | {0, len(stream)})
    segments = [(a, stream[a:b]) for a, b in pairwise(cuts)]
    extra = draw(st.lists(st.tuples(st.integers(0, len(stream)), st.integers(0, 60)), max_size=10))
    segments += [(a, stream[a : a + size]) for a, size in extra if stream[a : a + size]]
    return stream, draw(st.permutations(segments))


@pytest.mark.parametrize("window", [b"abc", b"abc" + bytes(1000), bytearray(b"abc"), bytearray(b"abc") + bytes(9)])
def test_queued_segments_do_not_depend_on_their_windows_memory(window):
    talk, receiver = conversation()
    talk.segment(0, 2, 1, ACK, BIG, memoryview(window)[:3], 3, 1)
    talk.keep()
    assert [len(piece[3].obj) for piece in talk.halves[0].pieces] == [3]
    if isinstance(window, bytearray):
        window[:3] = b"xyz"  # the next window
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"_"), 1, 2)
    assert receiver.streams[0] == b"_abc"


@given(segmented(), st.integers(0, MASK))
@settings(max_examples=300, deadline=None)
def test_any_split_order_overlap_and_repetition_gives_the_stream(case, isn):
    stream, segments = case
    talk, receiver = conversation((isn, 7))
    for time, (offset, data) in enumerate(segments):
        talk.segment(0, isn + 1 + offset & MASK, 8, ACK, BIG, memoryview(data), len(data), time)
    assert bytes(receiver.streams[0]) == stream  # without waiting for the end
    talk.finish(1000)
    assert bytes(receiver.streams[0]) == stream
    assert not receiver.gaps
    assert receiver.closed == [0, 1]
    assert receiver.times == sorted(receiver.times)


@given(segmented(), st.integers(0, MASK), st.sets(st.integers(0, 40), max_size=5))
@settings(max_examples=300, deadline=None)
def test_missing_bytes_are_a_gap_of_the_right_size(case, isn, lost):
    stream, segments = case
    kept = [segment for index, segment in enumerate(segments) if index not in lost]
    seen = bytearray(len(stream))
    talk, receiver = conversation((isn, 7))
    for time, (offset, data) in enumerate(kept):
        talk.segment(0, isn + 1 + offset & MASK, 8, ACK, BIG, memoryview(data), len(data), time)
        seen[offset : offset + len(data)] = b"\1" * len(data)
    talk.segment(1, 8, isn + 1 + len(stream) & MASK, ACK, BIG, memoryview(b""), 0, 999)
    talk.finish(1000)
    if len(stream) > 1:  # a single missing byte at the end is taken for the sequence number of a FIN
        tail = len(seen.rstrip(b"\0")) + 1
        want = bytes(byte if there else 0 for byte, there in zip(stream, seen, strict=True))
        got = bytes(receiver.streams[0])
        assert got == want or (tail == len(stream) and got == want[:-1])
    assert sum(count for _, _, count in receiver.gaps) in (seen.count(0), seen.count(0) - 1)


@given(segmented())
def test_the_first_captured_bytes_of_a_position_win(case):
    """For conflicting overlaps: a forged segment must not replace what the receiver has accepted."""
    stream, segments = case
    talk, receiver = conversation()
    owner = {}
    for index, (offset, data) in enumerate(segments):
        mark = bytes([index & 0xFF]) * len(data)
        for position in range(offset, offset + len(data)):
            owner.setdefault(position, index & 0xFF)
        talk.segment(0, 1 + offset, 1, ACK, BIG, memoryview(mark), len(mark), index)
    assert bytes(receiver.streams[0]) == bytes(owner[position] for position in range(len(stream)))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30)), min_size=1, max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_a_segment_is_never_delivered_before_the_bytes_that_it_acknowledges(turns, data):
    """Segments of both sides, shuffled within a few places as capturing does: causes stay before effects."""
    sent = [1, 1]
    segments = []
    for side, size in turns:
        segments.append((side, sent[side], sent[1 - side], size))
        sent[side] += size
    order = sorted(range(len(segments)), key=lambda i: i + data.draw(st.integers(0, 6)))
    talk, receiver = conversation()
    for time, index in enumerate(order):
        side, seq, ack, size = segments[index]
        talk.segment(side, seq, ack, ACK, BIG, memoryview(bytes([index]) * size), size, time)
    talk.finish(1000)
    assert not receiver.gaps
    position = [1, 1]
    runs = [list(stream) for stream in receiver.streams]
    for side in receiver.order:  # each delivery is one whole segment here, since none overlap
        index = runs[side][position[side] - 1]
        assert segments[index][2] <= position[1 - side]
        position[side] += segments[index][3]


def test_a_gap_is_declared_once_acknowledged_and_after_enough_segments():
    talk, receiver = conversation()
    talk.segment(0, 11, 1, ACK, BIG, memoryview(b"behind"), 6, 1)
    for time in range(2 * PATIENCE):  # not acknowledged: it may be retransmitted
        talk.segment(0, 17, 1, ACK, BIG, memoryview(b""), 0, time)
    assert not receiver.gaps
    for time in range(PATIENCE):
        talk.segment(1, 1, 17, ACK, BIG, memoryview(b""), 0, time)
    assert not receiver.gaps
    talk.segment(1, 1, 17, ACK, BIG, memoryview(b""), 0, 900)
    assert receiver.gaps == [(0, 0, 10)]
    assert bytes(receiver.streams[0][10:]) == b"behind"


@pytest.mark.parametrize("sides", ((0,), (1,), (0, 1)))
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_after_a_gap_of_any_size_a_connection_continues(sides, data):
    """As when a file of a rotated capture is missing: later bytes are delivered, and the gap is reported."""
    talk, receiver = conversation()
    sizes = []
    receiver.gap = lambda side, count, now_ns: sizes.append((side, count))
    sent, delivered, time = [1, 1], [0, 0], 0

    def exchange(count):
        nonlocal time
        for _ in range(count):
            for side, size in ((0, 100), (1, 1400)):
                time += 1000
                seq, ack = sent[side] & MASK, sent[1 - side] & MASK
                talk.segment(side, seq, ack, ACK, BIG, memoryview(bytes(size)), size, time)
                sent[side] += size
                delivered[side] += size

    exchange(20)
    holes = []
    for side in (0, 1):
        least = 1 if side in sides else 0
        hole = data.draw(st.integers(least, 3 << 32 if least else 0) | st.sampled_from((1 << 30, 1 << 31, 3 << 30)))
        if side not in sides:
            hole = 0
        assume(not 0 < -hole & MASK <= BEHIND and (not hole or hole & MASK))
        holes.append((side, hole & MASK))
        sent[side] += hole
    exchange(PATIENCE + 20)
    talk.finish(time)
    assert sorted(sizes) == [(side, size) for side, size in holes if size]
    assert [len(stream) for stream in receiver.streams] == delivered
    assert talk.strays == 0
    for half, (_, size) in zip(talk.halves, holes, strict=True):
        assert half.long_gaps == (size > FURTHEST) or abs(size - FURTHEST) < 1400 * 2 * PATIENCE
    assert talk._budget.left == MAX_QUEUED


def test_a_long_gap_in_a_capture_of_one_direction_is_recognised():
    receiver = Receiver()
    talk = Conversation(receiver)
    gaps = []
    receiver.gap = lambda side, count, now_ns: gaps.append((side, count))
    for hole in (0, 2 << 30):
        for turn in range(KEPT_STRAYS):
            talk.segment(0, hole + 7 * turn, 1000, ACK, BIG, memoryview(b"request"), 7, hole + turn)
    assert bytes(receiver.streams[0]) == b"request" * 2 * KEPT_STRAYS
    assert gaps == [(0, (2 << 30) - 7 * KEPT_STRAYS)]


@pytest.mark.parametrize("count", (1, 5, KEPT_STRAYS, 200))
def test_unacknowledged_strays_are_not_delivered(count):
    """Including forged ones: without an acknowledgement nothing is delivered, and little is kept."""
    talk, receiver = conversation()
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"abc"), 3, 0)
    talk.segment(1, 1, 4, ACK, BIG, memoryview(b"xyz"), 3, 1)
    for turn in range(count):
        talk.segment(0, (2 << 30) + 1000 * turn, 4, ACK, BIG, memoryview(bytes(1000)), 1000, 2 + turn)
    assert talk._budget.left >= MAX_QUEUED - 1000 * KEPT_STRAYS
    assert not talk.is_calm
    for turn in range(2 * PATIENCE):
        talk.segment(0, 4 + turn, 4, ACK, BIG, memoryview(b"d"), 1, 1000 + turn)
    assert bytes(receiver.streams[0]) == b"abc" + b"d" * 2 * PATIENCE
    assert not receiver.gaps
    assert talk.strays == count
    assert talk.is_calm and talk._budget.left == MAX_QUEUED


def test_segments_queued_behind_a_gap_keep_their_times():
    """A connection may end before a gap is declared; the durations of its last exchanges do not change."""
    talk, receiver = conversation()
    sent = [1, 1]
    for turn in range(PATIENCE // 4):
        side = turn % 2
        if turn != 2:  # a request that was not captured; the response acknowledges it
            talk.segment(side, sent[side], sent[1 - side], ACK, BIG, memoryview(b"four"), 4, turn * 1000)
        sent[side] += 4
    assert len(receiver.times) == 2
    talk.finish(999_999)
    assert receiver.gaps == [(0, 4, 4)]
    came = [turn * 1000 for turn in range(PATIENCE // 4)]
    assert receiver.times == [*came[:2], came[1], *came[3:]]  # the gap has the time of the bytes before it


def test_a_lost_request_is_declared_before_its_response():
    talk, receiver = conversation()
    talk.segment(1, 1, 51, ACK, BIG, memoryview(b"answer"), 6, 1)
    assert not receiver.order
    talk.finish(2)
    assert receiver.gaps == [(0, 0, 50)]
    assert bytes(receiver.streams[1]) == b"answer"


def test_bytes_beyond_the_snap_length_are_a_gap_at_once():
    talk, receiver = conversation()
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"captured"), 20, 1)
    talk.segment(0, 21, 1, ACK, BIG, memoryview(b"next"), 4, 2)
    assert receiver.gaps == [(0, 8, 12)]
    assert bytes(receiver.streams[0]) == b"captured" + bytes(12) + b"next"
    assert talk.halves[0].truncated == 1


def test_fins_end_the_sides_in_order_and_use_a_sequence_number_each():
    talk, receiver = conversation()
    talk.segment(0, 4, 1, ACK | FIN, BIG, memoryview(b""), 0, 1)  # overtakes the last bytes
    assert not receiver.closed
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"end"), 3, 2)
    assert receiver.closed == [0]
    talk.segment(1, 1, 5, ACK | FIN, BIG, memoryview(b"bye"), 3, 3)
    talk.segment(0, 5, 5, ACK, BIG, memoryview(b""), 0, 4)
    assert receiver.closed == [0, 1]
    assert not receiver.gaps


def test_a_capture_of_one_direction_does_not_wait_for_the_other():
    receiver = Receiver()
    talk = Conversation(receiver)
    position = 1
    for turn in range(5):
        talk.segment(0, position, 1000 + 100 * turn, ACK, BIG, memoryview(b"request"), 7, turn)
        position += 7
        assert bytes(receiver.streams[0]) == b"request" * (turn + 1)
    assert sum(count for side, _, count in receiver.gaps if side == 1) == 400


def test_counters_of_retransmissions_reordering_and_closed_windows():
    talk, _ = conversation()
    half = talk.halves[0]
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"abc"), 3, 0)
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"abc"), 3, 10)
    assert (half.retransmissions, half.out_of_order) == (1, 0)
    talk.segment(0, 3, 1, ACK, BIG, memoryview(b"c"), 1, 20)  # a keep-alive probe
    assert half.retransmissions == 1
    talk.segment(0, 7, 1, ACK, BIG, memoryview(b"ghi"), 3, 30)
    talk.segment(0, 4, 1, ACK, BIG, memoryview(b"def"), 3, 31)
    assert (half.retransmissions, half.out_of_order) == (1, 1)
    talk.segment(0, 13, 1, ACK, BIG, memoryview(b"mno"), 3, 40)
    talk.segment(0, 10, 1, ACK, BIG, memoryview(b"jkl"), 3, 200_000_000)
    assert (half.retransmissions, half.out_of_order) == (2, 1)
    for window in (0, 0, 5, 0):
        talk.segment(0, 16, 1, ACK, window, memoryview(b""), 0, 300_000_000)
    assert half.zero_windows == 2


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.integers(0, MASK),
            st.integers(0, MASK),
            st.sampled_from((0, ACK, FIN, ACK | FIN)),
            st.integers(0, 1),
            st.binary(max_size=8),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)
@settings(max_examples=300, deadline=None)
def test_absurd_segments_raise_nothing(segments):
    talk, receiver = conversation((MASK - 2, 5))
    receiver.gap = lambda side, count, now_ns: None  # too large to be kept as zeros
    for time, (side, seq, ack, flags, window, data, cut) in enumerate(segments):
        talk.segment(
            side,
            seq % 64 + MASK - 30 & MASK if seq % 3 else seq,
            ack % 90 if ack % 3 else ack,
            flags,
            window,
            memoryview(data),
            len(data) + cut,
            time,
        )
    talk.finish(len(segments))
    assert sorted(receiver.closed) == [0, 1]
    for half in talk.halves:
        assert not half.pieces and not half.queued_bytes


@pytest.mark.parametrize(
    ("size", "count", "shared"),
    [
        (1, 4096, 1 << 30),  # segments of a side
        (1 << 20, 4, 1 << 30),  # bytes of a side
        (1000, 100, 100_000),  # bytes of all connections
    ],
)
def test_the_queue_behind_a_gap_has_three_limits(size, count, shared):
    """Without acknowledgements, so that no gap is declared because of later segments."""
    receiver = Receiver()
    talk = Conversation(receiver, Budget(shared))
    for side in (0, 1):
        talk.open(side, 0)
    for number in range(count + 1):
        talk.segment(0, 2 + number * (size + 1), 1, ACK, BIG, memoryview(bytes(size)), size, number)
        assert len(receiver.gaps) == int(number == count)
    assert receiver.gaps == [(0, 0, 1)]

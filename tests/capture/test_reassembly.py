"""Whatever a network and a capture do to a byte stream, what is delivered is that stream, or a hole is named."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kproxy.capture.packets import ACK, FIN
from kproxy.capture.reassembly import BEHIND, FURTHEST, KEPT_STRAYS, MASK, MAX_QUEUED, PATIENCE, Budget, Conversation

BIG = 65535


class Ears:
    """What a conversation delivered, per side, holes as zeros."""

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
    ears = Ears()
    talk = Conversation(ears)
    for side in (0, 1):
        talk.open(side, isn[side])
    return talk, ears


@st.composite
def segmented(draw):
    """(stream, segments (offset, bytes) that cover it, with overlaps, repeats and any order)."""
    stream = draw(st.binary(min_size=1, max_size=300))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(stream) - 1)), max_size=20)) | {0, len(stream)})
    segments = [(a, stream[a:b]) for a, b in pairwise(cuts)]
    extra = draw(st.lists(st.tuples(st.integers(0, len(stream)), st.integers(0, 60)), max_size=10))
    segments += [(a, stream[a : a + size]) for a, size in extra if stream[a : a + size]]
    return stream, draw(st.permutations(segments))


@pytest.mark.parametrize("window", [b"abc", b"abc" + bytes(1000), bytearray(b"abc"), bytearray(b"abc") + bytes(9)])
def test_what_waits_for_the_next_window_holds_neither_the_memory_nor_the_bytes_of_its_own(window):
    talk, ears = conversation()
    talk.segment(0, 2, 1, ACK, BIG, memoryview(window)[:3], 3, 1)
    talk.keep()
    assert [len(piece[3].obj) for piece in talk.halves[0].pieces] == [3]
    if isinstance(window, bytearray):
        window[:3] = b"xyz"  # the next window
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"_"), 1, 2)
    assert ears.streams[0] == b"_abc"


@given(segmented(), st.integers(0, MASK))
@settings(max_examples=300, deadline=None)
def test_any_chopping_order_overlap_and_repetition_gives_the_stream(case, isn):
    stream, segments = case
    talk, ears = conversation((isn, 7))
    for time, (offset, data) in enumerate(segments):
        talk.segment(0, isn + 1 + offset & MASK, 8, ACK, BIG, memoryview(data), len(data), time)
    assert bytes(ears.streams[0]) == stream  # without waiting for the end
    talk.finish(1000)
    assert bytes(ears.streams[0]) == stream
    assert not ears.gaps
    assert ears.closed == [0, 1]
    assert ears.times == sorted(ears.times)


@given(segmented(), st.integers(0, MASK), st.sets(st.integers(0, 40), max_size=5))
@settings(max_examples=300, deadline=None)
def test_what_never_comes_is_a_hole_of_the_right_size(case, isn, lost):
    stream, segments = case
    kept = [segment for index, segment in enumerate(segments) if index not in lost]
    seen = bytearray(len(stream))
    talk, ears = conversation((isn, 7))
    for time, (offset, data) in enumerate(kept):
        talk.segment(0, isn + 1 + offset & MASK, 8, ACK, BIG, memoryview(data), len(data), time)
        seen[offset : offset + len(data)] = b"\1" * len(data)
    talk.segment(1, 8, isn + 1 + len(stream) & MASK, ACK, BIG, memoryview(b""), 0, 999)
    talk.finish(1000)
    if len(stream) > 1:  # one missing byte with nothing behind it is taken for the number of a FIN
        tail = len(seen.rstrip(b"\0")) + 1
        want = bytes(byte if there else 0 for byte, there in zip(stream, seen, strict=True))
        got = bytes(ears.streams[0])
        assert got == want or (tail == len(stream) and got == want[:-1])
    assert sum(count for _, _, count in ears.gaps) in (seen.count(0), seen.count(0) - 1)


@given(segmented())
def test_the_first_bytes_captured_of_a_position_win(case):
    """Overlaps that disagree: a forger's segment must not replace what the receiver already took."""
    stream, segments = case
    talk, ears = conversation()
    owner = {}
    for index, (offset, data) in enumerate(segments):
        mark = bytes([index & 0xFF]) * len(data)
        for position in range(offset, offset + len(data)):
            owner.setdefault(position, index & 0xFF)
        talk.segment(0, 1 + offset, 1, ACK, BIG, memoryview(mark), len(mark), index)
    assert bytes(ears.streams[0]) == bytes(owner[position] for position in range(len(stream)))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30)), min_size=1, max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_an_answer_is_never_delivered_before_what_it_acknowledges(turns, data):
    """Segments of both sides, shuffled within a few places as capture machines do: causes stay before effects."""
    sent = [1, 1]
    segments = []
    for side, size in turns:
        segments.append((side, sent[side], sent[1 - side], size))
        sent[side] += size
    order = sorted(range(len(segments)), key=lambda i: i + data.draw(st.integers(0, 6)))
    talk, ears = conversation()
    for time, index in enumerate(order):
        side, seq, ack, size = segments[index]
        talk.segment(side, seq, ack, ACK, BIG, memoryview(bytes([index]) * size), size, time)
    talk.finish(1000)
    assert not ears.gaps
    position = [1, 1]
    runs = [list(stream) for stream in ears.streams]
    for side in ears.order:  # each delivery is one whole segment here, since none overlap
        index = runs[side][position[side] - 1]
        assert segments[index][2] <= position[1 - side]
        position[side] += segments[index][3]


def test_a_hole_is_declared_once_the_peer_acknowledged_it_and_patience_is_over():
    talk, ears = conversation()
    talk.segment(0, 11, 1, ACK, BIG, memoryview(b"behind"), 6, 1)
    for time in range(2 * PATIENCE):  # not acknowledged: it may be sent again
        talk.segment(0, 17, 1, ACK, BIG, memoryview(b""), 0, time)
    assert not ears.gaps
    for time in range(PATIENCE):
        talk.segment(1, 1, 17, ACK, BIG, memoryview(b""), 0, time)
    assert not ears.gaps
    talk.segment(1, 1, 17, ACK, BIG, memoryview(b""), 0, 900)
    assert ears.gaps == [(0, 0, 10)]
    assert bytes(ears.streams[0][10:]) == b"behind"


@pytest.mark.parametrize("sides", ((0,), (1,), (0, 1)))
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_hole_of_any_size_does_not_silence_a_connection(sides, data):
    """A file of a rotated capture is missing: what comes behind it is delivered, and the hole is named."""
    talk, ears = conversation()
    sizes = []
    ears.gap = lambda side, count, now_ns: sizes.append((side, count))
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
    assert [len(stream) for stream in ears.streams] == delivered
    assert talk.strays == 0
    for half, (_, size) in zip(talk.halves, holes, strict=True):
        assert half.long_gaps == (size > FURTHEST) or abs(size - FURTHEST) < 1400 * 2 * PATIENCE
    assert talk._budget.left == MAX_QUEUED


def test_a_long_hole_in_a_capture_of_one_direction():
    ears = Ears()
    talk = Conversation(ears)
    gaps = []
    ears.gap = lambda side, count, now_ns: gaps.append((side, count))
    for hole in (0, 2 << 30):
        for turn in range(KEPT_STRAYS):
            talk.segment(0, hole + 7 * turn, 1000, ACK, BIG, memoryview(b"request"), 7, hole + turn)
    assert bytes(ears.streams[0]) == b"request" * 2 * KEPT_STRAYS
    assert gaps == [(0, (2 << 30) - 7 * KEPT_STRAYS)]


@pytest.mark.parametrize("count", (1, 5, KEPT_STRAYS, 200))
def test_strays_that_nobody_acknowledges_are_no_stream(count):
    """Also forged ones: without an acknowledgement of the other side nothing is delivered, and little is kept."""
    talk, ears = conversation()
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"abc"), 3, 0)
    talk.segment(1, 1, 4, ACK, BIG, memoryview(b"xyz"), 3, 1)
    for turn in range(count):
        talk.segment(0, (2 << 30) + 1000 * turn, 4, ACK, BIG, memoryview(bytes(1000)), 1000, 2 + turn)
    assert talk._budget.left >= MAX_QUEUED - 1000 * KEPT_STRAYS
    assert not talk.is_calm
    for turn in range(2 * PATIENCE):
        talk.segment(0, 4 + turn, 4, ACK, BIG, memoryview(b"d"), 1, 1000 + turn)
    assert bytes(ears.streams[0]) == b"abc" + b"d" * 2 * PATIENCE
    assert not ears.gaps
    assert talk.strays == count
    assert talk.is_calm and talk._budget.left == MAX_QUEUED


def test_what_waited_behind_a_hole_until_the_end_keeps_its_times():
    """A connection may end before patience is over; its last exchanges took as long as they took."""
    talk, ears = conversation()
    sent = [1, 1]
    for turn in range(PATIENCE // 4):
        side = turn % 2
        if turn != 2:  # a request that was not captured, and its answer acknowledges it
            talk.segment(side, sent[side], sent[1 - side], ACK, BIG, memoryview(b"four"), 4, turn * 1000)
        sent[side] += 4
    assert len(ears.times) == 2
    talk.finish(999_999)
    assert ears.gaps == [(0, 4, 4)]
    came = [turn * 1000 for turn in range(PATIENCE // 4)]
    assert ears.times == [*came[:2], came[1], *came[3:]]  # the hole is told at the time of what was before it


def test_a_request_that_is_lost_is_declared_before_its_answer():
    talk, ears = conversation()
    talk.segment(1, 1, 51, ACK, BIG, memoryview(b"answer"), 6, 1)
    assert not ears.order
    talk.finish(2)
    assert ears.gaps == [(0, 0, 50)]
    assert bytes(ears.streams[1]) == b"answer"


def test_bytes_cut_by_the_snap_length_are_a_hole_at_once():
    talk, ears = conversation()
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"captured"), 20, 1)
    talk.segment(0, 21, 1, ACK, BIG, memoryview(b"next"), 4, 2)
    assert ears.gaps == [(0, 8, 12)]
    assert bytes(ears.streams[0]) == b"captured" + bytes(12) + b"next"
    assert talk.halves[0].truncated == 1


def test_fins_end_the_sides_in_order_and_take_a_number_each():
    talk, ears = conversation()
    talk.segment(0, 4, 1, ACK | FIN, BIG, memoryview(b""), 0, 1)  # overtakes the last bytes
    assert not ears.closed
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"end"), 3, 2)
    assert ears.closed == [0]
    talk.segment(1, 1, 5, ACK | FIN, BIG, memoryview(b"bye"), 3, 3)
    talk.segment(0, 5, 5, ACK, BIG, memoryview(b""), 0, 4)
    assert ears.closed == [0, 1]
    assert not ears.gaps


def test_a_capture_of_one_direction_does_not_wait_for_the_other():
    ears = Ears()
    talk = Conversation(ears)
    position = 1
    for turn in range(5):
        talk.segment(0, position, 1000 + 100 * turn, ACK, BIG, memoryview(b"request"), 7, turn)
        position += 7
        assert bytes(ears.streams[0]) == b"request" * (turn + 1)
    assert sum(count for side, _, count in ears.gaps if side == 1) == 400


def test_counters_tell_retransmission_overtaking_and_closed_windows():
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
def test_no_segments_however_absurd_break_it(segments):
    talk, ears = conversation((MASK - 2, 5))
    ears.gap = lambda side, count, now_ns: None  # too large to be kept as zeros
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
    assert sorted(ears.closed) == [0, 1]
    for half in talk.halves:
        assert not half.pieces and not half.queued_bytes


@pytest.mark.parametrize(
    ("size", "count", "shared"),
    [
        (1, 4096, 1 << 30),  # pieces of a side
        (1 << 20, 4, 1 << 30),  # bytes of a side
        (1000, 100, 100_000),  # bytes of all connections
    ],
)
def test_what_waits_behind_a_hole_is_bounded_by_each_of_three_bounds(size, count, shared):
    """Nothing is acknowledged, so that no hole is given up because segments go by."""
    ears = Ears()
    talk = Conversation(ears, Budget(shared))
    for side in (0, 1):
        talk.open(side, 0)
    for number in range(count + 1):
        talk.segment(0, 2 + number * (size + 1), 1, ACK, BIG, memoryview(bytes(size)), size, number)
        assert len(ears.gaps) == int(number == count)
    assert ears.gaps == [(0, 0, 1)]

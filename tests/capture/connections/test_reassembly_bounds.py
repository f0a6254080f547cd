"""Every limit of reassembly, at the limit and one beyond."""

import pytest

from kproxy.capture.connections.reassembly import (
    BEHIND,
    FURTHEST,
    KEPT_STRAYS,
    KEPT_TIMES,
    MAX_PIECES,
    MAX_QUEUED,
    NOT_LATE,
    OVERTAKEN_NS,
    PATIENCE,
    Budget,
    Conversation,
)
from kproxy.capture.connections.stalls import LATE, REPEATED
from kproxy.capture.dissection.packets import ACK, FIN

FIRST = 1 << 28  # the first sequence number of both streams


class Talk(Conversation):
    """A conversation that records its deliveries as (side, bytes), (side, -size of a gap) or (side, None) for the
    end."""

    def __init__(self, budget=MAX_QUEUED, is_open=True):
        super().__init__(self, Budget(budget))
        self.delivered = []
        self.times = []
        if is_open:
            for side in (0, 1):
                self.open(side, FIRST - 1)

    def receive(self, side, view, now_ns):
        self.delivered.append((side, bytes(view) if len(view) < 100 else len(view)))
        self.times.append(now_ns)

    def gap(self, side, count, now_ns):
        self.delivered.append((side, -count))
        self.times.append(now_ns)

    def close(self, side, now_ns):
        self.delivered.append((side, None))
        self.times.append(now_ns)

    def send(self, side, at, data=b"", ack=0, *, flags=ACK, window=9, time=0, length=None):
        """at, ack: relative to the beginning of the streams."""
        size = len(data) if length is None else length
        seq, ack = at + FIRST & 0xFFFFFFFF, ack + FIRST & 0xFFFFFFFF
        return self.segment(side, seq, ack, flags, window, memoryview(data), size, time)


@pytest.mark.parametrize("beyond", (0, 1))
def test_a_segment_beyond_any_window_or_buffer_is_a_stray(beyond):
    talk = Talk()
    talk.send(0, FURTHEST + beyond, b"far")
    assert (talk.strays, talk.halves[0].queued_bytes) == ((1, 0) if beyond else (0, 3))
    talk = Talk()
    talk.send(0, -BEHIND - beyond, b"old")
    assert (talk.strays, talk.halves[0].retransmissions) == ((1, 0) if beyond else (0, 1))
    talk = Talk()
    talk.send(0, 0, b"", FURTHEST + beyond)
    assert talk.halves[1].acked == (-1 if beyond else FIRST + FURTHEST)


@pytest.mark.parametrize("time, taken", ((99, False), (100, True), (101, True)))
def test_a_stray_older_than_delivered_bytes_reveals_no_gap(time, taken):
    talk = Talk()
    talk.send(0, 0, b"x", time=100)
    talk.send(0, 2 << 30, b"stray", time=time)
    assert (talk.halves[0].astray is not None) == taken
    talk.send(0, 3 << 29, b"", time=time)
    assert talk.strays == 2


@pytest.mark.parametrize("count", (1, 2))
def test_two_acknowledged_strays_reveal_a_long_gap(count):
    talk = Talk()
    talk.send(1, 0, b"seen")
    for number in range(count):
        talk.send(0, (2 << 30) + 3 * number, b"abc", 4)
    talk.send(1, 4, b"", (2 << 30) + 3)  # in the middle of them
    hole = [(0, -(2 << 30)), (0, b"abc"), (0, b"abc")]
    assert talk.delivered[1:] == (hole if count == 2 else [])
    assert talk.halves[0].long_gaps == count - 1 and talk.strays == (0 if count == 2 else 1)


@pytest.mark.parametrize("ack", (0, 1, 3, 4))
def test_only_an_acknowledgement_among_the_strays_reveals_a_gap(ack):
    """That is, of a byte among them."""
    talk = Talk()
    talk.send(1, 0, b"seen")
    for number in range(3):
        talk.send(0, (2 << 30) + number, b"a", 4)
    talk.send(1, 4, b"", (2 << 30) + ack)
    assert (len(talk.delivered) > 1) == (1 <= ack <= 3)


@pytest.mark.parametrize("count", (KEPT_STRAYS - 1, KEPT_STRAYS))
def test_enough_strays_of_one_direction_reveal_a_long_gap(count):
    talk = Talk(is_open=False)
    talk.send(0, 0, b"x")
    for number in range(count):
        talk.send(0, (2 << 30) + number, b"s", time=number)
    assert (talk.strays, talk.halves[0].long_gaps) == ((0, 1) if count == KEPT_STRAYS else (count, 0))
    if count == KEPT_STRAYS:
        assert talk.times[-count:] == list(range(count))


@pytest.mark.parametrize("passed", (PATIENCE - 1, PATIENCE, PATIENCE + 1))
def test_strays_are_forgotten_after_enough_segments(passed):
    talk = Talk()
    talk.send(1, 0, b"seen")
    for number in range(2):
        talk.send(0, (2 << 30) + number, b"s", 4)
    for _ in range(passed):
        talk.send(0, 0, b"", 4)
    assert (talk.halves[0].astray is None) == (passed > PATIENCE)
    assert talk._budget.left == MAX_QUEUED - (2 if passed <= PATIENCE else 0)


@pytest.mark.parametrize(
    "at, data, counted",
    ((-1, b"p", 0), (-2, b"p", 1), (-2, b"pp", 1), (-1, b"pp", 0), (-1, b"", 0), (-3, b"", 0), (0, b"p", 0)),
)
def test_one_byte_before_the_next_is_a_probe_other_old_bytes_are_retransmissions(at, data, counted):
    talk = Talk()
    talk.send(0, 0, b"abcd")
    assert talk.send(0, 4 + at, data, window=0) == bool(counted)
    assert talk.halves[0].retransmissions == counted
    assert b"".join(each for _, each in talk.delivered) == b"abcd" + b"p" * max(0, at + len(data))


@pytest.mark.parametrize("late_ns", (OVERTAKEN_NS, OVERTAKEN_NS + 1))
def test_a_very_late_segment_is_a_retransmission_and_not_reordered(late_ns):
    talk = Talk()
    talk.send(0, 3, b"def", time=1000)
    talk.send(0, 0, b"abc", time=1000 + late_ns)
    half = talk.halves[0]
    is_late = late_ns > OVERTAKEN_NS
    assert (half.out_of_order, half.retransmissions) == ((0, 1) if is_late else (1, 0))
    assert talk.stalls.found == ([(1000, 1000 + late_ns, 0, LATE)] if is_late else [])
    assert talk.delivered == [(0, b"abc"), (0, b"def")] and talk.times == [1000 + late_ns] * 2


@pytest.mark.parametrize("acked", (3, 4, 5, 6))
def test_retransmissions_of_acknowledged_bytes_stalled_nothing(acked):
    """Bytes 3 to 6 again: until all of them are acknowledged, they are late."""
    talk = Talk()
    talk.send(0, 0, b"abcdef", time=10)
    talk.send(1, 0, b"", acked, time=20)
    for time in (500, 700):
        talk.send(0, 3, b"def", time=time)
    half = talk.halves[0]
    is_late = acked < 6
    assert talk.stalls.found == ([(10, 500, 0, REPEATED), (10, 700, 0, REPEATED)] if is_late else [])
    assert half.unacked == ([FIRST + 6, 10, 2] if is_late else None)
    talk.send(1, 0, b"", 5, time=800)
    assert half.late == 0
    talk.send(1, 0, b"", 6, time=900)
    assert (half.late, half.latest) == ((1, (890, 10, 2)) if is_late else (0, NOT_LATE))
    assert half.unacked is None


def test_the_latest_time_of_late_bytes_is_kept():
    talk = Talk()
    at, latest = 0, []
    for number, wait in enumerate((30, 50, 40)):
        time = 1000 * number
        talk.send(0, at, b"ab", time=time)
        talk.send(1, 0, b"", at, time=time)
        talk.send(0, at, b"ab", time=time + 20)
        at += 2
        talk.send(1, 0, b"", at, time=time + wait)
        latest.append(talk.halves[0].latest)
    assert latest == [(30, 0, 1), (50, 1000, 1), (50, 1000, 1)] and talk.halves[0].late == 3


@pytest.mark.parametrize("count", (1, 2))
def test_a_packet_captured_twice_is_not_counted_as_retransmitted(count):
    """One of two retransmissions remains."""
    talk = Talk()
    talk.send(0, 0, b"abc", time=10)
    talk.send(1, 0, b"", 0, time=10)
    for number in range(count):
        talk.send(0, 0, b"abc", time=500 + number)
    talk.same_packet(0)
    half = talk.halves[0]
    assert (half.retransmissions, half.duplicates) == (count - 1, 1)
    assert half.unacked == ([FIRST + 3, 10, 1] if count == 2 else None)
    assert talk.stalls.found == [(10, 500, 0, REPEATED)][: count - 1]
    assert talk.retransmitted_ns == [500][: count - 1]


@pytest.mark.parametrize("passed", (PATIENCE, PATIENCE + 1))
def test_an_acknowledged_gap_is_declared_after_enough_segments(passed):
    talk = Talk()
    talk.send(0, 5, b"behind", time=1)
    for number in range(passed):
        talk.send(1, 0, b"", 11, time=2 + number)
    assert talk.delivered == ([(0, -5), (0, b"behind")] if passed > PATIENCE else [])
    assert talk.is_calm == (passed > PATIENCE) or not talk.halves[0].seen
    assert talk._budget.left == MAX_QUEUED - (0 if passed > PATIENCE else 6)


@pytest.mark.parametrize("kind", ("bytes", "pieces", "budget"))
@pytest.mark.parametrize("beyond", (0, 1))
def test_the_queue_is_limited(kind, beyond):
    talk = Talk(100 if kind == "budget" else MAX_QUEUED * 2)
    if kind == "pieces":
        for number in range(MAX_PIECES + beyond):
            talk.send(0, 1 + 2 * number, b"p")
    else:
        talk.send(0, 1, bytes((100 if kind == "budget" else MAX_QUEUED) + beyond))
    assert (talk.delivered[:1] == [(0, -1)]) == bool(beyond)
    assert talk._budget.least == talk._budget.left if not beyond else talk._budget.least < talk._budget.left


@pytest.mark.parametrize("at, is_end", ((-1, False), (0, True), (1, False)))
def test_a_fin_ends_a_side_where_its_bytes_end(at, is_end):
    """A FIN before the last byte is old; one after it waits."""
    talk = Talk()
    talk.send(0, 0, b"abc", time=5)
    talk.send(0, 3 + at, b"", flags=ACK | FIN, time=7)
    assert ((0, None) in talk.delivered) == is_end
    assert talk.first_fin == (None if at < 0 else (0, 7))
    talk.send(1, 0, b"", 4, flags=ACK | FIN, time=8)
    assert talk.first_fin == ((1, 8) if at < 0 else (0, 7))


@pytest.mark.parametrize("lost", (1, 2))
def test_one_missing_number_at_the_end_is_a_fin_and_two_are_a_gap(lost):
    talk = Talk()
    talk.send(0, 0, b"abc")
    talk.send(1, 0, b"", 3 + lost)
    talk.finish(9)
    assert talk.delivered == [(0, b"abc"), *([(0, -2)] if lost == 2 else []), (0, None), (1, None)]
    assert talk.halves[0].gap_bytes == (2 if lost == 2 else 0)


def test_missing_numbers_before_more_bytes_are_a_gap():
    for lost in (1, 2):
        talk = Talk()
        talk.send(0, lost, b"abc")
        talk.finish(9)
        assert talk.delivered == [(0, -lost), (0, b"abc"), (0, None), (1, None)]


@pytest.mark.parametrize("count", (KEPT_TIMES, KEPT_TIMES + 1, KEPT_TIMES + 9))
def test_a_limited_number_of_times_is_kept(count):
    talk = Talk()
    talk.send(0, 0, b"ab")
    for number in range(count):
        talk.send(0, 0, b"ab", 0, time=1 + number)
    talk.keep()
    assert talk.retransmitted_ns == list(range(1 + count - KEPT_TIMES, 1 + count))


def test_times_of_retransmissions_grow_though_the_clock_does_not():
    talk = Talk()
    talk.send(0, 0, b"ab", time=100)
    for time in (90, 100, 102, 102):
        talk.send(0, 0, b"ab", time=time)
    assert talk.retransmitted_ns == [101, 101, 102, 102]


def test_a_stream_may_begin_at_number_zero():
    """A stream joined midstream at number 0, which does not mean that a side is unseen."""
    for first in (0, 1):
        talk = Talk(is_open=False)
        talk.segment(0, first, 0, ACK, 9, memoryview(b"ab"), 2, 0)
        talk.segment(1, 0, first + 2, ACK, 9, memoryview(b"cd"), 2, 0)
        assert talk.delivered == [(0, b"ab"), (1, b"cd")] and talk.is_calm and talk.is_still
        assert [half.first for half in talk.halves] == [first, 0]
        assert not any(half.retransmissions or half.gaps for half in talk.halves)


@pytest.mark.parametrize("first", (0, 1))
def test_a_segment_waits_for_number_zero_if_the_peer_expects_it(first):
    talk = Talk(is_open=False)
    talk.segment(1, 7, first, ACK, 9, memoryview(b""), 0, 0)
    talk.segment(0, first + 3, 7, ACK, 9, memoryview(b"def"), 3, 0)
    assert talk.delivered == []
    talk.segment(0, first, 7, ACK, 9, memoryview(b"abc"), 3, 0)
    assert talk.delivered == [(0, b"abc"), (0, b"def")]


def test_at_the_end_the_whole_budget_is_released():
    talk = Talk()
    talk.send(0, 1, b"waits")
    talk.send(1, 1, b"too")
    talk.send(0, 2 << 30, b"stray")
    assert talk._budget.left == MAX_QUEUED - 13
    talk.finish(0)
    assert talk._budget.left == MAX_QUEUED and talk._budget.least == MAX_QUEUED - 8


@pytest.mark.parametrize("begun", (0, 1))
def test_bytes_acknowledged_before_the_capture_are_no_gap(begun):
    """The first segment of a side may have an older number, as a probe has: the side starts where it was
    acknowledged."""
    talk = Talk(is_open=False)
    talk.segment(0, 9 + begun, 0, ACK, 9, memoryview(b""), 0, 0)
    talk.segment(1, 0, 10 + begun, ACK, 9, memoryview(b"x"), 1, 0)
    talk.segment(0, 10 + begun, 1, ACK, 9, memoryview(b"y"), 1, 0)
    assert talk.delivered == [(1, b"x"), (0, b"y")] and talk.halves[0].first == 10 + begun


def test_a_closed_window_is_counted_once_until_it_opens():
    talk = Talk()
    for number, (window, data) in enumerate(((0, b""), (0, b""), (5, b"x"), (0, b""), (5, b""), (0, b""))):
        at = talk.halves[0].position - FIRST
        talk.send(0, at, data, window=window, time=10 * number)
    half = talk.halves[0]
    assert (half.zero_windows, half.zero_window, talk.is_calm) == (2, True, False)
    assert talk.stalls.found == [(0, 20, 0, 2), (30, 40, 0, 2)]


def test_sides_that_wait_for_each_other_continue_with_the_first_segment():
    """The first transmission of each was not captured: neither side can have sent its bytes after the other's."""
    for first in (0, 1):
        talk = Talk()
        for number, side in enumerate((first, 1 - first)):
            talk.send(side, 0, b"%d" % side, 1, time=10 + number)
        assert talk.delivered == []
        talk.finish(99)
        assert talk.delivered[:2] == [(first, b"%d" % first), (1 - first, b"%d" % (1 - first))]
        assert talk.times[:2] == [10, 11] and talk.clock_ns == 99


def test_counters_are_reset_and_merged_from_either_side():
    talk, other = Talk(), Talk()
    for each, again in ((talk, 1), (other, 2)):
        each.send(0, 0, b"ab", time=1)
        each.send(1, 0, b"", 0, time=1)
        for number in range(again):
            each.send(0, 0, b"ab", time=50 + number)
        each.send(1, 0, b"", 2, time=60)
        each.send(1, 0, b"", 2, window=0, time=60)
        each.send(0, 2 << 30, b"stray", time=70)
    for turned in (0, 1):
        anew = Talk()
        anew.send(0, 0, b"ab", time=1)
        anew.send(0, 0, b"ab", time=1)
        anew.join(other, turned)
        sides = anew.halves[::-1] if turned else anew.halves
        assert [half.retransmissions for half in anew.halves] == ([1, 2] if turned else [3, 0])
        assert [half.zero_windows for half in sides] == [0, 1]
        assert [half.latest for half in sides] == [(59, 1, 2), NOT_LATE] and anew.strays == 1
        assert [half.late for half in sides] == [1, 0] and all(half.seen for half in sides)
    talk.count_anew()
    assert talk.strays == 0 and talk.halves[0].latest == NOT_LATE
    assert not any(half.retransmissions or half.late or half.zero_windows for half in talk.halves)

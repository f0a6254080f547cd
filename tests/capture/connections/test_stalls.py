"""The delays of an exchange by lost bytes and closed windows, along with its queue."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kproxy.capture.connections.stalls import CLOSED, KEPT, LATE, REPEATED, Stalls
from kproxy.capture.dissection.packets import ACK
from tests.capture.connections.test_reassembly import BIG, conversation

MS = 1_000_000
CLIENT, BROKER = 0, 1


def test_a_gap_filled_late_by_a_retransmission_is_loss():
    talk, _ = conversation()
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"a" * 10), 10, 0)
    talk.segment(0, 21, 1, ACK, BIG, memoryview(b"c" * 10), 10, 5 * MS)
    talk.segment(0, 11, 1, ACK, BIG, memoryview(b"b" * 10), 10, 205 * MS)
    assert talk.stalls.found == [(5 * MS, 205 * MS, 0, LATE)]
    assert talk.retransmitted_ns and talk.stalls.of(CLIENT, (0, 205 * MS, 206 * MS, 206 * MS), 0) == (
        *(200 * MS, 0, 0),
        *(0, 0, 0),
    )
    # queueing is subtracted first
    assert talk.stalls.of(CLIENT, (0, 205 * MS, 206 * MS, 206 * MS), 150 * MS)[0] == 55 * MS


def test_retransmissions_of_acknowledged_bytes_delay_nothing():
    for acknowledged, found in ((1, [(10 * MS, 250 * MS, 0, REPEATED)]), (11, [])):
        talk, _ = conversation()
        talk.segment(0, 1, 1, ACK, BIG, memoryview(b"a" * 10), 10, 10 * MS)
        talk.segment(1, 1, acknowledged, ACK, BIG, memoryview(b""), 0, 11 * MS)
        talk.segment(0, 1, 1, ACK, BIG, memoryview(b"a" * 10), 10, 250 * MS)
        assert talk.retransmitted_ns and talk.stalls.found == found
        # the last event before the pause was this request's last byte, not that of an older request
        assert sum(talk.stalls.of(CLIENT, (0, 10 * MS, 260 * MS, 260 * MS), 0)) == 240 * MS * bool(found)
        assert sum(talk.stalls.of(CLIENT, (0, 9 * MS, 260 * MS, 260 * MS), 0)) == 0


def test_the_kind_of_loss_depends_on_whether_it_delayed_the_first_byte():
    times = 0, 50, 100, 120
    for kind, of_request, of_answer in (
        (LATE, (), (0, 30, 5, 0, 0, 0)),
        (REPEATED, (0, 30, 0, 0, 0, 0), (0, 0, 5, 0, 0, 0)),
    ):
        stalls = Stalls()
        stalls.add(50, 80, CLIENT, kind)
        assert stalls.of(CLIENT, times, 0) == of_request
        stalls = Stalls()
        stalls.add(70, 105, BROKER, kind)
        assert stalls.of(CLIENT, times, 0) == of_answer


def test_a_packet_captured_twice_is_no_loss():
    talk, _ = conversation()
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"a" * 10), 10, 10 * MS)
    assert talk.segment(0, 1, 1, ACK, BIG, memoryview(b"a" * 10), 10, 10 * MS + 9)
    talk.same_packet(0)
    assert not talk.stalls.found


def test_a_closed_window_counts_for_its_reader_unless_already_explained():
    stalls = Stalls()
    stalls.window(BROKER, False, 10)
    stalls.window(BROKER, False, 20)
    assert stalls.of(CLIENT, (0, 100, 110, 120), 0)[3] == 90  # it is still closed
    stalls.window(BROKER, True, 60)
    assert stalls.of(CLIENT, (0, 100, 110, 120), 0) == (0, 0, 0, 50, 0, 0)
    assert stalls.of(CLIENT, (0, 100, 110, 120), 40) == (0, 0, 0, 20, 0, 0)  # 30 ns of it were in a mute
    assert stalls.of(CLIENT, (0, 100, 110, 120), 70) == ()
    stalls.add(30, 90, CLIENT, LATE)
    assert stalls.of(CLIENT, (0, 100, 110, 120), 0) == (60, 0, 0, 20, 0, 0)  # nothing is counted twice
    stalls.add(105, 118, CLIENT, CLOSED)
    assert stalls.of(CLIENT, (0, 100, 110, 120), 0) == (60, 0, 0, 20, 5, 8)  # the client reads no response
    stalls.add(112, 119, BROKER, LATE)
    assert stalls.of(CLIENT, (0, 100, 110, 120), 0) == (60, 0, 7, 20, 5, 2)
    for number in range(2 * KEPT):
        stalls.add(1000 + number, 1002 + number, CLIENT, LATE)
    stalls.keep()
    assert len(stalls.since(0)) == KEPT and stalls.since(0)[0][0] == 1000 + KEPT


moments = st.integers(0, 24)
intervals = st.tuples(moments, st.integers(1, 9), st.sampled_from((0, 1)), st.sampled_from((LATE, REPEATED, CLOSED)))


@given(st.lists(intervals, max_size=5), st.none() | moments, st.tuples(*[moments] * 4).map(sorted), moments)
def test_the_parts_of_a_wait_equal_a_count_of_every_nanosecond(found, closed_ns, times, waited_ns):
    """closed_ns: since when the broker's window has been closed."""
    begun, asked, start, end = times
    for client in (0, 1):
        stalls = Stalls()
        for at, length, side, kind in sorted(found, key=lambda each: each[0] + each[1]):
            assert stalls.add(at, at + length, side, kind)
        if closed_ns is not None:
            stalls.window(1 - client, False, closed_ns)
        overlap = [each for each in stalls.found if {*range(*each[:2])} & {*range(begun, end)}]
        still = [(closed_ns, end, 1 - client, CLOSED)] * (closed_ns is not None and closed_ns < end)
        assert stalls.between(begun, end) == overlap + still or begun == end
        assert stalls.overlap(np.array([begun, begun]), np.array([end, end])).tolist() == [bool(overlap + still)] * 2
        explained = [0] * 6
        for now in range(min(begun + waited_ns, start), end):
            here = [each for each in overlap + still if each[0] <= now < each[1]]
            part = 0 if now < min(asked, start) else 1 if now < start else 2
            lost = {
                0: any(side == client and kind != CLOSED for _, _, side, kind in here),
                1: any(
                    (side != client and kind == LATE) or (side == client and kind == REPEATED and at == asked)
                    for at, _, side, kind in here
                ),
                2: any(side != client and kind != CLOSED for _, _, side, kind in here),
            }[part]
            closed = any(kind == CLOSED and (side == client) == (part > 0) for _, _, side, kind in here)
            explained[part + (0 if lost else 3)] += lost or closed
        assert stalls.of(client, times, waited_ns) == (tuple(explained) if any(explained) else ())


def test_the_delays_of_an_exchange_are_the_same_afterwards_where_the_clock_goes_back():
    """A window that is closed after a response, with an earlier time, delays the next exchange and not this one."""
    talk, _ = conversation()
    times = 0, 10 * MS, 20 * MS, 20 * MS
    talk.segment(0, 1, 1, ACK, BIG, memoryview(b"a" * 10), 10, 10 * MS)
    talk.segment(1, 1, 11, ACK, BIG, memoryview(b"b" * 10), 10, 20 * MS)
    assert not talk.stalls.of(CLIENT, times, 0)
    talk.segment(0, 11, 11, ACK, 0, memoryview(b""), 0, 15 * MS)
    talk.segment(0, 11, 11, ACK, BIG, memoryview(b""), 0, 30 * MS)
    talk.segment(1, 11, 11, ACK, 0, memoryview(b""), 0, 24 * MS)
    talk.segment(1, 11, 11, ACK, BIG, memoryview(b""), 0, 26 * MS)
    assert talk.stalls.found == [(20 * MS, 30 * MS, 0, CLOSED), (24 * MS, 30 * MS, 1, CLOSED)]
    assert not talk.stalls.of(CLIENT, times, 0)

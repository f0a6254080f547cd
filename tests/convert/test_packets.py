"""A segment counts as a retransmission if its first byte was sent before and its packet was not captured twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kproxy
from kproxy.convert import packets
from kproxy.convert.frames import Frames, frames_of
from kproxy.convert.packets import packets_of
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT, NONE
from tests.capture import packet
from tests.capture.story import MS, Line, Story, answer, request


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15)), max_size=30))
def test_a_segment_is_a_retransmission_if_its_first_byte_was_sent(base, segments):
    sent, seen = packets._Sent(), None
    for start, length in segments:
        again = sent.again((base + start) % 2**32, length)
        if seen is None:  # bytes before the first segment count as sent
            seen = set(range(start))
        assert again == (start in seen)
        seen |= set(range(start, start + length))


def test_a_packet_captured_twice_is_no_retransmission(tmp_path):
    story = Story()
    line = Line(story, 40001).shake().send(0, request(1))
    story.copy(1)
    begun = line.next[1]
    line.send(1, answer(1)[:4])
    story.wait(300 * MS)
    line.send(1, answer(1)[:4], at=begun).send(1, answer(1)[4:]).close()
    capture = tmp_path / "twice.pcap"
    capture.write_bytes(packet.pcap(story.packets))
    (row,) = kproxy.exchanges(capture)
    found = packets_of(frames_of([capture], row["connection"], row["number"]))
    assert [(each.number, each.is_repeated, each.is_copy) for each in found] == [
        *((4, False, False), (5, True, True), (6, False, False), (7, True, False), (8, False, False)),
    ]


@pytest.mark.parametrize(
    ("side", "length", "times_ns"),
    [(CLIENT, 1, range(10, 21)), (BROKER, 1, range(30, 41)), (CLIENT, 0, ()), (BROKER, 0, ())],
)
def test_payload_from_the_first_to_the_last_byte_of_a_frame_carries_it(side, length, times_ns):
    """A frame of one packet begins and ends at the same time."""
    info = ConnectionInfo("demo", "a.pcap", "10.0.0.7", 5000, "10.0.0.1", 9092, 1, 0)
    found = Frames(info, 0, 0, 9, "answered", 7, 10, 20, 30, 40, 100, 50)
    name = "request" if side == CLIENT else "response"
    for time_ns in range(50):
        assert packets._carried(found, side, length, time_ns) == (name if time_ns in times_ns else "")
    unknown = Frames(info, 0, 0, 9, "lost", 7, *[NONE] * 4, 100, 50)
    assert packets._carried(unknown, side, length, 15) == ""

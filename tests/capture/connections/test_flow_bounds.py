"""A connection whose protocol is not clear yet: limits of the kept bytes, and the evidence that decides."""

import pytest

from kproxy.capture.connections import content
from kproxy.capture.dissection.packets import ACK, FIN
from tests.capture.connections.test_flows_bounds import Seen
from tests.capture.story import MS, Line, Story, answer, request
from tests.capture.test_snapshots import Read

KEPT = 4 * content.HEAD


def send_all(line, side, size):
    """Send `size` bytes that reveal no protocol."""
    for start in range(0, size, 30_000):
        line.send(side, bytes(min(30_000, size - start)))


@pytest.mark.parametrize("size, kinds", ((KEPT, [1, 0]), (KEPT + 1, [0, 1])))
def test_a_connection_without_recognisable_client_bytes_is_abandoned(size, kinds):
    story = Story()
    send_all(Line(story, 40001).shake(), 1, size)
    assert Seen(story).finish().kinds("undecided", "not_kafka") == kinds


@pytest.mark.parametrize("more", (-1, 0, 1))
def test_midstream_segments_before_the_first_request_are_dropped(more):
    """The oldest segments first, once the limit is exceeded; kept bytes count if the connection turns out to be
    Kafka's."""
    story = Story()
    line = Line(story, 40001)
    size = KEPT + more - len(request(1))
    send_all(line, 0, size)
    line.send(0, request(1))
    seen = Seen(story)
    assert (seen.quality.count("resync"), seen.quality.size("resync")) == ((1, 30_000) if more > 0 else (0, 0))
    line.send(1, answer(1))
    seen.finish()
    assert seen.kinds("kafka", "midstream") == [1, 1] and seen.quality.size("resync") == size
    assert seen.quality.size("kafka") == size + len(request(1) + answer(1))


@pytest.mark.parametrize("number, known", ((0, True), (63, True), (64, False)))
def test_a_limited_number_of_incomplete_requests_waits_for_a_response(number, known):
    story = Story()
    line = Line(story, 40001)
    for each in range(65):
        line.send(0, request(each)[:-1])
    line.send(1, answer(number))
    assert Seen(story).finish().kinds("kafka", "undecided") == [int(known), int(not known)]


@pytest.mark.parametrize("size", (7, 8))
@pytest.mark.parametrize("other", (False, True))
def test_a_response_is_recognised_by_its_correlation_id(size, other):
    """The correlation id of a request of the other side; one of the same side proves nothing."""
    story = Story()
    line = Line(story, 40001).send(0, request(7)[:-1])
    line.send(int(not other), answer(7)[:size])
    assert Seen(story).finish().kinds("kafka") == [int(size == 8 and not other)]


@pytest.mark.parametrize("count", (1, 2))
def test_two_complete_requests_prove_kafka_and_which_end_is_the_client(count):
    story = Story()
    line = Line(story, 40001)
    line.ends = line.ends[::-1]  # the broker's port proves nothing
    for number in range(count):
        line.send(0, request(number))
    seen = Seen(story).finish()
    assert seen.kinds("kafka", "undecided") == [int(count == 2), int(count == 1)]
    assert [flow.info.client_port for flow in seen.ended] == [9092] * (count == 2)


def test_a_retransmitted_request_counts_once():
    story = Story()
    line = Line(story, 40001)
    for _ in range(2):
        line.send(0, request(1))
    assert Seen(story).finish().kinds("kafka", "undecided") == [0, 1]


@pytest.mark.parametrize("ends", ((0,), (0, 1)))
def test_a_short_connection_is_decided_when_both_sides_have_ended(ends):
    story = Story()
    line = Line(story, 40001).shake().send(0, b"\0\0")
    for side in ends:
        line.send(side, flags=FIN | ACK)
    seen = Seen(story)
    assert seen.kinds("undecided") == [int(len(ends) == 2)]
    assert seen.finish().kinds("undecided", "no_data") == [1, 0]


@pytest.mark.parametrize("step", (1, 5, 28, 200))
@pytest.mark.parametrize("lost", (False, True))
def test_a_proxy_header_is_no_part_of_the_first_request(step, lost):
    """However it is split; after a gap it is not recognised as a header."""
    header = b"PROXY TCP4 192.0.2.7 10.0.0.2 5000 9092\r\n"
    story = Story()
    line = Line(story, 40001).shake()
    data = header + request(1)
    if lost:
        line.lose(0, data[:8])
    for start in range(8 * lost, len(data), step):
        line.send(0, data[start : start + step])
    line.send(1, answer(1)).ask(2, 3)
    seen = Seen(story).finish()
    (flow,) = seen.ended
    assert flow.payload_bytes[0] == len(data) - 8 * lost + 2 * len(request(1))
    assert (flow.info.client_address, flow.info.client_port) == (("10.0.0.1", 40001) if lost else ("192.0.2.7", 5000))
    assert flow.lacks_beginning == lost and seen.kinds("fault", "midstream") == [0, 0]


@pytest.mark.parametrize("is_seen", (False, True))
def test_loss_explains_nothing_of_a_response_whose_request_was_not_captured(is_seen):
    """Its latency is unknown."""
    story = Story()
    line = Line(story, 40001).shake().ask(1)
    (line.send if is_seen else line.lose)(0, request(2))
    begun, data = line.next[1], answer(2)
    line.lose(1, data[:5]).send(1, data[5:])
    story.wait(50 * MS)
    line.send(1, data[:5], at=begun).send(0)
    read = Read()
    for number, each in enumerate(story.packets):
        read.take(number, each)
    read.flows.finish()
    *_, (*_, stalled) = (each for each in read.events_of[read.flow] if len(each) > 2)  # the last exchange
    assert bool(stalled) == is_seen

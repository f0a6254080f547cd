"""Every limit in the life of a connection, at the limit and one beyond."""

import pytest

from kproxy.capture.connections import flows
from kproxy.capture.connections.flow import AT_ONCE_NS, Handlers
from kproxy.capture.connections.flows import IN_FLIGHT, Flows
from kproxy.capture.connections.reassembly import BEHIND, FURTHEST
from kproxy.capture.dissection.packets import ACK, ETHERNET, FIN, RST, SYN
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import Quality
from tests.capture.story import MS, Line, Story, answer, reported, request


class Seen:
    """The results of the connections of a story, read packet by packet."""

    def __init__(self, story, **options):
        self.ended, self.unconnected, self.quality = [], [], Quality()
        handlers = Handlers(
            lambda flow: lambda events: None, None, self.ended.append, unconnected=self.unconnected.append
        )
        self.flows = Flows("test", self.quality, handlers, **options)
        self.taken = 0
        self.story = story
        self.take()

    def take(self):
        """Read the packets that the story has so far."""
        for time_ns, data, length in self.story.packets[self.taken :]:
            self.flows.window(Window(data, 0, [(time_ns, ETHERNET, 0, len(data), length)]))
            self.taken += 1
        return self

    def finish(self):
        self.take()
        self.flows.finish()
        return self

    def kinds(self, *kinds):
        return [self.quality.count(kind) for kind in kinds]


@pytest.mark.parametrize("begin_ns", (0, 1, 10**18))
def test_connections_without_packets_since_a_moment_end(begin_ns):
    story = Story(begin_ns)
    Line(story, 40001).shake().ask(1)
    last_ns = story.packets[-1][0]
    seen = Seen(story)
    (flow,) = seen.flows.open
    assert seen.flows.of(flow.keys[0]) is seen.flows.of(flow.keys[1]) is flow
    assert seen.flows.expire(last_ns) == 0
    assert seen.flows.expire(last_ns + 1) == 1
    assert [flow.close for flow in seen.ended] == ["idle"] and seen.kinds("idle") == [1]
    assert not seen.flows.ended and not seen.flows.open  # nor is it remembered
    assert seen.flows.of(flow.keys[0]) is None


@pytest.mark.parametrize("begin_ns", (0, 1, 10**18))
def test_connects_unanswered_since_a_moment_end(begin_ns):
    """Not answered ones, even if their client has not acknowledged the response."""
    story = Story(begin_ns)
    Line(story, 40001).send(0, flags=SYN)
    seen = Seen(story)
    assert seen.flows.expire(0, begin_ns) == 0
    assert seen.flows.expire(0, begin_ns + 1) == 1
    story = Story(begin_ns)
    Line(story, 40001).send(0, flags=SYN).send(1, flags=SYN | ACK)
    Line(story, 40002).shake()
    assert Seen(story).flows.expire(0, 1 << 62) == 0


@pytest.mark.parametrize("begin_ns", (0, 10**18))
@pytest.mark.parametrize("flags", (FIN | ACK, RST))
@pytest.mark.parametrize("late", (0, 1))
def test_a_server_closes_at_once_within_a_second_of_the_handshake(begin_ns, flags, late):
    story = Story(begin_ns)
    line = Line(story, 40001).shake()
    story.now = begin_ns + 2 * 100_000 + AT_ONCE_NS + late
    line.send(1, flags=flags)
    seen = Seen(story).finish()
    assert seen.kinds("connect_closed_at_once", "no_data") == [1 - late, late]


@pytest.mark.parametrize("begin_ns", (0, 10**18))
def test_a_handshake_lasts_from_the_first_syn_to_the_clients_next_packet(begin_ns):
    story = Story(begin_ns)
    line = Line(story, 40001).send(0, flags=SYN)
    story.wait(7 * MS)
    line.send(0, flags=SYN, at=40_001_000).send(1, flags=SYN | ACK).send(0).ask(1)
    (flow,) = Seen(story).finish().ended
    assert (flow.rtt_ns, flow.first_ns, flow.start_seen) == (7 * MS + 300_000, begin_ns, True)
    assert flow.total("retransmissions") == 1


@pytest.mark.parametrize(
    "by, after, opened",
    ((-BEHIND, 0, 0), (-BEHIND - 1, 0, 0), (-4, 0, 0), (-3, 1, 0), (0, 1, 0), (IN_FLIGHT, 1, 0), (IN_FLIGHT + 1, 0, 1)),
)
def test_packets_of_the_peer_in_flight_at_a_reset_are_no_connection(by, after, opened):
    """by: where the late packet begins, relative to the last byte captured before."""
    story = Story()
    line = Line(story, 40001, (1 << 30, 1 << 30)).shake().ask(1).send(0, flags=RST)
    line.send(1, b"late", at=line.next[1] + by)
    seen = Seen(story)
    assert len(seen.flows.open) == opened
    assert (seen.quality.count("after_reset"), seen.quality.size("after_reset")) == (after, 4 * after)


@pytest.mark.parametrize(
    "by, payload, after, opened", ((0, b"x", 1, 0), (0, b"", 0, 0), (1, b"x", 0, 1), (-1, b"x", 0, 0))
)
def test_packets_sent_just_before_a_sides_own_reset_are_no_connection(by, payload, after, opened):
    story = Story()
    line = Line(story, 40001).shake().ask(1).send(1, flags=RST)
    line.send(1, payload, at=line.next[1] + by)
    seen = Seen(story)
    assert (len(seen.flows.open), seen.quality.count("after_reset")) == (opened, after)


@pytest.mark.parametrize("by, opened", ((-1, 0), (0, 0), (1, 1)))
def test_bytes_after_the_end_of_a_connection_begin_another(by, opened):
    story = Story()
    line = Line(story, 40001).shake().ask(1).close()
    line.send(0, request(2), at=line.next[0] + by)
    assert len(Seen(story).flows.open) == opened


@pytest.mark.parametrize(
    "by, closed", ((0, True), (FURTHEST - 1, True), (FURTHEST, False), (-FURTHEST + 1, True), (-FURTHEST, False))
)
def test_a_reset_ends_a_connection_if_its_number_fits(by, closed):
    story = Story()
    line = Line(story, 40001).shake().ask(1)
    line.send(1, flags=RST, at=line.next[1] + by)
    assert bool(Seen(story).ended) == closed


@pytest.mark.parametrize(
    "by, known", ((0, True), (FURTHEST - 1, True), (FURTHEST, False), (-FURTHEST + 1, True), (-FURTHEST, False))
)
def test_a_router_names_the_mtu_of_a_packet_whose_number_fits(by, known):
    story = Story()
    line = Line(story, 40001).shake().ask(1)
    story.add(reported(4, line.frame(0, b"large", at=line.next[0] + by), 1400))
    (flow,) = Seen(story).finish().ended
    assert flow.path_mtu == (1400 if known else None)


@pytest.mark.parametrize("count", (2, 3))
def test_a_limited_number_of_ended_connections_is_remembered(monkeypatch, count):
    """Late packets of a remembered connection begin no other."""
    monkeypatch.setattr(flows, "MAX_ENDED", 2)
    monkeypatch.setattr(flows, "shard_of", lambda key: 0)
    story = Story()
    lines = [Line(story, 40001 + number).shake().ask(1).close() for number in range(count)]
    seen = Seen(story, apart=True)
    assert len(seen.flows.ended) == 2
    lines[0].send(1, b"again", at=lines[0].next[1] - 5)
    seen.take()
    assert len(seen.flows.open) == count - 2
    assert len(seen.flows.forgotten) == 2 * (count - 2)


@pytest.mark.parametrize("count", (8, 9))
def test_beyond_the_limit_the_connections_silent_for_longest_are_evicted(monkeypatch, count):
    monkeypatch.setattr(flows, "MAX_FLOWS", 8)
    monkeypatch.setattr(flows, "shard_of", lambda key: 0)
    story = Story()
    lines = [Line(story, 40001 + number).shake().ask(1) for number in range(7)]
    lines[0].ask(2)
    for number in range(7, count):
        Line(story, 40001 + number).shake()
    seen = Seen(story)
    assert [flow.ends[0][1] for flow in seen.ended] == ([40002] if count == 9 else [])
    assert [flow.close for flow in seen.ended] == ["idle"] * (count - 8)
    assert not seen.flows.is_crowded


@pytest.mark.parametrize("port, kept", ((9092, True), (9093, False), (40001, True)))
def test_only_connections_of_named_ports_are_read(port, kept):
    story = Story()
    Line(story, 40001).shake().ask(1)
    seen = Seen(story, ports=(port,)).finish()
    assert seen.kinds("kafka", "other_ports") == ([1, 0] if kept else [0, 5])
    assert seen.quality.size("other_ports") == (0 if kept else len(request(1) + answer(1)))


def test_equal_times_are_accepted_and_times_that_go_back_are_counted():
    for step, back in ((0, 0), (1, 0), (-1, 2)):
        story = Story()
        line = Line(story, 40001).shake()
        for payload in (request(1), request(2)):
            story.now = story.packets[-1][0] + step
            line.send(0, payload)
        seen = Seen(story).finish()
        assert seen.kinds("clock_back", "packets") == [back, 5]


@pytest.mark.parametrize("begin_ns", (0, 10**18))
@pytest.mark.parametrize("count", (flows.FEW_PACKETS - 1, flows.FEW_PACKETS))
@pytest.mark.parametrize("apart_ns", (0, 1))
def test_many_packets_with_one_timestamp_have_no_times(begin_ns, count, apart_ns):
    story = Story(begin_ns)
    line = Line(story, 40001)
    for _ in range(count):
        line.send(0, b"x")
        story.now = begin_ns
    story.packets[-1] = (begin_ns + apart_ns, *story.packets[-1][1:])
    assert Seen(story).flows.has_times == (bool(apart_ns) or count < flows.FEW_PACKETS)

"""Packets that one capture cut and another one has whole, in one file, have all of their bytes."""

from itertools import islice
from struct import pack_into, unpack_from

import pytest

from kproxy.capture.columns.mapped import Columns
from kproxy.capture.dissection.packets import SAME_PACKET_NS
from kproxy.capture.dissection.uncut import NEAR_BYTES, uncut
from kproxy.capture.formats.records import Window
from kproxy.wire.events import ANSWERED
from tests import captures
from tests.capture import packet
from tests.capture.connections.test_flows import Seen
from tests.capture.story import BEGIN_NS, Line, Story, answer, request


def merged(path, packets):
    """A file of two interfaces: (nanoseconds, interface, bytes, length on the wire)."""
    blocks = [
        packet.enhanced(data, time_ns, name=name, original=length) for time_ns, name, data, length in sorted(packets)
    ]
    nanoseconds = packet.option(9, b"\x09")
    links = packet.interface(options=nanoseconds) + packet.interface(options=nanoseconds)
    path.write_bytes(packet.section() + links + b"".join(blocks))
    return path


@pytest.mark.parametrize("cut_at", (54, 66))  # behind TCP's header, which cuts its options, and behind them
@pytest.mark.parametrize("late_ns", (20_000, -20_000))
def test_a_cut_packet_is_read_from_its_whole_copy(tmp_path, late_ns, cut_at):
    """Of a part of a capture that is read in one piece."""
    base = packet.records(captures.capture("k41_librdkafka").read_bytes())
    packets = [(time_ns, data) for time_ns, data, _ in islice(base, 800)]
    cut = [(time_ns, 0, data[:cut_at], len(data)) for time_ns, data in packets]
    whole = [(time_ns + late_ns, 1, data, len(data)) for time_ns, data in packets]
    (tmp_path / "whole.pcap").write_bytes(packet.pcap(packets))
    expected, seen = Seen(tmp_path / "whole.pcap"), Seen(merged(tmp_path / "merged.pcapng", cut + whole))
    assert seen.requests() == expected.requests()
    assert not {"truncated", "gap", "retransmissions"} & seen.kinds().keys() - expected.kinds().keys()


def test_each_direction_may_be_whole_on_another_interface(tmp_path):
    story = Story()
    Line(story, 40001).shake().ask(*range(20)).close()
    packets = []
    for time_ns, data, length in story.packets:
        is_request = data[26:30] == packet.CLIENT[0]
        packets.append((time_ns, 0, data if is_request else data[:60], length))
        packets.append((time_ns + 20_000, 1, data[:60] if is_request else data, length))
    seen = Seen(merged(tmp_path / "merged.pcapng", packets))
    assert len(seen.exchanges) == 20
    assert "truncated" not in seen.kinds()


@pytest.mark.parametrize(
    ("whole", "apart_ns", "is_read"),
    [
        (lambda frame: frame, SAME_PACKET_NS, True),
        (lambda frame: frame, SAME_PACKET_NS + 1, False),
        (lambda frame: packet.ethernet(b"\0\5" + frame[12:], 0x8100), 1000, True),  # copied with a VLAN tag
        (lambda frame: frame[:70], 1000, True),  # cut too, but less
        (lambda frame: frame[:18] + b"\x77\x77" + frame[20:], 1000, False),  # sent again, with another identity
    ],
)
def test_only_another_copy_of_the_same_packet_replaces_a_cut_one(whole, apart_ns, is_read):
    frame = Line(Story(), 40001).frame(0, bytes(40))
    copy = whole(frame)
    cut = (BEGIN_NS, 1, 0, 60, len(frame))
    records = [cut, (BEGIN_NS + apart_ns, 1, 60, 60 + len(copy), len(frame))]
    (window,) = uncut([Window(frame[:60] + copy, 0, records)])
    assert window.records[0] == ((BEGIN_NS, *records[1][1:]) if is_read else cut)
    assert window.records[1] == records[1]


@pytest.mark.parametrize("late_ns", (20_000, -20_000))
def test_a_copy_may_be_in_another_window(late_ns):
    """The division into windows, which may overwrite each other's data, changes nothing."""
    line = Line(Story(), 40001)
    frames = [line.frame(0, bytes(40 + number)) for number in range(12)]
    whole = {frame[:60]: frame for frame in frames}
    packets = [(BEGIN_NS + number * 1000, frame[:60], len(frame)) for number, frame in enumerate(frames)]
    packets += [(time_ns + late_ns, whole[data], size) for time_ns, data, size in packets]
    alone = line.frame(1, bytes(40))[:60]  # from the first cut packet on, windows are held back
    packets = [(0, alone, 94), *sorted(packets)]
    whole[alone] = alone
    for count in range(1, len(packets) + 1):
        found = [
            (time_ns, bytes(window.data[start:end]))
            for window in uncut(overwriting(packets, count))
            for time_ns, _, start, end, _ in window.records
        ]
        assert found == [(time_ns, whole[data[:60]]) for time_ns, data, _ in packets]


def overwriting(packets, count):
    """Windows of some packets each, in one buffer."""
    buffer = bytearray(1 << 14)
    for first in range(0, len(packets), count):
        end, records = 0, []
        for time_ns, data, size in packets[first : first + count]:
            records.append((time_ns, 1, end, end + len(data), size))
            buffer[end : end + len(data)] = data
            end += len(data)
        yield Window(buffer, 0, Columns.of(Window(bytes(buffer), 0, records)), is_lasting=False)


def segments_of(data, size, step=1):
    """What a network card makes of a packet: segments of `size` bytes, with the next identities.

    step: of how many such segments the kernel then makes one (GRO), which has the identity of the first.
    """
    head, payload = data[:54], data[54:]
    identity, seq = unpack_from(">H", head, 18)[0], unpack_from(">I", head, 38)[0]
    for number, at in enumerate(range(0, max(1, len(payload)), size * step)):
        some, segment = payload[at : at + size * step], bytearray(head)
        pack_into(">HH", segment, 16, 40 + len(some), identity + number * step & 0xFFFF)
        pack_into(">I", segment, 38, seq + at & 0xFFFFFFFF)
        yield bytes(segment) + some


@pytest.mark.parametrize("isn", ((1000, 1000), (0xFFFF_F000, 0xFFFF_FF00)))
@pytest.mark.parametrize("joined", (2, 7))
def test_a_cut_packet_is_read_from_the_segment_into_which_the_receiver_joined_it(tmp_path, joined, isn):
    """The sender's end has small segments that are cut, and the receiver's has them joined and whole (GRO)."""
    story = Story()
    line = Line(story, 40001, isn=isn).shake()
    for first in (0, 100):
        line.send(0, b"".join(map(request, range(first, first + 100))))
        line.send(1, b"".join(map(answer, range(first, first + 100))))
    packets = []
    for time_ns, data, length in story.packets:
        packets += [
            (time_ns + place, 0, segment[:60], len(segment)) for place, segment in enumerate(segments_of(data, 300))
        ]
        packets += [
            (time_ns + 20_000 + place, 1, segment, len(segment))
            for place, segment in enumerate(segments_of(data, 300, joined))
        ]
        assert length == len(data)
    seen = Seen(merged(tmp_path / "merged.pcapng", packets))
    assert len([exchange for _, exchange in seen.exchanges if exchange.outcome is ANSWERED]) == 200
    assert not {"truncated", "gap"} & seen.kinds().keys()


@pytest.mark.parametrize(("lost", "count"), [(None, 200), (2, 100)])
def test_a_cut_packet_is_read_from_the_segments_that_a_network_card_made_of_it(tmp_path, lost, count):
    """The sender's end was cut, and the receiver's is whole; lost: a segment that is missing there."""
    story = Story()
    line = Line(story, 40001).shake()
    for first in (0, 100):
        line.send(0, b"".join(map(request, range(first, first + 100))))
        line.send(1, b"".join(map(answer, range(first, first + 100))))
    packets = []
    for number, (time_ns, data, length) in enumerate(story.packets):
        packets.append((time_ns, 0, data[:60], length))
        for place, segment in enumerate(segments_of(data, 1000)):
            if (number, place) != (3, lost):
                packets.append((time_ns + 20_000 + place, 1, segment, len(segment)))
    seen = Seen(merged(tmp_path / "merged.pcapng", packets))
    assert len([exchange for _, exchange in seen.exchanges if exchange.outcome is ANSWERED]) == count
    assert ("truncated" in seen.kinds()) == (lost is not None)


@pytest.mark.parametrize(("apart", "is_read"), [(NEAR_BYTES, True), (NEAR_BYTES + 1, False)])
def test_a_copy_farther_away_in_the_file_is_not_looked_for(apart, is_read):
    frame = Line(Story(), 40001).frame(0, bytes(40))
    data = frame[:60] + bytes(apart - 60) + frame
    ends = ((0, 60, len(frame)), (60, apart, apart - 60), (apart, len(data), len(frame)))
    window, *_ = uncut([Window(data, 0, [(BEGIN_NS, 1, start, end, size)]) for start, end, size in ends])
    _, _, start, end, _ = window.records[0]
    assert window.data[start:end] == (frame if is_read else frame[:60])

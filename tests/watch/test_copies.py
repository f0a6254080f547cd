"""Traffic that is captured more than once counts once."""

import numpy as np

from kproxy.capture.columns import inorder
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.connections.flow import Flow
from kproxy.capture.connections.reassembly import Budget
from kproxy.capture.dissection.packets import RAW
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import SAME_STREAM_NS, Quality
from kproxy.watch import copies
from kproxy.watch.copies import SILENT_NS, OneInterface, Twins
from tests.capture import packet

BRIDGE, MEMBER, ETH0 = 1, 2, 3


def window(packets):
    """(time_ns, interface, bytes) as a window, and the interfaces."""
    data, start, end = b"", [], []
    for _, _, each in packets:
        start.append(len(data))
        data += each
        end.append(len(data))
    head = np.zeros((len(packets), inorder.HEAD), np.uint8)
    for row, (_, _, each) in zip(head, packets, strict=True):
        row[: len(each)] = np.frombuffer(each[: inorder.HEAD], np.uint8)
    times = np.array([time_ns for time_ns, _, _ in packets], np.int64)
    columns = Columns(times, RAW, np.array(start), np.array(end), np.array(end) - np.array(start), head)
    return Window(data, 0, columns), np.array([interface for _, interface, _ in packets], np.int64)


def segment(port=40000, ipv6=False):
    if ipv6:
        return packet.ipv6(packet.tcp(b"x", source=(packet.CLIENT6[0], port), target=packet.BROKER6))
    return packet.ipv4(packet.tcp(b"x", source=(packet.CLIENT[0], port)))


def kept(one, packets):
    found, left_out = one(*window(packets))
    times = [each[0] for each in found.records]
    assert left_out == len(packets) - len(times)
    for time_ns, _, start, end, _ in found.records:
        assert found.data[start:end] in [each for time, _, each in packets if time == time_ns]
    return times


def test_a_direction_is_taken_from_the_interface_that_showed_it_first():
    for ipv6 in (False, True):
        one = OneInterface()
        a, b = segment(1, ipv6), segment(2, ipv6)
        assert kept(one, [(1, MEMBER, a), (2, BRIDGE, a), (3, BRIDGE, b), (4, MEMBER, b), (5, BRIDGE, a)]) == [1, 3]
        assert kept(one, [(6, BRIDGE, a), (7, MEMBER, a), (8, MEMBER, b), (9, BRIDGE, b)]) == [7, 9]
        assert kept(one, [(10, MEMBER, a), (11, BRIDGE, b)]) == [10, 11]


def test_a_route_that_changes_is_followed():
    one = OneInterface()
    a = segment()
    assert kept(one, [(1, MEMBER, a)]) == [1]
    assert kept(one, [(2, ETH0, a)]) == []
    assert kept(one, [(2 + SILENT_NS, ETH0, a)]) == [2 + SILENT_NS]
    assert kept(one, [(3 + SILENT_NS, MEMBER, a), (4 + SILENT_NS, ETH0, a)]) == [4 + SILENT_NS]


def test_packets_other_than_plain_segments_pass():
    one = OneInterface()
    odd = packet.ipv4(b"the end of a datagram", fragment=185)
    assert kept(one, [(1, MEMBER, odd), (2, BRIDGE, odd), (3, ETH0, odd)]) == [1, 2, 3]


def test_directions_are_bounded(monkeypatch):
    monkeypatch.setattr(copies, "MAX_DIRECTIONS", 10)
    one = OneInterface()
    for port in range(100):
        assert kept(one, [(port, MEMBER, segment(port)), (port, BRIDGE, segment(port))]) == [port]
    assert len(one._chosen) == 10


def flow(number, first_ns, client=1000, broker=2000):
    found = Flow((bytes(10) + number.to_bytes(2), number.to_bytes(2) + bytes(10)), first_ns, Budget(0), Quality())
    found.client = 0
    found.talk.halves[0].first, found.talk.halves[1].first = client, broker
    return found


def test_a_connection_under_other_addresses_is_a_copy(monkeypatch):
    twins = Twins()
    first = flow(1, 0)
    assert not twins.is_copy(first)
    assert not twins.is_copy(first)
    assert twins.is_copy(flow(2, SAME_STREAM_NS))
    assert not twins.is_copy(flow(3, 0, client=1001))
    assert not twins.is_copy(flow(4, 2 * SAME_STREAM_NS))  # much later: the numbers are the same by chance
    monkeypatch.setattr(copies, "MAX_TWINS", 3)
    for number in range(10):
        twins.is_copy(flow(5, 0, client=number))
    assert len(twins._met) <= 4

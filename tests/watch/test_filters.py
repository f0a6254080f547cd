"""The filter accepts what it should: run here as the kernel runs it, and by the kernel."""

from struct import pack, unpack

import pytest

from kproxy.watch.filters import MAX_INTERFACES, MAX_PORTS, SNAP, program
from kproxy.watch.ring import Ring
from tests.capture import packet
from tests.watch.live import why_not

IPV4, IPV6, VLAN, ARP = 0x0800, 0x86DD, 0x8100, 0x0806
HOST, OUTGOING = 0, 4
LO, ETH0, ETH1 = 1, 2, 3


def run(steps, data, protocol=IPV4, kind=HOST, interface=ETH0):
    """Run a filter program; return how many bytes of the packet it keeps (0 if it reads beyond the end)."""
    a = x = position = 0
    ancillary = {0xFFFFF000: protocol, 0xFFFFF004: kind, 0xFFFFF008: interface}
    for _ in range(1000):
        code, then, other, k = unpack("=HBBI", steps[position])
        position += 1
        try:
            if code in (0x20, 0x28, 0x30, 0x48):
                size = {0x20: 4, 0x28: 2, 0x30: 1, 0x48: 2}[code]
                at = k + (x if code == 0x48 else 0)
                a = ancillary[k] if k in ancillary else int.from_bytes(data[at : at + size])
                if k not in ancillary and at + size > len(data):
                    return 0
            elif code == 0x01:
                x = k
            elif code == 0x50:
                a = int.from_bytes(data[k + x : k + x + 1])
                if k + x >= len(data):
                    return 0
            elif code in (0x54, 0x64, 0x04, 0x0C):
                a = {0x54: a & k, 0x64: a << k, 0x04: a + k, 0x0C: a + x}[code]
            elif code == 0x07:
                x = a
            elif code == 0xB1:
                x = (data[k] & 15) * 4
            elif code == 0x05:
                position += k
            elif code in (0x15, 0x45):
                position += then if (a == k if code == 0x15 else a & k) else other
            elif code == 0x06:
                return k
            else:
                raise AssertionError(hex(code))
        except IndexError:
            return 0
    raise AssertionError("it does not end")


def to(port, source=50000):
    return packet.tcp(b"x", source=(packet.CLIENT[0], source), target=(packet.BROKER[0], port))


@pytest.mark.parametrize("count", [1, 2, MAX_PORTS])
def test_ports(count):
    ports = range(9092, 9092 + count)
    steps = program(ports)
    for port in ports:
        assert run(steps, packet.ipv4(to(port))) == SNAP
        assert run(steps, packet.ipv4(to(50000, port))) == SNAP
        assert run(steps, packet.ipv4(to(port), options=bytes(8))) == SNAP
        assert run(steps, packet.ipv6(to(port)), IPV6) == SNAP
        assert run(steps, packet.ipv6(to(50000, port)), IPV6) == SNAP
    for port in (9091, 9092 + count, 1):
        assert run(steps, packet.ipv4(to(port))) == 0
        assert run(steps, packet.ipv6(to(port)), IPV6) == 0
    assert run(steps, packet.ipv4(packet.udp(9092, b"x"), protocol=17)) == 0
    assert run(steps, packet.ipv6(packet.udp(9092, b"x"), protocol=17), IPV6) == 0
    assert run(steps, bytes(28), ARP) == 0
    assert run(steps, packet.ipv4(to(9092))[:19]) == 0


def test_packets_that_the_kernel_cannot_decide_are_accepted():
    steps = program([9092])
    assert run(steps, packet.ipv4(b"the end of a datagram", fragment=185)) == SNAP
    assert run(steps, packet.ipv4(to(9092), fragment=0x2000)) == SNAP  # the first one has the ports
    assert run(steps, packet.ipv4(to(80), fragment=0x2000)) == 0
    for extension in (0, 43, 44, 51, 60):
        assert run(steps, packet.ipv6(bytes(8) + to(80), protocol=extension), IPV6) == SNAP
    for tag in (VLAN, 0x88A8):
        assert run(steps, pack(">HH", 7, IPV4) + packet.ipv4(to(80)), tag) == SNAP


@pytest.mark.parametrize("ports", [(), range(1, MAX_PORTS + 2)], ids=["none", "too many"])
def test_any_port(ports):
    steps = program(ports)
    assert run(steps, packet.ipv4(to(31337))) == SNAP
    assert run(steps, packet.ipv6(to(31337)), IPV6) == SNAP
    assert run(steps, packet.ipv4(packet.udp(9092, b"x"), protocol=17)) == 0


@pytest.mark.parametrize("count", [0, 1, MAX_PORTS])
def test_icmp_that_quotes_a_packet_of_these_ports(count):
    steps = program(range(9092, 9092 + count))
    quoted = packet.ipv4(to(9092)), packet.ipv4(to(50000, 9092), options=bytes(12)), packet.ipv4(to(80))
    for code in (0, 1, 3, 4, 13):
        taken = []
        for begin in quoted:
            message = packet.icmp(3, code, 1400, begin[:-13])  # 8 bytes behind the IP header, as RFC 792 asks for
            kept = {run(steps, packet.ipv4(message, protocol=1, options=options)) for options in (b"", bytes(8))}
            taken += kept
        assert taken == [SNAP, SNAP, 0 if count else SNAP]
    for kind in (1, 2):
        for port, kept in ((9092, SNAP), (80, 0 if count else SNAP)):
            message = packet.icmp(kind, 0, 1280, packet.ipv6(to(port)))
            assert run(steps, packet.ipv6(message, protocol=58), IPV6) == kept
    udp = packet.udp(9092, bytes(8))
    for others in (
        packet.icmp(8, 0, 1, packet.ipv4(to(9092))),  # an echo request
        packet.icmp(3, 3, 0, packet.ipv4(udp, protocol=17)),
        packet.icmp(3, 3, 0, packet.ipv4(to(9092))[:9]),
        packet.icmp(3, 3, 0, b""),
    ):
        assert run(steps, packet.ipv4(others, protocol=1)) == 0
    for kind, begin in ((128, packet.ipv6(to(9092))), (3, packet.ipv6(to(9092))), (1, packet.ipv6(udp, protocol=17))):
        assert run(steps, packet.ipv6(packet.icmp(kind, 0, 0, begin), protocol=58), IPV6) == 0


def test_interfaces_and_loopback():
    data = packet.ipv4(to(9092))
    steps = program([9092], [ETH0, LO], [LO])
    assert run(steps, data, interface=ETH0) == run(steps, data, interface=ETH0, kind=OUTGOING) == SNAP
    assert run(steps, data, interface=ETH1) == 0
    assert run(steps, data, interface=LO) == SNAP
    assert run(steps, data, interface=LO, kind=OUTGOING) == 0
    every = program([9092], range(100), range(1, 3))
    assert run(every, data, interface=4000) == SNAP  # more than fit: all are taken


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("ports", [0, 1, MAX_PORTS])
@pytest.mark.parametrize("interfaces", [0, 1, MAX_INTERFACES])
def test_the_kernel_accepts_it(ports, interfaces):
    ring = Ring(program(range(1, ports + 1), range(1, interfaces + 1), range(interfaces)), 2)
    ring.attach(program([9092]))
    ring.close()
    assert ring.fileno() == -1

"""Finding TCP in a packet: every layer that can lie around it, and nothing read past the packet's end."""

import random
import tracemalloc
from struct import pack

import pytest

from kproxy.capture import packets
from kproxy.capture.quality import Quality
from tests import captures
from tests.capture import packet
from tests.capture.packet import ethernet, ipv4, ipv6, tcp, udp

PAYLOAD = b"the payload of the segment"
SEGMENT = tcp(PAYLOAD, seq=11, ack=22)
KEY = packet.CLIENT[0] + packet.BROKER[0] + pack(">HH", 40000, 9092)
KEY6 = packet.CLIENT6[0] + packet.BROKER6[0] + pack(">HH", 40000, 9092)

V4, V6, DOT1Q, QINQ, BRIDGED = 0x0800, 0x86DD, 0x8100, 0x88A8, 0x6558
extension = bytes((6, 1)) + bytes(14)  # next header TCP, 16 bytes


def tag(kind, payload, number=100):
    return pack(">HH", number, kind) + payload


def vxlan(frame):
    return udp(4789, b"\x08" + bytes(7) + frame)


def geneve(kind, payload, options=b""):
    return udp(6081, pack(">BBHI", len(options) // 4, 0, kind, 0) + options + payload)


LAYERS = {
    "ethernet": (1, ethernet(ipv4(SEGMENT)), KEY),
    "padded ethernet": (1, ethernet(ipv4(SEGMENT)) + bytes(18), KEY),
    "tcp options": (1, ethernet(ipv4(tcp(PAYLOAD, seq=11, ack=22, options=bytes(12)))), KEY),
    "ip options": (1, ethernet(ipv4(SEGMENT, options=bytes(8))), KEY),
    "no length (offload)": (1, ethernet(ipv4(SEGMENT, total=0)), KEY),
    "vlan": (1, ethernet(tag(V4, ipv4(SEGMENT)), DOT1Q), KEY),
    "qinq": (1, ethernet(tag(DOT1Q, tag(V6, ipv6(SEGMENT))), QINQ), KEY6),
    "sll": (113, bytes(14) + pack(">H", V4) + ipv4(SEGMENT), KEY),
    "sll2": (276, pack(">H", V6) + bytes(18) + ipv6(SEGMENT), KEY6),
    "null, little endian": (0, b"\2\0\0\0" + ipv4(SEGMENT), KEY),
    "null, big endian": (0, b"\0\0\0\x1e" + ipv6(SEGMENT), KEY6),
    "loop": (108, b"\0\0\0\2" + ipv4(SEGMENT), KEY),
    "raw 4": (101, ipv4(SEGMENT), KEY),
    "raw 6": (101, ipv6(SEGMENT), KEY6),
    "ipv6": (1, ethernet(ipv6(SEGMENT), V6), KEY6),
    "ipv6 without length (offload)": (1, ethernet(ipv6(SEGMENT, length=0), V6), KEY6),
    "ipv6 hop by hop": (1, ethernet(ipv6(extension + SEGMENT, protocol=0), V6), KEY6),
    "ipv6 destination, routing": (
        1,
        ethernet(ipv6(bytes((43, 0)) + bytes(6) + extension + SEGMENT, protocol=60), V6),
        KEY6,
    ),
    "ipv6 authentication": (1, ethernet(ipv6(bytes((6, 4)) + bytes(22) + SEGMENT, protocol=51), V6), KEY6),
    "ipv6 atomic fragment": (1, ethernet(ipv6(bytes((6,)) + bytes(7) + SEGMENT, protocol=44), V6), KEY6),
    "vxlan": (1, ethernet(ipv4(vxlan(ethernet(ipv4(SEGMENT))), protocol=17)), KEY),
    "vxlan over ipv6, tagged inside": (
        1,
        ethernet(ipv6(vxlan(ethernet(tag(V4, ipv4(SEGMENT)), DOT1Q)), protocol=17), V6),
        KEY,
    ),
    "geneve with options": (
        1,
        ethernet(ipv4(geneve(BRIDGED, ethernet(ipv6(SEGMENT), V6), bytes(12)), protocol=17)),
        KEY6,
    ),
    "gre": (1, ethernet(ipv4(pack(">HH", 0, V4) + ipv4(SEGMENT), protocol=47)), KEY),
    "gre with key, sequence, checksum": (
        1,
        ethernet(ipv4(pack(">HH", 0xB000, BRIDGED) + bytes(12) + ethernet(ipv4(SEGMENT)), protocol=47)),
        KEY,
    ),
    "ip in ip": (1, ethernet(ipv4(ipv4(SEGMENT), protocol=4)), KEY),
    "6in4": (1, ethernet(ipv4(ipv6(SEGMENT), protocol=41)), KEY6),
}


def dissect(link, data, dissector=None):
    """The segment of a packet that stands between other bytes, as in a window."""
    quality = Quality()
    around = b"\x45" * 64
    dissector = dissector or packets.Dissector(quality)
    return dissector.segment(link, around + data + around, 64, 64 + len(data), 5), quality


@pytest.mark.parametrize("name", LAYERS)
def test_the_segment_is_found_under_every_layer(name):
    link, data, key = LAYERS[name]
    segment, quality = dissect(link, data)
    held, found, seq, ack, flags, window, start, end, length = segment
    assert (found, seq, ack, flags & 0x1FF, window) == (key, 11, 22, packets.ACK, 500)
    assert held[start:end] == PAYLOAD
    assert length == len(PAYLOAD)
    assert not list(quality)


@pytest.mark.parametrize("name", [name for name in LAYERS if "offload" not in name and name != "padded ethernet"])
def test_what_the_snap_length_cut_is_missed_and_not_read_from_the_next_record(name):
    link, data, key = LAYERS[name]
    for size in range(len(data)):
        segment, quality = dissect(link, data[:size])
        if segment is None:
            assert [row.kind for row in quality] in (["malformed"], ["truncated"], ["not_tcp"], ["unknown_link"])
        else:
            held, found, _, _, _, _, start, end, length = segment
            assert found == key
            assert held[start:end] == PAYLOAD[: end - start]
            assert length == len(PAYLOAD) > end - start


def fragments(data, sizes, build):
    offset = 0
    for size in sizes:
        part, data = data[:size], data[size:]
        yield build(part, offset, bool(data))
        offset += size


def four(part, offset, more):
    return ethernet(ipv4(part, fragment=offset // 8 | (0x2000 if more else 0)))


def six(part, offset, more):
    return ethernet(ipv6(pack(">BBHI", 6, 0, offset | more, 77) + part, protocol=44), V6)


@pytest.mark.parametrize(("build", "key"), ((four, KEY), (six, KEY6)))
def test_fragments_are_put_together_in_any_order(build, key):
    dice = random.Random(1)
    for _ in range(20):
        parts = list(fragments(SEGMENT, (16, 8, 16, 999), build))
        dice.shuffle(parts)
        dissector = packets.Dissector(Quality())
        found = [dissect(1, part, dissector)[0] for part in [*parts[:2], *parts]]  # the first two twice
        segment = next(segment for segment in found if segment is not None)
        assert segment[1] == key
        assert segment[0][segment[6] : segment[7]] == PAYLOAD


@pytest.mark.parametrize("apart_ns, found", ((29_000_000_000, 1), (31_000_000_000, 0), (-31_000_000_000, 0)))
def test_fragments_of_another_time_are_of_another_datagram(apart_ns, found):
    """The identity of a datagram has 16 bits, and what was lost leaves its other fragments behind."""
    first, second = fragments(SEGMENT, (16, 999), four)
    quality = Quality()
    dissector = packets.Dissector(quality)
    now_ns = 100_000_000_000
    assert dissector.segment(1, first, 0, len(first), now_ns) is None
    segment = dissector.segment(1, second, 0, len(second), now_ns + apart_ns)
    assert (segment is not None, quality.count("fragments")) == (bool(found), 1 - found)


def test_fragments_that_overlap_hold_no_more_than_a_datagram_can_have():
    dissector = packets.Dissector(Quality())
    tracemalloc.start()
    try:
        for number in range(3000):
            part = ethernet(ipv4(bytes(32_000), fragment=0x2000 | number))
            assert dissector.segment(1, part, 0, len(part), 0) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    beyond = ethernet(ipv4(bytes(600), fragment=0x1FFF))
    quality = Quality()
    packets.Dissector(quality).segment(1, beyond, 0, len(beyond), 0)
    assert quality.count("malformed") == 1


def test_fragments_that_never_become_whole_are_counted_and_bounded():
    quality = Quality()
    dissector = packets.Dissector(quality)
    for number in range(1000):
        part = ethernet(ipv4(bytes(64), fragment=0x2000, identity=number))
        assert dissector.segment(1, part, 0, len(part), number) is None
    assert quality.count("fragments") == 1000 - 256
    dissector.finish()
    assert (quality.count("fragments"), quality.size("fragments")) == (1000, 64000)


@pytest.mark.parametrize(
    ("link", "data", "kind"),
    [
        (1, ethernet(bytes(46), 0x0806), "not_tcp"),
        (1, ethernet(ipv4(udp(53, bytes(40)), protocol=17)), "not_tcp"),
        (1, ethernet(ipv4(bytes(60), protocol=1)), "not_tcp"),
        (1, ethernet(b"\x65" + ipv4(SEGMENT)[1:]), "malformed"),
        (1, ethernet(ipv4(SEGMENT[:12] + b"\x20" + SEGMENT[13:])), "malformed"),  # a TCP header of 8 bytes
        (1, ethernet(ipv4(SEGMENT[:12] + b"\xf0" + SEGMENT[13:30])), "malformed"),  # longer than the packet
        (147, bytes(80), "unknown_link"),
        (1, ethernet(tag(DOT1Q, b"\0\1\x81\0" * 20), DOT1Q), "malformed"),  # nothing but tags
    ],
)
def test_what_holds_no_segment_is_counted_by_kind(link, data, kind):
    segment, quality = dissect(link, data)
    assert segment is None
    assert [(row.kind, row.bytes) for row in quality] == [(kind, len(data))]


def test_no_bytes_whatever_break_it():
    dice = random.Random(2)
    shapes = [(link, data) for link, data, _ in LAYERS.values()]
    for _ in range(20_000):
        link, data = dice.choice(shapes)
        data = bytearray(data)
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        segment, _ = dissect(link, bytes(data[: dice.randrange(1, len(data) + 1)]))
        if segment is not None:
            held, key, _, _, _, _, start, end, length = segment
            assert len(key) in (12, 36)
            assert 0 <= start <= end <= len(held)
            assert end - start <= length


def test_payload_bytes_of_a_fragmented_capture_equal_those_of_its_base():
    def payloads(name):
        from kproxy.capture.captures import Capture

        quality = Quality()
        dissector = packets.Dissector(quality)
        found = []
        for window in Capture([captures.capture(name)], quality).windows():
            for time_ns, link, start, end, _ in window.records:
                segment = dissector.segment(link, window.data, start, end, time_ns)
                if segment is not None:
                    found.append((segment[1], segment[2], segment[0][segment[6] : segment[7]]))
        return found

    base = payloads("k41_BASE")
    for name in ("k41_ipfrag", "k41_vlan", "k41_rawip", "k41_mixedlinks", "k41_realSLL2"):
        assert payloads(name) == base


def test_a_link_layer_other_than_ethernet_never_takes_the_common_path():
    """Its bytes may look like Ethernet and IPv4 at the places that are looked at first."""
    whole = packet.ethernet(packet.ipv4(packet.tcp(b"data")))
    quality = Quality()
    dissector = packets.Dissector(quality)
    assert dissector.segment(packets.ETHERNET, whole, 0, len(whole), 0) is not None
    assert dissector.segment(999, whole, 0, len(whole), 0) is None
    assert quality.count("unknown_link") == 1


@pytest.mark.parametrize("tagged", (False, True))
def test_a_tcp_header_has_five_words_at_least(tagged):
    for words, is_one in ((4, False), (5, True), (6, True)):
        segment = bytearray(packet.tcp(bytes(8)))
        segment[12] = words << 4
        ip = packet.ipv4(bytes(segment))
        data = packet.ethernet(b"\0\7\x08\0" + ip, 0x8100) if tagged else packet.ethernet(ip)
        found = packets.Dissector(Quality()).segment(packets.ETHERNET, data, 0, len(data), 0)
        assert (found is not None) is is_one
        assert found is None or found[8] == 28 - 4 * words


def test_a_fragment_cut_by_the_snap_length_is_counted_as_truncated():
    quality = Quality()
    data = packet.ethernet(packet.ipv4(packet.tcp(bytes(400)), fragment=0x2000))
    assert packets.Dissector(quality).segment(packets.ETHERNET, data[:100], 0, 100, 0) is None
    assert quality.count("truncated") == 1

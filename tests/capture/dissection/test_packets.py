"""TCP is found in a packet under every layer that may enclose it, and nothing is read past the packet's end."""

import ipaddress
import random
import re
import subprocess
import tracemalloc
from pathlib import Path
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture.dissection import packets
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


def gtp(datagram, more=b"", flags=0):
    return udp(2152, pack(">BBHI", 0x30 | flags, 255, len(more) + len(datagram), 9) + more + datagram)


def vxlan(frame, port=4789):
    return udp(port, b"\x08" + bytes(7) + frame)


def geneve(kind, payload, options=b"", port=6081):
    return udp(port, pack(">BBHI", len(options) // 4, 0, kind, 0) + options + payload)


MACS = bytes.fromhex("001b21000001001b21000002")


def mpls(payload, *labels):
    return b"".join(pack(">I", label << 12 | (label == labels[-1]) << 8 | 64) for label in labels) + payload


def ppp(payload, protocol=0x21):
    return b"\xff\3" + pack(">H", protocol) + payload


def pppoe(payload, protocol=0x21):
    return pack(">BBHHH", 0x11, 0, 1, 2 + len(payload), protocol) + payload


def nsh(payload, following, words=6):
    return pack(">HBBI", words, 1 if words == 6 else 2, following, 0x2A00) + bytes(words * 4 - 8) + payload


def gre(kind, payload, bits=0):
    return ipv4(pack(">HH", bits, kind) + payload, protocol=47)


def erspan_3(payload, platform=b"", is_ip=False):
    return bytes((0x20, 1)) + bytes(8) + bytes((is_ip << 3, len(platform) and 1)) + platform + payload


def isl(frame):
    """Cisco's ISL: https://wiki.wireshark.org/ISL; the check sequences of both frames follow."""
    head = bytes.fromhex("01000c000000 00000c112233") + pack(">H", len(frame) + 20)
    return head + bytes.fromhex("aaaa03 00000c 0065 0000 0000") + frame + bytes(8)


NFLOG_FIELDS = (1, pack(">HBx", 0x0800, 3)), (10, b"kafka\0")


def nflog(payload, order="<", family=2, before=NFLOG_FIELDS):
    fields = (*before, (9, payload))
    return bytes((family, 0, 0, 0)) + b"".join(
        pack(order + "HH", 4 + len(value), kind) + value + bytes(-len(value) % 4 * (kind != 9))
        for kind, value in fields
    )


def pktap(link, payload):
    return pack("<III", 108, 1, link) + bytes(96) + payload


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
    "authentication": (1, ethernet(ipv4(bytes((6, 4)) + bytes(22) + SEGMENT, protocol=51)), KEY),
    "authentication of ip in ip": (1, ethernet(ipv4(bytes((4, 4)) + bytes(22) + ipv4(SEGMENT), protocol=51)), KEY),
    "etherip": (1, ethernet(ipv4(b"\x30\0" + ethernet(tag(V6, ipv6(SEGMENT)), DOT1Q), protocol=97)), KEY6),
    "ip in ip": (1, ethernet(ipv4(ipv4(SEGMENT), protocol=4)), KEY),
    "6in4": (1, ethernet(ipv4(ipv6(SEGMENT), protocol=41)), KEY6),
    "erspan 1": (1, ethernet(gre(0x88BE, ethernet(ipv4(SEGMENT)))), KEY),
    "erspan 2": (1, ethernet(gre(0x88BE, bytes(4) + b"\x10\1" + bytes(6) + ethernet(ipv4(SEGMENT)), 0x1000)), KEY),
    "erspan 3": (1, ethernet(gre(0x22EB, bytes(4) + erspan_3(ethernet(ipv6(SEGMENT), V6)), 0x1000)), KEY6),
    "erspan 3, platform": (
        1,
        ethernet(gre(0x22EB, bytes(4) + erspan_3(ethernet(ipv4(SEGMENT)), bytes(8)), 0x1000)),
        KEY,
    ),
    "isl": (1, isl(ethernet(tag(V4, ipv4(SEGMENT)), DOT1Q)), KEY),
    "gre over udp": (1, ethernet(ipv4(udp(4754, gre(V4, ipv4(SEGMENT))[20:]), protocol=17)), KEY),
    "pptp": (1, ethernet(gre(0x880B, bytes(12) + ppp(ipv4(SEGMENT)), 0x3081)), KEY),
    "mpls": (1, ethernet(mpls(ipv4(SEGMENT), 16, 17, 18), 0x8847), KEY),
    "mpls over vlan, ipv6": (1, ethernet(tag(0x8848, mpls(ipv6(SEGMENT), 99)), DOT1Q), KEY6),
    "mpls pseudowire": (1, ethernet(mpls(bytes(4) + MACS + ethernet(ipv4(SEGMENT))[12:], 99), 0x8847), KEY),
    "mpls pseudowire without control word": (1, ethernet(mpls(MACS + ethernet(ipv4(SEGMENT))[12:], 99), 0x8847), KEY),
    "mpls over gre": (1, ethernet(gre(0x8847, mpls(ipv4(SEGMENT), 99))), KEY),
    "mpls over udp": (1, ethernet(ipv4(udp(6635, mpls(ipv4(SEGMENT), 99)), protocol=17)), KEY),
    "mpls over ip": (1, ethernet(ipv4(mpls(ipv4(SEGMENT), 99), protocol=137)), KEY),
    "pppoe": (1, ethernet(pppoe(ipv4(SEGMENT)), 0x8864), KEY),
    "pppoe, ipv6": (1, ethernet(pppoe(ipv6(SEGMENT), 0x57), 0x8864), KEY6),
    "nsh": (1, ethernet(nsh(ipv4(SEGMENT), 1), 0x894F), KEY),
    "nsh over vxlan-gpe": (
        1,
        ethernet(ipv4(udp(4790, b"\x0c\0\0\4" + bytes(4) + nsh(ethernet(ipv6(SEGMENT), V6), 3, 2)), protocol=17)),
        KEY6,
    ),
    "gtp-u": (1, ethernet(ipv4(gtp(ipv4(SEGMENT)), protocol=17)), KEY),
    "gtp-u with a sequence number": (1, ethernet(ipv4(gtp(ipv6(SEGMENT), b"\0\1\0\0", 2), protocol=17)), KEY6),
    "gtp-u with a container of 5G": (1, ethernet(ipv4(gtp(ipv4(SEGMENT), b"\0\0\0\x85\1\0\1\0", 4), protocol=17)), KEY),
    "snap": (1, ethernet(b"\xaa\xaa\3\0\0\0\x08\0" + ipv4(SEGMENT), 8 + len(ipv4(SEGMENT))), KEY),
    "vxlan on another port": (1, ethernet(ipv4(vxlan(ethernet(ipv4(SEGMENT)), 48000), protocol=17)), KEY),
    "geneve on another port": (1, ethernet(ipv4(geneve(V6, ipv6(SEGMENT), bytes(8), 48000), protocol=17)), KEY6),
    "ppp": (9, ppp(ipv4(SEGMENT)), KEY),
    "ppp, compressed": (9, b"\x57" + ipv6(SEGMENT), KEY6),
    "ppp in hdlc framing": (50, ppp(ipv6(SEGMENT), 0x57), KEY6),
    "ppp with direction": (204, b"\1" + ppp(ipv4(SEGMENT)), KEY),
    "pppoe as link": (51, pppoe(ipv4(SEGMENT)), KEY),
    "cisco hdlc": (104, b"\x0f\0\x08\0" + ipv4(SEGMENT), KEY),
    "cisco hdlc as ppp": (50, b"\x0f\0\x86\xdd" + ipv6(SEGMENT), KEY6),
    "nflog": (239, nflog(ipv4(SEGMENT)), KEY),
    "nflog, big endian": (239, nflog(ipv4(SEGMENT), ">"), KEY),
    "nflog, the packet alone": (239, nflog(ipv4(SEGMENT), before=()), KEY),
    "pktap": (258, pktap(1, ethernet(ipv4(SEGMENT))), KEY),
    "pktap, raw": (258, pktap(12, ipv6(SEGMENT)), KEY6),
    "pktap, old number": (149, pktap(1, ethernet(ipv4(SEGMENT))), KEY),
    "raw, number of FreeBSD": (12, ipv4(SEGMENT), KEY),
    "raw, number of OpenBSD": (14, ipv6(SEGMENT), KEY6),
    "raw, ipv4 alone": (228, ipv4(SEGMENT), KEY),
    "raw, ipv6 alone": (229, ipv6(SEGMENT), KEY6),
    "null, ipv6 of NetBSD": (0, b"\x18\0\0\0" + ipv6(SEGMENT), KEY6),
    "null, ipv6 of FreeBSD": (0, b"\0\0\0\x1c" + ipv6(SEGMENT), KEY6),
    "nflog, ipv6": (239, nflog(ipv6(SEGMENT), family=10), KEY6),
    "cisco hdlc, broadcast": (50, b"\x8f\0\x08\0" + ipv4(SEGMENT), KEY),
    "ppp, mpls": (9, ppp(mpls(ipv4(SEGMENT), 99), 0x281), KEY),
    "ppp, mpls multicast": (9, ppp(mpls(ipv6(SEGMENT), 99), 0x283), KEY6),
    "qinq before the standard": (1, ethernet(tag(V4, ipv4(SEGMENT)), 0x9100), KEY),
    "mpls, ethernet with a tag": (
        1,
        ethernet(mpls(MACS + ethernet(tag(V4, ipv4(SEGMENT)), DOT1Q)[12:], 99), 0x8847),
        KEY,
    ),
    "nsh, ipv6": (1, ethernet(nsh(ipv6(SEGMENT), 2), 0x894F), KEY6),
    "nsh in nsh, mpls": (1, ethernet(nsh(nsh(mpls(ipv4(SEGMENT), 99), 5), 4), 0x894F), KEY),
    "vxlan, port of Linux": (1, ethernet(ipv4(vxlan(ethernet(ipv4(SEGMENT)), 8472), protocol=17)), KEY),
    "vxlan-gpe, ethernet": (1, ethernet(ipv4(vxlan(ethernet(ipv4(SEGMENT)), 4790), protocol=17)), KEY),
    "gtp-u with an N-PDU number": (1, ethernet(ipv4(gtp(ipv4(SEGMENT), b"\0\0\1\0", 1), protocol=17)), KEY),
    "erspan 3, ip alone": (1, ethernet(gre(0x22EB, bytes(4) + erspan_3(ipv4(SEGMENT), is_ip=True), 0x1000)), KEY),
    "erspan 3, ipv6 alone": (1, ethernet(gre(0x22EB, bytes(4) + erspan_3(ipv6(SEGMENT), is_ip=True), 0x1000)), KEY6),
    "qinq, another number before the standard": (1, ethernet(tag(V4, ipv4(SEGMENT)), 0x9200), KEY),
    "security group of cisco": (1, ethernet(b"\1\1\0\1\0\5" + pack(">H", V4) + ipv4(SEGMENT), 0x8909), KEY),
    "vn-tag": (1, ethernet(pack(">IH", 0x10002, V6) + ipv6(SEGMENT), 0x8926), KEY6),
    "e-tag": (1, ethernet(pack(">HIH", 0x1000, 0x10000, V4) + ipv4(SEGMENT), 0x893F), KEY),
    "r-tag": (1, ethernet(pack(">IH", 1, V4) + ipv4(SEGMENT), 0xF1C1), KEY),
    "provider backbone": (1, ethernet(pack(">I", 0x1234) + ethernet(tag(V4, ipv4(SEGMENT)), DOT1Q), 0x88E7), KEY),
    "hsr": (1, ethernet(pack(">HHH", 0x40, 1, V4) + ipv4(SEGMENT), 0x892F), KEY),
    "qinq in sll2": (276, pack(">H", QINQ) + bytes(18) + tag(DOT1Q, tag(V4, ipv4(SEGMENT))), KEY),
    "vlan in vlan in sll": (113, bytes(14) + pack(">H", DOT1Q) + tag(DOT1Q, tag(V6, ipv6(SEGMENT))), KEY6),
    "ipv6 with four extension headers": (
        1,
        ethernet(
            ipv6(
                bytes((60, 0, 1, 4, 0, 0, 0, 0, 43, 0, 1, 4, 0, 0, 0, 0, 44, *bytes(7), 6, *bytes(7))) + SEGMENT,
                protocol=0,
            ),
            V6,
        ),
        KEY6,
    ),
    "segment routing of ipv6": (
        1,
        ethernet(ipv6(bytes((6, 2, 4, 0, 0, 0, 0, 0)) + packet.BROKER6[0] + SEGMENT, protocol=43), V6),
        KEY6,
    ),
    "4in6": (1, ethernet(ipv6(ipv4(SEGMENT), protocol=4), V6), KEY),
    "lisp": (1, ethernet(ipv4(udp(4341, b"\xc0" + bytes(7) + ipv6(SEGMENT)), protocol=17)), KEY6),
    "teredo": (1, ethernet(ipv4(udp(3544, ipv6(SEGMENT)), protocol=17)), KEY6),
    "ip over udp": (1, ethernet(ipv4(udp(5555, ipv4(SEGMENT)), protocol=17)), KEY),
    "gue": (1, ethernet(ipv4(udp(6080, b"\1\4\0\0" + bytes(4) + ipv4(SEGMENT)), protocol=17)), KEY),
    "gue without a header": (1, ethernet(ipv4(udp(6080, ipv4(SEGMENT)), protocol=17)), KEY),
    "tzsp": (1, ethernet(ipv4(udp(37008, b"\1\0\0\1\0\x0a\1\7\1" + ethernet(ipv4(SEGMENT))), protocol=17)), KEY),
    "mirror of hp": (
        1,
        ethernet(ipv4(udp(7932, bytes(12) + ethernet(tag(V6, ipv6(SEGMENT)), DOT1Q)), protocol=17)),
        KEY6,
    ),
    "ip over infiniband": (242, bytes(40) + pack(">HH", V6, 0) + ipv6(SEGMENT), KEY6),
    "fabricpath": (1, ethernet(pack(">H", 1 << 6 | 32) + MACS + ethernet(ipv4(SEGMENT))[12:], 0x8903), KEY),
    "trill": (1, ethernet(pack(">HHH", 32, 1, 2) + MACS + ethernet(ipv4(SEGMENT))[12:], 0x22F3), KEY),
    "trill with options": (
        1,
        ethernet(pack(">HHH", 1 << 6 | 32, 1, 2) + bytes(4) + MACS + ethernet(ipv6(SEGMENT), V6)[12:], 0x22F3),
        KEY6,
    ),
    "batman-adv": (1, ethernet(b"\x40\x0f\x32\1" + MACS[:6] + MACS + ethernet(ipv4(SEGMENT))[12:], 0x4305), KEY),
    "batman-adv with four addresses": (
        1,
        ethernet(b"\x42\x0f\x32\1" + MACS[:6] + MACS[6:] + b"\1\0" + MACS + ethernet(ipv4(SEGMENT))[12:], 0x4305),
        KEY,
    ),
    "ipv6 mobility": (1, ethernet(ipv6(extension + SEGMENT, protocol=135), V6), KEY6),
}
# Link types that are not read: https://www.tcpdump.org/linktypes.html
WLAN = (105, 119, 127, 163, 192)
SWITCH_TAGS = (281, 282, 284, 285)
ENDED = {"padded ethernet", "isl"}  # bytes of the link layer follow the segment
# Layers that tshark reads only with an option, or not at all.
DECODE_AS = {
    "vxlan on another port": "udp.port==48000,vxlan",
    "geneve on another port": "udp.port==48000,geneve",
    "vxlan, port of Linux": "udp.port==8472,vxlan",
    "mirror of hp": "udp.port==7932,hp_erm",
}
NOT_BY_TSHARK = {
    "fabricpath",  # all but the last four bytes, which it takes for a frame check sequence
    "ipv6 without length (offload)",
    "qinq, another number before the standard",
    "ip over udp",
    "gue",
    "gue without a header",
    "ipv6 mobility",
    "nflog, big endian",
    "vxlan-gpe, ethernet",
    "erspan 3, ip alone",
    "erspan 3, ipv6 alone",
}


def test_tshark_finds_the_same_segments(tmp_path):
    """One capture with an interface for each kind of packet; tshark reads it again for each of its options."""
    path = tmp_path / "all.pcapng"
    links = b"".join(packet.interface(link) for link, _, _ in LAYERS.values())
    blocks = (packet.enhanced(data, number, name=number) for number, (_, data, _) in enumerate(LAYERS.values()))
    path.write_bytes(packet.section() + links + b"".join(blocks))
    command = ["tshark", "-n", "-r", str(path), "-o", "tcp.relative_sequence_numbers:FALSE", "-T", "fields"]
    command += ["-E", "separator=,", "-E", "occurrence=l"]
    for field in ("tcp.srcport", "tcp.dstport", "tcp.seq_raw", "tcp.ack_raw", "tcp.len"):
        command += ["-e", field]
    found = {}
    for option in (None, *DECODE_AS.values()):
        asked = [*command, *(("-d", option) if option else ())]
        lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
        read = dict(zip(LAYERS, lines, strict=True))
        found |= {name: read[name] for name in LAYERS if DECODE_AS.get(name) == option}
    same = {name for name, line in found.items() if line == f"40000,9092,11,22,{len(PAYLOAD)}"}
    assert LAYERS.keys() - same == NOT_BY_TSHARK


def dissect(link, data, dissector=None):
    """The segment of a packet that is surrounded by other bytes, as in a window."""
    quality = Quality()
    around = b"\x45" * 64
    dissector = dissector or packets.Dissector(quality)
    return dissector.segment(link, around + data + around, 64, 64 + len(data), 5), quality


def test_a_jumbogram_has_its_length_in_an_option():
    """RFC 2675: the length of the IP header is 0."""
    segment = packet.tcp(bytes(70_000), source=packet.CLIENT6, target=packet.BROKER6)
    options = bytes((6, 0, 0xC2, 4)) + pack(">I", 8 + len(segment))
    found, quality = dissect(1, ethernet(ipv6(options + segment, protocol=0, length=0), V6))
    assert found[8] == 70_000 and not list(quality)


@pytest.mark.parametrize("name", LAYERS)
def test_the_segment_is_found_under_every_layer(name):
    link, data, key = LAYERS[name]
    segment, quality = dissect(link, data)
    held, found, seq, ack, flags, window, start, end, length = segment
    assert (found, seq, ack, flags & 0x1FF, window) == (key, 11, 22, packets.ACK, 500)
    assert held[start:end] == PAYLOAD
    assert length == len(PAYLOAD)
    assert not list(quality)


@pytest.mark.parametrize("name", [name for name in LAYERS if "offload" not in name and name not in ENDED])
def test_truncated_bytes_are_not_read_from_the_next_record(name):
    link, data, key = LAYERS[name]
    for size in range(len(data)):
        segment, quality = dissect(link, data[:size])
        if segment is None:
            assert [row.kind for row in quality] in (
                ["malformed"],
                ["truncated"],
                ["not_tcp"],
                ["unread"],
                ["unknown_link"],
            )
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
    return numbered(7, part, offset, more)


def numbered(identity, part, offset, more):
    return ethernet(ipv4(part, fragment=offset // 8 | (0x2000 if more else 0), identity=identity))


def six(part, offset, more):
    return ethernet(ipv6(pack(">BBHI", 6, 0, offset | more, 77) + part, protocol=44), V6)


def test_extension_headers_of_ipv6_may_be_in_the_fragments():
    """Those behind the fragment header belong to the datagram: RFC 8200, 4.5."""
    dissector = packets.Dissector(Quality())
    whole = bytes((6, 1)) + bytes(14) + SEGMENT
    for offset, part, more in ((0, whole[:24], 1), (24, whole[24:], 0)):
        fragment = pack(">BBHI", 60, 0, offset | more, 77) + part
        segment, _ = dissect(1, ethernet(ipv6(fragment, protocol=44), V6), dissector)
    held, key, *_, start, end, _ = segment
    assert (key, held[start:end]) == (KEY6, PAYLOAD)


@pytest.mark.parametrize(("build", "key"), ((four, KEY), (six, KEY6)))
def test_fragments_are_reassembled_in_any_order(build, key):
    dice = random.Random(1)
    for _ in range(20):
        parts = list(fragments(SEGMENT, (16, 8, 16, 999), build))
        dice.shuffle(parts)
        dissector = packets.Dissector(Quality())
        found = [dissect(1, part, dissector)[0] for part in [*parts[:2], *parts]]  # the first two twice
        segment = next(segment for segment in found if segment is not None)
        assert segment[1] == key
        assert segment[0][segment[6] : segment[7]] == PAYLOAD


@pytest.mark.parametrize("order", ("012012", "001122", "010212", "210102", "001212"))
@pytest.mark.parametrize("build", (four, six))
def test_fragments_that_were_captured_twice_are_one_datagram(build, order):
    """As at both ends of a path; a second later the identification belongs to another datagram."""
    parts = list(fragments(SEGMENT, (16, 8, 999), build))
    quality = Quality()
    dissector = packets.Dissector(quality)

    def found(since_ns):
        segments = [
            dissector.segment(1, parts[int(part)], 0, len(parts[int(part)]), since_ns + 1000 * number)
            for number, part in enumerate(order)
        ]
        return len([segment for segment in segments if segment is not None])

    assert found(0) == 1 and found(1_000_000_000) == 1
    dissector.finish()
    assert (quality.count("duplicate_packets"), quality.count("fragments")) == (6, 0)


@pytest.mark.parametrize("apart_ns, found", ((30_000_000_000, 1), (30_000_000_001, 0), (-30_000_000_001, 0)))
def test_fragments_of_another_time_belong_to_another_datagram(apart_ns, found):
    """The identification of a datagram has 16 bits, and fragments whose others were lost stay behind."""
    first, second = fragments(SEGMENT, (16, 999), four)
    quality = Quality()
    dissector = packets.Dissector(quality)
    now_ns = 100_000_000_000
    assert dissector.segment(1, first, 0, len(first), now_ns) is None
    segment = dissector.segment(1, second, 0, len(second), now_ns + apart_ns)
    assert (segment is not None, quality.count("fragments")) == (bool(found), 1 - found)


def test_overlapping_fragments_hold_no_more_than_a_datagram():
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


@settings(max_examples=150)
@given(st.data())
def test_of_overlapping_fragments_the_lower_offset_wins_then_the_first(data):
    """Compared with one byte after the other; the fragment at 0 has a TCP header."""
    words = data.draw(st.integers(5, 12))
    total = 8 * words - data.draw(st.integers(0, 7))
    parts = [(0, data.draw(st.integers(3, words)))]
    parts += data.draw(st.lists(st.tuples(st.integers(1, words - 1), st.integers(1, words)), max_size=12))
    parts.append((words - 1, 1))
    dissector, known, size, found = packets.Dissector(Quality()), {}, None, None
    for number, (word, count) in enumerate(data.draw(st.permutations(parts))):
        offset, stop = 8 * word, min(8 * (word + count), total)
        part = (b"" if offset else tcp()) + bytes((number + 1,)) * total
        part = part[: stop - offset]
        frame = four(part, offset, stop < total)
        assert found is None
        found = dissector.segment(1, frame, 0, len(frame), 0)
        known.setdefault(offset, part)
        size = total if stop == total else size
        by_offset = sorted(known.items(), reverse=True)
        whole = {offset + at: byte for offset, part in by_offset for at, byte in enumerate(part)}
        assert (found is not None) == (size is not None and len(whole) == total)
        if found is not None:
            assert found[0][found[6] : found[7]] == bytes(whole[at] for at in range(20, total))
            return


@pytest.mark.parametrize(("held", "full"), ((0xFFFF, 0), (0x10000, 1)))
def test_a_datagram_with_too_many_overlapping_bytes_is_dropped(held, full):
    quality = Quality()
    dissector = packets.Dissector(quality)
    for number in range(held // 1000 + 1):
        part = numbered(7, bytes(min(1000, held - 1000 * number)), 8 * number, True)
        dissector.segment(1, part, 0, len(part), 0)
    assert quality.count("fragments") == 0
    part = numbered(7, bytes(8), 8000, True)
    dissector.segment(1, part, 0, len(part), 0)
    assert quality.count("fragments") == full * 66
    assert quality.size("fragments") == full * held


@pytest.mark.parametrize("apart_ns", (packets.SAME_PACKET_NS, -packets.SAME_PACKET_NS))
def test_a_fragment_captured_again_within_a_second_is_a_copy(apart_ns):
    first, _ = fragments(SEGMENT, (16, 999), four)
    for further_ns, copies in ((0, 1), (1, 0)):
        quality = Quality()
        dissector = packets.Dissector(quality)
        for time_ns in (1 << 60, (1 << 60) + apart_ns + (further_ns if apart_ns > 0 else -further_ns)):
            dissector.segment(1, first, 0, len(first), time_ns)
        assert quality.count("duplicate_packets") == copies
    assert packets.SAME_PACKET_NS == 999_999_999  # a SYN is retransmitted after a second


def test_incomplete_datagrams_are_counted_and_bounded():
    quality = Quality()
    dissector = packets.Dissector(quality)
    for number in range(1000):
        part = ethernet(ipv4(bytes(64), fragment=0x2000, identity=number))
        assert dissector.segment(1, part, 0, len(part), number) is None
    assert quality.count("fragments") == 1000 - 256
    dissector.finish()
    assert (quality.count("fragments"), quality.size("fragments")) == (1000, 64000)


def test_copies_of_fragments_are_recognised_for_256_datagrams():
    quality = Quality()
    dissector = packets.Dissector(quality)
    first, *others = (list(fragments(SEGMENT, (16, 999), lambda *part, n=n: numbered(n, *part))) for n in range(257))

    def copies_of_the_first(then):
        for part in [part for datagram in then for part in datagram]:
            dissector.segment(1, part, 0, len(part), 0)
        before = quality.count("duplicate_packets")
        dissector.segment(1, first[1], 0, len(first[1]), 0)
        return quality.count("duplicate_packets") - before

    assert copies_of_the_first([first, *others[:255]]) == 1
    assert copies_of_the_first(others[255:]) == 0


def test_a_datagram_has_at_most_65535_bytes():
    quality = Quality()
    dissector = packets.Dissector(quality)
    for size in (23, 24):  # after 8191 words of eight bytes
        part = ethernet(ipv4(bytes(size), fragment=0x1FFD))
        dissector.segment(1, part, 0, len(part), 0)
        assert quality.count("malformed") == size - 23


@pytest.mark.parametrize(
    ("link", "data", "kind"),
    [
        (1, ethernet(bytes(46), 0x0806), "not_tcp"),
        (1, ethernet(ipv4(udp(53, bytes(40)), protocol=17)), "not_tcp"),
        (1, ethernet(ipv4(bytes(60), protocol=1)), "not_tcp"),
        (1, ethernet(b"\x65" + ipv4(SEGMENT)[1:]), "malformed"),
        (1, ethernet(ipv4(SEGMENT[:12] + b"\x20" + SEGMENT[13:])), "malformed"),  # a TCP header of 8 bytes
        (1, ethernet(ipv4(SEGMENT[:12] + b"\xf0" + SEGMENT[13:30])), "malformed"),  # longer than the packet
        (1, ethernet(tag(DOT1Q, b"\0\1\x81\0" * 20), DOT1Q), "malformed"),  # nothing but tags
    ],
)
def test_packets_without_a_segment_are_counted_by_kind(link, data, kind):
    segment, quality = dissect(link, data)
    assert segment is None
    assert [(row.kind, row.bytes) for row in quality] == [(kind, len(data))]


def test_protocols_without_tcp_do_not_count_as_unread():
    """By IANA's numbers of Ethernet types and IP protocols."""
    kinds = {"ARP": 0x0806, "RARP": 0x8035, "LACP": 0x8809, "PPPoE discovery": 0x8863, "802.1X": 0x888E, "LLDP": 0x88CC}
    kinds |= {"PTP": 0x88F7, "CFM": 0x8902, "802.3 with a length": 0x5FF}
    protocols = {"ICMP": 1, "IGMP": 2, "ICMPv6": 58, "nothing": 59, "EIGRP": 88, "OSPF": 89, "PIM": 103, "VRRP": 112}
    found = {name: dissect(1, ethernet(bytes(60), kind))[1] for name, kind in kinds.items()}
    found |= {
        name: dissect(1, ethernet(ipv4(bytes(60), protocol=number)))[1]
        for name, number in {**protocols, "SCTP": 132}.items()
    }
    assert not {name for name, quality in found.items() if [row.kind for row in quality] != ["not_tcp"]}


@pytest.mark.parametrize("nested", (lambda count: _tagged(count), lambda count: _extended(count)))
def test_up_to_seven_layers_around_a_segment_are_read(nested):
    for count, is_found in ((7, True), (8, False)):
        segment, quality = dissect(1, nested(count))
        assert (segment is not None, quality.count("malformed")) == (is_found, not is_found)


def _tagged(count):
    data, kind = ipv4(SEGMENT), V4
    for _ in range(count):
        data, kind = tag(kind, data), DOT1Q
    return ethernet(data, kind)


def _extended(count):
    return ethernet(ipv6((bytes((60, 0)) + bytes(6)) * (count - 1) + extension + SEGMENT, protocol=60), V6)


@pytest.mark.parametrize(
    ("link", "data", "kind", "named"),
    [
        *((link, bytes(80), "unknown_link", f"link type {link}") for link in (147, *WLAN, *SWITCH_TAGS, 247)),
        (258, pktap(105, bytes(60)), "unknown_link", "link type 105"),
        (1, ethernet(bytes(60), 0x88E5), "unread", "Ethernet type 0x88e5"),
        (1, ethernet(tag(0x88E5, bytes(60)), DOT1Q), "unread", "Ethernet type 0x88e5"),
        (1, ethernet(bytes(60), 0xDADA), "unread", "Ethernet type 0xdada"),
        (1, ethernet(ipv4(bytes(60), protocol=50)), "unread", "IP protocol 50"),
        (1, ethernet(ipv4(bytes(60), protocol=115)), "unread", "IP protocol 115"),
        (1, ethernet(gre(V4, ipv4(SEGMENT), 0x4000)), "unread", "GRE with source routing"),
        (1, ethernet(ipv4(bytes((51, 0)) * 400, protocol=51)), "unread", "IP protocol 51"),  # nothing but such headers
        (1, ethernet(ipv4(udp(4500, bytes(80)), protocol=17)), "unread", "UDP port 4500"),
        (1, ethernet(ipv4(udp(1701, bytes(80)), protocol=17)), "unread", "UDP port 1701"),
        (1, ethernet(ipv4(udp(5247, bytes(80)), protocol=17)), "unread", "UDP port 5247"),
        (1, ethernet(ipv6(pack(">HH", 51820, 9) + udp(9, bytes(80))[4:], protocol=17), V6), "unread", "UDP port 51820"),
    ],
)
def test_unsupported_headers_are_named(link, data, kind, named):
    segment, quality = dissect(link, data)
    assert segment is None
    (row,) = quality
    assert (row.kind, row.count, row.bytes) == (kind, 1, len(data))
    assert row.sentence.endswith(f" ({named} ×1)")


def test_the_documentation_says_what_to_do_about_each_unsupported_header():
    text = (Path(__file__).parents[3] / "docs/capture.md").read_text()
    (section,) = re.findall(r"(?s)## Headers around TCP\n(.*?)\n## ", text)
    rows = " ".join(row for row in section.splitlines() if row.startswith("| `"))
    names = ["Ethernet type 0x88e5", "Ethernet type 0xdada", "IP protocol 50", "IP protocol 115"]
    names += [f"UDP port {port}" for port in packets._UNREAD_PORTS]
    names += [f"link type {link}" for link in (*WLAN, *SWITCH_TAGS, 147, 247)]
    assert not [name for name in names if f"`{name}`" not in rows]


def test_the_names_of_headers_are_bounded():
    quality = Quality()
    for kind in range(0x9000, 0x9000 + 500):
        dissect(1, ethernet(bytes(60), kind), packets.Dissector(quality))
    (row,) = (row for row in quality if row.kind == "unread")
    assert row.count == 499  # all but 0x9100, which is a tag
    assert len(list(quality.counts())) <= 70
    assert row.sentence.endswith(" and 61 more)")


@pytest.mark.parametrize("length", (0, 1500))
def test_an_offloaded_packet_is_truncated_by_the_snap_length_only(length):
    """With an IP header of length 0 the length is that of the record, on the wire."""
    data = ethernet(ipv4(SEGMENT, total=0))
    quality = Quality()
    segment = packets.Dissector(quality).segment(1, data, 0, len(data), 5, len(data) + length)
    assert segment[8] == len(PAYLOAD) + length and segment[7] - segment[6] == len(PAYLOAD)


def test_no_bytes_raise():
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
        from kproxy.capture.formats.captures import Capture

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
    """Its bytes may look like Ethernet and IPv4 at the offsets that are checked first."""
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


def _quoting(kind, code, number=0, *, version=4, cut=0, **quotes):
    """An ICMP message about a SYN of the client, from a router to the client."""
    syn = packet.tcp(source=packet.CLIENT, seq=4_000_000_001, flags=packets.SYN)
    if version == 4:
        quoted = ipv4(syn, **quotes)
        message = packet.icmp(kind, code, number, quoted[: len(quoted) - cut])
        return ethernet(ipv4(message, protocol=1, source=(b"\x0a\0\0\x63", 0), target=packet.CLIENT))
    quoted = packet.ipv6(syn)
    message = packet.icmp(kind, code, number, quoted[: len(quoted) - cut])
    router = b"\xfd" + bytes(14) + b"\x63", 0
    return ethernet(packet.ipv6(message, protocol=58, source=router, target=packet.CLIENT6), 0x86DD)


UNDELIVERED = (
    *((_quoting(3, code, cut=12), "net_unreachable", 0) for code in (0, 6, 11)),
    *((_quoting(3, code, cut=12), "host_unreachable", 0) for code in (1, 7, 12)),
    (_quoting(3, 3), "port_unreachable", 0),
    *((_quoting(3, code), "prohibited", 0) for code in (9, 10, 13)),
    (_quoting(3, 10, options=bytes(8)), "prohibited", 0),
    (_quoting(3, 4, 1400), "too_big", 1400),
    (_quoting(3, 4, 68), "too_big", 68),
    (_quoting(2, 0, 1280, version=6), "too_big", 1280),
    (_quoting(1, 0, version=6), "net_unreachable", 0),
    *((_quoting(1, code, version=6), "prohibited", 0) for code in (1, 5, 6)),
    (_quoting(1, 3, version=6), "host_unreachable", 0),
    (_quoting(1, 4, version=6), "port_unreachable", 0),
)


def test_icmp_is_read_as_by_tshark(tmp_path):
    """The quoted packet, with at least eight bytes of its TCP header, and the MTU of the next hop."""
    path = tmp_path / "icmp.pcap"
    path.write_bytes(packet.pcap([(at * 1_000_000, data) for at, (data, _, _) in enumerate(UNDELIVERED)]))
    ends = ("ip.src", "ip.dst", "ipv6.src", "ipv6.dst")
    fields = ("icmp.mtu", "icmpv6.mtu", "tcp.srcport", "tcp.dstport", "tcp.seq", *ends)
    command = ["tshark", "-n", "-r", str(path), "-o", "tcp.relative_sequence_numbers:FALSE", "-T", "fields"]
    command += ["-E", "separator=,", "-E", "occurrence=l"]
    command += [part for field in fields for part in ("-e", field)]
    theirs = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(theirs) == len(UNDELIVERED)
    for (data, reason, mtu), line in zip(UNDELIVERED, theirs, strict=True):
        quality = Quality()
        segment = packets.Dissector(quality, reads_icmp=True).segment(1, data, 0, len(data), 5)
        _, key, seq, of_mtu, flags, number, start, end, length = segment
        assert (flags, packets.REASONS[number], of_mtu) == (packets.UNDELIVERED, reason, mtu)
        assert (start, length, quality.count("undelivered"), quality.count("not_tcp")) == (end, 0, 1, 0)
        v4, v6, source_port, target_port, of_seq, source4, target4, source6, target6 = line.split(",")
        assert (int(source_port), int(target_port), int(of_seq)) == (40000, 9092, seq)
        assert int(v4 or v6 or 0) == mtu
        addresses = (ipaddress.ip_address(each).packed for each in (source6 or source4, target6 or target4))
        assert key == b"".join(addresses) + pack(">HH", 40000, 9092)


def test_icmp_may_quote_the_first_fragment_of_a_datagram():
    data = _quoting(3, 4, 1400, fragment=0x2000)
    segment = packets.Dissector(Quality(), reads_icmp=True).segment(1, data, 0, len(data), 5)
    assert segment[1:5] == (KEY, 4_000_000_001, 1400, packets.UNDELIVERED)


@pytest.mark.parametrize("data", (_quoting(3, 4, 67), _quoting(2, 0, 1279, version=6), _quoting(3, 3, 1400)))
def test_impossible_mtus_and_those_of_other_icmp_codes_are_ignored(data):
    segment = packets.Dissector(Quality(), reads_icmp=True).segment(1, data, 0, len(data), 5)
    assert (segment[4], segment[3]) == (packets.UNDELIVERED, 0)


@pytest.mark.parametrize(
    "data",
    (
        _quoting(3, 3, cut=13),  # the sequence number is truncated
        _quoting(3, 2),  # another protocol
        _quoting(11, 0),  # time exceeded
        _quoting(8, 0),
        _quoting(1, 4, version=6, cut=13),
        _quoting(128, 0, version=6),
        ethernet(ipv4(packet.icmp(3, 3, 0, ipv4(packet.udp(53, b"12345678"), protocol=17)), protocol=1)),
        ethernet(ipv4(packet.icmp(3, 3, 0, ipv4(packet.tcp(), fragment=5)), protocol=1)),
        ethernet(ipv4(packet.icmp(3, 3, 0, ipv4(packet.tcp(), fragment=0x1FFF)), protocol=1)),
        ethernet(ipv4(packet.icmp(3, 3, 0, b"\x44" + ipv4(packet.tcp())[1:]), protocol=1)),  # a header of 16 bytes
        ethernet(ipv4(packet.icmp(3, 3, 0, b"\x65" + ipv4(packet.tcp())[1:]), protocol=1)),  # of IPv6
        ethernet(ipv4(b"\3\3", protocol=1)),
    ),
)
def test_icmp_without_a_tcp_segment_is_a_packet_without_tcp(data):
    quality = Quality()
    assert packets.Dissector(quality, reads_icmp=True).segment(1, data, 0, len(data), 5) is None
    assert quality.count("not_tcp") == 1 and not quality.count("undelivered")


def test_icmp_is_skipped_unless_requested():
    data = UNDELIVERED[0][0]
    quality = Quality()
    assert packets.Dissector(quality).segment(1, data, 0, len(data), 5) is None
    assert quality.count("not_tcp") == 1

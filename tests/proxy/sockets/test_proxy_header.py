"""PROXY protocol: valid headers split at any byte, too long and damaged ones; kproxy reads the headers it writes."""

import struct
from contextlib import suppress
from ipaddress import ip_address

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.proxy_header import MAX_BYTES, V1, V1_BYTES, V2, V2_START, Header, read, write

CLIENT4, SERVER4 = Address("203.0.113.7", 51234), Address("192.0.2.1", 9092)
CLIENT6, SERVER6 = Address("2001:db8::7", 51234), Address("2001:db8::1", 9092)
BEHIND = b"\0\0\0\x12\0\x12\0\0"  # the beginning of the first request after the header


def v2(body=b"", *, command=1, family=0x11, version=2, length=None):
    return (
        V2_START + struct.pack("!BBH", version << 4 | command, family, len(body) if length is None else length) + body
    )


def addresses(client, server, more=b""):
    hosts = [ip_address(end.host).packed for end in (client, server)]
    return b"".join(hosts) + struct.pack("!HH", client.port, server.port) + more


def tlv(kind, value):
    return struct.pack("!BH", kind, len(value)) + value


def fed(stream, portions=None):
    """The result of `read` for a stream that arrives in portions, and the bytes that it did not consume."""
    taken, portions = b"", iter(portions or ())
    while isinstance(found := read(taken), int):
        assert found > 0, "it must ask for at least one byte"
        most = min(found, next(portions, found))
        if len(taken) == len(stream):
            return None, b""  # the peer sends no more
        taken += stream[len(taken) : len(taken) + most]
    return found, stream[len(taken) :]


GOOD = {
    "v1 TCP4": (b"PROXY TCP4 203.0.113.7 192.0.2.1 51234 9092\r\n", Header(V1, CLIENT4, SERVER4)),
    "v1 TCP6": (b"PROXY TCP6 2001:db8::7 2001:db8::1 51234 9092\r\n", Header(V1, CLIENT6, SERVER6)),
    "v1 shortest": (b"PROXY TCP6 :: :: 0 0\r\n", Header(V1, Address("::", 0), Address("::", 0))),
    "v1 unknown": (b"PROXY UNKNOWN\r\n", Header(V1, None, None)),
    "v1 unknown with more": (b"PROXY UNKNOWN ff:: ff:: 65535 65535\r\n", Header(V1, None, None)),
    "v1 longest": (b"PROXY UNKNOWN " + b"f" * 91 + b"\r\n", Header(V1, None, None)),
    "v2 IPv4": (v2(addresses(CLIENT4, SERVER4)), Header(V2, CLIENT4, SERVER4)),
    "v2 IPv6": (v2(addresses(CLIENT6, SERVER6), family=0x21), Header(V2, CLIENT6, SERVER6)),
    "v2 mapped": (
        v2(addresses(Address("::ffff:203.0.113.7", 51234), SERVER6), family=0x21),
        Header(V2, CLIENT4, SERVER6),
    ),
    "v2 UNIX": (v2(bytes(216), family=0x31), Header(V2, None, None)),
    "v2 LOCAL": (v2(command=0, family=0), Header(V2, None, None)),
    "v2 LOCAL with ignored bytes": (v2(b"whatever", command=0, family=0xEE), Header(V2, None, None)),
    "v2 AF_UNSPEC": (v2(b"whatever", family=0), Header(V2, None, None)),
    "v2 no transport": (v2(addresses(CLIENT4, SERVER4), family=0x10), Header(V2, None, None)),
    "v2 fields": (
        v2(addresses(CLIENT4, SERVER4, tlv(4, b"filling") + tlv(2, b"kafka.example") + tlv(0xEA, b"\x01vpce-1"))),
        Header(V2, CLIENT4, SERVER4, ((2, b"kafka.example"), (0xEA, b"\x01vpce-1"))),
    ),
    "v2 longest": (
        v2(addresses(CLIENT4, SERVER4, tlv(0xE0, bytes(MAX_BYTES - 16 - 12 - 3)))),
        Header(V2, CLIENT4, SERVER4, ((0xE0, bytes(MAX_BYTES - 16 - 12 - 3)),)),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_header_is_read_however_it_arrives_and_no_byte_after_it_is_consumed(name):
    raw, header = GOOD[name]
    assert fed(raw + BEHIND) == (header, BEHIND)
    assert fed(raw + BEHIND, [1] * len(raw)) == (header, BEHIND)
    for cut in range(1, min(len(raw), 300)):
        assert fed(raw + BEHIND, [1] * cut) == (header, BEHIND)
        assert fed(raw[:cut])[0] is None, "a partial header must not be accepted"


@given(st.sampled_from(sorted(GOOD)), st.lists(st.integers(1, 40)))
def test_the_result_does_not_depend_on_the_portions(name, portions):
    raw, header = GOOD[name]
    assert fed(raw + BEHIND, portions) == (header, BEHIND)


BAD = {
    "kafka": (bytes.fromhex("00000012001200030000000100"), "a Kafka request"),
    "tls": (b"\x16\x03\x01\x02\0", "a TLS hello"),
    "http": (b"GET /metrics HTTP/1.1\r\n", "an HTTP request"),
    "other": (b"\xff\xff", "other bytes"),
    "v1 family": (b"PROXY UDP4 203.0.113.7 192.0.2.1 51234 9092\r\n", "TCP4, TCP6 or UNKNOWN"),
    "v1 no address": (b"PROXY TCP4 kafka.example 192.0.2.1 51234 9092\r\n", "is none"),
    "v1 other family": (b"PROXY TCP4 2001:db8::7 2001:db8::1 51234 9092\r\n", "do not fit"),
    "v1 two spaces": (b"PROXY TCP4  203.0.113.7 192.0.2.1 51234 9092\r\n", "two addresses"),
    "v1 port": (b"PROXY TCP4 203.0.113.7 192.0.2.1 65536 9092\r\n", "do not fit"),
    "v1 port with zeros": (b"PROXY TCP4 203.0.113.7 192.0.2.1 051 9092\r\n", "do not fit"),
    "v1 signed port": (b"PROXY TCP4 203.0.113.7 192.0.2.1 +512 9092\r\n", "do not fit"),
    "v1 bare LF": (b"PROXY TCP4 203.0.113.7 192.0.2.1 51234 9092\n", "CR LF"),
    "v1 too long": (b"PROXY UNKNOWN " + b"f" * 92 + b"\r\n", "CR LF"),
    "v1 without end": (b"PROXY TCP4 " + b"1" * 200, "CR LF"),
    "v2 version": (v2(version=1, command=1), "version 1"),
    "v2 command": (v2(command=2), "command 2"),
    "v2 family": (v2(family=0x41), "not assigned"),
    "v2 transport": (v2(addresses(CLIENT4, SERVER4), family=0x13), "not assigned"),
    "v2 datagrams": (v2(addresses(CLIENT4, SERVER4), family=0x12), "datagrams"),
    "v2 no room": (v2(addresses(CLIENT4, SERVER4)[:-1]), "no room"),
    "v2 no room for UNIX": (v2(bytes(215), family=0x31), "no room"),
    "v2 field cut": (v2(addresses(CLIENT4, SERVER4, b"\x02\0")), "cut short"),
    "v2 field too long": (v2(addresses(CLIENT4, SERVER4, b"\x02\0\x05kafk")), "longer than the header"),
    "v2 too long": (v2(length=MAX_BYTES - 15), f"{MAX_BYTES} at most"),
    "v2 longest length": (v2(length=65535), f"{MAX_BYTES} at most"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_header_is_refused_with_its_cause(name):
    raw, cause = BAD[name]
    with pytest.raises(Malformed, match=cause):
        fed(raw)
    with pytest.raises(Malformed, match=f"{cause}|no PROXY protocol header"):
        fed(raw, [1] * len(raw))


def test_a_wrong_checksum_is_refused():
    zeroed = v2(addresses(CLIENT4, SERVER4, tlv(2, b"kafka.example") + tlv(3, bytes(4))))
    whole = zeroed[:-4] + crc32c(zeroed).to_bytes(4, "big")
    header, _ = fed(whole)
    assert header == Header(V2, CLIENT4, SERVER4, ((2, b"kafka.example"),))
    assert header.authority == "kafka.example"
    for place in (20, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        with pytest.raises(Malformed, match="checksum"):
            fed(bytes(damaged))
    with pytest.raises(Malformed, match="checksum"):
        fed(v2(addresses(CLIENT4, SERVER4, tlv(3, b"\0"))))


@given(st.binary(max_size=300))
def test_any_bytes_yield_a_header_or_malformed_or_a_wait_for_more(data):
    for start in (b"", b"PROXY ", b"PROXY TCP4 ", b"PROXY TCP6 ::1 ", V2_START, V2_START + b"\x21\x11", v2()[:14]):
        try:
            found = read(start + data)
        except Malformed as fault:
            assert len(str(fault)) < 1000
        else:
            assert isinstance(found, Header) or 0 < found <= MAX_BYTES


@given(st.binary(min_size=1, max_size=4), st.integers(0, 80))
def test_a_damaged_header_raises_nothing_but_malformed(noise, place):
    for raw, _ in GOOD.values():
        damaged = bytearray(raw[:200])
        place %= len(damaged)
        damaged[place : place + len(noise)] = noise
        with suppress(Malformed):
            fed(bytes(damaged))


ENDS = st.builds(Address, st.ip_addresses().map(str), st.integers(0, 65535))


@given(st.sampled_from((V1, V2)), ENDS, ENDS)
def test_a_written_header_is_read_back(version, client, server):
    raw = write(version, client, server)
    found, rest = fed(raw + BEHIND)
    assert rest == BEHIND and found.version == version
    for read_back, sent in ((found.client, client), (found.server, server)):
        assert read_back.port == sent.port
        mapped = getattr(ip_address(sent.host), "ipv4_mapped", None)
        assert read_back.host == str(mapped or ip_address(sent.host))
    assert len(raw) <= V1_BYTES


@pytest.mark.parametrize("version", (V1, V2))
def test_the_header_of_kproxys_own_connections_contains_no_addresses(version):
    for ends in ((), (None, SERVER4), (Address("name", 1), SERVER4)):
        assert fed(write(version, *ends)) == (Header(version, None, None), b"")

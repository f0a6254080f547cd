"""PROXY headers before Kafka and TLS are skipped, and their client address is the connection's."""

import pytest

from kproxy.capture.connections import proxied
from kproxy.capture.dissection.packets import ACK, FIN
from tests.capture.connections.test_flows import Wire, answer, request

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


def version_2(family, addresses, command=0x21, more=b""):
    body = addresses + more
    return SIGNATURE + bytes((command, family)) + len(body).to_bytes(2) + body


PORTS = (5555).to_bytes(2) + (9092).to_bytes(2)
V4, V6 = bytes((192, 0, 2, 7, 10, 0, 0, 2)), bytes.fromhex("20010db8" + "00" * 11 + "07") + bytes(16)
MAPPED = bytes(10) + b"\xff\xff" + V4[:4] + bytes(16)
HEADERS = {
    "v1": (b"PROXY TCP4 192.0.2.7 10.0.0.2 5555 9092\r\n", ("192.0.2.7", 5555)),
    "v1 IPv6": (b"PROXY TCP6 2001:db8::7 ::1 5555 9092\r\n", ("2001:db8::7", 5555)),
    "v1 unknown": (b"PROXY UNKNOWN\r\n", None),
    "v2": (version_2(0x11, V4 + PORTS), ("192.0.2.7", 5555)),
    "v2 with TLVs": (version_2(0x11, V4 + PORTS, more=b"\x04\0\x10" + bytes(16)), ("192.0.2.7", 5555)),
    "v2 IPv6": (version_2(0x21, V6 + PORTS), ("2001:db8::7", 5555)),
    "v2 IPv4 mapped into IPv6": (version_2(0x21, MAPPED + PORTS), ("192.0.2.7", 5555)),
    "v1 IPv4 mapped into IPv6": (b"PROXY TCP6 ::FFFF:192.0.2.7 ::1 5555 9092\r\n", ("192.0.2.7", 5555)),
    "v1 mapped, in hexadecimal": (b"PROXY TCP6 0:0:0:0:0:ffff:C000:207 ::1 5555 9092\r\n", ("192.0.2.7", 5555)),
    "v2 local": (version_2(0, b"", command=0x20), None),
    "v2 of a Unix socket": (version_2(0x31, bytes(216)), None),
}


@pytest.mark.parametrize("step", (1, 5, 1000))
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_skipped_however_it_is_split(tmp_path, name, step):
    header, client = HEADERS[name]
    wire = Wire().shake()
    first = header + request(1)
    for place in range(0, len(first), step):
        wire.send(0, first[place : place + step])
    wire.send(1, answer(1)).ask(2)
    seen = wire.seen(tmp_path)
    (flow,) = seen.flows
    info = flow.info
    assert (info.client_address, info.client_port) == (client or ("10.0.0.1", 40000))
    assert [exchange.correlation_id for _, exchange in seen.exchanges] == [1, 2]
    assert all(exchange.response_end > 0 for _, exchange in seen.exchanges)


def test_tls_behind_a_header_is_tls(tmp_path):
    wire = (
        Wire()
        .shake()
        .send(0, HEADERS["v2"][0])
        .send(0, b"\x16\x03\x01\0\x05hello")
        .send(1, b"\x15\x03\x03\0\x02\x02\x28")
    )
    (flow,) = wire.seen(tmp_path).flows
    assert flow.speaks == "tls" and flow.info.client_address == "192.0.2.7"


def test_possible_headers_are_waited_for_and_other_bytes_are_not():
    for header, _ in HEADERS.values():
        for size in range(1, len(header)):
            assert proxied.header(header[:size]).length == proxied.PENDING
        assert proxied.header(header + b"more").length == len(header)
    others = (b"POST / HTTP/1.1\r\n", b"PROXY TCP4 nobody\r\n", b"PROXY " + b"x" * 200, SIGNATURE + b"\x31\x11\0\0")
    for other in (*others, request(1)):
        assert proxied.header(other) == proxied.NONE
    assert proxied.header(version_2(0x11, V4 + PORTS, more=bytes(5000))) == proxied.NONE


def test_a_tls_client_at_a_plaintext_port_differs_from_an_answered_one(tmp_path):
    hello = b"\x16\x03\x01\0\x05hello"
    for answered, kinds in ((b"", {"tls_unanswered": 1}), (b"\x16\x03\x03\0\x05hello", {"tls": 1})):
        wire = Wire().shake().send(0, hello)
        if answered:
            wire.send(1, answered)
        wire.send(1, flags=FIN | ACK).send(0, flags=FIN | ACK).send(1)
        seen = wire.seen(tmp_path)
        assert {
            kind: seen.quality.count(kind) for kind in ("tls", "tls_unanswered") if seen.quality.count(kind)
        } == kinds

"""The first bytes of a connection determine its protocol, as soon as there are enough of them."""

import pytest

from kproxy.capture.connections import content
from kproxy.capture.connections.content import HTTP, KAFKA, NOT_KAFKA, TLS, ZOOKEEPER, opening, other, witness
from kproxy.protocol import codec
from kproxy.wire import frames


def framed(body):
    return len(body).to_bytes(4) + body


def request(key, version, body, correlation_id=7):
    header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": correlation_id, "clientId": "me"}
    return framed(codec.encode_request(header, body))


HEARTBEAT = request(12, 4, {"groupId": "g"})
METADATA = request(3, 9, {"topics": [{"name": "t"}]})
NEWER = framed(b"\0\x12\0\x1f\0\0\0\7\0\2me" + bytes(9))  # ApiVersions in a version unknown to the schema
NEWEST = framed(b"\0\x12\x7f\xff\0\0\0\7\0\2me" + bytes(9))
ENDLESS = (1 << 20).to_bytes(4) + b"\0\0\0\3\0\0\0\7\0\2me" + bytes(content.HEAD)  # a Produce of 1 MiB
CONNECT = (45).to_bytes(4) + bytes(12) + (18000).to_bytes(4) + bytes(8) + (16).to_bytes(4) + bytes(17)


@pytest.mark.parametrize(
    ("client", "broker", "protocol", "needed"),
    [  # needed: the number of the client's bytes at which the protocol becomes clear
        (HEARTBEAT, b"", KAFKA, len(HEARTBEAT)),
        (METADATA, b"", KAFKA, len(METADATA)),
        (METADATA[:-1] + b"\7", b"", NOT_KAFKA, len(METADATA)),  # more tagged fields than there are bytes
        (framed(b"\0\7\0\0" + (7).to_bytes(4) + bytes(4)), b"", KAFKA, 16),  # ControlledShutdown v0: no client id
        (framed(b"\0\7\0\0" + (7).to_bytes(4) + bytes(5)), b"", NOT_KAFKA, 14),
        (NEWER, b"\0\0\0\5\0\0\0\7", KAFKA, 14),
        (NEWEST, b"\0\0\0\5\0\0\0\7", KAFKA, 14),
        (NEWEST.replace(b"\0\2me", b"\0\x42me"), b"\0\0\0\5\0\0\0\7", NOT_KAFKA, 14),
        (NEWER, b"\0\0\0\5\0\0\0\6", None, None),
        (NEWER, b"\0\0\0\5\0\0\0", None, None),
        (NEWER + bytes(content.HEAD), b"", KAFKA, content.HEAD),
        (ENDLESS, b"", KAFKA, content.HEAD),
        (ENDLESS, b"\0\0\1\0\0\0\0\7", KAFKA, 14),
        (CONNECT, b"", ZOOKEEPER, 32),
        (b"ruok", b"", ZOOKEEPER, 4),
        (b"GET / HTTP/1.1", b"", HTTP, 4),
        (b"\x16\3\1\2", b"", TLS, 4),
        (b"\x14\3\4\2", b"", TLS, 4),
        (b"\x17\3\0\2", b"", TLS, 4),
        ((9).to_bytes(4), b"", NOT_KAFKA, 4),
        ((frames.MAX_REQUEST + 1).to_bytes(4), b"", NOT_KAFKA, 4),
        ((10).to_bytes(4) + bytes(9), b"", None, None),
        (frames.MAX_REQUEST.to_bytes(4) + bytes(9), b"", None, None),
        (b"", b"\0\0\0\5\0\0\0\7", None, None),
    ],
)
def test_the_protocol_is_known_as_soon_as_possible(client, broker, protocol, needed):
    assert opening(client, broker, None) == protocol
    if needed is None:
        needed = len(client) + 1
    lengths = {*range(min(needed, len(client) + 1, 40)), needed - 1}
    assert {opening(client[:length], broker, None) for length in lengths} <= {None}
    if protocol is not None:
        assert opening(client[:needed], broker, None) == protocol


@pytest.mark.parametrize("head", (b"\x13\3\1\2", b"\x18\3\1\2", b"\x16\2\1\2", b"\x16\3\5\2"))
def test_nearly_valid_tls_records_are_not_tls(head):
    assert opening(head, b"", None) != TLS


@pytest.mark.parametrize("trusted", (KAFKA, ZOOKEEPER))
def test_the_configured_protocol_is_assumed_unless_bytes_contradict_it(trusted):
    assert opening(b"SSH-", b"", trusted) == NOT_KAFKA
    assert opening(b"SMB\2", b"", trusted) == opening((9).to_bytes(4), b"", trusted) == trusted
    assert opening(b"SSH", b"", trusted) is None
    assert [opening(head, b"", trusted) for head in (b"GET ", b"\x16\3\1\2", CONNECT)] == [HTTP, TLS, ZOOKEEPER]


def test_a_midstream_segment_is_evidence_if_it_begins_with_a_request():
    assert witness(HEARTBEAT + METADATA) == (7, True)
    assert witness(memoryview(ENDLESS)) == (7, False)
    assert witness(request(12, 4, {"groupId": "g"}, -2)) == (-2, True)
    assert witness(METADATA[:14]) == (7, False)
    assert [witness(each) for each in (METADATA[:13], METADATA[:-1] + b"\7", CONNECT, b"x" * 40)] == [None] * 4
    assert [other(each) for each in (b"\x17\3\3\0\5", b"POST /", CONNECT)] == [TLS, HTTP, ZOOKEEPER]
    assert other(b"\x17\3\3\0") is None and other(HEARTBEAT) is None


def test_only_the_beginning_of_a_request_is_recognised_as_one():
    asked = HEARTBEAT
    assert all(content.begins_request(asked[:size]) for size in (12, 13, 14, 15, len(asked)))
    assert not any(content.begins_request(asked[start:]) for start in range(1, len(asked)))
    assert not content.begins_request(asked[:11])

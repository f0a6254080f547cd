"""A TLS handshake that one side aborts is reported with the alert's name; a successful one, and its end, are not."""

import ssl
from contextlib import suppress

import pytest

from kproxy.capture.connections.tls_alerts import ENCRYPTED, Alerts, is_alert
from kproxy.capture.dissection.packets import ACK, FIN
from kproxy.views.summary import verdict
from tests.capture.connections.test_flows import Wire, answer, request
from tests.certificates import HOST, Authority

SERVER = "10.0.0.2:9092"  # packet.BROKER
HELLO = b"\x16\3\1\0\x2f\1\0\0\x2b\3\3" + bytes(41)
V1_2, V1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def contexts(authority, version, *, trusts=True, server_asks=False):
    """(the client's, the server's)"""
    made = authority.issue("kafka", HOST)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    for context in (client, server):
        context.minimum_version = context.maximum_version = version
    if trusts:
        client.load_verify_locations(made.ca)
    if server_asks:
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(made.ca)
    return client, server


def talked(client, server, says=b"hello"):
    """The pieces of a conversation, (side, bytes): the handshake, the client's message, and the end."""
    pipes = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    ends = [
        client.wrap_bio(*pipes[0], server_hostname=HOST),
        server.wrap_bio(*pipes[1], server_side=True),
    ]
    pieces, done, failed = [], [False, False], False
    for step in range(40):
        side = step % 2
        if not done[side] and not failed:
            try:
                ends[side].do_handshake()
                done[side] = True
                if side == 0:
                    ends[0].write(says)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                failed = True
        elif all(done) and step > 30:
            with suppress(ssl.SSLError):
                ends[side].unwrap()
        if data := pipes[side][1].read():
            pieces.append((side, data))
            pipes[1 - side][0].write(data)
    return pieces


def seen(pieces, tmp_path, cut=None):
    wire = Wire().shake()
    for side, data in pieces:
        for start in range(0, len(data), cut or len(data)):
            wire.send(side, data[start : start + (cut or len(data))])
    wire.send(1, flags=FIN | ACK).send(0, flags=FIN | ACK).send(1)
    return wire.seen(tmp_path).quality


CASES = {
    "the client trusts no such CA": (V1_2, {"trusts": False}, f"unknown_ca by a client of {SERVER}"),
    "nor with TLS 1.3, in clear by OpenSSL": (
        V1_3,
        {"trusts": False},
        f"unknown_ca by a client of {SERVER}",
    ),
    "the server wants a certificate": (V1_2, {"server_asks": True}, f"handshake_failure by the server {SERVER}"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [None, 1, 7])
def test_an_alert_is_named_with_its_sender(case, cut, authority, tmp_path):
    version, how, expected = CASES[case]
    quality = seen(talked(*contexts(authority, version, **how)), tmp_path, cut)
    (row,) = (row for row in quality if row.kind == "tls_alert")
    assert (row.count, quality.count("tls")) == (1, 0)
    assert row.sentence.endswith(f"({expected} ×1)")
    assert expected in verdict(quality) and "--key-log" not in verdict(quality)


def test_an_encrypted_alert_of_java_is_recognised_by_its_size(authority, tmp_path):
    hello, flight, *_ = talked(*contexts(authority, V1_3))
    pieces = [hello, flight, (0, b"\x14\x03\x03\0\x01\x01" + b"\x17\x03\x03\0\x13" + bytes(range(19)))]
    (row,) = (row for row in seen(pieces, tmp_path) if row.kind == "tls_alert")
    assert row.sentence.endswith(f"(an alert that TLS 1.3 encrypts by a client of {SERVER} ×1)")


@pytest.mark.parametrize("cut", [None, 1])
def test_a_server_that_refuses_after_the_clients_finished_is_reported(cut, authority, tmp_path):
    """A requested certificate is missing: TLS 1.3 encrypts the alert."""
    pieces = talked(*contexts(authority, V1_3, server_asks=True))
    (row,) = (row for row in seen(pieces, tmp_path, cut) if row.kind == "tls_alert")
    assert row.sentence.endswith(f"(an alert that TLS 1.3 encrypts by the server {SERVER} ×1)")


def test_the_response_to_a_clients_close_notify_is_no_refusal(authority, tmp_path):
    client, server = contexts(authority, V1_3)
    server.num_tickets = 0
    *pieces, of_server, of_client = talked(client, server, b"")
    assert (of_server[0], len(of_server[1])) == (1, 24)
    quality = seen([*pieces, of_client, of_server], tmp_path)
    assert (quality.count("tls"), quality.count("tls_alert")) == (1, 0)


def test_a_client_whose_server_closes_counts_as_unanswered(authority, tmp_path):
    """The client's alert reports a decode error at the end of the stream; the server has sent nothing."""
    (hello,) = (data for _, data in talked(*contexts(authority, V1_3))[:1])
    quality = seen([(0, hello), (0, b"\x15\x03\x01\0\x02\x02\x32")], tmp_path)
    assert (quality.count("tls_unanswered"), quality.count("tls_alert")) == (1, 0)


def test_incompatible_versions_are_an_alert_of_the_server(authority, tmp_path):
    client, _ = contexts(authority, V1_2)
    _, server = contexts(authority, V1_3)
    (row,) = (row for row in seen(talked(client, server), tmp_path) if row.kind == "tls_alert")
    assert row.sentence.endswith(f"(protocol_version by the server {SERVER} ×1)")


@pytest.mark.parametrize("version", [V1_2, V1_3])
@pytest.mark.parametrize("says", [b"", b"hello", b"x" * 40_000])
def test_a_successful_handshake_has_no_alert(version, says, authority, tmp_path):
    pieces = talked(*contexts(authority, version), says)
    assert len(pieces) > 2
    quality = seen(pieces, tmp_path, 1000)
    assert (quality.count("tls"), quality.count("tls_alert")) == (1, 0)


def test_bytes_that_are_no_tls_records_stop_the_detection(tmp_path):
    hello = b"\x16\x03\x01\0\x05hello"
    for odd in (
        b"\x15\x03\x03\0\x02\x01\x70",
        b"\x15\x03\x03\0\0",
        b"\x16\x03\x03\xff\xff",
        b"HTTP/1.1 400",
        b"\x17" * 9,
    ):
        quality = seen([(0, hello), (1, odd)], tmp_path, 3)
        is_clear = odd[:2] not in (b"\x15\x03", b"\x16\x03")
        counts = [quality.count(kind) for kind in ("tls", "tls_unanswered", "tls_alert")]
        assert counts == [not is_clear, is_clear, 0]


@pytest.mark.parametrize(
    "answer", (b"HTTP/1.0 400 Bad Request\r\n\r\n", b"\0\0\0\x08\0\0\0\1\0\0\0\0", b"SSH-2.0-OpenSSH_9.6\r\n")
)
def test_a_plaintext_response_means_a_port_without_tls(answer, authority, tmp_path):
    """Keys would not help, so none are suggested."""
    client, _ = contexts(authority, V1_3)
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        client.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    seen = Wire().shake().send(0, outgoing.read()).send(1, answer).send(1, flags=FIN | ACK).seen(tmp_path)
    kinds = {row.kind: row.count for row in seen.quality}
    assert kinds["tls_unanswered"] == 1 and "tls" not in kinds
    assert "its port has no TLS" in verdict(seen.quality) and "--key-log" not in verdict(seen.quality)


@pytest.mark.parametrize(
    ("messages", "failure", "kind"),
    (
        (((0, HELLO), (1, b"\x15\3\3\0\2\2\x28")), "handshake_failure by broker", "tls_alert"),
        (((0, HELLO), (1, b"\x16\3\3\0\2ok"), (0, b"\x15\3\3\0\2\2\x30")), "unknown_ca by client", "tls_alert"),
        (((0, HELLO), (1, b"HTTP/1.0 400 Bad Request\r\n\r\n")), "answered in clear", "tls_unanswered"),
        (((0, HELLO),), "unanswered", "tls_unanswered"),
        (((0, HELLO[:20]),), None, "tls"),  # a probe
        (((0, request(1)), (1, b"\x15\3\1\0\2\2\x46")), "TLS expected", "tls_expected"),
        (((0, request(1)), (1, b"\x15\3\1"), (1, b"\0\2\2\x46")), "TLS expected", "tls_expected"),
        (((0, HELLO), (1, b"\x16\3\3\0\2ok")), None, "tls"),
        (((0, request(1)), (1, answer(1))), None, "kafka"),
    ),
)
def test_a_connection_has_the_reason_of_its_failed_handshake(messages, failure, kind, tmp_path):
    wire = Wire().shake()
    for side, data in messages:
        wire.send(side, data)
    seen = wire.send(1, flags=FIN | ACK).send(0, flags=FIN | ACK).send(1).seen(tmp_path)
    (flow,) = seen.flows
    assert flow.columns()["tls_failure"] == failure
    assert seen.quality.count(kind) == 1


@pytest.mark.parametrize("is_before", (True, False))
def test_an_alert_behind_the_clients_fin_may_be_the_servers_close_notify(is_before, tmp_path):
    """So it is not known whether the handshake failed."""
    wire = Wire().shake()
    for side, data in (*BOTH, (1, DATA), (0, DATA)):
        wire.send(side, data)
    for side in (0, 1) if is_before else (1, 0):
        wire.send(side, LIKE_ALERT if side else b"", flags=ACK if side else FIN | ACK)
    (flow,) = wire.send(1, flags=FIN | ACK).send(0).seen(tmp_path).flows
    assert flow.columns()["tls_failure"] == (None if is_before else f"{ENCRYPTED} by broker")


class Followed:
    """The detection applied to a handshake: its result, and how many bytes it read until it had enough."""

    def __init__(self, messages, cut):
        self.client, self.alert, self.is_answered_in_clear, self.is_discarding = 1, None, False, False
        alerts = Alerts(self)
        for side, data in messages:
            for start in range(0, len(data), cut):
                if not self.is_discarding:
                    alerts.receive(side ^ 1, memoryview(data[start : start + cut]), 0)

    def discard_rest(self):
        self.is_discarding = True


def tls(kind, size, data=None, version=3):
    return bytes((kind, version, 3)) + size.to_bytes(2) + (bytes(size) if data is None else data)


SHAKE, CHANGE, DATA, LIKE_ALERT = tls(22, 50), tls(20, 1), tls(23, 30), tls(23, 19)  # an alert of TLS 1.3 has 19 bytes
FATAL_40, WARNING, UNKNOWN = tls(21, 2, b"\2\x28"), tls(21, 2, b"\1\x28"), tls(21, 2, b"\2\xc8")
BOTH = (0, SHAKE), (1, SHAKE)  # by the client, by the server


@pytest.mark.parametrize("cut", (1, 2, 5, 6, 7, 1000))
@pytest.mark.parametrize(
    ("messages", "alert"),
    (
        ((*BOTH, (0, FATAL_40)), (0, "handshake_failure")),
        ((*BOTH, (1, FATAL_40)), (1, "handshake_failure")),
        (((0, SHAKE), (1, FATAL_40)), (1, "handshake_failure")),
        (((0, SHAKE), (1, UNKNOWN)), (1, "alert 200")),
        (((0, SHAKE), (1, WARNING), (1, FATAL_40)), (1, "handshake_failure")),
        ((*BOTH, (0, WARNING)), None),
        (((0, SHAKE), (0, FATAL_40)), None),  # the stream ended before the server sent anything
        ((*BOTH, (1, SHAKE * 3 + CHANGE + FATAL_40)), (1, "handshake_failure")),
        ((*BOTH, (1, tls(22, 0) + FATAL_40)), (1, "handshake_failure")),
        ((*BOTH, (1, tls(22, 1) + tls(22, 2) + tls(22, 3) + FATAL_40)), (1, "handshake_failure")),
        ((*BOTH, (1, tls(21, 1) + DATA)), None),
        ((*BOTH, (1, tls(21, 1, b"\2") + tls(21, 1, b"\x28"))), (1, "handshake_failure")),
        ((*BOTH, (1, tls(21, 1, b"\1") + tls(21, 1, b"\x28") + FATAL_40)), (1, "handshake_failure")),
        # TLS 1.3: the server encrypts first
        ((*BOTH, (1, DATA), (0, LIKE_ALERT)), (0, ENCRYPTED)),
        ((*BOTH, (1, CHANGE + DATA), (0, CHANGE + LIKE_ALERT)), (0, ENCRYPTED)),
        ((*BOTH, (1, DATA), (0, tls(23, 18))), None),
        ((*BOTH, (1, DATA), (0, tls(23, 20))), None),
        ((*BOTH, (1, LIKE_ALERT), (0, LIKE_ALERT)), (1, ENCRYPTED)),
        ((*BOTH, (1, DATA + LIKE_ALERT)), (1, ENCRYPTED)),
        ((*BOTH, (1, DATA), (0, DATA), (1, LIKE_ALERT)), (1, ENCRYPTED)),
        ((*BOTH, (1, DATA), (0, DATA * 2), (1, LIKE_ALERT)), (1, ENCRYPTED)),
        ((*BOTH, (1, DATA), (0, DATA), (1, DATA + LIKE_ALERT)), None),  # the handshake succeeded
        ((*BOTH, (1, DATA), (0, DATA + LIKE_ALERT)), None),  # its close_notify
        ((*BOTH, (1, DATA), (0, DATA + LIKE_ALERT), (1, LIKE_ALERT)), None),
        # TLS 1.2: the client encrypts first
        ((*BOTH, (0, DATA), (1, LIKE_ALERT)), None),
        ((*BOTH, (0, DATA), (1, FATAL_40)), None),
        ((*BOTH, (0, LIKE_ALERT)), (0, ENCRYPTED)),
    ),
)
def test_records_in_any_pieces_reveal_who_aborted_a_handshake(messages, alert, cut):
    followed = Followed(messages, cut)
    assert followed.alert == (None if alert is None else (alert[0] ^ 1, alert[1]))
    assert not followed.is_answered_in_clear


@pytest.mark.parametrize("cut", (1, 5, 1000))
@pytest.mark.parametrize(
    ("answer", "in_clear"),
    (
        *((tls(kind, 2), False) for kind in (20, 21, 22, 23)),
        *((tls(kind, 2), True) for kind in (19, 24)),
        *((tls(22, 2, version=version), version != 3) for version in (2, 3, 4)),
        (SHAKE + tls(24, 2), False),  # later records are no response
    ),
)
def test_the_first_bytes_of_a_server_are_a_tls_record_or_plaintext(answer, in_clear, cut):
    assert Followed(((0, SHAKE), (1, answer)), cut).is_answered_in_clear == in_clear


@pytest.mark.parametrize(
    ("data", "found"),
    (
        (b"\x15\3\1\0\2\2", True),
        (b"\x15\3\1\0\2", False),
        (b"\x16\3\1\0\2\2", False),
        (b"\x15\2\1\0\2\2", False),
        (b"\x15\3\1\0\3\2", False),
        (b"\x15\3\1\1\2\2", False),
    ),
)
def test_a_plaintext_alert_is_recognised_by_its_header(data, found):
    assert is_alert(memoryview(data)) == found

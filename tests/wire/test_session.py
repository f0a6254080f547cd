"""Playbooks for the session: every rule of pairing, versions, SASL and faults, at any split of the bytes."""

import gc
import random
from functools import partial
from struct import pack
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.protocol.apis import API_VERSIONS, FETCH, METADATA, PRODUCE, SHARE_ACKNOWLEDGE
from kproxy.protocol.records import Record, write_batch
from kproxy.wire import frames
from kproxy.wire.bodies import BATCHES, ERRORS, SUMS, TOPICS, Found
from kproxy.wire.events import (
    ANSWERED,
    ANSWERED_BY_PROXY,
    BROKER,
    CLIENT,
    NO_ANSWER_EXPECTED,
    NONE,
    OPAQUE,
    REQUEST_NOT_SEEN,
    Closed,
    Desync,
    Exchange,
    Unanswered,
)
from kproxy.wire.interest import Interest
from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.session import Session
from kproxy.wire.state import MAX_NAMED
from tests.wire.playbook import MS, Dialogue, foreign_request, request, response, sized

HANDSHAKE, AUTHENTICATE = 17, 36
REWRITE = Interest(rewrite=True)
TRANSPARENT = Interest(details=True, detail=BATCHES)


def untouched(exchange: Exchange, frame: memoryview) -> None:
    return None


def rewriting(**more: Any) -> Dialogue:
    return Dialogue(REWRITE, transform=untouched, **more)


def captured(**more: Any) -> Dialogue:
    return Dialogue(TRANSPARENT, CapturedSession, **more)


# --- one exchange ----------------------------------------------------------------------------------------------------


def test_an_exchange_has_sizes_and_four_timestamps() -> None:
    ask, reply = request(METADATA, 12, 7, client="consumer-1"), response(METADATA, 12, 7, {"throttleTimeMs": 40})
    talk = Dialogue(TRANSPARENT).client(ask, [9, 20]).broker(reply, [3, 11])
    (exchange,) = talk.exchanges
    assert talk.sent == {BROKER: ask, CLIENT: reply}
    assert (exchange.plan.api, exchange.api_version, exchange.correlation_id) == ("Metadata", 12, 7)
    assert (exchange.client_id, exchange.outcome, exchange.throttle_ms) == ("consumer-1", ANSWERED, 40)
    assert (exchange.request_bytes, exchange.response_bytes) == (len(ask), len(reply))
    times = (exchange.request_start, exchange.request_end, exchange.response_start, exchange.response_end)
    assert times == (1 * MS, 3 * MS, 4 * MS, 6 * MS)


def test_a_frame_is_forwarded_from_its_complete_header_on_without_delay() -> None:
    ask = request(METADATA, 4, 1)
    talk = Dialogue()
    talk.client(ask[:11])
    assert talk.sent[BROKER] == b""
    talk.client(ask[11:12])
    assert talk.sent[BROKER] == ask[:12]
    talk.client(ask[12:14])
    assert talk.sent[BROKER] == ask[:14]


def test_a_response_may_take_hours() -> None:
    """JoinGroup waits for the slowest member, a Fetch for its max_wait_ms: no request is dropped meanwhile."""
    talk = rewriting().client(request(11, 9, 1, {"groupId": "g"}) + request(FETCH, 12, 2, {"maxWaitMs": 2**31 - 1}))
    talk.now += 5 * 3600 * 1000 * MS
    talk.broker(response(11, 9, 1) + response(FETCH, 12, 2))
    assert [(e.outcome, e.max_wait_ms) for e in talk.exchanges] == [(ANSWERED, None), (ANSWERED, 2**31 - 1)]
    assert not talk.faults and not talk.unanswered


def test_trailing_bytes_after_a_body_pass_and_are_no_fault() -> None:
    ask = sized(request(METADATA, 13, 5)[4:] + b"\0\0\0")
    talk = rewriting().client(ask).broker(response(METADATA, 13, 5))
    assert talk.sent[BROKER] == ask
    assert not talk.faults and len(talk.exchanges) == 1


@pytest.mark.parametrize("cuts", [[], [2, 5, 9]])
def test_a_response_of_an_unknown_layout_is_passed_to_the_transform(cuts: list[int]) -> None:
    answer = sized(pack(">i", 2) + b"\0\6secret\0")
    for transform, sent in (
        (lambda exchange, frame: bytes(frame).replace(b"secret", b"public"), answer.replace(b"secret", b"public")),
        (lambda exchange, frame: None, answer),
        (None, answer),
    ):
        talk = Dialogue(REWRITE, transform=transform).client(request(12, 4, 1)).broker(response(12, 4, 1))
        talk.sent[CLIENT] = b""
        talk.client(foreign_request(9999, 3, 2, b"\0\1c")).broker(answer, cuts)
        assert talk.sent[CLIENT] == sent
        assert len(talk.exchanges) == 2 and not talk.faults


def test_a_dropped_session_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    talk = rewriting().client(request(METADATA, 12, 7)).broker(response(METADATA, 12, 7))
    del talk
    assert gc.collect() == 0


# --- pairing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [(-1, -2, -3), (2**31 - 1, -(2**31), 0), (5, 5, 5)], ids=["negative", "wrap", "repeat"])
@pytest.mark.parametrize("which", [REWRITE, TRANSPARENT], ids=["rewriting", "reading"])
def test_correlation_ids_may_be_any_numbers(ids: tuple[int, ...], which: Interest) -> None:
    talk = Dialogue(which, transform=untouched)
    for correlation_id in ids:
        talk.client(request(12, 4, correlation_id))
    for correlation_id in ids:
        talk.broker(response(12, 4, correlation_id))
    assert [exchange.correlation_id for exchange in talk.exchanges] == list(ids)
    assert [exchange.number for exchange in talk.exchanges] == [0, 1, 2]
    assert not talk.faults


@pytest.mark.parametrize("version", [0, 2, 3, 8, 9, 12, 13])
@pytest.mark.parametrize("transactional_id", [None, "x" * 200])
@pytest.mark.parametrize("acks", [0, 1, -1])
@pytest.mark.parametrize("timeout", [0, 0x7F000001])
def test_acks_is_read_in_every_layout(version: int, transactional_id: str | None, acks: int, timeout: int) -> None:
    if version < 3 and transactional_id:
        transactional_id = None
    body = {"acks": acks, "timeoutMs": timeout, "transactionalId": transactional_id}
    ask = request(PRODUCE, version, 1, body, client="p" * 30)
    for cuts in ([], [12], [13, 14], range(1, len(ask))):
        talk = rewriting().client(ask, cuts)
        assert talk.sent[BROKER] == ask
        assert len(talk.session.pending) == (0 if acks == 0 else 1)
        assert [exchange.outcome for exchange in talk.exchanges] == ([NO_ANSWER_EXPECTED] if acks == 0 else [])


def test_repeated_first_fields_are_reported_for_each_request_and_changes_are_noticed() -> None:
    def produce(number: int, acks: int, client: str = "c", **more: Any) -> bytes:
        return request(PRODUCE, 9, number, {"acks": acks, "timeoutMs": number, **more}, client)

    asked = [
        produce(0, -1),
        produce(1, -1),
        produce(2, 0),
        produce(3, -1),
        produce(4, 1, "a longer name"),
        produce(5, 1, "a longer nama"),
        request(FETCH, 12, 6, {"maxWaitMs": 500}),
        produce(7, -1, transactionalId="t"),
        produce(8, -1),
    ]
    answers = [response(FETCH if n == 6 else PRODUCE, 12 if n == 6 else 9, n) for n in range(9) if n != 2]
    talk = rewriting().client(b"".join(asked)).broker(b"".join(answers))
    fields = {e.correlation_id: (e.client_id, e.acks, e.max_wait_ms, e.transactional_id) for e in talk.exchanges}
    assert fields == {
        0: ("c", -1, None, None),
        1: ("c", -1, None, None),
        2: ("c", 0, None, None),
        3: ("c", -1, None, None),
        4: ("a longer name", 1, None, None),
        5: ("a longer nama", 1, None, None),
        6: ("c", None, 500, None),
        7: ("c", -1, None, "t"),
        8: ("c", -1, None, None),
    }
    assert talk.sent == {BROKER: b"".join(asked), CLIENT: b"".join(answers)} and not talk.faults


def test_a_request_over_the_size_limit_is_refused_after_similar_smaller_ones() -> None:
    asked = [request(PRODUCE, 9, n, {"acks": -1, "transactionalId": None, "topicData": []}) for n in range(2)]
    large = request(PRODUCE, 9, 2, {"acks": -1, "topicData": [{"name": "t" * 2000}]})
    talk = rewriting(max_request_bytes=len(large) - 5).client(b"".join((*asked, large)))
    assert [fault.kind for fault in talk.faults] == ["size"] and "max_request_bytes" in talk.faults[0].text
    assert talk.sent[BROKER] == b"".join(asked)
    talk = rewriting(max_request_bytes=len(large) - 4).client(b"".join((*asked, large)))
    assert not talk.faults and talk.sent[BROKER] == b"".join((*asked, large))


def test_a_request_that_ends_inside_its_first_fields_is_malformed_whatever_bytes_follow() -> None:
    whole = request(PRODUCE, 9, 1, {"acks": -1})
    cut = sized(whole[4:16])  # ten bytes of first fields; the next bytes continue them, but belong to no frame
    talk = Dialogue(TRANSPARENT).client(whole + cut + whole[16:20] + bytes(60))
    assert [fault.kind for fault in talk.faults][:1] == ["malformed_request"]


@pytest.mark.parametrize("count", [b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x10"])
def test_a_produce_that_only_java_can_read_ends_the_connection_before_responses_are_mispaired(
    count: bytes,
) -> None:
    """Java reads such a count of tagged fields as -1 or 0: no response comes, and the next one has the same id."""
    produce = request(PRODUCE, 9, 5, {"acks": 0})
    assert produce[15] == 0  # tagged fields of the header
    talk = rewriting().client(sized(produce[4:15] + count + produce[16:]) + request(METADATA, 9, 5))
    assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("malformed_request", True)]
    talk.broker(response(METADATA, 9, 5, {"brokers": [{"nodeId": 1, "host": "upstream", "port": 9092}]}))
    assert not talk.sent[CLIENT]


def test_responses_skip_an_acks_0_produce_between_two_requests() -> None:
    talk = rewriting()
    talk.client(request(12, 4, 1) + request(PRODUCE, 9, 2, {"acks": 0}) + request(12, 4, 3))
    talk.broker(response(12, 4, 1) + response(12, 4, 3))
    assert [(e.correlation_id, e.outcome) for e in talk.exchanges] == [
        (2, NO_ANSWER_EXPECTED),
        (1, ANSWERED),
        (3, ANSWERED),
    ]
    assert not talk.faults


def test_a_broker_that_refuses_an_acks_0_produce_closes_and_leaves_nothing_unanswered() -> None:
    talk = rewriting().client(request(PRODUCE, 9, 1, {"acks": 0}) + request(12, 4, 2) + request(PRODUCE, 9, 3))
    talk.close(BROKER).close(CLIENT)
    assert [(e.correlation_id, e.outcome) for e in talk.exchanges] == [(1, NO_ANSWER_EXPECTED), (3, NO_ANSWER_EXPECTED)]
    assert [(lost.exchange.correlation_id, lost.cause) for lost in talk.unanswered] == [(2, "broker_closed")]


@pytest.mark.parametrize("key,version", [(9999, 0), (-19711, 77), (15, 99)])
def test_unknown_keys_and_versions_are_paired_by_position_and_passed_on_unread(key: int, version: int) -> None:
    ask, reply = foreign_request(key, version, 3, b"\xff" * 40), sized((3).to_bytes(4) + b"\xfe" * 50)
    talk = rewriting().client(ask + request(12, 4, 4)).broker(reply + response(12, 4, 4))
    assert talk.sent[BROKER].startswith(ask) and talk.sent[CLIENT].startswith(reply)
    first, second = talk.exchanges
    assert (first.decoded, first.plan.api_key, first.plan.api_version) == (OPAQUE, key, version)
    assert (first.correlation_id, second.correlation_id) == (3, 4)
    assert not talk.faults


def test_a_response_that_overtakes_drops_the_older_requests_and_reports_a_fault() -> None:
    talk = Dialogue().client(request(12, 4, 1) + request(12, 4, 2)).broker(response(12, 4, 2))
    assert [event.cause for event in talk.unanswered] == ["overtaken"]
    assert [exchange.correlation_id for exchange in talk.exchanges] == [2]
    assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("out_of_order", False)]


def test_an_unexpected_response_is_a_fault() -> None:
    stray = response(12, 4, 9)
    strict = rewriting().client(request(12, 4, 1)).broker(stray)
    assert [(fault.kind, fault.fatal) for fault in strict.faults] == [("unexpected_answer", True)]
    assert strict.sent[CLIENT] == b""
    assert [event.cause for event in strict.unanswered] == ["desync"]
    lenient = Dialogue().client(request(12, 4, 1)).broker(stray + response(12, 4, 1))
    assert [(fault.kind, fault.fatal) for fault in lenient.faults] == [("unexpected_answer", False)]
    assert lenient.sent[CLIENT] == stray + response(12, 4, 1)
    assert [exchange.outcome for exchange in lenient.exchanges] == [REQUEST_NOT_SEEN, ANSWERED]
    unseen, _ = lenient.exchanges
    assert (unseen.plan.api, unseen.plan.known, unseen.decoded) == ("unknown", False, OPAQUE)
    assert (unseen.plan.api_key, unseen.plan.api_version, unseen.number, unseen.in_flight) == (NONE, NONE, NONE, 1)
    assert (unseen.request_bytes, unseen.request_start, unseen.response_bytes) == (NONE, NONE, len(stray))


def test_requests_pending_at_the_end_are_reported_once() -> None:
    talk = Dialogue().client(request(12, 4, 1) + request(12, 4, 2)).broker(response(12, 4, 1))
    talk.close(CLIENT)
    assert not talk.unanswered  # half-closed: the broker may still answer
    talk.broker(response(12, 4, 2)[:6])
    talk.close(BROKER).close(BROKER).close(CLIENT)
    assert [(event.cause, event.exchange.correlation_id) for event in talk.unanswered] == [("client_closed", 2)]
    assert isinstance(talk.events[-1], Closed) and talk.events[-1].first == CLIENT


# --- versions --------------------------------------------------------------------------------------------------------


def test_kproxy_answers_a_newer_api_versions_with_v0_error_35_after_all_older_responses() -> None:
    newer = foreign_request(API_VERSIONS, 99, 8, b"\0\1c\0junk")
    talk = rewriting().client(request(12, 4, 7) + newer + request(12, 4, 9))
    assert talk.sent[CLIENT] == b""
    assert newer not in talk.sent[BROKER] and talk.sent[BROKER] == request(12, 4, 7) + request(12, 4, 9)
    talk.broker(response(12, 4, 7))
    head, own = talk.sent[CLIENT][: len(response(12, 4, 7))], talk.sent[CLIENT][len(response(12, 4, 7)) :]
    assert head == response(12, 4, 7)
    assert own == response(
        API_VERSIONS, 0, 8, {"errorCode": 35, "apiKeys": [{"apiKey": 18, "minVersion": 0, "maxVersion": 5}]}
    )
    talk.broker(response(12, 4, 9))
    assert [exchange.correlation_id for exchange in talk.exchanges] == [7, 8, 9]
    assert [e.outcome for e in talk.exchanges] == [ANSWERED, ANSWERED_BY_PROXY, ANSWERED]
    own_answer = talk.exchanges[1]
    assert (own_answer.errors, own_answer.queue_ns) == ((35,), own_answer.response_start - own_answer.request_end)
    alone = rewriting().client(newer, range(1, len(newer)))
    assert alone.sent == {CLIENT: own, BROKER: b""}


def test_a_broker_that_refuses_an_api_versions_answers_in_the_v0_layout() -> None:
    refusal = response(API_VERSIONS, 0, 1, {"errorCode": 35, "apiKeys": [{"apiKey": 18, "maxVersion": 3}]})
    for talk in (rewriting(), Dialogue(TRANSPARENT)):
        talk.client(request(API_VERSIONS, 4, 1)).broker(refusal)
        assert talk.sent[CLIENT] == refusal
        assert [(e.error_code, e.decoded) for e in talk.exchanges] == [(35, "full")]
        assert not talk.faults


@pytest.mark.parametrize("layout", [0, 5])
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_a_brokers_refusal_of_a_newer_api_versions_is_read_in_both_layouts(layout: int, piece: int) -> None:
    refusal = response(API_VERSIONS, layout, 1, {"errorCode": 35, "apiKeys": [{"apiKey": 18, "maxVersion": 4}]})
    accepted = response(API_VERSIONS, layout, 2, {"errorCode": 0})
    huge = sized((3).to_bytes(4) + (35).to_bytes(2) + b"\1" * 70_000)
    for talk in (Dialogue(TRANSPARENT), captured()):
        for number in (1, 2, 3):
            talk.client(foreign_request(API_VERSIONS, 99, number, b"\0\1c\0junk"))
        for answer in (refusal, accepted, huge):
            talk.broker(answer, range(piece, min(len(answer), 500), piece))
        assert [(exchange.error_code, exchange.errors, exchange.decoded) for exchange in talk.exchanges] == [
            (35, (35,), "full"),
            (None, (), OPAQUE),
            (None, (), OPAQUE),
        ]
        assert not talk.faults


def test_a_broker_may_refuse_an_api_versions_in_the_requested_version() -> None:
    """librdkafka's mock broker does, with an array count in another layout, and its client accepts that."""
    mock = bytes.fromhex("00000011 00000001 0023 01 00120000 00 0200000000")
    refusals = (mock, *(response(API_VERSIONS, version, 1, {"errorCode": 35}) for version in (1, 2, 3, 4)))
    for refusal, version in zip(refusals, (3, 1, 2, 3, 4), strict=True):
        for talk in (rewriting(), Dialogue(TRANSPARENT), Dialogue(TRANSPARENT, CapturedSession)):
            talk.client(request(API_VERSIONS, version, 1)).broker(refusal).client(request(12, 4, 2))
            assert talk.sent[CLIENT] == refusal
            assert [(e.error_code, e.decoded) for e in talk.exchanges] == [(35, "full")]
            assert not talk.faults


def test_the_cluster_and_node_id_that_a_client_expects_pass_and_so_does_the_refusal() -> None:
    """KIP-1242: cluster id and node id stay the cluster's own, so both may be checked end to end."""
    ask = request(API_VERSIONS, 5, 1, {"clientSoftwareName": "n", "clusterId": "another cluster", "nodeId": 7})
    refusal = response(API_VERSIONS, 5, 1, {"errorCode": 129})
    talk = rewriting().client(ask).broker(refusal)
    assert talk.sent == {BROKER: ask, CLIENT: refusal} and not talk.faults
    assert [(e.error_code, e.decoded) for e in talk.exchanges] == [(129, "full")]


@pytest.mark.parametrize("key", [0, 1, 3, 10, 60, 78, 79])
def test_an_unreadable_version_of_an_api_with_addresses_ends_a_rewriting_session(key: int) -> None:
    ask = foreign_request(key, 99, 1, b"\0\1c")
    strict = rewriting().client(ask)
    assert [(fault.kind, fault.fatal) for fault in strict.faults] == [("unreadable_carrier", True)]
    assert strict.sent[BROKER] == b""
    assert "upgrade kproxy" in strict.faults[0].text
    assert Dialogue().client(ask).sent[BROKER] == ask
    (fault,) = (
        rewriting().client(foreign_request(key, -1, 1, b"\0\1c")).faults
    )  # no release of kproxy will read a negative version
    assert "v-1 does not exist" in fault.text and "upgrade" not in fault.text


def test_the_transform_gets_a_held_response_whole_and_its_result_is_sent() -> None:
    seen: list[tuple[str, bytes]] = []

    def shout(exchange: Exchange, frame: memoryview) -> bytes:
        seen.append((exchange.plan.api, bytes(frame)))
        return b"REWRITTEN"

    brokers = {"brokers": [{"nodeId": 1, "host": "b", "port": 9092, "rack": None}]}
    reply, plain = response(METADATA, 12, 1, brokers), response(12, 4, 2)
    for cuts in ([], [8], range(1, len(reply) + len(plain))):
        seen.clear()
        talk = Dialogue(REWRITE, transform=shout).client(request(METADATA, 12, 1) + request(12, 4, 2))
        talk.broker(reply + plain, cuts)
        assert talk.sent[CLIENT] == b"REWRITTEN" + plain
        assert seen == [("Metadata", reply)]
        assert talk.exchanges[0].response_bytes == len(reply)


def test_a_held_response_that_does_not_decode_is_never_forwarded() -> None:
    reply = response(METADATA, 12, 1, {"brokers": [{"nodeId": 1, "host": "b", "port": 9092, "rack": None}]})
    broken = sized(reply[4:-9])
    for cuts in ([], [9, 15]):
        talk = rewriting().client(request(METADATA, 12, 1)).broker(broken, cuts)
        assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("malformed_answer", True)]
        assert talk.sent[CLIENT] == b""
        assert [event.cause for event in talk.unanswered] == ["desync"]
    lenient = Dialogue().client(request(METADATA, 12, 1)).broker(broken)
    assert lenient.sent[CLIENT] == broken
    assert [(fault.kind, fault.fatal) for fault in lenient.faults] == [("malformed_answer", False)]


def test_a_transform_that_raises_is_a_fatal_fault() -> None:
    def refuse(exchange: Exchange, frame: memoryview) -> bytes:
        raise Malformed("no address can be given")

    reply = response(METADATA, 12, 1, {"brokers": [{"nodeId": 1, "host": "b", "port": 9092, "rack": None}]})
    talk = Dialogue(REWRITE, transform=refuse).client(request(METADATA, 12, 1)).broker(reply)
    assert talk.faults[0].fatal and talk.sent[CLIENT] == b""


# --- other protocols -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head,kind",
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00", "tls"),
        (b"\x15\x03\x03\x00\x02\x02\x28\x15\x03\x03\x00\x02", "tls"),
        (b"GET / HTTP/1.1\r\n", "http"),
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n", "proxy_protocol"),
        (b"\r\n\r\n\0\r\nQUIT\n", "proxy_protocol"),
        (b"PROXIED request", "size"),
        (b"\xff\xff\xff\xff........", "size"),
        (b"\x7f\xff\xff\xff........", "size"),
        (b"\0\0\0\x07........", "size"),
    ],
)
def test_other_protocols_are_named(head: bytes, kind: str) -> None:
    strict = rewriting().client(head)
    assert [(fault.kind, fault.fatal, fault.side) for fault in strict.faults] == [(kind, True, CLIENT)]
    assert strict.sent[BROKER] == b""
    blind = Dialogue().client(head).broker(b"anything").client(b"more")
    assert [(fault.kind, fault.fatal) for fault in blind.faults] == [(kind, False)]
    assert blind.sent == {BROKER: head + b"more", CLIENT: b"anything"}


def test_a_response_may_have_any_size() -> None:
    """Brokers limit the size of requests but not of responses, which are streamed."""
    head = (2**31 - 1).to_bytes(4, "big") + (1).to_bytes(4, "big")
    talk = rewriting().client(request(FETCH, 12, 1)).broker(head + bytes(100))
    assert talk.sent[CLIENT] == head + bytes(100) and not talk.faults
    assert talk.session.missing(BROKER) == 2**31 - 1 + 4 - 108
    talk.broker(bytes(50)).close(BROKER)
    assert [event.cause for event in talk.unanswered] == ["broker_closed"]


@pytest.mark.parametrize("settings", [{}, {"interest": Interest(detail=BATCHES, details=True)}])
@pytest.mark.parametrize("side", [CLIENT, BROKER])
def test_missing_counts_the_rest_of_a_frame_at_every_byte(side: int, settings: dict[str, Any]) -> None:
    """A drain waits for the rest of a frame or of its header, and for nothing between two frames."""
    requests = [request(3, 12, 1, {"topics": []}), request(1, 12, 2, {"rackId": "r" * 40}), request(12, 4, 3)]
    answers = [response(3, 12, 1, {"clusterId": "c" * 40}), response(1, 12, 2), response(12, 4, 3)]
    talk = Dialogue(**settings)
    if side == BROKER:
        talk.client(b"".join(requests))
    for frame in (requests, answers)[side]:
        head = (frames.REQUEST_HEAD_BYTES, frames.RESPONSE_HEAD_BYTES)[side]
        for at in range(len(frame)):
            missing = 0 if not at else (head if at < head else len(frame)) - at
            assert (talk.session.missing(side), talk.session.at_boundary(side)) == (missing, not at)
            assert talk.session.missing(1 - side) == 0 and talk.session.at_boundary(1 - side)
            talk.says(side, frame[at : at + 1])
    assert talk.session.missing(side) == 0 and talk.session.at_boundary(side)


def test_a_side_with_a_backlog_is_not_at_a_boundary() -> None:
    """Requests that wait for a free pending slot still have to be sent."""
    talk = Session(REWRITE, transform=untouched, max_in_flight=2)
    asked = [request(12, 4, number) for number in range(3)]
    talk.receive(CLIENT, memoryview(bytearray(b"".join(asked))), 1)
    assert talk.backlog[CLIENT] is not None and not talk.at_boundary(CLIENT) and talk.at_boundary(BROKER)
    talk.receive(BROKER, memoryview(bytearray(response(12, 4, 0))), 2)
    talk.resume(CLIENT, 3)
    assert talk.backlog[CLIENT] is None and talk.at_boundary(CLIENT)


def test_the_broker_is_at_a_boundary_unless_it_owes_a_token() -> None:
    talk = handshake("SCRAM-SHA-256")
    for side, token in ((CLIENT, b"n,,n=a"), (BROKER, b"r=1"), (CLIENT, b"c=biws"), (BROKER, b"v=1")):
        talk.says(side, sized(token)[:5])
        assert not talk.session.at_boundary(side)
        talk.says(side, sized(token)[5:])
        assert talk.session.at_boundary(CLIENT) and talk.session.at_boundary(BROKER) == (side == BROKER)
    frames_follow(talk, 4)
    assert talk.session.at_boundary(CLIENT) and talk.session.at_boundary(BROKER)


# --- SASL ------------------------------------------------------------------------------------------------------------


def handshake(mechanism: str, **more: Any) -> Dialogue:
    ok = {"errorCode": 0, "mechanisms": [mechanism]}
    talk = rewriting(**more).client(request(API_VERSIONS, 0, 0)).broker(response(API_VERSIONS, 0, 0))
    return talk.client(request(HANDSHAKE, 0, 1, {"mechanism": mechanism})).broker(response(HANDSHAKE, 0, 1, ok))


def frames_follow(talk: Dialogue, tokens: int) -> None:
    talk.client(request(12, 4, 2)).broker(response(12, 4, 2))
    assert [exchange.correlation_id for exchange in talk.exchanges] == [0, 1, 2]
    assert talk.session.sasl_tokens == tokens and not talk.faults


PLAIN = sized(b"\0alice\0alice-secret")  # as a header: api key 97, version 27753


@pytest.mark.parametrize("step", [1, 5, 100])
@pytest.mark.parametrize(
    "mechanism,tokens",
    [
        ("PLAIN", [PLAIN, sized(b"")]),
        ("SCRAM-SHA-256", [sized(b"n,,n=a"), sized(b"r=1"), sized(b"c=biws"), sized(b"v=1")]),
        ("OAUTHBEARER", [sized(b"n,,\1auth=Bearer x\1\1"), sized(b"")]),
        ("OAUTHBEARER", [sized(b"n,,\1auth=Bearer x\1\1"), sized(b"{}"), sized(b"\1"), sized(b"")]),
        (
            "GSSAPI",
            [sized(b"\x60" + b"g" * 40), sized(b"r" * 30), sized(b""), sized(b"s" * 9), sized(b"t" * 20), sized(b"")],
        ),
    ],
)
def test_the_mechanism_decides_where_raw_tokens_end(mechanism: str, tokens: list[bytes], step: int) -> None:
    talk = handshake(mechanism)
    for index, token in enumerate(tokens):
        side = index % 2
        before = len(talk.sent[1 - side])
        talk.says(side, token, range(step, len(token), step))
        assert len(talk.sent[1 - side]) == before + len(token)  # forwarded at once and whole, even an empty token
    assert talk.sent[BROKER].endswith(b"".join(tokens[0::2])) and talk.sent[CLIENT].endswith(b"".join(tokens[1::2]))
    frames_follow(talk, len(tokens))
    assert talk.session.sasl_mechanism == mechanism


def test_a_token_sent_before_the_handshake_response_waits_for_it() -> None:
    talk = rewriting().client(request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"}) + PLAIN)
    assert not talk.sent[BROKER].endswith(PLAIN)
    talk.broker(response(HANDSHAKE, 0, 1, {"mechanisms": ["PLAIN"]}))
    assert talk.sent[BROKER].endswith(PLAIN)
    talk.broker(sized(b"")).client(request(12, 4, 2)).broker(response(12, 4, 2))
    assert [exchange.correlation_id for exchange in talk.exchanges] == [1, 2]


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_waiting_token_is_not_stuck_when_the_broker_sends_another_protocol(rewrites: bool) -> None:
    """From there a transparent session forwards unread and a rewriting one closes; neither keeps waiting."""
    talk = rewriting() if rewrites else Dialogue()
    talk.client(asks := request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"})).client(PLAIN)
    assert talk.session.holds_back
    talk.broker(b"\xff" * 16).client(b"more")
    assert not talk.session.holds_back
    assert talk.sent[BROKER] == (asks if rewrites else asks + PLAIN + b"more")


def test_after_a_refused_handshake_frames_follow() -> None:
    talk = rewriting().client(request(HANDSHAKE, 0, 1, {"mechanism": "NONE"}))
    talk.broker(response(HANDSHAKE, 0, 1, {"errorCode": 33, "mechanisms": ["PLAIN"]}))
    talk.client(request(HANDSHAKE, 0, 2, {"mechanism": "PLAIN"})).broker(response(HANDSHAKE, 0, 2)).client(PLAIN)
    assert [exchange.error_code for exchange in talk.exchanges] == [33, 0]
    assert talk.session.sasl_tokens == 1


def test_a_bare_gssapi_token_opens_a_connection() -> None:
    token = sized(b"\x60\x82\x02\x30" + b"g" * 60)
    talk = rewriting().client(token).broker(sized(b"r" * 20)).client(request(12, 4, 2)).broker(response(12, 4, 2))
    assert talk.sent[BROKER] == token + request(12, 4, 2)
    assert [exchange.correlation_id for exchange in talk.exchanges] == [2] and not talk.faults


def test_sasl_authenticate_and_re_authentication_are_ordinary_frames() -> None:
    talk = rewriting()
    for correlation_id in (1, 2**31 - 7):  # KIP-368: the Java client keeps the topmost ids for it
        talk.client(request(HANDSHAKE, 1, correlation_id, {"mechanism": "PLAIN"}))
        talk.broker(response(HANDSHAKE, 1, correlation_id, {"mechanisms": ["PLAIN"]}))
        talk.client(request(AUTHENTICATE, 2, correlation_id, {"authBytes": b"\0alice\0secret"}))
        talk.broker(response(AUTHENTICATE, 2, correlation_id, {"sessionLifetimeMs": 4000}))
    assert len(talk.exchanges) == 4 and not talk.faults
    assert talk.session.sasl_mechanism == "PLAIN" and talk.session.sasl_tokens == 0


def test_logins_and_api_versions_may_come_in_any_order_and_repeatedly() -> None:
    """ApiVersions, handshake, login, ApiVersions again, like the Java client; telemetry uses the same connection."""
    asked = [(API_VERSIONS, 3), (HANDSHAKE, 1), (AUTHENTICATE, 2), (API_VERSIONS, 3), (71, 0), (72, 0), (HANDSHAKE, 1)]
    talk = rewriting()
    expected = {CLIENT: b"", BROKER: b""}
    for number, (key, version) in enumerate(asked):
        ask, reply = request(key, version, number), response(key, version, number)
        talk.client(ask).broker(reply)
        expected[BROKER] += ask
        expected[CLIENT] += reply
    assert talk.sent == expected and not talk.faults
    assert [(e.plan.api_key, e.decoded) for e in talk.exchanges] == [(key, "full") for key, _ in asked]


# --- contents of bodies ----------------------------------------------------------------------------------------------


def produce(version: int, number: int, records: bytes, acks: int = -1, partitions: int = 2) -> bytes:
    data = [{"index": index, "records": records} for index in range(partitions)]
    return request(
        PRODUCE,
        version,
        number,
        {"acks": acks, "topicData": [{"name": "t", "topicId": UUID(int=1), "partitionData": data}]},
    )


def contents(body: Found | None) -> Any:
    if body is None:
        return None
    return [*body.sums], [*body.partitions], [*body.batches], dict(body.names)


@pytest.mark.parametrize("detail", [SUMS, TOPICS, BATCHES])
@pytest.mark.parametrize("most", [1, 13, 700, 40_000])
def test_any_split_gives_the_same_topic_partitions(detail: int, most: int) -> None:
    small, large = write_batch([Record(0, 1, None, b"v" * 50)]), write_batch([Record(0, 1, None, b"v" * 100_000)])
    if most == 1:
        large = small
    fetched = [
        {"topic": "t", "topicId": UUID(int=1), "partitions": [{"partitionIndex": 0, "errorCode": 3, "records": each}]}
        for each in (small * 3 + small[:70], large + small)
    ]
    topics = {"topics": [{"name": "t", "topicId": UUID(int=1), "partitions": [{"partitionIndex": 0}]}]}
    talks = []
    for cut in (False, True):
        random_ = random.Random(most)
        talk = Dialogue(Interest(details=detail > SUMS, detail=detail, rewrite=detail == TOPICS), transform=untouched)
        for side, data in (
            (
                CLIENT,
                produce(9, 0, small) + produce(13, 1, large) + produce(9, 2, small, acks=0) + request(METADATA, 12, 3),
            ),
            (BROKER, response(PRODUCE, 9, 0) + response(PRODUCE, 13, 1) + response(METADATA, 12, 3, topics)),
            (CLIENT, request(FETCH, 12, 4) + request(FETCH, 16, 5)),
            (BROKER, response(FETCH, 12, 4, {"responses": fetched}) + response(FETCH, 16, 5, {"responses": fetched})),
        ):
            cuts, at = [], 0
            while cut and (at := at + random_.randint(1, most)) < len(data):
                cuts.append(at)
            talk.says(side, data, cuts)
        assert not talk.faults
        talks.append([(contents(e.request_body), contents(e.response_body), *facts_of(e)) for e in talk.exchanges])
    assert talks[0] == talks[1] and len(talks[0]) == 6
    bodies = [body for exchange in talks[0] for body in exchange[:2] if body is not None]
    assert sum(len(body[0]) + len(body[1]) for body in bodies) >= 10
    assert any(body[3] == {UUID(int=1): "t"} for body in bodies)


def test_an_impossible_topic_name_ends_the_reading_and_not_the_connection() -> None:
    named = {"topics": [{"name": "n" * 40_000, "topicId": UUID(int=1)}]}
    answer = response(METADATA, 12, 1, {**named, "brokers": [{"nodeId": 1, "host": "h", "port": 9}]})
    for cuts in ((), (100,)):
        talk = Dialogue(Interest(rewrite=True, detail=TOPICS), transform=untouched)
        talk.client(request(METADATA, 12, 1)).broker(answer, cuts)
        assert [e.response_body for e in talk.exchanges] == [None] and talk.sent[CLIENT] == answer
        assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("malformed_answer", False)]


def test_the_errors_of_a_large_response_are_reported_without_keeping_it() -> None:
    partitions = [{"partitionIndex": index, "errorCode": 3 * (index % 2)} for index in range(20_000)]
    answer = response(8, 8, 1, {"topics": [{"name": "t", "partitions": partitions}]})
    talk = rewriting().client(request(8, 8, 1))
    talk.broker(answer, range(50_000, len(answer), 1_000))
    (exchange,) = talk.exchanges
    assert exchange.errors == (3,) * 10_000 and exchange.decoded == "full" and talk.sent[CLIENT] == answer


def test_partitions_named_by_pending_requests_are_bounded_and_the_excess_is_a_fault() -> None:
    ask = produce(9, 1, b"", partitions=MAX_NAMED // 4)
    assert len(ask) > 64 * 1024
    for cuts in ((), (70_000,)):
        talk = Dialogue(Interest(details=True, detail=TOPICS))
        for _ in range(6):
            talk.client(ask, cuts)
        kept = [len(each.request_body.partitions) for each in talk.session.pending if each.request_body is not None]
        assert sum(kept) == MAX_NAMED and [fault.kind for fault in talk.faults] == ["too_much_named"] * 2
        talk.broker(response(PRODUCE, 9, 1) * 6)
        assert len(talk.exchanges) == 6 and talk.sent[BROKER] == ask * 6
        assert not talk.client(ask, cuts).session.events and len(talk.faults) == 2  # below the limit again


def test_partitions_of_a_body_beyond_the_limit_are_dropped_with_a_fault() -> None:
    ask = produce(9, 1, b"", partitions=MAX_NAMED + 5)
    talk = Dialogue(Interest(details=True, detail=TOPICS)).client(ask, range(100_000, len(ask), 100_000))
    (exchange,) = talk.session.pending
    assert exchange.request_body is not None and len(exchange.request_body.partitions) == MAX_NAMED
    assert "5 more than" in talk.faults[0].text


# --- any split, any bytes --------------------------------------------------------------------------------------------


def facts(talk: Dialogue) -> list[Any]:
    found: list[Any] = []
    for event in talk.events:
        if isinstance(event, Exchange | Unanswered):
            e = event.exchange if isinstance(event, Unanswered) else event
            found += facts_of(e)
        elif isinstance(event, Desync):
            found.append((event.kind, event.fatal, event.side, event.offset))
    return found


def facts_of(e: Exchange) -> list[Any]:
    return [
        (e.plan.api, e.api_version, e.correlation_id, e.number, e.outcome, e.client_id, e.acks, e.max_wait_ms),
        (e.request_bytes, e.response_bytes, e.throttle_ms, e.error_code, e.errors, e.decoded, e.group_id),
    ]


def conversation() -> list[tuple[int, bytes]]:
    brokers = {"brokers": [{"nodeId": n, "host": f"h{n}", "port": 9092, "rack": "r"} for n in range(3)]}
    return [
        (CLIENT, request(API_VERSIONS, 3, 0, {"clientSoftwareName": "t", "clientSoftwareVersion": "1"})),
        (
            CLIENT,
            request(METADATA, 12, 1) + request(PRODUCE, 9, 2, {"acks": 0}) + request(PRODUCE, 13, 3, {"acks": -1}),
        ),
        (BROKER, response(API_VERSIONS, 3, 0) + response(METADATA, 12, 1, brokers)),
        (CLIENT, foreign_request(API_VERSIONS, 40, 4, b"\0\0")),
        (BROKER, response(PRODUCE, 13, 3, {"throttleTimeMs": 9})),
        (CLIENT, request(FETCH, 16, 5, {"maxWaitMs": 500}) + foreign_request(999, 9, 6, b"xyz" * 9)),
        (BROKER, response(FETCH, 16, 5, {"errorCode": 6}) + sized((6).to_bytes(4) + b"q" * 30)),
        (CLIENT, request(HANDSHAKE, 0, 7, {"mechanism": "PLAIN"})),
        (BROKER, response(HANDSHAKE, 0, 7, {"mechanisms": ["PLAIN"]})),
        (CLIENT, PLAIN),
        (BROKER, sized(b"")),
        (CLIENT, request(11, 9, 8, {"groupId": "g"})),
        (BROKER, response(11, 9, 8, {"errorCode": 25})),
    ]


@given(seed=st.integers(0, 2**32), most=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_any_split_of_the_bytes_gives_the_same_bytes_and_events(seed: int, most: int) -> None:
    whole, pieces = rewriting(), rewriting()
    random_ = random.Random(seed)
    for side, data in conversation():
        whole.says(side, data)
        cuts, at = [], 0
        while (at := at + random_.randint(1, most)) < len(data):
            cuts.append(at)
        pieces.says(side, data, cuts)
    assert whole.sent == pieces.sent
    assert facts(whole) == facts(pieces)
    assert len(whole.exchanges) == 9 and not whole.faults


def patching(exchange: Exchange, frame: memoryview) -> bytes | None:
    """Rewrite addresses like kproxy, but to the same length."""
    return bytes(frame).replace(b"upstream", b"instead!") if b"upstream" in bytes(frame) else None


@pytest.mark.parametrize("key, version", [(PRODUCE, 10), (PRODUCE, 13), (SHARE_ACKNOWLEDGE, 1)])
@given(
    named=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    wants=st.builds(
        partial(Interest, rewrite=True),
        details=st.booleans(),
        detail=st.sampled_from([ERRORS, SUMS, TOPICS, BATCHES]),
        brokers=st.booleans(),
        names=st.booleans(),
    ),
    cuts=st.sets(st.integers(1, 900), max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_every_address_is_rewritten_in_responses_that_rarely_have_one(
    key: int, version: int, named: list[int], wants: Interest, cuts: set[int]
) -> None:
    """Hints of a new leader (KIP-951) come at the end of responses that otherwise pass after one scan."""
    answers = b""
    for index, count in enumerate(named):
        nodes = [{"nodeId": node, "host": f"upstream-{node}", "port": 9092} for node in range(count)]
        unknown = {"_tags": {9: b"x" * index}} if index % 2 else {}
        answers += response(key, version, index, {"nodeEndpoints": nodes, "throttleTimeMs": index} | unknown)
    talk = Dialogue(wants, transform=patching)
    asks = {"acks": -1} if key == PRODUCE else {}
    talk.says(CLIENT, b"".join(request(key, version, index, asks) for index in range(len(named))))
    talk.says(BROKER, answers, sorted(cut for cut in cuts if cut < len(answers)))
    assert talk.sent[CLIENT] == answers.replace(b"upstream", b"instead!")
    assert [e.throttle_ms for e in talk.exchanges] == list(range(len(named))) and not talk.faults


FAULTS = [
    (CLIENT, b"\xff" * 16),
    (CLIENT, sized(request(PRODUCE, 9, 71, {"acks": 1})[4:16])),
    (CLIENT, request(PRODUCE, 9, 72, {"acks": 1, "topicData": [{"name": "t" * 90_000}]})[:-9] + b"\xff" * 9),
    (CLIENT, foreign_request(METADATA, 99, 73)),
    (BROKER, response(12, 4, 70)),
    (BROKER, b"\xff" * 16),
    (BROKER, sized((9).to_bytes(4) + b"\xff" * 30)),
]


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from(FAULTS), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_split_reports_a_fault_at_the_offset_of_its_frame(
    seed: int, most: int, fault: tuple[int, bytes], rewrites: bool
) -> None:
    random_ = random.Random(seed)
    steps = conversation()
    steps.insert(random_.randrange(len(steps) + 1), fault)
    whole, pieces = (rewriting() if rewrites else Dialogue(TRANSPARENT) for _ in range(2))
    for side, data in steps:
        whole.says(side, data)
        cuts, at = [], 0
        while (at := at + random_.randint(1, most if len(data) < 9000 else 9000)) < len(data):
            cuts.append(at)
        pieces.says(side, data, cuts)
    if rewrites and any(each.kind == "malformed_request" and each.fatal for each in whole.faults):
        assert pieces.sent[BROKER].startswith(whole.sent[BROKER])  # the bytes before the fault are already sent
    else:
        assert whole.sent == pieces.sent
    assert facts(whole) == facts(pieces)


def test_the_offset_of_a_fault_is_that_of_its_frame() -> None:
    ask, reply = request(12, 4, 1), response(12, 4, 1)
    talk = rewriting().client(ask).client(ask + ask + b"\xff" * 16)
    assert [(fault.kind, fault.offset) for fault in talk.faults] == [("size", 3 * len(ask))]
    talk = rewriting().client(ask + ask).broker(reply).broker(reply[:9]).broker(reply[9:] + response(12, 4, 99))
    assert [(fault.kind, fault.offset) for fault in talk.faults] == [("unexpected_answer", 2 * len(reply))]


@given(st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=80)), max_size=12), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_no_input_raises(chunks: list[tuple[int, bytes]], kind: int) -> None:
    talk = [rewriting, Dialogue, captured, lambda: captured(midstream=True)][kind]()
    for index, (side, data) in enumerate(chunks):
        talk.says(side, data)
        if kind >= 2 and index % 4 == 3:
            talk.gap(side, 5)
    talk.close(CLIENT).close(BROKER)
    assert not talk.session.pending


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_flipped_bits_raise_nothing_and_every_request_gets_one_event(seed: int) -> None:
    """Every recorded request appears in exactly one event."""
    random_ = random.Random(seed)
    for talk in (rewriting(), Dialogue(TRANSPARENT), captured()):
        for side, data in conversation():
            broken = bytearray(data)
            if random_.random() < 0.4:
                broken[random_.randrange(len(broken))] ^= 1 << random_.randrange(8)
            talk.says(side, bytes(broken))
        talk.close(BROKER).close(CLIENT)
        assert not talk.session.pending and isinstance(talk.events[-1], Closed)
        numbers = [e.number for e in talk.exchanges if e.number != NONE] + [u.exchange.number for u in talk.unanswered]
        assert sorted(numbers) == list(range(talk.session._number))


@pytest.mark.parametrize("kind", [Session, CapturedSession])
def test_a_clock_that_goes_back_gives_a_queue_time_of_0(kind: type[Session]) -> None:
    """For example between packets of a capture: the second response is older than its request."""
    talk = Dialogue(Interest(), kind)
    for side, data, now in (
        (CLIENT, request(12, 4, 1), 10),
        (CLIENT, request(12, 4, 2), 20),
        (BROKER, response(12, 4, 1), 30),
        (BROKER, response(12, 4, 2), 15),
    ):
        talk.session.receive(side, memoryview(data), now)
    assert [exchange.queue_ns for exchange in talk.session.events if isinstance(exchange, Exchange)] == [0, 0]


def test_bytes_in_the_backlog_at_the_end_count_as_received() -> None:
    """More frames arrive than one call handles."""
    session = Session(Interest())
    asked = b"".join(request(12, 4, number) for number in range(100))
    session.receive(CLIENT, memoryview(asked), MS)
    waiting = session.backlog[CLIENT]
    assert waiting is not None and session.received_bytes == (len(asked) - len(waiting), 0)
    for side in (CLIENT, BROKER):
        session.close(side, 2 * MS)
    (closed,) = (event for event in session.events if isinstance(event, Closed))
    assert closed.received_bytes == (len(asked), 0)

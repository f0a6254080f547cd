"""Requests decided before they are forwarded: passed, replaced, answered or refused, in order, at any split."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol.apis import HEARTBEAT, LIST_GROUPS, METADATA, PRODUCE, SASL_HANDSHAKE
from kproxy.wire.decisions.authorizer import (
    HOLD,
    MAX_HELD_REQUEST,
    Answer,
    Close,
    Decision,
    Hold,
    Later,
    Replace,
    answered,
)
from kproxy.wire.events import ANSWERED, ANSWERED_BY_PROXY, BROKER, CLIENT, Exchange
from kproxy.wire.interest import HeldBudget, Interest
from tests.wire.playbook import Dialogue, foreign_request, request, response

DENIED = 29


class Scripted:
    """Decides by correlation id alone."""

    def __init__(self, **decisions: Any) -> None:
        self.decisions = {int(name[1:]): decision for name, decision in decisions.items()}
        self.by_header: set[int] = set()  # ids that are forwarded without being held
        self.frames: list[bytes] = []
        self.too_large_ids: list[int] = []
        self.held: Interest | None = None  # if set, responses are edited too
        self.edited: list[bytes] = []
        self.edits: bytes | ProtocolError | None = None
        self.slow: set[int] = set()  # ids whose decision and edit take several slices
        self.slices = 3

    def _in_slices(self, what: Any, begun: memoryview) -> Iterator[None]:
        for _ in range(self.slices):
            yield
        if isinstance(what, ProtocolError):
            raise what
        return what

    def at_header(self, exchange: Exchange) -> Hold | Close | None:
        return None if exchange.correlation_id in self.by_header else HOLD

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        self.frames.append(bytes(frame))
        if self.held is not None:
            exchange.plan = self.held.held_plan(exchange.plan)
        decision = self.decisions.get(exchange.correlation_id)
        if exchange.correlation_id in self.slow:
            return Later(partial(self._in_slices, decision))
        return decision

    def edit(self, exchange: Exchange, frame: Any) -> bytes | Later | None:
        self.edited.append(bytes(frame))
        if exchange.correlation_id in self.slow:
            return Later(partial(self._in_slices, self.edits))
        if isinstance(self.edits, ProtocolError):
            raise self.edits
        return self.edits

    def too_large(self, exchange: Exchange) -> None:
        self.too_large_ids.append(exchange.correlation_id)


def interest(*keys: int, **settings: Any) -> Interest:
    return Interest(rewrite=True, authorizes=lambda key, version: key in keys, **settings)


def answer(correlation_id: int) -> Answer:
    return Answer(response(HEARTBEAT, 4, correlation_id, {"errorCode": DENIED}), (DENIED,))


def heartbeat(correlation_id: int, group: str = "g") -> bytes:
    return request(HEARTBEAT, 4, correlation_id, {"groupId": group})


_KINDS = ("pass", "forward", "header", "replace", "answer")


@given(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=12), st.data())
def test_decided_requests_are_forwarded_in_order_at_any_split(kinds, data):
    authorizer = Scripted()
    authorizer.slow = data.draw(st.sets(st.integers(0, len(kinds) - 1)), "decided in slices")
    sent, to_broker, to_client = b"", b"", []
    for number, kind in enumerate(kinds):
        frame = request(LIST_GROUPS, 4, number, {}) if kind == "pass" else heartbeat(number, "g" * (1 + 13 * number))
        sent += frame
        if kind == "header":
            authorizer.by_header.add(number)
        if kind == "replace":
            frame = heartbeat(number, "replaced")
            authorizer.decisions[number] = Replace(frame)
        if kind == "answer":
            authorizer.decisions[number] = answer(number)
            to_client.append(answer(number).frame)
        else:
            to_broker += frame
            key = LIST_GROUPS if kind == "pass" else HEARTBEAT
            to_client.append(response(key, 4, number, {"throttleTimeMs": number}))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=8), "cuts"))
    talk = Dialogue(interest(HEARTBEAT), authorizer=authorizer)
    talk.client(sent, cuts)
    assert talk.sent[BROKER] == to_broker
    first = len(to_client) - next((at for at, kind in enumerate(kinds) if kind != "answer"), len(kinds))
    assert talk.sent[CLIENT] == b"".join(
        to_client[: len(to_client) - first]
    )  # only responses without an older pending one
    of_broker = b"".join(frame for frame, kind in zip(to_client, kinds, strict=True) if kind != "answer")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(of_broker) - 1, 1)), max_size=8), "cuts of answers"))
    if of_broker:
        talk.broker(of_broker, [cut for cut in cuts if cut < len(of_broker)])
    assert talk.sent[CLIENT] == b"".join(to_client)
    assert [exchange.outcome for exchange in talk.exchanges] == [
        ANSWERED_BY_PROXY if kind == "answer" else ANSWERED for kind in kinds
    ]
    assert [exchange.errors for exchange in talk.exchanges if exchange.outcome == ANSWERED_BY_PROXY] == [
        (DENIED,)
    ] * kinds.count("answer")
    assert not talk.faults
    assert talk.session._interest.held._held_bytes == 0
    assert talk.session.completed == [len(kinds), len(kinds) - kinds.count("answer")]


def test_no_byte_of_an_undecided_request_is_forwarded():
    authorizer = Scripted(_1=answer(1))
    talk = Dialogue(interest(HEARTBEAT), authorizer=authorizer)
    frame = heartbeat(1)
    talk.client(frame[:-1])
    assert talk.sent == {CLIENT: b"", BROKER: b""}
    assert talk.session.states[CLIENT] == "framed, undecided"
    assert talk.session.missing(CLIENT) == 1 and not talk.session.at_boundary(CLIENT)
    talk.client(frame[-1:])
    assert talk.sent == {CLIENT: answer(1).frame, BROKER: b""}
    assert authorizer.frames == [frame]
    assert talk.session.at_boundary(CLIENT)


def test_a_request_that_repeats_the_one_before_is_decided_again():
    authorizer = Scripted(_2=answer(2))
    talk = Dialogue(interest(HEARTBEAT, details=True), authorizer=authorizer)
    talk.client(heartbeat(1) + heartbeat(2) + heartbeat(3))
    assert talk.sent[BROKER] == heartbeat(1) + heartbeat(3)
    assert len(authorizer.frames) == 3


def test_a_request_that_cannot_be_held_closes_the_connection():
    authorizer = Scripted()
    talk = Dialogue(interest(PRODUCE), authorizer=authorizer)
    size = (MAX_HELD_REQUEST + 1).to_bytes(4, "big")
    talk.client(size + heartbeat(1)[4:6].replace(b"\0\x0c", b"\0\0") + b"\0\x09\0\0\0\7" + b"x" * 100)
    (fault,) = talk.faults
    assert fault.fatal and fault.kind == "held_too_large" and "send less at a time" in fault.text
    assert authorizer.too_large_ids == [7]
    assert talk.sent == {CLIENT: b"", BROKER: b""}

    authorizer = Scripted()
    talk = Dialogue(interest(HEARTBEAT, held=HeldBudget(100)), authorizer=authorizer)
    frame = heartbeat(5, "g" * 300)
    talk.client(frame, [60, 120])
    (fault,) = talk.faults
    assert fault.fatal and fault.kind == "held_too_many"
    assert authorizer.too_large_ids == [5]
    assert talk.session._interest.held._held_bytes == 0


def test_a_client_that_disconnects_within_a_request_releases_the_held_bytes():
    talk = Dialogue(interest(HEARTBEAT), authorizer=Scripted())
    talk.client(heartbeat(1)[:20])
    assert talk.session._interest.held._held_bytes == 20
    talk.close(CLIENT).close(BROKER)
    assert talk.session._interest.held._held_bytes == 0


def test_a_request_can_be_refused_by_closing_the_connection():
    talk = Dialogue(interest(HEARTBEAT), authorizer=Scripted(_2=Close("no")))
    talk.client(heartbeat(1) + heartbeat(2) + heartbeat(3), [30])
    (fault,) = talk.faults
    assert (fault.kind, fault.text, fault.fatal) == ("refused", "no", True)
    assert talk.sent[BROKER] == heartbeat(1)
    assert fault.offset == len(heartbeat(1))


def test_an_unknown_api_is_decided_too():
    talk = Dialogue(interest(9999), authorizer=Scripted(_1=Close("no")))
    talk.client(foreign_request(9999, 3, 1, b"abc"))
    assert talk.sent[BROKER] == b"" and talk.faults[0].kind == "refused"


@pytest.mark.parametrize("topics", [3, 9000])  # 9000: larger than any response that is kept for reading
@pytest.mark.parametrize("rewrites", [True, False])
def test_the_response_to_a_decided_request_can_be_edited_before_addresses_are_rewritten(topics, rewrites):
    of = Interest(rewrite=rewrites, authorizes=lambda key, version: key == METADATA)
    authorizer = Scripted()
    authorizer.held = of
    authorizer.edits = response(METADATA, 12, 1, {"brokers": [{"nodeId": 1, "host": "h", "port": 1}]})
    transformed = []

    def transform(exchange: Exchange, frame: memoryview) -> bytes:
        transformed.append(bytes(frame))
        return b"transformed"

    names = [{"name": f"topic-{number}", "partitions": []} for number in range(topics)]
    answer = response(METADATA, 12, 1, {"topics": names})
    for cuts in ([], [100], [len(answer) // 2, len(answer) - 1]):
        authorizer.edited.clear()
        talk = Dialogue(of, authorizer=authorizer, transform=transform if rewrites else None)
        talk.client(request(METADATA, 12, 1, {"topics": None})).broker(answer, cuts)
        assert authorizer.edited == [answer]
        assert talk.sent[CLIENT] == (b"transformed" if rewrites else authorizer.edits)
        assert transformed == [authorizer.edits] * rewrites
        transformed.clear()


def test_a_response_that_cannot_be_edited_is_not_forwarded():
    of = Interest(authorizes=lambda key, version: key == METADATA)  # even without rewriting
    authorizer = Scripted()
    authorizer.held = of
    authorizer.edits = Malformed("cut short")
    talk = Dialogue(of, authorizer=authorizer)
    talk.client(request(METADATA, 12, 1, {"topics": None})).broker(response(METADATA, 12, 1, {"topics": []}))
    assert talk.faults[0].fatal and talk.sent[CLIENT] == b""


def test_a_session_that_authorizes_never_forwards_unread():
    talk = Dialogue(Interest(authorizes=lambda key, version: key == HEARTBEAT), authorizer=Scripted())
    talk.client(b"GET / HTTP/1.1").client(heartbeat(1))
    assert talk.faults[0].fatal and talk.sent[BROKER] == b""


def test_logins_without_a_fixed_number_of_tokens_are_refused():
    """Otherwise a crafted request could pass as a token, undecided."""
    talk = Dialogue(interest(HEARTBEAT), authorizer=Scripted())
    talk.client(b"\0\0\0\x10" + b"\x60" + b"t" * 15)
    (fault,) = talk.faults
    assert fault.fatal and fault.kind == "sasl_token" and "SaslAuthenticate" in fault.text
    talk = Dialogue(interest(HEARTBEAT), authorizer=Scripted())
    talk.client(request(SASL_HANDSHAKE, 0, 1, {"mechanism": "GSSAPI"}))
    talk.broker(response(SASL_HANDSHAKE, 0, 1, {"errorCode": 0, "mechanisms": ["GSSAPI"]}))
    assert talk.faults[0].fatal


@pytest.mark.parametrize("code", [0, DENIED])
def test_kproxys_own_answer_has_the_frame_of_its_body_and_reports_its_error(code: int) -> None:
    pending = Dialogue().client(heartbeat(7)).session.pending
    found = answered(pending[0], {"errorCode": code, "throttleTimeMs": 3})
    assert found == Answer(response(HEARTBEAT, 4, 7, {"errorCode": code, "throttleTimeMs": 3}), (code,) if code else ())


def test_kproxys_own_answer_without_a_top_level_error_reports_none() -> None:
    """A Metadata response has errors per topic only, and other bodies may omit theirs."""
    for key, body in ((METADATA, {"brokers": []}), (HEARTBEAT, {})):
        exchange = Exchange(interest().plan(key << 16 | 4), 7, 0, 0, 20, 0)
        assert answered(exchange, body) == Answer(response(key, 4, 7, body), ())


def test_a_decision_costs_by_the_length_of_the_request_and_little_for_records() -> None:
    """Cost: four frames, plus one for each 256 bytes, or for each 4 KiB of a Produce."""
    records = [{"name": "t", "partitionData": [{"index": 0, "records": bytes(4096)}]}]
    asked = {
        PRODUCE: partial(request, PRODUCE, 9, body={"acks": -1, "topicData": records}),
        METADATA: partial(request, METADATA, 9, body={"topics": [{"name": "t" * 4096}]}),
    }
    calls = {}
    for key, ask in asked.items():
        talk = Dialogue(interest(key), authorizer=Scripted(), transform=lambda exchange, frame: None)
        talk.client(ask(0))
        talk.client(b"".join(map(ask, range(1, 45))))
        assert talk.session.completed[CLIENT] == 45 and not talk.faults
        calls[key] = 1 + talk.calls
    assert calls == {PRODUCE: 4, METADATA: 11}  # a budget of 64 frames per call

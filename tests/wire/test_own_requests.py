"""Requests of the owner between those of a client: in their place for the broker, not there for the client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.protocol.apis import METADATA
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from tests.wire.playbook import Dialogue, request, response

HANDSHAKE, AUTHENTICATE = 17, 36
MINE = request(AUTHENTICATE, 2, 9, {"authBytes": b"secret"}, client="kproxy")
ANSWER = response(AUTHENTICATE, 2, 9, {"authBytes": b"x" * 300, "sessionLifetimeMs": 3000})


def asked(talk: Dialogue) -> list[bytes]:
    """The owner asks; what it then gets."""
    got: list[bytes] = []
    talk._send(talk.session.ask(MINE, got.append, "kproxy", talk.now))
    return got


@pytest.mark.parametrize("rewrite", [False, True])
@given(st.data())
def test_the_client_sees_its_own_answers_and_nothing_else(rewrite: bool, data: st.DataObject) -> None:
    before, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    requests = [request(METADATA, 12, number, {"topics": []}) for number in range(before + behind)]
    answers = [response(METADATA, 12, number, {"clusterId": "c" * 100}) for number in range(before + behind)]
    talk = Dialogue(Interest(rewrite=rewrite), transform=(lambda exchange, frame: None) if rewrite else None)
    talk.client(b"".join(requests[:before]))
    got = asked(talk)
    talk.client(b"".join(requests[before:]))
    assert talk.sent[BROKER] == b"".join(requests[:before]) + MINE + b"".join(requests[before:])
    stream = b"".join(answers[:before]) + ANSWER + b"".join(answers[before:])
    chunks = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=5)))
    talk.broker(stream, chunks)
    assert got == [ANSWER]
    assert talk.sent[CLIENT] == b"".join(answers)
    assert not talk.faults and not talk.session.pending
    assert [exchange.plan.api for exchange in talk.exchanges].count("SaslAuthenticate") == 1
    assert [exchange.number for exchange in talk.exchanges] == list(range(before + behind + 1))
    mine = talk.exchanges[before]
    assert (mine.plan.api_key, mine.plan.api_version, mine.correlation_id) == (AUTHENTICATE, 2, 9)
    assert (mine.request_bytes, mine.response_bytes, mine.client_id) == (len(MINE), len(ANSWER), "kproxy")
    assert mine.request_start == mine.request_end and mine.in_flight == before
    talk.client(MINE)  # of a client: it passes, as does its answer
    talk.broker(ANSWER)
    assert talk.sent[CLIENT].endswith(ANSWER) and got == [ANSWER]


def test_an_answer_that_is_too_large_ends_the_connection() -> None:
    talk = Dialogue(Interest(rewrite=True), transform=lambda exchange, frame: None)
    got = asked(talk)
    talk.broker(response(AUTHENTICATE, 2, 9, {"authBytes": b"x" * 600_000}), [1000])
    assert not got and not talk.sent[CLIENT]
    assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("held_too_large", True)]


def test_nothing_is_asked_where_frames_have_ended() -> None:
    talk = Dialogue(Interest(rewrite=True), transform=lambda exchange, frame: None)
    talk.client(b"GET / HTTP/1.1\r\n\r\n")
    assert talk.session.ask(MINE, lambda frame: None, "kproxy", talk.now) == []
    raw = Dialogue()
    raw.client(request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"}))
    assert raw.session.ask(MINE, lambda frame: None, "kproxy", raw.now) == []
    seen = Dialogue().broker(b"\xff" * 16)  # the broker alone speaks no Kafka
    assert seen.session.ask(MINE, lambda frame: None, "kproxy", seen.now) == []


def test_an_end_of_the_broker_leaves_it_unanswered() -> None:
    talk = Dialogue()
    got = asked(talk)
    talk.close(BROKER)
    assert [event.exchange.plan.api for event in talk.unanswered] == ["SaslAuthenticate"] and not got

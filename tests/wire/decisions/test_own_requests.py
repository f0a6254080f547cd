"""The owner's requests between those of a client: visible to the broker in order, invisible to the client."""

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
    """Send the owner's request; return the list that collects its responses."""
    got: list[bytes] = []
    talk._send(talk.session.ask(MINE, got.append, "kproxy", talk.now))
    return got


@pytest.mark.parametrize("rewrite", [False, True])
@given(st.data())
def test_the_client_receives_only_responses_to_its_own_requests(rewrite: bool, data: st.DataObject) -> None:
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
    talk.client(MINE)  # sent by the client: it passes, and so does its response
    talk.broker(ANSWER)
    assert talk.sent[CLIENT].endswith(ANSWER) and got == [ANSWER]


def test_a_response_to_the_owner_that_is_too_large_ends_the_connection() -> None:
    talk = Dialogue(Interest(rewrite=True), transform=lambda exchange, frame: None)
    got = asked(talk)
    talk.broker(response(AUTHENTICATE, 2, 9, {"authBytes": b"x" * 600_000}), [1000])
    assert not got and not talk.sent[CLIENT]
    assert [(fault.kind, fault.fatal) for fault in talk.faults] == [("held_too_large", True)]


def test_no_request_is_sent_on_an_unframed_connection() -> None:
    talk = Dialogue(Interest(rewrite=True), transform=lambda exchange, frame: None)
    talk.client(b"GET / HTTP/1.1\r\n\r\n")
    assert talk.session.ask(MINE, lambda frame: None, "kproxy", talk.now) == []
    raw = Dialogue()
    raw.client(request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"}))
    assert raw.session.ask(MINE, lambda frame: None, "kproxy", raw.now) == []
    seen = Dialogue().broker(b"\xff" * 16)  # only the broker's side is not Kafka
    assert seen.session.ask(MINE, lambda frame: None, "kproxy", seen.now) == []


def test_the_request_stays_unanswered_if_the_broker_closes() -> None:
    talk = Dialogue()
    got = asked(talk)
    talk.close(BROKER)
    assert [event.exchange.plan.api for event in talk.unanswered] == ["SaslAuthenticate"] and not got

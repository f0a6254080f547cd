"""Responses edited in slices: later responses wait, and the edited response is read like any other."""

import pytest

from kproxy.errors import Malformed
from kproxy.protocol.apis import HEARTBEAT, METADATA
from kproxy.wire.bodies import TOPICS
from kproxy.wire.events import ANSWERED_BY_PROXY, BROKER, CLIENT
from kproxy.wire.interest import HeldBudget
from kproxy.wire.state import SMALL_BODY
from tests.wire.decisions.test_authorizer import Scripted, answer, heartbeat, interest
from tests.wire.playbook import Dialogue, request, response


def metadata(correlation_id, topics, host="secret-host"):
    body = {
        "brokers": [{"nodeId": 1, "host": host, "port": 9092}],
        "topics": [{"name": f"topic-{topic}", "partitions": []} for topic in range(topics)],
    }
    return response(METADATA, 9, correlation_id, body)


def rewritten(exchange, frame):
    """A transform that replaces the host by one of the same size."""
    return bytes(frame).replace(b"secret-host", b"public-host")


def editing(edited, **settings):
    authorizer = Scripted()
    authorizer.slow = {1}
    asked = interest(METADATA, HEARTBEAT, details=True, detail=TOPICS, brokers=True, **settings)
    authorizer.held = asked
    authorizer.edits = edited
    return Dialogue(asked, authorizer=authorizer, transform=rewritten), authorizer


@pytest.mark.parametrize("topics", [3, 20_000])
@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("cuts", [[], [30, 5000]])
def test_the_edited_response_is_read_and_rewritten_like_any_other(topics, changes, cuts):
    came = metadata(1, topics)
    left = metadata(1, topics - 1) if changes else came
    talk, authorizer = editing(left if changes else None)
    ask = request(METADATA, 9, 1, {"topics": None})
    talk.client(ask)
    calls = talk.calls
    behind = response(HEARTBEAT, 4, 2, {})
    authorizer.held = None
    talk.client(heartbeat(2))
    talk.broker(came + behind, [cut for cut in cuts if cut < len(came)])
    assert talk.sent[CLIENT] == left.replace(b"secret-host", b"public-host") + behind
    assert talk.calls - calls > (10 if len(left) > SMALL_BODY else 3)
    first, second = talk.exchanges
    assert first.response_bytes == len(came) and second.correlation_id == 2
    assert first.response_body.brokers == {("secret-host", 9092): 1}
    assert talk.session.completed == [2, 2] and not talk.faults
    assert talk.session._interest.held._held_bytes == 0 and talk.session.slow == (None, None)


def test_kproxys_own_later_answer_waits():
    talk, authorizer = editing(None)
    talk.client(request(METADATA, 9, 1, {"topics": None}))
    session = talk.session
    came = metadata(1, 20_000)
    assert session.receive(BROKER, memoryview(came), 1) == []
    assert session.states[BROKER] == "framed, editing" and not session.at_boundary(BROKER)
    authorizer.held = None
    authorizer.decisions[2] = answer(2)
    assert session.receive(CLIENT, memoryview(heartbeat(2)), 2) == []
    sent = b""
    while session.backlog[BROKER] is not None:
        sent += b"".join(bytes(piece) for _, piece in session.resume(BROKER, 3))
    assert sent == came.replace(b"secret-host", b"public-host") + answer(2).frame
    assert [event.outcome == ANSWERED_BY_PROXY for event in session.events] == [False, True]


@pytest.mark.parametrize("room", [1 << 20, 100_000])
def test_a_response_that_cannot_be_edited_or_held_is_not_forwarded(room):
    talk, _ = editing(Malformed("not so"), held=HeldBudget(room))
    talk.client(request(METADATA, 9, 1, {"topics": None}))
    talk.broker(metadata(1, 20_000))
    assert talk.sent[CLIENT] == b"" and talk.faults[0].fatal
    assert talk.faults[0].kind == ("malformed_answer" if room == 1 << 20 else "held_too_many")
    assert len(talk.unanswered) == 1
    assert talk.session._interest.held._held_bytes == 0


@pytest.mark.parametrize("calls", [1, 6, 9])
def test_a_connection_that_ends_during_an_edit_releases_held_bytes(calls):
    talk, _ = editing(None)
    talk.client(request(METADATA, 9, 1, {"topics": None}))
    talk.session.receive(BROKER, memoryview(metadata(1, 20_000)), 1)
    for _ in range(calls):
        talk.session.resume(BROKER, 2)
    assert talk.session._interest.held._held_bytes > 0
    talk.close(CLIENT).close(BROKER)
    assert talk.session._interest.held._held_bytes == 0 and talk.session.slow == (None, None)
    assert len(talk.unanswered) == 1 and talk.unanswered[0].exchange.correlation_id == 1

"""Requests decided in slices: the client's next bytes wait, the broker's side continues, held bytes are counted."""

import pytest

from kproxy.protocol.apis import HEARTBEAT, LIST_GROUPS, PRODUCE, SASL_AUTHENTICATE
from kproxy.wire.bodies import TOPICS
from kproxy.wire.decisions.authorizer import MAX_HELD_REQUEST, Close, Replace
from kproxy.wire.events import ANSWERED_BY_PROXY, BROKER, CLIENT
from kproxy.wire.interest import HELD_PATIENCE_NS, HeldBudget
from kproxy.wire.state import SMALL_BODY
from tests.wire.decisions.test_authorizer import Scripted, answer, heartbeat, interest
from tests.wire.playbook import Dialogue, request, response


def deciding(slices: int = 5, **settings):
    """A dialogue whose request 2 is decided in slices."""
    authorizer = Scripted()
    authorizer.slow.add(2)
    authorizer.slices = slices
    return Dialogue(interest(HEARTBEAT, PRODUCE, **settings), authorizer=authorizer), authorizer


@pytest.mark.parametrize("cut", [len(heartbeat(2)), 20])
def test_between_two_slices_responses_pass_and_no_further_request_is_read(cut):
    talk, authorizer = deciding()
    talk.client(request(LIST_GROUPS, 4, 1, {}))
    session, later = talk.session, heartbeat(2) + heartbeat(3)
    pieces = session.receive(CLIENT, memoryview(later[:cut]), 1)
    if session.backlog[CLIENT] is None:
        pieces += session.receive(CLIENT, memoryview(later[cut:]), 1)
    assert session.states[CLIENT] == "framed, deciding" and session.in_transit and not session.at_boundary(CLIENT)
    for turn in range(authorizer.slices):  # one slice per call
        assert not session.slow[CLIENT].is_done
        assert not pieces
        pieces = session.resume(CLIENT, 2)
        if turn == 2:
            got = session.receive(BROKER, memoryview(response(LIST_GROUPS, 4, 1, {})), 3)
            assert [side for side, _ in got] == [CLIENT]
    assert len(authorizer.frames) == 1  # the third is not read
    pieces += session.resume(CLIENT, 2)
    assert session.slow == (None, None) and session.states[CLIENT] != "framed, deciding"
    while session.backlog[CLIENT] is not None:
        pieces += session.resume(CLIENT, 2)
    if cut != 20:
        pieces += session.receive(CLIENT, memoryview(later[len(heartbeat(2)) :]), 1)
    assert b"".join(bytes(piece) for side, piece in pieces if side == BROKER) == later
    assert session._interest.held._held_bytes == 0


def test_the_owner_can_do_the_slices_itself():
    talk, authorizer = deciding()
    authorizer.decisions[2] = answer(2)
    session = talk.session
    assert session.receive(CLIENT, memoryview(heartbeat(2)), 1) == []
    work = session.slow[CLIENT]
    assert work.step() is False
    work.restart()  # from the beginning
    assert [work.step() for _ in range(authorizer.slices + 1)] == [False] * authorizer.slices + [True]
    ((side, piece),) = session.resume(CLIENT, 2)
    assert side == CLIENT and bytes(piece) == answer(2).frame
    (exchange,) = session.events
    assert exchange.outcome == ANSWERED_BY_PROXY


@pytest.mark.parametrize("ends", ["client", "broker", "refused"])
def test_a_connection_that_ends_during_a_decision_releases_held_bytes(ends):
    talk, authorizer = deciding()
    if ends == "refused":
        authorizer.decisions[2] = Close("no")
        talk.client(heartbeat(2))
        assert talk.faults[0].kind == "refused"
    else:
        talk.session.receive(CLIENT, memoryview(heartbeat(2)), 1)
        work = talk.session.slow[CLIENT]
        assert talk.session._interest.held._held_bytes == len(heartbeat(2))
        talk.close(BROKER).close(CLIENT)
        assert work.is_done
    assert talk.session._interest.held._held_bytes == 0 and talk.session.slow == (None, None)
    assert talk.sent[BROKER] == b""


def test_a_request_beyond_the_held_budget_is_refused():
    talk, authorizer = deciding(held=HeldBudget(10))
    talk.client(heartbeat(2))
    assert talk.faults[0].kind == "held_too_many" and authorizer.too_large_ids == [2]
    assert talk.session._interest.held._held_bytes == 0


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_the_topics_of_a_large_held_request_are_walked_in_slices(slow, replaced):
    """It arrives in parts and is held whole."""
    talk, authorizer = deciding(details=True, detail=TOPICS)
    number = 2 if slow else 4
    topics = [
        {"name": f"topic-{topic}", "partitionData": [{"index": 0, "records": b"r" * 10}]} for topic in range(20_000)
    ]
    frame = request(PRODUCE, 8, number, {"acks": 1, "topicData": topics})
    assert SMALL_BODY < len(frame) < MAX_HELD_REQUEST
    if replaced:
        authorizer.decisions[number] = Replace(frame[:-1] + b"x")
    calls = talk.calls
    talk.client(frame, [100_000])
    assert talk.calls - calls > 10  # other connections get turns in between
    assert talk.sent[BROKER] == (frame[:-1] + b"x" if replaced else frame)
    talk.broker(response(PRODUCE, 8, number, {"responses": []}))
    (exchange,) = talk.exchanges
    assert [named.topic for named in exchange.request_body.partitions[:2]] == ["topic-0", "topic-1"]
    assert len(exchange.request_body.partitions) == 20_000 and not talk.faults
    assert talk.session._interest.held._held_bytes == 0


@pytest.mark.parametrize("waited_ns", [HELD_PATIENCE_NS - 1, HELD_PATIENCE_NS])
def test_a_request_that_stays_incomplete_too_long_is_dropped_for_others(waited_ns):
    """Its connection ends. If it is recent or complete, the connection that needs the budget is closed instead."""
    frame = heartbeat(1)
    for is_whole in (False, True):
        held = HeldBudget(len(frame))
        common = interest(HEARTBEAT, held=held)
        slow, quick = (Dialogue(common, authorizer=Scripted()) for _ in range(2))
        held.give_up = lambda session, waited_ns=waited_ns: session.give_up_held(waited_ns)
        slow.session.receive(CLIENT, memoryview(frame[:-1]), 0)
        if is_whole:
            slow.client(frame[-1:])
        quick.session.receive(CLIENT, memoryview(frame[:-1]), waited_ns)
        quick.client(b"").close(BROKER)
        slow.client(b"").close(BROKER)
        faults = [[fault.kind for fault in talk.faults] for talk in (slow, quick)]
        if is_whole:
            assert faults == [[], []]
        elif waited_ns < HELD_PATIENCE_NS:
            assert faults == [[], ["held_too_many"]]
        else:
            assert faults == [["held_too_many"], []]
            assert "is not whole yet, and others need its room" in slow.faults[0].text
        assert held.held_bytes == 0


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("cut", [None, 20])
@pytest.mark.parametrize("key", [SASL_AUTHENTICATE, HEARTBEAT])
def test_after_a_login_no_further_request_is_decided_in_the_same_call(key, cut, slow):
    """The owner must see the login first, as other rules may apply to the new principal, at any split."""
    authorizer = Scripted()
    authorizer.slow = {1} if slow else set()
    common = interest(SASL_AUTHENTICATE, HEARTBEAT)
    for warm, version in ((SASL_AUTHENTICATE, 2), (HEARTBEAT, 4)):
        common.plan(warm << 16 | version)  # a call that compiles it reads no further request either
    session = Dialogue(common, authorizer=authorizer).session
    login = request(SASL_AUTHENTICATE, 2, 1, {"authBytes": b"token"}) if key == SASL_AUTHENTICATE else heartbeat(1)
    sent = login + b"".join(map(heartbeat, range(2, 5)))
    if cut:
        session.receive(CLIENT, memoryview(sent[:cut]), 1)
    pieces = session.receive(CLIENT, memoryview(sent[cut or 0 :]), 2)
    while session.slow[CLIENT] is not None:
        assert session.completed[CLIENT] == 1
        pieces += session.resume(CLIENT, 3)
    assert len(authorizer.frames) == session.completed[CLIENT] == (1 if key == SASL_AUTHENTICATE else 4)
    while session.backlog[CLIENT] is not None:
        pieces += session.resume(CLIENT, 4)
    assert len(authorizer.frames) == 4
    assert session._interest.held.held_bytes == 0
    if not cut:
        assert b"".join(bytes(piece) for _, piece in pieces) == sent

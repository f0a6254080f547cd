"""kproxy's own answers wait for older responses: in order, counted, and bounded by back-pressure."""

from typing import Any

from kproxy.protocol.apis import HEARTBEAT, LIST_GROUPS
from kproxy.wire.decisions.authorizer import Answer
from kproxy.wire.decisions.own_answers import MAX_OWN_BYTES
from kproxy.wire.events import ANSWERED_BY_PROXY, BROKER, CLIENT
from kproxy.wire.interest import HeldBudget
from tests.wire.decisions.test_authorizer import DENIED, Scripted, heartbeat, interest
from tests.wire.playbook import MS, Dialogue, request, response

SIZE = MAX_OWN_BYTES // 4


def refusing(count: int, **settings: Any) -> tuple[Dialogue, list[bytes], list[bytes]]:
    """Return (a session that refuses requests 1, 2, … with SIZE bytes each, the requests, the refusals)."""
    authorizer = Scripted()
    answers = []
    for number in range(1, count + 1):
        frame = SIZE.to_bytes(4, "big") + number.to_bytes(4, "big") + bytes(SIZE - 4)
        authorizer.decisions[number] = Answer(frame, (DENIED,))
        answers.append(frame)
    talk = Dialogue(interest(HEARTBEAT, **settings), authorizer=authorizer)
    return talk, [heartbeat(number) for number in range(1, count + 1)], answers


def sent(talk: Dialogue, data: bytes) -> list[tuple[int, Any]]:
    """Let the client send data, resume until the session stops reading, and return the forwarded pieces."""
    pieces = talk.session.receive(CLIENT, memoryview(data), 1)
    while talk.session.backlog[CLIENT] is not None and not talk.session.owes:
        pieces += talk.session.resume(CLIENT, 1)
    return pieces


def waiting_bytes(talk: Dialogue) -> int:
    return talk.session._interest.held._held_bytes


def test_a_client_with_waiting_refusals_is_read_again_only_after_they_are_sent():
    talk, requests, answers = refusing(20)
    session = talk.session
    pieces = sent(talk, request(LIST_GROUPS, 4, 0, {}) + b"".join(requests))
    assert not [piece for side, piece in pieces if side == CLIENT]
    assert session.owes and session.states[CLIENT] == "framed, owing"
    assert MAX_OWN_BYTES < waiting_bytes(talk) <= MAX_OWN_BYTES + len(answers[0])
    before = len(session.pending)
    for turn in range(50):  # repeated calls change nothing
        assert session.resume(CLIENT, 2 + turn) == []
    assert len(session.pending) == before < len(requests)
    pieces = session.receive(BROKER, memoryview(response(LIST_GROUPS, 4, 0, {})), 100)
    assert not session.owes and not waiting_bytes(talk)
    while session.backlog[CLIENT] is not None:
        pieces += session.resume(CLIENT, 101)
    got = b"".join(bytes(piece) for side, piece in pieces if side == CLIENT)
    assert got == response(LIST_GROUPS, 4, 0, {}) + b"".join(answers)
    assert sum(event.outcome == ANSWERED_BY_PROXY for event in session.events) == len(answers)


def test_refusals_that_are_sent_at_once_are_not_counted_as_held():
    talk, requests, answers = refusing(8, held=HeldBudget(1024))
    for frame, answer in zip(requests, answers, strict=True):
        pieces = talk.session.receive(CLIENT, memoryview(frame), 1)
        assert [(side, bytes(piece)) for side, piece in pieces] == [(CLIENT, answer)]
    assert not waiting_bytes(talk) and not talk.session.faults


def test_beyond_the_held_budget_the_connection_ends_and_releases_its_bytes():
    talk, requests, _ = refusing(4, held=HeldBudget(SIZE + SIZE // 2))
    sent(talk, request(LIST_GROUPS, 4, 0, {}) + b"".join(requests))
    (fault,) = [event for event in talk.session.events if getattr(event, "fatal", False)]
    assert fault.kind == "held_too_many" and "max_held_bytes" in fault.text
    assert talk.session.states == ("closed", "closed") and not waiting_bytes(talk)


def test_a_connection_that_ends_releases_its_waiting_answers():
    talk, requests, _ = refusing(3)
    sent(talk, request(LIST_GROUPS, 4, 0, {}) + b"".join(requests))
    assert waiting_bytes(talk) == 3 * (SIZE + 4)
    talk.session.close(BROKER, 2)
    assert not waiting_bytes(talk)


def test_with_an_authorizer_malformed_first_fields_end_the_connection():
    """The first fields of a Produce contain acks: a wrong guess would pair later responses with other requests."""
    for cut in (None, 20):
        talk = Dialogue(interest(HEARTBEAT), authorizer=Scripted())
        good = request(LIST_GROUPS, 4, 0, {})
        bad = (30).to_bytes(4, "big") + bytes((0, 0, 0, 9)) + bytes(4) + b"\0\1c" + b"\xff" * 19
        talk.client(good + bad, [] if cut is None else [len(good) + cut])
        assert talk.session.states == ("closed", "closed")
        assert [fault.kind for fault in talk.faults] == ["malformed_request"] and talk.faults[0].fatal
        assert talk.sent[BROKER].startswith(good) and len(talk.sent[BROKER]) < len(good + bad)


def test_the_queue_time_of_a_refusal_counts_from_the_first_byte_of_its_request():
    authorizer = Scripted()
    authorizer.decisions[1] = Answer(b"\0\0\0\4\0\0\0\1", (DENIED,))
    talk = Dialogue(interest(HEARTBEAT), authorizer=authorizer)
    older = request(LIST_GROUPS, 4, 0, {})
    talk.client(older + heartbeat(1), [len(older) + 20]).broker(response(LIST_GROUPS, 4, 0, {}))
    _, own = talk.exchanges
    assert own.outcome == ANSWERED_BY_PROXY
    assert (own.request_start, own.request_end, own.response_start) == (1 * MS, 2 * MS, 3 * MS)
    assert (own.queue_ns, own.muted_ns) == (2 * MS, 0)


def test_own_answers_may_wait_up_to_1_mib():
    for more in (0, 1):
        authorizer = Scripted()
        sizes = [MAX_OWN_BYTES // 2, MAX_OWN_BYTES // 2 + more]
        for number, size in enumerate(sizes, 1):
            authorizer.decisions[number] = Answer((size - 4).to_bytes(4) + bytes(size - 4), (DENIED,))
        talk = Dialogue(interest(HEARTBEAT), authorizer=authorizer)
        sent(talk, request(LIST_GROUPS, 4, 0, {}) + heartbeat(1) + heartbeat(2))
        assert waiting_bytes(talk) == sum(sizes) and talk.session.owes == bool(more)
        talk.broker(response(LIST_GROUPS, 4, 0, {}))
        assert not talk.session.owes and not waiting_bytes(talk)

"""Observers of a session see each byte that is read, once and in order, and cost nothing before and after."""

from typing import Any

import pytest

from kproxy.protocol.apis import HEARTBEAT, METADATA, PRODUCE
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from kproxy.wire.observing.watched import UNKNOWN, boundary, is_framed, read_of, unwatch, watch
from kproxy.wire.session import Session
from kproxy.wire.state import Piece
from tests.wire.playbook import Dialogue, request, response


class Observing:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.seen = {CLIENT: b"", BROKER: b""}
        self.sent = {CLIENT: b"", BROKER: b""}
        self.calls: list[tuple[str, int, int]] = []

    def before(self, session: Session, side: int) -> None:
        self.calls.append(("before", side, session.completed[side]))

    def passed(self, session: Session, side: int, view: Any, pieces: list[Piece], now_ns: int) -> None:
        self.calls.append(("passed", side, session.completed[side]))
        self.seen[side] += bytes(read_of(session, side, view))
        for to, piece in pieces:
            self.sent[to] += bytes(piece)


def heartbeats(count: int) -> bytes:
    return b"".join(request(HEARTBEAT, 4, number) for number in range(count))


def test_an_observer_sees_what_is_read_before_and_after_each_call() -> None:
    talk, one = Dialogue(), Observing()
    watch(talk.session, one)
    talk.client(heartbeats(200), [10, 31, 500])  # more than one call reads: the backlog is observed when it is read
    talk.broker(b"".join(response(HEARTBEAT, 4, number) for number in range(200)), [3])
    assert one.seen == {CLIENT: heartbeats(200), BROKER: talk.sent[CLIENT]}
    assert one.sent == talk.sent
    assert one.calls[:2] == [("before", CLIENT, 0), ("passed", CLIENT, 0)]
    assert one.calls[-1] == ("passed", BROKER, 200) and len(one.calls) > 2 * 6
    assert [what for what, _, _ in one.calls] == ["before", "passed"] * (len(one.calls) // 2)


def test_observers_come_and_go() -> None:
    talk, one, other = Dialogue(), Observing(), Observing()
    unwatch(talk.session, one)  # not watched by it
    assert talk.session.observers == ()
    watch(talk.session, one)
    watch(talk.session, other)
    assert talk.session.observers == (one, other)
    talk.client(heartbeats(1))
    unwatch(talk.session, one)
    unwatch(talk.session, one)
    assert talk.session.observers == (other,)
    talk.client(heartbeats(1))
    unwatch(talk.session, other)
    assert talk.session.observers == ()
    talk.client(heartbeats(1))
    assert (one.seen[CLIENT], other.seen[CLIENT]) == (heartbeats(1), heartbeats(1) * 2)
    watch(talk.session, one)  # again, without the former observers
    assert talk.session.observers == (one,)


@pytest.mark.parametrize("detail", [0, 1])
def test_where_the_next_request_begins_is_known_behind_each_header(detail: int) -> None:
    frame = request(PRODUCE, 8, 1, {"acks": 1, "topicData": [{"name": "t" * 50, "partitionData": []}]})
    talk = Dialogue(Interest(detail=detail))
    for read in range(len(frame)):
        expected = 0 if read == 0 else UNKNOWN if read < 12 else len(frame) - read
        assert boundary(talk.session, CLIENT) == expected and is_framed(talk.session, CLIENT)
        talk.client(frame[read : read + 1])
    assert boundary(talk.session, CLIENT) == boundary(talk.session, BROKER) == 0


@pytest.mark.parametrize("rewrite", [False, True])
def test_where_the_next_answer_begins_is_counted_as_the_client_gets_it(rewrite: bool) -> None:
    """A partial header and a held response are not forwarded yet."""
    talk = Dialogue(Interest(rewrite=rewrite), transform=(lambda exchange, frame: None) if rewrite else None)
    talk.client(request(METADATA, 9, 1))
    frame = response(METADATA, 9, 1, {"clusterId": "c" * 50})
    for read in range(len(frame)):
        assert boundary(talk.session, BROKER) == (0 if read < 8 or rewrite else len(frame) - read)
        talk.broker(frame[read : read + 1])
    assert boundary(talk.session, BROKER) == 0 and len(talk.exchanges) == 1


def test_what_is_not_framed_has_no_next_frame() -> None:
    talk = Dialogue().client(request(17, 0, 1, {"mechanism": "PLAIN"}))
    assert not is_framed(talk.session, CLIENT) and is_framed(talk.session, BROKER)
    assert (boundary(talk.session, CLIENT), boundary(talk.session, BROKER)) == (UNKNOWN, 0)
    talk.broker(b"\xff" * 16)  # another protocol: both sides pass unread
    assert not is_framed(talk.session, CLIENT) and not is_framed(talk.session, BROKER)
    assert (boundary(talk.session, CLIENT), boundary(talk.session, BROKER)) == (UNKNOWN, UNKNOWN)

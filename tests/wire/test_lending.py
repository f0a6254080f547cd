"""When a session can be lent to the compiled core, and that it goes on as if it had never been."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, METADATA, PRODUCE, SASL_HANDSHAKE
from kproxy.wire.bodies import TOPICS
from kproxy.wire.captured import CapturedSession
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from kproxy.wire.lending import give_back, lend
from kproxy.wire.session import Session
from tests.wire.playbook import Dialogue, request, response


def heartbeats(*numbers: int) -> bytes:
    return b"".join(request(HEARTBEAT, 4, number, {"groupId": "g"}, client=f"c{number}") for number in numbers)


def beaten(*numbers: int) -> bytes:
    return b"".join(response(HEARTBEAT, 4, number) for number in numbers)


def lent_and_given_back(session: Session, interest: Interest) -> Session:
    """Another session with its state; the same one where it cannot be lent."""
    lent = lend(session)
    if lent is None:
        return session
    other = Session(interest)
    pending: list[Any] = [
        (
            each.plan,
            (each.client_id, each.acks, each.max_wait_ms, each.group_id, each.transactional_id),
            each.correlation_id,
            each.number,
            each.request_bytes,
            each.request_start,
            each.request_end,
            carried,
        )
        for each, carried in lent.pending
    ]
    last = pending[-1][1] if pending else (session.client_id,)
    give_back(other, pending, lent.number, lent.received, lent.completed, lent.free_at, 0, last)
    return other


@given(st.integers(1, 5), st.data())
def test_a_session_that_is_given_back_goes_on_as_if_it_had_not_been_lent(count: int, data: st.DataObject) -> None:
    """After any bytes of both sides. It is lent between frames of both sides, and nowhere else."""
    numbers = range(1, count + 1)
    asked, told = heartbeats(*numbers), beaten(*numbers)
    ends = [{len(heartbeats(*numbers[:place])) for place in range(count + 1)}]
    ends.append({len(beaten(*numbers[:place])) for place in range(count + 1)})
    interest = Interest()
    plain, moved = Dialogue(interest), Dialogue(interest)
    at = [0, 0]
    while at[BROKER] < len(told):
        whole = sum(end <= at[CLIENT] for end in ends[CLIENT]) - 1
        allowed = [len(asked), len(beaten(*numbers[:whole]))]
        side = data.draw(st.sampled_from([side for side in (CLIENT, BROKER) if at[side] < allowed[side]]))
        edges = sorted(end for end in ends[side] if at[side] < end <= allowed[side])
        upto = data.draw(st.sampled_from(edges) | st.integers(at[side] + 1, allowed[side]))
        piece = (asked, told)[side][at[side] : upto]
        at[side] = upto
        for talk in (plain, moved):
            talk.says(side, piece)
        assert (lend(moved.session) is not None) == all(at[each] in ends[each] for each in (CLIENT, BROKER))
        moved.session = lent_and_given_back(moved.session, interest)
    assert moved.sent == plain.sent and moved.session.completed == [count, count]
    assert [told_of(each) for each in moved.exchanges] == [told_of(each) for each in plain.exchanges]
    assert len(moved.exchanges) == count and moved.session.client_id == plain.session.client_id


def told_of(exchange: Any) -> dict[str, Any]:
    names = [name for name in type(exchange).__slots__ if hasattr(exchange, name) and name != "in_flight"]
    return {name: getattr(exchange, name) for name in names}


@pytest.mark.parametrize(
    ("settings", "asked", "told", "lent"),
    [
        ({}, b"", b"", True),
        ({}, heartbeats(1, 2), beaten(1), True),
        ({}, request(METADATA, 9, 1), b"", True),
        ({}, request(API_VERSIONS, 3, 1), b"", False),
        ({}, request(API_VERSIONS, 3, 1), response(API_VERSIONS, 3, 1), True),
        ({}, request(SASL_HANDSHAKE, 1, 1, {"mechanism": "PLAIN"}), b"", False),
        (
            {},
            request(SASL_HANDSHAKE, 0, 1, {"mechanism": "PLAIN"}),
            response(SASL_HANDSHAKE, 0, 1, {"mechanisms": ["PLAIN"]}),
            False,  # tokens without headers follow
        ),
        ({"rewrite": True}, request(METADATA, 9, 1), b"", False),  # its answer is edited
        ({"detail": TOPICS}, request(PRODUCE, 9, 1, {"acks": 1}), b"", True),
        ({"detail": TOPICS}, request(HEARTBEAT, 4, 1), b"", False),  # it names a group that has a lag
        ({"detail": TOPICS, "details": True}, request(PRODUCE, 9, 1, {"acks": 1}), b"", False),
        ({"detail": TOPICS}, request(PRODUCE, 9, 1, {"acks": 1}), response(PRODUCE, 9, 1), True),
    ],
)
def test_a_session_is_lent_where_it_needs_nothing_but_counting(
    settings: dict[str, Any], asked: bytes, told: bytes, lent: bool
) -> None:
    talk = Dialogue(Interest(**settings), **({"transform": lambda *_: None} if "rewrite" in settings else {}))
    if asked:
        talk.client(asked)
    if told:
        talk.broker(told)
    assert (lend(talk.session) is not None) == lent
    for side in (CLIENT, BROKER):
        talk.close(side)
    assert lend(talk.session) is None


def test_a_session_over_a_capture_is_not_lent() -> None:
    assert lend(Dialogue(Interest(), CapturedSession).session) is None

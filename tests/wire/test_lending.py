"""When a session can be lent to the compiled core, and that it goes on as if it had never been."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, METADATA, PRODUCE, SASL_HANDSHAKE
from kproxy.protocol.records import Record, write_message_set
from kproxy.protocol.schema import schema
from kproxy.wire.bodies import TOPICS
from kproxy.wire.events import BROKER, CLIENT, Exchange
from kproxy.wire.interest import ApiPlan, HeldBudget, Interest
from kproxy.wire.lending import First, first_fields, forget_notes, give_back, lend, passes, topic_of
from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.session import Session
from kproxy.wire.state import MAX_UNCOUNTED, MAX_UNNOTED, NAMED_BYTES
from tests.protocol.messages import vectors
from tests.wire.decisions.test_authorizer import Scripted
from tests.wire.playbook import Dialogue, foreign_request, request, response, sized
from tests.wire.test_state import TINY


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
            carried and [(*one, 0) for one in carried],
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
        ({"rewrite": True}, request(HEARTBEAT, 4, 1), b"", True),
        ({"rewrite": True}, request(HEARTBEAT, 4, 1) + foreign_request(API_VERSIONS, 99, 2), b"", False),  # ours waits
        ({}, heartbeats(1), response(HEARTBEAT, 4, 1, {"throttleTimeMs": 5}), False),  # the broker mutes it
        ({}, foreign_request(HEARTBEAT, 99, 1), b"", False),
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


def produce(version: int, count: int, records: bytes = TINY) -> bytes:
    """A Produce to so many partitions of two topics."""
    data = [{"index": each, "records": records * (1 + each % 3)} for each in range(count)]
    topics = [
        {"name": name, "topicId": UUID(int=number), "partitionData": data[number::2]}
        for number, name in enumerate(("orders", "\u00e9t\u00e9"))
    ]
    return request(PRODUCE, version, 1, {"acks": 1, "topicData": [topic for topic in topics if topic["partitionData"]]})


@pytest.mark.parametrize("version", [3, 8, 9, 12, 13])
@pytest.mark.parametrize("count", [0, 1, MAX_UNNOTED, MAX_UNNOTED + 1, MAX_UNCOUNTED, MAX_UNCOUNTED + 1])
def test_what_a_produce_carries_is_lent_and_given_back(version: int, count: int) -> None:
    """Of few topic-partitions; those of more stay with the session, which counts their memory."""
    held = HeldBudget(noted_limit_bytes=1 << 20)
    interest = Interest(detail=TOPICS, held=held)
    frame = produce(version, count)
    session = Dialogue(interest).client(frame).session
    (asked,) = session.pending
    assert asked.request_body is not None and len(asked.request_body.sums) == count
    assert (lend(session) is not None) == (count <= MAX_UNCOUNTED)
    if count > MAX_UNCOUNTED:
        return
    forget_notes(session)
    assert held.noted_bytes == 0
    talk = Dialogue(interest)
    talk.session = lent_and_given_back(session, interest)
    (again,) = talk.session.pending
    assert again.request_body is not None and [*again.request_body.sums] == [*asked.request_body.sums]
    assert held.noted_bytes == (count * NAMED_BYTES if count > MAX_UNNOTED else 0)
    talk.broker(response(PRODUCE, version, 1))
    assert held.noted_bytes == 0 and told_of(talk.exchanges[0])["client_id"] == "c"


def test_records_that_are_not_counted_are_not_lent() -> None:
    """A compressed message set hides how many they are."""
    for codec, lent in ((0, True), (1, False)):
        records = write_message_set([Record(0, 1, None, b"v")], magic=1, codec=codec)
        session = Dialogue(Interest(detail=TOPICS)).client(produce(2, 3, records)).session
        assert (lend(session) is not None) == lent


def test_a_topic_is_an_id_from_produce_13_on() -> None:
    for version in schema().apis[PRODUCE].request.versions:
        plan = Interest().plan(PRODUCE << 16 | version)
        expected = UUID(bytes=b"0123456789abcdef") if version >= 13 else "0123456789abcdef"
        assert topic_of(plan, b"0123456789abcdef") == expected
    assert topic_of(Interest().plan(PRODUCE << 16 | 9), b"\xff") == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("cut", [12, 20, 30])
def test_a_session_is_given_back_inside_a_request(cut: int) -> None:
    """The core has relayed the beginning of the last request, and read its first fields or none."""
    interest = Interest(details=True)
    frame = request(HEARTBEAT, 4, 1, {"groupId": "group-1"}, client="c" * 300)
    plain, moved = Dialogue(interest).client(frame, [cut]), Dialogue(interest)
    plan = interest.plan(HEARTBEAT << 16 | 4)
    values = ("c" * 300, None, None, "group-1", None)
    pending: list[Any] = [(plan, values, 1, 0, len(frame), 1_000_000, None, None)]
    give_back(moved.session, pending, 1, (cut, 0), (0, 0), 0, len(frame) - cut, values)
    assert moved.session.client_id == "c" * 256 and not moved.session.at_boundary(CLIENT)
    moved.now = plain.now - 1_000_000
    moved.client(frame[cut:])
    for talk in (plain, moved):
        talk.broker(response(HEARTBEAT, 4, 1) + b"\xff" * 8)
    assert [told_of(each) for each in moved.exchanges] == [told_of(each) for each in plain.exchanges]
    assert moved.session.completed == plain.session.completed == [1, 1]
    assert [fault.offset for fault in moved.faults] == [fault.offset for fault in plain.faults] != []


REQUESTS = [vector for vector in vectors() if vector.layout.side == "request"]
NOTHING = First(0, (None,) * 5, False, frozenset())


def fields_of(header: dict[str, Any], body: dict[str, Any]) -> tuple[Any, ...]:
    names = ("acks", "maxWaitMs", "groupId", "transactionalId")
    return header.get("clientId"), *(body.get(name) for name in names)


@pytest.mark.parametrize("details", [False, True])
def test_first_fields_are_those_of_the_whole_request_and_no_byte_behind_them_matters(details: bool) -> None:
    """None where the session has to read the request: without an answer, of a login, with a client's software."""
    interest = Interest(details=details)
    session = Session(interest)
    read = 0
    for layout, content, _, _ in REQUESTS:
        plan = interest.plan(layout.api_key << 16 | layout.version)
        frame, (header, body) = sized(content), layout.decode(content)
        found = first_fields(session, plan, frame, len(frame))
        if plan.prefix is None:
            assert found == NOTHING
        elif body.get("acks") == 0 or body.keys() & {"mechanism", "clientSoftwareName"}:
            assert found is None
        else:
            assert found is not None and found[1:] == (fields_of(header, body), True, frozenset())
            stop = 12 + found.size
            for part in (frame[:stop], frame[:stop] + b"\xff" * 50, frame + b"\xff" * 50):
                assert first_fields(session, plan, part, len(frame)) == found
            assert first_fields(session, plan, frame[: stop - 1], len(frame)) is None
            assert first_fields(session, plan, frame, stop - 1) is None
            read += 1
    assert read > 50
    broken = sized(bytes.fromhex("0000000900000001000163") + b"\0" + b"\xff" * 30)  # a length of more than 5 bytes
    assert first_fields(session, interest.plan(PRODUCE << 16 | 9), broken, len(broken)) is None


class Deciding(Scripted):
    """Decides by these fields, once and for all; None: each request by itself."""

    def __init__(self, fields: frozenset[str] | None) -> None:
        super().__init__()
        self.fields = fields
        self.asked: list[tuple[ApiPlan, int, bytes]] = []

    def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
        self.asked.append((exchange.plan, exchange.request_bytes, bytes(head)))
        exchange.client_id = "of the authorizer"
        return self.fields

    def passes(self, exchange: Exchange, frame: Any) -> bool:
        return exchange.plan.api_key == HEARTBEAT and exchange.request_bytes == len(frame)


def test_requests_that_are_decided_are_known_by_their_client_id_too() -> None:
    fields = frozenset({"groupId"})
    interest = Interest(authorizes=lambda key, version: True)
    plain = Interest()
    for layout, content, _, said in REQUESTS:
        key_version = layout.api_key << 16 | layout.version
        plan, frame = interest.plan(key_version), sized(content)
        before = first_fields(Session(plain), plain.plan(key_version), frame, len(frame))
        authorizer = Deciding(fields)
        session = Session(interest, authorizer=authorizer)
        found = first_fields(session, plan, frame + b"more", len(frame))
        id_end = 14 + len((said["client_id"] or "").encode())
        if before is None or layout.message.header_version(layout.version) == 0:
            assert found is None and not authorizer.asked
            continue
        values = before.values if before.is_read else ("of the authorizer", *(None,) * 4)
        assert found == (max(before.size, id_end - 12), values, before.is_read, fields)
        assert authorizer.asked == [(plan, len(frame), frame)]
        assert first_fields(session, plan, frame[: 12 + found.size], len(frame)) == found
        for short in (12, 13, id_end - 1):
            assert first_fields(session, plan, frame[:short], len(frame)) is None
        assert len(authorizer.asked) == 2
        assert first_fields(Session(interest, authorizer=Deciding(None)), plan, frame, len(frame)) is None
        assert first_fields(Session(interest), plan, frame, len(frame)) == before  # nobody decides
    for key, passed in ((HEARTBEAT, True), (METADATA, False)):
        assert passes(session, interest.plan(key << 16 | 4), frame) == passed

"""Sessions report of real traffic what ZooKeeper logged, however the bytes are split, lost or forged."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.zookeeper import session as module
from kproxy.zookeeper.records import write
from kproxy.zookeeper.session import ANSWERED, CLIENT, SERVER, UNANSWERED, Fault, Notification, Operation, Session
from tests.zookeeper.traffic import log, talks

UNSIGNED = (1 << 64) - 1


def events_of(talk, cut=lambda data: [data], *, begin=0, **options):
    """A session that has received a connection, each part split further; the first `begin` parts are not seen."""
    session = Session(midstream=bool(begin), **options)
    for side, data, now in talk.parts[begin:]:
        for part in cut(data):
            session.receive(side, part, now)
    session.close()
    return session


def values_of(event):
    """The values of an event, without its times."""
    names = [name for name in event.__slots__ if not name.endswith(("_start", "_end")) and name != "time"]
    return type(event).__name__, *(getattr(event, name) for name in names)


def sized(body):
    return len(body).to_bytes(4, "big") + body


def test_every_transaction_of_zookeepers_own_log_is_an_operation_with_its_zxid():
    operations = {}
    for talk in talks():
        events = events_of(talk).events
        assert not [event for event in events if isinstance(event, Fault)]
        for event in events:
            if isinstance(event, Operation):
                assert event.decoded
                operations[event.session & UNSIGNED, event.xid] = event
    seen = Counter()
    for line in log():
        if line.xid == 0:  # sessions that the server begins or expires
            seen[line.op] += 1
            continue
        operation = operations[line.session, line.xid]
        assert operation.zxid == line.zxid
        if line.op == "error":
            assert operation.error == int(line.rest)
        else:
            assert (operation.op, operation.error) == (line.op, 0)
        if line.op in ("create", "delete", "setData"):
            path = operation.response.get("path", operation.request["path"])  # with the number of a sequential node
            assert line.rest.startswith(f"'{path},") or line.rest == f"'{path}"
        seen["compared"] += 1
    assert seen == {"compared": 1055 + 1, "createSession": 18, "closeSession": 9}


def test_a_session_has_the_servers_id_and_keeps_it_when_it_is_resumed():
    begun = [line.session for line in log() if line.op == "createSession"]
    sessions = [events_of(talk) for talk in talks()]
    assert {session.session & UNSIGNED for session in sessions} >= set(begun)
    first = [session.events[0] for session in sessions]
    assert {event.op for event in first} == {"connect"}
    again = [event for event in first if event.request["sessionId"]]
    assert len(again) == len(first) - len(begun)
    assert not any("passwd" in {**event.request, **event.response} for event in first)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_any_split_gives_the_same_events(step):
    for talk in talks()[::4]:
        whole = events_of(talk).events
        split = events_of(talk, lambda data: [data[at : at + step] for at in range(0, len(data), step)]).events
        assert [values_of(event) for event in split] == [values_of(event) for event in whole]


def test_a_capture_that_begins_midstream_finds_the_next_frame():
    found = missed = 0
    for talk in talks():
        whole = [event for event in events_of(talk).events if isinstance(event, Operation)]
        begin = len(talk.parts) // 2
        if begin < 10:
            continue
        late = [event for event in events_of(talk, begin=begin).events if isinstance(event, Operation)]
        last = {(event.xid, event.op, event.zxid) for event in late if event.outcome == ANSWERED}
        wanted = {(event.xid, event.op, event.zxid) for event in whole if event.request_start > talk.parts[begin][2]}
        found += len(wanted & last)
        missed += len(wanted - last)
    assert found > 500
    assert missed == 0


def test_a_gap_loses_only_the_operations_in_it():
    talk = max(talks(), key=lambda talk: len(talk.parts))
    whole = {event.xid for event in events_of(talk).events if isinstance(event, Operation)}
    chance = random.Random(1)
    holes = set(chance.sample(range(10, len(talk.parts)), 20))
    session = Session()
    for index, (side, data, now) in enumerate(talk.parts):
        if index in holes:
            session.gap(side)
        else:
            session.receive(side, data, now)
    session.close()
    answered = {event.xid for event in session.events if isinstance(event, Operation) and event.outcome == ANSWERED}
    assert answered <= whole
    assert len(whole - answered) < 4 * len(holes)


def test_watches_fire_as_notifications():
    fired = Counter(
        event.type for talk in talks() for event in events_of(talk).events if isinstance(event, Notification)
    )
    assert fired == {"NodeChildrenChanged": 43, "NodeDeleted": 4, "NodeCreated": 3}


def test_an_expired_session_and_a_connection_without_a_session():
    session = Session()
    first = {
        "protocolVersion": 0,
        "lastZxidSeen": 7,
        "timeOut": 4000,
        "sessionId": 9,
        "passwd": b"p",
        "readOnly": False,
    }
    session.receive(CLIENT, sized(write("ConnectRequest", first | {"passwd": bytes(16)})), 1)
    gone = {"protocolVersion": 0, "timeOut": 0, "sessionId": 0, "passwd": bytes(16), "readOnly": False}
    session.receive(SERVER, sized(write("ConnectResponse", gone)), 2)
    (event,) = session.events
    assert (event.op, event.error, event.session) == ("connect", -112, 9)

    command = Session()
    command.receive(CLIENT, b"ruok", 1)
    command.receive(SERVER, b"imok", 2)
    command.close()
    assert command.opaque
    assert not command.events


def test_unanswered_operations_are_reported_at_the_end_and_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    session = Session(midstream=True)
    for xid in range(1, 16):
        header = write("RequestHeader", {"xid": xid, "type": 4})
        session.receive(CLIENT, sized(header + write("GetDataRequest", {"path": f"/{xid}", "watch": False})), xid)
    assert [event.xid for event in session.events] == [1, 2, 3, 4, 5]
    session.receive(CLIENT, sized(write("RequestHeader", {"xid": -2, "type": 11})), 16)
    calls = 0
    while session.close(4):  # a few at a time, as a relay does
        calls += 1
        assert len(session.events) == 5 + 4 * calls
    waiting = [(xid, UNANSWERED) for xid in (*range(1, 16), -2)]
    assert ([(event.xid, event.outcome) for event in session.events], calls) == (waiting, 2)


def get(xid, path):
    return sized(
        write("RequestHeader", {"xid": xid, "type": 4}) + write("GetDataRequest", {"path": path, "watch": False})
    )


@pytest.mark.parametrize(("values", "path", "each"), [(False, "/a", 1), (True, "/a", 1), (True, "/" + "a" * 1000, 16)])
def test_the_pending_operations_of_all_sessions_are_bounded(values, path, each):
    """Small unanswered requests on ever more connections must not make the process grow."""
    room = module.Room(operations=400)
    sessions = [Session(room=room, midstream=True, values=values) for _ in range(20)]
    for session in sessions:
        for xid in range(1, 101):
            session.receive(CLIENT, get(xid, path), xid)
            assert room.lent <= 400
    waiting = [session.unanswered for session in sessions]
    assert sum(waiting) <= 400 // each + 20 * module.FREE_PENDING
    assert min(waiting) == module.FREE_PENDING and waiting[0] >= 400 // each // 4
    for session in sessions:
        assert [event.xid for event in session.events] == list(range(1, 101 - session.unanswered))
        session.receive(SERVER, reply(100), 200)
        assert (session.events[-1].xid, session.events[-1].outcome) == (100, ANSWERED) and not session.unanswered
    assert room.lent == 0
    sessions[0].receive(CLIENT, b"".join(get(xid, path) for xid in range(101, 150)), 300)
    assert room.lent > 0
    sessions[0].close()
    assert room.lent == room.held == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_bytes_raise_or_are_kept(data):
    talk = talks()[data.draw(st.integers(0, len(talks()) - 1))]
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    session = Session(midstream=data.draw(st.booleans()))
    for side, part, now in talk.parts[: data.draw(st.integers(1, 60))]:
        broken = bytearray(part)
        for _ in range(chance.randrange(3)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        session.receive(side, bytes(broken), now)
        for half in session._halves:
            assert len(half.data) <= module.MAX_FRAME + len(part)
    session.close()


def large(xid, size):
    """A create whose node has `size` bytes, followed by its ACL."""
    node = {"path": "/big", "data": b"d" * size, "acl": [], "flags": 1}
    return sized(write("RequestHeader", {"xid": xid, "type": 1}) + write("CreateRequest", node))


def reply(xid, body=b"", zxid=7):
    return sized(write("ReplyHeader", {"xid": xid, "zxid": zxid, "err": 0}) + body)


def test_a_large_frame_is_held_in_part_and_its_first_fields_are_read():
    session = Session(keep=64 * 1024, whole=16 * 1024)
    whole, cut = large(1, 20_000), large(2, 1 << 20)
    for data in (whole, cut):
        for at in range(0, len(data), 10_000):
            session.receive(CLIENT, data[at : at + 10_000], 1)
            assert len(session._halves[CLIENT].data) <= 64 * 1024 + 10_004
    session.receive(SERVER, reply(1, write("CreateResponse", {"path": "/big"})) + reply(2), 2)
    first, second = session.events
    assert (first.request["path"], len(first.request["data"]), first.decoded) == ("/big", 20_000, False)
    assert "acl" not in first.request
    assert (second.request, second.decoded, second.request_bytes) == ({"path": "/big"}, False, len(cut))


def test_sessions_share_a_memory_limit_and_release_what_they_used():
    room = module.Room(100_000)
    sessions = [Session(room=room) for _ in range(10)]
    for session in sessions:
        session.receive(CLIENT, large(1, 40_000)[:-1], 1)
    assert room.held <= 100_000
    assert room.refused == 8
    assert sum(len(half.data) for session in sessions for half in session._halves) < 100_000 + 10 * module.SMALL_BYTES
    for session in sessions:
        session.receive(CLIENT, b"\0", 1)
        assert [operation.op for operation in session._pending] == ["create"]
    for session in sessions[:5]:
        session.receive(SERVER, reply(1), 2)
        assert session.events[-1].outcome == ANSWERED
    for session in sessions:
        session.close()
    assert room.held == 0


def test_without_resync_nothing_is_read_after_a_fault():
    session = Session(resync=False)
    session.receive(CLIENT, sized(write("RequestHeader", {"xid": 1, "type": 11})), 1)
    session.receive(CLIENT, b"\x7f\xff\xff\xff", 2)
    session.receive(CLIENT, b"x" * 100_000, 3)
    session.receive(SERVER, reply(1), 4)
    assert [type(event) for event in session.events] == [Fault]
    assert session.opaque
    assert session.skipped > 100_000
    session.close()
    assert [event.outcome for event in session.events[1:]] == [UNANSWERED]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((CLIENT, SERVER)), st.binary(max_size=60)), max_size=40), st.booleans())
def test_random_bytes_raise_nothing_and_hold_no_memory(parts, resync):
    room = module.Room(10_000)
    session = Session(midstream=not resync, resync=resync, keep=100, whole=50, room=room)
    for side, data in parts:
        session.receive(side, data, 1)
    session.gap(SERVER)
    session.close()
    assert room.held == room.lent == 0

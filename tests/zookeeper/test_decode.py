"""Single frames: requests and responses of real sessions, decoded one by one; anything else is reported in words."""

import pytest

from kproxy.errors import Malformed
from kproxy.zookeeper.decode import answer, requests, sized
from kproxy.zookeeper.records import write
from kproxy.zookeeper.session import ANSWERED, CLIENT, SERVER, Operation, Session
from tests.streams import frames
from tests.zookeeper.traffic import talks

GET = bytes.fromhex("0000000100000004000000012f01")


def test_frames_of_a_real_connection_decode_alone_as_in_their_session():
    talk = max(talks(), key=lambda talk: len(talk.parts))
    session = Session()
    for side, data, now in talk.parts:
        session.receive(side, data, now)
    whole = {event.xid: event for event in session.events if isinstance(event, Operation) and event.outcome == ANSWERED}
    compared = 0
    for side, frame, _ in frames(talk):
        xid = int.from_bytes(frame[:4], signed=True)
        if xid <= 0 or xid not in whole:
            continue
        if side == CLIENT:
            (operation,) = requests(sized(frame, has_sizes=False))
            assert (operation.op, operation.request) == (whole[xid].op, whole[xid].request)
        elif side == SERVER:
            values = answer(sized(frame, has_sizes=False), whole[xid].op)
            assert (values["zxid"], values["err"]) == (whole[xid].zxid, whole[xid].error)
            assert all(values[name] == value for name, value in whole[xid].response.items())
        compared += 1
    assert compared > 500


def test_sizes_are_recognised():
    assert sized(GET) == len(GET).to_bytes(4) + GET
    assert sized(sized(GET)) == sized(GET)
    (operation,) = requests(sized(GET))
    assert (operation.op, operation.request) == ("getData", {"path": "/", "watch": True})


@pytest.mark.parametrize("op,record,values", [
    ("auth", "AuthPacket", {"type": 0, "scheme": "digest", "auth": b"user:secret"}),
    ("sasl", "GetSASLRequest", {"token": b"secret"}),
])  # fmt: skip
def test_secrets_are_not_shown(op, record, values):
    from kproxy.zookeeper.records import layouts

    header = write("RequestHeader", {"xid": 1, "type": layouts()["operations"][op]})
    (operation,) = requests(sized(header + write(record, values), has_sizes=False))
    assert operation.op == op
    assert "secret" not in repr(operation)


@pytest.mark.parametrize(
    "data,words",
    [(b"ruok", "four letters"), (sized(GET)[:-1], "no whole frame"), (b"\0\0\0\x08\0\0\0\1\0\0\0\x63", "operation 99")],
)
def test_bytes_that_are_no_request_are_reported(data, words):
    with pytest.raises(Malformed, match=words):
        requests(data)


def test_bytes_that_are_no_response_are_reported():
    for data, to, words in (
        (b"\0\0\1\0", "getData", "256 bytes"),
        (b"", "getData", "0 bytes"),
        (bytes(20), "fly", "fly"),
    ):
        with pytest.raises(Malformed, match=words):
            answer(sized(data, has_sizes=True) if data else b"", to)

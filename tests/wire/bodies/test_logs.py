"""Batches of coordinators' logs in Fetch responses are copied whole at any split; those of other topics are not."""

import random
from types import SimpleNamespace
from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.records import Record, iterate_headers, write_batch
from kproxy.wire import bodies
from kproxy.wire.bodies import BodyWalker, Logs
from kproxy.wire.interest import Interest
from kproxy.wire.state import SMALL_BODY
from tests.wire.playbook import Dialogue, request, sized

IDS = {
    "__consumer_offsets": UUID(int=1 << 100),
    "orders": UUID(int=2 << 100),
    "__transaction_state": UUID(int=3 << 100),
}


def batches(topic, first):
    """Two batches of two records."""
    if topic == "__consumer_offsets":
        key = codec.encode_data("OffsetCommitKey", 0, {"group": "g", "topic": "t", "partition": 3})
        value = codec.encode_data("OffsetCommitValue", 3, {"offset": 7, "metadata": "m" * 300})
    elif topic == "__transaction_state":
        key = codec.encode_data("TransactionLogKey", 0, {"transactionalId": "tx"})
        value = codec.encode_data("TransactionLogValue", 0, {"producerId": 4})
    else:
        key, value = b"key", b"value" * 50
    return [write_batch([Record(at, 1, key, value), Record(at + 1, 1, key, value)]) for at in (first, first + 2)]


def answer(version, padding=0):
    """A Fetch answer of all topics, and the batches of logs in it. padding: bytes of one more record."""
    wanted, topics = [], []
    for topic, identity in IDS.items():
        parts = []
        for index in (0, 1):
            found = batches(topic, 10 * index)
            parts.append({"partitionIndex": index, "highWatermark": 9, "records": b"".join(found) + found[0][:40]})
            wanted += [(index, batch) for batch in found if topic in bodies.LOGS]
        topics.append({"topic": topic, "topicId": identity, "partitions": parts})
    if padding:
        batch = write_batch([Record(90, 1, None, bytes(padding))])
        topics.append({"topic": "orders", "topicId": IDS["orders"], "partitions": [{"records": batch}]})
    return codec.encode_response(1, version, {"correlationId": 0}, {"responses": topics}), wanted


def logged(found):
    return [(each.partition, bytes(each.copy.data)) for each in found.logged]


@pytest.mark.parametrize("version", (4, 11, 12, 13, 17))
@pytest.mark.parametrize("detail", (bodies.SUMS, bodies.TOPICS, bodies.BATCHES, bodies.RECORDS))
def test_any_pieces(version, detail):
    frame, wanted = answer(version)
    logs, dice = Logs(), random.Random(version)
    room = bodies.Room(lambda topic, identity: True, 1 << 20, 1 << 20)
    more = {"room": room} if detail == bodies.RECORDS else {}
    read = bodies.body_reader(1, version, "response", detail, True)
    plain = bodies.body_reader(1, version, "response", detail)(frame, 4, len(frame))
    found = read(frame, 4, len(frame), logs=logs, **more)
    assert logged(found) == wanted and found.partitions == plain.partitions
    for largest in (1, 7, 100, 1000):
        walker = BodyWalker(1, version, detail=detail, room=room, logs=logs, ahead_bytes=4)
        pos = 0
        while pos < len(frame):
            end = min(len(frame), pos + dice.randint(1, largest))
            walker.feed(frame, pos, end)
            pos = end
        walker.finish()
        assert walker.fault is None and logged(walker) == wanted and walker.partitions == list(plain.partitions)


@pytest.mark.parametrize("padding", (0, 2 * SMALL_BODY))
@pytest.mark.parametrize("cuts", ([], [5, 300, 2000]))
def test_a_session_copies_them_of_small_and_large_answers(padding, cuts):
    frame, wanted = answer(12, padding)
    interest = Interest(details=True, detail=bodies.TOPICS, logs=Logs())
    talk = Dialogue(interest).client(request(1, 12, 0)).broker(sized(frame), cuts)
    assert logged(talk.exchanges[0].response_body) == wanted and not talk.faults


def test_what_is_known_by_its_id_alone_is_looked_at_once():
    frame, wanted = answer(13)
    logs = Logs()
    assert [logs.may_be(None, identity) for identity in IDS.values()] == [True, True, True]
    bodies.body_reader(1, 13, "response", bodies.TOPICS, True)(frame, 4, len(frame), logs=logs)
    assert [logs.may_be(None, identity) for identity in IDS.values()] == [True, False, True]
    logs.learn({IDS["__consumer_offsets"]: "copies-of-offsets", IDS["orders"]: "orders"})  # it was only like it
    assert not logs.may_be(None, IDS["__consumer_offsets"])
    found = bodies.body_reader(1, 13, "response", bodies.TOPICS, True)(frame, 4, len(frame), logs=logs)
    assert logged(found) == wanted[4:]


def test_what_has_no_room_is_left_out():
    frame, wanted = answer(12)
    logs = Logs(all_bytes=len(wanted[0][1]) + 10)
    found = bodies.body_reader(1, 12, "response", bodies.TOPICS, True)(frame, 4, len(frame), logs=logs)
    assert logged(found) == wanted[:1] and logs.left_out == len(wanted) - 1
    del found
    assert logs.free_bytes == len(wanted[0][1]) + 10


def copied(topic, identity, data):
    """A batch that was copied, as a reader of bodies hands it over."""
    ((_, header),) = iterate_headers(memoryview(data))
    return SimpleNamespace(topic=topic, topic_id=identity, header=header, copy=SimpleNamespace(data=bytearray(data)))


def test_an_id_is_decided_by_the_first_batch_that_tells_and_until_then_doubted(monkeypatch):
    monkeypatch.setattr("kproxy.wire.bodies.logs.MAX_TOPICS", 5)
    logs = Logs()
    log, orders, other = (batches(topic, 0)[0] for topic in IDS)
    marker = write_batch([Record(0, 1, b"\0\0\0\1", bytes(6))], is_control=True)
    assert not logs.accepts(copied(None, IDS["orders"], marker))
    assert logs.doubted == {IDS["orders"].int} and logs.decided == {}
    assert logs.may_be(None, IDS["orders"])
    assert logs.accepts(copied(None, IDS["__consumer_offsets"], log))
    assert not logs.accepts(copied(None, IDS["orders"], orders))
    assert logs.decided == {IDS["__consumer_offsets"].int: True, IDS["orders"].int: False}
    assert logs.accepts(copied(None, IDS["__consumer_offsets"], marker))
    assert not logs.accepts(copied(None, IDS["orders"], marker)) and not logs.may_be(None, IDS["orders"])
    assert logs.doubted == {IDS["orders"].int}
    logs.learn(
        {IDS["__transaction_state"]: "__transaction_state", UUID(int=9): "orders", IDS["orders"]: "__consumer_offsets"}
    )
    # two names and three ids: there is no room for more, but what is decided can be decided anew
    assert logs.decided[IDS["orders"].int] and logs.decided[IDS["__transaction_state"].int]
    assert UUID(int=9).int not in logs.decided
    assert not logs.may_be(None, UUID(int=9)) and logs.may_be("__consumer_offsets", None)
    assert not logs.may_be("orders", IDS["orders"]) and logs.accepts(copied("any", None, other))

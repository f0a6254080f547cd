"""Batches of coordinators' logs in answers of Fetch: copied whole, whatever the pieces, and those of no other topic."""

import random
from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.records import Record, write_batch
from kproxy.wire import bodies
from kproxy.wire.bodies import BodyWalker, Logs

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


def answer(version):
    """A Fetch answer of all topics, and the batches of logs in it."""
    wanted, topics = [], []
    for topic, identity in IDS.items():
        parts = []
        for index in (0, 1):
            found = batches(topic, 10 * index)
            parts.append({"partitionIndex": index, "highWatermark": 9, "records": b"".join(found) + found[0][:40]})
            wanted += [(index, batch) for batch in found if topic in bodies.LOGS]
        topics.append({"topic": topic, "topicId": identity, "partitions": parts})
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

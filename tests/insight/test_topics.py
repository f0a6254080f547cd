"""Topics: names and partition counts of every capture equal what its brokers describe at its end."""

from uuid import UUID

from kproxy.insight import topics
from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.topics import APIS, Topics
from kproxy.protocol.apis import LEADER_AND_ISR
from tests import captures
from tests.insight.truth import CAPTURE, decoded_exchanges


def test_topics_have_names_and_counts():
    known = Topics()
    for each in decoded_exchanges(CAPTURE, (9092,), APIS):
        known.feed(each)
    assert "clicks-21e2" in known.names.values()
    assert sorted(count for topic, count in known.partitions.items() if not topic.startswith("__")) == [6, 7]


def test_topic_ids_are_learnt_from_controllers():
    known = Topics()
    for each in decoded_exchanges(captures.capture("k39_zk_cluster"), range(9091, 9094), {LEADER_AND_ISR}):
        known.feed(each)
    assert "__consumer_offsets" in known.names.values() and not known.partitions


def test_created_topics_are_known_and_missing_ones_are_not():
    known = Topics({UUID(int=9): "before"})
    created = [
        {"name": "new", "topicId": UUID(int=5), "numPartitions": 3, "errorCode": 0},
        {"name": "refused", "topicId": UUID(int=0), "numPartitions": -1, "errorCode": 36},
    ]
    known.feed(DecodedExchange(19, 7, {}, {"topics": created}, 1, 2))
    assert known.names == {UUID(int=9): "before", UUID(int=5): "new"}
    assert known.partitions == {"new": 3}
    gone = {"name": "new", "topicId": UUID(int=0), "errorCode": 3, "partitions": []}
    known.feed(DecodedExchange(3, 12, {}, {"topics": [gone]}, 1, 2))
    known.feed(DecodedExchange(3, 12, {}, None, 1, 0))
    assert known.partitions == {"new": 0}


def test_topics_are_bounded(monkeypatch):
    monkeypatch.setattr(topics, "MAX_TOPICS", 10)
    known = Topics()
    for number in range(1, 30):
        topic = {"name": f"t{number}", "topicId": UUID(int=number), "errorCode": 0, "partitions": [1]}
        known.feed(DecodedExchange(3, 12, {}, {"topics": [topic]}, 1, 2))
    assert (len(known.names), len(known.partitions), known.left_out) == (10, 10, 38)


def test_the_old_size_of_a_grown_topic_is_kept_while_clients_may_not_know_the_new_one(monkeypatch):
    monkeypatch.setattr(topics, "MAX_GROWN", 3)
    known = Topics()

    def feed_metadata(name, count, at):
        topic = {"name": name, "topicId": UUID(int=1), "errorCode": 0, "partitions": [1] * count}
        known.feed(DecodedExchange(3, 12, {}, {"topics": [topic]}, at, at))

    feed_metadata("t", 3, 1)
    assert not known.before(1)
    feed_metadata("t", 5, 10)
    feed_metadata("t", 5, 20)
    feed_metadata("t", 4, 30)  # a response of a broker that is behind
    assert known.before(40) == {"t": 3}
    assert not known.before(10 + topics.GROWN_NS)
    for number in range(9):
        feed_metadata(f"t{number}", 1, 50)
        feed_metadata(f"t{number}", 2, 60)
    assert known.before(70) == {"t6": 1, "t7": 1, "t8": 1}

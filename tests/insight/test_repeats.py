"""Skipping repeated frames changes nothing about the result."""

import random

import pytest

from kproxy.insight.decoded import decode_exchange
from kproxy.insight.knowledge import Knowledge
from kproxy.insight.repeats import MAX_DIGESTS, Repeats
from kproxy.insight.rows import Leadership, Topology
from kproxy.protocol.apis import CREATE_TOPICS, METADATA
from tests.wire.playbook import request, response


def metadata(dice, correlation_id):
    """One of few responses: topics that appear, disappear and grow, and leaders that move."""
    partitions = [
        {"partitionIndex": index, "leaderId": dice.choice((1, 2)), "replicaNodes": [1, 2], "isrNodes": [1, 2]}
        for index in range(dice.choice((1, 2)))
    ]
    error = dice.choice((0, 0, 0, 3, 29))
    topics = [{"name": "t", "errorCode": error, "partitions": [] if error else partitions}]
    brokers = [{"nodeId": node, "host": "b", "port": 9092 + node} for node in dice.choice(((1, 2), (1,)))]
    body = {"throttleTimeMs": correlation_id, "brokers": brokers, "topics": topics}
    asked = request(METADATA, 12, correlation_id, {}, client=dice.choice(("a", "b", None)))
    return METADATA, 12, asked, response(METADATA, 12, correlation_id, body)


def created(dice, correlation_id):
    topic = {"name": "t", "numPartitions": dice.choice((1, 4)), "replicationFactor": 1}
    frames = request(CREATE_TOPICS, 7, 1, {"topics": [topic]}), response(CREATE_TOPICS, 7, 1, {"topics": [topic]})
    return CREATE_TOPICS, 7, *frames


@pytest.mark.parametrize("seed", range(40))
def test_skipping_repeats_gives_the_rows_of_decoding_everything(seed):
    dice, repeats = random.Random(seed), Repeats()
    whole, quick = Knowledge("c"), Knowledge("c")
    for number in range(200):
        key, version, *frames = dice.choice((metadata, metadata, metadata, created))(dice, number)
        at = number * 1000
        expected = list(whole.feed(decode_exchange(key, version, *frames, at, at + 1)))
        if repeats.is_one(key, version, *frames):
            assert expected == []
        else:
            exchange = decode_exchange(key, version, *frames, at, at + 1)
            rows = list(quick.feed(exchange))
            repeats.fed(exchange, rows, quick.topics.changes)
            assert rows == expected
        assert quick.topics.partitions == whole.topics.partitions
    assert repeats.count


def test_a_refused_topic_is_reported_once_per_client_and_again_after_it_existed():
    repeats, known, changes = Repeats(), Knowledge("c"), []
    missing = {"name": "t", "errorCode": 3, "partitions": []}
    there = {"name": "t", "errorCode": 0, "partitions": []}
    for number, (client, topic) in enumerate(
        (client, topic) for topic in (missing, there, missing) for client in "aabbab"
    ):
        frames = request(METADATA, 12, number, {}, client), response(METADATA, 12, number, {"topics": [topic]})
        if not repeats.is_one(METADATA, 12, *frames):
            exchange = decode_exchange(METADATA, 12, *frames, number, number)
            rows = list(known.feed(exchange))
            repeats.fed(exchange, rows, known.topics.changes)
            changes += [(client, row.change) for row in rows]
    assert changes == [
        *(("a", "unknown"), ("b", "unknown"), ("a", "appeared"), ("a", "gone")),
        *(("a", "unknown"), ("b", "unknown")),
    ]
    assert repeats.count == 11  # each row makes all digests be forgotten


def test_digests_are_bounded_and_forgotten_after_a_change():
    repeats, body = Repeats(), {"topics": [{"name": "t", "partitions": []}]}
    asked = request(METADATA, 12, 1)
    for node in range(3 * MAX_DIGESTS):
        answer = response(METADATA, 12, 1, body | {"controllerId": node})
        exchange = decode_exchange(METADATA, 12, asked, answer, 1, 1)
        assert not repeats.is_one(METADATA, 12, asked, answer)
        repeats.fed(exchange, [], 0)
        assert repeats.is_one(METADATA, 12, asked, answer) and len(repeats._seen) <= MAX_DIGESTS
    for row in (Leadership(1, "c", "Metadata", *[None] * 8, "created"), Topology(1, "c", "topic")):
        assert not repeats.is_one(CREATE_TOPICS, 7, asked, answer)
        repeats.fed(exchange, [row], 0)
        assert not repeats.is_one(METADATA, 12, asked, answer)
        repeats.fed(exchange, [], 0)
    assert not repeats.is_one(METADATA, 12, asked, None)

"""A worker sends the consumers that reported since the last time, and additions and removals."""

import asyncio
import pickle
from collections import defaultdict

import pytest

from kproxy.metrics.processes.published import API, TOPIC, Published
from kproxy.protocol.apis import FETCH, OFFSET_FETCH
from kproxy.wire.bodies import Found, Sums
from tests.metrics.consumers.test_lag import Cluster, batch
from tests.metrics.test_metrics import FETCH as FETCHES
from tests.metrics.test_metrics import PRODUCE, answered_at, exchange, info

SECOND = 10**9


@pytest.fixture
def sent(monkeypatch):
    """A cluster with consumers, and a function that returns the changes sent now: {kind: {key: value}}."""
    cluster = Cluster()
    monkeypatch.setattr(type(cluster.metrics), "now_ns", lambda self: cluster.now_ns)
    published = Published(cluster.metrics)

    def now(with_lags=True):
        async def all_of_it():
            return [change async for changes in published.changes(with_lags) for change in changes]

        found = defaultdict(dict)
        for (kind, *rest), data in asyncio.run(all_of_it()):
            found[kind][rest[-1] if rest else None] = None if data is None else pickle.loads(data)
        return found

    return cluster, now


def test_offsets_are_sent_once_each_time_that_they_were_learned(sent):
    """Though the clock may stand still a little."""
    cluster, now = sent
    orders = ("orders", 0)
    for group in ("first", "second"):
        consumer = cluster.consumer(group)
        consumer.fetch({orders: 0}, {orders: (10, None)})
        consumer.commit(group, {orders: 3})
    cluster.now_ns += 2 * SECOND
    found = now()
    assert {group: position.offset for (group, _), position in found["committed"].items()} == {"first": 3, "second": 3}
    assert found["log"][orders].high_watermark == 10
    assert len(found["fetching"]) == 2
    for offset in (4, 5):
        consumer.commit("second", {orders: offset})
        found = now()
        assert {group: position.offset for (group, _), position in found["committed"].items()} == {"second": offset}
        assert not found["log"] and not found["fetching"]
    assert not now()["committed"]


def test_a_consumer_is_sent_when_it_fetches_and_removed_when_it_leaves(sent):
    cluster, now = sent
    orders = ("orders", 0)
    consumer = cluster.consumer("shop")
    consumer.fetch({orders: 0}, {orders: (10, None)})
    ((path, (client_id, asked_ns, positions, _)),) = now()["fetching"].items()
    assert (client_id, asked_ns) == ("shop", consumer.talk.now) and list(positions) == [orders]
    cluster.now_ns += SECOND
    now()
    assert not now()["fetching"]
    consumer.fetch({orders: 7}, {orders: (10, None)})
    assert not now(with_lags=False)["fetching"]
    ((again, (_, _, positions, _)),) = now()["fetching"].items()
    assert again == path and positions[orders].offset == 7
    cluster.metrics.cluster("default").lags.fetching.clear()
    assert not now(with_lags=False)["fetching"]
    assert now()["fetching"] == {path: None}
    assert not now()["fetching"]


def test_the_contents_of_a_slow_response_are_sent(sent):
    """It counts from its first byte, and changes were sent since then."""
    cluster, now = sent
    orders = ("orders", 0)
    consumer, other = cluster.consumer(), cluster.consumer("other")
    consumer.fetch({orders: 0}, {orders: (10, None)})
    consumer.commit("billing", {orders: 3})
    now()
    cluster.now_ns += SECOND

    def slowly():
        cluster.now_ns += SECOND
        now()
        cluster.now_ns += 5 * SECOND
        other.commit("billing", {orders: 7})

    topic = {"topic": "orders", "partitions": [{"partition": 0, "fetchOffset": 10}]}
    answered = {"partitionIndex": 0, "highWatermark": 500, "records": batch(10, 20)}
    answer = {"responses": [{"topic": "orders", "partitions": [answered]}]}
    consumer.ask(FETCH, 12, {"topics": [topic]}, answer, meanwhile=slowly, begins=True)
    cluster.now_ns = consumer.talk.now
    found = now()
    assert found["log"][orders].high_watermark == 500
    ((_, _, positions, _),) = found["fetching"].values()
    assert positions[orders].offset == 30
    assert found["committed"]["billing", orders].offset == 7
    cluster.now_ns += 2 * SECOND
    assert not {"log", "fetching", "committed"} & now().keys()


def test_a_commit_answered_before_a_slow_offset_fetch_ends_is_sent(sent):
    cluster, now = sent
    orders = ("orders", 0)
    consumer, tool = cluster.consumer(), cluster.consumer("tool")

    def slowly():
        cluster.now_ns += 5 * SECOND
        now()
        cluster.now_ns += 5 * SECOND
        consumer.commit("billing", {orders: 7})
        cluster.now_ns += SECOND

    partition = {"partitionIndex": 0, "committedOffset": 3, "errorCode": 0}
    answer = {"groups": [{"groupId": "other", "topics": [{"name": "orders", "partitions": [partition]}]}]}
    asked = {"groups": [{"groupId": "other", "topics": None}]}
    tool.ask(OFFSET_FETCH, 8, asked, answer, meanwhile=slowly, begins=True)
    assert {group: at.offset for (group, _), at in now()["committed"].items()} == {"billing": 7, "other": 3}


def test_cells_are_sent_whenever_they_have_counted(sent):
    """Even if requests and responses, or a topic's two directions, grow by the same number of bytes."""
    cluster, now = sent
    connection = cluster.metrics.connection(info(), "main", "1", topics=True)

    def counts(request_bytes, response_bytes, written, read):
        asked, answered = Found(), Found()
        asked.sums = [Sums("orders", None, written, 1, 1, 1)]
        answered.sums = [Sums("orders", None, read, 1, 1, 1)]
        sizes = {"request_bytes": request_bytes, "response_bytes": response_bytes}
        at = {"request_start": cluster.now_ns, **answered_at(cluster.now_ns)}
        produced = exchange(PRODUCE, **sizes, **at, request_body=asked)
        connection.events([produced, exchange(FETCHES, **at, response_body=answered)])
        return now()

    total = 0
    for sizes in ((7, 0, 9, 0), (50, 50, 80, 80), (60, 60, 90, 90), (1, 0, 0, 1)):
        found = counts(*sizes)
        total += sizes[0]
        assert found[API]["9"].request_bytes == total
        assert TOPIC in found
        assert not {API, TOPIC} & now().keys()

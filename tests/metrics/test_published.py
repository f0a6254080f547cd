"""What a worker sends of consumers: those that reported since the last time, and each that is new or gone."""

import asyncio
import pickle
from collections import defaultdict

import pytest

from kproxy.metrics.published import Published
from tests.metrics.test_lag import Cluster

SECOND = 10**9


@pytest.fixture
def sent(monkeypatch):
    """A cluster with consumers, and what is sent of it now: {kind: {key: value}}."""
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


def test_offsets_are_sent_when_they_were_reported_since_the_last_time_or_up_to_a_second_before(sent):
    """A second, since the clock may stand still a little; what was sent twice is only put in its place twice."""
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
    cluster.now_ns += 5 * SECOND
    consumer.commit("second", {orders: 4})
    reported_ns = consumer.talk.now
    cluster.now_ns = reported_ns + SECOND
    for _ in range(2):  # the second time it is a second old, to the nanosecond
        found = now()
        assert {group: position.offset for (group, _), position in found["committed"].items()} == {"second": 4}
        assert not found["log"] and not found["fetching"]
    cluster.now_ns += 1
    assert now()["committed"]
    assert not now()["committed"]


def test_a_consumer_is_sent_when_it_asks_and_taken_back_when_it_goes(sent):
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

"""Consumer lag: fetch sessions, offsets by topic name and id, rebalances, and limits."""

import random
import sys
import threading
from collections import Counter
from time import time_ns
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.metrics import Metrics
from kproxy.metrics.consumers import lag, log_end, offsets
from kproxy.metrics.counters.named import EXPIRY_NS, MAX_LABEL, OTHER, Topics
from kproxy.protocol.apis import FETCH, METADATA, OFFSET_COMMIT
from kproxy.protocol.records import Record, write_batch
from kproxy.wire.bodies import TOPICS
from kproxy.wire.interest import Interest
from tests.metrics.test_metrics import info, labels, scrape
from tests.wire.playbook import MS, Dialogue, request, response

NAMES = {UUID(int=1): "orders", UUID(int=2): "invoices"}
IDS = {name: identity for identity, name in NAMES.items()}
NOW_MS = 1_700_000_000_000
RECORDS = "kproxy_consumer_lag_records"
SECONDS = "kproxy_consumer_lag_seconds"


def batch(base, count, written_ms=NOW_MS):
    return write_batch([Record(base + number, written_ms, None, b"v") for number in range(count)])


class Cluster:
    """Consumers of one cluster, each on its own connection, and their lag in a scrape."""

    def __init__(self, detail=TOPICS):
        self.metrics = Metrics()
        self.interest = Interest(detail=detail)
        self.now_ns = NOW_MS * 1_000_000

    def consumer(self, client="c", version=12):
        return Consumer(self, client, version)

    def lags(self, by="client_id"):
        lags = self.metrics.cluster("default").lags
        for kind, rows in lags.shown(self.now_ns, self.now_ns):
            if kind == by:
                return {
                    (name, topic): (lag.records, lag.seconds and pytest.approx(lag.seconds, abs=0.02))
                    for name, topic, lag in rows
                    if lag.records is not None
                }
        raise AssertionError(by)


class Consumer:
    def __init__(self, cluster, client, version):
        self.cluster = cluster
        self.client = client
        self.version = version
        self.talk = Dialogue(cluster.interest)
        self.counting = cluster.metrics.connection(info(), "main", "1", topics=bool(cluster.interest.detail))
        self.number = 0

    def ask(self, key, version, body, answer, cuts=(), meanwhile=None, begins=False):
        """meanwhile: called before the response, or with `begins` after its first bytes."""
        self.number += 1
        self.talk.now = self.cluster.now_ns
        self.talk.client(request(key, version, self.number, body, client=self.client), cuts)
        frame = response(key, version, self.number, answer)
        if meanwhile is not None:
            first = 20 if begins else 0
            self.talk.broker(frame[:first])
            meanwhile()
            self.talk.now = self.cluster.now_ns
            frame = frame[first:]
        self.talk.broker(frame, cuts)
        assert not self.talk.faults
        self.counting.events(self.talk.events)
        self.talk.events.clear()

    def fetch(self, asked, answered, epoch=-1, forgotten=(), error=0, cuts=()):
        """asked: {(topic, partition): offset}; answered: {(topic, partition): (high watermark, records or error)}"""
        body = {
            "maxWaitMs": 500,
            "sessionEpoch": epoch,
            "topics": [
                {**self.topic(topic), "partitions": [{"partition": number, "fetchOffset": offset}]}
                for (topic, number), offset in asked.items()
            ],
            "forgottenTopicsData": [{**self.topic(topic), "partitions": [number]} for topic, number in forgotten],
        }
        answer = {"errorCode": error, "responses": []}
        for (topic, number), (high_watermark, records) in answered.items():
            partition = {"partitionIndex": number, "highWatermark": high_watermark}
            partition |= {"errorCode": records} if isinstance(records, int) else {"records": records}
            answer["responses"].append({**self.topic(topic), "partitions": [partition]})
        self.ask(FETCH, self.version, body, answer, cuts)

    def topic(self, name):
        return {"topic": name} if self.version < 13 else {"topicId": IDS[name]}

    def commit(self, group, offsets, version=8, errors=()):
        def topics(of):
            for (name, number), offset in offsets.items():
                topic = {"name": name} if version < 10 else {"topicId": IDS[name]}
                yield {**topic, "partitions": [of(number, offset)]}

        body = {
            "groupId": group,
            "topics": list(topics(lambda number, offset: {"partitionIndex": number, "committedOffset": offset})),
        }
        error = dict.fromkeys(errors, 22)
        answer = {"topics": list(topics(lambda n, _: {"partitionIndex": n, "errorCode": error.get(n, 0)}))}
        self.ask(OFFSET_COMMIT, version, body, answer)


def test_restarting_the_lags_of_a_cluster_drops_those_learned_so_far():
    cluster = Cluster()
    cluster.metrics.restart_lags("default")
    assert cluster.metrics.cluster("default").lags is None  # nothing is decoded
    consumer = cluster.consumer()
    consumer.fetch({("orders", 0): 5}, {("orders", 0): (15, b"")})
    assert cluster.lags() == {("c", "orders"): (10, None)}
    cluster.metrics.restart_lags("default")
    assert cluster.lags() == {}
    cluster.consumer("d").fetch({("orders", 0): 5}, {("orders", 0): (25, b"")})
    assert cluster.lags() == {("d", "orders"): (20, None)}


@pytest.mark.parametrize("version", [4, 6, 12, 13, 16, 18])
def test_a_consumer_without_a_fetch_session_names_all_partitions_each_time(version):
    cluster = Cluster()
    consumer = cluster.consumer(version=version)
    orders = ("orders", 0)
    topic = "orders" if version < 13 else cluster.metrics.cluster("default").topics.label(IDS["orders"])
    consumer.fetch({orders: 100}, {orders: (100, None)})
    assert cluster.lags() == {("c", topic): (0, 0.0)}
    consumer.fetch({orders: 100}, {orders: (500, batch(100, 50))}, cuts=[70, 100])
    cluster.now_ns += 2 * 10**9
    assert cluster.lags() == {("c", topic): (350, 2.0)}
    consumer.fetch({orders: 150}, {orders: (500, batch(150, 350, NOW_MS + 1500))})
    assert cluster.lags() == {("c", topic): (0, 0.0)}
    consumer.fetch({orders: 200}, {orders: (500, None)})  # it seeks back, into the middle of an earlier response
    assert cluster.lags() == {("c", topic): (300, 2.0)}  # not older than record 149
    consumer.fetch({("orders", 1): 7}, {("orders", 1): (9, None)})  # it skips the other partition for now
    assert cluster.lags()["c", topic][0] == 302


@pytest.mark.parametrize("version", [7, 11, 13, 18])
def test_a_fetch_session_keeps_its_partitions(version):
    """KIP-227: a request names only added and removed partitions, a response only changed ones."""
    cluster = Cluster()
    consumer = cluster.consumer(version=version)
    consumer.ask(METADATA, 12, {}, {"topics": [{"name": name, "topicId": key} for key, name in NAMES.items()]})
    a, b, c = ("orders", 0), ("orders", 1), ("invoices", 0)
    consumer.fetch({a: 10, b: 20, c: 30}, {a: (10, None), b: (25, None), c: (30, None)}, epoch=0)
    assert cluster.lags() == {("c", "orders"): (5, None), ("c", "invoices"): (0, 0.0)}
    consumer.fetch({}, {a: (14, batch(10, 2))}, epoch=1)
    assert cluster.lags()["c", "orders"] == (7, 0.0)
    consumer.fetch({a: 12}, {c: (33, None)}, epoch=2)
    assert cluster.lags() == {("c", "orders"): (7, 0.0), ("c", "invoices"): (3, 0.0)}
    for epoch in range(3, 9):  # a long idle time
        cluster.now_ns += lag.UNCONFIRMED_NS // 4
        consumer.fetch({}, {}, epoch=epoch)
    assert {of: lag[0] for of, lag in cluster.lags().items()} == {("c", "orders"): 7, ("c", "invoices"): 3}
    consumer.fetch({}, {}, epoch=9, forgotten=[b, c])
    assert {of: lag[0] for of, lag in cluster.lags().items()} == {("c", "orders"): 7, ("c", "invoices"): 3}
    cluster.now_ns += lag.UNCONFIRMED_NS + 10 * MS
    consumer.fetch({}, {}, epoch=10)  # it paused them: its positions stay
    assert {of: lag[0] for of, lag in cluster.lags().items()} == {("c", "orders"): 7, ("c", "invoices"): 3}
    consumer.fetch({b: 21}, {b: (25, None)}, epoch=11)
    assert cluster.lags()["c", "orders"][0] == 6
    consumer.fetch({a: 0}, {}, epoch=12, error=70)  # the broker does not know the session: ignored
    assert cluster.lags()["c", "orders"][0] == 6
    consumer.fetch({a: 13}, {a: (14, None)}, epoch=0)  # a new session names all partitions again
    cluster.now_ns += lag.UNCONFIRMED_NS + 10 * MS
    consumer.fetch({}, {}, epoch=1)
    assert {of: lag[0] for of, lag in cluster.lags().items()} == {("c", "orders"): 5, ("c", "invoices"): 3}


def test_the_lag_of_an_idle_consumer_follows_high_watermarks_seen_by_others():
    cluster = Cluster()
    slow, quick = cluster.consumer("slow"), cluster.consumer("quick", version=16)
    slow.ask(METADATA, 12, {}, {"topics": [{"name": "orders", "topicId": IDS["orders"]}]})
    orders = ("orders", 0)
    slow.fetch({orders: 0}, {orders: (10, batch(0, 10))})
    quick.fetch({orders: 0}, {orders: (1000, batch(0, 1000, NOW_MS + 100))})
    cluster.now_ns += 10**9
    assert cluster.lags() == {("slow", "orders"): (990, 1.0), ("quick", "orders"): (0, 0.0)}
    cluster.now_ns += lag.UNCONFIRMED_NS + 10 * MS
    assert cluster.lags().keys() == {
        ("slow", "orders")
    }  # the log end that the other one reached is no longer confirmed
    slow.counting.closed("client_closed")
    assert not cluster.lags()


def test_a_partition_that_moved_to_another_broker_is_counted_once():
    cluster = Cluster()
    here, there = cluster.consumer(), cluster.consumer()
    orders = ("orders", 0)
    here.fetch({orders: 5}, {orders: (9, None)})
    here.fetch({orders: 5}, {orders: (-1, 6)})  # NOT_LEADER_OR_FOLLOWER
    assert not cluster.lags()
    there.fetch({orders: 5}, {orders: (9, None)})
    assert cluster.lags() == {("c", "orders"): (4, None)}
    here.fetch({("orders", 1): 1}, {("orders", 1): (1, None)})
    here.fetch({}, {})
    there.fetch({("orders", 1): 1, orders: 5}, {("orders", 1): (3, None), orders: (9, None)})
    assert cluster.lags() == {("c", "orders"): (6, 0.0)}


@pytest.mark.parametrize("version", [1, 8, 10])
def test_the_lag_of_a_group_counts_from_its_committed_offsets(version):
    cluster = Cluster()
    member, committer = cluster.consumer(version=16), cluster.consumer()
    member.ask(METADATA, 12, {}, {"topics": [{"name": "orders", "topicId": IDS["orders"]}]})
    orders, other = ("orders", 0), ("orders", 1)
    member.fetch({orders: 0, other: 0}, {orders: (300, batch(0, 100)), other: (50, batch(0, 50, NOW_MS + 300))})
    committer.commit("billing", {orders: 60, other: 50}, version)  # only the last record of a response has a known time
    assert cluster.lags("group") == {("billing", "orders"): (240, None)}
    cluster.now_ns += 10**9
    committer.commit(
        "billing", {orders: 100, other: 40}, version, errors=[1]
    )  # one partition is refused, the other counts
    assert cluster.lags("group") == {("billing", "orders"): (200, 1.0)}
    member.fetch({orders: 100}, {orders: (900, batch(100, 100, NOW_MS + 900))})
    committer.commit("billing", {orders: 150}, version)
    assert cluster.lags("group") == {("billing", "orders"): (750, 1.0)}  # not older than record 99
    for first in range(200, 900, 10):  # the committed record stays dated after its mark is evicted
        member.fetch({orders: first}, {orders: (900, batch(first, 10, NOW_MS + 950))})
    committer.commit("billing", {orders: 150}, version)
    assert cluster.lags("group") == {("billing", "orders"): (750, 1.0)}
    cluster.now_ns += EXPIRY_NS + 10 * MS
    assert cluster.lags("group")["billing", "orders"][0] == 750


def test_a_lag_of_0_is_reported_only_while_fetches_confirm_the_log_end():
    """A consumer that dies at the log end must not show a lag of 0 for ever."""
    cluster = Cluster()
    member, other = cluster.consumer(), cluster.consumer("another")
    orders, clicks = ("orders", 0), ("clicks", 0)
    member.fetch({orders: 5, clicks: 5}, {orders: (5, None), clicks: (9, None)}, epoch=0)
    member.commit("billing", {orders: 5, clicks: 5})
    for epoch in range(1, 5):  # empty responses confirm that nothing changed
        cluster.now_ns += lag.UNCONFIRMED_NS // 2
        member.fetch({}, {}, epoch=epoch)
    assert cluster.lags("group") == {("billing", "orders"): (0, 0.0), ("billing", "clicks"): (4, None)}
    member.counting.closed("client_reset")
    assert cluster.lags("group") == {("billing", "clicks"): (4, None)}
    other.fetch({orders: 7}, {orders: (7, None)})
    assert cluster.lags("group") == {("billing", "orders"): (2, 120.0), ("billing", "clicks"): (4, None)}


def test_an_hour_without_a_record_is_no_lag_when_one_comes():
    """The member is at the log end, keeps committing, and its session omits unchanged partitions."""
    cluster = Cluster()
    member = cluster.consumer()
    orders = ("orders", 0)
    member.fetch({orders: 0}, {orders: (1, batch(0, 1, NOW_MS))}, epoch=0)
    member.fetch({orders: 1}, {}, epoch=1)
    member.commit("billing", {orders: 1})
    for epoch in range(2, 60):
        cluster.now_ns += 60 * 10**9
        member.fetch({}, {}, epoch=epoch)
    cluster.now_ns += 10**9
    member.commit("billing", {orders: 1})
    assert cluster.lags("group") == {("billing", "orders"): (0, 0.0)}
    # A record arrives alone in its response: its age is exact.
    member.fetch({}, {orders: (2, batch(1, 1, cluster.now_ns // MS - 300))}, epoch=60)
    cluster.now_ns += 4 * 10**9
    assert cluster.lags("group") == {("billing", "orders"): (1, 4.3)}
    member.commit("billing", {orders: 2})
    assert cluster.lags("group") == {("billing", "orders"): (0, 0.0)}
    # Later several arrive at once: they cannot be older than the last response without a change.
    cluster.now_ns += 3000 * 10**9
    member.fetch({}, {}, epoch=61)
    cluster.now_ns += 10**9 // 2
    member.fetch({}, {orders: (7, batch(2, 5, cluster.now_ns // MS))}, epoch=62)
    cluster.now_ns += 2 * 10**9
    assert cluster.lags("group") == {("billing", "orders"): (5, 2.5)}


@pytest.mark.parametrize(("lag_s", "rate"), [(40, 10), (3600, 1)])
def test_a_group_that_prefetches_has_a_lag_in_seconds_at_any_distance(lag_s, rate):
    """It fetches to the log end, `rate` responses a second, and commits records that it fetched `lag_s` ago."""
    cluster = Cluster()
    member = cluster.consumer()
    orders = ("orders", 0)
    for number in range(lag_s * 5 // 4 * rate):
        cluster.now_ns += 10**9 // rate
        member.fetch({orders: number}, {orders: (number + 1, batch(number, 1, cluster.now_ns // MS))}, epoch=number)
        if number % 50 == 0:
            member.commit("billing", {orders: max(1, number - lag_s * rate)})
    records, seconds = cluster.lags("group")["billing", "orders"]
    assert records >= lag_s * rate
    assert lag_s - 1 <= seconds.expected <= lag_s * 1.25 + 10
    assert cluster.lags() == {("c", "orders"): (0, 0.0)}


def test_a_stepped_wall_clock_moves_the_age_of_records_and_hides_nothing():
    cluster = Cluster()
    member = cluster.consumer()
    member.fetch({("orders", 0): 0}, {("orders", 0): (9, batch(0, 5))})
    lags = cluster.metrics.cluster("default").lags
    for step_s in (61, 3601, -3601):
        shown = dict(lags.shown(cluster.now_ns, cluster.now_ns + step_s * 10**9))
        assert shown["client_id"] == [("c", "orders", lag.Lag(4, pytest.approx(max(0, step_s), abs=0.1)))]


def test_topics_and_groups_that_consumers_name_are_bounded(monkeypatch):
    monkeypatch.setattr(offsets, "MAX_COMMITTED", 700)
    monkeypatch.setattr(offsets, "MAX_LOGS", 300)
    monkeypatch.setattr(lag, "MAX_POSITIONS", 100)
    cluster = Cluster()
    consumer = cluster.consumer("c" * 5000)
    for first in range(0, 500, 50):
        topics = {(f"t{number}", 0): 1 for number in range(first, first + 50)}
        consumer.fetch(topics, dict.fromkeys(topics, (10, None)), epoch=first)
    lags = cluster.metrics.cluster("default").lags
    (fetching,) = lags.fetching
    assert (len(lags.logs), len(fetching.positions), len(fetching.left)) == (300, 100, 0)
    for epoch in range(2):  # a new session each time: partitions of the old one are left
        topics = {(f"t{number}", 0): 1 for number in range(400 - 100 * epoch, 500 - 100 * epoch)}
        consumer.fetch(topics, dict.fromkeys(topics, (10, None)))
    assert (len(fetching.positions), len(fetching.left)) == (100, 100)
    for number in range(1000):
        consumer.commit(f"g{number}", {("t450", 0): number % 10})
    assert len(lags.committed) == 700
    lags_of = cluster.lags("group")
    assert len(lags_of) == lag.MAX_SERIES + 1 and lags_of[OTHER, OTHER][0] > 0
    assert sum(records for records, _ in lags_of.values()) == 70 * sum(range(1, 11))
    assert max(len(name) for name, _ in cluster.lags()) < 300


def test_many_consumers_together_hold_a_bounded_number_of_positions(monkeypatch):
    monkeypatch.setattr(lag, "MAX_ALL_POSITIONS", 150)
    cluster = Cluster()
    consumers = [cluster.consumer(f"c{number}") for number in range(20)]
    for turn in range(3):  # a new session each time: partitions of the old one are left
        for consumer in consumers:
            topics = {(f"{turn}-{number}-" + "t" * 5000, 0): 1 for number in range(20)}
            consumer.fetch(topics, dict.fromkeys(topics, (10, None)))
    lags = cluster.metrics.cluster("default").lags
    held = [key for each in lags.fetching for key in (*each.positions, *each.left)]
    assert len(held) == lags.positions <= 150 + 20
    assert max(len(topic) for topic, _ in (*held, *lags.logs)) == MAX_LABEL
    for consumer in consumers:
        consumer.counting.closed("client")
    assert lags.positions == 0 and not lags.fetching


def test_positions_of_partitions_left_are_kept_within_the_limit(monkeypatch):
    monkeypatch.setattr(lag, "MAX_ALL_POSITIONS", 20)
    cluster = Cluster()
    consumer = cluster.consumer()
    topics = {(f"t{number}", 0): 1 for number in range(20)}
    few = dict(list(topics.items())[:5])
    for asked in (topics, few):
        consumer.fetch(asked, dict.fromkeys(asked, (10, None)))
    lags = cluster.metrics.cluster("default").lags
    assert (lags.positions, lags.evicted[offsets.POSITION]) == (20, 0)


def test_lag_is_exposed_only_if_bodies_are_read():
    without_bodies = Cluster(detail=0)
    consumer = without_bodies.consumer()
    consumer.fetch({("orders", 0): 0}, {("orders", 0): (10, batch(0, 5))})
    consumer.commit("billing", {("orders", 0): 5})
    assert not any("consumer_lag" in name for name in scrape(without_bodies.metrics))
    cluster = Cluster()
    cluster.now_ns = cluster.metrics.now_ns()
    consumer = cluster.consumer()
    consumer.fetch({("orders", 0): 0}, {("orders", 0): (10, batch(0, 5))})
    consumer.commit("billing", {("orders", 0): 5})
    found = scrape(cluster.metrics)
    client = labels(cluster="default", client_id="c", topic="orders")
    group = labels(cluster="default", group="billing", topic="orders")
    assert found[RECORDS] == {client: 5, group: 5}
    age_s = time_ns() / 1e9 - NOW_MS / 1000
    assert found[SECONDS] == {client: pytest.approx(age_s, rel=1e-3), group: pytest.approx(age_s, rel=1e-3)}


T = 1_000_000 * 10**9
ORDERS = ("orders", 0)
UNCONFIRMED = lag.UNCONFIRMED_NS


@pytest.mark.parametrize(
    ("end", "fetched_ns", "behind", "is_reported"),
    [
        (8, -1, lag.Lag(3, None), True),
        (8, 0, lag.Lag(3, None, 1), True),  # the group has at least this lag
        (5, -1, lag.Lag(0, 0.0, is_exact=True), True),
        (5, 0, lag.Lag(None, None, 1), False),
        (5, 1, lag.Lag(0, 0.0, is_exact=True), True),  # a session has omitted it since, as unchanged
        (8, 1, lag.Lag(3, None), True),
    ],
)
def test_an_end_is_confirmed_for_a_minute(end, fetched_ns, behind, is_reported):
    """fetched_ns: -1: the end was reported 1 ns less than a minute ago; 0: a minute ago; 1: a session confirms it."""
    lags = lag.Lags(Topics())
    log = lags.logs[ORDERS] = log_end.Log()
    log.end(end, T, 0)
    lags._commit("billing", ORDERS, 5, T, OFFSET_COMMIT)
    now_ns = T + UNCONFIRMED + min(0, fetched_ns)
    fetching = lag.Fetching(lags)
    fetching.asked_ns = now_ns - UNCONFIRMED + max(0, fetched_ns)
    fetching.positions[ORDERS] = offsets.Position(5, -1, T)
    lags.fetching.add(fetching)
    if fetched_ns < 0:
        fetching.asked_ns = 0
    assert dict(lags.shown(now_ns, T))["group"] == [("billing", "orders", behind)]
    assert lags.ends(now_ns) == ({ORDERS: end} if is_reported else {})


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (lag.Lag(3, 5.0, 1, True), lag.Lag(4, 7.0, 2, False), lag.Lag(7, 7.0, 3, False)),
        (lag.Lag(3, 5.0), lag.Lag(None, None, 1), lag.Lag(3, 5.0, 1, False)),
        (lag.Lag(None, None, 1), lag.Lag(None, None, 1), lag.Lag(None, None, 2, False)),
        (lag.Lag(0, None), lag.Lag(2, None), lag.Lag(2, None)),
        (lag.Lag(0, None), lag.Lag(0, None), lag.Lag(0, None)),
        (lag.Lag(1, 5.0, 0, True), lag.Lag(1, 5.0, 0, False), lag.Lag(2, 5.0, 0, True)),
    ],
)
def test_lags_of_partitions_add_up_and_the_oldest_record_gives_the_age(one, other, both):
    assert lag._plus(one, other) == lag._plus(other, one) == both


def test_the_latest_positions_of_partitions_left_stay_and_evicted_ones_are_counted(monkeypatch):
    monkeypatch.setattr(lag, "MAX_POSITIONS", 2)
    lags = lag.Lags(Topics())
    fetching = lag.Fetching(lags)
    for number, held in enumerate(([0], [0, 1], [1, 2], [2, 3])):
        fetching.positions["orders", number] = offsets.Position(7, -1, T)
        fetching._leave(("orders", number), T + number)
        fetching._leave(("orders", number), T + 9)  # it has no position there any more
        assert [each for _, each in fetching.left] == held
        assert lags.evicted[offsets.POSITION] == max(0, number - 1)
    lags.positions = lag.MAX_ALL_POSITIONS + 1
    other = lag.Fetching(lags)
    other.positions[ORDERS] = offsets.Position(7, -1, T)
    other._leave(ORDERS, T)
    assert not other.left and lags.evicted[offsets.POSITION] == 3


def test_the_largest_lag_of_consumers_with_one_client_id_counts():
    lags = lag.Lags(Topics())
    lags.logs[ORDERS] = log_end.Log()
    lags.logs[ORDERS].end(100, T, 0)
    for offset in (50, 20, 70):
        fetching = lag.Fetching(lags)
        fetching.client_id, fetching.positions[ORDERS] = "c", offsets.Position(offset, -1, T)
        lags.fetching.add(fetching)
    assert dict(lags.shown(T, T))["client_id"] == [("c", "orders", lag.Lag(80, None))]


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), version=st.sampled_from([6, 7, 12, 16]))
def test_lag_is_right_whatever_fetch_sessions_omit(seed, version):
    """Model of a broker and a client with Kafka's fetch sessions; the expected lag comes from their full state."""
    dice = random.Random(seed)
    cluster = Cluster()
    consumer = cluster.consumer(version=version)
    consumer.ask(METADATA, 12, {}, {"topics": [{"name": name, "topicId": key} for key, name in NAMES.items()]})
    logs = {(topic, number): dice.randrange(50) for topic in IDS for number in range(3)}
    assigned, named, ends, left = {}, {}, {}, {}  # positions; as last named; log ends as last sent; positions left
    session = {}  # the broker's: partition -> (offset, log end last sent)
    epoch = 0
    for _ in range(40):
        for key in dice.sample(sorted(logs), 2):
            logs[key] += dice.randrange(9)
        for key in dice.sample(sorted(logs), dice.randrange(3)):
            if key in assigned:
                left[key] = assigned.pop(key)
            else:
                assigned[key] = dice.randrange(logs[key] + 1)
                left.pop(key, None)
        if version < 7 or not epoch or dice.random() < 0.1:
            epoch = 0
            asked, forgotten = dict(assigned), []
            session = {key: (offset, -1) for key, offset in assigned.items()}
        else:
            asked = {key: offset for key, offset in assigned.items() if named.get(key) != offset}
            forgotten = sorted(named.keys() - assigned.keys())
            session |= {key: (offset, session.get(key, (0, -1))[1]) for key, offset in asked.items()}
            session = {key: at for key, at in session.items() if key not in forgotten}
        named = dict(assigned)
        answer = {}
        for key, (offset, end) in session.items():
            count = min(dice.randrange(4), logs[key] - offset)
            if count or end != logs[key]:
                answer[key] = (logs[key], batch(offset, count) if count else None)
                session[key] = (offset, logs[key])
                ends[key] = logs[key]
                if count:
                    assigned[key] = offset + count
        consumer.fetch(asked, answer, epoch, forgotten)
        epoch += 1
        expected = Counter()
        for (topic, number), offset in (left | assigned).items():
            expected["c", topic] += max(0, ends[topic, number] - offset)
        assert {of: records for of, (records, _) in cluster.lags().items()} == expected


def test_a_scrape_reads_record_ages_while_logs_change():
    log = log_end.Log()
    log.marks.extend((number, number + 1, number) for number in range(log_end.MARKS))
    over = threading.Event()
    before = sys.getswitchinterval()

    def changes():
        number = log_end.MARKS
        while not over.is_set():
            number += 1
            log.marks.append((number, number + 1, number))
            log.end(number, number, number)

    sys.setswitchinterval(1e-6)
    changing = threading.Thread(target=changes)
    changing.start()
    try:
        assert all(log.age_s(-1, 1, 10**18, 10**18) == (1e9 - 1e-3, False) for _ in range(20_000))
        assert log.high_watermark > log_end.MARKS
    finally:
        over.set()
        changing.join()
        sys.setswitchinterval(before)

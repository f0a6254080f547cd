"""Lag equals that of kafka-consumer-groups or is reported as unknown: raising, lowering and removing its two offsets.

Each case is a realistic exchange between clients and a broker; the test sets the clock.
"""

from uuid import UUID

import pytest

from kproxy.metrics import Metrics
from kproxy.metrics.consumers import lag, log_end, offsets
from kproxy.metrics.consumers.log_end import Log
from kproxy.metrics.consumers.offsets import Offsets, Position, has_ended
from kproxy.metrics.counters.named import EXPIRY_NS, MAX_LABEL, Topics
from kproxy.metrics.processes import shared as shared_cells
from kproxy.metrics.processes.published import Published
from kproxy.metrics.processes.shared import Shared
from kproxy.protocol.apis import (
    CONSUMER_GROUP_HEARTBEAT,
    DELETE_GROUPS,
    DELETE_TOPICS,
    END_TXN,
    FETCH,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    JOIN_GROUP,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    PRODUCE,
    SHARE_GROUP_HEARTBEAT,
    TXN_OFFSET_COMMIT,
    UNKNOWN_TOPIC_ID,
)
from kproxy.wire.bodies import ERRORS, TOPICS
from kproxy.wire.interest import Interest
from tests.metrics.consumers.test_lag import IDS, Cluster, batch
from tests.metrics.processes.test_shared import told as published
from tests.metrics.test_metrics import labels, scrape

UNKNOWN_TOPIC = 3
S = 10**9
ORDERS, CLICKS = ("orders", 0), ("clicks", 0)


@pytest.fixture(params=["metrics", "recorded"])
def cluster(request):
    """A cluster whose bodies are read for metrics only, or for tables too."""
    cluster = Cluster()
    cluster.interest = Interest(detail=TOPICS, details=request.param == "recorded")
    return cluster


def records(cluster, by="group"):
    return {of: behind for of, (behind, _) in cluster.lags(by).items()}


def unknown(cluster):
    lags = cluster.metrics.cluster("default").lags
    found = dict(lags.shown(cluster.now_ns, cluster.now_ns))["group"]
    return {(name, topic): each.unknown for name, topic, each in found if each.unknown}


def produce(consumer, partition, count, base, version=9, error=0):
    topic, number = partition
    named = {"name": topic} if version < 13 else {"topicId": IDS[topic]}
    asked = {"index": number, "records": batch(0, count)}
    answered = {"index": number, "errorCode": error, "baseOffset": base}
    consumer.ask(
        PRODUCE,
        version,
        {"acks": -1, "topicData": [{**named, "partitionData": [asked]}]},
        {"responses": [{**named, "partitionResponses": [answered]}]},
    )


def list_offsets(consumer, partition, offset, *, timestamp=-1, isolation=0, replica=-1, epoch=-1, error=0):
    topic, number = partition
    asked = {"partitionIndex": number, "timestamp": timestamp}
    answered = {"partitionIndex": number, "errorCode": error, "offset": offset, "leaderEpoch": epoch}
    consumer.ask(
        LIST_OFFSETS,
        6,
        {"replicaId": replica, "isolationLevel": isolation, "topics": [{"name": topic, "partitions": [asked]}]},
        {"topics": [{"name": topic, "partitions": [answered]}]},
    )


def fetch_offsets(consumer, group, offsets, version=8, errors=(), meanwhile=None):
    """offsets: {(topic, partition): offset}"""
    topics = [
        {
            "name": topic,
            "partitions": [
                {"partitionIndex": number, "committedOffset": offset, "errorCode": 14 if number in errors else 0}
            ],
        }
        for (topic, number), offset in offsets.items()
    ]
    if version < 8:
        consumer.ask(OFFSET_FETCH, version, {"groupId": group, "topics": []}, {"topics": topics}, (), meanwhile)
    else:
        body = {"groups": [{"groupId": group, "topics": None}]}
        consumer.ask(OFFSET_FETCH, version, body, {"groups": [{"groupId": group, "topics": topics}]}, (), meanwhile)


def fetch(consumer, partition, offset, high_watermark, *, epoch=-1, rack="", replica=-1, error=0, **read):
    """One Fetch, with the fields that the helper of `test_lag` omits: epochs, racks, replicas, and slow responses."""
    topic, number = partition
    replicas = {"replicaId": replica} if consumer.version < 15 else {"replicaState": {"replicaId": replica}}
    asked = {"partition": number, "fetchOffset": offset, "currentLeaderEpoch": epoch}
    answered = {"partitionIndex": number, "highWatermark": high_watermark, "errorCode": error, "records": None}
    answered |= {"records": read["records"]} if "records" in read else {}
    consumer.ask(
        FETCH,
        consumer.version,
        {**replicas, "rackId": rack, "topics": [{**consumer.topic(topic), "partitions": [asked]}]},
        {"responses": [{**consumer.topic(topic), "partitions": [answered]}]},
        meanwhile=read.get("meanwhile"),
        begins=True,
    )


def delete_groups(consumer, results):
    """results: {group: error code}"""
    consumer.ask(
        DELETE_GROUPS,
        1,
        {"groupsNames": list(results)},
        {"results": [{"groupId": group, "errorCode": code} for group, code in results.items()]},
    )


def delete_topics(consumer, results, version=4):
    by_id = [{"name": None, "topicId": IDS[topic]} for topic in results]
    asked = {"topicNames": list(results)} if version < 6 else {"topics": by_id}
    answered = [
        {"name": topic, "errorCode": code, "topicId": IDS[topic] if version >= 6 else UUID(int=0)}
        for topic, code in results.items()
    ]
    consumer.ask(DELETE_TOPICS, version, asked, {"responses": answered})


def delete_offsets(consumer, group, results):
    """results: {(topic, partition): error code}"""
    asked = [{"name": topic, "partitions": [{"partitionIndex": number}]} for topic, number in results]
    answered = [
        {"name": topic, "partitions": [{"partitionIndex": number, "errorCode": code}]}
        for (topic, number), code in results.items()
    ]
    consumer.ask(OFFSET_DELETE, 0, {"groupId": group, "topics": asked}, {"errorCode": 0, "topics": answered})


def name_topics(consumer, names):
    consumer.ask(METADATA, 12, {}, {"topics": [{"name": name, "topicId": key} for name, key in names.items()]})


# --- ends of logs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 7, 9, 13])
def test_the_lag_of_a_group_without_consumers_grows_with_each_produce(cluster, version):
    member, producer = cluster.consumer(version=12 if version < 13 else 13), cluster.consumer("producer")
    name_topics(producer, IDS)
    member.fetch({ORDERS: 90}, {ORDERS: (100, None)})
    member.commit("behind", {ORDERS: 90})
    member.commit("atend", {ORDERS: 100})
    member.counting.closed("client_closed")
    produce(producer, ORDERS, 500, 100, version)
    cluster.now_ns += 62 * S
    assert records(cluster) == {("behind", "orders"): 510, ("atend", "orders"): 500}
    produce(producer, ORDERS, 1, -1, version, error=7)  # refused: the log is unchanged
    produce(producer, ORDERS, 500, 100, version)  # an idempotent producer's retry
    assert records(cluster) == {("behind", "orders"): 510, ("atend", "orders"): 500}
    cluster.now_ns += 30 * S
    seconds = cluster.lags("group")["atend", "orders"][1]
    assert seconds == pytest.approx(92, abs=1)  # the age counts from the produce


def test_produce_responses_alone_are_enough_for_the_log_end(cluster):
    """One partition is paused or its member has left; only the other is fetched."""
    producer, member = cluster.consumer("producer"), cluster.consumer()
    produce(producer, ORDERS, 1000, 0)
    member.fetch({("orders", 1): 1000}, {("orders", 1): (1000, None)})
    member.commit("billing", {ORDERS: 1, ("orders", 1): 1000})
    cluster.now_ns += 5 * S
    assert cluster.lags("group") == {("billing", "orders"): (999, 5.0)}


def test_list_offsets_of_the_latest_timestamp_sets_the_log_end(cluster):
    member, tool = cluster.consumer(), cluster.consumer("tool")
    member.commit("billing", {ORDERS: 40})
    assert records(cluster) == {} and unknown(cluster) == {("billing", "orders"): 1}
    list_offsets(tool, ORDERS, 7, timestamp=-2)  # the earliest
    list_offsets(tool, ORDERS, 90, isolation=1)  # the last stable offset
    for replica in (0, 3):
        list_offsets(tool, ORDERS, 91, replica=replica)  # sent by a follower
    list_offsets(tool, ORDERS, 92, error=6)
    assert records(cluster) == {} and unknown(cluster) == {("billing", "orders"): 1}
    list_offsets(tool, ORDERS, 100)
    assert records(cluster) == {("billing", "orders"): 60} and not unknown(cluster)


def test_a_follower_never_lowers_the_end(cluster):
    member, other = cluster.consumer(), cluster.consumer("rack-b")
    written_ms = cluster.now_ns // 10**6 - 30_000
    member.fetch({ORDERS: 899}, {ORDERS: (1000, batch(899, 1, written_ms))})
    member.commit("billing", {ORDERS: 900})
    assert cluster.lags("group") == {("billing", "orders"): (100, 30.0)}
    other.fetch({ORDERS: 880}, {ORDERS: (880, None)})
    assert cluster.lags("group") == {("billing", "orders"): (100, 30.0)}
    member.fetch({ORDERS: 900}, {ORDERS: (1000, None)})
    assert cluster.lags("group") == {("billing", "orders"): (100, 30.0)}


def test_a_log_end_reported_by_followers_only_leaves_lag_unknown(cluster):
    near, member = cluster.consumer("near"), cluster.consumer()
    fetch(near, ORDERS, 880, 900, rack="b")
    member.commit("billing", {ORDERS: 850})
    lags = cluster.metrics.cluster("default").lags
    assert not records(cluster) and not records(cluster, "client_id") and not lags.ends(cluster.now_ns)
    assert unknown(cluster) == {("billing", "orders"): 1}
    list_offsets(member, ORDERS, 890)  # an earlier value from the leader
    assert records(cluster) == {("billing", "orders"): 50} and not unknown(cluster)
    assert lags.ends(cluster.now_ns) == {ORDERS: 900}


def test_only_a_newer_leader_epoch_lowers_the_end(cluster):
    member, near = cluster.consumer(), cluster.consumer("near")
    member.commit("billing", {ORDERS: 900})
    fetch(member, ORDERS, 900, 1000, epoch=5)
    fetch(member, ORDERS, 900, 950, epoch=5)  # responses on several connections arrive in any order
    assert records(cluster) == {("billing", "orders"): 100}
    fetch(near, ORDERS, 880, 880, epoch=6, rack="b")  # a follower in the new epoch that has not caught up
    assert records(cluster) == {("billing", "orders"): 100}
    fetch(member, ORDERS, 900, 940, epoch=6)  # truncated: an unclean election
    assert records(cluster) == {("billing", "orders"): 40}
    list_offsets(member, ORDERS, 930, epoch=7)
    assert records(cluster) == {("billing", "orders"): 30}


def test_a_former_leader_does_not_raise_the_end_that_its_successor_lowered(cluster):
    """After an unclean election the isolated former leader still answers clients with old metadata."""
    member, late = cluster.consumer(), cluster.consumer("late")
    member.commit("billing", {ORDERS: 900})
    fetch(member, ORDERS, 900, 1000, epoch=5)
    cluster.now_ns += S
    fetch(member, ORDERS, 900, 940, epoch=6)
    cluster.now_ns += log_end.FENCED_NS - S
    fetch(late, ORDERS, 900, 1000, epoch=5)
    assert records(cluster) == {("billing", "orders"): 40}
    fetch(member, ORDERS, 900, 950, epoch=6)
    assert records(cluster) == {("billing", "orders"): 50}
    cluster.now_ns += 2 * S
    fetch(
        late, ORDERS, 900, 960, epoch=5
    )  # too late for a former leader: the topic was re-created and its epochs restarted
    assert records(cluster) == {("billing", "orders"): 60}


@pytest.mark.parametrize("by_asking", [True, False])
def test_a_record_does_not_get_the_age_of_a_truncated_one(cluster, by_asking):
    member = cluster.consumer()
    lags = cluster.metrics.cluster("default").lags
    fetch(member, ORDERS, 950, 1000, epoch=5, records=batch(950, 1, cluster.now_ns // 10**6 - 600_000))
    member.commit("billing", {ORDERS: 950})
    assert cluster.lags("group") == {("billing", "orders"): (50, 600.0)}
    cluster.now_ns += S
    if by_asking:
        lags.learn_ends({ORDERS: (950, 5)}, cluster.now_ns, cluster.now_ns)
    else:
        fetch(member, ORDERS, 950, 950, epoch=6)
    cluster.now_ns += 60 * S
    produce(member, ORDERS, 1, 950)
    cluster.now_ns += 5 * S
    ((_, _, found),) = dict(lags.shown(cluster.now_ns, cluster.now_ns))["group"]
    assert found.records == 1 and not found.is_exact
    assert 4.9 < found.seconds < 67


def test_a_slow_response_does_not_count_for_a_topic_re_created_meanwhile(cluster):
    member, admin = cluster.consumer(), cluster.consumer("admin")
    fetch(member, ORDERS, 0, 1000)
    member.commit("billing", {ORDERS: 900})

    def created_again():
        cluster.now_ns += S
        delete_topics(admin, {"orders": 0})
        cluster.now_ns += S
        fetch(admin, ORDERS, 0, 5)
        admin.commit("billing", {ORDERS: 3})

    fetch(member, ORDERS, 0, 1000, records=batch(0, 10), meanwhile=created_again)
    assert records(cluster) == {("billing", "orders"): 2}
    cluster.now_ns += S
    fetch(admin, ORDERS, 0, 1007)
    assert records(cluster) == {("billing", "orders"): 1004}


def together(*clusters):
    """Return the parent's merged state and log end; the order in which workers report makes no difference."""
    found = []
    for order in (clusters, clusters[::-1]):
        shared = Shared(Metrics())
        for each in order:
            shared.take(id(each), published(Published(each.metrics)))
        found.append(shared)
    ends = {shared.lags("default").logs[ORDERS].high_watermark for shared in found}
    assert len(ends) == 1
    return found[0], ends.pop()


def two_workers():
    """Two workers with one consumer each and equal clocks."""
    one, other = Cluster(), Cluster()
    one.now_ns = other.now_ns = max(one.now_ns, other.now_ns)
    return (one, one.consumer()), (other, other.consumer())


@pytest.mark.parametrize("epoch", [-1, 5])
def test_a_truncation_seen_by_one_worker_counts_for_all(epoch):
    """The other worker saw only a produce, or an earlier fetch from the leader."""
    (one, member), (other, producer) = two_workers()
    fetch(member, ORDERS, 900, 1000, epoch=5)
    produce(producer, ORDERS, 10, 990)
    if epoch >= 0:
        fetch(producer, ORDERS, 900, 1000, epoch=epoch)
    one.now_ns += 5 * S
    fetch(member, ORDERS, 900, 940, epoch=6)
    assert together(one, other)[1] == 940
    other.now_ns = one.now_ns + S
    produce(producer, ORDERS, 10, 1040)  # the log has grown since
    assert together(one, other)[1] == 1050


def test_a_newer_epoch_at_one_worker_does_not_hide_later_growth_seen_by_another():
    (one, member), (other, producer) = two_workers()
    fetch(producer, ORDERS, 900, 900, epoch=5)
    one.now_ns += S
    fetch(member, ORDERS, 900, 900, epoch=6)  # a new leader, no records lost
    other.now_ns = one.now_ns + S
    produce(producer, ORDERS, 10, 900)
    assert together(one, other)[1] == 910


@pytest.mark.parametrize("epoch", [-1, 0, 5])
def test_the_leaders_answer_to_kproxy_lowers_the_log_end_of_all_workers(epoch):
    """For example, a topic was deleted and re-created past kproxy."""
    (one, member), (other, producer) = two_workers()
    fetch(member, ORDERS, 900, 1000, epoch=epoch)
    produce(producer, ORDERS, 10, 990)
    shared, end = together(one, other)
    assert end == 1000
    lags, asked_ns = shared.lags("default"), one.now_ns + S
    lags.learn_ends({ORDERS: (5, 0)}, asked_ns, asked_ns + S)
    shared.keep_learned("default", lags, asked_ns)
    assert shared.lags("default").logs[ORDERS].high_watermark == 5
    for each in (one, other):  # workers repeat their old log end with the next change of the log
        shared.take(id(each), published(Published(each.metrics)))
    assert shared.lags("default").logs[ORDERS].high_watermark == 5
    other.now_ns = asked_ns + 2 * S
    produce(producer, ORDERS, 10, 995)  # grown past the old log end
    shared.take(id(other), published(Published(other.metrics)))
    assert shared.lags("default").logs[ORDERS].high_watermark == 1005


def spread(shared, *clusters):
    """Pass the workers' changes to the parent, and the parent's removals back to every worker."""
    for each in clusters:
        shared.take(id(each), published(Published(each.metrics)))
    for _, ended in shared.take_ended():
        for each in clusters:
            each.metrics.cluster("default").lags.ended(*ended)
    assert not [*shared.take_ended()]


@pytest.mark.parametrize("by_asking", [True, False])
def test_a_worker_receives_a_lowered_log_end_and_follows_the_log_from_there(by_asking):
    """The end was lowered by a truncation that the other worker saw, or by kproxy's own request."""
    (one, member), (other, producer) = two_workers()
    fetch(member, ORDERS, 900, 1000, epoch=5)
    produce(producer, ORDERS, 10, 990)
    shared, _ = together(one, other)
    if by_asking:
        lags, asked_ns = shared.lags("default"), one.now_ns + S
        lags.learn_ends({ORDERS: (400, 6)}, asked_ns, asked_ns + S)
        shared.keep_learned("default", lags, asked_ns)
    else:
        one.now_ns += S
        fetch(member, ORDERS, 900, 400, epoch=6)
    spread(shared, one, other)
    one.now_ns = other.now_ns = one.now_ns + 3 * S
    produce(producer, ORDERS, 10, 400)  # far below its old log end
    spread(shared, one, other)
    assert shared.lags("default").logs[ORDERS].high_watermark == 410
    one.now_ns += S
    fetch(member, ORDERS, 410, 420)
    spread(shared, one, other)
    assert shared.lags("default").logs[ORDERS].high_watermark == 420


def test_a_worker_without_changes_of_a_log_also_receives_the_lower_end_that_kproxy_requested(monkeypatch):
    (one, member), _ = two_workers()
    monkeypatch.setattr(type(one.metrics), "now_ns", lambda _: one.now_ns)
    published_by, shared = Published(one.metrics), Shared(Metrics())
    fetch(member, ORDERS, 900, 1000, epoch=5)
    member.commit("billing", {ORDERS: 0})
    one.now_ns += S
    shared.take(1, published(published_by))
    lags, asked_ns = shared.lags("default"), one.now_ns
    lags.learn_ends({ORDERS: (5, 0)}, asked_ns, asked_ns)
    shared.keep_learned("default", lags, asked_ns)
    for _, ended in shared.take_ended():
        one.metrics.cluster("default").lags.ended(*ended)
    one.now_ns += S
    produce(member, ORDERS, 3, 5)
    one.now_ns += S
    shared.take(1, published(published_by))
    assert shared.lags("default").logs[ORDERS].high_watermark == 8


def test_an_end_that_has_risen_since_is_not_lowered():
    log = log_end.Log()
    log.end(1000, 5 * S, 0)
    log.lower(400, 4 * S, 6)
    assert (log.high_watermark, log.epoch) == (1000, -1)
    log.lower(1000, 5 * S, 6)
    log.lower(400, 5 * S, 6)
    assert (log.high_watermark, log.raised_ns, log.reported_ns, log.epoch) == (400, 5 * S, 5 * S, 6)


@pytest.mark.parametrize("broker", [0, 2])
@pytest.mark.parametrize("version", [12, 13, 15, 17])
def test_a_replica_fetcher_sets_the_log_end_but_is_no_consumer(cluster, version, broker):
    replica, member = cluster.consumer("broker-2-fetcher-0", version=version), cluster.consumer()
    name_topics(replica, IDS)
    fetch(replica, ORDERS, 100, 100, replica=broker)
    member.commit("billing", {ORDERS: 60})
    assert records(cluster) == {("billing", "orders"): 40}
    assert not cluster.lags("client_id")


# --- committed offsets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 8, 10])
def test_a_commit_that_is_refused_in_part_counts_for_the_rest(cluster, version):
    member = cluster.consumer()
    name_topics(member, IDS)
    member.fetch({ORDERS: 50}, {ORDERS: (100, None)})
    member.commit("billing", {ORDERS: 50}, version)
    assert records(cluster) == {("billing", "orders"): 50}
    member.commit("billing", {ORDERS: 95, ("orders", 7): 7}, version, errors=[7])
    assert records(cluster) == {("billing", "orders"): 5} and not unknown(cluster)
    member.commit("billing", {ORDERS: 99}, version, errors=[0])
    assert records(cluster) == {("billing", "orders"): 5}


@pytest.mark.parametrize("version", [1, 5, 7, 8, 9])
def test_offset_fetch_responses_set_the_committed_offsets(cluster, version):
    member = cluster.consumer()
    member.fetch({ORDERS: 50, ("orders", 1): 10}, {ORDERS: (100, None), ("orders", 1): (10, None)})
    fetch_offsets(member, "billing", {ORDERS: 40, ("orders", 1): 10}, version)
    assert records(cluster) == {("billing", "orders"): 60}
    cluster.now_ns += S
    fetch_offsets(member, "billing", {ORDERS: -1, ("orders", 1): 4}, version, errors=[0])  # unstable, not absent
    assert records(cluster) == {("billing", "orders"): 66}
    cluster.now_ns += S
    fetch_offsets(member, "billing", {ORDERS: -1}, version)  # its offset has expired, or was deleted elsewhere
    assert records(cluster) == {("billing", "orders"): 6}


@pytest.mark.parametrize("version", [5, 8])
def test_offsets_requested_before_a_commit_do_not_replace_it(cluster, version):
    """On a tool's slow connection the coordinator may have read the offsets before the commit."""
    member, tool = cluster.consumer(), cluster.consumer("tool")
    fetch(member, ORDERS, 0, 1000)
    member.commit("billing", {ORDERS: 10})

    def commits(offset):
        cluster.now_ns += S
        member.commit("billing", {ORDERS: offset})
        cluster.now_ns += S

    def deleted():
        cluster.now_ns += S
        delete_groups(member, {"billing": 0})
        cluster.now_ns += S

    cluster.now_ns += S
    fetch_offsets(tool, "billing", {ORDERS: 10}, version, meanwhile=lambda: commits(900))
    assert records(cluster) == {("billing", "orders"): 100}
    cluster.now_ns += S
    fetch_offsets(tool, "billing", {ORDERS: -1}, version, meanwhile=lambda: commits(950))
    assert records(cluster) == {("billing", "orders"): 50}
    cluster.now_ns += S
    fetch_offsets(tool, "billing", {ORDERS: 950}, version, meanwhile=deleted)
    assert records(cluster) == {}
    cluster.now_ns += S
    fetch_offsets(tool, "billing", {ORDERS: 7}, version)
    assert records(cluster) == {("billing", "orders"): 993}


def test_0_is_an_offset_and_an_end(cluster):
    tool = cluster.consumer("tool")
    list_offsets(tool, ORDERS, 100)
    fetch_offsets(tool, "new", {ORDERS: 0})
    fetch_offsets(tool, "none", {ORDERS: -1})
    list_offsets(tool, CLICKS, 0)  # nothing was ever produced
    fetch_offsets(tool, "idle", {CLICKS: 0})
    assert records(cluster) == {("new", "orders"): 100, ("idle", "clicks"): 0} and not unknown(cluster)


@pytest.mark.parametrize("version", [2, 8, 10])
def test_a_group_that_commits_minus_one_has_no_offset(version):
    """Kafka accepts it, and its tool shows `-` for offset and lag. Another worker saw the earlier commit."""
    (one, member), (other, second) = two_workers()
    for each in (member, second):
        name_topics(each, IDS)
    fetch(member, ORDERS, 0, 100)
    member.commit("billing", {ORDERS: 40, ("orders", 1): 1}, version)
    other.now_ns += S
    second.commit("billing", {ORDERS: -1}, version)
    shared, _ = together(one, other)
    assert shared.lags("default").committed.keys() == {("billing", ("orders", 1))}
    one.now_ns += S
    member.commit("billing", {("orders", 1): -1}, version)
    assert ("billing", ("orders", 1)) not in one.metrics.cluster("default").lags.committed


def commit_in_transaction(consumer, version, offsets, transaction="shop-1", errors=()):
    """offsets: {(topic, partition): offset}"""
    asked = [
        {"name": topic, "partitions": [{"partitionIndex": number, "committedOffset": offset}]}
        for (topic, number), offset in offsets.items()
    ]
    answered = [
        {"name": topic, "partitions": [{"partitionIndex": number, "errorCode": 29 if number in errors else 0}]}
        for topic, number in offsets
    ]
    body = {"transactionalId": transaction, "groupId": "shop", "producerId": 7, "producerEpoch": 0, "topics": asked}
    consumer.ask(TXN_OFFSET_COMMIT, version, body, {"topics": answered})


def end_transaction(consumer, version, *, commits, transaction="shop-1", error=0):
    body = {"transactionalId": transaction, "producerId": 7, "producerEpoch": 0, "committed": commits}
    consumer.ask(END_TXN, version, body, {"errorCode": error})


@pytest.mark.parametrize("version", [0, 3, 5])
def test_offsets_of_a_transaction_count_once_it_is_committed(cluster, version):
    """TxnOffsetCommit and EndTxn of one producer arrive on different connections."""
    producer, coordinator = cluster.consumer(), cluster.consumer()
    for topic, end in ((ORDERS, 100), (CLICKS, 50)):
        fetch(producer, topic, 0, end)
    commit_in_transaction(producer, version, {ORDERS: 10, CLICKS: 20})
    assert records(cluster) == {}
    end_transaction(coordinator, version, commits=True, error=51)  # CONCURRENT_TRANSACTIONS: the client retries
    assert records(cluster) == {}
    end_transaction(coordinator, version, commits=True)
    assert records(cluster) == {("shop", "orders"): 90, ("shop", "clicks"): 30}
    commit_in_transaction(producer, version, {ORDERS: 40})
    end_transaction(coordinator, version, commits=True, transaction="another")
    end_transaction(coordinator, version, commits=False)
    end_transaction(coordinator, version, commits=True)
    assert records(cluster) == {("shop", "orders"): 90, ("shop", "clicks"): 30}
    commit_in_transaction(producer, version, {ORDERS: 50, ("orders", 1): 60}, errors=(1,))
    end_transaction(coordinator, version, commits=True)
    assert records(cluster) == {("shop", "orders"): 50, ("shop", "clicks"): 30}
    assert unknown(cluster) == {}
    commit_in_transaction(producer, version, {ORDERS: 70})  # the producer dies and starts again
    asked = {"transactionalId": "shop-1", "transactionTimeoutMs": 1000, "producerId": -1, "producerEpoch": -1}
    coordinator.ask(INIT_PRODUCER_ID, min(version, 4), asked, {"errorCode": 0, "producerId": 7, "producerEpoch": 1})
    end_transaction(coordinator, version, commits=True)
    assert records(cluster) == {("shop", "orders"): 50, ("shop", "clicks"): 30}


def test_a_commit_after_a_transactional_one_outlasts_the_end_of_the_transaction(cluster):
    """A coordinator keeps the offset it wrote last, in any order of EndTxn."""
    member = cluster.consumer()
    lags = cluster.metrics.cluster("default").lags
    fetch(member, ORDERS, 0, 100)
    commit_in_transaction(member, 3, {ORDERS: 10})
    cluster.now_ns += S
    member.commit("shop", {ORDERS: 50})
    cluster.now_ns += S
    lags.learn_offsets("shop", {ORDERS: 50}, (), cluster.now_ns, lambda _: True)
    end_transaction(member, 3, commits=True)
    assert records(cluster) == {("shop", "orders"): 50}
    cluster.now_ns += S
    commit_in_transaction(member, 3, {ORDERS: 60})
    cluster.now_ns += S
    commit_in_transaction(member, 3, {ORDERS: 70}, "another")
    end_transaction(member, 3, commits=True, transaction="another")
    end_transaction(member, 3, commits=True)
    assert records(cluster) == {("shop", "orders"): 30}


def test_a_transaction_does_not_restore_offsets_deleted_before_its_end(cluster):
    member = cluster.consumer()
    for topic in (ORDERS, CLICKS):
        fetch(member, topic, 0, 100)
        member.commit("shop", {topic: 5})
    deletions = (
        lambda: delete_topics(member, {"orders": 0}),
        lambda: delete_groups(member, {"shop": 0}),
        lambda: delete_offsets(member, "shop", {ORDERS: 0}),
    )
    for delete in deletions:
        cluster.now_ns += S
        fetch(member, ORDERS, 0, 100)
        commit_in_transaction(member, 3, {ORDERS: 10})
        cluster.now_ns += S
        delete()
        cluster.now_ns += S
        end_transaction(member, 3, commits=True)
        assert ("shop", "orders") not in records(cluster) and not unknown(cluster)


def test_offsets_of_transactions_that_never_end_are_bounded(cluster, monkeypatch):
    monkeypatch.setattr(offsets, "MAX_PENDING", 3)
    producer = cluster.consumer()
    fetch(producer, ORDERS, 0, 100)
    for number in range(10):
        commit_in_transaction(producer, 3, {ORDERS: number}, f"shop-{number}")
    lags = cluster.metrics.cluster("default").lags
    assert lags.evicted["committed"] == 7
    commit_in_transaction(producer, 3, {ORDERS: 1, ("orders", 1): 2, CLICKS: 3}, "all at once")
    assert lags.evicted["committed"] == 10
    for number in range(7, 10):
        commit_in_transaction(producer, 3, {ORDERS: number}, f"shop-{number}")
    assert lags.evicted["committed"] == 13  # offsets, not transactions
    end_transaction(producer, 3, commits=True, transaction="shop-2")  # forgotten
    assert records(cluster) == {}
    end_transaction(producer, 3, commits=True, transaction="shop-9")
    assert records(cluster) == {("shop", "orders"): 91}


def test_the_lag_of_a_hanging_group_grows_for_hours():
    """Its members are alive but commit nothing, while the log end keeps rising."""
    lags = lag.Lags(Topics())
    log = lags.logs[ORDERS] = log_end.Log()
    lags.committed["stuck", ORDERS] = offsets.Position(100, 1, 1 * S)
    for second in (10, 600, 3599, 3602, 7200, 100 * 3600):
        log.end(100 + second, second * S, second * S)
        found = dict(lags.shown(second * S, second * S))["group"]
        assert [(group, topic, each.records) for group, topic, each in found] == [("stuck", "orders", second)]


def test_the_lag_in_seconds_of_a_hanging_group_stays_accurate_while_the_log_grows():
    """Without fetches, only earlier log ends date the first uncommitted record."""
    lags = lag.Lags(Topics())
    log = lags.logs[ORDERS] = log_end.Log()
    lags.committed["stuck", ORDERS] = offsets.Position(100, log_end.UNKNOWN, 1 * S)
    for second in range(10, 3600, 10):
        log.end(90 + second, second * S, 0)
        ((_, _, found),) = dict(lags.shown(second * S, second * S))["group"]
        assert found.records == second - 10
        assert second - 10 <= found.seconds <= (second - 10) * 1.25 + 10


# --- removal of offsets ----------------------------------------------------------------------------------------------


def test_deleted_groups_and_offsets_have_no_lag(cluster):
    member, admin = cluster.consumer(), cluster.consumer("admin")
    member.fetch({ORDERS: 500, CLICKS: 9}, {ORDERS: (500, None), CLICKS: (9, None)})
    for group in ("gone", "kept", "offsets"):
        member.commit(group, {ORDERS: 100, CLICKS: 8})
    cluster.now_ns += 1
    delete_groups(admin, {"gone": 0, "kept": 68})  # NON_EMPTY_GROUP
    delete_offsets(admin, "offsets", {ORDERS: 0, CLICKS: 86})  # GROUP_SUBSCRIBED_TO_TOPIC
    assert records(cluster) == {
        ("kept", "orders"): 400,
        ("kept", "clicks"): 1,
        ("offsets", "clicks"): 1,
    }
    cluster.now_ns += 1
    member.commit("gone", {ORDERS: 499})
    assert records(cluster)["gone", "orders"] == 1


@pytest.mark.parametrize("version", [1, 4, 6])
def test_a_deleted_topic_has_no_lag_and_neither_has_its_successor_before_a_commit(cluster, version):
    member, admin = cluster.consumer(), cluster.consumer("admin")
    name_topics(admin, IDS)
    member.fetch({ORDERS: 1000, CLICKS: 5}, {ORDERS: (1000, None), CLICKS: (5, None)})
    member.commit("billing", {ORDERS: 900, CLICKS: 5})
    cluster.now_ns += 1
    delete_topics(admin, {"invoices": 0}, version)
    delete_topics(admin, {"orders": 29}, version)  # TOPIC_AUTHORIZATION_FAILED
    assert records(cluster)["billing", "orders"] == 100
    delete_topics(admin, {"orders": 0}, version)
    assert records(cluster) == {("billing", "clicks"): 0}
    assert not unknown(cluster)
    assert records(cluster, "client_id") == {("c", "clicks"): 0}
    cluster.now_ns += 1
    name_topics(admin, {"orders": UUID(int=77)})
    member.fetch({ORDERS: 0, CLICKS: 5}, {ORDERS: (20, None), CLICKS: (5, None)})
    assert records(cluster) == {("billing", "clicks"): 0}
    assert records(cluster, "client_id")["c", "orders"] == 20
    member.commit("billing", {ORDERS: 3})
    name_topics(admin, {"orders": UUID(int=77)} | {"orders": IDS["orders"]})  # a broker with old metadata
    assert records(cluster)["billing", "orders"] == 17


def test_a_new_topic_id_means_that_the_topic_was_re_created(cluster):
    """The deletion bypassed kproxy."""
    member, new = cluster.consumer(version=13), cluster.consumer("new", version=13)
    name_topics(member, IDS)
    member.fetch({ORDERS: 1000}, {ORDERS: (1000, None)})
    member.commit("billing", {ORDERS: 900}, 9)
    cluster.now_ns += 1
    name_topics(new, {"orders": UUID(int=77)})
    assert not records(cluster) and not unknown(cluster)
    fetch(member, ORDERS, 1000, -1, error=UNKNOWN_TOPIC_ID)  # for the old topic id: the new topic is not affected
    produce(new, ORDERS, 7, 0, version=9)
    member.commit("billing", {ORDERS: 2}, 9)
    name_topics(new, IDS)  # a broker with old metadata
    fetch(member, ORDERS, 1000, -1, error=UNKNOWN_TOPIC_ID)
    assert records(cluster) == {("billing", "orders"): 5}


def test_an_unknown_partition_error_from_the_partitions_own_broker_removes_its_offsets(cluster):
    member, elsewhere = cluster.consumer(), cluster.consumer("elsewhere")
    elsewhere.counting.move("2")
    member.fetch({ORDERS: 1000}, {ORDERS: (1000, None)})
    member.commit("billing", {ORDERS: 900})
    fetch(elsewhere, ORDERS, 1000, -1, error=UNKNOWN_TOPIC)  # another broker: its metadata may be old
    assert records(cluster) == {("billing", "orders"): 100}
    member.commit("asked", {CLICKS: 5})
    cluster.metrics.cluster("default").lags.learn_ends({CLICKS: (9, 0)}, cluster.now_ns, cluster.now_ns)
    fetch(elsewhere, CLICKS, 9, -1, error=UNKNOWN_TOPIC)
    assert records(cluster).pop(("asked", "clicks")) == 4
    delete_groups(member, {"asked": 0})
    fetch(member, ORDERS, 1000, -1, error=UNKNOWN_TOPIC)
    assert not records(cluster) and not unknown(cluster)
    lags = cluster.metrics.cluster("default").lags
    assert "billing" in lags.groups()  # a broker that has just started may know no topic: kproxy asks the coordinator
    lags.learn_offsets("billing", {ORDERS: 900}, (), cluster.now_ns + S, lambda _: True)
    lags.learn_ends({ORDERS: (1000, 0)}, cluster.now_ns + S, cluster.now_ns + S)
    assert records(cluster) == {("billing", "orders"): 100}


def test_offsets_by_topic_id_and_by_name_belong_to_one_topic(cluster):
    """The name of the topic id is learned after the offsets."""
    member, admin = cluster.consumer(version=13), cluster.consumer("admin")
    member.fetch({ORDERS: 0}, {ORDERS: (100, None)})
    member.commit("billing", {ORDERS: 5}, 10)
    name_topics(admin, IDS)
    cluster.now_ns += 1
    member.commit("billing", {ORDERS: 95}, 9)
    assert records(cluster) == {("billing", "orders"): 5}
    delete_topics(admin, {"orders": 0})
    assert not records(cluster)


def test_the_newer_offset_and_the_higher_log_end_count_whether_by_topic_id_or_by_name(cluster):
    member, other = cluster.consumer(version=13), cluster.consumer("other")
    member.fetch({ORDERS: 0}, {ORDERS: (100, None)})
    fetch(other, ORDERS, 0, 90)
    other.commit("billing", {ORDERS: 5})
    cluster.now_ns += S
    member.commit("billing", {ORDERS: 50}, 10)
    cluster.now_ns += S
    name_topics(other, IDS)
    assert records(cluster) == {("billing", "orders"): 50}


def test_an_offset_by_topic_id_is_compared_with_the_log_end_by_name(cluster):
    """Learning the name does not invent a log end for a partition without one."""
    member, other = cluster.consumer(version=13), cluster.consumer("other")
    fetch(other, ORDERS, 0, 100)
    member.commit("billing", {ORDERS: 5, ("orders", 1): 5}, 10)
    name_topics(other, IDS)
    assert records(cluster) == {("billing", "orders"): 95}
    assert unknown(cluster) == {("billing", "orders"): 1}


# --- unknown, and bounds ---------------------------------------------------------------------------------------------


def test_partitions_without_a_log_end_are_counted_as_unknown_and_left_out_of_the_sum(cluster):
    """A sidecar of a broker that is coordinator and leads one of two partitions."""
    cluster.now_ns = cluster.metrics.now_ns()
    member = cluster.consumer()
    member.fetch({ORDERS: 0}, {ORDERS: (500, None)})
    member.commit("billing", {ORDERS: 0, ("orders", 1): 0})
    member.commit("nowhere", {CLICKS: 3})
    found = scrape(cluster.metrics)
    of = labels(cluster="default", group="billing", topic="orders")
    nowhere = labels(cluster="default", group="nowhere", topic="clicks")
    assert found["kproxy_group_lag_unknown_partitions"] == {of: 1, nowhere: 1}
    by_group = {key: value for key, value in found["kproxy_consumer_lag_records"].items() if "group" in dict(key)}
    assert by_group == {of: 500}


def test_ends_and_offsets_of_two_sidecars_give_the_whole_lag():
    """One broker is coordinator and leads one partition; the other leads the second partition."""
    (one, member), (other, reader) = two_workers()
    member.fetch({ORDERS: 0}, {ORDERS: (500, None)})
    reader.fetch({("orders", 1): 0}, {("orders", 1): (500, None)})

    def joined():
        """Join both as the recording rules in dashboards/ do."""
        known = [each.metrics.cluster("default").lags for each in (one, other)]
        ends, offsets = {}, {}
        for lags in known:
            ends |= lags.ends(one.now_ns)
            offsets |= lags.offsets()
        return sum(ends[of[1:]] - offset for of, offset in offsets.items())

    member.commit("g", {ORDERS: 0, ("orders", 1): 0})
    assert joined() == 1000 and records(one) == {("g", "orders"): 500} and unknown(one) == {("g", "orders"): 1}
    member.fetch({ORDERS: 500}, {ORDERS: (500, None)})
    member.commit("g", {ORDERS: 500, ("orders", 1): 0})
    assert joined() == 500 and records(one) == {("g", "orders"): 0} and unknown(one) == {("g", "orders"): 1}
    assert not records(other)


@pytest.mark.parametrize("version", [0, 3, 4])
def test_kproxy_asks_for_the_offsets_of_a_group_that_only_sends_heartbeats(cluster, version):
    """After a restart of kproxy consumers reconnect; hanging ones neither join nor commit."""
    member = cluster.consumer()
    member.ask(JOIN_GROUP, 5, {"groupId": "billing", "protocolType": "consumer", "memberId": "m"}, {"memberId": "m"})
    member.ask(HEARTBEAT, version, {"groupId": "billing", "generationId": 3, "memberId": "m"}, {})
    member.ask(CONSUMER_GROUP_HEARTBEAT, 0, {"groupId": "audit", "memberId": "m", "memberEpoch": 5}, {})
    member.ask(SHARE_GROUP_HEARTBEAT, 1, {"groupId": "shared", "memberId": "m", "memberEpoch": 5}, {})  # has no offsets
    assert sorted(cluster.metrics.cluster("default").lags.groups()) == ["audit", "billing"]


def test_an_unconfirmed_log_end_makes_a_lag_of_0_unknown_and_any_other_a_minimum(cluster):
    """Other producers may bypass kproxy, and here kproxy asks no broker."""
    member, other = cluster.consumer(), cluster.consumer("another")
    member.fetch({ORDERS: 5, CLICKS: 5}, {ORDERS: (5, None), CLICKS: (9, None)})
    member.commit("billing", {ORDERS: 5, CLICKS: 5})
    member.counting.closed("client_closed")
    cluster.now_ns += lag.UNCONFIRMED_NS - 1
    assert records(cluster) == {("billing", "orders"): 0, ("billing", "clicks"): 4} and not unknown(cluster)
    cluster.now_ns += EXPIRY_NS
    assert records(cluster) == {("billing", "clicks"): 4}
    assert unknown(cluster) == {("billing", "orders"): 1, ("billing", "clicks"): 1}
    other.fetch({CLICKS: 20}, {CLICKS: (20, None)})
    assert records(cluster) == {("billing", "clicks"): 15} and unknown(cluster) == {("billing", "orders"): 1}


def test_a_client_at_an_unconfirmed_log_end_is_not_reported_without_lag(cluster):
    """It has paused one of two partitions, and other producers may bypass kproxy."""
    member = cluster.consumer("reader")
    member.fetch({ORDERS: 5, ("orders", 1): 5}, {ORDERS: (5, None), ("orders", 1): (5, None)})
    assert cluster.lags() == {("reader", "orders"): (0, 0.0)}
    for _ in range(3):
        cluster.now_ns += lag.UNCONFIRMED_NS // 2
        member.fetch({ORDERS: 5}, {ORDERS: (5, None)})
    ((*of, shown),) = dict(cluster.metrics.cluster("default").lags.shown(cluster.now_ns, 0))["client_id"]
    assert of == ["reader", "orders"] and shown == (0, None, 1, False)


@pytest.mark.parametrize("by", ["client_id", "group"])
def test_a_lag_of_0_seconds_is_shown_only_if_every_partition_is_known(monkeypatch, by):
    """A client then has no series of 0 records either: no metric counts its unknown partitions."""
    cluster = Cluster()
    cluster.now_ns = cluster.metrics.now_ns()
    member = cluster.consumer("reader")
    member.fetch({ORDERS: 5, ("orders", 1): 5}, {ORDERS: (5, None), ("orders", 1): (5, None)})
    member.commit("billing", {ORDERS: 5, ("orders", 1): 5})
    monkeypatch.setattr(cluster.metrics, "now_ns", lambda: cluster.now_ns)
    of = labels(cluster="default", topic="orders", **{by: {"client_id": "reader", "group": "billing"}[by]})
    assert scrape(cluster.metrics)["kproxy_consumer_lag_seconds"][of] == 0
    cluster.now_ns += 2 * lag.UNCONFIRMED_NS
    member.fetch({ORDERS: 5}, {ORDERS: (5, None)})
    found = scrape(cluster.metrics)
    assert of not in found.get("kproxy_consumer_lag_seconds", {})
    assert found.get("kproxy_consumer_lag_records", {}).get(of) == {"client_id": None, "group": 0}[by]


def test_groups_with_unknown_lag_are_the_last_to_lose_their_series(cluster, monkeypatch):
    member = cluster.consumer()
    member.fetch({ORDERS: 5}, {ORDERS: (5, None)})
    member.commit("at its end", {ORDERS: 5})
    member.commit("unknown", {CLICKS: 3})
    member.commit("unknown in part", {ORDERS: 5, ("orders", 1): 5})
    member.commit("behind", {ORDERS: 4})
    monkeypatch.setattr(lag, "MAX_SERIES", 3)
    assert {name for name, _ in unknown(cluster)} == {"unknown", "unknown in part"}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_partition_taken_over_by_another_client_is_no_lag_of_its_former_consumer(workers):
    """Members join a group one by one; earlier ones continue with their remaining partitions."""
    shared = Shared(Metrics())
    clusters = [Cluster() for _ in range(workers)]
    published_by = [Published(each.metrics) for each in clusters]
    first, second, third = (clusters[number % workers].consumer(name) for number, name in enumerate("abc"))

    def step(client, offsets, forgets=(), commits=True):
        for each in clusters:
            each.now_ns += S
        client.fetch(offsets, {key: (offset, None) for key, offset in offsets.items()}, epoch=5, forgotten=forgets)
        if commits:
            client.commit("billing", offsets)

    def shown():
        if workers == 1:
            return {name: behind for (name, _), behind in records(clusters[0], "client_id").items()}
        for number, each in enumerate(published_by):
            shared.take(number, published(each))
        found = dict(shared.merged().cluster("default").lags.shown(clusters[0].now_ns, 0))["client_id"]
        return {name: each.records for name, topic, each in found}

    one = ("orders", 1)
    step(first, {ORDERS: 10, one: 10})
    step(first, {ORDERS: 20}, [one])
    step(second, {one: 60}, commits=False)
    assert shown() == {"a": 50, "b": 0}  # a may have paused it, and b may be in another group
    step(second, {one: 70})
    assert shown() == {"a": 0, "b": 0}
    step(third, {one: 90})
    second.fetch({CLICKS: 3}, {CLICKS: (3, None)}, epoch=6, forgotten=[one])
    assert shown() == {"a": 0, "b": 0, "c": 0}
    step(first, {ORDERS: 20, one: 95})
    step(third, {CLICKS: 3}, [one])
    step(first, {ORDERS: 20}, [one], commits=False)  # now a has paused it
    step(second, {one: 99}, commits=False)
    assert shown()["a"] == 4


def test_a_throttled_empty_fetch_response_confirms_no_log_end(cluster):
    """A broker that throttles a Fetch answers without partitions even if they have new records."""
    member = cluster.consumer()
    member.fetch({ORDERS: 5}, {ORDERS: (5, None)}, epoch=0)
    member.commit("billing", {ORDERS: 5})
    throttled = {"throttleTimeMs": 1, "responses": []}
    for _ in range(7):
        cluster.now_ns += 9 * S
        member.ask(FETCH, 12, {"sessionEpoch": 1, "topics": [], "forgottenTopicsData": []}, throttled)
    assert not records(cluster) and unknown(cluster) == {("billing", "orders"): 1}
    member.fetch({}, {ORDERS: (25, None)}, epoch=2)
    assert cluster.lags("group") == {("billing", "orders"): (20, 63.0)}
    cluster.now_ns += S
    member.fetch({}, {}, epoch=3)  # no new records
    cluster.now_ns += S
    member.fetch({}, {ORDERS: (26, None)}, epoch=4)
    member.commit("billing", {ORDERS: 25})
    assert cluster.lags("group") == {("billing", "orders"): (1, 1.0)}


def test_entries_evicted_at_a_limit_are_counted(cluster, monkeypatch):
    for module, name in ((offsets, "MAX_COMMITTED"), (offsets, "MAX_LOGS"), (lag, "MAX_POSITIONS")):
        monkeypatch.setattr(module, name, 10)
    monkeypatch.setattr(offsets, "MAX_REMOVED", 4)
    monkeypatch.setattr(offsets, "MAX_SEEN", 2)
    member, admin = cluster.consumer(), cluster.consumer("admin")
    topics = {(f"t{number}", 0): 1 for number in range(13)}
    member.fetch(topics, dict.fromkeys(topics, (10, None)))
    member.commit("billing", topics)
    evicted = scrape(cluster.metrics)["kproxy_lag_evicted_total"]
    expected = {"end": 3, "committed": 3, "position": 3, "group": 0}
    assert evicted == {labels(cluster="default", kind=kind): count for kind, count in expected.items()}
    delete_groups(admin, {f"g{number}": 0 for number in range(9)})
    lags = cluster.metrics.cluster("default").lags
    for name in ("a", "b", "a", "c"):
        lags.note_group(name)
    assert (list(lags.seen), lags.evicted["group"]) == (["a", "c"], 1)
    assert len(lags.removed) == 4
    delete_groups(admin, {"billing": 0})
    assert not lags.committed and not lags._groups


def test_without_bodies_nothing_more_is_read_for_lag():
    """The plans of all APIs that lag depends on read no body."""
    interest = Interest(detail=ERRORS)
    for key, version in (
        (PRODUCE, 9),
        (LIST_OFFSETS, 6),
        (OFFSET_COMMIT, 8),
        (OFFSET_FETCH, 8),
        (DELETE_TOPICS, 6),
        (END_TXN, 3),
    ):
        plan = interest.plan(key << 16 | version)
        assert plan.request_reader is plan.response_reader is None
        assert plan.quick_scan is plan.scan
        assert (plan.prefix is None) == (key != PRODUCE)


# --- several workers -------------------------------------------------------------------------------------------------


def test_a_deletion_seen_by_one_worker_counts_for_all():
    first, second = Cluster(), Cluster()
    for cluster in (first, second):
        cluster.now_ns = first.metrics.now_ns()
    old, admin = first.consumer(), second.consumer("admin")
    old.fetch({ORDERS: 0, CLICKS: 0}, {ORDERS: (1000, None), CLICKS: (50, None)})
    for group in ("gone", "kept"):
        old.commit(group, {ORDERS: 900, CLICKS: 40})
    second.now_ns += S
    delete_groups(admin, {"gone": 0})
    delete_topics(admin, {"orders": 0})
    second.now_ns += S
    late = second.consumer("late")
    late.fetch({ORDERS: 0}, {ORDERS: (20, None)})
    late.commit("late", {ORDERS: 13})
    for order in ((first, second), (second, first)):
        shared = Shared(Metrics())
        for number, each in enumerate(order):
            shared.take(number, published(Published(each.metrics)))
        lags = shared.merged().clusters["default"].lags
        found = dict(lags.shown(second.now_ns, second.now_ns))["group"]
        assert sorted((group, topic, each.records) for group, topic, each in found) == [
            ("kept", "clicks", 10),
            ("late", "orders", 7),
        ]


def test_a_worker_learns_of_deletions_that_another_worker_saw():
    (one, member), (other, admin) = two_workers()
    name_topics(member, IDS)
    member.fetch({ORDERS: 0, CLICKS: 0}, {ORDERS: (1000, None), CLICKS: (50, None)})
    for group in ("gone", "less", "kept"):
        member.commit(group, {ORDERS: 900, CLICKS: 40})
    shared = Shared(Metrics())
    spread(shared, one, other)
    other.now_ns += S
    delete_groups(admin, {"gone": 0})
    delete_topics(admin, {"orders": 0})
    delete_offsets(admin, "less", {CLICKS: 0})
    spread(shared, one, other)
    known = one.metrics.cluster("default").lags
    assert known.logs.keys() == {CLICKS} and known.committed.keys() == {("kept", CLICKS)}
    one.now_ns = other.now_ns + S
    fetch(member, ORDERS, 0, 20)  # the topic was re-created
    member.commit("kept", {ORDERS: 13})
    one.now_ns += S
    name_topics(member, {"orders": UUID(int=77)})  # late: offsets of the new topic stay
    spread(shared, one, other)
    lags = shared.lags("default")
    assert (lags.logs[ORDERS].high_watermark, lags.committed["kept", ORDERS].offset) == (20, 13)


def test_a_fetch_response_dates_its_last_record_and_none_before_it(cluster):
    written_ms = cluster.now_ns // 10**6 - 30_000
    cluster.consumer().fetch({ORDERS: 900}, {ORDERS: (1000, batch(900, 10, written_ms))})
    log = cluster.metrics.cluster("default").lags.logs[ORDERS]
    assert [log.written_ms(offset) for offset in (900, 909, 910, 911)] == [-1, -1, written_ms, written_ms]


def test_kproxy_still_asks_for_the_latest_hundred_deleted_groups(cluster):
    """Clients that bypass kproxy may have re-created them."""
    admin = cluster.consumer()
    for number in range(150):
        cluster.now_ns += S
        delete_groups(admin, {f"g{number}": 0})
    assert set(cluster.metrics.cluster("default").lags.groups()) == {f"g{number}" for number in range(50, 150)}


def test_an_answer_to_kproxy_undoes_nothing_newer_than_its_request(cluster):
    member = cluster.consumer()
    fetch(member, ORDERS, 0, 1000)
    member.commit("gone", {ORDERS: 5})
    asked_ns = cluster.now_ns + S
    cluster.now_ns += 2 * S
    member.commit("billing", {ORDERS: 900})
    delete_groups(member, {"gone": 0})
    lags = cluster.metrics.cluster("default").lags
    for group in ("billing", "gone"):
        lags.learn_offsets(group, {ORDERS: 10}, (), asked_ns, lambda _: True)
        lags.learn_offsets(group, {}, [ORDERS], asked_ns, lambda _: True)
    assert records(cluster) == {("billing", "orders"): 100}
    later_ns = cluster.now_ns + S
    lags.learn_offsets(
        "billing", {}, [ORDERS], later_ns, lambda _: False
    )  # the answer may lack a topic with another id
    assert records(cluster) == {("billing", "orders"): 100}
    lags.learn_offsets("billing", {ORDERS: 950}, [ORDERS], later_ns, lambda _: True)
    lags.learn_offsets("gone", {ORDERS: 20}, [ORDERS], later_ns, lambda _: True)
    assert records(cluster) == {("billing", "orders"): 50, ("gone", "orders"): 980}
    lags.learn_offsets("billing", {}, [ORDERS], later_ns + S, lambda _: True)
    assert records(cluster) == {("gone", "orders"): 980}


@pytest.mark.parametrize("by_asking", [True, False])
def test_offsets_requested_before_a_commit_do_not_replace_one_seen_by_another_worker(by_asking):
    """Requested by kproxy itself, or by a tool at a worker without the commit; reported in any order."""
    (one, member), (other, tool) = two_workers()
    fetch(member, ORDERS, 0, 1000)
    member.commit("billing", {ORDERS: 10})
    shared, _ = together(one)
    lags, asked_ns = shared.lags("default"), one.now_ns + S

    def commits():
        one.now_ns = asked_ns + S
        member.commit("billing", {ORDERS: 900})
        other.now_ns = asked_ns + 2 * S

    other.now_ns = asked_ns
    if by_asking:
        commits()
        lags.learn_offsets("billing", {ORDERS: 10}, (), asked_ns, lambda _: True)
        shared.keep_learned("default", lags, asked_ns)
        shared.take(id(one), published(Published(one.metrics)))
        lags = shared.lags("default")
        lags.learn_offsets("billing", {}, [ORDERS], asked_ns, lambda _: True)
        shared.keep_learned("default", lags, asked_ns)
        assert shared.lags("default").committed["billing", ORDERS].offset == 900
    else:
        fetch_offsets(tool, "billing", {ORDERS: 10}, meanwhile=commits)
        shared, _ = together(one, other)
        assert shared.lags("default").committed["billing", ORDERS].offset == 900


def test_topic_names_and_removals_are_kept_while_offsets_are_evicted(monkeypatch):
    for module, name, most in ((shared_cells, "MAX_LOGS", 4), (shared_cells, "MAX_COMMITTED", 4)):
        monkeypatch.setattr(module, name, most)
    own, cluster = Metrics(), Cluster()
    own.cluster("default")
    member = cluster.consumer(version=13)
    name_topics(member, IDS)
    delete_groups(member, {"gone": 0})
    shared, published_by = Shared(own), Published(cluster.metrics)
    for number in range(30):
        cluster.now_ns += S
        fetch(member, ("orders", number), 0, 10)
        shared.take(1, published(published_by))
    assert own.cluster("default").lag_evicted["end"] == 24  # two of the eight are names and removals
    assert {topic for topic, _ in shared.lags("default").logs} == {"orders"}
    assert ("group", "gone") in shared.lags("default").removed


# --- one log, to the nanosecond --------------------------------------------------------------------------------------

T = 1_000 * S


def log(end=100, at_ns=T, epoch=5):
    one = Log()
    one.end(end, at_ns, 0, epoch=epoch)
    return one


def state(one):
    return one.high_watermark, one.reported_ns, one.raised_ns, one.lowered_ns, one.epoch


@pytest.mark.parametrize(
    ("offset", "more", "end", "lowered"),
    [
        (100, {}, 100, False),
        (101, {}, 101, False),
        (0, {"epoch": 6}, 0, True),
        (-1, {"epoch": 6}, 100, False),
        (99, {}, 100, False),  # late
        (99, {"epoch": 5}, 100, False),
        (99, {"epoch": 6}, 99, True),
        (99, {"epoch": 6, "by_leader": False}, 100, False),
        (99, {"asked_ns": T}, 99, True),  # not raised since the request
        (99, {"asked_ns": T - 1}, 100, False),
        (100, {"asked_ns": T - 1}, 100, False),
        (99, {"asked_ns": T - 1, "epoch": 6}, 99, True),
    ],
)
def test_the_log_end_rises_and_only_a_newer_leader_or_an_answer_to_kproxy_lowers_it(offset, more, end, lowered):
    one = log()
    one.read(90, 95, 7, T)
    one.end(offset, T + S, 0, **more)
    assert one.high_watermark == end and (one.lowered_ns > 0) == lowered
    assert (len(one.marks) == 0) == lowered  # other records now have these offsets
    assert (one.raised_ns == T + S) == (end != 100)
    assert one.reported_ns == (T if end == 100 and offset != 100 else T + S)


def test_without_a_known_epoch_a_lower_log_end_is_late():
    one = log(epoch=-1)
    one.end(50, T + S, 0, epoch=0)
    assert one.high_watermark == 100 and one.epoch == 0
    one.end(50, T + 2 * S, 0, epoch=1)
    assert one.high_watermark == 50


@pytest.mark.parametrize(
    ("now_ns", "epoch", "end"),
    [
        (T + 10 * S - 1, -1, 50),  # from before the truncation
        (T + 10 * S, -1, 60),
        (T + 10 * S, 6, 60),
        (T + 40 * S - 1, 5, 50),  # the former leader has not learned of the election
        (T + 40 * S, 5, 60),
        (T + 10 * S - 1, 6, 50),
    ],
)
def test_a_higher_end_from_before_a_truncation_is_ignored(now_ns, epoch, end):
    one = log()
    one.end(50, T + 10 * S, 0, epoch=6)
    one.end(60, now_ns, 0, epoch=epoch)
    assert one.high_watermark == end


@pytest.mark.parametrize(
    ("offset", "at_ns", "lowered"), [(100, T + S, False), (99, T + S, True), (99, T, True), (99, T - 1, False)]
)
def test_another_process_lowers_a_log_end_that_was_not_raised_since(offset, at_ns, lowered):
    one = log()
    one.read(90, 95, 7, T)
    one.lower(offset, at_ns, 4)
    assert state(one) == ((99, T, at_ns, at_ns, 5) if lowered else (100, T, T, 0, 5))
    assert (len(one.marks) == 0) == lowered


def test_a_log_end_is_known_once_a_leader_reports_it():
    one = Log()
    assert not one.is_led
    one.end(10, T, 0, by_leader=False)
    assert not one.is_led and one.high_watermark == 10
    one.end(10, T + 1, 0, broker="1")
    assert one.is_led and one.broker == "1"
    one.end(11, T + 2, 0)
    assert one.broker == "1"  # a report without a broker id does not replace it


def test_the_age_of_a_record_is_exact_if_it_was_fetched_alone_and_otherwise_a_bound():
    one = log(100)
    one.read(40, 41, (T - 9 * S) // 10**6, T)
    one.read(50, 52, (T - 8 * S) // 10**6, T)
    wall_ns = T + S
    assert one.age_s(40, -1, T, wall_ns) == (10.0, True)
    assert one.age_s(41, -1, T, wall_ns) == (10.0, False)  # younger than the record before it
    assert one.age_s(50, -1, T, wall_ns) == (10.0, False)
    assert one.age_s(52, 0, T, wall_ns) == (9.0, False)
    assert one.age_s(52, (T - 2 * S) // 10**6, T, wall_ns) == (3.0, False)
    assert one.age_s(30, 0, T, wall_ns) == (None, False)
    one.end(110, T + 5 * S, T + 3 * S)  # until then 100 was the end
    assert one.age_s(100, 0, T + 7 * S, T + 7 * S) == (4.0, False)
    assert one.age_s(99, 0, T + 7 * S, T + 7 * S) == (15.0, False)


@pytest.mark.parametrize(
    ("removal", "group", "ended"),
    [
        (("topic", "orders"), None, True),
        (("topic", "clicks"), None, False),
        (("partition", "orders", 0), None, True),
        (("partition", "orders", 1), None, False),
        (("group", "billing"), "billing", True),
        (("group", "billing"), "audit", False),
        (("group", "billing"), None, False),
        (("offset", "billing", "orders", 0), "billing", True),
        (("offset", "billing", "orders", 1), "billing", False),
        (("topic", "orders"), "billing", True),
    ],
)
def test_reports_not_later_than_a_removal_are_removed(removal, group, ended):
    assert has_ended({removal: T}, ORDERS, T, group) == ended
    assert not has_ended({removal: T}, ORDERS, T + 1, group)
    assert not has_ended({}, ORDERS, 0, group)


@pytest.mark.parametrize(("by_id_ns", "offset"), [(T - 1, 7), (T, 7), (T + 1, 9)])
def test_the_later_of_two_offsets_by_topic_id_and_by_name_stays_once_the_name_is_known(by_id_ns, offset):
    topics, identity = Topics(), UUID(int=5)
    lags = Offsets(topics)
    lags._commit("billing", ORDERS, 7, T, 8)
    lags._commit("billing", (identity, 0), 9, by_id_ns, 8)
    lags._commit("audit", (identity, 0), 3, T, 8)
    topics.names[identity] = "orders"
    lags.name_topics({identity: "orders"}, T + S)
    assert {of: position.offset for of, position in lags.committed.items()} == {
        ("billing", ORDERS): offset,
        ("audit", ORDERS): 3,
    }
    assert all(isinstance(position, Position) for position in lags.committed.values())


def test_a_position_keeps_the_latest_four_clients_that_committed_before():
    position = Position(0, 0, 0)
    for client in ("a", "b", "", "c", "a", "d", "e", "f"):
        position = Position(0, 0, 0, client=client).after(position)
    assert (position.client, position.former) == ("f", ("c", "a", "d", "e"))
    merged = Position(0, 0, 0, client="x", former=("e", "x", "y")).after(position)
    assert (merged.client, merged.former) == ("x", ("d", "e", "f", "y"))
    assert Position(0, 0, 0).after(position) == position  # an answer to kproxy has no client


@pytest.mark.parametrize(
    ("of_all_so_far", "written_ms"),
    [
        ([(0, 10, 5000)], 5000),
        ([(0, 10, 5000), (12, 20, 9000)], 5000),  # offset 10 is before the second one
        (
            [(0, 2, 5000), (2, 4, 5900), (4, 10, 5500)],
            5500,
        ),  # the last record's time, although an earlier record is newer
        (
            [(0, 2, 5000), (2, 10, 3000)],
            5000,
        ),  # producers' clocks differ: no record counts as older than the one before it
        ([(0, 11, 5000)], -1),
        ([(0, 10, 2**63 - 1)], 2**63 - 1),  # producers may set any time
    ],
)
def test_a_record_gets_the_time_of_the_last_record_before_it(of_all_so_far, written_ms):
    one = log()
    for first, following, at_ms in of_all_so_far:
        one.read(first, following, at_ms, T)
    assert one.written_ms(10) == written_ms
    assert one.age_s(10, -1, T, T)[0] in (None, (T - min(T, one.written.latest_ns(10) or T)) / S)


def test_an_answer_to_kproxy_counts_unless_something_newer_than_the_request_was_learned():
    """A commit in the same nanosecond as the request is replaced, like an earlier one."""
    lags = Offsets(Topics())
    for asked_ns, offset in ((T - 1, 7), (T, 9)):
        lags._commit("billing", ORDERS, 7, T, OFFSET_COMMIT)
        lags.learn_offsets("billing", {ORDERS: 9}, (), asked_ns, lambda _: True)
        assert lags.committed["billing", ORDERS].offset == offset
    for asked_ns, is_there in ((T - 1, True), (T, False)):
        lags._commit("billing", ORDERS, 7, T, OFFSET_COMMIT)
        lags.learn_offsets("billing", {}, [ORDERS], asked_ns, lambda _: True)
        assert (("billing", ORDERS) in lags.committed) == is_there


def test_the_last_of_several_simultaneous_writes_to_take_effect_counts(cluster):
    member = cluster.consumer()
    fetch(member, ORDERS, 0, 100)
    commit_in_transaction(member, 3, {ORDERS: 10})
    member.commit("shop", {ORDERS: 50})
    end_transaction(member, 3, commits=True)
    assert records(cluster) == {("shop", "orders"): 90}


def test_transactions_without_an_accepted_offset_are_bounded(cluster, monkeypatch):
    monkeypatch.setattr(offsets, "MAX_PENDING", 3)
    producer = cluster.consumer()
    for number in range(10):
        commit_in_transaction(producer, 3, {ORDERS: 1}, f"shop-{number}", errors=(0,))
    lags = cluster.metrics.cluster("default").lags
    assert list(lags._pending) == ["shop-7", "shop-8", "shop-9"] and lags.evicted["committed"] == 0


def test_kproxy_does_not_ask_for_groups_with_truncated_names():
    lags = Offsets(Topics())
    for size in (MAX_LABEL - 1, MAX_LABEL, MAX_LABEL + 1):
        lags.note_group("g" * size)
        lags._commit("c" * size, ORDERS, 7, T, OFFSET_COMMIT)
    lags.note_group("")
    lags.note_group(None)
    assert sorted(lags.groups()) == ["c" * (MAX_LABEL - 1), "g" * (MAX_LABEL - 1)]
    assert list(lags.seen) == ["g" * (MAX_LABEL - 1), "g" * MAX_LABEL]


def test_topic_ids_are_bounded(monkeypatch):
    """Ids of topics, of re-created topics and of topics without a known name: the oldest are dropped."""
    monkeypatch.setattr(offsets, "MAX_NAMES", 3)
    lags = Offsets(Topics())
    for number in range(5):
        lags.name_topics({UUID(int=number): f"t{number}"}, T)
    assert list(lags._ids) == ["t2", "t3", "t4"] and not lags._former
    for number in range(10, 15):
        lags.name_topics({UUID(int=number): "t4"}, T)
    assert list(lags._former) == [UUID(int=number) for number in (11, 12, 13)]
    for number in range(20, 25):
        lags._commit("billing", (UUID(int=number), 0), 7, T, OFFSET_COMMIT)
    assert lags._nameless == {UUID(int=number) for number in (20, 21, 22)}


@pytest.mark.parametrize(("written_ms", "is_known"), [(-1, False), (0, False), (1, True)])
def test_records_without_a_time_have_no_age(cluster, written_ms, is_known):
    member = cluster.consumer()
    member.fetch({ORDERS: 0}, {ORDERS: (2, batch(0, 1, written_ms))})
    member.commit("billing", {ORDERS: 0})
    assert (cluster.lags("group")["billing", "orders"][1] is not None) == is_known
    assert len(cluster.metrics.cluster("default").lags.logs[ORDERS].marks) == is_known

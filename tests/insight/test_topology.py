"""Topology: brokers that appear and disappear, topics that are created, grow and are deleted, as in logs and tools."""

import re
from collections import Counter
from functools import cache
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from kproxy.insight import topology
from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.leadership import Partitions
from kproxy.insight.topics import APIS as TOPICS
from kproxy.insight.topics import Topics
from kproxy.insight.topology import APIS, Cluster, of_partition
from kproxy.protocol.schema import schema
from tests import captures
from tests.insight.truth import CAPTURE, decoded_exchanges, log
from tests.protocol.messages import Layout, bodies

BROKERS = range(9091, 9096)


def feed_all(exchanges):
    cluster, topics = Cluster("c"), Topics()
    found = []
    for each in exchanges:
        if each.api_key in TOPICS:
            topics.feed(each)
        found += cluster.feed(each, topics)
    return cluster, found


@cache
def rows(name):
    return feed_all(decoded_exchanges(captures.capture(name), BROKERS, APIS))[1]


def test_the_growth_of_a_topic_is_reported_once():
    cluster, found = feed_all(decoded_exchanges(CAPTURE, BROKERS, APIS))
    grown = {row.topic: row.partitions for row in found if row.change == "grown"}
    logged = re.findall(r"Updating metadata|Bumped group epoch", log())
    assert logged  # tests of groups check how groups reacted
    assert grown == {"clicks-21e2": 6}
    assert {row.broker_id for row in found if row.kind == "broker" and row.change == "gone"} == {3}  # was killed
    assert not cluster.left_out


def test_stopped_brokers_are_gone_and_restarted_ones_appear_again():
    """In each of these captures broker 2 stops and starts again; with ZooKeeper broker 1 is the controller, and
    stops."""
    for name in ("k0102_java_cluster", "k111_java_cluster", "k39_zk_cluster"):
        found = [row for row in rows(name) if row.kind in ("broker", "controller")]
        of_two = [row.change for row in found if row.kind == "broker" and row.broker_id == 2]
        assert of_two == ["appeared", "shutting_down", "gone", "appeared"], name
        controllers = [row.broker_id for row in found if row.kind == "controller"]
        assert controllers[0] != controllers[-1] and len(controllers) == 2, name
    of_two = [row.change for row in rows("k41_java_cluster") if row.kind == "broker" and row.broker_id == 2]
    assert of_two == ["appeared", "gone", "appeared"]  # with KRaft clients only see lists


def test_topics_have_the_requested_partition_counts():
    made = {row.topic: row for row in rows("k41_java_cluster") if row.kind == "topic" and row.change == "appeared"}
    assert {name: made[name].partitions for name in ("alpha", "beta", "adm-alpha")} == {
        "alpha": 4,
        "beta": 2,
        "adm-alpha": 2,
    }
    changes = Counter((row.topic, row.change) for row in rows("k41_java_cluster") if row.kind == "topic")
    assert changes["adm-alpha", "grown"] == changes["adm-alpha", "gone"] == changes["beta", "gone"] == 1
    assert len(made["alpha"].topic_id) == 22  # as Kafka writes it


def described(topics, brokers=((1, "h", 9092),)):
    broker_list = [dict(zip(("nodeId", "host", "port"), each, strict=True)) for each in brokers]
    parts = [
        {
            "name": name,
            "errorCode": error,
            "topicId": UUID(int=identity),
            "partitions": [{"partitionIndex": index} for index in range(count)],
        }
        for name, identity, count, error in topics
    ]
    return DecodedExchange(3, 12, {}, {"brokers": broker_list, "topics": parts}, 1, 2)


def changes(*exchanges):
    return [(row.kind, row.change) for row in feed_all(exchanges)[1]]


def test_late_responses_change_nothing_and_new_ones_do():
    first = described([("t", 1, 3, 0)])
    assert changes(first, first) == [("broker", "appeared"), ("topic", "appeared")]
    assert changes(first, described([("t", 1, 2, 0)]))[2:] == []  # a response from before it grew
    assert changes(first, described([("t", 2, 2, 0)]), first)[2:] == [("topic", "recreated")]
    gone = [("topic", "gone"), ("topic", "unknown"), ("topic", "appeared")]  # unknown: to the client that asked
    assert changes(first, described([("t", 0, 0, 3)]), first)[2:] == gone
    assert changes(first, described([], ((1, "h", 9092), (1, "h", 9094))))[2:] == [("broker", "changed")]
    assert changes(first, described([], ()))[2:] == []  # a broker that has just started knows no others


CLIENT, SASL = ((1, "h1", 9092), (2, "h2", 9092)), ((1, "h1", 9093), (2, "h2", 9093))


def asked_at(broker, brokers):
    exchange = described([], brokers)
    exchange.broker = broker
    return exchange


def brokers(*exchanges):
    return [(row.change, row.broker_id, row.host, row.port) for row in feed_all(exchanges)[1]]


def test_listeners_of_a_broker_are_no_change_of_its_address():
    """A connection's own listener decides: responses at one listener never contain addresses of another."""
    client, sasl = asked_at(("10.0.0.1", 9092), CLIENT), asked_at(("10.0.0.1", 9093), SASL)
    assert brokers(client, sasl, client, sasl)[2:] == [("listener", 1, "h1", 9093), ("listener", 2, "h2", 9093)]
    of_others = asked_at(("10.0.0.2", 9093), SASL)  # another broker at the same listener, by its addresses
    assert len(brokers(client, sasl, of_others)) == 4
    moved = asked_at(("10.0.0.1", 9093), (SASL[0], (2, "h9", 9093)))
    assert brokers(client, sasl, moved)[4:] == [("changed", 2, "h9", 9093)]
    all_moved = asked_at(("10.0.0.1", 9092), ((1, "n1", 9092), (2, "n2", 9092)))
    assert brokers(client, all_moved)[2:] == [("changed", 1, "n1", 9092), ("changed", 2, "n2", 9092)]
    elsewhere = asked_at(("10.0.0.9", 9092), (CLIENT[0], (2, "h9", 9092)))  # broker 2 at its new address
    assert brokers(client, elsewhere)[2:] == [("changed", 2, "h9", 9092)]


def test_listener_names_are_learnt_from_controllers():
    def registered(*listeners):
        endpoints = [{"name": name, "host": host, "port": port} for name, host, port in listeners]
        return DecodedExchange(62, 4, {"brokerId": 7, "listeners": endpoints, "rack": None}, {"errorCode": 0}, 1, 1)

    first = registered(("CLIENT", "b7", 9092), ("SASL", "b7", 9093))
    assert [change for change, *_ in brokers(first)] == ["registered", "listener"]
    again = registered(("CLIENT", "b7", 9092), ("SASL", "b8", 9093))
    assert brokers(first, again, asked_at(None, ((7, "b7", 9095),)))[2:] == [
        ("registered", 7, "b8", 9093),
        ("listener", 7, "b7", 9095),
    ]


def test_controllers_of_kraft_fence_brokers():
    def registered(at):
        listeners = [{"name": "PLAINTEXT", "host": "b7", "port": 9092}]
        return DecodedExchange(62, 4, {"brokerId": 7, "listeners": listeners, "rack": "r"}, {"errorCode": 0}, at, at)

    def beat(at, fenced, leaving=False):
        request = {"brokerId": 7, "wantShutDown": leaving, "wantFence": False}
        return DecodedExchange(63, 1, request, {"errorCode": 0, "isFenced": fenced, "shouldShutDown": False}, at, at)

    _, found = feed_all(
        [registered(1), beat(2, True), beat(3, False), beat(4, False, True), beat(5, True), registered(6)]
    )
    assert [(row.time_ns, row.change) for row in found] == [
        (1, "registered"),
        (3, "unfenced"),
        (4, "shutting_down"),
        (5, "fenced"),
        (6, "registered"),
    ]
    assert (found[0].host, found[0].port, found[0].rack) == ("b7", 9092, "r")


def test_changes_of_partitions_are_rows_of_topology():
    known = Partitions("c")
    rows = [of_partition(row) for each in decoded_exchanges(CAPTURE, BROKERS, (3,)) for row in known.feed(each, {})]
    assert {row.kind for row in rows} == {"partition"}
    assert {row.partition for row in rows if row.topic == "clicks-21e2"} == set(range(6))


def test_invented_names_are_bounded(monkeypatch):
    monkeypatch.setattr(topology, "MAX_TOPICS", 2)
    monkeypatch.setattr(topology, "MAX_BROKERS", 2)
    monkeypatch.setattr(topology, "MAX_ADDRESSES", 2)
    brokers = [(node, f"h{host}", 1) for node in range(4) for host in range(4)]
    cluster, found = feed_all([described([(f"t{index}", index + 1, 1, 0) for index in range(5)], brokers)] * 2)
    assert cluster.left_out == {"topics": 6, "brokers": 16, "addresses": 8}
    assert len(found) == 2 * 2 + 2


LAYOUTS = [(key, version) for key in sorted(APIS) for version in schema().apis[key].request.versions]


@given(data=st.data(), pairs=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4))
def test_any_exchanges_give_rows_and_never_an_error(data, pairs):
    exchanges = []
    for key, version in pairs:
        api = schema().apis[key]
        request = data.draw(bodies(Layout(api.request, version, key, "request")))
        response = data.draw(st.none() | bodies(Layout(api.response, version, key, "response")))
        exchanges.append(DecodedExchange(key, version, request, response, 1, 2))
    cluster, topics = Cluster("c"), Topics()
    for each in exchanges:
        list(cluster.feed(each, topics))


def test_a_controller_refused_by_a_broker_is_not_active():
    asked = {"controllerId": 3, "controllerEpoch": 9, "ungroupedPartitionStates": [], "liveBrokers": []}
    assert not feed_all([DecodedExchange(6, 0, asked, {"errorCode": 11}, 1, 2)])[1]
    assert [row.change for row in feed_all([DecodedExchange(6, 0, asked, {"errorCode": 0}, 1, 2)])[1]] == ["active"]

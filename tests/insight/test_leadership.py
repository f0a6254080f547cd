"""Leadership: partition states on the wire equal those in ZooKeeper and in the brokers' logs."""

import json
import re
from collections import Counter
from functools import cache
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.insight import leadership
from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.leadership import APIS, Partitions
from kproxy.insight.registry import rows as registry_rows
from kproxy.protocol.apis import DELETE_TOPICS, METADATA, STOP_REPLICA
from kproxy.protocol.schema import schema
from kproxy.zookeeper.session import Session
from tests import captures
from tests.insight.truth import CAPTURE, decoded_exchanges, log
from tests.protocol.messages import Layout, bodies
from tests.zookeeper.traffic import DATA as ZOOKEEPER
from tests.zookeeper.traffic import talks

CHANGES = {"created", "elected", "isr_shrunk", "isr_grown", "offline", "moved", "deleted"}


@cache
def feed_capture(path, ports=range(9091, 9200)):
    """The partitions at the end of a capture, and the rows on the way."""
    partitions, found, names = Partitions("c"), [], {}
    for each in decoded_exchanges(path, ports, APIS):
        if each.api_key == METADATA and each.response is not None:
            names |= {topic.get("topicId"): topic["name"] for topic in each.response["topics"]}
        found += partitions.feed(each, names)
    return partitions, found


def test_every_state_sent_by_a_controller_is_in_zookeeper():
    written = set()
    for talk in talks():
        session = Session()
        for side, data, now in talk.parts:
            session.receive(side, data, now)
        for event in session.events:
            for row in registry_rows(event, "c"):
                if row.kind == "partition_state" and row.value and row.error is None:
                    state, parts = json.loads(row.value), row.path.split("/")
                    isr = tuple(sorted(state["isr"]))
                    written.add((parts[-4], int(parts[-2]), state["leader"], state["leader_epoch"], isr))
    _, found = feed_capture(ZOOKEEPER / "k0102_zkgroup_a.pcap.zst", range(9092, 9093))
    sent = [row for row in found if row.controller_id is not None and row.leader is not None]
    assert {(row.topic, row.partition, row.leader, row.leader_epoch, row.isr) for row in sent} <= written
    assert len(sent) > 20
    assert {row.change for row in sent} >= {"created", "elected", "isr_shrunk", "isr_grown"}


def test_every_leader_in_responses_to_clients_took_over_in_its_brokers_log():
    began = {
        (found[2], int(found[3]), int(found[1]), int(found[4]))
        for found in re.finditer(
            r"\[Broker id=(\d)\] Leader (\S+)-(\d+) with topic .*? starts at leader epoch (\d+)", log()
        )
    }
    partitions, found = feed_capture(CAPTURE)
    advertised = {(row.topic, row.partition, row.leader, row.leader_epoch) for row in found if row.leader is not None}
    assert advertised <= began
    assert Counter(row.change for row in found if row.change == "elected")["elected"] == 6  # the killed broker led 6
    last = {}
    for topic, index, leader, _ in sorted(began, key=lambda each: each[3]):
        last[topic, index] = leader
    client_topics = {key: leader for key, leader in last.items() if not key[0].startswith("__")}
    assert {key: partitions.leader_of(*key) for key in client_topics} == client_topics


@pytest.mark.parametrize("name", ["k0822_java_cluster", "k0102_java_cluster", "k111_java_cluster", "k39_zk_cluster"])
def test_a_stopped_broker_leads_nothing_until_it_restarts(name):
    """In each of these captures broker 2 stops and starts again, and a topic is deleted."""
    _, found = feed_capture(captures.capture(name))
    assert {row.change for row in found} <= CHANGES
    assert {row.change for row in found} >= {"created", "elected", "isr_shrunk", "isr_grown", "deleted"}
    leads = {}
    for row in found:
        leads.setdefault((row.topic, row.partition), []).append((row.leader_epoch, row.leader))
    for history in leads.values():  # an epoch has one leader, and epochs increase until the partition is deleted
        of_epoch = {}
        for epoch, leader in history:
            if leader is None:
                of_epoch.clear()
            elif epoch is not None:
                assert of_epoch.setdefault(epoch, leader) == leader
    assert any(row.change == "isr_shrunk" and 2 not in row.isr for row in found)
    assert any(row.change == "isr_grown" and 2 in row.isr for row in found)


def sent_by_controller(*states, api=4):
    fields = ("topicName", "partitionIndex", "leader", "leaderEpoch", "partitionEpoch", "isr", "replicas")
    parts = [dict(zip(fields, ("t", 0, *state), strict=True)) for state in states]
    return DecodedExchange(
        api, 0, {"controllerId": 1, "controllerEpoch": 7, "ungroupedPartitionStates": parts}, {}, 1, 2
    )


def described(leader, epoch, isr, replicas):
    part = {"partitionIndex": 0, "leaderId": leader, "leaderEpoch": epoch, "isrNodes": isr, "replicaNodes": replicas}
    return DecodedExchange(3, 7, {}, {"topics": [{"name": "t", "errorCode": 0, "partitions": [part]}]}, 3, 4)


def changes(*exchanges):
    partitions = Partitions("c")
    return [row.change for each in exchanges for row in partitions.feed(each, {})]


def test_late_exchanges_change_nothing():
    new, old = (1, 5, 9, [1, 2], [1, 2]), (2, 4, 8, [2], [1, 2])
    assert changes(sent_by_controller(new), sent_by_controller(old)) == ["created"]
    assert changes(sent_by_controller(new), sent_by_controller((1, 5, 8, [1], [1, 2]))) == [
        "created"
    ]  # an older state of the same leader
    assert changes(sent_by_controller(new), described(2, -1, [2], [2])) == [
        "created"
    ]  # from a broker without leader epochs
    assert changes(described(2, -1, [2], [2]), described(1, -1, [2], [2])) == ["created", "elected"]


def test_each_change_has_its_name():
    assert changes(
        sent_by_controller((1, 0, 0, [1, 2], [1, 2])),
        sent_by_controller((1, 0, 1, [1], [1, 2])),
        sent_by_controller((-1, 1, 2, [1], [1, 2])),
        sent_by_controller((2, 2, 3, [2], [1, 2])),
        sent_by_controller((2, 3, 4, [2], [1, 2])),
        sent_by_controller((2, 3, 5, [2], [2, 3])),
        sent_by_controller((2, 3, 6, [2, 3], [2, 3])),
        sent_by_controller((2, 3, 7, [2, 4], [2, 3])),  # one replica left the ISR, whichever joined
        sent_by_controller((-2, 4, 8, [2, 3], [2, 3])),
    ) == ["created", "isr_shrunk", "offline", "elected", "elected", "moved", "isr_grown", "isr_shrunk", "deleted"]


def test_partitions_are_bounded(monkeypatch):
    monkeypatch.setattr(leadership, "MAX_PARTITIONS", 1)
    partitions = Partitions("c")
    many = sent_by_controller((1, 0, 0, [1], [1]), (1, 0, 0, [1], [1]))
    many.request["ungroupedPartitionStates"][1]["partitionIndex"] = 1
    assert [row.partition for row in partitions.feed(many, {})] == [0]
    assert partitions.left_out == 1


def test_controllers_elect_resign_and_are_described():
    """KRaft's metadata log has one partition, whose leader is the active controller."""

    def quorum_exchange(api, leader, epoch, answer=False, **more):
        part = {"partitionIndex": 0, "leaderId": leader, "leaderEpoch": epoch, "errorCode": 0, **more}
        topics = {"topics": [{"topicName": "__cluster_metadata", "partitions": [part]}]}
        return DecodedExchange(api, 1, {} if answer else topics, topics if answer else {"topics": []}, epoch, epoch)

    voters = [{"replicaId": node} for node in (1, 2, 3)]
    talk = [
        quorum_exchange(53, 1, 5),
        quorum_exchange(53, 1, 5),
        quorum_exchange(55, 1, 5, answer=True, currentVoters=voters),
        quorum_exchange(54, 1, 5),
        quorum_exchange(52, -1, 6, answer=True),  # a vote while there is no leader
        quorum_exchange(53, 3, 6),
        quorum_exchange(53, 1, 5),  # late
    ]
    partitions = Partitions("c")
    rows = [row for each in talk for row in partitions.feed(each, {})]
    assert [(row.api, row.change, row.leader, row.leader_epoch) for row in rows] == [
        ("BeginQuorumEpoch", "created", 1, 5),
        ("EndQuorumEpoch", "offline", None, 5),
        ("BeginQuorumEpoch", "elected", 3, 6),
    ]
    assert rows[-1].replicas == (1, 2, 3)


def test_the_active_controller_equals_the_brokers_logs():
    """KRaft's controllers report the leader to each other; one of them is stopped in this capture."""
    logged = set()
    for line in (captures.folder("brokerlogs") / "k41_java_cluster.brokerlog").open():
        if '"requestApiKeyName":"BEGIN_QUORUM_EPOCH"' in line:
            (topic,) = json.loads(line.partition("request:")[2])["request"]["topics"]
            (part,) = topic["partitions"]
            logged.add((topic["topicName"], part["leaderId"], part["leaderEpoch"]))
    partitions, found = feed_capture(captures.capture("k41_java_cluster"))
    begun = [row for row in found if row.topic == "__cluster_metadata" and row.leader is not None]
    assert {(row.topic, row.leader, row.leader_epoch) for row in begun} == logged
    assert len(begun) == len(logged) > 1
    assert partitions.leader_of("__cluster_metadata", 0) == begun[-1].leader


LAYOUTS = [(key, version) for key in sorted(APIS) for version in schema().apis[key].request.versions]


@given(data=st.data(), pairs=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4))
def test_any_exchanges_give_rows_and_never_an_error(data, pairs):
    partitions = Partitions("c")
    for key, version in pairs:
        api = schema().apis[key]
        request = data.draw(bodies(Layout(api.request, version, key, "request")))
        response = data.draw(st.none() | bodies(Layout(api.response, version, key, "response")))
        assert {
            row.change for row in partitions.feed(DecodedExchange(key, version, request, response, 1, 2), {})
        } <= CHANGES


def test_a_topic_deleted_by_id_stays_deleted_despite_late_metadata():
    old, new = UUID(int=1), UUID(int=2)

    def described(identity, epoch):
        part = {"errorCode": 0, "partitionIndex": 0, "leaderId": 1, "leaderEpoch": epoch, "replicaNodes": [1]}
        topic = {"errorCode": 0, "name": "t", "topicId": identity, "partitions": [part | {"isrNodes": [1]}]}
        return DecodedExchange(METADATA, 12, {}, {"topics": [topic]}, 1, 2)

    def deleted(identity, error=0):
        topic = {"name": None, "topicId": identity, "errorCode": error}
        return DecodedExchange(DELETE_TOPICS, 6, {}, {"responses": [topic]}, 3, 4)

    talk = [described(old, 5), deleted(old, error=41), deleted(old), deleted(old), described(old, 5), described(new, 0)]
    partitions = Partitions("c")
    found = [row for each in talk for row in partitions.feed(each, {old: "t", new: "t"})]
    assert [(row.api, row.change, row.leader_epoch) for row in found] == [
        ("Metadata", "created", 5),
        ("DeleteTopics", "deleted", None),
        ("Metadata", "created", 0),
    ]
    many = [deleted(UUID(int=number)) for number in range(3, leadership.MAX_GONE + 9)]
    assert not [row for each in many for row in partitions.feed(each, {})]
    assert len(partitions._gone) == leadership.MAX_GONE


def test_a_recreated_topic_starts_over_whoever_deleted_it():
    old, new = UUID(int=1), UUID(int=2)

    def described(identity, *parts, error=0):
        states = [
            {"errorCode": 0, "partitionIndex": index, "leaderId": leader, "leaderEpoch": epoch}
            | {"replicaNodes": [1, 2], "isrNodes": [1]}
            for index, leader, epoch in parts
        ]
        topic = {"errorCode": error, "name": "t", "topicId": identity, "partitions": states}
        return DecodedExchange(METADATA, 12, {}, {"topics": [topic]}, 1, 2)

    first, late, again = described(old, (0, 1, 9), (1, -1, 9)), described(old, (0, 2, 9)), described(new, (0, 2, 0))
    nothing = described(UUID(int=0), error=3)
    gone = [(0, None, "deleted"), (1, None, "deleted")]
    for talk in ([first, again, late], [first, nothing, nothing, again], [first, described(UUID(int=0)), again]):
        partitions = Partitions("c")
        found = [(row.partition, row.leader, row.change) for each in talk for row in partitions.feed(each, {})]
        assert found == [(0, 1, "created"), (1, None, "offline"), *gone, (0, 2, "created")]
        assert partitions.leader_of("t", 0) == 2


def test_a_replica_deleted_while_others_lead_was_moved():
    new = (2, 5, 3, [2, 3], [2, 3])

    def stopped(epoch, broker, error=0):
        part = {"partitionIndex": 0, "deletePartition": True} | ({} if epoch is None else {"leaderEpoch": epoch})
        topic = {"topicName": "t", "partitionStates": [part]}
        asked = {"controllerId": 1, "controllerEpoch": 7, "topicStates": [topic]}
        if epoch is None:  # before 2.6
            topics = [{"name": "t", "partitionIndexes": [0]}]
            asked = {"controllerId": 1, "controllerEpoch": 7, "deletePartitions": True, "topics": topics}
        return DecodedExchange(STOP_REPLICA, 3, asked, {"errorCode": error}, 3, 4, broker_id=broker)

    for kept in (stopped(5, 1), stopped(5, None), stopped(None, 1), stopped(-2, 1, error=11)):
        assert changes(sent_by_controller(new), kept, sent_by_controller(new, api=6)) == ["created"]
    for end in (stopped(-2, 1), stopped(-2, None), stopped(None, 2), stopped(None, None)):
        assert changes(sent_by_controller(new), end) == ["created", "deleted"]


def test_requests_of_an_old_controller_that_brokers_refuse_change_nothing():
    refused = sent_by_controller((-1, 9, 9, [1], [1, 2]))
    refused.response = {"errorCode": 11}
    assert changes(sent_by_controller((1, 5, 9, [1, 2], [1, 2])), refused) == ["created"]

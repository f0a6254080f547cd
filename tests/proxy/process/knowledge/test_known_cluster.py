"""Insight into a live cluster: rows update the cells of metrics, and repeated responses are not decoded again."""

from collections import deque

import pytest

from kproxy.insight.knowledge import APIS
from kproxy.metrics import Metrics, figures
from kproxy.protocol.apis import METADATA
from kproxy.proxy.filters.feed import KeptExchange, Whose
from kproxy.proxy.process.knowledge import known_cluster
from kproxy.proxy.process.knowledge.known_cluster import KnownCluster
from tests.knowledge.recorded import DATA
from tests.knowledge.truth import Run
from tests.streams import frames, streams
from tests.wire.playbook import request, response

COMMIT, JOIN = 8, 11
WHOSE = Whose("default", "10.0.0.1", 3, 1, "live:default", None)


def kept_exchange(key, version, asked, answer, number=1, at_ns=10**18, correlation_id=7):
    frames = request(key, version, correlation_id, asked), response(key, version, correlation_id, answer)
    return KeptExchange(WHOSE, key, version, number, at_ns, at_ns + 1000, *frames)


def metadata(leader=1, isr=(1, 2), throttle=0, **more):
    partitions = [
        {"partitionIndex": 0, "leaderId": leader, "leaderEpoch": leader, "replicaNodes": [1, 2], "isrNodes": list(isr)}
    ]
    topics = [{"name": "t", "partitions": partitions}]
    return {"throttleTimeMs": throttle, "topics": topics, **more}


@pytest.mark.parametrize("version", [9, 12])
def test_a_repeated_metadata_response_is_not_decoded_again(version):
    known = KnownCluster("default")
    assert known.learn(kept_exchange(METADATA, version, {}, metadata()))
    for number in range(5):
        assert known.learn(kept_exchange(METADATA, version, {}, metadata(throttle=number), correlation_id=number)) == []
    assert known.repeats.count == 5
    assert known.learn(kept_exchange(METADATA, version, {}, metadata(leader=2)))
    assert known.learn(kept_exchange(METADATA, version, {}, metadata(leader=3, isr=(1,))))
    assert (known.cells.changes["elected"], known.cells.shrunk) == (2, 1)
    known.learn(
        kept_exchange(METADATA, version, {}, metadata(leader=2))
    )  # an older response is decoded again, without effect
    assert known.repeats.count == 5


def test_an_undecodable_exchange_is_counted_and_later_ones_are_decoded():
    known = KnownCluster("default")
    good = kept_exchange(JOIN, 5, {"groupId": "g"}, {"errorCode": 25})
    assert known.learn(good._replace(response=good.response[:-2])) == []
    assert known.cells.left_out["undecodable"] == 1
    assert known.learn(good) and known.cells.groups.cells["g"].failures["join"] == 1


def test_failed_commits_count_for_their_group():
    known = KnownCluster("default")
    failed = [{"name": "t", "partitions": [{"partitionIndex": 0, "errorCode": 22}]}]
    known.learn(kept_exchange(COMMIT, 8, {"groupId": "g"}, {"topics": failed}))
    assert known.cells.groups.cells["g"].failures["commit"] == 1
    assert list(known.groups("", 10)) == []  # the committing client need not be a member


def subscription(*topics):
    """Consumer metadata v0, as in JoinGroup."""
    names = b"".join(len(name).to_bytes(2) + name.encode() for name in topics)
    return b"\0\0" + len(topics).to_bytes(4) + names + b"\xff\xff\xff\xff"


def assignment(topic, *partitions):
    """An assignment v0, as in SyncGroup."""
    parts = b"".join(partition.to_bytes(4) for partition in partitions)
    name = len(topic).to_bytes(2) + topic.encode()
    return b"\0\0" + (1).to_bytes(4) + name + len(partitions).to_bytes(4) + parts + b"\xff\xff\xff\xff"


def generation(known, number, owners, at_ns):
    """All members join and get their partitions."""
    leader = next(iter(owners))
    members = [{"memberId": member, "metadata": subscription("t")} for member in owners]
    for step, member in enumerate(owners):
        asked = {"groupId": "g", "memberId": member, "protocolType": "consumer"}
        asked["protocols"] = [{"name": "range", "metadata": subscription("t")}]
        answer = {"generationId": number, "protocolName": "range", "leader": leader, "memberId": member}
        answer["members"] = members if member == leader else []
        known.learn(kept_exchange(JOIN, 5, asked, answer, at_ns=at_ns + step))
    given = [{"memberId": member, "assignment": assignment("t", *parts)} for member, parts in owners.items()]
    for step, member in enumerate(owners):
        asked = {"groupId": "g", "memberId": member, "generationId": number}
        asked["assignments"] = given if member == leader else []
        known.learn(
            kept_exchange(14, 3, asked, {"assignment": assignment("t", *owners[member])}, at_ns=at_ns + 100 + step)
        )


def commit(known, member, partition, error):
    asked = {"groupId": "g", "memberId": member, "generationIdOrMemberEpoch": 1}
    topics = [{"name": "t", "partitions": [{"partitionIndex": partition, "errorCode": error}]}]
    known.learn(kept_exchange(COMMIT, 8, asked, {"topics": topics}, at_ns=10**18 + 10**9))


def test_a_replaced_member_that_commits_partitions_of_another_member_counts_as_a_split_group():
    known = KnownCluster("default")
    generation(known, 1, {"a": [0], "b": [1]}, 10**18)
    generation(known, 2, {"b": [0, 1]}, 10**18 + 1000)  # the session of a has expired
    commit(known, "b", 0, 0)
    commit(known, "b", 0, 27)  # REBALANCE_IN_PROGRESS: no member was replaced
    commit(known, "b", 1, 22)  # its own partition, with the former generation
    assert known.cells.groups.cells["g"].split == 0
    commit(known, "a", 0, 25)
    assert known.cells.groups.cells["g"].split == 1
    commit(known, "a", 7, 25)  # a partition without an owner
    assert known.cells.groups.cells["g"].split == 1
    found = next(known.groups("", 1))
    assert (found["generation"], found["member_count"], found["strategy"]) == (2, 1, "range")


def test_a_list_of_groups_begins_with_the_empty_group_id():
    known = KnownCluster("default")
    for group_id in ("b", "", "a"):
        known.learn(kept_exchange(JOIN, 5, {"groupId": group_id}, {"errorCode": 24}))
    assert [each["group"] for each in known.groups(None, 2)] == ["", "a"]
    assert [each["group"] for each in known.groups("", 2)] == ["a", "b"]


def test_the_number_of_remembered_owners_is_limited(monkeypatch):
    monkeypatch.setattr(known_cluster, "MAX_OWNED", 5)
    known = KnownCluster("default")
    for number in range(1, 4):
        generation(known, number, {"a": [0, 1], "b": [2]}, 10**18 + 1000 * number)
        assert known._owned_count == 3
    generation(known, 4, {"a": [0, 1, 2, 3, 4, 5]}, 10**18 + 10_000)
    assert known._owned_count <= 5


def test_a_group_downgraded_to_the_classic_protocol_is_shown_as_classic():
    known = KnownCluster("default")
    asked = {"groupId": "g", "memberId": "new", "memberEpoch": 0, "rebalanceTimeoutMs": 1000, "topicPartitions": []}
    known.learn(kept_exchange(68, 1, asked, {"memberId": "new", "memberEpoch": 9, "heartbeatIntervalMs": 5}))
    assert known.cells.groups.cells["g"].generation == 9
    generation(known, 12, {"a": [0], "b": [1]}, 2 * 10**18)
    cells = known.cells.groups.cells["g"]
    assert (cells.generation, cells.members, cells.state) == (12, 2, "Stable")


def recorded_foreign():
    """Exchanges of a recorded run in the order of responses: Connect workers, classic Streams, the Streams protocol."""
    run = Run(DATA / "foreign")
    found = []
    for connection, stream in enumerate(streams(run.capture, run.ports.__contains__)):
        pending = deque()
        for number, (side, frame, now_ns) in enumerate(frames(stream)):
            key, version = (int.from_bytes(frame[at : at + 2], "big") for at in (0, 2))
            if side == 0:
                pending.append((number, key, version, frame, now_ns))
                continue
            number, key, version, asked, asked_ns = pending.popleft()
            if key in APIS:
                whose = Whose("default", None, run.ports[stream.port], connection, "live:default", None)
                sized = [bytes(4) + each for each in (asked, frame)]
                found.append(KeptExchange(whose, key, version, number, asked_ns, now_ns, *sized))
    return sorted(found, key=lambda each: each.response_start)


def test_protocol_and_type_of_each_recorded_group_are_recognised():
    known = KnownCluster("default")
    metrics = Metrics()
    for each in recorded_foreign():
        known.learn(each)
        metrics.now_ns = lambda now_ns=each.response_start: now_ns
    metrics.cluster("default").insight = lambda: known.cells
    kinds = {row[1]: tuple(row[8:]) for row in figures.group_rows(metrics, 100)}
    wanted = {
        "connect-g": ("classic", "connect"),
        "eager-g": ("classic", "connect"),
        "streams-g": ("classic", "streams"),
        "tasks-g": ("streams", "streams"),
    }
    assert kinds == wanted
    assert {each["group"]: (each["protocol"], each["type"]) for each in known.groups("", 100)} == wanted

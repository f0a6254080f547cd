"""The requests of the lag monitor, in every version that it may use, to a broker that answers them."""

import asyncio

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import FIND_COORDINATOR, LIST_OFFSETS, METADATA, OFFSET_FETCH
from kproxy.protocol.schema import schema
from kproxy.proxy.cluster.questions import offset_questions as asking
from kproxy.proxy.config.addresses import Address
from tests.each import each
from tests.wire.playbook import request, response

REFUSED = 15  # an error code
OLDEST = {METADATA: 4, LIST_OFFSETS: 1, OFFSET_FETCH: 2, FIND_COORDINATOR: 0}


class Broker:
    """A conversation with a broker that refuses what is named "bad"; it reads and writes the bytes of each version."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.versions: set[int] = set()

    async def ask_long(self, key, version, body):
        _, asked = codec.decode_request(request(key, version, 1, body)[4:])
        self.asked.append(asked)
        self.versions.add(version)
        answer = {METADATA: self.metadata, FIND_COORDINATOR: self.coordinator, LIST_OFFSETS: self.ends}
        reply = answer.get(key, self.offsets)(asked)
        return codec.decode_response(response(key, version, 1, reply)[4:], key, version)[1]

    def metadata(self, asked):
        assert asked["allowAutoTopicCreation"] is False
        parts = [{"partitionIndex": n, "leaderId": n - 1, "replicaNodes": [], "isrNodes": []} for n in range(3)]
        topics = [
            {"name": topic["name"], "errorCode": code(topic["name"]), "partitions": parts} for topic in asked["topics"]
        ]
        return {"brokers": [{"nodeId": 1, "host": "one", "port": 9092}], "topics": topics}

    def coordinator(self, asked):
        assert asked.get("keyType", 0) == 0
        at = {"nodeId": 1, "host": "one", "port": 9092}
        if "coordinatorKeys" not in asked:
            return {"errorCode": code(asked["key"]), **at}
        return {"coordinators": [{"key": key, "errorCode": code(key), **at} for key in asked["coordinatorKeys"]]}

    def ends(self, asked):
        assert (asked["replicaId"], asked.get("isolationLevel", 0)) == (-1, 0)
        topics = []
        for topic in asked["topics"]:
            partitions = topic["partitions"]
            assert all((part["timestamp"], part.get("currentLeaderEpoch", -1)) == (-1, -1) for part in partitions)
            ends = [
                {"partitionIndex": (n := part["partitionIndex"]), "errorCode": code(topic["name"]), "offset": 10 * n}
                for part in partitions
            ]
            topics.append({"name": topic["name"], "partitions": ends})
        return {"topics": topics}

    def offsets(self, asked):
        """Partition 0 has no commit, partition 1 has one at 0, and that of partition 2 may not be described."""
        assert not asked.get("requireStable")

        def group(name):
            offsets = ((0, -1, 0), (1, 0, 0), (2, 7, REFUSED))
            parts = [{"partitionIndex": n, "committedOffset": at, "errorCode": error} for n, at, error in offsets]
            return {"errorCode": code(name), "topics": [{"name": "orders", "partitions": parts}]}

        if "groups" in asked:
            assert all(one["topics"] is None for one in asked["groups"])
            return {"groups": [{"groupId": one["groupId"], **group(one["groupId"])} for one in asked["groups"]]}
        assert asked["topics"] is None
        return group(asked["groupId"])


def code(name):
    return REFUSED if name == "bad" else 0


def versions(key):
    newest = schema().apis[key].request.versions[-1]
    return range(OLDEST[key], min(newest, 9 if key == OFFSET_FETCH else newest) + 1)


def answered(of, key, version, wanted):
    broker = Broker()
    return broker, asyncio.run(of(broker, {key: (0, version)}, wanted))


ONE = Address("one", 9092)
QUESTIONS = (
    (asking.leaders, METADATA, {1: 0, 2: 1}, {1: ONE}, 0),
    (asking.coordinators, FIND_COORDINATOR, 1, {1: ONE}, 4),
    (asking.committed, OFFSET_FETCH, {("orders", 1): 0}, {}, 8),
)


@each(("question", "version"), [(one, version) for one in QUESTIONS for version in versions(one[1])])
def test_names_are_asked_for_in_requests_of_a_hundred_or_one_by_one(question, version):
    of, key, expected, brokers, together_from = question
    for count in (0, 99, 100):
        names = [*(f"n{number}" for number in range(count)), "bad"]
        broker, answer = answered(of, key, version, names)
        assert answer.found == dict.fromkeys(names[:-1], expected)
        assert answer.refused == {"bad": REFUSED}
        assert answer.brokers == (brokers if count or of is asking.leaders else {})
        size = 100 if version >= together_from else 1
        assert answer.requests == len(broker.asked) == -(-len(names) // size)
        assert broker.versions == {version}


@each("version", versions(LIST_OFFSETS))
def test_ends_are_asked_for_in_requests_of_a_thousand_partitions(version):
    for count in (1000, 1001):
        partitions = [(("a", "b", "bad")[number % 3], number) for number in range(count)]
        broker, answer = answered(asking.ends, LIST_OFFSETS, version, partitions)
        assert answer.found == {(name, n): (10 * n, -1) for name, n in partitions if name != "bad"}
        assert answer.refused == {(name, n): REFUSED for name, n in partitions if name == "bad"}
        assert answer.requests == len(broker.asked) == -(-count // 1000)
        assert all(len({topic["name"] for topic in one["topics"]}) == len(one["topics"]) for one in broker.asked)


def test_offsets_are_asked_for_by_name_though_a_broker_has_newer_versions():
    broker, _ = answered(asking.committed, OFFSET_FETCH, 10, ["group"])
    assert broker.versions == {9}


@pytest.mark.parametrize(
    ("of", "key"),
    [(asking.leaders, METADATA), (asking.ends, LIST_OFFSETS), (asking.committed, OFFSET_FETCH)],
)
def test_a_broker_with_older_versions_or_without_the_api_is_too_old(of, key):
    for offers in ({}, {key: (0, OLDEST[key] - 1)}):
        with pytest.raises(asking.TooOld, match=f"from version {OLDEST[key]} on"):
            asyncio.run(of(Broker(), offers, []))

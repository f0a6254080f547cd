"""The rights that brokers require: the table equals Kafka's own classes, and no client replicates without the right."""

import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kproxy.protocol.apis import CLUSTER_AUTHORIZATION_FAILED
from kproxy.protocol.records import Record, write_batch
from kproxy.proxy.filters.policy.rights import RIGHTS
from tests.broker.asking import KEYS, Asking
from tests.broker.cluster import Broker, Cluster, wait_for
from tests.broker.jvm import JARS, tool
from tests.broker.test_policy import audited, policy
from tests.broker.tools import TOPICS


def replicated(cluster: Cluster, leader: Broker, follower: Broker, topic: str) -> UUID:
    """Create a topic with one partition on two brokers; returns its id."""
    shape = ["--replica-assignment", f"{leader.node_id}:{follower.node_id}", "--config", "min.insync.replicas=2"]
    tool(TOPICS, "--bootstrap-server", cluster.bootstrap, "--create", "--if-not-exists", "--topic", topic, *shape)
    with Asking(leader.address) as client:
        found: list[Any] = []

        def ready() -> bool:
            found[:] = client.ask("Metadata", 12, {"topics": [{"topicId": UUID(int=0), "name": topic}]})["topics"]
            return all(len(each["isrNodes"]) == 2 for each in found[0]["partitions"] or [{"isrNodes": ()}])

        wait_for("two replicas in sync", ready)
    return found[0]["topicId"]


def produced(leader: Broker, topic: str, timeout_ms: int) -> int:
    """Write a record with acks=all; returns the error code."""
    records = write_batch([Record(0, 1, None, b"v")])
    data = [{"name": topic, "partitionData": [{"index": 0, "records": records}]}]
    with Asking(leader.address) as client:
        answer = client.ask("Produce", 9, {"acks": -1, "timeoutMs": timeout_ms, "topicData": data})
    return int(answer["responses"][0]["partitionResponses"][0]["errorCode"])


def end(leader: Broker, topic: str) -> int:
    """The high watermark, as consumers see it."""
    partitions = [{"partitionIndex": 0, "currentLeaderEpoch": -1, "timestamp": -1}]
    with Asking(leader.address) as client:
        answer = client.ask("ListOffsets", 7, {"replicaId": -1, "topics": [{"name": topic, "partitions": partitions}]})
    return int(answer["topics"][0]["partitions"][0]["offset"])


def fetches(follower: Broker, topic: str, topic_id: UUID, offset: int) -> list[tuple[int, dict[str, Any]]]:
    """Fetch requests as if that broker sent them, in versions that place the replica id differently: (version,
    body)."""
    body = {"maxWaitMs": 50, "minBytes": 0, "maxBytes": 1 << 20, "sessionId": 0, "sessionEpoch": -1}
    partition = {"partition": 0, "currentLeaderEpoch": -1, "fetchOffset": offset, "partitionMaxBytes": 1 << 20}
    named = [{"topic": topic, "partitions": [partition]}]
    by_id = [{"topicId": topic_id, "partitions": [partition]}]
    state = {"replicaId": follower.node_id, "replicaEpoch": 1 << 62}
    without = {name: value for name, value in body.items() if not name.startswith("session")}
    return [
        (4, {**without, "replicaId": follower.node_id, "topics": named}),
        (10, {**body, "replicaId": follower.node_id, "topics": named}),
        (13, {**body, "replicaId": follower.node_id, "topics": by_id}),
        (17, {**body, "replicaState": state, "topics": by_id}),
    ]


TOPIC_RULE = ("[[cluster.policy]]", 'action = "allow"', 'topic = "repl-*"')
OTHER_RULE = ("[[cluster.policy]]", 'action = "deny"', 'topic = "secret-*"')


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "lines", [("read_only = true",), TOPIC_RULE, OTHER_RULE], ids=["read_only", "allowed", "not denied"]
)
def test_only_brokers_can_acknowledge_records_by_replica_fetches(
    cluster: Cluster, tmp_path: Path, lines: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    leader, follower = cluster.brokers[0], cluster.brokers[1]
    topic = f"repl-{request.node.callspec.id.replace(' ', '-')}"
    topic_id = replicated(cluster, leader, follower, topic)
    wait_for("its leader", lambda: produced(leader, topic, 20_000) == 0)
    before = end(leader, topic)
    with policy(cluster, tmp_path, *lines) as kproxy:
        host, port = kproxy.bootstrap.split(":")
        at = f"{host}:{int(port) + leader.node_id + 1}"
        Asking(at).ask("Metadata", 12, {"topics": [{"topicId": UUID(int=0), "name": topic}]})
        errors: list[int] = []
        with follower.paused():
            producing = threading.Thread(target=lambda: errors.append(produced(leader, topic, 4_000)))
            producing.start()
            answers = []
            with Asking(at) as client:
                for offset in (before, before + 1, before + 1):
                    for version, body in fetches(follower, topic, topic_id, offset):
                        answers.append((version, client.ask("Fetch", version, body)))
            during = end(leader, topic)
            producing.join()
        found = {
            (version, answer.get("errorCode") or answer["responses"][0]["partitions"][0]["errorCode"])
            for version, answer in answers
        }
        refused = kproxy.metric("kproxy_policy_refusals_total", api="Fetch")
    # A record that is on one disk only is not acknowledged: it timed out, or too few replicas were in sync.
    assert during == before and errors and errors[0] in (7, 19, 20), (before, during, errors, found)
    assert found == {(version, CLUSTER_AUTHORIZATION_FAILED) for version in (4, 10, 13, 17)}
    assert refused == len(answers)
    audit_lines = [line for line in audited(tmp_path) if line["api"] == "Fetch"]
    assert len(audit_lines) == len(answers), json.dumps(audit_lines)
    assert {line["reason"] for line in audit_lines} == {
        "read_only" if "read_only = true" in lines else "cluster_action"
    }
    assert all(line["decision"] == "deny" for line in audit_lines)


# --- the table, and Kafka's own classes -------------------------------------------------------------------------------

CLASSES = (
    *("kafka.server.KafkaApis", "kafka.server.ControllerApis", "kafka.server.AclApis", "kafka.server.ConfigHelper"),
    "kafka.server.handlers.DescribeTopicPartitionsRequestHandler",
)
# Methods whose names do not contain their API's name.
OF_METHOD = {
    "getCoordinator": ("FindCoordinator",),
    "fetchOffsetsForGroup": ("OffsetFetch",),
    "fetchAllOffsetsForGroup": ("OffsetFetch",),
    "authorizeToken": ("DescribeDelegationToken",),
    "authorizeRequester": ("DescribeDelegationToken",),
    "filterAlterAuthorizedTopics": ("CreatePartitions",),
    "authorizeAlterResource": ("AlterConfigs", "IncrementalAlterConfigs"),
    "describeShareGroupOffsetsForGroup": ("DescribeShareGroupOffsets",),
    "describeShareGroupAllOffsetsForGroup": ("DescribeShareGroupOffsets",),
    "handleTopicMetadataRequest": ("Metadata",),
    "handleListOffsetRequest": ("ListOffsets",),
    "handleCreateTokenRequest": ("CreateDelegationToken",),
    "handleBrokerHeartBeatRequest": ("BrokerHeartbeat",),
}
# Further checks of these classes: operations that a client may perform on the cluster,
# and rights at a controller's own listener.
ELSEWHERE = {
    ("Metadata", "Describe", "cluster"),
    ("DescribeCluster", "Alter", "cluster"),
    ("IncrementalAlterConfigs", "ClusterAction", "cluster"),  # the loggers of a controller
}


def rights_in_classes() -> set[tuple[str, str, str]]:
    """(API, operation, resource) of each constant that the methods of these classes read."""
    javap = shutil.which("javap")
    assert javap is not None
    command = [javap, "-p", "-c", "-cp", ":".join(map(str, JARS.glob("kafka*.jar"))), *CLASSES]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = set()
    apis: tuple[str, ...] = ()
    operation = ""
    for line in text.splitlines():
        head = re.match(r"  (?:public|private|protected|static|final)\b.*?([\w$]+)\(", line)
        if head:
            method = re.sub(r"^(\$anonfun|lambda)\$|\$\d+$", "", head[1])
            api = re.sub(r"^handle(Legacy)?|Request$", "", method)
            apis = OF_METHOD.get(method, (api,) if api in KEYS else ())
            operation = ""
        read = re.search(r"Field org/apache/kafka/common/(acl/AclOperation|resource/ResourceType)\.([A-Z_]+):", line)
        if read and read[1] == "acl/AclOperation":
            operation = read[2].title().replace("_", "")
        elif read and operation:
            found |= {(api, operation, read[2].lower()) for api in apis}
        elif "authorizeClusterOperation:" in line:
            found |= {(api, operation, "cluster") for api in apis}
    return found


def test_the_table_of_rights_equals_kafkas_own_classes() -> None:
    table = set()
    for api, rights in RIGHTS.items():
        for right in rights:
            table.add((api, right.operation, right.resource))
            table |= {(api, right.or_cluster, "cluster")} if right.or_cluster else set()
    asked = rights_in_classes()
    assert len({api for api, _, _ in asked}) > 70
    assert asked - table - ELSEWHERE == set()
    # APIs that Kafka 4.1 no longer has, or does not have yet.
    older = {"LeaderAndIsr", "StopReplica", "UpdateMetadata", "ControlledShutdown"}
    newer = {"StreamsGroupTopologyDescriptionUpdate", "UnregisterController"}
    assert {api for api, *_ in table - asked} == older | newer, table - asked

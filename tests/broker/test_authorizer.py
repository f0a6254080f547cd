"""A real broker with StandardAuthorizer and a policy with the same rights refuse the same requests."""

import uuid
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.codec import paths_of
from kproxy.protocol.records import Record, write_batch
from kproxy.protocol.schema import Field, schema, served_versions
from kproxy.proxy.config.api_groups import ALWAYS, GROUPS
from kproxy.proxy.filters.policy.resources import KINDS
from kproxy.proxy.filters.policy.rights import CLUSTER, CLUSTER_ACTION, RIGHTS, Right
from kproxy.proxy.filters.policy.topic_names import TopicNames
from tests.broker.asking import KEYS, Asking
from tests.broker.cluster import SETTINGS, Broker, wait_for
from tests.broker.jvm import tool
from tests.broker.tools import TOPICS
from tests.proxy.filters.policy.policies import Decided

NODE_ID = 8
NEWEST = served_versions()[next(name for name in served_versions() if name.startswith("4.1"))]
DENIED = {29, 30, 31, 53, 65}  # *_AUTHORIZATION_FAILED
OPERATIONS = {
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Delete": 6,
    "Alter": 7,
    "Describe": 8,
    "ClusterAction": 9,
    "DescribeConfigs": 10,
    "AlterConfigs": 11,
    "IdempotentWrite": 12,
    "TwoPhaseCommit": 15,
}
RESOURCES = {"topic": 2, "group": 3, "cluster": 4, "transactional_id": 5}
THERE, ABSENT = "there", "absent"  # topics
PASSWORD = "p"
USERS = [f"u{number}" for number in range(800)]


class Case(NamedTuple):
    """A request for which a broker requires exactly these rights."""

    api: str
    version: int
    body: dict[str, Any]
    rights: tuple[Right, ...]
    names: dict[str, str]  # resource type -> name


class Trial(NamedTuple):
    """A case, sent by a client that has some of the rights."""

    case: Case
    user: str
    granted: tuple[tuple[str, str, str], ...]  # (operation, resource type, name)
    missing: Right | None  # None: the client has all of them


# --- requests ---------------------------------------------------------------------------------------------------------


def put(fields: tuple[Field, ...], version: int, body: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a path, into the only element of each array on the way."""
    name, _, rest = path.partition(".")
    field = next(field for field in fields if field.name == name and version in field.versions)
    if not rest:
        body[name] = [value] if field.is_array and not isinstance(value, list) else value
    elif field.is_array:
        body.setdefault(name, [{}])
        put(field.fields, version, body[name][0], rest, value)
    else:
        put(field.fields, version, body.setdefault(name, {}), rest, value)


def complete(fields: tuple[Field, ...], version: int, body: dict[str, Any]) -> None:
    """Give a partition to each topic of the body."""
    for field in fields:
        if version in field.versions:
            if field.name in ("partitions", "partitionData", "partitionIndexes") and field.name not in body:
                body[field.name] = [{}] if field.is_struct else [0]
            inner = body.get(field.name)
            for each in inner if isinstance(inner, list) else [inner]:
                if isinstance(each, dict):
                    complete(field.fields, version, each)


# Values that make a request valid and harmless, by API and path; a version without the path ignores it.
MORE: dict[str, dict[str, Any]] = {
    "Produce": {
        "acks": -1,
        "timeoutMs": 1000,
        "topicData.partitionData.records": write_batch(
            [Record(0, 1, None, b"v")], producer_id=1, producer_epoch=0, base_sequence=0, is_transactional=True
        ),
    },
    "Fetch": {"maxBytes": 1, "topics.partitions.partitionMaxBytes": 1},
    "ListOffsets": {"replicaId": -1, "topics.partitions.timestamp": -1},
    "OffsetCommit": {"topics.partitions.committedOffset": 0},
    "TxnOffsetCommit": {"topics.partitions.committedOffset": 0},
    "OffsetFetch": {"topics.partitionIndexes": 0, "groups.topics.partitionIndexes": 0},
    "OffsetForLeaderEpoch": {"replicaId": -1, "topics.partitions.leaderEpoch": 0},
    "JoinGroup": {"sessionTimeoutMs": 6000, "protocolType": "consumer", "protocols.name": "range"},
    "CreateTopics": {"validateOnly": True, "timeoutMs": 9000, "topics.numPartitions": 1, "topics.replicationFactor": 1},
    "DeleteTopics": {"timeoutMs": 9000},
    "CreatePartitions": {"validateOnly": True, "timeoutMs": 9000, "topics.count": 9},
    "DeleteRecords": {"timeoutMs": 1000, "topics.partitions.offset": 0},
    "AddPartitionsToTxn": {"v3AndBelowTopics.partitions": 0, "transactions.producerId": 1},
    "AlterConfigs": {"validateOnly": True},
    "IncrementalAlterConfigs": {"validateOnly": True, "resources.configs.name": "x"},
    "CreateAcls": {
        "creations.resourceType": 2,
        "creations.resourceName": "none",
        "creations.resourcePatternType": 3,
        "creations.principal": "User:none",
        "creations.host": "*",
        "creations.operation": 3,
        "creations.permissionType": 3,
    },
    "DescribeAcls": {"resourceTypeFilter": 2, "patternTypeFilter": 3, "operation": 3, "permissionType": 3},
    "DeleteAcls": {
        "filters.resourceTypeFilter": 2,
        "filters.resourceNameFilter": "none",
        "filters.patternTypeFilter": 3,
        "filters.operation": 3,
        "filters.permissionType": 2,
    },
    "AlterClientQuotas": {"validateOnly": True},
    "UpdateFeatures": {"validateOnly": True},
    "UnregisterBroker": {"brokerId": 99},
    "AddRaftVoter": {"voterId": 99},
    "RemoveRaftVoter": {"voterId": 99},
    "AlterUserScramCredentials": {"deletions.name": "none", "deletions.mechanism": 1},
    "AlterReplicaLogDirs": {"dirs.path": "/none", "dirs.topics.name": THERE, "dirs.topics.partitions": 0},
    "WriteTxnMarkers": {"markers.producerId": 1, "markers.coordinatorEpoch": 0},
    "ElectLeaders": {"topicPartitions.topic": THERE, "topicPartitions.partitions": 9, "timeoutMs": 9000},
    "AlterPartitionReassignments": {"topics.name": ABSENT, "topics.partitions.replicas": 8, "timeoutMs": 9000},
    "ListPartitionReassignments": {"timeoutMs": 9000},
    "ConsumerGroupHeartbeat": {"memberId": "m", "memberEpoch": 0, "rebalanceTimeoutMs": 9000, "topicPartitions": []},
    "ShareGroupHeartbeat": {"memberId": str(UUID(int=5)), "memberEpoch": 0},
    "ShareFetch": {"memberId": str(UUID(int=5)), "maxBytes": 1},
    "ShareAcknowledge": {"memberId": str(UUID(int=5)), "shareSessionEpoch": 1},
    "SyncGroup": {"memberId": "m"},
    "Heartbeat": {"memberId": "m"},
    "LeaveGroup": {"memberId": "m"},
}
# Kafka 4.1 does not serve these to clients, or only with settings that this broker does not have.
NOT_SERVED = {"CreateDelegationToken", "DescribeDelegationToken", "StreamsGroupHeartbeat", "StreamsGroupDescribe"}


def uuid_text(topic_id: UUID) -> str:
    """The id as Kafka writes it."""
    return urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def bodies(api: str, version: int) -> Iterator[tuple[dict[str, Any], tuple[Right, ...]]]:
    """Yields (values by path, the rights that they require)."""
    rights = tuple(right for right in RIGHTS[api] if version in right.versions)
    needed = tuple(right for right in rights if right.resource in KINDS and right.fields)
    if api == "Fetch":
        place = "replicaId" if version < 15 else "replicaState.replicaId"
        yield {place: -1}, needed
        yield {place: 99}, rights[:1]
    elif api == "FindCoordinator":
        for key_type, right in enumerate(rights):
            if version >= (1, 1, 6)[key_type]:
                key = {"coordinatorKeys": f"group:{uuid_text(UUID(int=5))}:0"} if key_type == 2 else {}
                yield {"keyType": key_type, **key}, (right,)
    elif api == "Metadata":
        yield {"allowAutoTopicCreation": False}, needed[:1]
        if version >= 4:
            yield {"topics.name": ABSENT, "allowAutoTopicCreation": True}, needed
    elif api == "InitProducerId":
        yield {"transactionTimeoutMs": 1000}, rights[:1]
        yield {"transactionTimeoutMs": 1000, "transactionalId": None}, rights[-1:]
    elif api == "ConsumerGroupHeartbeat":
        yield {"subscribedTopicRegex": None}, needed[:2]  # for regular expressions kproxy requires more rights
    elif api in ("DescribeConfigs", "AlterConfigs", "IncrementalAlterConfigs"):
        for right, type_, name in zip(rights, (2, 32, 4), (THERE, "", str(NODE_ID)), strict=True):
            yield {"resources.resourceType": type_} | ({"resources.resourceName": name} if name else {}), (right,)
    else:
        yield {}, needed or rights


def cases(topic_id: UUID) -> Iterator[Case]:
    numbers = count()
    for api, rights in RIGHTS.items():
        key = KEYS[api]
        if not rights or api in (*ALWAYS, *NOT_SERVED) or key not in NEWEST:
            continue
        layout = schema().apis[key].request
        served = [version for version in NEWEST[key] if version in layout.versions]
        for version in sorted({served[0], served[-1]} if api != "JoinGroup" else {served[-1]}):
            there = set(paths_of(layout.fields, version))
            for paths, needed in bodies(api, version):
                number = next(numbers)
                names = {"topic": THERE, "group": f"group-{number}", "transactional_id": f"transaction-{number}"}
                if api in ("CreateTopics", "DeleteTopics") or paths.get("topics.name") == ABSENT:
                    names["topic"] = ABSENT
                body: dict[str, Any] = {}
                values = {path: value for path, value in MORE.get(api, {}).items() if path in there}
                for right in needed:
                    for field in right.fields if right.resource in KINDS else ():
                        by_id = field.endswith("opicId")
                        if field in there and not (by_id and api in ("Metadata", "DeleteTopics")):
                            values[field] = topic_id if by_id else names[right.resource]
                for path, value in (values | {path: value for path, value in paths.items() if path in there}).items():
                    put(layout.fields, version, body, path, value)
                complete(layout.fields, version, body)
                yield Case(api, version, body, needed, names)


# --- rights -----------------------------------------------------------------------------------------------------------


def grants(case: Case, rights: tuple[Right, ...], *, by_cluster: bool) -> tuple[tuple[str, str, str], ...]:
    """The access rules that give a client these rights."""
    found = []
    for right in rights:
        if right.resource == CLUSTER:
            found.append((right.operation, CLUSTER, "kafka-cluster"))
        elif by_cluster and right.or_cluster:
            found.append((right.or_cluster, CLUSTER, "kafka-cluster"))
        else:
            found.append((right.operation, right.resource, case.names[right.resource]))
    return tuple(found)


def trials(topic_id: UUID) -> Iterator[Trial]:
    users = iter(USERS)
    for case in cases(topic_id):
        for by_cluster in {False, any(right.or_cluster for right in case.rights)}:
            yield Trial(case, next(users), grants(case, case.rights, by_cluster=by_cluster), None)
        for missing in case.rights:
            kept = tuple(right for right in case.rights if right is not missing)
            yield Trial(case, next(users), grants(case, kept, by_cluster=False), missing)
        # Every right on the resources that the request names, and none on the cluster.
        if any(right.resource == CLUSTER for right in case.rights):
            everything = tuple(("All", kind, name) for kind, name in case.names.items())
            yield Trial(case, next(users), everything, case.rights[0])


def policy_of(trial: Trial) -> list[dict[str, Any]]:
    """The policy rules that allow what the client is granted."""
    case, rules = trial.case, []
    held = set(trial.granted)
    for kind, name in case.names.items():
        mine = [right for right in case.rights if right.resource == kind]
        plain = [right for right in mine if right.operation != "Create" or case.api == "CreateTopics"]
        plain = [right for right in plain if (case.api, right.operation) != ("CreateTopics", "DescribeConfigs")]
        if ("All", kind, name) in held or (plain and all((right.operation, kind, name) in held for right in plain)):
            rules.append({"api": case.api, kind: name})
        rules += [
            {"api": {"Create": "CreateTopics", "DescribeConfigs": "DescribeConfigs"}[right.operation], kind: name}
            for right in mine
            if right not in plain and (right.operation, kind, name) in held
        ]
    for operation, resource, _ in held:
        if resource == CLUSTER:
            instead = {CLUSTER_ACTION: "broker", "Create": "CreateTopics"}
            rules.append({"api": instead.get(operation, case.api)})
            if operation == CLUSTER_ACTION and case.api not in GROUPS["broker"]:
                rules.append({"api": case.api})
    return [{"action": "allow", **rule} for rule in rules]


# --- the broker -------------------------------------------------------------------------------------------------------


class AuthorizedBroker(Broker):
    """One node with StandardAuthorizer. Clients of CLIENT may do everything; users log in at SASL."""

    def __init__(self, folder: Path, users: list[str]) -> None:
        super().__init__(NODE_ID, folder, controls=True)
        alone = {name: "1" for name in SETTINGS if name.endswith((".replication.factor", ".min.isr"))}
        module = "org.apache.kafka.common.security.plain.PlainLoginModule required "
        settings = {
            **{name: value for name, value in SETTINGS.items() if "reauth" not in name},
            **alone,
            "auto.create.topics.enable": "true",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "listener.name.sasl.plain.sasl.jaas.config": module
            + " ".join(f'user_{user}="{PASSWORD}"' for user in users)
            + ";",
        }
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self.format(cluster_id, f"{NODE_ID}@{self.host}:{self.ports['CONTROLLER']}", settings)

    def grant(self, trials: list[Trial]) -> None:
        """Create the access rules and wait until the broker applies them."""
        last = Trial(trials[-1].case, "last", (("All", "topic", "last"),), None)
        entries = [
            {
                "resourceType": RESOURCES[resource],
                "resourceName": name,
                "resourcePatternType": 3,
                "principal": f"User:{trial.user}",
                "host": "*",
                "operation": 2 if operation == "All" else OPERATIONS[operation],
                "permissionType": 3,
            }
            for trial in [*trials, last]
            for operation, resource, name in trial.granted
        ]
        with Asking(self.address) as client:
            for at in range(0, len(entries), 100):
                made = client.ask("CreateAcls", 3, {"creations": entries[at : at + 100]})
                assert not any(result["errorCode"] for result in made["results"]), made
        with Asking(self.address_of("SASL")) as client:
            login(client, "last")
            asked = {"topics": [{"name": "last"}], "allowAutoTopicCreation": False}
            wait_for("the access rules", lambda: client.ask("Metadata", 4, asked)["topics"][0]["errorCode"] != 29)


def login(client: Asking, user: str) -> None:
    assert client.ask("SaslHandshake", 1, {"mechanism": "PLAIN"})["errorCode"] == 0
    token = f"\0{user}\0{PASSWORD}".encode()
    answer = client.ask("SaslAuthenticate", 1, {"authBytes": token})
    assert answer["errorCode"] == 0, answer


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[AuthorizedBroker]:
    broker = AuthorizedBroker(tmp_path, [*USERS, "last"])
    try:
        broker.start()
        broker.wait_until_started()
        yield broker
    finally:
        broker.stop(kill=True)


# --- the decisions of both --------------------------------------------------------------------------------------------


def decision_of_broker(broker: AuthorizedBroker, trial: Trial) -> str:
    """The broker's decision on the request: "denied", "closed" or "other"."""
    case = trial.case
    with Asking(broker.address_of("SASL")) as client:
        login(client, trial.user)
        try:
            answer = client.answer(case.api, case.version, case.body)
        except (AssertionError, OSError):
            return "closed"  # as for requests that brokers serve at no listener for clients
    errors = codec.response_scan(KEYS[case.api], case.version)(memoryview(b"size" + answer), 8, len(answer) + 4)[2]
    return "denied" if DENIED & set(errors) else "other"


def decision_of_kproxy(trial: Trial, topic_id: UUID) -> str:
    case = trial.case
    names = TopicNames()
    names.learn({topic_id: THERE})
    frame = codec.framed_request(KEYS[case.api], case.version, 7, "asking", case.body)
    talk = Decided(*policy_of(trial), policy_default="deny", names=names).client(frame)
    assert isinstance(talk, Decided)
    if talk.refusals:
        return "denied"
    if not talk.requests():
        return "answered"  # a fetch of a share session that was not opened on this connection
    (sent,) = talk.requests()
    if case.api == "Metadata" and case.names["topic"] == ABSENT:
        return "other" if codec.decode_request(sent)[1]["allowAutoTopicCreation"] else "denied"
    return "other"


@pytest.mark.ring2
def test_a_policy_refuses_what_an_authorizer_with_the_same_rights_refuses(
    broker: AuthorizedBroker,
) -> None:
    made = ("--create", "--if-not-exists", "--topic", THERE, "--partitions", "1")
    tool(TOPICS, "--bootstrap-server", broker.address, *made)
    with Asking(broker.address) as client:
        asked = {"topics": [{"topicId": UUID(int=0), "name": THERE}]}
        topic_id = client.ask("Metadata", 12, asked)["topics"][0]["topicId"]
    tried = list(trials(topic_id))
    broker.grant(tried)
    seen: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for trial in tried:
        theirs, ours = decision_of_broker(broker, trial), decision_of_kproxy(trial, topic_id)
        what = "all" if trial.missing is None else "lacks one"
        seen[what, theirs, ours] += 1
        line = f"{trial.case.api} v{trial.case.version} {trial.granted}: broker {theirs}, kproxy {ours}"
        if (theirs == "denied" and ours != "denied") or (what == "all" and theirs == "denied"):
            wrong.append(line)
        elif what == "all" and ours == "denied":
            wrong.append(f"more: {line}")
    assert not wrong, "\n".join(wrong)
    assert seen["lacks one", "denied", "denied"] > 100 and seen["all", "other", "other"] > 100, seen

"""The rights that Kafka's brokers require: operation, resource, and the fields that name it, by API.

Facts, made from KafkaApis, ControllerApis, AclApis, ConfigHelper and DescribeTopicPartitionsRequestHandler of Kafka 4.1
with StandardAuthorizer: in `tests/broker`, test_rights.py compares them with these classes, and test_authorizer.py asks
such a broker. APIs that Kafka 4 lacks: KafkaApis of 2.0 and 3.9; those of Kafka 4.4: KIP-1312 and KIP-1331. Kafka's
documentation has most of it under "Operations and resources on protocols".

The policy follows this table: rules with names never allow a request that needs a right on the cluster, and only rules
for brokers allow ClusterAction. docs/reference/rights.md shows both.
"""

from functools import lru_cache
from typing import NamedTuple

from kproxy.protocol.schema import api_name
from kproxy.proxy.filters.policy.resources import CLUSTER, GROUP, KINDS, TOPIC, TRANSACTIONAL_ID

USER, TOKEN = "user", "delegation_token"  # resources of Kafka that rules treat as the cluster

CLUSTER_ACTION = "ClusterAction"

ALL_VERSIONS = range(1 << 15)


class Right(NamedTuple):
    """One right; a request needs all rights of its API, except for fields that it leaves out."""

    operation: str  # AclOperation, as Kafka's documentation writes it
    resource: str  # its type
    fields: tuple[str, ...] = ()  # fields that name the resource, or whose value requires the right
    when: str = ""  # a condition in words
    versions: range = ALL_VERSIONS
    or_cluster: str = ""  # an operation on the cluster that is as good


def _topics(operation: str, *fields: str, when: str = "", or_cluster: str = "") -> Right:
    return Right(operation, TOPIC, fields, when, or_cluster=or_cluster)


def _groups(operation: str, *fields: str, when: str = "", or_cluster: str = "") -> Right:
    return Right(operation, GROUP, fields, when, or_cluster=or_cluster)


def _transactions(operation: str, *fields: str, when: str = "") -> Right:
    return Right(operation, TRANSACTIONAL_ID, fields, when)


def _cluster(operation: str, or_cluster: str = "") -> tuple[Right, ...]:
    return (Right(operation, CLUSTER, or_cluster=or_cluster),)


_RESOURCE = ("resources.resourceName",)


def _settings(operation: str) -> tuple[Right, ...]:
    """Return the rights of an operation on a ConfigResource, by its type."""
    return (
        Right(operation, TOPIC, _RESOURCE, "resourceType is 2"),
        Right(operation, GROUP, _RESOURCE, "resourceType is 32"),
        Right(operation, CLUSTER, _RESOURCE, "resourceType is another: brokers, their loggers, client metrics"),
    )


_BETWEEN_BROKERS = _cluster(CLUSTER_ACTION)
_TO_AUTO_CREATE = "allowAutoTopicCreation, and it does not exist; before version 4 always"

RIGHTS: dict[str, tuple[Right, ...]] = {
    "Produce": (
        _transactions("Write", "transactionalId", when="the records are of a transaction"),
        _topics("Write", "topicData.name", "topicData.topicId"),
    ),
    "Fetch": (
        Right(CLUSTER_ACTION, CLUSTER, ("replicaId", "replicaState.replicaId"), "0 or above: then nothing else"),
        _topics("Read", "topics.topic", "topics.topicId"),
    ),
    "ListOffsets": (_topics("Describe", "topics.name"),),
    "Metadata": (
        _topics("Describe", "topics.name", "topics.topicId"),
        _topics("Create", "topics.name", when=_TO_AUTO_CREATE, or_cluster="Create"),
    ),
    "LeaderAndIsr": _BETWEEN_BROKERS,
    "StopReplica": _BETWEEN_BROKERS,
    "UpdateMetadata": _BETWEEN_BROKERS,
    "ControlledShutdown": _BETWEEN_BROKERS,
    "OffsetCommit": (_groups("Read", "groupId"), _topics("Read", "topics.name", "topics.topicId")),
    "OffsetFetch": (
        _groups("Describe", "groupId", "groups.groupId"),
        _topics("Describe", "topics.name", "groups.topics.name", "groups.topics.topicId"),
    ),
    "FindCoordinator": (
        _groups("Describe", "key", "coordinatorKeys", when="keyType is 0"),
        _transactions("Describe", "key", "coordinatorKeys", when="keyType is 1"),
        Right(CLUSTER_ACTION, CLUSTER, ("keyType",), "2: coordinators of share groups"),
    ),
    "JoinGroup": (_groups("Read", "groupId"),),
    "Heartbeat": (_groups("Read", "groupId"),),
    "LeaveGroup": (_groups("Read", "groupId"),),
    "SyncGroup": (_groups("Read", "groupId"),),
    "DescribeGroups": (_groups("Describe", "groups"),),
    "ListGroups": (_groups("Describe", when="each group of the answer", or_cluster="Describe"),),
    "SaslHandshake": (),
    "ApiVersions": (),
    "CreateTopics": (
        _topics("Create", "topics.name", or_cluster="Create"),
        _topics("DescribeConfigs", "topics.name", when="for the settings in the answer"),
    ),
    "DeleteTopics": (
        _topics("Delete", "topicNames", "topics.name", "topics.topicId", or_cluster="Delete"),
        _topics("Describe", "topics.topicId", when="for the name in the answer"),
    ),
    "DeleteRecords": (_topics("Delete", "topics.name"),),
    "InitProducerId": (
        _transactions("Write", "transactionalId"),
        Right("TwoPhaseCommit", TRANSACTIONAL_ID, ("enable2Pc",), "true", range(6, 1 << 15)),
        _topics("Write", when="transactionalId is null: of any topic", or_cluster="IdempotentWrite"),
    ),
    "OffsetForLeaderEpoch": (
        # Consumers do not send versions 0 and 1: brokers before Kafka 2.1 require only this right.
        Right(CLUSTER_ACTION, CLUSTER, versions=range(2)),
        Right("Describe", TOPIC, ("topics.topic",), versions=range(2, 1 << 15), or_cluster=CLUSTER_ACTION),
    ),
    "AddPartitionsToTxn": (
        Right("Write", TRANSACTIONAL_ID, ("v3AndBelowTransactionalId",), versions=range(4)),
        Right("Write", TOPIC, ("v3AndBelowTopics.name",), versions=range(4)),
        Right(CLUSTER_ACTION, CLUSTER, versions=range(4, 1 << 15)),
    ),
    "AddOffsetsToTxn": (_transactions("Write", "transactionalId"), _groups("Read", "groupId")),
    "EndTxn": (_transactions("Write", "transactionalId"),),
    "WriteTxnMarkers": _cluster("Alter", or_cluster=CLUSTER_ACTION),
    "TxnOffsetCommit": (
        _transactions("Write", "transactionalId"),
        _groups("Read", "groupId"),
        _topics("Read", "topics.name", "topics.topicId"),
    ),
    "DescribeAcls": _cluster("Describe"),
    "CreateAcls": _cluster("Alter"),
    "DeleteAcls": _cluster("Alter"),
    "DescribeConfigs": _settings("DescribeConfigs"),
    "AlterConfigs": _settings("AlterConfigs"),
    "AlterReplicaLogDirs": _cluster("Alter"),
    "DescribeLogDirs": _cluster("Describe"),
    "SaslAuthenticate": (),
    "CreatePartitions": (_topics("Alter", "topics.name"),),
    "CreateDelegationToken": (
        Right("CreateTokens", USER, ("ownerPrincipalType", "ownerPrincipalName"), "it is not who asks"),
    ),
    # Owners and renewers of a token need no right; no right lets other users do so.
    "RenewDelegationToken": (),
    "ExpireDelegationToken": (),
    "DescribeDelegationToken": (
        Right("Describe", TOKEN, when="each token of the answer that is not the client's"),
        Right("DescribeTokens", USER, ("owners.principalType", "owners.principalName"), "it is not who asks"),
    ),
    "DeleteGroups": (_groups("Delete", "groupsNames"),),
    "ElectLeaders": _cluster("Alter"),
    "IncrementalAlterConfigs": _settings("AlterConfigs"),
    "AlterPartitionReassignments": _cluster("Alter"),
    "ListPartitionReassignments": _cluster("Describe"),
    "OffsetDelete": (_groups("Delete", "groupId"), _topics("Read", "topics.name")),
    "DescribeClientQuotas": _cluster("DescribeConfigs"),
    "AlterClientQuotas": _cluster("AlterConfigs"),
    "DescribeUserScramCredentials": _cluster("Describe"),
    "AlterUserScramCredentials": _cluster("Alter"),
    "Vote": _BETWEEN_BROKERS,
    "BeginQuorumEpoch": _BETWEEN_BROKERS,
    "EndQuorumEpoch": _BETWEEN_BROKERS,
    "DescribeQuorum": _cluster("Describe"),
    "AlterPartition": _BETWEEN_BROKERS,
    "UpdateFeatures": _cluster("Alter"),
    "Envelope": _BETWEEN_BROKERS,
    "FetchSnapshot": _BETWEEN_BROKERS,
    "DescribeCluster": (),  # a controller's own listener asks for Alter on the cluster
    "DescribeProducers": (_topics("Read", "topics.name"),),
    "BrokerRegistration": _BETWEEN_BROKERS,
    "BrokerHeartbeat": _BETWEEN_BROKERS,
    "UnregisterBroker": _cluster("Alter"),
    "DescribeTransactions": (
        _transactions("Describe", "transactionalIds"),
        _topics("Describe", when="each topic of the answer"),
    ),
    "ListTransactions": (_transactions("Describe", when="each transactional id of the answer"),),
    "AllocateProducerIds": _BETWEEN_BROKERS,
    "ConsumerGroupHeartbeat": (
        _groups("Read", "groupId"),
        _topics("Describe", "subscribedTopicNames"),
        _topics("Describe", "subscribedTopicRegex", when="each topic that fits"),
    ),
    "ConsumerGroupDescribe": (_groups("Describe", "groupIds"), _topics("Describe", when="each topic of the answer")),
    "ControllerRegistration": _BETWEEN_BROKERS,
    "GetTelemetrySubscriptions": (),
    "PushTelemetry": (),
    "AssignReplicasToDirs": _BETWEEN_BROKERS,
    "ListConfigResources": _cluster("DescribeConfigs"),
    "DescribeTopicPartitions": (_topics("Describe", "topics.name"),),
    "ShareGroupHeartbeat": (_groups("Read", "groupId"), _topics("Describe", "subscribedTopicNames")),
    "ShareGroupDescribe": (_groups("Describe", "groupIds"), _topics("Describe", when="each topic of the answer")),
    "ShareFetch": (_groups("Read", "groupId"), _topics("Read", "topics.topicId")),
    "ShareAcknowledge": (_groups("Read", "groupId"), _topics("Read", "topics.topicId")),
    "AddRaftVoter": _cluster("Alter"),
    "RemoveRaftVoter": _cluster("Alter"),
    "UpdateRaftVoter": _BETWEEN_BROKERS,
    "InitializeShareGroupState": _BETWEEN_BROKERS,
    "ReadShareGroupState": _BETWEEN_BROKERS,
    "WriteShareGroupState": _BETWEEN_BROKERS,
    "DeleteShareGroupState": _BETWEEN_BROKERS,
    "ReadShareGroupStateSummary": _BETWEEN_BROKERS,
    "StreamsGroupHeartbeat": (
        _groups("Read", "groupId"),
        _topics(
            "Describe",
            "topology.subtopologies.sourceTopics",
            "topology.subtopologies.repartitionSinkTopics",
            "topology.subtopologies.repartitionSourceTopics.name",
            "topology.subtopologies.stateChangelogTopics.name",
        ),
        _topics(
            "Create",
            "topology.subtopologies.repartitionSourceTopics.name",
            "topology.subtopologies.stateChangelogTopics.name",
            when="it does not exist",
            or_cluster="Create",
        ),
    ),
    "StreamsGroupDescribe": (_groups("Describe", "groupIds"), _topics("Describe", when="each topic of the answer")),
    "DescribeShareGroupOffsets": (
        _groups("Describe", "groups.groupId"),
        _topics("Describe", "groups.topics.topicName"),
    ),
    "AlterShareGroupOffsets": (_groups("Read", "groupId"), _topics("Read", "topics.topicName")),
    "DeleteShareGroupOffsets": (_groups("Delete", "groupId"), _topics("Read", "topics.topicName")),
    "StreamsGroupTopologyDescriptionUpdate": (_groups("Read", "groupId"),),
    "UnregisterController": _cluster("Alter"),
}


@lru_cache(4096)  # clients invent versions
def rights_of(api_key: int, version: int) -> tuple[Right, ...]:
    """Return the rights of a version; none for a key that the schema lacks."""
    return tuple(right for right in RIGHTS.get(api_name(api_key), ()) if version in right.versions)


@lru_cache(4096)  # clients invent versions
def is_of_cluster(api_key: int, version: int) -> bool:
    """Return whether a broker requires only rights on the cluster, for any names in the request."""
    rights = rights_of(api_key, version)
    return bool(rights) and all(right.resource not in KINDS for right in rights)


@lru_cache(4096)  # clients invent versions
def is_cluster_action(api_key: int, version: int) -> bool:
    """Return whether only brokers and controllers may send requests of that version."""
    return any(right.operation == CLUSTER_ACTION and not right.fields for right in rights_of(api_key, version))

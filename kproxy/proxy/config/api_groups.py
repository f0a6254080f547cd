"""The API names in policy rules: Kafka's names, groups of APIs, numbers, or "*" for all APIs.

Every API of the schema is in exactly one group, which a test asserts. Refuses to know rules.
"""

import difflib
from functools import cache

from kproxy.protocol.schema import api_name, schema

EVERYTHING = "*"

# Logins, and the versions that a broker supports: no rule applies to them, since every client begins with them.
ALWAYS = ("SaslHandshake", "ApiVersions", "SaslAuthenticate")

# Requests of consumers, including members of groups and share groups. These APIs also commit offsets.
READ = (
    *("Fetch", "ListOffsets", "OffsetForLeaderEpoch", "ShareFetch", "ShareAcknowledge"),
    *("FindCoordinator", "JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup", "OffsetCommit", "OffsetFetch"),
    *("ConsumerGroupHeartbeat", "ShareGroupHeartbeat"),
)

# Requests of producers, including transactions; and of members of Streams groups, as brokers create topics for them.
WRITE = (
    *("Produce", "InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"),
    *("StreamsGroupHeartbeat", "StreamsGroupTopologyDescriptionUpdate"),
)

# Requests that change nothing and return no records.
DESCRIBE = (
    *("Metadata", "DescribeCluster", "DescribeTopicPartitions", "DescribeGroups", "ListGroups"),
    *("ConsumerGroupDescribe", "ShareGroupDescribe", "StreamsGroupDescribe", "DescribeShareGroupOffsets"),
    *("DescribeConfigs", "ListConfigResources", "DescribeLogDirs", "DescribeProducers", "DescribeTransactions"),
    *("ListTransactions", "ListPartitionReassignments", "DescribeAcls", "DescribeClientQuotas"),
    *("DescribeUserScramCredentials", "DescribeDelegationToken", "DescribeQuorum"),
    *("GetTelemetrySubscriptions", "PushTelemetry"),
)

# Requests of administrators, which change topics, groups, rights, settings or brokers. The audit log has each of them.
ADMIN = (
    *("CreateTopics", "DeleteTopics", "CreatePartitions", "DeleteRecords", "ElectLeaders"),
    *("AlterPartitionReassignments", "AlterReplicaLogDirs", "AlterConfigs", "IncrementalAlterConfigs"),
    *("CreateAcls", "DeleteAcls", "AlterClientQuotas", "AlterUserScramCredentials"),
    *("CreateDelegationToken", "RenewDelegationToken", "ExpireDelegationToken"),
    *("DeleteGroups", "OffsetDelete", "AlterShareGroupOffsets", "DeleteShareGroupOffsets"),
    *("UpdateFeatures", "UnregisterBroker", "UnregisterController", "AddRaftVoter", "RemoveRaftVoter"),
    "WriteTxnMarkers",
)

# Requests between brokers and controllers. No client has a reason to send them.
BROKER = (
    *("LeaderAndIsr", "StopReplica", "UpdateMetadata", "ControlledShutdown", "AlterPartition", "Envelope"),
    *("Vote", "BeginQuorumEpoch", "EndQuorumEpoch", "FetchSnapshot", "UpdateRaftVoter"),
    *("BrokerRegistration", "BrokerHeartbeat", "ControllerRegistration", "AllocateProducerIds"),
    *("AssignReplicasToDirs", "InitializeShareGroupState", "ReadShareGroupState", "WriteShareGroupState"),
    *("DeleteShareGroupState", "ReadShareGroupStateSummary"),
)

GROUPS = {"always": ALWAYS, "read": READ, "write": WRITE, "describe": DESCRIBE, "admin": ADMIN, "broker": BROKER}

# APIs that a read-only listener passes, besides ALWAYS.
READ_ONLY = ("read", "describe")


@cache
def keys_of_names() -> dict[str, int]:
    """Return Kafka's name of every API -> its key."""
    return {api.name: key for key, api in schema().apis.items()}


@cache
def group_keys(group: str) -> frozenset[int]:
    """Return the keys of a group's APIs."""
    names = keys_of_names()
    return frozenset(names[name] for name in GROUPS[group])


def api_keys(text: str) -> frozenset[int] | None:
    """Return the API keys that a rule's `api` means; None: all. Raises ValueError, with a similar name, for others."""
    if text == EVERYTHING:
        return None
    if text in GROUPS and text != "always":
        return group_keys(text)
    names = keys_of_names()
    if text in names:
        return frozenset((names[text],))
    digits = text.removeprefix("unknown_")
    if digits.removeprefix("-").isdigit() and -(1 << 15) <= int(digits) < 1 << 15:
        return frozenset((int(digits),))
    known = [*names, *GROUPS]
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(text.lower(), folded, 1)
    hint = f"did you mean {folded[near[0]]}?" if near else "write a name as Kafka spells it, like Produce"
    raise ValueError(
        f"{text!r} is no API: {hint} Groups are read, write, describe, admin and broker; others go by their number"
    )


def group_of(api_key: int) -> str | None:
    """Return the group of an API; None for a key that the schema does not have."""
    name = api_name(api_key)
    return next((group for group, members in GROUPS.items() if name in members), None)

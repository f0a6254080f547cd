"""Which topics, groups and transactional ids a request names, read by plans that are compiled from the schema.

Duty: NAMED says which fields of which request name what; `reader` compiles, for one API and version, the code that
reads these fields and steps over all else, record payloads included. Bounds: a request with more than MAX_ELEMENTS
elements in its arrays is Malformed, so that a hostile one takes some tens of milliseconds at most. Text that is not
UTF-8 is read with replacement characters, as brokers do. Refuses to know rules.
"""

from collections.abc import Callable
from functools import cache
from typing import Any
from uuid import UUID

from kproxy.protocol.codec import Plan, api_message, paths_of
from kproxy.protocol.plans import Length
from kproxy.protocol.schema import Field, Message, schema

TOPIC, GROUP, TRANSACTIONAL_ID = "topic", "group", "transactional_id"
CLUSTER = "cluster"  # what is none of them: brokers, access rules, quotas, users
KINDS = (TOPIC, GROUP, TRANSACTIONAL_ID)

METADATA = 3
DESCRIBE_TRANSACTIONS = 65
ENVELOPE = 58  # carries another request, in the name of somebody else
MAX_ELEMENTS = 64 * 1024

_ID = "topic_id"  # names a topic too

# By API: the fields that name something, each with what it names. "[]": each element of an array. APIs that are not
# here name nothing that rules distinguish.
NAMED: dict[str, dict[str, str]] = {
    "Produce": {"transactionalId": TRANSACTIONAL_ID, "topicData.name": TOPIC, "topicData.topicId": _ID},
    "Fetch": {"topics.topic": TOPIC, "topics.topicId": _ID},
    "ListOffsets": {"topics.name": TOPIC},
    "Metadata": {"topics.name": TOPIC, "topics.topicId": _ID},
    "OffsetCommit": {"groupId": GROUP, "topics.name": TOPIC, "topics.topicId": _ID},
    "OffsetFetch": {
        "groupId": GROUP,
        "topics.name": TOPIC,
        "groups.groupId": GROUP,
        "groups.topics.name": TOPIC,
        "groups.topics.topicId": _ID,
    },
    "FindCoordinator": {"key": "key", "keyType": "key_type", "coordinatorKeys[]": "key"},
    "JoinGroup": {"groupId": GROUP},
    "Heartbeat": {"groupId": GROUP},
    "LeaveGroup": {"groupId": GROUP},
    "SyncGroup": {"groupId": GROUP},
    "DescribeGroups": {"groups[]": GROUP},
    "CreateTopics": {"topics.name": TOPIC},
    "DeleteTopics": {"topicNames[]": TOPIC, "topics.name": TOPIC, "topics.topicId": _ID},
    "DeleteRecords": {"topics.name": TOPIC},
    "InitProducerId": {"transactionalId": TRANSACTIONAL_ID},
    "OffsetForLeaderEpoch": {"topics.topic": TOPIC},
    "AddPartitionsToTxn": {
        "v3AndBelowTransactionalId": TRANSACTIONAL_ID,
        "v3AndBelowTopics.name": TOPIC,
        "transactions.transactionalId": TRANSACTIONAL_ID,
        "transactions.topics.name": TOPIC,
    },
    "AddOffsetsToTxn": {"transactionalId": TRANSACTIONAL_ID, "groupId": GROUP},
    "EndTxn": {"transactionalId": TRANSACTIONAL_ID},
    "TxnOffsetCommit": {
        "transactionalId": TRANSACTIONAL_ID,
        "groupId": GROUP,
        "topics.name": TOPIC,
        "topics.topicId": _ID,
    },
    "DescribeConfigs": {"resources.resourceType": "resource_type", "resources.resourceName": "resource"},
    "AlterConfigs": {"resources.resourceType": "resource_type", "resources.resourceName": "resource"},
    "IncrementalAlterConfigs": {"resources.resourceType": "resource_type", "resources.resourceName": "resource"},
    "AlterReplicaLogDirs": {"dirs.topics.name": TOPIC},
    "DescribeLogDirs": {"topics.topic": TOPIC},
    "CreatePartitions": {"topics.name": TOPIC},
    "DeleteGroups": {"groupsNames[]": GROUP},
    "ElectLeaders": {"topicPartitions.topic": TOPIC},
    "AlterPartitionReassignments": {"topics.name": TOPIC},
    "ListPartitionReassignments": {"topics.name": TOPIC},
    "OffsetDelete": {"groupId": GROUP, "topics.name": TOPIC},
    "DescribeProducers": {"topics.name": TOPIC},
    "DescribeTransactions": {"transactionalIds[]": TRANSACTIONAL_ID},
    "ConsumerGroupHeartbeat": {
        "groupId": GROUP,
        "subscribedTopicNames[]": TOPIC,
        "subscribedTopicRegex": "expression",
    },
    "ConsumerGroupDescribe": {"groupIds[]": GROUP},
    "DescribeTopicPartitions": {"topics.name": TOPIC},
    "ShareGroupHeartbeat": {"groupId": GROUP, "subscribedTopicNames[]": TOPIC},
    "ShareGroupDescribe": {"groupIds[]": GROUP},
    "ShareFetch": {"groupId": GROUP, "topics.topicId": _ID},
    "ShareAcknowledge": {"groupId": GROUP, "topics.topicId": _ID},
    "StreamsGroupHeartbeat": {
        "groupId": GROUP,
        "topology.subtopologies.sourceTopics[]": TOPIC,
        "topology.subtopologies.sourceTopicRegex[]": "expression",
        "topology.subtopologies.repartitionSinkTopics[]": TOPIC,
        "topology.subtopologies.stateChangelogTopics.name": TOPIC,
        "topology.subtopologies.repartitionSourceTopics.name": TOPIC,
    },
    "StreamsGroupDescribe": {"groupIds[]": GROUP},
    "StreamsGroupTopologyDescriptionUpdate": {"groupId": GROUP},
    "DescribeShareGroupOffsets": {"groups.groupId": GROUP, "groups.topics.topicName": TOPIC},
    "AlterShareGroupOffsets": {"groupId": GROUP, "topics.topicName": TOPIC},
    "DeleteShareGroupOffsets": {"groupId": GROUP, "topics.topicName": TOPIC},
    # What brokers send each other. A broker without an authorizer takes it from every client.
    "WriteTxnMarkers": {"markers.topics.name": TOPIC},
    "LeaderAndIsr": {
        "ungroupedPartitionStates.topicName": TOPIC,
        "topicStates.topicName": TOPIC,
        "topicStates.topicId": _ID,
    },
    "StopReplica": {
        "ungroupedPartitions.topicName": TOPIC,
        "topics.name": TOPIC,
        "topicStates.topicName": TOPIC,
    },
    "UpdateMetadata": {
        "ungroupedPartitionStates.topicName": TOPIC,
        "topicStates.topicName": TOPIC,
        "topicStates.topicId": _ID,
    },
    "AlterPartition": {"topics.topicName": TOPIC, "topics.topicId": _ID},
    "AssignReplicasToDirs": {"directories.topics.topicId": _ID},
    "Vote": {"topics.topicName": TOPIC},
    "BeginQuorumEpoch": {"topics.topicName": TOPIC},
    "EndQuorumEpoch": {"topics.topicName": TOPIC},
    "FetchSnapshot": {"topics.name": TOPIC},
    "DescribeQuorum": {"topics.topicName": TOPIC},
    "InitializeShareGroupState": {"groupId": GROUP, "topics.topicId": _ID},
    "ReadShareGroupState": {"groupId": GROUP, "topics.topicId": _ID},
    "WriteShareGroupState": {"groupId": GROUP, "topics.topicId": _ID},
    "DeleteShareGroupState": {"groupId": GROUP, "topics.topicId": _ID},
    "ReadShareGroupStateSummary": {"groupId": GROUP, "topics.topicId": _ID},
}

# Arrays whose null means all of a kind, and those whose emptiness does, with the versions in which it does.
NULL_IS_ALL = {
    "Metadata": ("topics",),
    "OffsetFetch": ("topics", "groups.topics"),
    "DescribeLogDirs": ("topics",),
    "ElectLeaders": ("topicPartitions",),
    "ListPartitionReassignments": ("topics",),
    "DescribeShareGroupOffsets": ("groups.topics",),
}
EMPTY_IS_ALL = {"Metadata": range(1), "DescribeTopicPartitions": range(1 << 15)}

# Requests that ask for all of a kind by naming nothing.
ALL_OF = {"ListGroups": GROUP, "ListTransactions": TRANSACTIONAL_ID}

# What KIP-848 and idempotence need beside what they name: a producer id without a transaction is of use to any topic.
_ALSO = {"InitProducerId": TOPIC}

_KEY_TYPES = {0: GROUP, 1: TRANSACTIONAL_ID}
_SHARE_KEY = 2  # "group:topic id:partition" (KIP-932)
_RESOURCE_TYPES = {2: TOPIC, 32: GROUP}  # ConfigResource.Type
_ACL_TYPES = {2: TOPIC, 3: GROUP, 5: TRANSACTIONAL_ID}  # ResourceType


class Names:
    """What one request names; plans fill it in."""

    __slots__ = ("all_of", "cluster", "expression", "group", "topic", "topic_id", "transactional_id")

    def __init__(self) -> None:
        self.topic: list[str] = []
        self.topic_id: list[UUID] = []
        self.group: list[str] = []
        self.transactional_id: list[str] = []
        self.all_of: str | None = None  # a kind of which the request means all
        self.expression: str | None = None  # a broker looks for topics that fit: it may be any of them
        self.cluster = False  # it names something that is none of the kinds, like a broker's settings

    def is_empty(self) -> bool:
        return not (
            self.topic or self.topic_id or self.group or self.transactional_id or self.all_of or self.cluster
        )  # fmt: skip


Reader = Callable[[Any, int, int], Names]


@cache
def kinds_of(api_key: int, version: int) -> frozenset[str]:
    """The kinds that requests of that version can name."""
    api = schema().apis.get(api_key)
    if api is None or version not in api.request.versions:
        return frozenset()
    kinds = {kind for path, kind in NAMED.get(api.name, {}).items() if _is_in(api.request, version, path)}
    if kinds & {"key", "resource"}:
        kinds |= {GROUP, TRANSACTIONAL_ID} if "key" in kinds else {TOPIC, GROUP}
    if _ID in kinds:
        kinds.add(TOPIC)
    kinds |= {kind for table in (ALL_OF, _ALSO) if (kind := table.get(api.name))}
    return frozenset(kinds & set(KINDS))


@cache
def names_by_id(api_key: int, version: int) -> bool:
    """Whether requests of that version can name topics by their ids."""
    api = schema().apis.get(api_key)
    if api is None or version not in api.request.versions:
        return False
    return any(kind == _ID and _is_in(api.request, version, path) for path, kind in NAMED.get(api.name, {}).items())


def names_resources(api_key: int) -> bool:
    """Whether requests name what they are about with its type: settings of topics, of groups, or of brokers."""
    return "resource" in NAMED.get(schema().apis[api_key].name, {}).values()


@cache
def reader(api_key: int, version: int) -> Reader:
    """Compile read(frame, start, end) -> Names; `start` is behind the correlation id. The read raises Malformed."""
    return _NamesPlan(api_message(api_key, version, "request"), schema().apis[api_key].name, version).reader()


def _is_in(message: Message, version: int, path: str) -> bool:
    return path.removesuffix("[]") in set(paths_of(message.fields, version))


class _NamesPlan(Plan):
    """plan(buffer, start, end) -> Names"""

    utf8 = "replace"

    def __init__(self, message: Message, api: str, version: int) -> None:
        self.named = {path: kind for path, kind in NAMED.get(api, {}).items() if _is_in(message, version, path)}
        self.all_of_topics = {
            path
            for path in NULL_IS_ALL.get(api, ())
            for field in (_field_at(message.fields, path, version),)
            if field is not None and version in field.nullable_versions
        }
        self.empty_is_all = api in EMPTY_IS_ALL and version in EMPTY_IS_ALL[api]
        self.all_of = ALL_OF.get(api)
        super().__init__(message, version, self.named)

    def kept(self, field: Field, path: str, var: str) -> None:
        kind = self.named[path]
        if kind == _ID:
            self.after(f"if {var}.int: topic_ids.append({var})")
        elif kind in KINDS:
            self.after(f"if {var} is not None: {kind}s.append({var})")
        elif kind == "key":
            self.after(f"keys.append({var})")
        elif kind == "expression":
            self.after(f"expression = {var} or expression")
        elif kind == "resource":
            self.after(f"resources.append((resource_type, {var}))")
        else:
            self.after(f"{kind} = {var}")

    def counted(self, path: str, length: Length) -> None:
        self.line(f"total += {length.var}")
        with self.block(f"if total > {MAX_ELEMENTS}:"):
            text = f"{self.title}: more than {MAX_ELEMENTS} elements in its arrays"
            self.line(f"raise Malformed({text!r})")
        if path in self.all_of_topics:
            self.line(f"if {length.is_null}: all_of = 'topic'")
        if self.empty_is_all and path == "topics":
            self.line(f"if not ({length.is_some}): all_of = 'topic'")

    def reader(self) -> Reader:
        self.names |= {"Names": Names, "note_keys": _note_keys, "note_resources": _note_resources}
        special = {"key": ("keys", "note_keys(names, key_type, keys)")}
        special["resource"] = ("resources", "note_resources(names, resources)")
        used = [special[kind] for kind in special if kind in self.named.values()]
        self.line("topics, topic_ids, groups, transactional_ids = [], [], [], []")
        self.line("total = key_type = resource_type = 0")
        self.line(f"all_of = {self.all_of!r}")
        self.line("expression = None")
        for variable, _ in used:
            self.line(f"{variable} = []")
        with self.translated():
            self.header("request")
            self.struct(self.message.fields, "")
        self.short("pos > end")
        self.line("names = Names()")
        self.line("names.topic, names.topic_id, names.group = topics, topic_ids, groups")
        self.line("names.transactional_id, names.all_of = transactional_ids, all_of")
        self.line("names.expression = expression")
        for _, statement in used:
            self.line(statement)
        self.line("return names")
        return self.function("buffer, start, end")


def _note_keys(names: Names, key_type: int, keys: list[str]) -> None:
    """The keys of a FindCoordinator: groups, or transactional ids."""
    kind = _KEY_TYPES.get(key_type)
    if kind is not None:
        getattr(names, kind).extend(keys)
    elif key_type == _SHARE_KEY:
        names.group.extend(key.rsplit(":", 2)[0] for key in keys)
    elif keys:
        names.cluster = True


def _note_resources(names: Names, resources: list[tuple[int, str]]) -> None:
    """The resources of DescribeConfigs and its like: topics, groups, and others, which are the cluster's."""
    for resource_type, name in resources:
        kind = _RESOURCE_TYPES.get(resource_type)
        if kind is None:
            names.cluster = True
        else:
            getattr(names, kind).append(name)


def resource_kind(resource_type: int) -> str:
    """The kind of a resource of DescribeConfigs and its like."""
    return _RESOURCE_TYPES.get(resource_type, CLUSTER)


def acl_kind(resource_type: int) -> str:
    """The kind of a resource of access rules."""
    return _ACL_TYPES.get(resource_type, CLUSTER)


def key_names(key_type: int, key: str) -> tuple[str, str]:
    """(kind, name) of a key of FindCoordinator."""
    if key_type == _SHARE_KEY:
        return GROUP, key.rsplit(":", 2)[0]
    return _KEY_TYPES.get(key_type, CLUSTER), key


def _field_at(fields: tuple[Field, ...], path: str, version: int) -> Field | None:
    name, _, rest = path.partition(".")
    field = next((field for field in fields if field.name == name and version in field.versions), None)
    return field if field is None or not rest else _field_at(field.fields, rest, version)

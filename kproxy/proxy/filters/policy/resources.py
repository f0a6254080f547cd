"""Topics, groups and transactional ids in a request, read by plans that are compiled from the schema.

Duty: NAMED lists the fields of each request that name resources; `reader` compiles, for one API and version, the code
that reads these fields and skips all others, including record payloads. A request must be read as a broker reads it.
Kafka's generated classes read known tagged fields by their content and ignore their sizes, use the last of several
equal tags, and replace text that is not UTF-8. A request is Malformed if any of these makes a difference. A request
with more than MAX_ELEMENTS elements in arrays and tagged fields is TooManyElements, which bounds its memory. A request
with more than FEW_ELEMENTS is read in slices, which bounds the time of a call. Bytes after the end are skipped: no
broker reads them, and librdkafka sends some after a Metadata v13 for all topics. Does not evaluate rules.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from uuid import UUID

from kproxy.errors import Malformed
from kproxy.protocol.codec import Plan, Slices, api_message, paths_of
from kproxy.protocol.plans import Length
from kproxy.protocol.schema import Api, Field, Message, schema

TOPIC, GROUP, TRANSACTIONAL_ID = "topic", "group", "transactional_id"
CLUSTER = "cluster"  # all other resources: brokers, access rules, quotas, users
KINDS = (TOPIC, GROUP, TRANSACTIONAL_ID)

MAX_ELEMENTS = 64 * 1024
FEW_ELEMENTS = 128  # read in one call
_SLICE_NOTED = 1024

_ID = "topic_id"  # names a topic too

# Replica ids of consumers and debugging tools. A broker treats a client with any other id as a follower: the offsets of
# its Fetch move the high watermark, and it gets records that are not replicated yet.
CLIENT_REPLICA_IDS = (-1, -2)

# By API: the fields that name resources, with their kinds. "[]": each element of an array. Requests of other APIs name
# no resources that rules distinguish.
NAMED: dict[str, dict[str, str]] = {
    "Produce": {"transactionalId": TRANSACTIONAL_ID, "topicData.name": TOPIC, "topicData.topicId": _ID},
    "Fetch": {
        "topics.topic": TOPIC,
        "topics.topicId": _ID,
        "replicaId": "replica",
        "replicaState.replicaId": "replica",
    },
    "ListOffsets": {"topics.name": TOPIC, "replicaId": "replica"},
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
    "InitProducerId": {"transactionalId": TRANSACTIONAL_ID, "enable2Pc": "of_cluster"},
    "OffsetForLeaderEpoch": {"topics.topic": TOPIC, "replicaId": "replica"},
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
    # Requests between brokers. A broker without an authorizer accepts them from every client.
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

# By API: another API with the same effect, and the fields that name the topics of this effect. Brokers create missing
# topics for the first two, and the third's answer has the settings of topics.
ALSO: dict[str, tuple[str, tuple[str, ...]]] = {
    "Metadata": ("CreateTopics", ("topics.name",)),
    "StreamsGroupHeartbeat": (
        "CreateTopics",
        (
            "topology.subtopologies.repartitionSourceTopics.name",
            "topology.subtopologies.stateChangelogTopics.name",
        ),
    ),
    "CreateTopics": ("DescribeConfigs", ("topics.name",)),
}

# Arrays whose null means all resources of a kind; arrays that mean so if they are empty, with the versions.
NULL_IS_ALL = {
    "Metadata": ("topics",),
    "OffsetFetch": ("topics", "groups.topics"),
    "DescribeLogDirs": ("topics",),
    "ElectLeaders": ("topicPartitions",),
    "ListPartitionReassignments": ("topics",),
    "DescribeShareGroupOffsets": ("groups.topics",),
}
EMPTY_IS_ALL = {"Metadata": range(1), "DescribeTopicPartitions": range(1 << 15)}

# Requests for all resources of a kind, without fields that name them.
ALL_OF = {"ListGroups": GROUP, "ListTransactions": TRANSACTIONAL_ID}

# By API: the kind of a request without names: a producer id without a transaction is for any topic.
WITHOUT_NAMES = {"InitProducerId": TOPIC}

_KEY_TYPES = {0: GROUP, 1: TRANSACTIONAL_ID}
_SHARE_KEY = 2  # "group:topic id:partition" (KIP-932); a broker refuses a group with a colon, and ignores colons behind
_RESOURCE_TYPES = {2: TOPIC, 32: GROUP}  # ConfigResource.Type
_ACL_TYPES = {2: TOPIC, 3: GROUP, 5: TRANSACTIONAL_ID}  # ResourceType


class Names:
    """The names in one request; plans fill it in."""

    __slots__ = (
        *("all_of", "also", "cluster", "elements", "expression", "from_broker", "group", "topic", "topic_id"),
        "transactional_id",
    )

    def __init__(self) -> None:
        self.topic: list[str] = []
        self.topic_id: list[UUID] = []
        self.group: list[str] = []
        self.transactional_id: list[str] = []
        self.all_of: str | None = None  # the kind, if the request means all resources of a kind
        self.expression: str | None = None  # a regular expression of topics: it may match any topic
        self.cluster = False  # whether it names a resource of no kind, like a broker's settings
        self.from_broker = False  # whether it has values that only brokers set, like a replica id
        self.also: list[str] = []  # topics with the effect of another API: see ALSO
        self.elements = 0  # number of elements in all arrays and tagged fields

    def is_empty(self) -> bool:
        return not (
            self.topic or self.topic_id or self.group or self.transactional_id or self.all_of or self.cluster
        )  # fmt: skip


Reader = Callable[[Any, int, int], Names]
Peek = Callable[[Any, int, int], bool]
QuickReader = Callable[[Any, int, int], Names | None]
SlicedReader = Callable[[Any, int, int], Slices[Names]]


class TooManyElements(Malformed):
    """A request has more than MAX_ELEMENTS elements."""


@cache
def kinds_of(api_key: int, version: int) -> frozenset[str]:
    """Return the kinds that requests of that version can name."""
    api = schema().apis.get(api_key)
    if api is None or version not in api.request.versions:
        return frozenset()
    kinds = {kind for path, kind in NAMED.get(api.name, {}).items() if _is_in(api.request, version, path)}
    if kinds & {"key", "resource"}:
        kinds |= {GROUP, TRANSACTIONAL_ID} if "key" in kinds else {TOPIC, GROUP}
    if _ID in kinds:
        kinds.add(TOPIC)
    kinds |= {kind for table in (ALL_OF, WITHOUT_NAMES) if (kind := table.get(api.name))}
    return frozenset(kinds & set(KINDS))


def names_resources(api_key: int) -> bool:
    """Return whether requests name resources with a type: settings of topics, of groups, or of brokers."""
    return "resource" in NAMED.get(schema().apis[api_key].name, {}).values()


@cache
def reader(api_key: int, version: int) -> Reader:
    """Compile read(frame, start, end) -> Names; `start` is after the correlation id. The read raises Malformed."""
    return _names_plan(api_key, version).reader()


@cache
def quick_reader(api_key: int, version: int) -> QuickReader:
    """Compile a read as in `reader`, which returns None for requests with more than FEW_ELEMENTS."""
    plan = _names_plan(api_key, version)
    plan.is_quick = True
    return plan.reader()


@cache
def sliced_reader(api_key: int, version: int) -> SlicedReader:
    """Compile a read as in `reader`, which is a generator."""
    plan = _names_plan(api_key, version)
    plan.sliced = True
    return plan.reader()


def _names_plan(api_key: int, version: int) -> "_NamesPlan":
    return _NamesPlan(api_message(api_key, version, "request"), schema().apis[api_key].name, version)


def can_be_from_broker(api_key: int, version: int) -> bool:
    """Return whether requests can have values that only brokers set; an unknown version counts as the newest."""
    api = schema().apis[api_key]
    return bool(_said_by_brokers(api, version if version in api.request.versions else api.request.versions[-1]))


@cache
def peek(api_key: int, version: int) -> Peek:
    """Compile peek(frame, start, end) -> Names.from_broker; nothing else is read.

    The peek raises Malformed, except for errors after the fields that it reads.
    """
    api = schema().apis[api_key]
    return _PeekPlan(api.request, api.name, version, _said_by_brokers(api, version)).peek()


def _said_by_brokers(api: Api, version: int) -> list[str]:
    return [
        path
        for path, kind in NAMED.get(api.name, {}).items()
        if kind in ("replica", "key_type") and _is_in(api.request, version, path)
    ]


def _is_in(message: Message, version: int, path: str) -> bool:
    return path.removesuffix("[]") in set(paths_of(message.fields, version))


class _NamesPlan(Plan):
    """plan(buffer, start, end) -> Names"""

    strict_tags = True
    is_quick = False  # True: None is returned for more than FEW_ELEMENTS

    def __init__(self, message: Message, api: str, version: int) -> None:
        self.named = {path: kind for path, kind in NAMED.get(api, {}).items() if _is_in(message, version, path)}
        self.also = ALSO.get(api, ("", ()))[1]
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
        elif kind == "replica":
            self.after(f"from_broker = from_broker or {var} not in {CLIENT_REPLICA_IDS}")
        elif kind == "of_cluster":
            self.after(f"cluster = cluster or {var}")
        elif kind == "resource":
            self.after(f"resources.append((resource_type, {var}))")
        else:
            self.after(f"{kind} = {var}")
        if path in self.also:
            self.after(f"if {var} is not None: also.append({var})")

    def tags_counted(self, count: str) -> None:
        self.line(f"if {count} > 0: total += {count}")
        if self.is_quick:
            self.line(f"if total > {FEW_ELEMENTS}: return None")
            return
        text = f"{self.title}: more than {MAX_ELEMENTS} elements in its arrays and tagged fields"
        self.line(f"if total > {MAX_ELEMENTS}: raise TooManyElements({text!r})")

    def counted(self, path: str, length: Length) -> None:
        self.tags_counted(length.var)
        if path in self.all_of_topics:
            self.line(f"if {length.is_null}: all_of = 'topic'")
        if self.empty_is_all and path == "topics":
            self.line(f"if not ({length.is_some}): all_of = 'topic'")

    def reader(self) -> Callable[[Any, int, int], Any]:
        self.names |= {"Names": Names, "TooManyElements": TooManyElements}
        self.names |= {"note_keys": _note_keys, "note_resources": _note_resources}
        special = {"key": ("keys", "note_keys(names, key_type, keys)")}
        special["resource"] = ("resources", "note_resources(names, resources)")
        each = "yield from {}" if self.sliced else "for _ in {}: pass"
        used = [special[kind] for kind in special if kind in self.named.values()]
        flags = [
            flag
            for kind, flag in (("replica", "from_broker"), ("of_cluster", "cluster"))
            if kind in self.named.values()
        ]
        if self.also:
            flags.append("also")
        self.line("topics, topic_ids, groups, transactional_ids = [], [], [], []")
        self.line("total = key_type = resource_type = 0")
        self.line(f"all_of = {self.all_of!r}")
        self.line("expression = None")
        for variable, _ in used:
            self.line(f"{variable} = []")
        for flag in flags:
            self.line(f"{flag} = {[] if flag == 'also' else False}")
        with self.translated():
            self.header("request")
            self.struct(self.message.fields, "")
        with self.block("except UnicodeDecodeError:"):
            self.line(f"raise Malformed({self.title + ': a name that is not UTF-8'!r}) from None")
        self.short("pos > end")
        self.line("names = Names()")
        self.line("names.topic, names.topic_id, names.group = topics, topic_ids, groups")
        self.line("names.transactional_id, names.all_of = transactional_ids, all_of")
        self.line("names.expression, names.elements = expression, total")
        for flag in flags:
            self.line(f"names.{flag} = {flag}")
        for _, statement in used:
            self.line(each.format(statement))
        self.line("return names")
        return self.function("buffer, start, end")


class _PeekPlan(_NamesPlan):
    """plan(buffer, start, end) -> bool"""

    def __init__(self, message: Message, api: str, version: int, paths: list[str]) -> None:
        super().__init__(message, api, version)
        self.named = {path: kind for path, kind in self.named.items() if path in paths}
        self.wanted = frozenset(self.named)
        self._above = set(paths) | {path.partition(".")[0] for path in paths}

    def peek(self) -> Peek:
        self.names["TooManyElements"] = TooManyElements
        self.line("total = key_type = 0")
        self.line("all_of = None")
        self.line("from_broker = False")
        fields = self.message.fields
        # All are top-level fields: the walk can end after the last of them.
        if all("." not in path for path in self.named):
            places = [at for at, field in enumerate(fields) if field.name in self.named]
            fields = fields[: max(places) + 1]
        with self.translated():
            self.header("request")
            if fields is self.message.fields:
                self.struct(fields, "")
            else:
                for field in fields:
                    if self.version in field.versions:
                        self.field(field, field.name)
        self.short("pos > end")
        self.line(f"return from_broker or key_type == {_SHARE_KEY}")
        return self.function("buffer, start, end")


def _note_keys(names: Names, key_type: int, keys: list[str]) -> Iterator[None]:
    """Add the keys of a FindCoordinator, in slices: groups, or transactional ids."""
    kind = _KEY_TYPES.get(key_type)
    if kind is not None:
        getattr(names, kind).extend(keys)
    elif key_type == _SHARE_KEY:
        names.from_broker = True  # only brokers look up coordinators of share groups' state
        for number, key in enumerate(keys, 1):
            names.group.append(key.partition(":")[0])
            if number % _SLICE_NOTED == 0:
                yield
    elif keys:
        names.cluster = True


def _note_resources(names: Names, resources: list[tuple[int, str]]) -> Iterator[None]:
    """Add the resources of DescribeConfigs and similar APIs, in slices: topics, groups, all others as the cluster."""
    for number, (resource_type, name) in enumerate(resources, 1):
        if number % _SLICE_NOTED == 0:
            yield
        kind = _RESOURCE_TYPES.get(resource_type)
        if kind is None:
            names.cluster = True
        else:
            getattr(names, kind).append(name)


def resource_kind(resource_type: int) -> str:
    """Return the kind of a resource of DescribeConfigs and similar APIs."""
    return _RESOURCE_TYPES.get(resource_type, CLUSTER)


def acl_kind(resource_type: int) -> str:
    """Return the kind of a resource of access rules."""
    return _ACL_TYPES.get(resource_type, CLUSTER)


def key_names(key_type: int, key: str) -> tuple[str, str]:
    """Return (kind, name) of a key of FindCoordinator."""
    if key_type == _SHARE_KEY:
        return GROUP, key.partition(":")[0]
    return _KEY_TYPES.get(key_type, CLUSTER), key


def _field_at(fields: tuple[Field, ...], path: str, version: int) -> Field | None:
    name, _, rest = path.partition(".")
    field = next((field for field in fields if field.name == name and version in field.versions), None)
    return field if field is None or not rest else _field_at(field.fields, rest, version)

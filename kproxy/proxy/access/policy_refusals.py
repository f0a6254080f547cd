"""The answer to a refused request: the errors that a broker with an authorizer gives, as API and version lay them out.

Built from the schema: ITEMS says which array of an answer has an element for each element of which array of the
request, and error codes go where the layout has them, at the lowest level that belongs to what was denied. What is
denied gets the error of its kind. Everything else in the request was not done either, since a request is refused whole;
it gets an error that clients retry, where they do, or one that says so.

`refusal` returns None where the layout has no place for an error; the connection is then closed. Refuses to know rules.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import UUID

from kproxy.protocol.codec import encode_response
from kproxy.protocol.schema import Field, api_name, schema
from kproxy.proxy.access.policy_resources import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, key_names, resource_kind

UNSUPPORTED_VERSION = 35
UNKNOWN_TOPIC_ID = 100
CODES = {TOPIC: 29, GROUP: 30, CLUSTER: 31, TRANSACTIONAL_ID: 53}  # *_AUTHORIZATION_FAILED
_ORDER = (TRANSACTIONAL_ID, GROUP, CLUSTER, TOPIC)  # which of several errors a whole answer gets

# What was denied: (kind, name or topic id) -> the error code. An empty name stands for the request itself.
Denied = Mapping[tuple[str, str | UUID], int]

# By API: array of the answer -> array of the request that it has an element for each of. Those of other versions are
# left out by the schema. A path whose array lies in another that the answer does not repeat is joined by dots.
ITEMS: dict[str, dict[str, str]] = {
    "Produce": {"responses": "topicData", "responses.partitionResponses": "partitionData"},
    "Fetch": {"responses": "topics", "responses.partitions": "partitions"},
    "ListOffsets": {"topics": "topics", "topics.partitions": "partitions"},
    "Metadata": {"topics": "topics"},
    "OffsetCommit": {"topics": "topics", "topics.partitions": "partitions"},
    "OffsetFetch": {
        "topics": "topics",
        "topics.partitions": "partitionIndexes",
        "groups": "groups",
        "groups.topics": "topics",
        "groups.topics.partitions": "partitionIndexes",
    },
    "FindCoordinator": {"coordinators": "coordinatorKeys"},
    "LeaveGroup": {"members": "members"},
    "DescribeGroups": {"groups": "groups"},
    "CreateTopics": {"topics": "topics"},
    "DeleteTopics": {"responses": "topicNames|topics"},
    "DeleteRecords": {"topics": "topics", "topics.partitions": "partitions"},
    "OffsetForLeaderEpoch": {"topics": "topics", "topics.partitions": "partitions"},
    "AddPartitionsToTxn": {
        "resultsByTopicV3AndBelow": "v3AndBelowTopics",
        "resultsByTopicV3AndBelow.resultsByPartition": "partitions",
        "resultsByTransaction": "transactions",
        "resultsByTransaction.topicResults": "topics",
        "resultsByTransaction.topicResults.resultsByPartition": "partitions",
    },
    "WriteTxnMarkers": {
        "markers": "markers",
        "markers.topics": "topics",
        "markers.topics.partitions": "partitionIndexes",
    },
    "TxnOffsetCommit": {"topics": "topics", "topics.partitions": "partitions"},
    "CreateAcls": {"results": "creations"},
    "DeleteAcls": {"filterResults": "filters"},
    "DescribeConfigs": {"results": "resources"},
    "AlterConfigs": {"responses": "resources"},
    "AlterReplicaLogDirs": {"results": "dirs.topics", "results.partitions": "partitions"},
    "CreatePartitions": {"results": "topics"},
    "DeleteGroups": {"results": "groupsNames"},
    "ElectLeaders": {
        "replicaElectionResults": "topicPartitions",
        "replicaElectionResults.partitionResult": "partitions",
    },
    "IncrementalAlterConfigs": {"responses": "resources"},
    "AlterPartitionReassignments": {"responses": "topics", "responses.partitions": "partitions"},
    "OffsetDelete": {"topics": "topics", "topics.partitions": "partitions"},
    "AlterClientQuotas": {"entries": "entries", "entries.entity": "entity"},
    "DescribeUserScramCredentials": {"results": "users"},
    "AlterUserScramCredentials": {"results": "deletions|upsertions"},
    "DescribeQuorum": {"topics": "topics", "topics.partitions": "partitions"},
    "UpdateFeatures": {"results": "featureUpdates"},
    "DescribeProducers": {"topics": "topics", "topics.partitions": "partitionIndexes"},
    "DescribeTransactions": {"transactionStates": "transactionalIds"},
    "ConsumerGroupDescribe": {"groups": "groupIds"},
    "DescribeTopicPartitions": {"topics": "topics"},
    "ShareGroupDescribe": {"groups": "groupIds"},
    "ShareFetch": {"responses": "topics", "responses.partitions": "partitions"},
    "ShareAcknowledge": {"responses": "topics", "responses.partitions": "partitions"},
    "InitializeShareGroupState": {"results": "topics", "results.partitions": "partitions"},
    "ReadShareGroupState": {"results": "topics", "results.partitions": "partitions"},
    "WriteShareGroupState": {"results": "topics", "results.partitions": "partitions"},
    "DeleteShareGroupState": {"results": "topics", "results.partitions": "partitions"},
    "ReadShareGroupStateSummary": {"results": "topics", "results.partitions": "partitions"},
    "StreamsGroupDescribe": {"groups": "groupIds"},
    "DescribeShareGroupOffsets": {
        "groups": "groups",
        "groups.topics": "topics",
        "groups.topics.partitions": "partitions",
    },
    "AlterShareGroupOffsets": {"responses": "topics", "responses.partitions": "partitions"},
    "DeleteShareGroupOffsets": {"responses": "topics"},
}

# Answers whose errors stand in an array that no array of the request corresponds to: it gets one element.
_ONE = {"DescribeLogDirs": "results"}

# What is in a refused request and was not denied. Clients ask again where the error says that they may: for a leader
# (NOT_LEADER_OR_FOLLOWER), metadata (LEADER_NOT_AVAILABLE) or a coordinator (COORDINATOR_NOT_AVAILABLE). Where clients
# take any other error for a broken broker, it shares the error of what was denied (None). Administrators' requests,
# and transactions, know OPERATION_NOT_ATTEMPTED.
_NOT_ATTEMPTED = 55
_INNOCENT: dict[str, int | None] = {
    **dict.fromkeys(("Produce", "Fetch", "ListOffsets", "OffsetForLeaderEpoch", "ShareFetch", "ShareAcknowledge"), 6),
    "Metadata": 5,
    "FindCoordinator": 15,
    **dict.fromkeys(("OffsetCommit", "OffsetFetch", "TxnOffsetCommit"), None),
}

# Names that the same thing has in requests and answers.
_SAME = (
    ("name", "topic", "topicName", "user", "feature"),
    ("topicId",),
    ("index", "partition", "partitionIndex", "partitionId"),
    ("groupId",),
    ("key",),
    ("transactionalId",),
    ("memberId",),
    ("groupInstanceId",),
    ("producerId",),
    ("resourceType",),
    ("resourceName",),
    ("entityType",),
    ("entityName",),
)
_OF_NAME = {name: names for names in _SAME for name in names}

# What brokers write where an error leaves nothing to say and the schema has no default, or one that means something.
_NOTHING = {
    "baseOffset": -1,
    "committedOffset": -1,
    "controllerId": -1,
    "generationId": -1,
    "highWatermark": -1,
    "lowWatermark": -1,
    "nodeId": -1,
    "leaderId": -1,
    "startOffset": -1,
}


def refusal(
    api_key: int, version: int, correlation_id: int, request: dict[str, Any], denied: Denied, text: str
) -> tuple[bytes, tuple[int, ...]] | None:
    """The answer, its 4-byte size included, and all error codes in it; None if it cannot carry an error.

    request: the decoded body. text: what the error messages of the answer say, where it has some.
    """
    answer = _Refusal(api_key, version, denied, text)
    body = answer.body(request)
    if body is None:
        return None
    frame = encode_response(api_key, version, {"correlationId": correlation_id}, body)
    return len(frame).to_bytes(4, "big") + frame, tuple(answer.errors)


class _Refusal:
    def __init__(self, api_key: int, version: int, denied: Denied, text: str) -> None:
        self.api = api_name(api_key)
        self.version = version
        self.fields = schema().apis[api_key].response.fields
        self.denied = denied
        self.text = text
        self.items = ITEMS.get(self.api, {})
        self.carried: set[tuple[str, str | UUID]] = set()
        self.errors: list[int] = []
        shared = max(denied.values(), default=0) if len(set(denied.values())) == 1 else _whole(denied)
        innocent = _INNOCENT.get(self.api, _NOT_ATTEMPTED)
        self.innocent = shared if innocent is None else innocent

    def body(self, request: dict[str, Any]) -> dict[str, Any] | None:
        context = {"keyType": request.get("keyType", 0)}
        self._struct(self.fields, "", request, None, context)
        left = {what: code for what, code in self.denied.items() if what not in self.carried}
        whole = _whole(left) if left else None
        self.errors.clear()
        body = self._struct(self.fields, "", request, whole, context)
        if self.api in _ONE and not any(self.errors):
            for field in self._present(self.fields):
                if field.name == _ONE[self.api]:
                    body[field.name] = [self._struct(field.fields, field.name, {}, _whole(self.denied), context)]
        if not any(self.errors) and any(field.name == "errorCode" for field in self._present(self.fields)):
            self._set(body, self.fields, _whole(self.denied))
            self.errors.insert(0, body["errorCode"])
        return body if any(self.errors) else None

    def _present(self, fields: tuple[Field, ...]) -> Iterator[Field]:
        version = self.version
        return (field for field in fields if version in field.versions and version not in field.tagged_versions)

    def _struct(
        self, fields: tuple[Field, ...], path: str, request: Any, whole: int | None, context: dict[str, Any]
    ) -> dict[str, Any]:
        """The struct of the answer that belongs to that part of the request. whole: the error of all that is in it."""
        mine = self._own(request, context) if path else []
        code = self.denied[mine[0]] if mine else whole
        first = len(self.errors)
        has_code = False
        out: dict[str, Any] = {}
        for field in self._present(fields):
            if field.name in ("errorCode", "partitionErrorCode"):
                has_code = True
            elif field.is_array and field.is_struct:
                below = f"{path}.{field.name}" if path else field.name
                source = self.items.get(below)
                out[field.name] = [
                    self._struct(field.fields, below, item, code, context) for item in _source(request, source)
                ]
            elif path and (found := _value(field.name, request, fields, self._present)) is not _ABSENT:
                if found is not None or self.version in field.nullable_versions:
                    out[field.name] = found
            elif field.name in _NOTHING:
                out[field.name] = _NOTHING[field.name]
            elif field.type == "records":
                out[field.name] = b""
        if has_code:
            own = code
            if own is None and path:
                inner = any(self.errors[first:])
                own = 0 if inner else self.innocent
            if own:
                self.errors.insert(first, own)
                self._set(out, fields, own)
        if len(self.errors) > first:
            self.carried.update(mine)
        return out

    def _set(self, out: dict[str, Any], fields: tuple[Field, ...], code: int) -> None:
        for field in self._present(fields):
            if field.name in ("errorCode", "partitionErrorCode"):
                out[field.name] = code
            elif field.name == "errorMessage":
                out[field.name] = self.text

    def _own(self, request: Any, context: dict[str, Any]) -> list[tuple[str, str | UUID]]:
        """What an element of the request itself names, as far as it was denied."""
        return [what for what in _named(self.api, request, context) if what in self.denied]


def _named(api: str, item: Any, context: dict[str, Any]) -> Iterator[tuple[str, str | UUID]]:
    """What an element of a request's array names."""
    if api == "FindCoordinator":
        if isinstance(item, str):
            yield key_names(context["keyType"], item)
    elif isinstance(item, str):
        yield TOPIC, item
        yield GROUP, item
        yield TRANSACTIONAL_ID, item
    elif isinstance(item, dict):
        if "resourceType" in item:
            kind = resource_kind(item["resourceType"])
            yield kind, item["resourceName"] if kind != CLUSTER else ""
            return
        for name in ("name", "topic", "topicName", "topicId"):
            if item.get(name) is not None:
                yield TOPIC, item[name]
        for name, kind in (("groupId", GROUP), ("transactionalId", TRANSACTIONAL_ID)):
            if item.get(name) is not None:
                yield kind, item[name]


_ABSENT: Any = object()


def _value(name: str, request: Any, fields: tuple[Field, ...], present: Callable[..., Iterator[Field]]) -> Any:
    """What a field of an answer's element repeats of the request's element."""
    if name not in _OF_NAME:
        return _ABSENT
    if isinstance(request, dict):
        return next((request[one] for one in _OF_NAME[name] if one in request), _ABSENT)
    first = next(field.name for field in present(fields) if field.name in _OF_NAME)
    return request if name == first else _ABSENT


def _source(request: Any, source: str | None) -> list[Any]:
    """The elements of the request's arrays; "a|b": those of both, "a.b": of the arrays b in the elements of a."""
    if source is None or not isinstance(request, dict):
        return []
    items: list[Any] = []
    for path in source.split("|"):
        name, _, rest = path.partition(".")
        found = request.get(name) or []
        items += [inner for item in found for inner in _source(item, rest)] if rest else found
    return items


def _whole(denied: Denied) -> int:
    """The error of a whole request."""
    for kind in _ORDER:
        for (of_kind, _), code in denied.items():
            if of_kind == kind:
                return code
    return CODES[CLUSTER]

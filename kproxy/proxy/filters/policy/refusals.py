"""The answer to a refused request: the errors of a broker with an authorizer, in the layout of API and version.

Built from the schema: ITEMS maps arrays of an answer to arrays of the request with corresponding elements. Error codes
are set in the fields of the layout, at the lowest level that corresponds to a denied name. A denied name gets the error
of its kind. A request is refused as a whole, so all its other elements get an error, too: one that clients retry, if
clients do so for this API, or OPERATION_NOT_ATTEMPTED. An answer is built in slices, since it repeats all names of its
request.

`refusal` returns None if the layout has no field for an error; the connection is then closed. Does not evaluate rules.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from uuid import UUID

from kproxy.protocol.codec import Slices, response_in_slices
from kproxy.protocol.schema import Field, api_name, schema
from kproxy.proxy.filters.policy.resources import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, key_names, resource_kind

CODES = {TOPIC: 29, GROUP: 30, CLUSTER: 31, TRANSACTIONAL_ID: 53}  # *_AUTHORIZATION_FAILED
_SLICE_FREED = 1024
_SLICE_STRUCTS = 64  # structs built between two yields: some tenths of a millisecond
_ORDER = (TRANSACTIONAL_ID, GROUP, CLUSTER, TOPIC)  # precedence of errors for a whole answer

# Denied names: (kind, name or topic id) -> the error code. An empty name stands for the request itself.
Denied = dict[tuple[str, str | UUID], int]

# By API: array of the answer -> array of the request with corresponding elements. The schema of a version lacks arrays
# of other versions. A nested array whose parent the answer does not repeat is a path joined by dots.
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

# Answers with errors in an array without a corresponding array in the request: it gets one element.
_ONE = {"DescribeLogDirs": "results"}

# Errors of elements that were not denied in a refused request. Clients retry after some errors: they look up the leader
# (NOT_LEADER_OR_FOLLOWER), metadata (LEADER_NOT_AVAILABLE) or the coordinator (COORDINATOR_NOT_AVAILABLE). If clients
# treat any other error as a broken broker, these elements share the error of the denied ones (None). Administrative
# requests, and transactions, have OPERATION_NOT_ATTEMPTED.
_NOT_ATTEMPTED = 55
_INNOCENT: dict[str, int | None] = {
    **dict.fromkeys(("Produce", "Fetch", "ListOffsets", "OffsetForLeaderEpoch", "ShareFetch", "ShareAcknowledge"), 6),
    "Metadata": 5,
    "FindCoordinator": 15,
    **dict.fromkeys(("OffsetCommit", "OffsetFetch", "TxnOffsetCommit"), None),
}

# Field names with the same meaning in requests and answers.
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

# Values of other fields in brokers' error answers, if the schema has no default, or one that has a meaning.
_NOTHING: dict[str, Any] = {
    "baseOffset": -1,
    "committedOffset": -1,
    "currentLeader": MappingProxyType({"leaderId": -1, "leaderEpoch": -1}),
    "highWatermark": -1,
    "lowWatermark": -1,
    "nodeId": -1,
    "leaderId": -1,
    "startOffset": -1,
}


def refusal(
    api_key: int, version: int, correlation_id: int, request: dict[str, Any], denied: Denied, text: str
) -> Slices[tuple[bytes, tuple[int, ...]] | None]:
    """Return (answer with its 4-byte size, all error codes in it), in slices; None if it cannot carry an error.

    request: the decoded body. text: the value of error messages in the answer, if its layout has them.
    """
    answer = _Refusal(api_key, version, denied, text)
    body = yield from answer.body(request)
    if body is None:
        return None
    frame = yield from response_in_slices(api_key, version, {"correlationId": correlation_id}, body)
    yield from freed_in_slices(body)
    return len(frame).to_bytes(4, "big") + frame, tuple(answer.errors)


def freed_in_slices(value: Any) -> Slices[None]:
    """Empty nested lists and dicts in slices: freeing a hundred thousand objects at once takes some 50 ms."""
    stack = [value]
    count = 0
    while stack:
        if not stack[-1]:
            stack.pop()
            continue
        last = stack[-1].pop() if stack[-1].__class__ is list else stack[-1].popitem()[1]
        if last.__class__ is list or last.__class__ is dict:
            stack.append(last)
        count += 1
        if count % _SLICE_FREED == 0:
            yield


class _Struct:
    """The properties of the structs at a path of an answer that do not depend on the request."""

    __slots__ = ("arrays", "code", "constants", "message", "repeated")

    def __init__(self, fields: Iterable[Field], path: str, items: Mapping[str, str], version: int) -> None:
        self.code: str | None = None  # the field of its error code
        self.message: str | None = None  # the field of its error message
        self.arrays: list[tuple[str, tuple[Field, ...], str, str | None]] = []  # name, fields, path, source
        self.repeated: list[tuple[str, tuple[str, ...], bool, bool]] = []  # name, names of it, nullable, the first
        self.constants: dict[str, Any] = {}
        for field in fields:
            if field.name in ("errorCode", "partitionErrorCode"):
                self.code = field.name
            elif field.name == "errorMessage":
                self.message = field.name
            if field.is_array and field.is_struct:
                below = f"{path}.{field.name}" if path else field.name
                self.arrays.append((field.name, field.fields, below, items.get(below)))
            elif path and field.name in _OF_NAME:
                is_nullable = version in field.nullable_versions
                self.repeated.append((field.name, _OF_NAME[field.name], is_nullable, not self.repeated))
            if field.name in _NOTHING:
                self.constants[field.name] = _NOTHING[field.name]
            elif field.type == "records":
                self.constants[field.name] = b""


class _Refusal:
    def __init__(self, api_key: int, version: int, denied: Denied, text: str) -> None:
        self.api = api_name(api_key)
        self.version = version
        self.fields = schema().apis[api_key].response.fields
        self.denied = denied
        self.text = text
        self.items = ITEMS.get(self.api, {})
        self.structs: dict[str, _Struct] = {}  # by path
        self.made = 0
        self.left = denied.copy()  # denied names whose error is in no element of the answer yet
        self.errors: list[int] = []
        codes = set(denied.values())
        self.whole = _whole(denied)
        innocent = _INNOCENT.get(self.api, _NOT_ATTEMPTED)
        self.innocent = (codes.pop() if len(codes) == 1 else self.whole) if innocent is None else innocent

    def body(self, request: dict[str, Any]) -> Slices[dict[str, Any] | None]:
        context = {"keyType": request.get("keyType", 0)}
        body = yield from self._struct(self.fields, "", request, None, context)
        if self.left:  # an error without an element becomes the error of the whole answer
            self.errors.clear()
            yield from freed_in_slices(body)
            body = yield from self._struct(self.fields, "", request, _whole(self.left), context)
        top = self._known(self.fields, "")
        if self.api in _ONE and not any(self.errors):
            for name, fields, path, _ in top.arrays:
                if name == _ONE[self.api]:
                    body[name] = [(yield from self._struct(fields, path, {}, self.whole, context))]
        if not any(self.errors) and top.code == "errorCode":
            self._set(body, top, self.whole)
            self.errors.insert(0, self.whole)
        return body if any(self.errors) else None

    def _known(self, fields: tuple[Field, ...], path: str) -> _Struct:
        known = self.structs.get(path)
        if known is None:
            version = self.version
            present = (one for one in fields if version in one.versions and version not in one.tagged_versions)
            known = self.structs[path] = _Struct(present, path, self.items, version)
        return known

    def _struct(
        self, fields: tuple[Field, ...], path: str, request: Any, whole: int | None, context: dict[str, Any]
    ) -> Slices[dict[str, Any]]:
        """Return the struct of the answer for a part of the request. whole: the error of all elements in it."""
        self.made += 1
        if self.made % _SLICE_STRUCTS == 0:
            yield
        known = self._known(fields, path)
        mine = self._own(request, context) if path else []
        code = self.denied[mine[0]] if mine else whole
        errors = self.errors
        first = len(errors)
        out = known.constants.copy()
        for name, names, is_nullable, is_first in known.repeated:
            if isinstance(request, dict):
                found = next((request[one] for one in names if one in request), _ABSENT)
            else:
                found = request if is_first else _ABSENT
            if found is not _ABSENT and (found is not None or is_nullable):
                out[name] = found
        for name, below, below_path, source in known.arrays:
            out[name] = structs = []
            for item in _source(request, source):
                structs.append((yield from self._struct(below, below_path, item, code, context)))
        if known.code is not None:
            own = code
            if own is None and path:
                own = 0 if len(errors) > first else self.innocent
            if own:
                errors.insert(first, own)
                self._set(out, known, own)
        if len(errors) > first:
            for what in mine:
                self.left.pop(what, None)
        return out

    def _set(self, out: dict[str, Any], known: _Struct, code: int) -> None:
        if known.code is not None:
            out[known.code] = code
        if known.message is not None:
            out[known.message] = self.text

    def _own(self, request: Any, context: dict[str, Any]) -> list[tuple[str, str | UUID]]:
        """Return the denied names of an element of the request itself."""
        return [what for what in _named(self.api, request, context) if what in self.denied]


def _named(api: str, item: Any, context: dict[str, Any]) -> Iterator[tuple[str, str | UUID]]:
    """Yield the names of an element of a request's array."""
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


def _source(request: Any, source: str | None) -> list[Any]:
    """Return the elements of the request's arrays. "a|b": both arrays; "a.b": the arrays b in the elements of a."""
    if source is None or not isinstance(request, dict):
        return []
    items: list[Any] = []
    for path in source.split("|"):
        name, _, rest = path.partition(".")
        found = request.get(name) or []
        items += [inner for item in found for inner in _source(item, rest)] if rest else found
    return items


def _whole(denied: Denied) -> int:
    """Return the error of a whole request."""
    by_kind = {kind: code for (kind, _), code in reversed(denied.items())} if denied else {}
    return next((by_kind[kind] for kind in _ORDER if kind in by_kind), CODES[CLUSTER])

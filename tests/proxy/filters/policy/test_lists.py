"""A response contains no byte of a name that its client may not see; the rest is as the broker wrote it.

Random policies and random answers of every version of every API whose answers list or mention names; `naive_policy`
decides what the client may see. The tables below cover all other text fields of responses, so that a new field of a
newer schema fails a test until somebody has classified it.
"""

import copy
import random
from collections import Counter
from itertools import cycle, islice
from typing import Any
from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.plans import TAGS
from kproxy.protocol.schema import Field, schema
from kproxy.proxy.filters.policy import lists, members
from tests.proxy.filters.policy.naive_policy import KINDS, OF_CLUSTER, Naive, Rule
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import request, response, sized

# No name is part of another name or of any other text, so that a match in the bytes is always that name.
NAMES = {
    "topic": ("alpha-1", "alpha-2", "beta.1", "beta_2", "__gamma", "delta-1"),
    "group": ("kappa-1", "kappa-2", "lambda-1", "mü-1"),
    "transactional_id": ("rho-1", "rho-2", "sigma-1"),
}
GLOBS = {
    "topic": ("*", "alpha-*", "beta?1", "*-1", "__*", "delta-1", "\\alpha-2", "nothing"),
    "group": ("*", "kappa-*", "mü-?", "*-1", "nothing"),
    "transactional_id": ("*", "rho-*", "*-1", "nothing"),
}
ID_OF = {name: UUID(int=number) for number, name in enumerate(NAMES["topic"], 1)}
WHO = {"principal": "User:alice", "client_id": "c", "address": "10.1.2.3"}

# By API: the places of names in its answers: (array, field or "" where elements are names, kind). Those of LISTS are
# judged by the rules of that API, others by those of the API that describes the kind.
_MEMBERS = (
    ("groups.members.subscribedTopicNames", "", "topic"),
    ("groups.members.assignment.topicPartitions", "topicName", "topic"),
)
_SUBTOPOLOGIES = "groups.topology.subtopologies"
_DESCRIBED = "groups.topologyDescription"
PLACES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Metadata": (("topics", "name", "topic"),),
    "ListGroups": (("groups", "groupId", "group"),),
    "ListTransactions": (("transactionStates", "transactionalId", "transactional_id"),),
    "DescribeTopicPartitions": (("topics", "name", "topic"),),
    "DescribeLogDirs": (("results.topics", "name", "topic"),),
    "ListPartitionReassignments": (("topics", "name", "topic"),),
    "OffsetFetch": (
        ("topics", "name", "topic"),
        ("groups.topics", "name", "topic"),
        ("groups.topics", "topicId", "id"),
    ),
    "DescribeShareGroupOffsets": (("groups.topics", "topicName", "topic"),),
    "ConsumerGroupDescribe": (*_MEMBERS, ("groups.members.targetAssignment.topicPartitions", "topicName", "topic")),
    "ShareGroupDescribe": _MEMBERS,
    "StreamsGroupDescribe": (
        (f"{_SUBTOPOLOGIES}.sourceTopics", "", "topic"),
        (f"{_SUBTOPOLOGIES}.repartitionSinkTopics", "", "topic"),
        (f"{_SUBTOPOLOGIES}.stateChangelogTopics", "name", "topic"),
        (f"{_SUBTOPOLOGIES}.repartitionSourceTopics", "name", "topic"),
        (f"{_DESCRIBED}.subtopologies.nodes.sourceTopics", "", "topic"),
        (f"{_DESCRIBED}.globalStores.source.sourceTopics", "", "topic"),
        (f"{_DESCRIBED}.globalStores.processor.sourceTopics", "", "topic"),
    ),
    "StreamsGroupHeartbeat": (
        ("partitionsByUserEndpoint.activePartitions", "topic", "topic"),
        ("partitionsByUserEndpoint.standbyPartitions", "topic", "topic"),
    ),
    "DescribeGroups": (),
    "DescribeTransactions": (("transactionStates.topics", "topic", "topic"),),
    "DescribeAcls": (("resources", "resourceName", "acl"),),
    "DeleteAcls": (("filterResults.matchingAcls", "resourceName", "acl"),),
    "ListConfigResources": (("configResources", "resourceName", "config"),),
    "ControlledShutdown": (("remainingPartitions", "topicName", "topic"),),
}
LISTS = {
    "ListGroups": "group",
    "ListTransactions": "transactional_id",
    **dict.fromkeys(("Metadata", "DescribeTopicPartitions", "DescribeLogDirs", "OffsetFetch"), "topic"),
    **dict.fromkeys(("ListPartitionReassignments", "DescribeShareGroupOffsets"), "topic"),
}
# Single fields with a topic's name, which become null. A regex is visible only to clients that may see every topic.
NULLED = {f"{_DESCRIBED}.{path}.sinkTopic" for path in ("subtopologies.nodes", "globalStores.source")}
NULLED |= {f"{_DESCRIBED}.globalStores.processor.sinkTopic"}
EXPRESSION = "groups.members.subscribedTopicRegex"
CURSOR = "nextCursor.topicName"
MEMBER_BYTES = {
    "groups.members.memberMetadata": ("ConsumerProtocolSubscription", ("topics", "ownedPartitions")),
    "groups.members.memberAssignment": ("ConsumerProtocolAssignment", ("assignedPartitions",)),
}
RESOURCES = {
    "acl": {2: "topic", 3: "group", 5: "transactional_id"},
    "config": {2: "topic", 32: "group"},
}
# Fields that make a request ask for all resources, or for a response of the given shape.
ASKS: dict[str, Any] = {"topics": None, "groupIds": ["own"], "transactionalIds": ["own"], "resourceTypes": []}


# --- every text field of every response is classified -----------------------------------------------------------------

# Fields that, in any response, never contain a topic, group or transactional id of another client.
_TEXTS_OF_NOBODY = """
    host rack clusterId leader memberId groupInstanceId instanceId rackId clientId clientHost metadata
    protocolType protocolName protocolData groupState groupType assignorName mechanisms authBytes principal
    principalType principalName tokenRequesterPrincipalType tokenRequesterPrincipalName tokenId hmac user
    feature logDir documentation value entityType entityName key requestedMetrics unknownStateFilters
    transactionState subtopologyId processId stores successors records unalignedRecords assignment nodes.name
    source.name processor.name configs.name synonyms.name listeners.name supportedFeatures.name
    finalizedFeatures.name
"""
TEXTS = set(_TEXTS_OF_NOBODY.split())
# Messages of brokers name only resources of the request, except CreateTopics with a name that collides with another.
SENTENCES = {"errorMessage", "batchIndexErrorMessage", "acknowledgeErrorMessage", "statusDetail"}
# Responses that contain only names of the request, which were judged.
_ECHOING = """
    Produce Fetch ListOffsets LeaderAndIsr StopReplica OffsetCommit FindCoordinator CreateTopics DeleteTopics
    DeleteRecords OffsetForLeaderEpoch AddPartitionsToTxn WriteTxnMarkers TxnOffsetCommit DescribeConfigs
    AlterConfigs AlterReplicaLogDirs CreatePartitions DeleteGroups ElectLeaders IncrementalAlterConfigs
    AlterPartitionReassignments OffsetDelete Vote BeginQuorumEpoch EndQuorumEpoch DescribeQuorum
    AlterPartition FetchSnapshot DescribeProducers AlterShareGroupOffsets DeleteShareGroupOffsets OffsetFetch
    DescribeGroups DescribeTransactions ConsumerGroupDescribe ShareGroupDescribe StreamsGroupDescribe
    DescribeShareGroupOffsets
"""
ECHOES = set(_ECHOING.split())
ECHOED = {"name", "topic", "topicName", "groupId", "key", "resourceName", "transactionalId"}
# Judged otherwise, see docs/policy.md. JoinGroup: leaders assign partitions by it; Envelope is never forwarded unread.
OTHERWISE = {("JoinGroup", "members.metadata"), ("SyncGroup", "assignment"), ("Envelope", "responseData")}


def test_every_text_field_of_every_response_is_filtered_or_echoed_or_contains_no_name():
    unknown = []
    for api in schema().apis.values():
        places = {f"{array}.{name}".rstrip(".") for array, name, _ in PLACES.get(api.name, ())}
        places |= NULLED | {EXPRESSION, CURSOR, *MEMBER_BYTES} if api.name in PLACES else set()
        for path in _texts(api.response.fields, ""):
            last = path.rpartition(".")[2]
            known = (
                path in places or last in TEXTS | SENTENCES or any(path.endswith(one) for one in TEXTS if "." in one)
            )
            known = known or (api.name in ECHOES and last in ECHOED) or (api.name, path) in OTHERWISE
            unknown += [] if known else [(api.name, path)]
    assert not unknown


def _texts(fields: tuple[Field, ...], prefix: str) -> list[str]:
    found = []
    for field in fields:
        if field.is_struct:
            found += _texts(field.fields, f"{prefix}{field.name}.")
        elif field.element_type in ("string", "bytes", "records"):
            found.append(prefix + field.name)
    return found


# --- random responses, and their expected content after the filter ----------------------------------------------------


class Answers:
    """Random responses of one API and version, with names in all fields for names."""

    def __init__(self, api: str, key: int, version: int, rng: random.Random) -> None:
        self.api, self.key, self.version, self.rng = api, key, version, rng
        self.message = schema().apis[key].response
        self.kinds = {f"{array}.{name}".rstrip("."): kind for array, name, kind in PLACES[api]}
        self.kinds |= dict.fromkeys((*NULLED, EXPRESSION, CURSOR), "topic")
        self.is_flexible = version in self.message.flexible_versions

    def body(self) -> dict[str, Any]:
        made = self._struct(self.message.fields, "")
        if self.api == "DescribeGroups":
            for group in made["groups"]:
                for member in group["members"] if group["protocolType"] == "connect" else ():
                    member["memberMetadata"] = b"\0\1\0\x15http://worker-1:8083/"
                    member["memberAssignment"] = b"\0\1connector-1"
        return made

    def _struct(self, fields: tuple[Field, ...], prefix: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        resource = None
        for field in fields:
            if self.version not in field.versions or (
                self.version in field.tagged_versions and self.rng.random() < 0.5
            ):
                continue
            made[field.name] = self._value(field, prefix + field.name)
        for kind in RESOURCES:
            if self.kinds.get(f"{prefix}resourceName") == kind:
                resource = self.rng.choice((*RESOURCES[kind].items(), (2, "topic"), (4, None)))
        if resource is not None:
            if "resourceType" in made:
                made["resourceType"] = resource[0]
                made["resourceName"] = self.rng.choice((*NAMES[resource[1]], "*") if resource[1] else ("1", "cluster"))
            else:
                made["resourceName"] = "client-metrics"
        if self.kinds.get(f"{prefix}topicId") == "id" or (prefix == "topics." and self.api == "Metadata"):
            name = made.get("name") or self.rng.choice(NAMES["topic"])
            if "topicId" in made:
                made["topicId"] = ID_OF[name]
        if self.is_flexible and self.rng.random() < 0.2:
            made[TAGS] = {10_000 + self.rng.randrange(3): self.rng.randbytes(3)}
        return made

    def _value(self, field: Field, path: str) -> Any:
        rng = self.rng
        is_named = path in self.kinds and self.kinds[path] in KINDS
        null = 0.0 if is_named and path not in (NULLED | {EXPRESSION, CURSOR}) else 0.2
        if self.version in field.nullable_versions and rng.random() < null:
            return None
        if path in MEMBER_BYTES:
            return self._of_member(path)
        if path == "groups.protocolType":
            return rng.choice(("consumer", "consumer", "connect"))

        def one() -> Any:
            if field.is_struct:
                return self._struct(field.fields, f"{path}.")
            if field.element_type == "string":
                return rng.choice(NAMES[self.kinds[path]]) if is_named else rng.choice(("own", "Stable", ""))
            if field.element_type == "uuid":
                return rng.choice(list(ID_OF.values()))
            if field.element_type in ("bytes", "records"):
                return rng.randbytes(rng.randrange(5))
            if field.element_type == "bool":
                return rng.random() < 0.5
            return rng.randrange(100)

        return [one() for _ in range(rng.choice((0, 1, 2, 2, 4, 4)))] if field.is_array else one()

    def _of_member(self, path: str) -> bytes:
        message, _ = MEMBER_BYTES[path]
        rng = self.rng
        topics = rng.sample(NAMES["topic"], rng.randrange(4))
        partitions = [{"topic": topic, "partitions": [0, 1]} for topic in topics]
        user_data = rng.choice((None, rng.choice(NAMES["topic"]).encode()))
        body = {
            "topics": topics,
            "ownedPartitions": partitions,
            "assignedPartitions": partitions,
            "userData": user_data,
        }
        version = rng.choice(schema().data[message].versions)
        fields = {field.name for field in schema().data[message].fields if version in field.versions}
        made = codec.encode_data(message, version, {name: value for name, value in body.items() if name in fields})
        return rng.choice((b"", made, made, made, made + b"\0", made[: len(made) // 2]))


def pruned(naive: Naive, api: str, body: dict[str, Any], cursors: dict[str, str]) -> dict[str, Any]:
    """The response that the client should get. `cursors` receives the substitute of each hidden topic, by its name."""
    left = copy.deepcopy(body)
    of_list = LISTS.get(api)

    def may(kind: str, name: str) -> bool:
        return naive.may_name(api, kind, name) if of_list else naive.may_see(kind, name)

    def keeps(element: Any, name: str, kind: str) -> bool:
        if kind in RESOURCES:
            kind = RESOURCES[kind].get(element.get("resourceType"), "")
            return not kind or element["resourceName"] == "*" or may(kind, element["resourceName"])
        if kind == "id":
            return may("topic", next(name for name, topic_id in ID_OF.items() if topic_id == element["topicId"]))
        found = element[name] if name else element
        return found is None or may(kind, found)

    def walk(value: Any, steps: list[str], name: str, kind: str) -> None:
        for parent in value if isinstance(value, list) else [value]:
            if not isinstance(parent, dict) or parent.get(steps[0]) is None:
                continue
            if len(steps) > 1:
                walk(parent[steps[0]], steps[1:], name, kind)
            elif not name or not parent[steps[0]] or name in parent[steps[0]][0]:
                parent[steps[0]] = [one for one in parent[steps[0]] if keeps(one, name, kind)]

    for array, name, kind in PLACES[api]:
        walk(left, array.split("."), name, kind)

    def null(value: Any, steps: list[str], keep: Any) -> None:
        for parent in value if isinstance(value, list) else [value]:
            if isinstance(parent, dict) and parent.get(steps[0]) is not None:
                if len(steps) > 1:
                    null(parent[steps[0]], steps[1:], keep)
                elif not keep(parent[steps[0]]):
                    parent[steps[0]] = None

    if api == "StreamsGroupDescribe":
        for path in NULLED:
            null(left, path.split("."), lambda name: may("topic", name))
    if api == "ConsumerGroupDescribe":
        null(left, EXPRESSION.split("."), lambda _: naive.may_see_every("topic"))
    if api == "DescribeGroups" and not all(map(naive.may_see_every, KINDS)):
        for group in left["groups"]:
            for member in group["members"] if group["protocolType"] == "consumer" else ():
                for path, (message, arrays) in MEMBER_BYTES.items():
                    field = path.rpartition(".")[2]
                    member[field] = _member_left(message, arrays, bytes(member[field]), may)
    cursor = left.get("nextCursor")
    if cursor is not None and not may("topic", cursor["topicName"]):
        cursors[cursor["topicName"]] = cursor["topicName"] = f"(hidden-{len(cursors) + 1})"
    return left


def _member_left(message: str, arrays: tuple[str, ...], data: bytes, may: Any) -> bytes:
    if not data:
        return data
    try:
        _, body = codec.decode_data(message, data)
    except Exception:
        return b""
    for array in arrays:
        if array in body:
            topic_of = (lambda one: one) if array == "topics" else (lambda one: one["topic"])
            body[array] = [one for one in body[array] if may("topic", topic_of(one))]
    return codec.encode_data(message, int.from_bytes(data[:2], "big"), body | {"userData": None})


def random_rules(rng: random.Random, api: str) -> list[Rule]:
    rules: list[Rule] = []
    for _ in range(rng.choice((1, 2, 3, 4))):
        rule: Rule = {"action": rng.choice(("allow", "deny"))}
        for kind in rng.sample(KINDS, rng.choice((0, 1, 1, 2, 2, 3, 3, 3))):
            rule[kind] = rng.sample(GLOBS[kind], rng.choice((1, 1, 2)))
        if rng.random() < 0.3:
            rule["api"] = rng.choice((api, "describe", ["read", "describe"], "admin", "Metadata", "*"))
        if rng.random() < 0.1:
            rule["principal"] = rng.choice(("User:alice", "User:b*"))
        if rng.random() < 0.1:
            rule["client_id"] = rng.choice(("c", "other"))
        if rng.random() < 0.1:
            rule["address"] = rng.choice(("10.0.0.0/8", "192.168.0.0/16"))
        if len(rule) > 1:
            rules.append(rule)
    if rng.random() < 0.8:  # so that most requests pass
        rules.append({"action": "allow", **dict.fromkeys(KINDS, "nothing")})
        rules.append({"action": "allow", "api": api} if rng.random() < 0.5 else {"action": "allow", "group": "own"})
    return rules or [{"action": "deny", "topic": "alpha-*"}]


def asking(key: int, version: int) -> dict[str, Any]:
    """A request for all names, or one whose response mentions names that the request does not contain."""
    api = schema().apis[key]
    fields = [field.name for field in api.request.fields if version in field.versions]
    body = {name: value for name, value in ASKS.items() if name in fields}
    if api.name in ("Metadata", "DescribeTopicPartitions") and (version == 0 or api.name != "Metadata"):
        body["topics"] = []
    if api.name in ("OffsetFetch", "DescribeShareGroupOffsets"):
        body |= {"groupId": "own"} if "groupId" in fields else {}
        if "groups" in fields:
            body = {"groups": [{"groupId": "own", "topics": None}]}
    if api.name == "DescribeGroups":
        body["groups"] = ["own"]
    if api.name == "StreamsGroupHeartbeat":
        body |= {"groupId": "own", "memberId": "m"}
    if api.name == "DeleteAcls":
        body["filters"] = [{"resourceTypeFilter": 1}]
    return body


def hidden_names(naive: Naive, api: str) -> list[bytes]:
    """The names that the bytes of the response must not contain."""
    if api in LISTS:
        kind = LISTS[api]
        return [name.encode() for name in NAMES[kind] if not naive.may_name(api, kind, name)]
    return [name.encode() for kind in KINDS for name in NAMES[kind] if not naive.may_see(kind, name)]


SEED = 24
CASES = 40  # cases for each API, shared by its versions


def versions(api: str) -> list[tuple[str, int, int]]:
    """(API, key, version) of responses that can list or mention names."""
    key = next(key for key, one in schema().apis.items() if one.name == api)
    those = [version for version in schema().apis[key].response.versions if api != "OffsetFetch" or version >= 2]
    return [(api, key, version) for version in those]


def test_a_response_contains_no_byte_of_a_hidden_name_and_is_otherwise_unchanged():
    rng = random.Random(SEED)
    tally: Counter[tuple[str, str]] = Counter()
    for api, key, version in (case for name in PLACES for case in islice(cycle(versions(name)), CASES)):
        rules, default = random_rules(rng, api), rng.choice((None, "allow", "deny"))
        talk = Decided(*rules, policy_default=default, principal=WHO["principal"], address=WHO["address"])
        talk.names.learn({topic_id: name for name, topic_id in ID_OF.items()})
        ask = request(key, version, 1, asking(key, version))
        talk.client(ask, sorted(rng.sample(range(1, len(ask)), rng.choice((0, 1)))))
        has_client_id = (api, version) != ("ControlledShutdown", 0)
        naive = Naive(rules, default, **WHO if has_client_id else WHO | {"client_id": ""})
        context = (api, version, rules, default)
        may_ask = (api not in LISTS or naive.may_list(api, LISTS[api])) and (
            api not in ("OffsetFetch", "DescribeShareGroupOffsets") or naive.may_name(api, "group", "own")
        )
        if not talk.requests():
            assert api not in LISTS or not may_ask, context
            tally[api, "refused"] += 1
            continue
        assert api not in LISTS or may_ask, context
        body = Answers(api, key, version, rng).body()
        number = int.from_bytes(talk.requests()[0][4:8], "big", signed=True)
        frame = bytes(codec.encode_response(key, version, {"correlationId": number}, body))
        answer = sized(frame)
        talk.broker(answer, sorted(rng.sample(range(1, len(answer)), rng.choice((0, 1, 2)))))
        (got,) = talk.answers()
        cursors: dict[str, str] = {}
        broker_said = codec.decode_response(frame, key, version)[1]
        wanted = pruned(naive, api, broker_said, cursors)
        assert codec.decode_response(got, key, version)[1] == wanted, context
        assert got[4:] == bytes(codec.encode_response(key, version, {"correlationId": number}, wanted))[4:], context
        leaks = [name for name in hidden_names(naive, api) if name in got]
        assert not leaks, context
        tally[api, "filtered" if wanted != broker_said else "whole"] += 1
        if cursors:
            _goes_on_behind_the_cursor(talk, wanted, next(iter(cursors)))
            tally[api, "paged"] += 1
        if wanted != broker_said:
            tally[api, "unfiltered"] += _is_whole_without_filters(rules, default, ask, answer)
    # Enough cases went through the filter: of each API, and of all together.
    for api in PLACES.keys() - {"ControlledShutdown", *OF_CLUSTER}:  # few rules allow these APIs
        assert tally[api, "filtered"] and tally[api, "whole"], (api, tally)
        assert tally[api, "unfiltered"] == tally[api, "filtered"], (api, tally)
    assert sum(tally[api, "filtered"] for api in PLACES) > 0.25 * CASES * len(PLACES), tally
    assert tally["DescribeTopicPartitions", "paged"], tally


def _goes_on_behind_the_cursor(talk: Decided, page: dict[str, Any], topic: str) -> None:
    key = 75
    talk.client(request(key, 0, 2, {"topics": [], "responsePartitionLimit": 1, "cursor": page["nextCursor"]}))
    asked = codec.decode_request(talk.requests()[1])[1]["cursor"]
    assert asked == page["nextCursor"] | {"topicName": topic}


SUBSCRIPTION = codec.encode_data("ConsumerProtocolSubscription", 1, {"topics": ["a", "b"]})
GROUP = {"protocolType": "consumer", "members": [{"memberMetadata": SUBSCRIPTION}]}


def came(key, version, body):
    return memoryview(response(key, version, 1, body))


def nothing(*_):
    return False


@pytest.mark.parametrize("edit", [
    lambda: lists.hide_settings(5, came(19, 5, {"topics": [{"name": "a"}, {"name": "b"}]}), nothing),
    lambda: lists.filter_list(16, 4, came(16, 4, {"groups": [{"groupId": "a"}, {"groupId": "b"}]}), nothing),
    lambda: lists.hide_mentioned(
        69, 1, came(69, 1, {"groups": [{"members": [{"subscribedTopicNames": ["a"], "subscribedTopicRegex": "a"}]}]}),
        nothing, False,
    ),
    lambda: lists.metadata_answer(12, came(3, 12, {"topics": [{"name": "a"}, {"name": "b"}]}), nothing, [("a", 29)]),
    lambda: members.hide_in_members(5, came(15, 5, {"groups": [GROUP]}), nothing),
], ids=["settings", "list", "mentioned", "Metadata", "members"])  # fmt: skip
def test_a_short_response_is_edited_in_one_slice(edit):
    """Each further slice would make the connection wait for those of others."""
    with pytest.raises(StopIteration) as done:
        next(edit())
    assert done.value.value is not None


def test_a_client_can_continue_its_last_sixteen_pages_that_end_at_a_hidden_topic():
    talk = Decided({"action": "deny", "topic": "__*"})
    for number in range(17):
        talk.client(request(75, 0, number, {"topics": []}))
        body = {"topics": [], "nextCursor": {"topicName": f"__{number}", "partitionIndex": number}}
        talk.broker(sized(codec.encode_response(75, 0, {"correlationId": number}, body)))
    pages = [codec.decode_response(frame, 75, 0)[1]["nextCursor"] for frame in talk.answers()]
    assert [page["partitionIndex"] for page in pages] == [*range(17)] and not any("__" in str(page) for page in pages)
    for number, page in enumerate(pages):
        talk.client(request(75, 0, 17 + number, {"topics": [], "cursor": page}))
    asked = [codec.decode_request(frame)[1]["cursor"]["topicName"] for frame in talk.requests()[17:]]
    assert asked == [pages[0]["topicName"], *(f"__{number}" for number in range(1, 17))]


def _is_whole_without_filters(rules: list[Rule], default: str | None, ask: bytes, answer: bytes) -> bool:
    talk = Decided(*rules, policy_default=default, filter_lists=False).client(ask)
    if not talk.requests():
        return False
    assert talk.broker(answer).sent[0] == answer or talk.answers() == [answer[4:]]
    return True


@pytest.mark.parametrize("version", schema().apis[3].response.versions)
def test_metadata_contains_the_requested_topics_with_an_error_for_each_denied_one(version):
    """Requests by name, by id and both, also with ids that kproxy does not know."""
    key, rng = 3, random.Random(version)
    denied_by_id = passed = 0
    for _ in range(60):
        rules, default = random_rules(rng, "Metadata"), rng.choice((None, "allow", "deny"))
        naive = Naive(rules, default, **WHO)
        names = rng.sample(NAMES["topic"], rng.randrange(1, 5))
        by_id = version >= 12 and rng.random() < 0.6
        known = {ID_OF[name]: name for name in NAMES["topic"] if rng.random() < 0.5}
        topics = [{"name": None, "topicId": ID_OF[name]} if by_id else {"name": name} for name in names]
        talk = Decided(*rules, policy_default=default, principal=WHO["principal"], address=WHO["address"])
        talk.names.learn(known)
        talk.client(request(key, version, 1, {"topics": topics}))
        if not talk.requests():
            continue
        (asked,) = (codec.decode_request(frame)[1] for frame in talk.requests())
        name_of = {topic_id: name for name, topic_id in ID_OF.items()}
        asked_names = [topic["name"] or name_of[topic["topicId"]] for topic in asked["topics"]]
        allowed = [name for name in names if naive.may_name("Metadata", "topic", name)]
        # An unknown id is forwarded: the response contains its name.
        assert [name for name in asked_names if name in allowed] == allowed
        assert all(name in allowed or (by_id and ID_OF[name] not in known) for name in asked_names)
        fields = {field.name for field in _field(key, "topics").fields if version in field.versions}
        answered = [
            {k: v for k, v in {"name": name, "topicId": ID_OF[name], "partitions": []}.items() if k in fields}
            for name in asked_names
        ]
        number = int.from_bytes(talk.requests()[0][4:8], "big", signed=True)
        frame = codec.encode_response(key, version, {"correlationId": number}, {"brokers": [], "topics": answered})
        talk.broker(sized(bytes(frame)))
        (got,) = talk.answers()
        assert not [name for name in names if by_id and name not in allowed and name.encode() in got], rules
        found = codec.decode_response(got, key, version)[1]["topics"]
        assert [topic["name"] for topic in found if not topic["errorCode"]] == allowed, rules
        errors = {topic["topicId"] if by_id else topic["name"]: topic["errorCode"] for topic in found}
        assert {key: code for key, code in errors.items() if code} == {
            ID_OF[name] if by_id else name: 29 for name in names if name not in allowed
        }, rules
        others = [name for name in NAMES["topic"] if name not in names and name.encode() in got]
        assert not others
        passed += 1
        denied_by_id += by_id and len(allowed) < len(names)
    assert passed > 30 and (denied_by_id > 5 or version < 12)


def _field(key: int, name: str) -> Field:
    return next(field for field in schema().apis[key].response.fields if field.name == name)

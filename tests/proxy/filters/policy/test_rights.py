"""The policy requires at least the rights that a broker requires: it refuses each request without one of them."""

import random
from typing import Any
from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.codec import paths_of
from kproxy.protocol.schema import Api, Field, schema
from kproxy.proxy.config.api_groups import ALWAYS, GROUPS, READ_ONLY
from kproxy.proxy.filters.policy.resources import KINDS, TOPIC
from kproxy.proxy.filters.policy.rights import CLUSTER, CLUSTER_ACTION, RIGHTS, Right
from kproxy.proxy.filters.policy.topic_names import TopicNames
from tests.each import each
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import sized

APIS = sorted(schema().apis.values(), key=lambda api: api.key)
SECRET_ID = UUID(int=7)
KEY_TYPES = {"group": 0, "transactional_id": 1}
RESOURCE_TYPES = {"topic": 2, "group": 32, "cluster": 4}
PASSES = (*READ_ONLY, "always")


def test_the_table_of_rights_has_every_api_and_only_fields_of_its_schema():
    assert RIGHTS.keys() == {api.name for api in APIS}
    for api in APIS:
        paths = {path for version in api.request.versions for path in paths_of(api.request.fields, version)}
        assert {field for right in RIGHTS[api.name] for field in right.fields} <= paths, api.name


def body_with(api: Api, version: int, path: str, value: Any) -> dict[str, Any] | None:
    """The smallest body of that version with the value at a path, also in arrays; None if it has no such path."""
    if path not in set(paths_of(api.request.fields, version)):
        return None
    return _struct(api.request.fields, version, path, value)


def _struct(fields: tuple[Field, ...], version: int, path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    made: dict[str, Any] = {}
    for field in fields:
        if field.name == name and version in field.versions:
            inner = _struct(field.fields, version, rest, value) if rest else value
            made[name] = [inner] if field.is_array else inner
    return made


def frame_of(api: Api, version: int, body: dict[str, Any]) -> bytes:
    header = {"requestApiKey": api.key, "requestApiVersion": version, "correlationId": 1, "clientId": "c"}
    if api.request.header_version(version) == 0:
        del header["clientId"]
    return sized(codec.encode_request(header, body))


def decided(api: Api, version: int, body: dict[str, Any], *rules: dict[str, Any], **settings: Any) -> str:
    names = TopicNames()
    names.learn({SECRET_ID: "secret"})
    frame = frame_of(api, version, body)
    talk = Decided(*rules, names=names, **settings).client(frame)
    sent = talk.requests()
    if sent and sent[0] != frame[4:]:
        return "edited"
    assert bool(sent) != bool(talk.refusals), (api.name, version, talk.refusals)
    return "passed" if sent else "refused"


def requests(api: Api, right: Right) -> Any:
    """(version, body, a body that does not need the right) for each version and field of a right."""
    for version in api.request.versions:
        for path in right.fields if version in right.versions else ():
            name = "secret"
            if path == "keyType" and version:
                yield version, {path: 2}, {path: 0}
            elif path.endswith(("replicaId", "keyType")):
                for replica_id in (0, 1, 2**31 - 1, -3, -(2**31)):
                    if (body := body_with(api, version, path, replica_id)) is not None:
                        yield version, body, body_with(api, version, path, random.choice((-1, -2)))
                continue
            elif path == "enable2Pc":
                yield version, {"transactionalId": "t", path: True}, {"transactionalId": "t", path: False}
            elif body := body_with(api, version, path, SECRET_ID if path.endswith("Id") and "opicId" in path else name):
                other = body_with(api, version, path, UUID(int=0) if "opicId" in path else "other")
                for each in (body, other):
                    if api.name == "FindCoordinator" and version > 0:
                        each["keyType"] = KEY_TYPES[right.resource]
                    if path == "resources.resourceName":
                        each["resources"][0]["resourceType"] = RESOURCE_TYPES[right.resource]
                    if right.operation == "Create" and api.name == "Metadata" and version >= 4:
                        each["allowAutoTopicCreation"] = True
                if api.name != "FindCoordinator" or version > 0 or right.resource == "group":
                    yield version, body, other


NAMED = [(api, right) for api in APIS for right in RIGHTS[api.name] if right.resource in KINDS and right.fields]


@each(("api", "right"), NAMED)
def test_rules_about_names_apply_to_each_name_for_which_brokers_require_a_right(api, right):
    every = {"action": "allow"}
    denied = {"action": "deny", right.resource: "secret"}
    if right.operation == "Create" and api.name != "CreateTopics":
        denied["api"] = "CreateTopics"  # the broker may create the topic for this request
    if right.operation == "DescribeConfigs" and api.name == "CreateTopics":
        return  # see `hide_settings`
    seen = 0
    for version, body, other in requests(api, right):
        if right.operation == "TwoPhaseCommit":
            denied, every = {"action": "allow", "transactional_id": "*"}, {"action": "deny"}
            assert decided(api, version, other, denied, every) == "passed"
        if api.name == "Metadata" and "api" in denied and version < 4:
            continue  # there is no flag to clear, see docs/policy.md
        came = decided(api, version, body, denied, every)
        assert came == "edited" if api.name == "Metadata" and version > 0 else came != "passed", (api.name, version)
        if "topicId" not in str(other) and not any(path.endswith("Regex") for path in right.fields):
            assert decided(api, version, other, {"action": "deny", right.resource: "secret"}, every) != "refused" or (
                right.operation == "TwoPhaseCommit"
            )
        seen += 1
    assert seen


OF_CLUSTER = [
    (api, right) for api in APIS for right in RIGHTS[api.name] if right.resource not in KINDS and api.name not in ALWAYS
]


@each(("api", "right"), OF_CLUSTER)
def test_a_rule_with_names_does_not_give_rights_on_the_cluster(api, right):
    names = dict.fromkeys(KINDS, "*")
    asked = list(requests(api, right)) or [
        (version, {}, {}) for version in api.request.versions if version in right.versions
    ]
    for version, body, _ in asked:
        if api.name == "Envelope":
            body = {"requestData": b"", "requestPrincipal": None, "clientHostAddress": b""}
        allows = [{"action": "allow", **names}]
        assert decided(api, version, body, *allows) == "refused", (api.name, version)
        assert (
            decided(api, version, body, *allows, {"action": "allow", "api": "broker"}, {"action": "allow"}) != "refused"
        )
        if right.operation == CLUSTER_ACTION:
            assert decided(api, version, body, {"action": "deny", "api": "DeleteTopics"}) == "refused"
            assert decided(api, version, body, *allows, {"action": "allow", "api": "broker"}) != "refused"
            assert decided(api, version, body, {"action": "allow", "api": "broker", TOPIC: "*"}) == "refused"
        passes = decided(api, version, body, read_only=True) != "refused"
        assert not passes or right.operation in ("Describe", "DescribeConfigs", "DescribeTokens"), (api.name, version)


def test_a_producer_id_without_a_transaction_needs_the_right_to_write_some_topic():
    api = schema().apis[22]
    for version in api.request.versions:
        for rule, came in (({"transactional_id": "*"}, "refused"), ({"topic": "orders"}, "passed"), ({}, "passed")):
            assert decided(api, version, {"transactionalId": None}, {"action": "allow", **rule}) == came


def test_a_read_only_listener_passes_no_api_that_needs_a_right_to_change_something():
    for api in APIS:
        if any(api.name in GROUPS[group] for group in PASSES):
            changing = {
                right for right in RIGHTS[api.name] if right.operation in ("Write", "Create", "Alter", "Delete")
            }
            assert not changing or api.name == "Metadata", api.name  # its allowAutoTopicCreation is cleared


@pytest.mark.parametrize("rules", [(), ({"action": "allow", "topic": "*"},), ({"action": "deny", "group": "x"},)])
def test_a_replica_id_is_found_in_every_version(rules):
    settings = {} if rules else {"read_only": True}
    for api in APIS:
        if api.name not in ("Fetch", "ListOffsets", "OffsetForLeaderEpoch"):
            continue
        for version in api.request.versions:
            for path in ("replicaId", "replicaState.replicaId"):
                for replica_id in (-1, -2, 0, 1, 99, 2**31 - 1, -3, -(2**31)):
                    body = body_with(api, version, path, replica_id)
                    if body is None:
                        continue
                    body["topics"] = [{"name" if api.name == "ListOffsets" else "topic": "t", "partitions": [{}, {}]}]
                    if api.name == "Fetch":
                        body["topics"] = [{"topicId": SECRET_ID, "topic": "t", "partitions": [{}, {}]}]
                        body["topics"][0].pop("topic" if version >= 13 else "topicId")
                    came = decided(api, version, body, *rules, **settings)
                    assert (came == "refused") == (
                        replica_id not in (-1, -2) or (api.key, version) in ((23, 0), (23, 1))
                    )


def tagged(*fields: bytes) -> bytes:
    return bytes([len(fields)]) + b"".join(fields)


def test_a_request_with_a_duplicate_or_malformed_replica_state_is_refused():
    """Kafka reads known tags by their content, not by their size, and uses the last one; no such request passes."""
    api = schema().apis[1]
    for version in range(15, api.request.versions[-1] + 1):
        frame = frame_of(api, version, {})[4:-1]  # without its empty tag section
        state = {replica_id: replica_id.to_bytes(4, "big", signed=True) + bytes(8) + b"\0" for replica_id in (-1, 2)}
        for name, tags in {
            "consumer, then replica": (b"\1\x0d" + state[-1], b"\1\x0d" + state[2]),
            "replica, then consumer": (b"\1\x0d" + state[2], b"\1\x0d" + state[-1]),
            "size 0": (b"\1\0" + state[2],),
            "size too small": (b"\1\4" + state[2],),
            "size too large": (b"\1\x0e" + state[2] + b"\0",),
            "out of order": (b"\2\1x", b"\1\x0d" + state[2]),
            "behind an unknown one that swallows it": (b"\0\x7f" + state[2], b"\1\x0d" + state[2]),
            "behind a cluster id": (b"\0\3\2x", b"\1\x0d" + state[2])[1:],
            "before an unknown one": (b"\1\x0d" + state[2], b"\x09\1x"),
            "in a long varint": (b"\x81\x00\x8d\x00" + state[2],),
            "a count that promises more": (b"\1\x0d" + state[2],) * 1 + (b"",),
        }.items():
            talk = Decided(read_only=True).client(sized(frame + tagged(*tags)))
            assert talk.requests() == [] and talk.refusals, (version, name)
        # Requests without a replica's id pass unchanged.
        for tags in ((), (b"\1\x0d" + state[-1],), (b"\x09\1x",)):
            whole = frame + tagged(*tags)
            assert Decided(read_only=True).client(sized(whole)).requests() == [whole], version
        # Bytes after the tag section are not tags.
        assert Decided(read_only=True).client(sized(frame + b"\0" + b"\1\x0d" + state[2])).requests()


def test_a_fetch_of_a_replica_needs_a_rule_for_all_requests_of_brokers():
    api, body = schema().apis[1], {"replicaId": 2}
    allowed = {"action": "allow", "api": "broker"}
    for rules, came in (
        ([{"action": "allow"}], "passed"),
        ([allowed], "passed"),
        ([{"action": "allow", "api": ["read", "broker"]}], "passed"),
        ([{"action": "allow", "api": "read"}], "refused"),
        ([{"action": "allow", "api": ["Fetch", "FetchSnapshot", "LeaderAndIsr"]}], "refused"),
        ([allowed | {"principal": "User:broker"}], "refused"),
        ([allowed | {"version": "0-9"}], "refused"),
        ([{"action": "deny", "api": "Fetch"}, allowed], "refused"),
        ([{"action": "deny", "api": "broker"}, {"action": "allow"}], "refused"),
        ([{"action": "deny", "topic": "secret"}, allowed], "refused"),
        ([{"action": "deny", "topic": "other"}, allowed], "passed"),
    ):
        asked = {**body, "topics": [{"topic": "secret", "partitions": [{}]}]}
        assert decided(api, 12, asked, *rules) == came, rules
    assert decided(api, 12, body, allowed, read_only=True) == "refused"


def test_kproxy_offers_no_version_whose_replica_id_it_cannot_read():
    policy = Decided(read_only=True).policy
    assert policy.caps()[1] == schema().apis[1].request.versions[-1]
    frame = b"\0\1\0\x63\0\0\0\1\0\1c"  # Fetch v99
    talk = Decided(read_only=True).client(sized(frame))
    assert talk.requests() == [] and talk.refusals == {("Fetch", "unknown_version"): 1}
    assert CLUSTER not in KINDS

"""Which requests a policy forwards, and how it refuses others, however their bytes are split."""

from collections import Counter
from sys import getsizeof
from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import (
    API_VERSIONS,
    CONSUMER_GROUP_DESCRIBE,
    CREATE_TOPICS,
    DELETE_GROUPS,
    DELETE_SHARE_GROUP_STATE,
    DELETE_TOPICS,
    ELECT_LEADERS,
    ENVELOPE,
    FETCH,
    FIND_COORDINATOR,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    INVALID_REQUEST,
    LIST_GROUPS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    STOP_REPLICA,
    UNREGISTER_BROKER,
    WRITE_TXN_MARKERS,
)
from kproxy.protocol.schema import schema
from kproxy.proxy.filters.policy import lists as policy_lists
from kproxy.proxy.filters.policy import policy as policy_module
from kproxy.proxy.filters.policy import refusals as policy_refusals
from kproxy.proxy.filters.policy.authorizer import MAX_TREATMENTS
from kproxy.proxy.filters.policy.judging import SLICE_NAMES
from kproxy.proxy.filters.policy.refusals import CODES
from kproxy.wire.decisions.authorizer import MAX_HELD_REQUEST
from kproxy.wire.events import BROKER, CLIENT
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import foreign_request, request, response, sized

ALTER_CONFIGS = 44
TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = 29, 30, 31, 53

NO_SECRETS = {"action": "deny", "topic": "secret-*"}
A_TOPIC_ID = UUID(int=0xABCDEF)


def produce(correlation_id, *topics, acks=1, version=9):
    data = [{"name": topic, "partitionData": [{"index": 0, "records": b"r" * 100}]} for topic in topics]
    return request(PRODUCE, version, correlation_id, {"acks": acks, "timeoutMs": 1, "topicData": data})


def fetch_by_id(correlation_id, topic_id):
    topics = [{"topicId": topic_id, "partitions": [{"partition": 0}]}]
    return request(FETCH, 13, correlation_id, {"topics": topics})


def codes(body, items, inner):
    return [(item["name"], [one["errorCode"] for one in item[inner]]) for item in body[items]]


def test_a_refusal_of_several_names_gives_the_reason_for_the_first():
    talk = Decided(NO_SECRETS, {"action": "allow", "topic": "orders"})
    talk.client(produce(1, "orders", "o" * 70, "secret-1"))
    (_, *denied) = talk.answer(PRODUCE, 9)["responses"]
    reason = f"topic {'o' * 64}: no rule matches, and the default is to deny; 1 more denied"
    for each in denied:
        assert each["partitionResponses"][0]["errorMessage"] == f"Produce was refused by kproxy: {reason}"


@pytest.mark.parametrize("cuts", [[], [3], [11], [30], [30, 31, 90], range(1, 120, 7)])
def test_a_refused_produce_gets_an_error_for_each_partition_and_no_byte_reaches_the_broker(cuts):
    talk = Decided(NO_SECRETS)
    talk.client(produce(1, "orders", "secret-1"), cuts)
    assert talk.sent[BROKER] == b""
    # The allowed topics were not written either: clients send them again.
    assert codes(talk.answer(PRODUCE, 9), "responses", "partitionResponses") == [("orders", [6]), ("secret-1", [TOPIC])]
    message = talk.answer(PRODUCE, 9)["responses"][1]["partitionResponses"][0]["errorMessage"]
    assert message == "Produce was refused by kproxy: rule 1 denies it"
    assert talk.refusals == {("Produce", "rule"): 1}
    assert not talk.faults
    again = produce(2, "orders")
    talk.client(again)  # the connection stays open
    assert talk.sent[BROKER] == again


def test_a_refused_produce_without_acks_closes_the_connection_as_a_broker_does():
    talk = Decided(NO_SECRETS)
    talk.client(produce(1, "orders", acks=0) + produce(2, "secret-1", acks=0))
    assert talk.sent[BROKER] == produce(1, "orders", acks=0)
    (fault,) = talk.faults
    assert fault.fatal and fault.kind == "refused" and "acks=0" in fault.text
    assert talk.refusals == {("Produce", "rule"): 1}


def test_refusals_leave_in_the_order_of_the_requests():
    talk = Decided(NO_SECRETS)
    talk.client(produce(1, "a") + produce(2, "secret-1") + produce(3, "b") + produce(4, "secret-1"))
    assert talk.requests() == [produce(1, "a")[4:], produce(3, "b")[4:]]
    assert talk.sent[CLIENT] == b""
    answers = [response(PRODUCE, 9, number, {"responses": []}) for number in (1, 3)]
    talk.broker(answers[0])
    assert [frame[:4] for frame in talk.answers()] == [b"\0\0\0\1", b"\0\0\0\2"]
    talk.broker(answers[1])
    assert [frame[3] for frame in talk.answers()] == [1, 2, 3, 4]


def test_each_kind_of_resource_has_its_error_code():
    by_group = {"action": "deny", "group": "secret-*"}
    talk = Decided(by_group)
    talk.client(request(HEARTBEAT, 4, 1, {"groupId": "secret-1"}))
    assert talk.answer(HEARTBEAT, 4)["errorCode"] == GROUP
    talk = Decided(by_group)
    topics = [{"name": "t", "partitions": [{"partitionIndex": 0}]}]
    talk.client(request(OFFSET_COMMIT, 8, 1, {"groupId": "secret-1", "topics": topics}))
    assert codes(talk.answer(OFFSET_COMMIT, 8), "topics", "partitions") == [("t", [GROUP])]
    talk = Decided({"action": "deny", "transactional_id": "secret-*"})
    talk.client(request(INIT_PRODUCER_ID, 4, 1, {"transactionalId": "secret-1"}))
    assert talk.answer(INIT_PRODUCER_ID, 4)["errorCode"] == TRANSACTIONAL_ID
    talk = Decided({"action": "deny", "api": "UnregisterBroker"})
    talk.client(request(UNREGISTER_BROKER, 0, 1, {"brokerId": 1}))
    assert talk.answer(UNREGISTER_BROKER, 0)["errorCode"] == CLUSTER
    talk = Decided(by_group)
    talk.client(request(FIND_COORDINATOR, 4, 1, {"keyType": 0, "coordinatorKeys": ["secret-1", "g"]}))
    found = talk.answer(FIND_COORDINATOR, 4)["coordinators"]
    assert [(one["key"], one["errorCode"]) for one in found] == [("secret-1", GROUP), ("g", 15)]
    assert [one["nodeId"] for one in found] == [-1, -1]


def test_a_rule_about_topics_does_not_allow_to_alter_broker_configs():
    talk = Decided({"action": "allow", "topic": "orders"})
    topic = {"resourceType": 2, "resourceName": "orders", "configs": []}
    broker = {"resourceType": 4, "resourceName": "1", "configs": []}
    talk.client(request(ALTER_CONFIGS, 1, 1, {"resources": [topic]}))
    assert len(talk.requests()) == 1
    talk.client(request(ALTER_CONFIGS, 1, 2, {"resources": [topic, broker]})).broker(
        response(ALTER_CONFIGS, 1, 1, {"responses": []})
    )
    assert len(talk.requests()) == 1
    body = codec.decode_response(talk.answers()[1], ALTER_CONFIGS, 1)[1]
    assert [(one["resourceName"], one["errorCode"]) for one in body["responses"]] == [("orders", 55), ("1", CLUSTER)]


def test_a_request_for_all_topics_needs_a_rule_without_names():
    only_orders = {"action": "allow", "topic": "orders"}
    for rules in ([only_orders], [NO_SECRETS]):
        talk = Decided(*rules)
        talk.client(request(ELECT_LEADERS, 2, 1, {"topicPartitions": None}))
        assert talk.answer(ELECT_LEADERS, 2)["errorCode"] == CLUSTER
    for rule, passes in (({"action": "allow", "topic": "*"}, 0), ({"action": "allow", "api": "admin"}, 1)):
        talk = Decided(rule)  # a broker asks for a right on the cluster
        talk.client(request(ELECT_LEADERS, 2, 1, {"topicPartitions": None}))
        assert len(talk.requests()) == passes


@pytest.mark.parametrize("rules", [(NO_SECRETS,), ({"action": "allow", "topic": "orders", "group": "*"},)])
def test_a_subscription_by_regex_needs_the_right_to_name_all_topics(rules):
    """The broker's response would reveal the ids of the topics that match."""
    key, body = 68, {"groupId": "g", "memberId": "m", "subscribedTopicNames": None}
    talk = Decided(*rules).client(request(key, 1, 1, body | {"subscribedTopicRegex": "secret-.*"}))
    assert talk.sent[BROKER] == b"" and talk.answer(key, 1)["errorCode"] == TOPIC
    for expression in (None, ""):
        same = request(key, 1, 2, body | {"subscribedTopicRegex": expression})
        assert Decided(*rules).client(same).sent[BROKER] == same
    everything = ({"action": "allow", "topic": "*", "group": "*"},)
    some = request(key, 1, 1, body | {"subscribedTopicRegex": ".*"})
    assert Decided(*everything).client(some).sent[BROKER] == some


def test_rules_match_principal_address_client_id_and_version():
    rules = (
        {"action": "allow", "principal": "User:alice", "topic": "a"},
        {"action": "allow", "address": ["192.168.0.0/16", "::1"], "topic": "b"},
        {"action": "allow", "client_id": "app-*", "topic": "c"},
        {"action": "allow", "version": "0-8", "topic": "d"},
    )

    def passes(topic, version=9, client="c", **identity):
        talk = Decided(*rules, **identity)
        data = [{"name": topic, "partitionData": [{"index": 0, "records": None}]}]
        frame = request(PRODUCE, version, 1, {"acks": 1, "topicData": data}, client=client)
        talk.client(frame, [20])
        assert bool(talk.requests()) != bool(talk.refusals)
        return bool(talk.requests())

    assert passes("a") and not passes("a", principal="User:bob")
    assert passes("b", address="192.168.7.7") and passes("b", address="::1") and not passes("b")
    assert passes("b", address="::ffff:192.168.1.1")
    assert passes("c", client="app-1") and not passes("c") and not passes("c", client=None)
    assert passes("d", version=8) and not passes("d", version=9)


def test_each_request_of_a_connection_is_judged_by_its_own_client_id():
    talk = Decided({"action": "deny", "client_id": "bad"})
    frames = [request(HEARTBEAT, 4, number, {"groupId": "g"}, client=client) for number, client in enumerate("xyx")]
    bad = request(HEARTBEAT, 4, 9, {"groupId": "g"}, client="bad")
    talk.client(frames[0] + bad + frames[1] + bad + frames[2])
    assert talk.requests() == [frame[4:] for frame in frames]


# --- topics by id -----------------------------------------------------------------------------------------------------


def test_an_unknown_topic_id_is_refused_with_an_error_that_makes_clients_refresh_metadata():
    talk = Decided(NO_SECRETS)
    talk.client(fetch_by_id(1, A_TOPIC_ID))
    (topic,) = talk.answer(FETCH, 13)["responses"]
    assert topic["topicId"] == A_TOPIC_ID
    assert [one["errorCode"] for one in topic["partitions"]] == [100]
    assert talk.refusals == {("Fetch", "unknown_topic_id"): 1}
    assert talk.names.unknown() == [A_TOPIC_ID]
    # The client sends Metadata, and kproxy learns the id from the response.
    topics = [{"name": "orders", "topicId": A_TOPIC_ID, "partitions": []}]
    talk.client(request(METADATA, 12, 2, {"topics": [{"name": "orders"}]}))
    talk.broker(response(METADATA, 12, 2, {"topics": topics}), [20])
    talk.client(fetch_by_id(3, A_TOPIC_ID))
    assert talk.requests()[-1] == fetch_by_id(3, A_TOPIC_ID)[4:]


def test_a_topic_id_is_judged_by_the_name_of_its_topic():
    talk = Decided(NO_SECRETS)
    talk.names.learn({A_TOPIC_ID: "secret-1"})
    talk.client(fetch_by_id(1, A_TOPIC_ID))
    assert talk.answer(FETCH, 13)["responses"][0]["partitions"][0]["errorCode"] == TOPIC
    talk = Decided({"action": "deny", "group": "g"})  # no rule is about topics: the id does not matter
    talk.client(fetch_by_id(1, A_TOPIC_ID))
    assert len(talk.requests()) == 1


# --- Metadata and lists -----------------------------------------------------------------------------------------------


def metadata_of(*names, version=12):
    topics = [{"name": name, "partitions": [{"partitionIndex": 0, "leaderId": 1}]} for name in names]
    return response(METADATA, version, 1, {"brokers": [{"nodeId": 1, "host": "h", "port": 1}], "topics": topics})


@pytest.mark.parametrize("version", range(14))
def test_metadata_by_name_is_answered_as_a_broker_with_an_authorizer_does(version):
    talk = Decided(NO_SECRETS)
    asked = request(METADATA, version, 1, {"topics": [{"name": "orders"}, {"name": "secret-1"}]})
    talk.client(asked, [20])
    (frame,) = talk.requests()
    assert [topic["name"] for topic in codec.decode_request(frame)[1]["topics"]] == ["orders"]
    talk.broker(metadata_of("orders", version=version), [30])
    body = talk.answer(METADATA, version)
    assert [(topic["name"], topic["errorCode"]) for topic in body["topics"]] == [("orders", 0), ("secret-1", TOPIC)]
    assert len(body["brokers"]) == 1
    assert talk.refusals == {("Metadata", "rule"): 1}


@pytest.mark.parametrize("version", [0, 1, 12])
def test_metadata_of_denied_topics_alone_still_names_the_brokers(version):
    talk = Decided(NO_SECRETS)
    talk.client(request(METADATA, version, 1, {"topics": [{"name": "secret-1"}]}))
    names = ("orders", "secret-1") if version == 0 else ()  # there an empty list asks for all
    talk.broker(metadata_of(*names, version=version))
    body = talk.answer(METADATA, version)
    assert [(topic["name"], topic["errorCode"]) for topic in body["topics"]] == [("secret-1", TOPIC)]
    assert len(body["brokers"]) == 1


@pytest.mark.parametrize("version", range(14))
def test_a_list_of_all_topics_omits_topics_that_the_client_may_not_see(version):
    everything = {"topics": None if version else []}
    talk = Decided(NO_SECRETS)
    talk.client(request(METADATA, version, 1, everything))
    talk.broker(metadata_of("a", "secret-1", "b", "secret-2", version=version), [50])
    assert [topic["name"] for topic in talk.answer(METADATA, version)["topics"]] == ["a", "b"]
    talk = Decided(NO_SECRETS, filter_lists=False)
    talk.client(request(METADATA, version, 1, everything)).broker(metadata_of("secret-1", version=version))
    assert talk.sent[CLIENT] == metadata_of("secret-1", version=version)
    assert not talk.refusals


def test_a_list_of_groups_omits_groups_that_the_client_may_not_see():
    talk = Decided({"action": "allow", "group": "app-*"}, rewrite=False)
    talk.client(request(LIST_GROUPS, 4, 1, {}))
    talk.broker(response(LIST_GROUPS, 4, 1, {"groups": [{"groupId": "app-1"}, {"groupId": "other"}]}))
    assert [group["groupId"] for group in talk.answer(LIST_GROUPS, 4)["groups"]] == ["app-1"]
    talk = Decided({"action": "allow", "topic": "*"})
    talk.client(request(LIST_GROUPS, 4, 1, {}))
    assert talk.answer(LIST_GROUPS, 4)["errorCode"] == CLUSTER


# --- read-only, unknown keys and versions -----------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [(), ({"action": "allow", "api": "broker"},)])
def test_a_read_only_listener_refuses_fetches_of_followers_whatever_the_rules_allow(rules):
    """A broker advances the high watermark by the fetch offset of a replica."""
    talk = Decided(*rules, read_only=True, policy_default="allow")
    of_consumer, of_follower = (request(FETCH, 12, 1, {"replicaId": replica, "topics": []}) for replica in (-1, 3))
    talk.client(of_consumer)
    assert talk.sent[BROKER] == of_consumer and not talk.refusals
    talk.client(of_follower)
    assert talk.sent[BROKER] == of_consumer and talk.refusals == {("Fetch", "read_only"): 1}


def test_a_read_only_listener_passes_consumers_and_refuses_producers():
    for frame in (
        request(FETCH, 12, 1, {"topics": [{"topic": "t", "partitions": [{"partition": 0}]}]}),
        request(HEARTBEAT, 4, 1, {"groupId": "g"}),
        request(OFFSET_COMMIT, 8, 1, {"groupId": "g"}),
        request(LIST_GROUPS, 4, 1, {}),
        request(API_VERSIONS, 3, 1, {}),
    ):
        talk = Decided(read_only=True).client(frame, [15])
        assert talk.sent[BROKER] == frame
    for frame, api in (
        (produce(1, "t"), "Produce"),
        (request(INIT_PRODUCER_ID, 4, 1, {"transactionalId": None}), "InitProducerId"),
        (request(CREATE_TOPICS, 7, 1, {"topics": [{"name": "t"}]}), "CreateTopics"),
        (request(DELETE_GROUPS, 2, 1, {"groupsNames": ["g"]}), "DeleteGroups"),
    ):
        talk = Decided(read_only=True)
        talk.client(frame, [15])
        assert talk.requests() == [] and talk.refusals == {(api, "read_only"): 1} and not talk.faults
    talk = Decided(read_only=True).client(request(INIT_PRODUCER_ID, 4, 1, {"transactionalId": None}))
    assert talk.answer(INIT_PRODUCER_ID, 4)["errorCode"] == CLUSTER


@pytest.mark.parametrize("version", [4, 9, 12, 13])
def test_brokers_create_no_topic_for_a_consumer_of_a_read_only_listener(version):
    body = {"topics": [{"name": "t"}], "allowAutoTopicCreation": True}
    talk = Decided(read_only=True).client(request(METADATA, version, 1, body), [20])
    (frame,) = talk.requests()
    assert codec.decode_request(frame)[1]["allowAutoTopicCreation"] is False
    assert frame[:8] == request(METADATA, version, 1, body)[4:12]


@pytest.mark.parametrize("version", [0, 4, 5, 7])
def test_a_client_without_describe_configs_creates_a_topic_but_does_not_see_its_configs(version):
    made = {"numPartitions": 3, "replicationFactor": 1, "configs": [{"name": "retention.ms", "value": "1"}]}
    answer = {"topics": [{"name": name, **(made if version >= 5 else {})} for name in ("orders", "app-1")]}
    talk = Decided({"action": "allow", "api": "CreateTopics"}, {"action": "allow", "topic": "orders"})
    talk.client(request(19, version, 1, {"topics": [{"name": "orders"}, {"name": "app-1"}], "timeoutMs": 1}))
    assert len(talk.requests()) == 1
    talk.broker(response(19, version, 1, answer))
    orders, app = talk.answer(19, version)["topics"]
    if version >= 5:
        assert (orders["numPartitions"], orders["configs"][0]["value"]) == (3, "1")
        assert (app["numPartitions"], app["configs"], app["topicConfigErrorCode"]) == (-1, [], 29)
    assert app["errorCode"] == 0


@pytest.mark.parametrize(("topic", "created"), [("orders", True), ("app-1", False)])
def test_brokers_create_topics_automatically_only_for_clients_with_the_right_to_create_them(topic, created):
    """Otherwise kproxy clears the flag of Metadata, and refuses StreamsGroupHeartbeat, which has none."""
    rules = ({"action": "allow", "api": ["describe", "write"]}, {"action": "allow", "topic": "orders"})
    body = {"topics": [{"name": topic}], "allowAutoTopicCreation": True}
    (frame,) = Decided(*rules).client(request(METADATA, 9, 1, body)).requests()
    assert codec.decode_request(frame)[1]["allowAutoTopicCreation"] is created
    inside = [{"subtopologyId": "0", "stateChangelogTopics": [{"name": topic}], "repartitionSourceTopics": []}]
    talk = Decided(*rules)
    talk.client(request(88, 0, 1, {"groupId": "g", "memberId": "m", "topology": {"epoch": 0, "subtopologies": inside}}))
    assert (len(talk.requests()) == 1) is created
    assert created or talk.answer(88, 0)["errorCode"] == TOPIC


def test_an_unknown_api_needs_a_rule_with_its_number():
    frame = foreign_request(9999, 0, 1, b"\0\1c\0")
    # It could contain a name that a rule denies.
    for rule, reason in ((NO_SECRETS, "rule"), ({"action": "allow"}, "unknown_api")):
        talk = Decided(rule).client(frame)
        assert talk.sent[BROKER] == b"" and talk.faults[0].fatal
        assert talk.refusals == {("unknown_9999", reason): 1}
    assert Decided({"action": "allow", "api": 9999}).client(frame).sent[BROKER] == frame
    assert not Decided({"action": "allow", "api": 9999}, read_only=True).client(frame).sent[BROKER]
    assert Decided().client(frame).sent[BROKER] == frame  # without a policy


def test_an_unknown_version_passes_only_if_no_rule_depends_on_its_content():
    frame = foreign_request(PRODUCE, 99, 1, b"\0\1c\0")
    talk = Decided(NO_SECRETS).client(frame)
    assert talk.faults[0].fatal and talk.refusals == {("Produce", "unknown_version"): 1}
    assert Decided({"action": "deny", "group": "g"}).client(frame).sent[BROKER] == frame
    assert not Decided({"action": "deny", "api": "Produce"}).client(frame).sent[BROKER]
    frame = foreign_request(HEARTBEAT, 99, 1, b"\0\1c\0")
    assert Decided(NO_SECRETS).client(frame).sent[BROKER] == frame
    frame = foreign_request(CONSUMER_GROUP_DESCRIBE, 99, 1, b"\0\1c\0")  # its response could not be filtered
    assert not Decided(NO_SECRETS).client(frame).sent[BROKER]
    assert Decided(NO_SECRETS, filter_lists=False).client(frame).sent[BROKER] == frame


def test_logins_and_api_versions_always_pass():
    frame = request(API_VERSIONS, 3, 1, {"clientSoftwareName": "x", "clientSoftwareVersion": "1"})
    assert Decided({"action": "deny"}).client(frame).sent[BROKER] == frame


def test_a_malformed_or_too_large_request_is_refused():
    cut_short = produce(1, "orders")
    talk = Decided(NO_SECRETS)
    talk.client((len(cut_short) - 4 - 30).to_bytes(4, "big") + cut_short[4:-30])
    assert talk.faults[0].fatal and talk.refusals == {("Produce", "malformed"): 1}
    talk = Decided(NO_SECRETS)
    names = ["t"] * 70_000
    talk.client(request(DELETE_TOPICS, 5, 1, {"topicNames": names}))
    assert talk.refusals == {("DeleteTopics", "too_large"): 1} and talk.faults[0].fatal
    talk = Decided(NO_SECRETS)  # the response has a top-level error code: the connection stays open
    topics = [{"topic": "t", "partitions": []}] * 70_000
    talk.client(request(FETCH, 12, 1, {"topics": topics}))
    assert talk.answer(FETCH, 12)["errorCode"] == INVALID_REQUEST
    assert talk.refusals == {("Fetch", "too_large"): 1} and not talk.faults and not talk.requests()
    talk = Decided(NO_SECRETS)
    talk.client((MAX_HELD_REQUEST + 1).to_bytes(4, "big") + produce(1, "orders")[4:])
    assert talk.refusals == {("Produce", "too_large"): 1} and talk.faults[0].kind == "held_too_large"


def test_a_request_that_no_rule_restricts_is_forwarded_unread():
    talk = Decided(NO_SECRETS, {"action": "deny", "api": "DeleteGroups"})
    assert not talk.policy.authorizes(HEARTBEAT, 4)
    assert talk.policy.authorizes(PRODUCE, 9) and talk.policy.authorizes(DELETE_GROUPS, 2)
    talk.client(request(HEARTBEAT, 4, 1, {"groupId": "g"})[:14])
    assert len(talk.sent[BROKER]) == 14  # it passes as it arrives


# --- the audit --------------------------------------------------------------------------------------------------------


def test_every_administrative_request_is_audited_with_its_outcome():
    talk = Decided(audits=True)
    talk.client(request(API_VERSIONS, 3, 0, {"clientSoftwareName": "kafka", "clientSoftwareVersion": "4.1"}))
    talk.broker(response(API_VERSIONS, 3, 0, {}))
    talk.client(request(DELETE_TOPICS, 5, 1, {"topicNames": ["a", "b"]}, client="tool"), [15])
    assert talk.audit.lines == []
    body = {"responses": [{"name": "a", "errorCode": 0}, {"name": "b", "errorCode": 3}]}
    talk.broker(response(DELETE_TOPICS, 5, 1, body))
    (line,) = talk.audit.lines
    assert line | {"time": ""} == {
        "time": "",
        "cluster": "default",
        "client": "10.1.2.3:5000",
        "principal": "User:alice",
        "client_id": "tool",
        "software": "kafka 4.1",
        "api": "DeleteTopics",
        "version": 5,
        "decision": "allow",
        "rule": None,
        "reason": "default",
        "topics": ["a", "b"],
        "outcome": "answered",
        "errors": ["UNKNOWN_TOPIC_OR_PARTITION"],
    }


def test_refusals_and_unanswered_requests_are_audited():
    talk = Decided(NO_SECRETS, audits=True)
    talk.client(produce(1, "orders", "secret-1") + request(DELETE_GROUPS, 2, 2, {"groupsNames": ["g"]}))
    talk.close(CLIENT).close(BROKER)
    refused, lost = talk.audit.lines
    assert (refused["decision"], refused["rule"], refused["topics"]) == ("deny", 1, ["orders", "secret-1"])
    assert refused["denied"] == ["secret-1"]
    assert (lost["decision"], lost["groups"], lost["outcome"]) == ("allow", ["g"], "unanswered")


def test_an_audit_line_lists_denied_names_if_others_were_allowed():
    def lines(*requests, rule=NO_SECRETS):
        return Decided(rule, audits=True).client(b"".join(requests)).audit.lines

    (line,) = lines(produce(1, "secret-1", "secret-2"))
    assert line["topics"] == ["secret-1", "secret-2"] and "denied" not in line
    many = [f"secret-{number}" for number in range(150)]
    (line,) = lines(produce(1, "orders", *many))
    assert line["denied"] == [*many[:100], "... and 50 more"]
    topics = [{"name": name} for name in ("orders", "secret-1")]
    (line,) = lines(request(METADATA, 8, 1, {"topics": topics, "allowAutoTopicCreation": False}))
    assert line["topics"] == ["orders", "secret-1"] and line["denied"] == ["secret-1"]
    # The configs of broker 1 need a right on the cluster, which is denied too; `denied` contains only names.
    resources = [(2, "orders"), (2, "secret-1"), (4, "1")]
    asked = [{"resourceType": kind, "resourceName": name, "configs": []} for kind, name in resources]
    (line,) = lines(request(ALTER_CONFIGS, 1, 1, {"resources": asked}), rule={"action": "allow", "topic": "orders"})
    assert line["topics"] == ["orders", "secret-1"] and line["denied"] == ["secret-1"]


def test_the_fault_of_a_refusal_that_closes_the_connection_names_the_principal():
    talk = Decided(NO_SECRETS).client(produce(1, "secret-1", acks=0))
    (fault,) = talk.faults
    assert "of User:alice is refused: rule 1 denies it (a producer with acks=0 gets no answer)" in fault.text


FOR_BROKERS = {"action": "allow", "api": "broker"}


def test_names_in_requests_between_brokers_are_judged_too():
    markers = {"producerId": 1, "topics": [{"name": "secret-1", "partitionIndexes": [0]}]}
    talk = Decided(NO_SECRETS).client(request(WRITE_TXN_MARKERS, 1, 1, {"markers": [markers]}))
    assert talk.sent[BROKER] == b"" and not talk.faults
    topics = [{"topicName": "secret-1", "partitionStates": [{"partitionIndex": 0, "deletePartition": True}]}]
    for rules, reason in (((NO_SECRETS,), "cluster_action"), ((NO_SECRETS, FOR_BROKERS), "rule")):
        talk = Decided(*rules).client(request(STOP_REPLICA, 3, 1, {"topicStates": topics}))
        assert talk.sent[BROKER] == b"" and talk.refusals == {("StopReplica", reason): 1}
    talk = Decided({"action": "deny", "group": "secret-*"}, FOR_BROKERS)
    talk.client(request(DELETE_SHARE_GROUP_STATE, 0, 1, {"groupId": "secret-1", "topics": []}))
    assert talk.sent[BROKER] == b"" and talk.refusals == {("DeleteShareGroupState", "rule"): 1}


@pytest.mark.parametrize("cuts", [[], [20]])
def test_a_denied_request_does_not_pass_inside_an_envelope(cuts):
    inside = request(DELETE_TOPICS, 1, 1, {"topicNames": ["secret-1"]})[4:]
    frame = request(ENVELOPE, 0, 1, {"requestData": inside, "clientHostAddress": b"\x7f\0\0\1"})
    for rule in (NO_SECRETS, {"action": "deny", "api": "DeleteTopics"}, {"action": "allow"}):
        talk = Decided(rule).client(frame, cuts)
        assert talk.sent[BROKER] == b"" and talk.faults[0].fatal
    assert Decided({"action": "allow", "api": "broker"}).client(frame, cuts).sent[BROKER] == frame


def test_the_number_of_remembered_names_is_limited(monkeypatch):
    monkeypatch.setattr(policy_module, "MAX_REMEMBERED", 100)
    talk = Decided({"action": "deny", "group": "secret-*"}, {"action": "deny", "client_id": "x"})
    for version in (0, 1, 2):
        talk.client(request(15, version, version, {"groups": [f"g-{version}-{n}" for n in range(90)]}))
    assert 0 < len(talk.policy._matching) <= 100
    before = len(talk.policy._matching)
    talk.client(request(15, 0, 9, {"groups": ["long" * 1000]}))  # a name that no topic has
    assert len(talk.policy._matching) == before
    assert not talk.faults


@pytest.mark.parametrize("token", [b"\0alice\0hunter2-hunter2", b"n,,n=alice,r=hunter2-nonce"])
def test_a_sasl_token_in_place_of_a_request_yields_no_client_id(token):
    """For example after a handshake that the broker refused. Bytes 8 and 9 are not the length of a client id."""
    talk = Decided(NO_SECRETS, {"action": "allow", "client_id": "*hunter2*"}, audits=True).client(sized(token))
    (line,) = talk.audit.lines
    assert line["client_id"] is None and line["decision"] == "deny" and "nter2" not in str(line)


def test_a_line_of_the_audit_cuts_long_client_ids():
    talk = Decided(NO_SECRETS, audits=True)
    body = {"acks": 1, "topicData": [{"name": "secret-1", "partitionData": []}]}
    talk.client(request(PRODUCE, 9, 1, body, client="\n" * 30_000))
    assert len(talk.audit.lines[0]["client_id"]) == 256


def test_the_bytes_of_remembered_names_are_limited(monkeypatch):
    """256 characters beyond UCS-2 take 1 KiB, and the bits of many rules some more."""
    monkeypatch.setattr(policy_module, "MAX_REMEMBERED_BYTES", 100_000)
    talk = Decided({"action": "deny", "group": "secret-*"})
    for version in (0, 1, 2):
        wide = [f"\N{GRINNING FACE}-{version}-{n}".ljust(256, "x") for n in range(90)]
        talk.client(request(15, version, version, {"groups": wide}))
        assert sum(map(getsizeof, (name for _, name in talk.policy._matching))) < 100_000
    assert talk.policy._matching and not talk.faults


def test_the_rules_remembered_for_identities_are_limited(monkeypatch):
    """Client ids can match any subset of the rules, so the number of sets to remember is exponential."""
    rules = [{"action": "deny", "client_id": f"*{letter}*", "group": "g"} for letter in "abcdef"]
    monkeypatch.setattr(policy_module, "MAX_API_RULES", 200)
    talk = Decided(*rules)
    for number in range(64):
        name = "".join(letter for at, letter in enumerate("abcdef") if number >> at & 1)
        talk.client(request(15, 0, number, {"groups": ["h"]}, client=name or "z"))
    clearances = talk.policy._clearances.values()
    assert len(clearances) == 64 and 0 < sum(len(one._apis) for one in clearances) <= 200 // 8
    assert len(talk.requests()) == 64


def test_a_connection_remembers_a_limited_part_of_its_client_id():
    talk = Decided({"action": "deny", "client_id": "x*", "group": "g"}, NO_SECRETS)
    for number in range(3):
        long = ("x" if number == 1 else "\N{GRINNING FACE}") + "c" * 30_000
        talk.client(request(15, 0, number, {"groups": ["g"]}, client=long))
        authorizer = talk.authorizer
        kept = (authorizer._client_id, authorizer._client_head, authorizer._client_name)
        assert sum(map(getsizeof, kept)) < 8_000
    assert len(talk.requests()) == 2 and talk.refusals["DescribeGroups", "rule"] == 1  # it compares the whole id
    null = request(15, 0, 9, {"groups": ["g"]}, client=None)
    talk.client(null)
    assert len(talk.requests()) == 3


def test_a_connection_remembers_a_limited_number_of_apis():
    talk = Decided({"action": "deny", "group": "secret-*"}, {"action": "allow"})
    for key, api in schema().apis.items():
        if key in (SASL_HANDSHAKE, ENVELOPE, SASL_AUTHENTICATE):
            continue
        for version in api.request.versions:
            talk.client(request(key, version, 1, {}))
            assert len(talk.authorizer._treatments) <= MAX_TREATMENTS
    assert talk.session.requests > 4 * MAX_TREATMENTS and not talk.faults


class Sliced(Decided):
    """A dialogue that counts the names which each call of its session judges."""

    def __init__(self, *rules, **settings):
        super().__init__(*rules, **settings)
        self.judged = [0]
        matching = self.policy.matching

        def counted(kind, name):
            self.judged[-1] += 1
            return matching(kind, name)

        self.policy.matching = counted  # type: ignore[method-assign]

    def _send(self, pieces):
        self.judged.append(0)
        super()._send(pieces)


NAMES = [f"{'secret' if number % 3 else 'orders'}-{number}" for number in range(5000)]


def test_a_request_of_many_allowed_names_is_judged_in_slices():
    talk = Sliced(*({"action": "deny", "topic": f"*secret*{number}*x"} for number in range(200)))
    ask = request(METADATA, 9, 1, {"topics": [{"name": name} for name in NAMES]})
    talk.client(ask)
    assert talk.requests() == [ask[4:]]
    assert 0 < max(talk.judged) <= SLICE_NAMES and sum(talk.judged) >= len(NAMES)


def test_a_slice_judges_fewer_names_if_they_are_long():
    talk = Sliced({"action": "deny", "topic": "*secret*x*"})
    topics = [{"name": "a" * 32_000 + str(number), "partitionData": []} for number in range(20)]
    talk.client(request(PRODUCE, 9, 1, {"acks": 1, "topicData": topics}))
    assert len(talk.requests()) == 1
    assert max(talk.judged) == 1 and sum(talk.judged) == 20


def test_a_large_produce_is_decided_at_once_unless_it_names_many_topics():
    """A decision in slices makes its connection wait for the slices of other connections."""
    turns = []
    for count, length, size in (
        (1, 400, 100_000),
        (15, 400, 7_000),
        (25, 400, 10),
        (SLICE_NAMES // 4, 192, 1_000),
        (SLICE_NAMES // 4 + 1, 192, 1_000),
        (25, 400, 2_000),
    ):
        talk = Sliced({"action": "deny", "topic": "secret-*"})
        topics = [
            {"name": "t" * length + str(number), "partitionData": [{"index": 0, "records": bytes(size)}]}
            for number in range(count)
        ]
        talk.client(request(PRODUCE, 9, 1, {"acks": 1, "topicData": topics}))
        assert len(talk.requests()) == 1
        turns.append(talk.calls > 0)
    assert turns == [False, False, False, False, True, True]


@pytest.mark.parametrize("key, version, body", [
    (15, 5, {"groups": NAMES}),
    (OFFSET_FETCH, 8, {"groups": [{"groupId": name, "topics": []} for name in NAMES]}),
    (OFFSET_FETCH, 5, {"groupId": "g", "topics": [{"name": name, "partitionIndexes": [0, 1]} for name in NAMES]}),
    (32, 4, {"resources": [{"resourceType": 2, "resourceName": name} for name in NAMES]}),
])  # fmt: skip
def test_the_refusal_of_many_names_is_made_in_slices(key, version, body, monkeypatch):
    """Each slice makes a limited number of elements of the response."""
    made = []
    struct = policy_refusals._Refusal._struct

    def counted(self, *args):
        made.append(talk.calls)
        return (yield from struct(self, *args))

    monkeypatch.setattr(policy_refusals._Refusal, "_struct", counted)
    rules = {"action": "deny", "topic": "secret-*"}, {"action": "deny", "group": "secret-*"}
    talk = Sliced(*rules)
    ask = request(key, version, 1, body)
    talk.client(ask)
    assert max(Counter(made).values()) <= policy_refusals._SLICE_STRUCTS + 1
    assert max(talk.judged) <= SLICE_NAMES and not talk.requests() and not talk.faults
    kind = "group" if key != 32 and "groupId" not in body else "topic"
    denied = {(kind, name): CODES[kind] for name in NAMES if name.startswith("secret")}
    (_, first), *more = denied
    why = f"{kind} {first}: rule {2 if kind == 'group' else 1} denies it; {len(more):,} more denied"
    text = f"{policy_refusals.api_name(key)} was refused by kproxy: {why}"
    expected = codec.at_once(policy_refusals.refusal(key, version, 1, codec.decode_request(ask[4:])[1], denied, text))
    assert talk.sent[CLIENT] == expected[0]
    assert sum(talk.refusals.values()) == 1
    assert talk.session._interest.held._held_bytes == 0


def test_a_metadata_request_of_many_names_and_its_response_are_edited_in_slices():
    talk = Sliced({"action": "deny", "topic": "secret-*"})
    talk.client(request(METADATA, 9, 1, {"topics": [{"name": name} for name in NAMES]}))
    (asked,) = talk.requests()
    orders = [name for name in NAMES if name.startswith("orders")]
    assert [topic["name"] for topic in codec.decode_request(asked)[1]["topics"]] == orders
    came = {"topics": [{"name": name, "partitions": []} for name in orders], "brokers": []}
    calls = talk.calls
    talk.broker(response(METADATA, 9, 1, came))
    assert talk.calls - calls > 20  # turns for other connections
    topics = talk.answer(METADATA, 9)["topics"]
    assert {topic["name"]: topic["errorCode"] for topic in topics} == {
        name: 0 if name.startswith("orders") else TOPIC for name in NAMES
    }
    assert max(talk.judged) <= SLICE_NAMES


def test_a_list_of_many_names_is_filtered_in_slices():
    talk = Sliced({"action": "deny", "group": "secret-*"}, filter_lists=True)
    talk.client(request(LIST_GROUPS, 4, 1, {}))
    came = {"groups": [{"groupId": name, "protocolType": "consumer", "groupState": "Stable"} for name in NAMES]}
    talk.broker(response(LIST_GROUPS, 4, 1, came))
    assert [group["groupId"] for group in talk.answer(LIST_GROUPS, 4)["groups"]] == [
        name for name in NAMES if name.startswith("orders")
    ]
    assert 0 < max(talk.judged) <= policy_lists._SLICE_SPANS and sum(talk.judged) >= len(NAMES)


def test_the_configs_of_many_new_topics_are_hidden_in_full_slices():
    talk = Sliced({"action": "deny", "api": "DescribeConfigs", "topic": "secret-*"}, {"action": "allow"})
    topics = [{"name": name, "numPartitions": 1, "replicationFactor": 1} for name in NAMES]
    talk.client(request(CREATE_TOPICS, 5, 1, {"topics": topics}))
    talk.judged = [0]
    talk.broker(response(CREATE_TOPICS, 5, 1, {"topics": [{**topic, "configs": []} for topic in topics]}))
    shown = {topic["name"]: topic["numPartitions"] for topic in talk.answer(CREATE_TOPICS, 5)["topics"]}
    assert shown == {name: 1 if name.startswith("orders") else -1 for name in NAMES}
    assert max(talk.judged) == policy_lists._SLICE_SPANS and sum(talk.judged) == len(NAMES)

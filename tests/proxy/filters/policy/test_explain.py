"""`explain` predicts how a listener decides a request."""

import random
from collections import Counter

import pytest

from kproxy.errors import ConfigError
from kproxy.protocol.schema import schema
from kproxy.proxy.filters.policy.explain import explain
from kproxy.proxy.filters.policy.resources import reader
from kproxy.wire.frames import REQUEST_HEAD_BYTES
from tests.proxy.filters.policy.policies import Decided, cluster, random_body
from tests.proxy.filters.policy.test_policy import REQUESTS, outcome, random_rule
from tests.wire.playbook import sized

RULES = (
    {"action": "deny", "topic": "secret-*"},
    {"action": "allow", "api": "read", "principal": "User:alice"},
    {"action": "allow", "api": "Produce", "topic": "orders", "address": "10.0.0.0/8"},
)


def explained(api, **request):
    return [str(one) for one in explain(cluster(*RULES), api=api, **request)]


def test_each_name_of_a_request_has_its_line():
    assert explained("Produce", topics=["orders", "secret-1", "x"], address="10.1.1.1") == [
        "topic orders: allowed, rule 3 allows it",
        "topic secret-1: denied, rule 1 denies it",
        "topic x: denied, no rule matches, and the default is to deny",
    ]
    assert explained("Produce", topics=["orders"]) == [
        "topic orders: denied, no rule matches, and the default is to deny"
    ]
    assert explained("JoinGroup", groups=["g"], principal="User:alice") == ["group g: allowed, rule 2 allows it"]
    assert explained("ListGroups") == [
        "the request for a list, which leaves out what is denied: denied, no rule matches, and the default is to deny"
    ]
    assert explained("ApiVersions") == ["the request, which names nothing: allowed, every client may"]


@pytest.mark.parametrize("seed", range(2))
def test_explain_agrees_with_the_decision_of_a_listener(seed):
    rng = random.Random(seed)
    tally = Counter()
    for layout in rng.sample(REQUESTS, len(REQUESTS)):
        api = schema().apis[layout.api_key].name
        rules = [random_rule(rng, api) for _ in range(rng.choice((1, 2, 3, 4)))]
        settings = {"policy_default": rng.choice((None, "allow", "deny")), "read_only": rng.random() < 0.1}
        frame = sized(layout.encode(random_body(layout, rng), "c"))
        names = reader(layout.api_key, layout.version)(frame, REQUEST_HEAD_BYTES, len(frame))
        named = {"topics": names.topic, "groups": names.group, "transactional_ids": names.transactional_id}
        if (
            layout.message.header_version(layout.version) == 0
            or names.topic_id
            or names.expression
            or names.from_broker
        ):
            continue  # `explain` has no options for these
        if api == "StreamsGroupHeartbeat" and names.also:
            continue  # `explain` has no option for topics that a broker would create
        if names.cluster and (any(named.values()) or api in ("FindCoordinator", "InitProducerId")):
            continue
        if not names.cluster and api not in ("ListGroups", "ListTransactions"):  # empty lists, which no client sends
            all_of_none = names.all_of is None and not names.topic
            if all_of_none and api in (
                *("OffsetFetch", "DescribeShareGroupOffsets", "ElectLeaders", "DescribeConfigs", "AlterConfigs"),
                "IncrementalAlterConfigs",
            ):
                continue
        who = {"principal": rng.choice(("User:alice", "User:bob")), "address": "10.1.2.3"}
        talk = Decided(*rules, **who, **settings).client(frame)
        passes = outcome(talk, frame[4:]) == "forwarded" or not talk.refusals
        explanations = explain(
            cluster(*rules, **settings), api=api, version=layout.version, client_id="c", **named, **who
        )
        assert all(one.verdict.allowed for one in explanations) == passes, (
            layout,
            rules,
            settings,
            names.topic,
            explanations,
        )
        tally[passes] += 1
    assert tally[True] > 100 and tally[False] > 100, tally


def test_explain_describes_requests_without_names():
    rules = ({"action": "deny", "topic": "secret-*"}, {"action": "allow", "topic": "*", "group": "*"})

    def of(api, **request):
        return [str(one) for one in explain(cluster(*rules), api=api, **request)]

    assert of("ElectLeaders") == ["the request for all partitions: denied, rule 1 denies it"]
    assert of("DescribeConfigs") == ["the settings of brokers: denied, no rule matches, and the default is to deny"]
    assert of("OffsetFetch", groups=["g"]) == [
        "group g: allowed, rule 2 allows it",
        "all topics of it, which leaves out what is denied: allowed, rule 2 allows it",
    ]


def test_explain_reports_an_unknown_version_or_api():
    assert "kproxy does not read this version" in explained("Produce", version=99)[0]
    assert "kproxy does not know the API" in str(explain(cluster({"action": "allow"}), api="9999")[0])
    (one,) = explain(cluster(read_only=True), api="Produce", topics=["t"])
    assert str(one) == "topic t: denied, the listener is read-only"


def test_an_impossible_request_gets_a_hint():
    with pytest.raises(ConfigError) as caught:
        explained("produce")
    assert "did you mean Produce?" in str(caught.value.faults)
    with pytest.raises(ConfigError) as caught:
        explained("Heartbeat", topics=["t"])
    assert caught.value.faults[0][0] == "--topic"


def near(api, **request):
    return [line for one in explain(cluster(*RULES), api=api, **request) for line in one.near]


def test_explain_names_a_rule_that_fails_to_allow_by_one_key():
    assert near("Produce", topics=["x"], address="10.1.1.1") == ["rule 3 would allow it, but its topic is orders"]
    assert near("Produce", topics=["orders"]) == ["rule 3 would allow it, but its address leaves 127.0.0.1 out"]
    assert near("JoinGroup", groups=["g"]) == ["rule 2 would allow it, but its principal is User:alice"]
    assert near("CreateTopics", topics=["orders"], address="10.1.1.1") == [
        "rule 3 would allow it, but its api leaves CreateTopics out"
    ]
    assert near("Produce", topics=["x"]) == [], "two keys differ"
    assert near("Produce", topics=["orders", "secret-1"], address="10.1.1.1") == [], "rules decided"


def test_explain_names_such_rules_for_lists_too():
    rules = ({"action": "allow", "api": "Fetch", "topic": "orders"}, {"action": "allow", "api": "read", "group": "g"})
    (topics,) = explain(cluster(*rules), api="Metadata")
    assert topics.near == ("rule 1 would allow it, but its api leaves Metadata out",)
    (groups,) = explain(cluster(*rules), api="ListGroups")
    assert groups.near == ("rule 2 would allow it, but its api leaves ListGroups out",)


def test_explain_names_a_rule_about_other_kinds_of_names_with_the_difference():
    rule = {"action": "allow", "principal": "User:alice", "topic": "orders-*"}

    def near_rules(api, **request):
        (one,) = explain(cluster(rule), api=api, principal="User:alice", **request)
        return one.near

    assert near_rules("JoinGroup", groups=["g"]) == ("rule 1 would allow it, but it has no group",)
    (line,) = near_rules("GetTelemetrySubscriptions")
    assert line == "rule 1 would allow it, but it is about names (topic), and this needs a rule without them"


def test_explain_names_rules_for_other_principals_if_the_client_has_none():
    rules = (
        {"action": "allow", "principal": "User:alice", "topic": "orders"},
        {"action": "allow", "principal": "User:ops"},
    )

    def near_rules(principal):
        (one,) = explain(cluster(*rules), api="Produce", topics=["x"], principal=principal)
        return one.near

    assert near_rules("User:alice") == ("rule 1 would allow it, but its topic is orders",)
    assert near_rules("User:bob") == ("rule 2 would allow it, but its principal is User:ops",)

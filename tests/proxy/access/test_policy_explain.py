"""What `explain` says is what a request meets."""

import pytest

from kproxy.errors import ConfigError
from kproxy.proxy.access.policy_explain import explain
from tests.proxy.access.policies import cluster

RULES = (
    {"action": "deny", "topic": "secret-*"},
    {"action": "allow", "api": "read", "principal": "User:alice"},
    {"action": "allow", "api": "Produce", "topic": "orders", "address": "10.0.0.0/8"},
)


def said(api, **request):
    return [str(one) for one in explain(cluster(*RULES), api=api, **request)]


def test_each_thing_that_a_request_names_has_its_line():
    assert said("Produce", topics=["orders", "secret-1", "x"], address="10.1.1.1") == [
        "topic orders: allowed, rule 3 allows it",
        "topic secret-1: denied, rule 1 denies it",
        "topic x: denied, no rule matches, and the default is to deny",
    ]
    assert said("Produce", topics=["orders"]) == ["topic orders: denied, no rule matches, and the default is to deny"]
    assert said("JoinGroup", groups=["g"], principal="User:alice") == ["group g: allowed, rule 2 allows it"]
    assert said("ListGroups") == [
        "the request for a list, which leaves out what is denied: denied, no rule matches, and the default is to deny"
    ]
    assert said("ApiVersions") == ["the request, which names nothing: allowed, every client may"]


def test_what_cannot_be_read_says_so():
    assert "kproxy does not read this version" in said("Produce", version=99)[0]
    assert "kproxy does not know the API" in str(explain(cluster({"action": "allow"}), api="9999")[0])
    (one,) = explain(cluster(read_only=True), api="Produce", topics=["t"])
    assert str(one) == "topic t: denied, the listener is read-only"


def test_a_request_that_cannot_be_has_a_hint():
    with pytest.raises(ConfigError) as caught:
        said("produce")
    assert "did you mean Produce?" in str(caught.value.faults)
    with pytest.raises(ConfigError) as caught:
        said("Heartbeat", topics=["t"])
    assert caught.value.faults[0][0] == "--topic"

"""Idle rules: policy rules that never decide anything, similar rules that do, and globs that include other globs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.filters.policy.idle import _matches_all_of, idle_rules
from kproxy.proxy.filters.policy.policy import Patterns

USERS = {"authentication": {"mechanisms": ["PLAIN"], "users_file": "/users"}}
ALLOW, DENY = {"action": "allow"}, {"action": "deny"}


def found(*rules, **settings):
    """The places of a policy's idle rules, with their messages."""
    cluster = {"listen": "127.0.0.1:9092", "bootstrap": ["k:9092"], "policy": list(rules), **settings}
    return list(idle_rules(Cluster.model_validate(cluster)))


def test_a_rule_for_more_apis_than_the_rule_before_it_is_not_idle():
    assert not found(ALLOW | {"api": "Fetch"}, DENY | {"api": ["Fetch", "Produce"]})
    assert not found(ALLOW | {"api": "Fetch"}, DENY)


@pytest.mark.parametrize(
    ("rules", "settings", "place", "why"),
    [
        ([DENY | {"principal": "User:alice"}], {}, "policy[0].principal", r"nothing says who a client is.*authentic"),
        ([DENY | {"api": "Produce", "group": "g"}], {}, "policy[0].group", "no request of Produce names a group"),
        (
            [DENY | {"api": "Fetch", "version": "0-4", "transactional_id": "t"}],
            {},
            "policy[0].transactional_id",
            "Fetch",
        ),
        (
            [ALLOW | {"api": ["ElectLeaders", "broker"], "topic": "t"}],
            {},
            "policy[0].topic",
            "right on the whole cluster",
        ),
        ([DENY | {"api": "ApiVersions"}], {}, "policy[0].api", "always pass"),
        ([ALLOW | {"api": "Produce"}], {"read_only": True}, "policy[0].api", "read_only denies"),
        ([ALLOW, DENY | {"topic": "secret"}], {}, "policy[1]", r"policy\[0\] comes before it and allows all"),
        ([DENY | {"topic": "a*"}, ALLOW | {"topic": ["abc", "a-*"]}], {}, "policy[1]", "denies all that it allows"),
        (
            [ALLOW | {"api": ["Fetch", "Produce"]}, DENY | {"api": "Fetch"}],
            {},
            "policy[1]",
            "allows all that it denies",
        ),
        (
            [ALLOW | {"address": "10.0.0.0/8", "version": "0-8"}, DENY | {"address": "10.1.0.0/16", "version": "3"}],
            {},
            "policy[1]",
            "allows all that it denies",
        ),
        (
            [ALLOW | {"principal": "User:*"}, DENY | {"principal": "User:eve", "client_id": "x", "topic": "t"}],
            USERS,
            "policy[1]",
            "comes before it",
        ),
    ],
)
def test_a_rule_that_never_decides_is_reported_with_its_correction(rules, settings, place, why):
    ((where, text),) = found(*rules, **settings)
    assert where == place
    assert re.search(why, text), text


@pytest.mark.parametrize(
    ("rules", "settings"),
    [
        ([DENY | {"principal": "User:alice"}], USERS),
        ([DENY | {"principal": "User:*"}], {}),
        ([DENY | {"api": ["Produce", "JoinGroup"], "group": "g"}], {}),
        ([DENY | {"api": "Envelope", "topic": "t"}], {}),  # it denies Envelope, which kproxy does not read
        ([DENY | {"api": "999", "topic": "t"}], {}),
        ([ALLOW | {"api": ["describe", "broker"], "topic": "t"}], {}),
        ([ALLOW | {"topic": "*"}, DENY | {"api": "ElectLeaders", "topic": "t"}], {}),  # for all topics
        ([DENY | {"api": "Produce", "version": "900-", "group": "g"}], {}),  # a version of a later Kafka
        ([ALLOW | {"api": ["Produce", "Fetch"]}], {"read_only": True}),
        ([DENY | {"topic": "secret"}, ALLOW | {"topic": "*"}], {}),
        ([ALLOW | {"topic": "a"}, DENY | {"topic": ["a", "b"]}], {}),
        ([ALLOW | {"topic": "*"}, DENY | {"topic": "a", "group": "g"}], {}),
        ([ALLOW | {"topic": "*"}, DENY], {}),
        ([ALLOW | {"api": "read"}, DENY | {"topic": "secret"}], {}),
        ([ALLOW | {"topic": "a*"}, ALLOW | {"topic": "abc"}], {}),  # redundant: both rules allow
        ([ALLOW | {"client_id": "a"}, DENY], {}),
        ([ALLOW | {"address": "10.1.0.0/16"}, DENY | {"address": ["10.1.2.3", "::1"]}], {}),
    ],
)
def test_a_rule_that_decides_something_is_not_idle(rules, settings):
    assert found(*rules, **settings) == []


@pytest.mark.parametrize(
    ("wider", "pattern", "is_wider"),
    [
        ("*", "?", True),
        ("?", "*", False),
        ("a*", "a?*", True),
        ("a?", "a*", False),
        ("?*", "*?", True),
        ("?*", "*", False),
        ("*", r"\*", True),
        (r"\*", "*", False),
        (r"\?", "?", False),
    ],
)
def test_a_star_includes_a_question_mark_and_both_include_the_escaped_character(wider, pattern, is_wider):
    assert _matches_all_of(Patterns([wider]), pattern) is is_wider


PATTERNS = st.text("ab*?\\", max_size=6).filter(lambda text: not re.search(r"(?<!\\)(\\\\)*\\$", text))


@given(PATTERNS, PATTERNS, st.lists(st.text("ab*?", max_size=8), min_size=20))
def test_a_glob_that_includes_another_matches_all_its_names(wider, pattern, names):
    if _matches_all_of(Patterns([wider]), pattern):
        assert not [name for name in names if Patterns([pattern]).match(name) and not Patterns([wider]).match(name)]

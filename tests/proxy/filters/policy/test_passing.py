"""A request passes by its deciding fields alone exactly if it passes when the whole request is decided."""

import random

import pytest

from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, OFFSET_COMMIT, PRODUCE
from kproxy.wire.events import Exchange
from kproxy.wire.interest import Interest
from tests.protocol.messages import layouts
from tests.proxy.filters.policy.policies import Decided, random_body

REQUESTS = [layout for layout in layouts() if layout.side == "request"]
PLANS = Interest()
NAMED = {
    PRODUCE: {"transactionalId", "topicData.name", "topicData.topicId"},
    HEARTBEAT: {"groupId"},
    OFFSET_COMMIT: {"groupId", "topics.name", "topics.topicId"},
}


def asked(layout, rng):
    """A request of that layout with random contents, and its exchange."""
    body = random_body(layout, rng)
    encoded = layout.encode(body)
    plan = PLANS.plan(layout.api_key << 16 | layout.version)
    return len(encoded).to_bytes(4, "big") + encoded, lambda: Exchange(plan, 7, 0, 0, len(encoded) + 4, 0)


@pytest.mark.parametrize("rules, settings, by_names", [
    ([{"action": "allow"}], {}, ()),
    ([{"action": "deny", "topic": "secret-*"}, {"action": "deny", "group": "x:*"}], {}, NAMED),
    ([{"action": "allow", "topic": ["a", "o*"], "group": "a*"}, {"action": "deny"}], {}, NAMED),
    ([{"action": "deny", "topic": "secret-*"}], {"audits": True}, (PRODUCE, OFFSET_COMMIT)),
    ([{"action": "deny", "topic": "secret-*"}], {"filter_lists": True}, (PRODUCE, OFFSET_COMMIT)),
    ([{"action": "deny", "client_id": "other"}], {}, ()),
], ids=["all", "some", "only some", "audited", "filtered", "of others"])  # fmt: skip
def test_a_request_that_passes_by_its_deciding_fields_is_forwarded_unchanged(rules, settings, by_names):
    """The deciding fields contain the names that rules are about: there are none if the rules allow the whole API."""
    rng = random.Random(str(rules))
    named, always = set(), set()
    for layout in REQUESTS * 2:
        frame, exchange = asked(layout, rng)
        authorizer = Decided(*rules, **settings).authorizer
        fields = authorizer.deciding_fields(exchange(), frame)
        if fields is None:
            continue
        is_forwarded = authorizer.decide(exchange(), frame) is None
        assert authorizer.passes(exchange(), frame) == is_forwarded, layout
        if fields:
            assert fields <= NAMED[layout.api_key]
            named.add(layout.api_key)
        else:
            assert is_forwarded, layout
            always.add(layout.api_key)
    assert named == set(by_names)
    assert always >= {API_VERSIONS, *NAMED} - named and named.isdisjoint(always)


@pytest.mark.parametrize("key", [*range(-1, 95), 9999])
def test_a_policy_without_rules_needs_no_decision(key):
    for version in (0, 1, 5, 99):
        policy = Decided().policy
        assert not policy.authorizes(key, version) and policy.is_empty
        audits = Decided(audits=True).policy
        assert audits.authorizes(key, version) == audits.is_audited(key)


@pytest.mark.parametrize("rules, settings", [
    ([{"action": "deny", "topic": "secret-*"}], {"filter_lists": True}),
    ([{"action": "allow", "api": "read"}], {}),
    ([{"action": "deny", "api": ["admin", "Fetch"]}, {"action": "allow"}], {}),
    ([], {"read_only": True}),
], ids=["names", "reads", "no admin", "read only"])  # fmt: skip
def test_a_request_without_a_decision_would_be_forwarded(rules, settings):
    rng = random.Random(str(rules))
    some = set()
    for layout in REQUESTS:
        frame, exchange = asked(layout, rng)
        talk = Decided(*rules, **settings)
        needed = talk.policy.authorizes(layout.api_key, layout.version)
        some.add(needed)
        assert needed or talk.authorizer.decide(exchange(), frame) is None, layout
    assert some == {True, False}

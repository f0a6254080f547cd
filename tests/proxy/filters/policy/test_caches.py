"""The caches of a policy are bounded, and their size changes no decision."""

import random
from typing import Any

import pytest

from kproxy.proxy.filters.policy import authorizer as authorizers
from kproxy.proxy.filters.policy import policy as policies
from kproxy.proxy.filters.policy import topic_names
from kproxy.wire.decisions.authorizer import Later
from kproxy.wire.events import Exchange
from kproxy.wire.interest import Interest
from tests.protocol.messages import layouts
from tests.proxy.filters.policy.policies import IDS, Decided, random_body
from tests.wire.playbook import foreign_request

REQUESTS = [layout for layout in layouts() if layout.side == "request"]
PLANS = Interest()
RULES = (
    {"action": "deny", "client_id": "a*", "topic": "secret-*"},
    {"action": "deny", "client_id": "?", "group": "x:*"},
    {"action": "allow", "client_id": ["b", "c*"], "topic": ["orders*", "a"]},
    {"action": "deny", "client_id": ["c1", "c2"]},
)
CLIENTS = ("a", "a1", "b", "c1", "c2", "c3", "d", "", "x" * policies.MAX_NAME, "x" * (policies.MAX_NAME + 1))
SMALL = {
    policies: ("MAX_REMEMBERED", "MAX_REMEMBERED_BYTES", "MAX_API_RULES", "MAX_CLEARANCES", "MAX_CLIENT_IDS"),
    authorizers: ("MAX_TREATMENTS",),
}


def asked(number: int) -> list[tuple[Any, bytes]]:
    """Requests (plan, frame) of random APIs with random contents."""
    rng = random.Random(number)
    found = []
    for layout in rng.choices(REQUESTS, k=400):
        frame = layout.encode(random_body(layout, rng))
        size = 10 + max(0, int.from_bytes(frame[8:10], "big", signed=True))
        client = rng.choice(CLIENTS).encode()
        if (layout.api_key, layout.version) != (7, 0):  # the one request without a client id
            frame = frame[:8] + len(client).to_bytes(2, "big") + client + frame[size:]
        plan = PLANS.plan(layout.api_key << 16 | layout.version)
        found.append((plan, len(frame).to_bytes(4, "big") + frame))
    return found


def decisions(number: int) -> list[object]:
    talk = Decided(*RULES)
    talk.names.learn({each: f"orders-{each.int}" for each in IDS[1:3]})
    found: list[object] = []
    for plan, frame in asked(number):
        exchange = Exchange(plan, 7, 0, 0, len(frame), 0)
        decision = talk.authorizer.decide(exchange, frame)
        found.append((decision.__class__ if isinstance(decision, Later) else decision, exchange.client_id))
    return found


@pytest.mark.parametrize("number", range(5))
def test_small_caches_change_no_decision(number, monkeypatch):
    expected = decisions(number)
    assert len({str(each)[:20] for each in expected}) > 3
    for module, names in SMALL.items():
        for name in names:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, 1)
                assert decisions(number) == expected, name
            monkeypatch.setattr(module, name, 2)
    assert decisions(number) == expected  # all caches small at once


@pytest.mark.parametrize("most", [1, 3])
def test_each_cache_stops_growing_at_its_limit(most, monkeypatch):
    for module, name in ((policies, "MAX_REMEMBERED"), (policies, "MAX_CLEARANCES"), (authorizers, "MAX_TREATMENTS")):
        monkeypatch.setattr(module, name, most)
    monkeypatch.setattr(topic_names, "MAX_NAMES", most)
    monkeypatch.setattr(topic_names, "MAX_UNKNOWN", most)
    talk = Decided(*RULES)
    sizes: dict[str, set[int]] = {}
    for plan, frame in asked(1):
        talk.authorizer.decide(Exchange(plan, 7, 0, 0, len(frame), 0), frame)
        for name, cache in (
            ("matching", talk.policy._matching),
            ("clearances", talk.policy._clearances),
            ("treatments", talk.authorizer._treatments),
            ("unknown ids", talk.names._unknown),
        ):
            sizes.setdefault(name, set()).add(len(cache))
    assert {name: max(each) for name, each in sizes.items()} == dict.fromkeys(sizes, most)
    assert talk.names.unknown() and not talk.names.unknown()
    for each in IDS:
        talk.names.learn({each: "t"})
    assert [*talk.names.names] == [*IDS[-most:]]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_bytes_of_remembered_names_are_bounded(more, monkeypatch):
    """Names are dropped one by one, the oldest first, when the next one would exceed the bound."""
    names = [f"{number:02}" for number in range(30)]
    measured = Decided(*RULES).policy
    measured.matching("topic", names[0])
    each = measured._matching_bytes
    monkeypatch.setattr(policies, "MAX_REMEMBERED_BYTES", 10 * each + more)
    policy = Decided(*RULES).policy
    for name in names:
        policy.matching("topic", name)
    kept = 9 if more < 0 else 10
    assert [name for _, name in policy._matching] == names[-kept:] and policy._matching_bytes == kept * each


@pytest.mark.parametrize("length", [-1, 0, 1, 3, 1023, 1024, 1025])
@pytest.mark.parametrize("more", [-2, -1, 0, 1])
def test_a_client_id_is_read_only_if_all_its_bytes_are_there(length, more):
    """A request of an unknown API may be a token without a header: then it has no client id."""
    text = bytes(97 + at % 26 for at in range(max(0, length + more)))
    frame = foreign_request(20_000, 0, 1, length.to_bytes(2, "big", signed=True) + text)
    exchange = Exchange(PLANS.plan(20_000 << 16), 1, 0, 0, len(frame), 0)
    talk = Decided(*RULES)
    for _ in range(2):
        talk.authorizer.decide(exchange, frame)
        has_one = 0 <= length <= len(text)
        assert exchange.client_id == (text[:length][:1024].decode() if has_one else None)

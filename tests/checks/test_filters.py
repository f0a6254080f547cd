"""The list of filters (`kproxy check --filters`) is that of a running kproxy."""

import random
from uuid import UUID

import pytest

from kproxy.checks.filters import filters_of
from kproxy.protocol.apis import CREATE_TOPICS, METADATA, SHARE_FETCH
from kproxy.protocol.schema import schema
from kproxy.proxy.config.login import Login
from kproxy.proxy.config.settings import Config
from tests.proxy.filters.policy.policies import Decided, cluster, random_body
from tests.proxy.filters.policy.test_policy import REQUESTS, random_rule
from tests.wire.playbook import request

DENIED = {"action": "deny", "topic": "secret-*"}


def edited(rules, **settings):
    """The APIs whose answers the policy edits, according to the list; with versions unless it means all."""
    listed, _ = filters_of(Config(cluster=[cluster()]), cluster(*rules, **settings))
    return next((each.answers.names for each in listed if each.name == "policy"), ())


def names(api, version, listed):
    found = [name.partition(" ")[2] for name in listed if name.split()[0] == api]
    return any(
        not spans or any(int(span.split("-")[0]) <= version <= int(span.split("-")[-1]) for span in spans.split(","))
        for spans in found
    )


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        (METADATA, 12, {"topics": [{"name": "a"}, {"name": "secret-1"}]}),
        (CREATE_TOPICS, 7, {"topics": [{"name": "a"}]}),
        (SHARE_FETCH, 1, {"groupId": "g", "memberId": "m", "topics": [{"topicId": UUID(int=1)}]}),
    ],
)
def test_answers_that_the_policy_edits_without_filtered_lists_are_listed(key, version, body):
    talk = Decided(DENIED, {"action": "allow"}, filter_lists=False)
    talk.names.learn({UUID(int=1): "a"})
    talk.client(request(key, version, 7, body, "c"))
    assert talk.session.pending[0].plan.is_edited
    assert names(schema().apis[key].name, version, edited([DENIED, {"action": "allow"}], filter_lists=False))


def test_a_policy_without_names_edits_no_answers():
    listed, _ = filters_of(Config(cluster=[cluster()]), cluster(read_only=True, filter_lists=True))
    assert (listed[0].does, listed[0].answers.names) == ("forwards, refuses or edits requests", ())


@pytest.mark.parametrize(("route", "answers"), [("ports", True), ("transparent", False)])
def test_logins_of_redirected_clients_are_the_brokers(route, answers, tmp_path):
    (tmp_path / "password").write_text("secret")
    login = Login(mechanism="PLAIN", username="kproxy", password_file=str(tmp_path / "password"))
    listed, _ = filters_of(Config(cluster=[cluster()]), cluster(route=route, login=login))
    assert ("logins" in {each.name for each in listed}) == answers


def test_every_answer_that_a_policy_holds_is_listed():
    rng = random.Random(14)
    held = set()
    for layout in rng.choices(REQUESTS, k=800):
        api = schema().apis[layout.api_key].name
        rules = [random_rule(rng, api) for _ in range(rng.choice((1, 2, 3)))]
        settings = {"policy_default": rng.choice((None, "allow", "deny")), "filter_lists": rng.random() < 0.5}
        frame = layout.encode(random_body(layout, rng), "c")
        talk = Decided(*rules, **settings)
        talk.client(len(frame).to_bytes(4) + frame)
        if any(each.plan.is_edited for each in talk.session.pending):
            held.add(api)
            assert names(api, layout.version, edited(rules, **settings)), (api, rules, settings)
    assert len(held) >= 5

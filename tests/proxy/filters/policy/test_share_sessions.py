"""Clients that may read some topics go on with no session of ShareFetch that they did not begin."""

from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import SHARE_ACKNOWLEDGE, SHARE_FETCH
from kproxy.protocol.schema import schema
from kproxy.proxy.filters.policy import share_sessions
from kproxy.wire.events import BROKER
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import request, response

NO_SECRETS = {"action": "deny", "topic": "secret-*"}
ORDERS, SECRET = UUID(int=7), UUID(int=8)
VERSIONS = [
    (key, version) for key in (SHARE_FETCH, SHARE_ACKNOWLEDGE) for version in schema().apis[key].request.versions
]


def ask(key, version, epoch, *topics, member="m", number=1):
    wanted = [{"topicId": topic, "partitions": []} for topic in topics]
    return request(
        key, version, number, {"groupId": "g", "memberId": member, "shareSessionEpoch": epoch, "topics": wanted}
    )


def judged():
    talk = Decided(NO_SECRETS)
    talk.names.learn({ORDERS: "orders", SECRET: "secret-1"})
    return talk


@pytest.mark.parametrize("cuts", [[], [20], range(1, 40, 3)])
@pytest.mark.parametrize(("key", "version"), VERSIONS)
def test_the_session_of_somebody_else_cannot_be_gone_on_with(key, version, cuts):
    talk = judged().client(ask(key, version, 5), cuts)  # names nothing: a broker would send what was named before
    assert talk.sent[BROKER] == b""
    assert talk.answer(key, version)["errorCode"] == 122 and not talk.faults


@pytest.mark.parametrize("version", schema().apis[SHARE_FETCH].request.versions)
def test_a_session_that_was_begun_here_goes_on_until_it_ends(version):
    talk = judged()
    dialogue = [
        ask(SHARE_FETCH, version, 0, ORDERS),
        ask(SHARE_FETCH, version, 1, number=2),
        ask(SHARE_ACKNOWLEDGE, version, 2, ORDERS, number=3),
        ask(SHARE_ACKNOWLEDGE, version, -1, number=4),
    ]
    talk.client(b"".join(dialogue))
    assert talk.sent[BROKER] == b"".join(dialogue)
    talk.client(ask(SHARE_FETCH, version, 5, number=5)).client(ask(SHARE_FETCH, version, 1, member="other", number=6))
    assert talk.sent[BROKER] == b"".join(dialogue)


@pytest.mark.parametrize(
    "epoch, goes_on", [(-(1 << 31), False), (-1, False), (0, True), (1, True), ((1 << 31) - 1, True)]
)
def test_an_epoch_below_0_ends_a_session_and_no_other_one_does(epoch, goes_on):
    """Also one that a broker refuses: whoever sent it goes on with the session that it has."""
    talk = judged().client(ask(SHARE_FETCH, 1, 0, ORDERS))
    begun = talk.sent[BROKER] + ask(SHARE_ACKNOWLEDGE, 1, epoch, number=2)
    talk.client(ask(SHARE_ACKNOWLEDGE, 1, epoch, number=2))
    assert talk.sent[BROKER] == begun
    last = ask(SHARE_FETCH, 1, 1, number=3)
    assert talk.client(last).sent[BROKER] == begun + (last if goes_on else b"")


@pytest.mark.parametrize("size", [1, 20_000])
@pytest.mark.parametrize("version", schema().apis[SHARE_FETCH].request.versions)
def test_a_session_that_somebody_else_began_anew_brings_no_records_of_a_denied_topic(version, size):
    """The attack: begin a session in the name of another member, wait until that one begins it anew, go on with it."""
    talk = judged()
    records = [
        {"topicId": topic, "partitions": [{"partitionIndex": 0, "records": b"x" * size}]}
        for topic in (ORDERS, SECRET, UUID(int=9))  # the last one has no name that is known
    ]
    for epoch in (0, 1):
        talk.client(ask(SHARE_FETCH, version, epoch, *[ORDERS] * (not epoch), number=epoch))
        talk.broker(response(SHARE_FETCH, version, epoch, {"responses": records}))
    assert len(talk.requests()) == 2 and not talk.faults
    for answer in talk.answers():
        assert codec.decode_response(answer, SHARE_FETCH, version)[1]["responses"][0]["topicId"] == ORDERS
        assert answer.count(b"x" * size) == 1


def test_what_is_denied_begins_none():
    talk = judged().client(ask(SHARE_FETCH, 1, 0, SECRET))
    assert talk.sent[BROKER] == b""
    talk.client(ask(SHARE_FETCH, 1, 1, number=2))
    assert talk.sent[BROKER] == b""


def test_who_may_read_no_topic_goes_on_with_no_session_of_a_group_that_it_may_join():
    for rules in ({"action": "allow", "group": "g"},), (NO_SECRETS | {"topic": "*"}, {"action": "allow", "group": "g"}):
        talk = Decided(*rules).client(ask(SHARE_FETCH, 1, 5))
        assert talk.sent[BROKER] == b"" and talk.answer(SHARE_FETCH, 1)["errorCode"] == 122


def test_few_sessions_are_remembered(monkeypatch):
    monkeypatch.setattr(share_sessions, "MOST", 2)
    talk = judged()
    begun = b"".join(ask(SHARE_FETCH, 1, 0, ORDERS, member=name, number=at) for at, name in enumerate("abc"))
    talk.client(begun)
    goes_on = ask(SHARE_FETCH, 1, 1, member="c", number=4)
    talk.client(ask(SHARE_FETCH, 1, 1, member="a", number=3)).client(goes_on)
    assert talk.sent[BROKER] == begun + goes_on


def test_sessions_stay_where_rules_do_not_tell_topics_apart():
    frame = ask(SHARE_FETCH, 1, 5)
    assert Decided({"action": "deny", "group": "other"}).client(frame).sent[BROKER] == frame


def test_what_a_connection_remembers_of_its_sessions_is_short():
    """A group and a member may have 32 KiB each."""
    talk = judged()
    for number in range(2 * share_sessions.MOST):
        talk.client(ask(SHARE_FETCH, 1, 0, ORDERS, member=f"{number}".ljust(30_000, "m")))
    begun = talk.authorizer._share_sessions._begun
    assert len(begun) == share_sessions.MOST and sum(map(len, begun)) == 32 * share_sessions.MOST

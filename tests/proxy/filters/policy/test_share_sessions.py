"""Clients that may read only some topics can continue only share sessions that they created."""

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
def test_a_client_cannot_continue_the_session_of_another_client(key, version, cuts):
    talk = judged().client(ask(key, version, 5), cuts)  # no topics: a broker would send those of the session
    assert talk.sent[BROKER] == b""
    assert talk.answer(key, version)["errorCode"] == 122 and not talk.faults


@pytest.mark.parametrize("version", schema().apis[SHARE_FETCH].request.versions)
def test_a_client_can_continue_its_own_session_until_it_is_closed(version):
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
def test_only_an_epoch_below_0_closes_a_session(epoch, goes_on):
    """An epoch of 0 in ShareAcknowledge, which a broker refuses, does not close it either."""
    talk = judged().client(ask(SHARE_FETCH, 1, 0, ORDERS))
    begun = talk.sent[BROKER] + ask(SHARE_ACKNOWLEDGE, 1, epoch, number=2)
    talk.client(ask(SHARE_ACKNOWLEDGE, 1, epoch, number=2))
    assert talk.sent[BROKER] == begun
    last = ask(SHARE_FETCH, 1, 1, number=3)
    assert talk.client(last).sent[BROKER] == begun + (last if goes_on else b"")


@pytest.mark.parametrize("size", [1, 20_000])
@pytest.mark.parametrize("version", schema().apis[SHARE_FETCH].request.versions)
def test_a_session_that_another_client_created_anew_delivers_no_records_of_denied_topics(version, size):
    """The attack: create a session with another member's id, wait until that member creates it anew, continue it."""
    talk = judged()
    records = [
        {"topicId": topic, "partitions": [{"partitionIndex": 0, "records": b"x" * size}]}
        for topic in (ORDERS, SECRET, UUID(int=9))  # the last id is unknown
    ]
    for epoch in (0, 1):
        talk.client(ask(SHARE_FETCH, version, epoch, *[ORDERS] * (not epoch), number=epoch))
        talk.broker(response(SHARE_FETCH, version, epoch, {"responses": records}))
    assert len(talk.requests()) == 2 and not talk.faults
    for answer in talk.answers():
        assert codec.decode_response(answer, SHARE_FETCH, version)[1]["responses"][0]["topicId"] == ORDERS
        assert answer.count(b"x" * size) == 1


def test_a_denied_request_creates_no_session():
    talk = judged().client(ask(SHARE_FETCH, 1, 0, SECRET))
    assert talk.sent[BROKER] == b""
    talk.client(ask(SHARE_FETCH, 1, 1, number=2))
    assert talk.sent[BROKER] == b""


def test_a_client_that_may_read_no_topic_cannot_continue_a_session_of_an_allowed_group():
    for rules in ({"action": "allow", "group": "g"},), (NO_SECRETS | {"topic": "*"}, {"action": "allow", "group": "g"}):
        talk = Decided(*rules).client(ask(SHARE_FETCH, 1, 5))
        assert talk.sent[BROKER] == b"" and talk.answer(SHARE_FETCH, 1)["errorCode"] == 122


def test_the_number_of_remembered_sessions_is_limited(monkeypatch):
    monkeypatch.setattr(share_sessions, "MOST", 2)
    talk = judged()
    begun = b"".join(ask(SHARE_FETCH, 1, 0, ORDERS, member=name, number=at) for at, name in enumerate("abc"))
    talk.client(begun)
    goes_on = ask(SHARE_FETCH, 1, 1, member="c", number=4)
    talk.client(ask(SHARE_FETCH, 1, 1, member="a", number=3)).client(goes_on)
    assert talk.sent[BROKER] == begun + goes_on


def test_sessions_are_allowed_if_the_rules_treat_all_topics_alike():
    frame = ask(SHARE_FETCH, 1, 5)
    assert Decided({"action": "deny", "group": "other"}).client(frame).sent[BROKER] == frame


def test_a_connection_remembers_its_sessions_in_32_bytes_each():
    """The ids of the group and the member may have 32 KiB each."""
    talk = judged()
    for number in range(2 * share_sessions.MOST):
        talk.client(ask(SHARE_FETCH, 1, 0, ORDERS, member=f"{number}".ljust(30_000, "m")))
    begun = talk.authorizer._share_sessions._begun
    assert len(begun) == share_sessions.MOST and sum(map(len, begun)) == 32 * share_sessions.MOST

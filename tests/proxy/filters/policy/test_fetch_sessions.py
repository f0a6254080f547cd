"""Clients that may read only some topics get no fetch sessions."""

from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import FETCH
from kproxy.protocol.schema import schema
from kproxy.wire.events import BROKER
from tests.proxy.filters.policy.policies import Decided
from tests.wire.playbook import request

NO_SECRETS = {"action": "deny", "topic": "secret-*"}
NEWEST = schema().apis[FETCH].request.versions[-1]
A_TOPIC_ID = UUID(int=7)


def fetch(version, session_id, epoch, *topics):
    named = {"partitions": [{"partition": 0}]}
    wanted = [{"topic": topic, "topicId": A_TOPIC_ID, **named} for topic in topics]
    return request(FETCH, version, 1, {"sessionId": session_id, "sessionEpoch": epoch, "topics": wanted})


def judged():
    talk = Decided(NO_SECRETS)
    talk.names.learn({A_TOPIC_ID: "orders"})
    return talk


@pytest.mark.parametrize("cuts", [[], [20], range(1, 60, 3)])
@pytest.mark.parametrize("version", [7, 12, 13, NEWEST])
def test_a_client_cannot_continue_the_session_of_another_client(version, cuts):
    talk = judged().client(fetch(version, 4711, 12), cuts)  # no topics: a broker would send those of the session
    assert talk.sent[BROKER] == b""
    answer = talk.answer(FETCH, version)
    assert (answer["errorCode"], answer["sessionId"], answer["responses"]) == (70, 0, [])
    again = fetch(version, 0, -1, "orders")
    talk.client(again, cuts)  # how clients react to the error
    assert talk.sent[BROKER] == again and not talk.faults


@pytest.mark.parametrize("epoch", [0, 1, 1 << 8, 1 << 16, 1 << 24, (1 << 31) - 1, -1, -2, -(1 << 31)])
@pytest.mark.parametrize("session_id", [0, 1, 1 << 24, -1])
def test_an_epoch_above_0_is_recognised_whichever_of_its_bytes_is_set(session_id, epoch):
    talk = judged().client(fetch(12, session_id, epoch, "orders"))
    assert talk.sent[BROKER] == (b"" if epoch > 0 else fetch(12, 0, -1, "orders"))


@pytest.mark.parametrize("session_id, epoch", [(0, 0), (4711, 0), (4711, -1)])
@pytest.mark.parametrize("version", [7, 12, 13, NEWEST])
def test_a_client_cannot_create_a_session_or_close_that_of_another_client(version, session_id, epoch):
    talk = judged().client(fetch(version, session_id, epoch, "orders"))
    assert talk.sent[BROKER] == fetch(version, 0, -1, "orders")
    assert codec.decode_request(talk.requests()[0])[1]["sessionId"] == 0


@pytest.mark.parametrize(
    "rules",
    [
        [],
        [{"action": "deny", "group": "g"}],
        [{"action": "deny", "topic": "secret-*", "principal": "User:bob"}],
        [{"action": "allow", "api": "read"}],
    ],
)
def test_sessions_are_allowed_if_the_rules_treat_all_topics_alike(rules):
    frame = fetch(12, 4711, 12)
    assert Decided(*rules).client(frame).sent[BROKER] == frame
    assert fetch(6, 0, -1, "orders") == judged().client(fetch(6, 0, -1, "orders")).sent[BROKER]  # no sessions

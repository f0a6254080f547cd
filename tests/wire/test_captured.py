"""Playbooks for a session over a capture: holes, and finding the next frame."""

from typing import Any

from kproxy.wire.captured import CapturedSession
from kproxy.wire.events import ANSWERED, BROKER, CLIENT
from kproxy.wire.interest import Interest
from tests.wire.playbook import Dialogue, request, response

PRODUCE, METADATA = 0, 3


def captured(**more: Any) -> Dialogue:
    return Dialogue(Interest(details=True), CapturedSession, **more)


def test_a_hole_in_a_body_of_known_size_costs_that_body_only() -> None:
    ask = request(PRODUCE, 9, 1, {"acks": 1, "topicData": [{"name": "t" * 200, "partitionData": []}]})
    talk = captured().client(ask[:60]).gap(CLIENT, 100).client(ask[160:] + request(12, 4, 2))
    talk.broker(response(PRODUCE, 9, 1) + response(12, 4, 2))
    assert [(e.correlation_id, e.outcome) for e in talk.exchanges] == [(1, ANSWERED), (2, ANSWERED)]


def test_after_a_gap_the_next_plausible_frame_is_found_and_the_lost_answers_are_named() -> None:
    talk = captured()
    for correlation_id in (1, 2, 3):
        talk.client(request(12, 4, correlation_id))
    answer = response(12, 4, 1)
    talk.gap(BROKER, len(answer) + 3).broker(response(12, 4, 2)[3:]).broker(response(12, 4, 3))
    assert [(e.correlation_id, e.outcome) for e in talk.exchanges] == [(3, ANSWERED)]
    assert [(u.exchange.correlation_id, u.exchange.outcome) for u in talk.unanswered] == [(1, "lost"), (2, "lost")]


def test_a_capture_that_starts_in_the_middle_never_invents_a_pairing() -> None:
    talk = captured(midstream=True)
    talk.broker(response(12, 4, 6)).client(request(METADATA, 9, 5)[20:] + b"\0" * 300)
    talk.client(request(12, 4, 7)).broker(response(12, 4, 7))
    assert [exchange.correlation_id for exchange in talk.exchanges if exchange.outcome == ANSWERED] == [7]

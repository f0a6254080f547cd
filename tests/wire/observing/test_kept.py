"""Kept frames: the same at any split, bounded, and released whenever an exchange ends."""

import random
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kproxy
from kproxy.insight.knowledge import APIS
from kproxy.protocol.apis import FETCH, HEARTBEAT, JOIN_GROUP, LEADER_AND_ISR, METADATA, OFFSET_COMMIT
from kproxy.wire.bodies import BATCHES, ERRORS, TOPICS
from kproxy.wire.decisions.authorizer import Answer
from kproxy.wire.events import ANSWERED, ANSWERED_BY_PROXY, BROKER, CLIENT, Exchange, Unanswered
from kproxy.wire.interest import Interest
from kproxy.wire.observing.kept import MAX_SMALL, Kept
from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.session import Session
from kproxy.wire.state import SMALL_BODY
from tests.wire.decisions.test_authorizer import Scripted
from tests.wire.playbook import Dialogue, request, response
from tests.wire.test_state import renamed

OWN = f"{Path(kproxy.__file__).parent}/"
KEPT = frozenset({METADATA, LEADER_AND_ISR, OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT})
ONLY_FAILED = frozenset({OFFSET_COMMIT, HEARTBEAT})


def kept(**more: Any) -> Kept:
    return Kept(KEPT, only_failed=ONLY_FAILED, **more)


def frames_kept(exchange: Exchange) -> tuple[bytes | None, bytes | None]:
    """Return the kept frames; for a `small` API the response alone decides whether both are kept."""
    is_left = exchange.response_frame is None and exchange.plan.quick_scan is not None
    return (None if is_left else exchange.request_frame), exchange.response_frame


def frames_of(talk: Dialogue) -> dict[int, tuple[bytes | None, bytes | None]]:
    """Return the kept frames by correlation id, without exchanges of APIs that are not kept."""
    return {each.correlation_id: frames_kept(each) for each in talk.exchanges if each.plan.kept is not None}


def exchange(number: int, random_: random.Random) -> tuple[bytes, bytes, bool]:
    """Return (request, response, whether the frames are kept) of a random API and size."""
    many = random_.choice([1, 1, 1, 5, 2500])
    topics = [{"name": f"topic-{each}", "partitions": [{"partitionIndex": 0}]} for each in range(many)]
    error = random_.choice([0, 0, 27])
    kind = random_.choice(("heartbeat", "join", "metadata", "commit", "leader", "fetch"))
    if kind == "heartbeat":
        ask = {"groupId": "g", "memberId": "m" * many}
        return request(HEARTBEAT, 4, number, ask), response(HEARTBEAT, 4, number, {"errorCode": error}), error != 0
    if kind == "join":
        ask = {"groupId": "g", "protocols": [{"name": "range", "metadata": bytes(50 * many)}]}
        members = {"errorCode": error, "members": [{"memberId": "m", "metadata": bytes(50 * many)}]}
        return request(JOIN_GROUP, 9, number, ask), response(JOIN_GROUP, 9, number, members), True
    if kind == "metadata":
        names = [{"name": each["name"]} for each in topics]
        body = {"brokers": [{"nodeId": 1, "host": "b", "port": 9092}], "topics": topics}
        return request(METADATA, 12, number, {"topics": names}), response(METADATA, 12, number, body), True
    if kind == "commit":
        done = [{"name": "t", "partitions": [{"partitionIndex": 0, "errorCode": error}]}]
        ask = {"groupId": "g", "topics": topics}
        return request(OFFSET_COMMIT, 8, number, ask), response(OFFSET_COMMIT, 8, number, {"topics": done}), error != 0
    if kind == "leader":
        states = [{"topicName": f"topic-{each}", "partitionStates": [{"partitionIndex": 0}]} for each in range(many)]
        ask = {"controllerId": 1, "topicStates": states}
        return request(LEADER_AND_ISR, 7, number, ask), response(LEADER_AND_ISR, 7, number, {}), True
    return request(FETCH, 12, number, {"maxWaitMs": 500}), response(FETCH, 12, number, {}), False


INTERESTS: list[dict[str, Any]] = [
    {},
    {"detail": TOPICS},
    {"details": True, "detail": BATCHES},
    {"rewrite": True},
    {"rewrite": True, "detail": TOPICS, "names": True},
]


def rewritten(exchange: Exchange, frame: memoryview) -> bytes | None:
    return renamed(exchange, frame) if exchange.plan.known and exchange.plan.carries_addresses else None


def talk_with(which: dict[str, Any], budget: Kept, kind: type = CapturedSession) -> Dialogue:
    if which.get("rewrite"):
        return Dialogue(Interest(**which, kept=budget), transform=rewritten)
    return Dialogue(Interest(**which, kept=budget), kind)


def cuts(random_: random.Random, length: int, most: int) -> list[int]:
    found, at = [], 0
    while (at := at + random_.randint(1, most)) < length and len(found) < 400:
        found.append(at)
    return found


def test_any_split_keeps_the_same_frames() -> None:
    seen: Counter[str] = Counter()

    @given(st.integers(0, 2**32), st.sampled_from([3, 60, 900, 30_000, 400_000]), st.sampled_from(INTERESTS))
    @settings(max_examples=100, deadline=None)
    def holds(seed: int, most: int, which: dict[str, Any]) -> None:
        random_ = random.Random(seed)
        budget = kept(small=random_.choice([(), (HEARTBEAT,)]))
        talk = talk_with(which, budget, random_.choice([CapturedSession, Session]))
        expected, number, too_large = {}, 0, 0
        for _ in range(random_.randint(1, 4)):
            asked, answered = b"", b""
            for _ in range(random_.randint(1, 5)):
                ask, reply, is_kept = exchange(number, random_)
                if ask[4:6] != FETCH.to_bytes(2):
                    is_long = HEARTBEAT in budget.small and ask[4:6] == HEARTBEAT.to_bytes(2) and len(ask) > MAX_SMALL
                    too_large += is_long
                    is_kept = is_kept and not is_long
                    expected[number] = (ask, reply) if is_kept else (None, None)
                    seen["large" if max(len(reply), len(ask)) > SMALL_BODY else "small"] += 1
                    seen["dropped"] += not is_kept
                asked, answered, number = asked + ask, answered + reply, number + 1
            talk.client(asked, cuts(random_, len(asked), most)).broker(answered, cuts(random_, len(answered), most))
        assert not talk.faults and len(talk.exchanges) == number
        assert frames_of(talk) == expected
        assert budget.held_bytes == 0 and budget.left_out == {"too_large": too_large, "too_many": 0, "gap": 0}

    holds()
    assert seen["large"] > 10 and seen["small"] > 100 and seen["dropped"] > 20, seen


def test_without_kept_an_exchange_has_no_frames() -> None:
    talk = Dialogue(Interest()).client(request(JOIN_GROUP, 9, 1)).broker(response(JOIN_GROUP, 9, 1))
    assert talk.exchanges[0].plan.kept is None and not hasattr(talk.exchanges[0], "request_frame")
    plan = Interest(kept=kept()).plan(FETCH << 16 | 12)
    assert plan.kept is None and plan.quick_scan is not None
    with pytest.raises(ValueError, match="Produce"):
        Kept({0})


def join(number: int, payload: int = 10, error: int = 0) -> tuple[bytes, bytes]:
    ask = {"groupId": "g", "protocols": [{"name": "range", "metadata": bytes(payload)}]}
    return request(JOIN_GROUP, 9, number, ask), response(JOIN_GROUP, 9, number, {"errorCode": error})


@pytest.mark.parametrize("chunks", [(), (20, 700)])
def test_a_frame_that_is_too_large_is_dropped_with_its_partner_and_counted(chunks: tuple[int, ...]) -> None:
    budget = kept(max_frame_bytes=1000)
    (large, short), (small, reply) = join(1, 2000), join(2)
    talk = Dialogue(Interest(kept=budget)).client(large + small, chunks).broker(short + reply)
    long = response(JOIN_GROUP, 9, 3, {"members": [{"memberId": "m", "metadata": bytes(2000)}]})
    talk.client(join(3)[0]).broker(long, chunks)
    assert frames_of(talk) == {1: (None, None), 2: (small, reply), 3: (None, None)}
    assert budget.left_out == {"too_large": 2, "too_many": 0, "gap": 0} and budget.held_bytes == 0
    assert talk.sent == {BROKER: large + small + join(3)[0], CLIENT: short + reply + long}


@pytest.mark.parametrize("chunks", [(), (20, 700)])
def test_all_sessions_together_keep_at_most_the_limit(chunks: tuple[int, ...]) -> None:
    ask, reply = join(1, 2000)
    budget = kept(limit_bytes=3 * len(ask) + 10)
    talks = [Dialogue(Interest(kept=budget)).client(ask, chunks) for _ in range(5)]
    assert budget.held_bytes == 3 * len(ask) and budget.left_out["too_many"] == 2
    for talk in talks:
        talk.broker(reply)
    assert budget.held_bytes == 0
    assert [frames_of(talk)[1] for talk in talks] == [(ask, reply)] * 3 + [(None, None)] * 2
    half = Dialogue(Interest(kept=budget)).client(ask[:1000])
    assert budget.held_bytes == 1000
    half.close(CLIENT).close(BROKER)
    assert budget.held_bytes == 0


def test_an_unanswered_request_has_its_frame_and_no_response() -> None:
    budget = kept()
    ask, _ = join(1)
    talk = Dialogue(Interest(kept=budget)).client(ask).close(BROKER)
    (event,) = talk.unanswered
    assert (event.exchange.request_frame, event.exchange.response_frame) == (ask, None) and budget.held_bytes == 0


@pytest.mark.parametrize("chunks", [(), (9, 30)])
def test_requests_that_the_authorizer_holds_are_kept_unchanged(chunks: tuple[int, ...]) -> None:
    asks, replies = zip(*(join(number) for number in range(3)), strict=True)
    own = response(JOIN_GROUP, 9, 1, {"errorCode": 30})
    budget = kept()
    interest = Interest(rewrite=True, authorizes=lambda key, version: True, kept=budget)
    talk = Dialogue(interest, transform=renamed, authorizer=Scripted(_1=Answer(own, (30,))))
    talk.client(b"".join(asks), chunks).broker(replies[0] + replies[2])
    assert [each.outcome for each in talk.exchanges] == [ANSWERED, ANSWERED_BY_PROXY, ANSWERED]
    assert frames_of(talk) == {0: (asks[0], replies[0]), 1: (asks[1], own), 2: (asks[2], replies[2])}
    assert budget.held_bytes == 0


def test_a_client_that_disconnects_within_a_held_request_releases_everything() -> None:
    asks = [join(number)[0] for number in range(2)]
    budget = kept()
    interest = Interest(rewrite=True, authorizes=lambda key, version: True, kept=budget)
    talk = Dialogue(interest, transform=renamed, authorizer=Scripted())
    talk.client(asks[0] + asks[1][:-1]).close(CLIENT).close(BROKER)
    assert [each.exchange.correlation_id for each in talk.unanswered] == [0, 1]
    assert talk.sent[BROKER] == asks[0]
    assert not talk.session.pending and budget.held_bytes == 0


def test_a_rewritten_or_edited_response_is_kept_as_the_broker_sent_it() -> None:
    reply = response(METADATA, 12, 1, {"brokers": [{"nodeId": 1, "host": "broker", "port": 9092}]})
    for chunks in ((), (30,)):
        interest = Interest(rewrite=True, authorizes=lambda key, version: True, kept=kept())
        authorizer = Scripted()
        authorizer.held, authorizer.edits = interest, response(METADATA, 12, 1)
        talk = Dialogue(interest, transform=renamed, authorizer=authorizer)
        talk.client(request(METADATA, 12, 1)).broker(reply, chunks)
        assert frames_of(talk)[1][1] == reply and talk.sent[CLIENT] == response(METADATA, 12, 1)


# --- captures --------------------------------------------------------------------------------------------------------


def captured(budget: Kept) -> Dialogue:
    return Dialogue(Interest(details=True, detail=TOPICS, kept=budget), CapturedSession)


def test_a_frame_with_a_gap_is_not_kept() -> None:
    for side in (CLIENT, BROKER):
        for until in (600, None):  # within a frame, or up to its end
            budget = kept()
            ask, _ = join(1, 1000)
            reply = response(JOIN_GROUP, 9, 1, {"members": [{"memberId": "m", "metadata": bytes(1000)}]})
            talk = captured(budget)
            for each, frame in ((CLIENT, ask), (BROKER, reply)):
                talk.says(each, frame[: 500 if each == side else None])
                if each == side:
                    talk.gap(each, (until or len(frame)) - 500)
                    if until:
                        talk.says(each, frame[until:])
            assert frames_of(talk) == {1: (None, None)}
            assert budget.left_out == {"too_large": 0, "too_many": 0, "gap": 1} and budget.held_bytes == 0
            later = join(2)
            talk.client(later[0]).broker(later[1])
            assert frames_of(talk)[2] == later


def test_a_response_before_the_end_of_its_request_is_kept_with_it() -> None:
    for error in (0, 27):
        budget = kept()
        ask = request(OFFSET_COMMIT, 8, 1, {"groupId": "g" * 200})
        codes = [{"name": "t", "partitions": [{"partitionIndex": 0, "errorCode": error}]}]
        reply = response(OFFSET_COMMIT, 8, 1, {"topics": codes})
        talk = captured(budget).client(ask[:100]).broker(reply).client(ask[100:])
        assert frames_of(talk) == {1: (ask, reply) if error else (None, None)} and budget.held_bytes == 0


@given(seed=st.integers(0, 2**32), limit=st.sampled_from([0, 3000, 1 << 20]), which=st.sampled_from(INTERESTS))
@settings(max_examples=100, deadline=None)
def test_bytes_are_released_however_an_exchange_ends(seed: int, limit: int, which: dict[str, Any]) -> None:
    """With damaged bytes, gaps and ends at any place nothing stays counted, and kept frames are complete."""
    random_ = random.Random(seed)
    small = random_.choice([(), (HEARTBEAT,)])
    budget = kept(limit_bytes=limit, max_frame_bytes=random_.choice([500, 1 << 20]), small=small)
    talk = talk_with(which, budget, CapturedSession)
    for number in range(6):
        ask, reply, _ = exchange(number, random_)
        for side, frame in ((CLIENT, ask), (BROKER, reply)):
            data = bytearray(frame)
            if random_.random() < 0.2:
                data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
            if random_.random() < 0.1:
                data = data[: random_.randrange(len(data))]
            talk.says(side, bytes(data), cuts(random_, len(data), random_.choice([50, 100_000])))
            if random_.random() < 0.1 and isinstance(talk.session, CapturedSession):
                talk.gap(side, random_.randint(1, 300))
        assert budget.held_bytes <= limit
    talk.close(BROKER).close(CLIENT)
    assert budget.held_bytes == 0
    for event in talk.events:
        each = event.exchange if isinstance(event, Unanswered) else event
        if isinstance(each, Exchange) and each.plan.kept is not None and each.request_frame is not None:
            assert len(each.request_frame) == each.request_bytes
            assert each.response_frame is None or len(each.response_frame) == each.response_bytes


def test_a_successful_heartbeat_takes_the_same_path_as_without_kept() -> None:
    """Its response is only scanned for errors, and no bytes are counted."""
    budget = kept(small=(HEARTBEAT,))
    plan = Interest(kept=budget).plan(HEARTBEAT << 16 | 4)
    assert plan.quick_scan is not None and Interest(kept=budget).plan(JOIN_GROUP << 16 | 9).quick_scan is None
    talk = Dialogue(Interest(kept=budget)).client(request(HEARTBEAT, 4, 1, {"groupId": "g"}))
    assert budget.held_bytes == 0
    talk.broker(response(HEARTBEAT, 4, 1))
    assert talk.exchanges[0].response_frame is None and talk.exchanges[0].decoded == "full"


def test_failed_heartbeats_are_kept_at_the_lowest_detail() -> None:
    talk = Dialogue(Interest(detail=ERRORS, kept=kept()))
    ask, reply = request(HEARTBEAT, 4, 1, {"groupId": "g"}), response(HEARTBEAT, 4, 1, {"errorCode": 25})
    talk.client(ask * 2).broker(reply + response(HEARTBEAT, 4, 1))
    assert [(each.request_frame, each.response_frame) for each in talk.exchanges] == [(ask, reply), (None, None)]


def calls(
    interest: Interest, key: int, version: int, asked: dict[str, Any], answered: dict[str, Any], count: int = 50
) -> tuple[float, set[str]]:
    """Return (calls of kproxy's functions per exchange, the files of these functions)."""
    talk = Dialogue(interest, transform=lambda *_: None)
    pairs = [(request(key, version, n, asked), response(key, version, n, answered)) for n in range(2 * count)]
    found: Counter[str] = Counter()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found[frame.f_code.co_filename.removeprefix(OWN)] += 1

    for number, (question, answer) in enumerate(pairs):
        if number == count:
            sys.setprofile(called)
        talk.client(question).broker(answer)
    sys.setprofile(None)
    return found.total() / count, set(found)


def test_at_detail_headers_group_apis_cost_as_much_as_others() -> None:
    """Compares the function calls per exchange of an API that insight does not follow with those that it does."""
    group = {"groupId": "g", "memberId": "m"}
    plain = calls(Interest(rewrite=True), 22, 1, {"transactionalId": "t"}, {})  # InitProducerId
    followed: dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any]]] = {
        (12, 3): (group | {"generationId": 1}, {}),
        (11, 5): (group | {"protocols": [{"name": "range", "metadata": b"m" * 50}]}, {"protocolName": "range"}),
        (14, 3): (group, {"assignment": b"a" * 50}),
        (13, 3): ({"groupId": "g"}, {}),
        (8, 7): (group, {}),
        (68, 0): (group, {"memberEpoch": 1}),
    }
    assert {key for key, _ in followed} <= APIS
    for plan, (asked, answered) in followed.items():
        count, files = calls(Interest(rewrite=True), *plan, asked, answered)
        assert abs(count - plain[0]) < 1, (plan, count, plain)
        assert not {each for each in files if "insight" in each or "knowledge" in each or "kept" in each}
    asked, answered = followed[11, 5]
    count, files = calls(Interest(rewrite=True, kept=Kept(APIS)), 11, 5, asked, answered)
    assert count > plain[0] + 1 and "wire/observing/keeping.py" in files  # a higher detail costs more


def test_a_kept_request_that_cannot_be_decided_closes_the_connection_cleanly() -> None:
    """The session used to raise instead, because it had not begun to keep the request."""
    keep = kept()
    scripted = Scripted()
    scripted.by_header.add(1)
    interest = Interest(kept=keep, details=True, authorizes=lambda key, version: True)
    asked = bytearray(request(JOIN_GROUP, 5, 1, {"groupId": "g"}))
    group_at = asked.index(b"\0\1g")
    asked[group_at : group_at + 2] = b"\x7f\xff"
    talk = Dialogue(interest, authorizer=scripted).client(bytes(asked))
    assert [fault.kind for fault in talk.faults] == ["malformed_request"]
    assert [each.exchange.request_frame for each in talk.unanswered] == [None]
    assert keep.held_bytes == 0


def test_requests_of_a_small_api_are_kept_up_to_1_kib() -> None:
    """The first request, one with the same prefix, and one in parts; larger ones are counted as left out."""
    for size, is_kept in ((MAX_SMALL, True), (MAX_SMALL + 1, False)):
        which = Kept((HEARTBEAT,), only_failed=(HEARTBEAT,), small=(HEARTBEAT,))
        talk = Dialogue(Interest(details=True, kept=which))
        least = len(request(HEARTBEAT, 3, 0, {"groupId": "g"}))
        frames = [
            request(HEARTBEAT, 3, number, {"groupId": "g", "memberId": "m" * (size - least)}) for number in range(3)
        ]
        assert {*map(len, frames)} == {size}
        talk.client(frames[0]).client(frames[1]).client(frames[2], [30])
        talk.broker(b"".join(response(HEARTBEAT, 3, number, {"errorCode": 27}) for number in range(3)))
        expected = [frame if is_kept else None for frame in frames]
        assert [frames_kept(each)[0] for each in talk.exchanges] == expected
        assert [each.response_frame is not None for each in talk.exchanges] == [is_kept] * 3
        assert which.left_out["too_large"] == (0 if is_kept else 3) and which.held_bytes == 0

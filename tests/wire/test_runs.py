"""With runs and without them a session tells the same, sends the same and is counted the same."""

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.metrics import Metrics
from kproxy.protocol.shapes import LEARN_EVERY
from kproxy.wire import bodies, session
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT, Event, Exchange, Repeated
from kproxy.wire.interest import Interest
from kproxy.wire.pairing import LIMIT
from kproxy.wire.runs import PAUSE
from tests.wire.playbook import Dialogue, foreign_request, request, response, sized

PRODUCE, METADATA, HEARTBEAT, HANDSHAKE, API_VERSIONS = 0, 3, 12, 17, 18
INFO = ConnectionInfo("c", "live:main", "127.0.0.1", 40000, "127.0.0.1", 9092, 1, 0)
Step = tuple[int, bytes] | int  # a side says something, or it closes


SLOW = {"name": "slow", "throttleTimeMs": 3}
FAILED = {"name": "failing", "error": 6}
MOVED = {"nodeEndpoints": [{"nodeId": 1, "host": "b", "port": 1}]}


def produce(number: int, version: int = 9, size: int = 10, acks: int = -1) -> bytes:
    topic = {"name": "t", "partitionData": [{"index": 0, "records": b"r" * size}]}
    return request(PRODUCE, version, number, {"acks": acks, "timeoutMs": 9, "topicData": [topic]})


def produced(number: int, version: int = 9, name: str = "t", error: int = 0, **more: Any) -> bytes:
    topic = {"name": name, "partitionResponses": [{"errorCode": error, "baseOffset": number}]}
    return response(PRODUCE, version, number, {"responses": [topic], **more})


def asks(numbers: Iterable[int], **more: Any) -> bytes:
    return b"".join(produce(number, size=10 + number % 3, **more) for number in numbers)


def says(numbers: Iterable[int], **more: Any) -> bytes:
    return b"".join(produced(number, **more) for number in numbers)


def interest(repeats: bool) -> Interest:
    """One that has seen answers to Produce before."""
    made = Interest(rewrite=True, repeats=repeats)
    for version, said in ((9, {}), (9, {"name": "topic"}), (9, SLOW), (9, FAILED), (13, {}), (13, MOVED)):
        scan = made.plan(PRODUCE << 16 | version).scan
        assert scan is not None
        frame = produced(0, version, **said)
        for _ in range(LEARN_EVERY):
            scan(frame, 8, len(frame))
    return made


def shout(exchange: Exchange, frame: memoryview) -> bytes:
    return b"REWRITTEN"


def unrolled(events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        if not isinstance(event, Repeated):
            yield event
            continue
        for more, (correlation_id, size) in enumerate(zip(event.correlation_ids, event.request_bytes, strict=True), 1):
            exchange = copy.copy(event.exchange)
            exchange.correlation_id = correlation_id
            exchange.number += more
            exchange.in_flight += more
            exchange.request_bytes = size
            exchange.request_start = exchange.request_end
            exchange.response_start = exchange.response_end
            exchange.queue_ns, exchange.muted_ns = exchange.response_end - exchange.request_end, 0
            yield exchange


def plain(value: Any) -> Any:
    """Whatever it is, in values that can be compared."""
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    if "api_key" in slots and "scan" in slots:
        return value.api_key, value.api_version
    if slots:
        return type(value).__name__, {slot: plain(getattr(value, slot)) for slot in slots}
    return value


def cells(metrics: Metrics) -> Any:
    (cluster,) = metrics.clusters.values()
    (broker,) = cluster.brokers.values()
    apis = {key: plain(api) for key, api in broker.apis.items()}
    return apis, broker.queue, broker.queue_ns, cluster.faults, cluster.unanswered


def played(steps: Iterable[Step], **settings: Any) -> list[int]:
    """Play it with and without runs, and compare all that comes of it; returns how many were told at once."""
    talks = [Dialogue(interest(repeats), transform=shout, **settings) for repeats in (True, False)]
    counted = []
    for talk in talks:
        metrics = Metrics()
        counted.append((metrics, metrics.connection(INFO, "main", "1", talk.session.pending)))
    for step in steps:
        for talk, (_, counting) in zip(talks, counted, strict=True):
            told = len(talk.events)
            if isinstance(step, int):
                talk.close(step)
            else:
                talk.says(*step)
            counting.events(talk.events[told:])
        runs, alone = (talk.session for talk in talks)
        assert len(runs.pending) == len(alone.pending)
        assert (runs.completed, runs.faults) == (alone.completed, alone.faults)
        assert [runs.missing(side) for side in (CLIENT, BROKER)] == [alone.missing(side) for side in (CLIENT, BROKER)]
    assert talks[0].sent == talks[1].sent
    assert [plain(event) for event in unrolled(talks[0].events)] == [plain(event) for event in talks[1].events]
    assert cells(counted[0][0]) == cells(counted[1][0])
    return [1 + len(event.request_bytes) for event in talks[0].events if isinstance(event, Repeated)]


USUAL = (CLIENT, produce(0)), (BROKER, produced(0))  # from here on such a request is as usual
SPLIT = produced(4)[:20], produced(4)[20:]
HEAD, TOPICS = produced(3), says((4, 5)) + says((6, 7, 8), name="topic")


@pytest.mark.parametrize(
    "steps,together",
    [
        ([(CLIENT, asks(range(1, 9))), (BROKER, says(range(1, 9)))], [8]),
        ([(CLIENT, asks(range(1, 3))), (BROKER, says(range(1, 3)))], []),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says(range(1, 4))), (BROKER, says(range(4, 9)))], [3, 5]),
        ([(CLIENT, asks(range(1, 9)) + produce(9)[:30]), (CLIENT, produce(9)[30:]), (BROKER, says(range(1, 10)))], [8]),
        ([(CLIENT, asks(range(1, 9)) + produce(9)[:9]), (CLIENT, produce(9)[9:]), (BROKER, says(range(1, 10)))], [8]),
        ([(CLIENT, produce(1)[:9]), (CLIENT, produce(1)[9:] + asks(range(2, 9))), (BROKER, says(range(1, 9)))], [8]),
        ([(CLIENT, asks(range(1, 5))), (CLIENT, asks(range(5, 9))), (BROKER, says(range(1, 9)))], [4, 4]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says(range(1, 4)) + SPLIT[0]), (BROKER, SPLIT[1] + says((5, 6)))], [3]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, produced(1)[:6]), (BROKER, produced(1)[6:] + says(range(2, 9)))], [8]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says((1, 2)) + HEAD[:7]), (BROKER, HEAD[7:] + TOPICS)], [2, 3, 3]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says(range(1, 4))), BROKER, CLIENT], [3]),
        ([(CLIENT, asks(range(1, 9))), CLIENT, (BROKER, says(range(1, 9))), BROKER], [8]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says((1, 2, 5, 6)))], [2]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says((1, 2, 99, 3)))], [2]),
        ([(CLIENT, asks((5, 5, 5, 5, 5))), (BROKER, says((5, 5, 5, 5, 5)))], [5]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says((1, 2, 3)) + produced(4, error=6) + says((5, 6, 7, 8)))], [2]),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says(range(1, 9), **FAILED))], []),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says(range(1, 9), **SLOW))], []),
        ([(CLIENT, asks(range(1, 9))), (BROKER, says((1, 2, 3)) + says((4, 5, 6), name="topic"))], [3, 3]),
        ([(CLIENT, asks(range(1, 5)) + produce(5, acks=0) + asks(range(6, 9))), (BROKER, says((1, 2, 3, 4, 6)))], [4]),
        ([(CLIENT, asks(range(1, 5)) + foreign_request(API_VERSIONS, 99, 5)), (BROKER, says(range(1, 5)))], []),
        ([(CLIENT, asks(range(1, 5)) + b"GET / HTTP/1.1\r\n")], []),
        ([(CLIENT, asks(range(1, 5))), (BROKER, says(range(1, 5)) + produced(5))], [4]),
        ([(CLIENT, asks(range(1, 2 * LIMIT))), (BROKER, says(range(1, 2 * LIMIT)))], [16] * (LIMIT // 8 - 1) + [15]),
    ],
    ids=[
        "at once",
        "too few",
        "answers in two reads",
        "the last request in two reads",
        "its header in two reads",
        "the first request in two reads",
        "two runs",
        "an answer in two reads",
        "the first answer's header in two reads",
        "another answer's header in two reads",
        "closed by the broker",
        "closed by the client",
        "overtaken",
        "an answer to nobody",
        "ids that repeat",
        "an error",
        "errors alike",
        "throttled",
        "answers of two kinds",
        "acks=0",
        "an answer of ours behind it",
        "no Kafka behind it",
        "an answer too many",
        "more than may wait",
    ],
)
def test_edges(steps: list[Step], together: list[int]) -> None:
    assert played([*USUAL, *steps]) == together


def test_a_run_that_is_answered_one_by_one_is_not_tried_again_for_a_while() -> None:
    def batch(first: int, apart: bool) -> list[Step]:
        numbers = range(first, first + 10)
        answers = [(BROKER, produced(number)) for number in numbers] if apart else [(BROKER, says(numbers))]
        return [(CLIENT, asks(numbers)), *answers]

    steps = [*USUAL, *batch(1, apart=True)]
    for first in range(11, PAUSE + 50, 10):
        steps += batch(first, apart=False)
    assert played(steps) == [10] * 4


def test_an_answer_with_addresses_is_told_and_rewritten_alone() -> None:
    usual = (CLIENT, produce(0, 13)), (BROKER, produced(0, 13))
    answers = says((1, 2, 3), version=13) + says((4, 5, 6), version=13, **MOVED)
    assert played([*usual, (CLIENT, asks(range(1, 7), version=13)), (BROKER, answers)]) == [3]


def test_what_is_too_large_or_ends_inside_its_first_fields_is_in_no_run() -> None:
    large = produce(5, size=5000)
    assert played([*USUAL, (CLIENT, asks(range(1, 5)) + large)], max_request_bytes=1000) == []
    assert played([*USUAL, (CLIENT, asks(range(1, 5)) + large), (BROKER, says(range(1, 6)))]) == [5]
    whole = produce(4)
    cut = sized(whole[4:16])  # what its first fields usually are goes on behind it
    steps = [*USUAL, (CLIENT, asks(range(1, 4)) + cut + whole[16:20] + bytes(200))]
    assert played(steps) == []


def test_only_who_asks_for_it_and_reads_no_bodies_is_told_so() -> None:
    for asked in (
        Interest(),
        Interest(repeats=True, detail=bodies.SUMS),
        Interest(repeats=True, details=True, detail=2),
    ):
        talk = Dialogue(asked)
        for first in range(0, 40 * LEARN_EVERY, 8):
            talk.client(asks(range(first, first + 8))).broker(says(range(first, first + 8)))
        assert len(talk.exchanges) == len(talk.events) == 40 * LEARN_EVERY


def dialogue(dice: random.Random) -> Iterator[Step]:
    """Mostly handfuls of Produce, answered as they are; sometimes anything else; cut anywhere."""
    waiting: list[tuple[int, int, int]] = []
    number = 0
    handshaken = False
    yield from USUAL
    for _ in range(dice.randrange(1, 12)):
        asked = b""
        for _ in range(dice.randrange(1, 4)):
            kind, version = dice.random(), dice.choice((9, 9, 9, 13))
            for _ in range(dice.choice((1, 4, 8, 12))):
                number += 1
                if kind < 0.8:
                    asked += produce(number, version, dice.choice((10, 10, 300)))
                    waiting.append((PRODUCE, version, number))
                elif kind < 0.85:
                    asked += produce(number, version, acks=0)
                elif kind < 0.88:
                    asked += foreign_request(API_VERSIONS, 99, number)
                elif kind < 0.90 and not handshaken:
                    handshaken = True
                    asked += request(HANDSHAKE, 0, number, {"mechanism": "PLAIN"})
                    waiting.append((HANDSHAKE, 0, number))
                else:
                    key, version = dice.choice(((HEARTBEAT, 4), (METADATA, 9)))
                    asked += request(key, version, number)
                    waiting.append((key, version, number))
        answered = b""
        for _ in range(dice.choice((0, len(waiting), dice.randrange(len(waiting) + 1)))):
            key, version, answers = waiting.pop(0)
            if key == PRODUCE:
                what = dice.choice(({},) * 60 + ({"name": "topic"}, {"error": 3}, SLOW))
                answered += produced(answers, version, **what)
            else:
                answered += response(key, version, answers, {"errorCode": 33} if key == HANDSHAKE else {})
            if dice.random() < 0.02:
                answered += produced(dice.choice((answers + 2, -1)), version)
        for side, said in ((CLIENT, asked), (BROKER, answered)):
            start = 0
            while start < len(said):
                count = len(said) if dice.random() < 0.7 else dice.choice((1, 7, 60, 500))
                yield side, said[start : start + count]
                start += count
    for side in dice.sample((CLIENT, BROKER), 2):
        yield side


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_dialogue_is_the_same_with_and_without_runs(seed: int) -> None:
    dice = random.Random(seed)
    with mock.patch.object(session, "PAUSE", dice.choice((0, 5))):
        played(list(dialogue(dice)))


def test_dialogues_have_runs() -> None:
    """Or the property would say nothing."""
    with mock.patch.object(session, "PAUSE", 0):
        together = [count for seed in range(40) for count in played(list(dialogue(random.Random(seed))))]
    assert len(together) > 20 and max(together) >= 8

"""Many segments at once tell what their sessions would have told of them one by one, whatever they hold."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.capture import pairs
from kproxy.protocol.records import Record, write_batch
from kproxy.wire import bodies
from kproxy.wire.captured import CapturedSession
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from kproxy.wire.session import Usual
from tests import captures
from tests.wire.playbook import request, response

BATCH = write_batch([Record(offset, 1_700_000_000_000, None, bytes(300)) for offset in range(5)])
PRODUCE, FETCH, HEARTBEAT, HANDSHAKE, API_VERSIONS = 0, 1, 12, 17, 18
TOPICS = [
    {"name": name, "partitionData": [{"index": 0, "records": BATCH}, {"index": 1, "records": BATCH * 3}]}
    for name in ("a", "topic")
]
KINDS: list[tuple[int, int, list[dict[str, Any]], dict[str, Any]]] = [
    (PRODUCE, 9, [{"acks": -1}, {"acks": -1, "transactionalId": "t"}], {}),
    (PRODUCE, 9, [{"acks": -1, "topicData": TOPICS}], {"throttleTimeMs": 7}),
    (PRODUCE, 9, [{"acks": 0}], {}),
    (FETCH, 12, [{"maxWaitMs": 500}, {"maxWaitMs": 5}], {"throttleTimeMs": 3}),
    (HEARTBEAT, 4, [{"groupId": "g" * size} for size in (3, 300, 600)], {"errorCode": 27}),
    (API_VERSIONS, 3, [{"clientSoftwareName": name, "clientSoftwareVersion": "1"} for name in "ab"], {}),
    (API_VERSIONS, 4, [{"clientSoftwareName": "b", "clientSoftwareVersion": "1"}], {}),
    (HANDSHAKE, 1, [{"mechanism": "PLAIN"}], {"mechanisms": ["PLAIN"]}),
]


def dialogue(dice: random.Random) -> list[tuple[int, bytes]]:
    """Frames of both sides, requests on their way together, and now and then bytes that are nobody's."""
    said: list[tuple[int, bytes]] = []
    waiting: list[bytes] = []
    for number in range(dice.randrange(1, 40)):
        key, version, questions, answer = dice.choice(KINDS)
        question = dice.choice(questions)
        said.append((CLIENT, request(key, version, number, question)))
        if question.get("acks") != 0:
            frame = response(key, version, number, answer)
            if dice.random() < 0.1:  # of another length than any before, and too much of it
                frame = (len(frame) + 70_000).to_bytes(4) + frame[4:] + bytes(70_004)
            waiting.append(frame)
        if dice.random() < 0.02:
            waiting.append(response(HEARTBEAT, 4, -number))
        if dice.random() < 0.01:
            said.append((dice.randrange(2), dice.randbytes(30)))
        while waiting and dice.random() < 0.6:
            said.append((BROKER, waiting.pop(0)))
    if dice.random() < 0.2:
        said.append((CLIENT, request(HANDSHAKE, 0, 99, {"mechanism": "PLAIN"})))
    return said + [(BROKER, frame) for frame in waiting]


def plain(value: Any) -> Any:
    if type(value).__name__ in ("Found", "BodyWalker"):
        return [*value.partitions], [*value.batches]
    if type(value).__module__ == "kproxy.wire.events":
        slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
        return type(value).__name__, {slot: plain(getattr(value, slot)) for slot in slots}
    return value


@dataclass
class Talk:
    """A connection, and what was told of it."""

    session: CapturedSession
    flip: int
    openings: dict[int, Usual] = field(default_factory=dict)
    told: list[Any] = field(default_factory=list)

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        session = self.session
        session.receive(side ^ self.flip, view, now_ns)
        if session.usual[4].known:
            self.openings[session.usual[2]] = session.usual
        self.told += map(plain, session.events)
        session.events.clear()


def cut(dice: random.Random, said: list[tuple[int, bytes]], whole: bytearray) -> list[tuple[int, int, int, int]]:
    """Segments (side, start, end, time) of what was said, in one buffer with headers between them."""
    segments: list[tuple[int, int, int, int]] = []
    now = 1000
    usual = dice.choice((9, 50, 2000, 70_000))
    for side, data in said:
        most = usual if dice.random() < 0.9 else 1
        if len(data) > 1000:
            most = max(most, 2000)
        for start in range(0, len(data), most):
            now += dice.choice((0, 5, -3))
            whole += bytes(dice.randrange(3))  # headers, which nobody may look at
            part = data[start : start + most]
            if segments and segments[-1][0] == side and dice.random() < 0.3 and segments[-1][2] == len(whole):
                segments[-1] = (side, segments[-1][1], len(whole) + len(part), segments[-1][3])
            else:
                segments.append((side, len(whole), len(whole) + len(part), now))
            whole += part
    return segments


def in_order(told: list[Any]) -> tuple[list[Any], list[Any]]:
    """Exchanges in the order of their requests, and everything else as it came."""
    exchanges = [what for kind, what in told if kind == "Exchange"]
    exchanges.sort(key=lambda what: (what["number"], what["response_start"]))
    return exchanges, [(kind, {**what, "offset": 0}) for kind, what in told if kind != "Exchange"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((bodies.ERRORS, bodies.BATCHES)))
def test_connections_tell_what_they_tell_one_by_one(seed: int, detail: int) -> None:
    """Exchanges, faults, and where each session stands at the end; windows end anywhere."""
    dice = random.Random(seed)
    interest = Interest(details=True, detail=detail)
    whole = bytearray()
    talks, segments, expected, clocks = [], [], [], []
    for _ in range(dice.randrange(1, 4)):
        flip = dice.randrange(2)
        said = [(side ^ flip, data) for side, data in dialogue(dice)]
        segments.append(cut(dice, said, whole))
        talks.append(Talk(CapturedSession(interest), flip))
        expected.append(Talk(CapturedSession(interest), flip))
        clocks.append(0)
    view = memoryview(bytes(whole))
    for one, its in zip(expected, segments, strict=True):
        clock = 0
        for side, start, end, time_ns in its:
            clock = max(clock, time_ns)
            one.receive(side, view[start:end], clock)

    while any(segments):
        window, parts = [], []
        for number, its in enumerate(segments):
            count = dice.choice((dice.randrange(9), dice.randrange(60), 500))
            parts.append(pairs.Part(talks[number], len(window), len(window) + len(its[:count]), clocks[number]))
            window += its[:count]
            del its[:count]
        columns = pairs.Segments(*np.array(window, np.int64).reshape(-1, 4).T)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairs, "WORTH", dice.choice((0, 0, 8, 256)))
            patch.setattr(pairs, "ROUNDS", dice.choice((1, 2, 16)))
            for bulk in pairs.read(view, columns, parts, detail):
                for number, exchange in captures.one_by_one(bulk):
                    talks[number].told.append(plain(exchange))
        clocks = [part.clock_ns for part in parts]

    for talk, one in zip(talks, expected, strict=True):
        assert in_order(talk.told) == in_order(one.told)
        ours, theirs = talk.session, one.session
        assert [plain(each) for each in ours.pending] == [plain(each) for each in theirs.pending]
        assert (ours.completed, ours.software, ours.number) == (theirs.completed, theirs.software, theirs.number)
        assert ours._received == theirs._received

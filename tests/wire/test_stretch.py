"""A stretch tells what its session would have told of the segments one by one, whatever they hold."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.wire import bodies
from kproxy.wire.captured import CapturedSession
from kproxy.wire.events import BROKER, CLIENT, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.stretch import Reader
from tests.wire.playbook import request, response

PRODUCE, FETCH, HEARTBEAT, HANDSHAKE, API_VERSIONS = 0, 1, 12, 17, 18
KINDS: list[tuple[int, int, list[dict[str, Any]], dict[str, Any]]] = [
    (PRODUCE, 9, [{"acks": -1}, {"acks": -1, "transactionalId": "t"}], {}),
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
    if isinstance(value, Exchange | bodies.Found) or type(value).__module__ == "kproxy.wire.events":
        slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
        return type(value).__name__, {slot: plain(getattr(value, slot)) for slot in slots if not slot.startswith("_")}
    return value


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((bodies.ERRORS, bodies.BATCHES)))
def test_a_stretch_tells_what_its_segments_tell(seed: int, detail: int) -> None:
    dice = random.Random(seed)
    whole, segments = bytearray(), []
    now = 1000
    for side, data in dialogue(dice):
        most = dice.choice((1, 9, 50, 2000, 70_000))
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
    view = memoryview(bytes(whole))
    interest = Interest(details=True, detail=detail)

    one = CapturedSession(interest)
    expected, clock = [], 0
    for side, start, end, time_ns in segments:
        clock = max(clock, time_ns)
        one.receive(side, view[start:end], clock)
    expected = [plain(event) for event in one.events]

    session = CapturedSession(interest)
    reader = Reader(session)
    told: list[Any] = []

    def tell() -> None:
        told.extend(map(plain, session.events))
        session.events.clear()

    clock = 0
    while segments:
        count = dice.randrange(1, 30)
        clock = reader.read(view, segments[:count], 0, clock, tell)
        del segments[:count]
    without_offset = [[(kind, {**what, "offset": 0}) for kind, what in events] for events in (told, expected)]
    assert without_offset[0] == without_offset[1]
    assert [plain(each) for each in session.pending] == [plain(each) for each in one.pending]
    assert (session.completed, session.software, session._received) == (one.completed, one.software, one._received)

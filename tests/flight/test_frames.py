"""The recorder returns the frames that passed, for any split of their bytes, or marks them as truncated."""

import random
import tracemalloc

import pytest

from kproxy.flight import frames as module
from kproxy.flight.cutting import Cutter, cut
from kproxy.flight.frames import Frames
from kproxy.protocol.apis import HEARTBEAT, PRODUCE
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from kproxy.wire.observing.watched import watch
from kproxy.wire.session import Session
from tests.wire.playbook import request, response

INFO = ConnectionInfo("east", "live:east", "10.0.0.1", 40000, "10.0.0.2", 9092, 3, 1_700_000_000_000_000_000)
HOUR_NS = 3_600 * 10**9


def big(number: int, size: int) -> bytes:
    data = {"name": "t", "partitionData": [{"index": 0, "records": bytes(size)}]}
    body = {"transactionalId": None, "acks": 1, "timeoutMs": 9, "topicData": [data]}
    return request(PRODUCE, 7, number, body)


def dialogue(
    chance: random.Random, count: int, sizes: tuple[int, ...] = (10, 5_000, 90_000, 300_000)
) -> list[tuple[int, bytes]]:
    """Requests and their answers, some pipelined, some large."""
    said: list[tuple[int, bytes]] = []
    waiting: list[tuple[int, int]] = []
    for number in range(count):
        if chance.random() < 0.3:
            said.append((CLIENT, big(number, chance.choice(sizes))))
            waiting.append((PRODUCE, number))
        else:
            said.append((CLIENT, request(HEARTBEAT, 4, number)))
            waiting.append((HEARTBEAT, number))
        while waiting and chance.random() < 0.7:
            key, answered = waiting.pop(0)
            said.append((BROKER, response(key, 7 if key == PRODUCE else 4, answered)))
    for key, answered in waiting:
        said.append((BROKER, response(key, 7 if key == PRODUCE else 4, answered)))
    return said


def play(said: list[tuple[int, bytes]], chance: random.Random, kept: Frames, largest: int) -> None:
    session = Session(Interest())
    watch(session, kept.watched(INFO))
    now = 0
    for side, data in said:
        pos = 0
        while pos < len(data):
            piece = data[pos : pos + chance.randint(1, largest)]
            pos += len(piece)
            now += 1
            session.receive(side, memoryview(piece), now)
            while session.backlog[side] is not None:
                now += 1
                session.resume(side, now)
        session.events.clear()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("largest", [3, 200, 20_000, 400_000])
def test_frames_that_fit_come_back_byte_for_byte(seed, largest, monkeypatch):
    chance = random.Random(seed)
    said = dialogue(chance, 60) if largest >= 100 else dialogue(chance, 12, sizes=(10, 900))
    kept = Frames(1 << 30, HOUR_NS)
    play(said, chance, kept, largest)
    got = list(cut(kept.chunks))
    assert [(frame.side, frame.size, frame.data) for frame in got if frame.is_whole] == [
        (side, len(data), data) for (side, data), frame in zip(said, got, strict=True) if frame.is_whole
    ]
    assert all(data.startswith(frame.data) for (_, data), frame in zip(said, got, strict=True))
    whole = sum(frame.is_whole for frame in got)
    assert whole == len(got) or all(frame.size > module.MAX_FRAME for frame in got if not frame.is_whole)
    assert all(frame.api is not None for frame in got) and whole > len(got) // 2


def test_frames_larger_than_the_requested_size_return_only_their_first_bytes():
    said = dialogue(random.Random(1), 60)
    kept = Frames(1 << 30, HOUR_NS)
    play(said, random.Random(2), kept, 20_000)
    cutter = Cutter(largest=4096)
    got = [frame for chunk in kept.chunks for frame in cutter.feed(chunk)]
    wanted = [(len(data), data if len(data) <= 4096 else data[:12]) for _, data in said]
    assert [(frame.size, frame.data) for frame in got] == wanted
    assert {frame.is_whole for frame in got} == {True, False} and all(frame.api is not None for frame in got)


@pytest.mark.parametrize("seed", range(12))
def test_dropped_frames_are_left_out_and_the_others_are_right(seed):
    chance = random.Random(seed)
    said = dialogue(chance, 120)
    kept = Frames(200_000, HOUR_NS)
    play(said, chance, kept, 30_000)
    assert kept.held_bytes <= kept.limit_bytes
    got = list(cut(kept.chunks))
    sent = {(side, data) for side, data in said}
    assert 0 < len(got) < len(said)
    assert all((frame.side, frame.data) in sent for frame in got if frame.is_whole)


def test_old_bytes_go_with_time():
    kept = Frames(1 << 20, span_ns=10)
    session = Session(Interest())
    watch(session, kept.watched(INFO))
    for now in range(100):
        session.receive(CLIENT, memoryview(request(HEARTBEAT, 4, now)), now)
    assert [chunk.now_ns for chunk in kept.chunks] == list(range(89, 100))


def test_tokens_of_a_login_are_never_kept():
    kept = Frames(1 << 20, HOUR_NS)
    session = Session(Interest())
    watch(session, kept.watched(INFO))
    session.receive(CLIENT, memoryview(request(17, 0, 1, {"mechanism": "PLAIN"})), 1)
    session.receive(BROKER, memoryview(response(17, 0, 1, {"errorCode": 0, "mechanisms": ["PLAIN"]})), 2)
    token = b"\0alice\0hunter2-secret"
    session.receive(CLIENT, memoryview(len(token).to_bytes(4, "big") + token), 3)
    session.receive(BROKER, memoryview(bytes(4)), 4)
    session.receive(CLIENT, memoryview(request(HEARTBEAT, 4, 9)), 5)
    session.receive(CLIENT, memoryview(request(HEARTBEAT, 4, 10)), 6)
    assert not any(b"hunter2" in (chunk.data or b"") for chunk in kept.chunks)
    assert [frame.correlation_id for frame in cut(kept.chunks) if frame.side == CLIENT] == [9, 10]


def test_connections_without_bytes_are_bounded_by_the_size_of_their_state():
    kept = Frames(1 << 20, HOUR_NS)
    tracemalloc.start()
    try:
        for number in range(5000):
            address = f"10.0.{number >> 8}.{number & 255}"
            info = ConnectionInfo("default", "live:bootstrap", address, number, "10.1.0.1", 9092, None, number + 10**18)
            kept.ended(info, number + 10**18)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept.chunks) < 5000 and used < kept.limit_bytes * 1.2


@pytest.mark.parametrize(("after_its_start", "kept"), [(module.MAX_FRAME, True), (module.MAX_FRAME + 1, False)])
def test_a_frame_is_kept_up_to_so_many_bytes_after_the_read_with_its_start(after_its_start, kept):
    """Also the last read, which ends with the frame; the next frame is kept whatever this one was."""
    frame = big(1, after_its_start)
    first = len(frame) - after_its_start
    following = request(HEARTBEAT, 4, 2)
    held = Frames(1 << 30, HOUR_NS)
    session = Session(Interest())
    watch(session, held.watched(INFO))
    for part in (frame[:first], frame[first:-10], frame[-10:], following):
        session.receive(CLIENT, memoryview(part), 1)
    assert [chunk.data is not None for chunk in held.chunks] == [True, True, kept, True]
    got = list(cut(held.chunks))
    assert [(one.is_whole, one.data == whole) for one, whole in zip(got, (frame, following), strict=True)] == [
        (kept, kept),
        (True, True),
    ]

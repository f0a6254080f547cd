"""The ZooKeeper relay forwards every byte unchanged; its session yields the same events as without a relay."""

import asyncio
import contextlib
import itertools
import random
import socket
import time
from types import SimpleNamespace

import pytest
import uvloop

from kproxy.proxy.relay import readings as readings_module
from kproxy.proxy.relay import zookeeper as module
from kproxy.proxy.relay.readings import Readings
from kproxy.proxy.relay.zookeeper import ZooKeeperRelay
from kproxy.zookeeper.records import write
from kproxy.zookeeper.session import Operation, Room, Session
from tests.zookeeper.traffic import talks

PING = (8).to_bytes(4) + write("RequestHeader", {"xid": -2, "type": 11})


class Stage:
    """A relay between two socket pairs of the test."""

    def __init__(self, **options):
        self.events, self.total, self.ended, self.room = [], [0, 0], [], Room()
        self._before = options.pop("before", lambda ours: None)
        self._readings = options.pop("readings", None) or Readings()
        self._options = {"values": True} | options

    async def __aenter__(self):
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        for sock in (*ours, *theirs):
            sock.setblocking(False)
        self.relay = ZooKeeperRelay(
            *theirs,
            time.time_ns,
            self.take,
            self.ended.append,
            self.room,
            self.total,
            self._readings,
            **self._options,
        )
        self._before(ours)
        await self.relay.start()
        self.ends = [await asyncio.open_connection(sock=sock) for sock in ours if sock.fileno() >= 0]
        return self

    async def __aexit__(self, *_):
        for _, writer in self.ends:
            writer.close()
        await self.has_ended()

    async def has_ended(self):
        async with asyncio.timeout(60):
            while not self.ended:  # noqa: ASYNC110 - the relay has no event for it
                await asyncio.sleep(0.01)

    def take(self, relay, events):
        self.events.extend(events)

    async def send(self, side, data):
        """Send from one side; return as many bytes from the other."""
        reader, writer = self.ends[1 - side][0], self.ends[side][1]
        writer.write(data)
        return await asyncio.wait_for(reader.readexactly(len(data)), 30)


def test_a_relayed_connection_yields_the_events_of_its_session():
    talk = max(talks(), key=lambda talk: len(talk.parts))
    direct = Session()
    for side, data, now in talk.parts:
        direct.receive(side, data, now)

    async def play():
        async with Stage() as stage:
            for side, data, _ in talk.parts:
                assert await stage.send(side, data) == data
        return stage

    stage = asyncio.run(play())
    assert stage.total == [sum(len(data) for each, data, _ in talk.parts if each == side) for side in (0, 1)]

    def operations(events):
        return [(event.op, event.xid, event.zxid) for event in events if isinstance(event, Operation)]

    assert operations(stage.events) == operations(direct.events)
    assert stage.room.held == 0


@pytest.fixture
def slices(monkeypatch):
    """A clock by which a slice takes most of a turn's time, and the number of slices read in each turn of the loop."""
    clock = itertools.count(step=readings_module.TURN_NS * 3 // 4)
    monkeypatch.setattr(readings_module, "perf_counter_ns", lambda: next(clock))
    counted = [0]
    read = ZooKeeperRelay._read_slice

    def counting(relay):
        counted[-1] += 1
        read(relay)

    monkeypatch.setattr(ZooKeeperRelay, "_read_slice", counting)

    async def count_turns():
        while True:
            await asyncio.sleep(0)
            counted.append(0)

    return SimpleNamespace(counted=counted, count_turns=count_turns)


@pytest.mark.parametrize("seed", range(6))
def test_no_bytes_are_changed_or_block_the_loop(seed, slices):
    """Broken traffic, noise, very many small frames: each turn of the loop reads at most two slices."""
    chance = random.Random(seed)
    talk = talks()[seed]
    client = bytearray(b"".join(data for side, data, _ in talk.parts if side == 0))
    for _ in range(seed):
        client[chance.randrange(60, len(client))] = chance.randrange(256)
    wide = {"path": "/", "data": b"", "acl": [{"perms": 1, "id": {"scheme": "", "id": ""}}] * 80_000, "flags": 0}
    body = write("RequestHeader", {"xid": 9, "type": 1}) + write("CreateRequest", wide)
    sent = [bytes(client), PING * 20_000, len(body).to_bytes(4) + body, chance.randbytes(1 << 20), b"\0" * (1 << 20)]

    async def play():
        async with Stage() as stage:
            turns = asyncio.create_task(slices.count_turns())
            for data in sent:
                assert await stage.send(0, data) == data
                assert stage.relay._queued <= module.QUEUE_BYTES + (1 << 20)
            turns.cancel()
        return stage

    stage = asyncio.run(play())
    assert stage.room.held == 0
    assert 0 < max(slices.counted) <= 2  # one reading; those of two turns may meet


def test_each_turn_has_one_reading_however_often_data_arrives(slices):
    async def play():
        async with Stage() as stage:
            turns = asyncio.create_task(slices.count_turns())
            for _ in range(20):
                assert await stage.send(0, PING * 4000) == PING * 4000
            left = stage.relay._queued // module.SLICE
            for _ in range(2 * left):
                await asyncio.sleep(0)
            turns.cancel()
            assert left > 50 and not stage.relay._queued and not stage.relay.session.opaque

    asyncio.run(play())
    assert sum(slices.counted) >= 20 * 4000 * len(PING) // module.SLICE
    assert max(slices.counted) <= 2


def test_all_connections_share_one_reading_per_turn(slices):
    """With twelve busy clients, a turn of the loop reads no more than with one, and every client makes progress."""

    async def play():
        readings = Readings()
        stages = [Stage(readings=readings) for _ in range(12)]
        async with contextlib.AsyncExitStack() as stack:
            for stage in stages:
                await stack.enter_async_context(stage)
            turns = asyncio.create_task(slices.count_turns())
            await asyncio.gather(*(stage.send(0, PING * 20_000) for stage in stages))
            assert sum(stage.relay._queued for stage in stages) > 12 * 100_000
            queued = [stage.relay._queued for stage in stages]
            for _ in range(60):
                await asyncio.sleep(0)
            assert all(stage.relay._queued < before for stage, before in zip(stages, queued, strict=True))
            while any(stage.relay._queued for stage in stages):  # noqa: ASYNC110
                await asyncio.sleep(0)
            turns.cancel()
        return stages

    stages = asyncio.run(play())
    assert 0 < max(slices.counted) <= 2
    assert not any(stage.relay.session.opaque for stage in stages)


@pytest.mark.parametrize("room", [module.CLOSED_BYTES, 1000])
def test_unread_bytes_of_a_closed_connection_are_read_in_turns_or_dropped(room, slices, monkeypatch):
    """A client sends and resets: its unread bytes are read in short turns, and all closed connections share a limit."""
    monkeypatch.setattr(module, "CLOSED_BYTES", room)
    readings = Readings()

    async def play():
        async with Stage(readings=readings) as stage:
            turns = asyncio.create_task(slices.count_turns())
            assert await stage.send(0, PING * 20_000) == PING * 20_000
            stage.ends[0][1].transport.abort()
            stage.ends[1][1].transport.abort()
            while not stage.ended:
                assert readings.closed_bytes <= room
                await asyncio.sleep(0)
            turns.cancel()
        return stage

    stage = asyncio.run(play())
    assert max(slices.counted) <= 2 and readings.closed_bytes == 0 and stage.room.held == 0
    assert (sum(slices.counted) > 20_000 * len(PING) // module.SLICE * 0.9) == (room > 1000)


def test_all_unanswered_operations_of_a_closed_connection_are_emitted_in_turns():
    reported = []

    class CountingStage(Stage):
        def take(self, relay, events):
            reported.append(len(events))
            super().take(relay, events)

    async def play():
        async with CountingStage() as stage:
            assert await stage.send(0, PING * 1000) == PING * 1000
            while stage.relay.session.unanswered < 1000:  # noqa: ASYNC110
                await asyncio.sleep(0)
            stage.ends[0][1].transport.abort()
            stage.ends[1][1].transport.abort()
            await stage.has_ended()
            return stage

    stage = asyncio.run(play())
    assert sum(reported) == len(stage.events) == 1000 and max(reported) <= module.CLOSED_OPERATIONS
    assert (stage.room.lent, len(stage.ended)) == (0, 1)


class Resting(Readings):
    """Reads nothing until the test calls `go_on`."""

    rests = True

    def _schedule(self):
        if not self.rests:
            super()._schedule()

    async def go_on(self):
        self.rests = False
        self._schedule()
        for _ in range(10_000):
            await asyncio.sleep(0)
            if not self.waiting_bytes:
                return
        raise AssertionError("unread bytes remain")


def test_unread_bytes_of_all_connections_share_a_limit_and_are_still_forwarded(monkeypatch):
    """If the readings of open connections fall behind, those with the most unread bytes become opaque."""
    monkeypatch.setattr(module, "WAITING_BYTES", 150_000)

    async def play():
        readings = Resting()
        async with contextlib.AsyncExitStack() as stack:
            stages = [await stack.enter_async_context(Stage(readings=readings)) for _ in range(5)]
            for stage, count in zip(stages, (4000, 4000, 4000, 4000, 1000), strict=True):
                assert await stage.send(0, PING * count) == PING * count
                assert readings.waiting_bytes <= 150_000 + module.FREE_BYTES
                assert readings.waiting_bytes == sum(stage.relay._queued for stage in stages)
            await readings.go_on()
            for stage in stages:
                assert await stage.send(0, PING) == PING
            await readings.go_on()
        return [stage.relay.session.opaque for stage in stages], readings

    opaque, readings = asyncio.run(play())
    assert opaque == [False, False, False, True, False]
    assert readings.waiting_bytes == readings.closed_bytes == 0


def test_a_response_after_the_clients_half_close_arrives():
    async def play():
        async with Stage() as stage:
            assert await stage.send(0, b"ruok") == b"ruok"
            stage.ends[0][1].write_eof()
            assert await asyncio.wait_for(stage.ends[1][0].read(), 10) == b""
            assert await stage.send(1, b"imok") == b"imok"
        return stage

    stage = asyncio.run(play())
    assert stage.relay.session.command == "ruok"
    assert not stage.events


def test_a_side_that_does_not_read_pauses_the_other_and_is_closed(monkeypatch):
    monkeypatch.setattr(module, "STALLED_S", 0.3)

    async def play():
        async with Stage() as stage:
            writer = stage.ends[0][1]
            writer.transport.set_write_buffer_limits(high=1)
            with pytest.raises((TimeoutError, ConnectionError)):
                async with asyncio.timeout(10):
                    while True:
                        writer.write(bytes(1 << 16))
                        await writer.drain()
            assert stage.total[0] < 8 << 20
            await stage.has_ended()

    asyncio.run(play())


def test_a_drain_waits_for_the_pending_response():
    header = write("RequestHeader", {"xid": 1, "type": 4}) + write("GetDataRequest", {"path": "/", "watch": False})
    answer = write("ReplyHeader", {"xid": 1, "zxid": 5, "err": -101})

    async def play():
        async with Stage() as stage:
            asked = len(header).to_bytes(4) + header
            assert await stage.send(0, asked) == asked
            stage.relay.finish()
            await asyncio.sleep(0.05)
            assert not stage.ended
            frame = len(answer).to_bytes(4) + answer
            assert await stage.send(1, frame) == frame
            assert await asyncio.wait_for(stage.ends[0][0].read(), 10) == b""

    asyncio.run(play())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("greeting", [b"", b"hello"])
def test_bytes_and_close_of_a_server_before_the_client_is_ready_are_forwarded(run, greeting):
    """A server at its limit of clients accepts and closes at once."""

    async def play():
        async with Stage(before=lambda ours: (ours[1].sendall(greeting), ours[1].close())) as stage:
            return await asyncio.wait_for(stage.ends[0][0].read(), 10)

    assert run(play()) == greeting


def test_bytes_are_forwarded_although_the_receiver_of_events_raises(caplog):
    header = write("RequestHeader", {"xid": 1, "type": 4}) + write("GetDataRequest", {"path": "/", "watch": False})
    answer = write("ReplyHeader", {"xid": 1, "zxid": 5, "err": -101})

    class Broken(Stage):
        def take(self, relay, events):
            raise ValueError("a defect")

    async def play():
        async with Broken() as stage:
            for _ in range(3):
                for side, body in enumerate((header, answer)):
                    frame = len(body).to_bytes(4) + body
                    assert await stage.send(side, frame) == frame
        return stage

    stage = asyncio.run(play())
    assert stage.relay.session.opaque
    assert "a defect of kproxy" in caplog.text

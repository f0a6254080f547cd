"""How connections end: spread over the time of a drain, and none with an unanswered request."""

import asyncio
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kproxy.protocol.apis import HEARTBEAT
from kproxy.proxy.connection import draining
from kproxy.proxy.connection.draining import _TURN, MANY_IN_FLIGHT, drain, spread_s
from kproxy.proxy.relay.relay import Relay
from tests.proxy.live import HOST, Broker, Wire, kproxy, live, request, response


async def answer_for_ever(broker: Broker) -> None:
    """Every connection, every request; a few milliseconds late."""

    async def serve(wire: Wire) -> None:
        while len(frame := await wire.frame()) > 4:
            await asyncio.sleep(0.003)
            await wire.send(response(HEARTBEAT, 4, int.from_bytes(frame[8:12], "big")))

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(serve(await broker.accept()))


@pytest.mark.parametrize(("connections", "timeout_s", "expected"), [(0, 10, 0), (5, 10, 0.5), (10_000, 10, 7.5)])
def test_few_connections_are_closed_soon_and_many_within_the_time(connections, timeout_s, expected):
    assert spread_s(connections, timeout_s) == expected


def test_idle_connections_are_closed_one_by_one_over_the_time():
    async def test():
        async with kproxy(drain_timeout_s=2) as here:
            wires = [await here.connect() for _ in range(40)]
            start = time.monotonic()
            stopping = asyncio.create_task(here.server.stop())
            ends = []

            async def see_end(wire, _):
                assert await wire.rest() == b""
                ends.append(time.monotonic() - start)
                wire.close()

            await asyncio.gather(*[see_end(*both) for both in wires])
            await stopping
            assert here.counted.disconnects == {"drained": 40}
            # 1.5 s for 40: one in each 37 ms. A busy machine makes some late, not early.
            assert ends[-1] > 1.2
            assert all(sum(one <= at for one in ends) <= at / 0.03 + 2 for at in ends)

    live(test())


def test_clients_that_send_requests_without_a_pause_get_all_their_answers():
    """Three requests at once, and three more after their answers; a client whose connection ends connects elsewhere."""

    async def test():
        broker = Broker()
        async with kproxy(broker, drain_timeout_s=60) as here:
            serving = asyncio.create_task(answer_for_ever(broker))
            answered = [0] * 12

            async def ask(number: int) -> None:
                wire = await Wire.dial(here.port)
                while not await has_ended(wire):
                    count = answered[number]
                    await wire.send(b"".join(request(HEARTBEAT, 4, count + each) for each in range(3)))
                    for each in range(3):
                        assert await wire.frame() == response(HEARTBEAT, 4, count + each)
                    answered[number] += 3
                wire.close()

            asking = [asyncio.create_task(ask(number)) for number in range(12)]
            await here.until(lambda: min(answered) >= 3 or any(task.done() for task in asking))
            await here.server.stop()
            await asyncio.gather(*asking)
            assert min(answered) >= 3
            assert here.counted.disconnects == {"drained": 12} and not here.counted.unanswered
            serving.cancel()

    live(test())


def test_kproxy_soon_stops_reading_a_client_with_many_requests_in_flight(monkeypatch):
    """Its broker answers slowly, and gets the rest of the drain's time for the earlier requests."""
    monkeypatch.setattr(draining, "EARLY_SHARE", 0.005)
    drained, drain_relay = [], Relay.drain
    monkeypatch.setattr(Relay, "drain", lambda relay, *cause: (drained.append(relay), drain_relay(relay, *cause)))

    def asked(number):
        return request(HEARTBEAT, 4, number)

    def answers(count):
        return [response(HEARTBEAT, 4, number) for number in range(count)]

    async def test():
        async with kproxy(drain_timeout_s=60) as here:
            pairs = [(*await here.connect(), in_flight) for in_flight in (MANY_IN_FLIGHT // 2, 8 * MANY_IN_FLIGHT)]
            for client, broker, in_flight in pairs:
                await client.send(b"".join(map(asked, range(in_flight))))
                for number in range(in_flight):
                    assert await broker.frame() == asked(number)
            stopping = asyncio.create_task(here.server.stop())
            await here.until(lambda: drained)
            for client, _, in_flight in pairs:
                await client.send(asked(in_flight))
            (_, few, some), (_, crowded, _) = pairs
            assert await few.frame() == asked(some) and await crowded.is_silent()
            assert len(drained) == 1
            for client, broker, in_flight in ((*pairs[0][:2], some + 1), pairs[1]):
                await broker.send(b"".join(answers(in_flight)))
                for answer in answers(in_flight):
                    assert await client.frame() == answer
                await client.rest()
                client.close()
            await stopping
            assert not here.counted.unanswered and here.counted.disconnects == {"drained": 2}

    live(test())


class StuckOffset:
    """The part of a relay that a drain calls; its requests are never answered. Counts all calls per turn."""

    turn = 0
    asked: ClassVar[dict[int, int]] = {}

    session = SimpleNamespace(pending=[None])

    def __init__(self):
        self.closed = False
        self.causes = []

    def _ask(self, cause):
        self.causes.append(cause)
        self.asked[StuckOffset.turn] = self.asked.get(StuckOffset.turn, 0) + 1

    def finish(self):
        self._ask("finish")

    def drain(self):
        self._ask("drain")

    def close(self, cause):
        self.closed = True
        self._ask(cause)


def test_connections_that_do_not_finish_are_closed_a_few_in_each_turn_of_the_loop():
    """Others wait meanwhile: those of other clusters, or of other brokers."""

    async def test():
        loop = asyncio.get_running_loop()

        def tick():
            StuckOffset.turn += 1
            loop.call_soon(tick)

        tick()
        relays = [StuckOffset() for _ in range(1000)]
        relays[500].closed = True
        left = relays[:500] + relays[501:]
        assert await drain(relays, 0.2, asyncio.Event(), "test") == (0, 999)
        assert all(relay.causes[-2:] == ["drain", "drain_timeout"] for relay in left) and not relays[500].causes
        assert sum(StuckOffset.asked.values()) >= 2 * 999 and max(StuckOffset.asked.values()) <= 2 * _TURN

    live(test())


async def has_ended(wire: Wire) -> bool:
    """As a client finds out that polls its connection before it sends."""
    try:
        return not wire.sock.recv(1)
    except BlockingIOError:
        return False


def test_a_client_that_never_pauses_is_closed_in_time_between_two_requests(monkeypatch):
    drain_s, last_share = 60, 0.03
    monkeypatch.setattr(draining, "EARLY_SHARE", last_share / 2)
    monkeypatch.setattr(draining, "LAST_SHARE", last_share)
    is_last, drain_relay = asyncio.Event(), Relay.drain
    monkeypatch.setattr(Relay, "drain", lambda relay, *cause: (is_last.set(), drain_relay(relay, *cause)))

    async def answer_one_less(broker: Broker) -> None:
        """Each request when kproxy has passed on the next one, until it is to read no more of them."""
        wire = await broker.accept()
        asked = []
        reading, ending = asyncio.create_task(wire.frame()), asyncio.create_task(is_last.wait())
        while True:
            await asyncio.wait({reading} if is_last.is_set() else {reading, ending}, return_when="FIRST_COMPLETED")
            if reading.done():
                if len(frame := reading.result()) <= 4:
                    return
                asked.append(int.from_bytes(frame[8:12], "big"))
                reading = asyncio.create_task(wire.frame())
            await asyncio.sleep(0.003)
            while len(asked) > (0 if is_last.is_set() else 1):
                await wire.send(response(HEARTBEAT, 4, asked.pop(0)))

    async def test():
        broker = Broker()
        async with kproxy(broker, drain_timeout_s=drain_s) as here:
            serving = asyncio.create_task(answer_one_less(broker))
            wire = await Wire.dial(here.port)

            await wire.send(request(HEARTBEAT, 4, 0) + request(HEARTBEAT, 4, 1))
            stopping = None
            start = time.monotonic()
            number = 0
            while await wire.frame() == response(HEARTBEAT, 4, number):  # one is always under way
                number += 1
                if number == 30:
                    start = time.monotonic()
                    stopping = asyncio.create_task(here.server.stop())
                await wire.send(request(HEARTBEAT, 4, number + 1))
            assert is_last.is_set() and time.monotonic() - start > last_share * drain_s - 0.1
            wire.close()
            await stopping
            await serving
            assert not here.counted.unanswered and here.counted.disconnects == {"drained": 1}

    live(test())


def test_the_wait_of_a_drain_ends_at_once_on_request():
    async def test():
        async with kproxy() as here:
            client, _ = await here.connect()
            await client.send(request(HEARTBEAT, 4, 1))
            at_once = asyncio.Event()
            (relay,) = here.server.relays.worker.relays.values()
            its_drain = asyncio.create_task(drain([relay], 60, at_once, "a test"))
            await here.until(lambda: relay._finishing)
            assert not its_drain.done()
            at_once.set()
            assert await its_drain == (0, 1)
            assert here.counted.disconnects == {"drain_timeout": 1}

    live(test())


def test_during_the_delay_kproxy_is_not_ready_and_still_serves_clients(monkeypatch):
    delays_s = []

    async def test():
        is_over = asyncio.Event()

        async def waited(_, delay_s):
            delays_s.append(delay_s)
            await is_over.wait()

        monkeypatch.setattr("kproxy.proxy.process.server.waited", waited)
        async with kproxy(drain_delay_s=2, drain_timeout_s=60) as here:
            stopping = asyncio.create_task(here.server.stop())
            await here.until(lambda: delays_s)
            assert delays_s == [2] and here.server.not_ready() == ["draining"]
            client, wire = await here.connect()  # a client that has not learned of the drain yet
            await client.send(request(HEARTBEAT, 4, 7))
            await wire.frame()
            await wire.send(response(HEARTBEAT, 4, 7))
            assert await client.frame() == response(HEARTBEAT, 4, 7)
            is_over.set()
            assert await client.rest() == b""
            client.close()
            await stopping
            with pytest.raises(ConnectionRefusedError):
                await asyncio.get_running_loop().sock_connect(wire_socket(), (HOST, here.port))

    live(test())


def wire_socket():
    import socket

    sock = socket.socket()
    sock.setblocking(False)
    return sock

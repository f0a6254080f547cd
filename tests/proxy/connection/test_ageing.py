"""Idle and old connections are closed between two requests, never while an answer is due."""

import asyncio

import pytest

from kproxy.protocol.apis import HEARTBEAT
from kproxy.proxy.config.limits import AGE_JITTER, Limits
from kproxy.proxy.connection import ageing
from kproxy.proxy.connection.ageing import BUSY_S
from kproxy.wire.events import CLIENT
from tests.proxy.live import kproxy, live, request, response


def limited(**limits):
    return {"cluster": {"limits": Limits(**limits)}}


@pytest.fixture
def passes(monkeypatch):
    """passes(here, seconds): advance the clock of the wheel by so much, and run the wheel."""
    now_s = 1000.0
    monkeypatch.setattr(ageing, "monotonic", lambda: now_s)

    def passes(here, seconds):
        nonlocal now_s
        now_s += seconds
        watching = here.server.relays.worker.ageing
        if watching._timer is not None:
            watching._timer.cancel()
            watching._tick()

    return passes


@pytest.mark.parametrize(
    ("idle_s", "age_s", "check"),
    [
        (8.0, None, 1002.0),  # a quarter of the timeout
        (240.0, None, 1060.0),
        (244.0, None, 1060.0),  # at least once a minute
        (None, 3600.0, 1060.0),
        (None, 20.0, 1020.0),  # at the end of its age
        (8.0, 1.0, 1001.0),
    ],
)
def test_the_interval_of_checks_follows_from_the_limits(monkeypatch, idle_s, age_s, check):
    monkeypatch.setattr(ageing, "AGE_JITTER", 0)
    watched = ageing._Watched(1, Limits(idle_timeout_s=idle_s, max_age_s=age_s), 1000.0, lambda setting: None)
    assert watched.due(1000.0) == check
    watched.steps = watched.steps[1:]  # it closes, and is idle no more
    watched.ends_at = 1500.0
    assert watched.due(1000.0) == 1060.0 and watched.due(1470.0) == 1500.0


def test_an_idle_connection_is_closed_and_one_in_use_or_with_a_request_in_flight_is_not(passes):
    async def test():
        async with kproxy(**limited(idle_timeout_s=2.0)) as here:
            idle, idle_broker = await here.connect()
            used, used_broker = await here.connect()
            waits, waits_broker = await here.connect()
            await waits.send(request(HEARTBEAT, 4, 1))
            await waits_broker.frame()
            ended = asyncio.create_task(idle.rest())
            for number in range(1000):
                await used.send(request(HEARTBEAT, 4, number))
                assert await used_broker.frame() == request(HEARTBEAT, 4, number)
                await used_broker.send(response(HEARTBEAT, 4, number))
                await used.frame()
                passes(here, 0.25)
                if here.limits and number > 8:
                    break
            assert await ended == b"", "an end, not a reset"
            assert await idle_broker.rest() == b""
            await waits_broker.send(response(HEARTBEAT, 4, 1))
            assert await waits.frame() == response(HEARTBEAT, 4, 1), "a long poll is not idle"
            idle.close()
            await here.until(lambda: here.relays == 2)
            assert here.counted.disconnects == {"idle_timeout": 1}
            assert here.limits == {"idle_timeout_s": 1}
            passes(here, 4)  # each is checked
            passes(here, 4)  # now they are
            await here.until(lambda: here.relays == 0)

    live(test())


@pytest.mark.parametrize("part", (request(HEARTBEAT, 4, 1)[:-1], b"GET", b"\x16\3", b"\0"))
def test_a_connection_that_stops_in_the_middle_of_a_request_is_idle_too(passes, part):
    """This includes a connection that has not sent all bytes of its first request's size."""

    async def test():
        async with kproxy(**limited(idle_timeout_s=2.0)) as here:
            client, _ = await here.connect()
            await client.send(part)
            await here.until(lambda: _relay(here).session.received_bytes[CLIENT] == len(part))
            passes(here, 2)  # a check that sees new bytes
            assert not here.limits
            passes(here, 2)
            assert await client.rest() == b""
            await here.until(lambda: here.counted.disconnects == {"idle_timeout": 1})
            assert here.limits == {"idle_timeout_s": 1}

    live(test())


def test_an_old_connection_gets_the_answers_that_are_due_and_is_then_closed(passes):
    async def test():
        async with kproxy(**limited(max_age_s=3600.0)) as here:
            client, broker = await here.connect()
            await client.send(request(HEARTBEAT, 4, 1))
            await broker.frame()
            passes(here, 3600 * (1 - AGE_JITTER) - 2)
            assert not here.limits
            passes(here, 3600 * AGE_JITTER + 4)
            assert here.limits == {"max_age_s": 1}
            await broker.send(response(HEARTBEAT, 4, 1))
            assert await client.rest() == response(HEARTBEAT, 4, 1)
            client.close()
            await here.until(lambda: here.counted.disconnects == {"max_age": 1})
            assert here.limits == {"max_age_s": 1}

    live(test())


def test_kproxy_stops_reading_an_old_connection_that_always_has_a_request_in_flight(passes):
    async def test():
        async with kproxy(**limited(max_age_s=60.0)) as here:
            client, broker = await here.connect()
            await client.send(request(HEARTBEAT, 4, 1))
            await broker.frame()
            passes(here, 62)
            await client.send(request(HEARTBEAT, 4, 2))
            assert await broker.frame() == request(HEARTBEAT, 4, 2), "it is served for a while"
            passes(here, BUSY_S - 2)
            assert _relay(here)._finishing
            passes(here, 4)
            assert not _relay(here)._finishing
            await client.send(request(HEARTBEAT, 4, 3))
            assert await broker.is_silent()
            await broker.send(response(HEARTBEAT, 4, 1) + response(HEARTBEAT, 4, 2))
            assert await client.read(1000) == response(HEARTBEAT, 4, 1) + response(HEARTBEAT, 4, 2)
            await here.until(lambda: here.counted.disconnects == {"max_age": 1})

    live(test())


def _relay(here):
    (relay,) = here.server.relays.worker.relays.values()
    return relay


def test_the_wheel_drops_closed_connections_and_stops_when_it_is_empty(monkeypatch, passes):
    monkeypatch.setattr(ageing, "SLICE", 3)

    async def test():
        async with kproxy(**limited(max_age_s=3600)) as here:
            pairs = [await here.connect() for _ in range(10)]
            watching = here.server.relays.worker.ageing
            assert len(watching) == 10
            for client, broker in pairs[:9]:
                client.close()
                broker.close()
            await here.until(lambda: here.relays == 1)
            passes(here, 62)
            await here.until(lambda: len(watching) == 1)
            pairs[9][0].close()
            pairs[9][1].close()
            await here.until(lambda: here.relays == 0)
            passes(here, 62)
            await here.until(lambda: len(watching) == 0 and watching._timer is None)
            await here.connect()
            assert len(watching) == 1 and watching._timer is not None

    live(test())


def test_without_a_limit_nothing_is_watched():
    async def test():
        async with kproxy() as here:
            await here.connect()
            assert len(here.server.relays.worker.ageing) == 0 and here.server.relays.worker.ageing._timer is None

    live(test())

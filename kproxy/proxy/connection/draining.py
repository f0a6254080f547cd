"""Drains connections: closes one after the other, each when all its requests are answered.

If kproxy closed all idle clients at once, they would all reconnect at once, to the remaining kproxies. It therefore
spreads the connections' turns evenly over the drain, and serves each one as usual until its turn. From then on, it
closes the connection as soon as all requests received are answered. A client that always has requests in flight would
never be closed: near the end of the drain kproxy stops reading it, and delivers the pending answers. It stops reading
a connection with more than MANY_IN_FLIGHT requests in flight earlier, so that a slow broker has time to answer them.

The spread of few connections is short, so that a small kproxy stops soon. Refuses to know listeners and signals.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection
from typing import NamedTuple

from kproxy.proxy.relay.relay import Relay
from kproxy.proxy.tasks import waited

SPREAD_SHARE = 0.75  # share of the drain's time over which connections' turns are spread
LAST_SHARE = 0.85  # share of the drain's time after which no new request is read
EARLY_SHARE = 0.5  # the same for a connection with more than MANY_IN_FLIGHT requests in flight
MANY_IN_FLIGHT = 16
SPREAD_PER_CONNECTION_S = 0.1
_POLL_S = 0.02
_TURN = 64  # relays handled per turn of the event loop

log = logging.getLogger("kproxy.server")


class Drained(NamedTuple):
    """How many connections finished, and how many were closed before their requests were answered."""

    finished: int
    closed: int


def spread_s(connections: int, timeout_s: float) -> float:
    """Return over how many seconds to spread the turns of so many connections."""
    return min(SPREAD_SHARE * timeout_s, SPREAD_PER_CONNECTION_S * connections)


async def drain(
    relays: Collection[Relay], timeout_s: float, at_once: asyncio.Event, cause: str, *, serves: bool = True
) -> Drained:
    """Let connections finish within `timeout_s` seconds, or until `at_once`; the others are closed then.

    cause: for the log. serves: whether a connection is still served after its turn while it has requests in flight;
    False: no new request is read from its turn on.
    """
    relays = [relay for relay in relays if not relay.closed]
    random.shuffle(relays)
    loop = asyncio.get_running_loop()
    start = loop.time()
    over_s = spread_s(len(relays), timeout_s)
    asks = asyncio.create_task(_end_each(relays, over_s, random.random, serves=serves))

    async def until(end: float) -> None:
        while any(not relay.closed for relay in relays) and loop.time() < end and not at_once.is_set():
            await waited(at_once, min(_POLL_S, end - loop.time()))

    try:
        await until(start + EARLY_SHARE * timeout_s)
        async for relay in _open(relays):
            if len(relay.session.pending) > MANY_IN_FLIGHT:
                relay.drain()
        await until(start + LAST_SHARE * timeout_s)
        async for relay in _open(relays):
            relay.drain()
        await until(start + timeout_s)
    finally:
        asks.cancel()
    unfinished = [relay for relay in relays if not relay.closed]
    if unfinished:
        text = "%s: %d connections did not finish in time and are closed: drain_timeout_s=%g"
        log.warning(text, cause, len(unfinished), timeout_s)
    closed = 0
    async for relay in _open(unfinished):
        relay.close("drain_timeout")
        closed += 1
    return Drained(len(relays) - closed, closed)


async def _open(relays: Collection[Relay]) -> AsyncIterator[Relay]:
    """Yield the relays that are open when their turn comes: _TURN per turn of the event loop."""
    for number, relay in enumerate(relays, 1):
        if not relay.closed:
            yield relay
        if number % _TURN == 0:
            await asyncio.sleep(0)


async def _end_each(relays: Collection[Relay], over_s: float, jitter: Callable[[], float], *, serves: bool) -> None:
    """Ask the connections to end one by one, each at a random time within its share of `over_s`."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    share_s = over_s / max(1, len(relays))
    for number, relay in enumerate(relays):
        wait_s = start + share_s * (number + jitter()) - loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        elif number % _TURN == 0:
            await asyncio.sleep(0)
        if relay.closed:
            continue
        if serves:
            relay.finish()
        else:
            relay.drain()

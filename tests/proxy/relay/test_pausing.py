"""A relay pauses between two requests, also while one is in transit; afterwards the client continues undisturbed."""

import asyncio

from kproxy.protocol.apis import METADATA
from kproxy.proxy.relay.relay import Relay
from tests.proxy.live import Live, Wire, behind_kproxy, request, response

AUTHENTICATE = 36
MINE = request(AUTHENTICATE, 2, 9, {"authBytes": b"secret"}, client="kproxy")
ANSWER = response(AUTHENTICATE, 2, 9, {})
BODY = {"topics": [{"name": "t" * 200}]}


def relay_of(here: Live) -> Relay:
    (relay,) = here.server.relays.worker.relays.values()
    return relay


@behind_kproxy()
async def test_a_pause_begins_after_the_request_in_transit_and_reads_no_byte_of_the_next(
    here: Live, client: Wire, broker: Wire
) -> None:
    first, second = request(METADATA, 12, 1, BODY), request(METADATA, 12, 2, BODY)
    await client.send(first[:50])
    assert await broker.read(50) == first[:50]
    relay = relay_of(here)
    paused = asyncio.Event()
    relay.pause(paused.set)
    await client.send(first[50:60])
    assert await broker.read(10) == first[50:60]
    assert not paused.is_set()
    await client.send(first[60:] + second)
    await paused.wait()
    assert await broker.read(len(first) - 60) == first[60:]
    assert await broker.is_silent()
    got: list[bytes] = []
    assert relay.ask(MINE, got.append, "kproxy")
    assert await broker.frame() == MINE
    assert await broker.is_silent()
    await broker.send(response(METADATA, 12, 1) + ANSWER)
    assert await client.frame() == response(METADATA, 12, 1)
    await here.until(lambda: got)
    assert got == [ANSWER]
    relay.go_on()
    assert await broker.frame() == second
    await broker.send(response(METADATA, 12, 2))
    assert await client.frame() == response(METADATA, 12, 2)
    client.close()
    assert await broker.rest() == b""


@behind_kproxy()
async def test_a_drain_during_a_pause_delivers_pending_responses(here: Live, client: Wire, broker: Wire) -> None:
    await client.send(request(METADATA, 12, 1))
    await broker.frame()
    relay = relay_of(here)
    paused = asyncio.Event()
    relay.pause(paused.set)
    await paused.wait()
    got: list[bytes] = []
    assert relay.ask(MINE, got.append, "kproxy")
    await broker.frame()
    relay.drain()
    assert await client.is_silent()
    await broker.send(response(METADATA, 12, 1) + ANSWER)
    assert await client.rest() == response(METADATA, 12, 1)
    relay.go_on()
    client.close()
    await here.until(lambda: not here.relays)
    assert got == [ANSWER] and not relay.ask(MINE, got.append, "kproxy")
    assert here.counted.disconnects == {"drained": 1}


@behind_kproxy()
async def test_a_disconnect_during_a_pause_is_noticed_after_it(here: Live, client: Wire, broker: Wire) -> None:
    relay = relay_of(here)
    paused = asyncio.Event()
    relay.pause(paused.set)
    await paused.wait()
    client.close()
    await asyncio.sleep(0.05)
    assert here.relays == 1
    relay.go_on()
    assert await broker.rest() == b""

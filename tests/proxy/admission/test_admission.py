"""Clients beyond a limit are closed at once, counted by limit and named in the log; other clients are not affected."""

import asyncio
from contextlib import suppress

import pytest

from kproxy.protocol.apis import HEARTBEAT
from kproxy.proxy.admission import admission
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.limits import Limits
from kproxy.proxy.config.tls import ClientTls
from kproxy.proxy.sockets.proxy_header import write
from tests.certificates import Authority
from tests.proxy.live import HOST, Wire, kproxy, live, request, response


def limited(proxied=False, **limits):
    if proxied:
        return {"accept_proxy_protocol": True, "trusted_proxies": (*_NETWORKS,), "limits": Limits(**limits)}
    return {"limits": Limits(**limits)}


_NETWORKS = Limits(unlimited_addresses=["127.0.0.0/8"]).unlimited_addresses


async def is_closed(wire):
    with suppress(ConnectionResetError):
        return await wire.read(1) == b""
    return True


async def talks(client, broker, number):
    await client.send(request(HEARTBEAT, 4, number))
    assert await broker.frame() == request(HEARTBEAT, 4, number)
    await broker.send(response(HEARTBEAT, 4, number))
    assert await client.frame() == response(HEARTBEAT, 4, number)


@pytest.mark.parametrize(
    "limit, value", [("max_connections", 2), ("max_connections_per_address", 2), ("max_connection_rate", 2)]
)
def test_a_client_beyond_a_limit_is_closed_at_once(limit, value, caplog, monkeypatch):
    now_s = 100.0  # rates are measured by a clock that stands still
    monkeypatch.setattr(admission, "monotonic", lambda: now_s)

    async def test():
        async with kproxy(cluster=limited(**{limit: value})) as here:
            pairs = [await here.connect() for _ in range(2)]
            for _ in range(5):
                assert await is_closed(await Wire.dial(here.port))
            assert here.limits == {limit: 5}
            assert here.counted.disconnects == {"limit": 5}
            for number, (client, broker) in enumerate(pairs):
                await talks(client, broker, number)
            lines = [line for line in caplog.messages if line.startswith("refused=limit")]
            assert len(lines) == 1 and limit in lines[0] and f"client={HOST}:" in lines[0]
            pairs[0][0].close()
            pairs[0][1].close()
            await here.until(lambda: here.relays == 1)
            if limit == "max_connection_rate":
                nonlocal now_s
                now_s += 0.6
            client, broker = await here.connect()
            await talks(client, broker, 9)

    live(test())


def test_refused_clients_are_not_counted_as_open_connections():
    async def test():
        limits = limited(max_connections=3, max_connections_per_address=1)
        async with kproxy(cluster=limits) as here:
            first = await here.connect()
            for _ in range(10):
                assert await is_closed(await Wire.dial(here.port))
            assert here.limits == {"max_connections_per_address": 10}
            limits = here.server.clusters[0]._connections.admission._limits
            assert limits.connections == 1
            for wire in first:
                wire.close()
            await here.until(lambda: limits.connections == 0)
            assert not limits._open and here.server.relays.worker.gate.connections == 0

    live(test())


def test_behind_a_balancer_the_address_is_the_clients_own():
    async def test():
        here_is = Address("192.0.2.1", 9092)
        async with kproxy(cluster=limited(True, max_connections_per_address=1)) as here:

            async def comes(host):
                wire = await Wire.dial(here.port)
                await wire.send(write("v2", Address(host, 1234), here_is) + request(HEARTBEAT, 4, 7))
                return wire

            first = await comes("203.0.113.1")
            brokers = [await here.broker.accept()]
            assert await brokers[0].frame() == request(HEARTBEAT, 4, 7)
            assert await is_closed(await comes("203.0.113.1"))
            second = await comes("203.0.113.2")
            brokers.append(await here.broker.accept())
            assert await brokers[1].frame() == request(HEARTBEAT, 4, 7)
            assert here.limits == {"max_connections_per_address": 1}
            for wire in (first, brokers[0]):
                wire.close()
            await here.until(lambda: here.relays == 1)
            third = await comes("203.0.113.1")
            await here.broker.accept()
            second.close()
            third.close()

    live(test())


def test_behind_a_balancer_an_address_beyond_its_limit_gets_no_handshake(tmp_path):
    """Otherwise one address could use up all connections and guess passwords at any rate, uncounted."""
    settings = ClientTls(**Authority(tmp_path).server().settings())

    async def test():
        here_is = Address("192.0.2.1", 9092)
        limits = limited(True, max_connections_per_address=1, max_connections=3, handshake_timeout_s=60)
        async with kproxy(cluster=limits | {"tls": settings}) as here:

            async def comes(host):
                wire = await Wire.dial(here.port)
                await wire.send(write("v2", Address(host, 1234), here_is))
                return wire

            counted = here.server.clusters[0]._connections.admission._limits
            first = await comes("203.0.113.1")
            await here.until(lambda: counted._open == {"203.0.113.1": 1})
            for number in range(1, 6):
                assert await is_closed(await comes("203.0.113.1"))
                assert here.limits == {"max_connections_per_address": number}
            second = await comes("203.0.113.2")
            await here.until(lambda: len(counted._open) == 2)
            first.close()  # in the middle of its handshake
            await here.until(lambda: counted._open == {"203.0.113.2": 1} and counted.connections == 1)
            second.close()
            await here.until(lambda: counted.connections == 0)
            assert not counted._open

    live(test())


def test_a_silent_client_is_closed_after_the_handshake_timeout(caplog):
    async def test():
        async with kproxy(cluster=limited(True, handshake_timeout_s=0.3)) as here:
            silent = await Wire.dial(here.port)
            slow = await Wire.dial(here.port)
            await slow.send(b"PROXY TCP4 ")
            assert await is_closed(silent) and await is_closed(slow)
            assert here.counted.disconnects == {"handshake_timeout": 2}
            assert here.limits == {"handshake_timeout_s": 2}
            assert here.server.relays.worker.gate.connections == 0
        assert "within 0.3 s" in caplog.text and "handshake_timeout_s" in caplog.text

    live(test())


@pytest.mark.parametrize("limit", [1, 2])
def test_a_request_in_parts_is_read_to_its_end_at_any_limit_of_requests_in_flight(limit):
    async def test():
        async with kproxy(cluster=limited(max_requests_in_flight=limit)) as here:
            client, broker = await here.connect()
            for number in range(3):
                asked = request(HEARTBEAT, 4, number, {"groupId": "g" * 100})
                for part in (asked[:20], asked[20:50], asked[50:] + asked[:14]):
                    await client.send(part)
                    await asyncio.sleep(0.02)
                assert await broker.frame() == asked
                await broker.send(response(HEARTBEAT, 4, number))
                assert await client.frame() == response(HEARTBEAT, 4, number)
                await client.send(asked[14:])
                assert await broker.frame() == asked
                await broker.send(response(HEARTBEAT, 4, number))
                assert await client.frame() == response(HEARTBEAT, 4, number)

    live(test())


def test_a_connection_has_no_more_requests_in_flight_than_its_limit():
    async def test():
        async with kproxy(cluster=limited(max_requests_in_flight=3)) as here:
            client, broker = await here.connect()
            for number in range(10):
                await client.send(request(HEARTBEAT, 4, number))
            size = len(request(HEARTBEAT, 4, 0))
            for number in range(3):
                assert await broker.frame() == request(HEARTBEAT, 4, number)
            assert await broker.is_silent()
            for number in range(10):
                await broker.send(response(HEARTBEAT, 4, number))
                assert await client.frame() == response(HEARTBEAT, 4, number)
                if number + 3 < 10:
                    assert await broker.read(size) == request(HEARTBEAT, 4, number + 3)
            assert here.limits["max_requests_in_flight"] > 0

    live(test())

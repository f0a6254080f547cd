"""Memory pressure: all relays together keep a limited amount, and connections that keep little are not affected."""

import asyncio
import socket
from functools import cache

import pytest

from kproxy.protocol.apis import DESCRIBE_GROUPS
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.relay import in_flight, pressure
from kproxy.proxy.relay.pressure import FREE_REQUESTS, Pressure
from kproxy.wire import pairing
from tests.proxy import live as here_live
from tests.proxy.live import Secured, kproxy, live
from tests.wire.playbook import foreign_request, request, sized


def asked(count: int) -> bytes:
    return b"".join(foreign_request(9999, 0, number) for number in range(count))


def test_pending_requests_of_all_connections_are_limited_but_each_may_have_a_few(monkeypatch):
    """Floods use up the shared quota; a client with few requests is served meanwhile, and freed quota is lent again."""
    monkeypatch.setattr(pressure, "MOST_REQUESTS", 2 * pairing.LIMIT)

    async def test():
        async with kproxy() as here:
            kept = here.server.relays.worker.pressure
            floods = [await here.connect() for _ in range(4)]
            sending = [asyncio.create_task(client.send(asked(2 * pairing.LIMIT))) for client, _ in floods]
            relays = list(here.server.relays.worker.relays.values())
            reading = [asyncio.create_task(broker.rest()) for _, broker in floods]
            await here.until(lambda: all(one._in_flight_state == in_flight.FULL for one in relays))

            def waiting() -> list[int]:
                return [len(one.session.pending) for one in relays]

            await here.until(lambda: min(waiting()) >= FREE_REQUESTS and max(waiting()) > 4 * FREE_REQUESTS)
            assert sum(waiting()) <= 2 * pairing.LIMIT + len(floods) * FREE_REQUESTS
            assert kept.lent == sum(one.session.max_in_flight - FREE_REQUESTS for one in relays)
            assert here.limits["pending_requests"] > 0

            client, broker = await here.connect()
            few = asked(FREE_REQUESTS - 1)
            await client.send(few)
            assert await broker.read(len(few)) == few
            await broker.send(b"".join(sized(number.to_bytes(4)) for number in range(FREE_REQUESTS - 1)))
            assert len(await client.read(8 * (FREE_REQUESTS - 1))) == 8 * (FREE_REQUESTS - 1)

            for task in (*sending, *reading):
                task.cancel()
            for pair in floods:
                pair[0].reset()
            await here.until(lambda: here.relays == 1)
            assert kept.lent == kept.kept_bytes == 0
            again = asked(pairing.LIMIT)
            sending = [asyncio.create_task(client.send(again))]
            assert await broker.read(len(again)) == again
            await broker.send(b"".join(sized(number.to_bytes(4)) for number in range(pairing.LIMIT)))
            await client.read(8 * pairing.LIMIT)
            await here.until(lambda: kept.lent == 0)
            for wire in (client, broker, *(end for pair in floods for end in pair)):
                wire.close()

    live(test())


def test_few_half_closed_clients_with_unread_requests_are_kept(monkeypatch):
    """The kernel buffers their requests; the client that has waited longest is closed, others get their responses."""
    monkeypatch.setattr(pressure, "MOST_ENDED", 3)
    monkeypatch.setattr(pressure, "MOST_REQUESTS", 0)
    monkeypatch.setattr(in_flight, "GONE_S", 3600)
    count = 2 * FREE_REQUESTS
    answers = [sized(number.to_bytes(4)) for number in range(count)]

    async def test():
        async with kproxy() as here:
            open_client, open_broker = await here.connect()
            await open_client.send(asked(count))
            pairs = []
            for known in range(1, 9):
                client, broker = await here.connect()
                pairs.append((client, broker))
                await client.send(asked(count))
                client.end()
                await here.until(lambda known=known: here.limits.get("ended_clients", 0) == max(0, known - 3))
                if known <= 3:
                    await here.until(lambda known=known: len(here.server.relays.worker.pressure._ended) == known)
                assert here.relays == 1 + min(known, 3)
            assert here.counted.disconnects == {"client_closed": 5}
            for client, broker in [(open_client, open_broker), *pairs[-3:]]:
                assert await broker.read(len(asked(count)) // 2) == asked(FREE_REQUESTS)
                await broker.send(b"".join(answers))
                assert await client.read(8 * count) == b"".join(answers)
            await here.until(lambda: not here.server.relays.worker.pressure._ended)
            for pair in ((open_client, open_broker), *pairs):
                for wire in pair:
                    wire.reset()

    live(test())


@pytest.mark.parametrize("put_back", [True, False])
def test_reads_are_short_while_much_is_buffered(put_back, monkeypatch):
    """With floods of small requests, and with brokers that do not read: the limit plus a little per connection."""
    monkeypatch.setattr(pressure, "MANY_BYTES", 1 << 20)

    async def test():
        async with kproxy() as here:
            kept = here.server.relays.worker.pressure
            data = asked(40_000) if put_back else foreign_request(9999, 0, 1, b"x" * (8 << 20))
            floods = [await here.connect() for _ in range(12)]
            for _, broker in floods:  # else the kernel may buffer all of it, by tcp_rmem
                broker.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
            sending = [asyncio.create_task(client.send(data)) for client, _ in floods]
            await here.until(lambda: here.limits.get("kept_bytes"))
            most = 0
            while most <= 1 << 20:
                await asyncio.sleep(0.001)
                most = max(most, kept.kept_bytes)
            for _ in range(100):
                await asyncio.sleep(0.005)
                most = max(most, kept.kept_bytes)
            assert 1 << 20 < most < (1 << 20) + len(kept.whole) + 12 * pressure.FEW_BYTES
            for task in sending:
                task.cancel()
            for pair in floods:
                for wire in pair:
                    wire.reset()
            await here.until(lambda: not here.relays)
            assert kept.kept_bytes == 0 and kept.buffer is kept.whole

    live(test())


def test_keep_reports_only_the_change_to_short_reads():
    kept = Pressure(memoryview(bytearray(64 * 1024)))
    assert not kept.keep(pressure.MANY_BYTES) and kept.buffer is kept.whole
    assert kept.keep(1) and len(kept.buffer) == pressure.FEW_BYTES
    assert not kept.keep(1) and not kept.keep(-2) and kept.buffer is kept.whole


NAMES = [f"secret-{number}".ljust(30_000, "x") for number in range(300)]
DENIES = {"policy": (Rule(action="deny", group="secret-*"),)}


@cache
def refused_request() -> bytes:
    """A request of 9 MB, whose refusal is as large: more than the kernel buffers."""
    return request(DESCRIBE_GROUPS, 4, 1, {"groups": NAMES})


def test_unsent_large_frames_are_limited(monkeypatch):
    """Clients do not read their refusals: the one that has waited longest is closed, and all memory is released."""
    monkeypatch.setattr(pressure, "MOST_LARGE_BYTES", 20 << 20)
    monkeypatch.setattr(pressure, "PATIENCE_NS", 0)

    async def test():
        async with kproxy(cluster=DENIES) as here:
            kept = here.server.relays.worker.pressure
            pairs = []
            for number in range(6):
                client, broker = await here.connect()
                pairs.append((client, broker))
                await client.send(refused_request())
                await here.until(
                    lambda number=number: len(kept._large) + here.limits.get("unsent_frames", 0) == number + 1
                )
                assert kept.large_bytes <= kept.kept_bytes <= 20 << 20
            closed = here.limits["unsent_frames"]
            assert closed >= 2 and here.relays == 6 - closed and here.counted.disconnects == {"client_stalled": closed}
            client, broker = pairs[-1]
            assert len(await client.frame()) > 8 << 20  # an open client gets its whole response
            for pair in pairs:
                for wire in pair:
                    wire.reset()
            await here.until(lambda: not here.relays)
            assert kept.kept_bytes == kept.large_bytes == len(kept._large) == 0
            assert here.server.relays.worker.held._held_bytes == 0

    live(test())


def test_the_newest_connection_is_closed_if_none_has_waited_long(monkeypatch):
    monkeypatch.setattr(pressure, "MOST_LARGE_BYTES", 1 << 20)

    async def test():
        async with kproxy(cluster=DENIES) as here:
            client, _ = await here.connect()
            await client.send(refused_request())
            await here.until(lambda: not here.relays)
            assert here.limits["unsent_frames"] == 1
            assert here.server.relays.worker.pressure.kept_bytes == here.server.relays.worker.pressure.large_bytes == 0

    live(test())


def test_bytes_buffered_by_tls_count_too(tmp_path, monkeypatch):
    """Responses are encrypted for clients that do not read."""
    monkeypatch.setattr(here_live, "secured", Secured.make(tmp_path))
    monkeypatch.setattr(pressure, "MANY_BYTES", 1 << 20)
    monkeypatch.setattr(pressure, "MOST_REQUESTS", 0)

    async def test():
        async with kproxy() as here:
            kept = here.server.relays.worker.pressure
            pairs = [await here.connect() for _ in range(12)]  # the rest of a read has any size
            tasks = []
            for client, broker in pairs:
                await client.send(asked(1))
                await broker.frame()
                tasks.append(asyncio.create_task(broker.send(sized((0).to_bytes(4) + bytes(8 << 20)))))
            peers = [peer for relay in here.server.relays.worker.relays.values() for peer in relay._peers]
            await here.until(lambda: kept.kept_bytes > 1 << 20 and sum(peer.tls.held_bytes for peer in peers) > 1 << 16)
            for _ in range(100):
                assert sum(peer.tls.held_bytes for peer in peers) <= kept.kept_bytes + len(pairs) * 64 * 1024
                assert kept.kept_bytes < (1 << 20) + len(kept.whole) + len(peers) * 2 * pressure.FEW_BYTES
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            for pair in pairs:
                for wire in pair:
                    wire.reset()
            await here.until(lambda: not here.relays)
            assert kept.kept_bytes == 0

    live(test())


def test_deferred_bytes_are_released_after_a_fault(monkeypatch):
    """A fault of the broker closes a connection while bytes of its client wait."""
    monkeypatch.setattr(pressure, "MOST_REQUESTS", 0)

    async def test():
        async with kproxy() as here:
            kept = here.server.relays.worker.pressure
            for _ in range(3):
                client, broker = await here.connect()
                await client.send(asked(5000))
                await here.until(lambda: kept.kept_bytes > 10_000)
                await broker.send(sized((77).to_bytes(4)))  # an unknown correlation id
                await here.until(lambda: not here.relays)
                assert kept.kept_bytes == kept.lent == 0
                client.close()
                broker.close()
            assert here.counted.faults == {("broker", "unexpected_answer"): 3}

    live(test())

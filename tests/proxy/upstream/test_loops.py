"""Connections from kproxy to itself are refused, whatever the notation of the address or the proxies between."""

import asyncio
import socket
from collections import Counter

import pytest

from kproxy.errors import UpstreamError
from kproxy.proxy.cluster import discovery
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.connection import loops as connection_loops
from kproxy.proxy.process.server import Server
from kproxy.proxy.sockets.listeners import Gate, Listener, is_local
from kproxy.proxy.upstream import loops
from tests.proxy.live import HOST, Broker, Live, Wire, free_ports, kproxy, live, request

SPELLINGS = ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "0", "127.1", "2130706433", "localhost", "0x7f000001")


def counted(server: Server) -> int:
    return sum(cells.upstream.loops for cells in server.metrics.clusters.values() if cells.upstream)


@pytest.mark.parametrize("host", SPELLINGS)
def test_a_broker_address_that_is_kproxys_own_causes_no_loop_in_any_notation(host, caplog):
    async def test():
        # With `advertise`, the address mapping cannot recognise the address as kproxy's own.
        async with kproxy(advertise="kproxy.example:{port}", max_connections=50, wait=False) as here:
            port = here.port + 1
            await here.broker.answer_kproxy([{"nodeId": 0, "host": host, "port": port}])
            await here.until(lambda: not here.server.not_ready())
            for _ in range(3):
                assert await (await Wire.dial(port)).rest() == b""
            assert here.relays == 0
            assert counted(here.server) == 3
            for _ in range(45):  # nearly max_connections: the loop used up none
                await here.connect()

    live(test())
    assert "is kproxy itself" in caplog.text
    assert "must name the broker's own" in caplog.text


def test_a_listener_knows_its_own_addresses():
    async def test():
        gate = Gate(10)
        everywhere = Listener(gate, ["0.0.0.0"], 0, 1, lambda *_: None)
        loopback = Listener(gate, [HOST], 0, 1, lambda *_: None)
        for host in (HOST, "0.0.0.0", "::ffff:127.0.0.1", "127.0.0.9", "::ffff:0.0.0.0"):
            assert gate.is_ours(host, everywhere.port)
        for host in ("192.0.2.1", "::1", "::", "a-name"):
            assert not gate.is_ours(host, everywhere.port)
        for host in (HOST, "0.0.0.0", "::ffff:127.0.0.1"):
            assert gate.is_ours(host, loopback.port)
        assert not gate.is_ours("127.0.0.9", loopback.port)
        assert not gate.is_ours(HOST, loopback.port + 1)
        if is_local("::1"):
            six = Listener(gate, ["::"], 0, 1, lambda *_: None)
            assert gate.is_ours("::1", six.port)
            assert gate.is_ours("::", six.port)
            assert not gate.is_ours(HOST, six.port)
        gate.close()

    live(test())


def test_kproxys_own_connections_are_recognised_by_their_addresses():
    guard = loops.LoopGuard(lambda *_: False)
    with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        upstream = Address(*listener.getsockname())
        guard.dialled(sock, upstream)
        guard.connected(upstream, sock)
        accepted, peer = listener.accept()

        def own():
            return Address(*accepted.getsockname())

        with accepted:
            assert guard.is_own(Address(*peer), own) == upstream
            assert guard.is_own(Address(f"::ffff:{peer[0]}", peer[1]), own) == upstream
            with socket.create_server((HOST, 0)) as elsewhere:  # a client may have the same port, elsewhere
                assert guard.is_own(Address(*peer), lambda: Address(*elsewhere.getsockname())) is None
            guard.closed(guard.own_end(sock))
            assert guard.is_own(Address(*peer), own) is None


def test_a_connection_to_kproxys_own_listener_is_a_loop_whatever_address_was_dialled():
    """With address translation by the kernel, only the connected socket shows its destination."""
    with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        guard = loops.LoopGuard(lambda *address: address == listener.getsockname())
        elsewhere = Address("192.0.2.1", 9092)
        guard.check(elsewhere, elsewhere)
        guard.dialled(sock, elsewhere)
        with pytest.raises(UpstreamError, match="is kproxy itself") as caught:
            guard.connected(elsewhere, sock)
        assert caught.value.cause == "loop"


def test_only_kproxys_own_request_proves_a_loop_and_a_response_clears_it():
    guard, other = loops.LoopGuard(lambda *_: False), loops.LoopGuard(lambda *_: False)
    upstream = Address("192.0.2.1", 9092)
    question = request(18, 0, 1) + guard.asks(upstream).encode()
    assert guard.came_back(question) == upstream
    assert other.came_back(question) is None
    assert guard.came_back(b"kproxy-0.1.0-") is None
    guard.refuse(upstream)
    with pytest.raises(UpstreamError, match="leads back to this kproxy") as caught:
        guard.check(Address("kafka", 9092), upstream)
    assert caught.value.cause == "loop"
    guard.check(Address("kafka", 9092), upstream, asking=True)
    guard.answers(upstream)
    guard.check(Address("kafka", 9092), upstream)


class Relaying:
    """A plain TCP proxy, like a load balancer or a port mapping between kproxy and itself."""

    def __init__(self, port: int) -> None:
        self.target: int | None = None
        self._server: asyncio.Server
        self._port = port
        self.connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection(HOST, self.target)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(1 << 16):
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    def stop(self) -> None:
        self._server.close()


def test_a_bootstrap_that_leads_back_through_a_proxy_is_found(caplog):
    async def test():
        port = free_ports(8)
        between = Relaying(port + 7)
        between.target = port
        await between.start()
        server = Server(
            load(flags={"listen": f"{HOST}:{port}", "bootstrap": f"{HOST}:{port + 7}", "max_connections": 200})
        )
        await server.start()
        here = Live(server, Broker())
        await here.until(lambda: "leads back to this kproxy" in "".join(server.not_ready()))
        await here.until(lambda: here.relays == 0)
        assert between.connections < 30  # not 200, the limit
        clients = [await Wire.dial(port) for _ in range(5)]
        assert [await client.rest() for client in clients] == [b""] * 5
        await here.until(lambda: here.relays == 0)
        assert counted(server) > 0
        # Corrected: the proxy now leads to a broker.
        between.target = here.broker.port
        await here.broker.answer_kproxy()
        await here.until(lambda: not server.not_ready())
        client, _ = await here.connect()
        client.close()
        between.stop()
        await server.stop()

    live(test())
    assert "kproxy's own question" in caplog.text


def test_two_kproxys_that_are_each_others_bootstrap_open_few_connections(monkeypatch):
    monkeypatch.setattr(discovery, "LAST_RETRY_S", 0.2)
    rounds: Counter[discovery.Discovery] = Counter()
    a_round = discovery.Discovery._round

    async def counted(its: discovery.Discovery) -> str:
        rounds[its] += 1  # the earlier rounds have been reported
        return await a_round(its)

    monkeypatch.setattr(discovery.Discovery, "_round", counted)

    async def test():
        one, other = free_ports(6), free_ports(6)
        servers = [
            Server(load(flags={"listen": f"{HOST}:{a}", "bootstrap": f"{HOST}:{b}", "max_connections": 300}))
            for a, b in ((one, other), (other, one))
        ]
        for server in servers:
            await server.start()
        most = 0
        while len(rounds) < len(servers) or min(rounds.values()) < 4:
            most = max(most, *[len(server.relays.worker.relays) for server in servers])
            await asyncio.sleep(0.005)
        assert most < 50
        assert all(server.not_ready() for server in servers)
        assert any("leads back to this kproxy" in "".join(server.not_ready()) for server in servers)
        for server in servers:
            await server.stop()

    live(test())


def test_a_brokers_address_that_leads_back_through_a_proxy_is_found(monkeypatch, caplog):
    """kproxy sends no requests of its own there, unless the number of connections is suspicious."""
    monkeypatch.setattr(connection_loops, "PROBED_AT", 8)
    monkeypatch.setattr(loops, "REFUSED_S", 1.0)

    async def test():
        port = free_ports(8)
        between = Relaying(port + 7)
        between.target = port + 1
        await between.start()
        async with kproxy(port=port, max_connections=400, wait=False) as here:
            await here.broker.answer_kproxy([{"nodeId": 0, "host": HOST, "port": port + 7}])
            await here.until(lambda: not here.server.not_ready())
            client = await Wire.dial(port + 1)
            with pytest.raises(ConnectionError):
                assert await client.rest() == b""
                raise ConnectionError
            await here.until(lambda: here.relays == 0)
            assert between.connections < 200
            assert f"connections to {HOST}:{port + 7} lead back" in "".join(here.server.not_ready())
            await here.connect()
            # Corrected: kproxy tries again soon, also without a client.
            between.target = here.broker.port
            await here.until(lambda: not here.server.not_ready())
            client = await Wire.dial(port + 1)
            await here.broker.accept()
            client.close()
        between.stop()

    live(test())
    assert "loop cluster=default" in caplog.text

"""PROXY protocol: kproxy learns client addresses from HAProxy, and sends them to a balancer before the brokers."""

import asyncio
import shutil
import subprocess
from contextlib import asynccontextmanager, suppress

import pytest

from kproxy.protocol.apis import HEARTBEAT
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.limits import Limits
from kproxy.proxy.sockets.proxy_header import read, write
from tests.ports import free_ports
from tests.proxy.admission.test_admission import is_closed, talks
from tests.proxy.live import HOST, Broker, Wire, kproxy, live, request

ANYBODY = Limits(unlimited_addresses=["127.0.0.0/8"]).unlimited_addresses
NOBODY = Limits(unlimited_addresses=["10.0.0.0/8"]).unlimited_addresses
EXPECTED = {"accept_proxy_protocol": True, "trusted_proxies": ANYBODY}

needs_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="HAProxy is not installed")


@asynccontextmanager
async def haproxy(folder, bind, server):
    """A real HAProxy on the way: `bind` and `server` are options of its two lines. Gives its port."""
    port = free_ports(1)
    config = folder / f"haproxy-{port}.cfg"
    config.write_text(
        "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n"
        f"listen kafka\n  bind {HOST}:{port} {bind}\n  server only {HOST}:{server}\n"
    )
    process = subprocess.Popen(["haproxy", "-db", "-q", "-f", str(config)])  # noqa: ASYNC220 - it takes no time
    try:
        while True:
            try:
                probe = await Wire.dial(port)
                break
            except ConnectionRefusedError:
                assert process.poll() is None
                await asyncio.sleep(0.02)
        probe.close()
        yield port
    finally:
        process.terminate()
        process.wait()


def own_address(wire):
    return str(Address(*wire.sock.getsockname()[:2]))


def clients_of(here):
    return [str(Address(r.info.client_address, r.info.client_port)) for r in here.server.relays.worker.relays.values()]


async def first_frame(here):
    """The first frame of a connection that has one: the check whether HAProxy is there ends, or is reset, before."""
    while True:
        with suppress(ConnectionResetError):
            if frame := await (await here.broker.accept()).frame():
                return frame


@needs_haproxy
@pytest.mark.parametrize("option", ["send-proxy", "send-proxy-v2", "send-proxy-v2 proxy-v2-options crc32c,unique-id"])
def test_behind_haproxy_a_client_has_its_own_address(option, tmp_path):
    async def test():
        async with kproxy(cluster=EXPECTED) as here, haproxy(tmp_path, "", f"{here.port} {option}") as port:
            client = await Wire.dial(port)
            await client.send(request(HEARTBEAT, 4, 0))
            frame = await first_frame(here)
            assert frame == request(HEARTBEAT, 4, 0), "not a byte of what follows is lost"
            assert own_address(client) in clients_of(here)

    live(test())


@needs_haproxy
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_haproxy_before_the_brokers_gets_the_addresses_of_clients(version, tmp_path):
    """HAProxy reads our header, writes one of its own, and that one names the client."""

    async def test():
        broker = Broker()
        server = f"{broker.port} send-proxy-v2"
        async with haproxy(tmp_path, "accept-proxy", server) as port:
            settings = {"proxy_protocol": version, "bootstrap": (Address(HOST, port),)}
            async with kproxy(broker, wait=False, cluster=settings) as here:
                client = await Wire.dial(here.port)
                await client.send(request(HEARTBEAT, 4, 0))
                while True:
                    wire = await broker.accept()
                    header = await header_of(wire)
                    if header.client is not None and str(header.client) == own_address(client):
                        break
                assert header.server == Address(HOST, here.port)
                assert await wire.frame() == request(HEARTBEAT, 4, 0)

    live(test())


async def header_of(wire):
    data = b""
    while isinstance(found := read(data), int):
        part = await wire.read(found)
        assert part
        data += part
    return found


def test_the_log_names_brokers_that_do_not_read_the_header(caplog):
    """Kafka closes: it reads the header as a request's size, which is above its limit."""

    async def hang_up(reader, writer):
        await reader.read(1 << 16)
        writer.close()

    async def test():
        server = await asyncio.start_server(hang_up, HOST, 0)
        bootstrap = f"{HOST}:{server.sockets[0].getsockname()[1]}"
        async with kproxy(Broker(port=0), wait=False, cluster={"proxy_protocol": "v2"}, bootstrap=bootstrap) as here:
            await here.until(lambda: "not ready" in caplog.text)
        server.close()

    live(test())
    assert "leave proxy_protocol out, unless a balancer" in caplog.text


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_two_kproxies_in_a_row_pass_the_client_on(version):
    async def test():
        async with kproxy(cluster=EXPECTED) as inner:
            settings = {"proxy_protocol": version}
            async with kproxy(Broker(port=0), wait=False, cluster=settings, bootstrap=f"{HOST}:{inner.port}") as outer:
                client = await Wire.dial(outer.port)
                await client.send(request(HEARTBEAT, 4, 0))
                await inner.until(lambda: own_address(client) in clients_of(inner))

    live(test())


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_header_may_be_split_at_any_byte(version):
    async def test():
        async with kproxy(cluster=EXPECTED) as here:
            ends = []
            for port in (1, 2):
                client = await Wire.dial(here.port)
                stream = write(version, Address("203.0.113.7", port), Address("192.0.2.1", 9092))
                for byte in stream + request(HEARTBEAT, 4, 5):
                    await client.send(bytes((byte,)))
                    await asyncio.sleep(0)
                broker = await here.broker.accept()
                assert await broker.frame() == request(HEARTBEAT, 4, 5)
                ends += [client, broker]
            assert clients_of(here) == ["203.0.113.7:1", "203.0.113.7:2"]

    live(test())


def test_a_check_of_the_balancer_itself_is_a_client_like_any_other():
    async def test():
        async with kproxy(cluster=EXPECTED) as here:
            client = await Wire.dial(here.port)
            await client.send(write("v2"))
            broker = await here.broker.accept()
            await talks(client, broker, 3)
            assert clients_of(here) == [own_address(client)]
            (await Wire.dial(here.port)).close()  # a check whether the port is open
            behind = await Wire.dial(here.port)
            await behind.send(write("v2"))
            await here.broker.accept()  # by then kproxy has accepted the check, which came before
            await here.until(lambda: here.server.relays.worker.gate.connections == 2)  # and has gone
            assert not here.counted.disconnects

    live(test())


@pytest.mark.parametrize(
    "sent, why",
    [
        (request(HEARTBEAT, 4, 1), "a Kafka request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "a TLS hello"),
        (b"PROXY TCP4 1.2.3.4 5.6.7.8 1\r\n", "two ports"),
        (b"PROXY TCP4 1.2.3.4", "ended within"),
        (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff", "at most"),
    ],
)
def test_a_client_without_a_header_is_refused_and_the_log_has_the_reason(sent, why, caplog):
    async def test():
        async with kproxy(cluster=EXPECTED) as here:
            client = await Wire.dial(here.port)
            await client.send(sent)
            client.end()
            assert await is_closed(client)
            assert here.counted.disconnects == {"proxy_header": 1}
            (line,) = [line for line in caplog.messages if line.startswith("refused=proxy_header")]
            assert why in line and "send-proxy" in line and "accept_proxy_protocol" in line

    live(test())


def test_a_header_from_an_address_that_is_no_balancer_is_refused(caplog):
    async def test():
        async with kproxy(cluster=EXPECTED | {"trusted_proxies": NOBODY}) as here:
            client = await Wire.dial(here.port)
            await client.send(write("v1", Address("10.0.0.1", 1), Address("10.0.0.2", 2)))
            assert await is_closed(client)
            assert here.counted.disconnects == {"untrusted_proxy": 1}
            assert f"{HOST} is not among trusted_proxies" in caplog.text

    live(test())


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_log_names_an_unexpected_header_and_the_setting_for_it(version, caplog):
    async def test():
        async with kproxy() as here:
            client, _ = await here.connect()
            await client.send(write(version, Address("10.0.0.1", 1), Address("10.0.0.2", 2)))
            assert await is_closed(client)
            assert here.counted.faults == {("client", "proxy_protocol"): 1}
            assert "set accept_proxy_protocol and trusted_proxies" in caplog.text

    live(test())

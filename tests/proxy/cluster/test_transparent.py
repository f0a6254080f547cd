"""Route transparent without a kernel that redirects: the test sets the original destinations of clients.

With one: tests/deploy/test_transparent.py, in network namespaces.
"""

import pytest

from kproxy.errors import ConfigError
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.proxy.cluster import transparent
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.limits import Limits, network
from kproxy.proxy.config.load import load
from kproxy.proxy.process.server import Server
from tests.proxy.live import HOST, Broker, Wire, free_ports, kproxy, live, request, response

UNREADABLE = 9999


async def ask_for_a_login(broker):
    """As a cluster that names its brokers only after one: it closes on Metadata."""
    wire = await broker.accept()
    await wire.frame()
    offers = [{"apiKey": METADATA, "minVersion": 0, "maxVersion": 12}]
    await wire.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": offers}))
    await wire.frame()
    wire.close()


def test_nothing_is_rewritten_and_brokers_are_learnt_from_answers_that_pass(monkeypatch):
    async def test():
        broker = Broker()
        monkeypatch.setattr(transparent, "original_destination", lambda _: Address(HOST, broker.port))
        async with kproxy(broker, wait=False, route="transparent") as here:
            await ask_for_a_login(broker)
            await here.until(lambda: not here.server.not_ready())  # a login is the clients' affair
            for known in ("bootstrap", "7"):
                client, wire = await here.connect()
                await client.send(request(METADATA, 12, 1))
                await wire.frame()
                brokers = [{"nodeId": 7, "host": HOST, "port": broker.port}]
                answer = response(METADATA, 12, 1, {"brokers": brokers})
                await wire.send(answer)
                assert await client.frame() == answer
                await here.until(lambda known=known: known in here.counted.brokers)
                await here.until(
                    lambda: here.server.clusters[0]._redirected.destinations.broker_at(Address(HOST, broker.port)) == 7
                )

    live(test())


def test_bytes_that_kproxy_cannot_read_pass_anyway(monkeypatch):
    """A version of ApiVersions beyond ours, an unknown API, and then no Kafka at all."""

    async def test():
        broker = Broker()
        monkeypatch.setattr(transparent, "original_destination", lambda _: Address(HOST, broker.port))
        async with kproxy(broker, route="transparent") as here:
            client, wire = await here.connect()
            for key, version in ((API_VERSIONS, 99), (METADATA, 99), (UNREADABLE, 0)):
                frame = b"\0\0\0\x0a" + key.to_bytes(2, "big") + version.to_bytes(2, "big") + b"\0\0\0\x01\xff\xff"
                await client.send(frame)
                assert await wire.frame() == frame
                await wire.send(b"\0\0\0\x06\0\0\0\x01ab")
                assert await client.frame() == b"\0\0\0\x06\0\0\0\x01ab"
            await client.send(b"GET / HTTP/1.1\r\n")
            assert await wire.read(16) == b"GET / HTTP/1.1\r\n"
            await wire.send(b"HTTP/1.1 200\r\n")
            assert await client.read(14) == b"HTTP/1.1 200\r\n"
            assert here.counted.faults[("client", "http")] == 1

    live(test())


def test_a_client_that_dials_kproxy_itself_is_refused():
    async def test():
        async with kproxy(route="transparent") as here:
            client = await Wire.dial(here.port)
            assert await client.rest() == b""
            await here.until(lambda: here.counted.disconnects["not_redirected"] == 1)

    live(test())


def test_a_client_beyond_a_limit_is_counted_at_this_listener(monkeypatch):
    async def test():
        broker = Broker()
        monkeypatch.setattr(transparent, "original_destination", lambda _: Address(HOST, broker.port))
        async with kproxy(
            broker, wait=False, route="transparent", cluster={"limits": Limits(max_connections=1)}
        ) as here:
            await ask_for_a_login(broker)
            first = await here.connect()
            assert await (await Wire.dial(here.port)).rest() == b""
            await here.until(lambda: here.counted.disconnects["limit"] == 1)
            (cells,) = here.server.metrics.clusters.values()
            counts = cells.brokers["bootstrap"].disconnects
            assert {listener for (listener, _), count in counts.items() if count} == {"transparent"}
            for wire in first:
                wire.close()

    live(test())


def test_a_client_reaches_only_brokers(monkeypatch, caplog):
    async def test():
        broker = Broker()
        foreign = [Address("127.0.1.1", broker.port), Address("169.254.169.254", 80), Address("::1", 9092)]
        dialled = iter((*foreign, Address(HOST, broker.port)))
        monkeypatch.setattr(transparent, "original_destination", lambda _: next(dialled))
        cluster = {"destinations": (network("::ffff:127.0.0.0/120"), network("fd00::/8"))}
        async with kproxy(broker, wait=False, route="transparent", cluster=cluster) as here:
            await ask_for_a_login(broker)
            for _ in foreign:
                assert await (await Wire.dial(here.port)).rest() == b""
            await here.until(lambda: here.counted.disconnects == {"foreign_destination": 3})
            await here.connect()

    live(test())
    assert "it dialled 127.0.1.1" in caplog.text and "which is not in `destinations`" in caplog.text


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('advertise = "h:{port}"', "rewrites nothing"),
        ("read_only = true", "could keep nobody from anything"),
        ('policy_default = "deny"', "could keep nobody from anything"),
        ('proxy_protocol = "v2"', "byte for byte"),
        ('[cluster.tls]\ncertificate = "a.pem"', "byte for byte"),
    ],
)
def test_settings_that_a_transparent_listener_cannot_follow_are_refused(tmp_path, setting, said):
    file = tmp_path / "kproxy.toml"
    file.write_text(f'[[cluster]]\nroute = "transparent"\nlisten = ":1"\nbootstrap = ["h:1"]\n{setting}\n')
    with pytest.raises(ConfigError, match=said):
        load(file)


@pytest.mark.ring2
def test_kproxy_logs_in_for_its_own_questions_alone(tmp_path, monkeypatch):
    """A client's connection begins with the client's own bytes."""
    (tmp_path / "password").write_text("secret")
    file = tmp_path / "kproxy.toml"

    async def test():
        broker = Broker()
        monkeypatch.setattr(transparent, "original_destination", lambda _: Address(HOST, broker.port))
        file.write_text(
            f"[[cluster]]\nroute = 'transparent'\nlisten = '{HOST}:{free_ports(1)}'\n"
            f"bootstrap = ['{HOST}:{broker.port}']\n[cluster.login]\nmechanism = 'PLAIN'\nusername = 'kproxy'\n"
            f"password_file = '{tmp_path / 'password'}'\n"
        )
        server = Server(load(file))
        await server.start()
        try:
            asking = await broker.accept()
            assert b"kproxy" in await asking.frame()  # it begins to log in, and gets no answer
            client = await Wire.dial(server.clusters[0].address.port)
            wire = await broker.accept()
            await client.send(request(METADATA, 12, 1))
            assert await wire.frame() == request(METADATA, 12, 1)
        finally:
            await server.stop()

    live(test())

"""Advertised addresses lead clients to kproxy, and there to the right broker, while the cluster changes."""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

import pytest

from kproxy.errors import ConfigError
from kproxy.metrics.counters.upstream import ClusterState
from kproxy.metrics.scrape.collector import registry_of
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.proxy.cluster import broker_ports
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.connection import worker
from kproxy.proxy.process.server import Server
from kproxy.proxy.sockets.listeners import Listener
from tests.proxy.live import HOST, Broker, Live, Wire, behind_kproxy, free_ports, kproxy, live, request, response


async def advertised(
    client: Wire, broker: Wire, brokers: list[dict[str, Any]], version: int = 12
) -> dict[int, tuple[str, int]]:
    """Node id -> address, as a client learns it from a Metadata answer that names these."""
    await client.send(request(METADATA, version, 5))
    await broker.frame()
    await broker.send(response(METADATA, version, 5, {"brokers": brokers}))
    _, body = codec.decode_response((await client.frame())[4:], METADATA, version)
    return {each["nodeId"]: (each["host"], each["port"]) for each in body["brokers"]}


def node(node_id: int, port: int, host: str = HOST) -> dict[str, Any]:
    return {"nodeId": node_id, "host": host, "port": port}


async def is_connected(here: Live, port: int, broker: Broker) -> bool:
    """A request to that port of kproxy arrives at that broker."""
    client = await Wire.dial(port)
    message = request(12, 4, 9)
    await client.send(message)
    wire = await broker.accept()
    return await wire.frame() == message


def test_every_broker_is_behind_its_own_port():
    async def test():
        other = Broker(2)
        async with kproxy() as here:
            client, broker = await here.connect()
            addresses = await advertised(client, broker, [node(1, here.broker.port), node(2, other.port)])
            assert addresses == {1: (HOST, here.port + 2), 2: (HOST, here.port + 3)}
            assert await is_connected(here, addresses[1][1], here.broker)
            assert await is_connected(here, addresses[2][1], other)  # bound before the answer left
            assert here.counted.rewritten == {"Metadata": 2}
            assert here.counted.unbound == 0
            assert here.counted.brokers == {"bootstrap", "1", "2"}

    live(test())


def test_bodies_are_read_as_the_settings_say():
    async def test(detail: str, topics: set[str]) -> None:
        async with kproxy(detail=detail) as here:
            client, broker = await here.connect()
            data = [{"name": "orders", "partitionData": [{"index": 0, "records": bytes(70)}]}]
            await client.send(request(0, 9, 1, {"acks": -1, "topicData": data}))
            await broker.frame()
            await broker.send(response(0, 9, 1))
            await client.frame()
            counted = here.server.metrics.cluster("default").topics
            assert (set(counted.top.cells) if counted else set()) == topics

    for detail, topics in (("headers", set()), ("topics", {"orders"}), ("batches", {"orders"})):
        live(test(detail, topics))


def test_the_kept_contents_of_pending_requests_are_bounded_and_all_requests_pass(monkeypatch):
    monkeypatch.setattr(worker, "MAX_NOTED_TOGETHER", 40_000)  # a character counts as four bytes

    async def test():
        async with kproxy() as here:
            pairs = [await here.connect() for _ in range(3)]
            for count, (client, broker) in enumerate(pairs, 1):
                asked = request(1, 4, count, {"topics": []}, client=str(count) * 4000)
                await client.send(asked)
                assert await broker.frame() == asked
            assert here.counted.faults == {("client", "too_much_named"): 1}
            *_, last = here.server.relays.worker.relays.values()
            assert last.session.pending[0].client_id == "3" * 256

    live(test())


def test_a_broker_that_moves_keeps_its_port():
    async def test():
        old, new = Broker(2), Broker(2)
        async with kproxy() as here:
            client, broker = await here.connect()
            first = await advertised(client, broker, [node(2, old.port)])
            assert await is_connected(here, first[2][1], old)
            assert await advertised(client, broker, [node(2, new.port)]) == first
            assert await is_connected(here, first[2][1], new)
            assert await advertised(client, broker, [node(1, here.broker.port)])  # broker 2 has gone
            new.close()
            client = await Wire.dial(first[2][1])  # the port stays; behind it there is nobody
            assert await client.rest() == b""
            await here.until(lambda: here.counted.disconnects["unreachable"])

    live(test())


def test_a_port_that_cannot_be_bound_is_advertised_anyway(monkeypatch, caplog):
    monkeypatch.setattr(broker_ports, "RETRY_S", 0.05)

    async def test():
        async with kproxy() as here:
            taken, other = socket.create_server((HOST, here.port + 3)), socket.create_server((HOST, here.port + 4))
            client, broker = await here.connect()
            expected = {2: (HOST, here.port + 3)}
            both = expected | {3: (HOST, here.port + 4)}
            assert await advertised(client, broker, [node(2, here.broker.port), node(3, here.broker.port)]) == both
            assert here.counted.unbound == 2
            await asyncio.sleep(0)
            ports = here.server.clusters[0]._ports
            assert str(ports).endswith("without a port: 2,3")
            taken.close()
            other.close()
            await here.until(lambda: 2 in here.server.clusters[0].brokers)  # tried again
            await here.until(lambda: str(ports).endswith(f"3:{here.port + 4}"))
            assert await advertised(client, broker, [node(2, here.broker.port)]) == expected
            assert here.counted.unbound == 2
            assert not any("no port stands" in reason for reason in here.server.not_ready())
            high = [node(70000 + number, here.broker.port) for number in range(2)]
            assert await advertised(client, broker, high) == {70000: (HOST, 0), 70001: (HOST, 0)}
            assert "cluster default: no port stands for brokers 70000,70001: declare them in [[cluster.brokers]]" in (
                here.server.not_ready()
            )
            assert here.counted.unbound == 4
            listed = here.server._api_clusters({})[0]["brokers"]
            assert {node_id: each["port"] for node_id, each in listed.items()} == {
                "1": here.port + 2,
                "2": here.port + 3,
                "3": here.port + 4,
                "70000": None,
                "70001": None,
            }
            await asyncio.sleep(0)
            here.server.clusters[0]._ports.forget([1, 2])  # the cluster has them no more
            assert not any("no port stands" in reason for reason in here.server.not_ready())

    live(test())
    (line,) = [line for line in caplog.text.splitlines() if "tried again" in line]
    for node_id in (2, 3):
        assert f"the port of broker {node_id}, cannot be bound: another program listens there" in line
    assert "no port stands for brokers 70000,70001: declare them in [[cluster.brokers]], and clients" in caplog.text


def test_the_log_does_not_call_a_cluster_ready_that_has_a_broker_without_a_port(caplog):
    caplog.set_level("INFO")

    async def test():
        async with kproxy(wait=False) as here:
            await here.broker.answer_kproxy([node(1, here.broker.port), node(70000, here.broker.port)])
            await here.until(lambda: "without a port: 70000" in caplog.text)
            assert "not ready, although its brokers are known: cluster=default brokers=1:" in caplog.text
            assert [reason for reason in here.server.not_ready() if "brokers 70000" in reason]

    live(test())
    assert not [line for line in caplog.messages if line.startswith("ready ")]


def test_a_port_that_another_cluster_has_is_not_said_to_be_another_programs(caplog):
    async def test():
        async with kproxy() as here:
            other = Listener(here.server.relays.worker.gate, [HOST], here.port + 3, 1, lambda *_: None, "other/7")
            client, broker = await here.connect()
            await advertised(client, broker, [node(2, here.broker.port)])
            await here.until(lambda: "tried again" in caplog.text)
            other.close()

    live(test())
    text = "the port of broker 2, cannot be bound: this kproxy has it already (other/7): keep"
    assert text in caplog.text


def test_ports_never_use_descriptors_that_are_set_aside_for_others(caplog):
    caplog.set_level("INFO")

    async def test():
        async with kproxy() as here:
            gate = here.server.relays.worker.gate
            gate.max_sockets = gate.sockets + 3
            client, broker = await here.connect()
            named = [node(node_id, here.broker.port) for node_id in range(1, 1001)]
            addresses = await advertised(client, broker, named)
            assert len(addresses) == 1000
            assert set(here.server.clusters[0].brokers) == {1, 2, 3, 4}
            assert here.counted.unbound == 996
            (*reasons,) = here.server.not_ready()
            assert len(reasons) < 20
            assert "file descriptors set aside for ports are in use" in reasons[0]

    live(test())
    assert len(caplog.records) < 20  # of a thousand brokers


def test_an_answer_cannot_make_kproxy_open_any_number_of_ports(monkeypatch, caplog):
    monkeypatch.setattr(broker_ports, "MAX_BROKERS", 3)

    async def test():
        async with kproxy() as here:
            client, broker = await here.connect()
            named = [node(node_id, here.broker.port) for node_id in range(1, 6)]
            addresses = await advertised(client, broker, named)
            assert addresses == {node_id: (HOST, here.port + 1 + node_id) for node_id in range(1, 6)}
            assert set(here.server.clusters[0].brokers) == {1, 2, 3}
            assert here.counted.unbound == 2

    live(test())
    assert "broker 4 gets no port: 3 others have one" in caplog.text


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_server_that_ends_the_connection_at_the_first_request_may_expect_tls_or_a_proxy_header(is_reset):
    async def test():
        async with kproxy(wait=False) as here:
            wire = await here.broker.asked_as_before_0_10()
            if is_reset:
                wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wire.close()
            await here.until(lambda: "closed the connection on Metadata" in "".join(here.server.not_ready()))
            (reason,) = here.server.not_ready()
            assert "does it expect TLS ([cluster.upstream_tls]) or a PROXY header (proxy_protocol)?" in reason

    live(test())


def test_kproxy_waits_for_a_bootstrap_server_that_is_down():
    async def test():
        port = free_ports(1)
        async with kproxy(Broker(port=port), wait=False) as here:
            here.broker.close()
            (reason,) = here.server.not_ready()
            assert "not been asked" in reason
            await here.until(lambda: "cannot be reached: Connection refused" in "".join(here.server.not_ready()))
            client = await Wire.dial(here.port)
            assert await client.rest() == b""  # fails fast
            here.broker = Broker(port=port)
            await here.broker.answer_kproxy()
            await here.until(lambda: not here.server.not_ready())
            client, broker = await here.connect()
            await client.send(request(12, 4, 9))
            assert await broker.frame() == request(12, 4, 9)

    live(test())


def test_clients_bootstrap_at_any_server_that_is_up():
    async def test():
        dead, port = free_ports(1), Broker()
        async with kproxy(port, bootstrap=f"{HOST}:{dead},{HOST}:{port.port}") as here:
            for _ in range(4):
                client, broker = await here.connect()
                await client.send(request(12, 4, 9))
                assert await broker.frame() == request(12, 4, 9)
            assert "unreachable" not in here.counted.disconnects

    live(test())


def test_kproxy_does_not_dial_itself(caplog):
    async def test():
        async with kproxy() as here:
            client, broker = await here.connect()
            # by what it tells clients, and by where the name leads
            for node_id, host in ((2, HOST), (3, "localhost")):
                port = here.port + 1 + node_id
                await advertised(client, broker, [node(node_id, port, host)])
                lost = await Wire.dial(port)
                assert await lost.rest() == b""

    live(test())
    assert "broker 2 of cluster default says it is at 127.0.0.1" in caplog.text
    assert "is kproxy itself" in caplog.text


def test_sidecar_binds_one_port_and_dials_one_broker():
    async def test():
        port = free_ports(3)
        async with kproxy(route="sidecar", port=port, advertise="broker-{id}.pod:19092") as here:
            client, broker = await here.connect()
            addresses = await advertised(client, broker, [node(1, 9092), node(2, 9092)])
            assert addresses == {1: ("broker-1.pod", 19092), 2: ("broker-2.pod", 19092)}
            assert not here.server.clusters[0].brokers
            assert here.counted.brokers == {"1"}  # it knows beside whom it is

    live(test())


@pytest.mark.parametrize(
    "brokers, known",
    [
        ({1: "elsewhere.invalid", 2: "127.0.0.1", 3: "127.0.0.7"}, "2"),  # the address that is dialled
        ({1: "elsewhere.invalid", 2: "127.0.0.5"}, "2"),  # the only one of this machine
        ({1: "elsewhere.invalid"}, "1"),  # the only one at all
        ({1: "127.0.0.5", 2: "127.0.0.6"}, "bootstrap"),  # two of this machine: who knows
        ({1: "elsewhere.invalid", 2: "192.0.2.1"}, "bootstrap"),
    ],
)
def test_a_sidecar_knows_its_broker_by_more_than_the_address_it_dials(brokers, known):
    async def test():
        async with kproxy(route="sidecar", port=free_ports(1), advertise="b-{id}:1", wait=False) as here:
            listed = [node(node_id, here.broker.port, host) for node_id, host in brokers.items()]
            await here.broker.answer_kproxy(listed)
            await here.until(lambda: not here.server.not_ready())
            wires = await here.connect()
            await here.until(lambda: here.relays)
            assert wires and here.counted.brokers == {known}

    live(test())


def test_where_a_login_is_wanted_the_declared_ports_are_bound(tmp_path, caplog):
    async def closes_on_metadata(broker: Broker) -> None:
        wire = await broker.accept()
        await wire.frame()
        offers = [{"apiKey": METADATA, "minVersion": 0, "maxVersion": 12}]
        await wire.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": offers}))
        await wire.frame()
        wire.close()

    async def test():
        broker = Broker()
        port = free_ports(4)
        file = tmp_path / "kproxy.toml"
        file.write_text(
            f"""
            [[cluster]]
            listen = "{HOST}:{port}"
            bootstrap = ["{HOST}:{broker.port}"]
            [[cluster.brokers]]
            ids = "0-1"
            port = {port + 1}
            upstream = "{HOST}:{broker.port}"
            [[cluster.brokers]]
            ids = 2
            port = {port + 3}
            """
        )
        server = Server(load(file))
        await server.start()
        await closes_on_metadata(broker)
        here = Live(server, broker)
        await here.until(lambda: not server.not_ready())
        assert "clients of broker 2 are refused" in caplog.text
        assert await is_connected(here, port + 2, broker)
        await server.stop()
        async with kproxy(wait=False) as here:  # and where none are declared, it says how
            await closes_on_metadata(here.broker)
            await here.until(lambda: "[[cluster.brokers]]" in "".join(here.server.not_ready()))

    live(test())


def test_an_old_broker_without_api_versions_is_asked_all_the_same():
    async def test():
        async with kproxy(wait=False) as here:
            wire = await here.broker.asked_as_before_0_10()
            await wire.send(response(METADATA, 0, METADATA, {"brokers": here.broker.brokers()}))
            await here.until(lambda: not here.server.not_ready())

    live(test())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak the Kafka protocol here: it answers in HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an answer of 1397966893 bytes, or a text that begins with 'SSH-'"),
        (b"-ERR unknown command\r\n", "a text that begins with '-ERR'"),
        (b"J\0\0\0\n8.0.36\0", "does not speak the Kafka protocol here: an answer of 1241513984 bytes"),
        (response(API_VERSIONS, 0, 1), "answers what was not asked"),
        (response(API_VERSIONS, 0, API_VERSIONS, {"errorCode": 58}), "SASL_AUTHENTICATION_FAILED"),
        (response(API_VERSIONS, 0, API_VERSIONS), "it is a controller"),
        (response(API_VERSIONS, 0, API_VERSIONS)[:-1] + b"\x09", "does not answer as a Kafka broker does"),
    ],
)
def test_an_upstream_that_is_no_broker_is_named_and_asked_again(answer, reason):
    async def test():
        async with kproxy(wait=False) as here:
            wire = await here.broker.accept()
            await wire.frame()
            await wire.send(answer)
            await here.until(lambda: reason in "".join(here.server.not_ready()))
            wire.close()
            await here.broker.answer_kproxy()
            await here.until(lambda: not here.server.not_ready())

    live(test())


@behind_kproxy()
async def test_an_answer_that_names_no_broker_closes_no_port(here, client, broker):
    """KIP-1102: Metadata 13 may contain only an error; then the ports of the bootstrap and of all brokers stay open."""

    addresses = await advertised(client, broker, [node(1, here.broker.port)])
    await client.send(request(METADATA, 13, 6))
    await broker.frame()
    refusal = response(METADATA, 13, 6, {"errorCode": 129})
    await broker.send(refusal)
    assert await client.frame() == refusal
    assert await is_connected(here, addresses[1][1], here.broker)
    assert await is_connected(here, here.port, here.broker)
    assert not here.server.not_ready()


def test_two_in_a_row():
    """A kproxy before a kproxy is no loop: each advertises its own addresses, and finds the brokers of the next."""

    async def test():
        async with kproxy() as inner:
            port = free_ports(6)
            upstream = f"{HOST}:{inner.port}"
            outer = Server(load(flags={"listen": f"{HOST}:{port}", "bootstrap": upstream, "drain_timeout_s": 0}))
            try:
                await outer.start()
                await inner.broker.answer_kproxy()
                await inner.until(lambda: not outer.not_ready())
                client = await Wire.dial(port)
                broker = await inner.broker.accept()
                assert await advertised(client, broker, [node(1, inner.broker.port)]) == {1: (HOST, port + 2)}
                client = await Wire.dial(port + 2)
                message = request(12, 4, 9)
                await client.send(message)
                broker = await inner.broker.accept()
                assert await broker.frame() == message
            finally:
                await outer.stop()

    live(test())


@pytest.mark.parametrize("on_leak", ["log", "close"])
def test_an_address_in_a_field_that_rewriting_does_not_cover_is_a_leak(on_leak, caplog):
    """A tagged field of a newer Kafka, in an answer whose known addresses are rewritten."""

    async def test():
        async with kproxy(on_address_leak=on_leak) as here:
            host, port = HOST.encode(), here.broker.port
            tag = (9000, bytes([len(host) + 1]) + host + port.to_bytes(4, "big"))
            for count in (1, 2):
                client, broker = await here.connect()
                await client.send(request(METADATA, 12, 5))
                await broker.frame()
                brokers = [node(1, port)]
                body = {"brokers": brokers, "_tags": [tag]}
                await broker.send(response(METADATA, 12, 5, body))
                if on_leak == "close":
                    assert await client.rest() == b""
                else:
                    assert tag[1] in await client.frame()
                assert here.server.metrics.cluster("default").leaks["Metadata"] == count

    live(test())
    (line,) = [record.message for record in caplog.records if record.message.startswith("leak cluster=default")]
    assert "the Metadata v12 answer names 127.0.0.1:" in line


@pytest.mark.parametrize("on_leak", ["log", "close"])
@pytest.mark.parametrize("parts", [1, 3])
def test_an_address_in_an_answer_of_an_unknown_api_is_a_leak(on_leak, parts, caplog):
    async def test():
        async with kproxy(on_address_leak=on_leak) as here:
            client, broker = await here.connect()
            asked = struct.pack(">ihhih", 10, 999, 7, 1, -1)
            harmless = struct.pack(">ii", 8, 1) + b"fine"
            host = HOST.encode()
            leak = len(host).to_bytes(2, "big") + host + here.broker.port.to_bytes(4, "big")
            leaking = struct.pack(">ii", 4 + len(leak), 1) + leak
            for answer in (harmless, leaking):
                await client.send(asked)
                assert await broker.frame() == asked
                step = -(-len(answer) // parts)
                for start in range(0, len(answer), step):
                    await broker.send(answer[start : start + step])
                    await asyncio.sleep(0.01)
                if on_leak == "close" and answer is leaking:
                    assert await client.rest() == b""  # nothing of it
                else:
                    assert await client.frame() == answer
            assert here.server.metrics.cluster("default").leaks["unknown_999"] == 1

    live(test())
    assert "the unknown_999 v7 answer names 127.0.0.1:" in caplog.text


def test_connections_are_listed_by_page():
    async def test():
        async with kproxy() as here:
            wires = [await here.connect() for _ in range(7)]
            await here.until(lambda: here.relays == 7)

            async def page(**query: str) -> list[dict[str, Any]]:
                return [row async for rows in here.server._api_connections(query) for row in rows]

            rows = await page()
            assert [row["client"] for row in rows] == [
                "{}:{}".format(*client.sock.getsockname()) for client, _ in wires
            ]
            first = await page(limit="4")
            assert first + await page(limit="4", after=str(first[-1]["number"])) == rows
            for query in ({"limit": "x"}, {"limit": "10001"}, {"after": "-1"}, {"after": "9" * 5000}):
                with pytest.raises(ValueError, match="is not a number from 0 to"):
                    await page(**query)

    live(test())


def test_metrics_show_the_state_of_a_cluster_and_the_results_of_dials():
    async def test():
        async with kproxy(max_connections=9, discovery_interval_s=30) as here:

            def exposed(name: str, **labels: str) -> float | None:
                return registry_of(here.server.metrics).get_sample_value(name, {"cluster": "default"} | labels)

            assert exposed("kproxy_ready") == exposed("kproxy_accepting") == 1
            assert exposed("kproxy_connection_limit") == 9
            assert exposed("kproxy_listeners") == 2
            assert exposed("kproxy_loops_refused_total") == 0
            refused = {"broker": "1", "cause": "refused"}
            assert exposed("kproxy_dial_failures_total", **refused) == 0  # born with the broker
            await here.connect()
            await here.until(lambda: exposed("kproxy_dial_seconds_count", broker="bootstrap") == 1)
            here.broker.close()
            assert await (await Wire.dial(here.port + 2)).rest() == b""
            assert exposed("kproxy_dial_failures_total", **refused) == 1
            await here.until(lambda: exposed("kproxy_ready") == 0)
            wires = [await Wire.dial(here.port) for _ in range(3)]
            assert wires
            here.server.relays.worker.gate.max_connections = here.server.relays.worker.gate.connections
            assert exposed("kproxy_accepting") == 0

    live(test())


@behind_kproxy(drain_timeout_s=5)
async def test_while_it_drains_no_port_opens(here, client, broker):
    """Not by an answer under way, nor by the retry of a port that could not be bound."""
    with socket.socket() as taken:
        taken.bind((HOST, here.port + 4))
        taken.listen()
        await advertised(client, broker, [node(3, here.broker.port)])
        await client.send(request(METADATA, 12, 5))
        await broker.frame()
        stopping = asyncio.create_task(here.server.stop())
        await here.until(lambda: here.server.not_ready() == ["draining"])
    brokers = [node(node_id, here.broker.port) for node_id in (1, 2, 3)]
    await broker.send(response(METADATA, 12, 5, {"brokers": brokers}))
    _, body = codec.decode_response((await client.frame())[4:], METADATA, 12)
    assert {each["port"] for each in body["brokers"]} == {here.port + 2, here.port + 3, here.port + 4}  # still ours
    assert not here.server.relays.worker.gate.listeners  # while the drain goes on
    assert await client.rest() == b""  # and the client is sent away
    client.close()
    await stopping
    for port in range(here.port, here.port + 5):
        with pytest.raises(ConnectionRefusedError):
            await Wire.dial(port)
    assert not here.server.relays.worker.gate.listeners


@behind_kproxy(drain_timeout_s=60)
async def test_a_drain_does_not_wait_for_a_client_that_has_gone(here, client, broker):
    await client.send(request(METADATA, 12, 5))
    await broker.frame()
    client.close()
    await here.server.stop()
    assert "drain_timeout" not in here.counted.disconnects and sum(here.counted.disconnects.values()) == 1


@behind_kproxy()
async def test_what_kproxy_cannot_rewrite_is_not_offered(here, client, broker):
    await client.send(request(API_VERSIONS, 3, 1))
    await broker.frame()
    offers = [{"apiKey": key, "minVersion": 0, "maxVersion": 90} for key in (0, 3, 11)]
    await broker.send(response(API_VERSIONS, 3, 1, {"apiKeys": offers}))
    _, body = codec.decode_response((await client.frame())[4:], API_VERSIONS, 3)
    assert [offer["maxVersion"] for offer in body["apiKeys"]] == [13, 13, 90]


def test_a_carrier_that_kproxy_cannot_read_fails_closed():
    async def test():
        async with kproxy() as here:
            client, _ = await here.connect()
            await client.send((12).to_bytes(4, "big") + METADATA.to_bytes(2, "big") + b"\x00\x63" + bytes(8))
            assert await client.rest() == b""
            assert here.counted.faults == {("client", "unreadable_carrier"): 1}

    live(test())


def test_a_port_in_use_is_a_fault_of_the_settings():
    async def test():
        with socket.socket() as taken:
            taken.bind((HOST, 0))
            taken.listen()
            address = f"{HOST}:{taken.getsockname()[1]}"
            for flags in ({"listen": address}, {"listen": f"{HOST}:{free_ports(1)}", "admin": address}):
                server = Server(load(flags={"bootstrap": f"{HOST}:1"} | flags))
                with pytest.raises(ConfigError, match=r"cannot be bound: another program listens there"):
                    await server.start()
                await server.stop()

    live(test())


def test_of_a_name_the_addresses_of_this_machine_are_bound(monkeypatch):
    """In most containers localhost is ::1 too, and there is no IPv6. 192.0.2.1 is nobody's (RFC 5737)."""

    def addresses(host, *_, **__):
        assert host == "localhost"
        return [(None, None, 0, "", (address, 0)) for address in ("192.0.2.1", HOST, "127.0.0.2")]

    async def test():
        port = free_ports(7)
        flags = {"listen": f"localhost:{port}", "admin": f"localhost:{port + 6}", "bootstrap": f"{HOST}:1"}
        server = Server(load(flags=flags))
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", addresses)
            await server.start()
        for host in (HOST, "127.0.0.2"):
            for at in (port, port + 6):
                socket.create_connection((host, at)).close()
        await server.stop()

    live(test())


def test_names_are_resolved_without_stopping_the_others(monkeypatch):
    async def test():
        async with kproxy() as here:
            loop = asyncio.get_running_loop()
            client, broker = await here.connect()
            await advertised(client, broker, [node(2, here.broker.port, "localhost")])
            assert await is_connected(here, here.port + 3, here.broker)
            await advertised(client, broker, [node(2, here.broker.port, "no-such-host.invalid")])
            lost = loop.create_task((await Wire.dial(here.port + 3)).rest())
            assert await advertised(client, broker, [node(1, here.broker.port)])
            assert await lost == b""
            for nonsense in (node(2, -1), node(2, 70000), node(2, 9092, "h" * 300), node(2, 9092, "\0")):
                await advertised(client, broker, [nonsense])
                assert await (await Wire.dial(here.port + 3)).rest() == b""
            assert here.counted.disconnects["unreachable"] == 5

    live(test())


def test_a_cluster_that_has_closed_is_neither_ready_nor_accepts():
    async def test():
        async with kproxy() as here:
            (cluster,) = here.server.clusters
            assert not cluster.has_stopped and cluster._state().ready and cluster._state().listeners > 0
            cluster.close()
            assert cluster.has_stopped and cluster._state() == ClusterState(ready=False, accepting=False, listeners=0)

    live(test())


def test_connections_to_an_upstream_that_leads_back_to_kproxy_are_closed():
    """Whoever saw it, another worker too, tells the cluster."""

    async def test():
        async with kproxy() as here:
            client, broker = await here.connect()
            (cluster,) = here.server.clusters
            cluster.loop_found(Address(HOST, here.broker.port), "a test")
            with suppress(ConnectionResetError):
                assert await client.rest() == b""
            assert await (await Wire.dial(here.port)).rest() == b"", "none is dialled there any more"
            broker.close()

    live(test())


def test_the_counts_of_a_broker_whose_port_passes_on_are_added_to_other() -> None:
    async def test() -> None:
        async with kproxy() as here:
            cells = here.server.metrics.cluster("default")
            cells.broker("7", "broker-7").accepted["broker-7"] += 2
            here.server.clusters[0]._evicted(7)
            assert "7" not in cells.brokers
            assert cells.brokers["other"].accepted == {"broker-other": 2}

    live(test())

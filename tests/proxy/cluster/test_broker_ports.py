"""`ids = "any"`: brokers whose node ids are large or change have a port each, and keep it while they are there."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import HEARTBEAT, METADATA
from kproxy.proxy.cluster import broker_ports, ports_file
from kproxy.proxy.cluster.broker_ports import BrokerPorts
from kproxy.proxy.cluster.port_assignment import Held
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.sockets.listeners import Accepted, Gate
from tests.ports import free_ports
from tests.proxy.live import HOST, Wire, live, request, response
from tests.proxy.load import PATIENCE_S, Brokers, Kproxy, kproxy_process

LARGE = 1_840_211_337
TIMEOUT_S = 240  # several processes each, on a machine that may be busy


class Node(Brokers):
    """One broker of a cluster; the throttle time of its Heartbeat answers is its node id."""

    def __init__(self, cluster: "Nodes", node_id: int) -> None:
        super().__init__(node_id)
        self.cluster = cluster

    def _answer(self, api: int, version: int, correlation: int) -> bytes:
        if api == METADATA:
            brokers = [
                {"nodeId": node_id, "host": HOST, "port": int(node.address.rpartition(":")[2])}
                for node_id, node in self.cluster.nodes.items()
                if node_id in self.cluster.named
            ]
            return response(METADATA, version, correlation, {"brokers": brokers})
        if api == HEARTBEAT:
            return response(HEARTBEAT, 4, correlation, {"throttleTimeMs": self.node_ids[0]})
        return super()._answer(api, version, correlation)


class Nodes:
    """A cluster: `named` are the brokers in its answers, in the order in which they were made."""

    def __init__(self, *node_ids: int) -> None:
        self.nodes: dict[int, Node] = {}
        self.named: set[int] = set()
        self.add(*node_ids)

    def add(self, *node_ids: int) -> None:
        for node_id in node_ids:
            self.nodes[node_id] = Node(self, node_id)
        self.named.update(node_ids)

    @property
    def first(self) -> str:
        return next(iter(self.nodes.values())).address


class Settings:
    def __init__(self, folder, nodes: Nodes, *, count: int = 4, keeps: bool = True, workers: int = 1) -> None:
        self.folder, self.nodes, self.count, self.keeps, self.workers = folder, nodes, count, keeps, workers
        self.port = free_ports(20)
        self.base = self.port + 5
        self.ports_file = folder / "ports.json"
        self.file = folder / "kproxy.toml"
        self.more = ""
        self.write()

    def write(self) -> None:
        keeps = f'ports_file = "{self.ports_file}"\n' if self.keeps else ""
        self.file.write_text(
            f'admin = "{HOST}:{self.port + 1}"\nworkers = {self.workers}\ndiscovery_interval_s = 0.2\n'
            f'drain_timeout_s = 2\n[[cluster]]\nlisten = "{HOST}:{self.port}"\nbootstrap = ["{self.nodes.first}"]\n'
            f'{self.more}[[cluster.brokers]]\nids = "any"\nport = {self.base}\nport_count = {self.count}\n{keeps}'
        )

    def process(self, **variables: str) -> Any:
        return kproxy_process(self.file, self.port + 1, **variables)

    async def advertised_ports(self, lacking: int = 0) -> dict[int, int]:
        """Node id -> port, as a client learns it; lacking: so many brokers have port 0, since none is left for them.

        A worker waits ASK_S for its parent to open a new broker's port, then passes the answer on with port 0. A client
        then asks again, and so does this.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self._in_metadata()
                if self.workers == 1 or list(found.values()).count(0) <= lacking:
                    return found

    async def _in_metadata(self) -> dict[int, int]:
        client = await Wire.dial(self.port)
        await client.send(request(METADATA, 12, 5))
        _, body = codec.decode_response((await client.frame())[4:], METADATA, 12)
        client.close()
        assert all(each["host"] == HOST for each in body["brokers"])
        return {each["nodeId"]: each["port"] for each in body["brokers"]}

    async def checked_ports(self, lacking: int = 0) -> dict[int, int]:
        """The same, after a request to each port has reached that very broker."""
        advertised_ports = await self.advertised_ports(lacking)
        for node_id, port in advertised_ports.items():
            if port:
                assert await who(port) == node_id
        return advertised_ports


async def who(port: int) -> int:
    """The node id of the broker behind a port."""
    client = await Wire.dial(port)
    await client.send(request(HEARTBEAT, 4, 9))
    _, body = codec.decode_response((await client.frame())[4:], HEARTBEAT, 4)
    client.close()
    return int(body["throttleTimeMs"])


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


async def becomes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - of objects without events
            await asyncio.sleep(0.01)


async def upgraded(kproxy: Kproxy) -> None:
    since = len(kproxy.lines)
    kproxy.signal(signal.SIGUSR2)
    await kproxy.says("generation", since)
    await kproxy.ready()
    await kproxy.says("stopped in", since)


def patience(folder, seconds: float) -> dict[str, str]:
    """Variables by which a kproxy takes a broker for gone after that time."""
    (folder / "sitecustomize.py").write_text(
        "import kproxy.proxy.cluster.port_assignment as assignment\n"
        f"assignment.ABSENT_S = {seconds}\nassignment.RETRY_S = 0.01\n"
    )
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def test_ports_that_another_process_gave_out_differently_stay_open_and_lead_to_its_brokers():
    """While an upgrade is under way both processes give out ports; clients know those of the one that serves."""

    async def test():
        base = free_ports(4)
        entry = {"ids": "any", "port": base, "port_count": 3}
        cluster = Cluster.model_validate({"listen": f"{HOST}:1", "bootstrap": ["b:9092"], "brokers": [entry]})
        gate, routes, found = Gate(100), Routes(cluster, 1), {}

        def accepted(node_id: int) -> Accepted:
            return lambda sock, peer: found.setdefault(node_id, []).append(sock.close() or peer.port)

        ports = BrokerPorts(gate, cluster, routes, [HOST], 16, accepted)
        gate.hold(True)
        ports.answered([1, 2, LARGE])
        for node_id in (1, 2, LARGE):
            assert ports.bind(node_id)
        assert routes.assigned == {1: base, 2: base + 1, LARGE: base + 2}
        client = await Wire.dial(base)  # it waits in the backlog, for broker LARGE as the other process says
        ports.adopt({LARGE: Held(base), 2: Held(base + 1), 7: Held(base + 2, 4.0)})
        assert routes.assigned == {LARGE: base, 2: base + 1, 7: base + 2}  # none is left for broker 1
        assert routes.advertised(1, "b") == (HOST, 0)
        for node_id in (LARGE, 2, 7):
            assert ports.bind(node_id)
        assert {node_id: listener.port for node_id, listener in ports.open.items()} == routes.assigned
        gate.hold(False)
        await becomes(lambda: LARGE in found)
        assert found == {LARGE: [client.sock.getsockname()[1]]}
        assert not ports.bind(1)
        assert list(ports.not_ready()) == [
            f"no port is left for brokers 1: all 3 from {base} on stand for brokers that are named, were within 300 s, "
            "or have connections: raise port_count"
        ]
        ports.close()
        gate.given.close()
        assert gate.sockets == 0

    live(test(), TIMEOUT_S)


@pytest.mark.parametrize("is_any", [True, False])
def test_the_log_names_a_negative_node_id(is_any: bool) -> None:
    """Neither more ports nor a declaration would help."""

    async def test():
        base = free_ports(2)
        entry = {"ids": "any", "port": base, "port_count": 1} if is_any else {"ids": "7", "port": base}
        cluster = Cluster.model_validate({"listen": f"{HOST}:1", "bootstrap": ["b:9092"], "brokers": [entry]})
        routes = Routes(cluster, 1)
        ports = BrokerPorts(Gate(100), cluster, routes, [HOST], 16, lambda node_id: lambda sock, peer: sock.close())
        ports.answered([7, -1])
        assert ports.bind(7) and not ports.bind(-1)
        assert routes.advertised(-1, "b") == (HOST, 0)
        (why,) = ports.not_ready()
        assert why.startswith("brokers -1 have negative node ids") and "port_count" not in why and "declare" not in why
        assert not ports.bind(8) and not ports.bind(-(2**31))
        (why,) = ports.not_ready()
        assert why.startswith("brokers -1,-2147483648 have negative node ids")
        assert not ports.bind(0)  # no negative one: the port that it lacks is another matter
        (why,) = ports.not_ready()
        assert f"at `bootstrap` a broker?; no port {'is left' if is_any else 'stands'} for brokers 8,0" in why
        ports.close()

    live(test(), TIMEOUT_S)


def test_a_file_that_cannot_be_written_is_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(broker_ports, "RETRY_S", 0.02)
    monkeypatch.setattr(broker_ports, "_HELD_S", 0.02)

    async def test():
        path = tmp_path / "later" / "ports.json"
        entry = {"ids": "any", "port": free_ports(2), "port_count": 2, "ports_file": str(path)}
        cluster = Cluster.model_validate({"listen": f"{HOST}:1", "bootstrap": ["b:9092"], "brokers": [entry]})
        gate, routes = Gate(100), Routes(cluster, 1)
        ports = BrokerPorts(gate, cluster, routes, [HOST], 16, lambda node_id: lambda sock, peer: None)
        ports.restore(None)
        ports.answered([LARGE])
        await becomes(lambda: "cannot write ports_file" in caplog.text)
        gate.hold(True)  # another process serves: the file is its own
        path.parent.mkdir()
        for _ in range(3):  # it looks again, and does not write
            pending = ports._writing
            await becomes(lambda pending=pending: ports._writing is not pending)
        assert not path.exists()
        gate.hold(False)
        await becomes(path.exists)
        assert ports_file.read(path, "default") == {LARGE: Held(entry["port"])}
        ports.close()

    live(test(), TIMEOUT_S)


def test_kproxy_does_not_overwrite_a_file_that_another_process_changes(tmp_path, monkeypatch, caplog):
    """Two kproxys with the same file would overwrite each other's changes."""
    monkeypatch.setattr(broker_ports, "RETRY_S", 0.02)

    async def test():
        path = tmp_path / "ports.json"
        entry = {"ids": "any", "port": free_ports(3), "port_count": 3, "ports_file": str(path)}
        cluster = Cluster.model_validate({"listen": f"{HOST}:1", "bootstrap": ["b:9092"], "brokers": [entry]})
        kproxys = [
            BrokerPorts(Gate(100), cluster, Routes(cluster, 1), [HOST], 16, lambda node_id: lambda sock, peer: None)
            for _ in range(2)
        ]
        one, other = kproxys
        for each in kproxys:
            each.restore(None)
            each.answered([2, 3])  # they agree so far
            await becomes(lambda each=each: each._writing is None)
        one.answered([1, 2, 3])
        await becomes(lambda: 1 in ports_file.read(path, "default"))
        kept = path.read_text()
        other.answered([2, 3, LARGE])
        await becomes(lambda: "another process has changed it" in caplog.text)
        assert path.read_text() == kept
        path.unlink()  # as the log line advises
        await becomes(path.exists)
        assert LARGE in ports_file.read(path, "default")
        for each in kproxys:
            each.close()

    live(test(), TIMEOUT_S)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.ring2)])
def test_a_reload_that_declares_an_id_gives_it_the_declared_port(tmp_path, workers):
    async def test():
        nodes = Nodes(LARGE, 7)
        settings = Settings(tmp_path, nodes, workers=workers)
        base = settings.base
        declared = f'[[cluster.brokers]]\nids = "7"\nport = {base + 10}\n'

        async def reload(kproxy: Kproxy, more: str) -> None:
            settings.more = more
            settings.write()
            assert (await kproxy.json("/api/reload", post=True))["outcome"] == "applied"
            await kproxy.ready()

        async with settings.process() as kproxy:
            assert await settings.checked_ports() == {7: base, LARGE: base + 1}
            await reload(kproxy, declared)
            assert await settings.checked_ports() == {7: base + 10, LARGE: base + 1}
        async with settings.process() as kproxy:
            nodes.add(3)
            assert await settings.checked_ports() == {3: base, 7: base + 10, LARGE: base + 1}
            await reload(kproxy, "")
            assert await settings.checked_ports() == {3: base, 7: base + 2, LARGE: base + 1}
        settings.more = declared
        settings.write()  # the file of ports has another one
        async with settings.process():
            assert await settings.checked_ports() == {3: base, 7: base + 10, LARGE: base + 1}

    live(test(), TIMEOUT_S)


def test_a_reload_to_ports_that_are_given_out_opens_them_for_the_brokers_that_were_known(tmp_path):
    """Otherwise clients that ask before the cluster answers again would get port 0."""

    async def test():
        nodes = Nodes(LARGE, 7)
        settings = Settings(tmp_path, nodes)
        given = settings.file.read_text().replace("discovery_interval_s = 0.2", "discovery_interval_s = 3600")
        entry = given.index("[[cluster.brokers]]")
        declared = "".join(
            f'[[cluster.brokers]]\nids = "{node_id}"\nport = {port}\n'
            for node_id, port in ((7, settings.base), (LARGE, settings.base + 1))
        )
        settings.file.write_text(given[:entry] + declared)
        async with settings.process() as kproxy:
            nodes.named.clear()  # the cluster's next answers name nobody
            settings.file.write_text(given)
            assert (await kproxy.json("/api/reload", post=True))["outcome"] == "applied"
            assert await who(settings.base) == 7
            assert await who(settings.base + 1) == LARGE

    live(test(), TIMEOUT_S)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_large_ids_have_ports_that_outlive_restarts_reloads_and_upgrades(tmp_path, workers):
    async def test():
        nodes = Nodes(LARGE, 7, 2**31 - 1)
        settings = Settings(tmp_path, nodes, workers=workers)
        base = settings.base
        expected = {7: base, LARGE: base + 1, 2**31 - 1: base + 2}
        async with settings.process():
            assert await settings.checked_ports() == expected
            nodes.add(3)  # a lower id than the others, so that order alone would give others
            expected[3] = base + 3
            assert await settings.checked_ports() == expected
            await until(lambda: asyncio.to_thread(lambda: "3" in json.loads(settings.ports_file.read_text())["ports"]))
        async with settings.process() as kproxy:
            assert await settings.checked_ports() == expected

            settings.count, settings.more = 6, "read_only = true\n"
            settings.write()
            outcome = await kproxy.json("/api/reload", post=True)
            assert outcome["outcome"] == "applied", outcome
            await kproxy.ready()
            settings.more = ""
            settings.write()
            assert (await kproxy.json("/api/reload", post=True))["outcome"] == "applied"
            await kproxy.ready()
            assert await settings.checked_ports() == expected
            nodes.add(1)
            expected[1] = base + 4
            assert await settings.checked_ports() == expected
            await upgraded(kproxy)
            assert await settings.checked_ports() == expected
            nodes.add(2)
            expected[2] = base + 5
            assert await settings.checked_ports() == expected

    live(test(), TIMEOUT_S)


@pytest.mark.ring2
def test_without_a_file_an_upgrade_keeps_ports_and_a_restart_gives_them_by_order(tmp_path):
    async def test():
        nodes = Nodes(LARGE, 7)
        settings = Settings(tmp_path, nodes, keeps=False)
        base = settings.base
        for _ in range(2):
            async with settings.process():
                assert await settings.checked_ports() == {7: base, LARGE: base + 1}
        async with settings.process() as kproxy:
            nodes.add(3)
            assert await settings.checked_ports() == {7: base, LARGE: base + 1, 3: base + 2}
            await upgraded(kproxy)
            assert await settings.checked_ports() == {7: base, LARGE: base + 1, 3: base + 2}
        async with settings.process():
            assert await settings.checked_ports() == {3: base, 7: base + 1, LARGE: base + 2}
        assert not settings.ports_file.exists()

    live(test(), TIMEOUT_S)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_new_broker_gets_the_first_port_that_no_other_program_holds(tmp_path, workers):
    async def test():
        nodes = Nodes(7)
        settings = Settings(tmp_path, nodes, workers=workers)
        base = settings.base
        with socket.socket() as one, socket.socket() as two:
            for held, port in ((one, base + 1), (two, base + 3)):
                held.bind((HOST, port))
                held.listen()
            async with settings.process() as kproxy:
                nodes.add(LARGE)
                assert await settings.checked_ports() == {7: base, LARGE: base + 2}
                text = (
                    f"broker {LARGE} gets port {base + 2} of the range, since port {base + 1} cannot be bound: another"
                )
                await kproxy.says(text)
                assert (await kproxy.get("/ready"))[0] == 200
                nodes.add(LARGE + 1)  # the two free ports are in use
                assert (await settings.advertised_ports())[LARGE + 1] == base + 1

                async def is_refused() -> bool:
                    code, text = await kproxy.get("/ready")
                    return code != 200 and f"the port of broker {LARGE + 1}, cannot be bound: another program" in text

                await until(is_refused)
        async with settings.process():  # the ports are free now, and the ports that clients learned stay
            assert await settings.checked_ports() == {7: base, LARGE: base + 2, LARGE + 1: base + 1}

    live(test(), TIMEOUT_S)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_passes_on_once_its_broker_is_gone_and_nobody_is_connected(tmp_path, workers):
    async def test():
        nodes = Nodes(LARGE, LARGE + 1)
        settings = Settings(tmp_path, nodes, count=2, workers=workers)
        base = settings.base
        async with settings.process(**patience(tmp_path, 0.5)) as kproxy:
            assert await settings.checked_ports() == {LARGE: base, LARGE + 1: base + 1}
            stays = await Wire.dial(base + 1)
            await stays.send(request(HEARTBEAT, 4, 1))
            await stays.frame()
            nodes.named -= {LARGE + 1}
            nodes.add(LARGE + 2)

            async def is_refused() -> bool:
                return (await kproxy.get("/ready"))[0] != 200

            await until(is_refused)
            _, text = await kproxy.get("/ready")
            assert (
                f"no port is left for brokers {LARGE + 2}: all 2 from {base} on stand for brokers that are named"
                in text
            )
            assert "raise port_count" in text
            assert await settings.advertised_ports(lacking=1) == {LARGE: base, LARGE + 2: 0}
            assert await kproxy.metric('kproxy_unbound_brokers_total{cluster="default"}') >= 1
            until_s = time.monotonic() + 1.0  # longer than the time after which it counts as gone
            while time.monotonic() < until_s:
                assert await settings.advertised_ports(lacking=1) == {
                    LARGE: base,
                    LARGE + 2: 0,
                }  # somebody is connected to its port
            stays.close()
            await kproxy.ready()
            assert await settings.checked_ports() == {LARGE: base, LARGE + 2: base + 1}
            assert any("is now broker" in line for line in kproxy.lines)

            async def is_folded() -> bool:
                _, text = await kproxy.get("/metrics")
                return f'broker="{LARGE + 1}"' not in text and f"broker-{LARGE + 1}" not in text

            await until(is_folded)
            labels = 'broker="other",cluster="default",listener="broker-other"'
            assert await kproxy.metric(f"kproxy_connections_total{{{labels}}}") == 2
            nodes.named |= {LARGE + 1}  # it comes back, and has lost its port
            assert await settings.advertised_ports(lacking=1) == {LARGE: base, LARGE + 1: 0, LARGE + 2: base + 1}
            settings.count = 3
            settings.write()
            assert (await kproxy.json("/api/reload", post=True))["outcome"] == "applied"
            await kproxy.ready()
            assert await settings.checked_ports() == {LARGE: base, LARGE + 1: base + 2, LARGE + 2: base + 1}

    live(test(), TIMEOUT_S)


def test_a_file_that_is_not_ours_is_left_as_it_is(tmp_path):
    async def test():
        nodes = Nodes(LARGE, 7)
        settings = Settings(tmp_path, nodes)
        settings.ports_file.write_text("somebody's notes")
        async with settings.process() as kproxy:
            assert await settings.checked_ports() == {7: settings.base, LARGE: settings.base + 1}
            line = await kproxy.says("is not used")
            assert f"ports_file {settings.ports_file} is not used: it is no JSON" in line
            assert "remove it or name another" in line
        assert settings.ports_file.read_text() == "somebody's notes"

    live(test(), TIMEOUT_S)

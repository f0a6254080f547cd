"""Connections and counters of a cluster that a reload removes."""

import asyncio
import socket
from contextlib import suppress
from ipaddress import ip_network
from types import SimpleNamespace

import pytest

from kproxy.core import CHOICE
from kproxy.errors import ConfigError
from kproxy.protocol.apis import PRODUCE
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.process import relays as of_process
from kproxy.proxy.process.changing.changes import Changes
from kproxy.proxy.process.relays import Relays
from tests.native import lend_at_once, needs_core
from tests.proxy.live import HOST, Broker, Wire, kproxy, live
from tests.proxy.process.test_cluster import advertised, node
from tests.wire.playbook import request, response

TAKES_HEADERS = {"accept_proxy_protocol": True, "trusted_proxies": (ip_network(HOST),)}


@pytest.mark.parametrize("reloads", [1, 2])
@pytest.mark.parametrize(
    "header",
    [b"no header at all\r\n", b"PROXY TCP4 192.0.2.1 127.0.0.1 40000 9092\r\n"],
    ids=["refused", "let in"],
)
def test_a_client_in_its_handshake_is_closed_with_its_cluster_and_its_series_end(reloads, header):
    """A client that was refused was counted after the cluster's cells had gone: that made them anew, for good.

    A client that a reload let come in by its settings was unknown to the next reload, and so stayed for good.
    """

    async def test():
        async with kproxy(cluster=TAKES_HEADERS) as here:
            relays, (proxy,) = here.server.relays, here.server.clusters
            client = await Wire.dial(here.port)
            await here.until(lambda: proxy.making)
            name, config = proxy.cluster.name, relays.config
            if reloads == 2:
                other = proxy.cluster.model_copy(update={"detail": "headers"})
                changed = config.model_copy(update={"clusters": (other,)})
                relays.replace_clusters(changed, Changes(changed={name: ("detail",)}))
            none = config.model_copy(update={"clusters": ()})
            relays.replace_clusters(none, Changes(removed=(name,), drained=(name,)))
            draining = asyncio.create_task(relays.drain_cluster(name, asyncio.Event()))
            await client.send(header)
            with suppress(ConnectionResetError):  # the refused client's bytes were not all read
                assert await client.rest() == b""
            await draining
            await here.until(lambda: not proxy.making)
            assert not here.server.metrics.clusters

    live(test())


@pytest.mark.parametrize("core", ["python", pytest.param("native", marks=needs_core)])
def test_a_client_that_always_asks_has_no_request_relayed_by_rights_that_no_longer_hold(core, monkeypatch):
    """It was served by them for 85 % of drain_timeout_s, since it always had a request under way."""
    lend_at_once(monkeypatch)
    monkeypatch.setenv(CHOICE, core)

    async def test():
        async with kproxy(drain_timeout_s=20) as here:
            client, broker = await here.connect()
            for number in range(3):
                await client.send(request(PRODUCE, 8, number, {"acks": -1}))
                await broker.frame()
                await broker.send(response(PRODUCE, 8, number))
                await client.frame()
            (relay,) = here.server.relays.worker.relays.values()
            assert (relay._lending is not None and relay._lending.is_lent) == (core == "native")
            await client.send(request(PRODUCE, 8, 3, {"acks": -1}))
            await broker.frame()
            config = here.server.config
            (cluster,) = config.clusters
            new = config.model_copy(update={"clusters": (cluster.model_copy(update={"read_only": True}),)})
            here.server.reloader.reads(lambda: new)
            assert (await here.server.reloader.reload("the test")).outcome == "applied"
            await here.until(lambda: relay._draining)  # its moment has come
            await client.send(request(PRODUCE, 8, 4, {"acks": -1}))
            later = await here.connect()  # what has arrived until now is read, if it ever is
            await broker.send(response(PRODUCE, 8, 3))
            await client.frame()
            assert await client.rest() == b""
            assert await broker.rest() == b""
            for wire in (client, broker, *later):
                wire.close()

    live(test(), 20)


def test_connections_to_a_former_cluster_do_not_tell_where_brokers_of_the_next_one_are():
    """Its clients were dialled through to the former cluster, until the next one was asked again."""

    async def test():
        latter = Broker(1)
        async with kproxy(drain_timeout_s=30) as here:
            client, broker = await here.connect()
            relays, (proxy,) = here.server.relays, here.server.clusters
            name, config = proxy.cluster.name, relays.config
            other = proxy.cluster.model_copy(update={"bootstrap": (Address(HOST, latter.port),)})
            new = config.model_copy(update={"clusters": (other,)})
            relays.replace_clusters(new, Changes(changed={name: ("bootstrap",)}, drained=(name,)))
            (following,) = relays.clusters
            nodes = [node(1, here.broker.port), node(2, here.broker.port)]
            addresses = await advertised(client, broker, nodes)
            assert addresses == {1: (HOST, here.port + 2), 2: (HOST, here.port + 3)}
            assert following.routes.upstreams == {}
            await latter.answer_kproxy()
            await here.until(lambda: following.routes.upstreams)
            assert await advertised(client, broker, nodes) == addresses
            assert following.routes.upstreams == {1: Address(HOST, latter.port)}
            client.close()
            broker.close()
        latter.close()

    live(test(), 20)


def test_a_failed_reload_that_adds_a_cluster_back_leaves_the_counters_of_its_connections_that_drain():
    """The counters once fell to zero, and later events of these connections were not counted."""

    async def test():
        async with kproxy(drain_timeout_s=30) as here:
            client, broker = await here.connect()
            relays, (proxy,), clusters = here.server.relays, here.server.clusters, here.server.metrics.clusters
            name, config, cells = proxy.cluster.name, relays.config, clusters[proxy.cluster.name]
            none = config.model_copy(update={"clusters": ()})
            relays.replace_clusters(none, Changes(removed=(name,), drained=(name,)))
            with socket.create_server((HOST, config.clusters[0].listen.port)), pytest.raises(ConfigError):
                relays.replace_clusters(config, Changes(added=(name,)))
            assert clusters.get(name) is cells
            client.close()
            broker.close()
            await relays.drain_cluster(name, asyncio.Event())
            assert not clusters
            with socket.create_server((HOST, config.clusters[0].listen.port)), pytest.raises(ConfigError):
                relays.replace_clusters(config, Changes(added=(name,)))
            assert not clusters

    live(test(), 20)


@pytest.mark.parametrize(
    ("after", "limit"), [(0, 1000), (0, 50), (0, 51), (0, 7), (70, 50), (119, 9), (120, 9), (5, 0)]
)
def test_rows_of_connections_come_in_slices_after_a_number_up_to_a_limit(monkeypatch, after, limit):
    monkeypatch.setattr(of_process, "connection_row", lambda relay: {"number": relay.number})
    of_numbers = {number: SimpleNamespace(number=number, closed=number == 3) for number in range(120, 0, -1)}
    here = SimpleNamespace(worker=SimpleNamespace(relays=of_numbers))
    slices = [[row["number"] for row in rows] for rows in Relays.connection_rows(here, after, limit)]
    asked = range(after + 1, min(after + limit, 120) + 1)
    assert [number for numbers in slices for number in numbers] == [number for number in asked if number != 3]
    assert all(len(numbers) <= 50 for numbers in slices), "the loop serves clients between two slices"


def test_a_failed_reload_keeps_no_copy_of_a_listening_socket():
    """With a copy left, the port of a cluster that is removed later would go on accepting clients, for nobody."""

    async def test():
        async with kproxy() as here:
            relays, (proxy,) = here.server.relays, here.server.clusters
            config, name = relays.config, proxy.cluster.name
            with socket.create_server((HOST, 0)) as taken:
                listen = Address(HOST, taken.getsockname()[1])
                moved = config.model_copy(update={"clusters": (proxy.cluster.model_copy(update={"listen": listen}),)})
                with pytest.raises(ConfigError):
                    relays.replace_clusters(moved, Changes(changed={name: ("listen",)}))
            assert len(relays.worker.gate.given) == 0
            assert relays.config is config and here.server.clusters == [proxy]
            await here.connect()

    live(test(), 20)

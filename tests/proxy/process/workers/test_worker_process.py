"""How a worker handles messages of its parent during a reload."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.changing.changes import changes
from kproxy.proxy.process.shared import Known
from kproxy.proxy.process.workers.worker_process import Beginning, Serving, _Process
from kproxy.proxy.sockets.channel import Channel
from tests.proxy.live import HOST, live

BEFORE, AFTER = 19092, 29092  # bootstrap ports, without listeners
FORMER, LATTER = Address("former", 9092), Address("latter", 9092)


def settings(*clusters: tuple[str, int, Address]) -> Config:
    tables = [{"name": name, "listen": f"{HOST}:{port}", "bootstrap": [str(at)]} for name, port, at in clusters]
    return load(given={"workers": 2, "cluster": tables})


def known(name: str, port: int, upstream: Address = FORMER) -> Known:
    ports = (port, (HOST,)), (port + 2, (HOST,))
    return Known(name, port, {1: upstream}, {1: upstream}, frozenset((1,)), ports=ports)


def beginning(config: Config) -> Beginning:
    return Beginning(config, 1, "token", 100, 0, 0)


@contextmanager
def channel() -> Iterator[Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, {}, lambda: None)
    yield channel
    channel.close()
    theirs.close()


@pytest.mark.parametrize(
    ("before", "since"),
    [([FORMER], []), ([], [FORMER]), ([FORMER], [FORMER])],
    ids=["before the reload", "since", "before and since"],
)
def test_a_starting_worker_discards_state_from_before_a_reload(before, since):
    """It advertised closed ports and dialled brokers of the former cluster, until the next reload."""

    async def test():
        old, new = settings(("one", BEFORE, FORMER)), settings(("one", AFTER, LATTER))
        with channel() as to_parent:
            process = _Process(socket.socket())
            process._channel = to_parent
            process._beginning = beginning(old)
            for upstream in before:
                process._known(known("one", BEFORE, upstream))
            process._reconfigure(new, changes(old, new))
            for upstream in since:
                process._known(known("one", AFTER, upstream))
            serving = process._serve()
            (proxy,) = serving._relays.clusters
            assert proxy.cluster.listen.port == AFTER
            assert proxy.has_routes == bool(since)  # otherwise its clients wait for the current state
            assert not since or proxy.routes.upstreams == {1: since[-1]}
            process._known(known("one", AFTER, LATTER))
            assert proxy.routes.advertised(1, "any").port == AFTER + 2
            assert proxy.routes.upstreams == {1: LATTER}
            await serving._relays.close()
            process._sock.close()

    live(test())


def test_a_port_released_by_a_reload_no_longer_counts_as_kproxys_own():
    """Workers refused to dial a broker at such a port, although kproxy was ready."""

    async def test():
        old = settings(("one", BEFORE, FORMER), ("two", 39092, FORMER))
        new = settings(("one", AFTER, FORMER))
        with channel() as to_parent:
            serving = Serving(beginning(old), to_parent)
            serving.start()
            gate = serving._worker.gate
            serving.take(known("one", BEFORE))
            serving.take(known("two", 39092))
            assert all(gate.is_ours(HOST, port) for port in (BEFORE, BEFORE + 2, 39092, 39094))
            serving.reconfigure(new, changes(old, new))
            assert not any(gate.is_ours(HOST, port) for port in (39092, 39094))
            serving.take(known("one", AFTER))
            assert all(gate.is_ours(HOST, port) for port in (AFTER, AFTER + 2))
            assert not any(gate.is_ours(HOST, port) for port in (BEFORE, BEFORE + 2))
            await serving._tasks.cancel()
            await serving._relays.close()

    live(test())


def test_a_broker_at_another_address_may_use_the_port_of_a_listener():
    """If kproxy listened on one address only, each worker's dial to such a broker raised an exception."""

    async def test():
        config = settings(("one", BEFORE, FORMER))
        with channel() as to_parent:
            serving = Serving(beginning(config), to_parent)
            serving.start()
            serving.take(known("one", BEFORE))
            gate = serving._worker.gate
            assert gate.is_ours(HOST, BEFORE)
            assert not gate.is_ours("192.0.2.1", BEFORE)
            await serving._relays.close()

    live(test())

"""Discovery: kproxy's view of a cluster follows the cluster, whichever requests fail."""

import asyncio
import gc
import socket
import threading
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.proxy.cluster import discovery
from kproxy.proxy.cluster.questions import question
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream import conversation
from tests.proxy.live import HOST, Broker, Wire, free_ports, kproxy, live, request, response


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def node(node_id: int, port: int, host: str = HOST):
    return {"nodeId": node_id, "host": host, "port": port}


def test_an_unexpected_error_in_discovery_is_logged_and_does_not_end_it(monkeypatch, caplog):
    monkeypatch.setattr(discovery, "FIRST_RETRY_S", 0.02)
    ask = conversation.Conversation.metadata_version
    asked = 0

    async def fails_once(self):
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ZeroDivisionError("a defect")
        return await ask(self)

    monkeypatch.setattr(conversation.Conversation, "metadata_version", fails_once)

    async def test():
        async with kproxy(wait=False) as here:
            await here.until(lambda: "a defect of kproxy" in "".join(here.server.not_ready()))
            (await here.broker.accept()).close()
            await here.broker.answer_kproxy()
            await here.until(lambda: not here.server.not_ready())

    live(test())
    assert "ZeroDivisionError" in caplog.text
    assert "it is asked again" in caplog.text


def test_no_thread_for_a_name_is_a_fault_of_that_moment(monkeypatch):
    monkeypatch.setattr(discovery, "FIRST_RETRY_S", 0.02)
    start = threading.Thread.start
    failed = 0

    def cannot_start(self):
        nonlocal failed
        if self.name == "resolver" and not failed:
            failed += 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", cannot_start)

    async def test():
        broker = Broker()
        async with kproxy(broker, wait=False, bootstrap=f"localhost:{broker.port}") as here:
            await here.until(lambda: "no thread can be started" in "".join(here.server.not_ready()))
            await here.broker.answer_kproxy()
            await here.until(lambda: not here.server.not_ready())

    live(test())
    assert failed == 1


def test_new_and_moved_brokers_are_learnt_without_a_client(caplog):
    caplog.set_level("INFO")

    async def test():
        async with kproxy(discovery_interval_s=0.05) as here:
            other = Broker(2)
            await here.broker.answer_kproxy([node(1, here.broker.port), node(2, other.port)])
            cluster = here.server.clusters[0]
            await here.until(lambda: 2 in cluster.brokers)
            moved = Broker(2)
            while cluster.routes.upstreams[2].port != moved.port:
                await here.broker.answer_kproxy([node(1, here.broker.port), node(2, moved.port)])
                await asyncio.sleep(0.01)
            client = await Wire.dial(here.port + 3)
            await client.send(request(12, 4, 9))
            assert await (await moved.accept()).frame() == request(12, 4, 9)
            assert f"moved cluster=default broker=2 from {HOST}:{other.port} to {HOST}:{moved.port}" in caplog.text

    live(test())


def test_a_sidecar_asks_again_who_its_broker_is():
    async def test():
        async with kproxy(route="sidecar", advertise="b-{id}:1", discovery_interval_s=0.05) as here:
            topology = here.server.clusters[0]._topology
            assert topology.sidecar_broker == 1
            while topology.sidecar_broker != 7:
                await here.broker.answer_kproxy([node(7, here.broker.port)])
                await asyncio.sleep(0.01)

    live(test())


def of_topics(*topics: int) -> dict[str, Any]:
    """Topics in a Metadata response: a hundred partitions each, of three replicas."""
    of_one = [
        {"partitionIndex": p, "leaderId": 1, "replicaNodes": [1, 2, 3], "isrNodes": [1, 2, 3]} for p in range(100)
    ]
    return {"topics": [{"name": f"t-{t}", "topicId": UUID(int=t + 1), "partitions": of_one} for t in topics]}


async def longest_turn_ms(until: asyncio.Event) -> float:
    """The longest CPU time that the loop was held for by anything else."""
    longest = 0
    while not until.is_set():
        begun = time.thread_time_ns()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time_ns() - begun)
    return longest / 1e6


def test_the_topics_in_the_response_of_an_old_broker_are_not_decoded():
    """Before 0.10 Metadata cannot be asked for brokers alone: 50,000 partitions would hold the loop for 150 ms."""
    topics = of_topics(*range(500))

    async def test():
        async with kproxy(wait=False) as here:
            wire = await here.broker.asked_as_before_0_10()
            answer = response(METADATA, 0, METADATA, {"brokers": here.broker.brokers(), **topics})
            await wire.send(answer[: len(answer) // 8])  # the rest of it never arrives
            await here.until(lambda: not here.server.not_ready())

    live(test())


@pytest.mark.parametrize("version", [1, 12])
def test_a_broker_that_lists_endless_brokers_does_not_block_the_loop(version):
    brokers = {"brokers": [node(node_id, 9092, "b") for node_id in range(200_000)]}
    answer = response(METADATA, version, METADATA, brokers)  # a second of CPU, of which kproxy's patience takes no part

    async def test():
        async with kproxy(wait=False, connect_timeout_s=60) as here:
            wire = await here.broker.accept()
            await wire.frame()
            offers = [{"apiKey": METADATA, "minVersion": 0, "maxVersion": version}]
            await wire.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": offers}))
            await wire.frame()
            seen = asyncio.Event()
            longest = asyncio.create_task(longest_turn_ms(seen))
            with suppress(ConnectionError):
                await wire.send(answer)
            await here.until(lambda: "more in Metadata than fits" in "".join(here.server.not_ready()))
            seen.set()
            assert await longest < 60

    live(test())


def test_the_names_of_topics_are_read_while_the_loop_goes_on():
    answer = response(METADATA, 12, METADATA, of_topics(*range(500)))  # long to make: not while kproxy waits

    async def test():
        async with kproxy(connect_timeout_s=60) as here:
            ids = [UUID(int=number + 1) for number in range(500)]
            address, connector = Address(HOST, here.broker.port), here.server.clusters[0].connector
            asking = asyncio.create_task(question.ask_topic_names(address, connector, ids))
            wire = await here.broker.accept()
            await wire.frame()
            offers = [{"apiKey": METADATA, "minVersion": 0, "maxVersion": 12}]
            await wire.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": offers}))
            await wire.frame()
            done = asyncio.Event()
            asking.add_done_callback(lambda _: done.set())
            longest = asyncio.create_task(longest_turn_ms(done))
            await wire.send(answer)
            assert await asking == {UUID(int=number + 1): f"t-{number}" for number in range(500)}
            assert await longest < 60

    live(test())


def test_a_sidecar_does_not_wait_for_each_name_that_does_not_resolve(monkeypatch):
    """Its broker is beside it: where names cannot be looked up it serves all the same, after one time-out."""
    nobody = threading.Event()
    look_up = socket.getaddrinfo

    def hangs(host, *rest, **more):
        if str(host).startswith("broker-"):
            nobody.wait(30)
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)

    async def test():
        async with kproxy(route="sidecar", advertise="b-{id}:1", wait=False, connect_timeout_s=2) as here:
            names = [node(number, here.broker.port, f"broker-{number}.invalid") for number in range(40)]
            await here.broker.answer_kproxy([*names, node(40, here.broker.port, "127.0.0.5")])
            await here.until(lambda: not here.server.not_ready())  # one after the other takes longer than the test may
            assert here.server.clusters[0]._topology.sidecar_broker == 40
            nobody.set()

    live(test())


def test_ready_follows_the_state_of_the_cluster_both_ways(monkeypatch, caplog):
    monkeypatch.setattr(discovery, "DEBOUNCE_S", 0.01)
    monkeypatch.setattr(discovery, "MIN_INTERVAL_S", 0.05)
    caplog.set_level("INFO")

    async def test():
        port = free_ports(1)
        async with kproxy(Broker(port=port), discovery_interval_s=600) as here:  # by the loss alone
            here.broker.close()
            assert await (await Wire.dial(here.port)).rest() == b""
            await here.until(lambda: "Connection refused" in "".join(here.server.not_ready()))
            assert "no longer ready cluster=default" in caplog.text
            here.broker = Broker(port=port)
            await here.broker.answer_kproxy()
            await here.until(lambda: not here.server.not_ready())

    live(test())


def test_a_reset_by_a_broker_makes_kproxy_ask_once(monkeypatch):
    monkeypatch.setattr(discovery, "DEBOUNCE_S", 0.1)
    monkeypatch.setattr(discovery, "MIN_INTERVAL_S", 0.1)

    async def test():
        async with kproxy(discovery_interval_s=600) as here:
            pairs = [await here.connect() for _ in range(5)]
            for _, broker in pairs:
                broker.reset()
            other = Broker(2)
            await here.broker.answer_kproxy([node(1, here.broker.port), node(2, other.port)])
            await here.until(lambda: 2 in here.server.clusters[0].brokers)
            await asyncio.sleep(0.3)
            with_more = asyncio.create_task(here.broker.accept())
            await asyncio.sleep(0.05)
            assert not with_more.done()  # five resets were one reason to ask
            with_more.cancel()

    live(test())


@asynccontextmanager
async def refusing_broker():
    """Answers each ApiVersions request with an error."""
    broker = Broker()

    async def serve() -> None:
        while True:
            wire = await broker.accept()
            await wire.frame()
            await wire.send(response(API_VERSIONS, 0, API_VERSIONS, {"errorCode": 58}))
            wire.close()

    serving = asyncio.create_task(serve())
    try:
        yield broker
    finally:
        serving.cancel()
        broker.close()


def test_questions_leave_no_socket_to_the_garbage_collector(monkeypatch):
    monkeypatch.setattr(discovery, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(discovery, "LAST_RETRY_S", 0.001)
    faults = []
    ask = question.ask_brokers

    async def kept(address, connector):
        try:
            return await ask(address, connector)
        except Exception as fault:
            faults.append(fault)  # as a log record or a debugger would: its frames stay alive
            raise

    monkeypatch.setattr("kproxy.proxy.process.cluster.ask_brokers", kept)

    async def test():
        async with refusing_broker() as broker, kproxy(broker, wait=False) as here:
            gc.disable()
            try:
                await here.until(lambda: len(faults) > 2)
                before = open_files()
                await here.until(lambda: len(faults) > 40)
                assert open_files() < before + 10
            finally:
                gc.enable()

    live(test())

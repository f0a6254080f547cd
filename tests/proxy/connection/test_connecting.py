"""Many clients at once; a policy between sockets: refusals, and the names that kproxy asks for itself."""

import asyncio
import errno
import json
import os
import socket
from contextlib import suppress
from uuid import UUID

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, FETCH, METADATA, PRODUCE
from kproxy.proxy.admission.admission import Admission
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sockets import listeners
from kproxy.wire import interest
from tests.proxy.live import Broker, Wire, kproxy, live
from tests.wire.playbook import request, response

ORDERS, SECRET = UUID(int=1), UUID(int=2)


def fetch(correlation_id, topic_id):
    topics = [{"topicId": topic_id, "partitions": [{"partition": 0}]}]
    return request(FETCH, 13, correlation_id, {"topics": topics})


def code(frame):
    (topic,) = codec.decode_response(frame[4:], FETCH, 13)[1]["responses"]
    return topic["partitions"][0]["errorCode"]


async def answer_names(broker: Broker) -> list[UUID]:
    """Answer kproxy's question for the names of topics; returns the ids that it asked about."""
    wire = await broker.accept()
    await wire.frame()
    offers = [{"apiKey": METADATA, "minVersion": 0, "maxVersion": 12}]
    await wire.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": offers}))
    asked = [topic["topicId"] for topic in codec.decode_request((await wire.frame())[4:])[1]["topics"]]
    names = {ORDERS: "orders", SECRET: "secret-1"}
    topics = [{"name": names[topic_id], "topicId": topic_id, "partitions": []} for topic_id in asked]
    await wire.send(response(METADATA, 12, METADATA, {"topics": topics}))
    wire.close()
    return asked


def test_a_request_with_an_unknown_topic_id_is_refused_until_kproxy_has_learned_the_name():
    policy = (Rule(action="deny", topic="secret-*"),)

    async def talk() -> None:
        async with kproxy(cluster={"policy": policy}) as here:
            client, broker = await here.connect()

            def names() -> dict[UUID, str]:
                return here.server.clusters[0]._connections.naming.names.names

            for topic_id, allowed in ((ORDERS, True), (SECRET, False)):
                await client.send(fetch(1, topic_id))
                assert code(await client.frame()) == 100  # clients ask Metadata, and try again
                assert await answer_names(here.broker) == [topic_id]
                await here.until(lambda known=topic_id: known in names())
                await client.send(fetch(2, topic_id))
                if allowed:
                    assert await broker.frame() == fetch(2, topic_id)
                    answered = response(FETCH, 13, 2, {})
                    await broker.send(answered)
                    assert await client.frame() == answered
                else:
                    assert code(await client.frame()) == 29
                await here.until(lambda: not here.server.clusters[0]._connections.naming.is_asking)
            (cells,) = here.server.metrics.clusters.values()
            assert cells.refusals["Fetch", "rule"] == 1
            assert cells.refusals["Fetch", "unknown_topic_id"] == 2
            assert cells.refusals["Produce", "rule"] == 0  # the series begins at 0

    live(talk())


def test_clients_that_stop_within_requests_and_hold_all_memory_are_closed_for_others(monkeypatch):
    """A policy can decide their requests only when they are complete, so kproxy holds their bytes."""

    def produce(size: int) -> bytes:
        data = [{"name": "orders", "partitionData": [{"index": 0, "records": b"r" * size}]}]
        return request(PRODUCE, 9, 1, {"acks": 1, "timeoutMs": 1, "topicData": data})

    async def talk() -> None:
        policy = (Rule(action="deny", topic="secret-*"),)
        async with kproxy(cluster={"policy": policy}, max_held_bytes=1 << 20) as here:
            held = here.server.relays.worker.held
            monkeypatch.setattr(interest, "HELD_PATIENCE_NS", 1 << 62)  # at first no request has used up its time
            idle = []
            for _ in range(4):
                idle.append(await here.connect())
                await idle[-1][0].send(produce(250_000)[:-1])
                await here.until(lambda: held._held_bytes >= len(idle) * 250_000)
            whole = produce(200_000)
            client, _ = await here.connect()
            with suppress(OSError):
                await client.send(whole[:150_000])
                await client.rest()
            await here.until(lambda: here.relays == 4)
            monkeypatch.setattr(interest, "HELD_PATIENCE_NS", 0)
            client, broker = await here.connect()
            for start in range(0, len(whole), 50_000):
                await client.send(whole[start : start + 50_000])
                await asyncio.sleep(0.02)
            assert await broker.frame() == whole
            await here.until(lambda: here.relays == 4)
            with suppress(OSError):
                assert await idle[0][0].rest() == b""  # the connection that has waited for longest
            await idle[1][0].send(produce(250_000)[-1:])
            assert await idle[1][1].frame() == produce(250_000)  # the others have lost nothing
            for wire in (*(wire for pair in idle for wire in pair), client, broker):
                wire.close()
            await here.until(lambda: not here.relays)
            assert held._held_bytes == 0 and not held._requests
            assert here.counted.disconnects["fault"] == 2

    live(talk())


def test_the_audit_is_complete_when_kproxy_has_stopped(tmp_path):
    """The file and its metrics have every line from the first one on, even if the stop follows at once."""
    policy = (Rule(action="deny", topic="secret-*"),)
    path = tmp_path / "audit.jsonl"

    async def talk() -> None:
        async with kproxy(cluster={"policy": policy}, audit=str(path)) as here:
            client, _ = await here.connect()
            topics = [{"name": "secret-1", "partitionIndexes": [0]}]
            for number in range(50):
                await client.send(request(61, 0, number, {"topics": topics}))
                await client.frame()
            metrics = here.server.metrics
        assert metrics.audit_lines() == (50, 0)
        (cells,) = metrics.clusters.values()
        assert cells.refusals["DescribeProducers", "rule"] == 50

    live(talk())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 50
    assert {(line["api"], line["decision"], line["rule"], *line["topics"]) for line in lines} == {
        ("DescribeProducers", "deny", 1, "secret-1")
    }


def test_a_listener_without_a_policy_has_no_authorizer():
    async def talk() -> None:
        async with kproxy() as here:
            client = await Wire.dial(here.port)
            await here.broker.accept()
            await here.until(lambda: here.relays == 1)
            (relay,) = here.server.relays.worker.relays.values()
            assert relay.session._authorizer is None
            (cells,) = here.server.metrics.clusters.values()
            assert not cells.refusals
            client.close()

    live(talk())


def test_many_new_clients_at_once_do_not_delay_connected_ones(monkeypatch):
    """Each new client costs a millisecond or two up to its first request: a turn admits a few, then serves others."""
    came: list[int] = [0]  # by turn of the loop
    admit = Admission.admit

    def admitted(admission: Admission, client: Incoming) -> bool:
        came[-1] += 1
        return admit(admission, client)

    monkeypatch.setattr(Admission, "admit", admitted)

    async def turns() -> None:
        while True:
            came.append(0)
            await asyncio.sleep(0)

    async def talk() -> None:
        async with kproxy() as here:
            counting = asyncio.create_task(turns())
            clients = [socket.socket() for _ in range(60)]
            for client in clients:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", here.port))
            await here.until(lambda: sum(came) >= len(clients))
            assert max(came) <= 4
            counting.cancel()
            for client in clients:
                client.close()

    live(talk())


@pytest.mark.parametrize(
    ("number", "remedy"),
    (
        (errno.EMFILE, "raise the limit of open files (ulimit -n, LimitNOFILE)"),
        (errno.ENFILE, "raise that of this machine (sysctl fs.file-max)"),
    ),
)
def test_a_client_for_whom_no_descriptor_is_left_is_counted_and_served_later(monkeypatch, caplog, number, remedy):
    accept, faults = socket.socket.accept, [OSError(number, os.strerror(number)) for _ in range(3)]

    def accepted(sock):
        if faults:
            raise faults.pop()
        return accept(sock)

    async def test():
        async with kproxy() as here:
            monkeypatch.setattr(listeners, "_EXHAUSTED_PAUSE_S", 0.01)
            with monkeypatch.context() as patch:
                patch.setattr(socket.socket, "accept", accepted)
                client, broker = await here.connect()
            assert here.limits == {"open_files": 3}
            await client.send(request(API_VERSIONS, 0, 1))
            assert await broker.frame() == request(API_VERSIONS, 0, 1)

    live(test())
    assert remedy in caplog.text

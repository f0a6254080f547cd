"""The clients of the demo: their client ids, and the traffic of each.

Each is an asyncio task that runs until it is cancelled. Errors and closed connections are part of the demo, and the
request is tried again. Refuses to know kproxy: the clients have only an address to bootstrap from.
"""

import asyncio
import json
import random
import string
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from kproxy.demo.client import Client, Connection
from kproxy.demo.cluster import Cluster
from kproxy.demo.member import Member
from kproxy.errors import UpstreamError
from kproxy.protocol.apis import DESCRIBE_CLUSTER, FETCH, LIST_OFFSETS, METADATA, PRODUCE
from kproxy.protocol.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from kproxy.protocol.records import Record, iterate_headers, write_batch

TOPICS = {"orders": 6, "clicks": 6, "telemetry": 3, "exports": 3}
QUOTAS = {"nightly-export": 600_000.0}  # bytes per second

_LEADER_MOVES_S = 12.0
_AWAY_S, _THERE_S = 20.0, 40.0  # of the member that comes and goes
_READS_S, _WRITES_S = 4.0, 15.0  # of the consumer that repeatedly falls behind
_IDLE_S = 1.0
_RETRY_S = 0.5

Body = dict[str, Any]


def delay_s(api: str, size: int) -> float:
    """Service time of a request in seconds: mostly about a millisecond, at times a slow disk."""
    if api == "Produce":
        stall = random.uniform(0.02, 0.08) if random.random() < 0.01 else 0.0
        return random.lognormvariate(-6.4, 0.5) + size / 200e6 + stall
    return random.lognormvariate(-7.6, 0.4)


def clients(host: str, port: int) -> list[Awaitable[None]]:
    """Return all clients, not started yet."""

    def client(client_id: str, versions: Mapping[int, int] | None = None) -> Client:
        return Client(host, port, client_id, versions)

    old = {PRODUCE: 7, FETCH: 11, METADATA: 5, LIST_OFFSETS: 2}
    return [
        _lasting(client(client_id, versions), work)
        for client_id, versions, work in (
            ("checkout", None, _producer("orders", per_second=45, records=4, value_bytes=300, codec=ZSTD, acks=-1)),
            ("web-frontend", None, _producer("clicks", per_second=70, records=30, value_bytes=250, codec=LZ4, acks=1)),
            ("legacy-billing", old, _producer("orders", per_second=8, records=1, value_bytes=900, codec=GZIP, acks=-1)),
            ("sensors", old, _producer("telemetry", per_second=60, records=2, value_bytes=80, codec=SNAPPY, acks=0)),
            ("nightly-export", None, _producer("exports", per_second=6, records=24, value_bytes=6000, codec=NONE)),
            ("fraud-detector", None, _member("fraud", "orders", max_wait_ms=500, min_bytes=1)),
            ("fraud-detector", None, _autoscaled(_member("fraud", "orders", max_wait_ms=500, min_bytes=1))),
            ("session-builder", None, _member("sessions", "clicks", max_wait_ms=500, min_bytes=64_000)),
            ("session-builder", None, _member("sessions", "clicks", max_wait_ms=500, min_bytes=64_000)),
            ("data-lake-sink", {FETCH: 16}, _member("data-lake", "exports", 1000, 500_000, writes_s=_WRITES_S)),
            ("dashboards", old, _consumer("telemetry", max_wait_ms=250, min_bytes=1)),
            ("lag-monitor", None, _monitor),
            ("wrong-topic", None, _misconfigured),
        )
    ]


async def move_leaders(cluster: Cluster) -> None:
    """Move leaders at random times, as a rolling restart does."""
    while True:
        await asyncio.sleep(random.uniform(0.5, 1.5) * _LEADER_MOVES_S)
        topic = random.choice(list(TOPICS))
        cluster.move_leader(topic, random.randrange(TOPICS[topic]))


async def _lasting(client: Client, work: Callable[[Client], Awaitable[None]]) -> None:
    await asyncio.sleep(random.uniform(0, 1))
    try:
        while True:
            try:
                await work(client)
            except (UpstreamError, KeyError):  # the broker has stopped, or is unknown
                await client.close()
                await asyncio.sleep(random.uniform(0.5, 1.5) * _RETRY_S)
    finally:
        await client.close()


def _producer(
    topic: str, *, per_second: float, records: int, value_bytes: int, codec: int, acks: int = 1, in_flight: int = 5
) -> Callable[[Client], Awaitable[None]]:
    """Produce batches at random times, several in flight as real producers do."""

    async def work(client: Client) -> None:
        places = asyncio.Semaphore(in_flight)
        stale = asyncio.Event()

        def answered(answer: "asyncio.Future[Body]") -> None:
            places.release()
            if answer.cancelled() or answer.exception() is not None or _refused(answer.result()):
                stale.set()

        await client.refresh(topic)
        while True:
            await asyncio.sleep(random.expovariate(per_second))
            await places.acquire()
            if stale.is_set():
                await client.refresh(topic)
                stale.clear()
            partition = random.randrange(TOPICS[topic])
            connection = await client.leader(topic, partition)
            batch = _batch(random.randint(1, 2 * records - 1), value_bytes, codec)
            body = _topic(client, topic, "name", partitionData=[{"index": partition, "records": batch}])
            request = {"acks": acks, "timeoutMs": 30_000, "topicData": [body]}
            connection.send(PRODUCE, request, answered=acks != 0).add_done_callback(answered)
            await connection.drain()

    return work


def _consumer(topic: str, *, max_wait_ms: int, min_bytes: int) -> Callable[[Client], Awaitable[None]]:
    """Consume all partitions of a topic, in no group."""

    async def work(client: Client) -> None:
        wait = {"maxWaitMs": max_wait_ms, "minBytes": min_bytes}
        await _consume(client, topic, list(range(TOPICS[topic])), {}, wait)

    return work


def _member(
    group: str, topic: str, max_wait_ms: int, min_bytes: int, *, writes_s: float = 0.0
) -> Callable[[Client], Awaitable[None]]:
    """Consume the partitions assigned by the group. writes_s: length of pauses, as if it wrote files."""

    async def work(client: Client) -> None:
        wait = {"maxWaitMs": max_wait_ms, "minBytes": min_bytes}

        async def consume(partitions: list[int], offsets: dict[int, int]) -> None:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_READS_S if writes_s else None):
                        await _consume(client, topic, partitions, offsets, wait)
                await asyncio.sleep(writes_s)

        await Member(client, group, topic, TOPICS[topic]).run(consume)

    return work


def _autoscaled(work: Callable[[Client], Awaitable[None]]) -> Callable[[Client], Awaitable[None]]:
    """Be a member for a while, then away for a while: each time its group rebalances."""

    async def comes_and_goes(client: Client) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.5) * _AWAY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0.5, 1.5) * _THERE_S):
                    await work(client)
            await client.close()

    return comes_and_goes


async def _consume(client: Client, topic: str, partitions: list[int], offsets: dict[int, int], wait: Body) -> None:
    """Consume these partitions with one long poll per broker, as real consumers do, until cancelled."""
    while True:
        await client.refresh(topic)
        by_leader: dict[int, list[int]] = {}
        for partition in partitions:
            by_leader.setdefault(client.leaders[topic, partition], []).append(partition)
        connections = {leader: await client.connection(leader) for leader in by_leader}
        polls = [
            asyncio.create_task(_poll(client, topic, connections[leader], led, offsets, wait))
            for leader, led in by_leader.items()
        ] or [asyncio.create_task(asyncio.sleep(_IDLE_S))]  # it has no partition until the next rebalance
        try:
            done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
        for poll in done:
            poll.result()


async def _poll(
    client: Client, topic: str, connection: Connection, partitions: list[int], offsets: dict[int, int], wait: Body
) -> None:
    """Fetch from one broker until it no longer leads one of the partitions."""
    new = [partition for partition in partitions if partition not in offsets]
    if new:
        wanted = [{"partitionIndex": partition, "timestamp": -1} for partition in new]
        answer = await connection.request(
            LIST_OFFSETS, {"replicaId": -1, "topics": [{"name": topic, "partitions": wanted}]}
        )
        for part in answer["topics"][0]["partitions"]:
            if part["errorCode"]:
                return
            offsets[part["partitionIndex"]] = part["offset"]
    while True:
        wanted = [
            {"partition": partition, "fetchOffset": offsets[partition], "partitionMaxBytes": 1 << 20}
            for partition in partitions
        ]
        topics = [_topic(client, topic, "topic", partitions=wanted)]
        answer = await connection.request(FETCH, wait | {"maxBytes": 50 << 20, "topics": topics})
        for part in answer["responses"][0]["partitions"]:
            if part["errorCode"]:
                offsets.pop(part["partitionIndex"], None)
                await asyncio.sleep(0.05)
                return
            for _, header in iterate_headers(part["records"]):
                offsets[part["partitionIndex"]] = header.last_offset + 1


async def _monitor(client: Client) -> None:
    """List all end offsets at an interval, over new connections each time."""
    while True:
        for topic, count in TOPICS.items():
            await client.refresh(topic)
            for partition in range(count):
                connection = await client.leader(topic, partition)
                wanted = [{"partitionIndex": partition, "timestamp": -1}]
                body = {"replicaId": -1, "topics": [{"name": topic, "partitions": wanted}]}
                await connection.request(LIST_OFFSETS, body)
        await connection.request(DESCRIBE_CLUSTER, {})
        await client.close()
        await asyncio.sleep(2)


async def _misconfigured(client: Client) -> None:
    """Request Metadata of a topic that does not exist, at an interval."""
    while True:
        await client.refresh("oders")
        await asyncio.sleep(random.uniform(1, 3))


def _refused(answer: Body) -> bool:
    return any(part["errorCode"] for topic in answer.get("responses", ()) for part in topic["partitionResponses"])


def _topic(client: Client, topic: str, name: str, **rest: Any) -> Body:
    """Return a topic for a request, by name and by id: the version takes the field that it has."""
    ids = {"topicId": client.topic_ids[topic]} if topic in client.topic_ids else {}
    return {name: topic} | ids | rest


def _batch(count: int, value_bytes: int, codec: int) -> bytes:
    now_ms = time.time_ns() // 1_000_000
    return write_batch(
        [Record(index, now_ms, b"%08x" % random.getrandbits(32), _value(value_bytes)) for index in range(count)],
        codec=codec,
    )


_NOISE = "".join(random.choices(string.ascii_letters + string.digits, k=1 << 16))


def _value(size: int) -> bytes:
    """Return JSON of this size: a quarter to three quarters random, the rest blanks, which compress well."""
    length = int(random.uniform(0.25, 0.75) * size)
    start = random.randrange(len(_NOISE) - length)
    document = {
        "id": random.getrandbits(48),
        "user": random.randrange(10_000),
        "payload": _NOISE[start : start + length],
    }
    return json.dumps(document).encode().ljust(size)

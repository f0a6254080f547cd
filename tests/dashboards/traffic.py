"""The exposition of a kproxy after real traffic from the demo's cluster and clients, and from a scripted broker.

The demo's brokers never fail, so a second cluster of one scripted broker has a group that commits, a request that is
never answered, and a client that uses TLS on a plain port; a third cluster has a TLS listener.
"""

import asyncio
import shutil
import ssl
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvloop

from kproxy.demo import traffic
from kproxy.demo.cluster import Cluster
from kproxy.metrics import Metrics
from kproxy.metrics.counters.passive import PassiveCells
from kproxy.metrics.counters.zookeeper import ZooKeeperCells
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, FETCH, JOIN_GROUP, OFFSET_COMMIT, PRODUCE, SYNC_GROUP
from kproxy.protocol.records import Record, write_batch
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.flight import Flight
from kproxy.proxy.config.otlp import Otlp
from kproxy.proxy.config.settings import Cluster as ClusterConfig
from kproxy.proxy.config.settings import Config
from kproxy.proxy.config.telemetry import Telemetry
from kproxy.proxy.config.tls import ClientTls
from kproxy.proxy.process.server import Server
from kproxy.zookeeper.session import ANSWERED, Operation
from tests.certificates import Authority
from tests.proxy.live import HOST, Broker, TlsWire, Wire, free_ports, request, response
from tests.pushed import counter, gauge, pushed

TIMEOUT_S = 60
SUBSCRIPTIONS, PUSH = 71, 72
PUSHED_GAUGES = [
    f"org.apache.kafka.{name}"
    for name in (
        *("producer.record.queue.time.avg", "producer.node.request.latency.avg", "producer.produce.throttle.time.avg"),
        *("consumer.poll.idle.ratio.avg", "consumer.fetch.manager.fetch.latency.avg"),
        *("consumer.coordinator.commit.latency.avg", "consumer.coordinator.rebalance.latency.avg"),
        "consumer.coordinator.assigned.partitions",
    )
]
PUSHED_COUNTERS = [f"org.apache.kafka.{kind}.connection.creation.total" for kind in ("producer", "consumer")]


def exposition(complete: Callable[[str], bool]) -> str:
    """Return the text of a scrape as soon as it is complete, or after TIMEOUT_S."""
    return uvloop.run(_played(complete))


async def _played(complete: Callable[[str], bool]) -> str:
    demo = Cluster(topics=traffic.TOPICS, quotas={"nightly-export": 20_000.0}, delay=traffic.delay_s)
    await demo.start()
    scripted = Broker()
    first, second = free_ports(6), free_ports(6)
    brokers = tuple(Address(*address) for address in demo.bootstrap)
    clusters = (
        ClusterConfig(
            name="demo", listen=Address(HOST, first), bootstrap=brokers, detail="topics", telemetry=Telemetry()
        ),
        ClusterConfig(
            name="scripted",
            listen=Address(HOST, second),
            bootstrap=(Address(HOST, scripted.port),),
            detail="topics",
        ),
    )
    folder = Path(tempfile.mkdtemp(prefix="kproxy-traffic-"))
    authority = Authority(folder)
    secure = free_ports(1)
    clusters += (
        ClusterConfig(
            name="secure",
            listen=Address(HOST, secure),
            bootstrap=brokers[:1],
            route="sidecar",
            tls=ClientTls(**authority.server().settings()),
        ),
    )
    otlp = Otlp(endpoint=f"http://{HOST}:1", timeout_s=0.5)  # a collector that does not exist
    flight = Flight(folder=folder / "flight")
    server = Server(Config(cluster=clusters, max_connections=100, drain_timeout_s=0.5, otlp=otlp, flight=flight))
    server.metrics.zookeeper["old"] = _zookeeper()
    await server.start()
    tasks: list[asyncio.Future[None]] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await scripted.answer_kproxy()
            while server.not_ready():  # noqa: ASYNC110 (asked of a server, which has no event for it)
                await asyncio.sleep(0.01)
            tasks += map(asyncio.ensure_future, traffic.clients(HOST, first))
            await _push_metrics(first)
            await _script(second, scripted)
            trusting = ssl.create_default_context(cafile=authority.bundle)
            (await TlsWire((await Wire.dial(secure)).sock).begin(trusting, server_side=False)).close()
        with suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                while not complete(_scraped(server)):
                    for partition in range(traffic.TOPICS["orders"]):
                        demo.move_leader("orders", partition)
                    await asyncio.sleep(0.5)
        return _scraped(server)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()
        await demo.stop()
        scripted.close()
        shutil.rmtree(folder)


async def _script(port: int, scripted: Broker) -> None:
    """A group that rebalances and lags, an unsupported ApiVersions version, an unanswered request, and TLS."""
    client = await Wire.dial(port)
    broker = await scripted.accept()
    orders = {"topic": "orders", "partitions": [{"partition": 0, "fetchOffset": 0}]}
    batch = write_batch([Record(number, 1_700_000_000_000, None, b"v") for number in range(5)])
    fetched = [
        {"topic": "orders", "partitions": [{"partitionIndex": 0, "highWatermark": 9, "records": batch}]},
    ]
    offsets = [{"name": "orders", "partitions": [{"partitionIndex": 0, "committedOffset": 3}]}]
    answers = [{"name": "orders", "partitions": [{"partitionIndex": 0, "errorCode": 0}]}]
    joined = {"generationId": 1, "leader": "m", "memberId": "m", "members": [{"memberId": "m", "metadata": b""}]}
    given = {"memberId": "m", "assignment": b""}
    for asked, answer in (
        (request(API_VERSIONS, 3, 1), response(API_VERSIONS, 0, 1, {"errorCode": 35, "apiKeys": []})),
        (request(FETCH, 12, 2, {"maxWaitMs": 500, "topics": [orders]}), response(FETCH, 12, 2, {"responses": fetched})),
        (
            request(OFFSET_COMMIT, 8, 3, {"groupId": "billing", "topics": offsets}),
            response(OFFSET_COMMIT, 8, 3, {"topics": answers}),
        ),
        (
            request(JOIN_GROUP, 5, 3, {"groupId": "billing", "memberId": "m", "protocolType": "connect"}),
            response(JOIN_GROUP, 5, 3, joined),
        ),
        (
            request(
                SYNC_GROUP, 3, 3, {"groupId": "billing", "memberId": "m", "generationId": 1, "assignments": [given]}
            ),
            response(SYNC_GROUP, 3, 3),
        ),
    ):
        await client.send(asked)
        await broker.frame()
        await broker.send(answer)
        await client.frame()
    await client.send(request(PRODUCE, 9, 4, {"acks": -1}))
    await broker.frame()
    broker.close()
    await client.rest()
    client.close()
    client = await Wire.dial(port)
    await client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32))
    await client.rest()
    client.close()


async def _push_metrics(port: int) -> None:
    """A client that pushes the metrics of official clients, with one push that is refused."""
    client = await Wire.dial(port)
    await client.send(request(SUBSCRIPTIONS, 0, 1))
    given = codec.decode_response((await client.frame())[4:], SUBSCRIPTIONS, 0)[1]
    asked = {"clientInstanceId": given["clientInstanceId"], "subscriptionId": given["subscriptionId"]}
    points = [gauge(name, 1.5) for name in PUSHED_GAUGES] + [counter(name, 2) for name in PUSHED_COUNTERS]
    for number in (2, 3):  # the second is too early
        await client.send(request(PUSH, 0, number, {**asked, "metrics": pushed(*points)}))
        await client.frame()
    client.close()


def _zookeeper() -> ZooKeeperCells:
    """Cells of a ZooKeeper listener with a value in every series that boards query."""
    cells = ZooKeeperCells(["zk1:2181"])
    cells.count(Operation("getData", 1, 0, 0, outcome=ANSWERED, error=-101))
    return cells


def _passive() -> Metrics:
    """Metrics of a `kproxy watch` with a value in every series that boards query."""
    metrics = Metrics()
    metrics.passive = PassiveCells("eth0", ["gap"])
    metrics.passive.copies["default"] = 1
    return metrics


def _scraped(server: Server) -> str:
    """Return the expositions of this kproxy and of a `kproxy watch`."""
    return "".join(render(registry_of(metrics))[0].decode() for metrics in (server.metrics, _passive()))

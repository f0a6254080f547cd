"""The miniature cluster with a real client through kproxy."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kproxy.demo.app import claim_ports
from kproxy.demo.client import Connection
from kproxy.demo.cluster import OFFERED, Cluster
from kproxy.metrics.summary import summarise
from kproxy.protocol.apis import (
    API_VERSIONS,
    DESCRIBE_CLUSTER,
    FETCH,
    FIND_COORDINATOR,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    SYNC_GROUP,
)
from kproxy.protocol.records import Record, write_batch
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster as ClusterConfig
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.server import Server


@asynccontextmanager
async def proxied(cluster, *sinks, detail="headers", **settings):
    """(the address clients bootstrap at, the server), ready."""
    await cluster.start()
    port, claim = claim_ports(random.randrange(20_000, 30_000), 5)
    brokers = tuple(Address(*address) for address in cluster.bootstrap)
    listen = ClusterConfig(listen=Address("127.0.0.1", port), bootstrap=brokers, detail=detail)
    server = Server(Config(cluster=(listen,), max_connections=100, drain_timeout_s=0.5, **settings), sinks)
    await server.start()
    try:
        async with asyncio.timeout(60):
            await until(lambda: not server.not_ready())
        yield str(Address("127.0.0.1", port)), server
    finally:
        await server.stop()
        await cluster.stop()
        claim.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110 (the conditions have no event)
        await asyncio.sleep(0.02)


def produce(bootstrap, topic, values, **settings):
    """Deliver all of them, in order per partition; returns what was delivered where: {(partition, offset): value}."""
    delivered = {}

    def on_delivery(error, message):
        assert error is None, error
        delivered[message.partition(), message.offset()] = message.value()

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1, "message.timeout.ms": 120_000} | settings)
    for index, value in enumerate(values):
        producer.produce(topic, key=b"%d" % index, value=value, partition=index % 3, on_delivery=on_delivery)
        producer.poll(0)
    assert producer.flush(120) == 0
    return delivered


def consume(bootstrap, topic, count, **settings):
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "test", "enable.auto.commit": False, "check.crcs": True} | settings
    )
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(3)])
        found = {}
        while len(found) < count:
            messages = consumer.consume(count - len(found), timeout=120)
            assert messages, f"{len(found)} of {count} after two minutes"
            for message in messages:
                assert message.error() is None, message.error()
                found[message.partition(), message.offset()] = message.value()
        return found
    finally:
        consumer.close()


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_produced_through_kproxy_are_consumed_unchanged(compression):
    values = [random.randbytes(random.randrange(3)) + b"value %d " % index * 20 for index in range(600)]

    def work(bootstrap):
        addresses = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=60).brokers.values()
        delivered = produce(bootstrap, "t", values, **{"compression.type": compression, "enable.idempotence": True})
        assert sorted(delivered.values()) == sorted(values)
        assert consume(bootstrap, "t", len(values)) == delivered
        return {broker.id: (broker.host, broker.port) for broker in addresses}

    async def main():
        cluster = Cluster(topics={"t": 3})
        async with proxied(cluster) as (bootstrap, server):
            addresses = await asyncio.to_thread(work, bootstrap)
            port = int(bootstrap.rpartition(":")[2])
            assert addresses == {node_id: ("127.0.0.1", port + 1 + node_id) for node_id in (1, 2, 3)}
            totals = summarise(server.metrics)
            assert totals.apis["Produce"].request_bytes > 0
            assert totals.apis["Fetch"].response_bytes > 0
            assert not totals.apis["Produce"].errors
            assert totals.faults == 0

    asyncio.run(main())


@pytest.mark.parametrize("acks", ["0", "1"])
def test_fewer_acks(acks):
    async def main():
        async with proxied(Cluster(topics={"t": 3})) as (bootstrap, _):
            values = [b"%d" % index for index in range(300)]
            await asyncio.to_thread(produce, bootstrap, "t", values, acks=acks)
            found = await asyncio.to_thread(consume, bootstrap, "t", len(values))
            assert sorted(found.values()) == sorted(values)

    asyncio.run(main())


def test_clients_follow_leaders_that_move():
    """Nothing is lost and nothing is doubled, and the error that names the new leader leads through kproxy."""

    async def main():
        cluster = Cluster(topics={"t": 3}, delay=lambda api, size: 0.005)
        async with proxied(cluster) as (bootstrap, server):
            values = [b"%d" % index for index in range(3000)]
            settings = {"enable.idempotence": True, "linger.ms": 0, "batch.num.messages": 10}
            producing = asyncio.create_task(asyncio.to_thread(produce, bootstrap, "t", values, **settings))
            for partition in (0, 1, 2):
                await until(lambda partition=partition: cluster.topics["t"].partitions[partition].log.end_offset)
                cluster.move_leader("t", partition)
            delivered = await producing
            cluster.move_leader("t", 0)
            assert await asyncio.to_thread(consume, bootstrap, "t", len(values)) == delivered
            ends = [partition.log.end_offset for partition in cluster.topics["t"].partitions]
            assert ends == [1000, 1000, 1000]
            errors = summarise(server.metrics).apis["Produce"].errors
            assert errors["NOT_LEADER_OR_FOLLOWER"] > 0

    asyncio.run(main())


def test_a_client_over_its_quota_is_throttled():
    async def main():
        cluster = Cluster(topics={"t": 3}, quotas={"greedy": 50_000})
        async with proxied(cluster) as (bootstrap, server):
            values = [bytes(1000) for _ in range(90)]
            settings = {"client.id": "greedy", "compression.type": "none", "batch.num.messages": 10}
            await asyncio.to_thread(produce, bootstrap, "t", values, **settings)
            produced = summarise(server.metrics).apis["Produce"]
            assert produced.throttled > 0
            assert produced.throttle_ns > 0

    asyncio.run(main())


def addresses(answer):
    """Every broker that an answer names: {(id, host, port)}."""
    if isinstance(answer, list):
        return set().union(*map(addresses, answer))
    if not isinstance(answer, dict):
        return set()
    found = set().union(*map(addresses, answer.values()))
    if "host" in answer and answer.get("nodeId", 0) >= 0:
        found.add((answer.get("nodeId", answer.get("brokerId")), answer["host"], answer["port"]))
    return found


def test_every_version_that_is_offered_is_served_and_names_no_broker_but_kproxy():
    async def main():
        cluster = Cluster(topics={"t": 3})
        topic = cluster.topics["t"]
        async with proxied(cluster) as (bootstrap, server):
            port = int(bootstrap.rpartition(":")[2])
            doors = {(node_id, "127.0.0.1", port + 1 + node_id) for node_id in (1, 2, 3)}
            batch = write_batch([Record(0, 1000, b"k", b"v")])
            identity = {"name": "t", "topicId": topic.id}
            fetched = {"topic": "t", "topicId": topic.id, "partitions": [{"partitionMaxBytes": 1 << 20}]}
            stranger = 1 + topic.partitions[0].leader % 3  # leads no partition 0
            coordinator = {door for door in doors if door[0] == cluster.coordinator("g").id}
            leader = {door for door in doors if door[0] == topic.partitions[0].leader}
            produce = {"acks": -1, "topicData": [identity | {"partitionData": [{"index": 0, "records": batch}]}]}
            fetch = {"maxBytes": 1 << 20, "topics": [fetched]}
            requests = {
                PRODUCE: (produce, lambda version: leader if version >= 10 else set()),
                FETCH: (fetch, lambda version: leader if version >= 16 else set()),
                LIST_OFFSETS: ({"topics": [{"name": "t", "partitions": [{"timestamp": -2}]}]}, lambda _: set()),
                METADATA: ({"topics": [identity]}, lambda _: doors),
                FIND_COORDINATOR: ({"key": "g", "coordinatorKeys": ["g"]}, lambda _: coordinator),
                OFFSET_COMMIT: ({"groupId": "g", "topics": [{"name": "t", "partitions": [{}]}]}, lambda _: set()),
                OFFSET_FETCH: ({"groupId": "g", "topics": [], "groups": [{"groupId": "g"}]}, lambda _: set()),
                JOIN_GROUP: ({"groupId": "g", "protocolType": "consumer"}, lambda _: set()),
                HEARTBEAT: ({"groupId": "g"}, lambda _: set()),
                LEAVE_GROUP: ({"groupId": "g", "members": [{}]}, lambda _: set()),
                SYNC_GROUP: ({"groupId": "g"}, lambda _: set()),
                API_VERSIONS: ({"clientSoftwareName": "t", "clientSoftwareVersion": "1"}, lambda _: set()),
                INIT_PRODUCER_ID: ({"transactionalId": None}, lambda _: set()),
                DESCRIBE_CLUSTER: ({}, lambda _: doors),
            }
            assert requests.keys() == OFFERED.keys()
            asked = 0
            for api_key, (body, named) in requests.items():
                low, high = OFFERED[api_key]
                for version in range(low, high + 1):
                    connection = await Connection.open("127.0.0.1", port + 1 + stranger, "t", {api_key: version})
                    answer = await connection.request(api_key, body)
                    assert addresses(answer) == named(version), (api_key, version)
                    asked += 1
                    await connection.close()
            totals = summarise(server.metrics)
            assert totals.faults == 0
            assert sum(api.requests for api in totals.apis.values()) == 2 * asked  # each after its ApiVersions
            assert server.metrics.cluster("default").unbound == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x00\x00\x02\x00\x12",  # no room for a header
        b"\x7f\xff\xff\xff" + bytes(8),  # larger than anything
        b"\x00\x00\x00\x0a\x00\x01\x00\x00" + bytes(6),  # Fetch v0 is not offered
        b"\x00\x00\x00\x0a\x00\x03\x00\x09" + b"\xff" * 6,  # Metadata that does not decode
    ],
)
def test_a_broker_closes_the_connection_on_unreadable_requests(sent):
    async def main():
        cluster = Cluster()
        await cluster.start()
        reader, writer = await asyncio.open_connection(*cluster.bootstrap[0])
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        await cluster.stop()

    asyncio.run(main())

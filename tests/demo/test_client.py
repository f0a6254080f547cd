"""The demo's client when a connection ends at a bad moment."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import uvloop

from kproxy.demo.client import Client
from kproxy.demo.cluster import Cluster
from kproxy.errors import UpstreamError
from kproxy.protocol.apis import METADATA, PRODUCE
from kproxy.protocol.records import Record, write_batch


@asynccontextmanager
async def running(cluster):
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


class _Refusing:
    """A writer whose transport finds out that it is closed only when it is to write."""

    def __init__(self, writer, fault):
        self._writer = writer
        self._fault = fault

    def __getattr__(self, name):
        return getattr(self._writer, name)

    def write(self, data):
        raise self._fault


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_request_on_a_transport_that_is_closed_under_its_reader_fails_alone(run):
    """For every moment of sending between the end of the transport and that of the reader task."""

    async def main():
        async with running(Cluster(topics={"orders": 1})) as cluster:
            host, port = cluster.bootstrap[0]
            for turns in range(6):
                client = Client(host, port, "test")
                await client.refresh("orders")
                connection = await client.connection(1)
                connection._writer.transport.abort()
                for _ in range(turns):
                    await asyncio.sleep(0)
                assert connection.closed
                with pytest.raises(UpstreamError):
                    await connection.send(METADATA, {"topics": [], "allowAutoTopicCreation": False})
                assert connection._waiting.empty()
                await client.refresh("orders")  # over a new connection
                await client.close()

    run(main())


@pytest.mark.parametrize("fault", [RuntimeError("the handler is closed"), BrokenPipeError(32, "Broken pipe")])
@pytest.mark.parametrize("answered", [True, False])
def test_a_write_that_fails_is_a_broker_that_went_and_waits_for_no_answer(fault, answered):
    async def main():
        async with running(Cluster(topics={"orders": 1})) as cluster:
            host, port = cluster.bootstrap[0]
            client = Client(host, port, "test")
            await client.refresh("orders")
            connection = await client.connection(1)
            whole, connection._writer = connection._writer, _Refusing(connection._writer, fault)
            with pytest.raises(UpstreamError):
                await connection.send(METADATA, {"topics": [], "allowAutoTopicCreation": False}, answered=answered)
            connection._writer = whole
            answer = await connection.request(METADATA, {"topics": [], "allowAutoTopicCreation": False})
            assert answer["brokers"]  # each answer still meets its own request
            await client.close()

    asyncio.run(main())


def test_a_producer_without_acks_learns_of_a_new_leader_from_the_connection_that_is_closed():
    """No response can report it: without Metadata the producer would reconnect to the former leader for ever."""

    async def main():
        async with running(Cluster(topics={"orders": 1})) as cluster:
            client = Client(*cluster.bootstrap[0], "test", {PRODUCE: 7})
            former = await client.leader("orders", 0)
            cluster.move_leader("orders", 0)
            body = {"name": "orders", "partitionData": [{"index": 0, "records": write_batch([Record(0, 0, b"", b"")])}]}
            former.send(PRODUCE, {"acks": 0, "timeoutMs": 9, "topicData": [body]}, answered=False)
            await asyncio.wait([former._task], timeout=20)
            assert former.closed
            leader = await client.leader("orders", 0)
            assert client.leaders["orders", 0] == cluster.topics["orders"].partitions[0].leader
            assert leader is await client.leader("orders", 0) and leader is not former
            await client.close()

    asyncio.run(main())

"""The demo's client, where a connection ends at a bad time."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import uvloop

from kproxy.demo.client import Client
from kproxy.demo.cluster import METADATA, Cluster
from kproxy.errors import UpstreamError


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
    """Whatever moment between the transport's end and that of the reader task it is sent in."""

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

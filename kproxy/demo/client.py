"""A small Kafka client: connections that pipeline requests, and a map of the partitions' leaders.

It implements what the demo's traffic needs: each connection negotiates versions, requests go to leaders, and a leader
error makes the client ask Metadata again. Refuses to know what the traffic is for.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from kproxy.errors import UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.protocol.schema import schema

Body = dict[str, Any]


class Connection:
    """One connection: requests are pipelined without limit, answers arrive in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client_id: str) -> None:
        self._reader = reader
        self._writer = writer
        self._client_id = client_id
        self._versions: dict[int, int] = {API_VERSIONS: 3}
        self._correlation_id = 0
        self._waiting: asyncio.Queue[tuple[int, int, int, asyncio.Future[Body]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._answers())

    @classmethod
    async def open(cls, host: str, port: int, client_id: str, versions: Mapping[int, int]) -> "Connection":
        """Connect, and negotiate versions: the newest that both sides support, or an older one from `versions`."""
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        except OSError as fault:
            raise UpstreamError(f"{host}:{port} cannot be reached: {fault}") from None
        connection = cls(reader, writer, client_id)
        software = {"clientSoftwareName": "kproxy-demo", "clientSoftwareVersion": "1.0"}
        answer = await connection.request(API_VERSIONS, software)
        for offered in answer["apiKeys"]:
            api = schema().apis[offered["apiKey"]]
            newest = min(offered["maxVersion"], api.request.versions[-1])
            connection._versions[api.key] = min(versions.get(api.key, newest), newest)
        return connection

    @property
    def closed(self) -> bool:
        """Whether no further request can be sent; the transport may notice before the reading task does."""
        return self._task.done() or self._writer.is_closing()

    async def request(self, api_key: int, body: Body) -> Body:
        return await self.send(api_key, body)

    def send(self, api_key: int, body: Body, answered: bool = True) -> "asyncio.Future[Body]":
        """Send a request; the future holds its answer, or UpstreamError. `answered=False`: a Produce with acks=0."""
        self._correlation_id += 1
        version = self._versions[api_key]
        frame = codec.framed_request(api_key, version, self._correlation_id, self._client_id, body)
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_exception(UpstreamError("the connection is closed"))
            return future
        try:
            self._writer.write(frame)
        except (RuntimeError, OSError) as fault:  # RuntimeError: from uvloop, whose handle is closed
            future.set_exception(UpstreamError(f"the connection is closed: {fault}"))
            return future
        if answered:  # no await since the write, so the answer cannot have arrived
            self._waiting.put_nowait((self._correlation_id, api_key, version, future))
        else:
            future.set_result({})
        return future

    async def drain(self) -> None:
        with suppress(ConnectionError):
            await self._writer.drain()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()

    async def _answers(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                frame = await self._reader.readexactly(size)
                correlation_id, api_key, version, future = self._waiting.get_nowait()
                header, body = codec.decode_response(frame, api_key, version)
                if header["correlationId"] != correlation_id:
                    raise UpstreamError(f"answer {header['correlationId']} where {correlation_id} was due")
                if not future.cancelled():
                    future.set_result(body)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer.close()
            while not self._waiting.empty():
                future = self._waiting.get_nowait()[3]
                if not future.done():
                    future.set_exception(UpstreamError("the broker closed the connection"))
                    future.exception()  # mark it as retrieved: callers may not await it


class Client:
    """One client id, its connections to the brokers, and its metadata of topics.

    versions: API key -> the newest version of this client, for clients that are older than the codec.
    """

    def __init__(self, host: str, port: int, client_id: str, versions: Mapping[int, int] | None = None) -> None:
        self.client_id = client_id
        self._bootstrap = (host, port)
        self._versions = versions or {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._connections: dict[int, Connection] = {}
        self.leaders: dict[tuple[str, int], int] = {}
        self.topic_ids: dict[str, UUID] = {}

    async def refresh(self, *topics: str) -> Body:
        """Ask any broker for the leaders of these topics; returns its answer."""
        if self._addresses:
            answer = await self._ask(await self.connection(random.choice(list(self._addresses))), topics)
        else:
            connection = await Connection.open(*self._bootstrap, self.client_id, self._versions)
            try:
                answer = await self._ask(connection, topics)
            finally:
                await connection.close()
        self._addresses = {broker["nodeId"]: (broker["host"], broker["port"]) for broker in answer["brokers"]}
        for topic in answer["topics"]:
            if "topicId" in topic:
                self.topic_ids[topic["name"]] = topic["topicId"]
            for partition in topic["partitions"]:
                self.leaders[topic["name"], partition["partitionIndex"]] = partition["leaderId"]
        return answer

    async def _ask(self, connection: Connection, topics: Sequence[str]) -> Body:
        wanted = [{"name": topic} for topic in topics]
        return await connection.request(METADATA, {"topics": wanted, "allowAutoTopicCreation": False})

    async def ask_any(self, api_key: int, body: Body) -> Body:
        """Send a request to any broker; Metadata must have named some."""
        return await (await self.connection(random.choice(list(self._addresses)))).request(api_key, body)

    async def another_connection(self, host: str, port: int) -> Connection:
        """Open a connection that is not shared, for long waits such as those of group members."""
        return await Connection.open(host, port, self.client_id, self._versions)

    async def connection(self, node_id: int) -> Connection:
        connection = self._connections.get(node_id)
        if connection is None or connection.closed:
            connection = await Connection.open(*self._addresses[node_id], self.client_id, self._versions)
            self._connections[node_id] = connection
        return connection

    async def leader(self, topic: str, partition: int) -> Connection:
        """Return the connection to a partition's leader.

        A broker that no longer leads the partition answers a Produce with acks=0 by closing the connection. If it is
        closed, this client asks Metadata again, like Kafka's clients; otherwise it would connect to the former leader
        for ever.
        """
        held = self._connections.get(self.leaders.get((topic, partition), -1))
        if (topic, partition) not in self.leaders or (held is not None and held.closed):
            await self.refresh(topic)
        return await self.connection(self.leaders[topic, partition])

    async def close(self) -> None:
        """Close all connections and forget the metadata: the next request starts at the bootstrap address again."""
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()
        self._addresses.clear()
        self.leaders.clear()

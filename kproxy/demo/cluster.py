"""A Kafka cluster in miniature: brokers on loopback that use kproxy's codec and keep their logs in memory.

Real clients can find leaders, produce (also idempotently) and consume, alone or in classic groups (`groups`).
Transactions are not implemented, and not offered. As at a real broker, requests of a connection are served one at a
time and answered in order, a Fetch waits for data, and a client over its quota gets a throttle time and is then muted
(KIP-219).

Bounded: the logs (see `log`), the groups (see `groups`), MAX_TOPICS topics, one request of MAX_REQUEST_BYTES per
connection. Refuses to know kproxy and the clients.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4
from zlib import crc32

from kproxy.demo.groups import Groups
from kproxy.demo.log import Log, Refused
from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import (
    API_VERSIONS,
    COORDINATOR_NOT_AVAILABLE,
    DESCRIBE_CLUSTER,
    FENCED_LEADER_EPOCH,
    FETCH,
    FIND_COORDINATOR,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    INVALID_REQUIRED_ACKS,
    INVALID_TOPIC_EXCEPTION,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_OFFSETS,
    METADATA,
    NOT_COORDINATOR,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    SYNC_GROUP,
    UNKNOWN_LEADER_EPOCH,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
    UNSUPPORTED_VERSION,
)
from kproxy.protocol.schema import schema

MAX_TOPICS = 256
MAX_REQUEST_BYTES = 8 * 1024 * 1024

NONE = 0


# Versions offered to clients: those whose semantics are implemented here.
OFFERED: Mapping[int, tuple[int, int]] = {
    PRODUCE: (3, 13),  # 3 and later carry batches v2, the only ones stored
    FETCH: (4, 18),
    LIST_OFFSETS: (1, 10),
    METADATA: (0, 13),
    OFFSET_COMMIT: (2, 9),  # 10 and later use topic ids
    OFFSET_FETCH: (1, 9),
    JOIN_GROUP: (0, 9),
    HEARTBEAT: (0, 4),
    LEAVE_GROUP: (0, 5),
    SYNC_GROUP: (0, 5),
    FIND_COORDINATOR: (0, 6),
    API_VERSIONS: (0, 4),
    INIT_PRODUCER_ID: (0, 5),
    DESCRIBE_CLUSTER: (0, 1),
}

_OF_GROUPS = 0  # the coordinator type of groups
_LATEST, _EARLIEST, _MAX_TIMESTAMP = -1, -2, -3

Body = dict[str, Any]


@dataclass
class Partition:
    index: int
    leader: int
    epoch: int = 0
    log: Log = field(default_factory=Log)


@dataclass
class Topic:
    name: str
    partitions: list[Partition]
    id: UUID = field(default_factory=uuid4)


@dataclass
class Quota:
    """Bytes per second of one client id, over a window of a second."""

    bytes_per_second: float
    free_at: float = 0.0

    def charge(self, size: int, now: float) -> int:
        """Charge `size` bytes; returns the throttle time in milliseconds."""
        self.free_at = max(self.free_at, now - 1.0) + size / self.bytes_per_second
        return max(0, int((self.free_at - now) * 1000))


class Cluster:
    """`count` brokers with ids from 1.

    topics: name -> number of partitions. quotas: client id -> bytes per second. delay(api, size): seconds that a broker
    spends on a request, as real ones spend on disks and replicas.
    """

    def __init__(
        self,
        *,
        count: int = 3,
        host: str = "127.0.0.1",
        topics: Mapping[str, int] | None = None,
        quotas: Mapping[str, float] | None = None,
        delay: Callable[[str, int], float] | None = None,
    ) -> None:
        self.id = "kproxy-demo"
        self.topics: dict[str, Topic] = {}
        self.by_id: dict[UUID, Topic] = {}
        self.quotas = {client_id: Quota(rate) for client_id, rate in (quotas or {}).items()}
        self.delay = delay
        self.brokers = {node_id: Broker(self, node_id, host) for node_id in range(1, count + 1)}
        self.groups = Groups(lambda topic, index: topic in self.topics and index < len(self.topics[topic].partitions))
        self._next_producer_id = 1000
        for name, partitions in (topics or {}).items():
            self.create_topic(name, partitions)

    async def start(self) -> None:
        for broker in self.brokers.values():
            await broker.start()

    async def stop(self) -> None:
        for broker in self.brokers.values():
            await broker.stop()
        self.groups.stop()

    @property
    def bootstrap(self) -> list[tuple[str, int]]:
        return [(broker.host, broker.port) for broker in self.brokers.values()]

    def create_topic(self, name: str, partitions: int) -> Topic:
        """Create a topic; the brokers lead its partitions in turn."""
        ids = list(self.brokers)
        first = len(self.topics)
        topic = Topic(name, [Partition(index, ids[(first + index) % len(ids)]) for index in range(partitions)])
        self.topics[name] = self.by_id[topic.id] = topic
        return topic

    def move_leader(self, topic: str, index: int) -> None:
        """Make the next broker the leader; clients learn that from the errors of the former one."""
        partition = self.topics[topic].partitions[index]
        ids = list(self.brokers)
        partition.leader = ids[(ids.index(partition.leader) + 1) % len(ids)]
        partition.epoch += 1
        for waiter in tuple(partition.log.waiters):
            waiter()

    def coordinator(self, group: str) -> "Broker":
        return list(self.brokers.values())[crc32(group.encode()) % len(self.brokers)]

    def next_producer_id(self) -> int:
        self._next_producer_id += 1
        return self._next_producer_id


class Broker:
    """One broker: a listening socket, and a task per connection."""

    def __init__(self, cluster: Cluster, node_id: int, host: str) -> None:
        self.cluster = cluster
        self.id = node_id
        self.host = host
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._handlers: Mapping[int, Callable[[Body, Body], Awaitable[Body]]] = {  # given header and body
            PRODUCE: self._produce,
            FETCH: self._fetch,
            LIST_OFFSETS: self._list_offsets,
            METADATA: self._metadata,
            FIND_COORDINATOR: self._find_coordinator,
            API_VERSIONS: self._api_versions,
            INIT_PRODUCER_ID: self._init_producer_id,
            DESCRIBE_CLUSTER: self._describe_cluster,
        } | dict.fromkeys(
            (OFFSET_COMMIT, OFFSET_FETCH, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP), self._coordinate
        )

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, self.host, self.port, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop every connection, as a broker that dies does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # --- connections -------------------------------------------------------------------------------------------------

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError, asyncio.CancelledError):
            pass  # a broker closes the connection after an invalid request; cancelled: the broker stops
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; returns False to close the connection."""
        size = int.from_bytes(await reader.readexactly(4), "big")
        if not 8 <= size <= MAX_REQUEST_BYTES:
            return False
        frame = await reader.readexactly(size)
        api_key, version = (int.from_bytes(frame[at : at + 2], "big", signed=True) for at in (0, 2))
        low, high = OFFERED.get(api_key, (0, -1))
        if not low <= version <= high:
            if api_key != API_VERSIONS:
                return False
            correlation_id = int.from_bytes(frame[4:8], "big", signed=True)
            body = {"errorCode": UNSUPPORTED_VERSION, "apiKeys": [_range(API_VERSIONS)]}  # KIP-511
            self._send(writer, codec.encode_response(api_key, 0, {"correlationId": correlation_id}, body))
            return True
        header, body = codec.decode_request(frame)
        answer = await self._handlers[api_key](header, body)
        api = schema().apis[api_key]
        if self.cluster.delay is not None:
            await asyncio.sleep(self.cluster.delay(api.name, size))
        if api_key == PRODUCE and body["acks"] == 0:
            errors = (p["errorCode"] for topic in answer["responses"] for p in topic["partitionResponses"])
            return not any(errors)  # no answer can carry an error
        quota = self.cluster.quotas.get(header.get("clientId") or "") if api_key in (PRODUCE, FETCH) else None
        throttle_ms = quota.charge(_payload_bytes(api_key, size, answer), time.monotonic()) if quota else 0
        answer["throttleTimeMs"] = throttle_ms
        mutes_after = version in api.throttled_after_answer
        if throttle_ms and not mutes_after:
            await asyncio.sleep(throttle_ms / 1000)
        head = {"correlationId": header["correlationId"]}
        self._send(writer, codec.encode_response(api_key, version, head, answer))
        await writer.drain()
        if throttle_ms and mutes_after:
            await asyncio.sleep(throttle_ms / 1000)
        return True

    def _send(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        writer.write(len(frame).to_bytes(4, "big") + frame)

    # --- records -----------------------------------------------------------------------------------------------------

    async def _produce(self, _: Body, body: Body) -> Body:
        leaders: set[int] = set()
        responses = []
        for wanted in body["topicData"]:
            answers = []
            for part in wanted["partitionData"]:
                answer: Body = {"index": part["index"], "baseOffset": -1}
                partition, error = self._partition(wanted, part["index"])
                if body["acks"] not in (-1, 0, 1):
                    error = INVALID_REQUIRED_ACKS
                if partition is not None and not error:
                    try:
                        answer["baseOffset"] = partition.log.append(part["records"] or b"", partition.epoch)
                        answer["logStartOffset"] = partition.log.start_offset
                    except Refused as refused:
                        error = refused.error_code
                answer["errorCode"] = error
                if partition is not None and error == NOT_LEADER_OR_FOLLOWER:
                    answer["currentLeader"] = {"leaderId": partition.leader, "leaderEpoch": partition.epoch}
                    leaders.add(partition.leader)
                answers.append(answer)
            responses.append(_named(wanted, "name") | {"partitionResponses": answers})
        return {"responses": responses} | self._endpoints(leaders)

    async def _fetch(self, _: Body, body: Body) -> Body:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(body["maxWaitMs"], 0), 30_000) / 1000
        arrived = asyncio.Event()
        logs = [
            partition.log
            for wanted in body["topics"]
            for part in wanted["partitions"]
            if (partition := self._partition(wanted, part["partition"])[0]) is not None
        ]
        for log in logs:
            log.waiters.add(arrived.set)
        try:
            while True:
                arrived.clear()
                answer, size, failed = self._read(body)
                left = deadline - loop.time()
                if failed or size >= body["minBytes"] or left <= 0:
                    return answer
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await arrived.wait()
        finally:
            for log in logs:
                log.waiters.discard(arrived.set)

    def _read(self, body: Body) -> tuple[Body, int, bool]:
        """Return (the answer to a Fetch as of now, the bytes of records in it, whether a partition has an error)."""
        leaders: set[int] = set()
        responses = []
        size = 0
        failed = False
        for wanted in body["topics"]:
            answers = []
            for part in wanted["partitions"]:
                answer: Body = {"partitionIndex": part["partition"], "highWatermark": -1, "abortedTransactions": None}
                answer["records"] = b""
                partition, error = self._partition(wanted, part["partition"], part.get("currentLeaderEpoch", -1))
                if partition is not None and not error:
                    log = partition.log
                    answer |= {"highWatermark": log.end_offset, "lastStableOffset": log.end_offset}
                    answer["logStartOffset"] = log.start_offset
                    try:
                        if size < body["maxBytes"]:
                            limit = min(part["partitionMaxBytes"], body["maxBytes"] - size)
                            answer["records"] = log.read(part["fetchOffset"], limit)
                    except Refused as refused:
                        error = refused.error_code
                answer["errorCode"] = error
                if partition is not None and error == NOT_LEADER_OR_FOLLOWER:
                    answer["currentLeader"] = {"leaderId": partition.leader, "leaderEpoch": partition.epoch}
                    leaders.add(partition.leader)
                size += len(answer["records"])
                failed = failed or bool(error)
                answers.append(answer)
            responses.append(_named(wanted, "topic") | {"partitions": answers})
        return {"responses": responses} | self._endpoints(leaders), size, failed

    async def _list_offsets(self, _: Body, body: Body) -> Body:
        topics = []
        for wanted in body["topics"]:
            answers = []
            for part in wanted["partitions"]:
                answer: Body = {"partitionIndex": part["partitionIndex"]}
                partition, error = self._partition(wanted, part["partitionIndex"], part.get("currentLeaderEpoch", -1))
                answer["errorCode"] = error
                if partition is not None and not error:
                    offset, timestamp = _offset_for(partition.log, part["timestamp"])
                    answer |= {"offset": offset, "timestamp": timestamp, "leaderEpoch": partition.epoch}
                answers.append(answer)
            topics.append({"name": wanted["name"], "partitions": answers})
        return {"topics": topics}

    def _partition(self, wanted: Body, index: int, epoch: int = -1) -> tuple[Partition | None, int]:
        """Return (the partition or None if unknown, this broker's error code for it, 0 if it leads it)."""
        if (topic_id := wanted.get("topicId")) is not None:
            topic = self.cluster.by_id.get(topic_id)
            missing = UNKNOWN_TOPIC_ID
        else:
            topic = self.cluster.topics.get(wanted["name"] if "name" in wanted else wanted["topic"])
            missing = UNKNOWN_TOPIC_OR_PARTITION
        if topic is None:
            return None, missing
        if not 0 <= index < len(topic.partitions):
            return None, UNKNOWN_TOPIC_OR_PARTITION
        partition = topic.partitions[index]
        if partition.leader != self.id:
            return partition, NOT_LEADER_OR_FOLLOWER
        if epoch >= 0 and epoch != partition.epoch:
            return partition, FENCED_LEADER_EPOCH if epoch < partition.epoch else UNKNOWN_LEADER_EPOCH
        return partition, NONE

    def _endpoints(self, leaders: set[int]) -> Body:
        """Return the new leaders' endpoints that accompany leader errors, for versions with this field (KIP-951)."""
        if not leaders:
            return {}
        return {"nodeEndpoints": [self.cluster.brokers[leader].address("nodeId") for leader in sorted(leaders)]}

    # --- the cluster -------------------------------------------------------------------------------------------------

    def address(self, id_field: str) -> Body:
        return {id_field: self.id, "host": self.host, "port": self.port, "rack": None}

    async def _metadata(self, header: Body, body: Body) -> Body:
        cluster = self.cluster
        wanted = body["topics"]
        if wanted is None or (header["requestApiVersion"] == 0 and not wanted):
            topics = [_topic(topic) for topic in cluster.topics.values()]
        else:
            create = body.get("allowAutoTopicCreation", True)
            topics = [self._described(topic, create) for topic in wanted]
        return {
            "brokers": [broker.address("nodeId") for broker in cluster.brokers.values()],
            "clusterId": cluster.id,
            "controllerId": min(cluster.brokers),
            "topics": topics,
        }

    def _described(self, wanted: Body, create: bool) -> Body:
        cluster = self.cluster
        name = wanted["name"]
        if name is None:
            topic = cluster.by_id.get(wanted["topicId"])
            return (
                _topic(topic) if topic else {"errorCode": UNKNOWN_TOPIC_ID, "topicId": wanted["topicId"], "name": None}
            )
        if name in cluster.topics:
            return _topic(cluster.topics[name])
        if not create or len(cluster.topics) >= MAX_TOPICS:
            return {"errorCode": UNKNOWN_TOPIC_OR_PARTITION, "name": name}
        if not 0 < len(name) <= 249 or not name.replace(".", "").replace("_", "").replace("-", "").isalnum():
            return {"errorCode": INVALID_TOPIC_EXCEPTION, "name": name}
        return _topic(cluster.create_topic(name, len(cluster.brokers)))

    async def _describe_cluster(self, _: Body, body: Body) -> Body:
        brokers = [broker.address("brokerId") for broker in self.cluster.brokers.values()]
        return {"clusterId": self.cluster.id, "controllerId": min(self.cluster.brokers), "brokers": brokers}

    async def _find_coordinator(self, _: Body, body: Body) -> Body:
        of_groups = body.get("keyType", _OF_GROUPS) == _OF_GROUPS
        if "coordinatorKeys" not in body:
            return self._coordinator(body["key"], of_groups)
        return {"coordinators": [{"key": key, **self._coordinator(key, of_groups)} for key in body["coordinatorKeys"]]}

    def _coordinator(self, key: str, of_groups: bool) -> Body:
        """Return a group's coordinator; COORDINATOR_NOT_AVAILABLE for other types."""
        if of_groups:
            broker = self.cluster.coordinator(key)
            return {"errorCode": NONE, "nodeId": broker.id, "host": broker.host, "port": broker.port}
        text = "the demo's cluster keeps no transactions and no share groups"
        refusal = {"errorCode": COORDINATOR_NOT_AVAILABLE, "nodeId": -1, "host": "", "port": -1}
        return refusal | {"errorMessage": text}

    async def _coordinate(self, header: Body, body: Body) -> Body:
        """Handle a request about a group."""
        groups, key = self.cluster.groups, header["requestApiKey"]
        asked = [each["groupId"] for each in body["groups"]] if "groups" in body else [body["groupId"]]
        if any(self.cluster.coordinator(group) is not self for group in asked):
            if key == OFFSET_COMMIT:
                return groups.commit(body, NOT_COORDINATOR)
            if key == OFFSET_FETCH and "groups" in body:
                return {"groups": [{"groupId": group, "errorCode": NOT_COORDINATOR} for group in asked]}
            return {"errorCode": NOT_COORDINATOR}
        if key == JOIN_GROUP:
            return await groups.join(header["requestApiVersion"], body, header.get("clientId") or "")
        if key == SYNC_GROUP:
            return await groups.sync(body)
        at_once = {HEARTBEAT: groups.heartbeat, LEAVE_GROUP: groups.leave, OFFSET_COMMIT: groups.commit}
        return at_once.get(key, groups.fetch)(body)

    async def _init_producer_id(self, _: Body, body: Body) -> Body:
        if body["transactionalId"] is not None:
            return {"errorCode": COORDINATOR_NOT_AVAILABLE, "producerEpoch": -1}
        return {"producerId": self.cluster.next_producer_id(), "producerEpoch": 0}

    async def _api_versions(self, _: Body, body: Body) -> Body:
        return {"apiKeys": [_range(api_key) for api_key in OFFERED]}


def _range(api_key: int) -> Body:
    low, high = OFFERED[api_key]
    return {"apiKey": api_key, "minVersion": low, "maxVersion": high}


def _named(wanted: Body, name: str) -> Body:
    """Return the topic for an answer, by name or by id as in the request."""
    key = "topicId" if "topicId" in wanted else name
    return {key: wanted[key]}


def _topic(topic: Topic) -> Body:
    return {
        "errorCode": NONE,
        "name": topic.name,
        "topicId": topic.id,
        "partitions": [
            {
                "partitionIndex": partition.index,
                "leaderId": partition.leader,
                "leaderEpoch": partition.epoch,
                "replicaNodes": [partition.leader],
                "isrNodes": [partition.leader],
            }
            for partition in topic.partitions
        ],
    }


def _offset_for(log: Log, timestamp: int) -> tuple[int, int]:
    if timestamp == _LATEST:
        return log.end_offset, -1
    if timestamp == _EARLIEST:
        return log.start_offset, -1
    found = log.newest() if timestamp == _MAX_TIMESTAMP else log.offset_for(timestamp)
    return found or (-1, -1)


def _payload_bytes(api_key: int, request_bytes: int, answer: Body) -> int:
    """Return the bytes of records written or read, which count against quotas."""
    if api_key == FETCH:
        return sum(len(p["records"]) for topic in answer["responses"] for p in topic["partitions"])
    return request_bytes

"""A synthetic capture of consumers with lag: each exchange between clients and brokers takes a second."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

from kproxy.capture.dissection.packets import ACK
from kproxy.protocol.apis import (
    DELETE_GROUPS,
    DELETE_TOPICS,
    END_TXN,
    FETCH,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from kproxy.protocol.records import Record, write_batch
from tests.capture.packet import ethernet, ipv4, pcap, tcp
from tests.wire.playbook import request, response

START_NS = 1_700_000_000 * 10**9
MS = 10**6
LATEST, EARLIEST = -1, -2

Body = dict[str, Any]


class Traffic:
    """Traffic of one cluster; each client has one connection to each broker that it uses."""

    def __init__(self) -> None:
        self._packets: list[tuple[int, bytes]] = []
        self._now_ns = START_NS
        self._connections: dict[tuple[str, int], list[int]] = {}  # port, next sequence numbers, exchanges

    def pcap(self) -> bytes:
        return pcap(self._packets)

    def say(
        self,
        key: int,
        version: int,
        asked: Body,
        answered: Body | None,
        client: str = "c",
        broker: int = 1,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """A request and, if there is one, its answer 1 ms later, or behind what happens meanwhile."""
        new = [40000 + len(self._connections), 1, 1, 0]
        state = self._connections.setdefault((client, broker), new)
        here, there = (b"\x0a\0\0\1", state[0]), (bytes((10, 0, 1, broker)), 9092)
        ask = request(key, version, state[3], asked, client)
        self._send(
            ipv4(tcp(ask, source=here, target=there, seq=state[1], ack=state[2], flags=ACK), source=here, target=there)
        )
        state[1] += len(ask)
        if meanwhile is not None:
            self._now_ns += MS
            meanwhile()
        if answered is not None:
            self._now_ns += MS
            reply = response(key, version, state[3], answered)
            answer = tcp(reply, source=there, target=here, seq=state[2], ack=state[1], flags=ACK)
            self._send(ipv4(answer, source=there, target=here))
            state[2] += len(reply)
        state[3] += 1
        self._now_ns += 1000 * MS

    def _send(self, packet: bytes) -> None:
        self._packets.append((self._now_ns, ethernet(packet)))

    # --- requests whose responses contain the log end offset -----------------------------------------------------

    def produce(self, topic: str, base: int, count: int) -> None:
        batch = write_batch([Record(n, 1_700_000_000_000, None, b"x") for n in range(count)])
        asked = {"acks": -1, "topicData": [{"name": topic, "partitionData": [{"index": 0, "records": batch}]}]}
        told = {"index": 0, "errorCode": 0, "baseOffset": base}
        self.say(PRODUCE, 8, asked, {"responses": [{"name": topic, "partitionResponses": [told]}]}, "producer")

    def fetch(
        self, topic: str, at: int, end: int, *, epoch: int = -1, rack: str = "", error: int = 0, **who: Any
    ) -> None:
        wanted = {"partition": 0, "fetchOffset": at, "currentLeaderEpoch": epoch}
        asked = {
            "replicaId": who.pop("replica", -1),
            "rackId": rack,
            "topics": [{"topic": topic, "partitions": [wanted]}],
        }
        told = {"partitionIndex": 0, "errorCode": error, "highWatermark": end, "records": None}
        self.say(FETCH, 11, asked, {"responses": [{"topic": topic, "partitions": [told]}]}, **who)

    def list_offsets(self, topic: str, timestamp: int, offset: int, isolation: int = 0) -> None:
        wanted = {"partitionIndex": 0, "timestamp": timestamp}
        asked = {"replicaId": -1, "isolationLevel": isolation, "topics": [{"name": topic, "partitions": [wanted]}]}
        told = {"partitionIndex": 0, "errorCode": 0, "timestamp": -1, "offset": offset, "leaderEpoch": 0}
        self.say(LIST_OFFSETS, 5, asked, {"topics": [{"name": topic, "partitions": [told]}]})

    # --- commits of groups ---------------------------------------------------------------------------------------

    def commit(
        self, group: str, topic: str, *offsets: int, refused: tuple[int, ...] = (), answered: bool = True
    ) -> None:
        """Partition by partition, from 0 on."""
        numbers = range(len(offsets))
        wanted = [{"partitionIndex": n, "committedOffset": offsets[n]} for n in numbers]
        told = [{"partitionIndex": n, "errorCode": 22 if n in refused else 0} for n in numbers]
        asked = {"groupId": group, "memberId": "m", "topics": [{"name": topic, "partitions": wanted}]}
        answer = {"topics": [{"name": topic, "partitions": told}]} if answered else None
        self.say(OFFSET_COMMIT, 7, asked, answer, "c" if answered else "cut off")

    def commit_in(self, transaction: str, group: str, topic: str, offset: int) -> None:
        asked = {
            "transactionalId": transaction,
            "groupId": group,
            "producerId": 7,
            "topics": [{"name": topic, "partitions": [{"partitionIndex": 0, "committedOffset": offset}]}],
        }
        told = {"topics": [{"name": topic, "partitions": [{"partitionIndex": 0, "errorCode": 0}]}]}
        self.say(TXN_OFFSET_COMMIT, 2, asked, told, transaction)

    def end(self, transaction: str, committed: bool, error: int = 0) -> None:
        asked = {"transactionalId": transaction, "producerId": 7, "committed": committed}
        self.say(END_TXN, 1, asked, {"errorCode": error}, transaction, 2)

    def fetch_offset(self, group: str, topic: str, offset: int, **how: Any) -> None:
        asked = {"groupId": group, "topics": [{"name": topic, "partitionIndexes": [0]}]}
        told = {"partitionIndex": 0, "committedOffset": offset, "errorCode": 0}
        self.say(OFFSET_FETCH, 5, asked, {"topics": [{"name": topic, "partitions": [told]}]}, **how)

    # --- removal of commits and logs -----------------------------------------------------------------------------

    def delete_offset(self, group: str, topic: str, error: int = 0) -> None:
        asked = {"groupId": group, "topics": [{"name": topic, "partitions": [{"partitionIndex": 0}]}]}
        told = {"topics": [{"name": topic, "partitions": [{"partitionIndex": 0, "errorCode": error}]}]}
        self.say(OFFSET_DELETE, 0, asked, told)

    def delete_group(self, group: str, error: int = 0) -> None:
        self.say(DELETE_GROUPS, 1, {"groupsNames": [group]}, {"results": [{"groupId": group, "errorCode": error}]})

    def delete_topic(self, topic: str, error: int = 0) -> None:
        self.say(DELETE_TOPICS, 3, {"topicNames": [topic]}, {"responses": [{"name": topic, "errorCode": error}]})

    def metadata(self, topic: str, identity: int, *, leader: int = 1, brokers: tuple[int, ...] = ()) -> None:
        """brokers: ids of brokers at the addresses to which clients connect."""
        replicas = list(brokers) or [leader]
        partition = {"partitionIndex": 0, "leaderId": leader, "replicaNodes": replicas, "isrNodes": replicas}
        told = {"name": topic, "topicId": UUID(int=identity), "partitions": [partition]}
        named = [{"nodeId": each, "host": f"10.0.1.{each}", "port": 9092} for each in brokers]
        self.say(METADATA, 10, {"topics": [{"name": topic}]}, {"brokers": named, "topics": [told]})

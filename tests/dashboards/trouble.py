"""A kproxy in front of a real Kafka that meets every fault that has an alert, each by its real cause.

Open files, certificates, disk and ports are short or wrong, clients break the protocol, brokers are paused. A second
process that is scraped at the same time shows none of this. It needs root, to mount a small disk.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaException, Producer, TopicPartition

from kproxy.admin.asking import AdminPort
from kproxy.errors import KproxyError
from kproxy.protocol.apis import FETCH, FIND_COORDINATOR, LIST_OFFSETS, METADATA, OFFSET_COMMIT
from kproxy.protocol.codec import decode_response, framed_request
from tests.broker.cluster import Broker, Cluster, wait_for
from tests.broker.kproxy import KPROXY, Kproxy
from tests.certificates import Authority, now
from tests.ports import free_ports

HOST = "127.0.0.1"
FILES = 6000  # limit of open files; the clients alone use four fifths
DISK = "2m"  # size of the disk that it records to
LEAK = ("127.0.1.77", 0x4141)  # a bootstrap address whose encoding is valid text
TIMEOUT_S = 5.0
COMMIT_S = 30.0

# Alerts, each with its cause here.
PROVOKED = {
    "KproxyBrokerSlow": "a broker that is paused for 1.4 s, again and again",
    "KproxyFetchesLate": "the same",
    "KproxyLeadersUnsettled": "a client that asks a broker for a partition that another one leads",
    "KproxyGroupGone": "a group that has read everything and left",
    "KproxyRequestsUnanswered": "requests that brokers answer by closing the connection",
    "KproxyBrokerUnbound": "a broker port that another program occupies",
    "KproxySlow": "clients that read their responses slowly",
    "KproxyLoopLate": "a process that is stopped for 60 ms, ten times a second",
    "KproxyFilesRunOut": "more clients than its limit of open files allows",
    "KproxyAcceptsNobody": "the same",
    "KproxyAddressLeaks": "a group whose name is a broker's address in Kafka's encoding",
    "KproxyRecorderDrops": "a full disk",
    "KproxyDumpsFail": "the same",
    "KproxyPushesFail": "a collector that does not exist",
    "KproxyCertificateExpires": "a certificate with hours left",
    "KproxyCertificateNotUsed": "a new certificate without its key",
    "KproxyGroupStandsStill": "a member that does not poll while another one joins",
    "KproxySplitBrain": "a member that is stopped for longer than its session timeout and then commits",
    "KproxyCommitsFail": "commits for a generation that never existed",
}

_PAUSED_MEMBER = """
import sys
from confluent_kafka import Consumer
consumer = Consumer({"bootstrap.servers": sys.argv[1], "client.id": "paused", "group.id": sys.argv[2],
                     "session.timeout.ms": 6000, "heartbeat.interval.ms": 1000, "auto.offset.reset": "earliest",
                     "enable.auto.commit": False, "log_level": 0})
consumer.subscribe([sys.argv[3]])
while True:
    message = consumer.poll(0.2)
    if message is not None and not message.error():
        print("read", flush=True)
        try:
            consumer.commit(message, asynchronous=False)
        except Exception:
            pass
"""


class Troubled(Kproxy):
    """Listeners `open`, `expiring` (TLS) and `crowded` (first broker only)."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster.bootstrap, folder)
        self.brokers = cluster.brokers
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.authority = Authority(folder / "tls")
        self.crowded, secure = (free_ports(1, HOST) for _ in range(2))
        self.files = self.authority.server(not_after=now() + timedelta(hours=20)).settings()
        brokers = ", ".join(repr(address) for address in cluster.bootstrap.split(","))
        config = folder / "kproxy.toml"
        config.write_text(
            f"""
admin = "{self.admin}"
record = '{self.disk / "recorded"}'
flight = '{self.disk / "flight"}'

[otlp]
endpoint = "http://{HOST}:1"
interval_s = 2
timeout_s = 1

[[cluster]]
name = "open"
listen = "{self.bootstrap}"
bootstrap = [{brokers}, "{LEAK[0]}:{LEAK[1]}"]
detail = "topics"

[[cluster]]
name = "expiring"
listen = "{HOST}:{secure}"
bootstrap = ['{cluster.brokers[0].address}']
route = "sidecar"
[cluster.tls]
certificate = '{self.files["certificate"]}'
key = '{self.files["key"]}'

[[cluster]]
name = "crowded"
listen = "{HOST}:{self.crowded}"
bootstrap = ['{cluster.brokers[0].address}']
route = "sidecar"
"""
        )
        self.command = ["prlimit", f"--nofile={FILES}:{FILES}", str(KPROXY), "run", "--config", str(config)]

    def port_of(self, node_id: int) -> int:
        return int(self.bootstrap.split(":")[1]) + 1 + node_id

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> "Troubled":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "kproxy", str(self.disk)], check=True)
        try:
            self._taken = socket.create_server((HOST, self.port_of(3)))  # so kproxy cannot bind the port of broker 3
            self.start(waits_until_ready=False)
            wait_for("the troubled kproxy", self.is_alive, 60)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(kill=True)
        self._release()

    def _release(self) -> None:
        self._taken.close()
        subprocess.run(["umount", "--lazy", str(self.disk)], check=False)


class Trouble:
    """All faults, each on its own thread until the end; `stand_still` and `crowd` run when called."""

    def __init__(self, kproxy: Troubled, topic: str, quiet: str, alone: str) -> None:
        """topic: led by the first broker; quiet: without records; alone: its only replica is on the third broker."""
        self._kproxy = kproxy
        self._topic, self._quiet, self._alone = topic, quiet, alone
        self._ended = threading.Event()
        tasks = (
            self._produce,
            self._consume,
            self._ask_a_broker_that_does_not_lead,
            self._send_an_unanswered_request,
            self._name_a_broker,
            self._commit_for_an_unknown_member,
            self._read_slowly,
            self._stop_and_continue,
            self._stand_still_in_a_rebalance,
            self._commit_after_the_session_timeout,
            self._rewrite_the_certificate,
            self._ask_for_a_dump,
            self._fill_the_disk,
        )
        self._threads = [threading.Thread(target=self._again, args=(task,), daemon=True) for task in tasks]
        self._crowd: list[socket.socket] = []

    def __enter__(self) -> "Trouble":
        self._read_all_and_leave()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(20)
        for client in self._crowd:
            client.close()

    def stand_still(self, broker: Broker) -> None:
        """Pause a broker once within each scrape interval of 2 s; after 3 s Kafka would replace it."""
        for _ in range(20):
            with broker.paused():
                time.sleep(1.4)
            time.sleep(0.2)

    def crowd(self) -> None:
        """Open as many clients as its limit of open files allows, and some more that wait."""
        for _ in range(FILES // 2):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex((HOST, self._kproxy.crowded))
            self._crowd.append(client)
            if len(self._crowd) % 50 == 0:
                time.sleep(0.05)

    def _again(self, task: Callable[[], None]) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(KafkaException, OSError, BufferError):
                task()
            self._ended.wait(0.1)

    def _settings(self, client_id: str, **more: Any) -> dict[str, Any]:
        return {"bootstrap.servers": self._kproxy.bootstrap, "client.id": client_id, "log_level": 0, **more}

    @contextlib.contextmanager
    def _to(self, node_id: int) -> Iterator[socket.socket]:
        with socket.create_connection((HOST, self._kproxy.port_of(node_id)), timeout=TIMEOUT_S) as client:
            yield client

    def _ask(self, client: socket.socket, key: int, version: int, body: dict[str, Any]) -> bytes:
        client.sendall(framed_request(key, version, 1, "troubled", body))
        size = int.from_bytes(_exactly(client, 4), "big")
        return _exactly(client, size)

    def _produce(self) -> None:
        producer = Producer(self._settings("shop"))
        while not self._ended.wait(0.02):
            producer.produce(self._topic, os.urandom(20_000), partition=0)
            producer.poll(0)
        producer.purge()

    def _consume(self) -> None:
        consumer = Consumer(
            self._settings("reader", **{"group.id": "none", "fetch.wait.max.ms": 100, "fetch.min.bytes": 1 << 20})
        )
        consumer.assign([TopicPartition(self._topic, 0, OFFSET_END)])
        while not self._ended.is_set():
            consumer.poll(0.2)
        consumer.close()

    def _ask_a_broker_that_does_not_lead(self) -> None:
        wanted = [{"name": self._alone, "partitions": [{"partitionIndex": 0, "timestamp": -1}]}]
        with self._to(1) as client:
            while not self._ended.wait(0.1):
                self._ask(client, LIST_OFFSETS, 1, {"replicaId": -1, "topics": wanted})

    def _send_an_unanswered_request(self) -> None:
        """Send Fetch v0, which Kafka 4 no longer supports."""
        with self._to(1) as client:
            client.sendall(framed_request(METADATA, 9, 1, "old", {"topics": []}))
            client.sendall(an_old_fetch())
            while client.recv(4096):
                pass

    def _name_a_broker(self) -> None:
        group = chr(len(LEAK[0]) + 1) + LEAK[0] + LEAK[1].to_bytes(4, "big").decode()
        with self._to(1) as client:
            self._ask(client, FIND_COORDINATOR, 4, {"keyType": 0, "coordinatorKeys": [group]})
        self._ended.wait(1)

    def _commit_for_an_unknown_member(self) -> None:
        partitions = [{"partitionIndex": 0, "committedOffset": 1, "committedMetadata": ""}]
        body = {
            "groupId": self._group("ghosts"),
            "generationIdOrMemberEpoch": 7,
            "memberId": "ghost",
            "topics": [{"name": self._topic, "partitions": partitions}],
        }
        with self._to(1) as first, self._to(2) as second:
            while not self._ended.wait(0.3):
                for client in (first, second):
                    self._ask(client, OFFSET_COMMIT, 8, body)

    def _read_slowly(self) -> None:
        partitions = [{"partition": 0, "fetchOffset": 0, "partitionMaxBytes": 1 << 20, "currentLeaderEpoch": -1}]
        body = {"replicaId": -1, "maxWaitMs": 100, "minBytes": 1, "maxBytes": 1 << 20, "sessionEpoch": -1}
        topics = [{"topic": self._topic, "partitions": partitions}]
        asked = framed_request(FETCH, 12, 1, "slow", {**body, "topics": topics})
        for node_id in (1, 2):
            with self._to(node_id) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(asked * 20)
                for _ in range(200):
                    client.recv(8192)
                    self._ended.wait(0.005)

    def _stop_and_continue(self) -> None:
        self._kproxy.signal(signal.SIGSTOP)
        time.sleep(0.06)
        self._kproxy.signal(signal.SIGCONT)
        self._ended.wait(0.05)

    def _stand_still_in_a_rebalance(self) -> None:
        group = self._group("still")
        idle = self._member("idle", group)
        while not idle.assignment() and not self._ended.is_set():
            idle.poll(0.2)
        other = self._member("other", group)  # the first member does not poll any more
        while not self._ended.is_set():
            other.poll(0.2)
        idle.close()
        other.close()

    def _member(self, client_id: str, group: str, topic: str = "") -> Consumer:
        consumer = Consumer(self._settings(client_id, **{"group.id": group, "auto.offset.reset": "earliest"}))
        consumer.subscribe([topic or self._topic])
        return consumer

    def _commit_after_the_session_timeout(self) -> None:
        group = self._group("split")
        command = [sys.executable, "-c", _PAUSED_MEMBER, self._kproxy.bootstrap, group, self._topic]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as paused:
            try:
                assert paused.stdout is not None
                paused.stdout.readline()
                paused.send_signal(signal.SIGSTOP)
                heir = self._member("heir", group)
                until = time.monotonic() + 30
                while not heir.assignment() and time.monotonic() < until and not self._ended.is_set():
                    heir.poll(0.2)
                for _ in range(20):
                    message = heir.poll(0.2)
                    if message is not None and not message.error():
                        heir.commit(message, asynchronous=False)
                paused.send_signal(signal.SIGCONT)
                for _ in range(20):
                    heir.poll(0.2)
                heir.close()
            finally:
                paused.kill()

    def _ask_for_a_dump(self) -> None:
        with contextlib.suppress(KproxyError):
            AdminPort(self._kproxy.admin).post("/api/dump")
        self._ended.wait(3)

    def _fill_the_disk(self) -> None:
        """Fill the disk to the last byte and keep it full; OSError ends one round."""
        with (self._kproxy.disk / "filler").open("ab", buffering=0) as file:
            while not self._ended.is_set():
                file.write(bytes(4096))

    def _rewrite_the_certificate(self) -> None:
        """Replace its key by that of another certificate."""
        other = self._kproxy.authority.server(file="other").settings()
        shutil.copy(other["key"], self._kproxy.files["key"])
        self._ended.wait(60)

    def _read_all_and_leave(self) -> None:
        topic = self._quiet
        producer = Producer(self._settings("filler"))
        producer.produce(topic, b"x")
        assert producer.flush(20) == 0
        consumer = Consumer(self._settings("leaver", **{"group.id": self._group("gone")}))
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = None
        while message is None:
            message = consumer.poll(1)
        until = time.monotonic() + COMMIT_S
        committed = False
        while not committed:  # librdkafka may still look for the coordinator
            try:
                consumer.commit(message, asynchronous=False)
                committed = True
            except KafkaException:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        self._ended.wait(5)  # the lag is scraped
        consumer.close()

    def _group(self, prefix: str) -> str:
        """Return a group name that broker 3 does not coordinate: its port is taken."""
        until = time.monotonic() + COMMIT_S
        with self._to(1) as client:
            while time.monotonic() < until:
                group = f"{prefix}-{uuid.uuid4().hex[:6]}"
                asked = {"keyType": 0, "coordinatorKeys": [group]}
                _, body = decode_response(self._ask(client, FIND_COORDINATOR, 4, asked), FIND_COORDINATOR, 4)
                if body["coordinators"][0]["nodeId"] in (1, 2):
                    return group
                time.sleep(0.1)
        raise AssertionError(f"brokers 1 and 2 coordinate no group within {COMMIT_S:g} s")


def an_old_fetch() -> bytes:
    """Fetch v0: header v1, then replica, wait, bytes and no topics."""
    frame = b"\0\1\0\0" + (7).to_bytes(4, "big") + b"\0\3old" + (-1).to_bytes(4, "big", signed=True) + bytes(12)
    return len(frame).to_bytes(4, "big") + frame


def _exactly(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = client.recv(size - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data

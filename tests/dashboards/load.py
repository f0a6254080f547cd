"""The kproxy of `./dev dashboards`, with every feature that feeds a panel, and clients with everyday load.

Two workers, two Kafka listeners, one ZooKeeper listener, client telemetry, metrics pushed by OTLP, recorded tables.
Independent of Prometheus and of the deliberate faults in `trouble.py`.
"""

import contextlib
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from kproxy.protocol.apis import METADATA
from kproxy.protocol.codec import framed_request
from kproxy.proxy.sasl import users
from tests.broker.cluster import Cluster, wait_for
from tests.broker.kproxy import KPROXY, Kproxy
from tests.certificates import Authority
from tests.matrix.brokers import Node, Release
from tests.ports import free_ports

PASSWORD = "secret"
HOST = "127.0.0.1"
WITH_ZOOKEEPER = Release("3.9 with ZooKeeper", "3.9.1", zookeeper=True)
NOBODY = f"{HOST}:1"


class Keeper(Node):
    """A real ZooKeeper from the jars of Kafka 3.9."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1, HOST)
        settings = folder / "zoo.cfg"
        settings.write_text(
            f"dataDir={folder}/data\nclientPort={self.port}\nclientPortAddress={HOST}\ntickTime=500\n"
            "admin.enableServer=false\nmaxClientCnxns=0\n4lw.commands.whitelist=*\n"
        )
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        super().__init__(WITH_ZOOKEEPER, folder / "node", main, str(settings))

    def __enter__(self) -> "Keeper":
        self.start()
        wait_for("ZooKeeper", self._is_up)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _is_up(self) -> bool:
        self.check()
        with contextlib.suppress(OSError):
            return four_letters(self.port) == b"imok"
        return False


def four_letters(port: int) -> bytes:
    """Return ZooKeeper's answer to `ruok`."""
    with socket.create_connection((HOST, port), timeout=5) as sock:
        sock.sendall(b"ruok")
        return sock.recv(100)


class Watched(Kproxy):
    """Two listeners for the same brokers, one open, one with TLS, logins and a policy; and one for ZooKeeper.

    keeper: port of ZooKeeper; collector: port of an OpenTelemetry collector.
    """

    def __init__(self, cluster: Cluster, folder: Path, keeper: int, collector: int) -> None:
        super().__init__(cluster.bootstrap, folder)
        self.zookeeper = free_ports(1, HOST)
        secure = free_ports(6)
        self.secure = f"localhost:{secure}"
        self.authority = Authority(folder / "tls")
        certificate = self.authority.server().settings()
        users.change(folder / "users", "alice", PASSWORD)
        brokers = ", ".join(repr(address) for address in cluster.bootstrap.split(","))
        self.config = folder / "kproxy.toml"
        self.config.write_text(
            f"""
admin = "{self.admin}"
workers = 2
audit = '{folder / "audit.jsonl"}'
record = '{folder / "recorded"}'
flight = '{folder / "flight"}'

[otlp]
endpoint = "http://{HOST}:{collector}"
interval_s = 2

[[zookeeper]]
name = "old"
listen = "{HOST}:{self.zookeeper}"
servers = ["{NOBODY}", "{HOST}:{keeper}"]

[[cluster]]
name = "open"
listen = "{self.bootstrap}"
bootstrap = [{brokers}]
detail = "topics"
[cluster.telemetry]
push_interval_s = 2

[[cluster]]
name = "guarded"
listen = "{self.secure.replace("localhost", "127.0.0.1")}"
advertise = "localhost:{{port}}"
bootstrap = [{brokers}]
detail = "topics"
[cluster.tls]
certificate = '{certificate["certificate"]}'
key = '{certificate["key"]}'
[cluster.authentication]
mechanisms = ["PLAIN"]
users_file = '{folder / "users"}'
[[cluster.policy]]
action = "allow"
principal = "User:alice"
api = ["describe"]
topic = "*"
"""
        )
        self.command = [str(KPROXY), "run", "--config", str(self.config), "--log-level", "debug"]

    def of_alice(self, password: str = PASSWORD) -> dict[str, str]:
        return {
            "bootstrap.servers": self.secure,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": password,
            "ssl.ca.location": str(self.authority.bundle),
        }


class Load:
    """Clients with everyday load, each on its own thread until the end."""

    def __init__(self, kproxy: Watched, topic: str, old: str, alone: str) -> None:
        self._kproxy = kproxy
        self._topic, self._old, self._alone = topic, old, alone
        self._ended = threading.Event()
        self.group = f"billing-{uuid.uuid4().hex[:6]}"
        tasks = (
            self._produce,
            self._consume,
            self._unknown,
            self._throttled,
            self._tls,
            self._hang_up,
            self._knock,
            self._storm,
            self._stranger,
            self._registry,
            self._registry_of_many,
            self._registry_hangs_up,
        )
        self._threads = [
            threading.Thread(target=self._again, args=(task,), daemon=True) for task in (*tasks, self._log_in)
        ]

    def __enter__(self) -> "Load":
        self._behind()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(20)

    def _again(self, task: Callable[[], None]) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(KafkaException, KazooException, KazooTimeoutError, OSError, BufferError):
                task()
            self._ended.wait(0.1)

    def _settings(self, client_id: str, **more: Any) -> dict[str, Any]:
        known = {"bootstrap.servers": self._kproxy.bootstrap, "client.id": client_id, "log_level": 0}
        return {**known, "reconnect.backoff.max.ms": 200, "topic.metadata.refresh.interval.ms": 500, **more}

    def _member(self, client_id: str, group: str, **more: Any) -> Consumer:
        consumer = Consumer(self._settings(client_id, **{"group.id": group, "auto.offset.reset": "earliest", **more}))
        consumer.subscribe([self._topic])
        return consumer

    def _produce(self) -> None:
        producer = Producer(self._settings("shop", **{"linger.ms": 5, "compression.type": "lz4"}))
        while not self._ended.wait(0.02):
            for _ in range(10):
                producer.produce(self._topic, b"x" * 500)
            producer.produce(self._alone, b"y")
            producer.poll(0)
        producer.purge()

    def _consume(self) -> None:
        consumer = self._member("billing", self.group, **{"auto.commit.interval.ms": 500})
        while not self._ended.is_set():
            consumer.poll(0.2)
        consumer.close()

    def _unknown(self) -> None:
        producer = Producer(self._settings("lost"))
        with contextlib.suppress(KafkaException):
            producer.list_topics("nowhere-to-be-found", timeout=2)

    def _throttled(self) -> None:
        producer = Producer(self._settings("throttled"))
        while not self._ended.wait(0.05):
            producer.produce(self._topic, b"z" * 4000)  # small batches: throttled often and briefly
            producer.flush(5)

    def _tls(self) -> None:
        host, port = self._kproxy.bootstrap.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32))
            client.recv(100)
        self._ended.wait(0.5)

    def _knock(self) -> None:
        """A client that connects to the third broker's port, whether the broker is up or not."""
        host, port = self._kproxy.bootstrap.split(":")
        with socket.create_connection((host, int(port) + 1 + 3), timeout=5) as client:
            client.settimeout(0.3)
            client.recv(1)

    def _hang_up(self) -> None:
        """A client that disconnects before its responses."""
        asked = b"".join(framed_request(METADATA, 9, number, "impatient", {"topics": None}) for number in range(50))
        host, port = self._kproxy.bootstrap.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            client.sendall(asked)
            time.sleep(0.002)
        self._ended.wait(0.5)

    def _storm(self) -> None:
        consumer = self._member("restless", "restless")
        wait_until = time.monotonic() + 5
        while not consumer.assignment() and time.monotonic() < wait_until and not self._ended.is_set():
            consumer.poll(0.1)
        consumer.close()

    def _stranger(self) -> None:
        consumer = self._member("stranger", self.group, **{"partition.assignment.strategy": "cooperative-sticky"})
        for _ in range(10):
            consumer.poll(0.2)
        consumer.close()

    def _registry(self) -> None:
        """A ZooKeeper client that changes nodes, and one that watches them."""
        path = f"/brokers-{uuid.uuid4().hex[:6]}"
        with self._of_zookeeper() as client, self._of_zookeeper() as other:
            client.create(path, b"{}")
            while not self._ended.wait(0.1):
                for name in ("one", "two"):
                    other.get_children(path, watch=lambda _: None)
                    with contextlib.suppress(NodeExistsError):
                        client.create(f"{path}/{name}", b"v", ephemeral=name == "two")
                    other.get(f"{path}/{name}", watch=lambda _: None)
                    client.set(f"{path}/{name}", b"w")
                    with contextlib.suppress(NoNodeError):
                        client.get("/nowhere")
                    client.delete(f"{path}/{name}")

    def _registry_of_many(self) -> None:
        """Short ZooKeeper sessions, and four-letter commands."""
        with self._of_zookeeper() as client:
            client.exists("/")
        four_letters(self._kproxy.zookeeper)

    def _registry_hangs_up(self) -> None:
        """A ZooKeeper client that disconnects before its responses."""
        connect = struct.pack(">iqiqi16sB", 0, 0, 5000, 0, 16, bytes(16), 0)
        asked = b"".join(struct.pack(">iiii", 14, number, 4, 1) + b"/\0" for number in range(500))  # getData of /
        with socket.create_connection((HOST, self._kproxy.zookeeper), timeout=5) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(struct.pack(">i", len(connect)) + connect)
            client.recv(100)
            client.sendall(asked)
        self._ended.wait(0.5)

    @contextlib.contextmanager
    def _of_zookeeper(self) -> Iterator[KazooClient]:
        client = KazooClient(f"{HOST}:{self._kproxy.zookeeper}", timeout=5)
        client.start(10)
        try:
            yield client
        finally:
            client.stop()
            client.close()

    def _log_in(self) -> None:
        for password in (PASSWORD, "wrong"):
            producer = Producer({**self._kproxy.of_alice(password), "log_level": 0})
            with contextlib.suppress(KafkaException):
                producer.list_topics(timeout=2)
                producer.produce(self._topic, b"may not")
                producer.flush(1)
            producer.purge()

    def _behind(self) -> None:
        """Produce records of an hour ago; a group commits the first and then only sends heartbeats."""
        producer = Producer(self._settings("old"))
        for _ in range(50):
            producer.produce(self._old, b"o", timestamp=int((time.time() - 3600) * 1000))
        assert producer.flush(20) == 0
        consumer = Consumer(
            self._settings("late", **{"group.id": "late", "auto.offset.reset": "earliest", "enable.auto.commit": False})
        )
        consumer.subscribe([self._old])
        message = None
        while message is None:
            message = consumer.poll(1)
        consumer.commit(message, asynchronous=False)
        self._late = consumer

        def more() -> None:
            for _ in range(100):
                producer.produce(self._old, b"o", timestamp=int((time.time() - 3600) * 1000))
            producer.flush(20)
            time.sleep(0.2)

        for step in (lambda: consumer.poll(0.2) and None, more):
            self._threads.append(threading.Thread(target=self._again, args=(step,), daemon=True))

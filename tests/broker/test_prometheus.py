"""A real Prometheus scrapes a real kproxy before a real Kafka: boards show data, alerts fire when they should.

Two Prometheus scrape the same kproxy. In one the rules run FAST times as fast as they are written: there alerts fire
within seconds of what provokes them. In the other they run SLOW times as fast, so that the restart of a broker, which
takes this small one seconds, is as long as that of a large one: there nothing fires that nobody provoked.
By hand, `pytest tests/broker/test_prometheus.py --rolling` restarts every broker, not one.
"""

import contextlib
import math
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from dashboards.boards.__main__ import BOARDS
from dashboards.boards.model import panels_of
from kproxy.proxy.access.sasl import users
from tests.broker.cluster import Cluster, tool, wait_for
from tests.broker.kproxy import KPROXY, Kproxy
from tests.broker.prometheus import Prometheus
from tests.broker.tools import CONFIGS
from tests.certificates import Authority
from tests.ports import free_ports

FAST, SLOW = 60, 6
PASSWORD = "secret"

# What the clients of this test provoke on purpose, beside restarts; job "broken" is a kproxy before nobody.
PROVOKED = {
    "KproxyErrors": "a client asks for a topic that is not there",
    "KproxyClientsThrottled": "a producer above its quota",
    "KproxyGroupBehind": "a group that has committed, and reads no further, in a topic of old records",
    "KproxyProtocolFaults": "a client that speaks TLS where none is",
    "KproxyRebalanceStorm": "a member that leaves and comes back again and again",
    "KproxyMemberNeverJoins": "a member with another strategy than its group",
    "KproxyPartitionOffline": "a topic with its only replica on the broker that is restarted",
}
OF_AN_OUTAGE = {"KproxyBrokerUnreachable", "KproxyIsrShrunk"}

# Queries that are empty for the reason that the panel gives, and that nothing here provokes.
NEVER_HERE = {
    "kproxy_worker_cpu_seconds_total": "one process",
    "kproxy_worker_resident_memory_bytes": "one process",
}


class Watched(Kproxy):
    """A kproxy with two listeners before the same brokers: one for everybody, one with TLS, logins and a policy."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster.bootstrap, folder)
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
audit = '{folder / "audit.jsonl"}'
record = '{folder / "recorded"}'

[[cluster]]
name = "open"
listen = "{self.bootstrap}"
bootstrap = [{brokers}]
detail = "topics"

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
    """Clients that do what a day brings, each on a thread of its own, until `stop`."""

    def __init__(self, kproxy: Watched, topic: str, old: str, alone: str) -> None:
        self._kproxy = kproxy
        self._topic, self._old, self._alone = topic, old, alone
        self._ended = threading.Event()
        self.group = f"billing-{uuid.uuid4().hex[:6]}"
        tasks = (self._produce, self._consume, self._unknown, self._throttled, self._tls, self._storm, self._stranger)
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
            with contextlib.suppress(KafkaException, OSError, BufferError):
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
            producer.produce(self._topic, b"z" * 50_000)
            producer.flush(5)

    def _tls(self) -> None:
        host, port = self._kproxy.bootstrap.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32))
            client.recv(100)
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

    def _log_in(self) -> None:
        for password in (PASSWORD, "wrong"):
            producer = Producer({**self._kproxy.of_alice(password), "log_level": 0})
            with contextlib.suppress(KafkaException):
                producer.list_topics(timeout=2)
                producer.produce(self._topic, b"may not")
                producer.flush(1)
            producer.purge()

    def _behind(self) -> None:
        """Records of an hour ago, of which a group reads the first; its reader then only says that it lives."""
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
        self._threads.append(
            threading.Thread(target=self._again, args=(lambda: consumer.poll(0.2) and None,), daemon=True)
        )


@pytest.fixture(scope="module")
def watched(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with Watched(cluster, tmp_path_factory.mktemp("watched")) as kproxy:
        wait_for("the process that follows groups", lambda: "are followed by process" in kproxy.log.read_text(), 30)
        yield kproxy


def test_boards_show_data_and_alerts_fire_when_provoked_and_only_then(
    cluster: Cluster, watched: Watched, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    topic, old, alone = (f"{name}-{uuid.uuid4().hex[:6]}" for name in ("orders", "archive", "alone"))
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    made = admin.create_topics(
        [
            NewTopic(topic, 3, 3),
            NewTopic(old, 1, 3),
            NewTopic(alone, 1, replica_assignment=[[cluster.brokers[2].node_id]]),
        ]
    )
    for done in made.values():
        done.result(60)
    quota = ("--entity-type", "clients", "--entity-name", "throttled", "--add-config", "producer_byte_rate=20000")
    tool(CONFIGS, "--bootstrap-server", cluster.bootstrap, "--alter", *quota)
    nobody = f"127.0.0.1:{free_ports(1)}"
    (tmp_path / "broken").mkdir()
    broken = Kproxy(nobody, tmp_path / "broken")
    broken.start(waits_until_ready=False)
    wait_for("the broken kproxy", broken.is_alive, 30)
    targets = {"kproxy": watched.admin, "broken": broken.admin}
    try:
        with (
            Prometheus(tmp_path / "fast", targets, FAST) as fast,
            Prometheus(tmp_path / "slow", targets, SLOW) as slow,
            Load(watched, topic, old, alone),
        ):
            _boards_show_data(fast)
            _rules_are_sound(fast)
            _exemplars_name_clients(fast)
            wait_for("KproxyNotReady", lambda: ("KproxyNotReady", "critical", "broken") in fast.fired(), 30)
            broken.stop(kill=True)
            provoked = {*PROVOKED, "KproxyDown"} - {"KproxyPartitionOffline"}

            def missing(wanted: set[str]) -> set[str]:
                return wanted - {name for name, _, _ in fast.fired()}

            _wait_for_alerts(missing, provoked)
            for broker in cluster.brokers if pytestconfig.getoption("--rolling", False) else cluster.brokers[2:]:
                broker.stop()
                if broker is cluster.brokers[2]:
                    _wait_for_alerts(missing, OF_AN_OUTAGE | {"KproxyPartitionOffline"})
                broker.start()
                broker.wait_until_started()
            wait_for("sound partitions", lambda: not fast.query("sum(kproxy_partitions_offline) > 0"), 60)
            grave = {name for name, severity, job in slow.fired() if severity != "info" and job != "broken"}
            assert not grave - PROVOKED.keys()
    finally:
        broken.stop(kill=True)


def _wait_for_alerts(missing: Callable[[set[str]], set[str]], wanted: set[str]) -> None:
    try:
        wait_for("alerts", lambda: not missing(wanted), 90)
    except AssertionError:
        raise AssertionError(f"these did not fire: {missing(wanted)}") from None


def _queries() -> list[tuple[str, str, str]]:
    """(board and panel, query, what its legend names) of all panels."""
    return [
        (f"{board.BOARD['title']}: {panel['title']}", target["expr"], target["legendFormat"])
        for board in BOARDS.values()
        for panel in panels_of(board.BOARD["panels"])
        for target in panel["targets"]
    ]


def _plain(query: str) -> str:
    """A query with everything chosen, as Grafana would send it."""
    return re.sub(r'=~"\$\w+"', '=~".*"', query).replace("$__rate_interval", "15s").replace("$__range", "2m")


def _boards_show_data(prometheus: Prometheus) -> None:
    """Every query of every panel has series with numbers, and the labels that its legend names."""
    queries = _queries()
    assert len(queries) > 100

    def empty() -> list[tuple[str, str]]:
        left = []
        for panel, query, legend in queries:
            if any(name in query for name in NEVER_HERE):
                continue
            found = prometheus.query(_plain(query))
            labels = set(re.findall(r"{{(\w+)}}", legend)) - {"le"}
            shown = [
                each for each in found if labels <= each["metric"].keys() and not math.isnan(float(each["value"][1]))
            ]
            if not shown:
                left.append((panel, query))
        return left

    try:
        wait_for("data in every panel", lambda: not empty(), 60, pause_s=1)
    except AssertionError:
        raise AssertionError("\n".join(f"{panel}: {query}" for panel, query in empty())) from None


def _rules_are_sound(prometheus: Prometheus) -> None:
    """Rules are evaluated without a fault; each recording rule has data."""
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 30
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert not [name for name in recorded if not prometheus.query(name)]


def _exemplars_name_clients(prometheus: Prometheus) -> None:
    now = time.time()
    found = prometheus.get(
        "query_exemplars",
        query="kproxy_request_duration_seconds_bucket",
        start=str(now - 600),
        end=str(now + 60),
    )
    named = [exemplar for series in found for exemplar in series["exemplars"]]
    assert named
    assert all(exemplar["labels"]["correlation_id"].lstrip("-").isdigit() for exemplar in named)
    assert {exemplar["labels"]["client"] for exemplar in named} == {"127.0.0.1"}
    assert {exemplar["labels"].get("client_id") for exemplar in named} & {"shop", "throttled", "billing", "lost"}

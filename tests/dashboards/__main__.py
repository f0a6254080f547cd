"""`./dev dashboards`: a real Prometheus scrapes a real kproxy before a real Kafka: boards show data, alerts fire.

Two Prometheus scrape the same kproxy. In one the rules run FAST times as fast as they are written: there alerts fire
within seconds of what provokes them. In the other they run SLOW times as fast, so that the restart of a broker, which
takes this small one seconds, is as long as that of a large one: there nothing fires that nobody provoked, also while
all brokers are restarted one after the other. CI has a short form of it before the demo's cluster (test_dashboards.py).
"""

import contextlib
import signal
import socket
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kproxy.protocol.codec import framed_request
from kproxy.proxy.access.sasl import users
from tests.broker.cluster import Cluster, tool, wait_for
from tests.broker.kproxy import KPROXY, Kproxy
from tests.broker.tools import CONFIGS
from tests.certificates import Authority
from tests.ports import free_ports
from tests.prometheus import Prometheus

FAST, SLOW = 60, 6
PASSWORD = "secret"
METADATA = 3

# What the clients provoke on purpose, beside restarts; job "broken" is a kproxy before nobody.
PROVOKED = {
    "KproxyErrors": "a client asks for a topic that is not there",
    "KproxyClientsThrottled": "a producer above its quota",
    "KproxyGroupBehind": "a group that has committed, and reads no further, in a topic of old records",
    "KproxyProtocolFaults": "a client that speaks TLS where none is",
    "KproxyRebalanceStorm": "a member that leaves and comes back again and again",
    "KproxyMemberNeverJoins": "a member with another strategy than its group",
    "KproxyPartitionOffline": "a topic with its only replica on the broker that is restarted",
}
# Of the machine: where other work fills its cores, kproxy is late, and these say so.
OF_A_BUSY_MACHINE = {"KproxyLoopLate", "KproxySlow"}
OF_AN_OUTAGE = {"KproxyBrokerUnreachable", "KproxyIsrShrunk"}

# Queries that are empty for the reason that the panel gives, and that nothing here provokes.
NEVER_HERE = ("kproxy_worker_", "kproxy_zookeeper_", "kproxy_watch_", "kproxy_otlp_")


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
    """Clients that do what a day brings, each on a thread of its own, until `stop`."""

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
            producer.produce(self._topic, b"z" * 4000)  # small ones: throttled often, and shortly
            producer.flush(5)

    def _tls(self) -> None:
        host, port = self._kproxy.bootstrap.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32))
            client.recv(100)
        self._ended.wait(0.5)

    def _knock(self) -> None:
        """A client that knows the third broker's port, whether the broker is there or not."""
        host, port = self._kproxy.bootstrap.split(":")
        with socket.create_connection((host, int(port) + 1 + 3), timeout=5) as client:
            client.settimeout(0.3)
            client.recv(1)

    def _hang_up(self) -> None:
        """A client that is gone before its answers."""
        asked = b"".join(framed_request(METADATA, 9, number, "impatient", {"topics": None}) for number in range(50))
        host, port = self._kproxy.bootstrap.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the end is a reset
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


def run(cluster: Cluster, folder: Path) -> None:
    """Raises AssertionError that names what is empty, does not fire, or fired unprovoked."""
    topic, old, alone = (f"{name}-{uuid.uuid4().hex[:6]}" for name in ("orders", "archive", "alone"))
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    third = cluster.brokers[2]
    topics = [NewTopic(topic, 3, 3), NewTopic(old, 1, 3), NewTopic(alone, 1, replica_assignment=[[third.node_id]])]
    for done in admin.create_topics(topics).values():
        done.result(60)
    quota = ("--entity-type", "clients", "--entity-name", "throttled", "--add-config", "producer_byte_rate=20000")
    tool(CONFIGS, "--bootstrap-server", cluster.bootstrap, "--alter", *quota)
    for name in ("watched", "broken"):
        (folder / name).mkdir()
    broken = Kproxy("127.0.0.1:1", folder / "broken")
    try:
        with Watched(cluster, folder / "watched") as watched:
            broken.start(waits_until_ready=False)
            wait_for("the broken kproxy", broken.is_alive, 60)
            wait_for("who follows groups", lambda: "are followed by process" in watched.log.read_text(), 60)
            targets = {"kproxy": watched.admin, "broken": broken.admin}
            with (
                Prometheus(folder / "fast", targets, FAST) as fast,
                Prometheus(folder / "slow", targets, SLOW) as slow,
                Load(watched, topic, old, alone),
            ):
                _observe(cluster, broken, fast, slow)
    finally:
        broken.stop(kill=True)


def _observe(cluster: Cluster, broken: Kproxy, fast: Prometheus, slow: Prometheus) -> None:
    """All of it, and then what was wrong."""
    start = time.monotonic()
    faults: list[str] = []

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - start:5.0f} s  {text}")

    def check(done: str, step: Callable[[], object]) -> None:
        try:
            step()
            say(done)
        except AssertionError as fault:
            faults.append(str(fault) or f"not so: {done}")
            say(f"WRONG: {faults[-1]}")

    def fire(wanted: set[str], timeout_s: float) -> None:
        def missing() -> set[str]:
            return wanted - {name for name, _, _ in fast.fired()}

        try:
            wait_for("alerts", lambda: not missing(), timeout_s)
        except AssertionError:
            raise AssertionError(f"these did not fire: {', '.join(sorted(missing()))}") from None

    check("every query of every panel has data", lambda: _boards_show_data(fast))
    check("every rule is evaluated", fast.check_rules)
    check("exemplars name clients", lambda: _exemplars_name_clients(fast))
    check("KproxyNotReady fired for a kproxy before nobody", lambda: fire({"KproxyNotReady"}, 60))
    broken.stop(kill=True)
    provoked = {*PROVOKED, "KproxyDown"} - {"KproxyPartitionOffline"}
    check(f"these fired, as provoked: {', '.join(sorted(provoked))}", lambda: fire(provoked, 90))
    for broker in reversed(cluster.brokers):
        broker.stop()
        broker.start()
        broker.wait_until_started()
        say(f"broker {broker.node_id} was restarted")
    offline = "sum(kproxy_partitions_offline) > 0"
    check("no partition is offline", lambda: wait_for("sound partitions", lambda: not fast.query(offline), 60))

    def silent() -> None:
        fired = {name for name, severity, job in slow.fired() if severity != "info" and job != "broken"}
        unprovoked = sorted(fired - PROVOKED.keys() - OF_A_BUSY_MACHINE)
        if fired & OF_A_BUSY_MACHINE:
            say(f"fired where the machine is busy: {', '.join(sorted(fired & OF_A_BUSY_MACHINE))}")
        assert not unprovoked, f"these fired through the restarts, unprovoked: {', '.join(unprovoked)}"

    check(f"nothing unprovoked fired through the restarts, in 1/{SLOW} of the rules' times", silent)
    cluster.brokers[2].stop()
    outage = OF_AN_OUTAGE | {"KproxyPartitionOffline"}
    check(f"these fired in an outage: {', '.join(sorted(outage))}", lambda: fire(outage, 60))
    assert not faults, "\n".join(faults)


def _boards_show_data(prometheus: Prometheus) -> None:
    """Every query of every panel has series with numbers, and the labels that its legend names."""

    def empty() -> list[str]:
        return [line for line in prometheus.empty_panels() if not any(name in line for name in NEVER_HERE)]

    try:
        wait_for("data in every panel", lambda: not empty(), 60, pause_s=1)
    except AssertionError:
        raise AssertionError("\n".join(empty())) from None


def _exemplars_name_clients(prometheus: Prometheus) -> None:
    named = prometheus.exemplars("kproxy_request_duration_seconds_bucket")
    assert named
    assert all(each["correlation_id"].lstrip("-").isdigit() for each in named)
    assert {each["client"] for each in named} == {"127.0.0.1"}
    assert {each.get("client_id") for each in named} & {"shop", "throttled", "billing", "lost"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", type=click.Path(path_type=Path), help="A folder for all logs. Default: one in /tmp.")
def main(keep: Path | None) -> None:
    """Watch a kproxy before three brokers with Prometheus: boards, rules, alerts, a rolling restart."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = keep or Path(tempfile.mkdtemp(prefix="dashboards-"))
    folder.mkdir(exist_ok=True)
    click.echo(f"logs in {folder}")
    (folder / "kafka").mkdir()
    cluster = Cluster(folder / "kafka")
    try:
        cluster.start()
        run(cluster, folder)
    except AssertionError as fault:
        raise click.ClickException(str(fault)) from None
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()

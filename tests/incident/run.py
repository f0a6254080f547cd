"""An incident before three real brokers: captured from beside, with the truth written down while it happens.

Duty: the cluster and its topics, the capture, what happens to brokers and when, and a file of what is true: what was
done (`truth.jsonl`), what clients reported, what Kafka's own tools say of lag at the end. Refuses to know kproxy.
"""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.tools import CONFIGS, CONSUMER, GROUPS, VERIFIABLE_PRODUCER, Running, as_root
from tests.incident.clients import Clients, healthy, ill

SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    "super.users": "User:ANONYMOUS",
    "connections.max.reauth.ms": "0",
    "broker.session.timeout.ms": "6000",
}
# Topics with the replicas of their partitions.
TOPICS = {
    "orders": [[1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 3, 2], [2, 1, 3], [3, 2, 1]],
    "payments": [[2, 3, 1], [1, 2, 3], [3, 1, 2]],
    "events": [[1, 2, 3], [2, 3, 1], [3, 1, 2]],
    "ledger": [[1, 3, 2]],
    "bulk": [[3, 1, 2]],
    "strict": [[1, 2, 3]],  # min.insync.replicas is 3
    "lone": [[2]],
    "secret": [[1, 2, 3]],
}


READERS = ("billing", "pay-reader", "aio-reader", "mail-reader")  # how client ids of healthy groups begin


class Truth:
    """What happened, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def say(self, what: str, **more: Any) -> None:
        with self._lock:
            now_ns = time.time_ns()
            clock = time.strftime("%H:%M:%S", time.gmtime(now_ns // 10**9))
            self._file.write(json.dumps({"time": clock, "time_ns": now_ns, "what": what, **more}) + "\n")

    def close(self) -> None:
        self._file.close()


def make_topics(cluster: Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    made = [
        NewTopic(
            name,
            len(replicas),
            replica_assignment=replicas,
            config={"min.insync.replicas": "3"} if name == "strict" else {},
        )
        for name, replicas in TOPICS.items()
    ]
    for each in admin.create_topics(made).values():
        each.result(60)
    deny = AclBinding(
        *(ResourceType.TOPIC, "secret", ResourcePatternType.LITERAL, "User:alice", "*"),
        *(AclOperation.WRITE, AclPermissionType.DENY),
    )
    for acl in admin.create_acls([deny]).values():
        acl.result(30)
    alter = (CONFIGS, "--bootstrap-server", cluster.bootstrap, "--alter")
    tool(*alter, "--entity-type", "clients", "--entity-name", "greedy", "--add-config", "producer_byte_rate=200000")
    warm = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": "warm"})
    warm.init_transactions(60)


@dataclass(frozen=True)
class Plan:
    """How long each part lasts, in seconds; what brokers take to start comes on top."""

    calm_s: float = 15
    down_s: float = 12  # broker 2, killed
    still_s: float = 8  # broker 3, stopped by a signal
    stopped_s: float = 10  # broker 1, shut down in order; 0: it is not
    between_s: float = 10
    rate: int = 300  # records a second of each steady producer
    has_java: bool = False  # also Kafka's own producer and consumer, in JVMs of their own
    healthy_s: float = 0  # not 0: nothing happens for so long, and no ill client begins


def play(cluster: Cluster, truth: Truth, plan: Plan, begin_ill: Callable[[], None]) -> None:
    """Calm; then ill clients; then a kill, a pause, a controlled stop. Or healthy clients alone."""
    if plan.healthy_s:
        time.sleep(plan.healthy_s)
        return
    one, two, three = cluster.brokers
    time.sleep(plan.calm_s)
    truth.say("ill clients begin")
    begin_ill()
    time.sleep(plan.between_s)
    truth.say("broker 2 killed (SIGKILL)")
    two.stop(kill=True)
    time.sleep(plan.down_s)
    truth.say("broker 2 starts again")
    two.start()
    two.wait_until_started()
    truth.say("broker 2 is back")
    time.sleep(plan.between_s)
    truth.say("broker 3 stands still (SIGSTOP)")
    with three.paused():
        time.sleep(plan.still_s)
    truth.say("broker 3 goes on (SIGCONT)")
    time.sleep(plan.between_s)
    if plan.stopped_s:
        truth.say("broker 1 stops (controlled shutdown)")
        one.stop()
        truth.say("broker 1 has stopped")
        time.sleep(plan.stopped_s)
        one.start()
        one.wait_until_started()
        truth.say("broker 1 is back")
        time.sleep(plan.between_s)


def run(folder: Path, plan: Plan, say: Callable[[str], None] = lambda text: None) -> Path:
    """Returns the capture; `truth.jsonl` stands beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = Truth(folder / "truth.jsonl")
    capture = folder / "incident.pcap"
    cluster = Cluster(folder / "kafka", settings=SETTINGS)
    try:
        cluster.start()
        make_topics(cluster)
        say("the cluster is up")
        with captured(cluster, capture), ExitStack() as running:
            clients = Clients(cluster.bootstrap, cluster.sasl_bootstrap, plan.rate)
            threads: list[threading.Thread] = []

            def begin(tasks: dict[str, Callable[[], None]]) -> None:
                for name, task in tasks.items():
                    threads.append(threading.Thread(target=task, name=name, daemon=True))
                    threads[-1].start()

            begin(healthy(clients))
            for each in java_clients(cluster, folder, plan.rate) if plan.has_java else []:
                running.callback(each.stop)
            wait_for("all to read", lambda: all(clients.reads(group) for group in READERS), 120)
            time.sleep(5)  # leaders that move when a cluster begins have moved
            truth.say("calm begins")
            play(cluster, truth, plan, lambda: begin(ill(clients)))
            clients.over.set()
            truth.say("clients end")
            for thread in threads:
                thread.join(45)
                if thread.is_alive():
                    truth.say(f"{thread.name} did not end")
        for name, counts in sorted(clients.reported.items()):
            truth.say("reported", client=name, **counts)
        truth.say("lag by kafka-consumer-groups", **lags(cluster))
    finally:
        cluster.stop()
        truth.close()
    return capture


def java_clients(cluster: Cluster, folder: Path, rate: int) -> list[Running]:
    """A producer and a consumer of Kafka's own library, which report to files in the folder."""
    to = ("--bootstrap-server", cluster.bootstrap, "--topic", "events")
    settings = folder / "producer.properties"
    settings.write_text("client.id=java-writer\nretries=1000\n")
    written = ("--acks", "-1", "--throughput", str(rate), "--producer.config", str(settings))
    group = ("--group", "java", "--consumer-property", "client.id=java-reader")
    return [
        Running(folder / "java-writer", VERIFIABLE_PRODUCER, *to, *written),
        Running(folder / "java-reader", CONSUMER, *to, *group),
    ]


@contextmanager
def captured(cluster: Cluster, capture: Path) -> Iterator[None]:
    """What clients and brokers send each other, in a file."""
    log = capture.with_suffix(".log")
    listeners = [(each.host, each.ports[name]) for each in cluster.brokers for name in ("CLIENT", "SASL")]
    wanted = " or ".join(f"(host {host} and port {port})" for host, port in listeners)
    command = ["tcpdump", "-i", "lo", "-s", "0", "-B", "262144", "-U", "-w", str(capture), wanted]
    with log.open("wb") as said:
        tcpdump = subprocess.Popen([*as_root(), *command], stdin=subprocess.DEVNULL, stderr=said)
    try:
        wait_for("tcpdump", lambda: "listening" in log.read_text())
        yield
        time.sleep(1)
    finally:
        tcpdump.send_signal(signal.SIGINT)
        tcpdump.wait(30)


def lags(cluster: Cluster) -> dict[str, int]:
    """Records that each group is behind, by Kafka's own tool."""
    found: dict[str, int] = {}
    described = tool(GROUPS, "--bootstrap-server", cluster.bootstrap, "--describe", "--all-groups")
    for words in map(str.split, described.splitlines()):
        if len(words) > 5 and words[5].isdecimal():
            found[words[0]] = found.get(words[0], 0) + int(words[5])
    return found


def events(folder: Path) -> dict[str, int]:
    """When what happened, in nanoseconds since the epoch."""
    lines = map(json.loads, (folder / "truth.jsonl").read_text().splitlines())
    return {line["what"]: line["time_ns"] for line in lines}

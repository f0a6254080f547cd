"""Findings about real traffic: clients that provoke each finding, clients that do not, and a network that loses
packets.

All clients run at once before a cluster of three brokers, through two recording kproxies: one for the provoking
clients, one for the well-behaved ones. tests/analysis/findings tests further findings on captures of the repository:
quotas, versions that a newer Kafka drops, groups that do not come to rest.
"""

import json
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as Place

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import findings, limits
from kproxy.analysis.findings.finding import Finding
from kproxy.analysis.findings.network import UNREAD
from kproxy.convert.processes import convert
from tests.broker.apart import Apart
from tests.broker.cluster import Broker, Cluster, wait_for
from tests.broker.kproxy import Kproxy
from tests.namespaces import Namespace, why_not

TEXT = json.dumps({"user": "somebody", "items": ["a thing", "another thing"], "state": "shipped"}).encode()
SPAN_S = 12.0  # longer than the 10 s that lag and transactions need to become findings
HELD_S = 6.0  # how long a member does not poll while another waits for it: 5 s until the finding
DANGLING = "dangling-tx"  # a transactional id
PAUSE_S = 1.0  # of the slow broker; more than three times what others take, even on a slow machine
SLOW = 3  # its id

# Topics with the brokers that lead their partitions, of one replica each; `weak` has three.
BAD = {"drops": [1], "filled": [2], "uneven": [1, 2, 3, 1], "quiet": [2], "stream": [2], "held": [2]}
BAD |= {"again": [3], "paced": [1, 2, 3], "team": [1, 2, 1]}
GOOD = {"full": [1, 2], "still": [2], "ended": [1]}  # not at the slow broker

# A slow machine reaches no high rates with these clients, and none of its brokers is quick.
THRESHOLDS = {"single_record_rate": 10, "empty_rate": 5, "tiny_fetch_rate": 10, "commit_rate": 5}
THRESHOLDS |= {"slow_produce_ms": 600 * PAUSE_S}
# A busy machine lengthens a pause of the slow broker to several seconds: only a silence of SPAN_S is a finding.
THRESHOLDS |= {"silent_s": SPAN_S, "writers_still_s": SPAN_S}

SINGLES, FILLED, ACKED, PLAIN, FLIGHTS, EMPTIES = 1000, 300, 40, 1600, 70, 300


class Client:
    """A client of the scene: where it bootstraps, and until when it runs."""

    def __init__(self, kproxy: Kproxy) -> None:
        self.kproxy = kproxy
        self.until = time.monotonic() + SPAN_S

    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    def producer(self, client_id: str, **settings: Any) -> Producer:
        common = {"bootstrap.servers": self.kproxy.bootstrap, "client.id": client_id}
        return Producer(common | {name.replace("_", "."): value for name, value in settings.items()})

    def consumer(self, client_id: str, topic: str | None = None, **settings: Any) -> Consumer:
        """A consumer of partition 0 from its beginning if a topic is given."""
        common = {"bootstrap.servers": self.kproxy.bootstrap, "client.id": client_id, "group.id": f"of-{client_id}"}
        common |= {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
        made = Consumer(common | {name.replace("_", "."): value for name, value in settings.items()})
        if topic is not None:
            made.assign([TopicPartition(topic, 0, 0)])
        return made

    def run(self, *clients: Callable[[], None]) -> None:
        with ThreadPoolExecutor(len(clients)) as pool:
            for job in [pool.submit(client) for client in clients]:
                job.result()


class Provoking(Client):
    """A method for each client id."""

    def __init__(self, kproxy: Kproxy, slow: Broker) -> None:
        super().__init__(kproxy)
        self.slow_broker = slow
        self.sleeps = threading.Event()
        self.slept_s = 0.0
        self.is_read = False  # tells `streaming` to end
        self.forgotten = threading.Event()
        self.kept: list[Any] = []  # clients that live until kproxy has stopped

    def all(self) -> None:
        acks = (lambda: self.acked("careless", "0")), (lambda: self.acked("hasty", "1"))
        self.run(
            *(self.pausing, self.single, self.nibbling, self.anxious, self.plain, *acks, self.retrying, self.steady),
            *(self.eager, self.slow, self.streaming, self.dangling, self.committed, self.flighty),
            *(lambda: self.member("brisk"), self.busy, self.late),
        )

    def pausing(self) -> None:
        """Pauses the slow broker over and over, and meanwhile cuts the connection of `retrying`."""
        while self.goes_on():
            with self.slow_broker.paused():
                time.sleep(PAUSE_S / 2)
                for row in json.loads(self.kproxy.get("/api/connections")):
                    if row["client_id"] == "retrying" and row["requests_pending"]:
                        self.kproxy.post(f"/api/close?connection={row['number']}")
                time.sleep(PAUSE_S / 2)
            time.sleep(PAUSE_S)

    def single(self) -> None:
        """Sends 250 batches a second with one record each."""
        producer = self.producer("single", linger_ms=0, batch_num_messages=1)
        for number in range(SINGLES):
            producer.produce("drops", b"%d" % number, partition=0)
            producer.poll(0)
            time.sleep(0.004)
        assert producer.flush(60) == 0

    def nibbling(self) -> None:
        """Fetches each record as it arrives."""
        consumer = self.consumer("nibbling", "drops")
        count = 0
        while count < SINGLES:
            count += len(consumer.consume(100, 0.2))
        consumer.close()

    def anxious(self) -> None:
        """Commits after each record."""
        consumer = self.consumer("anxious", "filled")
        count = 0
        while count < FILLED:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                consumer.commit(message, asynchronous=False)
                count += 1
        consumer.close()

    def plain(self) -> None:
        """Sends large uncompressed batches, all to one partition of four."""
        producer = self.producer("plain", linger_ms=5, compression_type="none")
        for _ in range(PLAIN):
            producer.produce("uneven", TEXT * 100, partition=0)
            producer.poll(0.001)
        assert producer.flush(60) == 0

    def acked(self, client_id: str, acks: str) -> None:
        producer = self.producer(client_id, acks=acks, linger_ms=0)
        for _ in range(ACKED):
            producer.produce("weak", TEXT, partition=0)
            producer.flush(10)
            time.sleep(0.05)

    def retrying(self) -> None:
        """Loses its connection before the broker has answered, and sends the same records again."""
        settings = {"acks": "all", "enable_idempotence": False, "linger_ms": 5, "retry_backoff_ms": 50, "retries": 50}
        producer = KafkaProducer(bootstrap_servers=self.kproxy.bootstrap, client_id="retrying", **settings)
        sent = []
        while self.goes_on():
            sent += [producer.send("again", b"%d-%s" % (len(sent), TEXT), partition=0) for _ in range(10)]
            time.sleep(0.05)
        producer.flush(60)
        assert all(each.succeeded() for each in sent)
        producer.close()

    def steady(self) -> None:
        """Sends the same to each broker: batches of two records, 20 a second, one request in flight."""
        producer = self.producer("steady", linger_ms=10, max_in_flight=1, compression_type="lz4")
        while self.goes_on():
            for partition in (0, 1, 2):
                for _ in range(2):
                    producer.produce("paced", TEXT, partition=partition)
            producer.poll(0)
            time.sleep(0.05)
        assert producer.flush(60) == 0

    def eager(self) -> None:
        """Fetches without letting the broker wait for records."""
        consumer = self.consumer("eager", "quiet", fetch_wait_max_ms=1, fetch_queue_backoff_ms=1)
        until = time.monotonic() + 60
        while time.monotonic() < until and self.asked("eager") < EMPTIES:
            consumer.poll(0.1)
        consumer.close()

    def asked(self, client_id: str) -> int:
        """Requests so far on open connections."""
        rows = json.loads(self.kproxy.get("/api/connections"))
        return sum(row["requests"] for row in rows if row["client_id"] == client_id)

    def slow(self) -> None:
        """Reads 50 records a second while 500 a second arrive."""
        consumer = KafkaConsumer(
            bootstrap_servers=self.kproxy.bootstrap,
            client_id="slow",
            max_partition_fetch_bytes=2000,
            max_poll_records=10,
            enable_auto_commit=False,
        )
        consumer.assign([Place("stream", 0)])
        consumer.seek(Place("stream", 0), 0)
        until, has_read = time.monotonic() + 120, False
        while time.monotonic() < until:
            if consumer.poll(100) and not has_read:
                until, has_read = time.monotonic() + SPAN_S + 2, True
            time.sleep(0.2)
        self.is_read = True
        consumer.close()

    def streaming(self) -> None:
        producer = self.producer("streaming", linger_ms=50, batch_num_messages=50)
        until = time.monotonic() + 120
        while time.monotonic() < until and not self.is_read:
            for _ in range(50):
                producer.produce("stream", TEXT, partition=0)
            producer.poll(0)
            time.sleep(0.1)
        assert producer.flush(60) == 0

    def dangling(self) -> None:
        """Begins a transaction and forgets it; another producer continues in the same partition."""
        producer = self.producer("dangling", transactional_id=DANGLING)
        self.kept.append(producer)
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce("held", b"x", partition=0)
        assert producer.flush(60) == 0
        beside = self.producer("beside", linger_ms=5)
        until = time.monotonic() + SPAN_S
        while time.monotonic() < until:
            beside.produce("held", b"y", partition=0)
            beside.flush(10)
            time.sleep(0.25)
        self.forgotten.set()

    def committed(self) -> None:
        """Reads committed records behind a transaction that nobody ends."""
        consumer = self.consumer("committed", "held", isolation_level="read_committed")
        while not self.forgotten.is_set():
            consumer.poll(0.2)
        consumer.close()

    def flighty(self) -> None:
        """Creates a client for each question."""
        for _ in range(FLIGHTS):
            AdminClient({"bootstrap.servers": self.kproxy.bootstrap, "client.id": "flighty"}).list_topics(timeout=20)

    def joined(self, client_id: str) -> Consumer:
        """A member of group team that rejoins only when it polls, as Java's members do."""
        how = {"partition_assignment_strategy": "range", "heartbeat_interval_ms": 500}
        member = self.consumer(client_id, group_id="team", **how)
        member.subscribe(["team"], on_assign=lambda *_: None, on_revoke=lambda *_: None)
        return member

    def member(self, client_id: str) -> None:
        """Polls while the busy member does not, and two seconds more."""
        member = self.joined(client_id)
        until = time.monotonic() + 120
        while time.monotonic() < until and not self.slept_s:
            member.poll(0.1)
        for _ in range(20):
            member.poll(0.1)
        member.close()

    def team_is(self, state: str) -> bool:
        groups = json.loads(self.kproxy.get("/api/groups"))
        return any(one["group"] == "team" and one["state"] == state for one in groups)

    def busy(self) -> None:
        """Does not poll for a while."""
        member = self.joined("busy")

        def settled() -> bool:
            member.poll(0.1)
            return bool(member.assignment()) and self.team_is("Stable")

        wait_for("an assignment", settled, 60, pause_s=0)
        began = time.monotonic()
        self.sleeps.set()
        wait_for("another that waits for it", lambda: self.team_is("PreparingRebalance"), 60)
        time.sleep(HELD_S)
        self.slept_s = time.monotonic() - began
        for _ in range(20):
            member.poll(0.1)
        member.close()

    def late(self) -> None:
        """Joins while another member does not poll."""
        self.sleeps.wait(60)
        self.member("late")


class Behaving(Client):
    """The same work done well."""

    def all(self) -> None:
        self.run(self.batching, self.patient, self.tidy, lambda: self.member("one"), lambda: self.member("other"))

    def batching(self) -> None:
        """Sends full, compressed batches, acknowledged by all replicas, with as many records as others send one by
        one."""
        producer = self.producer("batching", linger_ms=50, compression_type="zstd", acks="all")
        while self.goes_on():
            for number in range(400):
                producer.produce("full", TEXT, key=b"%d" % number)
            producer.poll(0)
            time.sleep(0.1)
        assert producer.flush(60) == 0

    def patient(self) -> None:
        """Waits for records that never arrive, with the default fetch wait."""
        consumer = self.consumer("patient", "still")
        while self.goes_on():
            consumer.poll(0.5)
        consumer.close()

    def tidy(self) -> None:
        """Ends each transaction."""
        producer = self.producer("tidy", transactional_id=self.transactional_id(), linger_ms=20)
        producer.init_transactions(60)
        while self.goes_on():
            producer.begin_transaction()
            for number in range(20):
                producer.produce("ended", b"x%d" % number, partition=0)
            producer.commit_transaction(60)
            time.sleep(0.3)

    def transactional_id(self) -> str:
        """An id whose coordinator is not the slow broker: leaders verify a transaction with it before they append to
        it.

        The coordinator is the leader of the partition given by the id's hash, as Java computes it
        (TransactionStateManager).
        """
        log = "__transaction_state"
        partitions = AdminClient({"bootstrap.servers": self.kproxy.bootstrap}).list_topics(log).topics[log].partitions
        for number in range(100):
            name = f"tidy-{number}"
            hashed = 0
            for letter in name.encode():
                hashed = (31 * hashed + letter) & 0xFFFFFFFF
            hashed -= (hashed >> 31) << 32  # as a Java int
            if partitions[abs(hashed) % len(partitions)].leader != SLOW:
                return name
        raise AssertionError("the slow broker coordinates all transactions")

    def member(self, client_id: str) -> None:
        """Reads records and commits now and then."""
        member = self.consumer(client_id, group_id="crew", enable_auto_commit=True, auto_commit_interval_ms=1000)
        member.subscribe(["full"])
        while self.goes_on():
            member.consume(500, 0.2)
        member.close()


class Run(NamedTuple):
    """The findings in the tables that kproxy recorded, and its findings while it ran."""

    recorded: dict[tuple[str, str], Finding]
    live: list[dict[str, Any]]
    slept_s: float = 0.0  # of the member that others wait for


def forget(cluster: Cluster, names: Set[str]) -> None:
    """Remove what a failed run left: its open transaction and its topics."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    there = names & admin.list_topics(timeout=60).topics.keys()
    if not there:
        return
    Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": DANGLING}).init_transactions(60)  # aborts it
    for deleted in admin.delete_topics(list(there)).values():
        deleted.result(60)
    wait_for("the topics to be gone", lambda: not names & admin.list_topics(timeout=60).topics.keys())


def warm_up(cluster: Cluster) -> None:
    """Make the brokers create their internal topics for groups and transactions, which takes seconds the first time."""
    common = {"bootstrap.servers": cluster.bootstrap}
    Producer(common | {"transactional.id": "first"}).init_transactions(60)
    first = Consumer(common | {"group.id": "first"})
    first.commit(offsets=[TopicPartition("quiet", 0, 0)], asynchronous=False)
    first.close()


@pytest.fixture(scope="module")
def runs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Findings about the provoking clients and about the well-behaved ones; both run at the same time."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    topics = [NewTopic(name, len(led), replica_assignment=[[one] for one in led]) for name, led in (BAD | GOOD).items()]
    forget(cluster, {*BAD, *GOOD, "weak"})
    for made in admin.create_topics([*topics, NewTopic("weak", 1, replica_assignment=[[1, 2, 3]])]).values():
        made.result(60)
    filling = Producer({"bootstrap.servers": cluster.bootstrap, "linger.ms": 50})
    for number in range(FILLED):
        filling.produce("filled", b"%d" % number, partition=0)
    for number in range(30):
        filling.produce("team", b"%d" % number, partition=number % 3)
    assert filling.flush(60) == 0
    warm_up(cluster)
    proxies = []
    for name in ("provoking", "behaving"):
        folder = tmp_path_factory.mktemp(name)
        proxies.append(Kproxy(cluster.bootstrap, folder, "--detail", "batches", "--record", str(folder / "tables")))
    with proxies[0], proxies[1]:
        provoking, behaving = Provoking(proxies[0], cluster.brokers[SLOW - 1]), Behaving(proxies[1])
        with ThreadPoolExecutor(2) as pool:
            for job in [pool.submit(provoking.all), pool.submit(behaving.all)]:
                job.result()
        live = [json.loads(proxy.get(f"/api/findings?{urlencode(THRESHOLDS)}"))["findings"] for proxy in proxies]
    found = []
    for proxy, live_findings, slept_s in zip(proxies, live, (provoking.slept_s, 0.0), strict=True):
        with Tables(proxy.log.parent / "tables") as tables:
            roots = findings(tables, limits(THRESHOLDS))
            by_kind = {(one.kind, one.where): one for root in roots for one in (root, *root.consequences)}
            found.append(Run(by_kind, live_findings, slept_s))
    return found[0], found[1]


@pytest.fixture(scope="module")
def provoked(runs: tuple[Run, Run]) -> dict[tuple[str, str], Finding]:
    return runs[0].recorded


def brokers(found: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The findings without the ports of brokers, which differ in each run."""
    return {(kind, re.sub(r" \(127\.0\.1\.\d:\d+\)$", "", where)) for kind, where in found}


def test_each_client_has_exactly_the_findings_that_it_provokes(provoked: dict[tuple[str, str], Finding]) -> None:
    assert brokers(provoked) == {
        ("single_record_batches", "client single, topic drops"),
        ("no_compression", "client plain, topic uneven"),
        ("hot_partition", "topic uneven, partition 0"),
        ("hot_broker", "broker 1"),
        ("slow_broker", "broker 3"),
        ("weak_acks", "client careless, topic weak"),
        ("weak_acks", "client hasty, topic weak"),
        ("unanswered", "client retrying, broker 3"),  # the cause of the next
        ("resent_not_idempotent", "client retrying, topic again"),
        ("empty_fetches", "client eager"),
        ("tiny_fetches", "client nibbling"),
        ("commit_storm", "group of-anxious"),
        ("growing_lag", "client slow, topic stream"),
        ("open_transaction", f"transactional id {DANGLING}, client dangling"),
        ("stuck_stable_offset", "topic held, partition 0"),
        ("connection_churn", "client flighty"),
        ("straggler", "group team, client busy"),
    }


def test_the_evidence_has_the_numbers_of_the_scene(
    runs: tuple[Run, Run], provoked: dict[tuple[str, str], Finding]
) -> None:
    of = {(kind, where.partition(" (")[0]): dict(one.evidence) for (kind, where), one in provoked.items()}
    exact = {
        ("single_record_batches", "client single, topic drops"): {
            "batches": SINGLES,
            "single_share": 1.0,
            "records_per_batch": 1.0,
            "connections": 1,
        },
        ("hot_partition", "topic uneven, partition 0"): {"share": 1.0, "times_even": 4.0, "partitions": 4, "idle": 3},
        ("hot_broker", "broker 1"): {"brokers": 3},
        ("weak_acks", "client careless, topic weak"): {"acks": 0, "requests": ACKED, "replicas": 3},
        ("weak_acks", "client hasty, topic weak"): {"acks": 1, "requests": ACKED, "replicas": 3},
        ("empty_fetches", "client eager"): {"max_wait_ms": 1},
        ("straggler", "group team, client busy"): {"rebalances": 1},
    }
    for key, numbers in exact.items():
        assert numbers.items() <= of[key].items(), key
    plain = of["no_compression", "client plain, topic uneven"]
    assert 1 < plain["plain_bytes"] / (PLAIN * len(TEXT) * 100) < 1.02
    assert of["hot_partition", "topic uneven, partition 0"]["bytes"] == plain["plain_bytes"]
    slow = of["slow_broker", "broker 3"]
    assert slow["p99_ns"] / 1e9 > 0.6 * PAUSE_S and slow["others_p99_ns"] < slow["p99_ns"] / 3
    assert of["resent_not_idempotent", "client retrying, topic again"]["resent"] >= 3
    lag = of["growing_lag", "client slow, topic stream"]
    assert lag["last_lag_records"] > 1000 and lag["span_ns"] > 10e9
    assert of["open_transaction", f"transactional id {DANGLING}, client dangling"]["open_ns"] > SPAN_S * 1e9
    stuck = of["stuck_stable_offset", "topic held, partition 0"]
    assert stuck["last_stable_offset"] == 0 and stuck["stuck_ns"] > 10e9 and stuck["behind_records"] > 20
    assert of["connection_churn", "client flighty"]["connections"] >= FLIGHTS
    # some commits reach no coordinator
    assert FILLED <= of["commit_storm", "group of-anxious"]["commits"] <= FILLED + 5
    waited = of["straggler", "group team, client busy"]
    assert HELD_S < waited["longest_ns"] / 1e9 < runs[0].slept_s + 1


def test_well_behaved_clients_have_no_findings(runs: tuple[Run, Run]) -> None:
    assert runs[1].recorded == {}
    assert [one for one in runs[1].live if one["kind"] != "core_full"] == []  # core_full is about the machine


def test_the_running_kproxy_has_the_same_findings(runs: tuple[Run, Run]) -> None:
    """As far as metrics know: topics and brokers, no clients; lag from the second minute on."""
    # core_full explains some of the others
    every = [one for root in runs[0].live for one in (root, *root["consequences"])]
    live = {(one["kind"], one["where"]): one["evidence"] for one in every if one["kind"] != "core_full"}
    # its rate covers all connections, so it exceeds the threshold only now and then
    live.pop(("single_record_batches", "topic drops"), None)
    live.pop(("unanswered", "all clients"), None)  # of connections that the test closed
    assert set(live) == {
        ("no_compression", "topic uneven"),
        ("hot_broker", "broker 1"),
        ("slow_broker", "broker 3"),
        ("connection_churn", "all clients"),
    }
    recorded = dict(runs[0].recorded["no_compression", "client plain, topic uneven"].evidence)
    same = ("plain_bytes", "batches", "bytes_per_batch")
    assert [live["no_compression", "topic uneven"][name] for name in same] == [recorded[name] for name in same]
    assert live["slow_broker", "broker 3"]["p99_ns"] > 0.6 * PAUSE_S * 1e9


# --- a network that loses packets -------------------------------------------------------------------------------------

WRITER = """
import base64, os, sys
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
bootstrap, topic, client_id = sys.argv[1:]
admin = AdminClient({"bootstrap.servers": bootstrap})
admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(60)
settings = {"linger.ms": 5, "compression.type": "zstd", "client.id": client_id}
producer = Producer({"bootstrap.servers": bootstrap} | settings)
for _ in range(500):
    producer.produce(topic, base64.b64encode(os.urandom(7500)))
    producer.poll(0)
assert producer.flush(60) == 0
"""
READER = """
import sys
from kafka import KafkaConsumer, TopicPartition
bootstrap, topic, client_id = sys.argv[1:]
consumer = KafkaConsumer(bootstrap_servers=bootstrap, client_id=client_id)
consumer.assign([TopicPartition(topic, 0)])
consumer.seek(TopicPartition(topic, 0), 0)
missing = 500
while missing > 0:
    missing -= sum(map(len, consumer.poll(1000).values()))
consumer.close()
"""
# One response of 1 MB or more for a receive buffer of 16 KiB, which is not read until it has been full for a while.
# Real clients do not fit: their threads read while the application sleeps.
SLOW_READER = """
import socket, sys, time
from kproxy.protocol import codec
bootstrap, topic, client_id = sys.argv[1:]
host, _, port = bootstrap.rpartition(":")
places = [{"partition": 0, "fetchOffset": 0, "partitionMaxBytes": 1 << 20}]
body = {"replicaId": -1, "maxWaitMs": 500, "minBytes": 1, "maxBytes": 1 << 20, "isolationLevel": 0}
request = codec.framed_request(1, 4, 1, client_id, body | {"topics": [{"topic": topic, "partitions": places}]})
with socket.socket() as client:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    client.connect((host, int(port)))
    client.sendall(request)
    missing = 4 + int.from_bytes(client.recv(4, socket.MSG_PEEK | socket.MSG_WAITALL))
    assert missing > 900_000
    while missing > 0:
        time.sleep(0.1)
        part = client.recv(1 << 20)
        missing -= len(part)
        assert part
"""


def resent(namespace: Namespace) -> int:
    """The number of segments that the kernel of a namespace has retransmitted so far."""
    names, values = (line.split() for line in namespace.run("grep", "^Tcp:", "/proc/net/snmp").stdout.splitlines())
    return int(values[names.index("RetransSegs")])


@contextmanager
def captured(namespace: Namespace, device: str, path: Path, *filter_: str) -> Iterator[None]:
    """Capture the Kafka packets of a device into a file."""
    tcpdump = namespace.start(
        *("tcpdump", "-i", device, "-s", "0", "-B", "65536", "-U", "-w", path, "port", "9092", *filter_),
        stderr=subprocess.PIPE,
    )
    assert tcpdump.stderr is not None and "listening" in tcpdump.stderr.readline()
    yield
    time.sleep(0.2)
    tcpdump.terminate()
    tcpdump.wait(20)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_lost_segments_and_closed_windows_are_attributed_to_their_host(apart: Apart, tmp_path: Path) -> None:
    """Two hosts do the same before one broker; the path of one of them loses packets, and it reads slowly."""
    client, gateway, bootstrap = apart.client, apart.gateway, apart.bootstrap
    client.run("ip", "link", "set", "dev", "uplink", "gso_max_segs", "1")  # packets of one segment, as on a wire
    lossy, whole = tmp_path / "lossy.pcap", tmp_path / "whole.pcap"
    with captured(gateway, "net1", lossy), captured(gateway, "net2", whole, "and", "host", "10.91.2.254"):
        gateway.run(sys.executable, "-c", WRITER, bootstrap, "kept", "calm")
        gateway.run(sys.executable, "-c", READER, bootstrap, "kept", "calm")
        before = resent(client) + resent(apart.server)
        rules = "add table ip lossy; add chain ip lossy passing { type filter hook forward priority 0; }; "
        rules += "add rule ip lossy passing ip saddr 10.91.1.9 tcp dport 9092 numgen random mod 100 < 6 drop"
        gateway.run("nft", rules)
        client.run(sys.executable, "-c", WRITER, bootstrap, "lost", "unlucky")
        gateway.run("nft", "delete table ip lossy")
        client.run(sys.executable, "-c", SLOW_READER, bootstrap, "lost", "sluggish")
        sent_again = resent(client) + resent(apart.server) - before
    convert([lossy, whole], tmp_path / "tables")
    with Tables(tmp_path / "tables") as tables:
        found = {(one.kind, one.where): one for one in findings(tables, kinds=("retransmissions", "zero_windows"))}
        rows = tables["connections"].arrow().to_pylist()
        # [waits for the broker, waits for the reader] in ns
        waits: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        for row in tables["exchanges"].arrow().to_pylist():
            waits[row["source"], row["connection"]][0] += (row["queue_ns"] or 0) + (row["muted_ns"] or 0)
            waits[row["source"], row["connection"]][1] += row["closed_window_ns"] or 0
        all_shut, readers = defaultdict(int), defaultdict(int)  # closed windows by host
        for row in rows:
            all_shut[row["client_address"]] += row["zero_windows"] or 0
            behind_ns, reader_ns = waits[row["source"], row["connection"]]
            if behind_ns <= UNREAD * reader_ns:
                readers[row["client_address"]] += row["zero_windows"] or 0
        assert all_shut == {"10.91.1.9": closed(lossy), "10.91.2.254": closed(whole)}
        assert not {"gap", "kernel_drops"} & {row["kind"] for row in tables["quality"].arrow().to_pylist()}
    bad, good = (f"{host} and {bootstrap}" for host in ("10.91.1.9", "10.91.2.254"))
    resends, shut = found.pop(("retransmissions", bad)), found.pop(("zero_windows", bad))
    # The kernels of both ends count their retransmissions: lost segments, and the broker's segments into windows that
    # stay closed. The SYN and FIN of the four connections are among them.
    assert 50 < dict(resends.evidence)["retransmissions"] <= sent_again <= dict(resends.evidence)["retransmissions"] + 4
    assert 0.01 < dict(resends.evidence)["segment_share"] < 0.1 and resends.severity == "warning"
    assert dict(shut.evidence)["zero_windows"] == closed(lossy)
    # On a machine short of CPU, even good readers close their windows; connections whose requests waited for the broker
    # do not count as slow readers.
    for (kind, where), one in found.items():
        assert (kind, where, dict(one.evidence)["zero_windows"]) == ("zero_windows", good, readers["10.91.2.254"])


def closed(capture: Path) -> int:
    """How often an end of a connection closed its window, according to tshark."""
    fields = ("tcp.stream", "ip.src", "tcp.window_size_value", "tcp.flags.reset")
    command = ["tshark", "-r", str(capture), "-T", "fields", *(word for field in fields for word in ("-e", field))]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    count, shut = 0, set()
    for stream, source, window, reset in (line.split("\t") for line in text.splitlines()):
        if reset in ("1", "True"):
            continue
        if window != "0":
            shut.discard((stream, source))
        elif (stream, source) not in shut:
            shut.add((stream, source))
            count += 1
    return count

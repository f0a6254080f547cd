"""The lag that kproxy reports equals that of `kafka-consumer-groups --describe --all-groups` at the same moment.

One scene runs before real brokers: clients of three libraries consume, stop, hang, fall behind, read from followers,
commit in transactions, and have commits refused in part; groups, offsets and topics change where kproxy does not see
it. It runs through a gateway with two workers that serves all clients, then through three sidecars, one per broker,
which Prometheus joins by the rules of `dashboards/`. At each moment, when nothing moves, every partition of every group
agrees, and so do the sums.

Meanwhile the traffic between the brokers and their clients is captured. At the end `kproxy analyze group-lag` and `lag`
report from the capture what the tool reports: from all exchanges, and without the lag requests of kproxy and of the
tool.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kafka import KafkaConsumer
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as Partition
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

from kproxy.analysis import engine, jobs
from kproxy.analysis.duck import Tables
from kproxy.analysis.lags import TABLES as OF_LAG
from kproxy.convert.processes import convert
from kproxy.spark import table
from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import Kproxy
from tests.broker.test_outages import leaders_spread
from tests.broker.tools import (
    CONSUMER,
    GROUPS,
    SHARE_CONSUMER,
    SHARE_GROUPS,
    TOPICS,
    as_root,
    create_share_group,
    create_topic,
    delete_topic,
    members,
    tcpdump,
)
from tests.ports import free_ports
from tests.prometheus import Prometheus

SETTINGS = """
workers = {workers}
[[cluster]]
detail = "topics"
{route}
[cluster.lag]
ask_interval_s = 0.5
"""

RULES = ("records:sum", "unknown_partitions:count")

Lags = dict[tuple[str, str, int], tuple[int, int]]  # (group, topic, partition) -> committed offset, end of the log

# A consumer in its own process, which commits what it is asked to and then stops polling.
COMMITS_ONCE = """
import sys, time
from confluent_kafka import Consumer
bootstrap, group, topic = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "client.id": group,
    "auto.offset.reset": "earliest", "enable.auto.commit": False, "session.timeout.ms": 300000})
consumer.subscribe([topic])
while (message := consumer.poll(1)) is None or message.error():
    pass
consumer.commit(message, asynchronous=False)
print("committed", flush=True)
time.sleep(3600)
"""
TOO_LARGE = "m" * 5000  # as the metadata of an offset: brokers accept 4096 bytes


class Scene:
    """Clients that connect through one or several kproxies, and changes made directly at the cluster."""

    def __init__(
        self, cluster: Cluster, bootstrap: str, kproxies: list[Kproxy], prometheus: Prometheus | None = None
    ) -> None:
        self.cluster = cluster
        self.prometheus = prometheus  # scrapes all kproxies and evaluates the rules
        self.bootstrap = bootstrap
        self.kproxies = kproxies
        self.groups: set[str] = set()
        self.moments: list[tuple[str, int, Lags]] = []  # (name, end time in ns, lags that the tool reported)

    # --- the events of the scene --------------------------------------------------------------------------------------

    def group(self, name: str) -> str:
        group = f"{name}-{uuid.uuid4().hex[:8]}"
        self.groups.add(group)
        return group

    def produce(self, topic: str, records: int, *, to: str | None = None) -> None:
        """Produce `records` records to each of the topic's three partitions; `to` bypasses kproxy."""
        producer = Producer({"bootstrap.servers": to or self.bootstrap, "linger.ms": 5})
        for number in range(3 * records):
            producer.produce(topic, b"v" * 100, partition=number % 3)
        assert producer.flush(60) == 0

    @contextmanager
    def consumer(self, group: str, topic: str, **settings: Any) -> Iterator[Consumer]:
        """A librdkafka consumer without automatic commits."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": group,
                "client.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        )
        consumer.subscribe([topic])
        try:
            yield consumer
        finally:
            consumer.close()

    @contextmanager
    def hanging(self, group: str, topic: str) -> Iterator[None]:
        """A consumer that has committed and is then stopped by SIGSTOP: its connections and its membership stay."""
        command = [sys.executable, "-c", COMMITS_ONCE, self.bootstrap, group, topic]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == b"committed\n"
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                yield
            finally:
                process.kill()

    def consume(self, group: str, topic: str, records: int, **settings: Any) -> None:
        """Consume that many records and commit them; the consumer leaves."""
        with self.consumer(group, topic, **settings) as consumer:
            committed(consumer, read(consumer, records))

    # --- lag as reported ----------------------------------------------------------------------------------------------

    def described(self) -> Lags:
        """The lags of this scene's groups by Kafka's own tool.

        It does not describe all groups: groups of other tests may have offsets in topics that are deleted or have no
        leader. The tool waits a minute for those and then describes no group at all.
        """
        found: Lags = {}
        asks = "--bootstrap-server", self.cluster.bootstrap, "--timeout", "60000"  # its default timeout is 5 s
        there = self.groups & set(tool(GROUPS, *asks, "--list").split())
        if not there:
            return found
        text = tool(GROUPS, *asks, "--describe", *(part for group in sorted(there) for part in ("--group", group)))
        for line in text.splitlines():
            group, topic, partition, offset, end, *_ = [*line.split(), *"-----"]
            if group in self.groups and offset.isdigit():
                found[group, topic, int(partition)] = int(offset), int(end)
        return found

    def shown(self) -> tuple[Lags, dict[tuple[str, str], float], float]:
        """The lags by the kproxies together: per partition; the sums and the unknown ones by Prometheus' rules if it
        runs."""
        ends: dict[tuple[str, int], int] = {}
        offsets: dict[tuple[str, str, int], int] = {}
        sums: dict[tuple[str, str], float] = {}
        unknown = 0.0
        for kproxy in self.kproxies:
            for family in text_string_to_metric_families(kproxy.get("/metrics")):
                for name, labels, value, *_ in family.samples:
                    if name == "kproxy_log_end_offset":
                        log = labels["topic"], int(labels["partition"])
                        ends[log] = max(int(value), ends.get(log, 0))
                    elif labels.get("group") not in self.groups:
                        continue
                    elif name == "kproxy_group_committed_offset":
                        of = labels["group"], labels["topic"], int(labels["partition"])
                        offsets[of] = max(int(value), offsets.get(of, 0))
                    elif name == "kproxy_consumer_lag_records":
                        sums[labels["group"], labels["topic"]] = value
                    elif name == "kproxy_group_lag_unknown_partitions":
                        unknown += value
        if self.prometheus is not None:
            sums, missing = (self._recorded(f"cluster_group_topic:kproxy_group_lag_{name}") for name in RULES)
            unknown = sum(missing.values())
        return {of: (offset, ends.get(of[1:], -1)) for of, offset in offsets.items()}, sums, unknown

    def _recorded(self, rule: str) -> dict[tuple[str, str], float]:
        """The values that Prometheus recorded by a rule, by group and topic."""
        assert self.prometheus is not None
        return {
            (each["metric"]["group"], each["metric"]["topic"]): float(each["value"][1])
            for each in self.prometheus.query(rule)
            if each["metric"]["group"] in self.groups
        }

    def moment(self, name: str) -> None:
        """While nothing moves, both report the same lag for each partition and for each group in a topic."""
        expected: Lags = {}
        shown: Any = None

        def agrees() -> bool:
            nonlocal expected, shown
            expected, shown = self.described(), self.shown()  # while coordinators move, neither knows all groups
            sums: defaultdict[tuple[str, str], float] = defaultdict(float)
            for (group, topic, _), (offset, end) in expected.items():
                sums[group, topic] += end - offset
            return bool(expected) and shown == (expected, dict(sums), 0)

        try:
            wait_for(name, agrees, pause_s=0.2)
        except AssertionError as fault:
            raise AssertionError(f"{fault}\nKafka: {expected}\nkproxy: {shown}") from None
        self.moments.append((name, time.time_ns(), expected))


def read(consumer: Consumer, records: int) -> dict[tuple[str, int], int]:
    """Poll that many records; returns the offset after the last one of each partition."""
    offsets: dict[tuple[str, int], int] = {}
    missing = records

    def is_read() -> bool:
        nonlocal missing
        message = consumer.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            offsets[message.topic(), message.partition()] = message.offset() + 1
            missing -= 1
        return missing == 0

    wait_for(f"{records} records", is_read, pause_s=0)
    return offsets


def committed(consumer: Consumer, offsets: dict[tuple[str, int], int]) -> None:
    consumer.commit(
        offsets=[TopicPartition(topic, number, offset) for (topic, number), offset in offsets.items()],
        asynchronous=False,
    )


def play(scene: Scene) -> None:
    cluster = scene.cluster
    behind = cluster.bootstrap
    topic, group = create_topic(cluster.bootstrap), scene.group("stops")
    scene.produce(topic, 10)
    scene.consume(group, topic, 30)
    scene.moment("the group is at the end")
    scene.produce(topic, 20)
    scene.moment("its consumers have stopped, producers continue")
    scene.produce(topic, 10, to=behind)
    scene.moment("producers continue past kproxy")

    paused = scene.group("pauses")
    with scene.consumer(paused, topic) as consumer:
        offsets = read(consumer, 120)
        committed(consumer, offsets)
        consumer.pause([TopicPartition(topic, 0)])
        scene.produce(topic, 5)
        committed(consumer, read(consumer, 10))
        scene.moment("a partition is paused")

    slow = scene.group("prefetches")
    with scene.consumer(slow, topic, group_instance_id="static-1") as consumer:
        committed(consumer, read(consumer, 7))
        scene.moment("a consumer has fetched everything and committed little")
    scene.moment("a static member has stopped")

    hung = scene.group("hangs")
    with scene.hanging(hung, topic):
        scene.produce(topic, 5)
        assert sum(members(behind, hung).values()) == 3
        scene.moment("a consumer hangs and is still a member")

    near = scene.group("follows")
    # leads one of the three partitions
    with scene.consumer(near, topic, client_rack=cluster.brokers[1].rack) as consumer:
        committed(consumer, read(consumer, 150))
        scene.produce(topic, 2)
        committed(consumer, read(consumer, 5))
        scene.moment("a consumer reads from followers")

    refused_in_part(scene, topic)
    shared(scene, topic)

    simple = scene.group("assigns")
    assigned = KafkaConsumer(
        bootstrap_servers=scene.bootstrap,
        group_id=simple,
        client_id=simple,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    try:
        assigned.assign([Partition(topic, 1)])
        wait_for("a record", lambda: bool(assigned.poll(timeout_ms=500)))
        assigned.commit({Partition(topic, 1): OffsetAndMetadata(3, "", -1)})
        scene.moment("a consumer without a subscription commits in one partition")
    finally:
        assigned.close(autocommit=False)

    java = scene.group("java")
    consumed = ("--topic", topic, "--group", java, "--from-beginning", "--max-messages", "20")
    tool(CONSUMER, "--bootstrap-server", scene.bootstrap, *consumed)
    scene.moment("a Java consumer has stopped")

    new = scene.group("kip848")
    with scene.consumer(new, topic, group_protocol="consumer") as consumer:
        committed(consumer, read(consumer, 40))
        scene.moment("a consumer of the new protocol")

    transactions(scene, topic)

    reset = ("--reset-offsets", "--topic", topic, "--to-offset", "4", "--execute")
    tool(GROUPS, "--bootstrap-server", behind, "--group", group, *reset)
    scene.moment("offsets are reset past kproxy")
    tool(GROUPS, "--bootstrap-server", behind, "--group", group, "--delete-offsets", "--topic", f"{topic}:1")
    scene.moment("offsets of a partition are deleted past kproxy")
    tool(GROUPS, "--bootstrap-server", behind, "--group", java, "--delete")
    scene.moment("a group is deleted elsewhere")

    short = create_topic(cluster.bootstrap)
    again = scene.group("again")
    scene.produce(short, 20)
    scene.consume(again, short, 60)
    scene.moment("another topic")
    delete_topic(cluster.bootstrap, short)
    scene.moment("a topic is deleted")
    wait_for("the topic to be gone", lambda: short not in tool(TOPICS, "--bootstrap-server", behind, "--list").split())
    shape = ("--create", "--if-not-exists", "--topic", short, "--partitions", "3", "--replication-factor", "3")
    tool(TOPICS, "--bootstrap-server", behind, *shape)
    scene.produce(short, 5)
    scene.moment("it is created again")
    scene.consume(again, short, 9)
    scene.moment("and the group has committed in the new one")

    moved = cluster.brokers[1]
    moved.stop()
    try:
        scene.produce(topic, 3)
        scene.moment("a broker is gone, and what it led and coordinated is elsewhere")
    finally:
        moved.start()
        moved.wait_until_started()
    scene.produce(topic, 3)
    # Leaders and coordinators would also move back by themselves, but minutes later: in a test that counts on
    # connections.
    wait_for("every broker to lead again", lambda: leaders_spread(behind, topic))
    scene.moment("the broker is back, and leads and coordinates what it did")


def refused_in_part(scene: Scene, topic: str) -> None:
    """The broker refuses one partition of a commit because its metadata is too large, and one of an unknown topic."""
    group = scene.group("refused")
    with scene.consumer(group, topic) as consumer:
        read(consumer, 1)
        committed(consumer, {(topic, number): 2 for number in range(3)})
        wanted = [
            TopicPartition(topic, 0, 5, metadata=TOO_LARGE),
            *(TopicPartition(topic, number, 5 + number) for number in (1, 2)),
            TopicPartition(f"no-{topic}", 0, 7),
        ]
        with pytest.raises(KafkaException, match="OFFSET_METADATA_TOO_LARGE"):
            consumer.commit(offsets=wanted, asynchronous=False)
        scene.moment("a commit is refused in part")
        truth = scene.moments[-1][2]
        assert [truth[group, topic, number][0] for number in range(3)] == [2, 6, 7]


def shared(scene: Scene, topic: str) -> None:
    """A share group has no committed offset: neither the tool for consumer groups nor kproxy names it."""
    group = create_share_group(scene.cluster.bootstrap)
    scene.groups.add(group)
    consumed = ("--topic", topic, "--group", group, "--max-messages", "10", "--timeout-ms", "120000")
    tool(SHARE_CONSUMER, "--bootstrap-server", scene.bootstrap, *consumed)
    about = tool(SHARE_GROUPS, "--bootstrap-server", scene.cluster.bootstrap, "--describe", "--group", group)
    assert [line.split()[:2] for line in about.splitlines() if topic in line] == [[group, topic]] * 3
    scene.moment("a share group has consumed")


def transactions(scene: Scene, topic: str) -> None:
    """Offsets committed in transactions count once the transaction is committed."""
    group = scene.group("transactions")
    producer = Producer({"bootstrap.servers": scene.bootstrap, "client.id": group, "transactional.id": group})
    producer.init_transactions(60)
    with scene.consumer(group, topic, isolation_level="read_committed") as consumer:
        for name, ends in (("aborted", producer.abort_transaction), ("committed", producer.commit_transaction)):
            offsets = read(consumer, 10)
            producer.begin_transaction()
            of_partitions = [TopicPartition(topic, number, offset) for (_, number), offset in offsets.items()]
            producer.send_offsets_to_transaction(of_partitions, consumer.consumer_group_metadata(), 60)
            producer.produce(topic, b"in a transaction", partition=0)
            producer.flush(60)
            scene.moment(f"a transaction is open, to be {name}")
            ends(60)
            scene.moment(f"it is {name}")


# --- lag from a capture -----------------------------------------------------------------------------------------------


@contextmanager
def captured(cluster: Cluster, path: Path) -> Iterator[None]:
    """Capture all traffic between clients and brokers; capture nothing where capturing is not permitted."""
    try:
        as_root()
    except pytest.skip.Exception:
        yield
        return
    places = " or ".join(f"(host {broker.host} and port {broker.port})" for broker in cluster.brokers)
    with tcpdump(path, places):
        yield
        last = cluster.brokers[0]
        with socket.create_connection((last.host, last.port)) as sock:
            host, port = sock.getsockname()
            ends = socket.inet_aton(host) + socket.inet_aton(last.host) + struct.pack(">HH", port, last.port)
        wait_for("the last packet", lambda: ends in path.read_bytes())


def dicts(answer: Any) -> list[dict[str, Any]]:
    names = [column.name for column in engine.columns(answer)]
    return [dict(zip(names, row, strict=True)) for row in engine.rows(answer)]


# The partitions of a capture without the lag requests of kproxy and of the tool.
UNASKED = """
    select p.* from partitions p left join exchanges e
        on p.source = e.source and p.connection = e.connection and p.`number` = e.`number`
    where not (p.api in ('ListOffsets', 'OffsetFetch')
        and (e.client_id like 'kproxy%' or e.client_id like 'adminclient%'))"""


# The brokers from which the consumer that names a rack has read each partition.
READ_FROM = """
    select distinct p.`partition`, e.broker_id from partitions p join exchanges e
        on p.source = e.source and p.connection = e.connection and p.`number` = e.`number`
    where e.api = 'Fetch' and e.client_id like 'follows-%' and p.direction = 'response' and p.records > 0"""


def analyses(tables: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The answers of `group-lag` and `lag`."""
    inputs = [tables[name] for name in OF_LAG]
    return dicts(jobs.group_lag(*inputs)), dicts(jobs.lag(*inputs))


def agree(expected: Lags, groups: Collection[str], rows: list[dict[str, Any]]) -> None:
    """`group-lag` reports what the tool reports for each group and partition, or why the lag is unknown."""
    of = {(row["group_id"], row["topic"], row["partition"]): row for row in rows if row["group_id"] in groups}
    known = {place: row for place, row in of.items() if row["lag_records"] is not None}
    assert {place: (row["committed_offset"], row["end_offset"]) for place, row in known.items()} == {
        place: offsets for place, offsets in expected.items() if place in known or place not in of
    }
    assert all(row["lag_records"] == row["end_offset"] - row["committed_offset"] for row in known.values())
    assert all(row["unknown"] for place, row in of.items() if place not in known)


def agree_by_client(expected: Lags, by_group: list[dict[str, Any]], by_client: list[dict[str, Any]]) -> None:
    """`lag` reports the same by client: consumers use the name of their group as client id."""
    committers = {row["group_id"] for row in by_group if row["client"] == row["group_id"]}
    behind = {
        of: row["committed_lag_records"]
        for row in by_client
        if (of := (row["client"], row["topic"], row["partition"])) in expected and row["client"] in committers
    }
    assert behind == {of: expected[of][1] - expected[of][0] for of in behind} and {of[0] for of in behind} == committers


def until(tables: Mapping[str, Any], ns: int) -> dict[str, Any]:
    """The tables as they were at a moment."""
    condition = f"unix_micros(`time`) <= {ns // 1000}"
    return {
        name: engine.ask({name: rows}, cut=f"select * from {name} where {condition}") for name, rows in tables.items()
    }


def compared(scene: Scene, capture: Path, spark: SparkSession | None = None) -> None:
    """The analyses of the captured scene equal the tool's lags; with Spark at each moment too, and by both engines."""
    expected = scene.described()
    if not capture.exists():
        pytest.skip("the scene was played, but capturing packets needs root: no capture is compared")
    place = capture.with_suffix("")
    convert([capture], place)
    with Tables(place) as tables:
        frames = {name: tables[name] for name in OF_LAG}
        near = scene.cluster.brokers[1].node_id
        assert set(engine.rows(engine.ask(frames, answer=READ_FROM))) >= {(number, near) for number in range(3)}
        unasked = {**frames, "partitions": engine.ask(frames, unasked=UNASKED)}
        for inputs in (frames, unasked):
            by_group, by_client = analyses(inputs)
            agree(expected, scene.groups, by_group)
            assert not any(row["unknown"] for row in by_group if row["group_id"] in scene.groups)
            agree_by_client(expected, by_group, by_client)
        if spark is None:
            return
        for name, ns, expected in scene.moments:
            try:
                agree(expected, scene.groups, dicts(jobs.group_lag(*until(unasked, ns).values())))
            except AssertionError as fault:
                raise AssertionError(f"{name}: {fault}") from None
        theirs = {name: table(spark, str(place), name) for name in OF_LAG}
        assert analyses(theirs) == analyses(frames)


def test_lag_through_a_gateway(cluster: Cluster, tmp_path: Path) -> None:
    file, capture = tmp_path / "kproxy.toml", tmp_path / "scene.pcap"
    file.write_text(SETTINGS.format(workers=2, route=""))
    with captured(cluster, capture), Kproxy(cluster.bootstrap, tmp_path, "--config", str(file)) as kproxy:
        scene = Scene(cluster, kproxy.bootstrap, [kproxy])
        play(scene)
    compared(scene, capture)


@pytest.mark.ring2
def test_after_a_restart_heartbeats_make_groups_known_again(cluster: Cluster, tmp_path: Path) -> None:
    """Their members neither join nor commit: the connections are new, the members are not."""
    file = tmp_path / "kproxy.toml"
    file.write_text(SETTINGS.format(workers=2, route=""))
    with Kproxy(cluster.bootstrap, tmp_path, "--config", str(file)) as kproxy:
        scene = Scene(cluster, kproxy.bootstrap, [kproxy])
        topic = create_topic(cluster.bootstrap)
        groups = {scene.group("classic"): "classic", scene.group("kip848"): "consumer"}
        scene.produce(topic, 10)
        with ExitStack() as stack:
            for group, protocol in groups.items():
                consumer = stack.enter_context(scene.consumer(group, topic, group_protocol=protocol))
                committed(consumer, read(consumer, 30))
            scene.moment("two groups at the end")
            kproxy.stop()
            scene.produce(topic, 5, to=cluster.bootstrap)
            kproxy.start()
            scene.moment("kproxy is started again, while their members do nothing")
        assert {group for group, *_ in scene.moments[-1][2]} == set(groups)


@pytest.mark.ring2
@pytest.mark.timeout(900)  # longer than others on a busy machine: a Prometheus, a Spark and thirty moments
def test_lag_through_three_sidecars(cluster: Cluster, tmp_path: Path, spark: SparkSession) -> None:
    port = free_ports(1, "")
    file, capture = tmp_path / "kproxy.toml", tmp_path / "scene.pcap"
    file.write_text(SETTINGS.format(workers=1, route='route = "sidecar"'))
    with ExitStack() as stack:
        stack.enter_context(captured(cluster, capture))
        sidecars = []
        for broker in cluster.brokers:
            folder = tmp_path / str(broker.node_id)
            folder.mkdir()
            listen = f"{broker.host}:{port}"
            sidecar = Kproxy(broker.address, folder, "--config", str(file), "--listen", listen)
            sidecars.append(stack.enter_context(sidecar))
        targets = {f"sidecar-{number}": sidecar.admin for number, sidecar in enumerate(sidecars)}
        prometheus = stack.enter_context(Prometheus(tmp_path / "prometheus", targets))
        bootstrap = ",".join(f"{broker.host}:{port}" for broker in cluster.brokers)
        scene = Scene(cluster, bootstrap, sidecars, prometheus)
        play(scene)
    compared(scene, capture, spark)

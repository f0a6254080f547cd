"""`[[zookeeper]]` before a real ZooKeeper: a real client notices no difference, and kproxy decodes all its
operations."""

import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError
from kazoo.protocol.states import WatchedEvent
from prometheus_client.parser import text_string_to_metric_families

from tests.matrix.brokers import Node, Release
from tests.ports import free_ports
from tests.watch.live import why_not

HOST = "127.0.0.1"
RELEASE = Release("3.9 with ZooKeeper", "3.9.1", zookeeper=True)
NO_PROGRAM = 1  # a port without a listener


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def asked(port, command):
    """The reply to a four-letter command, as in `echo ruok | nc`."""
    import socket

    with socket.create_connection((HOST, port), timeout=10) as sock:
        sock.sendall(command)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(4096), b""))


def is_up(port):
    try:
        return asked(port, b"ruok") == b"imok"
    except OSError:
        return False


@pytest.fixture(scope="module")
def keeper(tmp_path_factory):
    """Start a ZooKeeper; returns its port."""
    folder = tmp_path_factory.mktemp("keeper")
    port = free_ports(1, HOST)
    settings = folder / "zoo.cfg"
    settings.write_text(
        f"dataDir={folder}/data\nclientPort={port}\nclientPortAddress={HOST}\ntickTime=500\nmaxSessionTimeout=60000\n"
        "admin.enableServer=false\nmaxClientCnxns=0\n4lw.commands.whitelist=*\n"
    )
    node = Node(RELEASE, folder / "node", "org.apache.zookeeper.server.ZooKeeperServerMain", str(settings))
    node.start()
    try:
        wait_until(lambda: node.check() or is_up(port))
        yield port
    finally:
        node.stop()


class Kproxy:
    """A kproxy process whose Kafka cluster does not exist."""

    def __init__(self, folder: Path, servers: list[str], workers: int = 1) -> None:
        self.folder = folder
        self.port, self.admin, cluster = (free_ports(1, HOST) for _ in range(3))
        settings = folder / "kproxy.toml"
        settings.write_text(
            f'workers = {workers}\nadmin = "{HOST}:{self.admin}"\nrecord = "{folder}/tables"\n'
            f'[[cluster]]\nlisten = "{HOST}:{cluster}"\nbootstrap = ["{HOST}:{NO_PROGRAM}"]\nbroker_port_base = 40000\n'
            f'[[zookeeper]]\nname = "old"\nlisten = "{HOST}:{self.port}"\nservers = {servers}\n'
        )
        self._log = (folder / "log").open("ab")
        self.command = [sys.executable, "-c", "from kproxy.cli import main; main()", "run", "--config", str(settings)]
        self._process = subprocess.Popen(self.command, stdout=self._log, stderr=self._log)

    def log(self):
        return (self.folder / "log").read_text()

    def stop(self):
        self._process.terminate()
        assert self._process.wait(30) == 0, self.log()
        self._log.close()

    def metrics(self):
        return metrics(self.admin)

    def rows(self, table):
        return rows_in(self.folder / "tables", table)


def metrics(admin):
    with urllib.request.urlopen(f"http://{HOST}:{admin}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for each in families if each.name.startswith("kproxy_zookeeper_") for sample in each.samples]
    found = {}
    for sample in samples:
        labels = [value for name, value in sorted(sample.labels.items()) if name != "cluster"]
        found[sample.name.removeprefix("kproxy_zookeeper_"), *labels] = sample.value
    return found


def rows_in(tables, table):
    files = sorted((tables / table).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


# Columns that a passive observer does not know or fills differently: connection, clock and names.
OBSERVER_COLUMNS = {"source", "cluster", "connection", "time", "time_ns", "latency_ns", "client_port", "server_port"}
OF_PACKETS = ("requests_total", "errors_total", "watches_fired_total", "unanswered_total", "latency_seconds_count")


def comparable(rows):
    return Counter(tuple((name, value) for name, value in row.items() if name not in OBSERVER_COLUMNS) for row in rows)


@pytest.fixture(params=[1])
def proxied(keeper, tmp_path, request):
    running = Kproxy(tmp_path, [f"{HOST}:{NO_PROGRAM}", f"{HOST}:{keeper}"], request.param)
    try:
        wait_until(lambda: is_up(running.port))
        yield running
    finally:
        if running._process.poll() is None:
            running._process.kill()
        running._process.wait()


def connected(port, **options):
    client = KazooClient(hosts=f"{HOST}:{port}", timeout=40, **options)
    client.start(timeout=30)
    return client


def dialogue(client, base, large=100_000):
    """Run all kinds of operations; returns what the client saw."""
    seen, fired = [], []
    client.ensure_path(base)
    seen.append(client.create(f"{base}/a", b"one", ephemeral=True))
    seen.append(client.get(f"{base}/a", watch=lambda event: fired.append(event))[0])
    seen.append(client.create(f"{base}/s-", b"", sequence=True))
    seen.append(sorted(client.get_children(base, watch=lambda event: fired.append(event))))
    seen.append(client.set(f"{base}/a", b"two" * large).version)
    seen.append(client.get(f"{base}/a")[0])
    try:
        client.create(f"{base}/a", b"")
    except NodeExistsError:
        seen.append("exists")
    transaction = client.transaction()
    transaction.create(f"{base}/m", b"multi")
    transaction.check(f"{base}/a", version=1)
    transaction.delete(f"{base}/m")
    seen.append(transaction.commit())
    transaction = client.transaction()
    transaction.check(f"{base}/a", version=77)
    transaction.create(f"{base}/never", b"")
    seen.append([type(each).__name__ for each in transaction.commit()])
    seen.append(client.exists(f"{base}/never"))
    client.add_auth("digest", "alice:geheim")
    wait_until(lambda: len(fired) == 2)
    seen.append(sorted((event.type, event.path) for event in fired))
    assert all(isinstance(event, WatchedEvent) for event in fired)
    return seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize("proxied", [1, 2], indirect=True, ids=["process", "workers"])
def test_a_dialogue_through_kproxy_is_unchanged_and_fully_decoded(keeper, proxied):
    through, direct = connected(proxied.port), connected(keeper)
    session = through.client_id[0]
    one, other = dialogue(through, "/through"), dialogue(direct, "/direct")
    assert str(one).replace("/through", "/direct") == str(other)
    direct.stop()
    values = proxied.metrics()
    assert values["requests_total", "multi"] == 2
    assert values["errors_total", "NODEEXISTS", "create"] == 1
    assert values["watches_fired_total", "NodeDataChanged"] == values["watches_fired_total", "NodeChildrenChanged"] == 1
    assert values["sessions",] == values["open_connections",] == 1
    assert values["bytes_total", "request"] > 300_000 < values["bytes_total", "response"]
    assert values["latency_seconds_count", "getData"] == 2
    assert values["unread_connections_total", "fault"] == 0 < values["unread_connections_total", "command"]
    assert values["dial_failures_total", f"{HOST}:{NO_PROGRAM}"] == 1  # the server that was asked last
    kproxy = Path(sys.executable).with_name("kproxy")
    command = [kproxy, "ctl", "-a", f"{HOST}:{proxied.admin}", "connections", "--zookeeper", "--json"]
    (row,) = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert (row["cluster"], row["server"]) == ("old", f"{HOST}:{keeper}")
    assert row["session"] == f"0x{session & (1 << 64) - 1:x}" and row["operations"] > 10 and row["is_read"]
    assert row["session"] in subprocess.run(command[:-1], check=True, capture_output=True, text=True).stdout
    through.stop()
    proxied.stop()
    rows = proxied.rows("registry")
    assert {row["session"] for row in rows} == {f"0x{session & (1 << 64) - 1:x}"}
    ops = Counter(row["op"] for row in rows)
    assert ops["getData"] == 2
    assert {"connect", "create", "setData", "check", "delete", "auth", "notification", "closeSession"} <= ops.keys()
    (created,) = [row for row in rows if row["path"] == "/through/a" and row["op"] == "create" and not row["error"]]
    assert (created["ephemeral"], created["value"], created["server_port"]) == (True, "one", keeper)
    assert "geheim" not in str(rows) + proxied.log()


@pytest.mark.ring2
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_watching_kproxy_reports_the_same_as_a_proxying_one(keeper, proxied, tmp_path):
    """One watch observes the client's connection and another kproxy's connection to the server: all three record the
    same registry."""
    watches = []
    for number, port in enumerate((proxied.port, keeper)):
        admin = free_ports(1, HOST)
        folder = tmp_path / f"watch-{number}"
        folder.mkdir()
        options = ("--zookeeper-port", str(port), "--admin", str(admin), "--record", str(folder / "tables"))
        with (folder / "log").open("wb") as log:
            command = (*proxied.command[:3], "watch", "--interface", "lo", *options)
            process = subprocess.Popen(command, stdout=log, stderr=log)
        watches.append((admin, folder, process))
    try:
        for _, folder, _ in watches:
            wait_until(lambda folder=folder: "admin at" in (folder / "log").read_text())
        client = connected(proxied.port)
        dialogue(client, "/watched", 1000)  # a proxying kproxy keeps less of larger values
        client.stop()

        def counted(admin):
            values = metrics(admin)
            return {key: value for key, value in values.items() if key[0] in OF_PACKETS and value}

        wait_until(lambda: counted(proxied.admin)["requests_total", "closeSession"] == 1)
        for admin, _, _ in watches:
            wait_until(lambda admin=admin: counted(admin).get(("requests_total", "closeSession")) == 1)
            assert counted(admin) == counted(proxied.admin)
            assert ("sessions",) not in metrics(admin)  # only the proxying kproxy knows all sessions
    finally:
        for _, folder, process in watches:
            process.terminate()
            assert process.wait(30) == 0, (folder / "log").read_text()
    proxied.stop()
    between = comparable(proxied.rows("registry"))
    assert between.total() > 15
    for _, folder, _ in watches:
        assert comparable(rows_in(folder / "tables", "registry")) == between


@pytest.mark.ring2
def test_a_session_survives_a_restart_of_kproxy(keeper, proxied, tmp_path):
    """The client resumes its session, and its ephemeral node still exists."""
    client = connected(proxied.port)
    before = client.client_id
    client.create("/survivor", b"", ephemeral=True, makepath=True)
    listen = (proxied.folder / "kproxy.toml").read_text()
    proxied.stop()
    again = tmp_path / "again"
    again.mkdir()
    (again / "kproxy.toml").write_text(listen.replace(f"{proxied.folder}/tables", f"{again}/tables"))
    log = (again / "log").open("ab")
    command = [sys.executable, "-c", "from kproxy.cli import main; main()", "run", "--config", f"{again}/kproxy.toml"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        assert client.retry(client.get, "/survivor")[1].ephemeralOwner == before[0]
        assert client.client_id == before
        client.stop()
    finally:
        process.terminate()
        process.wait(30)
        log.close()


@pytest.mark.ring2
def test_bytes_that_are_not_frames_are_forwarded_and_reported(keeper, proxied):
    assert asked(proxied.port, b"srvr").startswith(b"Zookeeper version")
    assert asked(proxied.port, b"\x7f\xff\xff\xff" + b"noise" * 1000) == b""  # ZooKeeper closes the connection
    client = connected(proxied.port)
    assert client.exists("/nothing") is None
    client.stop()
    assert proxied.metrics()["unread_connections_total", "fault"] == 1
    assert "no longer read: a frame of 2147483647 bytes" in proxied.log()


@pytest.mark.ring2
def test_a_kafka_that_reaches_zookeeper_only_through_kproxy_works_and_is_decoded(keeper, proxied, tmp_path):
    """Registration, election and topics go through kproxy; when kproxy stops and starts again, the session
    continues."""
    port = free_ports(1, HOST)
    settings = tmp_path / "server.properties"
    settings.write_text(
        f"broker.id=7\nlisteners=PLAINTEXT://{HOST}:{port}\nlog.dirs={tmp_path}/kafka\n"
        f"zookeeper.connect={HOST}:{proxied.port}/kafka\nzookeeper.session.timeout.ms=30000\n"
        "offsets.topic.replication.factor=1\nauto.create.topics.enable=false\n"
    )
    node = Node(RELEASE, tmp_path / "broker", "kafka.Kafka", str(settings))
    node.start()
    admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0})

    def leaders():
        node.check()
        topics = admin.list_topics(timeout=5).topics
        return {name: [part.leader for part in topic.partitions.values()] for name, topic in topics.items()}

    def is_there():
        try:
            return leaders() is not None
        except KafkaException:
            return False

    again = None
    try:
        wait_until(is_there, 120)
        admin.create_topics([NewTopic("t", 2, 1)])["t"].result(30)
        wait_until(lambda: leaders().get("t") == [7, 7])
        values = proxied.metrics()
        assert values["sessions",] == 1 and values["unread_connections_total", "fault"] == 0
        assert values["requests_total", "multi"] > 0 and values["watches_fired_total", "NodeChildrenChanged"] > 0
        proxied.stop()
        again = subprocess.Popen(proxied.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        admin.create_topics([NewTopic("later", 1, 1)])["later"].result(60)
        wait_until(lambda: leaders().get("later") == [7])
        assert proxied.metrics()["sessions",] == 1
    finally:
        node.stop()
        if again is not None:
            again.terminate()
            again.wait(30)
    rows = proxied.rows("registry")
    made = {row["path"]: row for row in rows if row["op"].startswith("create") and row["error"] is None}
    assert made["/kafka/brokers/ids/7"]["ephemeral"]  # empty: a later operation of the same transaction writes it
    (written,) = [row for row in rows if row["path"] == "/kafka/brokers/ids/7" and row["op"] == "setData"]
    assert str(port) in written["value"] and written["number"] == made["/kafka/brokers/ids/7"]["number"]
    assert made["/kafka/controller"]["kind"] == "controller" and made["/kafka/controller"]["ephemeral"]
    states = [f"/kafka/brokers/topics/{at}/state" for at in ("t/partitions/0", "t/partitions/1", "later/partitions/0")]
    assert {made[path]["kind"] for path in states} == {"partition_state"}
    assert len({row["session"] for row in rows if row["path"] in (*states, "/kafka/controller")}) == 1
    registered = [row for row in rows if row["path"] == "/kafka/brokers/ids/7" and row["op"].startswith("create")]
    assert len(registered) == 1  # its session never expired

"""A real cluster with members of real groups, recorded: traffic by tcpdump, what its brokers say by their own logs.

A run is a folder: `traffic.pcap` (clients, brokers and controllers among themselves), `broker-N/knowledge.log`,
`events.jsonl` (what was done), `members.jsonl` (what members saw), `asked.jsonl` (what Kafka's own tools answered, and
from when to when they looked). The tools ask on a listener of their own, which is not recorded. All that is read
afterwards is the folder: `truth.py`, `routes.py`.
"""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import JARS, SMALL_JVM, Tools
from tests.broker.kproxy import Kproxy
from tests.knowledge import traffic
from tests.matrix import setup
from tests.ports import free_ports

HERE = Path(__file__).parent
GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
SHARE_GROUPS = "org.apache.kafka.tools.consumer.group.ShareGroupCommand"
TOPICS = "org.apache.kafka.tools.TopicCommand"
QUORUM = "org.apache.kafka.tools.MetadataQuorumCommand"
ELECTION = "org.apache.kafka.tools.LeaderElectionCommand"
STREAMS_GROUPS = "org.apache.kafka.tools.streams.StreamsGroupCommand"
FEATURES = "org.apache.kafka.tools.FeatureCommand"
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"

WORKER = """\
bootstrap.servers={bootstrap}
group.id={group}
client.id={name}
listeners=http://127.0.0.1:{port}
key.converter=org.apache.kafka.connect.json.JsonConverter
value.converter=org.apache.kafka.connect.json.JsonConverter
offset.storage.topic={group}-offsets
offset.storage.partitions=1
config.storage.topic={group}-configs
status.storage.topic={group}-status
status.storage.partitions=1
session.timeout.ms=6000
heartbeat.interval.ms=1000
scheduled.rebalance.max.delay.ms=1500
connect.protocol={protocol}
"""

LISTENERS = {"CLIENT": "PLAINTEXT", "TRUTH": "PLAINTEXT"}
SETTINGS = {
    "sasl.enabled.mechanisms": "PLAIN",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.assignors": "uniform,range",
    # Sessions that end while a scenario waits for it.
    **{
        f"group.{kind}.{name}": value
        for kind in ("consumer", "share", "streams")
        for name, value in (
            ("min.session.timeout.ms", "3000"),
            ("session.timeout.ms", "6000"),
            ("min.heartbeat.interval.ms", "1000"),
            ("heartbeat.interval.ms", "1000"),
        )
    },
    "unstable.feature.versions.enable": "true",
    "unstable.api.versions.enable": "true",  # KIP-1071, which 4.1 has for those who want to try it
    "group.coordinator.rebalance.protocols": "classic,consumer,share,streams",
    # Leaders stay where a scenario has put them.
    "auto.leader.rebalance.enable": "false",
}


class ProcessEnded(AssertionError):
    """A child has ended that nobody has told to: which one, how, and its last words."""


class Process:
    """A child that takes lines and gives lines, each of which a thread hands on.

    Its name is that of `errors`, the file of its stderr.
    """

    def __init__(self, command: list[str], errors: Path, heard: Callable[[str], None], **options: Any) -> None:
        self._errors = errors
        self._may_end = False
        with errors.open("ab") as stderr:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1, **options
            )
        self._heard = heard
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._heard(line)

    def tell(self, line: str, *, last: bool = False) -> None:
        """last: it ends by this line."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(line + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            self.popen.wait(10)
        self.check()
        self._may_end = last

    def check(self) -> None:
        """ProcessEnded if it has ended by itself."""
        if self._may_end or self.popen.poll() is None:
            return
        words = self._errors.read_text(errors="replace").splitlines()[-30:]
        raise ProcessEnded("\n".join((f"{self._errors.stem} ended, exit code {self.popen.returncode}:", *words)))

    def end(self, sign: int = signal.SIGKILL) -> None:
        self._may_end = True
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(sign)
        self.popen.wait(30)
        self._thread.join(10)


class Rig:
    """A run in progress. Use `running`."""

    def __init__(self, folder: Path, *, through_kproxy: tuple[str, ...] | None = None) -> None:
        """through_kproxy: arguments of a `kproxy run` that clients go through; None: they go to the brokers."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = Cluster(folder, listeners=LISTENERS, settings=SETTINGS)
        self.kproxy: Kproxy | None = None
        self._through = through_kproxy
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._files = {name: (folder / f"{name}.jsonl").open("w") for name in ("events", "members", "asked")}
        self.members: dict[str, tuple[Process, bool]] = {}  # with whether others are in that process
        self.seen: dict[str, list[dict[str, Any]]] = {}
        self._jvms: dict[str, Process] = {}
        self._workers: dict[str, int] = {}  # ports
        self._last_words: dict[str, str] = {}

    @property
    def bootstrap(self) -> str:
        return self.cluster.bootstrap if self.kproxy is None else self.kproxy.bootstrap

    @property
    def truth(self) -> str:
        return ",".join(broker.address_of("TRUTH") for broker in self.cluster.brokers)

    def write(self, name: str, line: dict[str, Any]) -> None:
        with self._lock:
            self._files[name].write(json.dumps(line) + "\n")
            self._files[name].flush()

    def note(self, what: str, **more: Any) -> None:
        """Something was done."""
        self.write("events", {"time_ns": time.time_ns(), "what": what, **more})

    # --- the cluster -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        classes = compiled(self.folder / "classes")
        self.classes = classes
        for broker in self.cluster.brokers:
            broker.logging = HERE / "log4j2.xml"
            broker.log_options = (f"-Dknowledge={broker.folder}/knowledge.log",)
        names = ("CLIENT", "INTERNAL", "CONTROLLER")
        lines = [
            {"broker": broker.node_id, "listener": name, "host": broker.host, "port": broker.ports[name]}
            for broker in self.cluster.brokers
            for name in names
        ]
        (self.folder / "ports.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._capture("traffic.pcap", [(line["host"], line["port"]) for line in lines])
        self._stack.callback(self.cluster.stop)
        self.cluster.start()
        if self._through is not None:
            kproxy = Kproxy(self.cluster.bootstrap, self.folder, *self._through)
            first = int(kproxy.bootstrap.rpartition(":")[2])
            self._capture("front.pcap", [("127.0.0.1", port) for port in range(first, first + 6)])
            self._stack.enter_context(kproxy)
            self.kproxy = kproxy
        self.tools = Tools(classes=str(classes))
        self._stack.callback(self.tools.close)
        self.admin = AdminClient({"bootstrap.servers": self.truth, "log_level": 0})

        def all_there() -> bool:
            with suppress(Exception):
                return len(self.admin.list_topics(timeout=2).brokers) == len(self.cluster.brokers)
            return False

        wait_for("all brokers", all_there, 60)

    def _capture(self, name: str, ends: list[tuple[Any, Any]]) -> None:
        wanted = " or ".join(f"(host {host} and port {port})" for host, port in ends)
        self._stack.enter_context(traffic.recorded(self.folder / name, f"tcp and ({wanted})"))

    def close(self) -> None:
        for process in [process for process, _ in self.members.values()] + list(self._jvms.values()):
            process.end()
        self._stack.close()
        for file in self._files.values():
            file.close()

    def topics(self, **partitions: int) -> None:
        """Creates topics, by the listener of clients; `_` in a name stands for `-`."""
        wanted = {name.replace("_", "-"): count for name, count in partitions.items()}
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "client.id": "operator"})
        for future in admin.create_topics([NewTopic(name, count, 3) for name, count in wanted.items()]).values():
            future.result(30)
        self.note("topics", topics=wanted)

        def ready(name: str, count: int) -> bool:
            found = self.admin.list_topics(name, timeout=10).topics[name].partitions.values()
            return len(found) == count and all(each.leader > 0 for each in found)

        for name, count in wanted.items():
            wait_for(f"leaders of {name}", lambda: ready(name, count), 30)  # noqa: B023

    def ask(self, what: str, main: str, *arguments: str) -> str:
        """What one of Kafka's tools says, on the listener that is not recorded; kept with its times."""
        told = self.tools.run(main, "--bootstrap-server", self.truth, *arguments)
        assert told.status == 0, f"{what}: {told}"
        self.write("asked", {"from_ns": told.from_ns, "to_ns": told.to_ns, "what": what, "text": told.output})
        return told.output

    def operate(self, what: str, main: str, *arguments: str) -> str:
        """The same on the clients' listener, as an operator would."""
        self.note(what, arguments=arguments)
        told = self.tools.run(main, "--bootstrap-server", self.bootstrap, *arguments)
        assert told.status == 0, f"{what}: {told}"
        return told.output

    def describe(self) -> None:
        """What the brokers know of all groups and topics now."""
        every = (GROUPS, "--describe", "--all-groups")
        self.ask("state", *every, "--state")
        self.ask("members", *every, "--members", "--verbose")
        self.ask("offsets", *every, "--offsets")
        self.describe_topics()
        if self.kproxy is not None:
            begin = time.time_ns()
            groups = json.loads(self.kproxy.get("/api/groups?limit=1000"))
            line = {"from_ns": begin, "to_ns": time.time_ns(), "what": "kproxy", "text": json.dumps(groups)}
            self.write("asked", line)
            lines = [
                line for line in self.kproxy.get("/metrics").splitlines() if line.startswith("kproxy_consumer_lag_r")
            ]
            self.write("asked", {"from_ns": begin, "to_ns": time.time_ns(), "what": "lag", "text": "\n".join(lines)})

    def describe_topics(self) -> None:
        self.ask("topics", TOPICS, "--describe")
        self.ask("quorum", QUORUM, "describe", "--status")

    def committed(self) -> None:
        """Waits until members, who commit every second, have nothing more to commit."""
        before = ""

        def as_before() -> bool:
            nonlocal before
            every = ("--bootstrap-server", self.truth, "--describe", "--all-groups", "--offsets")
            before, now = self.tools.run(GROUPS, *every).output, before
            return before == now

        wait_for("commits to end", as_before, 60, pause_s=2.5)

    def coordinator(self, group: str) -> int:
        """The broker that coordinates a group, by its number."""
        return int(self._state(group)[2])

    def _state(self, group: str, kind: str = "consumer") -> list[str]:
        return self.tools.run("State", "--bootstrap-server", self.truth, group, kind).output.split()

    def settled(self, group: str, members: int, timeout_s: float = 45, *, kind: str = "consumer") -> None:
        """Waits until the coordinator says that a group is stable, or empty, with so many members.

        kind: consumer; classic, of members of any kind; streams; share.
        """
        wanted = ["Stable" if members else "Empty", str(members)]

        def is_so() -> bool:
            for process in [process for process, _ in self.members.values()]:
                process.check()
            return self._state(group, kind)[:2] == wanted

        wait_for(f"{group} to be {wanted}", is_so, timeout_s, pause_s=0.3)
        self.note("settled", group=group, members=members)

    def loaded(self, *topics: str, each_s: float = 0.2) -> Callable[[], None]:
        """From now on a producer sends a record to each of these topics again and again, until what this returns."""
        stop = threading.Event()
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "client.id": "load",
                "log_level": 0,
                "topic.metadata.refresh.interval.ms": "2000",
            }
        )

        def go_on() -> None:
            number = 0
            while not stop.wait(each_s):
                for topic in topics:
                    number += 1
                    with suppress(Exception):
                        producer.produce(topic, value=b"x" * 20, key=str(number % 17).encode())
                producer.poll(0)
            producer.flush(5)

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(15)

        self._stack.callback(end)
        return end

    # --- members -----------------------------------------------------------------------------------------------------

    def _heard(self, line: str) -> None:
        said = json.loads(line)
        self.seen.setdefault(said["name"], []).append(said)
        self.write("members", said)

    def _settings(self, group: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        return {"bootstrap.servers": self.bootstrap, "group.id": group, "client.id": name, **settings}

    def python(self, library: str, name: str, group: str, topics: list[str], **settings: Any) -> None:
        """A member of librdkafka (confluent-kafka) or kafka-python, in a process of its own. `_` stands for `.`."""
        wanted = self._settings(group, name, {key.replace("_", "."): value for key, value in settings.items()})
        newest = str(wanted.get("group.protocol", "")) == "consumer"
        beat = {} if newest else {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000}
        wanted = {"auto.offset.reset": "earliest", "auto.commit.interval.ms": 1000, **beat, **wanted}
        wanted.setdefault("metadata.max.age.ms", 3000)
        if library == "confluent-kafka":
            wanted |= {"log_level": 0, "topic.metadata.refresh.interval.ms": 3000}
            wanted.setdefault("max.poll.interval.ms", 60000)
            if newest:
                wanted.pop("partition.assignment.strategy", None)
        job = {"library": library, "name": name, "topics": topics, "settings": wanted}
        self.note("start", member=name, group=group, library=library, topics=topics, settings=settings)
        command = [sys.executable, "-m", "tests.knowledge.member", json.dumps(job)]
        root = HERE.parents[1]
        process = Process(command, self.folder / f"{name}.err", self._heard, cwd=root)
        self.members[name] = process, False

    def java(
        self, name: str, group: str, topics: list[str], *, kind: str = "consumer", jvm: str = "java", **settings: Any
    ) -> None:
        """A member of Kafka's own client, in a JVM that it shares with those of the same `jvm`. `_` stands for `.`."""
        wanted = self._settings(group, name, {key.replace("_", "."): str(value) for key, value in settings.items()})
        newest = wanted.get("group.protocol") in ("consumer", "streams")
        if kind in ("consumer", "transactions"):
            beat = {} if newest else {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000"}
            reset = {"auto.offset.reset": "earliest", "auto.commit.interval.ms": "1000"}
            wanted = {**reset, **beat, "metadata.max.age.ms": "3000", "max.poll.interval.ms": "60000", **wanted}
        if jvm not in self._jvms:
            lib = setup.CACHE / "java-4.1.0/lib"
            command = ["java", *SMALL_JVM, "-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=info"]
            command += ["-Dorg.slf4j.simpleLogger.showDateTime=true", "-cp", f"{self.classes}:{lib}/*", "Members"]
            self._jvms[jvm] = Process(command, self.folder / f"{jvm}.err", self._heard)
        self.note("start", member=name, group=group, library="java", topics=topics, settings=settings, kind=kind)
        start = {"do": "start", "name": name, "kind": kind, "topics": topics, "settings": wanted}
        self._jvms[jvm].tell(json.dumps(start))
        self.members[name] = self._jvms[jvm], True

    def worker(self, name: str, group: str, protocol: str = "sessioned") -> None:
        """A worker of Kafka Connect, in a JVM of its own; this waits until it answers."""
        port = self._workers[name] = free_ports(1, "127.0.0.1")
        settings = {"bootstrap": self.bootstrap, "group": group, "name": name, "port": port, "protocol": protocol}
        config = self.folder / f"{name}.properties"
        config.write_text(WORKER.format(**settings))
        self.note("start", member=name, group=group, library="connect", kind="worker", settings={"port": port})
        # The classes have a connector.
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        command = ["java", *SMALL_JVM, "-Xmx256m", "-cp", f"{self.classes}:{JARS}/*", main, str(config)]
        self.members[name] = Process(command, self.folder / f"{name}.err", lambda line: None), False

        def answers() -> bool:
            self.members[name][0].check()
            with suppress(OSError):
                return bool(self.connect(name, "/"))
            return False

        wait_for(f"{name} to answer", answers, 90, pause_s=0.3)

    def connect(self, name: str, path: str, body: Any = None) -> Any:
        """What a worker answers; body: what is put there."""
        data = None if body is None else json.dumps(body).encode()
        method = "GET" if data is None else "PUT"
        url = f"http://127.0.0.1:{self._workers[name]}{path}"
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)

    def running(self, name: str, connector: str) -> dict[str, list[str]]:
        """Which workers (HOST:PORT) run a connector and its tasks, by what they run, as one of them says."""
        try:
            status = self.connect(name, f"/connectors/{connector}/status")
        except OSError:
            return {}
        found: dict[str, list[str]] = {}
        for each, what in [(status["connector"], connector), *((t, f"{connector}-{t['id']}") for t in status["tasks"])]:
            if each["state"] == "RUNNING":
                found.setdefault(each["worker_id"], []).append(what)
        return found

    def tell(self, name: str, do: str, **more: Any) -> None:
        """slow (ms), topics (topics) or close."""
        self.note(do, member=name, **more)
        process, shared = self.members[name]
        process.tell(json.dumps({"do": do, "name": name, **more}), last=do == "close" and not shared)

    def close_members(self, *names: str) -> None:
        """They leave, as they would by themselves; this waits until they have."""
        for name in names:
            self.tell(name, "close")
        for name in names:
            wait_for(f"{name} to close", lambda: self.saw(name, "closed") or self.saw(name, "failed"), 40)  # noqa: B023

    def saw(self, name: str, what: str) -> list[dict[str, Any]]:
        return [line for line in self.seen.get(name, ()) if line["what"] == what]

    def kill(self, name: str) -> None:
        """SIGKILL, to the member's process."""
        self.note("kill", member=name)
        self.members[name][0].end()

    def signal(self, name: str, sign: int) -> None:
        self.note(signal.Signals(sign).name, member=name)
        self.members[name][0].popen.send_signal(sign)


def compiled(folder: Path) -> Path:
    """The classes of java/, compiled."""
    setup.java_client("4.1.0")  # whose jars have Kafka Streams
    folder.mkdir(exist_ok=True)
    jars = f"{setup.CACHE}/java-4.1.0/lib/*:{JARS}/*"
    compiler = Path(shutil.which("java") or "java").with_name("javac")
    sources = [str(path) for path in sorted((HERE / "java").glob("*.java"))]
    done = subprocess.run(
        [str(compiler), "-nowarn", "-d", str(folder), "-cp", jars, *sources],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def running(folder: Path, *, through_kproxy: tuple[str, ...] | None = None) -> Iterator[Rig]:
    """A cluster that is recorded, for as long as the `with`."""
    rig = Rig(folder, through_kproxy=through_kproxy)
    try:
        rig.start()
        yield rig
    finally:
        rig.close()

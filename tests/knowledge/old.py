"""Kafka 0.8.2 and 0.10.2 with ZooKeeper, and five high-level consumers of their time, recorded.

A run is a folder: `traffic.pcap` (ZooKeeper's port and the brokers'), `events.jsonl` (what was done), `consumers.log`
(the consumers' own logs, each line with its consumer) and `txnlog.txt` (ZooKeeper's transaction log through its own
LogFormatter). Both releases run on Java 17, with the ZooKeeper of a later release: see tests/matrix/brokers.pom.xml.
"""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.broker.cluster import wait_for
from tests.broker.jvm import SMALL_JVM
from tests.knowledge import traffic
from tests.matrix import setup
from tests.ports import free_ports

VERSIONS = ("0.8.2.2", "0.10.2.2")
HOST = "127.0.3.201"
CONSUMERS = 5
PARTITIONS = 8
GROUP, TOPIC = "legacy", "orders"
SESSION_S = 4
_LOG4J = """\
log4j.rootLogger=INFO, stdout
log4j.appender.stdout=org.apache.log4j.ConsoleAppender
log4j.appender.stdout.target=System.err
log4j.appender.stdout.layout=org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern=%d{yyyy-MM-dd HH:mm:ss,SSS} %p %m (%c)%n
"""
_CONSUMER = """\
zookeeper.connect={zookeeper}
group.id={group}
consumer.id=c{number}
client.id=c{number}
zookeeper.session.timeout.ms={session_ms}
zookeeper.connection.timeout.ms=30000
zookeeper.sync.time.ms=500
rebalance.backoff.ms=1000
rebalance.max.retries=8
auto.commit.interval.ms=1000
auto.offset.reset=smallest
"""
_BROKER = """\
broker.id={number}
listeners=PLAINTEXT://{host}:{port}
host.name={host}
port={port}
log.dirs={folder}
zookeeper.connect={zookeeper}
zookeeper.connection.timeout.ms=60000
controlled.shutdown.enable=true
log.cleaner.enable=false
num.io.threads=2
num.network.threads=2
"""


class Old:
    """A run in progress. Use `running`."""

    def __init__(self, version: str, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        unwanted = ("log4j-1", "slf4j-log4j12")  # two backends of slf4j; reload4j stands for both
        jars = [str(jar) for jar in sorted(setup.jars(version).glob("*.jar")) if not jar.name.startswith(unwanted)]
        (folder / "log4j.properties").write_text(_LOG4J)
        logging = f"-Dlog4j.configuration=file:{folder}/log4j.properties"
        self._java = ["java", *SMALL_JVM, "-Xmx160m", logging, "-Dzookeeper.admin.enableServer=false"]
        self._java += ["-cp", ":".join(jars)]
        self.ports = list(range(first := free_ports(3, HOST), first + 3))  # ZooKeeper's, then the brokers'
        self.zookeeper = f"{HOST}:{self.ports[0]}"
        servers = zip(("zookeeper", "1", "2"), self.ports, strict=True)
        lines = (json.dumps({"server": name, "port": port}) + "\n" for name, port in servers)
        (folder / "ports.jsonl").write_text("".join(lines))
        self._stack = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._events = (folder / "events.jsonl").open("w")

    def note(self, what: str, **more: Any) -> None:
        self._events.write(json.dumps({"time_ns": time.time_ns(), "what": what, **more}) + "\n")
        self._events.flush()

    def _start(self, name: str, *command: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([*self._java, *command], stdin=stdin, stdout=subprocess.DEVNULL, stderr=log)
        self._processes[name] = process

        def end() -> None:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

        self._stack.callback(end)
        return process

    def _logged(self, name: str, text: str) -> bool:
        process = self._processes[name]
        found = (self.folder / f"{name}.log").read_text(errors="replace")
        assert process.poll() is None, f"{name} exited {process.returncode}\n{found[-3000:]}"
        return text in found

    def start(self) -> None:
        data = self.folder / "zookeeper"
        config = self.folder / "zookeeper.properties"
        config.write_text(
            f"dataDir={data}\nclientPort={self.ports[0]}\nclientPortAddress={HOST}\nmaxClientCnxns=0\ntickTime=1000\n"
        )
        self._capture()
        self._start("keeper", "org.apache.zookeeper.server.ZooKeeperServerMain", str(config))
        wait_for("ZooKeeper", lambda: self._logged("keeper", "PrepRequestProcessor"), 60)
        for number in (1, 2):
            text = _BROKER.format(
                number=number,
                host=HOST,
                port=self.ports[number],
                zookeeper=self.zookeeper,
                folder=self.folder / f"b{number}",
            )
            (self.folder / f"broker-{number}.properties").write_text(text)
            self.start_broker(number)
        self._tool("kafka.admin.TopicCommand", "--create", "--topic", TOPIC, "--partitions", str(PARTITIONS))
        brokers = ",".join(f"{HOST}:{port}" for port in self.ports[1:])
        keyed = (
            "--property",
            "parse.key=true",
            "--property",
            "key.separator=:",
        )  # without keys all go to one partition
        arguments = ("--broker-list", brokers, "--topic", TOPIC, *keyed)
        producer = self._start("producer", "kafka.tools.ConsoleProducer", *arguments, stdin=subprocess.PIPE)
        stop = threading.Event()

        def feed() -> None:
            assert producer.stdin is not None
            while not stop.wait(0.1) and producer.poll() is None:
                producer.stdin.writelines(b"%d:a record\n" % key for key in range(PARTITIONS))
                producer.stdin.flush()

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        self._stack.callback(thread.join, 5)
        self._stack.callback(stop.set)

    def _tool(self, main: str, *arguments: str) -> None:
        command = [*self._java, main, "--zookeeper", self.zookeeper, *arguments, "--replication-factor", "2"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 and "Created topic" in done.stdout, done.stdout + done.stderr

    def _capture(self) -> None:
        wanted = " or ".join(f"port {port}" for port in self.ports)
        path = self.folder / "traffic.pcap"
        self._stack.enter_context(traffic.recorded(path, f"tcp and host {HOST} and ({wanted})"))

    def start_broker(self, number: int) -> None:
        self.note("broker_start", broker=number)
        name = f"broker-{number}"
        (self.folder / f"{name}.log").unlink(missing_ok=True)
        self._start(name, "kafka.Kafka", str(self.folder / f"{name}.properties"))
        wait_for(f"broker {number}", lambda: self._logged(name, f"[Kafka Server {number}], started"), 90)

    def stop_broker(self, number: int) -> None:
        """A controlled shutdown."""
        self.note("broker_stop", broker=number)
        self._processes[f"broker-{number}"].terminate()
        self._processes[f"broker-{number}"].wait(60)

    def join(self, number: int) -> None:
        """A consumer is started; this waits until it has ended its first rebalance."""
        config = self.folder / f"consumer-{number}.properties"
        text = _CONSUMER.format(zookeeper=self.zookeeper, group=GROUP, number=number, session_ms=SESSION_S * 1000)
        config.write_text(text)
        self.note("join", consumer=number)
        arguments = ("--zookeeper", self.zookeeper, "--topic", TOPIC, "--consumer.config", str(config))
        self._start(f"consumer-{number}", "kafka.tools.ConsoleConsumer", *arguments)
        ended = f"end rebalancing consumer {GROUP}_c{number}"
        wait_for(f"consumer {number}", lambda: self._logged(f"consumer-{number}", ended), 60)

    def leave(self, number: int) -> None:
        self.note("leave", consumer=number)
        self._processes[f"consumer-{number}"].terminate()
        self._processes[f"consumer-{number}"].wait(30)

    def kill(self, number: int) -> None:
        self.note("kill", consumer=number)
        self._processes[f"consumer-{number}"].kill()

    def freeze(self, number: int) -> None:
        self.note("freeze", consumer=number)
        self._processes[f"consumer-{number}"].send_signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self.note("thaw", consumer=number)
        self._processes[f"consumer-{number}"].send_signal(signal.SIGCONT)

    def rebalances(self, number: int) -> int:
        """How many a consumer has ended."""
        text = (self.folder / f"consumer-{number}.log").read_text(errors="replace")
        return len(re.findall(f"end rebalancing consumer {GROUP}_c{number} ", text))

    def again(self, number: int, count: int) -> None:
        """Waits until a consumer has ended more rebalances than it had."""
        wait_for(f"consumer {number} to rebalance", lambda: self.rebalances(number) > count, 40)

    def close(self) -> None:
        self._stack.close()
        self._events.close()
        logs = sorted((self.folder / "zookeeper/version-2").glob("log.*"))
        lines = []
        for log in logs:
            command = [*self._java, "org.apache.zookeeper.server.LogFormatter", str(log)]
            lines.append(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
        (self.folder / "txnlog.txt").write_text("".join(lines))
        with (self.folder / "consumers.log").open("w") as out:
            for path in sorted(self.folder.glob("consumer-*.log")):
                number = path.stem.rpartition("-")[2]
                out.writelines(
                    f"c{number} {line}\n"
                    for line in path.read_text(errors="replace").splitlines()
                    if _CONNECTOR in line
                )


_CONNECTOR = "kafka.consumer."


def playbook(run: Old) -> None:
    """Five join, one leaves, one dies, one is frozen past its session; a broker stops and comes back; all leave."""
    for number in range(CONSUMERS):
        counts = {other: run.rebalances(other) for other in range(number)}
        run.join(number)
        for other, count in counts.items():
            run.again(other, count)
    for deed, gone, others in ((run.leave, 0, (1, 2, 3, 4)), (run.kill, 1, (2, 3, 4)), (run.freeze, 2, (3, 4))):
        counts = {other: run.rebalances(other) for other in others}
        deed(gone)
        for other, count in counts.items():
            run.again(other, count)
        time.sleep(2)  # what was claimed is fetched
    counts = {other: run.rebalances(other) for other in (2, 3, 4)}
    run.thaw(2)
    for other, count in counts.items():
        run.again(other, count)
    time.sleep(1)
    run.stop_broker(2)
    time.sleep(2)
    run.start_broker(2)
    time.sleep(2)
    for number in (2, 3, 4):
        run.leave(number)
        time.sleep(1.5)  # those that are left begin a rebalance


@contextmanager
def running(version: str, folder: Path) -> Iterator[Old]:
    """ZooKeeper, two brokers and a producer, recorded, for as long as the `with`."""
    run = Old(version, folder)
    try:
        run.start()
        yield run
    finally:
        run.close()

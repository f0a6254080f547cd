"""Brokers of all releases, each alone or three together, with the listeners of `tests.broker.security`.

A cluster listens at addresses of its own and keeps nothing. Old releases log in users from a JAAS file and keep them in
ZooKeeper; those in KRaft mode get them when they are formatted.
"""

import re
import signal
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.cluster import LOGGING, wait_for
from tests.broker.jvm import SMALL_JVM, TOOL_TIMEOUT_S
from tests.broker.security import LISTENERS, MECHANISMS, OAUTHBEARER, USERS, Security
from tests.matrix.setup import jars
from tests.ports import free_ports

_SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")
_START_S = 180
_SETTINGS = {
    "num.network.threads": "2",
    "num.io.threads": "4",
    "num.partitions": "3",
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
    "share.coordinator.state.topic.num.partitions": "3",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.enable": "false",
    "message.max.bytes": "2000000",
}
_LOG4J = """\
log4j.rootLogger=WARN, stdout
log4j.appender.stdout=org.apache.log4j.ConsoleAppender
log4j.appender.stdout.layout=org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern=%d %p %m (%c)%n
log4j.appender.connections=org.apache.log4j.FileAppender
log4j.appender.connections.file=${connections}
log4j.appender.connections.layout=org.apache.log4j.PatternLayout
log4j.appender.connections.layout.ConversionPattern=%m%n
log4j.logger.kafka.network.Acceptor=DEBUG, connections
log4j.additivity.kafka.network.Acceptor=false
log4j.logger.kafka.network.DataPlaneAcceptor=DEBUG, connections
log4j.additivity.kafka.network.DataPlaneAcceptor=false
"""


@dataclass(frozen=True)
class Release:
    """One kind of cluster of the matrix. name: as its table is headed."""

    name: str
    version: str
    nodes: int = 1
    zookeeper: bool = False

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split(".")))

    @property
    def codecs(self) -> tuple[str, ...]:
        return ("none", "gzip", "snappy", "lz4", *(["zstd"] if self.number >= (2, 1) else []))

    @property
    def headers(self) -> bool:
        return self.number >= (0, 11)

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return MECHANISMS if self.number >= (2, 0) else tuple(name for name in MECHANISMS if name != OAUTHBEARER)

    @property
    def signed_tokens(self) -> bool:
        return self.number >= (3, 1)


RELEASES = (
    Release("4.1", "4.1.0"),
    Release("4.1, three brokers", "4.1.0", nodes=3),
    Release("3.9", "3.9.1"),
    Release("3.9 with ZooKeeper", "3.9.1", zookeeper=True),
    Release("2.8", "2.8.2", zookeeper=True),
    Release("1.1", "1.1.1", zookeeper=True),
    Release("0.10.2", "0.10.2.2", zookeeper=True),
)


class Node:
    """One JVM: a broker, or ZooKeeper."""

    def __init__(self, release: Release, folder: Path, main: str, *arguments: str, options: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log"
        self.connections = folder / "connections.log"
        (folder / "log4j.properties").write_text(_LOG4J)
        logging = (f"-Dlog4j.configuration=file:{folder}/log4j.properties", f"-Dlog4j2.configurationFile={LOGGING}")
        small = (*SMALL_JVM, "-Xmx256m", *logging, f"-Dconnections={self.connections}")
        self.command = ["java", *small, *options, "-cp", f"{jars(release.version)}/*", main, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def check(self) -> None:
        """AssertionError with the end of its log if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{self.folder.name} exited {self._process.returncode}\n{tail}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class Brokers:
    """A running cluster of one release. Use `running`."""

    def __init__(self, release: Release, folder: Path, *, share: bool = True) -> None:
        self.release = release
        self.folder = folder
        self._share = share and release.number >= (4, 1)  # KIP-932, which 4.1 has but does not turn on by itself
        self.hosts = [f"127.0.3.{number}" for number in range(1, release.nodes + 1)]
        self.security = Security.create(
            folder / "security", *self.hosts, mechanisms=release.mechanisms, signed=release.signed_tokens
        )
        self._protocols = {**LISTENERS, "INTERNAL": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        self.ports = [
            {name: port for port, name in enumerate(self._protocols, free_ports(len(self._protocols), host))}
            for host in self.hosts
        ]
        self.nodes: list[Node] = []
        self._jaas = folder / "jaas.conf"
        text = "\n".join(f"  {self.security.server_jaas(name)}" for name in ("PLAIN", "SCRAM-SHA-256"))
        self._jaas.write_text(f"KafkaServer {{\n{text}\n}};\n")

    def address(self, listener: str, index: int = 0) -> str:
        return f"{self.hosts[index]}:{self.ports[index][listener]}"

    def bootstrap(self, listener: str) -> str:
        return ",".join(self.address(listener, index) for index in range(len(self.hosts)))

    def start(self, stack: ExitStack) -> None:
        zookeeper = ""
        options = [*self.security.broker_options()]
        if self.release.zookeeper:
            zookeeper = f"127.0.3.200:{free_ports(1, '127.0.3.200')}"
            host, port = zookeeper.split(":")
            config = self.folder / "zookeeper.properties"
            config.write_text(
                f"dataDir={self.folder}/zookeeper\nclientPort={port}\nclientPortAddress={host}\n"
                "admin.enableServer=false\nmaxClientCnxns=0\n"
            )
            keeper = Node(
                *(self.release, self.folder / "keeper", "org.apache.zookeeper.server.ZooKeeperServerMain", str(config)),
                options=("-Dzookeeper.admin.enableServer=false",),
            )
            stack.callback(keeper.stop)
            keeper.start()
            if self.release.number < (2, 7):
                options.append(f"-Djava.security.auth.login.config={self._jaas}")
                self._old_users(zookeeper)
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        for index in range(len(self.hosts)):
            folder = self.folder / f"broker-{index + 1}"
            folder.mkdir()
            config = folder / "server.properties"
            config.write_text("".join(f"{name}={value}\n" for name, value in self._settings(index, zookeeper).items()))
            if not self.release.zookeeper:
                self._format(cluster_id, config)
            node = Node(self.release, folder, "kafka.Kafka", str(config), options=options)
            stack.callback(node.stop)
            self.nodes.append(node)
        for node in self.nodes:
            node.start()
        wait_for(f"Kafka {self.release.name}", self._started, _START_S, pause_s=0.5)
        if self.release.zookeeper and self.release.number >= (2, 7):
            self._users()

    def _settings(self, index: int, zookeeper: str) -> dict[str, str]:
        listeners = {name: f"{name}://{self.address(name, index)}" for name in self._protocols}
        controller = listeners.pop("CONTROLLER")
        protocols = dict(self._protocols)
        copies = str(len(self.hosts))
        settings = {
            **_SETTINGS,
            **self.security.broker(),
            "inter.broker.listener.name": "INTERNAL",
            "log.dirs": str(self.folder / f"broker-{index + 1}/data"),
            "advertised.listeners": ",".join(listeners.values()),
            "default.replication.factor": copies,
        }
        for name in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
            settings[f"{name}.replication.factor"] = copies
        settings["transaction.state.log.min.isr"] = settings["share.coordinator.state.topic.min.isr"] = "1"
        settings = {name: value for name, value in settings.items() if not name.endswith("connections.max.reauth.ms")}
        if self.release.zookeeper:
            settings |= {"broker.id": str(index + 1), "zookeeper.connect": zookeeper}
            settings |= {"zookeeper.connection.timeout.ms": "60000"}
            del protocols["CONTROLLER"]
        else:
            voters = (f"{n + 1}@{self.address('CONTROLLER', n)}" for n in range(len(self.hosts)))
            settings |= {
                "process.roles": "broker,controller",
                "node.id": str(index + 1),
                "controller.listener.names": "CONTROLLER",
                "controller.quorum.voters": ",".join(voters),
            }
            listeners["CONTROLLER"] = controller
        settings["listeners"] = ",".join(listeners.values())
        settings["listener.security.protocol.map"] = ",".join(f"{name}:{kind}" for name, kind in protocols.items())
        return settings

    def _format(self, cluster_id: str, config: Path) -> None:
        users = (
            option
            for mechanism in _SCRAM
            for name, password in USERS.items()
            for option in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        )
        share = ("--feature", "share.version=1") if self._share else ()
        self._tool(
            "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", f"--config={config}", *users, *share
        )

    def _old_users(self, zookeeper: str) -> None:
        for name, password in USERS.items():
            added = ",".join(f"{mechanism}=[password={password}]" for mechanism in _SCRAM)
            where = ("--zookeeper", zookeeper, "--alter", "--entity-type", "users", "--entity-name", name)
            self._tool("kafka.admin.ConfigCommand", *where, "--add-config", added)

    def _users(self) -> None:
        from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

        kinds = (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
        wanted = [
            UserScramCredentialUpsertion(name, ScramCredentialInfo(kind, 4096), password.encode())
            for name, password in USERS.items()
            for kind in kinds
        ]
        admin = self._admin()
        for future in admin.alter_user_scram_credentials(wanted).values():
            future.result(30)

    def _tool(self, main: str, *arguments: str) -> None:
        command = ["java", *SMALL_JVM, "-Xmx256m", "-cp", f"{jars(self.release.version)}/*", main, *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise AssertionError(f"{main} exited {done.returncode}\n{done.stdout}\n{done.stderr}")

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap("INTERNAL"), "log_level": 0})

    def _started(self) -> bool:
        for node in self.nodes:
            node.check()
        with suppress(Exception):
            return len(self._admin().list_topics(timeout=2).brokers) == len(self.hosts)
        return False

    def create_topics(self, *names: str) -> None:
        """Topics of three partitions, made on a listener of which no client knows."""
        admin = self._admin()
        wanted = [NewTopic(name, 3, len(self.hosts)) for name in names]
        for future in admin.create_topics(wanted, operation_timeout=30).values():
            future.result(30)

        def ready(name: str) -> bool:
            partitions = admin.list_topics(name, timeout=10).topics[name].partitions.values()
            return len(partitions) == 3 and all(partition.leader > 0 for partition in partitions)

        for name in names:
            wait_for(f"leaders of {name}", lambda: ready(name), 30)  # noqa: B023

    def create_share_group(self, group: str) -> None:
        """A share group that begins with the oldest records."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

        entry = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
        admin = self._admin()
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(30)

    def client_peers(self) -> Counter[tuple[str, tuple[str, int]]]:
        """Every connection to a listener for clients so far, by the brokers' own logs: (broker, peer)."""
        found: Counter[tuple[str, tuple[str, int]]] = Counter()
        wanted = {self.address(name, index) for name in LISTENERS for index in range(len(self.hosts))}
        for node in self.nodes:
            text = node.connections.read_text()
            for match in re.finditer(
                r"^Accepted connection from /([0-9.]+):([0-9]+) on /([0-9.:]+) ", text, re.MULTILINE
            ):
                if match[3] in wanted:
                    found[match[3], (match[1], int(match[2]))] += 1
        return found


@contextmanager
def running(release: Release, folder: Path, *, share: bool = True) -> Iterator[Brokers]:
    """A cluster of that release, started and ended. share: with share groups, where it has them."""
    with ExitStack() as stack:
        brokers = Brokers(release, folder, share=share)
        start = time.monotonic()
        brokers.start(stack)
        print(f"Kafka {release.name} started in {time.monotonic() - start:.1f} s", flush=True)
        yield brokers

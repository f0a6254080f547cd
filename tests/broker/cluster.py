"""A real Kafka for tests: a KRaft cluster of separate JVMs on addresses of their own.

Every broker has a listener CLIENT for the clients under test, SASL for clients that log in, INTERNAL for the other
brokers, and CONTROLLER. So a broker's connection log lists only clients as peers of CLIENT. For a broker with TLS and
every login see secured.py.

Processes are ended by the handles kept here.
"""

import re
import signal
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.broker.jvm import java, tool
from tests.ports import free_ports

LOGGING = Path(__file__).with_name("log4j2.xml")

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 60, *, pause_s: float = 0.1) -> None:
    """Poll until the condition holds; raises AssertionError that names `what` if it does not hold in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still waiting for {what} after {timeout_s} s")
        time.sleep(pause_s)


USERS = {"alice": "secret"}
LISTENERS = {"CLIENT": "PLAINTEXT", "SASL": "SASL_PLAINTEXT"}


class Broker:
    """One node in a JVM of its own, on an address of its own; `stop` and `start` keep its data.

    listeners: the listeners for clients, each with its security protocol. CLIENT is one of them.
    """

    logging = LOGGING  # the Log4j 2 settings of its JVM
    log_options: tuple[str, ...] = ()  # JVM options that LOGGING reads

    def __init__(self, node_id: int, folder: Path, *, controls: bool, listeners: Mapping[str, str] = LISTENERS) -> None:
        self.node_id = node_id
        self.controls = controls  # whether it is also a controller
        self.host = f"127.0.1.{node_id}"
        first = free_ports(len(listeners) + 2, self.host)
        self.protocols = {**listeners, "INTERNAL": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        self.ports = {name: port for port, name in enumerate(self.protocols, first)}
        self.port = self.ports["CLIENT"]
        self.folder = folder / f"broker-{node_id}"
        self.folder.mkdir(parents=True)
        self.config = self.folder / "server.properties"
        self.log = self.folder / "server.log"
        self.connections = self.folder / "connections.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return self.address_of("CLIENT")

    @property
    def rack(self) -> str:
        return f"rack-{self.node_id}"

    def address_of(self, listener: str) -> str:
        return f"{self.host}:{self.ports[listener]}"

    def format(
        self, cluster_id: str, voters: str, settings: Mapping[str, str], users: Mapping[str, str] = USERS
    ) -> None:
        """users: names and passwords of users that log in by SCRAM."""
        listeners = {name: f"{name}://{self.address_of(name)}" for name in self.protocols}
        controller = listeners.pop("CONTROLLER")
        self.config.write_text(
            "".join(
                f"{name}={value}\n"
                for name, value in {
                    "process.roles": "broker,controller" if self.controls else "broker",
                    "node.id": str(self.node_id),
                    "listeners": ",".join((*listeners.values(), *([controller] if self.controls else []))),
                    "advertised.listeners": ",".join(listeners.values()),
                    "listener.security.protocol.map": ",".join(
                        f"{name}:{protocol}" for name, protocol in self.protocols.items()
                    ),
                    "inter.broker.listener.name": "INTERNAL",
                    "controller.listener.names": "CONTROLLER",
                    "controller.quorum.voters": voters,
                    "log.dirs": str(self.folder / "data"),
                    "broker.rack": self.rack,
                    **settings,
                }.items()
            )
        )
        tool(
            *("kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "--config", str(self.config)),
            *(
                option
                for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
                for name, password in users.items()
                for option in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
            ),
            *("--feature", "share.version=1"),  # KIP-932: 4.1 has it, but does not enable it by itself
        )

    def start(self, *, options: Sequence[str] = ()) -> None:
        """options: JVM options that replace those that keep it small."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                java(
                    "kafka.Kafka",
                    str(self.config),
                    options=(
                        "-Xmx256m",
                        *options,
                        f"-Dlog4j2.configurationFile={self.logging}",
                        f"-Dconnections={self.connections}",
                        *self.log_options,
                    ),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_started(self) -> None:
        def started() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"broker {self.node_id} exited {self._process.returncode}\n{self.log_tail()}")
            with socket.socket() as probe:  # not at CLIENT, which only the clients under test connect to
                return probe.connect_ex((self.host, self.ports["INTERNAL"])) == 0

        try:
            wait_for(f"broker {self.node_id}", started, START_TIMEOUT_S)
        except AssertionError as fault:
            raise AssertionError(f"{fault}\n{self.log_tail()}") from None

    def stop(self, *, kill: bool = False) -> None:
        """Shut down in a controlled way, or kill at once."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop all its threads for a while, as a long garbage collection does."""
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task")
        self._process.send_signal(signal.SIGSTOP)
        try:
            # The state is the field after the name, which is in parentheses and may contain spaces: proc(5).
            wait_for(
                "each of its threads to stop",
                lambda: all(
                    (task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()
                ),
                pause_s=0.01,
            )
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- broker {self.node_id}\n" + "\n".join(text.splitlines()[-lines:])

    def client_peers(self, listener: str = "CLIENT") -> list[tuple[str, int]]:
        """The peers that connected to a listener so far, from the broker's own log, oldest first."""
        return [
            (match[1], int(match[2]))
            for match in re.finditer(
                rf"^Accepted connection from /([0-9.]+):([0-9]+) on /{re.escape(self.address_of(listener))} ",
                self.connections.read_text(),
                re.MULTILINE,
            )
        ]


# Small and quick: few threads, few partitions of internal topics, and no needless delays.
SETTINGS = {
    "num.network.threads": "2",
    "num.io.threads": "4",
    "num.partitions": "3",
    "default.replication.factor": "3",
    "min.insync.replicas": "1",
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "3",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "3",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    **{  # heartbeats whose interval brokers dictate: the default and minimum are 5 s
        f"group.{kind}.{bound}heartbeat.interval.ms": "500" for kind in ("consumer", "share") for bound in ("min.", "")
    },
    # for clients that name a rack
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
    "listener.name.sasl.plain.sasl.jaas.config": (
        'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="secret";'
    ),
    "listener.name.sasl.scram-sha-256.sasl.jaas.config": (
        "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    ),
    "connections.max.reauth.ms": "2000",  # KIP-368: clients log in again and again
}


class Cluster:
    """Three brokers that are also the controllers, and brokers that join later.

    settings: for every broker; they override SETTINGS.
    """

    def __init__(
        self, folder: Path, *, listeners: Mapping[str, str] = LISTENERS, settings: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.settings = {**SETTINGS, **(settings or {})}
        self.id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self.brokers = [Broker(number, folder, controls=True, listeners=listeners) for number in (1, 2, 3)]
        self.voters = ",".join(
            f"{broker.node_id}@{broker.host}:{broker.ports['CONTROLLER']}" for broker in self.brokers
        )

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    @property
    def sasl_bootstrap(self) -> str:
        return ",".join(broker.address_of("SASL") for broker in self.brokers)

    def start(self) -> None:
        for broker in self.brokers:
            broker.format(self.id, self.voters, self.settings)
            broker.start()
        for broker in self.brokers:
            broker.wait_until_started()

    @contextmanager
    def one_more(self) -> Iterator[Broker]:
        """A fourth broker, for the duration of the context."""
        broker = Broker(4, self.folder, controls=False)
        broker.format(self.id, self.voters, self.settings)
        self.brokers.append(broker)
        try:
            broker.start()
            broker.wait_until_started()
            yield broker
        finally:
            broker.stop()
            self.brokers.remove(broker)

    def stop(self) -> None:
        """Kill the brokers: their data is thrown away, so a controlled shutdown is not needed."""
        for broker in self.brokers:
            broker.stop(kill=True)

    def client_peers(self) -> Counter[tuple[str, tuple[str, int]]]:
        """Every connection that the brokers accepted from clients so far: (broker, peer)."""
        return Counter((broker.address, peer) for broker in self.brokers for peer in broker.client_peers())

    def log_tail(self) -> str:
        return "\n".join(broker.log_tail() for broker in self.brokers)

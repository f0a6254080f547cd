"""What chaos happens to: three brokers, kproxy before them, and a failing link on either side of it.

Clients know kproxy at FRONT, where links listen that lead to kproxy; brokers advertise addresses where links listen
that lead to them. So every connection of a client and every one of kproxy crosses a link.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.cluster import SETTINGS, Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import KPROXY, Kproxy
from tests.broker.security import Security
from tests.certificates import Certificate
from tests.chaos.links import Links
from tests.chaos.load import PARTITIONS
from tests.ports import free_ports

FRONT = "127.0.5.1"
_KPROXY_HOST = "127.0.4.1"
_LISTENERS = {"CLIENT": "PLAINTEXT", "SSL": "SSL"}
_PORTS = 5  # of kproxy for each listener: to bootstrap, what would be broker 0, and each broker
_BEHIND = "127.0.6"  # and the node id: what brokers advertise to kproxy
_SETTINGS = {
    **SETTINGS,
    "num.network.threads": "2",
    "min.insync.replicas": "2",
    "transaction.state.log.min.isr": "2",
    "offsets.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    "replica.lag.time.max.ms": "5000",
    "unclean.leader.election.enable": "false",
    "group.min.session.timeout.ms": "3000",
    "ssl.allow.dn.changes": "true",  # of a broker that gets another certificate while it runs
}
for _name in [name for name in _SETTINGS if "sasl" in name or "reauth" in name]:
    del _SETTINGS[_name]


class ChaosProxy(Kproxy):
    """`kproxy run` with a configuration file, at addresses that links lead to. Samples what it uses.

    It has two clusters, which are one: `plaintext`, and `tls` towards clients and brokers alike.
    """

    def __init__(self, brokers: Mapping[str, Sequence[str]], security: Security, folder: Path, workers: int) -> None:
        """brokers: by listener, where they are for kproxy."""
        self.first_port = free_ports(1 + _PORTS * len(brokers), _KPROXY_HOST)
        self.admin = f"{_KPROXY_HOST}:{self.first_port}"
        self._listens = {name: self.first_port + 1 + _PORTS * place for place, name in enumerate(brokers)}
        self.bootstrap, self.tls_bootstrap = (f"{FRONT}:{port}" for port in self._listens.values())
        self.log = folder / "kproxy.log"
        self.file = folder / "kproxy.toml"
        self.workers = workers
        self._brokers = brokers
        self._security = security
        self.rotate()
        self.configure()
        self.command = [str(KPROXY), "run", "--config", str(self.file)]
        self._process: subprocess.Popen[bytes] | None = None
        self.samples: list[tuple[float, int, int]] = []  # of this life: seconds since its start, RSS, descriptors
        self.lives: list[list[tuple[float, int, int]]] = []
        self._started = 0.0

    @property
    def ports(self) -> range:
        """Those that clients dial."""
        return range(self.first_port + 1, self.first_port + 1 + _PORTS * len(self._brokers))

    def rotate(self) -> Certificate:
        """Another certificate and key, under the names of the last."""
        fresh = self._security.authority.server(FRONT, file="fresh")
        self.certificate = replace(fresh, certificate=self.file.with_suffix(".pem"), key=self.file.with_suffix(".key"))
        fresh.key.replace(self.certificate.key)
        fresh.certificate.replace(self.certificate.certificate)
        return self.certificate

    def configure(self, **changed: Any) -> None:
        """Writes the file; `changed`: settings of the process."""
        settings: dict[str, Any] = {"admin": self.admin, "log_level": "info", "drain_timeout_s": 5} | changed
        if self.workers > 1:
            settings["workers"] = self.workers
        lines = [f"{name} = {_toml(value)}" for name, value in settings.items()]
        for name, brokers in self._brokers.items():
            cluster = {
                "name": "tls" if name == "SSL" else "plaintext",
                "listen": f"{_KPROXY_HOST}:{self._listens[name]}",
                "advertise": f"{FRONT}:{{port}}",
                "bootstrap": list(brokers),
            }
            lines += ["[[cluster]]", *(f"{key} = {_toml(value)}" for key, value in cluster.items())]
            if name == "SSL":
                shown = {"certificate": str(self.certificate.certificate), "key": str(self.certificate.key)}
                lines += ["[cluster.tls]", *(f"{key} = {_toml(value)}" for key, value in shown.items())]
                lines += ["[cluster.upstream_tls]", f"ca = {_toml(str(self._security.authority.bundle))}"]
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.file)

    def stop(self, *, kill: bool = False) -> None:
        """After an upgrade a process stands in for the one that relays: killed is whoever there is."""
        if kill and self._process is not None:
            with suppress(psutil.Error):
                for one in reversed(self.processes()):
                    with suppress(psutil.Error):
                        one.kill()
        super().stop(kill=kill)

    def start(self) -> None:
        super().start()
        self._started = time.monotonic()
        self.samples = []
        self.lives.append(self.samples)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """All that belong to it: itself, those that it has started, and whoever followed in its place."""
        found = psutil.Process(self.pid)
        return [found, *found.children(recursive=True)]

    def start_time(self) -> float:
        """When the process that answers started, in seconds since the epoch; 0 while none answers."""
        with suppress(OSError):
            return self.metric("process_start_time_seconds")
        return 0.0

    def relaying(self) -> int:
        """How many processes of `kproxy run` there are, workers apart."""
        parents: dict[int, int] = {}
        for one in self.processes():
            with suppress(psutil.Error):  # it has ended meanwhile
                if "stand_in" not in " ".join(one.cmdline()):
                    parents[one.pid] = one.ppid()
        return sum(parent not in parents for parent in parents.values())

    def sample(self) -> None:
        """Notes what its processes use now: the largest its memory, all together their descriptors."""
        with suppress(psutil.Error, AssertionError):
            using = [(one.memory_info().rss, one.num_fds()) for one in self.processes()]
            rss, descriptors = max(rss for rss, _ in using), sum(count for _, count in using)
            self.samples.append((time.monotonic() - self._started, rss, descriptors))


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


class Stage:
    """All of it. Use as a context."""

    def __init__(self, folder: Path, *, workers: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.cluster = Cluster(folder, listeners=_LISTENERS)
        brokers = self.cluster.brokers
        self.fronts = {
            broker.node_id: {name: f"{_BEHIND}.{broker.node_id}:{broker.ports[name]}" for name in _LISTENERS}
            for broker in brokers
        }
        hosts = [f"{_BEHIND}.{broker.node_id}" for broker in brokers]
        self.security = Security.create(folder / "security", *hosts)
        links = {
            self.fronts[broker.node_id][name]: broker.address_of(name) for broker in brokers for name in _LISTENERS
        }
        self.behind = Links(links)
        fronts = {name: [self.fronts[broker.node_id][name] for broker in brokers] for name in _LISTENERS}
        self.kproxy = ChaosProxy(fronts, self.security, folder, workers)
        self.before = Links({f"{FRONT}:{port}": f"{_KPROXY_HOST}:{port}" for port in self.kproxy.ports})
        # past kproxy and all links: for verdicts and for faults, never for clients
        self.direct = ",".join(broker.address_of("INTERNAL") for broker in self.cluster.brokers)

    def __enter__(self) -> "Stage":
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for done in [pool.submit(self._format, broker) for broker in self.cluster.brokers]:
                    done.result()
            for broker in self.cluster.brokers:
                broker.start()
            for broker in self.cluster.brokers:
                broker.wait_until_started()
            self.behind.__enter__()
            self.before.__enter__()
            self.kproxy.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for links in (self.behind, self.before):
            with suppress(AttributeError):
                links.__exit__()
        with suppress(Exception):
            self.kproxy.stop(kill=True)
        self.cluster.stop()

    def _format(self, broker: Any) -> None:
        advertised = {name: broker.address_of(name) for name in broker.protocols if name != "CONTROLLER"}
        advertised |= self.fronts[broker.node_id]
        listeners = ",".join(f"{name}://{address}" for name, address in advertised.items())
        settings = {**_SETTINGS, **self.security.stores(self.security.server), "advertised.listeners": listeners}
        broker.format(self.cluster.id, self.cluster.voters, settings)

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.direct, "log_level": 0})

    def create_topics(self, *names: str) -> None:
        admin = self.admin()
        for future in admin.create_topics([NewTopic(name, PARTITIONS, 3) for name in names]).values():
            future.result(60)
        wait_for("replicas of all topics", self.in_sync, 60)

    def in_sync(self) -> bool:
        """Whether every partition has a leader and three replicas in sync."""
        try:
            topics = self.admin().list_topics(timeout=5).topics.values()
        except Exception:
            return False
        return all(
            partition.leader > 0 and len(partition.isrs) == 3
            for topic in topics
            for partition in topic.partitions.values()
        )

    def reassign(self, plan: str) -> str:
        """Starts moving partitions; what the tool said."""
        file = self.folder / "plan.json"
        file.write_text(plan)
        where = ("--bootstrap-server", self.direct, "--reassignment-json-file", str(file))
        return tool("org.apache.kafka.tools.reassign.ReassignPartitionsCommand", *where, "--execute")

    def signal_kproxy(self, number: signal.Signals) -> None:
        os.kill(self.kproxy.pid, number)

    def tracebacks(self) -> list[str]:
        """What kproxy should never have logged."""
        text = self.kproxy.log.read_text(errors="replace") if self.kproxy.log.exists() else ""
        return re.findall(r"^Traceback.*(?:\n.+){0,12}", text, re.MULTILINE)

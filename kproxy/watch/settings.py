"""The settings of `kproxy watch`, and their checks. Refuses to know how they are written on a command line."""

from dataclasses import dataclass
from pathlib import Path

from kproxy.errors import KproxyError
from kproxy.proxy.config.addresses import Address
from kproxy.watch.filters import MAX_PORTS
from kproxy.wire.bodies import DETAILS

PORT = 9092  # default port of brokers


@dataclass(frozen=True)
class Settings:
    """The settings. Raises KproxyError for invalid ones.

    ports: of brokers; empty: any, Kafka is found by its content. learns_ports: adds the ports that answers name.
    zookeeper_ports: of ZooKeeper; without `ports` it is found by its content too. user: the user to become once the
    socket is open; None: the caller of sudo. processes: find the processes of connections in /proc.
    """

    interfaces: tuple[str, ...]
    ports: tuple[int, ...] = (PORT,)
    learns_ports: bool = True
    zookeeper_ports: tuple[int, ...] = ()
    admin: Address | None = None
    record: Path | None = None
    cluster: str = "default"
    detail: str = "headers"
    buffer_mib: int = 64
    user: str | None = None
    processes: bool = False

    def __post_init__(self) -> None:
        for option, ports in (("--port", self.ports), ("--zookeeper-port", self.zookeeper_ports)):
            for port in ports:
                if not 0 < port < 1 << 16:
                    raise KproxyError(f"{option} {port}: ports are from 1 to 65535, or any")
        both = sorted(set(self.ports) & set(self.zookeeper_ports))
        if both:
            raise KproxyError(f"--zookeeper-port {both[0]}: --port names it too; a port speaks one or the other")
        count = len(self.ports) + len(self.zookeeper_ports)
        if self.ports and count > MAX_PORTS:
            raise KproxyError(f"--port: {count} ports; at most {MAX_PORTS}, or any, which finds Kafka by itself")
        if not self.cluster:
            raise KproxyError("--cluster: the name is empty: leave it out, or name it")
        if self.detail not in DETAILS:
            raise KproxyError(f"--detail {self.detail}: one of {', '.join(DETAILS)}")
        if not 2 <= self.buffer_mib <= 4096:
            raise KproxyError(f"--buffer-mib {self.buffer_mib}: from 2 to 4096")
        if self.admin is None and self.record is None:
            raise KproxyError(
                "nothing would come of it: give it --admin HOST:PORT, for metrics, or --record DIR, for tables"
            )

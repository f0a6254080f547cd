"""Values that the processes of one cluster exchange: one holds its ports and finds its brokers, the others serve.

Duty: the values alone. `cluster.py` fills and applies them, `workers/` carries them.
"""

from dataclasses import dataclass, field
from typing import Protocol

from kproxy.proxy.config.addresses import Address


@dataclass
class Known:
    """The state of a cluster that all its processes share."""

    name: str
    listen_port: int
    # Where to dial each broker.
    upstreams: dict[int, Address] = field(default_factory=dict)
    # The address that each broker advertises, to find leaks of it.
    brokers: dict[int, Address] = field(default_factory=dict)
    open: frozenset[int] = frozenset()  # brokers whose port is open and will not be given to another broker
    assigned: dict[int, int] = field(default_factory=dict)  # ports assigned as node ids appeared
    sidecar_broker: int | None = None  # route sidecar: the broker on this machine
    ports: tuple[tuple[int, tuple[str, ...]], ...] = ()  # (port, local addresses) of each listener


class Ports(Protocol):
    """The ports of a cluster, held by another process, which also asks the cluster for its brokers."""

    def bind(self, node_id: int, host: str, port: int, *, is_news: bool) -> bool:
        """Process a broker named by an answer; is_news: its address is new. Returns whether its port is open.

        On return the cluster's routes include a port that was assigned to the broker.
        """

    def broker_lost(self) -> None:
        """Ask for the brokers soon: one could not be dialled, or reset a connection."""

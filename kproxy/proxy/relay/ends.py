"""The two ends of a connection before a relay joins them, each with its socket.

A client is Incoming while it is admitted, then Admitted; a broker is Outgoing while it is dialled, then Dialled. Steps
(a PROXY header, TLS, a login) run on an end one after the other, and may replace its socket by a wrapper. The caller of
the steps closes the end's socket if one of them fails. Refuses to know the steps.
"""

import socket
from dataclasses import dataclass, field
from typing import NamedTuple

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sasl.clients import Session
from kproxy.proxy.sasl.login import LoggedIn

ANONYMOUS = "User:ANONYMOUS"  # the brokers' name for a client without a login


class PortCheck(ConnectionResetError):
    """A connection that ended before its first byte: the health check of a load balancer, not a client."""


@dataclass(slots=True)
class Incoming:
    """An accepted client; the steps of its admission fill in the fields."""

    sock: socket.socket
    peer: Address  # the client's address; a trusted PROXY header replaces it
    node_id: int | None  # the broker of its port or server name; None: it bootstraps
    opened_ns: int  # nanoseconds since the epoch
    principal: str = ANONYMOUS
    server_name: str | None = None  # SNI, as the client sent it
    session: Session | None = None  # if kproxy has checked the client's login
    broker_takes_telemetry: bool = False  # according to the broker's ApiVersions before the client's login
    number: int = 0  # connection number, if another process has assigned one
    destination: Address | None = None  # numeric: the dialled address before redirection by the kernel; None: our port
    server: Address | None = None  # the destination in a PROXY header; None: the socket's own address
    ticket: tuple[str | None] | None = None  # the counters of limits that include it (`admission/admission.py`)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A client that may use its cluster; its fields are those of Incoming."""

    sock: socket.socket
    peer: Address
    node_id: int | None
    opened_ns: int
    principal: str = ANONYMOUS
    session: Session | None = None
    broker_takes_telemetry: bool = False
    number: int = 0
    destination: Address | None = None
    server: Address | None = None
    ticket: tuple[str | None] | None = None


def admitted(client: Incoming) -> Admitted:
    """Return a client whose admission is complete."""
    return Admitted(
        client.sock,
        client.peer,
        client.node_id,
        client.opened_ns,
        client.principal,
        client.session,
        client.broker_takes_telemetry,
        client.number,
        client.destination,
        client.server,
        client.ticket,
    )


@dataclass(slots=True)
class Outgoing:
    """A dialled broker; PROXY header, TLS and login follow on its socket."""

    sock: socket.socket
    address: Address  # as configured, or as in Metadata
    upstream: Address = field(init=False)  # numeric: the dialled address
    client: Admitted | None = None  # the client of the connection; None: it is for kproxy's own requests
    login: LoggedIn | None = None  # kproxy's own login for this client, if it must be renewed

    def __post_init__(self) -> None:
        self.upstream = Address(*self.sock.getpeername()[:2])


class Dialled(NamedTuple):
    """A connection to a broker on which Kafka's protocol can begin."""

    sock: socket.socket
    upstream: Address  # numeric
    login: LoggedIn | None = None  # kproxy's own login for this client, if it must be renewed

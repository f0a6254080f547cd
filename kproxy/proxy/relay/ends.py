"""The two ends of a connection before a relay joins them, each with its socket.

A client is Incoming while it is admitted, then Admitted; a broker is Outgoing while it is dialled, then Dialled. Steps
(a PROXY header, TLS, a login) run on an end one after the other, and may replace its socket by one that wraps it;
whoever runs the steps closes the end's socket when one of them fails. Refuses to know what steps do.
"""

import socket
from dataclasses import dataclass, field
from typing import NamedTuple

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sasl.clients import Session
from kproxy.proxy.sasl.login import LoggedIn

ANONYMOUS = "User:ANONYMOUS"  # as brokers call a client that did not say who it is


class PortCheck(ConnectionResetError):
    """A connection that ended before it said anything, where a balancer looks whether the port is open: no client."""


@dataclass(slots=True)
class Incoming:
    """An accepted client; the steps of its admission fill in what they learn of it."""

    sock: socket.socket
    peer: Address  # the client's address; what a trusted PROXY header says replaces it
    node_id: int | None  # whose port it came to, or whom its server name means; None: it bootstraps
    opened_ns: int  # nanoseconds since the epoch
    principal: str = ANONYMOUS
    server_name: str | None = None  # SNI, as the client wrote it
    session: Session | None = None  # of a client whose login kproxy has checked
    broker_takes_telemetry: bool = False  # as its broker said before the client's login
    number: int = 0  # of the connection, where another process has given it one
    destination: Address | None = None  # numeric, what it dialled before the kernel redirected it; None: our port
    server: Address | None = None  # where a PROXY header says that it connected to; None: where its socket says
    ticket: tuple[str | None] | None = None  # what limits have counted it for (`admission/admission.py`)


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
    """A client whose admission is complete."""
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
    """A dialled broker; the steps of the way to it run on its socket."""

    sock: socket.socket
    address: Address  # as configured, or as the cluster names it
    upstream: Address = field(init=False)  # numeric: where the dial went
    client: Admitted | None = None  # that the connection is for; None: kproxy itself asks
    login: LoggedIn | None = None  # of kproxy for this client, where it has to be renewed

    def __post_init__(self) -> None:
        self.upstream = Address(*self.sock.getpeername()[:2])


class Dialled(NamedTuple):
    """A connection to a broker on which Kafka's protocol can begin."""

    sock: socket.socket
    upstream: Address  # numeric
    login: LoggedIn | None = None  # of kproxy for this client, where it has to be renewed

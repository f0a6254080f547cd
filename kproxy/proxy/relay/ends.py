"""The two ends of a connection before a relay joins them: what is known of each, and its socket.

Steps (a PROXY header, TLS, a login) run on an end one after the other, and may replace its socket by one that wraps it;
whoever runs the steps closes the socket that stands there when one of them fails. Refuses to know what steps do.
"""

import socket
from dataclasses import dataclass, field

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sasl.clients import Session
from kproxy.proxy.sasl.login import LoggedIn

ANONYMOUS = "User:ANONYMOUS"  # as brokers call a client that did not say who it is


class PortCheck(ConnectionResetError):
    """A connection that ended before it said anything, where a balancer looks whether the port is open: no client."""


@dataclass(slots=True)
class Incoming:
    """An accepted client on its way to a relay."""

    sock: socket.socket
    peer: Address  # the client's address; what a trusted PROXY header says replaces it
    node_id: int | None  # whose port it came to, or whom its server name means; None: it bootstraps
    opened_ns: int  # nanoseconds since the epoch
    principal: str = ANONYMOUS
    server_name: str | None = None  # SNI, as the client wrote it
    session: Session | None = None  # of a client whose login kproxy has checked
    broker_takes_telemetry: bool = False  # as its broker said before the client's login
    login: LoggedIn | None = None  # of kproxy at the broker for this client, where it has to be renewed
    number: int = 0  # of the connection, where another process has given it one
    destination: Address | None = None  # numeric, what it dialled before the kernel redirected it; None: our port
    server: Address | None = None  # where a PROXY header says that it connected to; None: where its socket says
    ticket: tuple[str | None] | None = None  # what limits have counted it for (`admission/entrance.py`)


@dataclass(slots=True)
class Outgoing:
    """A dialled broker on its way to a relay, or to a question of kproxy's own."""

    sock: socket.socket
    address: Address  # as configured, or as the cluster names it
    upstream: Address = field(init=False)  # numeric: where the dial went
    client: Incoming | None = None  # whom it is for; None: kproxy itself asks

    def __post_init__(self) -> None:
        self.upstream = Address(*self.sock.getpeername()[:2])

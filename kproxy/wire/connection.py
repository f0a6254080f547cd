"""The identity of a connection, and the interface of those that receive its events; used live and offline.

Knows nothing of sockets, files or metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from kproxy.wire.events import Event


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """One client connection with its broker connection."""

    cluster: str  # as configured, "default" otherwise
    source: str  # the capture's name, or live:<listener>
    client_address: str
    client_port: int
    broker_address: str
    broker_port: int
    broker_id: int | None  # None: not known, as on a bootstrap listener
    opened_ns: int  # live: the accept; captures: the first packet; nanoseconds since the epoch
    ends_tls: bool = False  # whether kproxy relays it and decrypts what the client sends
    _id: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def id(self) -> int:
        """The `connection` column: a 63-bit hash of both ends and the first moment.

        So shards and machines derive the same id independently, and a capture may be given another name. Tables before
        schema version 9 have the names of the cluster and of the source in it.
        """
        if self._id is not None:
            return self._id
        text = "\0".join(
            (
                self.client_address,
                str(self.client_port),
                self.broker_address,
                str(self.broker_port),
                str(self.opened_ns),
            )
        )
        found = int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
        object.__setattr__(self, "_id", found)
        return found


class Sink(Protocol):
    """Takes the events of connections: metrics, the recorder, insight, a live view."""

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        """Called once per connection; the callable it returns gets every batch of events, in order.

        The list is the caller's and is emptied after the call: keep the events, not the list.
        """
        ...

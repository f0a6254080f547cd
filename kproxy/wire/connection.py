"""The identity of a connection, and the interface of receivers of its events; used live and offline.

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
    broker_id: int | None  # None: unknown, for example on a bootstrap listener
    opened_ns: int  # time of the accept, or of the first packet in a capture; nanoseconds since the Unix epoch
    ends_tls: bool = False  # whether kproxy relays it and decrypts the client's bytes
    _id: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def id(self) -> int:
        """Return the `connection` column: a 63-bit hash of both ends and `opened_ns`.

        Shards and machines derive the same id independently, also after a capture was renamed. Tables before schema
        version 9 have a hash that includes the names of the cluster and the source.
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
    """A receiver of events of connections: metrics, the recorder, insight, a live view."""

    def connected(self, info: ConnectionInfo) -> Callable[[list[Event]], None]:
        """Begin a connection; return a function that takes each of its batches of events, in order.

        The caller empties the list after each call: keep the events, not the list.
        """
        ...

"""Identifies the broker at an address that a client dialled, for transparent listeners, which rewrite nothing.

Brokers advertise host names and clients dial numeric addresses, so this module resolves names: when an answer first
names a broker, and again in each round of discovery. Only labels use the result, so a wrong or missing one does not
affect traffic. Bounded: MAX_BROKERS brokers, PLACES addresses of each, one look-up at a time. Refuses to know sockets
and listeners.
"""

import asyncio
from collections.abc import Iterable

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.listeners import normal
from kproxy.proxy.upstream.resolver import Resolver

MAX_BROKERS = 4096
PLACES = 16


class Destinations:
    """The brokers of one cluster by their numeric addresses."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._named: dict[int, Address] = {}  # node id -> advertised address
        self._at: dict[Address, int] = {}  # numeric address -> node id
        self._new: asyncio.Queue[int] = asyncio.Queue(MAX_BROKERS)

    def __len__(self) -> int:
        return len(self._named)

    def broker_at(self, destination: Address) -> int | None:
        """Return the node id of the broker at a numeric address; None if no answer has named one."""
        return self._at.get(normal(destination))

    def learn(self, brokers: Iterable[tuple[int, Address]], *, again: bool = False) -> list[int]:
        """Apply advertised addresses; returns the brokers not known before. again: resolve all names once more."""
        new = []
        for node_id, address in brokers:
            is_new = node_id not in self._named
            if self._named.get(node_id) == address and not again:
                continue
            if (is_new and len(self._named) >= MAX_BROKERS) or self._new.full():
                continue
            if is_new:
                new.append(node_id)
            self._named[node_id] = address
            self._new.put_nowait(node_id)
        return new

    async def run(self) -> None:
        """Resolve names as answers name brokers, for ever."""
        while True:
            node_id = await self._new.get()
            try:
                places = await self._resolver.addresses(self._named[node_id])
            except OSError:
                continue  # its former addresses remain
            found = {normal(Address(*place[:2])) for _, place in places[:PLACES]}
            for address in [address for address, at in self._at.items() if at == node_id and address not in found]:
                del self._at[address]
            self._at.update(dict.fromkeys(found, node_id))

"""Route transparent: clients dial brokers, the kernel redirects them here, and kproxy dials the original destination.

Duty: find each client's original destination, refuse clients that were not redirected, and identify the broker there
from discovery and from clients' answers. Only labels use the broker; kproxy rewrites nothing, and forwards bytes that
it cannot read. Bounds are those of `Destinations`. Refuses to know relays and the syntax of kernel rules.
"""

import socket
from collections.abc import Callable, Iterable

from kproxy.errors import RefusedClient
from kproxy.proxy.cluster.destinations import Destinations
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.limits import Networks, is_in
from kproxy.proxy.relay.ends import Admitted, Incoming
from kproxy.proxy.sockets.listeners import Gate
from kproxy.proxy.sockets.redirected import original_destination
from kproxy.proxy.upstream.resolver import Resolver
from kproxy.wire.events import Event, Exchange

ROUTE = "transparent"
FIX = (
    "rules of the kernel redirect kproxy's own connections too: they must leave out its user (meta skuid) or its mark "
    "(upstream_mark), as in deploy/transparent/redirect.nft"
)


class Transparent:
    """The part of a cluster that replaces broker ports and rewriting.

    expose(node id): called for each broker found. allowed: networks that clients may reach; empty: all redirected ones.
    """

    def __init__(self, gate: Gate, resolver: Resolver, expose: Callable[[int], None], allowed: Networks = ()) -> None:
        self.destinations = Destinations(resolver)
        self._allowed = allowed
        self._gate = gate
        self._expose = expose

    async def find_destination(self, client: Incoming) -> None:
        """Record a client's original destination; the first step of its connection. Raises RefusedClient."""
        destination = self.destination_of(client.sock)
        if self._gate.is_ours(*destination):
            raise RefusedClient(
                "not_redirected",
                f"it dialled {destination}, this port of kproxy, and not a broker: route transparent takes only what "
                "rules of the kernel redirect (nft list ruleset). Clients keep dialling brokers",
            )
        if self._allowed and not is_in(destination.host, self._allowed):
            raise RefusedClient(
                "foreign_destination",
                f"it dialled {destination}, which is not in `destinations`: add it if a broker is there, or redirect "
                "connections to brokers alone (ip daddr)",
            )
        client.destination = destination

    def destination_of(self, client: socket.socket) -> Address:
        """Return the numeric destination of an accepted connection. Raises OSError if the client has disconnected."""
        return original_destination(client)

    def broker_of(self, client: Incoming | Admitted) -> int | None:
        """Return the node id of the broker that a client dialled, if known."""
        return None if client.destination is None else self.destinations.broker_at(client.destination)

    def learn(self, brokers: Iterable[tuple[int, Address]], *, again: bool = False) -> None:
        """Apply the addresses that brokers advertise. again: resolve known names once more."""
        for node_id in self.destinations.learn(brokers, again=again):
            self._expose(node_id)

    def look_for_brokers(self, events: list[Event]) -> None:
        """Learn the brokers named in the answers of a connection."""
        for event in events:
            if type(event) is Exchange and event.response_body is not None and event.response_body.brokers:
                named = event.response_body.brokers
                self.learn((node_id, Address(*address)) for address, node_id in named.items())

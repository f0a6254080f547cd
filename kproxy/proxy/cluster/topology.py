"""The brokers of one cluster as its connections need them: which broker a client comes for, and where that one is.

Discovery and answers that pass fill in the routes. Refuses to know how brokers are found and dialled.
"""

import socket

from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.cluster.transparent import Transparent
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.ends import Admitted, Incoming


class Topology:
    """redirected: with route transparent, the addresses that clients have dialled themselves.

    routes: set by the owner once the bootstrap port is bound. beside: with route sidecar, the node id of the broker
    behind the bootstrap address, once it is known.
    """

    def __init__(self, addresses: BootstrapAddresses, redirected: Transparent | None) -> None:
        self.routes: Routes
        self.beside: int | None = None
        self.addresses = addresses
        self.redirected = redirected

    def broker_of(self, client: Incoming | Admitted) -> int | None:
        """The node id of the broker that a client comes for, if it is known."""
        if self.redirected is not None:
            return self.redirected.broker_of(client)
        return self.beside if client.node_id is None else client.node_id

    def upstreams(self, client: Incoming | Admitted) -> list[Address]:
        """Addresses of a client's broker, in the order in which they are to be tried; none: it is not known yet."""
        if client.destination is not None:
            return [client.destination]
        if client.node_id is None:
            return list(self.addresses.in_order())
        address = self.routes.upstreams.get(client.node_id)
        return [address] if address is not None else []

    def destination_of(self, client: socket.socket) -> Address:
        """Where an accepted client was going: to our own port, or where the kernel redirected it from. OSError."""
        if self.redirected is not None:
            return self.redirected.destination_of(client)
        return Address(*client.getsockname()[:2])

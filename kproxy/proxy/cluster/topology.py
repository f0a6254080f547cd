"""The brokers of one cluster for its connections: the broker that a client dialled, and its upstream addresses.

Discovery and clients' answers fill in the routes. Refuses to know how brokers are found and dialled.
"""

import socket

from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.cluster.transparent import Transparent
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.ends import Admitted, Incoming


class Topology:
    """redirected: the addresses that clients have dialled, for route transparent.

    routes: set by the owner once the bootstrap port is bound. sidecar_broker: the node id of the broker behind the
    bootstrap address, once known, for route sidecar.
    """

    def __init__(self, addresses: BootstrapAddresses, redirected: Transparent | None) -> None:
        self.routes: Routes
        self.sidecar_broker: int | None = None
        self.addresses = addresses
        self.redirected = redirected

    def broker_of(self, client: Incoming | Admitted) -> int | None:
        """Return the node id of the broker that a client dialled, if known."""
        if self.redirected is not None:
            return self.redirected.broker_of(client)
        return self.sidecar_broker if client.node_id is None else client.node_id

    def upstreams(self, client: Incoming | Admitted) -> list[Address]:
        """Return the addresses of a client's broker, in the order to try them; none if the broker is not known yet."""
        if client.destination is not None:
            return [client.destination]
        if client.node_id is None:
            return list(self.addresses.in_order())
        address = self.routes.upstreams.get(client.node_id)
        return [address] if address is not None else []

    def destination_of(self, client: socket.socket) -> Address:
        """Return an accepted client's destination: kproxy's port, or the one before the redirect. Raises OSError."""
        if self.redirected is not None:
            return self.redirected.destination_of(client)
        return Address(*client.getsockname()[:2])

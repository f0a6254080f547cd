"""Dials the broker of an admitted client. Refuses to know relays, and how sockets are opened."""

from time import monotonic_ns

from kproxy.errors import UpstreamError
from kproxy.metrics.counters.upstream import UpstreamCells
from kproxy.proxy.cluster.topology import Topology
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.connection.labels import broker_label
from kproxy.proxy.relay.ends import Admitted, Dialled
from kproxy.proxy.sockets.listeners import Gate
from kproxy.proxy.upstream.connector import BrokerConnector


class Dialling:
    """Counts each dial in `metrics`; `gate` pauses if the process has no descriptors left."""

    def __init__(self, topology: Topology, connector: BrokerConnector, metrics: UpstreamCells, gate: Gate) -> None:
        self._topology = topology
        self._connector = connector
        self._metrics = metrics
        self._gate = gate

    async def open(self, client: Admitted) -> Dialled:
        """Connect to the client's broker, at the first of its addresses that answers. Raises UpstreamError."""
        broker = broker_label(self._topology.broker_of(client))
        upstreams = self._topology.upstreams(client)
        if not upstreams:
            fault = UpstreamError("no answer has named its address yet", "no_address")
            self._metrics.dial_failed(broker, fault.cause)
            raise fault
        bootstraps = client.node_id is None and client.destination is None
        fault = UpstreamError("no bootstrap address")
        for address in upstreams:
            try:
                return await self._dial(address, client, broker)
            except UpstreamError as refused:
                if bootstraps:
                    self._topology.addresses.failed(address)
                fault = refused
        raise fault

    async def _dial(self, address: Address, client: Admitted, broker: str) -> Dialled:
        start = monotonic_ns()
        try:
            dialled = await self._connector.open(address, client=client)
        except UpstreamError as fault:
            self._metrics.dial_failed(broker, fault.cause)
            if isinstance(fault.__cause__, OSError):
                self._gate.check(fault.__cause__)
            raise
        self._metrics.dialled(broker, monotonic_ns() - start)
        return dialled

    def close(self, dialled: Dialled) -> None:
        """Close a connection that no relay has taken over."""
        self._connector.close(dialled.sock)

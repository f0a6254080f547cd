"""TLS of one cluster: its contexts, the steps that use them, and the reload of their files every few seconds.

Refuses to know the files' content, and how a handshake works.
"""

import asyncio
from collections.abc import Callable

from kproxy.metrics.counters.cells import ClusterCells
from kproxy.metrics.counters.tls import BROKER_RESULTS, CLIENT_RESULTS, TlsSide
from kproxy.proxy.admission.client_tls import ClientHandshakes
from kproxy.proxy.cluster.routing import ServerNames
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.tls import contexts
from kproxy.proxy.tls.contexts import Built, Reloading
from kproxy.proxy.tls.handshakes import Handshakes
from kproxy.proxy.upstream.tls import BrokerHandshakes


class ClusterTls:
    """The TLS of a cluster; without steps if its settings have none.

    handshakes(): returns the handshakes of the event loop. names: set if the listener's server names select brokers.
    Raises ConfigError with all faults of the files.
    """

    def __init__(
        self,
        cluster: Cluster,
        cells: ClusterCells,
        handshakes: Callable[[], Handshakes],
        names: ServerNames | None = None,
    ) -> None:
        self.welcome: ClientHandshakes | None = None
        self.broker_step: BrokerHandshakes | None = None
        self._watched: list[tuple[Reloading, TlsSide]] = []
        name = cluster.name
        clients, brokers = cluster.tls, cluster.upstream_tls
        if clients is not None:
            serves = names.serves if names is not None else None

            def built() -> Built:
                return contexts.for_clients(clients, serves, f"{name}: tls")

            reloading, side = self._watch(cells, "client", CLIENT_RESULTS, f"cluster={name} tls", built)
            node_of = names.node_id if names is not None else None
            self.welcome = ClientHandshakes(name, clients, lambda: reloading.context, handshakes(), side, node_of)
        if brokers is not None:

            def built_upstream() -> Built:
                return contexts.for_brokers(brokers, f"{name}: upstream_tls")

            upstream, side = self._watch(
                cells, "broker", BROKER_RESULTS, f"cluster={name} upstream_tls", built_upstream
            )
            self.broker_step = BrokerHandshakes(brokers, lambda: upstream.context, handshakes(), side)

    def _watch(
        self, cells: ClusterCells, side: str, results: tuple[str, ...], whose: str, build: Callable[[], Built]
    ) -> tuple[Reloading, TlsSide]:
        reloading = Reloading(whose, build)
        counted = cells.tls[side] = TlsSide(results, lambda: reloading.expiries)
        self._watched.append((reloading, counted))
        return reloading, counted

    async def watch(self) -> None:
        """Check the files until it is cancelled."""
        while self._watched:
            await asyncio.sleep(contexts.CHECK_S)
            await self.look()

    async def look(self) -> None:
        """Read the files again, and use new content that is valid."""
        for reloading, counted in self._watched:
            failures = reloading.failures
            if await asyncio.to_thread(reloading.reload):
                counted.reloads["ok"] += 1
            counted.reloads["failed"] += reloading.failures - failures

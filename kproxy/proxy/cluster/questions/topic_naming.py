"""Asks a cluster for the names of topics that clients identify by ids not yet named in an answer (KIP-516).

Bounds: one request at a time, NAMING_PAUSE_S apart. Refuses to know who needs the names.
"""

import asyncio
import logging

from kproxy.errors import UpstreamError
from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.cluster.questions.question import ask_topic_names
from kproxy.proxy.filters.policy.topic_names import TopicNames
from kproxy.proxy.tasks import Tasks
from kproxy.proxy.upstream.connector import BrokerConnector

NAMING_PAUSE_S = 0.5  # s between two requests

log = logging.getLogger("kproxy.cluster")


class TopicNaming:
    """names: the known names; looking up an unknown id there starts a request."""

    def __init__(self, cluster: str, addresses: BootstrapAddresses, connector: BrokerConnector, tasks: Tasks) -> None:
        self.names = TopicNames(self._begin)
        self.is_asking = False
        self._cluster = cluster
        self._addresses = addresses
        self._connector = connector
        self._tasks = tasks

    def _begin(self) -> None:
        if not self.is_asking:
            self.is_asking = True
            self._tasks.spawn(self._ask())

    async def _ask(self) -> None:
        try:
            unknown = self.names.unknown()
            for address in self._addresses.in_order():
                try:
                    self.names.learn(await ask_topic_names(address, self._connector, unknown))
                    break
                except UpstreamError as fault:
                    log.debug("cluster=%s: topics have no names yet: %s", self._cluster, fault)
            await asyncio.sleep(NAMING_PAUSE_S)
        finally:
            self.is_asking = False

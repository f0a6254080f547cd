"""What is left of a cluster that a reload removes."""

import asyncio
from ipaddress import ip_network

from kproxy.proxy.process.changing.changes import Changes
from tests.proxy.live import HOST, Wire, kproxy, live


def test_the_series_of_a_removed_cluster_do_not_come_back_with_a_client_that_was_on_its_way_in():
    """It was counted when it was refused, after the cluster's cells had gone: that made them anew, for good."""

    async def test():
        async with kproxy(cluster={"accept_proxy_protocol": True, "trusted_proxies": (ip_network(HOST),)}) as here:
            relays, (proxy,) = here.server.relays, here.server.clusters
            client = await Wire.dial(here.port)
            await here.until(lambda: proxy.making)
            name = proxy.cluster.name
            new = relays.config.model_copy(update={"clusters": ()})
            relays.replace_clusters(new, Changes(removed=(name,), drained=(name,)))
            draining = asyncio.create_task(relays.drain_cluster(name, asyncio.Event()))
            await client.send(b"no header at all\r\n")
            await here.until(lambda: not proxy.making)
            await draining
            assert not here.server.metrics.clusters

    live(test())

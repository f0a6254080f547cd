"""Connections of a worker that learn broker addresses during a reload."""

import socket

from kproxy.proxy.process.shared import Known
from kproxy.proxy.process.workers.divided_cluster import PortsOfParent
from kproxy.proxy.sockets.channel import Channel
from tests.proxy.live import HOST, Broker, kproxy, live
from tests.proxy.process.test_cluster import advertised, is_connected, node


def test_a_response_between_a_reload_and_the_parents_state_contains_the_current_ports():
    """The worker's next cluster has no ports until it receives that state: the first response closed the connection."""

    async def test():
        other = Broker(2)
        async with kproxy() as here:
            client, broker = await here.connect()
            (former,) = here.server.clusters
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel = Channel(ours, {}, lambda: None)
            following = PortsOfParent(here.server.relays.worker, former.cluster, channel)
            former._successor = following.proxy
            nodes = [node(1, here.broker.port), node(2, other.port)]
            addresses = await advertised(client, broker, nodes)
            assert addresses == {1: (HOST, here.port + 2), 2: (HOST, here.port + 3)}
            assert await is_connected(here, addresses[2][1], other)
            following.take(Known(former.cluster.name, here.port, open=frozenset((1, 2))))
            assert await advertised(client, broker, nodes) == addresses
            assert set(following.proxy.routes.upstreams) == {1, 2}  # from now on the next cluster learns
            await following.proxy.stop()
            channel.close()
            theirs.close()

    live(test())

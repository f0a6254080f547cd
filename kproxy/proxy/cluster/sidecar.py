"""Route sidecar: finds the broker of the cluster that runs on this machine.

Duty: compare the address that kproxy dials and the addresses that brokers advertise with the machine's own addresses.
Refuses to know connections.
"""

import asyncio

from kproxy.proxy.cluster.discovery import Brokers
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets.listeners import is_local
from kproxy.proxy.upstream.dial import Dialler

LOOKED_UP = 64  # names of brokers to resolve at once, to find the one on the sidecar's machine


async def find_broker_here(asked: Address, brokers: Brokers, dialler: Dialler) -> int | None:
    """Return the node id of the broker that answers at an address; None if uncertain, as answers do not name a sender.

    A sidecar dials localhost, but the broker advertises a host name: it is the broker on this machine with that port.
    """
    same = [node_id for node_id, at in brokers.items() if at == asked]
    if same or len(brokers) == 1:
        return (same or list(brokers))[0]
    same_port = [node_id for node_id, at in brokers.items() if at.port == asked.port]
    here: list[int] = []
    for start in range(0, len(same_port), LOOKED_UP):
        some = same_port[start : start + LOOKED_UP]
        found = await asyncio.gather(*(_is_here(brokers[node_id], dialler) for node_id in some))
        here += [node_id for node_id, is_here in zip(some, found, strict=True) if is_here]
    return here[0] if len(here) == 1 and await _is_here(asked, dialler) else None


async def _is_here(address: Address, dialler: Dialler) -> bool:
    """Whether the address belongs to this machine; False if its name is not resolved in time."""
    try:
        async with asyncio.timeout(dialler.timeout_s):
            places = await dialler.resolver.addresses(address)
    except OSError:  # includes TimeoutError
        return False
    return any(is_local(place[0]) for _, place in places)

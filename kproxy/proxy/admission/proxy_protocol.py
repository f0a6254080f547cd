"""Reads the PROXY header at the start of a client's connection, if its cluster expects one.

The connecting host must be among `trusted_proxies`: the header is believed, so no other host may send it. The address
in it becomes the client's in logs, metrics, tables, limits and policy. Bounded by the header's size; the timeout is
that of all welcome steps together. Refuses to know what follows.
"""

from kproxy.errors import Malformed, RefusedClient
from kproxy.proxy.config.limits import Networks, is_in
from kproxy.proxy.relay.ends import Incoming, PortCheck
from kproxy.proxy.sockets.proxy_header import Header, read
from kproxy.proxy.sockets.streams import receive

_CHECK_BYTES = 4  # that a health check may send before it ends the connection; the shortest header has 15


class ReadProxyHeader:
    """A welcome step: replaces the peer of a client by the one that its header names."""

    def __init__(self, trusted: Networks) -> None:
        self._trusted = trusted

    async def __call__(self, client: Incoming) -> None:
        if not is_in(client.peer.host, self._trusted):
            text = (
                f"{client.peer.host} is not among trusted_proxies, whose PROXY headers are believed: add it if it is a "
                "balancer of yours; clients connect to the balancer, or to a cluster without accept_proxy_protocol"
            )
            raise RefusedClient("untrusted_proxy", text)
        header = await self._read(client)
        client.peer = header.client or client.peer
        client.server = header.server

    async def _read(self, client: Incoming) -> Header:
        data = b""
        try:
            while isinstance(found := read(data), int):
                try:
                    part = await receive(client.sock, found)
                except ConnectionResetError:
                    part = b""
                if not part and len(data) <= _CHECK_BYTES:
                    raise PortCheck
                if not part:
                    raise Malformed(f"the connection ended within its PROXY protocol header, after {len(data)} bytes")
                data += part
        except Malformed as fault:
            fix = "have the balancer send one (HAProxy: send-proxy-v2), or leave accept_proxy_protocol out"
            raise RefusedClient("proxy_header", f"{fault}: {fix}") from None
        return found

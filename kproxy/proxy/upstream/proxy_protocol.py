"""The PROXY header that a connection to a broker begins with, where its cluster says so: before TLS and login.

A client's connection names the client, and where it connected to; kproxy's own questions say that nobody stands behind
them. Refuses to know who reads it: a balancer before the brokers, or another kproxy; brokers themselves do not.
"""

from contextlib import suppress

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.ends import Outgoing
from kproxy.proxy.sockets.proxy_header import write
from kproxy.proxy.sockets.streams import send_all

UNREAD = "leave proxy_protocol out, unless a balancer or a kproxy reads its header there: brokers do not"


class SendProxyHeader:
    """A step of the way to a broker. version: "v1" or "v2"."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def __call__(self, outgoing: Outgoing) -> None:
        client = outgoing.client
        server = None
        if client is not None:
            server = client.server
            if server is None:
                with suppress(OSError):  # it has gone, which whoever relays it notices
                    server = Address(*client.sock.getsockname()[:2])
        await send_all(outgoing.sock, write(self._version, client.peer if client is not None else None, server))

"""Sends the PROXY header at the start of a connection to a broker, before TLS and login, if so configured.

A client's connection names the client and the address that it dialled; kproxy's own connections name no client (UNKNOWN
or LOCAL). The reader is a balancer in front of the brokers or another kproxy; brokers themselves do not read it.
"""

from contextlib import suppress

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.ends import Outgoing
from kproxy.proxy.sockets.proxy_header import write
from kproxy.proxy.sockets.streams import send_all

UNREAD = "leave proxy_protocol out, unless a balancer or a kproxy reads its header there: brokers do not"


class SendProxyHeader:
    """A step of `BrokerConnector`. version: "v1" or "v2"."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def __call__(self, outgoing: Outgoing) -> None:
        client = outgoing.client
        server = None
        if client is not None:
            server = client.server
            if server is None:
                with suppress(OSError):  # the client has disconnected, which its relay will notice
                    server = Address(*client.sock.getsockname()[:2])
        await send_all(outgoing.sock, write(self._version, client.peer if client is not None else None, server))

"""Bytes sent before a relay starts: all arrive over plain and TLS sockets, however few the kernel accepts at once."""

import asyncio
import socket
import ssl

import pytest

from kproxy.proxy.sockets.streams import receive, receive_exactly, send_all
from kproxy.proxy.tls.handshakes import Handshakes
from kproxy.proxy.tls.tls_socket import TlsSocket
from tests.certificates import Authority
from tests.proxy.live import live

MUCH = bytes(range(256)) * 8192  # 2 MiB: more than the buffers of a socket


async def pair(tmp_path, tls):
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    if not tls:
        return ends
    authority = Authority(tmp_path)
    certificate = authority.server()
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(certificate.certificate, certificate.key)
    of_client = ssl.create_default_context(cafile=str(authority.bundle))
    handshakes = Handshakes()
    client = TlsSocket(ends[0], of_client, handshakes.buffer, server_side=False, server_name="localhost")
    server = TlsSocket(ends[1], of_server, handshakes.buffer, server_side=True)
    await asyncio.gather(handshakes.run(client), handshakes.run(server))
    handshakes.close()
    return client, server


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_all_bytes_arrive_while_both_sides_send(tmp_path, tls):
    async def test():
        one, other = await pair(tmp_path, tls)
        with one, other:
            async with asyncio.timeout(60):
                here, there, *_ = await asyncio.gather(
                    receive_exactly(one, len(MUCH)),
                    receive_exactly(other, len(MUCH) - 1),
                    send_all(one, MUCH[1:]),
                    send_all(other, MUCH),
                )
            assert here == MUCH
            assert there == MUCH[1:]

    live(test())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_close_in_the_middle_raises_eof_error_with_and_without_tls(tmp_path, tls):
    async def test():
        one, other = await pair(tmp_path, tls)
        with one:
            with other:
                await send_all(other, b"ab")
            assert await receive(one, 1) == b"a"
            with pytest.raises(EOFError):
                await receive_exactly(one, 2)
            assert await receive(one, 1) == b""

    live(test())

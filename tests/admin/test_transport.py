"""TLS connections of the admin port: no peer blocks the loop for long, and responses arrive complete."""

import asyncio
import ctypes
import ctypes.util
import socket
import ssl
import struct
import threading
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from kproxy.admin.server import Admin
from kproxy.admin.transport import HIGH_BYTES, Readers, TlsTransport
from kproxy.proxy.config.tls import ClientTls
from kproxy.proxy.tls import contexts
from tests.certificates import Authority
from tests.proxy.live import TlsWire, Wire, live

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@asynccontextmanager
async def serving(authority, scrape=lambda _: (b"up 1\n", "text/plain")):
    """(the admin server, a client's context)"""
    settings = ClientTls(**authority.server().settings())
    tls = contexts.Reloading("admin", lambda: contexts.for_clients(settings))
    admin = Admin("127.0.0.1", 0, scrape=scrape, not_ready=tuple, api={}, tls=tls)
    await admin.start()
    try:
        yield admin, ssl.create_default_context(cafile=str(authority.bundle))
    finally:
        await admin.stop()


async def connected(admin, trusted):
    wire = await Wire.dial(admin.address[1])
    return await TlsWire(wire.sock).begin(trusted, server_side=False)


def renews(port, asks, stop, sent):
    """Renew the key, and send nothing else, until the server ends the connection."""
    library = ctypes.CDLL(ctypes.util.find_library("ssl"))
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    theirs = ctypes.c_void_p(
        library.SSL_new(ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method()))))
    )
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        library.SSL_set_fd(theirs, sock.fileno())
        library.SSL_set_connect_state(theirs)
        assert library.SSL_do_handshake(theirs) == 1
        while not stop.is_set():
            library.SSL_key_update(theirs, asks)
            if library.SSL_do_handshake(theirs) != 1:
                return
            sent.append(1)


@pytest.mark.skipif(ctypes.util.find_library("ssl") is None, reason="needs libssl: Python asks for no new keys")
@pytest.mark.parametrize("asks", [0, 1])
def test_a_client_that_renews_its_keys_endlessly_is_disconnected(authority, asks, monkeypatch):
    """Each new key takes 0.1 to 0.2 ms of the loop, and 16 KiB have 600 of them."""
    monkeypatch.setattr("kproxy.admin.connections.REQUEST_S", 600.0)
    stop, sent = threading.Event(), []

    async def main():
        async with serving(authority) as (admin, trusted):
            attack = asyncio.create_task(asyncio.to_thread(renews, admin.address[1], asks, stop, sent))
            try:
                async with asyncio.timeout(20):
                    await attack
            finally:
                stop.set()
            client = await connected(admin, trusted)
            await client.send(HEALTH)
            assert (await client.read(12)) == b"HTTP/1.1 200"
            client.close()

    live(main())
    assert sent


def test_one_connection_reads_in_a_turn_of_the_loop():
    read = []

    class Transport:
        def __init__(self, name):
            self.name = name

        def read(self):
            read.append(self.name)

    async def main():
        loop = asyncio.get_running_loop()
        readers = Readers()
        some = [Transport(name) for name in "abcd"]
        for transport in [*some, some[0]]:
            readers.add(transport, loop)
        readers.remove(some[2])
        for count in range(1, 4):
            await asyncio.sleep(0)
            assert len(read) == count
        readers.add(some[2], loop)
        await asyncio.sleep(0)

    uvloop.run(main())
    assert read == ["a", "b", "d", "c"]


def test_bytes_of_tls_itself_that_did_not_fit_are_sent_once_there_is_room():
    """For example the answer to a new key: nothing else may ever be sent that would take it along."""
    sent, writers = [], []

    class Sock:
        tls = on_leftover = on_blocked = None
        held_bytes = 9

        def getpeername(self):
            return ("10.0.0.7", 40000)

        def getsockname(self):
            return ("10.0.0.1", 9600)

        def send(self, data):
            sent.append(bytes(data))

    class Loop:
        def add_reader(self, *_):
            pass

        def call_soon(self, *_):
            pass

        def add_writer(self, _, has_room):
            writers.append(has_room)

        def remove_writer(self, _):
            writers.clear()

    sock = Sock()
    TlsTransport(Loop(), sock, asyncio.Protocol(), None, Readers())
    sock.on_blocked()
    assert not sent
    (has_room,) = writers
    has_room()
    assert sent == [b""] and not writers


def test_many_requests_in_small_records_are_answered_in_order(authority):
    async def main():
        async with serving(authority) as (admin, trusted):
            client = await connected(admin, trusted)
            for byte in HEALTH * 20:
                await client.send(bytes([byte]))
            answer = b""
            while answer.count(b"ok\n") < 20:
                answer += await client.read(1)
            assert answer.count(b"HTTP/1.1 200") == 20
            client.close()

    live(main())


def test_a_refusal_arrives_complete_although_more_was_sent_than_is_read(authority):
    async def main():
        async with serving(authority) as (admin, trusted):
            client = await connected(admin, trusted)
            with suppress(ConnectionError):
                await client.send(b"no HTTP\r\n\r\n" + bytes(8 << 20))
            answer = await client.read(64)
            assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
            client.close()
            while admin.gate.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    live(main())


@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("says", [b"", HEALTH])
def test_a_client_that_disconnects_frees_its_slot(authority, how, says):
    async def main():
        async with serving(authority) as (admin, trusted):
            client = await connected(admin, trusted)
            if says:
                await client.send(says)
            sock = socket.socket(fileno=client.sock.detach())
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            async with asyncio.timeout(10):
                while admin.gate.connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    live(main())


def test_a_response_ends_with_a_tls_close_notify(authority):
    async def main():
        async with serving(authority, lambda _: (b"x" * (1 << 20), "text/plain")) as (admin, trusted):
            client = await connected(admin, trusted)
            await client.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await client.rest()).endswith(b"\r\n\r\n" + b"x" * (1 << 20))  # else ConnectionResetError
            client.close()

    live(main())


def test_a_writer_is_paused_until_the_client_reads(authority):
    paused = []

    class Writer(asyncio.Protocol):
        def pause_writing(self):
            paused.append(True)

        def resume_writing(self):
            paused.append(False)

    async def main():
        async with serving(authority) as (admin, trusted):
            made = []
            handler = TlsTransport.__init__

            def caught(self, *arguments):
                handler(self, *arguments)
                made.append(self)

            TlsTransport.__init__ = caught
            try:
                client = await connected(admin, trusted)
                while not made:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            finally:
                TlsTransport.__init__ = handler
            (transport,) = made
            aiohttps = transport.get_protocol()
            transport.set_protocol(Writer())
            count = 0
            while not paused:
                transport.write(b"y" * HIGH_BYTES)
                count += HIGH_BYTES
            assert transport.get_write_buffer_size() > HIGH_BYTES
            assert await client.read(count) == b"y" * count
            await asyncio.sleep(0)
            assert paused == [True, False] and transport.get_write_buffer_size() == 0
            transport.set_protocol(aiohttps)
            transport.abort()
            client.close()

    live(main())

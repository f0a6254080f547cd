"""A kproxy in the test's own loop, between clients and a broker that do exactly what they are told.

The broker does what a real one cannot be made to do; its bytes come from the codec all the same.
"""

import asyncio
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from kproxy.metrics.counters.cells import ClusterCells
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.proxy.config.load import load
from kproxy.proxy.config.tls import ClientTls, UpstreamTls
from kproxy.proxy.process.server import Server
from kproxy.proxy.sockets import sockets
from kproxy.proxy.sockets.streams import readable, writable
from kproxy.wire.connection import Sink
from tests.certificates import Authority
from tests.ports import free_ports
from tests.wire.playbook import request, response

HOST = "127.0.0.1"
TIMEOUT_S = 60
RECEIVE_BYTES = 128 * 1024  # of the test's own sockets, so that back-pressure does not need hundreds of megabytes


def live(test: Coroutine[Any, Any, None], within_s: float = TIMEOUT_S) -> None:
    """Run a test in a loop of its own; one that hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(within_s):
            await test

    uvloop.run(limited())


class Wire:
    """One end of a connection, with nothing between the test and the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.loop = asyncio.get_running_loop()

    @classmethod
    async def dial(cls, port: int) -> "Wire":
        wire = cls(socket.socket())
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        await wire.loop.sock_connect(wire.sock, (HOST, port))
        return wire

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def read(self, count: int) -> bytes:
        """Exactly so many bytes, fewer only at the peer's end."""
        data = bytearray()
        while len(data) < count and (part := await self.loop.sock_recv(self.sock, min(count - len(data), 1 << 20))):
            data += part
        return bytes(data)

    async def frame(self) -> bytes:
        head = await self.read(4)
        return head + await self.read(int.from_bytes(head, "big"))

    async def rest(self) -> bytes:
        """Everything up to the peer's end."""
        return await self.read(1 << 40)

    async def is_silent(self, seconds: float = 0.1) -> bool:
        """Nothing comes, not even an end."""
        await asyncio.sleep(seconds)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False

    def end(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


class TlsWire(Wire):
    """The same over TLS, by Python's own socket: it does things another way than kproxy's."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._ahead = b""

    @property
    def tls(self) -> ssl.SSLSocket:
        assert isinstance(self.sock, ssl.SSLSocket)
        return self.sock

    async def begin(self, context: ssl.SSLContext, *, server_side: bool, name: str | None = None) -> "TlsWire":
        """Shake hands. Raises what ssl raises."""
        name = "localhost" if name is None and not server_side else name
        self.sock = context.wrap_socket(
            self.sock,
            server_side=server_side,
            server_hostname=name or None,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
        await self._when_ready(self.tls.do_handshake)
        return self

    async def _when_ready(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                await readable(self.sock)
            except ssl.SSLWantWriteError:
                await writable(self.sock)
            except ssl.SSLEOFError as fault:  # an end of which TLS says nothing; ssl calls a reset one too
                raise ConnectionResetError("reset, or an end without close_notify") from fault

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            part = view[: 1 << 16]
            view = view[await self._when_ready(lambda part=part: self.sock.send(part)) :]

    async def read(self, count: int) -> bytes:
        data = bytearray(self._ahead[:count])
        self._ahead = self._ahead[count:]
        while len(data) < count:
            at_most = min(count - len(data), 1 << 20)
            try:
                part = await self._when_ready(lambda at_most=at_most: self.sock.recv(at_most))
            except ssl.SSLZeroReturnError:  # an end, after one of ours
                break
            if not part:
                break
            data += part
        return bytes(data)

    async def is_silent(self, seconds: float = 0.1) -> bool:
        await asyncio.sleep(seconds)
        try:
            self._ahead += self.sock.recv(1)
        except ssl.SSLWantReadError:
            return True
        return False

    def end(self) -> None:
        with suppress(ssl.SSLError):  # the peer's own end is not here yet
            self.tls.unwrap()
        socket.socket.shutdown(self.sock, socket.SHUT_WR)

    def close(self) -> None:
        with suppress(OSError):
            while self.sock.recv(1 << 16):  # what TLS itself sent, like session tickets: unread, it makes this a reset
                pass
        self.sock.close()


@dataclass
class Secured:
    """TLS of a test's kproxy: its settings, and the contexts of both ends; None: that end has no TLS."""

    tables: dict[str, Any]
    of_client: ssl.SSLContext | None
    of_broker: ssl.SSLContext | None

    @classmethod
    def make(cls, folder: Path, *, clients: bool = True, brokers: bool = True) -> "Secured":
        authority = Authority(folder)
        certificate = authority.server()
        tables = {"tls": ClientTls(**certificate.settings()), "upstream_tls": UpstreamTls(ca=authority.bundle)}
        of_broker = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        of_broker.load_cert_chain(certificate.certificate, certificate.key)
        of_client = ssl.create_default_context(cafile=str(authority.bundle))
        tables = {name: table for name, table in tables.items() if (clients if name == "tls" else brokers)}
        return cls(tables, of_client if clients else None, of_broker if brokers else None)


secured: Secured | None = None  # where tests run over TLS


class Broker:
    """Accepts, and answers what kproxy itself asks at start; the rest is the test's."""

    def __init__(self, node_id: int = 1, port: int = 0) -> None:
        self.node_id = node_id
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self.sock.bind((HOST, port))
        self.sock.listen(64)
        self.sock.setblocking(False)
        self.port = int(self.sock.getsockname()[1])

    async def accept(self) -> Wire:
        sock, _ = await asyncio.get_running_loop().sock_accept(self.sock)
        if secured is not None and secured.of_broker is not None:
            return await TlsWire(sock).begin(secured.of_broker, server_side=True)
        return Wire(sock)

    async def asked_as_before_0_10(self) -> Wire:
        """The connection on which kproxy asks Metadata v0, since the one on which it asked ApiVersions was closed."""
        wire = await self.accept()
        await wire.frame()
        wire.close()
        wire = await self.accept()
        await wire.frame()
        return wire

    def brokers(self) -> list[dict[str, Any]]:
        return [{"nodeId": self.node_id, "host": HOST, "port": self.port}]

    async def answer_kproxy(self, brokers: list[dict[str, Any]] | None = None) -> None:
        wire = await self.accept()
        await wire.frame()
        offers = [{"apiKey": METADATA, "minVersion": 0, "maxVersion": 12}]
        await wire.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": offers}))
        await wire.frame()
        await wire.send(response(METADATA, 12, METADATA, {"brokers": self.brokers() if brokers is None else brokers}))
        wire.close()

    def close(self) -> None:
        self.sock.close()


class Counted:
    """The counters of a cluster; those at 0 are left out, as they were there before anything happened."""

    def __init__(self, cells: ClusterCells) -> None:
        self.unanswered = +Counter(cells.unanswered)  # by api and cause
        self.faults = +Counter(cells.faults)  # by side and kind
        self.paused = +Counter(cells.paused)  # by side
        self.rewritten = +Counter(cells.rewritten)  # by api
        self.neutralised = +Counter(cells.neutralised)
        self.unbound = cells.unbound
        self.accepted = sum(count for broker in cells.brokers.values() for count in broker.accepted.values())
        self.disconnects: Counter[str] = Counter()  # by cause, of all listeners and brokers
        for broker in cells.brokers.values():
            for (_, cause), count in broker.disconnects.items():
                self.disconnects[cause] += count
        self.disconnects = +self.disconnects
        self.silent = sum(count for broker in cells.brokers.values() for count in broker.silent.values())
        self.brokers = {name for name, broker in cells.brokers.items() if any(broker.accepted.values())}


class Live:
    def __init__(self, server: Server, broker: Broker) -> None:
        self.server = server
        self.broker = broker

    @property
    def port(self) -> int:
        return self.server.clusters[0].address.port

    @property
    def relays(self) -> int:
        return len(self.server.relays.worker.relays)

    @property
    def limits(self) -> dict[str, int]:
        """How often which limit was reached."""
        (cells,) = self.server.metrics.clusters.values()
        return dict(+Counter(cells.limits))

    @property
    def counted(self) -> "Counted":
        """What the metrics of the one cluster have counted so far."""
        (cells,) = self.server.metrics.clusters.values()
        return Counted(cells)

    async def connect(self) -> tuple[Wire, Wire]:
        """(a client's end, the broker's end) of one connection through kproxy"""
        client = await self.dial()
        return client, await self.broker.accept()

    async def dial(self) -> Wire:
        """A client's end."""
        client = await Wire.dial(self.port)
        if secured is not None and secured.of_client is not None:
            return await TlsWire(client.sock).begin(secured.of_client, server_side=False)
        return client

    async def until(self, condition: Any) -> None:
        while not condition():  # noqa: ASYNC110 - of the proxy, which has no event for it
            await asyncio.sleep(0.005)


KERNEL_S = 60  # a thread of its own begins with times of arrival, which has to be scheduled first


@contextmanager
def arrival_times() -> Iterator[None]:
    """Inside, the kernel has the time of arrival of each segment.

    It begins with them a moment after the first socket of the machine asks for them, and ends with the last one.
    """
    with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            sockets.prepare(here)
            here.setblocking(True)
            until = time.monotonic() + KERNEL_S
            while True:
                there.send(b"x")
                if sockets.receive_timed(here.recvmsg_into, bytearray(1))[1] is not None:
                    break
                assert time.monotonic() < until, (
                    "this kernel has no times of arrival: lateness of kproxy would be booked on brokers"
                )
            yield


Talk = Callable[[Live, Wire, Wire], Coroutine[Any, Any, None]]


@asynccontextmanager
async def kproxy(
    broker: Broker | None = None,
    *,
    wait: bool = True,
    sinks: Sequence[Sink] = (),
    cluster: dict[str, Any] | None = None,
    **flags: Any,
) -> AsyncIterator[Live]:
    """A kproxy before that broker, on ports of its own, and ready. cluster: settings that are tables, as models.

    Where a test says nothing of discovery, kproxy asks once: a later question, at its interval or after the loss of a
    broker, would come among the connections that the test awaits at the broker.
    """
    asks_again = "discovery_interval_s" in flags
    broker = broker or Broker()
    port = flags.pop("port", None) or free_ports(6)
    ours = {"listen": f"{HOST}:{port}", "bootstrap": f"{HOST}:{broker.port}", "drain_timeout_s": 0.2}
    flags = ours | {"discovery_interval_s": 3600} | flags
    config = load(flags=flags)
    cluster = (secured.tables if secured is not None else {}) | (cluster or {})
    if cluster:
        config = config.model_copy(update={"clusters": (config.clusters[0].model_copy(update=cluster),)})
    server = Server(config, sinks)
    here = Live(server, broker)
    try:
        await server.start()
        if wait:
            await broker.answer_kproxy()
            await here.until(lambda: not server.not_ready())
        if wait and not asks_again:
            for each in server.clusters:
                each._discovery.broker_lost = lambda: None
        yield here
    finally:
        await server.stop()
        broker.close()


def behind_kproxy(**flags: Any) -> Callable[[Talk], Callable[[], None]]:
    """A test that gets a kproxy and both ends of one connection through it."""

    def runs(test: Talk) -> Callable[[], None]:
        async def connected() -> None:
            async with kproxy(**flags) as here:
                await test(here, *await here.connect())

        def run() -> None:  # not functools.wraps: pytest would take the arguments for fixtures
            live(connected())

        run.__name__ = run.__qualname__ = test.__name__
        run.__doc__ = test.__doc__
        run.__module__ = test.__module__
        return run

    return runs


__all__ = ["HOST", "Broker", "Live", "Wire", "behind_kproxy", "free_ports", "kproxy", "live", "request", "response"]

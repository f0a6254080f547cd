"""The operator's HTTP: /metrics, /health, /ready, live state as JSON under /api/, and the page that shows it.

Duty: answer requests about this process without disturbing it. A scrape is rendered on a thread, a list of rows in
slices between which the relays run; all other answers are small, and computed one at a time (`turns.py`).

Connections: at most `max_connections`, each with REQUEST_S for the headers of a request, as long again for its body,
and IDLE_S between two requests. A new connection that takes the last place displaces the one that has been silent for
longest, from the network with the most connections; a client that is reading its answer goes last. A connection with
a request is not silent: without TLS, kproxy reads the bytes of new connections before it displaces one, except for a
network with more than FEW. If none is silent, accepting pauses, and every connection closes after its current answer;
the client must take a piece of it within FULL_S. Thus silent and busy connections lock out others only for the duration
of the current requests, and a new connection never displaces one that has just completed its handshake.

Answers: a large answer is written in pieces, so kproxy holds it once, without copies in transports. All of them
together have MAX_UNTAKEN bytes; beyond that, kproxy closes the client that has taken nothing for longest. A stream ends
if its client has taken no line for TAKEN_S. A TLS handshake is queued (`openings.py`) once its first record has
arrived. A turn of the loop reads READ_BYTES of a connection, and with TLS (`transport.py`) of one connection in total.
kproxy reads nothing after malformed HTTP, nor the rest of a body that its handler does not want.

Invariants: a GET changes nothing; an answer is never older than its request (no cache, here or in between); one scrape
is rendered at a time. Refuses to know metrics, sessions and sockets of Kafka: it is given callables. Authorization:
`guard.py`.
"""

import asyncio
import html
import json
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from kproxy import __version__
from kproxy.admin import connections
from kproxy.admin.bodies import json_line, json_of_slices, packed, read_parameters
from kproxy.admin.connections import COMMON_HEADERS, NEW, TAKING, Connection, close_if_full, log, rank, timed
from kproxy.admin.guard import Guard
from kproxy.admin.live import Encoded
from kproxy.admin.openings import Openings
from kproxy.admin.page import PAGE_HEADERS, Asset
from kproxy.admin.parameters import Noting, NotNow
from kproxy.admin.scrapes import Scrape, Scrapes
from kproxy.admin.transport import Readers, TlsTransport
from kproxy.admin.turns import Turns
from kproxy.proxy.config.addresses import Address, network_of
from kproxy.proxy.sockets.listeners import Gate, Listener, resolve
from kproxy.proxy.tasks import Tasks
from kproxy.proxy.tls.contexts import CHECK_S, Reloading
from kproxy.proxy.tls.handshakes import Handshakes, first_record
from kproxy.proxy.tls.tls_socket import TlsSocket

# The time after which a thread that waits for the interpreter gets it. With Python's default of 5 ms, each system call
# of a relay during a scrape could cost 5 ms: p99.9 5.1 ms measured with 7,500 samples, 0.6 ms with this value.
_TURN_S = 0.0002

TAKEN_S = 10.0  # time for the client to take a line of a stream, and for which a trace waits for a slow reader
MAX_CONNECTIONS = 32
READ_TURNS = 10  # turns of the loop between the accept of a connection and the read of a request that has arrived
FEW = 4  # connections of one network: as many as a browser, or a scraper and an operator, need
READ_BYTES = 16 * 1024  # in the kernel; as chunks of one byte, the most expensive case, they take 2 ms to parse
_PIECE = 64 * 1024  # a larger answer is written in pieces of this size
MAX_UNTAKEN = 64 * 1024 * 1024  # bytes of all answers that are written in pieces
MAX_BODY = 64 * 1024  # of a request
RETRY_AFTER_S = "1"  # for answers that are not available yet
_BACKLOG = 128
_SHUTDOWN_S = 1.0  # for pending answers when the process ends

Query = Mapping[str, str]
Action = Callable[[Query], Awaitable[tuple[int, Any]]]  # returns (HTTP status, the value to send as JSON)


class Question(Protocol):
    """A read of the admin API, from counters."""

    async def follow(self) -> None:
        """Run until kproxy ends."""

    async def asked(self, query: Query) -> Any:
        """The value to send as JSON. Raises ValueError for a bad query."""


Lines = AsyncIterator[Mapping[str, Any] | None]  # None: no line yet

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>kproxy</title>
<style>
  :root {{ color-scheme: light dark; font: 16px/1.6 system-ui, sans-serif }}
  body {{ max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}
  dt {{ font-family: ui-monospace, monospace }} dd {{ margin: 0 0 .8rem 1.5rem; opacity: .75 }}
  .ready {{ color: seagreen }} .unready {{ color: crimson }}
</style>
<h1>kproxy <small>{version}</small></h1>
<p class="{state}">{readiness}</p>
<dl>{links}</dl>
</html>
"""


class Admin:
    """The HTTP server.

    scrape(accept) -> (body, content type): the metrics in the format of an Accept header; called on a thread.
    not_ready() -> the reasons why clients should not connect yet; empty: ready.
    api: name -> a callable that gets the parameters of the query and returns the value of GET /api/<name>: a value, an
    awaitable, or slices of a list, between which the relays run. It is called on the loop, and so must be quick. It
    raises ValueError for a bad query, NotNow if the answer is not available yet.
    actions: name -> the handler of POST /api/<name>, which gets the parameters of the query and of a JSON object in the
    body. Only these requests change something. It raises ValueError for bad parameters.
    streams: like actions; their JSON lines are sent until they end or the client is gone.
    page: the files under /page/, and at / (its index.html); None: / is a list of links.
    guard: authorization. tls: the context of new connections, reloaded when its files change; None: plain HTTP.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        scrape: Scrape,
        not_ready: Callable[[], Sequence[str]],
        api: Mapping[str, Callable[[Query], Any]],
        actions: Mapping[str, Action] | None = None,
        streams: Mapping[str, Callable[[Query], Lines]] | None = None,
        page: Mapping[str, Asset] | None = None,
        guard: Guard | None = None,
        tls: Reloading | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._host = host
        self._port = port
        self._scrapes = Scrapes(scrape)
        self._not_ready = not_ready
        self._api = api
        self._actions = actions or {}
        self._streams = streams or {}
        self._page = page
        self._guard = guard or Guard()
        self._tls = None if tls is None else (tls, Handshakes())
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self.gate = Gate(max_connections, name=f"admin {Address(host, port)}")
        # Connections without a pending request, by the loop time since when, longest first.
        self._idle: dict[Connection, float] = {}
        self._networks: Counter[str] = Counter()  # connections by the network of their clients
        self._tasks = Tasks("admin")
        self._openings = Openings(max(1, max_connections // 2))
        self._readers = Readers()
        self._turns = Turns()
        self._deciding: asyncio.Handle | None = None  # pending decision: which connection the newest one displaces

    async def start(self) -> None:
        """Bind and serve. Raises OSError if the address cannot be bound."""
        app = web.Application(middlewares=[timed, self._guard.middleware], client_max_size=MAX_BODY)
        app.on_response_prepare.append(_common)
        app.router.add_get("/", self._index if self._page is None else self._asset)
        if self._page is not None:
            app.router.add_get("/page/{name}", self._asset)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/api", self._api_names)
        app.router.add_get("/api/{name}", self._api_value)
        app.router.add_post("/api/{name}", self._api_action)
        sys.setswitchinterval(min(_TURN_S, sys.getswitchinterval()))
        self._runner = web.AppRunner(
            app, access_log=None, logger=log, handle_signals=False, shutdown_timeout=_SHUTDOWN_S
        )
        await self._runner.setup()
        try:
            self._listener = Listener(self.gate, resolve(self._host), self._port, _BACKLOG, self._accepted, "admin")
        except OSError:
            await self.stop()
            raise
        for sock in self._listener.sockets:  # accepted sockets inherit the options
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        if self._tls is not None:
            self._tasks.spawn(self._follow_files(self._tls[0]))

    async def _follow_files(self, tls: Reloading) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(tls.reload)

    async def stop(self) -> None:
        self.gate.close()
        if self._deciding is not None:
            self._deciding.cancel()
        await self._tasks.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        for connection in tuple(self._idle):  # accepted just now
            connection.give_up()
            connection.left()
        if self._tls is not None:
            self._tls[1].close()
        self._scrapes.stop()

    @property
    def address(self) -> tuple[str, int]:
        """The address, with the port that the kernel chose."""
        if self._listener is None:
            raise RuntimeError("the admin server has not been started")
        return self._listener.address

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{Address(*self.address)}"

    @property
    def offers(self) -> str:
        """The address and its URLs, for the log."""
        page = "" if self._page is None else f", a page for browsers at {self.url}/"
        return f"admin at {self.url}: /metrics /health /ready{page}"

    # --- connections -------------------------------------------------------------------------------------------------

    def _accepted(self, client: socket.socket, peer: Address) -> None:
        assert self._runner is not None and self._runner.server is not None
        network = network_of(peer.host)

        def left() -> None:
            self._networks[network] -= 1
            self._networks += Counter()  # drop zero counts
            self.gate.leave()

        loop = asyncio.get_running_loop()
        connection = Connection(self._runner.server, loop, network, self._idle, lambda: not self.gate.is_open, left)
        connection.is_opening = self._tls is not None
        self.gate.enter()
        self._networks[network] += 1
        self._tasks.spawn(self._serve(client, peer, connection))
        if self._deciding is not None:
            self._deciding.cancel()
            self._deciding = None
        if self.gate.is_open:
            return
        if self._tls is None and self._networks[network] <= FEW:
            self._make_room_after_reads(connection)
        else:
            self._make_room(connection)

    def _make_room_after_reads(self, connection: Connection, turns: int = READ_TURNS) -> None:
        """Let the loop read the bytes of new connections for a number of turns, then make room.

        Until then no further one is accepted, unless another one ends.
        """
        self._deciding = None
        if turns:
            loop = asyncio.get_running_loop()
            self._deciding = loop.call_soon(self._make_room_after_reads, connection, turns - 1)
        else:
            self._make_room(connection)

    async def _serve(self, client: socket.socket, peer: Address, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        if connection.is_given_up:
            client.close()
            connection.left()
            return
        if self._tls is not None:
            connection.opening = asyncio.current_task()
        try:
            if self._tls is None:
                # uvloop does not report the end of a connection whose begin is cancelled: `stop` ends it.
                await asyncio.shield(loop.connect_accepted_socket(lambda: connection, client))
            else:
                if await first_record(client):  # otherwise the handshake fails at once, with the reason
                    connection.works()  # from here on the client waits for kproxy
                    await self._openings.turn(peer.host)
                    connection.waits(connections.REQUEST_S)
                connection.is_opening = False
                self._make_room(connection)
                files, handshakes = self._tls
                context = files.context
                client = tls = TlsSocket(client, context, handshakes.buffer, server_side=True)
                async with asyncio.timeout(connections.REQUEST_S):
                    await handshakes.run(tls)
                TlsTransport(loop, tls, connection, context, self._readers)
        except (OSError, EOFError):  # the client closed the connection, or does not use TLS
            client.close()
            connection.left()
        except asyncio.CancelledError:
            if self._tls is not None:
                client.close()
                connection.left()
            raise

    def _make_room(self, connection: Connection) -> None:
        """If all places are taken, displace the connection that has been silent for longest.

        The order is: connections that have not begun their handshake, connections that stall in it, connections whose
        KEPT_S is over, one of the network with the most places if it has more than FEW, connections that read an
        answer, the new connection. While handshakes are queued, only queued connections are displaced, and none while
        more are queued than have had their turn. Thus half of the places have a handshake, for any number of addresses,
        and each connection keeps its place for that number of turns.
        """
        if self.gate.is_open:
            return
        others = [other for other in self._idle if other is not connection]
        waiting = self._openings.waiting
        if waiting and (connection.is_opening or waiting > sum(not other.is_opening for other in others)):
            others = [other for other in others if other.is_opening]
        if others:
            now = asyncio.get_running_loop().time()
            ranks = {other: rank(other, now - self._idle[other]) for other in others}
            if connection in self._idle:
                ranks[connection] = TAKING

            def order(other: Connection) -> tuple[int, int, int]:
                return min(ranks[other], NEW), -max(self._networks[other.network], FEW), ranks[other]

            min(ranks, key=order).give_up()

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = await self._scrapes.rendered(request.headers.get("Accept", ""))
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        body, headers = await packed(request, body, headers)
        return await self._sent(request, body, headers)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        reasons = list(self._not_ready())
        status = 503 if reasons else 200
        if "application/json" in request.headers.get("Accept", ""):
            return web.json_response({"ready": not reasons, "reasons": reasons}, status=status)
        text = "".join(f"not ready: {reason}\n" for reason in reasons) or "ready\n"
        return web.Response(text=text, status=status)

    async def _api_names(self, _: web.Request) -> web.Response:
        return web.json_response({name: f"/api/{name}" for name in self._api})

    async def _api_value(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name in self._actions and name not in self._api:
            raise web.HTTPMethodNotAllowed("GET", ["POST"])
        if name not in self._api:
            raise web.HTTPNotFound(text=f"no such value: /api names them all ({', '.join(self._api)})\n")
        query = Noting(request.query)
        try:
            value = await self._turns.make(lambda: self._api[name](query))
            if asyncio.iscoroutine(value):
                value = await value
            query.check()
            text = await self._text_of(value)
        except NotNow as fault:
            headers = {"Retry-After": RETRY_AFTER_S}
            raise web.HTTPServiceUnavailable(text=f"{fault}\n", headers=headers) from None
        except ValueError as fault:
            raise web.HTTPBadRequest(text=f"{fault}\n") from None
        headers = {"Content-Type": "application/json; charset=utf-8"}
        body, headers = await packed(request, text.encode(), headers)
        return await self._sent(request, body, headers)

    async def _text_of(self, value: Any) -> str:
        if isinstance(value, Encoded):
            return value
        if isinstance(value, AsyncIterator):
            return await json_of_slices(value)
        return await self._turns.make(lambda: json.dumps(value))

    async def _api_action(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._actions and name not in self._streams:
            if name in self._api:
                raise web.HTTPMethodNotAllowed("POST", ["GET"], text=f"/api/{name} is read with GET\n")
            names = ", ".join((*self._actions, *self._streams))
            raise web.HTTPNotFound(text=f"no such action: there {f'are {names}' if names else 'is none'}\n")
        try:
            parameters = {**request.query, **await read_parameters(request)}
            if name in self._streams:
                return await self._stream(request, self._streams[name](parameters))
            status, value = await self._actions[name](parameters)
        except ValueError as fault:
            raise web.HTTPBadRequest(text=f"{fault}\n") from None
        return web.json_response(value, status=status)

    async def _stream(self, request: web.Request, lines: Lines) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            first = await anext(lines, None)  # an error in the parameters is raised before the first byte
            await response.prepare(request)
            await _taken(response.write(json_line(first)))
            async for line in lines:
                await _taken(response.write(json_line(line)))
            await _taken(response.write_eof())
        except ConnectionError:  # the client is gone
            if request.transport is not None:
                request.transport.abort()
        finally:
            await lines.aclose()  # type: ignore[attr-defined]  # they are generators
        return response

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        assert self._page is not None
        asset = self._page.get(request.match_info.get("name", "index.html"))
        if asset is None:
            raise web.HTTPNotFound(text="no such part of the page\n")
        headers = {"Content-Type": asset.content_type, **PAGE_HEADERS}
        body, headers = await packed(request, asset.body, headers)
        return await self._sent(request, body, headers)

    async def _sent(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """The answer with that body. A large one has been written when this returns.

        Not by aiohttp: it gives the transport a copy of the whole body, and TLS makes two more, until the client reads.
        """
        if len(body) <= _PIECE or request.method == "HEAD":
            return web.Response(body=body, headers=headers)
        connection = request.protocol
        assert isinstance(connection, Connection)
        answer = web.StreamResponse(headers=headers)
        answer.content_length = len(body)
        close_if_full(connection, answer)
        self._make_room_for(len(body))
        connection.untaken = len(body)
        patience_s = connections.FULL_S if connection.is_full() else connections.IDLE_S
        connection.waits(patience_s)
        view = memoryview(body)
        try:
            await answer.prepare(request)
            for start in range(0, len(body), _PIECE):
                await answer.write(view[start : start + _PIECE])
                if connection.transport is not None:  # the client has taken most of the written bytes
                    connection.waits(patience_s)
            await answer.write_eof()
        except ConnectionError:  # the client is gone
            if request.transport is not None:
                request.transport.abort()
        finally:
            connection.untaken = 0
        return answer

    def _make_room_for(self, count: int) -> None:
        """Close the clients that have taken nothing for longest, until there is memory for `count` more bytes."""
        slow = [connection for connection in self._idle if connection.untaken]
        count += sum(connection.untaken for connection in slow)
        for connection in slow:
            if count <= MAX_UNTAKEN:
                return
            count -= connection.untaken
            connection.give_up()

    async def _index(self, _: web.Request) -> web.Response:
        links = {
            "/metrics": "Prometheus and OpenMetrics",
            "/health": "the process lives",
            "/ready": "traffic can be sent here; if not, why",
        } | {f"/api/{name}": "JSON" for name in self._api}
        reasons = list(self._not_ready())
        page = _PAGE.format(
            version=html.escape(__version__),
            state="unready" if reasons else "ready",
            readiness=html.escape("Not ready: " + "; ".join(reasons) if reasons else "Ready."),
            links="".join(f'<dt><a href="{path}">{path}</a></dt><dd>{text}</dd>' for path, text in links.items()),
        )
        return web.Response(text=page, content_type="text/html")


async def _taken(written: Awaitable[None]) -> None:
    """Wait until the client has taken the written bytes. Raises ConnectionError after TAKEN_S."""
    try:
        async with asyncio.timeout(TAKEN_S):
            await written
    except TimeoutError:
        raise ConnectionAbortedError from None


async def _common(_: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of every answer, refusals included."""
    response.headers.update(COMMON_HEADERS)

"""The operator's HTTP: /metrics, /health, /ready, live state as JSON under /api/, and the page that shows it.

Duty: answer questions about this process without disturbing it. A scrape is rendered on a thread of its own
(`scrapes.py`) and takes the interpreter in short turns, so that the relay goes on in between; long lists are built in
slices between which the relay has its turn; everything else is small, and made for one client at a time (`turns.py`).

Bounded: at most `max_connections` connections, each with REQUEST_S for its request, as long again for its body, and
IDLE_S between two of them. The last one that fits replaces the one that has been silent for longest, of the network
with most of them; a client that takes its answer goes last. If none is silent, accepting pauses, and every connection
closes after its current answer, of which its client takes a piece within FULL_S. So neither silent nor busy connections
lock others out for longer than the requests that are under way take, and no connection that comes ends one that has
just shaken hands. A large answer is written in pieces, so that one that is not read is held once, and no transport
holds copies of it; together they may be MAX_UNTAKEN bytes, beyond which the client that has taken nothing for longest
is closed. A stream ends once nobody has taken its lines for TAKEN_S. A TLS handshake has its turn (`openings.py`) once
its first record is here. A turn of the loop reads READ_BYTES of a connection, over TLS (`transport.py`) of one
connection in all; nothing is read behind bad HTTP, and of a body that its handler has left.

Invariants: a GET changes nothing; no answer was made before its request came (no cache, here or on the way); one scrape
is rendered at a time. Refuses to know metrics, sessions and sockets of Kafka: it is given callables. Who may ask what:
`guard.py`.
"""

import asyncio
import html
import json
import logging
import re
import socket
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from kproxy import __version__
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

# While two threads want the interpreter, one gets it back after this long. Python's 5 ms, times the system calls of the
# relay, would stop the traffic for as long as a scrape lasts; measured with 7,500 samples: p99.9 5.1 ms, so 0.6 ms.
_TURN_S = 0.0002

REQUEST_S = 10.0  # from the accept to the end of the request's headers
IDLE_S = 30.0  # for an answer, or a piece of a large one, to be taken, and the next request to come
TAKEN_S = 10.0  # for a line of a stream to be taken; as long as a trace is kept for who does not read it
FULL_S = 1.0  # for an answer, or a piece of a large one, to be taken while all connections are in use
STALLED_S = 0.25  # without a byte of the client in a TLS handshake: longer than any round trip on earth
KEPT_S = 1.0  # for the first request behind a handshake, or the next, whoever else wants the place
_NEW, _TAKING = 3, 4  # the last ranks of `_rank`
MAX_CONNECTIONS = 32
READ_BYTES = 16 * 1024  # in the kernel: in chunks of one byte, which are the dearest, they take 2 ms to parse
_FAULT_CHARS = 300  # of what is wrong with bad HTTP: aiohttp repeats all of it, escaped
_THREAD_BYTES = 64 * 1024  # of an answer; more is compressed on a thread (this much takes 0.4 ms)
_PIECE = 64 * 1024  # of an answer that is written in pieces; a smaller one is written at once
MAX_UNTAKEN = 64 * 1024 * 1024  # bytes of all answers that are written in pieces
MAX_BODY = 64 * 1024  # of a request
MAX_LINE = 128 * 1024  # its first: /api/groups is asked for what is behind a group, whose id may have 32 KiB
RETRY_AFTER_S = "1"  # of what cannot be said yet
_NEVER = re.compile(r"\s*q=0(\.0*)?\s*").fullmatch  # the weight of a coding that a client does not take
_BACKLOG = 128
_SHUTDOWN_S = 1.0  # answers under way when the process ends
_COMMON_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

Query = Mapping[str, str]
Action = Callable[[Query], Awaitable[tuple[int, Any]]]  # returns (HTTP status, what is sent as JSON)


class Question(Protocol):
    """A read of the admin API, about what is counted."""

    async def follow(self) -> None:
        """Runs as long as kproxy does."""

    async def asked(self, query: Query) -> Any:
        """What is sent as JSON. ValueError: a bad query."""


Slices = AsyncIterator[Sequence[Any]]
Lines = AsyncIterator[Mapping[str, Any] | None]  # None: nothing for now

log = logging.getLogger("kproxy.admin")
# Who speaks bad HTTP gets an answer that says so; a stack for each would let anybody fill the log.
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))

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

    scrape(accept) -> (body, content type): the metrics in the format that an Accept header names; called on a thread.
    not_ready() -> why traffic should not be sent here yet; nothing: ready.
    api: name -> callable that gets the query's parameters and returns what is sent as JSON from /api/<name>: a value,
    one to be awaited, or slices of a list, between which the loop has its turn. Called on the loop, so quick.
    ValueError: a bad query; NotNow: what is asked for cannot be said yet.
    actions: name -> what POST /api/<name> does, with the query's parameters and those of a JSON object in the body; the
    only requests that change something. ValueError: bad parameters.
    streams: the same, for what is sent as JSON lines until it ends or nobody reads it.
    page: what is served under /page/, and at / (its index.html); None: / is a list of links.
    guard: who may ask. tls: the context of new connections, followed while this runs; None: plain HTTP.
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
        self._idle: dict[_Connection, float] = {}  # those without a request under way, and since when, longest first
        self._networks: Counter[str] = Counter()  # connections by the network of their clients
        self._tasks = Tasks("admin")
        self._openings = Openings(max(1, max_connections // 2))
        self._readers = Readers()
        self._turns = Turns()

    async def start(self) -> None:
        """Bind and serve; OSError where the address cannot be bound."""
        app = web.Application(middlewares=[_timed, self._guard.middleware], client_max_size=MAX_BODY)
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
        for sock in self._listener.sockets:  # which those that are accepted inherit
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        if self._tls is not None:
            self._tasks.spawn(self._follow_files(self._tls[0]))

    async def _follow_files(self, tls: Reloading) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(tls.reload)

    async def stop(self) -> None:
        self.gate.close()
        await self._tasks.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._tls is not None:
            self._tls[1].close()
        self._scrapes.stop()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, the port it was given included."""
        if self._listener is None:
            raise RuntimeError("the admin server has not been started")
        return self._listener.address

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{Address(*self.address)}"

    @property
    def offers(self) -> str:
        """Where it listens and what is there, for the log."""
        page = "" if self._page is None else f", a page for browsers at {self.url}/"
        return f"admin at {self.url}: /metrics /health /ready{page}"

    # --- connections -------------------------------------------------------------------------------------------------

    def _accepted(self, client: socket.socket, peer: Address) -> None:
        assert self._runner is not None and self._runner.server is not None
        network = network_of(peer.host)

        def left() -> None:
            self._networks[network] -= 1
            self._networks += Counter()  # without those that have none
            self.gate.leave()

        loop = asyncio.get_running_loop()
        connection = _Connection(self._runner.server, loop, network, self._idle, lambda: not self.gate.is_open, left)
        connection.is_opening = self._tls is not None
        self.gate.enter()
        self._networks[network] += 1
        self._make_room(connection)
        self._tasks.spawn(self._serve(client, peer, connection))

    async def _serve(self, client: socket.socket, peer: Address, connection: "_Connection") -> None:
        loop = asyncio.get_running_loop()
        if connection.is_given_up:
            client.close()
            connection.left()
            return
        if self._tls is not None:
            connection.opening = asyncio.current_task()
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(lambda: connection, client)
            else:
                if await first_record(client):  # else it is over at once, and TLS says why
                    connection.works()  # it is kproxy that it waits for
                    await self._openings.turn(peer.host)
                    connection.waits(REQUEST_S)
                connection.is_opening = False
                self._make_room(connection)
                files, handshakes = self._tls
                context = files.context
                client = tls = TlsSocket(client, context, handshakes.buffer, server_side=True)
                async with asyncio.timeout(REQUEST_S):
                    await handshakes.run(tls)
                TlsTransport(loop, tls, connection, context, self._readers)
        except (OSError, EOFError):  # it has gone already, or speaks no TLS
            client.close()
            connection.left()
        except asyncio.CancelledError:
            client.close()
            connection.left()
            raise

    def _make_room(self, connection: "_Connection") -> None:
        """Where all places are taken, the connection that was silent for longest goes, so that the next can come in.

        Those that have not begun a handshake go first, then those that stall in it, then those that have had KEPT_S. Of
        the rest one of the network that has most places goes, last those that take an answer, and the new one. While
        some wait for their handshake, no other goes but for one of them, and none while more wait than have had their
        turn: so however many addresses there are, half of the places have it, each until as many turns have come.
        """
        if self.gate.is_open:
            return
        others = [other for other in self._idle if other is not connection]
        waiting = self._openings.waiting
        if waiting and (connection.is_opening or waiting > sum(not other.is_opening for other in others)):
            others = [other for other in others if other.is_opening]
        if others:
            now = asyncio.get_running_loop().time()
            ranks = {other: _rank(other, now - self._idle[other]) for other in others} | {connection: _TAKING}

            def order(other: _Connection) -> tuple[int, int, int]:
                return min(ranks[other], _NEW), -self._networks[other.network], ranks[other]

            min(ranks, key=order).give_up()

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = await self._scrapes.rendered(request.headers.get("Accept", ""))
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        body, headers = await _packed(request, body, headers)
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
        body, headers = await _packed(request, text.encode(), headers)
        return await self._sent(request, body, headers)

    async def _text_of(self, value: Any) -> str:
        if isinstance(value, Encoded):
            return value
        if isinstance(value, AsyncIterator):
            return await _json_of_slices(value)
        return await self._turns.make(lambda: json.dumps(value))

    async def _api_action(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._actions and name not in self._streams:
            if name in self._api:
                raise web.HTTPMethodNotAllowed("POST", ["GET"], text=f"/api/{name} is read with GET\n")
            names = ", ".join((*self._actions, *self._streams))
            raise web.HTTPNotFound(text=f"no such action: there {f'are {names}' if names else 'is none'}\n")
        try:
            parameters = {**request.query, **await _parameters(request)}
            if name in self._streams:
                return await self._stream(request, self._streams[name](parameters))
            status, value = await self._actions[name](parameters)
        except ValueError as fault:
            raise web.HTTPBadRequest(text=f"{fault}\n") from None
        return web.json_response(value, status=status)

    async def _stream(self, request: web.Request, lines: Lines) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            first = await anext(lines, None)  # a fault in the parameters comes before the first byte
            await response.prepare(request)
            await _taken(response.write(_line(first)))
            async for line in lines:
                await _taken(response.write(_line(line)))
            await _taken(response.write_eof())
        except ConnectionError:  # nobody reads it any more
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
        body, headers = await _packed(request, asset.body, headers)
        return await self._sent(request, body, headers)

    async def _sent(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """The answer with that body; a large one has been written when this returns.

        aiohttp gives the transport a copy of a whole body, and TLS two more, which a client that does not read keeps.
        """
        if len(body) <= _PIECE or request.method == "HEAD":
            return web.Response(body=body, headers=headers)
        connection = request.protocol
        assert isinstance(connection, _Connection)
        answer = web.StreamResponse(headers=headers)
        answer.content_length = len(body)
        _close_if_full(connection, answer)
        self._make_room_for(len(body))
        connection.untaken = len(body)
        patience_s = FULL_S if connection.is_full() else IDLE_S
        connection.waits(patience_s)
        view = memoryview(body)
        try:
            await answer.prepare(request)
            for start in range(0, len(body), _PIECE):
                await answer.write(view[start : start + _PIECE])
                if connection.transport is not None:  # it has taken most of what is written
                    connection.waits(patience_s)
            await answer.write_eof()
        except ConnectionError:  # nobody reads it any more
            if request.transport is not None:
                request.transport.abort()
        finally:
            connection.untaken = 0
        return answer

    def _make_room_for(self, count: int) -> None:
        """Close the clients that have taken nothing for longest, until that many bytes more may be held."""
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


class _Connection(RequestHandler):
    """One connection of the admin port: aiohttp's, with an end to its patience.

    aiohttp itself waits for the headers of a first request for ever.
    """

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        network: str,
        idle: "dict[_Connection, float]",
        is_full: Callable[[], bool],
        left: Callable[[], None],
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            logger=log,
            max_line_size=MAX_LINE,
            lingering_time=0,  # else a body that nobody wants is parsed for 10 s
        )
        self.network = network  # of its client
        self._silent = idle
        self.is_full = is_full
        self.untaken = 0  # bytes of an answer that is being written in pieces
        # Until there is a transport: it waits for what the client says, or for its turn.
        self.opening: asyncio.Task[None] | None = None
        self.is_opening = False  # its TLS handshake has not begun
        self._on_left: Callable[[], None] | None = left
        self._patience: asyncio.TimerHandle | None = None
        self.is_given_up = False
        self.waits(REQUEST_S)

    @property
    def takes(self) -> bool:
        """Whether an answer is on its way to the client, up to what the kernel has."""
        return bool(self.untaken or (self.transport is not None and self.transport.get_write_buffer_size()))

    def waits(self, seconds: float) -> None:
        """No request is under way: it has so long to send one, and to take the answer before it."""
        self.works()
        self._silent[self] = self._loop.time()
        self._patience = self._loop.call_later(seconds, self.give_up)

    def works(self) -> None:
        """A request is under way, which ends by itself."""
        self._silent.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def give_up(self) -> None:
        """Close it without a word; one that has no transport yet is closed as soon as it has."""
        self.works()
        self.is_given_up = True
        if self.transport is not None:  # uvloop's own class, which is no asyncio.Transport
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def left(self) -> None:
        """It is gone, once. Cycles of aiohttp and of ours end here: they would fill the old generation."""
        self.works()
        self.opening = None
        super().connection_lost(None)  # nothing, if it was called before
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opening = None
        if self._silent.pop(self, None) is not None:  # its handshake was no silence; its patience is not renewed
            self._silent[self] = self._loop.time()
        super().connection_made(transport)
        if self.is_given_up:
            self.give_up()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.left()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp answers to bad HTTP, without asking the application; nothing is read behind it."""
        self.close()
        answer = super().handle_error(request, status, exc, message and message[:_FAULT_CHARS])
        answer.headers.update(_COMMON_HEADERS)
        return answer


def _rank(idle: _Connection, silent_s: float) -> int:
    """Who goes first where places are wanted. Of one rank: whoever has been silent for longest."""
    if idle.is_opening:
        return 0
    if idle.opening is not None and silent_s >= STALLED_S:
        return 1
    if idle.opening is None and silent_s >= KEPT_S:
        return 2
    return _TAKING if idle.takes else _NEW


@web.middleware
async def _timed(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Stop the connection's clock while a request is under way, and close after it if all connections are in use."""
    connection = request.protocol
    assert isinstance(connection, _Connection)
    connection.works()
    try:
        answer = await handler(request)
        _close_if_full(connection, answer)
        return answer
    except web.HTTPException as refusal:
        _close_if_full(connection, refusal)
        raise
    finally:
        if connection.transport is not None:
            connection.waits(FULL_S if connection.is_full() else IDLE_S)


def _close_if_full(connection: _Connection, answer: web.StreamResponse) -> None:
    if connection.is_full():
        answer.force_close()  # others wait


async def _parameters(request: web.Request) -> dict[str, str]:
    """The parameters in a body: a JSON object of plain values. Raises ValueError, and what a body is refused with."""
    try:
        async with asyncio.timeout(REQUEST_S):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {REQUEST_S:g} s\n") from None
    except ConnectionError:  # nobody reads the answer
        raise web.HTTPBadRequest from None
    if not body.strip():
        return {}
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError('the body is not JSON: write parameters as {"name": "value"}, or in the query') from None
    if not isinstance(values, dict) or not all(isinstance(value, str | int | float) for value in values.values()):
        raise ValueError('the body is no object of plain values, like {"name": "value"}')
    return {name: str(value) for name, value in values.items()}


async def _taken(written: Awaitable[None]) -> None:
    """Raises ConnectionError where nobody takes what was written: a connection may not be held for ever."""
    try:
        async with asyncio.timeout(TAKEN_S):
            await written
    except TimeoutError:
        raise ConnectionAbortedError from None


def _line(value: Any) -> bytes:
    """A line of a stream; an empty one shows whether the reader is still there."""
    return b"\n" if value is None else json.dumps(value).encode() + b"\n"


async def _common(_: web.Request, response: web.StreamResponse) -> None:
    """What all answers have in common, refusals included."""
    response.headers.update(_COMMON_HEADERS)


async def _json_of_slices(slices: Slices) -> str:
    """A JSON list, encoded slice by slice: the relay has its turn between two of them."""
    parts = []
    async for rows in slices:
        if rows:
            parts.append(json.dumps(rows)[1:-1])
        await asyncio.sleep(0)
    return f"[{', '.join(parts)}]"


async def _packed(request: web.Request, body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """(the body, compressed where the client takes gzip; the headers of the answer)

    By hand: aiohttp has no say in the level, and its own takes four times as long as this for a tenth fewer bytes.
    """
    if _takes_gzip(request.headers.get("Accept-Encoding", "")):
        many = len(body) > _THREAD_BYTES
        body = await asyncio.to_thread(_gzip, body) if many else _gzip(body)
        headers = {**headers, "Content-Encoding": "gzip"}
    return body, {"Vary": "Accept-Encoding", **headers}


def _takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header names gzip, and not with a weight of 0 (RFC 9110, 12.5.3)."""
    return any(
        name.strip() == "gzip" and not _NEVER(weight)
        for name, _, weight in (coding.partition(";") for coding in accepted.lower().split(","))
    )


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, zlib.Z_BEST_SPEED, wbits=zlib.MAX_WBITS + 16)  # + 16: the format is gzip's

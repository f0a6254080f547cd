"""A connection to the admin port, with a timer, and the order in which silent ones are displaced.

Duty: the time that a client has for its request and for its answer, which aiohttp limits only between two requests.
`server.py` decides when to displace a connection, and `rank` which one. Refuses to know what is answered.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

REQUEST_S = 10.0  # time between the accept and the end of the request's headers
IDLE_S = 30.0  # time for the client to take an answer, or a piece of a large one, and to send the next request
FULL_S = 1.0  # time for the client to take an answer, or a piece of a large one, while all connections are in use
STALLED_S = 0.25  # maximum pause between bytes of a TLS handshake: longer than any round trip on earth
KEPT_S = 1.0  # time for the first or next request after a handshake, before the connection may be displaced
NEW, TAKING = 3, 4  # the last ranks of `rank`
MAX_LINE = 128 * 1024  # the request line: /api/groups takes the id of a group, which may have 32 KiB
_FAULT_CHARS = 300  # shown of an error about malformed HTTP: aiohttp quotes all bytes, escaped
COMMON_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

log = logging.getLogger("kproxy.admin")
# Malformed HTTP is answered with an error; a stack trace for each would let any client fill the log.
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


class Connection(RequestHandler):
    """A connection of aiohttp with a timer: aiohttp alone waits for the headers of a first request for ever."""

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        network: str,
        idle: "dict[Connection, float]",
        is_full: Callable[[], bool],
        left: Callable[[], None],
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            logger=log,
            max_line_size=MAX_LINE,
            lingering_time=0,  # otherwise aiohttp parses an unwanted body for 10 s
        )
        self.network = network  # of its client
        self._silent = idle
        self.is_full = is_full
        self.untaken = 0  # bytes of an answer that is being written in pieces
        # Until there is a transport: waiting for bytes of the client, or in the queue of handshakes.
        self.opening: asyncio.Task[None] | None = None
        self.is_opening = False  # its TLS handshake has not begun
        self._on_left: Callable[[], None] | None = left
        self._patience: asyncio.TimerHandle | None = None
        self.is_given_up = False
        self.waits(REQUEST_S)

    @property
    def takes(self) -> bool:
        """Whether the client has not taken all of its answer, apart from bytes in the kernel."""
        return bool(self.untaken or (self.transport is not None and self.transport.get_write_buffer_size()))

    def waits(self, seconds: float) -> None:
        """Start the timer: no request is pending, and the client has `seconds` to take its answer and send one."""
        self.works()
        self._silent[self] = self._loop.time()
        self._patience = self._loop.call_later(seconds, self.give_up)

    def works(self) -> None:
        """Stop the timer: a request is pending."""
        self._silent.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def give_up(self) -> None:
        """Close the connection without an answer; if it has no transport yet, as soon as it has one."""
        self.works()
        self.is_given_up = True
        if self.transport is not None:  # a class of uvloop, not an asyncio.Transport
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def left(self) -> None:
        """Release the place, once. Break reference cycles, which would otherwise fill the old generation."""
        self.works()
        self.opening = None
        super().connection_lost(None)  # does nothing the second time
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._on_left is None:  # the port was closed meanwhile
            transport.close()
            return
        self.opening = None
        if self._silent.pop(self, None) is not None:  # its handshake was no silence; the timer is not restarted
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
        """Answer malformed HTTP without the application, and read nothing after it."""
        self.close()
        answer = super().handle_error(request, status, exc, message and message[:_FAULT_CHARS])
        answer.headers.update(COMMON_HEADERS)
        return answer


def rank(idle: Connection, silent_s: float) -> int:
    """The order of displacement, lowest first; within a rank the longest silence goes first."""
    if idle.is_opening:
        return 0
    if idle.opening is not None and silent_s >= STALLED_S:
        return 1
    if idle.opening is None and silent_s >= KEPT_S:
        return 2
    return TAKING if idle.takes else NEW


@web.middleware
async def timed(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Stop the connection's timer while a request is pending, and close after it if all connections are in use."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    connection.works()
    try:
        answer = await handler(request)
        close_if_full(connection, answer)
        return answer
    except web.HTTPException as refusal:
        close_if_full(connection, refusal)
        raise
    finally:
        if connection.transport is not None:
            connection.waits(FULL_S if connection.is_full() else IDLE_S)


def close_if_full(connection: Connection, answer: web.StreamResponse) -> None:
    """Close a connection after this answer if all of them are in use."""
    if connection.is_full():
        answer.force_close()  # other clients wait

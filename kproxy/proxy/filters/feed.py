"""Queue of exchanges with their frames, from relays to the process that decodes them (`feed_process.py`).

Duty: the sink of a relay's process. It queues exchanges that sessions kept, which costs the loop an append; a thread
writes them to a socket, almost always without the interpreter's lock. If the other process falls behind, it drops and
counts exchanges, and no relay waits. While the other process starts, there is no socket, and exchanges stay in the
queue.

Bounded: QUEUE_BYTES. Does not decode frames.
"""

import json
import logging
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from struct import Struct
from threading import Event as Signal
from threading import Thread
from time import monotonic, sleep
from typing import NamedTuple

from kproxy.protocol.apis import FETCH
from kproxy.wire.bodies import Batch
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Event, Exchange, Unanswered

QUEUE_BYTES = 32 << 20
QUEUE_FULL = "queue_full"
_ITEM_BYTES = 1000  # size of a queued exchange without its frames
_GATHER_S = 0.01  # exchanges of this interval are written together
_CHUNK_BYTES = 64 * 1024
_CLOSE_S = 2.0

_HEAD = Struct(">IIi")  # sizes in bytes: pickled fields, request, answer (-1: no answer)

log = logging.getLogger("kproxy.insight")


class Whose(NamedTuple):
    """The properties of a connection that insight needs for each of its exchanges."""

    cluster: str
    client_address: str
    broker_id: int | None
    connection: int
    source: str
    principal: str | None
    broker: tuple[str, int] | None = None  # its address


class KeptExchange(NamedTuple):
    """A queued exchange with its frames."""

    whose: Whose
    api_key: int
    api_version: int
    number: int
    request_end: int
    response_start: int  # 0: never answered
    request: bytes  # a coordinator's log (FETCH) has the topic, its id and the partition here, as JSON
    response: bytes | None  # a coordinator's log has one batch here

    @property
    def at_ns(self) -> int:
        """Return its time in nanoseconds, which determines the order of exchanges."""
        return self.response_start or self.request_end

    @property
    def size_bytes(self) -> int:
        return _ITEM_BYTES + len(self.request) + len(self.response or b"")


class Feed:
    """The queue of exchanges from the relays of one process to insight."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[KeptExchange, dict[str, int]]] = deque()
        self._bytes = 0  # added by the loop only
        self._written = 0  # added by the thread only
        self._sock: socket.socket | None = None
        self._wake = Signal()
        self._closing = False
        self._thread: Thread | None = None

    def use(self, sock: socket.socket | None) -> None:
        """Write to this socket from now on, and close it later; None: no process reads."""
        before, self._sock = self._sock, sock
        if before is not None:
            with suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)  # ends a blocked write
            before.close()
        if sock is not None:
            sock.setblocking(True)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="feed", daemon=True)
                self._thread.start()
            self._wake.set()

    def connected(
        self, info: ConnectionInfo, principal: str | None, left_out: dict[str, int]
    ) -> Callable[[list[Event]], None]:
        """Return a function that takes the events of a connection; dropped exchanges are counted in `left_out`."""
        broker = info.broker_address, info.broker_port
        whose = Whose(info.cluster, info.client_address, info.broker_id, info.id, info.source, principal, broker)
        put = self._put

        def take(events: list[Event]) -> None:
            for event in events:
                if event.__class__ is Exchange:
                    exchange = event
                    if exchange.plan.kept is None:
                        if exchange.plan.api_key == FETCH and exchange.response_body is not None:
                            for batch in exchange.response_body.logged:
                                put(_logged(whose, exchange, batch), left_out)
                        continue
                    if exchange.response_frame is None:
                        continue
                elif event.__class__ is Unanswered:
                    exchange = event.exchange
                    if exchange.plan.kept is None:
                        continue
                else:
                    continue
                plan = exchange.plan
                if exchange.request_frame is None:
                    continue
                start = exchange.response_start if exchange.response_frame is not None else 0
                kept = KeptExchange(
                    whose,
                    plan.api_key,
                    plan.api_version,
                    exchange.number,
                    exchange.request_end,
                    start,
                    exchange.request_frame,
                    exchange.response_frame,
                )
                put(kept, left_out)

        return take

    def _put(self, kept: KeptExchange, left_out: dict[str, int]) -> None:
        size = kept.size_bytes
        if self._bytes - self._written + size > QUEUE_BYTES:
            left_out[QUEUE_FULL] = left_out.get(QUEUE_FULL, 0) + 1
            return
        self._bytes += size
        self._waiting.append((kept, left_out))
        if not self._wake.is_set():
            self._wake.set()

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes that are queued."""
        return self._bytes - self._written

    def close(self) -> None:
        """Write queued exchanges for at most _CLOSE_S, and end. Blocks."""
        end = monotonic() + _CLOSE_S
        while self._waiting and self._sock is not None and monotonic() < end:
            sleep(_GATHER_S)
        self._closing = True
        self._wake.set()
        self.use(None)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait()
            sleep(_GATHER_S)
            self._wake.clear()
            sock = self._sock
            if sock is None:
                continue  # `use` wakes it
            try:
                self._write(sock)
            except OSError:
                if self._sock is sock:
                    self._sock = None  # its owner starts another one
                    sock.close()

    def _write(self, sock: socket.socket) -> None:
        small = bytearray()
        sizes = 0
        unsent: list[dict[str, int]] = []  # counters of the exchanges that the kernel has not taken yet
        try:
            while self._waiting:
                kept, left_out = self._waiting.popleft()
                sizes += kept.size_bytes
                unsent.append(left_out)
                for part in packed(kept):
                    if len(part) < _CHUNK_BYTES:
                        small += part
                    if len(small) >= _CHUNK_BYTES or len(part) >= _CHUNK_BYTES:
                        sock.sendall(small)
                        small.clear()
                    if len(part) >= _CHUNK_BYTES:
                        sock.sendall(part)
                if not small:
                    self._written, sizes = self._written + sizes, 0
                    unsent.clear()
            if small:
                sock.sendall(small)
        except OSError:
            for left_out in unsent:
                left_out[QUEUE_FULL] = left_out.get(QUEUE_FULL, 0) + 1
            raise
        finally:
            self._written += sizes  # no longer queued here


def _logged(whose: Whose, exchange: Exchange, batch: Batch) -> KeptExchange:
    """Return a batch of a coordinator's log as an exchange: its topic and partition as request, the batch as answer."""
    assert batch.copy is not None
    identity = None if batch.topic_id is None else batch.topic_id.hex
    return KeptExchange(
        whose,
        FETCH,
        exchange.plan.api_version,
        exchange.number,
        exchange.request_end,
        exchange.response_start,
        json.dumps((batch.topic, identity, batch.partition)).encode(),
        bytes(batch.copy.data),
    )


def packed(kept: KeptExchange) -> Iterator[bytes]:
    """Yield one exchange as bytes of a stream, in parts."""
    fields = pickle.dumps(tuple(kept[:-2]), pickle.HIGHEST_PROTOCOL)
    response = kept.response
    yield _HEAD.pack(len(fields), len(kept.request), -1 if response is None else len(response)) + fields
    yield kept.request
    if response is not None:
        yield response


class Unpacker:
    """Reads exchanges from the bytes of a stream. Bounded by one exchange and one read."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[KeptExchange]:
        """Yield the exchanges that are complete with these bytes."""
        self._data += data
        view = memoryview(self._data)
        pos = 0
        while len(view) - pos >= _HEAD.size:
            fields, request, response = _HEAD.unpack_from(view, pos)
            end = pos + _HEAD.size + fields + request + max(response, 0)
            if end > len(view):
                break
            at = pos + _HEAD.size
            whose, api_key, api_version, number, request_end, response_start = pickle.loads(view[at : at + fields])
            at += fields
            answer = None if response < 0 else bytes(view[at + request : end])
            asked = bytes(view[at : at + request])
            yield KeptExchange(whose, api_key, api_version, number, request_end, response_start, asked, answer)
            pos = end
        view.release()
        del self._data[:pos]

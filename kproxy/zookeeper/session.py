"""One client connection with a ZooKeeper server, without I/O: cuts frames, pairs answers, reports both as events.

A connection begins with a ConnectRequest and its answer, which contain the session id; a capture may begin later. After
that each request has an xid. Answers come in the order of requests, but pings and authentications have fixed xids and
are answered separately; notifications answer no request (`org.apache.zookeeper.ClientCnxn`). A client that sends a
four-letter command ("ruok") instead has no session: its bytes are not read.

A peer's bytes never raise: a body that does not decode leaves its operation without values (`decoded` is False), and if
a frame does not begin where it should, a Fault reports it and the next plausible header is searched for, as also after
`gap`. A live connection has no gaps, so there a fault ends the reading (`resync` False).

Bounds: a frame has MAX_FRAME bytes at most, of which `keep` are held, or SMALL_BYTES if the `Room` shared by all
sessions is full; MAX_PENDING unanswered operations, or FREE_PENDING if all sessions together have as many as their room
lends: the oldest is then reported as unanswered; the values of operations take bytes of the same room. If a body is
larger than `whole`, only the fields before its first vector are read: an element of a vector costs a hundred times its
bytes. Refuses to know sockets, clocks and the meaning of paths.
"""

import re
from collections import deque
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from kproxy.errors import Malformed
from kproxy.zookeeper import operations
from kproxy.zookeeper.operations import AUTH, NOTIFICATION, PING, SET_WATCHES
from kproxy.zookeeper.records import Values, layouts, names_of, read

CLIENT, SERVER = 0, 1
MAX_FRAME = 16 * 1024 * 1024  # jute.maxbuffer is 1 MiB by default, and higher in clusters with many nodes
MAX_PENDING = 4096
FREE_PENDING = 8  # per queue of pending operations, without using the room
OPERATION_BYTES = 1024  # memory of one operation at most
VALUES_SHIFT = 6  # so many bytes (1 << 6) of a request with values take as much memory
KEEP_BYTES = 1024 * 1024  # bytes per frame
WHOLE_BYTES = 1024 * 1024  # bytes per body
SMALL_BYTES = 4096
ROOM_BYTES = 64 * 1024 * 1024

_SIZE = Struct(">i")
_REQUEST = Struct(">iii")  # size, xid, operation
_FIXED_XIDS = frozenset((PING, AUTH, SET_WATCHES))
_CONNECT_BYTES = range(44, 62)  # of a ConnectRequest: a password of 16 bytes or none, readOnly since 3.4
_CONNECTED_BYTES = range(20, 38)

# Outcomes of an operation.
ANSWERED = "answered"
UNANSWERED = "unanswered"
NOT_SEEN = "request_not_seen"


@dataclass(slots=True, eq=False)
class Operation:
    """A request and its answer. Times of the first and the last byte of each, in nanoseconds since the epoch."""

    op: str  # ZooKeeper's name; "connect" for the first, "unknown" if only the answer was seen
    xid: int
    session: int  # 64 bits, signed; 0: unknown
    number: int  # on its connection, from 0
    request_start: int = 0
    request_end: int = 0
    response_start: int = 0
    response_end: int = 0
    request_bytes: int = 0  # including the frame's size
    response_bytes: int = 0
    zxid: int = 0  # of the answer
    error: int | None = None  # of the answer; 0: none; None: unanswered
    outcome: str = UNANSWERED
    decoded: bool = True  # whether both bodies were decoded
    request: Values = field(default_factory=dict)
    response: Values = field(default_factory=dict)
    held: int = 0  # bytes taken from the room
    lent: int = 0  # taken from the room's operations


@dataclass(slots=True, eq=False)
class Notification:
    """A watch that fired at this client."""

    session: int
    type: str  # NodeCreated, NodeChildrenChanged, ...
    state: str  # SyncConnected, ...
    path: str
    zxid: int
    time: int
    bytes: int


@dataclass(slots=True, eq=False)
class Fault:
    """Bytes that are no frame; `offset` is their position in the side's stream."""

    side: int
    text: str
    offset: int
    time: int


Event = Operation | Notification | Fault


class Room:
    """The shared budget of sessions for large frames and unanswered requests.

    operations: how many it lends; None: only the sessions' own bounds apply.
    """

    def __init__(self, size: int = ROOM_BYTES, operations: int | None = None) -> None:
        self._size = size
        self._operations = operations
        self.held = 0
        self.lent = 0
        self.refused = 0  # frames whose values were dropped

    def take(self, count: int) -> bool:
        """Take bytes from the budget; returns whether they fit."""
        if self.held + count > self._size:
            self.refused += 1
            return False
        self.held += count
        return True

    def give_back(self, count: int) -> None:
        self.held -= count

    def lend(self, count: int) -> bool:
        """Lend an operation of that weight; returns whether it fits."""
        if self._operations is not None and self.lent + count > self._operations:
            return False
        self.lent += count
        return True


class _Half:
    """The bytes of one side that are not cut into frames yet."""

    __slots__ = ("begun", "data", "dropped", "frame", "keep", "position", "seeking", "taken")

    def __init__(self) -> None:
        self.data = bytearray()
        self.begun = 0  # when the first byte of `data` arrived
        self.position = 0  # offset of that byte in the side's stream
        self.seeking = False
        self.frame = 0  # bytes of the frame at the start of `data`, including its size; 0: unknown
        self.keep = 0  # bytes of it that are held
        self.dropped = 0  # bytes of it after those, which were dropped
        self.taken = 0  # bytes of it taken from the room


class Session:
    """Reads a pair of byte streams. The owner takes and clears `events` after each call.

    midstream: the start of the connection was not seen, as in captures that were started later. resync: search for the
    next frame after a fault; else reading ends. values: read bodies; else operations have no values. keep, whole, room:
    see the bounds above.
    """

    def __init__(
        self,
        *,
        midstream: bool = False,
        resync: bool = True,
        values: bool = True,
        keep: int = KEEP_BYTES,
        whole: int = WHOLE_BYTES,
        room: Room | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.session = 0
        self.timeout_ms = -1  # as negotiated
        self.opaque = False  # a four-letter command, or not ZooKeeper at all: no longer read
        self.command = ""  # the four-letter command
        self.skipped = 0  # bytes that belong to no frame
        self._resync = resync
        self._values = values
        self._keep = keep
        self._whole = whole
        self._room = Room() if room is None else room
        self._halves = (_Half(), _Half())
        self._connecting: Operation | None = None
        self._begins = not midstream  # the client's first frame has not been seen
        self._pending: deque[Operation] = deque()
        self._fixed: dict[int, deque[Operation]] = {xid: deque() for xid in _FIXED_XIDS}
        self._number = 0
        for half in self._halves:
            half.seeking = midstream

    def receive(self, side: int, data: Any, now_ns: int) -> None:
        """Read further bytes of a side."""
        half = self._halves[side]
        if self.opaque:
            half.position += len(data)
            self.skipped += len(data)
            return
        if not half.data:
            half.begun = now_ns
        half.data += data
        while not self.opaque and self._cut(side, half, now_ns):
            half.begun = now_ns

    @property
    def unanswered(self) -> int:
        """How many operations wait for their answers."""
        return len(self._pending) + sum(map(len, self._fixed.values())) + (self._connecting is not None)

    def held(self, side: int) -> int:
        """Return how many bytes of a side are no complete frame yet."""
        half = self._halves[side]
        return len(half.data) + half.dropped

    def gap(self, side: int) -> None:
        """Skip missing bytes of a side, in captures. Pending operations can no longer be paired by order."""
        half = self._halves[side]
        self._clear(half)
        half.seeking = True
        if side == CLIENT:
            self._begins = False
        elif self._connecting is not None:
            self.events.append(self._connecting)
            self._connecting = None

    def close(self, most: int | None = None) -> bool:
        """End the connection: report up to `most` pending operations as unanswered. Returns whether more are left."""
        for half in self._halves:
            self._clear(half)
        if self._connecting is not None:
            self._pending.appendleft(self._connecting)
            self._connecting = None
        queues = [queue for queue in (self._pending, *self._fixed.values()) if queue]
        for _ in range(self.unanswered if most is None else most):
            if not queues:
                break
            oldest = min(queues, key=_first_number)
            operation = oldest.popleft()
            self._release(operation)
            self.events.append(operation)
            if not oldest:
                queues.remove(oldest)
        return bool(queues)

    # --- frames ------------------------------------------------------------------------------------------------------

    def _cut(self, side: int, half: _Half, now: int) -> bool:
        """Cut one frame from the start of the data; returns whether there may be another."""
        data = half.data
        if half.seeking and not self._found(side, half):
            return False
        if not half.frame and not self._measure(side, half, now):
            return bool(half.seeking and data)
        missing = half.frame - half.dropped - len(data)
        if missing > 0:
            if len(data) > half.keep:
                half.dropped += len(data) - half.keep
                del data[half.keep :]
            return False
        end = half.frame - half.dropped
        frame = memoryview(bytes(data[4 : min(end, half.keep)]))
        try:
            if side == CLIENT:
                self._request(frame, half, now)
            else:
                self._answer(frame, half, now)
        except Malformed as fault:
            self._lost(side, half, str(fault), now)
            return bool(data)
        self._take_off(half, end)
        return bool(data)

    def _measure(self, side: int, half: _Half, now: int) -> bool:
        """Read the size of the frame at the start of the data; returns whether it is valid."""
        if len(half.data) < 4:
            return False
        (size,) = _SIZE.unpack_from(half.data)
        if self._begins and side == CLIENT and half.data[:4].isalpha():
            self.command = half.data[:4].decode()
            self.give_up()
            return False
        if not 0 <= size <= MAX_FRAME:
            self._lost(side, half, f"a frame of {size} bytes", now)
            return False
        half.frame = 4 + size
        half.keep = min(half.frame, 4 + self._keep)
        if half.keep > SMALL_BYTES:
            if self._room.take(half.keep):
                half.taken = half.keep
            else:
                half.keep = SMALL_BYTES
        return True

    def _take_off(self, half: _Half, end: int) -> None:
        """Remove the frame that ends at `end` of the held data."""
        half.position += half.frame
        del half.data[:end]
        self._room.give_back(half.taken)
        half.frame = half.dropped = half.taken = 0

    def _clear(self, half: _Half) -> None:
        count = len(half.data) + half.dropped
        half.position += count
        self.skipped += count
        half.data.clear()
        self._room.give_back(half.taken)
        half.frame = half.dropped = half.taken = 0

    def give_up(self) -> None:
        """Stop reading."""
        self.opaque = True
        for half in self._halves:
            self._clear(half)

    def _lost(self, side: int, half: _Half, text: str, now: int) -> None:
        self.events.append(Fault(side, text, half.position, now))
        if self._begins or not self._resync:
            self.give_up()
            return
        if half.dropped:  # the held bytes are no longer contiguous
            self._clear(half)
        self._room.give_back(half.taken)
        half.frame = half.taken = 0
        half.seeking = True
        self._drop(half, min(1, len(half.data)))

    def _found(self, side: int, half: _Half) -> bool:
        """Search for a plausible frame and drop the bytes before it; returns whether there is one."""
        pos = _next(side, half.data)
        half.seeking = pos < 0
        self._drop(half, pos if pos >= 0 else max(0, len(half.data) - _MIN_HEADER_BYTES[side] + 1))
        return pos >= 0

    def _drop(self, half: _Half, count: int) -> None:
        del half.data[:count]
        half.position += count
        self.skipped += count

    # --- requests ----------------------------------------------------------------------------------------------------

    def _request(self, frame: memoryview, half: _Half, now: int) -> None:
        if self._begins and len(frame) in _CONNECT_BYTES and not any(frame[:4]):
            self._begins = False
            self._connecting = self._begin("connect", 0, half, now)
            self._connecting.request = _without_password("ConnectRequest", frame)
            self.session = self._connecting.session = self._connecting.request["sessionId"]
            return
        self._begins = False
        header, pos = read("RequestHeader", frame, 0)
        number = header["type"]
        if number not in operations.REQUESTS:
            raise Malformed(f"a request for operation {number}")
        operation = self._begin(names_of("operations")[number], header["xid"], half, now)
        if self._values and (len(frame) <= SMALL_BYTES or self._room.take(len(frame))):
            operation.held = len(frame) if len(frame) > SMALL_BYTES else 0
            operation.request = self._body(operations.request, operation, frame, pos, half)
        queue = self._fixed.get(operation.xid, self._pending)
        weight = 1 + (len(frame) >> VALUES_SHIFT if operation.request else 0)
        while len(queue) >= FREE_PENDING:
            if len(queue) < MAX_PENDING and self._room.lend(weight):
                operation.lent = weight
                break
            self._release(queue[0])
            self.events.append(queue.popleft())
        queue.append(operation)

    def _begin(self, op: str, xid: int, half: _Half, now: int) -> Operation:
        operation = Operation(op, xid, self.session, self._number, half.begun, now)
        operation.request_bytes = half.frame
        operation.decoded = self._values or op == "connect"
        self._number += 1
        return operation

    def _body(self, read_as: Any, operation: Operation, frame: memoryview, pos: int, half: _Half) -> Values:
        """Return the values of a body; of a large one, those before its first vector."""
        is_whole = half.frame <= self._whole and not half.dropped and half.frame <= half.keep
        try:
            values: Values
            values, _ = read_as(operation.op, frame, pos, whole=is_whole)
        except Malformed:
            operation.decoded = False
            return {}
        operation.decoded = operation.decoded and is_whole
        return values

    def _release(self, operation: Operation) -> None:
        self._room.give_back(operation.held)
        self._room.lent -= operation.lent
        operation.held = operation.lent = 0

    # --- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, frame: memoryview, half: _Half, now: int) -> None:
        if self._connecting is not None:
            self._connected(self._connecting, frame, half, now)
            return
        header, pos = read("ReplyHeader", frame, 0)
        if header["xid"] == NOTIFICATION:
            event, _ = read("WatcherEvent", frame, pos)
            kind = names_of("event_types").get(event["type"], str(event["type"]))
            state = names_of("event_states").get(event["state"], str(event["state"]))
            path = event["path"] or ""
            self.events.append(Notification(self.session, kind, state, path, header["zxid"], now, half.frame))
            return
        operation = self._paired(header["xid"])
        operation.zxid, operation.error = header["zxid"], header["err"]
        if operation.outcome != NOT_SEEN:
            operation.outcome = ANSWERED
            if not operation.error and self._values:
                operation.response = self._body(operations.answer, operation, frame, pos, half)
        self._end(operation, half, now)

    def _connected(self, operation: Operation, frame: memoryview, half: _Half, now: int) -> None:
        self._connecting = None
        if len(frame) not in _CONNECTED_BYTES:
            self.events.append(operation)
            raise Malformed(f"an answer of {len(frame)} bytes to the first request")
        values = operation.response = _without_password("ConnectResponse", frame)
        operation.outcome = ANSWERED
        # A server that no longer knows the session answers with session id 0.
        operation.error = 0 if values["sessionId"] else layouts()["errors"]["SESSIONEXPIRED"]
        if values["sessionId"]:
            self.session = operation.session = values["sessionId"]
        self.timeout_ms = values["timeOut"]
        self._end(operation, half, now)

    def _end(self, operation: Operation, half: _Half, now: int) -> None:
        operation.response_start, operation.response_end = half.begun, now
        operation.response_bytes = half.frame
        self._release(operation)
        self.events.append(operation)

    def _paired(self, xid: int) -> Operation:
        """Return the request of an answer; older pending ones are reported as unanswered."""
        queue = self._fixed.get(xid, self._pending)
        if xid in self._fixed:
            if queue:
                return queue.popleft()
        elif queue and (queue[0].xid == xid or any(operation.xid == xid for operation in queue)):
            while queue[0].xid != xid:
                self._release(queue[0])
                self.events.append(queue.popleft())
            return queue.popleft()
        return Operation("unknown", xid, self.session, -1, outcome=NOT_SEEN, decoded=False)


def _first_number(queue: deque[Operation]) -> int:
    return queue[0].number


def _is_plausible(side: int, data: bytearray | memoryview, pos: int) -> bool:
    """Whether the header of a frame may begin at `pos`, where _MIN_HEADER_BYTES bytes are available."""
    if side == CLIENT:
        size, xid, operation = _REQUEST.unpack_from(data, pos)
        return 8 <= size <= MAX_FRAME >> 4 and (xid > 0 or xid in _FIXED_XIDS) and operation in operations.REQUESTS
    size, xid = _SIZE.unpack_from(data, pos)[0], _SIZE.unpack_from(data, pos + 4)[0]
    zxid, error = int.from_bytes(data[pos + 8 : pos + 16], signed=True), _SIZE.unpack_from(data, pos + 16)[0]
    if not (16 <= size <= MAX_FRAME >> 4 and zxid >= -1 and error in names_of("errors")):
        return False
    return xid > 0 or xid in _FIXED_XIDS or xid == NOTIFICATION


def _ends(numbers: Any) -> bytes:
    """Return a pattern of these 4-byte numbers."""
    return b"(?:" + b"|".join(re.escape(number.to_bytes(4, signed=True)) for number in sorted(numbers)) + b")"


# The checks of _is_plausible as patterns, for a fast search; matches may overlap, hence the lookahead.
_MIN_HEADER_BYTES = (12, 20)
_SIZES = rb"\x00(?:\x00\x00[%b-\xff]|\x00[\x01-\xff].|[\x01-\x10]..)"
_XIDS = rb"(?!\x00{4})(?:[\x00-\x7f]...|\xff\xff\xff.)"
_ZXIDS = rb"(?:[\x00-\x7f].{7}|\xff{8})"
_HEADS = (
    re.compile(rb"(?s)(?=" + _SIZES % rb"\x08" + _XIDS + _ends(operations.REQUESTS) + b")"),
    re.compile(rb"(?s)(?=" + _SIZES % rb"\x10" + _XIDS + _ZXIDS + _ends(names_of("errors")) + b")"),
)


def _next(side: int, data: bytearray) -> int:
    """Return the position of the first plausible header, or -1."""
    with memoryview(data) as view:
        return next((at.start() for at in _HEADS[side].finditer(view) if _is_plausible(side, view, at.start())), -1)


def side_of(head: bytes) -> int | None:
    """Return CLIENT or SERVER, the sender of midstream bytes that begin with a frame that only ZooKeeper sends.

    Recognised are a ping, a login, a request or a notification with a path; None for others, so for most answers.
    """
    if len(head) < 12:
        return None
    view = memoryview(head)
    size, xid = _SIZE.unpack_from(view)[0], _SIZE.unpack_from(view, 4)[0]
    frame = view[4 : 4 + size] if 8 <= size <= len(view) - 4 else view[:0]
    if xid == PING:
        if size == 8 and frame and _SIZE.unpack_from(frame, 4)[0] == layouts()["operations"]["ping"]:
            return CLIENT
        return SERVER if size == 16 and frame and not any(frame[12:]) else None
    try:
        if xid == NOTIFICATION and len(frame) >= 16 and not any(frame[12:16]):
            values, end = read("WatcherEvent", frame, 16)
            return SERVER if end == len(frame) and _is_path(values) else None
        if xid == AUTH and len(frame) > 8 and _SIZE.unpack_from(frame, 4)[0] == layouts()["operations"]["auth"]:
            return CLIENT if read("AuthPacket", frame, 8)[1] == len(frame) else None
        if len(frame) > 8 and _is_plausible(CLIENT, view, 0):
            values, end = operations.request(names_of("operations")[_SIZE.unpack_from(frame, 4)[0]], frame, 8)
            parts = values.get("operations", [values])
            return CLIENT if end == len(frame) and parts and all(map(_is_path, parts)) else None
    except Malformed:
        pass
    return None


def _is_path(values: Values) -> bool:
    return (values.get("path") or "").startswith("/")


def _without_password(record: str, frame: memoryview) -> Values:
    """Return the first record of a side without its password. `readOnly` is missing before 3.4."""
    try:
        values, _ = read(record, frame, 0)
    except Malformed:
        values, _ = read(record, memoryview(bytes(frame) + b"\0"), 0)
    values.pop("passwd")
    return values

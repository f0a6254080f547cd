"""One client connection with a ZooKeeper server, without I/O: frames are cut, answers paired, events report all of it.

A connection begins with a ConnectRequest and its answer, which name the session; a capture may begin later. Then each
request has an xid. Answers come in the order of requests, but pings and authentications have fixed xids and are
answered on their own; notifications are answers to nothing (`org.apache.zookeeper.ClientCnxn`). A client that sends a
command of four letters instead ("ruok") is no session: its bytes are not read.

A peer's bytes never raise: a body that does not decode leaves its operation without values (`decoded` is False), and
where frames no longer begin where they should, a Fault says so and the next plausible header is sought. After `gap`
it is sought as well. A live connection has no gaps, so there a fault ends the reading (`resync` False).

Bounds: of a frame, whose size is MAX_FRAME at most, `keep` bytes are held, SMALL where all sessions together hold
what their `Room` has; MAX_PENDING operations without an answer, or FREE_PENDING where all sessions together have as
many as their room lends, of which the oldest is then given up; and their values from the same room. Of a body larger
than `whole`, the fields before its first vector are read: one element of a vector costs a hundred times its bytes.
Refuses to know sockets, clocks and what paths mean.
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
MAX_FRAME = 16 * 1024 * 1024  # jute.maxbuffer is 1 MiB by default, and raised by those who have many nodes
MAX_PENDING = 4096
FREE_PENDING = 8  # of a kind, that need nothing of the room
OPERATION_BYTES = 1024  # that one takes in memory, at most
VALUES_SHIFT = 6  # 1 << 6 bytes of a request whose values are read take as much
KEEP = 1024 * 1024  # of a frame
WHOLE = 1024 * 1024  # of a body
SMALL = 4096
ROOM_BYTES = 64 * 1024 * 1024

_SIZE = Struct(">i")
_REQUEST = Struct(">iii")  # size, xid, operation
_FIXED_XIDS = frozenset((PING, AUTH, SET_WATCHES))
_CONNECT_BYTES = range(44, 62)  # of a ConnectRequest: 16 bytes of password or none, readOnly since 3.4
_CONNECTED_BYTES = range(20, 38)

# Outcomes of an operation.
ANSWERED = "answered"
UNANSWERED = "unanswered"
NOT_SEEN = "request_not_seen"


@dataclass(slots=True, eq=False)
class Operation:
    """A request and its answer. Times are nanoseconds since the epoch, of the first and the last byte of each."""

    op: str  # as ZooKeeper calls it; "connect" for the first, "unknown" if only the answer was seen
    xid: int
    session: int  # 64 bits, signed; 0: not known
    number: int  # of the operation on its connection
    request_start: int = 0
    request_end: int = 0
    response_start: int = 0
    response_end: int = 0
    request_bytes: int = 0  # sizes included
    response_bytes: int = 0
    zxid: int = 0  # of the answer
    error: int | None = None  # of the answer; 0: none; None: no answer
    outcome: str = UNANSWERED
    decoded: bool = True  # of both bodies
    request: Values = field(default_factory=dict)
    response: Values = field(default_factory=dict)
    held: int = 0  # bytes of its session's room
    lent: int = 0  # of the operations that the room lends


@dataclass(slots=True, eq=False)
class Notification:
    """A watch fired at this client."""

    session: int
    type: str  # NodeCreated, NodeChildrenChanged, ...
    state: str  # SyncConnected, ...
    path: str
    zxid: int
    time: int
    bytes: int


@dataclass(slots=True, eq=False)
class Fault:
    """Bytes that are no frame; `offset` is where in the side's stream."""

    side: int
    text: str
    offset: int
    time: int


Event = Operation | Notification | Fault


class Room:
    """What sessions hold of large frames and of requests without an answer, all together.

    operations: how many it lends; None: there is no bound but that of each session.
    """

    def __init__(self, size: int = ROOM_BYTES, operations: int | None = None) -> None:
        self._size = size
        self._operations = operations
        self.held = 0
        self.lent = 0
        self.refused = 0  # frames whose values were not kept

    def take(self, count: int) -> bool:
        """Whether there is room for so many bytes; they are then held."""
        if self.held + count > self._size:
            self.refused += 1
            return False
        self.held += count
        return True

    def give_back(self, count: int) -> None:
        self.held -= count

    def lend(self, count: int) -> bool:
        """Whether there is room for an operation that counts as so many; they are then lent."""
        if self._operations is not None and self.lent + count > self._operations:
            return False
        self.lent += count
        return True


class _Half:
    """What one side sent and is not cut yet."""

    __slots__ = ("begun", "data", "dropped", "frame", "keep", "position", "seeking", "taken")

    def __init__(self) -> None:
        self.data = bytearray()
        self.begun = 0  # when the first byte of `data` arrived
        self.position = 0  # in the side's stream, of that byte
        self.seeking = False
        self.frame = 0  # bytes of the frame that begins `data`, its size included; 0: not known
        self.keep = 0  # of them held
        self.dropped = 0  # of them, behind those, not held
        self.taken = 0  # of the room


class Session:
    """A pair of byte streams, read. `events` is the owner's to take and to clear after each call.

    midstream: the connection's begin was not seen, as in captures that were started later.
    resync: seek the next frame behind a fault; else nothing more is read.
    values: read bodies; else operations have no values.
    keep, whole, room: see the bounds above.
    """

    def __init__(
        self,
        *,
        midstream: bool = False,
        resync: bool = True,
        values: bool = True,
        keep: int = KEEP,
        whole: int = WHOLE,
        room: Room | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.session = 0
        self.timeout_ms = -1  # as negotiated
        self.opaque = False  # a four-letter command, or nothing that is ZooKeeper's: no longer read
        self.command = ""  # that four-letter command
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
        """Bytes of a side arrived."""
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
        """Operations that wait for their answers."""
        return len(self._pending) + sum(map(len, self._fixed.values())) + (self._connecting is not None)

    def held(self, side: int) -> int:
        """Bytes of a side that are no whole frame yet."""
        half = self._halves[side]
        return len(half.data) + half.dropped

    def gap(self, side: int) -> None:
        """Bytes of a side are missing, which only captures know. What is pending can no longer be paired by order."""
        half = self._halves[side]
        self._clear(half)
        half.seeking = True
        if side == CLIENT:
            self._begins = False
        elif self._connecting is not None:
            self.events.append(self._connecting)
            self._connecting = None

    def close(self, most: int | None = None) -> bool:
        """The connection ended: what is pending gets no answer. Whether more than `most` operations are: call again."""
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
            self._let_go(operation)
            self.events.append(operation)
            if not oldest:
                queues.remove(oldest)
        return bool(queues)

    # --- frames ------------------------------------------------------------------------------------------------------

    def _cut(self, side: int, half: _Half, now: int) -> bool:
        """Take one frame off the begin of what is there; whether there may be another."""
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
        """Read the size of the frame that begins `data`; whether there is one."""
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
        if half.keep > SMALL:
            if self._room.take(half.keep):
                half.taken = half.keep
            else:
                half.keep = SMALL
        return True

    def _take_off(self, half: _Half, end: int) -> None:
        """The frame that ends at `end` of what is held was read."""
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
        """Read nothing more."""
        self.opaque = True
        for half in self._halves:
            self._clear(half)

    def _lost(self, side: int, half: _Half, text: str, now: int) -> None:
        self.events.append(Fault(side, text, half.position, now))
        if self._begins or not self._resync:
            self.give_up()
            return
        if half.dropped:  # what is held is no longer a stretch of the stream
            self._clear(half)
        self._room.give_back(half.taken)
        half.frame = half.taken = 0
        half.seeking = True
        self._drop(half, min(1, len(half.data)))

    def _found(self, side: int, half: _Half) -> bool:
        """Whether a plausible frame begins in what is there; what stands before it is dropped."""
        pos = _next(side, half.data)
        half.seeking = pos < 0
        self._drop(half, pos if pos >= 0 else max(0, len(half.data) - _LEAST[side] + 1))
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
        if self._values and (len(frame) <= SMALL or self._room.take(len(frame))):
            operation.held = len(frame) if len(frame) > SMALL else 0
            operation.request = self._body(operations.request, operation, frame, pos, half)
        queue = self._fixed.get(operation.xid, self._pending)
        weight = 1 + (len(frame) >> VALUES_SHIFT if operation.request else 0)
        while len(queue) >= FREE_PENDING:
            if len(queue) < MAX_PENDING and self._room.lend(weight):
                operation.lent = weight
                break
            self._let_go(queue[0])
            self.events.append(queue.popleft())
        queue.append(operation)

    def _begin(self, op: str, xid: int, half: _Half, now: int) -> Operation:
        operation = Operation(op, xid, self.session, self._number, half.begun, now)
        operation.request_bytes = half.frame
        operation.decoded = self._values or op == "connect"
        self._number += 1
        return operation

    def _body(self, read_as: Any, operation: Operation, frame: memoryview, pos: int, half: _Half) -> Values:
        """The values of a body; of a large one, those before its first vector."""
        is_whole = half.frame <= self._whole and not half.dropped and half.frame <= half.keep
        try:
            values: Values
            values, _ = read_as(operation.op, frame, pos, whole=is_whole)
        except Malformed:
            operation.decoded = False
            return {}
        operation.decoded = operation.decoded and is_whole
        return values

    def _let_go(self, operation: Operation) -> None:
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
        # A server that does not know the session any more answers with none.
        operation.error = 0 if values["sessionId"] else layouts()["errors"]["SESSIONEXPIRED"]
        if values["sessionId"]:
            self.session = operation.session = values["sessionId"]
        self.timeout_ms = values["timeOut"]
        self._end(operation, half, now)

    def _end(self, operation: Operation, half: _Half, now: int) -> None:
        operation.response_start, operation.response_end = half.begun, now
        operation.response_bytes = half.frame
        self._let_go(operation)
        self.events.append(operation)

    def _paired(self, xid: int) -> Operation:
        """The request of an answer; those that it overtakes are given up."""
        queue = self._fixed.get(xid, self._pending)
        if xid in self._fixed:
            if queue:
                return queue.popleft()
        elif queue and (queue[0].xid == xid or any(operation.xid == xid for operation in queue)):
            while queue[0].xid != xid:
                self._let_go(queue[0])
                self.events.append(queue.popleft())
            return queue.popleft()
        return Operation("unknown", xid, self.session, -1, outcome=NOT_SEEN, decoded=False)


def _first_number(queue: deque[Operation]) -> int:
    return queue[0].number


def _is_plausible(side: int, data: bytearray | memoryview, pos: int) -> bool:
    """Whether the header of a frame may stand at `pos`, where _LEAST bytes are."""
    if side == CLIENT:
        size, xid, operation = _REQUEST.unpack_from(data, pos)
        return 8 <= size <= MAX_FRAME >> 4 and (xid > 0 or xid in _FIXED_XIDS) and operation in operations.REQUESTS
    size, xid = _SIZE.unpack_from(data, pos)[0], _SIZE.unpack_from(data, pos + 4)[0]
    zxid, error = int.from_bytes(data[pos + 8 : pos + 16], signed=True), _SIZE.unpack_from(data, pos + 16)[0]
    if not (16 <= size <= MAX_FRAME >> 4 and zxid >= -1 and error in names_of("errors")):
        return False
    return xid > 0 or xid in _FIXED_XIDS or xid == NOTIFICATION


def _ends(numbers: Any) -> bytes:
    """A pattern of the last three bytes of small numbers of 4 bytes, of which the first is any."""
    return b"(?:" + b"|".join(re.escape(number.to_bytes(4, signed=True)) for number in sorted(numbers)) + b")"


# What _is_plausible looks at, for a search that stays out of Python: overlapping, hence the lookahead.
_LEAST = (12, 20)
_SIZES = rb"\x00(?:\x00\x00[%b-\xff]|\x00[\x01-\xff].|[\x01-\x10]..)"
_XIDS = rb"(?!\x00{4})(?:[\x00-\x7f]...|\xff\xff\xff.)"
_ZXIDS = rb"(?:[\x00-\x7f].{7}|\xff{8})"
_HEADS = (
    re.compile(rb"(?s)(?=" + _SIZES % rb"\x08" + _XIDS + _ends(operations.REQUESTS) + b")"),
    re.compile(rb"(?s)(?=" + _SIZES % rb"\x10" + _XIDS + _ZXIDS + _ends(names_of("errors")) + b")"),
)


def _next(side: int, data: bytearray) -> int:
    """Where the first header that is plausible stands; -1: nowhere."""
    with memoryview(data) as view:
        return next((at.start() for at in _HEADS[side].finditer(view) if _is_plausible(side, view, at.start())), -1)


def side_of(head: bytes) -> int | None:
    """CLIENT or SERVER: who sent bytes that begin with a frame that can only be ZooKeeper's, in the middle of a stream.

    A ping, a login, a request or a notification that names a path; None for all else, so for most answers.
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
    """The first record of a side. `readOnly` came with 3.4: older peers leave it out."""
    try:
        values, _ = read(record, frame, 0)
    except Malformed:
        values, _ = read(record, memoryview(bytes(frame) + b"\0"), 0)
    values.pop("passwd")
    return values

"""One client connection with a ZooKeeper server, without I/O: frames are cut, answers paired, events report all of it.

A connection begins with a ConnectRequest and its answer, which name the session; a capture may begin later. Then each
request has an xid. Answers come in the order of requests, but pings and authentications have fixed xids and are
answered on their own; notifications are answers to nothing (`org.apache.zookeeper.ClientCnxn`). A client that sends a
command of four letters instead ("ruok") is no session: its bytes are not read.

A peer's bytes never raise: a body that does not decode leaves its operation without values (`decoded` is False), and
where frames no longer begin where they should, a Fault says so and the next plausible header is sought. After `gap`
it is sought as well.

Bounds: MAX_FRAME bytes of one incomplete frame per side, MAX_PENDING operations without an answer, of which the oldest
is then given up. Refuses to know sockets, clocks and what paths mean.
"""

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
MAX_PENDING = 65_536

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


class _Half:
    """What one side sent and is not cut yet."""

    __slots__ = ("begun", "data", "position", "seeking")

    def __init__(self) -> None:
        self.data = bytearray()
        self.begun = 0  # when the first byte of `data` arrived
        self.position = 0  # in the side's stream, of that byte
        self.seeking = False


class Session:
    """A pair of byte streams, read. `events` is the owner's to take and to clear after each call.

    midstream: the connection's begin was not seen, as in captures that were started later.
    """

    def __init__(self, *, midstream: bool = False) -> None:
        self.events: list[Event] = []
        self.session = 0
        self.timeout_ms = -1  # as negotiated
        self.opaque = False  # a four-letter command, or nothing that is ZooKeeper's: no longer read
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
            return
        if not half.data:
            half.begun = now_ns
        half.data += data
        while not self.opaque and self._cut(side, half, now_ns):
            half.begun = now_ns

    def gap(self, side: int) -> None:
        """Bytes of a side are missing, which only captures know. What is pending can no longer be paired by order."""
        half = self._halves[side]
        half.position += len(half.data)
        half.data.clear()
        half.seeking = True
        if side == CLIENT:
            self._begins = False

    def close(self) -> None:
        """The connection ended: what is pending gets no answer."""
        waiting: list[Operation] = [self._connecting] if self._connecting is not None else []
        for queue in (self._pending, *self._fixed.values()):
            waiting += queue
            queue.clear()
        self._connecting = None
        waiting.sort(key=lambda operation: operation.number)
        self.events += waiting

    # --- frames ------------------------------------------------------------------------------------------------------

    def _cut(self, side: int, half: _Half, now: int) -> bool:
        """Take one frame off the begin of what is there; whether there may be another."""
        data = half.data
        if half.seeking and not self._found(side, half):
            return False
        if len(data) < 4:
            return False
        (size,) = _SIZE.unpack_from(data)
        if self._begins and side == CLIENT and data[:4].isalpha():
            self.opaque = True
            return False
        if not 0 <= size <= MAX_FRAME:
            self._lost(side, half, f"a frame of {size} bytes", now)
            return True
        if len(data) < 4 + size:
            return False
        frame = memoryview(bytes(data[4 : 4 + size]))
        try:
            if side == CLIENT:
                self._request(frame, half.begun, now)
            else:
                self._answer(frame, half.begun, now)
        except Malformed as fault:
            self._lost(side, half, str(fault), now)
            return True
        del data[: 4 + size]
        half.position += 4 + size
        return bool(data)

    def _lost(self, side: int, half: _Half, text: str, now: int) -> None:
        self.events.append(Fault(side, text, half.position, now))
        if self._begins:
            self.opaque = True
        half.seeking = True
        del half.data[:1]
        half.position += 1

    def _found(self, side: int, half: _Half) -> bool:
        """Whether a plausible frame begins in what is there; what stands before it is dropped."""
        data = half.data
        least = 12 if side == CLIENT else 20
        for pos in range(len(data) - least + 1):
            if self._is_plausible(side, data, pos):
                half.seeking = False
                self._drop(half, pos)
                return True
        self._drop(half, max(0, len(data) - least + 1))
        return False

    def _drop(self, half: _Half, count: int) -> None:
        del half.data[:count]
        half.position += count

    def _is_plausible(self, side: int, data: bytearray, pos: int) -> bool:
        if side == CLIENT:
            size, xid, operation = _REQUEST.unpack_from(data, pos)
            return 8 <= size <= MAX_FRAME >> 4 and (xid > 0 or xid in _FIXED_XIDS) and operation in operations.REQUESTS
        size, xid = _SIZE.unpack_from(data, pos)[0], _SIZE.unpack_from(data, pos + 4)[0]
        zxid, error = int.from_bytes(data[pos + 8 : pos + 16], signed=True), _SIZE.unpack_from(data, pos + 16)[0]
        if not (16 <= size <= MAX_FRAME >> 4 and zxid >= -1 and error in names_of("errors")):
            return False
        return xid > 0 or xid in _FIXED_XIDS or xid == NOTIFICATION

    # --- requests ----------------------------------------------------------------------------------------------------

    def _request(self, frame: memoryview, start: int, now: int) -> None:
        if self._begins and len(frame) in _CONNECT_BYTES and not any(frame[:4]):
            self._begins = False
            self._connecting = self._begin("connect", 0, frame, start, now)
            self._connecting.request = _without_password("ConnectRequest", frame)
            self.session = self._connecting.session = self._connecting.request["sessionId"]
            return
        self._begins = False
        header, pos = read("RequestHeader", frame, 0)
        number = header["type"]
        if number not in operations.REQUESTS:
            raise Malformed(f"a request for operation {number}")
        operation = self._begin(names_of("operations")[number], header["xid"], frame, start, now)
        try:
            operation.request, _ = operations.request(operation.op, frame, pos)
        except Malformed:
            operation.decoded = False
        queue = self._fixed.get(operation.xid, self._pending)
        queue.append(operation)
        if len(queue) > MAX_PENDING:
            self.events.append(queue.popleft())

    def _begin(self, op: str, xid: int, frame: memoryview, start: int, now: int) -> Operation:
        operation = Operation(op, xid, self.session, self._number, start, now)
        operation.request_bytes = 4 + len(frame)
        self._number += 1
        return operation

    # --- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, frame: memoryview, start: int, now: int) -> None:
        if self._connecting is not None:
            operation, self._connecting = self._connecting, None
            self._connected(operation, frame, start, now)
            return
        header, pos = read("ReplyHeader", frame, 0)
        if header["xid"] == NOTIFICATION:
            event, _ = read("WatcherEvent", frame, pos)
            kind = names_of("event_types").get(event["type"], str(event["type"]))
            state = names_of("event_states").get(event["state"], str(event["state"]))
            path = event["path"] or ""
            self.events.append(Notification(self.session, kind, state, path, header["zxid"], now, 4 + len(frame)))
            return
        operation = self._paired(header["xid"])
        operation.zxid, operation.error = header["zxid"], header["err"]
        if operation.outcome != NOT_SEEN:
            operation.outcome = ANSWERED
            if not operation.error:
                try:
                    operation.response, _ = operations.answer(operation.op, frame, pos)
                except Malformed:
                    operation.decoded = False
        self._end(operation, frame, start, now)

    def _connected(self, operation: Operation, frame: memoryview, start: int, now: int) -> None:
        if len(frame) not in _CONNECTED_BYTES:
            raise Malformed(f"an answer of {len(frame)} bytes to the first request")
        values = operation.response = _without_password("ConnectResponse", frame)
        operation.outcome = ANSWERED
        # A server that does not know the session any more answers with none.
        operation.error = 0 if values["sessionId"] else layouts()["errors"]["SESSIONEXPIRED"]
        if values["sessionId"]:
            self.session = operation.session = values["sessionId"]
        self.timeout_ms = values["timeOut"]
        self._end(operation, frame, start, now)

    def _end(self, operation: Operation, frame: memoryview, start: int, now: int) -> None:
        operation.response_start, operation.response_end = start, now
        operation.response_bytes = 4 + len(frame)
        self.events.append(operation)

    def _paired(self, xid: int) -> Operation:
        """The request of an answer; those that it overtakes are given up."""
        queue = self._fixed.get(xid, self._pending)
        if xid in self._fixed:
            if queue:
                return queue.popleft()
        elif any(operation.xid == xid for operation in queue):
            while queue[0].xid != xid:
                self.events.append(queue.popleft())
            return queue.popleft()
        return Operation("unknown", xid, self.session, -1, outcome=NOT_SEEN, decoded=False)


def _without_password(record: str, frame: memoryview) -> Values:
    """The first record of a side. `readOnly` came with 3.4: older peers leave it out."""
    try:
        values, _ = read(record, frame, 0)
    except Malformed:
        values, _ = read(record, memoryview(bytes(frame) + b"\0"), 0)
    values.pop("passwd")
    return values

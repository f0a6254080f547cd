"""The receivers of a flow's bytes: they choose its protocol, and pass the bytes to a session.

`Undecided` takes the bytes of a flow until its protocol is clear; then `Kafka` or `ZooKeeper` takes them, or
`flow.DISCARD` drops them. Memory: 4 * content.HEAD bytes of a flow without a protocol yet, and the memory of its
session. Refuses to know packets.
"""

from collections import deque
from collections.abc import Callable

from kproxy.capture.connections import content, proxied
from kproxy.capture.connections.flow import DISCARD, Flow, Listener, ZooKeeperListener
from kproxy.capture.connections.reassembly import Receiver
from kproxy.capture.connections.tls_alerts import OPENING, is_alert
from kproxy.capture.quality import Quality
from kproxy.wire.events import Desync, Gap
from kproxy.wire.offline.captured import CapturedSession
from kproxy.wire.state import Usual
from kproxy.zookeeper import session as zookeeper


class Kafka:
    """Passes the bytes of a Kafka connection to its session, and the session's events to the listener."""

    __slots__ = ("_brokers_first", "_flow", "_quality", "flip", "listener", "openings", "session")

    def __init__(self, flow: Flow, session: CapturedSession, listener: Listener, quality: Quality) -> None:
        self.session = session
        self.flip = flow.client  # 1 where side 0 of the conversation is the broker
        self.openings: dict[int, Usual] = {}  # how its requests began, by key and version
        self._flow = flow
        self.listener = listener
        self._quality = quality
        self._brokers_first: bytearray | None = (
            bytearray() if flow.start_seen else None
        )  # bytes, until they are OPENING

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        session = self.session
        if self._brokers_first is not None and side ^ self.flip:
            self._look_for_tls(self._brokers_first, view)
        session.receive(side ^ self.flip, view, now_ns)
        usual = session.usual
        if usual[4].known:
            self.openings[usual[2]] = usual
        if session.events:
            self._emit(now_ns)

    def _look_for_tls(self, first: bytearray, view: memoryview) -> None:
        first += view[: OPENING - len(first)]
        if len(first) == OPENING:
            self._flow.meets_tls = is_alert(first)
            self._brokers_first = None

    def gap(self, side: int, count: int, now_ns: int) -> None:
        self.session.gap(side ^ self.flip, count, now_ns)
        self._emit(now_ns)

    def close(self, side: int, now_ns: int) -> None:
        self.session.close(side ^ self.flip, now_ns)
        self._emit(now_ns)

    def _emit(self, now_ns: int) -> None:
        self._flow.heard_ns = now_ns
        events = self.session.events
        for event in events:
            if type(event) is Gap and event.resync:
                self._quality.note("resync", event.now_ns, size=event.count)
            elif type(event) is Desync:
                self._quality.note("fault", event.now_ns)
        self.listener(events)
        events.clear()


class ZooKeeper:
    """Passes the bytes of a ZooKeeper connection to its session, and the session's events to the listener."""

    __slots__ = ("_flip", "_listener", "_open_sides", "_quality", "_session")

    def __init__(
        self, session: zookeeper.Session, flip: int, listener: ZooKeeperListener | None, quality: Quality
    ) -> None:
        self._session = session
        self._flip = flip  # 1 where side 0 of the conversation is the server
        self._listener = listener
        self._quality = quality
        self._open_sides = 2

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        session = self._session
        session.receive(side ^ self._flip, view, now_ns)
        if session.events or session.skipped:
            self._emit(now_ns)

    def gap(self, side: int, count: int, now_ns: int) -> None:
        self._session.gap(side ^ self._flip)
        self._emit(now_ns)

    def close(self, side: int, now_ns: int) -> None:
        self._open_sides -= 1
        if not self._open_sides:
            self._session.close()
            self._emit(now_ns)

    def _emit(self, now_ns: int) -> None:
        session = self._session
        events = session.events
        if session.skipped and not session.command:
            self._quality.note("resync", now_ns, size=session.skipped)
        session.skipped = 0
        for event in events:
            if type(event) is zookeeper.Fault:
                self._quality.note("zookeeper_fault", event.time)
            elif type(event) is zookeeper.Operation and not event.decoded and event.outcome != zookeeper.NOT_SEEN:
                size = event.request_bytes + event.response_bytes
                self._quality.note("zookeeper_unread", event.response_end or event.request_end, size=size)
        if self._listener is not None:
            self._listener(events)
        events.clear()


class Undecided:
    """Keeps the first deliveries of a flow until its protocol is clear, then passes them on."""

    __slots__ = (
        "_decide",
        "_deliveries",
        "_flow",
        "_heads",
        "_quality",
        "_size",
        "_skipped",
        "_trusted",
        "_whole",
        "_witnesses",
    )

    def __init__(
        self, flow: Flow, decide: Callable[[Flow, str], Receiver], quality: Quality, trusted: str | None
    ) -> None:
        """decide: returns the receiver of a flow with a known protocol. trusted: the user's protocol for its port."""
        self._decide = decide
        self._quality = quality
        self._flow = flow
        self._trusted = trusted
        self._whole = flow.start_seen  # all bytes so far are here, from the connection's first on
        self._deliveries: deque[tuple[int, bytes | int | None, int]] = deque()  # bytes, a gap's size, or the end
        self._heads = (bytearray(), bytearray())
        self._size = 0
        self._skipped = 0  # bytes of a PROXY header
        self._witnesses: tuple[dict[int, bool], dict[int, bool]] = ({}, {})

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        self._deliveries.append((side, bytes(view), now_ns))
        self._size += len(view)
        flow = self._flow
        if self._whole:
            if flow.client < 0:  # both sides sent a SYN: the client sends the first bytes
                flow.client = side
            head = self._heads[side]
            if len(head) < content.HEAD:
                head += view[: content.HEAD - len(head)]
            if side == flow.client and not self._skipped:
                found = proxied.header(head)
                if found.length == proxied.PENDING:
                    return
                if found.length:
                    self._skipped, flow.proxied = found.length, found.client
                    del head[: found.length]
            speaks = content.opening(self._heads[flow.client], self._heads[1 - flow.client], self._trusted)
        else:
            speaks = self._middle(side, view)
        if speaks is not None:
            self._settle(speaks)
        elif self._size > 4 * content.HEAD:
            if self._whole:
                self._settle(content.NOT_KAFKA)
            else:  # the flow begins in the middle of a large frame: drop bytes before its first request
                _, delivery, _ = self._deliveries.popleft()
                if isinstance(delivery, bytes):
                    self._size -= len(delivery)
                    self._quality.note("resync", now_ns, size=len(delivery))

    def gap(self, side: int, count: int, now_ns: int) -> None:
        self._deliveries.append((side, count, now_ns))
        if self._whole:
            self._whole = False
            for number, delivery, _ in list(self._deliveries):
                if isinstance(delivery, bytes) and (speaks := self._middle(number, memoryview(delivery))):
                    self._settle(speaks)
                    return

    def close(self, side: int, now_ns: int) -> None:
        self._deliveries.append((side, None, now_ns))
        if sum(1 for _, delivery, _ in self._deliveries if delivery is None) == 2:
            self._settle("undecided" if self._size else "no_data")

    def _middle(self, side: int, view: memoryview) -> str | None:
        """The protocol by a segment of a flow without its beginning; Kafka by two requests, or one and its response."""
        kind = content.other(view)
        if kind is not None:
            return kind
        flow = self._flow
        sent_by = content.zookeeper_side(view)
        if sent_by is not None:
            flow.client = side ^ sent_by
            return content.ZOOKEEPER
        if flow.client >= 0 and self._trusted is not None:
            return self._trusted
        if self._trusted == content.ZOOKEEPER:
            return None
        theirs = self._witnesses[1 - side]
        if len(view) >= 8 and int.from_bytes(view[4:8], signed=True) in theirs and flow.client in (-1, 1 - side):
            flow.client = 1 - side
            return content.KAFKA
        if flow.client == 1 - side:
            return None
        seen = content.witness(view)
        if seen is not None:
            ours = self._witnesses[side]
            if len(ours) < 64:
                ours[seen[0]] = seen[1]
            if sum(ours.values()) >= 2:
                flow.client = side
                return content.KAFKA
        return None

    def _settle(self, speaks: str) -> None:
        if self._flow.start_seen and not self._whole:
            sent = (each for side, each, _ in self._deliveries if side == self._flow.client)
            first = next(sent, None)
            self._flow.lacks_beginning = not (isinstance(first, bytes) and content.begins_request(first))
        if speaks == content.NOT_KAFKA and self._whole:
            self._flow.foreign = content.foreign(self._heads[self._flow.client])
        receiver = self._decide(self._flow, speaks)
        self._flow.talk.receiver = receiver
        if receiver is DISCARD:
            return
        skipped = self._skipped
        for side, delivery, now_ns in self._deliveries:
            if isinstance(delivery, bytes) and side == self._flow.client and skipped:
                skipped -= len(cut := delivery[:skipped])
                delivery = delivery[len(cut) :]
                if not delivery:
                    continue
            if delivery is None:
                receiver.close(side, now_ns)
            elif isinstance(delivery, int):
                receiver.gap(side, delivery, now_ns)
            else:
                receiver.receive(side, memoryview(delivery), now_ns)

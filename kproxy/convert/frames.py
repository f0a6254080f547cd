"""The frames of one exchange of a capture, found by its connection and its number in the tables.

Duty: reads the capture once for the exchange's times, sizes and correlation id, and a second time to keep the bytes of
its connection from the exchange's first byte to its last. A frame is found by its size, API, version and correlation
id.

Memory: the bytes of one connection during the exchange; if its end is unknown, SPARE_BYTES more than the frame. Does
not decode the frames.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from uuid import UUID

import numpy as np

from kproxy.capture.connections.flow import Flow, Handlers
from kproxy.capture.connections.flows import Flows
from kproxy.capture.connections.reassembly import Receiver
from kproxy.capture.decrypt import decrypt
from kproxy.capture.dissection.uncut import uncut
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from kproxy.convert.job import Job, Settings, captures_of
from kproxy.errors import KproxyError
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import ANSWERED, BROKER, CLIENT, NONE, Event, Exchange, Unanswered
from kproxy.wire.interest import ApiPlan
from kproxy.wire.offline.bulk import Bulk

SPARE_BYTES = 4 << 20
MAX_TOPICS = 65_536  # names of topics by id
NEAR = 8  # suggested connection ids in an error message
_FOR_EVER = 1 << 63
_DEFAULT = Settings()


@dataclass(frozen=True)
class Frames:
    """One exchange. Times are nanoseconds since the epoch, sizes bytes including the 4-byte size; NONE: unknown.

    request, response: the frames without their sizes; None if the capture does not hold the complete frame.
    """

    connection: ConnectionInfo
    number: int
    api_key: int
    api_version: int
    outcome: str
    correlation_id: int
    request_start: int
    request_end: int
    response_start: int
    response_end: int
    request_bytes: int
    response_bytes: int
    request: bytes | None = None
    response: bytes | None = None
    topics: Mapping[UUID, str] = field(default_factory=dict)  # names by id, from earlier responses
    keys: tuple[bytes, ...] = ()  # of segments from the client and from the broker: `capture.dissection.keys`
    paths: tuple[str, ...] = ()  # of its capture


def frames_of(captures: Sequence[Path | str], connection: int, number: int, settings: Settings = _DEFAULT) -> Frames:
    """Return the frames of the exchange with this `connection` and `number` in the tables.

    Raises KproxyError if there is no such connection or exchange, CaptureError for an unreadable file.
    """
    seen = False
    near: set[int] = set()
    for job in captures_of(captures, settings):
        search = _Search(connection, number)
        _read(job, _flows(Flows, job, search.handlers), search.is_over)
        seen |= search.seen
        near |= search.near
        if search.found is not None:
            return replace(_with_frames(job, search.found), topics=search.topics, paths=job.paths)
    if not seen and near:
        raise KproxyError(
            f"no connection {connection}: did you mean {min(near)}? Readers of JSON that keep numbers as floats, "
            "like jq before 1.7, round ids"
        )
    if not seen:
        raise KproxyError(
            f"no connection {connection} in {', '.join(map(str, captures))}: name the capture that the tables were "
            "made of; of tables from before schema version 9, make them anew with kproxy convert"
        )
    raise KproxyError(f"connection {connection} has no request with the number {number}")


class _Search:
    """A listener of a capture's flows that searches for one exchange."""

    def __init__(self, connection: int, number: int) -> None:
        self.seen = False  # whether the connection exists
        self.near: set[int] = set()  # ids that equal the searched one when rounded to a float; NEAR at most
        self.found: Frames | None = None
        self.topics: dict[UUID, str] = {}
        self._connection = connection
        self._number = number
        self.handlers = Handlers(self._decided, self._many, lambda flow: None)

    def is_over(self) -> bool:
        return self.found is not None

    def _decided(self, flow: Flow) -> Callable[[list[Event]], None]:
        info = flow.info
        assert info is not None
        mine = info.id == self._connection
        self.seen |= mine
        if not mine and float(info.id) == float(self._connection) and len(self.near) < NEAR:
            self.near.add(info.id)

        def listen(events: list[Event]) -> None:
            for event in events:
                if type(event) is Exchange and event.response_body is not None and len(self.topics) < MAX_TOPICS:
                    self.topics |= event.response_body.names
            for event in events if mine else ():
                exchange = event.exchange if isinstance(event, Unanswered) else event
                if isinstance(exchange, Exchange) and exchange.number == self._number:
                    self.found = _found(
                        flow, exchange.number, exchange.plan, exchange.outcome, partial(getattr, exchange)
                    )

        return listen

    def _many(self, flows: Sequence[Flow], bulk: Bulk) -> None:
        for index, flow in enumerate(flows):
            if flow.info is None or flow.info.id != self._connection:
                continue
            for row in np.flatnonzero((bulk.connection == index) & (bulk.columns["number"] == self._number)).tolist():
                columns = {name: int(column[row]) for name, column in bulk.columns.items()}
                self.found = _found(flow, self._number, bulk.plan, ANSWERED, columns.__getitem__)


def _found(flow: Flow, number: int, plan: ApiPlan, outcome: str, value: Callable[[str], int]) -> Frames:
    assert flow.info is not None
    return Frames(
        flow.info,
        number,
        plan.api_key,
        plan.api_version,
        outcome,
        correlation_id=value("correlation_id"),
        request_start=value("request_start"),
        request_end=value("request_end"),
        response_start=value("response_start"),
        response_end=value("response_end"),
        request_bytes=value("request_bytes"),
        response_bytes=value("response_bytes"),
        keys=(flow.keys[flow.client], flow.keys[1 - flow.client]),
    )


def _read(job: Job, flows: Flows, is_over: Callable[[], bool]) -> None:
    """Read the flows of a capture until `is_over` returns true."""
    capture = Capture(job.paths, Quality(), storage=job.storage)
    flows.keep_encrypted = job.key_log is not None
    for window in uncut(capture.windows()):
        flows.keep_encrypted |= bool(capture.secrets)
        flows.window(window)
        if is_over():
            return
    flows.finish()
    if flows.encrypted:
        decrypt(flows, job.paths, job.key_log, job.storage)


def _flows(kind: type[Flows], job: Job, handlers: Handlers) -> Flows:
    return kind(
        job.source, Quality(), handlers, cluster=job.cluster, ports=job.ports, zookeeper_ports=job.zookeeper_ports
    )


# --- the bytes -------------------------------------------------------------------------------------------------------


def _with_frames(job: Job, found: Frames) -> Frames:
    client = _Kept(found.request_start, found.request_end, found.request_bytes)
    broker = _Kept(found.response_start, found.response_end, found.response_bytes)
    kept = (client, broker)

    class KeepingFlows(Flows):
        def decide(self, flow: Flow, speaks: str) -> Receiver:
            receiver = super().decide(flow, speaks)
            if flow.info is not None and flow.info.id == found.connection.id and flow.session is not None:
                return _Keeper(receiver, flow.client, kept)
            return receiver

    handlers = Handlers(lambda flow: lambda events: None, lambda flows, bulk: None, lambda flow: None)
    _read(job, _flows(KeepingFlows, job, handlers), lambda: client.is_over and broker.is_over)
    request = struct.pack(">ihhi", found.request_bytes - 4, found.api_key, found.api_version, found.correlation_id)
    return replace(
        found,
        request=client.frame(request),
        response=broker.frame(struct.pack(">ii", found.response_bytes - 4, found.correlation_id)),
    )


class _Kept:
    """The bytes of one side of a connection that arrived between two times."""

    def __init__(self, first_ns: int, last_ns: int, size: int) -> None:
        self.is_over = size < 4 or first_ns == NONE
        self._first_ns = first_ns
        self._last_ns = _FOR_EVER if last_ns == NONE else last_ns
        self._size = size
        self._most = size + SPARE_BYTES if last_ns == NONE else _FOR_EVER
        self._bytes = bytearray()

    def take(self, view: memoryview, now_ns: int) -> None:
        if now_ns > self._last_ns or len(self._bytes) > self._most:
            self.is_over = True
        elif now_ns >= self._first_ns:
            self._bytes += view

    def frame(self, head: bytes) -> bytes | None:
        """Return the frame that begins with `head`, without its size; None if it is incomplete."""
        place = self._bytes.find(head) if self._size >= 4 else -1
        if place < 0 or place + self._size > len(self._bytes):
            return None
        return bytes(self._bytes[place + 4 : place + self._size])


class _Keeper:
    """A receiver in front of the connection's session that keeps the bytes."""

    def __init__(self, receiver: Receiver, client: int, kept: tuple[_Kept, _Kept]) -> None:
        self._receiver = receiver
        self._kept = (kept[client ^ CLIENT], kept[client ^ BROKER])  # by the side of the conversation

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        self._kept[side].take(view, now_ns)
        self._receiver.receive(side, view, now_ns)

    def gap(self, side: int, count: int, now_ns: int) -> None:
        self._receiver.gap(side, count, now_ns)

    def close(self, side: int, now_ns: int) -> None:
        self._receiver.close(side, now_ns)

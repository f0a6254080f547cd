"""Traces: the frames of a connection, or of a client's address, decoded and without secrets, while a client reads them.

Connections without a trace have no cost. The session of a traced connection gets the observer of the flight recorder
(`flight.frames`), and its chunks are cut into frames at once. The relay never waits: frames that a trace drops are
counted. Bytes of a side without frames (a SASL token without a header, bytes that are not Kafka) are left out and
only counted. Frames are decoded later, on a thread, when the trace is read.

Never shown: fields that `protocol/shown/secrets.py` lists, records (only their number and size are), fields outside the
schema, and bytes after a body, since these may be secrets. A frame that does not decode, or has an unknown API, shows
only its size.

Bounded: MAX_TRACES per process, MAX_CONNECTIONS per trace; MAX_HELD_BYTES of unread frames; only the header of a frame
larger than MAX_FRAME; a trace ends if it is not read for FORGOTTEN_S. Does not use HTTP.
"""

import ipaddress
from base64 import b64decode
from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any, NamedTuple

from kproxy.addresses import numeric
from kproxy.errors import ProtocolError
from kproxy.flight.cutting import Cutter
from kproxy.flight.frames import Chunk, Watch
from kproxy.protocol.apis import API_VERSIONS
from kproxy.protocol.compression import codec_name
from kproxy.protocol.records import iterate_headers
from kproxy.protocol.schema import Field, api_name
from kproxy.protocol.shown import decode
from kproxy.protocol.shown.secrets import CONTENT
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.relay.relay import Relay
from kproxy.wire.events import CLIENT, SIDES
from kproxy.wire.observing.watched import unwatch, watch

MAX_TRACES = 4
MAX_CONNECTIONS = 64
MAX_HELD_BYTES = 4 * 1024 * 1024
MAX_FRAME = 64 * 1024
FORGOTTEN_S = 10.0
_OVERHEAD = 256  # memory of a frame in addition to its bytes
_UNKNOWN = "(left out)"

Json = dict[str, Any]


class Captured(NamedTuple):
    """A frame of a trace, before it is decoded."""

    now_ns: int
    connection: int
    client: str
    side: int  # the sender
    size: int  # bytes, including the 4-byte size of a frame
    frame: bytes | None  # None: left out
    api: tuple[int, int] | None  # for an answer: key and version of its request
    why: str  # why it is left out


class Tap:
    """A traced connection."""

    def __init__(self, trace: "Trace", relay: Relay) -> None:
        self.relay = relay
        self._trace = trace
        self._client = str(Address(relay.info.client_address, relay.info.client_port))
        pending = [(one.correlation_id, (one.plan.api_key, one.plan.api_version)) for one in relay.session.pending]
        self._cutter = Cutter(pending, MAX_FRAME)
        self._watch = Watch(self._take, relay.info)
        watch(relay.session, self._watch)

    def end(self) -> None:
        unwatch(self.relay.session, self._watch)

    def _take(self, chunk: Chunk) -> None:
        if chunk.data is None and chunk.boundary < 0:
            self._keep(chunk, chunk.size, None, None, "no frames: a SASL token, or no Kafka")
        for frame in self._cutter.feed(chunk):
            if frame.is_whole:
                self._keep(chunk, frame.size, frame.data, frame.api, "")
            else:
                self._keep(chunk, frame.size, None, frame.api, "too large to be shown")

    def _keep(self, chunk: Chunk, size: int, frame: bytes | None, api: tuple[int, int] | None, why: str) -> None:
        self._trace.keep(Captured(chunk.now_ns, self.relay.number, self._client, chunk.side, size, frame, api, why))


class Trace:
    """A trace of one connection by its number, or of all connections of an address, including later ones."""

    def __init__(self, connection: int | None, client: str | None) -> None:
        self.connection = connection
        self.client = client
        self.dropped = 0  # frames that were not shown
        self.read_at = monotonic()
        self._taps: dict[int, Tap] = {}
        self._captured: deque[Captured] = deque()
        self.held_bytes = 0

    def wants(self, relay: Relay) -> bool:
        if self.connection is not None:
            return relay.number == self.connection
        return self.client in (relay.info.client_address, f"{relay.info.client_address}:{relay.info.client_port}")

    def watch(self, relay: Relay) -> None:
        for number, tap in list(self._taps.items()):
            if tap.relay.closed:
                tap.end()
                del self._taps[number]
        if len(self._taps) < MAX_CONNECTIONS and relay.number not in self._taps:
            self._taps[relay.number] = Tap(self, relay)

    def keep(self, captured: Captured) -> None:
        size = _OVERHEAD + len(captured.frame or b"")
        if self.held_bytes + size > MAX_HELD_BYTES:
            self.dropped += 1
            return
        self.held_bytes += size
        self._captured.append(captured)

    def take(self) -> list[Captured]:
        """Return and remove the frames since the last call."""
        self.read_at = monotonic()
        taken, self._captured = list(self._captured), deque()
        self.held_bytes = 0
        return taken

    @property
    def watched(self) -> int:
        """Return the number of open connections in this trace."""
        return sum(not tap.relay.closed for tap in self._taps.values())

    def end(self) -> None:
        for tap in self._taps.values():
            tap.end()
        self._taps.clear()


class Traces:
    """The traces of a process. `connected` is called for each new connection while there is one."""

    def __init__(self) -> None:
        self._traces: dict[str, Trace] = {}

    def __bool__(self) -> bool:
        return bool(self._traces)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of unread frames."""
        return sum(trace.held_bytes for trace in self._traces.values())

    def start(self, name: str, relays: Iterable[Relay], connection: int | None, client: str | None) -> int:
        """Begin a trace; returns the number of its connections. Raises ValueError if there are too many traces."""
        self._forget()
        if len(self._traces) >= MAX_TRACES:
            raise ValueError(f"{MAX_TRACES} traces are being watched; end one of them")
        trace = self._traces[name] = Trace(connection, _normal(client))
        for relay in relays:
            if not relay.closed and trace.wants(relay):
                trace.watch(relay)
        return trace.watched

    def connected(self, relay: Relay) -> None:
        """Add a new connection to the traces of its address."""
        self._forget()
        for trace in self._traces.values():
            if trace.wants(relay):
                trace.watch(relay)

    def take(self, name: str) -> tuple[list[Captured], int, int]:
        """Return (frames since the last call, frames dropped so far, number of open connections)."""
        trace = self._traces.get(name)
        if trace is None:  # this process started after the trace
            return [], 0, 0
        return trace.take(), trace.dropped, trace.watched

    def stop(self, name: str) -> None:
        trace = self._traces.pop(name, None)
        if trace is not None:
            trace.end()

    def _forget(self) -> None:
        """End the traces that were not read for FORGOTTEN_S."""
        for name, trace in list(self._traces.items()):
            if monotonic() - trace.read_at > FORGOTTEN_S:
                self.stop(name)


def _normal(client: str | None) -> str | None:
    """Return an address, with or without port, in the notation of connections. Raises ValueError for other text."""
    if client is None:
        return None
    host, colon, port = client.rpartition(":")
    if numeric(client) is not None or not colon or not port.isdigit():
        host, port = client, ""
    try:
        address = numeric(host.strip("[]")) or ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"client={client[:60]!r} is no address, like 10.0.0.7 or 10.0.0.7:51234") from None
    return f"{address}:{port}" if port else str(address)


# --- output ----------------------------------------------------------------------------------------------------------


def as_json(captured: Captured) -> Json:
    """Return a frame as a JSON object, decoded, without secrets and records. Takes milliseconds: not for the loop."""
    kind = "request" if captured.side == CLIENT else "response"
    shown: Json = {
        "time_ns": captured.now_ns,
        "connection": captured.connection,
        "client": captured.client,
        "from": SIDES[captured.side],
        "bytes": captured.size,
    }
    if captured.api is not None:
        shown |= {"api": api_name(captured.api[0]), "version": captured.api[1], "kind": kind}
    if captured.frame is None:
        return shown | {"left_out": captured.why}
    if captured.api is None:
        return shown | {"left_out": "it answers no request that this trace has seen"}
    try:
        decoded = _decoded(captured.frame[4:], captured.side, captured.api)
        shown |= decode.as_json(decoded, show_secrets=False)
        _leave_out_records(decoded.message.fields, shown["body"])
        if shown["body"].get(pushed := CONTENT.get(decoded.message.name, "")):
            shown["body"][pushed] = {"bytes": len(decoded.body[pushed])}
        _leave_out_unknown(shown["header"])
        _leave_out_unknown(shown["body"])
    except (ProtocolError, ValueError, KeyError, RecursionError) as fault:
        shown.pop("header", None)
        shown.pop("body", None)
        return shown | {"left_out": f"it does not decode: {_safe(fault)}"}
    return shown


def _safe(fault: Exception) -> str:
    """Return the kind of an exception; its text may contain bytes of a peer."""
    return type(fault).__name__


def _decoded(frame: bytes, side: int, api: tuple[int, int]) -> decode.Decoded:
    if side == CLIENT:
        return decode.request(frame)
    try:
        return decode.response(frame, *api)
    except ProtocolError:
        if api[0] != API_VERSIONS:
            raise
        return decode.response(frame, api[0], 0)  # the answer to an unsupported version has version 0


def _leave_out_records(fields: tuple[Field, ...], body: Json) -> None:
    """Replace records in a JSON body by their number and size."""
    for field in fields:
        value = body.get(field.name)
        if value is None:
            continue
        if field.type == "records":
            body[field.name] = _summary(value)
        elif field.fields and isinstance(value, dict):
            _leave_out_records(field.fields, value)
        elif field.fields and isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    _leave_out_records(field.fields, item)


def _leave_out_unknown(value: Any) -> None:
    """Replace the values of tags outside the schema, and the bytes after a body, by _UNKNOWN."""
    if isinstance(value, list):
        for item in value:
            _leave_out_unknown(item)
    elif isinstance(value, dict):
        for name in value:
            if name == "_tags":
                value[name] = dict.fromkeys(value[name], _UNKNOWN)
            elif name == "_trailing":
                value[name] = _UNKNOWN
            else:
                _leave_out_unknown(value[name])


def _summary(records: Any) -> Json:
    """Return the size and number of batches, the number of records, and the codecs."""
    data = b64decode(records) if isinstance(records, str) else b""
    batches = count = 0
    codecs = set()
    try:
        for _, header in iterate_headers(data):
            batches += 1
            count += max(0, header.record_count)
            codecs.add(codec_name(header.codec))
    except ProtocolError:
        pass  # cut short, as a broker may leave them
    return {"bytes": len(data), "batches": batches, "records": count, "codecs": sorted(codecs)}

"""Clients' pushes of their own metrics (KIP-714), answered in place of the broker, like Kafka's ClientMetricsManager.

A client requests a subscription (GetTelemetrySubscriptions: which metrics, how often), and then sends PushTelemetry
with these metrics, in OTLP. The id of a subscription depends only on the settings and the client's instance id, so any
process of kproxy computes it, also one that has just started. Clients with series of their own send cumulative values,
which a lost push does not falsify; all others send deltas, which can be summed.

An instance id belongs to the client id and principal that used it first, for as long as it is in use: /metrics shows
instance ids, and a push under another client's id would replace its values. Other clients receive INVALID_REQUEST.

Bounds, per cluster and process: MAX_INSTANCES clients are remembered for the interval of their pushes; only the first
client of a connection can have series of its own, from its first push on; `max_push_bytes` of a push, before and after
its decompression; BYTES_PER_S of all pushes, MAX_BURST_BYTES at once, and MAX_WAITING_BYTES that are queued. Pushes
beyond these are answered with THROTTLING_QUOTA_EXCEEDED, after which clients wait for their next interval. Raises
nothing on a client's bytes. Uses no sockets; `kproxy.metrics.pushed.telemetry` interprets the metrics.
"""

import asyncio
import logging
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any, Final
from uuid import UUID, uuid4

from kproxy.errors import Malformed, ProtocolError, TooLarge
from kproxy.metrics.counters.named import MAX_LABEL
from kproxy.metrics.pushed.telemetry import LIFE_INTERVALS, Answers, Pushes, parse
from kproxy.protocol import codec
from kproxy.protocol.codec import Body
from kproxy.protocol.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD, decompress
from kproxy.protocol.schema import schema
from kproxy.protocol.shown.render import uuid_text
from kproxy.proxy.config.telemetry import Telemetry
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.filters.rewrite import add_offers
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.wire.decisions.authorizer import HOLD, Answer, Close, Decision, Hold, answered
from kproxy.wire.events import Exchange

API_VERSIONS: Final = 18
GET_TELEMETRY_SUBSCRIPTIONS: Final = 71
PUSH_TELEMETRY: Final = 72
TELEMETRY_APIS = (GET_TELEMETRY_SUBSCRIPTIONS, PUSH_TELEMETRY)

MAX_INSTANCES = 4096
BYTES_PER_S = 1024 * 1024  # of uncompressed metrics: 5 % of a core, 1500 clients a minute
MAX_BURST_BYTES = 4 * BYTES_PER_S
MAX_WAITING_BYTES = 2 * 1024 * 1024
MIN_WAITING_BYTES = 256  # a queued push counts as at least so many bytes
MAX_HEADER_BYTES = 64 * 1024  # around the metrics of a push; a client id has 32 KiB at most
_S = 10**9

# Kafka's error codes by name.
CODES = {
    "NONE": 0,
    "INVALID_REQUEST": 42,
    "UNSUPPORTED_COMPRESSION_TYPE": 76,
    "INVALID_RECORD": 87,
    "THROTTLING_QUOTA_EXCEEDED": 89,
    "UNKNOWN_SUBSCRIPTION_ID": 117,
    "TELEMETRY_TOO_LARGE": 118,
}
ERRORS_OF = {
    "GetTelemetrySubscriptions": ("NONE", "INVALID_REQUEST", "THROTTLING_QUOTA_EXCEEDED"),
    "PushTelemetry": tuple(CODES),
}
_ASK_AGAIN = ("UNKNOWN_SUBSCRIPTION_ID", "UNSUPPORTED_COMPRESSION_TYPE")  # clients resubscribe at once
_COMPRESSIONS = (ZSTD, LZ4, GZIP, SNAPPY)  # the order of brokers' answers; a push may always be uncompressed
_RESERVED = (UUID(int=0), UUID(int=1))  # ids that Kafka reserves

Software = tuple[str, str]  # name and version
Owner = tuple[str, str]  # client id, cut, and principal

log = logging.getLogger("kproxy.telemetry")


class _Instance:
    """The state of one client."""

    __slots__ = ("error", "got_ns", "is_malformed", "may_push", "owner", "pushed_ns", "terminating")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.got_ns = self.pushed_ns = 0
        self.is_malformed = False  # the last push: a large one is parsed after its answer, the next one reports it
        self.may_push = True  # before the interval has passed: it has subscribed since its last push, or is new
        self.terminating = False
        self.error = "NONE"  # the error in the last answer


class Receiver:
    """Answers the clients of one cluster. spawn: runs the task that reads pushes. now_ns: the clock of the events."""

    def __init__(
        self,
        cluster: str,
        settings: Telemetry,
        cells: Answers,
        pushes: Pushes,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        now_ns: Callable[[], int],
    ) -> None:
        self.settings = settings
        self.cells = cells
        self._cluster = cluster
        self._pushes = pushes  # its limits are set on use only, since a reload that fails creates a receiver, too
        self._spawn = spawn
        self._now_ns = now_ns
        self._asks = True  # False after a reload removed the settings
        self._interval_ns = round(settings.push_interval_s * _S)
        self._instances: OrderedDict[UUID, _Instance] = OrderedDict()
        self._waiting: deque[tuple[UUID, Any, int]] = deque()
        self._waiting_bytes = 0
        self._is_reading = False
        self._credit_bytes = MAX_BURST_BYTES
        self._credited_ns = now_ns()
        self._limiter = LogLimiter(log)

    def change(self, settings: Telemetry | None, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Change the settings: each client gets a new subscription at its next push. None: without any metrics."""
        self._spawn = spawn
        self._asks = settings is not None
        if settings is None or settings == self.settings:
            return
        self.settings = settings
        self._interval_ns = round(settings.push_interval_s * _S)
        self._limit()
        self._instances.clear()  # their intervals were those of the previous settings

    def subscribe(self, instance: UUID, owner: Owner, client: str, *, may_own: bool) -> Body:
        """Return the answer to GetTelemetrySubscriptions. may_own: the client may have series of its own."""
        now_ns = self._now_ns()
        known = self._instance(instance, owner, now_ns)
        if known is None:
            return self._foreign("GetTelemetrySubscriptions", owner, client)
        early = max(known.got_ns, known.pushed_ns) + self._interval_ns > now_ns
        if early and known.got_ns and known.error not in _ASK_AGAIN:
            return self._refused("GetTelemetrySubscriptions", known, "THROTTLING_QUOTA_EXCEEDED")
        known.got_ns, known.may_push, known.error = now_ns, True, "NONE"
        owns = self._owns(instance, now_ns, may_own)
        if may_own and self._asks and not owns:
            text = "cluster=%s client=%s: all places of max_clients (%d) are taken: what it pushes adds up in `other`"
            self._limiter.log(logging.WARNING, "full", text, self._cluster, client, self.settings.max_clients)
        self.cells.answers["GetTelemetrySubscriptions", "NONE"] += 1
        return {
            "clientInstanceId": instance,
            "subscriptionId": self._subscription(instance, owns),
            "acceptedCompressionTypes": list(_COMPRESSIONS),
            "pushIntervalMs": self._interval_ns // 10**6,
            "telemetryMaxBytes": self.settings.max_push_bytes,
            "deltaTemporality": not owns,
            "requestedMetrics": list(self.settings.metrics) if self._asks else [],
        }

    def push(self, body: Body, owner: Owner, software: Software, client: str, *, may_own: bool) -> Body:
        """Return the answer to PushTelemetry; keep its metrics, within bounds."""
        known = self._instance(body["clientInstanceId"], owner, self._now_ns())
        if known is None:
            return self._foreign("PushTelemetry", owner, client)
        error, text = self._push(known, body, software, may_own)
        known.terminating |= bool(body["terminating"])
        if text:
            line = "cluster=%s client=%s client_id=%s: the metrics that it pushed are refused: %s"
            self._limiter.log(logging.WARNING, error, line, self._cluster, client, owner[0][:64], text)
        if error:
            return self._refused("PushTelemetry", known, error)
        known.error = "NONE"
        self.cells.answers["PushTelemetry", "NONE"] += 1
        return {}

    def too_large(self, exchange: Exchange) -> Answer:
        """Return the answer to a push that is too large and was not read."""
        self.cells.answers["PushTelemetry", "TELEMETRY_TOO_LARGE"] += 1
        return answered(exchange, {"errorCode": CODES["TELEMETRY_TOO_LARGE"]})

    def _push(self, known: _Instance, body: Body, software: Software, may_own: bool) -> tuple[str, str]:
        """Return (error, text for the log); both may be empty. The order of checks is that of brokers."""
        instance, metrics, compression = body["clientInstanceId"], body["metrics"], body["compressionType"]
        now_ns = self._now_ns()
        if instance in _RESERVED or known.terminating:
            return "INVALID_REQUEST", ""
        early = known.pushed_ns + self._interval_ns > now_ns
        if early and not known.may_push and not body["terminating"]:  # the first may: clients jitter intervals
            return "THROTTLING_QUOTA_EXCEEDED", ""
        known.pushed_ns, known.may_push = now_ns, False
        owns = self._owns(instance, now_ns, may_own)
        if body["subscriptionId"] != self._subscription(instance, owns):
            return "UNKNOWN_SUBSCRIPTION_ID", ""
        if compression not in (NONE, *_COMPRESSIONS):
            return "UNSUPPORTED_COMPRESSION_TYPE", f"compression type {compression} is none that Kafka has"
        limit = self.settings.max_push_bytes
        if len(metrics) > limit:
            return "TELEMETRY_TOO_LARGE", f"{len(metrics)} bytes, where max_push_bytes is {limit}"
        if known.is_malformed:
            known.is_malformed = False
            return "INVALID_RECORD", "its push before this one was malformed"
        if self._waiting_bytes + len(metrics) > MAX_WAITING_BYTES or not self._has_credit(now_ns):
            return "THROTTLING_QUOTA_EXCEEDED", "all clients together push more than kproxy reads at a time"
        cost = limit  # a push that fails to decompress may have been decompressed up to its last byte
        try:
            plain = decompress(compression, metrics, limit_bytes=limit) if metrics else b""  # it has no series any more
            cost = len(plain)
            parsed = parse(plain)
        except TooLarge as fault:
            return "TELEMETRY_TOO_LARGE", f"{fault} (max_push_bytes)"
        except Malformed as fault:
            return "INVALID_RECORD", str(fault)
        finally:
            self._credit_bytes -= cost
        if owns and (plain or instance in self._pushes.clients):
            life_ns = LIFE_INTERVALS * self._interval_ns
            self._pushes.admit(instance, known.owner[0], software, now_ns, life_ns)
        size = max(len(plain), MIN_WAITING_BYTES)
        self._waiting_bytes += size
        self._waiting.append((instance, parsed, size))
        if not self._is_reading:
            self._is_reading = True
            self._spawn(self._read())
        return "", ""

    async def _read(self) -> None:
        """Read queued pushes, in slices; the loop runs between slices."""
        try:
            while self._waiting:
                instance, parsed, size = self._waiting.popleft()
                try:
                    for _ in self._pushes.take(instance, parsed, self._now_ns(), self.cells.left_out):
                        await asyncio.sleep(0)
                except Malformed as fault:  # a large push, answered before it was parsed
                    if instance in self._instances:
                        self._instances[instance].is_malformed = True
                    line = "cluster=%s instance=%s: the metrics that it pushed are refused: %s"
                    self._limiter.log(logging.WARNING, "INVALID_RECORD", line, self._cluster, instance, fault)
                finally:
                    self._waiting_bytes -= size
                await asyncio.sleep(0)
        finally:
            self._is_reading = False

    def _owns(self, instance: UUID, now_ns: int, may_own: bool) -> bool:
        """Return whether a client has series of its own, or gets them with its first push."""
        self._limit()
        return self._asks and may_own and self._pushes.has_place(instance, now_ns)

    def _limit(self) -> None:
        self._pushes.limit(self.settings.max_clients, self.settings.max_series_per_client)

    def _has_credit(self, now_ns: int) -> bool:
        earned = (now_ns - self._credited_ns) * BYTES_PER_S // _S
        self._credit_bytes = min(MAX_BURST_BYTES, self._credit_bytes + earned)
        self._credited_ns = now_ns
        return self._credit_bytes > 0

    def _instance(self, instance: UUID, owner: Owner, now_ns: int) -> _Instance | None:
        """Return the state of a client; None if another client uses its instance id."""
        known = self._instances.get(instance)
        if known is not None and known.owner != owner and instance not in _RESERVED:
            if max(known.got_ns, known.pushed_ns) + LIFE_INTERVALS * self._interval_ns > now_ns:
                return None
            known = None
        if known is None:
            if len(self._instances) >= MAX_INSTANCES:
                self._instances.popitem(last=False)
            known = self._instances[instance] = _Instance(owner)
        self._instances.move_to_end(instance)
        return known

    def _foreign(self, api: str, owner: Owner, client: str) -> Body:
        line = "cluster=%s client=%s client_id=%s: %s under an instance id that another client uses is refused"
        self._limiter.log(logging.WARNING, "foreign", line, self._cluster, client, owner[0][:64], api)
        self.cells.answers[api, "INVALID_REQUEST"] += 1
        return {"errorCode": CODES["INVALID_REQUEST"]}

    def _subscription(self, instance: UUID, owns: bool) -> int:
        settings = self.settings
        wanted = f"{settings.metrics if self._asks else ()} {self._interval_ns} {settings.max_push_bytes} {owns}"
        return zlib.crc32(wanted.encode() + instance.bytes) & 0x7FFFFFFF

    def _refused(self, api: str, known: _Instance, error: str) -> Body:
        known.error = error
        self.cells.answers[api, error] += 1
        return {"errorCode": CODES[error]}


class AnswerTelemetry(Filter):
    """The filter of one connection: answers telemetry requests, and offers their APIs in ApiVersions answers.

    software: the name and version that a client sent in ApiVersions before its login. `broker_answers`: its broker
    offers these APIs itself.
    """

    def __init__(
        self,
        receiver: Receiver,
        client: str,
        principal: str,
        software: Software | None,
    ) -> None:
        self.broker_answers = False
        self._receiver = receiver
        self._client = client
        self._principal = principal
        self._software = software or ("", "")
        self._first: UUID | None = None  # the first instance of the connection; only a hostile client has several

    def at_header(self, exchange: Exchange) -> Hold | Close | Answer | None:
        if not wants(exchange.plan.api_key, exchange.api_version):
            return None
        if exchange.plan.api_key == API_VERSIONS:
            return HOLD if exchange.request_bytes <= MAX_HEADER_BYTES else None
        if self._forwards:
            return HOLD
        bound = self._receiver.settings.max_push_bytes + MAX_HEADER_BYTES
        return HOLD if exchange.request_bytes <= bound else self._receiver.too_large(exchange)

    def decide(self, exchange: Exchange, frame: Any) -> Decision:
        key = exchange.plan.api_key
        if not wants(key, exchange.api_version):
            return None
        if key != API_VERSIONS and self._forwards:
            return None
        if key == API_VERSIONS and len(frame) > MAX_HEADER_BYTES:
            return None
        try:
            header, body = codec.decode_flat_request(bytes(frame[4:]))
        except ProtocolError as fault:
            return None if key == API_VERSIONS else Close(f"{exchange.plan.title} does not decode: {fault}")
        if key == API_VERSIONS:
            if "clientSoftwareName" in body:
                self._software = body["clientSoftwareName"][:MAX_LABEL], body["clientSoftwareVersion"][:MAX_LABEL]
            return None
        return self._answer(exchange, header["clientId"] or "", body)

    def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
        return None if wants(exchange.plan.api_key, exchange.api_version) else frozenset()

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        """Return an ApiVersions answer that offers the telemetry APIs too."""
        if exchange.plan.api_key != API_VERSIONS:
            return None
        offered, self.broker_answers = add_offers(exchange.plan.api_version, frame, TELEMETRY_APIS)
        return offered

    @property
    def _forwards(self) -> bool:
        return self.broker_answers and self._receiver.settings.answer == "missing"

    def _answer(self, exchange: Exchange, client_id: str, body: Body) -> Answer:
        instance = body["clientInstanceId"]
        owner = client_id[:MAX_LABEL], self._principal
        if exchange.plan.api_key == PUSH_TELEMETRY:
            may_own = self._may_own(instance)
            return answered(exchange, self._receiver.push(body, owner, self._software, self._client, may_own=may_own))
        if instance.int == 0:
            instance = new_instance()
        may_own = self._may_own(instance)
        return answered(exchange, self._receiver.subscribe(instance, owner, self._client, may_own=may_own))

    def _may_own(self, instance: UUID) -> bool:
        if self._first is None:
            self._first = instance
        return instance == self._first


def new_instance() -> UUID:
    """Return an instance id like those of brokers: random, and without a dash at the beginning of its text."""
    while uuid_text(instance := uuid4()).startswith("-"):
        pass
    return instance


def wants(api_key: int, version: int) -> bool:
    """Return whether an Interest must send requests of an API and version to this filter."""
    if api_key not in (API_VERSIONS, *TELEMETRY_APIS):
        return False
    return version in schema().apis[api_key].request.versions

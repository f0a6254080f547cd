"""The events that a session emits, in the order of their causes.

An event is plain data. Times are integers in nanoseconds; NONE is an unknown time or size. Sizes are those of the frame
as its sender wrote it, including the 4-byte size.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kproxy.wire.bodies import Found
    from kproxy.wire.interest import ApiPlan

CLIENT = 0
BROKER = 1
SIDES = ("client", "broker")

NONE = -1  # an unknown time, size or count

ANSWERED = "answered"
ANSWERED_BY_PROXY = "answered_by_proxy"  # kproxy answered in the broker's place: the broker never got the request
NO_ANSWER_EXPECTED = "no_answer_expected"  # a Produce with acks=0
UNANSWERED = "unanswered"
REQUEST_NOT_SEEN = "request_not_seen"
LOST = "lost"  # all or part of its response is in a gap of the capture, or a later request was answered

# The part of a response that was read.
FULL = "full"
HEADER = "header"
FAILED = "failed"  # the response does not decode
OPAQUE = "opaque"  # the key or the version is unknown


class Exchange:
    """A request and its response: the object of a pending request, and later the event.

    The session emits it at the last byte of the response (`answered`, `answered_by_proxy`), at the last byte of a
    request without a response (`no_answer_expected`), or for a response whose request was not seen
    (`request_not_seen`: `number` is NONE, `plan` is the plan of the unknown API). An `Unanswered` contains a request
    that is never answered.

    `request_frame` and `response_frame` exist only if `plan.kept` is set: the frames as their senders wrote them,
    including the 4-byte size (keeping.py). None: not kept, or not answered.
    """

    request_frame: bytes | None
    response_frame: bytes | None

    __slots__ = (
        "acks",
        "client_id",
        "correlation_id",
        "decoded",
        "error_code",
        "errors",
        "group_id",
        "in_flight",
        "max_wait_ms",
        "muted_ns",
        "number",
        "outcome",
        "plan",
        "queue_ns",
        "request_body",
        "request_bytes",
        "request_end",
        "request_frame",
        "request_start",
        "response_body",
        "response_bytes",
        "response_end",
        "response_frame",
        "response_start",
        "throttle_ms",
        "transactional_id",
    )

    def __init__(
        self,
        plan: "ApiPlan",
        correlation_id: int,
        number: int,
        in_flight: int,
        request_bytes: int,
        request_start: int,
    ) -> None:
        self.plan = plan  # api key, name, version and handling; all exchanges of that API and version share it
        self.correlation_id = correlation_id
        self.number = number  # order of the request on its connection, from 0; NONE if it was not seen
        self.in_flight = in_flight  # requests in flight on this connection when this one arrived
        self.client_id: str | None = None
        self.request_bytes = request_bytes
        self.request_start = request_start  # first byte
        self.request_end = NONE  # last byte
        self.response_bytes = NONE
        self.response_start = NONE
        self.response_end = NONE
        # The time from request_start to response_start is the sum of queue_ns, muted_ns, the rest of the sending time
        # and the broker's time (muting.broker_ns); NONE: not answered.
        self.queue_ns = NONE  # wait behind earlier requests of the connection
        self.muted_ns = NONE  # wait while earlier throttles muted the connection (KIP-219)
        self.throttle_ms = NONE  # as the broker reported it; NONE: the response has none, or was not read
        self.error_code: int | None = None  # top level, else the first that is not 0; None: no such field, or not read
        self.errors: tuple[int, ...] = ()  # every code other than 0 that was read, all levels, in wire order
        self.acks: int | None = None  # acks of a Produce
        self.max_wait_ms: int | None = None  # maximum wait of a Fetch or ShareFetch
        self.group_id: str | None = None
        self.transactional_id: str | None = None
        self.request_body: Found | None = None  # its partitions and batches, if the interest wants them and they decode
        self.response_body: Found | None = None
        self.outcome = UNANSWERED
        self.decoded = HEADER  # the part that was read of the response, or of a request without a response

    @property
    def api_version(self) -> int:
        """Return the API version of the request."""
        return self.plan.api_version


class Unanswered:
    """A request that was forwarded and never answered; `exchange.outcome` is `unanswered` or `lost`."""

    __slots__ = ("cause", "exchange")

    def __init__(self, exchange: Exchange, cause: str) -> None:
        self.exchange = exchange
        self.cause = cause  # client_closed, broker_closed, desync, gap, ...


class AddressesHidden:
    """The broker addresses in a streamed response were hidden; the client will send a Metadata request for them."""

    __slots__ = ("exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange


class ClientNamed:
    """The name and version of a client's software (KIP-511): emitted when first seen, and at each change."""

    __slots__ = ("client_id", "name", "now_ns", "version")

    def __init__(self, client_id: str | None, name: str, version: str, now_ns: int) -> None:
        self.client_id = client_id
        self.name = name
        self.version = version
        self.now_ns = now_ns


class Gap:
    """Bytes that a capture lacks, or that were skipped to find the next plausible frame."""

    __slots__ = ("count", "now_ns", "offset", "resync", "side")

    def __init__(self, side: int, offset: int, count: int, resync: bool, now_ns: int) -> None:
        self.side = side
        self.offset = offset  # position in the side's byte stream
        self.count = count
        self.resync = resync  # False: not captured; True: captured, but skipped to find a frame again
        self.now_ns = now_ns


class Desync:
    """A violation of the protocol in the bytes of a side: a description in one line, and its place."""

    __slots__ = ("api_key", "api_version", "fatal", "kind", "now_ns", "offset", "side", "text")

    def __init__(
        self,
        side: int,
        kind: str,
        text: str,
        offset: int,
        api_key: int,
        api_version: int,
        fatal: bool,
        now_ns: int,
    ) -> None:
        self.side = side
        self.kind = kind  # bounded: the label of kproxy_protocol_faults_total
        self.text = text  # names the cause and the fix
        self.offset = offset  # position of the frame's first byte in the side's byte stream
        self.api_key = api_key  # NONE: unknown
        self.api_version = api_version
        self.fatal = fatal  # True: the owner must close both sides now; False: forwarding continues
        self.now_ns = now_ns


class Closed:
    """Both sides have ended. The last event of a session, with the totals of the connection."""

    __slots__ = ("cause", "first", "now_ns", "received_bytes", "sasl_mechanism", "sasl_tokens", "software")

    def __init__(
        self,
        first: int,
        now_ns: int,
        cause: str = "",
        received_bytes: tuple[int, int] = (0, 0),
        software: tuple[str, str] | None = None,
        sasl_mechanism: str | None = None,
        sasl_tokens: int = 0,
    ) -> None:
        self.first = first  # the side that ended first
        self.now_ns = now_ns
        self.cause = cause  # bounded: client_closed, broker_reset, drained, ...
        self.received_bytes = received_bytes  # bytes received, per side
        self.software = software  # the client's name and version, from ApiVersions (KIP-511)
        self.sasl_mechanism = sasl_mechanism
        self.sasl_tokens = sasl_tokens  # number of raw tokens; they emit no exchanges


Event = Exchange | Unanswered | AddressesHidden | ClientNamed | Gap | Desync | Closed

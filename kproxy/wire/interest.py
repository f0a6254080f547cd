"""Plans for the handling of frames, one per (api key, version).

Duty: turn the owner's interest into one `ApiPlan` per (api key, version), compiled at first use and shared by every
exchange of that kind. Bound: _UNKNOWN_PLANS plans for unknown keys and versions, because a peer can invent 2**32 of
them.

Refuses to know connections, bytes in flight and the owner's use of a held response.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from kproxy.errors import Malformed
from kproxy.protocol import codec, schema
from kproxy.protocol.apis import (
    API_VERSIONS,
    CONSUMER_GROUP_HEARTBEAT,
    DELETE_GROUPS,
    DELETE_TOPICS,
    END_TXN,
    FETCH,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    PRODUCE,
    SASL_HANDSHAKE,
    SHARE_FETCH,
    STREAMS_GROUP_HEARTBEAT,
    TXN_OFFSET_COMMIT,
)
from kproxy.wire import bodies
from kproxy.wire.observing.kept import Kept

# Handling of a response.
PASS = 0  # forwarded as it arrives; only its header is read
SCAN = 1  # forwarded as it arrives, and read for its throttle time and errors; a large one as it streams
STREAM = 2  # like SCAN, even if its addresses must be rewritten: a large response gets its addresses hidden
HOLD = 3  # buffered until it is complete, then passed to the owner's transform

# Handling of a request.
FORWARD = 0
ANSWER = 1  # not forwarded: kproxy answers (an ApiVersions newer than it can read)
REFUSE = 2  # its response would contain addresses that kproxy cannot read: close the connection
AUTHORIZE = 3  # the session's authorizer decides (authorizer.py)


Reader = Callable[[Any, int, int], bodies.Found]
Scanned = tuple[int, int | None, tuple[int, ...], bool]  # throttle, error code, all error codes, has addresses
Scan = Callable[[Any, int, int], Scanned]
Prefix = Callable[[Any, int, int], tuple[tuple[Any, ...], int] | None]

# Fields read from every request, in this order, after the client id; None: the version lacks the field.
PREFIX_FIELDS = (
    "acks",
    "maxWaitMs",
    "groupId",
    "transactionalId",
    "mechanism",
    "clientSoftwareName",
    "clientSoftwareVersion",
)

_NO_FIELDS = (None,) * len(PREFIX_FIELDS)

# APIs with topic-partitions in requests and responses; below, the APIs that are read only for metrics.
_OF_PARTITIONS = frozenset((PRODUCE, FETCH, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH, TXN_OFFSET_COMMIT, SHARE_FETCH))
_OF_TRANSACTIONS = frozenset((INIT_PRODUCER_ID, END_TXN))  # they end a transaction, by its transactional id
_COUNTED_REQUESTS = frozenset((PRODUCE, FETCH, LIST_OFFSETS, OFFSET_COMMIT, TXN_OFFSET_COMMIT))
_COUNTED_ANSWERS = _COUNTED_REQUESTS | {OFFSET_FETCH, SHARE_FETCH}
_DELETIONS = frozenset((DELETE_TOPICS, DELETE_GROUPS, OFFSET_DELETE))  # their responses end offsets or logs
HEARTBEATS = frozenset((HEARTBEAT, CONSUMER_GROUP_HEARTBEAT, STREAMS_GROUP_HEARTBEAT))  # from groups with offsets
# Requests whose group id or transactional id the metrics of offsets need.
_WITH_OFFSET_OWNER = frozenset((OFFSET_FETCH, OFFSET_DELETE, TXN_OFFSET_COMMIT)) | _OF_TRANSACTIONS | HEARTBEATS

_UNKNOWN_PLANS = 64

MAX_HELD_TOGETHER = 64 * 1024 * 1024
MAX_NOTED_TOGETHER = 128 * 1024 * 1024  # limit for ids and topic-partitions of all pending requests
HELD_PATIENCE_NS = 1_000_000_000  # a request is held for at least so long before the budget evicts it
MAX_HELD = 4 * 1024 * 1024  # largest held response: tens of thousands of brokers, or coordinators
MAX_HELD_LIST = 32 * 1024 * 1024  # largest response that is held because the authorizer edits it


class ApiPlan:
    """One (api key, version): its names, readers, and the handling of its frames. Compared by identity."""

    __slots__ = (
        "api",
        "api_key",
        "api_version",
        "carries_addresses",
        "held",
        "is_edited",
        "keeps_small",
        "kept",
        "known",
        "max_held_bytes",
        "prefix",
        "quick_scan",
        "read_on",
        "reads_request",
        "request",
        "request_reader",
        "response",
        "response_detail",
        "response_reader",
        "scan",
        "splits",
        "throttled_after_answer",
        "title",
        "transforms_always",
    )

    def __init__(self, api_key: int, api_version: int, api: str, known: bool) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.api = api  # Kafka's name, or unknown_<key>
        self.title = f"{api} v{api_version}"  # for messages
        self.known = known  # both the key and the version are in the schema
        self.request = FORWARD
        self.response = PASS
        self.prefix: Prefix | None = None
        self.scan: Scan | None = None
        # Equal to `scan` if a complete response without errors needs no other step; a ProtocolError from it means that
        # the response needs one.
        self.quick_scan: Scan | None = None
        self.request_reader: Reader | None = None  # reads the topic-partitions of the body; None: body not read
        self.response_reader: Reader | None = None
        self.response_detail = bodies.ERRORS  # level of detail for a large response
        self.max_held_bytes = MAX_HELD  # limit for a held response
        self.is_edited = False  # the authorizer may change its responses
        self.kept: Kept | None = None  # chooses and counts frames kept for insight; None: no frames are kept
        self.keeps_small = False  # a small request is kept and not read
        self.reads_request = False  # a complete request is read or kept
        self.held: ApiPlan | None = None  # variant that holds complete responses; made at first use
        self.read_on: ApiPlan | None = None  # for a held variant: the plan that reads its edited responses
        self.carries_addresses = False  # its responses can contain addresses of brokers
        self.splits = False  # only the head of a large response is held (`bodies.head_array`)
        self.throttled_after_answer = False  # KIP-219: the response leaves at once, then the connection is muted
        self.transforms_always = False  # the transform gets responses even without addresses (ApiVersions)

    def __repr__(self) -> str:
        return f"ApiPlan({self.api} v{self.api_version})"


class HeldBudget:
    """The limit for the bytes of incomplete requests and responses that all sessions together buffer.

    A client that never completes a request would keep its share for ever. Therefore, at the limit, the budget evicts
    the request held for longest, if it was held for at least HELD_PATIENCE_NS: `give_up(session)` of the owner makes
    the session release its bytes before it returns.

    A second limit applies to the ids and topic-partitions kept from pending requests; None: no limit, as for captures,
    which are read from end to end.
    """

    __slots__ = ("_held_bytes", "_noted_bytes", "_requests", "give_up", "limit_bytes", "noted_limit_bytes")

    def __init__(self, limit_bytes: int = MAX_HELD_TOGETHER, noted_limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.noted_limit_bytes = noted_limit_bytes
        self._noted_bytes = 0
        self.give_up: Callable[[Any], None] | None = None
        self._held_bytes = 0
        self._requests: dict[object, int] = {}  # session -> time since which its request is held; oldest first

    def take(self, count: int, now_ns: int = 0, session: object = None) -> bool:
        """Reserve `count` bytes until `release`; return False, reserving nothing, if there is no room."""
        while self._held_bytes + count > self.limit_bytes:
            if not self._give_up_oldest(now_ns, session):
                return False
        self._held_bytes += count
        return True

    def _give_up_oldest(self, now_ns: int, session: object) -> bool:
        oldest, since_ns = next(iter(self._requests.items()), (None, now_ns))
        if self.give_up is None or oldest is None or oldest is session or now_ns - since_ns < HELD_PATIENCE_NS:
            return False
        del self._requests[oldest]
        self.give_up(oldest)
        return True

    @property
    def held_bytes(self) -> int:
        """Return the bytes reserved now for incomplete frames, and for complete ones that wait."""
        return self._held_bytes

    @property
    def noted_bytes(self) -> int:
        """Return the bytes reserved now for ids and topic-partitions of pending requests."""
        return self._noted_bytes

    def begin(self, session: object, now_ns: int) -> None:
        """Record that a session holds a request from now on."""
        self._requests[session] = now_ns

    def end(self, session: object) -> None:
        """Record that a session no longer holds a request."""
        self._requests.pop(session, None)

    def release(self, count: int) -> None:
        self._held_bytes -= count

    def note(self, count: int) -> bool:
        """Reserve `count` bytes for ids and topic-partitions of a pending request, until `forget`; False: no room."""
        if self.noted_limit_bytes is not None and self._noted_bytes + count > self.noted_limit_bytes:
            return False
        self._noted_bytes += count
        return True

    def forget(self, count: int) -> None:
        self._noted_bytes -= count


class Interest:
    """The plans of one kind of owner.

    rewrite: hold responses with addresses, and ApiVersions, for the owner's transform; refuse requests whose response
        cannot be rewritten (fail closed). Otherwise the session forwards everything, and a fault only ends the reading.
    details: read the prefix of every request (client id, group, transactional id). Without it the session reads only
        the prefix of Produce (its acks decide whether a response comes), Fetch (max_wait_ms), SaslHandshake and
        ApiVersions (client software). Any `detail` adds requests whose group or transaction is not in the response.
    detail: level of detail of bodies with topic-partitions (bodies.TOPICS, bodies.BATCHES). The exchange's request_body
        and response_body have the values, and names of topic ids. With `details` they have brokers' ids at any level;
        without it the level is at most bodies.SUMS, for records and positions of consumers only. bodies.ERRORS: bodies
        are not read.
    brokers: read the brokers in responses into the exchange's response_body, at any level of detail.
    room: memory for copies of wanted batches, with `detail` bodies.RECORDS.
    held: budget for held responses and requests; owners with several interests share one.
    authorizes: returns whether the sessions' authorizer wants requests of (api key, version).
    names: read names of topic ids in responses, at any level of detail.
    kept: chooses the exchanges whose frames are kept; owners with several interests share one.
    logs: memory for copies of batches of coordinators' logs, unless `detail` is bodies.ERRORS.
    """

    def __init__(
        self,
        *,
        rewrite: bool = False,
        details: bool = False,
        detail: int = bodies.ERRORS,
        brokers: bool = False,
        room: bodies.Room | None = None,
        held: "HeldBudget | None" = None,
        authorizes: Callable[[int, int], bool] | None = None,
        names: bool = False,
        kept: Kept | None = None,
        logs: bodies.Logs | None = None,
    ) -> None:
        self.rewrite = rewrite
        self.details = details
        self.detail = detail if details else min(detail, bodies.SUMS)
        self.brokers = brokers
        self.room = room
        self.logs = logs if self.detail else None
        self.held = held or HeldBudget()
        self._authorizes = authorizes
        self._names = names
        self._kept = kept
        # The key of the dictionary is four bytes of a request's header: api key and version as one unsigned integer.
        self.plans: dict[int, ApiPlan] = {}
        self._unknown = 0

    def plan(self, key_version: int) -> ApiPlan:
        """Return the plan for `api_key << 16 | api_version` (unsigned 16-bit values), made at first use."""
        plan = self.plans.get(key_version)
        if plan is None:
            api_key = _signed16(key_version >> 16)
            api_version = _signed16(key_version & 0xFFFF)
            api = schema.schema().apis.get(api_key)
            if api is not None and api_version in api.request.versions:
                plan = self._known(api, api_version)
            else:
                plan = self._foreign(api_key, api_version)
                if self._unknown >= _UNKNOWN_PLANS:
                    return plan
                self._unknown += 1
            self.plans[key_version] = plan
        return plan

    def held_plan(self, plan: ApiPlan) -> ApiPlan:
        """Return the variant of a plan whose responses are held until complete and passed to the authorizer first."""
        if plan.held is None:
            held = ApiPlan(plan.api_key, plan.api_version, plan.api, plan.known)
            for name in ApiPlan.__slots__:
                setattr(held, name, getattr(plan, name))
            held.response = HOLD
            held.quick_scan = None
            held.splits = False
            held.is_edited = True
            held.max_held_bytes = MAX_HELD_LIST
            plan.held = held
        return plan.held

    def read_on_plan(self, plan: ApiPlan) -> ApiPlan:
        """Return the plan that reads a response after the authorizer has edited it."""
        if plan.read_on is None:
            read_on = ApiPlan(plan.api_key, plan.api_version, plan.api, plan.known)
            base = self.plan((plan.api_key & 0xFFFF) << 16 | plan.api_version & 0xFFFF)
            for name in ApiPlan.__slots__:
                setattr(read_on, name, getattr(base, name))
            read_on.kept = None  # the held variant keeps the frame
            plan.read_on = read_on
        return plan.read_on

    def _known(self, api: schema.Api, version: int) -> ApiPlan:
        plan = ApiPlan(api.key, version, api.name, True)
        plan.throttled_after_answer = version in api.throttled_after_answer
        if (
            self.details
            or (self.detail and api.key in _WITH_OFFSET_OWNER)
            or api.key in (PRODUCE, FETCH, SASL_HANDSHAKE, API_VERSIONS)
        ):
            plan.prefix = codec.request_prefix(api.key, version, PREFIX_FIELDS)
        plan.scan = codec.response_scan(api.key, version)
        address = schema.address_path(api.key, version)
        plan.carries_addresses = address is not None
        plan.response = STREAM if api.key in (FETCH, SHARE_FETCH) else SCAN
        read = (_OF_PARTITIONS if self.details else _COUNTED_REQUESTS) | _OF_TRANSACTIONS
        if self.detail and api.key in read:
            plan.request_reader = self._reader(api.key, version, "request")
        reads_answer = api.key in (_OF_PARTITIONS if self.details else _COUNTED_ANSWERS)
        reads_answer |= api.key in _DELETIONS or bodies.names_topics(api.key, version)
        if self.brokers and bodies.names_brokers(api.key, version):
            detail = max(self.detail, bodies.TOPICS) if self.detail else bodies.ERRORS  # sums have no brokers
            plan.response_reader = bodies.body_reader(api.key, version, "response", detail)
        elif (self.detail and reads_answer) or (self.details and bodies.names_brokers(api.key, version)):
            plan.response_reader = self._reader(api.key, version, "response")
            plan.response_detail = self.detail
        elif self._names and bodies.names_topics(api.key, version):
            plan.response_reader = bodies.body_reader(api.key, version, "response", bodies.SUMS)
            plan.response_detail = bodies.SUMS
        if self.rewrite:
            plan.transforms_always = api.key == API_VERSIONS
            if plan.response == SCAN and (plan.carries_addresses or plan.transforms_always):
                plan.response = HOLD
                plan.splits = bodies.head_array(api.key, version) is not None
        if self._kept is not None and api.key in self._kept.apis:
            plan.kept = self._kept
            if api.key in self._kept.small and plan.response != HOLD and plan.response_reader is None:
                plan.quick_scan = partial(_scan_of_success, plan.scan)
                plan.keeps_small = True
        elif plan.response_reader is None and (plan.response != HOLD or address == schema.NODE_ENDPOINTS):
            plan.quick_scan = plan.scan
        plan.reads_request = plan.kept is not None or plan.request_reader is not None
        if self._authorizes is not None and self._authorizes(api.key, version):
            plan.request = AUTHORIZE
        return plan

    def _reader(self, api_key: int, version: int, side: str) -> Reader:
        copies = self.logs is not None and api_key == FETCH and side == "response"
        reader = bodies.body_reader(api_key, version, side, self.detail, copies)
        if copies:
            reader = partial(reader, logs=self.logs)
        return reader if self.detail < bodies.RECORDS else partial(reader, room=self.room)

    def _foreign(self, api_key: int, api_version: int) -> ApiPlan:
        plan = ApiPlan(api_key, api_version, schema.api_name(api_key), False)
        plan.prefix = _client_id_prefix
        if api_key == API_VERSIONS and not self.rewrite:
            plan.scan = plan.quick_scan = codec.scan_unknown_api_versions
        if self.rewrite:
            plan.transforms_always = True  # its layout is unknown: the owner may search it for addresses
            if api_key == API_VERSIONS:
                plan.request = ANSWER
            elif api_key in schema.ADDRESS_CARRIERS:
                plan.request = REFUSE
        if not plan.request and self._authorizes is not None and self._authorizes(api_key, api_version):
            plan.request = AUTHORIZE
        return plan


def _client_id_prefix(buffer: Any, start: int, end: int) -> tuple[tuple[Any, ...], int] | None:
    """Read the prefix of an unknown API or version, like `codec.request_prefix`: only the client id."""
    if end - start < 2:
        return None
    length = int.from_bytes(buffer[start : start + 2], "big", signed=True)
    stop = start + 2 + max(length, 0)
    if stop > end:
        return None
    client_id = bytes(buffer[start + 2 : stop]).decode("utf-8", "replace") if length >= 0 else None
    return (client_id, *_NO_FIELDS), stop


def _scan_of_success(scan: Scan, buffer: Any, start: int, end: int) -> Scanned:
    """Read a response without an error. Raises Malformed for a response with an error, whose frame is kept."""
    found = scan(buffer, start, end)
    if found[2]:
        raise Malformed("the response has an error")
    return found


def _signed16(value: int) -> int:
    return value - 0x10000 if value & 0x8000 else value

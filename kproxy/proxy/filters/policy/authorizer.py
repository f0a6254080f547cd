"""Decides the requests of one connection by the policy of its cluster, and keeps the audit of them.

Reads the names in a request, applies the rules to each, and forwards, refuses or edits the request. Until the answer it
keeps the edits of that answer, and lines of the audit that need the outcome. It decides requests with few elements at
once, and all others in slices of SLICE_NAMES. It refuses a request with more elements than `resources` reads as a
whole. Bounds: `pending.py`, MAX_CURSORS and MAX_TREATMENTS. Raises nothing on a client's bytes. Uses no sockets.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol.apis import (
    CREATE_TOPICS,
    DESCRIBE_TOPIC_PARTITIONS,
    ENVELOPE,
    FETCH,
    HEARTBEAT,
    INVALID_REQUEST,
    METADATA,
    OFFSET_COMMIT,
    PRODUCE,
    SHARE_ACKNOWLEDGE,
    SHARE_FETCH,
    STREAMS_GROUP_HEARTBEAT,
)
from kproxy.protocol.apis import UNKNOWN_TOPIC_ID as UNKNOWN_TOPIC_ID_CODE
from kproxy.protocol.codec import Slices, at_once, request_in_slices
from kproxy.protocol.schema import schema
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.filters.policy.audit import MAX_NAME, Audit
from kproxy.proxy.filters.policy.auditing import AuditedRequests, Peer
from kproxy.proxy.filters.policy.fetch_sessions import UNKNOWN_SESSION, unknown_session, without_session
from kproxy.proxy.filters.policy.judging import (
    SLICE_NAMES,
    Denied,
    by_id,
    judge,
    judge_created,
    may_not_create,
    work_of,
)
from kproxy.proxy.filters.policy.lists import (
    cursor_of,
    filter_list,
    hide_mentioned,
    hide_settings,
    kind_of_list,
    metadata_answer,
    metadata_request,
    with_cursor,
)
from kproxy.proxy.filters.policy.pending import MAX_KEPT_BYTES, PendingBytes, bytes_of_names
from kproxy.proxy.filters.policy.policy import (
    LISTS,
    MALFORMED,
    TOO_LARGE,
    ApiRules,
    Clearance,
    Policy,
    Verdict,
)
from kproxy.proxy.filters.policy.refusals import CODES, freed_in_slices, refusal
from kproxy.proxy.filters.policy.resources import (
    CLUSTER,
    NAMED,
    TOPIC,
    Names,
    Peek,
    QuickReader,
    TooManyElements,
    peek,
    quick_reader,
    sliced_reader,
)
from kproxy.proxy.filters.policy.share_sessions import ShareSessions, no_session
from kproxy.proxy.filters.policy.topic_names import TopicNames
from kproxy.wire.decisions.authorizer import HOLD, Answer, Close, Decision, Hold, Later, Replace
from kproxy.wire.events import Exchange
from kproxy.wire.frames import REQUEST_HEAD_BYTES
from kproxy.wire.interest import ApiPlan, Interest

MAX_CURSORS = 16  # lists that a connection is paging through
MAX_TREATMENTS = 64  # APIs and versions; a client uses some twenty
MAX_ID_BYTES = 1024  # size of a cached client id; events have the first 1024 characters of a longer one
# Limits of the work in one call: some tenths of a millisecond.
FEW_REFUSED = 16  # elements of a refused request
SHORT_REQUEST = 32 * 1024  # bytes; a longer request is read in slices, except for records
SHORT_ANSWER = 8 * 1024  # bytes of an edited answer
_CLIENT_ID_AT = REQUEST_HEAD_BYTES + 2
_SHOWN_NAME = 64  # characters of a name in the text of a refusal, which an answer repeats in each of its elements
_NO_CLIENT_ID = ("ControlledShutdown", 0)  # the only version whose header has no client id

# Requests that kproxy forwards unchanged if their names are allowed. It edits other requests, or their answers.
_DECIDED_BY_NAMES = {key: frozenset(NAMED[schema().apis[key].name]) for key in (PRODUCE, HEARTBEAT, OFFSET_COMMIT)}

_NONE: Denied = {}


class Treatment(NamedTuple):
    """The handling of requests of an API and version, for one clearance."""

    rules: ApiRules
    read: QuickReader | None  # reads their names; None: all requests pass
    peek: Peek | None  # if set, requests pass unless this returns true
    is_audited: bool
    also: ApiRules | None  # the rules of another API that also apply to its topics; None: they allow all


# Edits of the answers to forwarded requests: frame -> the frame to send instead, or None.
Edits = dict[int, Callable[[memoryview], Slices[bytes | None]]]


class PolicyAuthorizer(AuditedRequests, Filter):
    """The filter of one connection, which also takes its events.

    refused(api, reason) counts refusals.
    """

    needs_all_events = False  # Python reads the answers with names, and those to requests that are audited or edited

    def __init__(
        self,
        policy: Policy,
        peer: Peer,
        interest: Interest,
        names: TopicNames,
        refused: Callable[[str, str], None],
        audit: Audit | None,
    ) -> None:
        self._edits: Edits = {}  # by the exchange's number
        self._policy = policy
        self._peer = peer
        self._interest = interest
        self._names = names
        self._refused = refused
        self._audit = audit
        self._clearance_of = policy.identity(peer.principal, peer.host)
        self._clearance: Clearance = self._clearance_of(None)
        self._client_id: object = None  # client id of the last request, in bytes; the next one nearly always has it too
        self._client_head: bytes | None = None  # the same with its length, as in requests
        self._client_name: str | None = None
        self._treatments: dict[ApiPlan, Treatment] = {}  # the session's plan of an API and version -> treatment
        self._software: tuple[str, str] | None = None
        self._share_sessions = ShareSessions()
        self._cursors: dict[str, str] = {}  # cursor shown to a client -> the topic that it may not see
        self._next_cursor = 1
        self._lines: dict[int, dict[str, Any]] = {}  # exchange number -> line of an audited request without an answer
        self._pending = PendingBytes(interest.held)  # memory of edits and lines

    def refused_versions(self, client_id: str | None) -> dict[int, frozenset[int]]:
        """Return API key -> the versions in which kproxy refuses every request of the client."""
        return self._clearance_of(client_id).refused_versions

    # --- decisions ---------------------------------------------------------------------------------------------------

    def at_header(self, exchange: Exchange) -> Hold | Close | None:
        plan = exchange.plan
        policy = self._policy
        if policy.has_client_ids or policy.is_audited(plan.api_key):
            return HOLD
        if not plan.known or plan.api_key == ENVELOPE:
            return self._unknown(exchange)
        constant = self._clearance.api(plan.api_key, plan.api_version).constant
        if (
            constant is None
            or not constant.allowed
            or self._hides(plan.api_key)
            or self._clearance.also(plan.api_key) is not None
            or self._clearance.peeks(plan.api_key, plan.api_version)
        ):
            return HOLD
        return None

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        plan = exchange.plan
        self._read_client_id(exchange, frame)
        if not plan.known or plan.api_key == ENVELOPE:
            return self._unknown(exchange)
        treatment = self._treatment(plan)
        read, look = treatment.read, treatment.peek
        if read is None:
            return None
        if len(frame) > SHORT_REQUEST and plan.api_key != PRODUCE and plan.api in NAMED:
            return Later(partial(self._decided, exchange, treatment))
        try:
            if look is not None and not look(frame, REQUEST_HEAD_BYTES, len(frame)):
                return None
            names = read(frame, REQUEST_HEAD_BYTES, len(frame))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        if names is None or (len(frame) > SHORT_REQUEST and work_of(names.topic) > SLICE_NAMES):
            return Later(partial(self._decided, exchange, treatment))
        denied, verdict = at_once(self._judged(exchange, treatment, names))
        if denied and names.elements > FEW_REFUSED:
            return Later(partial(self._decided, exchange, treatment))
        return at_once(self._obeyed(exchange, frame, treatment, names, denied, verdict))

    @property
    def is_quiet(self) -> bool:
        return not (self._edits or self._lines)

    def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
        plan = exchange.plan
        self._read_client_id(exchange, head)
        if not plan.known or plan.api_key == ENVELOPE:
            return None
        treatment = self._treatment(plan)
        if treatment.read is None:
            return frozenset()
        if (
            treatment.peek is not None
            or treatment.is_audited
            or treatment.also is not None
            or self._hides(plan.api_key)
        ):
            return None
        return _DECIDED_BY_NAMES.get(plan.api_key)

    def passes(self, exchange: Exchange, frame: Any) -> bool:
        self._read_client_id(exchange, frame)
        treatment = self._treatment(exchange.plan)
        if treatment.read is None:
            return True
        try:
            names = treatment.read(frame, REQUEST_HEAD_BYTES, len(frame))
        except Malformed:
            return False
        return names is not None and not at_once(self._judged(exchange, treatment, names))[0]

    def _treatment(self, plan: ApiPlan) -> Treatment:
        treatment = self._treatments.get(plan)
        if treatment is None:
            if len(self._treatments) >= MAX_TREATMENTS:
                self._treatments.clear()
            treatment = self._treatments[plan] = self._treat(plan.api_key, plan.api_version)
        return treatment

    def _decided(self, exchange: Exchange, treatment: Treatment, frame: memoryview) -> Slices[Decision]:
        """Decide a request in slices."""
        plan = exchange.plan
        try:
            names = yield from sliced_reader(plan.api_key, plan.api_version)(frame, REQUEST_HEAD_BYTES, len(frame))
        except TooManyElements as fault:
            return self._refuse_unread(exchange, str(fault))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        denied, verdict = yield from self._judged(exchange, treatment, names)
        return (yield from self._obeyed(exchange, frame, treatment, names, denied, verdict))

    def _rules(self, exchange: Exchange, treatment: Treatment, names: Names) -> ApiRules:
        """Return the rules for a request: the rules for brokers, if it has fields that only brokers set."""
        plan = exchange.plan
        return self._clearance.of_brokers(plan.api_key, plan.api_version) if names.from_broker else treatment.rules

    def _judged(self, exchange: Exchange, treatment: Treatment, names: Names) -> Slices[tuple[Denied, Verdict]]:
        """Return (denied names of a request, the verdict for the audit)."""
        plan = exchange.plan
        denied, verdict = yield from judge(self._rules(exchange, treatment, names), names, plan.api, self._names.get)
        if treatment.also is not None and plan.api_key == STREAMS_GROUP_HEARTBEAT and not denied:
            denied, verdict = yield from judge_created(treatment.also, names, verdict)
        return denied, verdict

    def _obeyed(
        self, exchange: Exchange, frame: Any, treatment: Treatment, names: Names, denied: Denied, verdict: Verdict
    ) -> Slices[Decision]:
        """Return the decision about a request, given its denied names."""
        rules, is_audited, also = self._rules(exchange, treatment, names), treatment.is_audited, treatment.also
        if denied:
            if exchange.plan.api_key == METADATA and names.all_of is None and not names.is_empty():
                return (yield from self._ask_for_the_rest(exchange, frame, names, denied, verdict))
            return (yield from self._refuse(exchange, frame, names, denied, verdict))
        decision = yield from self._passed(exchange, frame, rules, names, also)
        if is_audited and self._audit is not None and not isinstance(decision, Close):
            self._await_outcome(exchange, self._line(exchange, names, verdict))
        return decision

    def _passed(
        self, exchange: Exchange, frame: Any, rules: ApiRules, names: Names, also: ApiRules | None
    ) -> Slices[Decision]:
        """Return the decision about a request without denied names, and keep the edit of its answer."""
        plan = exchange.plan
        key, version = plan.api_key, plan.api_version
        if names.all_of is not None and self._policy.filters_lists and plan.api in LISTS:
            self._filter(exchange, rules)
        elif key == CREATE_TOPICS and also is not None and also.restricts(TOPIC):
            self._edits[exchange.number] = partial(
                hide_settings, version, sees=lambda name: also.named(TOPIC, name).allowed
            )
            exchange.plan = self._interest.held_plan(plan)
        elif self._hides(key):
            clearance = self._clearance
            self._edits[exchange.number] = partial(
                hide_mentioned, key, version, sees=clearance.sees, sees_every_topic=clearance.sees_every_topic
            )
            exchange.plan = self._interest.held_plan(plan)
        if key == FETCH and rules.restricts(TOPIC):
            return (yield from self._without_session(exchange, frame))
        if key in (SHARE_FETCH, SHARE_ACKNOWLEDGE) and rules.restricts(TOPIC):
            return (yield from self._of_own_share_session(exchange, frame, rules))
        if key == DESCRIBE_TOPIC_PARTITIONS and self._cursors:
            return (yield from self._with_real_cursor(exchange, frame))
        if key == METADATA and (yield from may_not_create(also, names.also)):
            try:
                patched = yield from metadata_request(version, frame, None, clear_auto_creation=True)
            except Malformed as fault:
                return self._close(exchange, MALFORMED, str(fault))
            return None if patched is None else Replace(patched)
        return None

    def _without_session(self, exchange: Exchange, frame: Any) -> Slices[Decision]:
        """Remove the session of a Fetch: an incremental one reads topics of earlier requests, maybe of others."""
        version = exchange.plan.api_version
        try:
            patched = yield from without_session(version, memoryview(frame))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        if patched == UNKNOWN_SESSION:
            return Answer(*unknown_session(version, exchange.correlation_id))
        return None if patched is None else Replace(patched)

    def _of_own_share_session(self, exchange: Exchange, frame: Any, rules: ApiRules) -> Slices[Decision]:
        """Decide a ShareFetch: an incremental one reads topics of earlier requests, maybe of others.

        That is possible in sessions of this connection, too: a client on another connection can begin such a session
        anew with the group and the member. kproxy therefore also filters answers with records.
        """
        plan = exchange.plan
        key, version = plan.api_key, plan.api_version
        try:
            goes_on = yield from self._share_sessions.goes_on(key, version, memoryview(frame))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        if not goes_on:
            return Answer(*no_session(key, version, exchange.correlation_id))
        if key == SHARE_FETCH:

            def keep(found: list[str | UUID]) -> bool:
                return all(isinstance(what, UUID) and by_id(rules, what, self._names.get).allowed for what in found)

            self._edits[exchange.number] = lambda answer: filter_list(key, version, answer, keep)
            exchange.plan = self._interest.held_plan(plan)
        return None

    def _with_real_cursor(self, exchange: Exchange, frame: Any) -> Slices[Decision]:
        """Replace a client's cursor by the real one: a page may begin at a topic that the client may not see."""
        try:
            cursor = yield from cursor_of(exchange.plan.api_version, "request", memoryview(frame))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        if cursor is None or (topic := self._cursors.get(cursor[0])) is None:
            return None
        return Replace((yield from with_cursor(memoryview(frame), cursor[1], cursor[2], topic)))

    def _hide_cursor(self, rules: ApiRules, version: int, frame: memoryview) -> Slices[bytes | None]:
        cursor = yield from cursor_of(version, "response", frame)
        if cursor is None or rules.named(TOPIC, cursor[0]).allowed:
            return None
        shown = f"(hidden-{self._next_cursor})"  # an invalid topic name
        self._next_cursor += 1
        self._cursors[shown] = cursor[0]
        if len(self._cursors) > MAX_CURSORS:
            del self._cursors[next(iter(self._cursors))]
        return (yield from with_cursor(frame, cursor[1], cursor[2], shown))

    def _treat(self, key: int, version: int) -> Treatment:
        """Return the handling of requests of a version, for the current clearance."""
        policy = self._policy
        rules = self._clearance.api(key, version)
        is_audited, also = policy.is_audited(key), self._clearance.also(key)
        passes = rules.constant is not None and rules.constant.allowed
        passes = passes and not (is_audited or also is not None or self._hides(key))
        peeks = passes and self._clearance.peeks(key, version)
        read = None if passes and not peeks else quick_reader(key, version)
        return Treatment(rules, read, peek(key, version) if peeks else None, is_audited, also)

    def _hides(self, key: int) -> bool:
        return self._policy.hides_in(key) and not self._clearance.sees_all

    def edit(self, exchange: Exchange, frame: Any) -> bytes | Later | None:
        edit = self._edits.pop(exchange.number, None)
        if edit is None or len(frame) <= SHORT_ANSWER:
            self._pending.forget(exchange.number)
            return None if edit is None else at_once(edit(frame))
        return Later(partial(self._edited, exchange.number, edit))

    def _edited(
        self, number: int, edit: Callable[[memoryview], Slices[bytes | None]], answer: memoryview
    ) -> Slices[bytes | None]:
        edited = yield from edit(answer)
        self._pending.forget(number)
        return edited

    def too_large(self, exchange: Exchange) -> None:
        self._tell(exchange, None, TOO_LARGE)

    def _read_client_id(self, exchange: Exchange, frame: Any) -> None:
        """Set the exchange's client id, and the clearance for it."""
        head = self._client_head
        if head is not None and frame[REQUEST_HEAD_BYTES : REQUEST_HEAD_BYTES + len(head)] == head:
            exchange.client_id = self._client_name
            return
        plan = exchange.plan
        text: bytes | None = None
        self._client_head = None
        if (plan.api, plan.api_version) != _NO_CLIENT_ID and len(frame) >= _CLIENT_ID_AT:
            length = int.from_bytes(frame[REQUEST_HEAD_BYTES:_CLIENT_ID_AT], "big", signed=True)
            if 0 <= length <= len(frame) - _CLIENT_ID_AT:  # else there is none, as in a token without a header
                text = bytes(frame[_CLIENT_ID_AT : _CLIENT_ID_AT + length])
                if plan.known:
                    self._client_head = bytes(frame[REQUEST_HEAD_BYTES : _CLIENT_ID_AT + length])
        if text != self._client_id:
            self._client_id = text
            name = None if text is None else str(text, "utf-8", "replace")
            self._clearance = self._clearance_of(name)
            self._treatments.clear()
            self._client_name = name and name[:MAX_ID_BYTES]
            if text is not None and len(text) > MAX_ID_BYTES:
                self._client_head, self._client_id = None, object()  # it is read again next time
        exchange.client_id = self._client_name

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _unknown(self, exchange: Exchange) -> Close | None:
        """Decide a request that the schema cannot read."""
        verdict = self._clearance.unknown(exchange.plan.api_key, exchange.plan.api_version)
        return None if verdict.allowed else self._close(exchange, verdict)

    def _refuse(
        self, exchange: Exchange, frame: Any, names: Names, denied: Denied, verdict: Verdict
    ) -> Slices[Answer | Close]:
        plan = exchange.plan
        text = f"{plan.api} was refused by kproxy: {_why(denied, verdict)}"
        try:
            body = yield from request_in_slices(frame[4:])
            if plan.api_key == 0 and body["acks"] == 0:
                return self._close(exchange, verdict, "a producer with acks=0 gets no answer", names, denied)
            made = refusal(plan.api_key, plan.api_version, exchange.correlation_id, body, denied, text)
            answer = yield from made
        except ProtocolError as fault:
            return self._close(exchange, MALFORMED, str(fault), names)
        if answer is None:
            return self._close(exchange, verdict, "the answer has no place for an error", names, denied)
        self._tell(exchange, names, verdict, denied)
        yield from freed_in_slices([body, denied, names.topic, names.group, names.transactional_id, names.topic_id])
        return Answer(*answer)

    def _refuse_unread(self, exchange: Exchange, why: str) -> Answer | Close:
        """Refuse a request with too many elements, with one error for the whole request if its answer can have one."""
        plan = exchange.plan
        denied: Denied = {(CLUSTER, ""): INVALID_REQUEST}
        text = f"{plan.api} was refused by kproxy: {why}"
        answer = at_once(refusal(plan.api_key, plan.api_version, exchange.correlation_id, {}, denied, text))
        if answer is None or plan.api_key == PRODUCE:  # the acks of a Produce were not read
            return self._close(exchange, TOO_LARGE, why)
        self._tell(exchange, None, TOO_LARGE)
        return Answer(*answer)

    def _close(
        self, exchange: Exchange, verdict: Verdict, more: str = "", names: Names | None = None, denied: Denied = _NONE
    ) -> Close:
        self._tell(exchange, names, verdict, denied)
        who = self._peer.principal[:MAX_NAME]
        text = f"{exchange.plan.title} of {who} is refused: {verdict.why}{f' ({more})' if more else ''}"
        return Close(text)

    def _tell(self, exchange: Exchange, names: Names | None, verdict: Verdict, denied: Denied = _NONE) -> None:
        """Count a refusal, and add it to the audit."""
        self._refused(exchange.plan.api, verdict.reason)
        if self._audit is not None:
            line = self._line(exchange, names, verdict)
            if names is not None:
                self._name_denied(line, names, denied)
            self._audit.add(line)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _ask_for_the_rest(
        self, exchange: Exchange, frame: Any, names: Names, denied: Denied, verdict: Verdict
    ) -> Slices[Replace | Close | None]:
        """Forward a Metadata without its denied topics, and add an error for each of them to the answer."""
        plan = exchange.plan
        version = plan.api_version
        # A topic id without a known name is decided when the answer names it.
        unknown: set[str | UUID] = set()
        errors: dict[str | UUID, int] = {}
        kept_bytes = 0
        for number, ((_, what), code) in enumerate(denied.items(), 1):
            if number % SLICE_NAMES == 0:
                yield
            kept_bytes += bytes_of_names((what,))
            if code == UNKNOWN_TOPIC_ID_CODE:
                unknown.add(what)
            else:
                errors[what] = code
        rules = self._clearance.api(METADATA, version)
        allowed: set[str] = set()
        for number, name in enumerate(names.topic, 1):
            if number % SLICE_NAMES == 0:
                yield
            if name not in errors and name not in allowed:
                kept_bytes += bytes_of_names((name,))
                allowed.add(name)
        by_id = bool(names.topic_id)

        def keep_asked(found: list[str | UUID]) -> bool:
            return not any(what in errors for what in found)

        def edit(answer: memoryview) -> Slices[bytes | None]:
            late: list[tuple[str | UUID, int]] = []

            def keep(found: list[str | UUID]) -> bool:
                name = next((what for what in found if isinstance(what, str)), None)
                if name is None or name in allowed:
                    return True
                if by_id and rules.named(TOPIC, name).allowed:
                    return True
                late.extend((what, CODES[TOPIC]) for what in found if isinstance(what, UUID) and what in unknown)
                return False

            # The first edit finds denied topics whose names are only in the answer; a second one adds their errors.
            edited = yield from metadata_answer(version, answer, keep, list(errors.items()))
            if late:
                edited = yield from metadata_answer(version, answer, keep, [*errors.items(), *late])
            return edited

        also = self._clearance.also(plan.api_key)
        clears = yield from may_not_create(also, allowed.intersection(names.also))
        try:
            patched = yield from metadata_request(version, frame, keep_asked, clear_auto_creation=clears)
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault), names)
        if not self._pending.keep(exchange.number, kept_bytes):
            text = f"a connection keeps {MAX_KEPT_BYTES} bytes of names until answers are there: await them"
            return self._close(exchange, TOO_LARGE, text)
        if errors:
            self._tell(exchange, names, verdict, denied)
        self._edits[exchange.number] = edit
        exchange.plan = self._interest.held_plan(plan)
        return None if patched is None else Replace(patched)

    def _filter(self, exchange: Exchange, rules: ApiRules) -> None:
        """Keep an edit that removes elements from a list's answer that the client may not see."""
        plan = exchange.plan
        kind = kind_of_list(plan.api_key)
        if not rules.depends_on(kind):
            return

        def keep(found: list[str | UUID]) -> bool:
            for what in found:
                if isinstance(what, str):
                    return rules.named(kind, what).allowed
            return all(isinstance(what, UUID) and by_id(rules, what, self._names.get).allowed for what in found)

        def edit(answer: memoryview) -> Slices[bytes | None]:
            listed = yield from filter_list(plan.api_key, plan.api_version, answer, keep)
            if plan.api_key != DESCRIBE_TOPIC_PARTITIONS:
                return listed
            view = answer if listed is None else memoryview(listed)
            paged = yield from self._hide_cursor(rules, plan.api_version, view)
            return listed if paged is None else paged

        self._edits[exchange.number] = edit
        exchange.plan = self._interest.held_plan(plan)


def _why(denied: Denied, verdict: Verdict) -> str:
    """Return why a request is refused. If several names are denied: the first one, its verdict, and how many follow."""
    if len(denied) < 2:
        return verdict.why
    kind, name = next(iter(denied))
    return f"{kind} {str(name)[:_SHOWN_NAME]}: {verdict.why}; {len(denied) - 1:,} more denied"

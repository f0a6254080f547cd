"""Decides the requests of one connection by the policy of its cluster, and keeps the audit of them.

Reads what a request names, asks the rules about each, and forwards, refuses or edits. Between a request and its answer
it keeps what is to be done with the answer: edits, and lines of the audit that wait for the outcome. Bound: the pending
requests of the connection. Raises nothing on a client's bytes. Refuses to know sockets.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol.codec import decode_request
from kproxy.protocol.error_codes import error_name
from kproxy.proxy.access.audit import MAX_NAME, Audit, shown, timestamp
from kproxy.proxy.access.fetch_sessions import FETCH, UNKNOWN_SESSION, unknown_session, without_session
from kproxy.proxy.access.policy import (
    LISTS,
    MALFORMED,
    TOO_LARGE,
    UNKNOWN_TOPIC_ID,
    ApiRules,
    Clearance,
    Policy,
    Verdict,
)
from kproxy.proxy.access.policy_lists import (
    DESCRIBE_TOPIC_PARTITIONS,
    cursor_of,
    filter_list,
    hide_mentioned,
    kind_of_list,
    metadata_answer,
    metadata_request,
    with_cursor,
)
from kproxy.proxy.access.policy_refusals import CODES, refusal
from kproxy.proxy.access.policy_refusals import UNKNOWN_TOPIC_ID as UNKNOWN_TOPIC_ID_CODE
from kproxy.proxy.access.policy_resources import (
    CLUSTER,
    ENVELOPE,
    GROUP,
    METADATA,
    TOPIC,
    TRANSACTIONAL_ID,
    Names,
    Reader,
    reader,
)
from kproxy.proxy.access.share_sessions import SHARE_ACKNOWLEDGE, SHARE_FETCH, ShareSessions, no_session
from kproxy.proxy.access.topic_names import TopicNames
from kproxy.wire.authorizer import HOLD, Answer, Close, Decision, Hold, Replace
from kproxy.wire.events import ANSWERED, ClientNamed, Event, Exchange, Unanswered
from kproxy.wire.frames import REQUEST_HEAD_BYTES
from kproxy.wire.interest import ApiPlan, Interest

MAX_CURSORS = 16  # of lists that a connection is in the middle of
_CLIENT_ID_AT = REQUEST_HEAD_BYTES + 2
_NO_CLIENT_ID = ("ControlledShutdown", 0)  # the one version whose header ends before

# (the rules; what reads requests, None: all pass; whether they are audited; whether a Metadata loses its flag)
Treatment = tuple[ApiRules, Reader | None, bool, bool]
# What changes the answer of a request that was forwarded: frame -> what is sent instead, or None.
Edits = dict[int, Callable[[memoryview], bytes | None]]


class Peer(NamedTuple):
    """Whose requests these are, for rules and for the audit."""

    cluster: str
    client: str  # HOST:PORT
    host: str
    principal: str


class PolicyAuthorizer:
    """The authorizer of one connection's session, and a sink of its events.

    refused(api, reason) counts refusals.
    """

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
        self._client_id: bytes | None = None  # of the last request, in bytes: nearly always that of this one too
        self._client_head: bytes | None = None  # the same behind its length, as requests have it
        self._client_name: str | None = None
        self._treatments: dict[ApiPlan, Treatment] = {}  # by what the session calls an API and version
        self._software: tuple[str, str] | None = None
        self._share_sessions = ShareSessions()
        self._cursors: dict[str, str] = {}  # what a client was shown -> the topic that it may not see
        self._next_cursor = 1
        self._lines: dict[int, dict[str, Any]] = {}  # by number: audited requests that are not answered yet

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
            or policy.clears_auto_creation(plan.api_key, plan.api_version)
        ):
            return HOLD
        return None

    def decide(self, exchange: Exchange, frame: Any) -> Decision:
        plan = exchange.plan
        self._read_client_id(exchange, frame)
        if not plan.known or plan.api_key == ENVELOPE:
            return self._unknown(exchange)
        key, version = plan.api_key, plan.api_version
        treatment = self._treatments.get(plan)
        if treatment is None:
            treatment = self._treatments[plan] = self._treat(key, version)
        rules, read, is_audited, clears = treatment
        if read is None:
            return None
        try:
            names = read(frame, REQUEST_HEAD_BYTES, len(frame))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        denied, verdict = self._judge(rules, names, plan.api)
        if denied:
            if key == METADATA and names.all_of is None and not names.is_empty():
                return self._ask_for_the_rest(exchange, frame, names, denied, verdict)
            return self._refuse(exchange, frame, names, denied, verdict)
        if is_audited and self._audit is not None:
            self._lines[exchange.number] = self._line(exchange, names, verdict)
        if names.all_of is not None and self._policy.filters_lists and plan.api in LISTS:
            self._filter(exchange, rules)
        elif self._hides(key):
            self._edits[exchange.number] = partial(hide_mentioned, key, version, sees=self._clearance.sees)
            exchange.plan = self._interest.held_plan(plan)
        if key == FETCH and rules.restricts(TOPIC):
            return self._without_session(exchange, frame)
        if key in (SHARE_FETCH, SHARE_ACKNOWLEDGE) and rules.restricts(TOPIC):
            return self._of_own_share_session(exchange, frame)
        if key == DESCRIBE_TOPIC_PARTITIONS and self._cursors:
            return self._with_real_cursor(exchange, frame)
        if clears:
            try:
                patched = metadata_request(version, frame, None, clear_auto_creation=True)
            except Malformed as fault:
                return self._close(exchange, MALFORMED, str(fault))
            return None if patched is None else Replace(patched)
        return None

    def _without_session(self, exchange: Exchange, frame: Any) -> Decision:
        """What goes on with a session reads what an earlier request named, which may be another client's."""
        version = exchange.plan.api_version
        try:
            patched = without_session(version, memoryview(frame))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        if patched == UNKNOWN_SESSION:
            return Answer(*unknown_session(version, exchange.correlation_id))
        return None if patched is None else Replace(patched)

    def _of_own_share_session(self, exchange: Exchange, frame: Any) -> Decision:
        """What goes on with a session reads what was named when it began, which may have been another client."""
        plan = exchange.plan
        try:
            if self._share_sessions.goes_on(plan.api_key, plan.api_version, memoryview(frame)):
                return None
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        return Answer(*no_session(plan.api_key, plan.api_version, exchange.correlation_id))

    def _with_real_cursor(self, exchange: Exchange, frame: Any) -> Decision:
        """A list goes on at a topic that the client may not see: it was given another name for it."""
        try:
            cursor = cursor_of(exchange.plan.api_version, "request", memoryview(frame))
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault))
        if cursor is None or (topic := self._cursors.get(cursor[0])) is None:
            return None
        return Replace(with_cursor(memoryview(frame), cursor[1], cursor[2], topic))

    def _hide_cursor(self, rules: ApiRules, version: int, frame: memoryview) -> bytes | None:
        cursor = cursor_of(version, "response", frame)
        if cursor is None or rules.named(TOPIC, cursor[0]).allowed:
            return None
        shown = f"(hidden-{self._next_cursor})"  # no topic can be called so
        self._next_cursor += 1
        self._cursors[shown] = cursor[0]
        if len(self._cursors) > MAX_CURSORS:
            del self._cursors[next(iter(self._cursors))]
        return with_cursor(frame, cursor[1], cursor[2], shown)

    def _treat(self, key: int, version: int) -> Treatment:
        """What is done with requests of a version, for the clearance of now."""
        policy = self._policy
        rules = self._clearance.api(key, version)
        is_audited, clears = policy.is_audited(key), policy.clears_auto_creation(key, version)
        passes = rules.constant is not None and rules.constant.allowed
        passes = passes and not (is_audited or clears or self._hides(key))
        return rules, None if passes else reader(key, version), is_audited, clears

    def _hides(self, key: int) -> bool:
        return self._policy.hides_in(key) and not self._clearance.sees_all

    def edit(self, exchange: Exchange, frame: Any) -> bytes | None:
        edit = self._edits.pop(exchange.number, None)
        return None if edit is None else edit(frame)

    def too_large(self, exchange: Exchange) -> None:
        self._tell(exchange, None, TOO_LARGE)

    def _judge(self, rules: ApiRules, names: Names, api: str) -> tuple[dict[tuple[str, str | UUID], int], Verdict]:
        """(what is denied and with which error, the verdict that the audit names: of the first denied, else any)"""
        denied: dict[tuple[str, str | UUID], int] = {}
        first: Verdict | None = None
        verdict: Verdict | None = None

        for kind, found in (
            (TOPIC, names.topic),
            (GROUP, names.group),
            (TRANSACTIONAL_ID, names.transactional_id),
        ):
            for name in found:
                verdict = rules.named(kind, name)
                if not verdict.allowed:
                    first = first or verdict
                    denied[kind, name] = CODES[kind]
        for topic_id in names.topic_id:
            verdict = self._by_id(rules, topic_id)
            if not verdict.allowed:
                first = first or verdict
                denied[TOPIC, topic_id] = UNKNOWN_TOPIC_ID_CODE if verdict is UNKNOWN_TOPIC_ID else CODES[TOPIC]
        if names.all_of is not None:
            verdict = rules.nothing((names.all_of,)) if api in LISTS else rules.all_of(names.all_of)
            if not verdict.allowed:
                first = first or verdict
                denied[CLUSTER, ""] = CODES[CLUSTER]
        if names.expression is not None:
            verdict = rules.all_of(TOPIC)
            if not verdict.allowed:
                first = first or verdict
                denied[CLUSTER, ""] = CODES[TOPIC]
        if names.cluster:
            verdict = rules.cluster()
            if not verdict.allowed:
                first = first or verdict
                denied[CLUSTER, ""] = CODES[CLUSTER]
        if verdict is None:
            verdict = rules.nothing()
            if not verdict.allowed:
                first = verdict
                denied[CLUSTER, ""] = CODES[CLUSTER]
        return denied, first or verdict

    def _by_id(self, rules: ApiRules, topic_id: UUID) -> Verdict:
        if not rules.depends_on(TOPIC):
            return rules.named(TOPIC, "")
        name = self._names.get(topic_id)
        return UNKNOWN_TOPIC_ID if name is None else rules.named(TOPIC, name)

    def _read_client_id(self, exchange: Exchange, frame: Any) -> None:
        """Set the exchange's client id, and the clearance that goes with it."""
        head = self._client_head
        if head is not None and frame[REQUEST_HEAD_BYTES : REQUEST_HEAD_BYTES + len(head)] == head:
            exchange.client_id = self._client_name
            return
        plan = exchange.plan
        text: bytes | None = None
        self._client_head = None
        if (plan.api, plan.api_version) != _NO_CLIENT_ID and len(frame) >= _CLIENT_ID_AT:
            length = int.from_bytes(frame[REQUEST_HEAD_BYTES:_CLIENT_ID_AT], "big", signed=True)
            if length >= 0:
                text = bytes(frame[_CLIENT_ID_AT : _CLIENT_ID_AT + length])
                if plan.known:
                    self._client_head = bytes(frame[REQUEST_HEAD_BYTES : _CLIENT_ID_AT + length])
        if text != self._client_id:
            self._client_id = text
            self._client_name = None if text is None else str(text, "utf-8", "replace")
            self._clearance = self._clearance_of(self._client_name)
            self._treatments.clear()
        exchange.client_id = self._client_name

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _unknown(self, exchange: Exchange) -> Close | None:
        """Decide a request that cannot be read."""
        verdict = self._clearance.unknown(exchange.plan.api_key, exchange.plan.api_version)
        return None if verdict.allowed else self._close(exchange, verdict)

    def _refuse(
        self,
        exchange: Exchange,
        frame: Any,
        names: Names,
        denied: dict[tuple[str, str | UUID], int],
        verdict: Verdict,
    ) -> Answer | Close:
        plan = exchange.plan
        text = f"{plan.api} was refused by kproxy: {verdict.why}"
        try:
            _, body = decode_request(frame[4:])
            if plan.api_key == 0 and body["acks"] == 0:
                return self._close(exchange, verdict, "a producer with acks=0 gets no answer", names)
            answer = refusal(plan.api_key, plan.api_version, exchange.correlation_id, body, denied, text)
        except ProtocolError as fault:
            return self._close(exchange, MALFORMED, str(fault), names)
        if answer is None:
            return self._close(exchange, verdict, "the answer has no place for an error", names)
        self._tell(exchange, names, verdict)
        return Answer(*answer)

    def _close(self, exchange: Exchange, verdict: Verdict, more: str = "", names: Names | None = None) -> Close:
        self._tell(exchange, names, verdict)
        text = f"{exchange.plan.title} is refused: {verdict.why}{f' ({more})' if more else ''}"
        return Close(text)

    def _tell(self, exchange: Exchange, names: Names | None, verdict: Verdict) -> None:
        """Count a refusal, and put it into the audit."""
        self._refused(exchange.plan.api, verdict.reason)
        if self._audit is not None:
            self._audit.add(self._line(exchange, names, verdict))

    # --- answers -----------------------------------------------------------------------------------------------------

    def _ask_for_the_rest(
        self,
        exchange: Exchange,
        frame: Any,
        names: Names,
        denied: dict[tuple[str, str | UUID], int],
        verdict: Verdict,
    ) -> Replace | Close | None:
        """Ask a Metadata for the topics that are not denied, and put an error for each other into the answer."""
        plan = exchange.plan
        version = plan.api_version
        # The name behind an id that is not known yet decides when the answer names it.
        unknown = {what for (_, what), code in denied.items() if code == UNKNOWN_TOPIC_ID_CODE}
        errors = {what: code for (_, what), code in denied.items() if what not in unknown}
        rules = self._clearance.api(METADATA, version)
        allowed = {name for name in names.topic if (TOPIC, name) not in denied}
        by_id = bool(names.topic_id)

        def keep_asked(found: list[str | UUID]) -> bool:
            return not any(what in errors for what in found)

        def edit(answer: memoryview) -> bytes | None:
            late: list[tuple[str | UUID, int]] = []

            def keep(found: list[str | UUID]) -> bool:
                name = next((what for what in found if isinstance(what, str)), None)
                if name is None or name in allowed:
                    return True
                if by_id and rules.named(TOPIC, name).allowed:
                    return True
                late.extend((what, CODES[TOPIC]) for what in found if isinstance(what, UUID) and what in unknown)
                return False

            # Twice where an id proved to be of a denied topic: its error is known only then.
            edited = metadata_answer(version, answer, keep, list(errors.items()))
            return metadata_answer(version, answer, keep, [*errors.items(), *late]) if late else edited

        clears = self._policy.clears_auto_creation(plan.api_key, version)
        try:
            patched = metadata_request(version, frame, keep_asked, clear_auto_creation=clears)
        except Malformed as fault:
            return self._close(exchange, MALFORMED, str(fault), names)
        if errors:
            self._tell(exchange, names, verdict)
        self._edits[exchange.number] = edit
        exchange.plan = self._interest.held_plan(plan)
        return None if patched is None else Replace(patched)

    def _filter(self, exchange: Exchange, rules: ApiRules) -> None:
        """Take what the client may not see out of the answer to a list."""
        plan = exchange.plan
        kind = kind_of_list(plan.api_key)
        if not rules.depends_on(kind):
            return

        def keep(found: list[str | UUID]) -> bool:
            for what in found:
                if isinstance(what, str):
                    return rules.named(kind, what).allowed
            return all(isinstance(what, UUID) and self._by_id(rules, what).allowed for what in found)

        def edit(answer: memoryview) -> bytes | None:
            listed = filter_list(plan.api_key, plan.api_version, answer, keep)
            if plan.api_key != DESCRIBE_TOPIC_PARTITIONS:
                return listed
            paged = self._hide_cursor(rules, plan.api_version, answer if listed is None else memoryview(listed))
            return listed if paged is None else paged

        self._edits[exchange.number] = edit
        exchange.plan = self._interest.held_plan(plan)

    # --- events ------------------------------------------------------------------------------------------------------

    def events(self, events: list[Event]) -> None:
        """Learn from answers, and finish the audit of administrative requests."""
        for event in events:
            if event.__class__ is Exchange:
                body = event.response_body
                if body is not None and body.names:
                    self._names.learn(body.names)
                if self._lines and event.number in self._lines:
                    self._finish(self._lines.pop(event.number), event)
            elif event.__class__ is ClientNamed:
                self._software = event.name, event.version
            elif event.__class__ is Unanswered:
                self._edits.pop(event.exchange.number, None)
                line = self._lines.pop(event.exchange.number, None)
                if line is not None:
                    self._finish(line, event.exchange)

    def _finish(self, line: dict[str, Any], exchange: Exchange) -> None:
        assert self._audit is not None
        line["outcome"] = exchange.outcome
        if exchange.outcome is ANSWERED:
            line["errors"] = shown([error_name(code) for code in exchange.errors])
        self._audit.add(line)

    def _line(self, exchange: Exchange, names: Names | None, verdict: Verdict) -> dict[str, Any]:
        """A line of the audit, as far as it is known when the request is decided."""
        peer, plan = self._peer, exchange.plan
        line: dict[str, Any] = {
            "time": timestamp(exchange.request_start),
            "cluster": peer.cluster,
            "client": peer.client,
            "principal": peer.principal,
            "client_id": exchange.client_id and exchange.client_id[:MAX_NAME],
            "software": " ".join(self._software)[:MAX_NAME] if self._software else None,
            "api": plan.api,
            "version": plan.api_version,
            "decision": "allow" if verdict.allowed else "deny",
            "rule": verdict.rule,
            "reason": verdict.reason,
        }
        if names is not None:
            of_ids = [self._names.names.get(topic_id, str(topic_id)) for topic_id in names.topic_id]
            for kind, found in (
                ("topics", names.topic + of_ids),
                ("groups", names.group),
                ("transactional_ids", names.transactional_id),
            ):
                if found:
                    line[kind] = shown(found)
            if names.all_of is not None:
                line["all"] = names.all_of
        return line

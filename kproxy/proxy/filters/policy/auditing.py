"""Lines of the audit of one connection, from the decision about a request to its outcome; topic ids from answers.

A line is kept until the answer to its request. Bounds: `pending.py`. Does not evaluate rules, or read requests.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.protocol.error_codes import error_name
from kproxy.proxy.filters.policy.audit import MAX_NAME, MAX_NAMES, Audit, shown, timestamp
from kproxy.proxy.filters.policy.pending import PendingBytes, bytes_of_line
from kproxy.proxy.filters.policy.policy import Verdict
from kproxy.proxy.filters.policy.resources import Names
from kproxy.proxy.filters.policy.topic_names import TopicNames
from kproxy.wire.events import ANSWERED, ClientNamed, Closed, Event, Exchange, Unanswered

NOT_AWAITED = "not_awaited"  # the outcome in a line that could not be kept until the answer, for lack of memory


class Peer(NamedTuple):
    """The sender of requests, for rules and for the audit."""

    cluster: str
    client: str  # HOST:PORT
    host: str
    principal: str


class AuditedRequests:
    """The part of an authorizer that is a sink of its session's events."""

    _audit: Audit | None
    _edits: dict[int, Callable[..., Any]]  # exchange number -> edit of the answer
    _lines: dict[int, dict[str, Any]]
    _names: TopicNames
    _peer: Peer
    _pending: PendingBytes
    _software: tuple[str, str] | None

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
            elif event.__class__ is Closed:
                self._pending.forget_all()
            elif event.__class__ is Unanswered:
                self._edits.pop(event.exchange.number, None)
                self._pending.forget(event.exchange.number)
                line = self._lines.pop(event.exchange.number, None)
                if line is not None:
                    self._finish(line, event.exchange)

    def _await_outcome(self, exchange: Exchange, line: dict[str, Any]) -> None:
        """Write a line once its request is answered, or at once, without the outcome, if it cannot be kept."""
        assert self._audit is not None
        if self._pending.keep(exchange.number, bytes_of_line(line)):
            self._lines[exchange.number] = line
        else:
            self._audit.add(line | {"outcome": NOT_AWAITED})

    def _finish(self, line: dict[str, Any], exchange: Exchange) -> None:
        assert self._audit is not None
        self._pending.forget(exchange.number)
        line["outcome"] = exchange.outcome
        if exchange.outcome is ANSWERED:
            line["errors"] = shown([error_name(code) for code in dict.fromkeys(exchange.errors)])
        self._audit.add(line)

    def _line(self, exchange: Exchange, names: Names | None, verdict: Verdict) -> dict[str, Any]:
        """Return a line of the audit with the state at the decision about the request."""
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
            of_ids = [self._names.names.get(topic_id, topic_id) for topic_id in names.topic_id]
            for kind, found in (
                ("topics", [*names.topic, *of_ids]),
                ("groups", names.group),
                ("transactional_ids", names.transactional_id),
            ):
                if found:
                    line[kind] = shown(found)
            if names.all_of is not None:
                line["all"] = names.all_of
        return line

    def _name_denied(self, line: dict[str, Any], names: Names, denied: Mapping[tuple[str, str | UUID], int]) -> None:
        """Add the denied names to a line, if the request has further names."""
        named = len(names.topic) + len(names.topic_id) + len(names.group) + len(names.transactional_id)
        count = sum(1 for _, what in denied if what)  # the others are rights on the whole cluster
        if count < named:
            few = [what for _, what in islice(denied, MAX_NAMES) if what]
            found = shown([self._names.names.get(what, what) if isinstance(what, UUID) else what for what in few])
            more = [f"... and {count - MAX_NAMES} more"] if count > MAX_NAMES else []
            if found:
                line["denied"] = [*found, *more]

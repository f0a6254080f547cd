"""The state of a session that the compiled core takes over, and gives back (`proxy/relay/compiled.py`).

Duty: decide whether a session can be lent: it is between two frames on both sides, holds and keeps no bytes, has no
waiting bytes, and each pending request has a lent plan. Refuses to know the core.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.errors import Malformed
from kproxy.protocol.apis import API_VERSIONS, PRODUCE, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy.protocol.codec import api_message, paths_of
from kproxy.protocol.plans import uuid_of
from kproxy.wire.bodies import SUMS, Found
from kproxy.wire.bodies.found import Sums
from kproxy.wire.events import BROKER, CLIENT, NONE, UNANSWERED, Exchange
from kproxy.wire.frames import REQUEST_HEAD_BYTES
from kproxy.wire.interest import AUTHORIZE, FORWARD, HEARTBEATS, ApiPlan
from kproxy.wire.session import Session
from kproxy.wire.state import MAX_CUT_ID, MAX_UNCOUNTED, MAX_UNNOTED, NAMED_BYTES

_READ = frozenset((API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE))  # each changes the session's own state
Values = tuple[Any, ...]  # client id, acks, max_wait_ms, group id, transactional id
Produced = tuple[bytes, int, int, int, int, int]  # topic, partition, bytes, batches, records, codecs


class Lent(NamedTuple):
    """The state that the core takes over; times in nanoseconds of the session's clock."""

    pending: list[tuple[Exchange, list[Produced] | None]]
    number: int  # number of the next request
    received: tuple[int, int]  # bytes received, by side
    completed: tuple[int, int]  # complete frames, by side
    free_at: int  # when the last response ended


def is_lent(session: Session, plan: ApiPlan) -> bool:
    """Return whether requests of this plan that are forwarded, and their responses without errors, are only counted."""
    return (
        plan.known
        and plan.request in (FORWARD, AUTHORIZE)
        and plan.kept is None
        and plan.api_key not in _READ
        and not (session.interest.detail and plan.api_key in HEARTBEATS)  # heartbeats name the groups that have a lag
        and (
            (plan.quick_scan is not None and plan.request_reader is None and plan.response_reader is None)
            or counts_records(session, plan)
        )
    )


def counts_records(session: Session, plan: ApiPlan) -> bool:
    """Return whether requests of this plan are read only for the sums of each topic-partition's records."""
    return plan.api_key == PRODUCE and plan.request_reader is not None and session.interest.detail == SUMS


def topic_of(plan: ApiPlan, raw: bytes) -> str | UUID:
    """Return the topic in a Produce of that plan, as `found.Sums` has it."""
    return uuid_of(raw) if produces_by_id(plan.api_version) else raw.decode("utf-8", "replace")


@cache
def produces_by_id(version: int) -> bool:
    """Return whether a Produce of that version has ids of topics, not their names."""
    return "topicData.topicId" in paths_of(api_message(PRODUCE, version, "request").fields, version)


def lend(session: Session) -> Lent | None:
    """Return the state of a session; None: it cannot be lent now."""
    if (
        session._may_be_damaged  # over a capture
        or session.observers
        or session._handlers[CLIENT] is not Session._requests
        or session._handlers[BROKER] is not Session._answers
        or session._client_left
        or session._broker_left
        or session._client_head
        or session._broker_head
        or session.backlog[CLIENT] is not None
        or session.backlog[BROKER] is not None
        or session._own_answers
        or (session._authorizer is not None and not session._authorizer.is_quiet)
        or session._handshake is not None
        or session._own_request is not None
        or session._mutes
        or session._named
        or session.events
        or session._ended
        or not all(is_lent(session, each.plan) and each.outcome is UNANSWERED for each in session.pending)
    ):
        return None
    pending = [(each, _produced(session, each)) for each in session.pending]
    if any(produced is None and counts_records(session, each.plan) for each, produced in pending):
        return None
    received, completed = session._received, session.completed
    return Lent(pending, session._number, (received[0], received[1]), (completed[0], completed[1]), session._free_at)


def forget_notes(session: Session) -> None:
    """Release the memory reserved for a session's pending requests, which are lent."""
    if session._noted:
        for exchange in session.pending:
            session._forget(exchange)


def give_back(
    session: Session,
    pending: Iterable[tuple[ApiPlan, Values, int, int, int, int, int | None, list[tuple[Any, ...]] | None]],
    number: int,
    received: tuple[int, int],
    completed: tuple[int, int],
    free_at: int,
    missing: int,
    last: Values | None,
) -> None:
    """Restore a lent session.

    pending: for each request its plan, first fields, correlation id, number, bytes, times of its first and last byte,
    and counts of a Produce. missing: bytes of the last request that have not arrived. last: the first fields of the
    last request whose first fields are read.
    """
    exchanges: list[Exchange] = []
    for plan, values, correlation_id, each, size, start, end, produced in pending:
        exchange = Exchange(plan, correlation_id, each, len(exchanges), size, start)
        exchange.request_end = NONE if end is None else end
        (
            exchange.client_id,
            exchange.acks,
            exchange.max_wait_ms,
            exchange.group_id,
            exchange.transactional_id,
        ) = values
        exchanges.append(exchange)
        if produced is not None:
            exchange.request_body = _body(plan, produced)
    session.pending[:] = exchanges
    session._number = number
    session._received[:] = received
    session.completed[:] = completed
    session._free_at = free_at
    session._client_left = missing
    session._client_exchange = exchanges[-1] if missing and exchanges else None
    if last is not None:
        session.client_id = cut_id(last[0])
    for exchange in exchanges:
        body = exchange.request_body
        if body is not None and len(body.sums) > MAX_UNNOTED:
            session._count_named(exchange, 0, len(body.sums) * NAMED_BYTES, exchange.request_start)


def _produced(session: Session, exchange: Exchange) -> list[Produced] | None:
    """Return the counts of a Produce request by topic-partition; None: not counted, or unknown."""
    body = exchange.request_body
    if body is None or not counts_records(session, exchange.plan) or len(body.sums) > MAX_UNCOUNTED:
        return None
    produced: list[Produced] = []
    for topic, topic_id, size, batches, records, codecs, partition in body.sums:
        if records < 0:  # a compressed message set hides its count
            return None
        raw = topic.encode() if topic is not None else topic_id.bytes if topic_id is not None else b""
        produced.append((raw, partition, size, batches, records, codecs))
    return produced


def _body(plan: ApiPlan, produced: list[tuple[Any, ...]]) -> Found:
    """Return the body of a Produce as the session reads it."""
    body = Found()
    sums: list[Sums] = []
    body.sums = sums
    for raw, partition, size, batches, records, codecs, _ in produced:
        topic = topic_of(plan, raw)
        name, identity = (topic, None) if isinstance(topic, str) else (None, topic)
        sums.append(Sums(name, identity, size, batches, records, codecs, partition))
    return body


def cut_id(client_id: str | None) -> str | None:
    """Return a client id, cut as a session cuts it."""
    return client_id and client_id[:MAX_CUT_ID]


class First(NamedTuple):
    """The first fields of a request; requests that begin with the same bytes have the same first fields."""

    size: int  # bytes of these fields, after the correlation id
    values: Values
    is_read: bool  # the session reads these values
    deciding: frozenset[str]  # paths of further fields that the authorizer needs; empty: all requests are forwarded


def first_fields(session: Session, plan: ApiPlan, part: bytes, size: int) -> First | None:
    """Read the first fields of a request that begins with `part`; None: the session must read it.

    size: bytes of the request, its 4-byte size included.
    """
    end = min(size, len(part))
    if plan.prefix is None:
        first = First(0, _NO_FIELDS, False, frozenset())
    else:
        try:
            found = plan.prefix(part, REQUEST_HEAD_BYTES, end)
        except Malformed:  # the session reports the fault
            return None
        if found is None:
            return None
        values, stop = found
        if values[1] == 0 or values[5:] != (None, None, None):  # acks=0; a login; the client's software
            return None
        first = First(stop - REQUEST_HEAD_BYTES, values[:5], True, frozenset())
    if plan.request == FORWARD or session._authorizer is None:
        return first
    id_end = _end_of_client_id(plan, part, end)
    if id_end is None:
        return None
    exchange = _exchange_of(plan, size)
    deciding = session._authorizer.deciding_fields(exchange, part[:end])
    if deciding is None:
        return None
    values = first.values if first.is_read else (exchange.client_id, *_NO_FIELDS[1:])
    return First(max(first.size, id_end - REQUEST_HEAD_BYTES), values, first.is_read, deciding)


def passes(session: Session, plan: ApiPlan, frame: bytes) -> bool:
    """Return whether the authorizer forwards all requests with the first and the deciding fields of this one."""
    assert session._authorizer is not None
    return session._authorizer.passes(_exchange_of(plan, len(frame)), frame)


def _exchange_of(plan: ApiPlan, size: int) -> Exchange:
    """Return an exchange with which to ask the authorizer about a request: it has no number and is not pending."""
    return Exchange(plan, 0, NONE, 0, size, 0)


def _end_of_client_id(plan: ApiPlan, part: bytes, end: int) -> int | None:
    """Return where the client id ends in a request; None: it ends after `part`, or the request has no client id."""
    at = REQUEST_HEAD_BYTES + 2
    if end < at or api_message(plan.api_key, plan.api_version, "request").header_version(plan.api_version) == 0:
        return None
    stop = at + max(int.from_bytes(part[at - 2 : at], "big", signed=True), 0)
    return stop if stop <= end else None


_NO_FIELDS: Values = (None,) * 5

"""Kafka's registry in ZooKeeper: operations on its tree as rows, each with the kind of its node.

Duty: map paths to kinds by the table KINDS (`kafka.zk.ZkData` of Kafka 0.8 to 3.9; a chroot may precede them), and
values to text. Bound: a value has MAX_VALUE characters. Its input contains no passwords and tokens. Refuses to know
connections and the effects of a change.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kproxy.insight.rows import RegistryRow
from kproxy.zookeeper.operations import NOTIFICATION, is_ephemeral
from kproxy.zookeeper.records import Values, names_of
from kproxy.zookeeper.session import Event, Notification, Operation

MAX_VALUE = 16 * 1024  # a topic of thousands of partitions has its assignment in one node

# Kinds of nodes by the end of their path. The first match counts.
KINDS = (
    (r"/brokers/ids(/\d+)?", "broker"),
    (r"/brokers/topics/[^/]+/partitions/\d+/state", "partition_state"),
    (r"/brokers/topics(/[^/]+(/partitions(/\d+)?)?)?", "topic"),
    (r"/controller", "controller"),
    (r"/controller_epoch", "controller_epoch"),
    (r"/isr_change_notification(/[^/]+)?", "isr_change"),
    (r"/consumers/[^/]+/ids(/[^/]+)?", "consumer_id"),
    (r"/consumers/[^/]+/owners(/[^/]+(/\d+)?)?", "consumer_owner"),
    (r"/consumers/[^/]+/offsets(/[^/]+(/\d+)?)?", "consumer_offset"),
    (r"/config(/.*)?", "config"),
    (r"/admin(/.*)?", "admin"),
    (r"/kafka-acl[^/]*(/.*)?", "acl"),
)
_KIND = re.compile("(?:/.*)?(?:" + "|".join(f"(?P<k{number}>{path})" for number, (path, _) in enumerate(KINDS)) + ")")
_CREATED = ("create", "create2", "createTTL", "createContainer")


def kind_of(path: str | None) -> str:
    """Return the kind of a node, one of KINDS; "other" for all other paths."""
    found = _KIND.fullmatch(path or "")
    return KINDS[int(str(found.lastgroup)[1:])][1] if found is not None else "other"


class Ends(NamedTuple):
    """The ends of a connection, as its rows contain them."""

    client_address: str | None = None
    client_port: int | None = None
    server_address: str | None = None
    server_port: int | None = None
    connection: int | None = None


_NOWHERE = Ends()


def rows(event: Event, cluster: str, ends: Ends = _NOWHERE) -> Iterator[RegistryRow]:
    """Yield the rows of a ZooKeeper session's event; none for bytes that are not a frame."""
    if isinstance(event, Notification):
        yield RegistryRow(
            event.time,
            cluster,
            session_name(event.session),
            ends.client_address,
            ends.client_port,
            NOTIFICATION,
            "notification",
            event.path or None,
            None,
            event.zxid if event.zxid >= 0 else None,
            None,
            None,
            None,
            event.type,
            kind_of(event.path),
            None,
            ends.server_address,
            ends.server_port,
            ends.connection,
        )
    elif isinstance(event, Operation):
        for op, asked, answered, error in _parts(event):
            path = answered.get("path") if op in _CREATED else None  # includes a sequential node's number
            path = path or asked.get("path")
            yield RegistryRow(
                event.response_end or event.request_end,
                cluster,
                session_name(event.session),
                ends.client_address,
                ends.client_port,
                event.xid,
                op,
                path,
                (answered.get("stat") or asked).get("version"),
                event.zxid or None,
                is_ephemeral(asked),
                None if error is None else names_of("errors").get(error, str(error)) if error else None,
                event.response_start - event.request_end if event.response_start and event.request_end else None,
                _text(op, asked, answered),
                kind_of(path),
                asked.get("watch"),
                ends.server_address,
                ends.server_port,
                ends.connection,
                event.number if event.number >= 0 else None,
            )


def _parts(event: Operation) -> Iterator[tuple[str, Values, Values, int | None]]:
    """Yield (operation, request, response, error) of each part of a transaction, or of the single operation."""
    parts = event.request.get("operations")
    if parts is None:
        yield event.op, event.request, event.response, event.error
        return
    answers: list[Values] = event.response.get("operations") or [{}] * len(parts)
    for part, answered in zip(parts, answers, strict=False):
        yield part["op"], part, answered, answered.get("err", event.error)


def _text(op: str, asked: Values, answered: Values) -> str | None:
    """Return the value written or read, the children's names, a connect's session, or an auth's scheme."""
    if op == "connect":
        again = session_name(asked["sessionId"]) if asked.get("sessionId") else None
        timeout = answered.get("timeOut", asked.get("timeOut"))
        return json.dumps({"timeout_ms": timeout, "session": again, "read_only": asked.get("readOnly")})
    if op == "auth":
        return asked.get("scheme")
    value: Any = asked.get("data") if asked.get("data") is not None else answered.get("data")
    if value is not None:
        return bytes(value[:MAX_VALUE]).decode(errors="replace")
    children = answered.get("children")
    names = sorted(child for child in children or () if child is not None)  # the wire format allows null
    return ",".join(names)[:MAX_VALUE] or None


def session_name(number: int) -> str | None:
    """Return a session id in the notation of ZooKeeper's log; None: its start was not seen."""
    return f"0x{number & (1 << 64) - 1:x}" if number else None

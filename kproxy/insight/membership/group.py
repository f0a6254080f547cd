"""Common base of groups of all protocols: their coordinator, causes of generations, and events.

Bounds: MAX_MEMBERS members per group, MAX_CAUSES causes between two generations; HEAVY_BYTES of subscriptions and
assignments weigh as much as one member. A reason, which members may write themselves, has MAX_REASON characters.
Refuses to know the messages of one protocol or another.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.protocol.error_codes import error_name

MAX_MEMBERS = 4096
MAX_CAUSES = 256
HEAVY_BYTES = 512
MAX_REASON = 2000

GroupRow = GroupEvent | Rebalance | Assignment


class Cause(NamedTuple):
    """A possible cause of a generation; the earliest one is the cause."""

    at: int
    cause: str  # as in the `cause` column of `rebalances`
    member_id: str | None
    reason: str


class Member(Protocol):
    """The fields that members of all protocols have."""

    id: str
    instance_id: str | None
    client_id: str | None
    client_address: str | None


class Group:
    """One group. The subclass for its protocol defines `feed` and `finish`."""

    def __init__(self, cluster: str, group_id: str, protocol: str) -> None:
        self.cluster = cluster
        self.group_id = group_id
        self.protocol = protocol
        self.coordinator_id: int | None = None
        self.group_type: str | None = None  # consumer, connect, streams, share, or another type that its members name
        self._causes: list[Cause] = []  # since the last generation
        self._moved: Cause | None = None
        self._held_bytes = 0  # about, of subscriptions and assignments

    def coordinated_by(self, node: int | None, exchange: DecodedExchange) -> Iterator[GroupEvent]:
        """Learn the coordinator's node id from a response; yield an event if the coordinator has moved."""
        if node is None or node == self.coordinator_id:
            return
        before, self.coordinator_id = self.coordinator_id, node
        if before is not None:
            reason = f"broker {node} instead of broker {before}"
            self._moved = Cause(exchange.response_start, "coordinator_moved", None, reason)
            yield self.event(exchange, "coordinator_moved", reason=reason)

    def caused(self, at: int, cause: str, member_id: str | None, reason: str) -> None:
        """Remember a possible cause of the next generation."""
        if len(self._causes) < MAX_CAUSES:
            self._causes.append(Cause(at, cause, member_id, _short(reason)))

    def failed(self, exchange: DecodedExchange, event: str, codes: set[int]) -> Iterator[GroupEvent]:
        """Yield an event for each error."""
        for code in sorted(codes - {0}):
            yield self.event(exchange, event, error=code)

    def expired(self, member: Member, at: int, generation: int, reason: str) -> GroupEvent:
        """Return the event of an expired session. No message reports it, so the event has no exchange.

        at: the latest time at which it can have expired, in ns.
        """
        return GroupEvent(
            at,
            self.cluster,
            self.group_id,
            self.protocol,
            "expired",
            member.id,
            member.instance_id,
            member.client_id,
            member.client_address,
            generation,
            self.coordinator_id,
            reason=reason,
            group_type=self.group_type,
        )

    def event(
        self,
        exchange: DecodedExchange,
        event: str,
        *,
        error: int = 0,
        reason: str | None = None,
        at: int | None = None,
        **known: Any,
    ) -> GroupEvent:
        """Return an event of the exchange, at its response unless `at` is given. known: fields not in the request."""
        request = exchange.request
        fields: dict[str, Any] = {
            "member_id": request.get("memberId"),
            "group_instance_id": request.get("groupInstanceId", request.get("instanceId")),
            "client_id": exchange.client_id,
            "client_address": exchange.client_address,
            "generation": request.get("generationId", request.get("generationIdOrMemberEpoch")),
            "coordinator_id": self.coordinator_id if exchange.broker_id is None else exchange.broker_id,
        }
        return GroupEvent(
            exchange.response_start if at is None else at,
            self.cluster,
            self.group_id,
            self.protocol,
            event,
            error=error_name(error) if error else None,
            reason=None if reason is None else _short(reason),
            connection=exchange.connection,
            number=exchange.number,
            group_type=self.group_type,
            **fields | known,
        )


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"

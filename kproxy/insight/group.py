"""What groups of all protocols have in common: who coordinates them, what set a generation off, and their events.

Bounds: MAX_MEMBERS members of a group are followed, MAX_CAUSES causes are remembered between two generations; what
members subscribe to and own weighs with them, HEAVY_BYTES of it as much as a member. A reason, which members may write
themselves, has MAX_REASON characters.
Refuses to know the messages of one protocol or another.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from kproxy.insight.rows import Assignment, GroupEvent, Rebalance
from kproxy.insight.spoken import Spoken
from kproxy.protocol.error_codes import error_name

MAX_MEMBERS = 4096
MAX_CAUSES = 256
HEAVY_BYTES = 512
MAX_REASON = 2000

GroupRow = GroupEvent | Rebalance | Assignment


class Cause(NamedTuple):
    """What may have set a generation off; the first of them did."""

    at: int
    cause: str  # as `rebalances` has them
    member_id: str | None
    reason: str


class Member(Protocol):
    """What members of all protocols have."""

    id: str
    instance_id: str | None
    client_id: str | None
    client_address: str | None


class Group:
    """One group. What is fed and how it ends is its protocol's."""

    def __init__(self, cluster: str, group_id: str, protocol: str) -> None:
        self.cluster = cluster
        self.group_id = group_id
        self.protocol = protocol
        self.coordinator_id: int | None = None
        self.group_type: str | None = None  # consumer, connect, streams, share, or what else members call themselves
        self._causes: list[Cause] = []  # since the last generation
        self._moved: Cause | None = None
        self._held_bytes = 0  # about, of subscriptions and assignments

    def coordinated_by(self, node: int | None, spoken: Spoken) -> Iterator[GroupEvent]:
        """A broker answered for the group, or was named: the event of it, if it is another one than before."""
        if node is None or node == self.coordinator_id:
            return
        before, self.coordinator_id = self.coordinator_id, node
        if before is not None:
            reason = f"broker {node} instead of broker {before}"
            self._moved = Cause(spoken.response_start, "coordinator_moved", None, reason)
            yield self.event(spoken, "coordinator_moved", reason=reason)

    def caused(self, at: int, cause: str, member_id: str | None, reason: str) -> None:
        """Remember what may set the next generation off."""
        if len(self._causes) < MAX_CAUSES:
            self._causes.append(Cause(at, cause, member_id, _short(reason)))

    def failed(self, spoken: Spoken, event: str, codes: set[int]) -> Iterator[GroupEvent]:
        """An event for each error."""
        for code in sorted(codes - {0}):
            yield self.event(spoken, event, error=code)

    def expired(self, member: Member, at: int, generation: int, reason: str) -> GroupEvent:
        """A member is gone without a word. No message says so: the event has no exchange; at: no later than then."""
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
        spoken: Spoken,
        event: str,
        *,
        error: int = 0,
        reason: str | None = None,
        at: int | None = None,
        **known: Any,
    ) -> GroupEvent:
        """An event of the exchange, at its answer if not `at` another time. known: what the request does not say."""
        request = spoken.request
        fields: dict[str, Any] = {
            "member_id": request.get("memberId"),
            "group_instance_id": request.get("groupInstanceId", request.get("instanceId")),
            "client_id": spoken.client_id,
            "client_address": spoken.client_address,
            "generation": request.get("generationId", request.get("generationIdOrMemberEpoch")),
            "coordinator_id": self.coordinator_id if spoken.broker_id is None else spoken.broker_id,
        }
        return GroupEvent(
            spoken.response_start if at is None else at,
            self.cluster,
            self.group_id,
            self.protocol,
            event,
            error=error_name(error) if error else None,
            reason=None if reason is None else _short(reason),
            connection=spoken.connection,
            number=spoken.number,
            group_type=self.group_type,
            **fields | known,
        )


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"

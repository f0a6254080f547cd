"""State of groups of the classic protocol: their members, members that are expected, and a forming generation.

Bounds: those of `embedded`; the group bounds their number. Refuses to know the order of messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kproxy.insight.decoded import Body
from kproxy.insight.membership.embedded import Owned, given, subscription_of
from kproxy.insight.rows import GroupEvent

MS = 1_000_000
MAX_REBALANCE_NS = 3600 * 10**9  # longest wait for a JoinGroup; members may ask for weeks


@dataclass(slots=True)
class Joined:
    """A member, from its last JoinGroup request, or from the list of members in the leader's JoinGroup response."""

    id: str
    instance_id: str | None = None
    client_id: str | None = None
    client_address: str | None = None
    topics: tuple[str, ...] | None = None  # None: not known, or no consumer
    rack: str | None = None
    asked_ns: int = 0  # time of its last JoinGroup
    heard_ns: int = 0  # time of its last known message; heartbeats without an error are not decoded
    session_ns: int = 0  # its session's timeout
    said_owned: Owned | None = None  # partitions that it reported as owned in its JoinGroup (cooperative protocol)
    owned: Owned | None = None  # its last assignment; None: not known
    size_bytes: int = 0  # size of its subscription and assignment
    given_bytes: int = 0  # the assignment's part of `size_bytes`, as in SyncGroup
    is_gone: bool = False  # it left, or its expiry was reported
    words: str | None = None  # description of a Connect worker or Streams member, from its metadata

    @property
    def was_seen(self) -> bool:
        """Whether it sent anything, rather than being named by others alone."""
        return self.client_id is not None or self.asked_ns > 0 or self.heard_ns > 0


@dataclass(slots=True)
class Forming:
    """A forming generation: some members have received its number, not all have received an assignment."""

    number: int
    strategy: str | None
    leader: str
    answered_ns: int  # the first JoinGroup response: later requests belong to the next generation
    called: set[str]  # members that received REBALANCE_IN_PROGRESS since the previous generation
    joined_ns: int
    started_ns: int
    last_to_join: str | None  # None: no join was seen
    joined: dict[str, Joined] = field(default_factory=dict)
    members: int = 0  # number of members in the leader's JoinGroup response; 0: not seen
    synced: set[str] = field(default_factory=set)
    synced_ns: int = 0
    last_request_ns: int = 0
    last_but_one_ns: int = 0


class Expected:
    """Members that received MEMBER_ID_REQUIRED with an id, and have not joined with it yet.

    A JoinGroup is decoded when its response arrives: after all members have joined, or after the longest rebalance
    timeout. A member has therefore not joined if a later generation lacks it, or if that time has passed.
    """

    def __init__(self) -> None:
        self._asked: dict[str, GroupEvent] = {}  # the event to emit if it does not join, at the end of its session
        self._rebalance_ns = 0  # the longest rebalance timeout of a member

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, member_id: str, event: GroupEvent) -> None:
        self._asked[member_id] = event

    def may_take(self, request: Body) -> None:
        """Learn the rebalance timeout from a JoinGroup request."""
        longest_ms = max(request.get("rebalanceTimeoutMs", 0), request["sessionTimeoutMs"])
        self._rebalance_ns = max(self._rebalance_ns, min(longest_ms * MS, MAX_REBALANCE_NS))

    def came(self, member_id: str) -> bool:
        """Remove a member that joins or leaves; return whether it was expected."""
        return self._asked.pop(member_id, None) is not None

    @property
    def until_ns(self) -> int | None:
        """Return the time after which the first expected member counts as not joined; None: no member is expected."""
        first = min((event.time_ns for event in self._asked.values()), default=None)
        return None if first is None else first + self._rebalance_ns

    def due(self, now_ns: int) -> Iterator[GroupEvent]:
        """Yield the events of members that have not joined by now."""
        yield from self.gone(now_ns - self._rebalance_ns)

    def gone(self, before_ns: int) -> Iterator[GroupEvent]:
        """Yield the events of members whose sessions ended before this time."""
        for member_id in [each for each, event in self._asked.items() if event.time_ns < before_ns]:
            yield self._asked.pop(member_id)


def joined_as_stored(
    member_id: str,
    instance_id: str | None,
    client_id: str,
    client_address: str,
    session_ms: int,
    kind: str | None,
    metadata: bytes,
    assignment: bytes,
) -> Joined:
    """Return a member from the coordinator's log. kind: the type of its group."""
    member = Joined(member_id, instance_id, client_id, client_address, session_ns=session_ms * MS)
    subscribe(member, kind, metadata)
    has = given(kind, assignment)
    if has is not None and (member.topics is not None or member.words is not None):
        member.owned = has.after(member.said_owned)
    member.size_bytes = len(metadata) + len(assignment)
    return member


def subscribe(member: Joined, kind: str | None, metadata: bytes) -> None:
    """Learn topics, owned partitions and rack from the metadata that a member of this type of group joins with."""
    subscription = subscription_of(kind, metadata)
    member.size_bytes = len(metadata)
    if subscription is not None:
        member.topics, member.said_owned = subscription.topics, subscription.owned
        member.rack, member.words = subscription.rack, subscription.words

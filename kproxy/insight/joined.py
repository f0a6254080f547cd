"""Members of groups of the classic protocol, those that are expected, and a generation of theirs that forms.

Duty: what is remembered of each. Bounds: those of `embedded`; how many there are is the group's. Refuses to know what
is said when.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kproxy.insight.embedded import Owned, given, said
from kproxy.insight.rows import GroupEvent
from kproxy.insight.spoken import Body

MS = 1_000_000
MAX_REBALANCE_NS = 3600 * 10**9  # as long as a JoinGroup is waited for; members may ask for weeks


@dataclass(slots=True)
class Joined:
    """A member, as its last JoinGroup said, or as its leader was told."""

    id: str
    instance_id: str | None = None
    client_id: str | None = None
    client_address: str | None = None
    topics: tuple[str, ...] | None = None  # None: not known, or no consumer
    rack: str | None = None
    asked_ns: int = 0  # when its last JoinGroup came
    heard_ns: int = 0  # its last word that was seen; heartbeats without an error are not
    session_ns: int = 0  # its session's timeout
    said_owned: Owned | None = None  # what it said that it owned when it joined (cooperative ones)
    owned: Owned | None = None  # what it was last given; None: not known
    size_bytes: int = 0  # of its subscription and assignment
    given_bytes: int = 0  # of them its assignment's, as SyncGroup had it
    is_gone: bool = False  # it left, or was said to be expired
    words: str | None = None  # what a worker of Connect, or a member of Streams, says of itself


@dataclass(slots=True)
class Forming:
    """A generation that forms: told to some members, and perhaps not yet assigned to all."""

    number: int
    strategy: str | None
    leader: str
    answered_ns: int  # the first answer to a JoinGroup: what comes later is of the next generation
    called: set[str]  # members that were told to rejoin since the one before
    joined_ns: int
    started_ns: int
    last_to_join: str | None  # None: no join was seen
    joined: dict[str, Joined] = field(default_factory=dict)
    members: int = 0  # as the leader was told; 0: not seen
    synced: set[str] = field(default_factory=set)
    synced_ns: int = 0
    last_request_ns: int = 0
    last_but_one_ns: int = 0


class Expected:
    """Members that were given an id, to join with.

    A JoinGroup is known when it is answered, and it is answered when all have joined, or have taken longer than any of
    them may. So who does not come is known when a later generation lacks it, or after that time.
    """

    def __init__(self) -> None:
        self._asked: dict[str, GroupEvent] = {}  # the event, should it not come: its time is when its session ends
        self._rebalance_ns = 0  # the longest that a member may take

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, member_id: str, event: GroupEvent) -> None:
        self._asked[member_id] = event

    def may_take(self, request: Body) -> None:
        """Learn from a JoinGroup how long others may take."""
        longest_ms = max(request.get("rebalanceTimeoutMs", 0), request["sessionTimeoutMs"])
        self._rebalance_ns = max(self._rebalance_ns, min(longest_ms * MS, MAX_REBALANCE_NS))

    def came(self, member_id: str) -> bool:
        """Whether a member that joins, or leaves, is one of them."""
        return self._asked.pop(member_id, None) is not None

    @property
    def until_ns(self) -> int | None:
        """When the first of them has not come for certain; None: there is none."""
        first = min((event.time_ns for event in self._asked.values()), default=None)
        return None if first is None else first + self._rebalance_ns

    def due(self, now_ns: int) -> Iterator[GroupEvent]:
        """Those who have not come by now."""
        yield from self.gone(now_ns - self._rebalance_ns)

    def gone(self, before_ns: int) -> Iterator[GroupEvent]:
        """Those whose sessions ended before."""
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
    """A member as the coordinator's log has it. kind: the type of its group."""
    member = Joined(member_id, instance_id, client_id, client_address, session_ns=session_ms * MS)
    subscribe(member, kind, metadata)
    has = given(kind, assignment)
    if has is not None and (member.topics is not None or member.words is not None):
        member.owned = has.after(member.said_owned)
    member.size_bytes = len(metadata) + len(assignment)
    return member


def subscribe(member: Joined, kind: str | None, metadata: bytes) -> None:
    """Learn what a member of a group of this type says as it joins."""
    told = said(kind, metadata)
    member.size_bytes = len(metadata)
    if told is not None:
        member.topics, member.said_owned, member.rack, member.words = told.topics, told.owned, told.rack, told.words

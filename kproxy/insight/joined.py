"""Members of groups of the classic protocol, and a generation of theirs that forms.

Duty: what is remembered of each. Bounds: those of `embedded`; how many there are is the group's. Refuses to know what
is said when.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kproxy.insight.embedded import Owned, given, said
from kproxy.insight.rows import GroupEvent

MS = 1_000_000


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
    last_to_join: str
    joined: dict[str, Joined] = field(default_factory=dict)
    members: int = 0  # as the leader was told; 0: not seen
    synced: set[str] = field(default_factory=set)
    synced_ns: int = 0
    last_request_ns: int = 0
    last_but_one_ns: int = 0


class Asked(NamedTuple):
    """A member that was given an id, to join with."""

    deadline_ns: int
    event: GroupEvent  # should it not come


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

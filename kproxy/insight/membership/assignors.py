"""Assignments of Kafka's own strategies, computed from the members' subscriptions.

Duty: range and round robin, as the clients' assignors compute them (`RangeAssignor`, `RoundRobinAssignor` of Java,
`range` and `roundrobin` of librdkafka), to compare them with the leader's assignment; and the faults of any assignment:
partitions without an owner, with two owners, or with an owner that does not subscribe. Sticky assignments depend on the
previous owners, and range assignments on racks: those are only checked for such faults.

MAX_STEPS bounds the time: members times topics, and partitions. Refuses to know frames, generations and where
partition counts come from.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kproxy.wording import few

COOPERATIVE = "cooperative-sticky"
STICKY = ("sticky", COOPERATIVE)
MAX_STEPS = 2_000_000
MAX_NAMED = 10  # partitions named in a description of faults

Owned = Mapping[str, frozenset[tuple[str, int]]]  # member id -> (topic, partition)


class Member(NamedTuple):
    """A member of a group, as in the leader's JoinGroup response."""

    id: str
    instance_id: str | None  # group.instance.id of a static member (KIP-345)
    topics: Sequence[str]  # its subscription
    rack: str | None = None
    owned: frozenset[tuple[str, int]] | None = None  # partitions that it reported as owned in its JoinGroup


class Verdict(NamedTuple):
    """The result of a check of an assignment."""

    reason: str | None = None  # its faults, in words; None: no fault was found
    expected: Owned | None = None  # the assignment that the strategy computes
    sent: Owned | None = None
    holds: bool | None = None  # whether it has no fault, for strategies that are not computed

    def agrees(self, member_id: str) -> bool | None:
        """Return whether a member's assignment is the expected one; None: it cannot be determined."""
        if self.expected is None or self.sent is None:
            return self.holds
        return self.sent.get(member_id) == self.expected.get(member_id)


def checked(strategy: str, members: Sequence[Member], partitions: Mapping[str, int], sent: Owned) -> Verdict:
    """Compare a leader's assignment with the one that its strategy computes, or check it for faults."""
    if not members:
        return Verdict()
    expected = computed(strategy, members, partitions)
    if expected is not None:
        differs = any(sent.get(member.id, frozenset()) != expected[member.id] for member in members)
        differs = differs or not sent.keys() <= expected.keys()
        if not differs or not any(member.rack is not None for member in members):
            words = _wrong(strategy, members, partitions, sent) or f"not what {strategy} computes"
            return Verdict(words if differs else None, expected, sent)
    if strategy in STICKY and all(topic in partitions for member in members for topic in member.topics):
        wrong = _wrong(strategy, members, partitions, sent)
        return Verdict(wrong, holds=wrong is None)
    return Verdict()


def _wrong(strategy: str, members: Sequence[Member], partitions: Mapping[str, int], sent: Owned) -> str | None:
    """Return the faults that no assignment of Kafka's own strategies may have, in words; None: it has none."""
    if sum(partitions.get(topic, 0) for topic in _topics(members)) > MAX_STEPS:
        return None
    wrong = []
    twice = owned_twice(sent)
    if twice:
        words = [f"{topic}-{index} by {' and '.join(who[:3])}" for (topic, index), who in sorted(twice.items())]
        wrong.append(f"owned twice: {few(words, MAX_NAMED)}")
    nobody = unowned(sent, members, partitions)
    if strategy == COOPERATIVE:  # a moving partition has no owner for a generation
        nobody = nobody.difference(*(member.owned or frozenset() for member in members))
    if nobody:
        wrong.append(f"owned by nobody: {few([f'{topic}-{index}' for topic, index in sorted(nobody)], MAX_NAMED)}")
    wanted = {member.id: frozenset(member.topics) for member in members}
    unwanted = [
        f"{topic}-{index} at {member}"
        for member, owned in sorted(sent.items())
        for topic, index in sorted(owned)
        if topic not in wanted.get(member, ())
    ]
    if unwanted:
        wrong.append(f"at one who did not subscribe: {few(unwanted, MAX_NAMED)}")
    return "; ".join(wrong) or None


def computed(strategy: str, members: Iterable[Member], partitions: Mapping[str, int]) -> Owned | None:
    """Return the strategy's assignment; None: a strategy that is not computed, over MAX_STEPS, or an unknown topic.

    partitions: the partition count of each topic; 0: the topic does not exist.
    """
    ordered = sorted(members, key=_order)
    topics = _topics(ordered)
    if any(topic not in partitions for topic in topics):
        return None
    if len(ordered) * len(topics) + sum(partitions[topic] for topic in topics) > MAX_STEPS:
        return None
    if strategy == "range":
        return _range(ordered, partitions)
    if strategy == "roundrobin":
        return _round_robin(ordered, partitions)
    return None


def unowned(assigned: Owned, members: Iterable[Member], partitions: Mapping[str, int]) -> set[tuple[str, int]]:
    """Return the partitions of subscribed topics that no member owns."""
    wanted = {(topic, index) for topic in _topics(members) for index in range(partitions.get(topic, 0))}
    return wanted.difference(*assigned.values())


def owned_twice(assigned: Owned) -> dict[tuple[str, int], list[str]]:
    """Return the partitions with more than one owner, each with its owners."""
    owners: dict[tuple[str, int], list[str]] = {}
    for member, owned in sorted(assigned.items()):
        for partition in owned:
            owners.setdefault(partition, []).append(member)
    return {partition: several for partition, several in owners.items() if len(several) > 1}


def _order(member: Member) -> tuple[bool, str]:
    """Sort static members first, by instance id, so that a new member id moves no partition (KIP-345)."""
    return (member.instance_id is None, member.id if member.instance_id is None else member.instance_id)


def _topics(members: Iterable[Member]) -> list[str]:
    return sorted({topic for member in members for topic in member.topics})


def _range(members: Sequence[Member], partitions: Mapping[str, int]) -> Owned:
    """Assign each member a contiguous range of each topic's partitions; the first members get the remainder."""
    owned: dict[str, set[tuple[str, int]]] = {member.id: set() for member in members}
    wanted = [(member.id, frozenset(member.topics)) for member in members]
    for topic in _topics(members):
        subscribed = [member_id for member_id, topics in wanted if topic in topics]
        each, more = divmod(partitions[topic], len(subscribed))
        first = 0
        for place, member in enumerate(subscribed):
            count = each + (place < more)
            owned[member].update((topic, index) for index in range(first, first + count))
            first += count
    return {member: frozenset(found) for member, found in owned.items()}


def _round_robin(members: Sequence[Member], partitions: Mapping[str, int]) -> Owned | None:
    """Assign all partitions of all topics in turn, each to the next member that subscribes to its topic."""
    owned: dict[str, set[tuple[str, int]]] = {member.id: set() for member in members}
    wanted = [frozenset(member.topics) for member in members]
    place = steps = 0
    for topic in _topics(members):
        for index in range(partitions[topic]):
            while topic not in wanted[place]:
                place = (place + 1) % len(members)
                steps += 1
                if steps > MAX_STEPS:
                    return None
            owned[members[place].id].add((topic, index))
            place = (place + 1) % len(members)
    return {member: frozenset(found) for member, found in owned.items()}

"""The assignments that Kafka's own strategies make, computed from what members subscribe to.

Duty: range and round robin, as the clients' assignors have them (`RangeAssignor`, `RoundRobinAssignor` of Java, `range`
and `roundrobin` of librdkafka), so that what a group's leader sent can be compared; and what is wrong with any
assignment: partitions that nobody owns, and that two own. Other strategies depend on what members owned before, or on
racks, and are not computed.

Memory and time are bounded by the partitions of the topics that are subscribed to, which the caller limits. Refuses to
know frames, generations and where partition counts come from.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Owned = Mapping[str, frozenset[tuple[str, int]]]  # member id -> (topic, partition)


class Member(NamedTuple):
    """A member of a group, as the leader learns of it."""

    id: str
    instance_id: str | None  # of a static member (KIP-345)
    topics: Sequence[str]  # that it subscribes to


def computed(strategy: str, members: Iterable[Member], partitions: Mapping[str, int]) -> Owned | None:
    """What the strategy assigns; None for a strategy that is not computed, or if a topic's partitions are not known.

    partitions: how many a topic has; 0 for one that does not exist.
    """
    ordered = sorted(members, key=_order)
    if any(topic not in partitions for member in ordered for topic in member.topics):
        return None
    if strategy == "range":
        return _range(ordered, partitions)
    if strategy == "roundrobin":
        return _round_robin(ordered, partitions)
    return None


def unowned(assigned: Owned, members: Iterable[Member], partitions: Mapping[str, int]) -> set[tuple[str, int]]:
    """Partitions of topics that somebody subscribes to, and that nobody owns."""
    wanted = {(topic, index) for topic in _topics(members) for index in range(partitions.get(topic, 0))}
    return wanted.difference(*assigned.values())


def owned_twice(assigned: Owned) -> dict[tuple[str, int], list[str]]:
    """Partitions with more than one owner, each with its owners."""
    owners: dict[tuple[str, int], list[str]] = {}
    for member, owned in sorted(assigned.items()):
        for partition in owned:
            owners.setdefault(partition, []).append(member)
    return {partition: several for partition, several in owners.items() if len(several) > 1}


def _order(member: Member) -> tuple[bool, str]:
    """Static members come first, by their instance, so that a new member id moves nothing (KIP-345)."""
    return (member.instance_id is None, member.id if member.instance_id is None else member.instance_id)


def _topics(members: Iterable[Member]) -> list[str]:
    return sorted({topic for member in members for topic in member.topics})


def _range(members: Sequence[Member], partitions: Mapping[str, int]) -> Owned:
    """Of each topic a run of partitions for each member; the first members get one more where it does not come out."""
    owned: dict[str, set[tuple[str, int]]] = {member.id: set() for member in members}
    for topic in _topics(members):
        subscribed = [member.id for member in members if topic in member.topics]
        each, more = divmod(partitions[topic], len(subscribed))
        first = 0
        for place, member in enumerate(subscribed):
            count = each + (place < more)
            owned[member].update((topic, index) for index in range(first, first + count))
            first += count
    return {member: frozenset(found) for member, found in owned.items()}


def _round_robin(members: Sequence[Member], partitions: Mapping[str, int]) -> Owned:
    """All partitions of all topics in turn, each to the next member that subscribes to its topic."""
    owned: dict[str, set[tuple[str, int]]] = {member.id: set() for member in members}
    place = 0
    for topic in _topics(members):
        for index in range(partitions[topic]):
            while topic not in members[place].topics:
                place = (place + 1) % len(members)
            owned[members[place].id].add((topic, index))
            place = (place + 1) % len(members)
    return {member: frozenset(found) for member, found in owned.items()}

"""Records about groups in the coordinator's log, which complete the group's traffic on the wire.

Duty: the meaning of each record: a generation of the classic protocol with its members and assignments; an epoch, a
member, or a member's assignment of the protocols whose coordinator assigns. Every record yields an event, `stored` or
`removed`. A generation that was seen on the wire is not reported twice: only facts that the wire did not show become
members, assignments and a rebalance. History changes no known group. Refuses to know partitions and offsets of logs.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from kproxy.insight.decoded import Body
from kproxy.insight.logs.coordinator_logs import Entry, ns_of
from kproxy.insight.membership.classic import ClassicGroup
from kproxy.insight.membership.embedded import CONSUMER, MAX_OWNED, Owned, group_type
from kproxy.insight.membership.epochs import EpochGroup
from kproxy.insight.membership.group import MAX_MEMBERS, Group, GroupRow
from kproxy.insight.membership.joined import Joined, joined_as_stored
from kproxy.insight.rows import GroupEvent
from kproxy.wording import counted

SHOWN_TOPICS = 20

# (protocol, kind of record) by the name of the key's message.
MESSAGES = {
    "GroupMetadataKey": ("classic", "group"),
    **{
        f"{name}Group{kind}Key": (name.lower(), what)
        for name in ("Consumer", "Share", "Streams")
        for kind, what in (("Metadata", "epoch"), ("MemberMetadata", "member"), ("CurrentMemberAssignment", "owned"))
    },
}


def kind_of(entry: Entry) -> tuple[str, str] | None:
    """Return (protocol, kind of record); None: a record that does not describe a group."""
    return MESSAGES.get(entry.record.key_message.name)


def group_id(entry: Entry) -> str:
    key = entry.record.key
    return str(key["group"] if "group" in key else key["groupId"])


def stored(group: ClassicGroup | EpochGroup, what: str, entry: Entry, names: Mapping[UUID, str]) -> Iterator[GroupRow]:
    """Yield the rows of a record about a group. what: its kind. names: topic names by id."""
    if isinstance(group, ClassicGroup):
        yield from _classic(group, entry)
    elif what == "epoch":
        yield from _epoch(group, entry)
    elif what == "member":
        yield from _member(group, entry)
    else:
        yield from _owned(group, entry, names)


def _classic(group: ClassicGroup, entry: Entry) -> Iterator[GroupRow]:
    value = entry.record.value
    if value is None:
        yield _event(
            group, entry, "removed", reason="the group is gone: it had no members and no offsets, or was deleted"
        )
        if not entry.is_history and group.state != "Stable":
            group.members.clear()
        return
    stored = value["members"]
    kind = group_type(value["protocolType"], value["protocol"])
    group.group_type = kind or group.group_type
    words = f"{'Stable' if stored else 'Empty'}, {counted(len(stored), 'member')}"
    words += f", {value['protocol']}" if value["protocol"] else ""
    words += f", protocol type {value['protocolType']}" if value["protocolType"] not in ("", CONSUMER) else ""
    words += f", leader {value['leader']}" if value["leader"] else ""
    yield _event(group, entry, "stored", generation=value["generation"], reason=words)
    if entry.is_history and group.generation != -1:
        return
    at = ns_of(value.get("currentStateTimestamp") or -1, entry.time_ns)
    members = {each["memberId"]: _joined(each, kind) for each in stored[:MAX_MEMBERS]}
    yield from group.stored(value["generation"], value["protocol"], members, at)


def _joined(member: Body, kind: str | None) -> Joined:
    return joined_as_stored(
        member["memberId"],
        member.get("groupInstanceId"),
        member["clientId"],
        _address(member["clientHost"]),
        member["sessionTimeout"],
        kind,
        bytes(member["subscription"]),
        bytes(member["assignment"]),
    )


def _epoch(group: EpochGroup, entry: Entry) -> Iterator[GroupRow]:
    value = entry.record.value
    if value is None:
        yield _event(group, entry, "removed", reason="the group is gone, or has another protocol now")
        return
    yield _event(group, entry, "stored", generation=value["epoch"], reason=f"epoch {value['epoch']}")
    if not entry.is_history:
        group.stored_epoch(value["epoch"], entry.time_ns)


def _member(group: EpochGroup, entry: Entry) -> Iterator[GroupRow]:
    member_id, value = entry.record.key["memberId"], entry.record.value
    if value is None:
        yield _event(group, entry, "removed", member_id=member_id, reason="it is no member any more")
        if not entry.is_history:
            yield from group.stored_gone(member_id, entry.time_ns)
        return
    topics, regex = value.get("subscribedTopicNames"), value.get("subscribedTopicRegex")
    words = ", ".join((topics or [])[:SHOWN_TOPICS]) or regex
    known = {
        "member_id": member_id,
        "group_instance_id": value.get("instanceId"),
        "client_id": value["clientId"],
        "client_address": _address(value["clientHost"]),
    }
    yield _event(group, entry, "stored", reason=f"subscribes to {words}" if words else None, **known)
    if not entry.is_history:
        if value.get("serverAssignor"):
            group.strategy = value["serverAssignor"]
        at = entry.time_ns
        group.stored_member(
            member_id, value["clientId"], known["client_address"], known["group_instance_id"], topics, regex, at
        )


def _owned(group: EpochGroup, entry: Entry, names: Mapping[UUID, str]) -> Iterator[GroupRow]:
    value = entry.record.value
    if value is None or entry.is_history:
        return
    owned = _partitions(value, names)
    if owned is not None:
        yield from group.stored_owned(entry.record.key["memberId"], value["memberEpoch"], owned, entry.time_ns)


def _partitions(value: Body, names: Mapping[UUID, str]) -> Owned | None:
    """Return a member's partitions or tasks; None: more than MAX_OWNED."""
    if "activeTasks" in value:
        assigned = [(part["subtopologyId"], part["partitions"]) for part in value["activeTasks"]]
    else:
        parts = value["assignedPartitions"]
        assigned = [(names.get(part["topicId"], str(part["topicId"])), part["partitions"]) for part in parts]
    if sum(len(indexes) for _, indexes in assigned) > MAX_OWNED:
        return None
    return frozenset((topic, index) for topic, indexes in assigned for index in indexes)


def _event(group: Group, entry: Entry, event: str, **known: Any) -> GroupEvent:
    logged = entry.logged
    node = logged.broker_id if logged.broker_id is not None else group.coordinator_id
    return GroupEvent(
        entry.time_ns,
        group.cluster,
        group.group_id,
        group.protocol,
        event,
        coordinator_id=node,
        connection=logged.connection,
        number=logged.number,
        group_type=group.group_type,
        **known,
    )


def _address(host: str) -> str:
    """Return the address without its host name: Java writes "/10.0.0.1" or "name/10.0.0.1"."""
    return host.rpartition("/")[2]

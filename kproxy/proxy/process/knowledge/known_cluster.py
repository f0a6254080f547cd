"""Knowledge of one live cluster: exchanges in; rows, metrics and /api/groups out.

Duty: decode exchanges, except Metadata answers that only repeat an earlier one; feed `insight`; count its rows in cells
for metrics; keep each group's last rebalance, for /api/groups, and the owner of each partition.

A group is split if a replaced member commits a partition that another member owns by then: both processed it. Nothing
on the wire ties a Fetch to a group, so a replaced member that only fetches is not seen.

Bounds: those of `insight.knowledge`, `insight.repeats` and `metrics.counters.groups`; the last rebalance of as many
groups as knowledge follows; MAX_OWNED partitions with their owners, of the groups that rebalanced last. Refuses to know
where exchanges come from and where rows go.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.insight.decoded import DecodedExchange, decode_exchange
from kproxy.insight.knowledge import Knowledge
from kproxy.insight.logs.coordinator_logs import Logged, named
from kproxy.insight.membership import classic, epochs
from kproxy.insight.membership.classic import ClassicGroup
from kproxy.insight.membership.epochs import EpochGroup
from kproxy.insight.membership.groups import MAX_GROUPS
from kproxy.insight.repeats import Repeats
from kproxy.insight.rows import Assignment, GroupEvent, Leadership, Rebalance, Row
from kproxy.metrics.counters.groups import GroupCells, InsightCells
from kproxy.protocol.apis import FETCH, OFFSET_COMMIT
from kproxy.proxy.filters.feed import KeptExchange

PROTOCOLS = ("classic", "consumer", "share", "streams")
OF_LOG = ("stored", "removed")  # event kinds decoded from the coordinator's log
MAX_OWNED = 200_000
MAX_SHOWN_MEMBERS = 100  # per group in /api/groups

# Failure event -> the operation that failed.
_FAILED = {"join_answered": "join", "sync_answered": "sync", "heartbeat_failed": "heartbeat", "commit_failed": "commit"}
# Errors that are part of every rebalance.
_USUAL = frozenset(("MEMBER_ID_REQUIRED", "REBALANCE_IN_PROGRESS", "NONE"))
# Errors that a coordinator returns to a member that is not, or is no longer, in the group.
_REPLACED = frozenset((22, 25, 82, 110, 113))  # ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, ..._EPOCH


class _Owners(NamedTuple):
    """The observed owners of a group's partitions."""

    generation: int
    members: dict[tuple[Any, int], str]  # (topic, partition) -> member id


class KnownCluster:
    """The knowledge of one cluster, gained from its traffic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells = InsightCells()
        self.knowledge = Knowledge(name)
        self.repeats = Repeats()
        self._last: dict[tuple[str, str], Rebalance] = {}
        self._owners: dict[str, _Owners] = {}  # by group
        self._owned_count = 0

    def learn(self, kept: KeptExchange) -> list[Row]:
        """Return the rows of an exchange; none if it does not decode or repeats known content."""
        if kept.api_key == FETCH:
            return self._learn_log(kept)
        if self.repeats.is_one(kept.api_key, kept.api_version, kept.request, kept.response):
            return []
        whose = kept.whose
        exchange = decode_exchange(
            kept.api_key,
            kept.api_version,
            kept.request,
            kept.response,
            kept.request_end,
            kept.response_start,
            cluster=self.name,
            client_address=whose.client_address,
            broker_id=whose.broker_id,
            connection=whose.connection,
            number=kept.number,
            source=whose.source,
            broker=whose.broker,
            principal=whose.principal,
        )
        if exchange is None:
            self.cells.left_out["undecodable"] += 1
            return []
        rows = self._counted(self.knowledge.feed(exchange))
        self.repeats.fed(exchange, rows, self.knowledge.topics.changes)
        if kept.api_key == OFFSET_COMMIT:
            self._look_for_split(exchange)
        group_id = exchange.request.get("groupId")
        if isinstance(group_id, str):
            own = "classic" if kept.api_key in classic.APIS else epochs.PROTOCOLS.get(kept.api_key)
            self._update_gauges(group_id, PROTOCOLS if own is None else (own,), kept.at_ns)
        self.cells.left_out["not_followed"] = sum(self.knowledge.left_out.values())
        return rows

    def _learn_log(self, kept: KeptExchange) -> list[Row]:
        """Return the rows of a batch of a coordinator's log; none while the name of its topic is unknown."""
        topic, identity, partition = json.loads(kept.request)
        log = named(topic, None if identity is None else UUID(identity), self.knowledge.topics.names)
        if log is None or kept.response is None:
            self.knowledge.logs.unnamed()
            return []
        whose = kept.whose
        logged = Logged(
            kept.at_ns, log, partition, kept.response, whose.broker_id, whose.connection, kept.number, whose.source
        )
        return self._counted(self.knowledge.feed_log(logged))

    def tick(self, now_ns: int) -> list[Row]:
        """Return the rows that were due by now."""
        return self._counted(self.knowledge.due(now_ns))

    def _counted(self, rows: Iterable[Row]) -> list[Row]:
        found = list(rows)
        for row in found:
            self._count(row)
        return found

    # --- counting ----------------------------------------------------------------------------------------------------

    def _count(self, row: Row) -> None:
        cells = self.cells
        if isinstance(row, Rebalance):
            duration = None if row.ended_ns is None else max(0, row.ended_ns - row.started_ns)
            cells.rebalanced(cells.group(row.group_id, row.ended_ns or row.joined_ns), row.cause, duration)
            key = row.group_id, row.protocol
            self._last.pop(key, None)
            self._last[key] = row
            if len(self._last) > MAX_GROUPS:
                del self._last[next(iter(self._last))]
        elif isinstance(row, GroupEvent):
            operation = _FAILED.get(row.event)
            if operation is not None and row.error is not None and row.error not in _USUAL:
                cells.group(row.group_id, row.time_ns).failures[operation] += 1
            if row.event in OF_LOG:
                self._update_gauges(row.group_id, (row.protocol,), row.time_ns)
        elif isinstance(row, Assignment):
            self._record_owner(row)
        elif isinstance(row, Leadership):
            missing = 0 if row.isr is None or row.replicas is None else len(row.replicas) - len(row.isr)
            cells.leadership(row.topic, row.partition, row.change, row.leader, missing)

    def _record_owner(self, row: Assignment) -> None:
        """Record the owner of a partition."""
        owners = self._owners.pop(row.group_id, None)
        if owners is None or owners.generation != row.generation:
            self._owned_count -= 0 if owners is None else len(owners.members)
            owners = _Owners(row.generation, {})
        self._owners[row.group_id] = owners
        self._owned_count += (row.topic, row.partition) not in owners.members
        owners.members[row.topic, row.partition] = row.member_id
        while self._owned_count > MAX_OWNED:
            self._owned_count -= len(self._owners.pop(next(iter(self._owners))).members)

    def _look_for_split(self, exchange: DecodedExchange) -> None:
        """Count refused commits of replaced members for partitions that another member owns."""
        owners = self._owners.get(exchange.request["groupId"])
        if owners is None or exchange.response is None:
            return
        refused = (
            (topic.get("name") or self.knowledge.topics.names.get(topic.get("topicId")), partition["partitionIndex"])
            for topic in exchange.response["topics"]
            for partition in topic["partitions"]
            if partition["errorCode"] in _REPLACED
        )
        member_id = exchange.request.get("memberId")
        split = sum(owners.members.get(key, member_id) != member_id for key in refused)
        if split:
            self.cells.group(exchange.request["groupId"], exchange.response_start).split += split

    def _update_gauges(self, group_id: str, protocols: tuple[str, ...], at_ns: int) -> None:
        """Update the group's gauges of these protocols after an event."""
        for protocol in protocols:
            group = self.knowledge.groups.get(group_id, protocol)
            if group is None:
                continue
            cells: GroupCells = self.cells.group(group_id, at_ns)
            self.cells.stands(
                cells, group.state, len(group.members), _generation(group), group.protocol, group.group_type
            )

    # --- /api/groups -------------------------------------------------------------------------------------------------

    def groups(self, after: str | None, limit: int) -> Iterator[dict[str, Any]]:
        """Yield groups in the order of their ids, above `after`: `limit` groups, and every protocol of the last id."""
        above = [group for group in self.knowledge.groups if after is None or group.group_id > after]
        above.sort(key=lambda group: group.group_id)
        for number, group in enumerate(above):
            if number >= limit and group.group_id != above[number - 1].group_id:
                return
            yield self._as_json(group)

    def _as_json(self, group: ClassicGroup | EpochGroup) -> dict[str, Any]:
        protocol = "classic" if isinstance(group, ClassicGroup) else group.protocol
        last = self._last.get((group.group_id, protocol))
        members: list[Any] = sorted(group.members.values(), key=lambda member: member.id)
        return {
            "cluster": self.name,
            "group": group.group_id,
            "protocol": protocol,
            "type": group.group_type,
            "state": group.state,
            "generation": _generation(group),
            "strategy": group.strategy if isinstance(group, ClassicGroup) else None,
            "coordinator": group.coordinator_id,
            "member_count": len(members),
            "members": [
                {"member_id": member.id, "client_id": member.client_id, "instance_id": member.instance_id}
                for member in members[:MAX_SHOWN_MEMBERS]
            ],
            "last_rebalance": None
            if last is None
            else {
                "generation": last.generation,
                "cause": last.cause,
                "member_id": last.cause_member,
                "reason": last.reason,
                "started_ns": last.started_ns,
                "ended_ns": last.ended_ns,
                "last_to_join": last.last_to_join,
                "members_before": last.members_before,
                "members_after": last.members_after,
            },
        }


def _generation(group: ClassicGroup | EpochGroup) -> int:
    return group.generation if isinstance(group, ClassicGroup) else group.epoch

"""The groups of one cluster, of all protocols, and the exchanges of each.

Duty: pass an exchange to its group, or to each group that it names: FindCoordinator, the describes and DeleteGroups
name several. A commit or a FindCoordinator request creates no group, because clients that are not members send them
too: it yields events only. A group that changes its protocol counts as two groups.

Offsets committed in a transaction take effect when it ends: EndTxn yields an event of the group.

Bounds: MAX_GROUPS groups, as many transactions with offsets, MAX_WEIGHT members of all groups together. Beyond that the
least recently seen group is forgotten, with a row for its forming generation. MAX_GROUPS coordinators of groups, and
MAX_NAMED groups of one exchange. Refuses to know what is in a message.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kproxy.insight.decoded import Body, DecodedExchange
from kproxy.insight.logs.coordinator_logs import Entry
from kproxy.insight.membership import classic, epochs, stored_groups
from kproxy.insight.membership.classic import ClassicGroup
from kproxy.insight.membership.epochs import EpochGroup
from kproxy.insight.membership.group import Group, GroupRow
from kproxy.insight.rows import GroupEvent
from kproxy.insight.topics import Topics
from kproxy.protocol.apis import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    END_TXN,
    FIND_COORDINATOR,
    GROUP_ID_NOT_FOUND,
    HEARTBEAT,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    TXN_OFFSET_COMMIT,
)

DESCRIBES = {DESCRIBE_GROUPS: "classic", 69: "consumer", 77: "share", 89: "streams"}
GROUP_KEY = 0  # FindCoordinator's key type; others are transactional ids and share partitions
MAX_GROUPS = 10_000
MAX_WEIGHT = 100_000  # in members; state of former members counts too
MAX_NAMED = 10_000
LOOK_NS = 10**9  # between two checks for members that did not join
MAX_IN_TRANSACTION = 64  # groups of one transaction; a producer has one

# Responses of these APIs matter only with an error; they are by far the most frequent ones.
ONLY_FAILED = frozenset((OFFSET_COMMIT, OFFSET_FETCH, HEARTBEAT))

Key = tuple[str, str]  # id, protocol
AnyGroup = ClassicGroup | EpochGroup


class Groups:
    """The groups of one cluster."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.forgotten = 0
        self._groups: dict[Key, AnyGroup] = {}  # least recently seen first
        self._weights: dict[Key, int] = {}
        self._weight = 0  # sum over all groups
        self._coordinators: dict[str, int] = {}
        self._in_transactions: dict[str, dict[str, int]] = {}  # by transactional id: offsets of each group
        # The time at which expected members count as not joined, or pending rebalances become rows.
        self._waited_for: dict[Key, int] = {}
        self._next_ns = 0  # no group in `_waited_for` is due before

    @property
    def apis(self) -> frozenset[int]:
        return APIS

    @property
    def left_out(self) -> Mapping[str, int]:
        return {"groups": self.forgotten}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[AnyGroup]:
        return iter(self._groups.values())

    def get(self, group_id: str, protocol: str = "classic") -> AnyGroup | None:
        return self._groups.get((group_id, protocol))

    def feed(self, exchange: DecodedExchange, topics: Topics) -> Iterator[GroupRow]:
        """Yield the rows of an exchange of an API in `APIS`."""
        shared = _SHARED.get(exchange.api_key)
        if shared is not None:
            if exchange.response is not None:
                yield from shared(self, exchange, exchange.response)
            return
        key = exchange.request["groupId"], epochs.PROTOCOLS.get(exchange.api_key, "classic")
        group = self._known(key)
        if isinstance(group, ClassicGroup):
            yield from group.feed(exchange, topics.partitions, topics.before(exchange.request_end))
        else:
            yield from group.feed(exchange, topics.names)
        yield from self._weigh(key, group)

    def stored(self, entry: Entry, topics: Topics) -> Iterator[GroupRow]:
        """Yield the rows of a coordinator's log record about a group."""
        kind = stored_groups.kind_of(entry)
        if kind is None:
            return
        key = stored_groups.group_id(entry), kind[0]
        if entry.record.value is None and key not in self._groups:
            return  # the removal of an unknown group
        group = self._known(key)
        if group.coordinator_id is None:
            group.coordinator_id = entry.logged.broker_id
        yield from stored_groups.stored(group, kind[1], entry, topics.names)
        yield from self._weigh(key, group)

    def due(self, now_ns: int) -> Iterator[GroupRow]:
        """Yield the rows that are due by now: members that did not join, and final rebalances."""
        if not self._waited_for or now_ns < self._next_ns:
            return
        for key in [key for key, until_ns in self._waited_for.items() if until_ns < now_ns]:
            group = self._groups.get(key)
            if group is not None:
                yield from (group.expected if isinstance(group, ClassicGroup) else group).due(now_ns)
                yield from self._weigh(key, group)
        self._next_ns = max(min(self._waited_for.values(), default=0), now_ns + LOOK_NS)

    def finish(self) -> Iterator[GroupRow]:
        """Yield the rows of incomplete generations, at the end of the traffic."""
        for group in self._groups.values():
            yield from group.finish()

    # --- known groups ------------------------------------------------------------------------------------------------

    def _known(self, key: Key) -> AnyGroup:
        """Return the group, new or known, and make it the most recently seen one."""
        group = self._groups.pop(key, None)
        if group is None:
            group = ClassicGroup(self.cluster, key[0]) if key[1] == "classic" else EpochGroup(self.cluster, *key)
            group.coordinator_id = self._coordinators.get(key[0])
        self._groups[key] = group
        return group

    def _any(self, group_id: str) -> Group:
        """Return a group by its id alone; an unknown group is returned, but not kept."""
        for protocol in ("consumer", "classic", "streams", "share"):
            group = self._groups.get((group_id, protocol))
            if group is not None:
                return group
        unknown = Group(self.cluster, group_id, "unknown")
        unknown.coordinator_id = self._coordinators.get(group_id)
        return unknown

    def _weigh(self, key: Key, group: AnyGroup) -> Iterator[GroupRow]:
        """Update the group's weight and next due time; forget groups beyond the bounds, yielding their rows."""
        until_ns = (group.expected if isinstance(group, ClassicGroup) else group).until_ns
        if until_ns is not None:
            self._waited_for[key] = until_ns
            self._next_ns = min(self._next_ns, until_ns)
        else:
            self._waited_for.pop(key, None)
        weight = group.weight
        self._weight += weight - self._weights.get(key, 0)
        self._weights[key] = weight
        while self._groups and (len(self._groups) > MAX_GROUPS or self._weight > MAX_WEIGHT):
            oldest, forgotten = next(iter(self._groups.items()))
            yield from forgotten.finish()
            self._drop(oldest)
            self.forgotten += 1

    def _drop(self, key: Key) -> None:
        del self._groups[key]
        self._waited_for.pop(key, None)
        self._weight -= self._weights.pop(key, 0)

    # --- APIs of several groups, and of clients that are no members --------------------------------------------------

    def _failed(self, group: Group, exchange: DecodedExchange, event: str, codes: set[int]) -> Iterator[GroupRow]:
        """Yield an event for each error; a known group remembers the member."""
        yield from group.failed(exchange, event, codes)
        if isinstance(group, ClassicGroup | EpochGroup):
            yield from self._weigh((group.group_id, group.protocol), group)

    def _committed(self, exchange: DecodedExchange, answer: Body) -> Iterator[GroupRow]:
        """Yield the failures of an OffsetCommit or TxnOffsetCommit; count a transaction's offsets until it ends."""
        group = self._any(exchange.request["groupId"])
        if isinstance(group, ClassicGroup | EpochGroup):
            group.note_alive(exchange.request.get("memberId") or "", exchange.request_end)
        codes = {part["errorCode"] for topic in answer["topics"] for part in topic["partitions"]}
        yield from self._failed(group, exchange, "commit_failed", codes)
        transaction = exchange.request.get("transactionalId")
        if transaction is not None and codes == {0}:
            pending = self._in_transactions.pop(transaction, {})
            count = sum(len(topic["partitions"]) for topic in answer["topics"])
            if len(pending) < MAX_IN_TRANSACTION:
                pending[group.group_id] = pending.get(group.group_id, 0) + count
            _put(self._in_transactions, transaction, pending)

    def _transaction_ended(self, exchange: DecodedExchange, answer: Body) -> Iterator[GroupEvent]:
        """Yield the events of an EndTxn: the transaction's offsets are committed or aborted now."""
        transaction, error = exchange.request["transactionalId"], answer["errorCode"]
        pending = self._in_transactions.get(transaction, {})
        if error:
            for group_id in pending:
                reason = f"transaction {transaction} did not end"
                yield self._any(group_id).event(exchange, "commit_failed", error=error, reason=reason)
            return
        self._in_transactions.pop(transaction, None)
        event = "offsets_committed" if exchange.request["committed"] else "offsets_aborted"
        for group_id, count in pending.items():
            reason = f"{count} offsets in transaction {transaction}"
            yield self._any(group_id).event(exchange, event, reason=reason)

    def _offsets_fetched(self, exchange: DecodedExchange, answer: Body) -> Iterator[GroupRow]:
        several = answer.get("groups")
        if several is None:
            several = [answer | {"groupId": exchange.request["groupId"]}]
        for each in several[:MAX_NAMED]:
            codes = {part["errorCode"] for topic in each["topics"] for part in topic["partitions"]}
            codes.add(each.get("errorCode", 0))
            yield from self._failed(self._any(each["groupId"]), exchange, "offset_fetch_failed", codes)

    def _coordinator_found(self, exchange: DecodedExchange, answer: Body) -> Iterator[GroupEvent]:
        if exchange.request.get("keyType", GROUP_KEY) != GROUP_KEY:
            return
        several = answer.get("coordinators")
        if several is None:
            several = [answer | {"key": exchange.request["key"]}]
        for each in several[:MAX_NAMED]:
            group, error, node = self._any(each["key"]), each["errorCode"], each["nodeId"]
            if error:
                reason = each.get("errorMessage")
                yield group.event(exchange, "coordinator_not_found", error=error, reason=reason, coordinator_id=None)
                continue
            where = f"{each['host']}:{each['port']}"
            yield group.event(exchange, "coordinator_found", reason=where, coordinator_id=node)
            for moved in group.coordinated_by(node, exchange):
                yield moved._replace(coordinator_id=node)
            self._coordinators.pop(each["key"], None)
            _put(self._coordinators, each["key"], node)

    def _described(self, exchange: DecodedExchange, answer: Body) -> Iterator[GroupRow]:
        for description in answer["groups"][:MAX_NAMED]:
            key = description["groupId"], DESCRIBES[exchange.api_key]
            if description["errorCode"] == GROUP_ID_NOT_FOUND and exchange.api_key != DESCRIBE_GROUPS:
                continue  # tools try this describe first, for groups of any protocol
            known = self._groups.get(key)
            if known is None and (description["errorCode"] or not description["members"]):
                group = Group(self.cluster, *key)  # it does not exist, or is empty
                error, reason = description["errorCode"], f"{description['groupState']}, 0 members"
                yield group.event(exchange, "described", error=error, reason=reason, coordinator_id=exchange.broker_id)
                continue
            group = self._known(key)
            yield from group.described(exchange, description)
            yield from self._weigh(key, group)

    def _deleted(self, exchange: DecodedExchange, answer: Body) -> Iterator[GroupRow]:
        for each in answer["results"][:MAX_NAMED]:
            group, error = self._any(each["groupId"]), each["errorCode"]
            yield group.event(exchange, "deleted", error=error, reason=each.get("errorMessage"))
            key = group.group_id, group.protocol
            if not error and key in self._groups:
                yield from self._groups[key].finish()
                self._drop(key)


def _put(into: dict[str, Any], key: str, value: Any) -> None:
    """Add an entry; remove the oldest one beyond MAX_GROUPS."""
    into[key] = value
    if len(into) > MAX_GROUPS:
        del into[next(iter(into))]


_SHARED: dict[int, Callable[[Groups, DecodedExchange, Body], Iterator[Any]]] = {
    OFFSET_COMMIT: Groups._committed,
    OFFSET_FETCH: Groups._offsets_fetched,
    FIND_COORDINATOR: Groups._coordinator_found,
    END_TXN: Groups._transaction_ended,
    TXN_OFFSET_COMMIT: Groups._committed,
    DELETE_GROUPS: Groups._deleted,
    **dict.fromkeys(DESCRIBES, Groups._described),
}
APIS = classic.APIS | epochs.PROTOCOLS.keys() | _SHARED.keys()

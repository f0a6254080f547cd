"""Groups of consumers that coordinate through ZooKeeper (Kafka 0.8 to 0.10): members, owners, rebalances, herds.

Each consumer has an ephemeral node under /consumers/GROUP/ids and watches that folder. When it changes, the consumer
releases its partitions and claims those of its range assignment, by an ephemeral node per partition under owners
(`kafka.consumer.ZookeeperConsumerConnector`). There is no coordinator: a consumer that claims a partition before its
owner has released it receives NODEEXISTS and retries. A *rebalance* here has the effects of one change of the members,
or of a topic's partitions: the members that its watches woke (the herd), partitions released and claimed, failed claims
(lost races), and the time when the last partition had an owner again. ZooKeeper does not number rebalances:
`generation` counts them from the first one seen.

ZooKeeper sends no message when a session expires: a member has expired if a later list of the folder lacks it, or if
its reconnect is refused as expired; the rebalance starts when the watches fired. The caller feeds rows of `registry` in
the order of time.

Bounds: MAX_GROUPS groups, the least recently seen forgotten, MAX_NAMES members of a group and as many partitions,
MAX_SESSIONS sessions of members, MAX_TOPICS topics; `left_out` counts the rest. Refuses to know bytes, and groups that
the brokers coordinate.
"""

import json
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

from kproxy.insight.membership.assignors import Member, Owned, computed
from kproxy.insight.rows import Assignment, GroupEvent, Rebalance, RegistryRow

PROTOCOL = "zookeeper"
STRATEGY = "range"  # roundrobin was rare, and no node records it
MAX_GROUPS = 1000
MAX_NAMES = 4096
MAX_SESSIONS = 65_536
MAX_TOPICS = 10_000
# Watches fire before the response to the change, and within this time of each other.
TOGETHER_NS = 200_000_000

_NODE = re.compile(r"(.*)/consumers/([^/]+)/(ids|owners)(?:/([^/]+)(?:/(\d+))?)?")
_TOPIC = re.compile(r"(.*)/brokers/topics/([^/]+)")
_CREATES = frozenset(("create", "create2", "createTTL", "createContainer"))
_EXPIRED = "SESSIONEXPIRED"

Partition = tuple[str, int]
Counts = Mapping[str, int]  # partitions by topic
Produced = GroupEvent | Rebalance | Assignment


@dataclass(slots=True)
class _Consumer:
    """A member: an ephemeral node under ids."""

    session: str  # "": it registered before the first row
    zxid: int
    streams: dict[str, int] = field(default_factory=dict)  # threads by topic, from the node's value


@dataclass(slots=True)
class _Claim:
    time_ns: int
    member: str
    thread: str


@dataclass(slots=True)
class _Round:
    """The rebalance in progress."""

    number: int
    started_ns: int
    before: frozenset[str]
    owned: frozenset[Partition]  # when it began
    cause: str = "unknown"
    cause_member: str | None = None
    sessions: set[str] = field(default_factory=set)  # sessions whose watches fired
    woken: set[str] = field(default_factory=set)  # the members of those sessions
    listed_ns: int = 0  # when a member last listed the members
    revoked_ns: int = 0  # when the first partition was released
    claims: dict[Partition, _Claim] = field(default_factory=dict)
    lost: set[tuple[str, Partition]] = field(default_factory=set)


class _Group:
    def __init__(self, cluster: str, group_id: str) -> None:
        self.left_out = 0
        self._cluster = cluster
        self._group_id = group_id
        self._members: dict[str, _Consumer] = {}
        self._by_session: dict[str, str] = {}
        self._gone: set[str] = set()  # former members
        self._owners: dict[Partition, _Claim] = {}
        self._round: _Round | None = None
        self._rounds = 0

    # --- members -----------------------------------------------------------------------------------------------------

    def joined(self, row: RegistryRow, member: str, counts: Counts) -> Iterator[Produced]:
        if len(self._members) >= MAX_NAMES:
            self.left_out += 1
            return
        again = member in self._gone or member in self._members
        yield from self._caused(row.time_ns, "member_joined", member, counts)
        self._members[member] = _Consumer(_whose(row), row.zxid or 0, _streams(row.value))
        self._by_session[_whose(row)] = member
        self._gone.discard(member)
        yield self._event(row, "join", member, "registered again" if again else "registered")

    def described(self, member: str, value: str | None) -> None:
        if member in self._members:
            self._members[member].streams = _streams(value)

    def left(self, row: RegistryRow, member: str, why: str, counts: Counts) -> Iterator[Produced]:
        if member in self._members:
            yield from self._caused(row.time_ns, "member_left", member, counts)
            yield self._event(row, "leave", member, why)
            self._remove(member)

    def listed(self, row: RegistryRow, counts: Counts) -> Iterator[Produced]:
        """Learn from a list of members: known members that it lacks have expired; yield their events."""
        present = set((row.value or "").split(",")) - {""}
        zxid = row.zxid or 0
        for member in [name for name, each in self._members.items() if name not in present and each.zxid <= zxid]:
            yield from self.expired(row, member, counts)
        for member in sorted(present - self._members.keys() - self._gone):
            if len(self._members) < MAX_NAMES:
                self._members[member] = _Consumer("", zxid)
            else:
                self.left_out += 1
        if self._round is not None and self._by_session.get(_whose(row)) is not None:
            self._round.listed_ns = row.time_ns

    def expired(self, row: RegistryRow, member: str, counts: Counts) -> Iterator[Produced]:
        if member not in self._members:
            return
        current = self._round
        if current is not None and (current.cause == "session_expired" or not current.claims):
            if current.cause == "unknown":
                current.cause, current.cause_member = "session_expired", member
        else:
            yield from self._caused(row.time_ns, "session_expired", member, counts)
        yield self._event(row, "expired", member, f"session {self._members[member].session}".rstrip())
        self._remove(member)

    def _remove(self, member: str) -> None:
        """Remove a member and its partitions: their nodes end with its session."""
        self._by_session.pop(self._members.pop(member).session, None)
        if len(self._gone) < MAX_NAMES:
            self._gone.add(member)
        for partition in [each for each, claim in self._owners.items() if claim.member == member]:
            del self._owners[partition]

    # --- owners ------------------------------------------------------------------------------------------------------

    def claimed(self, row: RegistryRow, partition: Partition, counts: Counts) -> Iterator[Produced]:
        thread = row.value or ""
        member = thread.rpartition("-")[0]
        if partition not in self._owners and len(self._owners) >= MAX_NAMES:
            self.left_out += 1
            return
        if self._round is None:
            yield from self._open(row.time_ns, counts)
        assert self._round is not None
        consumer = self._members.get(member)
        if consumer is not None and not consumer.session:
            consumer.session = _whose(row)
            self._by_session[_whose(row)] = member
        claim = _Claim(row.time_ns, member, thread)
        self._owners[partition] = self._round.claims[partition] = claim
        yield self._event(row, "assigned", member, _spelled(partition))

    def lost(self, row: RegistryRow, partition: Partition) -> Iterator[Produced]:
        """Yield the event of a claim that failed because the partition has another owner."""
        member = (row.value or "").rpartition("-")[0]
        owner = self._owners.get(partition)
        if self._round is not None and len(self._round.lost) < MAX_NAMES:
            self._round.lost.add((member, partition))
        of = f" of {owner.member}" if owner is not None else ""
        yield self._event(row, "claim_lost", member, f"{_spelled(partition)}{of}")

    def revoked(self, row: RegistryRow, partition: Partition) -> Iterator[Produced]:
        claim = self._owners.pop(partition, None)
        if self._round is not None:
            self._round.claims.pop(partition, None)
            self._round.revoked_ns = self._round.revoked_ns or row.time_ns
        member = claim.member if claim is not None else self._by_session.get(_whose(row))
        if member is not None:
            yield self._event(row, "revoked", member, _spelled(partition))

    # --- rebalances --------------------------------------------------------------------------------------------------

    def woken(self, row: RegistryRow, cause: str, counts: Counts) -> Iterator[Produced]:
        """A watch on the members' folder or on a topic fired for a session: begin or extend a rebalance."""
        if self._round is None or _whose(row) in self._round.sessions or not self._is_fresh(row.time_ns):
            yield from self._open(row.time_ns, counts)
        assert self._round is not None
        if self._round.cause == "unknown":
            self._round.cause = cause
        self._round.sessions.add(_whose(row))
        member = self._by_session.get(_whose(row))
        if member is not None:
            self._round.woken.add(member)
            yield self._event(row, "woken", member, row.path)

    def _caused(self, time_ns: int, cause: str, member: str, counts: Counts) -> Iterator[Produced]:
        if self._round is None or self._round.cause != "unknown" or not self._is_fresh(time_ns):
            yield from self._open(time_ns, counts)
        assert self._round is not None
        self._round.cause, self._round.cause_member = cause, member

    def _is_fresh(self, time_ns: int) -> bool:
        """Return whether the rebalance has only just begun, so that a change at this time may be its cause."""
        assert self._round is not None
        return time_ns - self._round.started_ns <= TOGETHER_NS and not self._round.claims

    def _open(self, time_ns: int, counts: Counts) -> Iterator[Produced]:
        yield from self.close(counts)
        self._rounds += 1
        self._round = _Round(self._rounds, time_ns, frozenset(self._members), frozenset(self._owners))

    def close(self, counts: Counts) -> Iterator[Produced]:
        """Yield the rows of the rebalance in progress and end it: another one begins, or the rows end."""
        done, self._round = self._round, None
        if done is None:
            return
        computed_ = self._computed(counts)
        for partition, claim in sorted(done.claims.items()):
            agrees = None if computed_ is None else partition in computed_.get(claim.thread, ())
            who = self._group_id, done.number, claim.member, None
            yield Assignment(claim.time_ns, self._cluster, *who, *partition, STRATEGY, agrees, PROTOCOL)
        wanted = done.owned if computed_ is None else frozenset[Partition]().union(*computed_.values())
        last = max(done.claims.values(), key=lambda claim: claim.time_ns, default=None)
        is_whole = last is not None and wanted <= self._owners.keys()
        yield Rebalance(
            self._cluster,
            self._group_id,
            PROTOCOL,
            STRATEGY,
            done.number,
            done.cause,
            done.cause_member,
            _in_words(done, last),
            done.started_ns,
            done.listed_ns or done.started_ns,
            last.time_ns if last is not None and is_whole else None,
            len(done.before),
            len(self._members),
            len(done.woken & done.before & self._members.keys()),
            None if last is None else last.member,
            None,
            group_type=PROTOCOL,
        )

    def _computed(self, counts: Counts) -> Owned | None:
        """Return the partitions that each thread should own; None: a subscription or topic is not known."""
        threads: dict[str, list[str]] = {}
        for name, member in self._members.items():
            if not member.streams:
                return None
            for topic, streams in member.streams.items():
                if len(threads) + streams > MAX_NAMES:
                    return None
                for number in range(streams):
                    threads.setdefault(f"{name}-{number}", []).append(topic)
        return computed(STRATEGY, [Member(thread, None, topics) for thread, topics in threads.items()], counts)

    def _event(self, row: RegistryRow, event: str, member: str, reason: str | None) -> GroupEvent:
        return GroupEvent(
            row.time_ns,
            self._cluster,
            self._group_id,
            PROTOCOL,
            event,
            member,
            client_address=row.client_address,
            generation=self._round.number if self._round is not None else None,
            error=row.error,
            reason=reason,
            connection=row.connection,
            number=row.number,
            group_type=PROTOCOL,
        )


class ConsumerGroups:
    """The groups of one cluster. `feed` takes rows of `registry` in the order of time."""

    def __init__(self, cluster: str = "default") -> None:
        self.left_out = 0  # forgotten groups; members, sessions and topics beyond the bounds
        self._cluster = cluster
        self._groups: dict[tuple[str, str], _Group] = {}  # by (chroot, name), least recently seen first
        self._sessions: dict[str, set[tuple[tuple[str, str], str]]] = {}  # (group, member) by session
        self._counts: dict[str, dict[str, int]] = {}  # partitions by chroot and topic
        self._topics = 0

    def feed(self, row: RegistryRow) -> Iterator[Produced]:
        if row.op == "closeSession" and row.zxid:
            yield from self._closed(row)
        elif row.op == "connect" and row.error == _EXPIRED:
            for key, member in sorted(self._sessions.pop(_whose(row), ())):
                if key in self._groups:
                    yield from self._groups[key].expired(row, member, self._counts_of(key))
        elif row.kind in ("consumer_id", "consumer_owner"):
            found = _NODE.fullmatch(row.path or "")
            if found is not None:
                yield from self._node(row, (found[1], found[2]), found[3], found[4], found[5])
        elif row.kind == "topic":
            found = _TOPIC.fullmatch(row.path or "")
            if found is not None:
                yield from self._topic(row, found[1], found[2])

    def finish(self) -> Iterator[Produced]:
        """Yield the rows of rebalances in progress."""
        for key, group in self._groups.items():
            yield from group.close(self._counts_of(key))

    def _node(
        self, row: RegistryRow, key: tuple[str, str], folder: str, name: str | None, partition: str | None
    ) -> Iterator[Produced]:
        is_done = row.error is None and bool(row.zxid)
        counts = self._counts_of(key)
        if folder == "ids" and name is None:
            if row.op == "notification" and row.value == "NodeChildrenChanged":
                yield from (yield from self._group(key)).woken(row, "unknown", counts)
            elif row.op in ("getChildren", "getChildren2") and is_done:
                yield from (yield from self._group(key)).listed(row, counts)
        elif folder == "ids" and name is not None and partition is None:
            if row.op in _CREATES and is_done:
                self._belongs(_whose(row), key, name)
                yield from (yield from self._group(key)).joined(row, name, counts)
            elif row.op == "delete" and is_done:
                yield from (yield from self._group(key)).left(row, name, "its node was deleted", counts)
            elif row.op == "getData" and is_done:
                (yield from self._group(key)).described(name, row.value)
        elif folder == "owners" and name is not None and partition is not None:
            owned = name, int(partition)
            if row.op in _CREATES and is_done:
                self._belongs(_whose(row), key, (row.value or "").rpartition("-")[0])
                yield from (yield from self._group(key)).claimed(row, owned, counts)
            elif row.op in _CREATES and row.error == "NODEEXISTS":
                yield from (yield from self._group(key)).lost(row, owned)
            elif row.op == "delete" and is_done:
                yield from (yield from self._group(key)).revoked(row, owned)

    def _topic(self, row: RegistryRow, root: str, topic: str) -> Iterator[Produced]:
        if row.op == "notification":
            if row.value == "NodeDataChanged":
                for key, _ in sorted(self._sessions.get(_whose(row), ())):
                    if key in self._groups and key[0] == root:
                        yield from self._groups[key].woken(row, "metadata_changed", self._counts_of(key))
        elif row.error is None and row.zxid and row.value:
            count = _partitions(row.value)
            known = self._counts.setdefault(root, {}) if root in self._counts or len(self._counts) < MAX_GROUPS else {}
            if topic not in known and self._topics >= MAX_TOPICS:
                self.left_out += 1
            elif count:
                self._topics += topic not in known
                known[topic] = count

    def _closed(self, row: RegistryRow) -> Iterator[Produced]:
        for key, member in sorted(self._sessions.pop(_whose(row), ())):
            if key in self._groups:
                yield from self._groups[key].left(row, member, "closed its session", self._counts_of(key))

    def _belongs(self, session: str, key: tuple[str, str], member: str) -> None:
        if session in self._sessions or len(self._sessions) < MAX_SESSIONS:
            members = self._sessions.setdefault(session, set())
            if len(members) < MAX_NAMES:
                members.add((key, member))
                return
        self.left_out += 1

    def _counts_of(self, key: tuple[str, str]) -> Counts:
        return self._counts.get(key[0], {})

    def _group(self, key: tuple[str, str]) -> Generator[Produced, None, _Group]:
        """Return the group, as the generator's value; yield the rows of a group forgotten in its place."""
        group = self._groups.pop(key, None)
        if group is None:
            group = _Group(self._cluster, key[1])
            if len(self._groups) >= MAX_GROUPS:
                old, forgotten = next(iter(self._groups.items()))
                yield from forgotten.close(self._counts_of(old))
                del self._groups[old]
                self.left_out += 1 + forgotten.left_out
        self._groups[key] = group
        return group


def _in_words(done: _Round, last: _Claim | None) -> str:
    reasons = {
        "member_joined": f"{done.cause_member} registered",
        "member_left": f"{done.cause_member} left",
        "session_expired": f"the session of {done.cause_member} expired",
        "metadata_changed": "a topic's partitions changed",
    }
    text = f"{reasons.get(done.cause, 'a watch fired')}; {len(done.woken)} woken, {len(done.claims)} claimed"
    if done.lost:
        text += f", {len(done.lost)} races lost"
    if last is not None and done.revoked_ns:
        text += f"; stood still for {(last.time_ns - done.revoked_ns) / 1e9:.3f} s"
    return text


def _whose(row: RegistryRow) -> str:
    """Return the session id, or a name of the connection if the session's start was not seen."""
    return row.session if row.session is not None else f"of connection {row.connection}"


def _streams(value: str | None) -> dict[str, int]:
    """Return the number of threads by topic in the value of a consumer's node."""
    subscription = _json(value).get("subscription")
    if not isinstance(subscription, dict):
        return {}
    found = list(subscription.items())[:MAX_NAMES]
    return {topic: min(count, MAX_NAMES) for topic, count in found if isinstance(count, int) and count > 0}


def _partitions(value: str) -> int:
    """Return the partition count in the value of a topic's node; 0: it has none."""
    partitions = _json(value).get("partitions")
    return len(partitions) if isinstance(partitions, dict) else 0


def _json(value: str | None) -> dict[str, object]:
    try:
        found = json.loads(value or "")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _spelled(partition: Partition) -> str:
    return f"{partition[0]}-{partition[1]}"

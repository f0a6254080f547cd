"""The two offsets whose difference is lag: the end of each log, and each group's committed offset in it.

Duty: both offsets for each topic-partition, with their source and the time at which they were learned.

The end of a log comes from responses to Produce (base offset plus the records of the request), Fetch (high watermark)
and ListOffsets (latest, read_uncommitted); `log_end.py` decides when it rises and falls.

The committed offset of a group comes from OffsetCommit, for each partition that the broker accepted, and from
OffsetFetch, unless the group has committed since that request. Offsets of a TxnOffsetCommit take effect when an EndTxn
commits their transaction, by its transactional id, unless the group has committed other offsets in the meantime, or
group, offset or topic were deleted. If the EndTxn passes through another process, kproxy asks the coordinator for the
group's offsets. A commit of -1 leaves a group without an offset.

kproxy may ask brokers itself (`learn_ends`, `learn_offsets`): a leader's response also lowers an end that nothing has
raised since the request, and offsets that a coordinator does not list are removed. Traffic after the request is newer.

Both offsets end with a successful DeleteGroups, OffsetDelete or DeleteTopics, with a re-created topic (another topic
id), and with UNKNOWN_TOPIC_OR_PARTITION from the broker that answered for the log before; never because of their age.
Workers report `removed` to their parent, which passes it to the other workers (`ended`).

Bounds, per cluster: MAX_LOGS and MAX_COMMITTED, the oldest removed and counted in `evicted`; MAX_REMOVED removals,
MAX_SEEN groups, MAX_PENDING offsets of transactions, MAX_NAMES topic ids, and for each log MARKS and twice
marks.MAX_POINTS. Changed on the event loop's thread only. Times of events use the events' clock, timestamps of records
the wall clock. Refuses to know connections and the exposition.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.metrics.consumers.log_end import UNKNOWN, Log
from kproxy.metrics.counters.named import MAX_LABEL, MAX_NAMES, Topics
from kproxy.protocol.apis import (
    DELETE_GROUPS,
    DELETE_TOPICS,
    FETCH,
    LIST_OFFSETS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    PRODUCE,
    TXN_OFFSET_COMMIT,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy.wire.bodies import Partition, Sums
from kproxy.wire.events import Exchange

MAX_LOGS = 16 * 1024
MAX_COMMITTED = 64 * 1024
MAX_REMOVED = 16 * 1024
MAX_SEEN = 4096
MAX_LOST = 100  # groups whose offsets were deleted that kproxy still asks for: one request
MAX_FORMER = 4
MAX_PENDING = 16 * 1024  # offsets of open transactions

END, COMMITTED, POSITION, GROUP = KINDS = ("end", "committed", "position", "group")  # kinds counted in `evicted`

GONE = frozenset((UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID))

Key = tuple[str | UUID | None, int]  # a topic-partition, by its topic's name or id as on the wire
# A removal: ("group", group), ("topic", topic), ("partition", topic, number), ("offset", group, topic, number).
Removal = tuple[str | UUID | int | None, ...]


class Position(NamedTuple):
    """A consumer's position: the next offset, and when the record before it was written (ms since the Unix epoch)."""

    offset: int
    written_ms: int
    reported_ns: int  # time of its report; for an OffsetFetch the time of the request: a commit since then is newer
    source: int = FETCH  # the API key that it comes from
    written_by_ns: int = 0  # when the coordinator wrote the group's last commit that was seen as a request
    client: str = ""  # the client that committed it, if a request shows it
    former: tuple[str, ...] = ()  # the last MAX_FORMER other clients that committed there before

    def after(self, before: "Position") -> "Position":
        """Return this commit with the clients that committed before it, the latest last, the earliest dropped first."""
        client = self.client or before.client
        clients = dict.fromkeys((*before.former, before.client, *self.former))
        former = [each for each in clients if each not in ("", client)]
        return self._replace(client=client, former=tuple(former[-MAX_FORMER:]))


class Offsets:
    """The offsets of one cluster. evicted: numbers of entries removed at a bound, by one of KINDS."""

    def __init__(self, topics: Topics, evicted: dict[str, int] | None = None) -> None:
        self.logs: dict[Key, Log] = {}
        self.committed: dict[tuple[str, Key], Position] = {}  # the last one learned comes last
        self.learned = 0  # number of commits so far: at most the last (increase) entries of `committed` are new
        self.seen: dict[str, None] = {}  # groups whose offsets kproxy asks for, the last one seen last
        # Offsets of open transactions, each with the time when the coordinator wrote it.
        self._pending: dict[str, dict[tuple[str, Key], tuple[int, int]]] = {}  # by transactional id
        self._pending_offsets = 0
        self.removed: dict[Removal, int] = {}  # time of each; reports until then are ignored, from any process
        self.evicted: dict[str, int] = {} if evicted is None else evicted
        for kind in KINDS:
            self.evicted.setdefault(kind, 0)
        self._topics = topics
        self._groups: dict[Key, set[str]] = {}  # groups with a committed offset, by partition
        self._ids: dict[str, UUID] = {}  # newest id of each topic
        self._former: dict[UUID, None] = {}  # ids of deleted or re-created topics
        self._nameless: set[UUID] = (
            set()
        )  # ids in keys of `logs` and `committed`, as long as the topic's name is unknown

    # --- ends of logs ------------------------------------------------------------------------------------------------

    def learn(
        self,
        key: Key,
        partition: Partition,
        now_ns: int,
        unchanged_ns: int,
        epoch: int = UNKNOWN,
        broker: str | None = None,
        by_leader: bool = True,
    ) -> None:
        """Learn from a partition of a Fetch response; until `unchanged_ns` its fetch session reported no change."""
        named = self._named(key)
        if named is None:
            return
        log = self._log(named)
        log.end(partition.high_watermark, now_ns, unchanged_ns, epoch=epoch, broker=broker, by_leader=by_leader)
        if partition.batches and partition.max_timestamp > 0:
            log.read(partition.first_offset, partition.last_offset + 1, partition.max_timestamp, now_ns)

    def produced(self, exchange: Exchange, broker: str | None) -> None:
        """Learn the end of logs from a Produce: the leader returns the first offset of the appended records.

        Compressed message sets are skipped, because they do not show their number of records.
        """
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None or answered is None:
            return
        carried: Iterable[Sums | Partition] = asked.sums or asked.partitions
        counts = {key_of(each): each.records for each in carried if each.records > 0}
        now_ns = exchange.response_start
        for partition in answered.partitions:
            key = key_of(partition)
            if partition.error_code:
                if partition.error_code in GONE:
                    self.partition_gone(key, broker, now_ns)
                continue
            count = counts.get(key)
            if count is not None and partition.offset >= 0:
                self.appended(key, partition.offset, partition.offset + count, exchange.request_start, now_ns, broker)

    def appended(self, key: Key, first: int, end: int, asked_ns: int, answered_ns: int, broker: str | None) -> None:
        """Learn the end of a log from records that were appended: their offsets, from `first` to before `end`."""
        named = self._named(key)
        if named is None:
            return
        log = self._log(named)
        if not log.reported_ns:  # gives the age of these records a bound
            log.end(first, asked_ns, 0, source=PRODUCE, broker=broker)
        unchanged_ns = asked_ns if first == log.high_watermark else 0
        log.end(end, answered_ns, unchanged_ns, source=PRODUCE, broker=broker)

    def listed(self, exchange: Exchange, broker: str | None) -> None:
        """Learn the ends in a ListOffsets response, which only a leader returns."""
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None or answered is None or not asked.latest or asked.isolation_level or asked.replica_id >= 0:
            return
        latest = set(asked.latest)
        for partition in answered.partitions:
            if partition.error_code or partition.offset < 0 or (partition.topic, partition.partition) not in latest:
                continue
            named = self._named(key_of(partition))
            if named is not None:
                self._log(named).end(
                    partition.offset,
                    exchange.response_start,
                    0,
                    epoch=partition.leader_epoch,
                    source=LIST_OFFSETS,
                    broker=broker,
                )

    def _log(self, key: Key) -> Log:
        log = self.logs.get(key)
        if log is None:
            if len(self.logs) >= MAX_LOGS:
                del self.logs[next(iter(self.logs))]
                self.evicted[END] += 1
            log = self.logs[key] = Log()
            if self.removed:
                log.lowered_ns = removed_ns(self.removed, key)
        return log

    # --- committed offsets -------------------------------------------------------------------------------------------

    def position(self, key: Key, offset: int, now_ns: int, source: int = FETCH) -> Position:
        log = self.logs.get(self._named(key) or key)
        return Position(offset, log.written_ms(offset) if log is not None else UNKNOWN, now_ns, source)

    def committed_by(self, exchange: Exchange, client: str) -> None:
        """Learn the offsets of an OffsetCommit, for the partitions that the broker accepted."""
        now_ns = exchange.response_end
        for group, key, offset in _accepted(exchange):
            self._commit(group, key, offset, now_ns, OFFSET_COMMIT, now_ns, client)

    def committed_in_transaction(self, exchange: Exchange) -> None:
        """Keep the offsets of a TxnOffsetCommit until their transaction ends."""
        self.note_group(exchange.group_id)
        if exchange.transactional_id is None:
            return
        transaction = exchange.transactional_id[:MAX_LABEL]
        offsets = self._pending.pop(transaction, {})
        self._pending[transaction] = offsets  # ordered by the last commit
        for group, key, offset in _accepted(exchange):
            of = group[:MAX_LABEL], key
            self._pending_offsets += of not in offsets
            offsets[of] = offset, exchange.response_end
        while self._pending_offsets > MAX_PENDING or len(self._pending) > MAX_PENDING:
            dropped = len(self._pending.pop(next(iter(self._pending))))
            self._pending_offsets -= dropped
            self.evicted[COMMITTED] += dropped

    def transaction_ended(self, exchange: Exchange) -> None:
        """Commit or drop the offsets of a transaction: EndTxn ends it, InitProducerId aborts one left open."""
        if exchange.errors or exchange.transactional_id is None:
            return
        offsets = self._pending.pop(exchange.transactional_id[:MAX_LABEL], {})
        self._pending_offsets -= len(offsets)
        asked = exchange.request_body
        if asked is not None and asked.is_commit:
            for (group, key), (offset, written_ns) in offsets.items():
                named = self._named(key) or key
                known = self.committed.get((group, named))
                is_latest = known is None or known.written_by_ns <= written_ns  # a later write stays
                if is_latest and not self.is_removed(named, written_ns, group):
                    self._commit(group, key, offset, exchange.response_end, TXN_OFFSET_COMMIT, written_ns)

    def fetched_offsets(self, exchange: Exchange) -> None:
        """Learn a group's offsets from an OffsetFetch response; -1: the partition has none."""
        answered = exchange.response_body
        if answered is None:
            return
        asked_ns = exchange.request_start
        for partition in answered.partitions:
            group = exchange.group_id if partition.group_id is None else partition.group_id
            if group is None or partition.error_code or (named := self._named(key_of(partition))) is None:
                continue
            known = self.committed.get((group[:MAX_LABEL], named))
            if known is not None and known.reported_ns > asked_ns:
                continue  # the coordinator may have answered before this commit
            if partition.offset < 0 and known is None:
                continue
            if not self.is_removed(named, asked_ns, group[:MAX_LABEL]):
                self._commit(group, named, partition.offset, asked_ns, OFFSET_FETCH)

    def _commit(
        self, group: str, key: Key, offset: int, now_ns: int, source: int, written_ns: int = 0, client: str = ""
    ) -> None:
        """Set a group's committed offset; -1 removes it.

        written_ns: the time when the coordinator wrote it; client: the client that committed it, if a request shows it.
        """
        named = self._named(key)
        if named is None:
            return
        committed = self.committed
        name = (group[:MAX_LABEL], named)
        if offset < 0:
            self._remove(("offset", name[0], *named), now_ns)
            self._uncommit(name)
            return
        position = self.position(named, offset, now_ns, source)._replace(client=client)
        before = committed.pop(name, None)
        if before is not None:
            position = position.after(before)
            written_ns = max(before.written_by_ns, written_ns)
            if before.offset == position.offset:
                position = position._replace(written_ms=max(before.written_ms, position.written_ms))
        position = position._replace(written_by_ns=written_ns)
        if len(committed) >= MAX_COMMITTED:
            self._uncommit(next(iter(committed)))
            self.evicted[COMMITTED] += 1
        committed[name] = position
        self.learned += 1
        self._groups.setdefault(named, set()).add(name[0])

    def _uncommit(self, name: tuple[str, Key]) -> None:
        """Forget a group's committed offset in a partition."""
        self.committed.pop(name, None)
        group, key = name
        groups = self._groups.get(key)
        if groups is not None:
            groups.discard(group)
            if not groups:
                del self._groups[key]

    # --- kproxy's own requests to brokers ----------------------------------------------------------------------------

    def note_group(self, group: str | None) -> None:
        """Remember a group whose commits do not show all offsets, to ask its coordinator for them."""
        if not group:
            return
        self.seen.pop(group[:MAX_LABEL], None)
        if len(self.seen) >= MAX_SEEN:
            del self.seen[next(iter(self.seen))]  # its next commit or connection adds it again
            self.evicted[GROUP] += 1
        self.seen[group[:MAX_LABEL]] = None

    def groups(self) -> list[str]:
        """Return the groups with committed offsets, and MAX_LOST groups whose offsets were deleted: they may have more.

        Groups whose names were cut at MAX_LABEL are left out, because brokers do not know the cut names.
        """
        lost = (str(removal[1]) for removal in reversed(self.removed) if removal[0] in ("group", "offset"))
        named = {*self.seen, *(of[0] for of in self.committed), *islice(dict.fromkeys(lost), MAX_LOST)}
        return [group for group in named if len(group) < MAX_LABEL]

    def learn_ends(self, ends: Mapping[tuple[str, int], tuple[int, int]], asked_ns: int, now_ns: int) -> None:
        """Learn the (end, leader epoch) of each log from leaders' responses to a request of kproxy at `asked_ns`."""
        for key, (offset, epoch) in ends.items():
            if not self.is_removed(key, asked_ns):
                self._log(key).end(offset, now_ns, 0, epoch=epoch, source=LIST_OFFSETS, asked_ns=asked_ns)

    def committed_keys(self) -> dict[str, list[Key]]:
        """Return the partitions with a committed offset of each group."""
        keys: defaultdict[str, list[Key]] = defaultdict(list)
        for group, key in self.committed:
            keys[group].append(key)
        return keys

    def learn_offsets(
        self,
        group: str,
        offsets: Mapping[tuple[str, int], int],
        known: Iterable[Key],
        asked_ns: int,
        is_listed: Callable[[str], bool],
    ) -> None:
        """Learn all offsets of a group from its coordinator's response to a request of kproxy at `asked_ns`.

        known: partitions with a committed offset at that time. is_listed: whether kproxy may see a topic's offsets in
        the response; a missing offset of another topic may exist.
        """
        for key in known:
            topic = key[0]
            position = self.committed.get((group, key))
            if position is None or position.reported_ns > asked_ns or key in offsets:
                continue
            if isinstance(topic, str) and is_listed(topic):
                self._commit(group, key, -1, asked_ns, OFFSET_FETCH)
        for partition, offset in offsets.items():
            position = self.committed.get((group, partition))
            is_newer = position is not None and position.reported_ns > asked_ns
            if not is_newer and not self.is_removed(partition, asked_ns, group):
                self._commit(group, partition, offset, asked_ns, OFFSET_FETCH)

    # --- deletions ---------------------------------------------------------------------------------------------------

    def deleted(self, exchange: Exchange) -> None:
        """Remove the groups, offsets or topics that a request deleted."""
        answered = exchange.response_body
        assert answered is not None
        now_ns = exchange.response_start
        api_key = exchange.plan.api_key
        if api_key == DELETE_GROUPS:
            self._groups_gone({str(group)[:MAX_LABEL] for group, _ in answered.deleted}, now_ns)
        elif api_key == OFFSET_DELETE and exchange.group_id is not None:
            group = exchange.group_id[:MAX_LABEL]
            for topic, number in answered.deleted:
                self._remove(("offset", group, topic, number), now_ns)
                self._uncommit((group, (topic, number)))
        elif api_key == DELETE_TOPICS:
            topics = {named[0] for each in answered.deleted if (named := self._named(each)) is not None}
            for topic in topics:
                if isinstance(topic, str) and (identity := self._ids.pop(topic, None)) is not None:
                    self._retire(identity)
            self._topics_gone(topics, now_ns)

    def partition_gone(self, key: Key, broker: str | None, now_ns: int) -> None:
        """Remove a log that a broker does not know, if the same broker answered for it before.

        Other brokers may not know a new topic yet.
        """
        named = self._named(key)
        log = None if named is None else self.logs.get(named)
        if log is None or named is None or log.broker != broker:
            return
        for group in self._groups.get(named, ()):  # a starting broker may be wrong: ask the coordinators
            self.note_group(group)
        self._remove(("partition", *named), now_ns)
        self._forget_log(named)

    def name_topics(self, names: Mapping[UUID, str], now_ns: int) -> None:
        """Learn the names of topic ids; a name with a new id is a topic that was deleted and re-created."""
        ids = self._ids
        again = set()
        for identity, name in names.items():
            known = ids.get(name)
            if known == identity or identity in self._former:
                continue
            if known is not None:
                self._retire(known)
                again.add(name)
            elif len(ids) >= MAX_NAMES:
                del ids[next(iter(ids))]
            ids[name] = identity
        if again:
            self._topics_gone(again, now_ns)
        for identity in self._nameless & names.keys():
            self._nameless.discard(identity)
            self._rename(identity, names[identity])

    def _retire(self, identity: UUID) -> None:
        """Note that the topic with this id was deleted."""
        self._former[identity] = None
        if len(self._former) > MAX_NAMES:
            del self._former[next(iter(self._former))]

    def _groups_gone(self, groups: Collection[str], now_ns: int) -> None:
        for group in groups:
            self._remove(("group", group), now_ns)
        for name in [name for name in self.committed if name[0] in groups]:
            self._uncommit(name)

    def _topics_gone(self, topics: Collection[str | UUID | None], now_ns: int) -> None:
        for topic in topics:
            self._remove(("topic", topic), now_ns)
        for key in [key for key in {*self.logs, *self._groups} if key[0] in topics]:
            self._forget_log(key)

    def _forget_log(self, key: Key) -> None:
        """Forget a log and all committed offsets in it."""
        self.logs.pop(key, None)
        for group in tuple(self._groups.get(key, ())):
            self._uncommit((group, key))

    def _remove(self, removal: Removal, now_ns: int) -> None:
        self.removed.pop(removal, None)
        if len(self.removed) >= MAX_REMOVED:
            del self.removed[next(iter(self.removed))]
        self.removed[removal] = now_ns

    def ended(self, removed: Mapping[Removal, int], lowered: Mapping[Key, tuple[int, int, int]]) -> None:
        """Apply removals and lower ends of logs (as for `Log.lower`) that other processes learned.

        Without them, responses from a new, shorter log would be ignored here: an end only rises.
        """
        topics = {removal[1] for removal in removed if removal[0] == "topic"}
        groups = {removal[1] for removal in removed if removal[0] == "group"}
        keys: list[Any] = [removal[1:] for removal in removed if removal[0] == "partition"]
        names: list[Any] = [(removal[1], removal[2:]) for removal in removed if removal[0] == "offset"]
        if topics:
            keys += [key for key in {*self.logs, *self._groups} if key[0] in topics]
            for topic in topics:
                if ("topic", topic) not in self.removed:  # forget its former id, so that the new one ends nothing again
                    self._ids.pop(topic, None)  # type: ignore[arg-type]
        if groups:
            names += [name for name in self.committed if name[0] in groups]
        for key in keys:
            log = self.logs.get(key)
            if log is not None and has_ended(removed, key, log.raised_ns):
                del self.logs[key]
            names += [(group, key) for group in self._groups.get(key, ())]
        for name in names:
            position = self.committed.get(name)
            if position is not None and has_ended(removed, name[1], position.reported_ns, name[0]):
                self._uncommit(name)
        for key, (offset, at_ns, epoch) in lowered.items():
            if (log := self.logs.get(key)) is not None:
                log.lower(offset, at_ns, epoch)

    def is_removed(self, key: Key, at_ns: int, group: str | None = None) -> bool:
        """Return whether a partition, or a group's offset in it, was removed since a report at `at_ns`."""
        return has_ended(self.removed, key, at_ns, group)

    def _named(self, key: Key) -> Key | None:
        """Return the key with the topic's name, or with its id as long as no name is known; None: a deleted topic."""
        topic, partition = key
        if not isinstance(topic, UUID):
            return key
        if topic in self._former:
            return None
        name = self._topics.names.get(topic)
        if name is not None:
            return name, partition
        if len(self._nameless) < MAX_NAMES:
            self._nameless.add(topic)
        return key

    def _rename(self, identity: UUID, name: str) -> None:
        """Replace a topic's id in all keys by its name, which was just learned."""
        self.learned += len(self.committed)
        for key in [key for key in {*self.logs, *self._groups} if key[0] == identity]:
            named = name, key[1]
            log = self.logs.pop(key, None)
            known = self.logs.get(named)
            if log is not None and (known is None or known.high_watermark < log.high_watermark):
                self.logs[named] = log
            for group in tuple(self._groups.get(key, ())):
                position = self.committed.get((group, key))
                self._uncommit((group, key))
                before = self.committed.get((group, named))
                if position is not None and (before is None or before.reported_ns < position.reported_ns):
                    self.committed[group, named] = position
                    self._groups.setdefault(named, set()).add(group)
        self.committed = dict(sorted(self.committed.items(), key=lambda item: item[1].reported_ns))

    def is_stale(self, key: Key, position: Position) -> bool:
        """Return whether the partition of a client's position was deleted since."""
        topic, number = key
        if isinstance(topic, UUID):
            if topic in self._former:
                return True
            topic = self._topics.names.get(topic, topic)
        return self.is_removed((topic, number), position.reported_ns)


def removed_ns(removed: Mapping[Removal, int], key: Key) -> int:
    """Return the time when a partition's log was last removed; 0: never."""
    topic, number = key
    return max(removed.get(("topic", topic), 0), removed.get(("partition", topic, number), 0))


def has_ended(removed: Mapping[Removal, int], key: Key, at_ns: int, group: str | None = None) -> bool:
    """Return whether a partition, or a group's offset in it, was removed since a report at `at_ns`."""
    if not removed:
        return False
    topic, number = key
    ends_ns = removed_ns(removed, key)
    if group is not None:
        of_group = max(removed.get(("group", group), 0), removed.get(("offset", group, topic, number), 0))
        ends_ns = max(ends_ns, of_group)
    return at_ns <= ends_ns


def _accepted(exchange: Exchange) -> Iterator[tuple[str, Key, int]]:
    """Yield (group, partition, offset) of an OffsetCommit or TxnOffsetCommit, for the accepted partitions."""
    asked, answered = exchange.request_body, exchange.response_body
    if asked is None or (exchange.errors and answered is None):
        return
    refused: set[Key] = set()
    if exchange.errors and answered is not None:
        refused = {key_of(partition) for partition in answered.partitions if partition.error_code}
    for partition in asked.partitions:
        key = key_of(partition)
        if partition.group_id is not None and key not in refused:
            yield partition.group_id, key, partition.offset


def key_of(partition: Partition | Sums) -> Key:
    topic = partition.topic
    if topic and len(topic) > MAX_LABEL:  # not a valid name: those have at most 249 characters
        topic = topic[:MAX_LABEL]
    return topic or partition.topic_id, partition.partition

"""How far consumers are behind the ends of logs: clients by what they fetch, groups by what they commit.

Duty: two offsets for each topic-partition, both with their source and the time at which it was read, and the lag as
their difference. The lag is never stored: a scrape derives it, so the lag of a group whose members have stopped grows
with the log.

The end of a log comes from answers to Produce (base offset plus the records of the request), Fetch (high watermark) and
ListOffsets (latest, read_uncommitted). It only rises, whoever answers: a follower (KIP-392) has a lower high watermark
than the leader. Only an answer of the leader with a newer leader epoch lowers it, since the log was truncated.

The committed offset of a group comes from OffsetCommit, for each partition that the broker accepted, and from
OffsetFetch. Both offsets end with DeleteGroups, OffsetDelete and DeleteTopics that were answered without an error, with
a topic that was created again (another topic id), and with UNKNOWN_TOPIC_OR_PARTITION from the broker that answered for
the log before. Offsets that a transaction commits are not read: its outcome is known later, and elsewhere.

The position of a client is the offset that it fetches next. A fetch session (KIP-227) leaves out what has not changed,
so each connection remembers its own positions; those of partitions that it no longer asks for too, as of paused ones.
Requests of brokers (replica id) have no position: they are replication.

Unknown is not zero. A committed offset without an end of its log is counted as unknown, and so is one at an end that
no answer has confirmed for UNCONFIRMED_NS: records may have been written where kproxy does not see them. The lag of the
group is the sum over its other partitions.

Lag in seconds is the age of the first record that a consumer has not got. That record's own timestamp is known where a
Fetch answer had it alone. Otherwise the age is an upper bound, the lower of two: the age of the record before it, and
the time since the log was last known to end at or before it. So a consumer at the end of a topic with a record an hour
does not jump to 3600 seconds when the record comes. Both reach back a day (`marks.py`): a consumer that prefetches
commits what it fetched minutes or hours ago.

Bounded by MAX_POSITIONS per connection, MAX_ALL_POSITIONS, MAX_LOGS and MAX_COMMITTED per cluster: the oldest go, which
is counted in `evicted`. Also by MAX_REMOVED removals and MAX_NAMES topic ids, MARKS and twice marks.MAX_POINTS of each
log, and MAX_SERIES lags of each kind that are shown. Changed on the thread of the event loop only; a scrape copies
first. Events are compared with the clock of the events, records' timestamps with the wall clock.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from heapq import nlargest
from typing import NamedTuple
from uuid import UUID

from kproxy.metrics.marks import Marks
from kproxy.metrics.named import MAX_LABEL, MAX_NAMES, OTHER, Topics, shown
from kproxy.wire.bodies import Partition, Sums
from kproxy.wire.events import ANSWERED, Event, Exchange
from kproxy.wire.interest import (
    DELETE_GROUPS,
    DELETE_TOPICS,
    FETCH,
    LIST_OFFSETS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    PRODUCE,
)

MAX_POSITIONS = 16 * 1024
MAX_ALL_POSITIONS = 512 * 1024  # of all connections to a cluster: some 100 MiB
MAX_LOGS = 16 * 1024
MAX_COMMITTED = 64 * 1024
MAX_REMOVED = 16 * 1024
MAX_SERIES = 500
MARKS = 16  # of a log: stretches whose age is known (a consumer commits what it has just fetched), and earlier ends
UNCONFIRMED_NS = 60 * 10**9
_MAX_WRITTEN_MS = (2**63 - 1) // 10**6  # producers write any int64
UNKNOWN = -1  # a time that no batch contained; a leader epoch that no answer named

END, COMMITTED, POSITION = KINDS = ("end", "committed", "position")  # what falls out of the bounds

_UNKNOWN_TOPIC_OR_PARTITION = 3
_UNKNOWN_TOPIC_ID = 100
_GONE = frozenset((_UNKNOWN_TOPIC_OR_PARTITION, _UNKNOWN_TOPIC_ID))

Key = tuple[str | UUID | None, int]  # of a topic-partition, as the wire calls it
Consumer = tuple[str, str]  # a client or a group, and the topic
# What was removed: ("group", group), ("topic", topic), ("partition", topic, number), ("offset", group, topic, number).
Removal = tuple[str | UUID | int | None, ...]


class Position(NamedTuple):
    """Where a consumer is: the next offset, and when the record before it was written, in milliseconds."""

    offset: int
    written_ms: int
    reported_ns: int  # when that was learned
    source: int = FETCH  # from which API


class Lag(NamedTuple):
    """Of a consumer in a topic: records over all partitions, and the most seconds; None: nothing is known of it."""

    records: int | None  # of the partitions whose lag is known; None: of none
    seconds: float | None
    unknown: int = 0  # partitions with a committed offset whose lag is not known


class Log:
    """What is known of a topic-partition's end.

    `high_watermark` is the end, of `source` (an API key), since `raised_ns`, and confirmed by an answer at
    `reported_ns`. `broker` is the label of the broker that last answered as leader, `epoch` its leader epoch.
    """

    __slots__ = (
        *("broker", "earlier_ends", "ends", "epoch", "high_watermark", "marks", "raised_ns", "reported_ns"),
        *("source", "written"),
    )

    def __init__(self) -> None:
        self.high_watermark = 0
        self.source = UNKNOWN
        self.raised_ns = 0
        self.reported_ns = 0  # 0: the end is not known
        self.epoch = UNKNOWN
        self.broker: str | None = None
        self.marks: deque[tuple[int, int, int]] = deque(maxlen=MARKS)  # first offset, the one after the last, written
        # Earlier ends, and when each was the end for the last time: the last ones, and sparse ones of a day.
        self.ends: deque[tuple[int, int]] = deque(maxlen=MARKS)
        self.earlier_ends = Marks()
        self.written = Marks()  # records fetched so far, sparse, by their timestamps

    def end(
        self,
        offset: int,
        now_ns: int,
        unchanged_ns: int,
        *,
        epoch: int = UNKNOWN,
        source: int = FETCH,
        broker: str | None = None,
        by_leader: bool = True,
    ) -> None:
        """An answer says that the log ends at `offset` now; until `unchanged_ns` it ended where it did.

        A lower offset changes nothing, unless the leader says it in a newer epoch than before.
        """
        if offset < 0:
            return
        is_newer = by_leader and epoch > self.epoch
        is_truncated = offset < self.high_watermark and is_newer and self.epoch != UNKNOWN
        if is_newer:
            self.epoch = epoch
        if by_leader and broker is not None:
            self.broker = broker
        if is_truncated:
            self.ends.clear()
            self.earlier_ends.clear()
            self.written.clear()
        elif offset < self.high_watermark:
            return
        elif offset > self.high_watermark and self.reported_ns:
            last_ns = max(self.reported_ns, unchanged_ns)
            self.ends.append((self.high_watermark, last_ns))
            self.earlier_ends.add(self.high_watermark, last_ns, now_ns)
        if offset != self.high_watermark or not self.reported_ns:
            self.raised_ns = now_ns
            self.source = source
        self.high_watermark = offset
        self.reported_ns = now_ns

    def read(self, first: int, following: int, written_ms: int, now_ns: int) -> None:
        """Records up to `following` were fetched, and the newest of them was written then."""
        self.marks.append((first, following, written_ms))
        if written_ms <= _MAX_WRITTEN_MS:
            self.written.add(following, min(written_ms * 10**6, now_ns), now_ns)  # a later time would hide all others

    def age_s(self, offset: int, written_ms: int, now_ns: int, wall_ns: int) -> float | None:
        """The age of the record at an offset, or its upper bound; `written_ms` is that of the record before it.

        Called by a scrape, while the loop's thread goes on.
        """
        for first, following, alone_ms in reversed(tuple(self.marks)):
            if first == offset and following == offset + 1:
                return max(0.0, wall_ns / 1e9 - alone_ms / 1e3)
        bounds = [wall_ns / 1e9 - written_ms / 1e3] if written_ms > 0 else []
        bounds += [(now_ns - end_ns) / 1e9 for end, end_ns in tuple(self.ends) if end <= offset]
        if (earlier_ns := self.earlier_ends.latest_ns(offset)) is not None:
            bounds.append((now_ns - earlier_ns) / 1e9)
        if (written_ns := self.written.latest_ns(offset)) is not None:
            bounds.append((wall_ns - written_ns) / 1e9)
        return max(0.0, min(bounds)) if bounds else None

    def written_ms(self, offset: int) -> int:
        """When the record before an offset was written, if that is known."""
        for first, following, written_ms in reversed(self.marks):
            if first < offset <= following:
                return written_ms
        written_ns = self.written.latest_ns(offset)
        return UNKNOWN if written_ns is None else written_ns // 10**6


class Fetching:
    """What one connection fetches. `broker`: the label of the broker at its other end."""

    def __init__(self, lags: "Lags", broker: str | None = None) -> None:
        self.broker = broker
        self.client_id = ""
        self.asked_ns = 0
        self.positions: dict[Key, Position] = {}
        self.left: dict[Key, Position] = {}  # not asked for any more: paused, enough of it is buffered, or another's
        self._lags = lags
        self._counted = 0  # of `positions` and `left`, in `lags.positions`

    def events(self, events: list[Event]) -> None:
        """Learn from these events; nothing of them is kept."""
        lags = self._lags
        for event in events:
            if event.__class__ is Exchange and event.outcome is ANSWERED:
                answered = event.response_body
                if answered is not None and answered.names:
                    lags.name_topics(answered.names, event.response_start)
                key = event.plan.api_key
                if key == FETCH:
                    self._fetched(event)
                elif key == PRODUCE:
                    lags.produced(event, self.broker)
                elif key == LIST_OFFSETS:
                    lags.listed(event, self.broker)
                elif key == OFFSET_COMMIT:
                    lags.committed_by(event)
                elif key == OFFSET_FETCH:
                    lags.fetched_offsets(event)
                elif answered is not None and answered.deleted:
                    lags.deleted(event)

    def closed(self) -> None:
        self._lags.fetching.discard(self)
        self._lags.positions -= self._counted
        self._counted = 0

    def _fetched(self, exchange: Exchange) -> None:
        lags = self._lags
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None or answered is None or (exchange.error_code and not answered.partitions):
            return
        now_ns = exchange.response_start
        by_leader = not asked.has_rack
        epochs = {_key(partition): partition.leader_epoch for partition in asked.partitions if by_leader}
        if asked.replica_id >= 0:
            for partition in answered.partitions:
                if not partition.error_code:
                    key = _key(partition)
                    lags.learn(key, partition, now_ns, 0, epochs.get(key, UNKNOWN), self.broker, by_leader)
            return
        lags.fetching.add(self)
        before_ns = self.asked_ns  # an answer of this session that left a partition out said that it is as it was
        self.client_id = (exchange.client_id or "")[:MAX_LABEL]
        self.asked_ns = now_ns
        positions = self.positions
        wanted = {_key(partition): partition.offset for partition in asked.partitions}
        if asked.forgotten is not None:
            for key in asked.forgotten:
                self._leave(key, now_ns)
        elif positions.keys() != wanted.keys():
            for key in positions.keys() - wanted.keys():
                self._leave(key, now_ns)
        for key, offset in wanted.items():
            known = positions.get(key)
            if known is not None and known.offset != offset:
                positions[key] = lags.position(key, offset, now_ns)
        room = min(MAX_POSITIONS, len(positions) + max(0, MAX_ALL_POSITIONS - lags.positions))
        for partition in answered.partitions:
            key = _key(partition)
            if partition.error_code:
                positions.pop(key, None)
                if partition.error_code in _GONE:
                    lags.partition_gone(key, self.broker, now_ns)
                continue
            unchanged_ns = before_ns if key in positions else 0
            lags.learn(key, partition, now_ns, unchanged_ns, epochs.get(key, UNKNOWN), self.broker, by_leader)
            if partition.batches:
                position = Position(partition.last_offset + 1, partition.max_timestamp, now_ns)
            elif key in wanted and key not in positions:
                position = lags.position(key, wanted[key], now_ns)
            else:
                continue
            if key in positions or len(positions) < room:
                positions[key] = position
                self.left.pop(key, None)
            else:
                lags.evicted[POSITION] += 1
        held = len(positions) + len(self.left)
        lags.positions += held - self._counted
        self._counted = held

    def _leave(self, key: Key, now_ns: int) -> None:
        position = self.positions.pop(key, None)
        if position is None:
            return
        if len(self.left) >= MAX_POSITIONS or self._lags.positions > MAX_ALL_POSITIONS:
            self._lags.evicted[POSITION] += 1
            if not self.left:
                return
            del self.left[next(iter(self.left))]
        self.left[key] = position._replace(reported_ns=now_ns)


class Lags:
    """The consumers of one cluster. `evicted`: counts what falls out of the bounds, by one of KINDS."""

    def __init__(self, topics: Topics, evicted: dict[str, int] | None = None) -> None:
        self.logs: dict[Key, Log] = {}
        self.fetching: set[Fetching] = set()
        self.committed: dict[tuple[str, Key], Position] = {}  # the last one reported comes last
        self.removed: dict[Removal, int] = {}  # when; what was reported until then does not count, whoever reports it
        self.positions = 0  # of all connections together
        self.evicted: dict[str, int] = {} if evicted is None else evicted
        for kind in KINDS:
            self.evicted.setdefault(kind, 0)
        self._topics = topics
        self._groups: dict[Key, set[str]] = {}  # that have committed an offset, by partition
        self._ids: dict[str, UUID] = {}  # of topics, the newest
        self._former: dict[UUID, None] = {}  # ids of topics that were created again
        self._nameless: set[UUID] = set()  # ids that stand for a topic in the keys of `logs` and `committed`

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
        """What a Fetch answer says of a log; until `unchanged_ns` its session knew of no change."""
        named = self._named(key)
        if named is None:
            return
        log = self._log(named)
        log.end(partition.high_watermark, now_ns, unchanged_ns, epoch=epoch, broker=broker, by_leader=by_leader)
        if partition.batches and partition.max_timestamp > 0:
            log.read(partition.first_offset, partition.last_offset + 1, partition.max_timestamp, now_ns)

    def produced(self, exchange: Exchange, broker: str | None) -> None:
        """The records of a Produce stand at the end of the log: its leader answers their first offset.

        Nothing is learned of compressed message sets, which hide their count.
        """
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None or answered is None:
            return
        carried: Iterable[Sums | Partition] = asked.sums or asked.partitions
        counts = {_key(each): each.records for each in carried if each.records > 0}
        now_ns = exchange.response_start
        for partition in answered.partitions:
            key = _key(partition)
            if partition.error_code:
                if partition.error_code in _GONE:
                    self.partition_gone(key, broker, now_ns)
                continue
            count = counts.get(key)
            if count is None or partition.offset < 0 or (named := self._named(key)) is None:
                continue
            log = self._log(named)
            if not log.reported_ns:  # so the age of these records has a bound
                log.end(partition.offset, exchange.request_start, 0, source=PRODUCE, broker=broker)
            unchanged_ns = exchange.request_start if partition.offset == log.high_watermark else 0
            log.end(partition.offset + count, now_ns, unchanged_ns, source=PRODUCE, broker=broker)

    def listed(self, exchange: Exchange, broker: str | None) -> None:
        """The ends that a ListOffsets asked for: only the leader answers it."""
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None or answered is None or not asked.latest or asked.isolation_level or asked.replica_id >= 0:
            return
        latest = set(asked.latest)
        for partition in answered.partitions:
            if partition.error_code or partition.offset < 0 or (partition.topic, partition.partition) not in latest:
                continue
            named = self._named(_key(partition))
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
        return log

    # --- committed offsets -------------------------------------------------------------------------------------------

    def position(self, key: Key, offset: int, now_ns: int, source: int = FETCH) -> Position:
        log = self.logs.get(self._named(key) or key)
        return Position(offset, log.written_ms(offset) if log is not None else UNKNOWN, now_ns, source)

    def committed_by(self, exchange: Exchange) -> None:
        """A group's offsets, of the partitions that the broker accepted."""
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None:
            return
        refused: set[Key] = set()
        if exchange.errors:
            if answered is None:
                return
            refused = {_key(partition) for partition in answered.partitions if partition.error_code}
        for partition in asked.partitions:
            key = _key(partition)
            if partition.group_id is not None and partition.offset >= 0 and key not in refused:
                self._commit(partition.group_id, key, partition.offset, exchange.response_start, OFFSET_COMMIT)

    def fetched_offsets(self, exchange: Exchange) -> None:
        """A group's offsets, as its coordinator has them; a partition without one has -1."""
        answered = exchange.response_body
        if answered is None:
            return
        now_ns = exchange.response_start
        for partition in answered.partitions:
            group = exchange.group_id if partition.group_id is None else partition.group_id
            if group is None or partition.error_code:
                continue
            key = _key(partition)
            if partition.offset >= 0:
                self._commit(group, key, partition.offset, now_ns, OFFSET_FETCH)
            elif (named := self._named(key)) is not None and (group[:MAX_LABEL], named) in self.committed:
                self._remove(("offset", group[:MAX_LABEL], *named), now_ns)
                self._uncommit((group[:MAX_LABEL], named))

    def _commit(self, group: str, key: Key, offset: int, now_ns: int, source: int) -> None:
        named = self._named(key)
        if named is None:
            return
        committed = self.committed
        name = (group[:MAX_LABEL], named)
        position = self.position(named, offset, now_ns, source)
        before = committed.pop(name, None)
        if before is not None and before.offset == position.offset:
            position = position._replace(written_ms=max(before.written_ms, position.written_ms))
        if len(committed) >= MAX_COMMITTED:
            self._uncommit(next(iter(committed)))
            self.evicted[COMMITTED] += 1
        committed[name] = position
        self._groups.setdefault(named, set()).add(name[0])

    def _uncommit(self, name: tuple[str, Key]) -> None:
        """Forget what a group committed in a partition."""
        self.committed.pop(name, None)
        group, key = name
        groups = self._groups.get(key)
        if groups is not None:
            groups.discard(group)
            if not groups:
                del self._groups[key]

    # --- what ends both ----------------------------------------------------------------------------------------------

    def deleted(self, exchange: Exchange) -> None:
        """Groups, offsets of groups, or topics were deleted."""
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
        """A broker does not know a partition: the log is gone if the same broker answered for it before.

        Others may not have heard of a new topic.
        """
        named = self._named(key)
        log = None if named is None else self.logs.get(named)
        if log is None or named is None or (log.broker is not None and log.broker != broker):
            return
        self._remove(("partition", *named), now_ns)
        self._forget_log(named)

    def name_topics(self, names: Mapping[UUID, str], now_ns: int) -> None:
        """Learn the names of topic ids; a name with a new id is a topic that was deleted and created again."""
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
        """A topic with this id is no more."""
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
        """Forget a log, and what groups committed in it."""
        self.logs.pop(key, None)
        for group in tuple(self._groups.get(key, ())):
            self._uncommit((group, key))

    def _remove(self, removal: Removal, now_ns: int) -> None:
        self.removed.pop(removal, None)
        if len(self.removed) >= MAX_REMOVED:
            del self.removed[next(iter(self.removed))]
        self.removed[removal] = now_ns

    def is_removed(self, key: Key, at_ns: int, group: str | None = None) -> bool:
        """Whether what was reported then of a partition, or of a group in it, has ended since."""
        return has_ended(self.removed, key, at_ns, group)

    def _named(self, key: Key) -> Key | None:
        """Some call a topic by its name and some by its id: by its name, once that is known. None: it is deleted."""
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
        """The name of a topic has become known whose id was used so far."""
        for key in [key for key in {*self.logs, *self._groups} if key[0] == identity]:
            named = name, key[1]
            log = self.logs.pop(key, None)
            if log is not None and named not in self.logs:
                self.logs[named] = log
            for group in tuple(self._groups.get(key, ())):
                position = self.committed.get((group, key))
                self._uncommit((group, key))
                if position is not None and (group, named) not in self.committed:
                    self.committed[group, named] = position
                    self._groups.setdefault(named, set()).add(group)
        self.committed = dict(sorted(self.committed.items(), key=lambda item: item[1].reported_ns))

    # --- a scrape ----------------------------------------------------------------------------------------------------

    def shown(self, now_ns: int, wall_ns: int) -> Iterator[tuple[str, list[tuple[str, str, Lag]]]]:
        """By "client_id" and by "group": (its name, the topic, its lag), those with the most records by name.

        `now_ns` is by the clock of the events, `wall_ns` the time of day, which records' timestamps are compared with.
        """
        labels = _Labels(self._topics)
        logs = {(labels[topic], number): log for (topic, number), log in self.logs.copy().items() if log.reported_ns}
        fetching = self.fetching.copy()
        left = (
            (each.client_id, key, at)
            for each in fetching
            for key, at in each.left.copy().items()
            if not self._is_stale(key, at)
        )
        live = [
            (each, key, at)
            for each in fetching
            for key, at in each.positions.copy().items()
            if not self._is_stale(key, at)
        ]
        fetched = _furthest(((each.client_id, key, at) for each, key, at in live), labels)
        confirmed = {  # by each answer that leaves the end out
            (labels[key[0]], key[1]) for each, key, _ in live if each.asked_ns + UNCONFIRMED_NS > now_ns
        }
        groups = {(name, labels[topic], number): at for (name, (topic, number)), at in self.committed.copy().items()}
        for by, places in (
            ("client_id", _furthest(left, labels) | fetched),
            ("group", groups),
        ):
            behind: dict[Consumer, Lag] = {}
            for (name, topic, number), position in places.items():
                log = logs.get((topic, number))
                is_confirmed = (topic, number) in confirmed
                lag = _UNKNOWN_LAG if log is None else _lag(log, position, is_confirmed, now_ns, wall_ns)
                if lag is _UNKNOWN_LAG and by != "group":
                    continue
                of = shown(name), topic
                before = behind.get(of)
                behind[of] = lag if before is None else _plus(before, lag)
            yield by, [(*of, lag) for of, lag in _largest(behind)]

    def _is_stale(self, key: Key, position: Position) -> bool:
        """Whether the partition of a client's position was deleted since."""
        topic, number = key
        if isinstance(topic, UUID):
            if topic in self._former:
                return True
            topic = self._topics.names.get(topic, topic)
        return self.is_removed((topic, number), position.reported_ns)


_UNKNOWN_LAG = Lag(None, None, 1)


def _lag(log: Log, position: Position, is_confirmed: bool, now_ns: int, wall_ns: int) -> Lag:
    """The lag in one partition; at an end that nobody confirms it is not known."""
    records = log.high_watermark - position.offset
    if records > 0:
        return Lag(records, log.age_s(position.offset, position.written_ms, now_ns, wall_ns))
    if is_confirmed or log.reported_ns + UNCONFIRMED_NS > now_ns:
        return Lag(0, None)
    return _UNKNOWN_LAG


def has_ended(removed: Mapping[Removal, int], key: Key, at_ns: int, group: str | None = None) -> bool:
    """Whether what was reported at `at_ns` of a partition, or of a group in it, was removed since."""
    if not removed:
        return False
    topic, number = key
    ends_ns = max(removed.get(("topic", topic), 0), removed.get(("partition", topic, number), 0))
    if group is not None:
        of_group = max(removed.get(("group", group), 0), removed.get(("offset", group, topic, number), 0))
        ends_ns = max(ends_ns, of_group)
    return at_ns <= ends_ns


class _Labels(dict[str | UUID | None, str]):
    """The names of topics, each looked up once."""

    def __init__(self, topics: Topics) -> None:
        super().__init__()
        self._topics = topics

    def __missing__(self, topic: str | UUID | None) -> str:
        label = self[topic] = self._topics.label(topic)
        return label


def _key(partition: Partition | Sums) -> Key:
    topic = partition.topic
    if topic and len(topic) > MAX_LABEL:  # invented: a topic's name has at most 249 characters
        topic = topic[:MAX_LABEL]
    return topic or partition.topic_id, partition.partition


def _furthest(positions: Iterable[tuple[str, Key, Position]], labels: _Labels) -> dict[tuple[str, str, int], Position]:
    """By name, topic and partition; of several consumers of one name the one that is furthest behind."""
    furthest: dict[tuple[str, str, int], Position] = {}
    for name, (topic, number), position in positions:
        of = name, labels[topic], number
        before = furthest.get(of)
        if before is None or position.offset < before.offset:
            furthest[of] = position
    return furthest


def _plus(one: Lag, other: Lag) -> Lag:
    known = [lag for lag in (one, other) if lag.records is not None]
    ages = [lag.seconds for lag in known if lag.seconds is not None]
    records = sum(lag.records or 0 for lag in known) if known else None
    return Lag(records, max(ages, default=None), one.unknown + other.unknown)


def _largest(behind: dict[Consumer, Lag]) -> Iterator[tuple[Consumer, Lag]]:
    """Those with the most records, and the rest as one; an age of 0 where there is no lag."""
    largest = nlargest(MAX_SERIES, behind.items(), key=_rank)
    if len(largest) < len(behind):
        others = reduce(_plus, (behind[of] for of in behind.keys() - dict(largest).keys()))
        largest.append(((OTHER, OTHER), others))
    for of, lag in largest:
        yield of, lag._replace(seconds=0.0) if lag.records == 0 else lag


def _rank(item: tuple[Consumer, Lag]) -> int:
    return -1 if item[1].records is None else item[1].records

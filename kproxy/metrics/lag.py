"""How far consumers are behind the ends of logs: clients by what they fetch, groups by what they commit.

Duty: from the bodies of Fetch and OffsetCommit, for each topic-partition the high watermark that brokers last reported,
and the next offset that each client wants and that each group has committed. A fetch session (KIP-227) leaves out what
has not changed, so each connection remembers what is in its own. The difference is taken at a scrape: the lag of a
consumer that stands still grows with what others learn of the log. If nobody learns of it any more, that a group is at
its end would be a guess, and is not shown.

Lag in seconds is the age of the first record that a consumer has not got. That record's own timestamp is known where a
Fetch answer had it alone. Otherwise the age is an upper bound, the lower of two: the age of the record before it, and
the time since the log was last known to end at or before it. So a consumer at the end of a topic with a record an hour
does not jump to 3600 seconds when the record comes. Both reach back a day (`marks.py`): a consumer that prefetches
commits what it fetched minutes or hours ago.

What was asked for and not answered well, and a commit of which any part was refused, counts for nothing; nor do offsets
that a transaction commits, since whether it does is known later, and elsewhere. A partition that a client has not asked
for AWAY_NS is not its own any more: after a rebalance it may never say so.

Bounded by MAX_POSITIONS per connection, MAX_ALL_POSITIONS, MAX_LOGS and MAX_COMMITTED per cluster (the oldest go),
MARKS and twice marks.MAX_POINTS of each log, and MAX_SERIES lags of each kind that are shown. Changed on the thread of
the event loop only; a scrape copies first. Events are compared with the clock of the events, records' timestamps with
the wall clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import reduce
from heapq import nlargest
from typing import NamedTuple
from uuid import UUID

from kproxy.metrics.marks import Marks
from kproxy.metrics.named import EXPIRY_NS, MAX_LABEL, OTHER, Topics, shown
from kproxy.wire.bodies import Partition
from kproxy.wire.events import ANSWERED, Event, Exchange
from kproxy.wire.interest import FETCH, OFFSET_COMMIT

MAX_POSITIONS = 16 * 1024
MAX_ALL_POSITIONS = 512 * 1024  # of all connections to a cluster: some 100 MiB
MAX_LOGS = 16 * 1024
MAX_COMMITTED = 64 * 1024
MAX_SERIES = 500
MARKS = 16  # of a log: stretches whose age is known (a consumer commits what it has just fetched), and earlier ends
AWAY_NS = 60 * 10**9
_MAX_WRITTEN_MS = (2**63 - 1) // 10**6  # producers write any int64
UNKNOWN = -1  # a time that no batch contained

Key = tuple[str | UUID | None, int]  # of a topic-partition, as the wire calls it
Consumer = tuple[str, str]  # a client or a group, and the topic
Behind = tuple[int, float | None]  # records, and the age of the first in seconds (of several partitions the most)


class Position(NamedTuple):
    """Where a consumer is: the next offset, and when the record before it was written, in milliseconds."""

    offset: int
    written_ms: int
    reported_ns: int  # when that was learned


class Lag(NamedTuple):
    """Of a consumer in a topic: records over all partitions, and the most seconds; None: nothing is known of it."""

    records: int
    seconds: float | None


class Log:
    """What is known of a topic-partition's end."""

    __slots__ = ("earlier_ends", "ends", "high_watermark", "marks", "reported_ns", "written")

    def __init__(self) -> None:
        self.high_watermark = 0
        self.reported_ns = 0
        self.marks: deque[tuple[int, int, int]] = deque(maxlen=MARKS)  # first offset, the one after the last, written
        # Earlier ends, and when each was the end for the last time: the last ones, and sparse ones of a day.
        self.ends: deque[tuple[int, int]] = deque(maxlen=MARKS)
        self.earlier_ends = Marks()
        self.written = Marks()  # records fetched so far, sparse, by their timestamps

    def end(self, high_watermark: int, now_ns: int, unchanged_ns: int) -> None:
        """The log ends here now; until `unchanged_ns` it ended where it did."""
        if high_watermark < self.high_watermark:
            self.ends.clear()  # it was truncated
            self.earlier_ends.clear()
            self.written.clear()
        elif high_watermark > self.high_watermark and self.reported_ns:
            last_ns = max(self.reported_ns, unchanged_ns)
            self.ends.append((self.high_watermark, last_ns))
            self.earlier_ends.add(self.high_watermark, last_ns, now_ns)
        self.high_watermark = high_watermark
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
    """What one connection fetches."""

    def __init__(self, lags: "Lags") -> None:
        self.client_id = ""
        self.asked_ns = 0
        self.positions: dict[Key, Position] = {}
        self.left: dict[Key, Position] = {}  # not asked for any more; a client leaves out what it has enough of, too
        self._lags = lags
        self._counted = 0  # of `positions` and `left`, in `lags.positions`

    def events(self, events: list[Event]) -> None:
        """Learn from these events; nothing of them is kept."""
        for event in events:
            if event.__class__ is Exchange and event.outcome is ANSWERED:
                if event.plan.api_key == FETCH:
                    self._fetched(event)
                elif event.plan.api_key == OFFSET_COMMIT:
                    self._lags.committed_by(event)

    def closed(self) -> None:
        self._lags.fetching.discard(self)
        self._lags.positions -= self._counted
        self._counted = 0

    def _fetched(self, exchange: Exchange) -> None:
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None or answered is None or (exchange.error_code and not answered.partitions):
            return
        self._lags.fetching.add(self)
        before_ns = self.asked_ns  # an answer of this session that left a partition out said that it is as it was
        self.client_id = (exchange.client_id or "")[:MAX_LABEL]
        self.asked_ns = now_ns = exchange.response_start
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
                positions[key] = self._lags.position(key, offset, now_ns)
        room = min(MAX_POSITIONS, len(positions) + max(0, MAX_ALL_POSITIONS - self._lags.positions))
        for partition in answered.partitions:
            key = _key(partition)
            if partition.error_code:
                positions.pop(key, None)
                continue
            self._lags.learn(key, partition, now_ns, before_ns if key in positions else 0)
            if partition.batches:
                position = Position(partition.last_offset + 1, partition.max_timestamp, now_ns)
            elif key in wanted and key not in positions:
                position = self._lags.position(key, wanted[key], now_ns)
            else:
                continue
            if key in positions or len(positions) < room:
                positions[key] = position
                self.left.pop(key, None)
        held = len(positions) + len(self.left)
        self._lags.positions += held - self._counted
        self._counted = held

    def _leave(self, key: Key, now_ns: int) -> None:
        position = self.positions.pop(key, None)
        if position is None:
            return
        if len(self.left) >= MAX_POSITIONS or self._lags.positions > MAX_ALL_POSITIONS:
            if not self.left:
                return
            del self.left[next(iter(self.left))]
        self.left[key] = position._replace(reported_ns=now_ns)


class Lags:
    """The consumers of one cluster."""

    def __init__(self, topics: Topics) -> None:
        self.logs: dict[Key, Log] = {}
        self.fetching: set[Fetching] = set()
        self.committed: dict[tuple[str, Key], Position] = {}
        self.positions = 0  # of all connections together
        self._topics = topics

    def learn(self, key: Key, partition: Partition, now_ns: int, unchanged_ns: int) -> None:
        """What a Fetch answer says of a log; until `unchanged_ns` its session knew of no change."""
        key = self._named(key)
        log = self.logs.get(key)
        if log is None:
            if len(self.logs) >= MAX_LOGS:
                del self.logs[next(iter(self.logs))]
            log = self.logs[key] = Log()
        log.end(partition.high_watermark, now_ns, unchanged_ns)
        if partition.batches and partition.max_timestamp > 0:
            log.read(partition.first_offset, partition.last_offset + 1, partition.max_timestamp, now_ns)

    def position(self, key: Key, offset: int, now_ns: int) -> Position:
        log = self.logs.get(self._named(key))
        return Position(offset, log.written_ms(offset) if log is not None else UNKNOWN, now_ns)

    def committed_by(self, exchange: Exchange) -> None:
        """A group's offsets, if the broker took all of them."""
        if exchange.request_body is None or exchange.errors:
            return
        committed = self.committed
        for partition in exchange.request_body.partitions:
            if partition.group_id is None or partition.offset < 0:
                continue
            key = self._named(_key(partition))
            name = (partition.group_id[:MAX_LABEL], key)
            position = self.position(key, partition.offset, exchange.response_start)
            before = committed.pop(name, None)
            if before is not None and before.offset == position.offset:
                position = position._replace(written_ms=max(before.written_ms, position.written_ms))
            if len(committed) >= MAX_COMMITTED:
                del committed[next(iter(committed))]
            committed[name] = position

    def _named(self, key: Key) -> Key:
        """Some call a topic by its name and some by its id: by its name, once that is known."""
        topic, partition = key
        return (self._topics.names.get(topic, topic), partition) if isinstance(topic, UUID) else key

    def shown(self, now_ns: int, wall_ns: int) -> Iterator[tuple[str, list[tuple[str, str, Lag]]]]:
        """By "client_id" and by "group": (its name, the topic, its lag), those with the most records by name.

        `now_ns` is by the clock of the events, `wall_ns` the time of day, which records' timestamps are compared with.
        """
        labels = _Labels(self._topics)
        logs = {(labels[topic], number): log for (topic, number), log in self.logs.copy().items()}
        fetching = self.fetching.copy()
        left = (
            (each.client_id, key, at)
            for each in fetching
            for key, at in each.left.copy().items()
            if at.reported_ns + AWAY_NS > now_ns
        )
        live = (
            (each.client_id, key, at)
            for each in fetching
            if each.asked_ns + AWAY_NS > now_ns
            for key, at in each.positions.copy().items()
        )
        groups = (
            (name, key, at) for (name, key), at in self.committed.copy().items() if at.reported_ns + EXPIRY_NS > now_ns
        )
        fetched = _furthest(live, labels)
        confirmed = {(topic, number) for _, topic, number in fetched}  # by each answer that leaves the end out
        for by, places in (
            ("client_id", _furthest(left, labels) | fetched),
            ("group", _furthest(groups, labels)),
        ):
            behind: dict[Consumer, Behind] = {}
            for (name, topic, number), (offset, written_ms, _) in places.items():
                log = logs.get((topic, number))
                if log is None:
                    continue
                records = log.high_watermark - offset
                lag: Behind
                if records > 0:
                    lag = records, log.age_s(offset, written_ms, now_ns, wall_ns)
                elif (topic, number) in confirmed or log.reported_ns + AWAY_NS > now_ns:
                    lag = 0, None
                else:
                    continue
                of = shown(name), topic
                behind[of] = _plus(behind.get(of, (0, None)), lag)
            yield (
                by,
                [(*of, Lag(records, seconds if records else 0.0)) for of, (records, seconds) in _largest(behind)],
            )


class _Labels(dict[str | UUID | None, str]):
    """The names of topics, each looked up once."""

    def __init__(self, topics: Topics) -> None:
        super().__init__()
        self._topics = topics

    def __missing__(self, topic: str | UUID | None) -> str:
        label = self[topic] = self._topics.label(topic)
        return label


def _key(partition: Partition) -> Key:
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


def _plus(one: Behind, other: Behind) -> Behind:
    records, seconds = one
    more, also = other
    if seconds is None or also is None:
        return records + more, also if seconds is None else seconds
    return records + more, max(seconds, also)


def _largest(behind: dict[Consumer, Behind]) -> Iterator[tuple[Consumer, Behind]]:
    largest = nlargest(MAX_SERIES, behind.items(), key=lambda item: item[1][0])
    yield from largest
    if len(largest) < len(behind):
        yield (OTHER, OTHER), reduce(_plus, (behind[of] for of in behind.keys() - dict(largest).keys()))

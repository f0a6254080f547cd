"""The lag of clients, by their Fetch positions, and the lag of groups, by their committed offsets.

Duty: the position of each client, which is the offset that it fetches next, and the lag of clients and groups: the
difference between the end of a log and that position, or the committed offset (`offsets`). The lag is never stored: a
scrape derives it, so the lag of a group whose members have stopped grows with the log.

A fetch session (KIP-227) leaves out unchanged partitions, so each connection remembers its own positions. It also keeps
those of partitions that the client no longer fetches, such as paused ones, unless another client has committed in them
for the same group since: a rebalance assigned them to that client. Brokers' requests (replica id) have no position:
they are replication.

Unknown is not zero. The lag of a committed offset is unknown if no leader has returned the end of its log (a follower's
does not suffice, KIP-392), or if no response has confirmed that end for UNCONFIRMED_NS, since records may be written
where kproxy does not see them. The lag of the group is the sum over its other partitions, plus the lower bounds in
those with an unconfirmed end.

Lag in seconds is the age of the first record that a consumer has not received. A Fetch response with this record alone
shows its timestamp. Otherwise the age is an upper bound, the lower of two: the age of the record before it, and the
time since the log last ended at or before it. Therefore the lag of a consumer at the end of a topic with one record an
hour does not jump to 3600 seconds when the record arrives. Both reach back a day (`marks.py`), because a consumer that
prefetches commits records that it fetched minutes or hours ago.

Bounds: MAX_POSITIONS per connection and MAX_ALL_POSITIONS per cluster, beyond which positions are left out and counted
in `evicted`; MAX_SERIES lags of each kind are shown. Changed on the event loop's thread only; a scrape copies first.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from heapq import nlargest
from typing import NamedTuple
from uuid import UUID

from kproxy.metrics.consumers.log_end import UNKNOWN, Log
from kproxy.metrics.consumers.offsets import GONE, POSITION, Key, Offsets, Position, key_of
from kproxy.metrics.counters.named import MAX_LABEL, OTHER, Topics, shown
from kproxy.protocol.apis import (
    END_TXN,
    FETCH,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from kproxy.wire.events import ANSWERED, Event, Exchange
from kproxy.wire.interest import HEARTBEATS

MAX_POSITIONS = 16 * 1024
MAX_ALL_POSITIONS = 512 * 1024  # over all connections to a cluster: some 100 MiB
MAX_SERIES = 500
PARTITION_SERIES = 5000  # default of the setting partition_series
UNCONFIRMED_NS = 60 * 10**9

Consumer = tuple[str, str]  # a client or a group, and the topic


class Lag(NamedTuple):
    """The lag of a consumer in a topic: sum of records, and maximum of seconds, over partitions; None: unknown."""

    records: int | None  # sum over the partitions with a known lag or lower bound; None: there is none
    seconds: float | None
    unknown: int = 0  # partitions with an offset whose lag is unknown, or known only as a lower bound
    is_exact: bool = False  # seconds is an age by a record's own timestamp, not an upper bound

    @property
    def rank(self) -> float:
        """Return the sort key: records, and 0.5 for a lag that may be above 0."""
        return self.records or (0.5 if self.unknown else 0)


class Fetching:
    """The Fetch positions of one connection. broker: the label of the broker at its other end."""

    def __init__(self, lags: "Lags", broker: str | None = None) -> None:
        self.broker = broker
        self.client_id = ""
        self.asked_ns = 0
        self.positions: dict[Key, Position] = {}
        self.left: dict[Key, Position] = {}  # no longer fetched: paused, buffered enough, or reassigned
        self.lags = lags
        self._counted = 0  # of `positions` and `left`, in `lags.positions`

    def events(self, events: list[Event]) -> None:
        """Learn from these events, without keeping any of them."""
        lags = self.lags
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
                    lags.committed_by(event, self.client_id)
                elif key == OFFSET_FETCH:
                    self._learn_client(event)
                    lags.fetched_offsets(event)
                elif key == TXN_OFFSET_COMMIT:
                    lags.committed_in_transaction(event)
                elif key in HEARTBEATS:
                    self._learn_client(event)
                    lags.note_group(event.group_id)  # it may have committed offsets before kproxy started
                elif key in (END_TXN, INIT_PRODUCER_ID):
                    lags.transaction_ended(event)
                elif answered is not None and answered.deleted:
                    lags.deleted(event)

    def _learn_client(self, exchange: Exchange) -> None:
        """Learn the client id, which is not decoded for a commit."""
        self.client_id = (exchange.client_id or "")[:MAX_LABEL]

    def closed(self) -> None:
        self.lags.fetching.discard(self)
        self.lags.positions -= self._counted
        self._counted = 0

    def _fetched(self, exchange: Exchange) -> None:
        lags = self.lags
        asked, answered = exchange.request_body, exchange.response_body
        if asked is None or answered is None or (exchange.error_code and not answered.partitions):
            return
        now_ns = exchange.response_start
        by_leader = not asked.has_rack
        epochs = {key_of(partition): partition.leader_epoch for partition in asked.partitions if by_leader}
        if asked.replica_id >= 0:
            for partition in answered.partitions:
                if not partition.error_code:
                    key = key_of(partition)
                    lags.learn(key, partition, now_ns, 0, epochs.get(key, UNKNOWN), self.broker, by_leader)
            return
        lags.fetching.add(self)
        before_ns = self.asked_ns  # partitions left out of this session's last response had not changed
        self._learn_client(exchange)
        if answered.partitions or exchange.throttle_ms <= 0:  # a throttled response is empty in any case
            self.asked_ns = now_ns
        positions = self.positions
        wanted = {key_of(partition): partition.offset for partition in asked.partitions}
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
            key = key_of(partition)
            if partition.error_code:
                positions.pop(key, None)
                if partition.error_code in GONE:
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
        if len(self.left) >= MAX_POSITIONS or self.lags.positions > MAX_ALL_POSITIONS:
            self.lags.evicted[POSITION] += 1
            if not self.left:
                return
            del self.left[next(iter(self.left))]
        self.left[key] = position._replace(reported_ns=now_ns)


class Lags(Offsets):
    """The consumers of one cluster."""

    def __init__(self, topics: Topics, evicted: dict[str, int] | None = None) -> None:
        super().__init__(topics, evicted)
        self.fetching: set[Fetching] = set()
        self.positions = 0  # over all connections

    def shown(self, now_ns: int, wall_ns: int) -> Iterator[tuple[str, list[tuple[str, str, Lag]]]]:
        """Yield "client_id" and "group", each with rows (name, topic, lag): the MAX_SERIES largest, the rest as one.

        now_ns: current time of the events' clock. wall_ns: wall clock time, which is compared with records' timestamps.
        """
        labels = _Labels(self._topics)
        logs = {(labels[topic], number): log for (topic, number), log in self.logs.copy().items() if log.is_led}
        fetching = self.fetching.copy()
        groups = {(name, labels[topic], number): at for (name, (topic, number)), at in self.committed.copy().items()}
        given = {(client, *of[1:]) for of, at in groups.items() for client in at.former}
        left = (
            (each.client_id, key, at)
            for each in fetching
            for key, at in each.left.copy().items()
            if not self.is_stale(key, at) and (each.client_id, labels[key[0]], key[1]) not in given
        )
        live = [
            (each, key, at)
            for each in fetching
            for key, at in each.positions.copy().items()
            if not self.is_stale(key, at)
        ]
        fetched = _furthest(((each.client_id, key, at) for each, key, at in live), labels)
        confirmed = _confirmed(((each, key) for each, key, _ in live), labels, now_ns)
        for by, places in (
            ("client_id", _furthest(left, labels) | fetched),
            ("group", groups),
        ):
            behind: dict[Consumer, Lag] = {}
            for (name, topic, number), position in places.items():
                log = logs.get((topic, number))
                is_confirmed = (topic, number) in confirmed
                lag = _UNKNOWN_LAG if log is None else _lag(log, position, is_confirmed, now_ns, wall_ns)
                of = shown(name), topic
                before = behind.get(of)
                behind[of] = lag if before is None else _plus(before, lag)
            yield by, [(*of, lag) for of, lag in _largest(behind)]

    def ends(self, now_ns: int) -> dict[tuple[str, int], int]:
        """Return the end of the log of each (topic, partition).

        An end that no response has confirmed for UNCONFIRMED_NS is left out, unless a group is behind it.
        """
        labels = _Labels(self._topics)
        fetched = ((each, key) for each in self.fetching.copy() for key in each.positions.copy())
        confirmed = _confirmed(fetched, labels, now_ns)
        behind: dict[tuple[str, int], int] = {}
        for (_, topic, number), offset in self.offsets().items():
            behind[topic, number] = min(offset, behind.get((topic, number), offset))
        found = {}
        for key, log in self.logs.copy().items():
            of = labels[key[0]], key[1]
            end = log.high_watermark
            is_confirmed = of in confirmed or log.reported_ns + UNCONFIRMED_NS > now_ns
            if log.is_led and (is_confirmed or behind.get(of, end) < end):
                found[of] = end
        return found

    def offsets(self) -> dict[tuple[str, str, int], int]:
        """Return the committed offset of each (group, topic, partition)."""
        labels = _Labels(self._topics)
        committed = self.committed.copy()
        return {(shown(group), labels[topic], number): at.offset for (group, (topic, number)), at in committed.items()}


_UNKNOWN_LAG = Lag(None, None, 1)


def _lag(log: Log, position: Position, is_confirmed: bool, now_ns: int, wall_ns: int) -> Lag:
    """Return the lag in one partition: behind an unconfirmed end it is a lower bound, at an unconfirmed end unknown."""
    records = log.high_watermark - position.offset
    is_confirmed = is_confirmed or log.reported_ns + UNCONFIRMED_NS > now_ns
    if records > 0:
        seconds, is_exact = log.age_s(position.offset, position.written_ms, now_ns, wall_ns)
        return Lag(records, seconds, int(not is_confirmed), is_exact)
    return Lag(0, None) if is_confirmed else _UNKNOWN_LAG


def _confirmed(fetched: "Iterable[tuple[Fetching, Key]]", labels: "_Labels", now_ns: int) -> set[tuple[str, int]]:
    """Return the partitions whose end a recent response of a fetch session has confirmed, also by leaving them out."""
    return {(labels[topic], number) for each, (topic, number) in fetched if each.asked_ns + UNCONFIRMED_NS > now_ns}


class _Labels(dict[str | UUID | None, str]):
    """The names of topics, each looked up once."""

    def __init__(self, topics: Topics) -> None:
        super().__init__()
        self._topics = topics

    def __missing__(self, topic: str | UUID | None) -> str:
        label = self[topic] = self._topics.label(topic)
        return label


def _furthest(positions: Iterable[tuple[str, Key, Position]], labels: _Labels) -> dict[tuple[str, str, int], Position]:
    """Return positions by (name, topic, partition), the lowest one of several consumers with one name."""
    furthest: dict[tuple[str, str, int], Position] = {}
    for name, (topic, number), position in positions:
        of = name, labels[topic], number
        before = furthest.get(of)
        if before is None or position.offset < before.offset:
            furthest[of] = position
    return furthest


def _plus(one: Lag, other: Lag) -> Lag:
    known = [lag for lag in (one, other) if lag.records is not None]
    ages = [(lag.seconds, lag.is_exact) for lag in known if lag.seconds is not None]
    records = sum(lag.records or 0 for lag in known) if known else None
    seconds, is_exact = max(ages, default=(None, False))
    return Lag(records, seconds, one.unknown + other.unknown, is_exact)


def _largest(behind: dict[Consumer, Lag]) -> Iterator[tuple[Consumer, Lag]]:
    """Yield the MAX_SERIES largest lags and the rest as one; a lag of 0 records has an age of 0 s."""
    largest = nlargest(MAX_SERIES, behind.items(), key=lambda item: item[1].rank)
    if len(largest) < len(behind):
        others = reduce(_plus, (behind[of] for of in behind.keys() - dict(largest).keys()))
        largest.append(((OTHER, OTHER), others))
    for of, lag in largest:
        is_at_end = lag.records == 0 and not lag.unknown
        yield of, lag._replace(seconds=0.0, is_exact=True) if is_at_end else lag

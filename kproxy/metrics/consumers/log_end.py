"""The end of one topic-partition's log, and the age of its records.

Duty: the end as brokers' responses show it. It only rises, because a follower (KIP-392) returns a lower high watermark
than the leader. Only a leader's response with a newer leader epoch lowers it, since the log was truncated. After that,
responses of the former leader do not raise it for FENCED_NS, nor does a response that began earlier.

Bounds: MARKS and twice marks.MAX_POINTS for each log. Times of events use the events' clock, timestamps of records the
wall clock. Refuses to know groups.
"""

from collections import deque

from kproxy.metrics.consumers.marks import Marks
from kproxy.protocol.apis import FETCH

FENCED_NS = 30 * 10**9  # how long a former leader may still answer as leader: broker.session.timeout.ms is 9 s
MARKS = 16  # per log: fetched ranges with their age (a consumer commits what it just fetched), and as many earlier ends
UNKNOWN = -1  # a time that no batch contained; a leader epoch that no response contained


class Log:
    """The end of a topic-partition's log.

    `high_watermark` is the end, from `source` (an API key), since `raised_ns`, and confirmed by a response at
    `reported_ns`. `lowered_ns`: higher ends reported until then are ignored; if the log was re-created, the time when
    the former log was removed. `broker` is the label of the broker that last answered as leader, `epoch` its leader
    epoch; `is_led`: a leader has answered at least once. Until then the end is not known: a follower's high watermark
    may be lower.
    """

    __slots__ = (
        *("broker", "earlier_ends", "ends", "epoch", "high_watermark", "is_led", "lowered_ns", "marks", "raised_ns"),
        *("reported_ns", "source", "written"),
    )

    def __init__(self) -> None:
        self.high_watermark = 0
        self.source = UNKNOWN
        self.raised_ns = 0
        self.reported_ns = 0  # 0: the end is not known
        self.lowered_ns = 0
        self.epoch = UNKNOWN
        self.broker: str | None = None
        self.is_led = False
        self.marks: deque[tuple[int, int, int]] = deque(maxlen=MARKS)  # (first offset, end, newest record's ms)
        # Earlier ends, each with the last time at which it was the end: the latest ones, and sparse ones of a day.
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
        asked_ns: int | None = None,
    ) -> None:
        """Learn from a response that the log ends at `offset` now; its former end held until `unchanged_ns`.

        A lower offset is ignored, unless the leader returns it in a newer epoch, or in response to kproxy's own request
        at `asked_ns` and nothing has raised the end since.
        """
        if offset < 0:
            return
        if offset > self.high_watermark and self._is_outdated(now_ns, epoch):
            return
        is_newer = by_leader and epoch > self.epoch
        is_truncated = offset < self.high_watermark and is_newer and self.epoch != UNKNOWN
        is_asked = asked_ns is not None and self.raised_ns <= asked_ns
        if is_newer:
            self.epoch = epoch
        if by_leader:
            self.is_led = True
            if broker is not None:
                self.broker = broker
        if is_truncated:
            self._truncate()
            self.lowered_ns = now_ns
        elif offset < self.high_watermark:
            if asked_ns is None or not is_asked:
                return
            self.marks.clear()  # it may be another log
            self.lowered_ns = asked_ns
            self.epoch = self.epoch if epoch == UNKNOWN else epoch
        elif offset > self.high_watermark and self.reported_ns:
            last_ns = max(self.reported_ns, unchanged_ns)
            self.ends.append((self.high_watermark, last_ns))
            self.earlier_ends.add(self.high_watermark, last_ns, now_ns)
        if offset != self.high_watermark or not self.reported_ns:
            self.raised_ns = now_ns
            self.source = source
        self.high_watermark = offset
        self.reported_ns = now_ns

    def _is_outdated(self, now_ns: int, epoch: int) -> bool:
        """Return whether a higher end precedes the truncation: it is older, or comes from the former leader."""
        if now_ns < self.lowered_ns:
            return True
        return UNKNOWN < epoch < self.epoch and now_ns < self.lowered_ns + FENCED_NS

    def _truncate(self) -> None:
        """Forget the ages of truncated records: other records have their offsets."""
        self.marks.clear()
        self.ends.clear()
        self.earlier_ends.clear()
        self.written.clear()

    def lower(self, offset: int, at_ns: int, epoch: int) -> None:
        """Lower the end to the one that another process learned at `at_ns`, unless a response raised it since."""
        if offset >= self.high_watermark or self.raised_ns > at_ns:
            return
        self._truncate()
        self.high_watermark, self.raised_ns, self.lowered_ns = offset, at_ns, at_ns
        self.epoch = max(self.epoch, epoch)

    def read(self, first: int, following: int, written_ms: int, now_ns: int) -> None:
        """Learn that records from `first` to before `following` were fetched, the newest written at `written_ms`."""
        self.marks.append((first, following, written_ms))
        self.written.add(following, min(written_ms * 10**6, now_ns), now_ns)  # a later time would hide all others

    def age_s(self, offset: int, written_ms: int, now_ns: int, wall_ns: int) -> tuple[float | None, bool]:
        """Return the age in s of the record at an offset (None: unknown), and whether it is exact, not an upper bound.

        written_ms: when the record before it was written. Called by a scrape, on another thread than the event loop's.
        """
        for first, following, alone_ms in reversed(tuple(self.marks)):
            if first == offset and following == offset + 1:
                return max(0.0, wall_ns / 1e9 - alone_ms / 1e3), True
        bounds = [wall_ns / 1e9 - written_ms / 1e3] if written_ms > 0 else []
        bounds += [(now_ns - end_ns) / 1e9 for end, end_ns in tuple(self.ends) if end <= offset]
        if (earlier_ns := self.earlier_ends.latest_ns(offset)) is not None:
            bounds.append((now_ns - earlier_ns) / 1e9)
        if (written_ns := self.written.latest_ns(offset)) is not None:
            bounds.append((wall_ns - written_ns) / 1e9)
        return max(0.0, min(bounds)) if bounds else None, False

    def written_ms(self, offset: int) -> int:
        """Return when the last record before an offset was written, as far as known, in ms; UNKNOWN: no time is known.

        Only the newest record of a response has a known time, so offsets within that response have none.
        """
        known = [written_ms for _, following, written_ms in self.marks if following <= offset]
        written_ns = self.written.latest_ns(offset)
        return max(UNKNOWN if written_ns is None else written_ns // 10**6, *known[-1:], UNKNOWN)

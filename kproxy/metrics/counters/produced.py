"""Records produced to a topic-partition, as the compiled core adds them up between two turns of the loop.

Duty: bring the sums into the cells of topics, and the offsets into the ends of logs. Refuses to know the core.
"""

from collections.abc import Sequence
from uuid import UUID

from kproxy.metrics.consumers.lag import Lags
from kproxy.metrics.counters.named import MAX_LABEL, Topics
from kproxy.protocol.plans import uuid_of

Append = tuple[int, int, int, int]  # first offset, the one behind the last; when it was asked for and answered, in ns


class Produced:
    """Takes what was produced to a broker. by_id: requests have the ids of topics, not their names."""

    def __init__(self, topics: Topics, lags: Lags, broker: str, *, by_id: bool) -> None:
        self._topics = topics
        self._lags = lags
        self._broker = broker
        self._by_id = by_id

    def add(
        self,
        raw: bytes,
        partition: int,
        count_bytes: int,
        records: int,
        batches: Sequence[tuple[int, int]],
        asked_ns: int,
        appends: Sequence[Append],
    ) -> None:
        """Count records. raw: the topic, as requests have it. batches: (set of codecs, count)."""
        topic: str | UUID = uuid_of(raw) if self._by_id else raw.decode("utf-8", "replace")[:MAX_LABEL]
        if not topic:
            return
        self._topics.produced(topic, count_bytes, records, batches, asked_ns)
        for append in appends:
            self._lags.appended((topic, partition), *append, self._broker)

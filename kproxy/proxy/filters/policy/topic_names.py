"""Names of topics by their ids (KIP-516), learned from answers.

Bounds: MAX_NAMES, the oldest are dropped first; MAX_UNKNOWN ids that were looked up in vain.
"""

from collections.abc import Callable, Mapping
from uuid import UUID

MAX_NAMES = 64 * 1024
MAX_UNKNOWN = 1024


class TopicNames:
    """The names of one cluster's topics. `missing()` is called when an id is looked up in vain."""

    def __init__(self, missing: Callable[[], None] = lambda: None) -> None:
        self.names: dict[UUID, str] = {}
        self._unknown: dict[UUID, None] = {}
        self._missing = missing

    def get(self, topic_id: UUID) -> str | None:
        """Return the name of a topic; None, and a call of `missing`, if no answer has named it yet."""
        name = self.names.get(topic_id)
        if name is None:
            if len(self._unknown) < MAX_UNKNOWN:
                self._unknown[topic_id] = None
            self._missing()
        return name

    def learn(self, names: Mapping[UUID, str]) -> None:
        """Record names; they stay valid, since Kafka never reuses a topic id."""
        self.names.update(names)
        if self._unknown:
            for topic_id in names:
                self._unknown.pop(topic_id, None)
        while len(self.names) > MAX_NAMES:
            del self.names[next(iter(self.names))]

    def unknown(self) -> list[UUID]:
        """Return the ids that were looked up in vain since the last call."""
        unknown = list(self._unknown)
        self._unknown.clear()
        return unknown

"""Many exchanges of one API and version as columns: the contents of thousands of `Exchange` events, as arrays.

Owners make tables from them. Each column has the meaning of the attribute of that name, and a missing number is NONE
(-1), or NULL if -1 is a valid value. All exchanges were answered and read completely.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from kproxy.wire.interest import ApiPlan
from kproxy.wire.structures import joined, picked

NULL = -(1 << 63)  # no number


@dataclass(slots=True)
class Bodies:
    """The topic-partitions of bodies, one row each, ordered by body and within a body as on the wire."""

    of: np.ndarray  # index of each row's exchange
    topics: Sequence[tuple[str | None, UUID | None]]  # name and id
    topic: np.ndarray  # index into `topics`
    numbers: dict[str, np.ndarray]  # by the names of fields of `bodies.Partition`
    texts: dict[str, Sequence[str | None]]  # group_id and metadata
    batch_of: np.ndarray  # index of each record batch's row
    batches: np.ndarray  # headers, with the names of fields of `records.BatchHeader`

    def topic_keys(self, keys: dict[str | UUID | None, int]) -> np.ndarray:
        """Return a number for each row's topic, by its name or else its id; add new topics to `keys`."""
        of_topics = np.array([keys.setdefault(name or id_, len(keys)) for name, id_ in self.topics], np.int64)
        return np.take(of_topics, self.topic)

    @staticmethod
    def together(parts: "Sequence[tuple[Bodies, np.ndarray]]") -> "Bodies":
        """Join several `Bodies`, each with the new numbers of its exchanges."""
        if len(parts) == 1:
            bodies, exchanges = parts[0]
            bodies.of = exchanges[bodies.of]
            return bodies
        of = np.concatenate([exchanges[bodies.of] for bodies, exchanges in parts])
        order = np.argsort(of, kind="stable")
        place = np.empty(len(of), np.int64)
        place[order] = np.arange(len(of))
        rows = np.cumsum([0, *(len(bodies.of) for bodies, _ in parts)])
        names = np.cumsum([0, *(len(bodies.topics) for bodies, _ in parts)])
        batch_of = np.concatenate([place[bodies.batch_of + row] for (bodies, _), row in zip(parts, rows, strict=False)])
        of_batches = np.argsort(batch_of, kind="stable")
        texts: dict[str, Sequence[str | None]] = {}
        for name in {name for bodies, _ in parts for name in bodies.texts}:
            column = [text for bodies, _ in parts for text in bodies.texts.get(name, [None] * len(bodies.of))]
            texts[name] = [column[row] for row in order.tolist()]
        return Bodies(
            of[order],
            [topic for bodies, _ in parts for topic in bodies.topics],
            np.concatenate([bodies.topic + first for (bodies, _), first in zip(parts, names, strict=False)])[order],
            {
                name: np.concatenate([bodies.numbers[name] for bodies, _ in parts])[order]
                for name in parts[0][0].numbers
            },
            texts,
            batch_of[of_batches],
            picked(joined([bodies.batches for bodies, _ in parts]), of_batches),
        )

    def some(self, exchanges: np.ndarray) -> "Bodies":
        """Return the rows of the exchanges selected by a mask; the selected exchanges are renumbered from 0."""
        if exchanges.all():
            return self
        rows = np.flatnonzero(exchanges[self.of])
        number = np.cumsum(exchanges) - 1
        kept = np.zeros(len(self.of), bool)
        kept[rows] = True
        batches = np.flatnonzero(kept[self.batch_of])
        return Bodies(
            number[self.of[rows]],
            self.topics,
            self.topic[rows],
            {name: column[rows] for name, column in self.numbers.items()},
            {name: [column[row] for row in rows.tolist()] for name, column in self.texts.items()},
            (np.cumsum(kept) - 1)[self.batch_of[batches]],
            picked(self.batches, batches),
        )


@dataclass(slots=True)
class Bulk:
    """Answered exchanges of one API and version, in order within each connection."""

    plan: ApiPlan
    connection: np.ndarray  # index into the owner's list of connections
    prefix: np.ndarray  # an index into `prefixes`
    prefixes: Sequence[tuple[str | None, int | None, int | None, str | None, str | None]]  # see interest.PREFIX_FIELDS
    # Numeric attributes of `events.Exchange` by name (error_code may be NULL), and from request bodies replica_id, and
    # has_rack as 0 or 1.
    columns: dict[str, np.ndarray]
    request_body: Bodies | None
    response_body: Bodies | None

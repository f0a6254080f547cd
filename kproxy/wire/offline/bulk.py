"""Many exchanges of one API and version as columns: the contents of thousands of `Exchange` events, as arrays.

Owners make tables from them. Each column has the meaning of the attribute of that name, and a missing number is NONE
(-1), or NULL if -1 is a valid value. All exchanges were answered and read completely.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from kproxy.wire.interest import ApiPlan

NULL = -(1 << 63)  # no number


@dataclass(slots=True)
class Bodies:
    """The topic-partitions of bodies, one row each, ordered by body and within a body as on the wire."""

    of: np.ndarray  # index of each row's exchange
    topics: Sequence[tuple[str | None, UUID | None]]  # name and id
    topic: np.ndarray  # index into `topics`
    numbers: dict[str, np.ndarray]  # numeric fields of `bodies.Partition`, by name
    texts: dict[str, Sequence[str | None]]  # group_id and metadata
    batch_of: np.ndarray  # index of each record batch's row
    batches: np.ndarray  # headers, with the names of fields of `records.BatchHeader`

    def topic_keys(self, keys: dict[str | UUID | None, int]) -> np.ndarray:
        """Return a number for each row's topic, by its name, or by its id without a name; add new topics to `keys`."""
        of_topics = np.array([keys.setdefault(name or id_, len(keys)) for name, id_ in self.topics], np.int64)
        return np.take(of_topics, self.topic)


@dataclass(slots=True)
class Bulk:
    """Answered exchanges of one API and version, in order within each connection."""

    plan: ApiPlan
    connection: np.ndarray  # index into the owner's list of connections
    prefix: np.ndarray  # an index into `prefixes`
    prefixes: Sequence[tuple[str | None, int | None, int | None, str | None, str | None]]  # see interest.PREFIX_FIELDS
    # Numeric attributes of `events.Exchange` by name (error_code may be NULL); replica_id of request bodies, and their
    # has_rack as 0 or 1.
    columns: dict[str, np.ndarray]
    request_body: Bodies | None
    response_body: Bodies | None

"""Copies of record batches of the coordinators' logs in Fetch responses, for any level of detail.

Duty: `Logs` decides by the topic's name. If a body has only a topic id, an earlier decision about that id applies.
`Logs` copies a batch of an undecided id. If any record of the batch does not decode as a record of a coordinator's log,
the topic is not such a log. Records of another topic may decode too, so the reader of the copies looks up the topic's
name, or drops the copies.

Bounds: the bounds of `Room`; MAX_TOPICS decided names or ids, and no copies for further ids; MAX_DECODED_BYTES
decompressed bytes of one batch. Refuses to know the meaning of a record.
"""

from collections.abc import Mapping
from uuid import UUID

from kproxy.errors import KproxyError
from kproxy.protocol.log_records import decode_record
from kproxy.protocol.records import Batch as Records
from kproxy.wire.bodies.found import Batch, Room

LOGS = ("__consumer_offsets", "__transaction_state")
BATCH_BYTES = 1 << 20  # the default limit of brokers
ALL_BYTES = 16 << 20
MAX_TOPICS = 65_536
MAX_DECODED_BYTES = 1 << 20


class Logs(Room):
    """The memory for copies of batches of `LOGS`, shared by all bodies that are read with it."""

    def __init__(self, batch_bytes: int = BATCH_BYTES, all_bytes: int = ALL_BYTES) -> None:
        super().__init__(self.may_be, batch_bytes, all_bytes)
        self._decided: dict[str | int | None, bool] = dict.fromkeys(LOGS, True)  # key: topic name, or id as an integer
        self.doubted: set[int] = set()  # undecided ids with a dropped control batch

    def may_be(self, topic: str | None, topic_id: UUID | None) -> bool:
        """Return whether batches of a topic are copied; batches of an undecided id are copied to decide it."""
        if topic is not None or topic_id is None:
            return topic in self._decided
        decided = self._decided.get(topic_id.int)
        return len(self._decided) < MAX_TOPICS if decided is None else decided

    def learn(self, names: Mapping[UUID, str]) -> None:
        """Decide topic ids by their names."""
        for identity, name in names.items():
            if identity.int in self._decided or len(self._decided) < MAX_TOPICS:
                self._decided[identity.int] = name in LOGS

    @property
    def decided(self) -> dict[int, bool]:
        """Return by topic id, as an integer, whether the topic is one of `LOGS`; undecided ids are missing."""
        return {key: is_log for key, is_log in self._decided.items() if isinstance(key, int)}

    def accepts(self, batch: Batch) -> bool:
        """Return whether to keep a copied batch; its records decide the topic id if it is undecided."""
        assert batch.copy is not None
        if batch.topic is not None or batch.topic_id is None:
            return True
        decided = self._decided.get(batch.topic_id.int)
        if decided is None and not batch.header.is_control:  # control batches have the same layout in all topics
            decided = self._decided[batch.topic_id.int] = _is_like(batch.header, batch.copy.data)
        elif decided is None and len(self.doubted) < MAX_TOPICS:
            self.doubted.add(batch.topic_id.int)
        return bool(decided)


def _is_like(header: object, data: bytearray) -> bool:
    """Return whether all records of a batch decode as records of one of `LOGS`."""
    for log in LOGS:
        try:
            for record in Records(header, memoryview(data)).records(MAX_DECODED_BYTES):  # type: ignore[arg-type]
                decode_record(log, record)
        except KproxyError:
            continue
        return True
    return False

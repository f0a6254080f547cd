"""The logs that coordinators keep, where they are fetched: which batches are copied, whatever the detail.

Duty: `Logs` decides by the topic's name. A body that has only an id is decided by what was learnt of it; of one that
nothing is known of a batch is copied, and if no record in it is a coordinator's the topic is none of these logs. What
stays is perhaps a topic that is only like them: whoever reads the copies knows its name, or leaves it out.

Bounds: those of `Room`; MAX_TOPICS names or ids that are decided, beyond which nothing is copied of new ones; of one
batch LOOKED_AT bytes are decompressed. Refuses to know what a record means.
"""

from collections.abc import Mapping
from uuid import UUID

from kproxy.errors import KproxyError
from kproxy.protocol.log_records import decode_record
from kproxy.protocol.records import Batch as Records
from kproxy.wire.bodies.found import Batch, Room

LOGS = ("__consumer_offsets", "__transaction_state")
BATCH_BYTES = 1 << 20  # brokers take 1 MiB unless they are configured otherwise
ALL_BYTES = 16 << 20
MAX_TOPICS = 65_536
LOOKED_AT = 1 << 20


class Logs(Room):
    """The memory for copies of batches of `LOGS`, shared by all bodies that are read with it."""

    def __init__(self, batch_bytes: int = BATCH_BYTES, all_bytes: int = ALL_BYTES) -> None:
        super().__init__(self.may_be, batch_bytes, all_bytes)
        self._decided: dict[str | int | None, bool] = dict.fromkeys(LOGS, True)  # by name, or by the id's number
        self.doubted: set[int] = set()  # ids of which a batch was left out before it was clear whose it is

    def may_be(self, topic: str | None, topic_id: UUID | None) -> bool:
        """Whether batches of a topic are copied; of an id that is not known, they are looked at."""
        if topic is not None or topic_id is None:
            return topic in self._decided
        decided = self._decided.get(topic_id.int)
        return len(self._decided) < MAX_TOPICS if decided is None else decided

    def learn(self, names: Mapping[UUID, str]) -> None:
        """The names of topics by their ids."""
        for identity, name in names.items():
            if identity.int in self._decided or len(self._decided) < MAX_TOPICS:
                self._decided[identity.int] = name in LOGS

    @property
    def decided(self) -> dict[int, bool]:
        """Whether topics are logs, by their ids, as far as it is clear."""
        return {key: is_log for key, is_log in self._decided.items() if isinstance(key, int)}

    def accepts(self, batch: Batch) -> bool:
        """Whether a batch that was copied stays."""
        assert batch.copy is not None
        if batch.topic is not None or batch.topic_id is None:
            return True
        decided = self._decided.get(batch.topic_id.int)
        if decided is None and not batch.header.is_control:  # which are alike in all logs
            decided = self._decided[batch.topic_id.int] = _is_like(batch.header, batch.copy.data)
        elif decided is None and len(self.doubted) < MAX_TOPICS:
            self.doubted.add(batch.topic_id.int)
        return bool(decided)


def _is_like(header: object, data: bytearray) -> bool:
    """Whether all records of a batch are those of one of `LOGS`."""
    for log in LOGS:
        try:
            for record in Records(header, memoryview(data)).records(LOOKED_AT):  # type: ignore[arg-type]
                decode_record(log, record)
        except KproxyError:
            continue
        return True
    return False

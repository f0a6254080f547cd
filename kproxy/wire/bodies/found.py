"""The values read from a body: the levels of detail, and the values that the compiled plans fill in.

Duty: `Found` and the rows in it, one per topic-partition and one per record batch, and `Room`, the memory budget for
copies of batches. Bounds: MAX_ERRORS error codes, MAX_NAMES topic names and as many broker addresses, MAX_FORGOTTEN
each of partitions that leave a fetch session, whose end is requested, or that were deleted; further ones are dropped.
Partitions and batches are not bounded here: the caller takes them after each piece (`BodyWalker.feed`). Knows
no layouts and reads no bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast
from uuid import UUID

from kproxy.protocol.records import BatchHeader

# The levels of detail of a body; each level includes the levels before it.
ERRORS = 0  # the throttle time and the error codes
SUMS = 1  # sums of each topic-partition's records, at half the cost of TOPICS; offsets are read as with TOPICS
TOPICS = 2  # every field of each topic-partition
BATCHES = 3  # every record batch header
CHECKED = 4  # the checksum of each batch, which reads every byte
RECORDS = 5  # a copy of every batch that the Room accepts
DETAILS = {"headers": ERRORS, "topics": TOPICS, "batches": BATCHES}  # the values of the `detail` setting

NONE = -1  # a number that is absent or unknown

MAX_ERRORS = 64 * 1024
MAX_NAMES = 64 * 1024
MAX_FORGOTTEN = 64 * 1024


class Partition(NamedTuple):
    """The fields of one topic-partition in a body, and the sums over its record batches."""

    topic: str | None  # None where the version identifies topics by id
    topic_id: UUID | None
    group_id: str | None
    metadata: str | None
    error_code: int | None
    partition: int
    bytes: int  # size of its records field as sent: compressed, and including an incomplete last batch
    batches: int  # complete batches; an incomplete last batch is counted in `bytes` only
    records: int  # excluding control batches; NONE if a compressed message set hides its count
    codecs: int  # a bit mask of 1 << codec over its batches; codec 0 is uncompressed
    magic: int  # magic of the last batch; last_offset is of the same batch
    offset: int  # the fetch offset, the base offset of a Produce, or the committed offset, depending on the API
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    leader_epoch: int
    first_offset: int  # offset of the first batch; a compressed message set states only its last offset
    last_offset: int
    max_timestamp: int


# The initial values: all unknown, no records.
BLANK = Partition(None, None, None, None, None, NONE, 0, 0, 0, 0, *(NONE,) * 9)


class Sums(NamedTuple):
    """The sums over one topic-partition's records; fields have the same meaning as in Partition."""

    topic: str | None
    topic_id: UUID | None
    bytes: int
    batches: int
    records: int
    codecs: int
    partition: int = NONE


class Batch(NamedTuple):
    """One record batch, or the beginning of one that the end of the records field cuts."""

    topic: str | None
    topic_id: UUID | None
    partition: int
    header: BatchHeader
    partial: bool  # whether the end of the records field cuts it
    crc_valid: bool | None  # set with CHECKED and RECORDS; None: not checked, or the batch is partial
    copy: "Copy | None"  # its bytes, with RECORDS or in `logged`; None: not copied


class Room:
    """The memory budget for copies of batches, shared by all bodies that are read with it.

    wants: whether batches of a topic (name, id) are to be copied.
    batch_bytes: the largest batch that is copied; all_bytes: the limit for all copies that exist at the same time.
    """

    def __init__(self, wants: Callable[[str | None, UUID | None], bool], batch_bytes: int, all_bytes: int) -> None:
        self._wants = wants
        self._batch_bytes = batch_bytes
        self.free_bytes = all_bytes
        self.left_out = 0  # wanted batches that exceeded a limit
        self.left_out_bytes = 0

    def copy(self, topic: str | None, topic_id: UUID | None, size: int) -> "Copy | None":
        """Return an empty copy that reserves `size` bytes, or None if the batch is unwanted or exceeds a limit."""
        if not self._wants(topic, topic_id):
            return None
        if size > self._batch_bytes or size > self.free_bytes:
            self.left_out += 1
            self.left_out_bytes += size
            return None
        return Copy(self, size)


class Copy:
    """The bytes of one batch. They are counted against the Room until the last reference to this object is gone."""

    __slots__ = ("_room", "_size", "data")

    def __init__(self, room: Room, size: int) -> None:
        self._room = room
        self._size = size
        self.data = bytearray()
        room.free_bytes -= size

    def __del__(self) -> None:
        self._room.free_bytes += self._size


class Found:
    """The values read from one body; the compiled plans write them."""

    # The defaults are class attributes, so that an instance stores only what its body contains.
    throttle_ms = NONE
    error_code: int | None = None  # the top-level error code; without such a field, the first of `errors`
    partitions: Sequence[Partition] = ()
    sums: Sequence[Sums] = ()  # replaces `partitions` with SUMS
    batches: Sequence[Batch] = ()
    logged: Sequence[Batch] = ()  # batches of coordinators' logs that `Logs` accepts, each with its copy
    names: Mapping[UUID, str] = MappingProxyType({})  # topic names by topic id, from bodies that have both
    brokers: Mapping[tuple[str, int], int] = MappingProxyType({})  # node ids by (host, port)
    cluster_id: str | None = None  # cluster id in a response that lists brokers; Kafka before 0.10.1 sends none
    # The (topic, partition) pairs that an incremental Fetch removes from its session (KIP-227); `partitions` then has
    # the additions. None: `partitions` is the complete list.
    forgotten: list[tuple[str | UUID | None, int]] | None = None
    replica_id = NONE  # id of the broker that sent a Fetch or ListOffsets request; NONE: a client sent it
    has_rack = False  # a Fetch request names its rack, so that a follower may answer it (KIP-392)
    isolation_level = 0  # isolation level of a ListOffsets request; 0: read_uncommitted
    latest: Sequence[tuple[str | None, int]] = ()  # (topic, partition) pairs whose end a ListOffsets request asks for
    is_commit = False  # whether an EndTxn request commits its transaction, or aborts it
    # Successful deletions: groups (DeleteGroups), and topics by name or id (DeleteTopics), each with NONE; the (topic,
    # partition) of a group's offsets (OffsetDelete).
    deleted: Sequence[tuple[str | UUID | None, int]] = ()
    _errors: Sequence[int] = ()

    @property
    def errors(self) -> tuple[int, ...]:
        """Return all error codes other than 0, in wire order."""
        return tuple(self._errors)

    def note_error(self, code: int) -> None:
        if not self._errors:
            self._errors = [code]
        elif len(self._errors) < MAX_ERRORS:
            cast(list[int], self._errors).append(code)

    def note_forgotten(self, topic: str | UUID | None, partition: int) -> None:
        if self.forgotten is not None and len(self.forgotten) < MAX_FORGOTTEN:
            self.forgotten.append((topic, partition))

    def note_latest(self, topic: str | None, partition: int) -> None:
        if not self.latest:
            self.latest = [(topic, partition)]
        elif len(self.latest) < MAX_FORGOTTEN:
            cast(list[tuple[str | None, int]], self.latest).append((topic, partition))

    def note_deleted(self, name: str | UUID | None, partition: int) -> None:
        if not self.deleted:
            self.deleted = [(name, partition)]
        elif len(self.deleted) < MAX_FORGOTTEN:
            cast(list[tuple[str | UUID | None, int]], self.deleted).append((name, partition))

    def note_name(self, identity: UUID, name: str | None) -> None:
        if name and identity.int:
            if not self.names:
                self.names = {identity: name}
            elif len(self.names) < MAX_NAMES:
                cast(dict[UUID, str], self.names)[identity] = name

    def note_broker(self, node: int, host: str, port: int) -> None:
        if node >= 0:
            if not self.brokers:
                self.brokers = {(host, port): node}
            elif len(self.brokers) < MAX_NAMES:
                cast(dict[tuple[str, int], int], self.brokers)[host, port] = node

    def complete(self) -> None:
        """Set the error code after the whole body was read."""
        if self.error_code is None and self._errors:
            self.error_code = self._errors[0]

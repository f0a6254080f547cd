"""The structural reader: walks a body as it streams past and never needs it whole.

Duty: from the pieces of a frame, split anywhere, the throttle and every error code; if asked, what it says of each
topic-partition and of each batch, the names of topics beside their ids, and the addresses of brokers beside theirs; and
for an owner that
rewrites the one change that must be made at the tail of a body whose size is already announced: the addresses in it are
hidden at constant size. The walk is the schema's, compiled per (api, version, side) into a generator of straight-line
code that stops only where a chunk ends inside what it must read; payloads are stepped over by their length, so that a
chunk that lies within records costs one comparison.

Bounded by: what a read that straddles two chunks needs (a topic's name or an offset's metadata, 32 KiB at most),
MAX_TAIL for a tail that is held back, MAX_ERRORS codes, MAX_NAMES names, and the partitions and batches that one chunk
can name. Bytes of a peer never raise: a fault ends the looking and is told. Refuses to know frames, pairing, and what
is in a record.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, cast
from uuid import UUID

from kproxy.errors import Malformed, ProtocolError
from kproxy.protocol.codec import Plan, api_message, encode_response, is_noted, paths_of
from kproxy.protocol.plans import Length, join
from kproxy.protocol.primitives import Buffer, write_uvarint
from kproxy.protocol.records import (
    CONTROL,
    HEADER_BYTES,
    LEAST_LENGTH,
    V2,
    V2_COUNTS,
    BatchHeader,
    Checksum,
    crc_valid,
    read_header,
)
from kproxy.protocol.schema import Field, address_path
from kproxy.protocol.shapes import remembered

Edit = tuple[int, int, bytes]  # instead of the chunk's bytes [start, end) send these; they may be none
Walk = Generator[tuple[int, int], tuple[Buffer, int, int], int]

# How closely a body is looked at.
ERRORS = 0  # the throttle and the error codes
SUMS = 1  # and what each topic-partition carries, no more: half the work; where consumers are needs more: as TOPICS
TOPICS = 2  # and every topic-partition
BATCHES = 3  # and every batch
CHECKED = 4  # and its checksum, for which every byte is read
RECORDS = 5  # and a copy of every batch that there is room for
DETAILS = {"headers": ERRORS, "topics": TOPICS, "batches": BATCHES}  # as settings call them

NONE = -1  # what is not there, or not known

MAX_TAIL = 64 * 1024  # a thousand brokers or so
MAX_ERRORS = 64 * 1024  # more are not kept
MAX_NAMES = 64 * 1024
MAX_FORGOTTEN = 64 * 1024
MAX_TEXT = 0x7FFF  # Kafka's own limit

# What tells where consumers are. A request of a fetch session (KIP-227) names only what is new and what leaves.
_OF_CONSUMERS = frozenset((1, 8))  # Fetch, OffsetCommit
_SESSION_EPOCH = "sessionEpoch"
_FORGOTTEN = "forgottenTopicsData"

# The id of the broker that asks, in a Fetch and a ListOffsets; from Fetch v15 on in a tagged field (KIP-903).
REPLICA_ID = "replicaId"
_REPLICA_IDS = (REPLICA_ID, f"replicaState.{REPLICA_ID}")

# What addresses are hidden under: an unknown tag is skipped by every client. The highest of one byte is the last that
# Kafka, which counts from 0, will ever use; so nobody mistakes the content, even if tags behind it are lower.
UNKNOWN_TAG = 127

# Kafka's names for the same things, which differ from API to API, and ours. A partition is an element of an array of
# structs with an index; the structs around it tell of which topic it is.
_INDEXES = {"partition", "partitionIndex", "index"}
_NAMES = ("name", "topicName")  # of a topic, beside its topicId
_AROUND = {"topic": "topic", "name": "topic", "topicId": "topic_id", "groupId": "group_id"}
_OF_PARTITION = dict.fromkeys(_INDEXES, "partition") | {
    "baseOffset": "offset",
    "committedLeaderEpoch": "leader_epoch",
    "committedMetadata": "metadata",
    "committedOffset": "offset",
    "currentLeaderEpoch": "leader_epoch",
    "errorCode": "error_code",
    "fetchOffset": "offset",
    "highWatermark": "high_watermark",
    "lastStableOffset": "last_stable_offset",
    "leaderEpoch": "leader_epoch",
    "logStartOffset": "log_start_offset",
    "metadata": "metadata",
    "offset": "offset",
}


class Partition(NamedTuple):
    """What a body says of one topic-partition, and the sums over the batches that it carries."""

    topic: str | None  # None where the version knows topics by id
    topic_id: UUID | None
    group_id: str | None
    metadata: str | None
    error_code: int | None
    partition: int
    bytes: int  # of records, as they lie on the wire
    batches: int  # whole ones; what follows the last of them is in no sum
    records: int  # those of control batches apart; NONE if a message set hides its count
    codecs: int  # a bit for each codec of a batch: 1 << 0 is none
    magic: int  # of the last batch, as is last_offset
    offset: int  # fetched from, given to the first record, or committed: what the API says
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    leader_epoch: int
    first_offset: int  # of the first; a compressed message set tells only its last
    last_offset: int
    max_timestamp: int


# What a partition begins as: nothing is known of it, and it carries nothing.
BLANK = Partition(None, None, None, None, None, NONE, 0, 0, 0, 0, *(NONE,) * 9)
_SUMMED = (
    "bytes",
    "batches",
    "records",
    "codecs",
    "magic",
    "first_offset",
    "last_offset",
    "max_timestamp",
)  # over its batches


class Sums(NamedTuple):
    """Of a topic-partition no more than what it carries."""

    topic: str | None
    topic_id: UUID | None
    bytes: int  # as a Partition's, and so are the others
    batches: int
    records: int
    codecs: int


class Batch(NamedTuple):
    topic: str | None
    topic_id: UUID | None
    partition: int
    header: BatchHeader
    partial: bool  # cut by the end of the records
    crc_valid: bool | None  # with CHECKED; None: it is not all there
    copy: "Copy | None"  # of its bytes, with RECORDS


class Room:
    """For copies of batches: of which topics, how large, and how many bytes of them at a time, of all bodies."""

    def __init__(self, wants: Callable[[str | None, UUID | None], bool], batch_bytes: int, all_bytes: int) -> None:
        self._wants = wants
        self._batch_bytes = batch_bytes
        self.free_bytes = all_bytes
        self.left_out = 0  # batches that were wanted, and were too large
        self.left_out_bytes = 0

    def copy(self, topic: str | None, topic_id: UUID | None, size: int) -> "Copy | None":
        """Room for a batch, if it is wanted and not too large."""
        if not self._wants(topic, topic_id):
            return None
        if size > self._batch_bytes or size > self.free_bytes:
            self.left_out += 1
            self.left_out_bytes += size
            return None
        return Copy(self, size)


class Copy:
    """The bytes of a batch. They take their room for as long as anyone holds this."""

    __slots__ = ("_room", "_size", "data")

    def __init__(self, room: Room, size: int) -> None:
        self._room = room
        self._size = size
        self.data = bytearray()
        room.free_bytes -= size

    def __del__(self) -> None:
        self._room.free_bytes += self._size


class Found:
    """What was read of a body; the compiled walks write here."""

    # The defaults are the class's: a body costs what is in it.
    throttle_ms = NONE
    error_code: int | None = None  # the top level's, or in the end the first of the errors: see codec's scan
    partitions: Sequence[Partition] = ()
    sums: Sequence[Sums] = ()  # instead, with SUMS
    batches: Sequence[Batch] = ()
    names: Mapping[UUID, str] = MappingProxyType({})  # of topics, where a body has both the name and the id
    brokers: Mapping[tuple[str, int], int] = MappingProxyType({})  # node ids by (host, port)
    # (topic, partition): what leaves a fetch session, of which `partitions` says what is new. None: it says all.
    forgotten: list[tuple[str | UUID | None, int]] | None = None
    replica_id = NONE  # of a request: the broker that asks; NONE: a client does
    _errors: Sequence[int] = ()

    @property
    def errors(self) -> tuple[int, ...]:
        """Every code other than 0, in wire order."""
        return tuple(self._errors)

    def note_error(self, code: int) -> None:
        if not self._errors:
            self._errors = [code]
        elif len(self._errors) < MAX_ERRORS:
            cast(list[int], self._errors).append(code)

    def note_forgotten(self, topic: str | UUID | None, partition: int) -> None:
        if self.forgotten is not None and len(self.forgotten) < MAX_FORGOTTEN:
            self.forgotten.append((topic, partition))

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
        if self.error_code is None and self._errors:
            self.error_code = self._errors[0]


@cache
def body_reader(api_key: int, version: int, side: str, detail: int) -> Callable[..., Found]:
    """read(buffer, start, end) -> what is found: a body that is wholly there, in a buffer that may go on behind it.

    It finds what a BodyWalker finds, at half the cost. Trailing bytes are allowed. Raises Malformed. With RECORDS its
    fourth argument is the room for copies.
    """
    read = _Whole(api_key, version, side, detail)
    return remembered(read.plan()) if read.detail == SUMS and side == "request" else read.plan()


class BodyWalker(Found):
    """Reads one body, of a "request" or a "response"; `feed` gets its bytes in order, from behind the correlation id.

    detail: SUMS fills `sums`, TOPICS `partitions`, BATCHES also `batches`, each in the order of the wire; they are the
    owner's to take and to clear after each feed, if the body's size should not be memory's.

    neutralise: the client must not see the addresses of a streamed answer. Fetch's are a tagged field, whose number is
    changed when it passes, at once. ShareFetch's are an array, which is emptied; since what fills its place must open
    with its size, the array, to the count of the tags behind it, is held back and comes out as one edit when that has
    arrived. Nothing else is held back. With a `fault`, an owner that rewrites must close: what follows could name
    brokers.
    """

    def __init__(
        self,
        api_key: int,
        api_version: int,
        side: str = "response",
        *,
        detail: int = ERRORS,
        room: Room | None = None,
        neutralise: bool = False,
        ahead_bytes: int = 0,
        marks_head: bool = False,
    ) -> None:
        self.ahead_bytes = ahead_bytes  # that nobody needs to see: at first those before the body
        self.partitions: list[Partition] = []
        self.sums: list[Sums] = []
        self.batches: list[Batch] = []
        self.neutralised = False  # addresses were hidden
        self.fault: Malformed | None = None
        self.left_out = 0  # the owner's count of what it did not keep

        self._carry = b""  # bytes of earlier chunks, already sent, that the next read begins with
        self._held: bytearray | None = None
        self._held_from = 0
        self._edits: list[Edit] | None = None
        self._offset = 0  # from a position of the walk to one of the chunk
        self.is_done = False  # nothing more is looked at: what follows is trailing, or there was a fault
        self._room = room
        self._batch: Batch | None = None  # the one whose bytes pass by
        self._checksum: Checksum | None = None
        self.head_end: int | None = None  # with `marks_head`, once its end was met: a position of the chunk at hand
        self._walk = _walk(api_key, api_version, side, detail, neutralise, marks_head)(self)
        _, self._need = next(self._walk)

    def feed(self, chunk: Buffer, start: int, end: int) -> list[Edit] | None:
        """The next bytes of the body are chunk[start:end]: what to change in them, in order, or None."""
        self._edits = None
        if self._checksum is not None:
            self._pass_by(chunk, start, end)
        if self.is_done or self.ahead_bytes >= end - start:
            self.ahead_bytes -= end - start
            if self._held is not None:
                self._hold_back(chunk, start, end)
            return self._edits
        pos = start + self.ahead_bytes
        self._held_from = start
        try:
            while pos < end:
                pos = self._read(chunk, pos, end)
        except StopIteration as stop:
            pos = stop.value + self._offset
            self.is_done = True
        except Malformed as fault:
            self._end_with(fault)
        self.ahead_bytes = pos - end
        if self._held is not None:
            self._hold_back(chunk, self._held_from, end)
        return self._edits

    def finish(self) -> None:
        """The frame has ended."""
        if self.fault is None and (not self.is_done or self.ahead_bytes > 0):
            self._end_with(Malformed("the body is cut short"))
        self.complete()

    def _read(self, chunk: Buffer, pos: int, end: int) -> int:
        """Let the walk go on with what there is; returns from where on it needs more, which may be behind `end`."""
        carried = len(self._carry)
        stop = max(pos, pos + self._need - carried)
        if stop > end:
            self._carry += bytes(chunk[pos:end])
            return end
        self._offset = 0
        if not carried:
            pos, self._need = self._walk.send((chunk, pos, end))
            return pos
        joined = self._carry + bytes(chunk[pos:stop])
        self._carry = b""
        self._offset = pos - carried
        try:
            ahead, self._need = self._walk.send((joined, 0, len(joined)))
        finally:  # even if that was all there is to read
            if self._checksum is not None:
                self._pass_by(chunk, stop, end)
        if ahead >= carried:
            return ahead + self._offset
        self._carry = joined[ahead:]  # it looked further than it went, as at a batch shorter than its look
        return stop

    def _end_with(self, fault: Malformed) -> None:
        self.is_done = True
        self.fault = fault

    # What the compiled walk calls. Its position is one in the chunk less the offset; what it has just read alone, as it
    # does a tag or a count, is never carried over.

    def begin_batch(self, batch: Batch, buffer: Buffer, pos: int, end: int) -> None:
        """A batch begins at `pos`: its checksum is taken, and maybe a copy, as its bytes pass by."""
        size = batch.header.size_bytes
        copy = None if self._room is None else self._room.copy(batch.topic, batch.topic_id, size)
        self._batch = batch._replace(copy=copy)
        self._checksum = Checksum(batch.header)
        self._pass_by(buffer, pos, end)

    def _pass_by(self, chunk: Buffer, start: int, end: int) -> None:
        """The next bytes of the batch are at `start`, as far as the chunk has them."""
        checksum, batch = self._checksum, self._batch
        assert checksum is not None and batch is not None
        piece = memoryview(chunk)[start : min(end, start + checksum.left)]
        checksum.add(piece)
        if batch.copy is not None:
            batch.copy.data += piece
        if not checksum.left:
            self.batches.append(batch._replace(crc_valid=checksum.is_valid))
            self._checksum = self._batch = None

    def hide_tag(self, pos: int) -> None:
        """The tag of the addresses is the byte before `pos`."""
        self._edit(pos + self._offset - 1, pos + self._offset, bytes((UNKNOWN_TAG,)))
        self.neutralised = True

    def mark_head(self, pos: int) -> None:
        """The array of addresses ends before `pos`."""
        self.head_end = pos + self._offset

    def hold(self, pos: int) -> None:
        """From here on nothing leaves."""
        self._held = bytearray()
        self._held_from = pos + self._offset

    def release(self, buffer: Buffer, pos: int, entries: int, tags: int) -> None:
        """What is held is the array of addresses and the count of the tags behind it, up to `pos`."""
        held = self._held
        assert held is not None
        held += buffer[self._held_from : pos]
        self._edit(self._held_from, pos, _emptied(len(held), tags) if entries > 0 else bytes(held))
        self.neutralised = entries > 0
        self._held = None

    def _hold_back(self, chunk: Buffer, start: int, end: int) -> None:
        held = self._held
        assert held is not None
        held += chunk[start:end]
        self._edit(start, end, b"")
        if len(held) > MAX_TAIL and self.fault is None:
            self._end_with(Malformed(f"the addresses at the end take more than {MAX_TAIL} bytes"))

    def _edit(self, start: int, end: int, replacement: bytes) -> None:
        if self._edits is None:
            self._edits = []
        self._edits.append((start, end, replacement))


def _emptied(size: int, tags: int) -> bytes:
    """An empty compact array and the count of the tags behind it, with one more that fills up what is left."""
    head = b"\1" + write_uvarint(tags + 1) + bytes((UNKNOWN_TAG,))
    room = size - len(head)
    width = next(width for width in range(1, 6) if room - width < 1 << 7 * width)
    filler = bytearray(write_uvarint(room - width))
    while len(filler) < width:  # where the shorter size would leave a byte too many: a longer form of the same number
        filler[-1] |= 128
        filler.append(0)
    return head + filler + bytes(room - width)


@cache
def _walk(
    api_key: int, version: int, side: str, detail: int, neutralise: bool, marks_head: bool
) -> Callable[[BodyWalker], Walk]:
    return _Stream(api_key, version, side, detail, neutralise, marks_head).plan()


class Wanted:
    """What is looked at in the bodies of one API, version and side, by path; see `codec.paths_of`."""

    def __init__(self, api_key: int, version: int, side: str, detail: int) -> None:
        if detail == SUMS and api_key in _OF_CONSUMERS:
            detail = TOPICS
        self.detail = detail
        self.message = api_message(api_key, version, side)
        fields = self.message.fields
        self.noted = [path for path in paths_of(fields, version) if side == "response" and is_noted(path)]
        named = dict(_named_topics(fields, version)) if detail and side == "response" else {}
        # What tells names is asked for them: the partitions of Metadata carry nothing, and are many.
        self.told = _brokers(api_key, version) if side == "response" and detail != SUMS else {}
        arrays = set(_partition_arrays(fields, version)) if detail and not named and not self.told else set()
        self.attributes = dict(_attributes(fields, version, arrays))  # paths, and what they are of a Partition
        if detail == SUMS:
            self.attributes = {path: var for path, var in self.attributes.items() if var in ("topic", "topic_id")}
        self.topics = dict.fromkeys(named.values(), "topic") | {join(array, "topicId"): "topic_id" for array in named}
        if detail and side == "request":
            present = set(paths_of(fields, version))
            self.told |= _session(fields, version)
            self.told |= {path: "found.replica_id = {}" for path in _REPLICA_IDS if path in present}
        self.partitions = {f"{array}[]" for array in arrays}
        self.named = {f"{array}[]" for array in named}
        # What may be said of a partition; the rest is as in BLANK.
        carries = any(path.endswith(".records") for path in paths_of(fields, version))
        self.known = {var.removeprefix("of_") for var in self.attributes.values()} & {*Partition._fields[3:]}
        self.known |= set(_SUMMED if carries else ())

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.noted, *self.attributes, *self.topics, *self.told)


class _Look(Plan):
    """What is kept of a body, into `found`, and of its records."""

    utf8 = "replace"
    walks_all_tags = True

    def __init__(self, api_key: int, version: int, side: str, detail: int) -> None:
        wanted = Wanted(api_key, version, side, detail)
        super().__init__(wanted.message, version, wanted.paths)
        self.side = side
        self.detail = wanted.detail
        self.noted = wanted.noted
        self.partitions = wanted.partitions
        self.known = wanted.known
        self.lists = ("sums",) if self.detail == SUMS else ("partitions", "batches") if self.partitions else ()
        self.attributes = wanted.attributes
        self.named = wanted.named
        self.topics = wanted.topics
        self.told = wanted.told
        self.names |= {
            "Partition": Partition,
            "Batch": Batch,
            "BatchHeader": BatchHeader,
            "ProtocolError": ProtocolError,
            "crc_valid": crc_valid,
            "read_header": read_header,
            "Sums": Sums,
            "new": tuple.__new__,
            "Found": Found,
        }

    def body(self) -> None:
        self.line("topic = topic_id = group_id = None")
        self.header(self.side)
        self.struct(self.message.fields, "")
        self.settle()

    def kept(self, field: Field, path: str, var: str) -> None:
        if path in self.attributes:
            self.after(f"{self.attributes[path]} = {var}")
        elif path in self.topics:
            self.after(f"{self.topics[path]} = {var}")
        elif path in self.told:
            self.after(self.told[path].format(var))
        if path == "throttleTimeMs":
            self.after(f"found.throttle_ms = {var}")
        elif path in self.noted:
            if path == "errorCode":
                self.after(f"found.error_code = {var}")
            self.after(f"if {var}: found.note_error({var})")

    def content(self, var: str, type_: str, length: Length, nullable: bool) -> None:
        self.fault(f"{length.real} > {MAX_TEXT}", f"a text of more than {MAX_TEXT} bytes")
        super().content(var, type_, length, nullable)

    def before(self, path: str) -> None:
        if path in self.partitions and self.detail == SUMS:
            self.line("total = batches = records = codecs = 0")
        elif path in self.partitions:
            for name in self.known:
                self.line(f"of_{name} = {getattr(BLANK, name)}")

    def behind(self, path: str) -> None:
        if path in self.partitions and self.detail == SUMS:
            carried = "new(Sums, (topic, topic_id, total, batches, records, codecs))"
            self.line(f"if total: sums.append({carried})")
        elif path in self.partitions:
            said = (f"of_{name}" if name in self.known else str(getattr(BLANK, name)) for name in Partition._fields[3:])
            self.line(f"partitions.append(new(Partition, (topic, topic_id, group_id, {', '.join(said)})))")
        elif path in self.named:
            self.line("found.note_name(topic_id, topic)")

    def primitive(self, field: Field, type_: str, path: str, compact: bool, nullable: bool) -> str | None:
        if type_ != "records" or not self.detail:
            return super().primitive(field, type_, path, compact, nullable)
        length = self.length(compact, "i", nullable, path)
        with self.block(f"if {length.is_some}:"):
            self.line(f"{'total' if self.detail == SUMS else 'of_bytes'} = left = {length.real}")
            self.line(f"stop = {self.here} + left")
            self.short("stop > end")
            with self.block("while left:"):
                self.line(f"size = left if left < {HEADER_BYTES} else {HEADER_BYTES}")
                self.need("size")
                if self.detail == SUMS:
                    self.sum_up()
                    self.read_header()
                    self.line("size = header.size_bytes")
                    self.line("if size > left: break")
                    self.line("batches += 1")
                    self.line("codecs |= 1 << header.codec")
                    self.line("count = 0 if header.is_control else header.record_count")
                    self.line(f"records = records + count if count >= 0 <= records else {NONE}")
                else:
                    self.batch()
                self.line("left -= size")
                self.line("pos += size")
            self.go_to("stop")
        return None

    def read_header(self) -> None:
        """What is no batch, or too little of one, is behind the last batch that counts."""
        self.line("try: header = read_header(buffer, pos, pos + left)")
        self.line("except ProtocolError: break")
        self.line("if header is None: break")

    def batch(self) -> None:
        self.line(f"header = {self.unpacker(V2.format)}(buffer, pos) if size == {HEADER_BYTES} else None")
        least = LEAST_LENGTH[2]
        with self.block(f"if header is None or header[3] != 2 or header[12] < 0 or header[1] < {least}:"):
            self.read_header()
        self.line("base_offset, length, _, magic, _, attributes, delta, _, timestamp, _, _, _, count = header")
        self.line("size = length + 12")
        if self.detail >= BATCHES:
            self.line("header = new(BatchHeader, header)")
            with self.block("if size > left:"):
                self.line(f"batches.append({self.new_batch('True', 'None', 'None')})")
                self.line("break")
            self.whole_batch()
        else:
            self.line("if size > left: break")
        self.line("if not of_batches: of_first_offset = base_offset")
        self.line("of_batches += 1")
        self.line("of_magic = magic")
        self.line("of_codecs |= 1 << (attributes & 7)")
        self.line("of_last_offset = base_offset + delta")
        self.line("if timestamp > of_max_timestamp: of_max_timestamp = timestamp")
        self.line(f"if attributes & {CONTROL} and magic == 2: count = 0")
        self.line(f"of_records = of_records + count if count >= 0 <= of_records else {NONE}")

    def new_batch(self, partial: str, valid: str, copy: str) -> str:
        return f"new(Batch, (topic, topic_id, of_partition, header, {partial}, {valid}, {copy}))"

    def whole_batch(self) -> None:
        """All of the batch that begins at `pos` is, or will be, there."""
        raise NotImplementedError

    def sum_up(self) -> None:
        """The way of nearly all batches, without a header of their own; what is special falls through."""
        with self.block(f"if size == {HEADER_BYTES}:"):
            self.line(f"length, magic, codec, count = {self.unpacker(V2_COUNTS.format)}(buffer, pos)")
            least = HEADER_BYTES - 12
            with self.block(f"if magic == 2 and 0 <= codec < 8 and count >= 0 and {least} <= length <= left - 12:"):
                self.line("batches += 1")
                self.line("codecs |= 1 << codec")
                self.line("if records >= 0: records += count")
                self.line("left -= length + 12")
                self.line("pos += length + 12")
                self.line("continue")


class _Whole(_Look):
    """plan(buffer, start, end) -> Found; with RECORDS plan(buffer, start, end, room)"""

    def plan(self) -> Callable[..., Found]:
        self.line("found = Found()")
        for name in self.lists:
            self.line(f"{name} = []")
        with self.translated():
            self.body()
        self.short("pos > end")
        for name in self.lists:
            self.line(f"if {name}: found.{name} = {name}")
        if self.noted:
            self.line("found.complete()")
        self.line("return found")
        return self.function("buffer, start, end, room=None" if self.detail == RECORDS else "buffer, start, end")

    def whole_batch(self) -> None:
        valid = copy = "None"
        if self.detail >= CHECKED:
            valid = "crc_valid(header, content)"
            self.line("content = memoryview(buffer)[pos : pos + size]")
        if self.detail == RECORDS:
            copy = "copy"
            self.line("copy = None if room is None else room.copy(topic, topic_id, size)")
            self.line("if copy is not None: copy.data += content")
        self.line(f"batches.append({self.new_batch('False', valid, copy)})")


class _Stream(_Look):
    """plan(found) -> a generator: it yields (position, bytes needed there) and is sent (buffer, position, end).

    `base` is what a position in today's buffer lacks to one that stays the same when the buffer changes. `found` is the
    walker itself, for what an owner that rewrites must not let through.
    """

    here = "base + pos"

    def __init__(self, api_key: int, version: int, side: str, detail: int, neutralise: bool, marks_head: bool) -> None:
        super().__init__(api_key, version, side, detail)
        self.head_array = head_array(api_key, version) if marks_head else None
        carrier = address_path(api_key, version) if neutralise else None
        fields = {field.name: field for field in self.message.fields}
        self.strict = carrier is not None
        self.hidden_tag = fields[carrier].tag if carrier else None
        self.held_array = carrier if carrier and self.hidden_tag is None else None

    def plan(self) -> Callable[[BodyWalker], Walk]:
        for name in self.lists:
            self.line(f"{name} = found.{name}")
        self.line("base = 0")
        self.line("buffer, pos, end = yield 0, 0")
        self.body()
        self.line("return pos")
        return self.function("found")

    def whole_batch(self) -> None:
        batch = self.new_batch("False", "None", "None")
        self.line(
            f"found.begin_batch({batch}, buffer, pos, end)" if self.detail >= CHECKED else f"batches.append({batch})"
        )

    def go_to(self, place: str) -> None:
        self.line(f"pos = {place} - base")

    def need(self, size: int | str) -> None:
        with self.block(f"if end - pos < {size}:"):
            self.line("base += pos")
            self.line(f"buffer, pos, end = yield pos, {size}")
            self.line("base -= pos")

    def short(self, condition: str) -> None:
        """What is not there yet may still come; what never comes is told at the end of the frame."""

    def rest_of_uvarint(self, var: str) -> None:
        with self.block(f"if {var} > 127:"):
            self.line(f"{var} &= 127")
            self.line("shift = 0")
            self.line("byte = 128")
            with self.block("while byte > 127:"):
                self.line("shift += 7")
                self.fault("shift > 28", "a varint of more than five bytes")
                self.need(1)
                self.line("byte = buffer[pos]")
                self.line("pos += 1")
                self.line(f"{var} |= (byte & 127) << shift")
            if self.strict:  # a tag that is written longer than it must be cannot be changed by its last byte
                self.fault("not byte", "a varint with a needless byte")

    def tag_read(self, path: str, tag: str) -> None:
        if not path and self.hidden_tag is not None:
            self.line(f"if {tag} == {self.hidden_tag}: found.hide_tag(pos)")

    def before(self, path: str) -> None:
        super().before(path)
        if path == self.held_array:
            self.settle()
            self.need(1)  # what is before it may be stepped over into a chunk that is not here yet
            self.line("found.hold(pos)")

    def behind(self, path: str) -> None:
        super().behind(path)
        if path == self.head_array:
            self.settle()
            self.need(1)  # its last field may be stepped over into a chunk that is not here yet
            self.line("found.mark_head(pos)")

    def counted(self, path: str, length: Length) -> None:
        if path == self.held_array:
            self.line(f"entries = {length.real}")

    def tags(self, tagged: list[Field], path: str, var: str | None) -> None:
        if path or not self.held_array:
            super().tags(tagged, path, var)
            return
        count = self.fresh("t")
        self.uvarint(count)
        self.line(f"found.release(buffer, pos, entries, {count})")
        self.tag_loop(count, [], path, var)


@cache
def tells_names(api_key: int, version: int) -> bool:
    """Do its answers tell the names of topics beside their ids?"""
    return any(_named_topics(api_message(api_key, version, "response").fields, version))


@cache
def tells_brokers(api_key: int, version: int) -> bool:
    """Are its answers there to tell where brokers are? (NodeEndpoints, KIP-951, name only what Metadata has named.)"""
    return bool(_brokers(api_key, version))


@cache
def head_array(api_key: int, version: int) -> str | None:
    """The top-level array of an answer that names brokers, if arrays of structs follow it, as topics do in Metadata.

    The bytes up to its end, the head, are all of the answer that names brokers, and may be a small part of it.
    """
    path = address_path(api_key, version)
    fields = api_message(api_key, version, "response").fields_of(version)
    plain = [field for field in fields if version not in field.tagged_versions]
    names = [field.name for field in plain]
    if path not in names:
        return None
    return path if any(field.is_array and field.is_struct for field in plain[names.index(path) + 1 :]) else None


@cache
def empty_rest(api_key: int, version: int) -> bytes:
    """What follows the head in the smallest answer there is: with it, a head alone is a whole answer."""
    frame = bytes(8) + encode_response(api_key, version, {"correlationId": 0}, {})[4:]
    walker = BodyWalker(api_key, version, marks_head=True, ahead_bytes=8)
    walker.feed(frame, 0, len(frame))
    assert walker.head_end is not None
    return frame[walker.head_end :]


def _brokers(api_key: int, version: int) -> dict[str, str]:
    """What an answer says of brokers: paths, and what to do with each value."""
    array = address_path(api_key, version)
    if array is None or array == "nodeEndpoints":
        return {}
    kept = {"nodeId": "node = {}", "brokerId": "node = {}", "host": "host = {}"}
    kept["port"] = "found.note_broker(node, host, {})"
    present = set(paths_of(api_message(api_key, version, "response").fields, version))
    return {path: line for name, line in kept.items() if (path := join(array, name)) in present}


def _named_topics(fields: tuple[Field, ...], version: int, above: str = "") -> Iterator[tuple[str, str]]:
    """Arrays whose elements have both an id and a name of a topic, and the path of the name."""
    for field in fields:
        if version in field.versions and field.is_struct:
            path = join(above, field.name)
            members = {member.name for member in field.fields if version in member.versions}
            for name in _NAMES:
                if field.is_array and {name, "topicId"} <= members:
                    yield path, join(path, name)
            yield from _named_topics(field.fields, version, path)


def _session(fields: tuple[Field, ...], version: int) -> dict[str, str]:
    """What a fetch request says of its session: paths, and what to do with each value."""
    if not any(field.name == _SESSION_EPOCH and version in field.versions for field in fields):
        return {}
    kept = {
        _SESSION_EPOCH: "if {} > 0: found.forgotten = []",
        join(_FORGOTTEN, "topic"): "topic = {}",
        join(_FORGOTTEN, "topicId"): "topic_id = {}",
        join(_FORGOTTEN, "partitions[]"): "found.note_forgotten(topic or topic_id, {})",
    }
    present = {*paths_of(fields, version), join(_FORGOTTEN, "partitions[]")}
    return {path: line for path, line in kept.items() if path in present}


def _partition_arrays(fields: tuple[Field, ...], version: int, above: str = "") -> Iterator[str]:
    for field in fields:
        if version in field.versions and field.is_struct:
            path = join(above, field.name)
            members = {member.name for member in field.fields if version in member.versions}
            if field.is_array and members & _INDEXES:
                yield path
            yield from _partition_arrays(field.fields, version, path)


def _attributes(fields: tuple[Field, ...], version: int, arrays: set[str]) -> Iterator[tuple[str, str]]:
    """The paths of what becomes a Partition's, and the variable that takes it."""
    around = {array.rsplit(".", count)[0] for array in arrays for count in range(1, array.count(".") + 1)}
    if arrays:
        around.add("")
    for path in paths_of(fields, version):
        above, _, name = path.rpartition(".")
        if above in arrays and name in _OF_PARTITION:
            yield path, f"of_{_OF_PARTITION[name]}"
        elif above in around and name in _AROUND:
            yield path, _AROUND[name]

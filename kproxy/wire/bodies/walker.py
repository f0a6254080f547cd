"""The walker: reads a body piece by piece as it arrives, and changes addresses in it without changing its size.

Duty: run the generator of `plans` over the pieces, keep the bytes of a value that straddles two pieces, compute
checksums and make copies of batches, and return edits that hide addresses. The size of the frame has already been sent,
so an edit never changes the length of the body. A piece that lies inside a payload costs one comparison.

Bounds: the bytes of one value that straddles two pieces (32 KiB: a string), MAX_TAIL bytes held back, the limits of
`found`, and the partitions and batches that one piece names, if the owner takes them after each `feed`. A peer's bytes
never raise: a fault ends the reading, and `fault` has it. Knows no frames, no pairing and no API: the plan knows the
API.
"""

from functools import cache
from uuid import UUID

from kproxy.errors import Malformed
from kproxy.protocol.codec import encode_response
from kproxy.protocol.primitives import Buffer, write_uvarint
from kproxy.protocol.records import Checksum
from kproxy.wire.bodies.found import ERRORS, Batch, Found, Partition, Room, Sums
from kproxy.wire.bodies.logs import Logs
from kproxy.wire.bodies.plans import body_walk

Edit = tuple[int, int, bytes]  # replace the piece's bytes [start, end) by these, which may be empty

MAX_TAIL = 64 * 1024  # enough for the addresses of about a thousand brokers

# The walker hides addresses under this tag number, because clients skip unknown tags. It is the highest number of one
# byte. Kafka assigns numbers from 0 upwards, so it will use this one last. Later tags may have lower numbers, which
# clients accept.
UNKNOWN_TAG = 127


class BodyWalker(Found):
    """Reads the body of a "request" or a "response"; `feed` takes its bytes in order, from after the correlation id.

    detail: SUMS fills `sums`, TOPICS `partitions`, BATCHES also `batches`, each in wire order. The owner
    takes them and clears the lists after each `feed`, so that memory does not grow with the body.
    room: memory for copies of batches, with RECORDS.
    logs: memory for copies of batches of coordinators' logs, in `logged`.
    ahead_bytes: the number of bytes to skip before the body, such as a frame's size and correlation id.
    marks_head: set `head_end` where the head ends (`fields.head_array`).
    neutralise: hide the addresses of a response. Fetch has them in a tagged field: an edit changes the tag number.
    ShareFetch has them in an array: an edit empties the array and fills its place with a tagged field. That field
    begins with its size, so the walker holds back the array and the tag count after it until they are complete, and
    then returns them as one edit. It holds back nothing else. After a `fault` an owner that rewrites must close the
    connection, because the bytes that follow could contain addresses.
    """

    def __init__(
        self,
        api_key: int,
        api_version: int,
        side: str = "response",
        *,
        detail: int = ERRORS,
        room: Room | None = None,
        logs: Logs | None = None,
        neutralise: bool = False,
        ahead_bytes: int = 0,
        marks_head: bool = False,
    ) -> None:
        self.ahead_bytes = ahead_bytes  # bytes still to be skipped
        self.partitions: list[Partition] = []
        self.sums: list[Sums] = []
        self.batches: list[Batch] = []
        self.logged: list[Batch] = []
        self.neutralised = False  # whether addresses were hidden
        self.fault: Malformed | None = None
        self.left_out = 0  # counted by the owner: partitions and batches that it dropped
        self.looks = 0  # approximate number of batch headers that the last `feed` read

        self._carry = b""  # the beginning of a value that continues in the next piece; already forwarded
        self._held: bytearray | None = None
        self._held_from = 0
        self._edits: list[Edit] | None = None
        self._offset = 0  # difference from a position of the generator to one in the piece
        self.is_done = False  # the walker reads no more: the body has ended, or there was a fault
        self._room = room
        self._batch: Batch | None = None  # the batch whose checksum is in progress
        self._checksum: Checksum | None = None
        self._logs = logs
        self._log: Batch | None = None  # the batch of a coordinator's log whose copy is in progress
        self._log_left = 0  # its bytes that have not arrived
        self.head_end: int | None = None  # with `marks_head`: a position in the current piece
        self._walk = body_walk(api_key, api_version, side, detail, neutralise, marks_head, logs is not None)(self)
        _, self._need = next(self._walk)

    def feed(self, piece: Buffer, start: int, end: int, far: int = 0) -> list[Edit] | None:
        """Read the next bytes of the body, piece[start:end]; return the edits to make in them, in order, or None.

        far: the end of the piece's bytes, if it is beyond `end`. The walker may then read headers of consecutive
        batches beyond `end`, which saves calls; `ahead_bytes` then has the distance.
        """
        self._edits = None
        self.looks = 0
        if self._checksum is not None:
            self._pass_by(piece, start, end)
        if self._log is not None:
            self._copy_log(piece, start, end)
        if self.is_done or self.ahead_bytes >= end - start:
            self.ahead_bytes -= end - start
            if self._held is not None:
                self._hold_back(piece, start, end)
            return self._edits
        pos = start + self.ahead_bytes
        self._held_from = start
        try:
            while pos < end:
                pos = self._read(piece, pos, end, far if far > end else end)
        except StopIteration as stop:
            pos = stop.value + self._offset
            self.is_done = True
        except Malformed as fault:
            self._end_with(fault)
        self.ahead_bytes = pos - end
        if self._held is not None:
            self._hold_back(piece, self._held_from, end)
        return self._edits

    def finish(self) -> None:
        """Handle the end of the frame: an incomplete body is a fault."""
        if self.fault is None and (not self.is_done or self.ahead_bytes > 0):
            self._end_with(Malformed("the body is cut short"))
        self.complete()

    def _read(self, piece: Buffer, pos: int, end: int, far: int) -> int:
        """Run the generator over piece[pos:end]; return where it must continue, which may be beyond `end`."""
        carried = len(self._carry)
        stop = max(pos, pos + self._need - carried)
        if stop > end:
            self._carry += bytes(piece[pos:end])
            return end
        self._offset = 0
        if not carried:
            pos, self._need = self._walk.send((piece, pos, end, far))
            return pos
        joined = self._carry + bytes(piece[pos:stop])
        self._carry = b""
        self._offset = pos - carried
        try:
            ahead, self._need = self._walk.send((joined, 0, len(joined), len(joined)))
        finally:  # also when the generator ends here
            if self._checksum is not None:
                self._pass_by(piece, stop, end)
            if self._log is not None:
                self._copy_log(piece, stop, end)
        if ahead >= carried:
            return ahead + self._offset
        self._carry = joined[ahead:]  # the generator read beyond its position: a batch may be shorter than a header
        return stop

    def _end_with(self, fault: Malformed) -> None:
        self.is_done = True
        self.fault = fault

    # The generator calls these methods (plans.Streamed). Its position plus `_offset` is a position in the piece. A
    # value that it reads separately, such as a tag number or a count, always ends in the piece, never in `_carry`.

    def begin_batch(self, batch: Batch, buffer: Buffer, pos: int, end: int) -> None:
        """Start the checksum, and perhaps a copy, of the batch that begins at `pos`."""
        size = batch.header.size_bytes
        copy = None if self._room is None else self._room.copy(batch.topic, batch.topic_id, size)
        self._batch = batch._replace(copy=copy)
        self._checksum = Checksum(batch.header)
        self._pass_by(buffer, pos, end)

    def _pass_by(self, piece: Buffer, start: int, end: int) -> None:
        """Add the bytes of the current batch, which continue at `start`, to its checksum and its copy."""
        checksum, batch = self._checksum, self._batch
        assert checksum is not None and batch is not None
        part = memoryview(piece)[start : min(end, start + checksum.left)]
        checksum.add(part)
        if batch.copy is not None:
            batch.copy.data += part
        if not checksum.left:
            self.batches.append(batch._replace(crc_valid=checksum.is_valid))
            self._checksum = self._batch = None

    def may_be_log(self, topic: str | None, topic_id: UUID | None) -> bool:
        """Return whether the batches of a topic are copied as batches of a coordinator's log."""
        assert self._logs is not None
        return self._logs.may_be(topic, topic_id)

    def begin_logged(self, batch: Batch, buffer: Buffer, pos: int, end: int) -> None:
        """Start a copy of the batch of a coordinator's log that begins at `pos`, unless it exceeds a limit."""
        assert self._logs is not None
        size = batch.header.size_bytes
        copy = self._logs.copy(batch.topic, batch.topic_id, size)
        if copy is not None:
            self._log, self._log_left = batch._replace(copy=copy), size
            self._copy_log(buffer, pos, end)

    def _copy_log(self, piece: Buffer, start: int, end: int) -> None:
        """Add the bytes of the current batch of a log, which continue at `start`, to its copy."""
        batch, logs = self._log, self._logs
        assert batch is not None and batch.copy is not None and logs is not None
        part = memoryview(piece)[start : min(end, start + self._log_left)]
        batch.copy.data += part
        self._log_left -= len(part)
        if not self._log_left:
            self._log = None
            if logs.accepts(batch):
                self.logged.append(batch)

    def hide_tag(self, pos: int) -> None:
        """Replace the tag number of the field with the addresses, the byte before `pos`, by an unknown one."""
        self._edit(pos + self._offset - 1, pos + self._offset, bytes((UNKNOWN_TAG,)))
        self.neutralised = True

    def mark_head(self, pos: int) -> None:
        """The head ends before `pos`."""
        self.head_end = pos + self._offset

    def hold(self, pos: int) -> None:
        """Hold back everything from `pos` on, where the array of addresses begins."""
        self._held = bytearray()
        self._held_from = pos + self._offset

    def release(self, buffer: Buffer, pos: int, entries: int, tags: int) -> None:
        """Replace the held bytes, the array of addresses and the tag count after it, by an empty array and a filler."""
        held = self._held
        assert held is not None
        held += buffer[self._held_from : pos]
        self._edit(self._held_from, pos, _emptied(len(held), tags) if entries > 0 else bytes(held))
        self.neutralised = entries > 0
        self._held = None

    def _hold_back(self, piece: Buffer, start: int, end: int) -> None:
        """Keep piece[start:end] and remove it from the forwarded bytes."""
        held = self._held
        assert held is not None
        held += piece[start:end]
        self._edit(start, end, b"")
        if len(held) > MAX_TAIL and self.fault is None:
            self._end_with(Malformed(f"the addresses at the end take more than {MAX_TAIL} bytes"))

    def _edit(self, start: int, end: int, replacement: bytes) -> None:
        if self._edits is None:
            self._edits = []
        self._edits.append((start, end, replacement))


def _emptied(size: int, tags: int) -> bytes:
    """Return `size` bytes: an empty compact array, the tag count `tags` + 1, and an unknown tag that fills the rest."""
    head = b"\1" + write_uvarint(tags + 1) + bytes((UNKNOWN_TAG,))
    room = size - len(head)
    width = next(width for width in range(1, 6) if room - width < 1 << 7 * width)
    filler = bytearray(write_uvarint(room - width))
    while len(filler) < width:  # the shortest varint would leave one byte over: use a longer form
        filler[-1] |= 128
        filler.append(0)
    return head + filler + bytes(room - width)


@cache
def empty_rest(api_key: int, version: int) -> bytes:
    """Return the bytes after the head in a response without further contents; appended to a head, they complete it."""
    frame = bytes(8) + encode_response(api_key, version, {"correlationId": 0}, {})[4:]
    walker = BodyWalker(api_key, version, marks_head=True, ahead_bytes=8)
    walker.feed(frame, 0, len(frame))
    assert walker.head_end is not None
    return frame[walker.head_end :]

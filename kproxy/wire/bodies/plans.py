"""The emitters: they generate the Python code that reads the bodies of one API, version and side.

Duty: place the statements of `fields.Wanted` in the walk over the schema (`protocol.plans`), and read record batch
headers; the code skips payloads by their length. It has two forms: a function over a body that is complete in a buffer,
and a generator that suspends where a piece ends inside a value. Bounds: one plan per API, version, side and detail,
kept for ever; a string of at most MAX_TEXT bytes. Raises Malformed for bytes that cannot be a body, and nothing else.
Knows neither frames nor the caller of the generator.
"""

from collections.abc import Callable, Generator
from functools import cache
from typing import ClassVar, Protocol
from uuid import UUID

from kproxy.errors import ProtocolError
from kproxy.protocol.codec import Plan
from kproxy.protocol.plans import Length
from kproxy.protocol.primitives import Buffer
from kproxy.protocol.records import (
    CONTROL,
    HEADER_BYTES,
    LEAST_LENGTH,
    V2,
    V2_COUNTS,
    BatchHeader,
    crc_valid,
    read_header,
)
from kproxy.protocol.schema import Field, address_path
from kproxy.wire.bodies.fields import Wanted, head_array
from kproxy.wire.bodies.found import (
    BATCHES,
    BLANK,
    CHECKED,
    NONE,
    RECORDS,
    SUMS,
    TOPICS,
    Batch,
    Found,
    Partition,
    Sums,
)

# Yields (position in the current buffer, bytes needed there), receives the next (buffer, position, end, far), and
# returns the position of the body's end. Both positions may be beyond the end. The generator may read headers of
# consecutive batches up to `far`, which is at least the end, and at most MAX_LOOKS headers beyond the end.
Walk = Generator[tuple[int, int], tuple[Buffer, int, int, int], int]

MAX_LOOKS = 32

MAX_TEXT = 0x7FFF  # the longest string that Kafka's non-compact length can state


class Streamed(Protocol):
    """The methods that a generator calls on its Found. `pos` is a position in the last buffer that it received."""

    looks: int  # headers of batches read since the records began or continued

    def begin_batch(self, batch: Batch, buffer: Buffer, pos: int, end: int) -> None:
        """A complete batch begins at `pos`; its bytes may continue in later pieces."""

    def may_be_log(self, topic: str | None, topic_id: UUID | None) -> bool:
        """Return whether the batches of a topic are copied as batches of a coordinator's log."""

    def begin_logged(self, batch: Batch, buffer: Buffer, pos: int, end: int) -> None:
        """A complete batch of a log begins at `pos`; its bytes may continue in later pieces."""

    def hide_tag(self, pos: int) -> None:
        """The tag number of the field with the addresses is the byte before `pos`."""

    def hold(self, pos: int) -> None:
        """The array of addresses begins at `pos`."""

    def release(self, buffer: Buffer, pos: int, entries: int, tags: int) -> None:
        """The array of addresses, of `entries` elements, and the tag count after it end before `pos`."""

    def mark_head(self, pos: int) -> None:
        """The head of the response (see `fields.head_array`) ends before `pos`."""


@cache
def body_reader(api_key: int, version: int, side: str, detail: int, logs: bool = False) -> Callable[..., Found]:
    """Return read(buffer, start, end) -> Found for bodies that are complete in a buffer.

    The function finds the same values as a BodyWalker, at half the cost. `start` is the byte after the correlation id.
    The frame may have further bytes after the body, as the protocol permits. With RECORDS the fourth argument is the
    Room for copies; with `logs` the last argument is the Logs. `read` raises Malformed.
    """
    return WholeBody(api_key, version, side, detail, logs).plan()


@cache
def body_walk(
    api_key: int, version: int, side: str, detail: int, neutralise: bool, marks_head: bool, logs: bool = False
) -> Callable[[Streamed], Walk]:
    """Return the generator function that reads bodies in pieces; see StreamedBody."""
    return StreamedBody(api_key, version, side, detail, neutralise, marks_head, logs).plan()


class _Body(Plan):
    """The code that both forms share: it fills `found`, and reads the headers of record batches."""

    utf8 = "replace"
    walks_all_tags = True
    may_be_log: ClassVar[str]  # the expression by which the code calls the function of that name

    def __init__(self, api_key: int, version: int, side: str, detail: int, logs: bool = False) -> None:
        wanted = Wanted(api_key, version, side, detail)
        super().__init__(wanted.message, version, wanted.paths)
        self.side = side
        self.detail = wanted.detail
        self.noted = wanted.noted
        self.partitions = wanted.partitions
        self.known = wanted.known
        self.lists = ("sums",) if self.detail == SUMS else ("partitions", "batches") if self.partitions else ()
        self.logs = logs and self.detail >= TOPICS and bool(self.partitions)
        self.attributes = wanted.attributes
        self.named = wanted.named
        self.topics = wanted.topics
        self.statements = wanted.statements
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
        elif path in self.statements:
            self.after(self.statements[path].format(var))
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
            carried = "new(Sums, (topic, topic_id, total, batches, records, codecs, of_partition))"
            self.line(f"if total: sums.append({carried})")
        elif path in self.partitions:
            fields = Partition._fields[3:]
            values = (f"of_{name}" if name in self.known else str(getattr(BLANK, name)) for name in fields)
            self.line(f"partitions.append(new(Partition, (topic, topic_id, group_id, {', '.join(values)})))")
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
            if self.logs:
                self.line(f"is_log = left and {self.may_be_log}(topic, topic_id)")
            self.begin_records()
            with self.block("while left:"):
                self.line(f"size = left if left < {HEADER_BYTES} else {HEADER_BYTES}")
                self.need_header()
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
            self.end_records()
            self.go_to("stop")
        return None

    def begin_records(self) -> None:
        """Emit the code before the first batch of a records field."""

    def need_header(self) -> None:
        """Emit the wait for the header of a batch, of `size` bytes."""
        self.need("size")

    def end_records(self) -> None:
        """Emit the code after the last batch of a records field."""

    def read_header(self) -> None:
        """Emit the reading of a header, up to an incomplete one or other bytes: only complete batches are counted."""
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
        if self.logs:
            with self.block("if is_log:"):
                self.line("header = new(BatchHeader, header)")
                self.logged_batch()
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
        """Emit the handling of the complete batch that begins at `pos`."""
        raise NotImplementedError

    def logged_batch(self) -> None:
        """Emit the handling of the complete batch of a coordinator's log that begins at `pos`."""
        raise NotImplementedError

    def sum_up(self) -> None:
        """Emit the fast path for batches of magic 2, without a BatchHeader; others fall through to `read_header`."""
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


class WholeBody(_Body):
    """The function plan(buffer, start, end) -> Found; a `room` argument with RECORDS, a `logs` argument with logs."""

    may_be_log = "logs.may_be"

    def plan(self) -> Callable[..., Found]:
        self.line("found = Found()")
        for name in self.lists:
            self.line(f"{name} = []")
        if self.logs:
            self.line("logged = []")
        with self.translated():
            self.body()
        self.short("pos > end")
        for name in self.lists:
            self.line(f"if {name}: found.{name} = {name}")
        if self.logs:
            self.line("if logged: found.logged = logged")
        if self.noted:
            self.line("found.complete()")
        self.line("return found")
        room = ", room=None" if self.detail == RECORDS else ""
        return self.function(f"buffer, start, end{room}{', logs=None' if self.logs else ''}")

    def logged_batch(self) -> None:
        self.line("copy = logs.copy(topic, topic_id, size)")
        with self.block("if copy is not None:"):
            self.line("copy.data += memoryview(buffer)[pos : pos + size]")
            self.line(f"batch = {self.new_batch('False', 'None', 'copy')}")
            self.line("if logs.accepts(batch): logged.append(batch)")

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


class StreamedBody(_Body):
    """The generator function plan(found) -> Walk; `found` is a Found that is also a Streamed.

    `pos` in the generated code is a position in the current buffer; `base + pos` is the same position counted from the
    start of the body, which stays valid when the buffer changes.

    neutralise: call `hide_tag` or `hold` and `release` where the response contains addresses.
    marks_head: call `mark_head` at the end of the head.
    """

    here = "base + pos"

    may_be_log = "found.may_be_log"

    def __init__(
        self, api_key: int, version: int, side: str, detail: int, neutralise: bool, marks_head: bool, logs: bool
    ) -> None:
        super().__init__(api_key, version, side, detail, logs)
        self.head_array = head_array(api_key, version) if marks_head else None
        carrier = address_path(api_key, version) if neutralise else None
        fields = {field.name: field for field in self.message.fields}
        self.strict = carrier is not None
        self.hidden_tag = fields[carrier].tag if carrier else None
        self.held_array = carrier if carrier and self.hidden_tag is None else None

    def plan(self) -> Callable[[Streamed], Walk]:
        for name in self.lists:
            self.line(f"{name} = found.{name}")
        self.line("base = 0")
        self.line("buffer, pos, end, far = yield 0, 0")
        self.body()
        self.line("return pos")
        return self.function("found")

    def whole_batch(self) -> None:
        batch = self.new_batch("False", "None", "None")
        self.line(
            f"found.begin_batch({batch}, buffer, pos, end)" if self.detail >= CHECKED else f"batches.append({batch})"
        )

    def logged_batch(self) -> None:
        self.line(f"found.begin_logged({self.new_batch('False', 'None', 'None')}, buffer, pos, end)")

    def go_to(self, place: str) -> None:
        self.line(f"pos = {place} - base")

    def need(self, size: int | str) -> None:
        with self.block(f"if end - pos < {size}:"):
            self.line("base += pos")
            self.line(f"buffer, pos, end, far = yield pos, {size}")
            self.line("base -= pos")

    def begin_records(self) -> None:
        self.line("looks = 0")
        if self.detail >= CHECKED:  # the checksum and the copy need the bytes of batches in order
            self.line("far = end")
        elif self.logs:
            self.line("if is_log: far = end")

    def need_header(self) -> None:
        with self.block("if far - pos < size:"):
            self.line("found.looks = looks")
            self.line("looks = 0")
            self.line("base += pos")
            self.line("buffer, pos, end, far = yield pos, size")
            self.line("base -= pos")
            if self.detail >= CHECKED:
                self.line("far = end")
            elif self.logs:
                self.line("if is_log: far = end")
        self.line("looks += 1")
        self.line(f"if looks == {MAX_LOOKS}: far = end")

    def end_records(self) -> None:
        self.line("found.looks = looks")

    def short(self, condition: str) -> None:
        """Emit nothing: missing bytes may be in the next piece; `BodyWalker.finish` reports a body that is cut."""

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
            self.fault(f"{var} > 0xFFFF_FFFF", "a varint of more than 32 bits")
            if self.strict:  # `hide_tag` changes one byte, so a tag number must have its shortest form
                self.fault("not byte", "a varint with a needless byte")

    def tag_read(self, path: str, tag: str) -> None:
        if not path and self.hidden_tag is not None:
            self.line(f"if {tag} == {self.hidden_tag}: found.hide_tag(pos)")

    def before(self, path: str) -> None:
        super().before(path)
        if path == self.held_array:
            self.settle()
            self.need(1)  # a payload skipped before it may end in a piece that has not arrived
            self.line("found.hold(pos)")

    def behind(self, path: str) -> None:
        super().behind(path)
        if path == self.head_array:
            self.settle()
            self.need(1)  # its last field may be skipped and end in a piece that has not arrived
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

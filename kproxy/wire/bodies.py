"""The structural reader: walks a body as it streams past and never needs it whole.

Duty: from the pieces of a frame, split anywhere, the throttle and every error code, and for an owner that rewrites the
one change that must be made at the tail of a body whose size is already announced: the addresses in it are hidden at
constant size. The walk is the schema's, compiled per (api, version, side) into a generator of straight-line code that
stops only where a chunk ends inside what it must read; payloads are stepped over by their length, so that a chunk that
lies within records costs one comparison.

Bounded by: what a read that straddles two chunks needs (60 bytes), MAX_TAIL for a tail that is held back, and
MAX_ERRORS codes. Bytes of a peer never raise: a fault ends the looking and is told. Refuses to know frames and pairing.
"""

from collections.abc import Callable, Generator
from functools import cache

from kproxy.errors import Malformed
from kproxy.protocol.codec import Plan, api_message, is_noted, paths_of
from kproxy.protocol.plans import Length
from kproxy.protocol.primitives import Buffer, write_uvarint
from kproxy.protocol.schema import Field, address_path

Edit = tuple[int, int, bytes]  # instead of the chunk's bytes [start, end) send these; they may be none
Walk = Generator[tuple[int, int], tuple[Buffer, int, int], int]

MAX_TAIL = 64 * 1024  # a thousand brokers or so
MAX_ERRORS = 64 * 1024  # more are not kept

# What addresses are hidden under: an unknown tag is skipped by every client. The highest of one byte is the last that
# Kafka, which counts from 0, will ever use; so nobody mistakes the content, even if tags behind it are lower.
UNKNOWN_TAG = 127


class BodyWalker:
    """Reads one response body; `feed` gets its bytes in order, from the byte behind the correlation id.

    neutralise: the client must not see the addresses of a streamed answer. Fetch's are a tagged field, whose number is
    changed when it passes, at once. ShareFetch's are an array, which is emptied; since what fills its place must open
    with its size, the array, to the count of the tags behind it, is held back and comes out as one edit when that has
    arrived. Nothing else is held back. With a `fault`, an owner that rewrites must close: what follows could name
    brokers.
    """

    __slots__ = (
        "_carry",
        "_done",
        "_edits",
        "_errors",
        "_held",
        "_held_from",
        "_need",
        "_offset",
        "_skip",
        "_walk",
        "error_code",
        "fault",
        "neutralised",
        "throttle_ms",
    )

    def __init__(self, api_key: int, api_version: int, *, neutralise: bool = False) -> None:
        self.throttle_ms = -1
        self.error_code: int | None = None  # as codec.response_scan has it, after finish()
        self.neutralised = False  # addresses were hidden
        self.fault: Malformed | None = None

        self._errors: list[int] = []
        self._carry = b""  # bytes of earlier chunks, already sent, that the next read begins with
        self._skip = 0  # bytes that nobody needs to see
        self._held: bytearray | None = None
        self._held_from = 0
        self._edits: list[Edit] | None = None
        self._offset = 0  # from a position of the walk to one of the chunk
        self._done = False
        self._walk = _walk(api_key, api_version, neutralise)(self)
        _, self._need = next(self._walk)

    def feed(self, chunk: Buffer, start: int, end: int) -> list[Edit] | None:
        """The next bytes of the body are chunk[start:end]: what to change in them, in order, or None."""
        self._edits = None
        if self._done or self._skip >= end - start:
            self._skip -= end - start
            if self._held is not None:
                self._hold_back(chunk, start, end)
            return self._edits
        pos = start + self._skip
        self._held_from = start
        try:
            while pos < end:
                pos = self._read(chunk, pos, end)
        except StopIteration as stop:
            pos = stop.value + self._offset
            self._done = True
        except Malformed as fault:
            self._end_with(fault)
        self._skip = pos - end
        if self._held is not None:
            self._hold_back(chunk, self._held_from, end)
        return self._edits

    def finish(self) -> None:
        """The frame has ended."""
        if self.fault is None and (not self._done or self._skip > 0):
            self._end_with(Malformed("the body is cut short"))
        if self.error_code is None and self._errors:
            self.error_code = self._errors[0]

    @property
    def errors(self) -> tuple[int, ...]:
        """Every code other than 0, in wire order."""
        return tuple(self._errors)

    def _read(self, chunk: Buffer, pos: int, end: int) -> int:
        """Let the walk go on with what there is; returns from where on it needs more, which may be behind `end`."""
        carried = len(self._carry)
        stop = pos + self._need - carried
        if stop > end:
            self._carry += bytes(chunk[pos:end])
            return end
        self._offset = 0
        if carried:
            chunk = self._carry + bytes(chunk[pos:stop])
            self._carry = b""
            self._offset = pos - carried
            pos, end = 0, len(chunk)
        pos, self._need = self._walk.send((chunk, pos, end))
        return pos + self._offset

    def _end_with(self, fault: Malformed) -> None:
        self._done = True
        self.fault = fault

    # What the compiled walk calls. Its position is one in the chunk less the offset; what it has just read alone, as it
    # does a tag or a count, is never carried over.

    def note_error(self, code: int) -> None:
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(code)

    def hide_tag(self, pos: int) -> None:
        """The tag of the addresses is the byte before `pos`."""
        self._edit(pos + self._offset - 1, pos + self._offset, bytes((UNKNOWN_TAG,)))
        self.neutralised = True

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
def _walk(api_key: int, version: int, neutralise: bool) -> Callable[[BodyWalker], Walk]:
    return _Stream(api_key, version, neutralise).plan()


class _Stream(Plan):
    """plan(walker) -> a generator: it yields (position, bytes needed there) and is sent (buffer, position, end).

    `base` is what a position in today's buffer lacks to one that stays the same when the buffer changes.
    """

    walks_all_tags = True
    here = "base + pos"

    def __init__(self, api_key: int, version: int, neutralise: bool) -> None:
        message = api_message(api_key, version, "response")
        carrier = address_path(api_key, version) if neutralise else None
        wanted = [path for path in paths_of(message.fields, version) if is_noted(path)]
        super().__init__(message, version, wanted)
        fields = {field.name: field for field in message.fields}
        self.strict = carrier is not None
        self.hidden_tag = fields[carrier].tag if carrier else None
        self.held_array = carrier if carrier and self.hidden_tag is None else None

    def plan(self) -> Callable[[BodyWalker], Walk]:
        self.line("base = 0")
        self.line("buffer, pos, end = yield 0, 0")
        self.header("response")
        self.struct(self.message.fields, "")
        self.settle()
        self.line("return pos")
        return self.function("walker")

    def kept(self, field: Field, path: str, var: str) -> None:
        if path == "throttleTimeMs":
            self.after(f"walker.throttle_ms = {var}")
            return
        if path == "errorCode":
            self.after(f"walker.error_code = {var}")
        self.after(f"if {var}: walker.note_error({var})")

    # The grammar, over chunks.

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

    # What an owner that rewrites must not let through.

    def tag_read(self, path: str, tag: str) -> None:
        if not path and self.hidden_tag is not None:
            self.line(f"if {tag} == {self.hidden_tag}: walker.hide_tag(pos)")

    def before(self, path: str) -> None:
        if path == self.held_array:
            self.settle()
            self.need(1)  # what is before it may be stepped over into a chunk that is not here yet
            self.line("walker.hold(pos)")

    def counted(self, path: str, length: Length) -> None:
        if path == self.held_array:
            self.line(f"entries = {length.real}")

    def tags(self, tagged: list[Field], path: str, var: str | None) -> None:
        if path or not self.held_array:
            super().tags(tagged, path, var)
            return
        count = self.fresh("t")
        self.uvarint(count)
        self.line(f"walker.release(buffer, pos, entries, {count})")
        self.tag_loop(count, [], path, var)

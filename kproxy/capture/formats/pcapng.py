"""pcapng: sections, interfaces and blocks as the same windows of packet records that classic pcap gives.

Duty: several sections of either byte order, interfaces with their own link type, time resolution and offset, enhanced,
simple and obsolete packet blocks, interface statistics (the kernel's drops go to the quality) and decryption secrets.
Reference: draft-ietf-opsawg-pcapng. A block is taken as sound when its length is repeated at its end; after one that is
not, reading goes on at the next place where that holds, since blocks are aligned to four bytes.

A simple packet block has no time: it gets that of the packet before it.
"""

from collections.abc import Iterator
from struct import Struct, error
from typing import TYPE_CHECKING, NamedTuple

from kproxy.capture.formats import heads
from kproxy.capture.formats.files import Source
from kproxy.capture.formats.holes import Hole
from kproxy.capture.formats.records import MAX_RECORD, SECOND, WINDOW, Record, Window
from kproxy.capture.quality import NONE, Quality
from kproxy.errors import CaptureError

if TYPE_CHECKING:
    from mmap import mmap

SECTION, INTERFACE, _OLD_PACKET, SIMPLE, STATISTICS, _ENHANCED, SECRETS = 0x0A0D0D0A, 1, 2, 3, 5, 6, 10
KNOWN = frozenset((SECTION, INTERFACE, _OLD_PACKET, SIMPLE, 4, STATISTICS, _ENHANCED, 9, SECRETS, 0xBAD, 0x40000BAD))
ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_TLS_KEY_LOG = 0x544C534B
# Fields of blocks with a packet, after the block's head: interface, captured length, original length.
PACKETS = {_ENHANCED: "I8xII", _OLD_PACKET: "H10xII"}
PACKET_BYTES = 28
LEAST_BLOCK = 12  # bytes: its kind, and its length twice
_LEAST_BODY = {INTERFACE: 8, _OLD_PACKET: 20, SIMPLE: 4, STATISTICS: 12, SECRETS: 8}  # bytes of their fields

_OPT_END, _IF_TSRESOL, _IF_TSOFFSET, _ISB_IFDROP, _ISB_OSDROP = 0, 9, 14, 5, 7

LATEST_NS = 1 << 63  # tables hold times as int64: the year 2262


class _Interface(NamedTuple):
    link: int
    snap: int
    multiply: int  # a timestamp's unit in nanoseconds is multiply / divide
    divide: int
    offset_ns: int


class Front(NamedTuple):
    """The blocks before a file's first packet."""

    data: bytes
    order: str
    links: list[int]  # of the interfaces
    has_secrets: bool


def front(data: "bytes | mmap") -> Front | None:
    """The front of a file that begins with `data`; None: no packet with a time is seen in it, or what is no block."""
    order = ORDERS.get(data[8:12])
    if order is None:
        return None
    block, interface = Struct(order + "II").unpack_from, Struct(order + "H").unpack_from
    position, links, has_secrets = 0, list[int](), False
    while position + 12 <= len(data):
        kind, length = block(data, position)
        if kind in PACKETS:
            return Front(bytes(data[:position]), order, links, has_secrets)
        if kind not in KNOWN or kind == SIMPLE or (kind == SECTION and position):
            return None
        if length < LEAST_BLOCK + _LEAST_BODY.get(kind, 0) or length & 3:
            return None
        if kind == INTERFACE:
            links.append(interface(data, position + 8)[0])
        has_secrets |= kind == SECRETS
        position += length
    return None


class Sections:
    """The records of one pcapng file, whose first four bytes are already read."""

    def __init__(self, source: Source, quality: Quality, head: bytes, secrets: list[bytes]) -> None:
        self._source = source
        self._quality = quality
        self._head = head
        self._secrets = secrets
        self._order = "<"
        self._interfaces: list[_Interface] = []
        self._drops: dict[int, int] = {}
        self._last_ns = NONE
        self.changes: set[str] = set()  # kinds of blocks behind a packet that what comes depends on
        self._begin("<")

    def windows(self) -> Iterator[Window]:
        data = self._head
        offset = 0
        hole: Hole | None = None
        while True:
            more = self._source.read(WINDOW)
            data += more
            position = 0
            records: list[Record] = []
            while True:
                if hole is not None:
                    begin = position
                    position, found = self._next_sound(data, position, not more)
                    hole.add(data[begin:position])
                    if not found:
                        break
                    hole.end(self._quality)
                    hole = None
                position, sound = self._walk(data, position, records)
                if sound:
                    break
                if not offset and not position:
                    raise CaptureError(self._source.name, "a pcapng file whose first block makes no sense", 0)
                hole = Hole(self._last_ns)
                hole.add(data[position : position + 4])
                position += 4
            if records:
                yield Window(data, offset, records)
            if not more:
                break
            data = data[position:]
            offset += position
        if hole is not None:
            hole.add(data[position:])
            hole.end(self._quality, final=True)
        elif position < len(data):
            self._quality.note("cut_file", self._last_ns, size=len(data) - position)
        self._end_section()

    def _begin(self, order: str) -> None:
        self._order = order
        self._block = Struct(order + "II")
        self._word = Struct(order + "I")
        self._enhanced = Struct(order + "IIIII")
        self._interfaces = []

    def _end_section(self) -> None:
        drops = sum(self._drops.values())
        if drops:
            self._quality.note("kernel_drops", self._last_ns, count=drops)
        self._drops.clear()

    def _walk(self, data: bytes, position: int, records: list[Record]) -> tuple[int, bool]:
        """Take whole blocks from `position` on; returns where it stopped, and whether that place is sound."""
        size = len(data)
        unpack, word = self._block.unpack_from, self._word.unpack_from
        enhanced = self._enhanced.unpack_from
        interfaces = self._interfaces
        append = records.append
        while position + 12 <= size:
            kind, length = unpack(data, position)
            if kind == SECTION:
                order = ORDERS.get(data[position + 8 : position + 12])
                if order is None:
                    return position, False
                length = Struct(order + "I").unpack_from(data, position + 4)[0]
                if order != self._order and length + position <= size:
                    self._begin(order)
                    unpack, word, enhanced = self._block.unpack_from, self._word.unpack_from, self._enhanced.unpack_from
            if length < 12 or length & 3 or length > MAX_RECORD:
                return position, False
            end = position + length
            if end > size:
                break
            if word(data, end - 4)[0] != length:
                return position, False
            try:
                if kind == _ENHANCED:
                    name, high, low, captured, original = enhanced(data, position + 8)
                    start = position + 28
                    link, _, multiply, divide, offset_ns = interfaces[name]
                    time_ns = (high << 32 | low) * multiply // divide + offset_ns
                    if start + captured > end - 4 or not 0 <= time_ns < LATEST_NS:
                        return position, False
                    self._last_ns = time_ns
                    append((time_ns, link, start, start + captured, original))
                elif kind == SECTION:
                    self._note_change("sections")
                    self._end_section()
                    self._interfaces = interfaces = []
                else:
                    self._other(kind, data, position + 8, end - 4, records)
            except (IndexError, error):
                return position, False
            position = end
        return position, True

    def _other(self, kind: int, data: bytes, start: int, end: int, records: list[Record]) -> None:
        order = self._order
        if end - start < _LEAST_BODY.get(kind, 0):
            raise IndexError
        if kind == INTERFACE:
            self._note_change("interfaces")
            link, snap = Struct(order + "HxxI").unpack_from(data, start)
            options = self._options(data, start + 8, end)
            resolution = (options.get(_IF_TSRESOL) or b"\x06")[0]
            shift = int.from_bytes(options.get(_IF_TSOFFSET, b""), "little" if order == "<" else "big", signed=True)
            divide = 1 << (resolution & 0x7F) if resolution & 0x80 else 10**resolution
            self._interfaces.append(_Interface(link, snap, SECOND, divide, shift * SECOND))
        elif kind == SIMPLE:
            original = self._word.unpack_from(data, start)[0]
            interface = self._interfaces[0]
            captured = min(original, interface.snap or original, end - start - 4)
            records.append((max(self._last_ns, 0), interface.link, start + 4, start + 4 + captured, original))
        elif kind == _OLD_PACKET:
            name, _, high, low, captured, original = Struct(order + "HHIIII").unpack_from(data, start)
            interface = self._interfaces[name]
            time_ns = (high << 32 | low) * interface.multiply // interface.divide + interface.offset_ns
            if start + 20 + captured > end or not 0 <= time_ns < LATEST_NS:
                raise IndexError
            self._last_ns = time_ns
            records.append((time_ns, interface.link, start + 20, start + 20 + captured, original))
        elif kind == STATISTICS:
            self._note_change("statistics")
            name = self._word.unpack_from(data, start)[0]
            options = self._options(data, start + 12, end)
            counts = [
                int.from_bytes(options.get(code, b""), "little" if order == "<" else "big")
                for code in (_ISB_IFDROP, _ISB_OSDROP)
            ]
            self._drops[name] = max(counts)  # a later block replaces an earlier one: the counts only grow
        elif kind == SECRETS:
            secret, length = Struct(order + "II").unpack_from(data, start)
            if secret == _TLS_KEY_LOG:
                self._secrets.append(data[start + 8 : min(start + 8 + length, end)])

    def _note_change(self, what: str) -> None:
        if self._last_ns != NONE:
            self.changes.add(what)

    def _options(self, data: bytes, position: int, end: int) -> dict[int, bytes]:
        options: dict[int, bytes] = {}
        head = Struct(self._order + "HH").unpack_from
        while position + 4 <= end:
            code, length = head(data, position)
            if code == _OPT_END or position + 4 + length > end:
                break
            options[code] = data[position + 4 : position + 4 + length]
            position += 4 + (length + 3 & ~3)
        return options

    def _next_sound(self, data: bytes, position: int, final: bool) -> tuple[int, bool]:
        """The next place with a block of a known type whose length is repeated at its end.

        final: the file ends with the data, so what would reach beyond them is no block.
        """
        for start in heads.places(
            data, position, len(data) - 11, step=4, order=self._order, length_at=4, least=LEAST_BLOCK, most=MAX_RECORD
        ):
            kind, length = self._block.unpack_from(data, start)
            if kind in KNOWN and not length & 3:
                if start + length > len(data):
                    if length <= 1 << 18 and not final:
                        return start, False  # more of the file decides
                elif self._word.unpack_from(data, start + length - 4)[0] == length:
                    return start, True
        return max(position, len(data) - 11 & ~3), False

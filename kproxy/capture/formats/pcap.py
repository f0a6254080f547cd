"""Classic pcap: records of either byte order, with micro- or nanoseconds, in windows.

Duty: the records of one file, and where they make no sense the next place from which plausible ones follow each other.
A record whose length is wrong is found by the header behind it, so the last record of a window waits for the next one.
Reference: draft-ietf-opsawg-pcap. Memory: one window. Refuses to know what is in a packet.
"""

from collections.abc import Iterator
from struct import Struct

from kproxy.capture.formats import files, heads
from kproxy.capture.formats.holes import Hole
from kproxy.capture.formats.records import SECOND, WINDOW, Record, Window, most_captured
from kproxy.capture.quality import NONE, Quality

LINK_MASK = 0x03FF_FFFF  # above it: the length of a frame check sequence

HEADER_BYTES = 24  # of a file
LEAST_CAPTURED = 14  # bytes of a packet, where records are looked for
CHAIN = 4  # plausible records in a row that are taken for records
DAY_S = 86_400  # between neighbouring records, in either direction; others are checked
CLASSIC = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}


class Classic:
    """The records of one classic pcap file from `start` on, where one of `last_ns` ended, or the file's header."""

    def __init__(
        self,
        source: files.Source,
        quality: Quality,
        order: str,
        unit: int,
        link: int,
        snap: int,
        start: int = HEADER_BYTES,
        last_ns: int = NONE,
    ) -> None:
        self._source = source
        self._quality = quality
        self._order = order
        self._head = Struct(order + "IIII")
        self._unit = unit  # nanoseconds per unit of the fraction
        self._link = link
        self._snap = snap
        self._most = most_captured(snap)
        self._start = start
        self._last_ns = last_ns

    def windows(self) -> Iterator[Window]:
        data = b""
        offset = self._start  # of data[0]
        hole: Hole | None = None  # where the records stopped making sense
        while True:
            more = self._source.read(WINDOW)
            data += more
            position = 0
            records: list[Record] = []
            while True:
                if hole is not None:
                    begin = position
                    position, found = self._next_sound(data, position, self._last_ns, not more)
                    hole.add(data[begin:position])
                    if not found:
                        break
                    hole.end(self._quality)
                    hole = None
                position, sound = self._walk(data, position, records, not more)
                if sound and not more and position < len(data):  # cut, or a wrong length with records behind it
                    sound = not self._next_sound(data, position + 1, self._last_ns, True)[1]
                if sound:
                    break
                behind, is_known = self._behind_wrong_length(data, position, records, not more)
                if not is_known:
                    break  # more of the file decides
                if behind != position:
                    position = behind
                    continue
                hole = Hole(self._last_ns)
                hole.add(data[position : position + 1])
                position += 1
            if more and hole is None and records and records[-1][3] == position:
                position = records.pop()[2] - 16  # read it again with the next header, which confirms its length
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

    def _walk(self, data: bytes, position: int, records: list[Record], final: bool) -> tuple[int, bool]:
        """Append the complete records from `position` on; return the place after them, and whether it is plausible."""
        unpack = self._head.unpack_from
        append = records.append
        link, unit, most = self._link, self._unit, self._most
        second = SECOND // unit
        size = len(data)
        last = size - 16
        before = self._last_ns // SECOND if self._last_ns != NONE else None
        sound = True
        while position <= last:
            seconds, fraction, captured, original = unpack(data, position)
            if captured > most or fraction >= second or not original:
                sound = False  # no packet has 0 bytes: a hole in the file
                break
            if before is None:
                before = seconds
            if captured > original or not -DAY_S <= seconds - before <= DAY_S:
                believed = self._is_record(data, position, final)
                if believed is None:
                    break
                if not believed:
                    sound = False
                    break
            start = position + 16
            end = start + captured
            if end > size:
                break
            append((seconds * SECOND + fraction * unit, link, start, end, original))
            before = seconds
            position = end
        if records:
            self._last_ns = records[-1][0]
        return position, sound

    def _is_record(self, data: bytes, position: int, final: bool) -> bool | None:
        """Whether a header with an unlikely time or length is valid: records follow it, and none begin in its packet.

        None: more of the file is needed. The clock may have been set, and some programs write another value as original
        length.
        """
        end = position + 16 + self._head.unpack_from(data, position)[2]
        inside, found = self._next_sound(data, position + 16, self._last_ns, final, end)
        if found or inside < end:
            return False if found else None
        chain = self.chain(data, position, NONE, strict=False)
        if chain is None:
            return False
        return True if final or chain[0] == CHAIN else None

    def _behind_wrong_length(self, data: bytes, position: int, records: list[Record], final: bool) -> tuple[int, bool]:
        """The place of the next record, if there is none at `position` because the last record's length is wrong.

        That record is then dropped: records follow after its original length, or begin inside it, as after a lost
        block. `position`: its length is right. False: more of the file is needed.
        """
        if not records or records[-1][3] != position:
            return position, True
        time_ns, _, start, _, original = records[-1]
        searched = [(start, position)]
        if position < start + original <= start + self._most:
            if start + original + 16 > len(data) and not final:
                return position, False
            searched.append((start + original, start + original + 1))
        for begin, stop in searched:
            behind, found = self._next_sound(data, begin, time_ns, final, stop)
            if found:
                del records[-1]
                self._quality.note("damaged", time_ns, size=behind - start + 16)
                return behind, True
            if behind < stop:
                return position, False
        return position, True

    def _next_sound(
        self, data: bytes, position: int, last_ns: int, final: bool, stop: int | None = None
    ) -> tuple[int, bool]:
        """The next place before `stop` with a chain of plausible records; else (the end of the search, False).

        At the end of the file fewer than CHAIN records suffice: preferably a chain that ends with the file, else the
        one with most complete records before a cut one. Bytes that resemble a record by chance mostly look like a cut
        record without a complete one before it.
        """
        order, least, most = self._order, LEAST_CAPTURED, self._most
        most_whole, at = 0, position
        last = len(data) - 16
        if stop is None:
            stop = max(position, last)
        for start in heads.places(
            data, position, min(stop, last), step=1, order=order, length_at=8, least=least, most=most
        ):
            chain = self.chain(data, start, last_ns)
            if chain is None:
                continue
            whole, end = chain
            if whole == CHAIN or (final and end == len(data)):
                return start, True
            if not final:
                return start, False  # more of the file decides
            if whole > most_whole:
                most_whole, at = whole, start
        return (at, True) if most_whole else (stop, False)

    def chain(self, data: bytes, position: int, last_ns: int, *, strict: bool = True) -> tuple[int, int] | None:
        """(how many whole records follow each other from `position` on, CHAIN at most, and where the last one ends).

        The last one may be cut: it ends behind the data. strict: each is near in time, and complete or cut at the snap
        length. None: one is not a record.
        """
        before = last_ns // SECOND
        size = len(data)
        for whole in range(CHAIN):
            if position + 16 > size:
                return whole, position
            seconds, fraction, captured, original = self._head.unpack_from(data, position)
            if fraction >= SECOND // self._unit or captured > self._most or not original:
                return None
            if strict:
                if captured < LEAST_CAPTURED or captured not in (original, self._snap):
                    return None
                if last_ns != NONE and abs(seconds - before) > DAY_S:
                    return None
            before = seconds
            last_ns = 0
            position += 16 + captured
            if position > size:
                return whole, position
        return CHAIN, position

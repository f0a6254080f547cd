"""The TCP segments of a split, each with its packet records.

Duty: dissects a split's packets, including fragments of datagrams that began before it. It yields a segment that is
reassembled from IP fragments with the records of all fragments. Memory: one window, and the fragments of
`capture.dissection.packets`.

Does not group segments by connection.
"""

from collections.abc import Iterator
from typing import Any

from kproxy.capture.dissection.packets import Dissector, Segment
from kproxy.capture.formats.records import Record, Window
from kproxy.capture.formats.splits import Split, windows
from kproxy.capture.quality import Quality
from kproxy.errors import CaptureError

# A packet record of a file: (time_ns, link type, offset, captured bytes, original length)
Packet = tuple[int, int, int, bytes, int]

_NONE: tuple[Packet, ...] = ()


def segments(
    split: Split, quality: Quality, secrets: list[bytes] | None = None
) -> Iterator[tuple[Window, list[tuple[Record, Segment, tuple[Packet, ...]]]]]:
    """Yield each window with its segments: (record, segment, records of its earlier fragments).

    Raises CaptureError for a pcapng file that cannot be read in splits.
    """
    changes = set[str]()
    dissector = _Dissector(Quality())
    if split.overlap < split.start:
        for window in windows(split.before, Quality()):
            _dissect(dissector, window)
    dissector.count_in(quality)
    for window in windows(split, quality, secrets, changes):
        yield window, _dissect(dissector, window)
    if not split.last and (changes or quality.count("cut_file")):
        reason = (
            f"its {' and '.join(sorted(changes))} change later on" if changes else "a payload looks like its blocks"
        )
        raise CaptureError(split.path, f"{reason}: read it in one piece, with splitBytes 0", split.start)
    if not split.last:
        dissector.hand_on(split.handed_on)
    dissector.finish()


def _dissect(dissector: "_Dissector", window: Window) -> list[tuple[Record, Segment, tuple[Packet, ...]]]:
    data = window.data
    dissect = dissector.segment
    found = []
    for record in window.records:
        time_ns, link, start, end, original = record
        segment = dissect(link, data, start, end, time_ns, original)
        if segment is not None and segment[0] is data:
            found.append((record, segment, _NONE))
        elif dissector.name is not None:
            earlier = dissector.follow((time_ns, link, window.offset + start, data[start:end], original), segment)
            if segment is not None:
                found.append((record, segment, earlier))
        elif segment is not None:
            found.append((record, segment, _NONE))
    return found


class _Dissector(Dissector):
    """Keeps the packet records of a datagram's fragments, in addition to the fragments."""

    def __init__(self, quality: Quality) -> None:
        super().__init__(quality)
        self.name: bytes | None = None  # name of the datagram of the last fragment
        self._records: dict[bytes, list[Packet]] = {}

    def count_in(self, quality: Quality) -> None:
        self._quality = quality

    def _fragment(self, name: bytes, *rest: Any) -> Segment | str:
        self.name = name
        return super()._fragment(name, *rest)

    def follow(self, packet: Packet, segment: Segment | None) -> tuple[Packet, ...]:
        """Keep the record of a fragment; if it completed a segment, return the records of the earlier fragments."""
        name, self.name = self.name, None
        assert name is not None
        earlier = self._records.pop(name, [])
        if name in self._fragments:
            self._records[name] = [*earlier, packet]
        if len(self._records) > len(self._fragments):  # the dissector dropped some
            self._records = {name: kept for name, kept in self._records.items() if name in self._fragments}
        return tuple(earlier) if segment is not None else _NONE

    def hand_on(self, offset: int) -> None:
        """Drop datagrams that began at `offset` or later: the next split reads them."""
        for name, packets in self._records.items():
            if packets[0][2] >= offset:
                del self._fragments[name]

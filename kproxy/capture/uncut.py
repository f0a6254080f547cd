"""Packets that the snap length cut, read from another capture of the same packet that has more of it.

Duty: in a file with several snap lengths, as of two interfaces or of two machines whose captures were merged, a packet
may be there twice, first cut and then whole. A cut packet then gets the bytes of its longest copy in the window, and
keeps its place and time; the copy stays where it is, and counts as a copy. If TCP's options were cut, they are not
compared. Windows in which no packet has more bytes than one that was cut, as in all captures with one snap length, are
returned as they are.

A copy in another window is not found. Memory: the identities of one window's packets. Refuses to know whether a packet
was captured twice or sent again.
"""

import numpy as np

from kproxy.capture.columns.inorder import OPTIONS
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.copies import row_of
from kproxy.capture.packets import SAME_PACKET_NS, Dissector
from kproxy.capture.quality import Quality
from kproxy.capture.records import Record, Window

_HEADER_BYTES = 60  # of TCP at most


def uncut(window: Window) -> Window:
    """The window, with cut packets replaced by longer copies of them."""
    if not _has_longer(window):
        return window
    records = list(window.records)
    dissect = Dissector(Quality()).segment
    cut: list[tuple[int, int, bytes]] = []  # index, captured bytes of payload, identity
    longest: dict[bytes, tuple[int, Record]] = {}  # the same bytes, and the record, by identity
    for index, record in enumerate(records):
        time_ns, link, start, end, wire_bytes = record
        packet = bytes(window.data[start:end])
        padded = packet + bytes(_HEADER_BYTES) if len(packet) < wire_bytes else packet
        segment = dissect(link, padded, 0, len(padded), time_ns, wire_bytes)
        if segment is None or segment[0] is not padded:  # without TCP, or a datagram of several fragments
            continue
        captured = len(packet) - segment[6]  # negative: cut within TCP's header
        row = row_of(segment)
        without_options = segment[1] + row[: OPTIONS.start] + row[OPTIONS.stop :]
        whole = segment[1] + row
        if captured < segment[8]:
            cut.append((index, captured, without_options if captured < 0 else whole))
        for identity in (without_options, whole):
            if identity not in longest or captured > longest[identity][0]:
                longest[identity] = captured, record
    for index, captured, identity in cut:
        time_ns = records[index][0]
        more, copy = longest[identity]
        if more > captured and abs(copy[0] - time_ns) <= SAME_PACKET_NS:
            records[index] = (time_ns, *copy[1:])
    return window._replace(records=records)


def _has_longer(window: Window) -> bool:
    """Whether a packet of the window has more captured bytes than one that was cut."""
    records = window.records
    if not records:
        return False
    if isinstance(records, Columns):
        captured, original = records.end - records.start, records.original
    else:
        _, _, start, end, original = np.array(records, np.int64).T
        captured = end - start
    is_cut = captured < original
    return bool(is_cut.any()) and bool(captured[is_cut].min() < captured.max())

"""The packet records of captures, independent of the file's format.

Duty: a `Window` is a piece of a file with the complete records in it. A record is a plain tuple (time_ns, link
type, start, end, original length); start and end are offsets of its captured bytes in the window's data, and
`window.offset + start` is their offset in the (decompressed) file. Refuses to know formats, and contents of packets.
"""

from collections.abc import Sequence
from mmap import mmap
from typing import NamedTuple

Record = tuple[int, int, int, int, int]  # time_ns, link type, start, end, original length

WINDOW = 1 << 19  # larger ones cost page faults
MAX_RECORD = 1 << 24  # libpcap allows 256 KiB for all but USB; a broken length must not become an allocation
SECOND = 1_000_000_000


class Window(NamedTuple):
    """A piece of a capture."""

    data: bytes | mmap
    offset: int  # file offset of data[0], in the decompressed file
    records: Sequence[Record]
    is_lasting: bool = True  # views of `data` stay valid; else only until the next window is requested


def most_captured(snap: int) -> int:
    """The largest plausible record of a file with this snap length."""
    return min(max(snap, 1 << 18), MAX_RECORD)

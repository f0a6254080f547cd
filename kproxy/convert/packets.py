"""The packets of one exchange: their numbers in the capture's files, as Wireshark counts them.

Duty: read a capture once more for the packets of one connection, from the first byte of a request to the last of its
answer, and say which carry which and which were sent before. Whether a segment was sent before is known of the
BEFORE_NS ahead of the exchange.

Memory: MOST packets, and as many sequence numbers. Refuses to know what is in frames.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kproxy.capture.captures import Capture
from kproxy.capture.packets import ACK, FIN, RST, SYN, Dissector
from kproxy.capture.quality import Quality
from kproxy.capture.reassembly import MASK, ahead
from kproxy.convert.frames import Frames
from kproxy.wire.events import BROKER, CLIENT, NONE

BEFORE_NS = 10_000_000_000
MOST = 1000
_FLAGS = ((SYN, "SYN"), (FIN, "FIN"), (RST, "RST"), (ACK, "ACK"))


@dataclass(frozen=True)
class Packet:
    """A packet of the exchange's connection. Times are nanoseconds since the epoch, bytes those of TCP's payload."""

    path: str
    number: int  # in its file, from 1
    time_ns: int
    side: int  # CLIENT or BROKER: who sent it
    payload_bytes: int
    flags: str
    carries: str  # "request" or "response": payload while that was sent; else empty
    is_repeated: bool  # its first byte was sent before: a retransmission, or a packet captured twice


def packets_of(found: Frames) -> list[Packet]:
    """The packets of an exchange's connection while it lasted, MOST at most, in the order of the capture's files.

    Raises CaptureError where a file cannot be read.
    """
    times = [time for time in (found.request_start, found.response_end, found.request_end) if time != NONE]
    if not times or not found.keys:
        return []
    first, last = min(times), max(times)
    sides = {found.keys[0]: CLIENT, found.keys[1]: BROKER}
    return list(_packets(found, sides, first, last))


def _packets(found: Frames, sides: dict[bytes, int], first: int, last: int) -> Iterator[Packet]:
    reached: dict[int, int] = {}  # the sequence number behind the last byte of each side
    starts: dict[int, set[int]] = {CLIENT: set(), BROKER: set()}
    count = 0
    for path in found.paths:
        dissect = Dissector(Quality()).segment
        number = 0
        for window in Capture([path], Quality()).windows():
            before, number = number, number + len(window.records)
            for index, (time_ns, link, start, end, _) in enumerate(window.records, before + 1):
                if not first - BEFORE_NS <= time_ns <= last:
                    continue
                segment = dissect(link, window.data, start, end, time_ns)
                if segment is None or segment[1] not in sides:
                    continue
                side, seq, flags, length = sides[segment[1]], segment[2], segment[4], segment[8]
                is_repeated = length > 0 and seq in starts[side] and ahead(reached.get(side, seq), seq) > 0
                if length > 0:
                    if len(starts[side]) < 1 << 16:
                        starts[side].add(seq)
                    stop = seq + length & MASK
                    reached[side] = stop if ahead(stop, reached.get(side, stop)) >= 0 else reached[side]
                if time_ns < first:
                    continue
                yield Packet(
                    str(path),
                    index,
                    time_ns,
                    side,
                    length,
                    ",".join(name for bit, name in _FLAGS if flags & bit),
                    _carried(found, side, length, time_ns),
                    is_repeated,
                )
                count += 1
                if count == MOST:
                    return


def _carried(found: Frames, side: int, length: int, time_ns: int) -> str:
    if not length:
        return ""
    if side == CLIENT:
        return (
            "request"
            if NONE not in (found.request_start, found.request_end)
            and (found.request_start <= time_ns <= found.request_end)
            else ""
        )
    return (
        "response"
        if NONE not in (found.response_start, found.response_end)
        and (found.response_start <= time_ns <= found.response_end)
        else ""
    )


def by_file(packets: Sequence[Packet]) -> dict[Path, list[int]]:
    """The numbers of packets in each file, in order."""
    files: dict[Path, list[int]] = {}
    for packet in packets:
        files.setdefault(Path(packet.path), []).append(packet.number)
    return files

"""The packets of one exchange: their numbers in the capture's files, as Wireshark counts them.

Duty: reads a capture a second time for the packets of one connection, from the first byte of a request to the last byte
of its response, and marks packets with the frame that they carry, and retransmissions and copies. Retransmissions are
recognised for segments sent up to BEFORE_NS before the exchange.

Memory: MOST packets, and HOLES holes per side. Does not decode frames.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kproxy.capture.connections.reassembly import MASK, ahead
from kproxy.capture.dissection.clock import Clock
from kproxy.capture.dissection.copies import Recent
from kproxy.capture.dissection.packets import ACK, FIN, RST, SYN, Dissector
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from kproxy.convert.frames import Frames
from kproxy.wire.events import BROKER, CLIENT, NONE

BEFORE_NS = 10_000_000_000
MOST = 1000
HOLES = 1000  # the oldest are dropped: a segment that fills such a hole counts as a retransmission
_FLAGS = ((SYN, "SYN"), (FIN, "FIN"), (RST, "RST"), (ACK, "ACK"))


@dataclass(frozen=True)
class Packet:
    """A packet of the exchange's connection. Times are nanoseconds since the epoch, bytes those of TCP's payload."""

    path: str
    number: int  # in its file, from 1
    time_ns: int
    side: int  # CLIENT or BROKER: the sender
    payload_bytes: int
    flags: str
    carries: str  # "request" or "response": payload while that frame was sent; otherwise empty
    is_repeated: bool  # its first byte was sent before
    is_copy: bool  # a packet captured twice, rather than a retransmission


def packets_of(found: Frames) -> list[Packet]:
    """Return the packets of the connection during an exchange, MOST at most, in the order of the capture's files.

    Raises CaptureError for an unreadable file.
    """
    times = [time for time in (found.request_start, found.response_end, found.request_end) if time != NONE]
    if not times or not found.keys:
        return []
    first, last = min(times), max(times)
    sides = {found.keys[0]: CLIENT, found.keys[1]: BROKER}
    return list(_packets(found, sides, first, last))


def _packets(found: Frames, sides: dict[bytes, int], first: int, last: int) -> Iterator[Packet]:
    sent = {CLIENT: _Sent(), BROKER: _Sent()}
    count = 0
    clock, recent = Clock(Quality()), Recent()
    for path in found.paths:
        dissect = Dissector(Quality()).segment
        number = 0
        for taken in Capture([path], Quality()).windows():
            window = clock.take(taken)
            recent.add(window)
            before, number = number, number + len(window.records)
            for index, (time_ns, link, start, end, wire_bytes) in enumerate(window.records):
                if not first - BEFORE_NS <= time_ns <= last:
                    continue
                segment = dissect(link, window.data, start, end, time_ns, wire_bytes)
                if segment is None or segment[1] not in sides:
                    continue
                side, seq, flags, length = sides[segment[1]], segment[2], segment[4], segment[8]
                if not recent.plain[index]:
                    recent.note(index, segment)
                is_repeated = length > 0 and sent[side].again(seq, length)
                if time_ns < first:
                    continue
                yield Packet(
                    str(path),
                    before + index + 1,
                    time_ns,
                    side,
                    length,
                    ",".join(name for bit, name in _FLAGS if flags & bit),
                    _carried(found, side, length, time_ns),
                    is_repeated,
                    is_repeated and recent.has_bytes(index, segment),
                )
                count += 1
                if count == MOST:
                    return
            recent.let_go()


class _Sent:
    """The sequence numbers that one side has sent: all up to `reached`, except for holes, each a (start, stop)."""

    def __init__(self) -> None:
        self.reached: int | None = None
        self.holes: list[tuple[int, int]] = []

    def again(self, seq: int, length: int) -> bool:
        """Record a segment; returns whether its first byte was sent before."""
        stop = seq + length & MASK
        if self.reached is None:
            self.reached = stop
            return False
        first = ahead(seq, self.reached)
        if first >= 0:
            if first > 0:
                self.holes = [*self.holes, (self.reached, seq)][-HOLES:]
            self.reached = stop
            return False
        is_new = any(ahead(seq, hole) >= 0 > ahead(seq, end) for hole, end in self.holes)
        holes = []
        for hole, end in self.holes:
            if ahead(stop, hole) <= 0 or ahead(seq, end) >= 0:
                holes.append((hole, end))
                continue
            holes += [(hole, seq)] if ahead(seq, hole) > 0 else []
            holes += [(stop, end)] if ahead(end, stop) > 0 else []
        self.holes = holes[-HOLES:]
        self.reached = stop if ahead(stop, self.reached) > 0 else self.reached
        return not is_new


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
    """Return the numbers of packets by file, in order."""
    files: dict[Path, list[int]] = {}
    for packet in packets:
        files.setdefault(Path(packet.path), []).append(packet.number)
    return files

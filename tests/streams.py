"""The bytes that each side of each connection of a capture sent, in order: for tests of what reads streams.

For clean captures of one link layer, seen from each connection's SYN on; kproxy's own reading of captures (`capture`)
has tests of its own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct

import zstandard

from kproxy.capture.connections.reassembly import Conversation
from kproxy.capture.dissection.packets import RST, SYN, Dissector
from kproxy.capture.quality import Quality

_RECORD = Struct("<IIII")
_PORTS = Struct(">HH")


class Stream:
    """One connection: (side, bytes, time in ns), in order; side 0 is the client's. port: the server's."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.parts: list[tuple[int, bytes, int]] = []

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        self.parts.append((side, bytes(view), now_ns))

    def gap(self, side: int, count: int, now_ns: int) -> None:
        raise AssertionError("the capture has no holes")

    def close(self, side: int, now_ns: int) -> None:
        pass


def streams(path: Path, wanted: Callable[[int], bool]) -> list[Stream]:
    """The connections to ports that are wanted, of a pcap that may be packed with zstd."""
    raw = path.read_bytes()
    if path.suffix == ".zst":
        with path.open("rb") as packed:
            raw = zstandard.ZstdDecompressor().stream_reader(packed).read()
    link = int.from_bytes(raw[20:24], "little")
    unit = 1 if raw[:4] == bytes.fromhex("4d3cb2a1") else 1000
    dissector = Dissector(Quality())
    found: list[Stream] = []
    ways: dict[bytes, tuple[Conversation, int]] = {}
    position = 24
    while position + 16 <= len(raw):
        seconds, fraction, captured, _ = _RECORD.unpack_from(raw, position)
        now_ns, start = seconds * 10**9 + fraction * unit, position + 16
        position = start + captured
        segment = dissector.segment(link, raw, start, position, now_ns)
        if segment is None:
            continue
        data, key, seq, ack, bits, window, begin, end, length = segment
        _, target = _PORTS.unpack(key[-4:])
        if bits & SYN and key not in ways and wanted(target):
            found.append(Stream(target))
            conversation = Conversation(found[-1])
            half = len(key) // 2 - 2
            ways[key] = conversation, 0
            ways[key[half : 2 * half] + key[:half] + key[-2:] + key[-4:-2]] = conversation, 1
        if key not in ways or bits & RST:
            continue
        conversation, side = ways[key]
        if bits & SYN:
            conversation.open(side, seq)
        else:
            view = memoryview(data)[begin:end]
            conversation.segment(side, seq, ack, bits & 63, window, view, length, now_ns)
    return found


def frames(stream: Stream) -> Iterator[tuple[int, bytes, int]]:
    """(side, frame without its 4-byte size, when its last byte came), in the order in which frames were complete."""
    kept = (bytearray(), bytearray())
    for side, data, now_ns in stream.parts:
        buffer = kept[side]
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := int.from_bytes(buffer[:4], "big")):
            yield side, bytes(buffer[4 : 4 + size]), now_ns
            del buffer[: 4 + size]

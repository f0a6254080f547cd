"""ZooKeeper's side of a real capture, as the bytes that each side of each connection sent, with their times."""

import gzip
import re
from functools import cache
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import zstandard

from kproxy.capture.packets import RST, SYN, Dissector
from kproxy.capture.quality import Quality
from kproxy.capture.reassembly import Conversation

DATA = Path(__file__).parent.parent / "data" / "zookeeper"
PORT = 2181

_RECORD = Struct("<IIII")
_PORTS = Struct(">HH")


class Talk:
    """One connection: (side, bytes, time), in order. Side 0 is the client's."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes, int]] = []

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        self.parts.append((side, bytes(view), now_ns))

    def gap(self, side: int, count: int, now_ns: int) -> None:
        raise AssertionError("the capture has no holes")

    def close(self, side: int, now_ns: int) -> None:
        pass


@cache
def talks() -> list[Talk]:
    """The connections of ZooKeeper's port in k0102_zkgroup_a, all seen from their SYN on."""
    with (DATA / "k0102_zkgroup_a.pcap.zst").open("rb") as packed:
        raw = zstandard.ZstdDecompressor().stream_reader(packed).read()
    link = int.from_bytes(raw[20:24], "little")
    unit = 1 if raw[:4] == bytes.fromhex("4d3cb2a1") else 1000
    dissector = Dissector(Quality())
    found, ways, position = [], {}, 24
    while position + 16 <= len(raw):
        seconds, fraction, captured, _ = _RECORD.unpack_from(raw, position)
        now_ns, start = seconds * 10**9 + fraction * unit, position + 16
        position = start + captured
        segment = dissector.segment(link, raw, start, position, now_ns)
        if segment is None:
            continue
        data, key, seq, ack, bits, window, begin, end, length = segment
        source, target = _PORTS.unpack(key[-4:])
        if PORT not in (source, target) or bits & RST:
            continue
        if bits & SYN and target == PORT:
            found.append(Talk())
            conversation = Conversation(found[-1])
            half = len(key) // 2 - 2
            ways[key] = conversation, 0
            ways[key[half : 2 * half] + key[:half] + key[-2:] + key[-4:-2]] = conversation, 1
        conversation, side = ways[key]
        if bits & SYN:
            conversation.open(side, seq)
        else:
            view = memoryview(data)[begin:end]
            conversation.segment(side, seq, ack, bits & 63, window, view, length, now_ns)
    return found


class Logged(NamedTuple):
    """A transaction as ZooKeeper's own log has it."""

    session: int
    xid: int
    zxid: int
    op: str
    rest: str


@cache
def log() -> list[Logged]:
    text = gzip.decompress((DATA / "k0102_zkgroup_a.txnlog.txt.gz").read_bytes()).decode()
    lines = re.finditer(r"session 0x([0-9a-f]+) cxid 0x([0-9a-f]+) zxid 0x([0-9a-f]+) (\w+) ?(.*)", text)
    return [Logged(int(one[1], 16), int(one[2], 16), int(one[3], 16), one[4], one[5].strip()) for one in lines]


__all__ = ["PORT", "Logged", "Talk", "log", "talks"]

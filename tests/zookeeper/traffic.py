"""ZooKeeper's side of a real capture, and ZooKeeper's own log of the same time."""

import gzip
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.streams import Stream, streams

DATA = Path(__file__).parent.parent / "data" / "zookeeper"
PORT = 2181


@cache
def talks() -> list[Stream]:
    """The connections of ZooKeeper's port in k0102_zkgroup_a, all seen from their SYN on."""
    return streams(DATA / "k0102_zkgroup_a.pcap.zst", PORT.__eq__)


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

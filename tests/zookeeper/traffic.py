"""ZooKeeper traffic of a real capture, and ZooKeeper's own log of the same time."""

import gzip
import json
import re
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import zstandard

from tests.capture.packet import records
from tests.streams import Stream, streams

DATA = Path(__file__).parent.parent / "data" / "zookeeper"
PORT = 2181


@cache
def talks() -> list[Stream]:
    """The connections to ZooKeeper's port in k0102_zkgroup_a, all captured from their SYN on."""
    return streams(DATA / "k0102_zkgroup_a.pcap.zst", PORT.__eq__)


@cache
def packets() -> list[tuple[int, bytes, int]]:
    """(time_ns, bytes, length on the wire) of every packet of that capture, including Kafka's."""
    with (DATA / "k0102_zkgroup_a.pcap.zst").open("rb") as packed:
        return list(records(zstandard.ZstdDecompressor().stream_reader(packed).read()))


class Logged(NamedTuple):
    """A transaction in ZooKeeper's own log."""

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


class Deed(NamedTuple):
    """An action on a consumer while the capture ran."""

    time_s: float
    what: str
    consumer: int


@cache
def deeds() -> list[Deed]:
    lines = (DATA / "k0102_zkgroup_a.events.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    return [Deed(each["time"], each["what"], each["consumer"]) for each in told if "consumer" in each]


@cache
def _consumers() -> str:
    """The consumers' own logs."""
    return gzip.decompress((DATA / "k0102_zkgroup_a.consumers.gz").read_bytes()).decode()


@cache
def begun() -> list[tuple[int, str]]:
    """(time in ns, consumer) of each rebalance that a consumer logged, without retries."""
    lines = re.finditer(r"^c\d (\S+ \S+) .* begin rebalancing consumer (\S+) try #0", _consumers(), re.MULTILINE)
    return [(_time_ns(line[1]), line[2]) for line in lines]


def owned() -> Counter[tuple[str, str]]:
    """How often each consumer logged that it owned a partition."""
    found = re.findall(r"\], (\S+)-\d+ successfully owned partition (\d+) for topic", _consumers())
    return Counter((consumer, partition) for consumer, partition in found)


def _time_ns(text: str) -> int:
    moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000) * 1_000_000

"""Captures whose parts are read by readers that hear nothing of each other give the same rows, wherever borders lie."""

import os
import random
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from struct import pack_into, unpack_from

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.offline import Connection, generate
from kproxy.capture import flows, splits
from kproxy.capture.quality import Quality
from kproxy.capture.records import Window
from kproxy.convert import joining, processes, stints
from kproxy.convert.job import Settings, captures_of
from kproxy.convert.joining import Joiner
from kproxy.convert.rows import Rows
from kproxy.convert.slices import share, sorters
from kproxy.convert.stints import Part, Torn
from kproxy.protocol import codec
from kproxy.tables import schema
from kproxy.tables.arrays import batch
from tests.capture.dialogues import stretches
from tests.capture.packet import pcap
from tests.convert.test_slices import ALL, ONE, made_up, told


def parts_of(path, places, overlap_part):
    """A capture, cut at the first records behind some places."""
    data = path.read_bytes()
    walker = splits._Records(data)
    found = {walker.boundary(max(24, place), len(data)) for place in places}
    cuts = [0, *sorted(cut for cut in found if cut and cut > 24), len(data)]
    pieces = [
        splits.Split(str(path), start, end, data[:24] if start else b"", last=end == len(data))
        for start, end in pairwise(cuts)
    ]
    return [
        Part(number, piece, 0, following, overlap_part)
        for number, (piece, following) in enumerate(zip(pieces, [*pieces[1:], None], strict=True))
    ]


def read(job, parts, work, prefix):
    """What readers and joiners make of a capture, as shares; and how many of its bytes were carried."""
    shares, found = [], []
    for part in parts:
        sorted_by = sorters(job, work, f"{prefix}.{part.number}")
        rows = []
        seen = stints.read(job, part, lambda table, batch, rows=rows: rows.append((table, batch)))
        found.append(seen)
        for table, some in rows:
            sorted_by[table.name].add(joining.without(seen.left, some))
        shares.append(share(sorted_by, seen.quality, seen.names))
        if seen.torn:
            raise Torn(seen.torn)
    data = Path(job.paths[0]).read_bytes()
    by_pair = defaultdict(lambda: ([], []))
    carried = 0
    for number, seen in enumerate(found):
        for stint in seen.stints:
            by_pair[stint.pair][0].append(stint)
        for _, phase, owners, places, _ in seen.packets.of(seen.carried):
            for owner in np.unique(owners):
                mine = places[owners == owner]
                by_pair[seen.packets.pairs[owner]][1].append((number, phase, mine))
                carried += int(mine["captured"].sum())
    sorted_by = sorters(job, work, f"{prefix}.joined")
    gate, quality = [True], Quality()
    rows = Rows(lambda table, some: sorted_by[table.name].add(some) if gate[0] else None, keeps=job.is_known)
    flows = rows.flows(job, quality, first=False, apart=True)
    mends, connections = [], []
    for _, (of_pair, packets) in sorted(by_pair.items()):
        joiner = Joiner(of_pair, flows, rows, gate) if of_pair else None
        for number, phase, places in packets:
            if joiner is None or joiner.at(number, phase):
                records = [
                    (
                        int(p["time_ns"]),
                        int(p["link"]),
                        int(p["offset"]),
                        int(p["offset"] + p["captured"]),
                        int(p["original"]),
                    )
                    for p in places
                ]
                flows.window(Window(data, 0, records))
                if joiner is not None:
                    joiner.seen()
        if joiner is None:
            flows.finish()
        else:
            joiner.finish()
            mends += joiner.mends
            connections += joiner.rows
    rows.flush(1)
    rows.note(quality)
    if joining.clash([(seen.logs, seen.doubted) for seen in found] + [(rows.logs.decided, rows.logs.doubted)]):
        raise Torn("logs")
    sorted_by["connections"].add(batch(schema.CONNECTIONS.schema, connections))
    shares.append(share(sorted_by, quality, rows.names))
    for each in shares:
        for runs in each.runs.values():
            each.mends.update(dict.fromkeys(runs, lambda some: joining.mended(mends, some)))
    return shares, carried, found


class InParts:
    """A capture, read in one piece, and then in parts. `seen` counts what became of it."""

    def __init__(self, path, work):
        (self._job,) = captures_of([path], Settings())
        self._path = path
        self._work = work
        self.whole = told([processes._share(self._job, work, ".whole", tuple(range(16)), True, None, None)])
        self.seen = Counter()
        self.torn = Counter()

    def check(self, places, overlap_part):
        self.seen["rounds"] += 1
        parts = parts_of(self._path, places, overlap_part)
        try:
            shares, carried, found = read(self._job, parts, self._work, f".{self.seen['rounds']}")
        except Torn as fault:
            self.torn[str(fault)] += 1
            self.seen["torn"] += 1
            return
        self.seen["bytes"] += self._path.stat().st_size
        self.seen["carried"] += carried
        self.seen["borders"] += len(parts) - 1
        self.seen["handed"] += sum(stint.edge is not None for each in found for stint in each.stints)
        rows, quality, names = told(shares)
        for name, table in self.whole[0].items():
            assert rows[name].equals(table), (name, [part.split.start for part in parts])
        assert quality == self.whole[1]
        assert names == self.whole[2]


TORN = {"fragments", "ports used again", "not_kept", "idle", "logs", "late packets"}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_parts_of_any_capture_change_nothing(path, tmp_path):
    read, dice = InParts(path, tmp_path), random.Random(path.name)
    size = path.stat().st_size
    for count in (1, 5):
        read.check([dice.randrange(24, size) for _ in range(count)], dice.choice((1, 2, 3)))
    assert read.torn.keys() <= TORN  # what the capture itself is a reason for


def test_parts_of_made_up_dialogues_change_nothing(tmp_path_factory):
    """Of one connection and of two, with segments that are lost, late or there twice."""
    total = Counter()
    dialogues = st.lists(stretches(200), min_size=1, max_size=2)

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(dialogues, st.integers(0, 1 << 32), st.sampled_from((0, 0.003, 0.02)))
    def holds(dialogues, seed, disorder):
        folder, dice = tmp_path_factory.mktemp("dialogues"), random.Random(seed)
        path = folder / "made-up.pcap"
        path.write_bytes(made_up(dialogues, dice, disorder))
        read = InParts(path, folder)
        for count in (1, 3):
            read.check([dice.randrange(24, path.stat().st_size) for _ in range(count)], dice.choice((1, 2)))
        total.update(read.seen)

    holds()
    assert total["handed"] and total["torn"] * 4 < total["rounds"], total


@pytest.mark.parametrize(
    "kind", (ONE, replace(ONE, dirty=True), replace(ONE, connections=3)), ids=("one", "dirty", "3")
)
def test_busy_connections_are_handed_over_at_each_border(kind, tmp_path):
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(kind, file, 2000)
    read = InParts(path, tmp_path)
    size = path.stat().st_size
    read.check([size * number // 4 for number in range(1, 4)], 2)
    assert read.seen["borders"] == 3 and read.seen["handed"] == 3 * kind.connections and not read.seen["carried"]


def test_readers_read_each_byte_once_and_their_warm_ups_twice(tmp_path, monkeypatch):
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(replace(ONE, connections=3), file, 13_000)  # two milliseconds in each warm-up
    (job,) = captures_of([path], Settings())
    size = path.stat().st_size
    counted = Counter()

    def preadv(handle, rooms, offset):
        count = real(handle, rooms, offset)
        counted["bytes"] += count
        return count

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    told = 0
    for part in parts_of(path, [size // 2], 20):
        found = stints.read(job, part, lambda table, batch: None)
        told += found.read_bytes
        assert not found.carried and not found.torn
    assert size <= counted["bytes"] <= 1.1 * size
    assert told == pytest.approx(counted["bytes"], rel=0.02)


def test_a_clock_so_coarse_that_a_connection_seems_to_begin_twice(tmp_path):
    """Its id is of its ends and its first packet's time: what a reader calls by the whole one's id it must not mend."""
    path = tmp_path / "coarse.pcap"
    with path.open("wb") as file:
        generate(ONE, file, 1000)
    data = bytearray(path.read_bytes())
    place = 24
    while place < len(data):
        pack_into("<I", data, place + 4, 0 if place < 0.7 * len(data) else 10_000)
        place += 16 + unpack_from("<I", data, place + 8)[0]
    path.write_bytes(data)
    read = InParts(path, tmp_path)
    read.check([len(data) // 2], 2)
    assert read.torn == {"one id for two readers": 1}


def test_late_packets_of_a_connection_that_is_not_remembered_any_more(tmp_path, monkeypatch):
    """They look like another connection's, whose packets would be carried, and the first one's with them."""
    monkeypatch.setattr(flows, "MAX_ENDED", 2)
    busy, *others = (Connection(number, 1448) for number in range(100))
    head = {"requestApiKey": 12, "requestApiVersion": 4, "clientId": "c"}

    def asked(number):
        body = codec.encode_request(head | {"correlationId": number}, {"groupId": "g", "memberId": "m"})
        return len(body).to_bytes(4) + body

    def answered(number):
        body = codec.encode_response(12, 4, {"correlationId": number}, {"errorCode": 0})
        return len(body).to_bytes(4) + body

    packets = [*busy.shake()]
    for number in range(3000):
        packets += busy.send(0, asked(number))
        packets += busy.send(1, answered(number))
    late = []
    for number, one in enumerate(others):
        packets += [*one.shake(), *one.send(0, asked(0)), *one.send(1, answered(0))]
        packets += [one._packet(0, b"", 0x11), one._packet(1, b"", 0x11)]
        late = late or [*one.send(0, asked(1)), *one.send(1, answered(1))]
        packets += late if number == 80 else []
    path = tmp_path / "late.pcap"
    path.write_bytes(pcap([(1_700_000_000_000_000_000 + at * 10_000, packet) for at, packet in enumerate(packets)]))
    read = InParts(path, tmp_path)
    read.check([path.stat().st_size // 2], 5)
    assert read.torn == {"ports used again": 1}

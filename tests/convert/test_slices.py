"""Captures whose busy connections are read in slices of the file give the same rows, wherever borders lie."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from struct import pack

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.offline import KINDS, Connection, generate
from kproxy.capture.pcap import CLASSIC
from kproxy.convert import processes, slices
from kproxy.convert.job import Settings, captures_of
from kproxy.convert.processes import convert
from kproxy.convert.slices import Slice, Slices
from kproxy.tables import schema, writer
from tests.capture.dialogues import frames, stretches
from tests.captures import folder

ALL = [
    path
    for name in ("captures", "shapes")
    for path in sorted(folder(name).iterdir())
    if path.suffix == ".pcap" and path.read_bytes()[:4] in CLASSIC
]
STEP_NS = 1_000_000  # between packets
ONE = replace(KINDS[0], connections=1)


def told(shares):
    """All that readers say of a capture: rows by table, flaws, and names."""
    rows = {}
    for name in shares[0].runs:
        table = schema.BY_NAME.get(name) or slices.FED[name]
        runs = [run for share in shares for run in share.runs[name]]
        mends = {run: mend for share in shares for run, mend in share.mends.items()}
        parts = list(writer.merged(table, runs, mends))
        rows[name] = pa.concat_tables(parts) if parts else table.schema.empty_table()
    quality, names = shares[0].quality, shares[0].names
    for share in shares[1:]:
        quality.add(share.quality)
        names.add(share.names.told())
    return rows, list(quality), names.told()


class Read:
    """A capture, read in one piece, and then in slices. `seen` counts what became of them."""

    def __init__(self, path, work):
        (self._job,) = captures_of([path], Settings())
        self._size = path.stat().st_size
        self._work = work
        self._whole = told([processes._share(self._job, work, ".whole", tuple(range(16)), True, None, None)])
        self.seen = Counter()

    def check(self, dice, connections, count):
        """Slices of the connections with most bytes, that begin anywhere."""
        bytes_of, _ = slices._sampled(self._job.paths[0], self._size)
        keys = tuple(sorted(bytes_of, key=lambda pair: (-bytes_of[pair], pair))[:connections])
        if not keys:
            return
        of = Slices(tuple(sorted(dice.randrange(24, self._size) for _ in range(count))), keys)
        self.seen["rounds"] += 1
        work = self._work / str(self.seen["rounds"])
        work.mkdir()
        later = [  # the last first, so that nobody waits for a claim
            slices.read_slice(self._job, work, f".{number}", Slice(of, number, work)) for number in range(count, 0, -1)
        ]
        shares = [slices.read_first(self._job, work, ".0", Slice(of, 0, work)), *reversed(later)]
        self.seen["claims"] += sum(bool(share.sliced.claimed) for share in later)
        used = slices.stitched(shares, work, ".s")
        if used is None:
            self.seen["again"] += 1
            return
        self.seen["joined"] += len(used) - 1
        rows, quality, names = told(used)
        for name, table in self._whole[0].items():
            assert rows[name].equals(table), (name, of.borders)
        assert (quality, names) == self._whole[1:], of.borders


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_slices_of_any_capture_change_nothing(path, tmp_path, monkeypatch):
    """Short captures, cut anywhere: two slices may find the same place, of which one is not needed then."""
    monkeypatch.setattr(slices, "CHUNK", 8)
    read, dice = Read(path, tmp_path), random.Random(path.name)
    for count in (2, 6):
        read.check(dice, 1 + count % 3, count)
    if path.stem == "k41_kip848_share":  # has a topic that looks like a coordinators' log or not, as its batches are
        assert read.seen["rounds"] == 2, read.seen
    else:
        assert read.seen["joined"] >= read.seen["claims"] / 4 and not read.seen["again"], read.seen


def test_slices_of_made_up_dialogues_change_nothing(tmp_path_factory):
    """Of one connection and of two, with segments that are lost, late or there twice; most claims are joined."""
    total = Counter()
    dialogues = st.lists(stretches(200), min_size=1, max_size=2)

    @settings(max_examples=12, deadline=None, derandomize=True)  # else the shares below are by chance
    @given(dialogues, st.integers(0, 1 << 32), st.sampled_from((0, 0.003, 0.02)))
    def holds(dialogues, seed, disorder):
        folder, dice = tmp_path_factory.mktemp("dialogues"), random.Random(seed)
        path = folder / "made-up.pcap"
        path.write_bytes(made_up(dialogues, dice, disorder))
        read = Read(path, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slices, "CHUNK", dice.choice((8, 128)))
            for count in (1, 3):
                read.check(dice, len(dialogues), count)
        total.update(read.seen)

    holds()
    assert total["claims"] > 8 and total["joined"] > 0.6 * total["claims"], total
    assert total["again"] * 6 < total["rounds"], total


def made_up(dialogues, dice, disorder):
    """A capture of connections that say what dialogues have, in turns."""
    connections = [Connection(number, dice.choice((300, 1448, 9000))) for number in range(len(dialogues))]
    packets = [packet for connection in connections for packet in connection.shake()]
    said = [list(frames(dialogue)) for dialogue in dialogues]
    late = []
    while any(said):
        number = dice.choice([number for number, left in enumerate(said) if left])
        for _ in range(min(len(said[number]), dice.randrange(1, 9))):
            for packet in connections[number].send(*said[number].pop(0)):
                fate = dice.random() / disorder if disorder else 9
                if 1 <= fate < 2:
                    late.append(packet)
                elif fate >= 1:
                    packets += [packet, packet] if fate < 3 else [packet]
                    packets += late
                    late.clear()
    times = [1_700_000_000_000_000_000 + number * STEP_NS for number in range(len(packets))]
    return pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262_144, 1) + b"".join(
        pack("<IIII", time_ns // 10**9, time_ns % 10**9, len(packet), len(packet)) + packet
        for time_ns, packet in zip(times, packets, strict=True)
    )


@pytest.mark.parametrize(
    "kind", (ONE, replace(ONE, dirty=True), replace(ONE, connections=3)), ids=("one", "dirty", "3")
)
def test_each_slice_of_busy_connections_is_used(kind, tmp_path):
    path = tmp_path / "busy.pcap"
    with path.open("wb") as file:
        generate(kind, file, 2000)
    read = Read(path, tmp_path)
    size = path.stat().st_size

    class Even:
        def randrange(self, low, high):
            self.at = getattr(self, "at", 0) + size // 5
            return self.at

    read.check(Even(), kind.connections, 4)
    assert read.seen == {"rounds": 1, "claims": 4, "joined": 4}


def test_processes_share_one_connection_and_nothing_changes(tmp_path, monkeypatch):
    path = tmp_path / "one.pcap"
    with path.open("wb") as file:
        generate(ONE, file, 3000)
    convert([path], tmp_path / "1", processes=1)
    monkeypatch.setattr(slices, "SLICED_PACKETS", 1)
    used = []
    stitched = slices.stitched
    monkeypatch.setattr(slices, "stitched", lambda *given: used.append(stitched(*given)) or used[-1])
    convert([path], tmp_path / "3", processes=3)
    assert [len(shares) for shares in used] == [3]
    files = [file.relative_to(tmp_path / "1") for file in (tmp_path / "1").rglob("*") if file.is_file()]
    assert len(files) > 10
    for file in files:
        assert (tmp_path / "3" / file).read_bytes() == (tmp_path / "1" / file).read_bytes(), file
    monkeypatch.setattr(slices, "stitched", lambda *given: None)  # there is nothing to join
    convert([path], tmp_path / "again", processes=2)
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "1" / file).read_bytes(), file


def test_what_is_worth_slices(tmp_path, monkeypatch):
    def worth(kind, exchanges, name, processes=2, **settings):
        path = tmp_path / name
        with path.open("wb") as file:
            generate(kind, file, exchanges)
        (job,) = captures_of([path], Settings(**settings))
        return slices.worth(job, processes)

    assert worth(ONE, 2000, "few.pcap") is None  # packets
    monkeypatch.setattr(slices, "SLICED_PACKETS", 1000)
    found = worth(ONE, 2000, "one.pcap", 3)
    assert len(found.borders) == 2 and len(found.keys) == 1 and len(found.flat) == 2
    assert worth(ONE, 2000, "alone.pcap", 1) is None
    assert worth(replace(ONE, connections=2), 2000, "two.pcap", 2) is None  # as many processes as connections
    assert len(worth(replace(ONE, connections=2), 2000, "2.pcap", 4).keys) == 2
    assert worth(KINDS[0], 2000, "many.pcap") is None
    (tmp_path / "no.pcap").write_bytes(b"\x0a\x0d\x0d\x0a" + bytes(100_000))
    (job,) = captures_of([tmp_path / "no.pcap"], Settings())
    assert slices.worth(job, 2) is None


@pytest.mark.parametrize(("processes_", "part"), ((2, 1.0), (2, 0.7), (4, 0.5), (16, 0.9)))
def test_borders_give_all_readers_as_much_to_do(processes_, part):
    size = 1 << 40
    borders = [0, *slices.borders(size, processes_, part), size]
    lengths = [(end - begin) / size for begin, end in pairwise(borders)]
    passed = slices.READING
    work = [passed + (1 - passed) * (1 - part + part * lengths[0])]
    work += [length * (passed + (1 - passed) * part) for length in lengths[1:]]
    assert len(work) == processes_ and (max(work) - min(work) < 0.01 or lengths[0] == pytest.approx(0.02))

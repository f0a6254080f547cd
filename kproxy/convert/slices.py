"""One connection of a large capture, read by several processes: each has a slice of the file.

Duty: where most bytes of a capture are those of a few connections, to share these out in time. Reader 0 reads all of
the file. The others begin at the borders of their slices, and look at nothing but those connections: as at the
beginning of a capture they find a frame, and read on until each request that waits was seen. There such a reader tells
its *claim*: the place of the next packet, and for each connection what its packets to come depend on (`Flow.standing`),
by value. The reader before it comes to that place with what it knows, and compares. If both are the same it hands the
connections over and tells what it has counted so far; if not, it reads on as if nobody had claimed anything, until the
next claim, and what the other reader makes is thrown away. So nothing is guessed: a claim only makes it faster.

`stitched` joins what came: requests count on from those before, a connection is the one that began earlier, its row and
its flaws are sums, and a lag that needs an offset which was asked for before gets it. Where a reader met something else
that depends on what only those before it knew (answers out of turn behind a hole, the id of a coordinators' log), there
is nothing to join, and the capture is to be read again without slices.

Memory: that of the readers; of a claim, and of what is handed over, what waits in some connections. Refuses to know
processes.
"""

import pickle
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kproxy.capture import captures, files, splits
from kproxy.capture.captures import Capture
from kproxy.capture.columns import inorder
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.copies import SAME_PACKET_NS
from kproxy.capture.flow import Flow
from kproxy.capture.flows import QUEUED_BYTES, Flows
from kproxy.capture.keys import pair_of
from kproxy.capture.pcap import CLASSIC
from kproxy.capture.quality import Quality
from kproxy.capture.reassembly import PATIENCE
from kproxy.capture.records import Window
from kproxy.convert.job import Job
from kproxy.convert.rows import BATCH_ROWS, Counted, Rows
from kproxy.convert.spoken import SPOKEN
from kproxy.errors import CaptureError
from kproxy.tables import schema, writer
from kproxy.tables.arrays import batch
from kproxy.tables.names import Names
from kproxy.tables.partitions import LATER, MAX_POSITIONS, Positions, with_offsets
from kproxy.tables.schema import Table
from kproxy.wire.bodies import Logs
from kproxy.wire.events import NONE

FED = {table.name: table for table in (SPOKEN, schema.REGISTRY)}  # what insight is fed
SLICED_PACKETS = 200_000  # a capture of fewer, about, is read by one process before two have started
SAMPLES = 16  # places that are looked at
UNEVEN = 1.3  # times a process's even share makes a connection worth slices
MOST = 8  # connections that are sliced
READING = 0.15  # of what reading costs, the share of those packets that are passed over
WARM_BYTES = 64 << 20  # until a slice's reader has found its place
CHUNK, CHUNK_BYTES = 128, 1 << 17  # between two looks whether it has: so many packets, or their bytes
POLL_S = 0.005
_RECORD = 16  # bytes of a record's header

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Slices:
    """Which connections are sliced, and where."""

    borders: tuple[int, ...]  # near which slice 1 and those after it begin
    keys: tuple[tuple[bytes, bytes], ...]  # of those connections, in both directions

    @property
    def flat(self) -> frozenset[bytes]:
        return frozenset(key for pair in self.keys for key in pair)


@dataclass(frozen=True)
class Slice:
    """What one reader has of them."""

    slices: Slices
    number: int
    claims: Path  # a folder that all readers write claims to


@dataclass
class Edge:
    """A connection where it is handed over."""

    id: int
    number: int  # of its next request
    counted: Counted
    positions: Positions
    has_seen_gap: bool

    def follow(self, before: "Edge") -> bool:
        """`before` is where the same connection was handed over earlier; False: what is in between depends on that."""
        if before.has_seen_gap and self.counted.is_surprised:
            return False
        self.counted.join(before.counted)
        self.positions = {**before.positions, **self.positions}
        if len(self.positions) * 2 >= MAX_POSITIONS:
            return False
        self.has_seen_gap |= before.has_seen_gap
        return True


@dataclass
class Sliced:
    """What a reader of slices says beside its rows."""

    claimed: list[tuple[int, int]] = field(default_factory=list)  # each connection's id and next number, as known here
    handed_to: int = 0  # the slice that goes on; 0: none does
    edges: list[Edge] = field(default_factory=list)  # of each connection, then
    missed: list[list[Any]] = field(default_factory=list)  # of each, the partitions whose offsets are known before
    counted: list[Counted] = field(default_factory=list)  # connections that ended, from the claim on
    is_crowded: bool = False  # a bound was reached, and whoever reads all of it alone may reach it elsewhere
    most_queued: int = 0  # bytes that waited for others at once
    logs: dict[int, bool] = field(default_factory=dict)  # whether topics are coordinators' logs, by their ids
    doubted: set[int] = field(default_factory=set)  # ids of which something was left out, since that was not known

    def learn(self, flows: Flows, logs: Logs | None) -> None:
        self.is_crowded, self.most_queued = flows.is_crowded, flows.most_queued
        if logs is not None:
            self.logs, self.doubted = logs.decided, logs.doubted


@dataclass
class Share:
    """What was read of a capture, or of some of its flows: sorted runs by table, its flaws, and names of topics."""

    runs: dict[str, list[Path]]
    quality: Quality
    names: Names
    sliced: Sliced | None = None
    mends: dict[Path, Callable[[pa.RecordBatch], pa.RecordBatch]] = field(default_factory=dict)  # see `writer.merged`


def sorters(job: Job, work: Path, prefix: str) -> dict[str, writer.Sorter]:
    """What sorts the rows of a share, by table."""
    tables = [*(schema.BY_NAME[name] for name in job.tables), *FED.values()]
    return {table.name: writer.Sorter(table, work, prefix) for table in tables}


def share(sorted_by: dict[str, writer.Sorter], quality: Quality, names: Names, sliced: Sliced | None = None) -> Share:
    for sorter in sorted_by.values():
        sorter.spill()
    return Share({name: sorter.runs for name, sorter in sorted_by.items()}, quality, names, sliced)


# --- what is worth it ------------------------------------------------------------------------------------------------


def worth(job: Job, processes: int) -> Slices | None:
    """How to slice a capture for so many processes; None: its connections are shared out as they are."""
    if processes < 2 or len(job.paths) != 1 or job.key_log is not None or job.records is not None:
        return None
    path = job.paths[0]
    try:
        size = job.storage.size(path)
        if size < SLICED_PACKETS * _RECORD:
            return None
        source = files.Bytes(path, storage=job.storage)
        try:
            if source.mapped() is None or source.read(4) not in CLASSIC:
                return None
        finally:
            source.close()
    except (OSError, CaptureError):
        return None
    bytes_of, packets = _sampled(path, size)
    whole = sum(bytes_of.values())
    if packets < SLICED_PACKETS:
        return None
    busy = [pair for pair, some in sorted(bytes_of.items(), key=lambda each: -each[1]) if some * processes > whole]
    if not busy or bytes_of[busy[0]] * processes < UNEVEN * whole:
        return None
    busy = busy[:MOST]
    part = sum(map(bytes_of.__getitem__, busy)) / whole
    return Slices(borders(size, processes, part), tuple(busy))


def borders(size: int, processes: int, part: float) -> tuple[int, ...]:
    """Where slices begin, so that all readers have as much to do: the first has all but `part` of the bytes besides.

    What is passed over costs READING of what is read.
    """
    rest = READING + (1 - READING) * (1 - part)  # the first reader's work, whatever is sliced
    sliced = READING + (1 - READING) * part  # that of the others, if one had all of the file
    first = (sliced - (processes - 1) * rest) / (sliced + (processes - 1) * (1 - READING) * part)
    first = max(first, 0.02)
    each = (1 - first) / (processes - 1)
    return tuple(int(size * (first + number * each)) for number in range(processes - 1))


def _sampled(path: str, size: int) -> tuple[dict[tuple[bytes, bytes], int], int]:
    """The bytes of connections at some places of a file; and how many packets it may have."""
    bytes_of: dict[tuple[bytes, bytes], int] = {}
    packets = length = 0
    for number in range(SAMPLES):
        place = splits.first_record(path, number * size // SAMPLES)
        window = None if place is None else next(_windows(path, place), None)
        columns = None if window is None else Columns.of(window)
        if columns is None:
            continue
        packets += len(columns)
        length += int(columns.end[-1] - columns.start[0]) + _RECORD
        heads = inorder.heads(columns.link, columns.start, columns.end, columns.head)
        if heads is None:
            continue
        sizes = np.bincount(heads.lane, (columns.end - columns.start)[heads.index], len(heads.keys))
        for key, some in zip(heads.keys, sizes.tolist(), strict=True):
            pair = pair_of(key)
            bytes_of[pair] = bytes_of.get(pair, 0) + int(some)
    return bytes_of, size * packets // max(length, 1)


def _windows(path: str, place: int) -> Iterator[Window]:
    """The packets of a plain pcap file of this machine from a record on. Its flaws are told by who reads all of it."""
    source = files.Bytes(path)
    try:
        yield from captures.windows_of(source, Quality(), [], place)
    finally:
        source.close()


# --- the readers -----------------------------------------------------------------------------------------------------


def read_first(job: Job, work: Path, prefix: str, mine: Slice, report: Report | None = None) -> Share:
    """Read all of a capture; its busy connections until they are handed over."""
    quality = Quality()
    sorted_by = sorters(job, work, prefix)
    rows = Rows(lambda table, rows: sorted_by[table.name].add(rows), job.records, keeps=job.is_known)
    flows = rows.flows(job, quality)
    sliced = Sliced()
    successors = _Successors(mine, flows, rows, sliced)
    capture = Capture(job.paths, quality, storage=job.storage)
    for window in capture.windows():
        for part in successors.parts(window):
            flows.window(part)
        rows.flush(BATCH_ROWS)
        if report is not None:
            report(job.source, capture.consumed, capture.size)
    flows.finish()
    sliced.learn(flows, rows.logs)
    rows.flush(1)
    rows.note(quality)
    return share(sorted_by, quality, rows.names, sliced)


def read_slice(job: Job, work: Path, prefix: str, mine: Slice) -> Share:
    """Read the busy connections of a capture from a border on, until they are handed over."""
    slices, number, claims = mine.slices, mine.number, mine.claims
    quality = Quality()
    sorted_by = sorters(job, work, prefix)
    sliced = Sliced()

    def add(table: Table, rows: pa.RecordBatch) -> None:
        if sliced.claimed:
            sorted_by[table.name].add(rows)

    rows = Rows(add, job.records, keeps=job.is_known)
    flows = rows.flows(job, quality, first=False, only=slices.flat)
    border = slices.borders[number - 1]
    beginner = _Beginner(slices, flows, border + WARM_BYTES)
    successors = _Successors(mine, flows, rows, sliced)
    place = splits.first_record(job.paths[0], border)
    offsets: list[Offsets] = []
    for window in _windows(job.paths[0], place) if place is not None else ():
        begin = 0
        while not sliced.claimed and begin < len(window.records):
            at = window.offset + window.records[begin][2] - _RECORD
            if beginner.is_late(at):
                _publish(claims, number, None)
                return share(sorted_by, Quality(), Names(), sliced)
            if beginner.is_ready():
                rows.flush(1)  # to nobody
                rows.note(quality)
                rows.names.forget()
                quality.forget()
                offsets = [Offsets() for _ in slices.keys]
                sliced.claimed, claim = beginner.claim(at, rows, offsets)
                _publish(claims, number, claim)
            else:
                end = min(begin + CHUNK, max(begin + 1, index_at(window, at + CHUNK_BYTES)))
                beginner.take(part_of(window, begin, end))
                begin = end
        if begin < len(window.records):
            for part in successors.parts(part_of(window, begin)):
                if sliced.handed_to:
                    break
                flows.window(part)
        rows.flush(BATCH_ROWS)
        if sliced.handed_to:
            break
    if not sliced.claimed:
        _publish(claims, number, None)
        return share(sorted_by, Quality(), Names(), sliced)
    flows.finish()
    rows.flush(1)
    rows.note(quality)
    sliced.learn(flows, rows.logs)
    sliced.counted = rows.continued
    for counted in sliced.counted:
        counted.let_go()
    sliced.missed = [list(each.missed) for each in offsets]
    sliced.is_crowded |= any(each.is_full for each in offsets)
    return share(sorted_by, quality, rows.names, sliced)


class Offsets(Positions):
    """Where a consumer is: what is not known from a claim on is LATER, and less."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: dict[Any, int] = {}
        self.is_full = False

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            return self[key]
        if len(self.missed) >= MAX_POSITIONS and key not in self.missed:
            self.is_full = True
            return default
        return self.missed.setdefault(key, LATER - len(self.missed))


class _Beginner:
    """Reads from a border until it stands on firm ground."""

    def __init__(self, slices: Slices, flows: Flows, limit: int) -> None:
        self._keys = [pair[0] for pair in slices.keys]
        self._flows = flows
        self._limit = limit
        self._packets = 0
        self._first_ns = -1
        self._last_ns = -1
        self._firm: dict[Flow, int] = {}  # the number of a connection's next request when the first was answered

    def take(self, window: Window) -> None:
        self._packets += len(window.records)
        times = [record[0] for record in (window.records[0], window.records[-1])]
        if self._first_ns < 0:
            self._first_ns = times[0]
        self._last_ns = times[1]
        self._flows.window(window)

    def is_late(self, place: int) -> bool:
        return place >= self._limit

    def is_ready(self) -> bool:
        """Whether all that waits on the connections was seen since a first answer was: older requests have theirs.

        And packets that come twice would be known, and holes of before are not waited for any more.
        """
        if self._last_ns - self._first_ns < 2 * SAME_PACKET_NS or self._packets < 2 * PATIENCE:
            return False
        flows = [self._flows.of(key) for key in self._keys]
        return min([flow is not None and self._is_firm(flow) for flow in flows])

    def _is_firm(self, flow: Flow) -> bool:
        session = flow.session
        if session is None or session.free_at <= 0:
            return False
        firm = self._firm.setdefault(flow, session.number)
        return session.oldest_number >= firm and flow.standing is not None

    def claim(self, place: int, rows: Rows, offsets: Sequence[Positions]) -> tuple[list[tuple[int, int]], Any]:
        """Each connection's id and next number; and what is claimed. Counting begins anew."""
        claimed, standings = [], []
        for key, positions in zip(self._keys, offsets, strict=True):
            flow = self._flows.of(key)
            assert flow is not None and flow.session is not None and flow.info is not None
            standings.append(flow.standing)
            claimed.append((flow.info.id, flow.session.number))
            rows.count_anew(flow, positions)
            flow.count_anew()
        return claimed, (place, standings)


class _Successors:
    """The slices behind a reader's, to the first of which that claims what is so the connections go."""

    def __init__(self, mine: Slice, flows: Flows, rows: Rows, sliced: Sliced) -> None:
        self._slices = mine.slices
        self._following = mine.number + 1
        self._claims = mine.claims
        self._flows = flows
        self._rows = rows
        self._sliced = sliced

    def parts(self, window: Window) -> Iterator[Window]:
        """A window in parts, between which connections may have been handed over. The owner reads each at once."""
        begin = 0
        while not self._sliced.handed_to and self._following <= len(self._slices.borders) and len(window.records):
            last = window.offset + window.records[-1][3]
            if last < self._slices.borders[self._following - 1]:
                break
            claim = _claimed(self._claims, self._following)
            if claim is None:
                self._following += 1
                continue
            place, standings = claim
            at = index_at(window, place)
            if at == len(window.records):
                break
            if at > begin:
                yield part_of(window, begin, at)
                begin = at
            if window.offset + window.records[at][2] - _RECORD == place:
                self._hand_over(standings)
            self._following += 1
        if begin < len(window.records):
            yield part_of(window, begin)

    def _hand_over(self, standings: Sequence[Any]) -> None:
        flows = [self._flows.of(pair[0]) for pair in self._slices.keys]
        edges = []
        for flow, standing in zip(flows, standings, strict=True):
            if flow is None or flow.standing != standing:
                return
            assert flow.session is not None and flow.info is not None
            positions = dict(self._rows.positions(flow))
            if len(positions) * 2 >= MAX_POSITIONS:
                return
            session = flow.session
            edges.append(
                (flow, Edge(flow.info.id, session.number, self._rows.counted(flow), positions, session.has_seen_gap))
            )
        for flow, edge in edges:
            self._rows.forget(flow)
            self._flows.hand_over(flow)
            edge.counted.let_go()
            self._sliced.edges.append(edge)
        self._sliced.handed_to = self._following


def part_of(window: Window, begin: int, end: int | None = None) -> Window:
    return window if not begin and end is None else window._replace(records=window.records[begin:end])


def index_at(window: Window, place: int) -> int:
    """The first record that begins at a place or behind it."""
    start = place + _RECORD - window.offset
    if isinstance(window.records, Columns):
        return int(np.searchsorted(window.records.start, start))
    return bisect_left(window.records, start, key=lambda record: record[2])


def _publish(claims: Path, number: int, claim: Any) -> None:
    draft = claims / f"{number}.draft"
    draft.write_bytes(pickle.dumps(claim))
    draft.replace(claims / f"{number}.claim")


def _claimed(claims: Path, number: int) -> Any:
    """What a slice's reader claims: it is about to say so, or whoever started both ends this one too."""
    path = claims / f"{number}.claim"
    while not path.exists():
        time.sleep(POLL_S)
    return pickle.loads(path.read_bytes())


# --- what they made, joined ------------------------------------------------------------------------------------------


def stitched(shares: Sequence[Share], work: Path, prefix: str) -> list[Share] | None:
    """What the readers made, in the order of their slices, as shares of one capture; None: read it without slices."""
    used = [shares[0]]
    ids: dict[int, tuple[int, int]] = {}  # of the last one: (the whole connection's id, what to add to its numbers)
    known: dict[int, Edge] = {}  # whole connections so far, by their ids
    rows: list[dict[str, Any]] = []
    logs: dict[int, bool] = {}
    while (owner := _said(used[-1])).handed_to:
        share = shares[owner.handed_to]
        mine = _said(share)
        logs |= owner.logs
        if any(logs.get(id_, False) for id_ in mine.doubted):
            return None
        if any(logs.get(id_, is_log) != is_log for id_, is_log in mine.logs.items()):
            return None
        theirs, ids = ids, {}
        offsets: dict[int, list[int]] = {}
        for edge, (claimed, number), missed in zip(owner.edges, mine.claimed, mine.missed, strict=True):
            whole, added = theirs.get(edge.id, (edge.id, 0))
            if whole in known and not edge.follow(known[whole]):
                return None
            known[whole] = edge
            ids[claimed] = whole, added + edge.number - number
            offsets[claimed] = [edge.positions.get(each, NONE) for each in missed]
        for counted in mine.counted:
            assert counted.flow.info is not None
            before = known[ids[counted.flow.info.id][0]]
            if before.has_seen_gap and counted.is_surprised:
                return None
            counted.join(before.counted)
            counted.flow.count(share.quality)
            counted.flow.count_kind(share.quality)
            rows.append(counted.row())
        _renumber(share, ids, offsets, work, f"{prefix}.{owner.handed_to}.joined")
        used.append(share)
    first, *others = map(_said, used)
    if any(each.is_crowded for each in (first, *others)) or any(
        first.most_queued + each.most_queued > QUEUED_BYTES for each in others
    ):
        return None
    connections = writer.Sorter(schema.CONNECTIONS, work, f"{prefix}.joined")
    connections.add(batch(schema.CONNECTIONS.schema, rows))
    connections.spill()
    used[0].runs[schema.CONNECTIONS.name] += connections.runs
    remove([share for share in shares if share not in used])
    return used


def remove(shares: Sequence[Share]) -> None:
    """Their rows are of no use."""
    for run in (run for share in shares for runs in share.runs.values() for run in runs):
        run.unlink()


def _said(share: Share) -> Sliced:
    assert share.sliced is not None
    return share.sliced


def _renumber(
    share: Share, ids: dict[int, tuple[int, int]], offsets: dict[int, list[int]], work: Path, prefix: str
) -> None:
    """Rows of connections that began elsewhere get their ids, numbers and lags: when they are merged."""
    mend = partial(_renumbered, ids, offsets)
    for name, runs in share.runs.items():
        table = schema.BY_NAME.get(name) or FED[name]
        if not {"connection", "number"} <= set(table.schema.names):
            continue
        if name not in FED:
            share.mends.update(dict.fromkeys(runs, mend))
            continue
        sorter = writer.Sorter(table, work, prefix)  # it is merged with that of other captures
        for part in writer.merged(table, runs, dict.fromkeys(runs, mend)):
            for rows in part.to_batches():
                sorter.add(rows)
        sorter.spill()
        for run in runs:
            run.unlink()
        share.runs[name] = sorter.runs


def _renumbered(ids: dict[int, tuple[int, int]], offsets: dict[int, list[int]], rows: pa.RecordBatch) -> pa.RecordBatch:
    if "lag_records" in rows.schema.names:
        for claimed, known in offsets.items():
            rows = with_offsets(rows, claimed, known)
    connection, number = rows["connection"], rows["number"]
    for claimed, (whole, added) in ids.items():
        mine = pc.equal(connection, claimed)
        number = pc.if_else(mine, pc.add(number, added), number)
        connection = pc.if_else(mine, pa.scalar(whole, connection.type), connection)
    columns = {"connection": connection, "number": number}
    return pa.RecordBatch.from_arrays([columns.get(name, rows[name]) for name in rows.schema.names], schema=rows.schema)

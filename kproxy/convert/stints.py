"""A capture in parts, each read once by a reader that hears nothing of the others, and what is joined of them.

Duty: a part is what lies between two borders of a capture. Its reader begins some packets before it, at its split's
first record, and *warms up*: as behind a hole it finds frames, and reads until each request that waits was seen
(`Warm`). At the border it claims the connections of which it knows all that decides what comes, and takes up those that
begin later; what says anything beyond these is *carried*: its packets are told, not read. At its end it warms up as the
reader of the next part does, from the same packets, so that it knows what that one claims. A connection that both know
alike is handed over there. One that is not is left out of its rows, and carried from its first packet on.

`Joiner` gets what readers say of one connection, in their order, and the packets that are carried. It reads these,
compares each claim with what it knows by then, and joins the stints: numbers, ids, lags and the connection's row. So
nothing is guessed; what does not fit (`Torn`) means that the capture is to be read by one reader.

Memory: that of Flows, and the places of a part's packets. Refuses to know who runs readers, and how packets travel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from kproxy.capture import splits
from kproxy.capture.columns import inorder
from kproxy.capture.columns.mapped import Columns
from kproxy.capture.content import TLS
from kproxy.capture.copies import SAME_PACKET_NS
from kproxy.capture.flow import Flow
from kproxy.capture.flows import ALL, NEW, NOBODY, Flows
from kproxy.capture.keys import Pair, pair_of
from kproxy.capture.packets import Dissector
from kproxy.capture.quality import NONE, Quality
from kproxy.capture.reassembly import PATIENCE
from kproxy.capture.records import Window
from kproxy.capture.splits import Split
from kproxy.convert.job import Job
from kproxy.convert.rows import BATCH_ROWS, Counted, Rows
from kproxy.convert.slices import Edge, Offsets, index_at, part_of
from kproxy.tables.names import Names
from kproxy.tables.partitions import MAX_POSITIONS
from kproxy.tables.schema import Table

OVERLAP_BYTES = 4 << 20  # at a split's beginning, in which its reader warms up
LOOK = 64  # packets between two looks which connections have seen an answer
OVERLAP_PART = 48  # of it, at most this part
WARM, MAIN = 0, 1
PLACE = np.dtype(
    [("offset", "<i8"), ("time_ns", "<i8"), ("link", "<i4"), ("captured", "<i4"), ("original", "<i4")]
)  # of a packet
Add = Callable[[Table, pa.RecordBatch], None]


class Torn(Exception):
    """The capture cannot be read in parts: why."""


@dataclass(frozen=True)
class Part:
    """What one reader has of a capture, between the warm-up of its split and the end of that of the next."""

    number: int
    split: Split
    file: int  # the number of the split's file
    following: Split | None = None
    overlap_part: int = OVERLAP_PART

    def border(self, split: Split) -> int:
        """Where packets begin that are not of a split's warm-up any more, by the place of their first byte."""
        size = OVERLAP_BYTES if split.whole else min(OVERLAP_BYTES, (split.end - split.start) // self.overlap_part)
        return split.start + size + 16

    def windows(self, quality: Quality, secrets: list[bytes] | None = None) -> Iterator[tuple[int, bool, Window]]:
        """The part's windows: how many files further, whether it is the warm-up, and the packets."""
        border = self.border(self.split) if self.number else 0
        for window in splits.windows(self.split, quality, secrets):
            at = index_at(window, border - 16) if border and len(window.records) else 0
            if at:
                yield 0, True, part_of(window, 0, at)
            if at < len(window.records):
                yield 0, False, part_of(window, at)
        if self.following is not None:
            further = int(self.following.path != self.split.path)
            for window in self.warming(self.following):
                yield further, False, window

    def warming(self, split: Split) -> Iterator[Window]:
        """The packets of a split's warm-up. Its flaws are told by its own reader."""
        border = self.border(split)
        if split.is_classic:
            split = replace(split, end=min(split.end, border - 16), last=False)
        for window in splits.windows(split, Quality()):
            at = index_at(window, border - 16)
            if at:
                yield part_of(window, 0, at)
            if at < len(window.records):
                return


@dataclass
class Stint:
    """What the reader of a part says of a connection that it had, or that it claimed."""

    part: int
    pair: Pair
    standing: Any = None  # what it claimed; None: the connection begins in the part
    id: int = 0  # as the reader names it
    number: int = 0  # of its first request
    missed: list[Any] = field(default_factory=list)  # partitions whose offsets those before it know
    is_left: bool = False  # its packets are carried, and no row is told
    edge: Edge | None = None  # it was handed over at the end
    counted: Counted | None = None  # it ended
    ended: str = ""  # how one ended that is told already
    is_full: bool = False  # more partitions were missed than are kept in mind


class Warm:
    """Flows that begin somewhere in a capture, until it is clear which of them stand on firm ground."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows
        self._packets = 0
        self._first_ns = self._last_ns = -1
        self._firm: dict[Flow, int] = {}  # the number of a connection's next request when the first was answered

    def take(self, window: Window) -> None:
        begin = 0
        while begin < len(window.records):  # looked at after the same packets, however they come in windows
            end = min(len(window.records), begin + LOOK - self._packets % LOOK)
            part = part_of(window, begin, end)
            self._packets += len(part.records)
            times = part.records[0][0], part.records[-1][0]
            self._first_ns = times[0] if self._first_ns < 0 else self._first_ns
            self._last_ns = times[1]
            self._flows.window(part)
            if not self._packets % LOOK:
                self._look()
            begin = end

    def _look(self) -> None:
        for flow in self._flows.open:
            if flow not in self._firm and flow.session is not None and flow.session.free_at > 0:
                self._firm[flow] = flow.session.number

    def claims(self) -> dict[Pair, tuple[Flow, Any]]:
        """The connections of which is known what decides what comes, with that."""
        if self._last_ns - self._first_ns < 2 * SAME_PACKET_NS or self._packets < 2 * PATIENCE:
            return {}
        found = {}
        for flow, firm in self._firm.items():
            if flow.session is not None and flow.close == "open" and flow.session.oldest_number >= firm:
                standing = flow.standing
                if standing is not None:
                    found[pair_of(flow.keys[0])] = flow, standing
        return found


def claimed_at(part: Part, job: Job, split: Split) -> tuple[dict[Pair, Any], int]:
    """What the reader of the part that begins with a split claims; and the bytes that were read for it."""
    size = 0
    quality = Quality()
    rows = Rows(lambda table, batch: None, keeps=job.is_known)
    warm = Warm(rows.flows(job, quality, first=False, apart=True))
    for window in part.warming(split):
        warm.take(window)
        size += window.records[-1][3] - window.records[0][2]
        rows.flush(BATCH_ROWS)
    return {pair: standing for pair, (_, standing) in warm.claims().items()}, size


class Packets:
    """The places of a part's packets, by connection."""

    def __init__(self, spool: BinaryIO | None) -> None:
        self.pairs: list[Pair] = []
        self.is_torn = False  # datagrams come in fragments, which may be anywhere
        self._numbers: dict[bytes, int] = {}
        self._dissector = _Dissector(Quality())
        self._spool = spool
        self._spooled = 0
        self._found: list[tuple[np.ndarray, np.ndarray, np.ndarray, int, int]] = []
        self.times_ns = np.zeros(0, np.int64)  # of the window that was added last
        self.size = 0  # its bytes

    def add(self, window: Window, file: int, phase: int) -> None:
        records = window.records
        columns = Columns.of(window) if len(records) else None
        owners = np.full(len(records), -1, np.int32)
        others: Sequence[int] = range(len(records))
        if columns is not None:
            heads = inorder.heads(columns.link, columns.start, columns.end, columns.head)
            if heads is not None:
                owners[heads.index] = np.array([self._number(key) for key in heads.keys], np.int32)[heads.lane]
                others = np.flatnonzero(owners < 0).tolist()
        for index in others:
            time_ns, link, start, end, _ = records[index]
            segment = self._dissector.segment(link, window.data, start, end, time_ns)
            if segment is not None:
                owners[index] = self._number(segment[1])
        self.is_torn |= self._dissector.met
        places = np.empty(len(records), PLACE)
        if columns is not None:
            places["time_ns"], places["link"], places["original"] = columns.time_ns, columns.link, columns.original
            places["offset"], places["captured"] = columns.start + window.offset, columns.end - columns.start
        elif len(records):
            time_ns, link, start, end, original = np.array(list(records), np.int64).T
            places["time_ns"], places["link"], places["original"] = time_ns, link, original
            places["offset"], places["captured"] = start + window.offset, end - start
        spooled = self._spooled + np.cumsum(places["captured"], dtype=np.int64) - places["captured"]
        if self._spool is not None and len(places):
            starts = (places["offset"] - window.offset).tolist()
            for start, size in zip(starts, places["captured"].tolist(), strict=True):
                self._spool.write(window.data[start : start + size])
            self._spooled = int(spooled[-1] + places["captured"][-1])
        self._found.append((owners, places, spooled, file, phase))
        self.times_ns, self.size = places["time_ns"], int(places["captured"].sum(dtype=np.int64)) + 16 * len(places)

    def of(self, phases: dict[Pair, int]) -> Iterator[tuple[int, int, np.ndarray, np.ndarray, np.ndarray]]:
        """Those of some connections, each from a phase on, by window.

        File, phase, whose they are (an index of `pairs`), their places, and where they are in the spool.
        """
        least = np.array([phases.get(pair, MAIN + 1) for pair in self.pairs] + [MAIN + 1])
        for owners, places, spooled, file, phase in self._found:
            mine = np.flatnonzero(least[owners] <= phase)
            if len(mine):
                yield file, phase, owners[mine], places[mine], spooled[mine]

    def _number(self, key: bytes) -> int:
        number = self._numbers.get(key)
        if number is None:
            pair = pair_of(key)
            number = self._numbers[pair[0]] = self._numbers[pair[1]] = len(self.pairs)
            self.pairs.append(pair)
        return number


class _Dissector(Dissector):
    met = False

    def _fragment(self, name: bytes, *rest: Any) -> Any:
        self.met = True
        return super()._fragment(name, *rest)


@dataclass
class Found:
    """What a reader says of its part, beside its rows."""

    quality: Quality
    names: Names
    stints: list[Stint]
    packets: Packets
    carried: dict[Pair, int]  # connections whose packets are to be carried, and from which phase on
    left: set[int]  # ids of connections whose rows are not to be told
    first_ns: int  # of its packets but those of the warm-up, the earliest time
    last_ns: int  # of all, the latest
    torn: str  # why the capture cannot be read in parts; "": it can
    logs: dict[int, bool]
    doubted: set[int]
    read_bytes: int


def read(job: Job, part: Part, add: Add, spool: BinaryIO | None = None) -> Found:
    """Read a part. Rows of connections that are left (`Found.left`) are told too, and not to be used.

    spool: gets the bytes of all packets.
    """
    quality, secrets = Quality(), list[bytes]()
    opened = [not part.number]
    rows = Rows(lambda table, batch: add(table, batch) if opened[0] else None, job.records, keeps=job.is_known)
    flows = rows.flows(job, quality, apart=True)
    if job.records is not None:  # of which there may be as many as one has room for
        flows.takes = NOBODY
    packets = Packets(spool)
    flaws = Quality()
    stints: dict[Pair, Stint] = {}
    offsets: dict[Pair, Offsets] = {}
    warm = Warm(flows)
    first_ns = last_ns = NONE
    read_bytes = 0

    def claim() -> None:
        claims = warm.claims()
        rows.flush(1)  # to nobody
        rows.note(quality)
        rows.names.forget()
        quality.forget()
        opened[0] = True
        for flow in flows.open:
            pair = pair_of(flow.keys[0])
            if pair in claims and claims[pair][0] is flow:
                assert flow.session is not None and flow.info is not None
                stints[pair] = Stint(part.number, pair, claims[pair][1], flow.info.id, flow.session.number)
                offsets[pair] = Offsets()
                rows.count_anew(flow, offsets[pair])
                flow.count_anew()
                flow.noted.forget()
            else:
                let_go(flow, rows, flows)
        flows.takes = NEW if flows.takes == ALL else flows.takes

    for further, is_warm, window in part.windows(flaws, secrets):
        if not is_warm and not opened[0]:
            claim()
        packets.add(window, part.file + further, WARM if is_warm else MAIN)
        if is_warm:
            warm.take(window)
        else:
            flows.window(window)
            times = packets.times_ns
            first_ns = int(times.min()) if first_ns == NONE else min(first_ns, int(times.min()))
        last_ns = max(last_ns, int(packets.times_ns.max()))
        read_bytes += packets.size
        rows.flush(BATCH_ROWS)
    if not opened[0]:
        claim()

    quality.add(flaws)
    torn = "fragments" if packets.is_torn else "secrets" if secrets else ""
    carried: dict[Pair, int] = {}
    left: set[int] = set()
    ended = {pair_of(flow.keys[0]): flow.close for flow in flows.ended if not flow.continues}
    if part.following is not None:
        torn = torn or ("damage" if flaws.count("damaged") or flaws.count("cut_file") else "")
        claims, again = claimed_at(part, job, part.following)
        read_bytes += again
        for flow in flows.open:
            pair = pair_of(flow.keys[0])
            stint = stints.get(pair)
            standing = flow.standing
            positions = {} if standing is None else dict(rows.positions(flow))
            if stint is not None and not flow.continues:
                torn = torn or "ports used again"
            if standing is None or claims.get(pair) != standing or len(positions) * 2 >= MAX_POSITIONS:
                if pair in ended or pair[0] in flows.forgotten:
                    torn = torn or "ports used again"
                carried[pair] = MAIN if stint is None else WARM
                if flow.info is not None:
                    left.add(flow.info.id)
                if stint is not None:
                    stint.is_left = True
                let_go(flow, rows, flows)
                continue
            assert flow.session is not None and flow.info is not None
            session = flow.session
            counted = rows.counted(flow)
            edge = Edge(flow.info.id, session.number, counted, positions, session.has_seen_gap)
            if stint is None:
                stint = stints[pair] = Stint(part.number, pair, None, flow.info.id)
            stint.edge = edge
            quality.add(flow.noted)
            let_go(flow, rows, flows)
            counted.let_go()
    for key in flows.away:
        pair = pair_of(key)
        stint = stints.get(pair)
        if pair not in carried and (stint is None or stint.edge is None):
            carried[pair] = MAIN
            if pair in ended or stint is not None or key in flows.forgotten:
                torn = torn or "ports used again"
    flows.finish()
    rows.flush(1)
    rows.note(quality)
    for counted in rows.continued:
        pair = pair_of(counted.flow.keys[0])
        stints[pair].counted = counted
        counted.let_go()
    for pair, close in ended.items():
        if pair not in stints and pair not in carried:
            stints[pair] = Stint(part.number, pair, ended=close)
    for pair, missed in offsets.items():
        stints[pair].missed, stints[pair].is_full = list(missed.missed), missed.is_full
    for kind in ("idle", "not_kept"):
        if quality.count(kind) and part.number + (part.following is not None):
            torn = torn or kind
    logs = rows.logs
    return Found(
        quality, rows.names, list(stints.values()), packets, carried, left, first_ns, last_ns, torn,
        {} if logs is None else logs.decided, set() if logs is None else logs.doubted, read_bytes,
    )  # fmt: skip


def let_go(flow: Flow, rows: Rows, flows: Flows) -> None:
    if flow.session is not None or flow.speaks == TLS:
        rows.forget(flow)
    flows.hand_over(flow)

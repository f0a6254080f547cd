"""The reader of one part of a capture; it reads the part once, without data from the readers of other parts.

Duty: a part is the packets between two borders of a capture. Its reader begins some packets before it, at its split's
first record, and *warms up*: it searches for frames as after a gap, and reads until every pending request was seen
(`Warm`). At the border it claims the connections whose state is complete, and it takes connections that begin later.
Packets of all other connections are *deferred*: the reader emits their places without reading them. At its end it does
the next reader's warm-up, with the same packets, and so computes that reader's claims. A connection with the same state
in both is handed over there. Any other connection is left out of its rows, and deferred from its first packet on.

`Joiner` takes the excerpts of one connection, in their order, and the deferred packets. It reads these packets,
compares each claim with its own state at that point, and joins the excerpts: numbers, ids, lags and the connection's
row. So nothing is guessed. A connection that does not fit (`Conflicting`) is deferred from its first packet to its
last, when parts are read again. A conflict beyond one connection (`Unsplittable`) means that one reader must read the
capture.

Memory: that of Flows, and the places of a part's packets.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import pyarrow as pa

from kproxy.capture.columns.inorder import AT_ONCE_NS
from kproxy.capture.connections.content import TLS
from kproxy.capture.connections.flow import Flow
from kproxy.capture.connections.flows import ALL, NEW, NOBODY, Flows
from kproxy.capture.connections.reassembly import MASK, PATIENCE
from kproxy.capture.dissection.keys import Pair, pair_of
from kproxy.capture.formats import splits
from kproxy.capture.formats.records import Window
from kproxy.capture.formats.splits import Split
from kproxy.capture.quality import NONE, Quality
from kproxy.convert.job import Job
from kproxy.convert.parts.handover import Handover, Offsets
from kproxy.convert.parts.places import MAIN, WARM, Packets, index_at, part_of
from kproxy.convert.rows import BATCH_ROWS, Counted, Rows
from kproxy.tables.names import Names
from kproxy.tables.partitions import MAX_POSITIONS
from kproxy.tables.schema import Table

OVERLAP_BYTES = 4 << 20  # initial length of a warm-up, at a split's beginning
OVERLAP_PART = 48  # the initial warm-up is at most 1/48 of the split
MOST_BYTES, MOST_PART = 64 << 20, 16  # limits of an extended warm-up: bytes, and 1/16 of the split
ENOUGH = 0.9  # a warm-up ends when claimable connections have this share of the bytes
MAX_CONFLICTING = 1000  # maximum of conflicting connections in a capture that is read in parts
LOOK, MOST_LOOK = 64, 4096  # packets before the first check which connections have an answered request; between checks
SEVERAL_LENGTHS = "packets cut at several lengths"  # another part may have more bytes of the same packet
Add = Callable[[Table, pa.RecordBatch], None]


class Unsplittable(Exception):
    """The capture cannot be read in parts; the text is the reason."""


class Conflicting(Unsplittable):
    """One connection cannot be read in parts: defer its packets from the first one on, and read the parts again."""


@dataclass(frozen=True)
class Part:
    """The input of one reader: the bytes between the end of its split's warm-up and that of the next split."""

    number: int
    split: Split
    file: int  # the number of the split's file
    following: Split | None = None
    overlap_part: int = OVERLAP_PART
    conflicting: frozenset[Pair] = frozenset()  # connections that no reader takes


@dataclass
class Excerpt:
    """The result of a part's reader for a connection that it read or claimed."""

    part: int
    pair: Pair
    snapshot: Any = None  # the claimed state; None: the connection begins in the part
    id: int = 0  # in this reader's rows
    number: int = 0  # of its first request
    missed: list[Any] = field(default_factory=list)  # partitions whose offsets earlier parts determine
    is_left: bool = False  # its packets are deferred, and no row is emitted
    handover: Handover | None = None  # for the reader of the next part; None until this part ends
    counted: Counted | None = None  # the counts, if it ended
    ended: str = ""  # the end of a connection whose row is emitted already
    is_full: bool = False  # more partitions were missed than `missed` can hold
    begun: tuple[int, int] | None = None  # the first connection that began in the part: its side and number of the SYN
    firsts: tuple[int, int] | None = None  # the last one whose beginning was seen: those of both sides, or -1


class Warm:
    """The warm-up of flows at the beginning of a split, until enough of them can be claimed.

    A warm-up goes on while claimable connections have less than ENOUGH of the bytes, up to MOST_BYTES and 1/MOST_PART
    of the split. The result depends only on the packets, not on their division into windows.
    """

    def __init__(self, flows: Flows, split: Split, overlap_part: int) -> None:
        self._flows = flows
        self._split = split
        least = most = OVERLAP_BYTES
        if not split.whole:
            size = split.end - split.start
            least = min(least, size // overlap_part)
            most = max(least, min(MOST_BYTES, size // MOST_PART))
        self._size, self._most = least, most
        self._packets = 0
        self._look_at = LOOK
        self._first_ns = self._last_ns = -1
        self._firm: dict[Flow, int] = {}  # the number of a connection's next request when the first was answered
        self.is_over = False

    @property
    def border(self) -> int:
        """Return the offset in the file at which the warm-up ends, by the packets read so far."""
        return self._split.start + self._size

    @property
    def part(self) -> float:
        """Return the share of claimable connections in the bytes of all open connections."""
        firm = {id(flow) for flow, _ in self.claims().values()}
        sizes = [(sum(flow.payload_bytes), id(flow) in firm) for flow in self._flows.open]
        return sum(size for size, is_firm in sizes if is_firm) / max(1, sum(size for size, _ in sizes))

    def take(self, window: Window) -> int:
        """Take the packets of a window that belong to the warm-up; returns their number."""
        begin = 0
        while begin < len(window.records) and not self.is_over:
            stop = index_at(window, self.border)
            if stop > begin:
                self._take(part_of(window, begin, stop))
                begin = stop
            if begin < len(window.records):
                self.reached()
        return begin

    def reached(self) -> None:
        """End the warm-up at the border, or extend it."""
        if self._size >= self._most or self.part >= ENOUGH:
            self.is_over = True
        else:
            self._size = min(2 * self._size, self._most)

    def windows(self) -> Iterator[Window]:
        """Take and yield the packets of the split's warm-up. The reader of the split counts their defects."""
        split = self._split
        if not split.is_classic:
            for window in splits.windows(split, Quality()):
                count = self.take(window)
                if count:
                    yield part_of(window, 0, count)
                if count < len(window.records):
                    return
            return
        begin = split.start
        while begin < split.end and not self.is_over:
            some = replace(split, start=begin, end=min(split.end, self.border), last=False)
            before = begin
            for window in splits.windows(some, Quality(), stop=split.end):
                self.take(window)
                begin = window.offset + window.records[-1][3]
                yield window
            if begin < split.end:
                if begin == before and self.border > before:
                    return  # no valid record there
                self.reached()

    def _take(self, window: Window) -> None:
        begin = 0
        while begin < len(window.records):  # checks come after the same packets in every reader
            end = min(len(window.records), begin + self._look_at - self._packets)
            part = part_of(window, begin, end)
            self._packets += len(part.records)
            times = part.records[0][0], part.records[-1][0]
            self._first_ns = times[0] if self._first_ns < 0 else self._first_ns
            self._last_ns = times[1]
            self._flows.window(part)
            if self._packets == self._look_at:
                self._look()
                self._look_at += min(3 * self._packets, MOST_LOOK)
            begin = end

    def _look(self) -> None:
        for flow in self._flows.open:
            if flow not in self._firm and flow.session is not None and flow.session.free_at > 0:
                self._firm[flow] = flow.session.number

    def claims(self) -> dict[Pair, tuple[Flow, Any]]:
        """Return the connections whose state is complete here: pair -> (flow, state to compare at the border)."""
        if self._last_ns - self._first_ns < 2 * AT_ONCE_NS or self._packets < 2 * PATIENCE:
            return {}
        found = {}
        for flow, firm in self._firm.items():
            if flow.session is not None and flow.close == "open" and flow.session.oldest_number >= firm:
                snapshot = flow.snapshot
                if snapshot is not None:
                    found[pair_of(flow.keys[0])] = flow, snapshot
        return found


@dataclass
class Found:
    """The result of a reader for its part, in addition to rows."""

    quality: Quality
    names: Names
    excerpts: list[Excerpt]
    packets: Packets
    deferred: dict[Pair, int]  # connections whose packets are deferred, and the first phase of these packets
    left: set[int]  # ids of connections whose rows must be dropped
    begin: int  # offset of its first packet after the warm-up, or a smaller one
    until: int  # `begin` of the next part
    first_ns: int  # earliest time of its packets after the warm-up
    last_ns: int  # latest time of all its packets
    unsplittable: str  # why the capture cannot be read in parts; "": it can
    conflicting: dict[Pair, str]  # connections that cannot be read in parts, with the reason
    logs: dict[int, bool]
    doubted: set[int]
    read_bytes: int


def read(
    job: Job,
    part: Part,
    add: Add,
    spool: BinaryIO | None = None,
    *,
    least: float = 0,
    seen: Callable[[int], None] | None = None,
) -> Found:
    """Read a part. Rows of connections in `Found.left` are emitted, too; the caller must drop them.

    spool: receives the bytes of all packets. seen: called with the bytes of each window. Raises Unsplittable at once if
    claimed connections have a share below `least` of the warm-up's bytes: most packets would be read twice.
    """
    quality, secrets, changes = Quality(), list[bytes](), set[str]()
    opened = [not part.number]
    rows = Rows(lambda table, batch: add(table, batch) if opened[0] else None, job.records, keeps=job.is_known)
    flows = rows.flows(job, quality, apart=True)
    if job.records is not None:  # a reader must not decide which batches are kept within a shared limit
        flows.takes = NOBODY
    nobodys = [key for pair in part.conflicting for key in pair]
    flows.leave(nobodys)
    packets = Packets(spool)
    flaws = Quality()
    excerpts: dict[Pair, Excerpt] = {}
    offsets: dict[Pair, Offsets] = {}
    warm = Warm(flows, part.split, part.overlap_part)
    of_others: set[Flow] = set()  # flows that began in the warm-up
    first_ns = last_ns = NONE
    read_bytes = 0

    def claim() -> None:
        claims = warm.claims()
        of_others.update(flows.ended, flows.open)
        rows.flush(1)  # discarded: the gate is closed
        rows.note(quality)
        rows.names.forget()
        quality.forget()
        opened[0] = True
        for flow in flows.open:
            pair = pair_of(flow.keys[0])
            if pair in claims and claims[pair][0] is flow:
                assert flow.session is not None and flow.info is not None
                excerpts[pair] = Excerpt(part.number, pair, claims[pair][1], flow.info.id, flow.session.number)
                offsets[pair] = Offsets()
                rows.count_anew(flow, offsets[pair])
                flow.count_anew()
                flow.noted.forget()
            else:
                let_go(flow, rows, flows)
        flows.takes = NEW if flows.takes == ALL else flows.takes

    def note(window: Window, file: int, phase: int) -> None:
        nonlocal last_ns, read_bytes
        packets.add(window, file, phase)
        last_ns = max(last_ns, int(packets.times_ns.max()))
        read_bytes += packets.size
        if seen is not None:
            seen(packets.size)

    def take(window: Window, file: int) -> None:
        nonlocal first_ns
        if not opened[0]:
            if warm.part < least:
                raise Unsplittable("most connections are in the middle of something")
            claim()
        note(window, file, MAIN)
        flows.window(window)
        rows.flush(BATCH_ROWS)
        times = packets.times_ns
        first_ns = int(times.min()) if first_ns == NONE else min(first_ns, int(times.min()))

    for window in splits.windows(part.split, flaws, secrets, changes):
        count = 0 if opened[0] else warm.take(window)
        if count:
            note(part_of(window, 0, count), part.file, WARM)
            rows.flush(BATCH_ROWS)
        if count < len(window.records):
            take(part_of(window, count), part.file)
    if not opened[0]:
        claim()
    claims: dict[Pair, Any] = {}
    until = NONE
    if part.following is not None:
        file = part.file + (part.following.path != part.split.path)
        theirs = Rows(lambda table, batch: None, keeps=job.is_known)
        their_flows = theirs.flows(job, Quality(), first=False, apart=True)
        their_flows.leave(nobodys)
        ahead = Warm(their_flows, part.following, part.overlap_part)
        for window in ahead.windows():
            take(window, file)
            theirs.flush(BATCH_ROWS)
        claims = {pair: snapshot for pair, (_, snapshot) in ahead.claims().items()}
        until = ahead.border

    quality.add(flaws)
    unsplittable = "fragments" if packets.has_fragments else "secrets" if secrets else ""
    unsplittable = unsplittable or (SEVERAL_LENGTHS if packets.lengths.has_longer else "")
    deferred: dict[Pair, int] = dict.fromkeys(part.conflicting, MAIN)
    conflicting: dict[Pair, str] = {}
    left: set[int] = set()
    ended = {pair_of(flow.keys[0]): flow.close for flow in flows.ended if not flow.continues}
    if part.following is None:  # the capture ends here, and so do open connections
        ended |= {pair_of(flow.keys[0]): "open" for flow in flows.open if not flow.continues}
    begun, firsts = _beginnings((*flows.ended, *flows.open), of_others)
    unsplittable = unsplittable or ("clock step" if flows.clock.steps else "")
    unsplittable = unsplittable or ("times that go back" if flows.goes_back else "")
    if part.following is not None:
        unsplittable = unsplittable or ("damage" if flaws.count("damaged") or flaws.count("cut_file") else "")
        unsplittable = unsplittable or "".join(sorted(changes)[:1])
        for flow in flows.open:
            pair = pair_of(flow.keys[0])
            excerpt = excerpts.get(pair)
            snapshot = flow.snapshot
            positions = {} if snapshot is None else dict(rows.positions(flow))
            if excerpt is not None and not flow.continues:
                conflicting[pair] = "ports used again"
            if snapshot is None or claims.get(pair) != snapshot or len(positions) * 2 >= MAX_POSITIONS:
                if pair[0] in flows.forgotten:
                    unsplittable = unsplittable or "late packets"
                elif pair in ended:
                    conflicting[pair] = "ports used again"
                deferred[pair] = MAIN if excerpt is None else WARM
                if flow.info is not None:
                    left.add(flow.info.id)
                if excerpt is not None:
                    excerpt.is_left = True
                let_go(flow, rows, flows)
                continue
            assert flow.session is not None and flow.info is not None
            session = flow.session
            counted = rows.counted(flow)
            handover = Handover(flow.info.id, session.number, counted, positions, session.has_seen_gap)
            if excerpt is None:
                excerpt = excerpts[pair] = Excerpt(part.number, pair, None, flow.info.id)
            excerpt.handover = handover
            quality.add(flow.noted)
            let_go(flow, rows, flows)
            counted.let_go()
    for key in flows.away:
        pair = pair_of(key)
        excerpt = excerpts.get(pair)
        if pair not in deferred and (excerpt is None or excerpt.handover is None):
            deferred[pair] = MAIN
            if key in flows.forgotten:
                unsplittable = unsplittable or "late packets"
            elif pair in ended or excerpt is not None:
                conflicting[pair] = "ports used again"
    for flow in flows.unsure:
        conflicting.setdefault(pair_of(flow.keys[0]), "sent again, or captured twice")
    flows.finish()
    rows.flush(1)
    rows.note(quality)
    for counted in rows.continued:
        pair = pair_of(counted.flow.keys[0])
        excerpts[pair].counted = counted
        counted.let_go()
    for pair, close in ended.items():
        if pair not in excerpts and pair not in deferred:
            excerpts[pair] = Excerpt(part.number, pair, ended=close)
    for pair, excerpt in excerpts.items():
        excerpt.begun, excerpt.firsts = begun.get(pair), firsts.get(pair)
    for pair, missed in offsets.items():
        excerpts[pair].missed, excerpts[pair].is_full = list(missed.missed), missed.is_full
    for kind in ("idle", "not_kept"):
        if quality.count(kind) and part.number + (part.following is not None):
            unsplittable = unsplittable or kind
    logs = rows.logs
    return Found(
        quality, rows.names, list(excerpts.values()), packets, deferred, left, warm.border if part.number else 0, until,
        first_ns, last_ns, unsplittable, conflicting,
        {} if logs is None else logs.decided, set() if logs is None else logs.doubted, read_bytes,
    )  # fmt: skip


def is_again(begun: tuple[int, int] | None, firsts: tuple[int, int] | None) -> bool:
    """Return whether a connection begins like the previous one: then its packets were captured twice."""
    return begun is not None and firsts is not None and firsts[begun[0]] == begun[1]


def firsts_of(flow: Flow) -> tuple[int, int]:
    """Return the first sequence numbers of both sides of a connection's pair; -1 if not seen."""
    numbers = [half.first & MASK if half.seen else -1 for half in flow.talk.halves]
    side = pair_of(flow.keys[0]).index(flow.keys[0])
    return numbers[side], numbers[1 - side]


def begun_by(flow: Flow) -> tuple[int, int]:
    """Return the side and the number of a flow's SYN, as in `Excerpt.begun`."""
    side = pair_of(flow.keys[0]).index(flow.keys[0])
    return side, firsts_of(flow)[side]


def _beginnings(
    flows: Sequence[Flow], of_others: Collection[Flow]
) -> tuple[dict[Pair, tuple[int, int]], dict[Pair, tuple[int, int]]]:
    """Return `begun` and `firsts` of `Excerpt`, by pair."""
    begun, firsts = dict[Pair, tuple[int, int]](), dict[Pair, tuple[int, int]]()
    for flow in flows:
        if flow.start_seen:
            pair = pair_of(flow.keys[0])
            firsts[pair] = firsts_of(flow)
            if flow not in of_others:
                begun.setdefault(pair, begun_by(flow))
    return begun, firsts


def let_go(flow: Flow, rows: Rows, flows: Flows) -> None:
    if flow.session is not None or flow.speaks == TLS:
        rows.forget(flow)
    flows.hand_over(flow)

"""A capture in parts, each read once by a reader that hears nothing of the others, and what is joined of them.

Duty: a part is what lies between two borders of a capture. Its reader begins some packets before it, at its split's
first record, and *warms up*: as behind a hole it finds frames, and reads until each request that waits was seen
(`Warm`). At the border it claims the connections of which it knows all that decides what comes, and takes up those that
begin later; packets of all others are *deferred*: their places are handed on, they are not read. At its end it warms up
as the reader of the next part does, from the same packets, so that it knows what that one claims. A connection that
both know alike is handed over there. One that is not is left out of its rows, and deferred from its first packet on.

`Joiner` gets what readers say of one connection, in their order, and the packets that are deferred. It reads these,
compares each claim with what it knows by then, and joins the excerpts: numbers, ids, lags and the connection's row. So
nothing is guessed. A connection that does not fit (`Conflicting`) is deferred from its first packet to its last, when
parts are read again; what is not one connection's (`Unsplittable`) means that one reader is to read the capture.

Memory: that of Flows, and the places of a part's packets. Refuses to know who runs readers, and how packets travel.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import pyarrow as pa

from kproxy.capture import splits
from kproxy.capture.columns.inorder import AT_ONCE_NS
from kproxy.capture.content import TLS
from kproxy.capture.flow import Flow
from kproxy.capture.flows import ALL, NEW, NOBODY, Flows
from kproxy.capture.keys import Pair, pair_of
from kproxy.capture.quality import NONE, Quality
from kproxy.capture.reassembly import MASK, PATIENCE
from kproxy.capture.records import Window
from kproxy.capture.splits import Split
from kproxy.convert.job import Job
from kproxy.convert.parts.handover import Handover, Offsets
from kproxy.convert.parts.places import MAIN, WARM, Packets, index_at, part_of
from kproxy.convert.rows import BATCH_ROWS, Counted, Rows
from kproxy.tables.names import Names
from kproxy.tables.partitions import MAX_POSITIONS
from kproxy.tables.schema import Table

OVERLAP_BYTES = 4 << 20  # at a split's beginning, in which its reader warms up, if that is enough
OVERLAP_PART = 48  # of it, at most this part
MOST_BYTES, MOST_PART = 64 << 20, 16  # and where it is not
ENOUGH = 0.9  # of the bytes, those of connections that stand firm
MAX_CONFLICTING = 1000  # connections that are read by themselves; more tear the capture
LOOK, MOST_LOOK = 64, 4096  # packets until it is looked which connections have seen an answer, and between two looks
Add = Callable[[Table, pa.RecordBatch], None]


class Unsplittable(Exception):
    """The capture cannot be read in parts: why."""


class Conflicting(Unsplittable):
    """One connection cannot be: its packets are to be deferred from the first one on, and the parts read again."""


@dataclass(frozen=True)
class Part:
    """What one reader has of a capture, between the warm-up of its split and the end of that of the next."""

    number: int
    split: Split
    file: int  # the number of the split's file
    following: Split | None = None
    overlap_part: int = OVERLAP_PART
    conflicting: frozenset[Pair] = frozenset()  # connections that no reader has


@dataclass
class Excerpt:
    """What the reader of a part says of a connection that it had, or that it claimed."""

    part: int
    pair: Pair
    snapshot: Any = None  # what it claimed; None: the connection begins in the part
    id: int = 0  # as the reader names it
    number: int = 0  # of its first request
    missed: list[Any] = field(default_factory=list)  # partitions whose offsets those before it know
    is_left: bool = False  # its packets are deferred, and no row is told
    handover: Handover | None = None  # to the reader of the next part, at the end
    counted: Counted | None = None  # it ended
    ended: str = ""  # how one ended that is told already
    is_full: bool = False  # more partitions were missed than are kept in mind
    begun: tuple[int, int] | None = None  # the first connection that began in the part: its side and number of the SYN
    firsts: tuple[int, int] | None = None  # the last one whose beginning was seen: those of both sides, or -1


class Warm:
    """Flows that begin with a split, until it is clear which of them stand on firm ground.

    A warm-up goes on while the connections that stand firm have less than ENOUGH of the bytes, but MOST_BYTES and one
    of MOST_PART at most. Who takes the same packets, however they come in windows, finds the same.
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
        """The place in the file from which on packets are not of the warm-up any more, as far as is known."""
        return self._split.start + self._size

    @property
    def part(self) -> float:
        """Of the bytes of all connections that are open, those of the ones that stand firm."""
        firm = {id(flow) for flow, _ in self.claims().values()}
        sizes = [(sum(flow.payload_bytes), id(flow) in firm) for flow in self._flows.open]
        return sum(size for size, is_firm in sizes if is_firm) / max(1, sum(size for size, _ in sizes))

    def take(self, window: Window) -> int:
        """How many of a window's packets are of the warm-up: they were taken."""
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
        """What comes next lies behind the border."""
        if self._size >= self._most or self.part >= ENOUGH:
            self.is_over = True
        else:
            self._size = min(2 * self._size, self._most)

    def windows(self) -> Iterator[Window]:
        """The packets of the split's warm-up, which were taken. Their flaws are told by who reads the split."""
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
                    return  # nothing makes sense there
                self.reached()

    def _take(self, window: Window) -> None:
        begin = 0
        while begin < len(window.records):  # looked at after the same packets
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
        """The connections of which is known what decides what comes, with that."""
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
    """What a reader says of its part, beside its rows."""

    quality: Quality
    names: Names
    excerpts: list[Excerpt]
    packets: Packets
    deferred: dict[Pair, int]  # connections whose packets are to be deferred, and from which phase on
    left: set[int]  # ids of connections whose rows are not to be told
    begin: int  # the place of its first packet that is not of the warm-up, or one before it
    until: int  # where the next part's begin
    first_ns: int  # of its packets but those of the warm-up, the earliest time
    last_ns: int  # of all, the latest
    unsplittable: str  # why the capture cannot be read in parts; "": it can
    conflicting: dict[Pair, str]  # connections that cannot be: why
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
    """Read a part. Rows of connections that are left (`Found.left`) are told too, and not to be used.

    spool: gets the bytes of all packets. seen: gets the bytes of each window. Raises Unsplittable at once where the
    connections that are claimed have less than `least` of the warm-up's bytes: most would be read twice.
    """
    quality, secrets, changes = Quality(), list[bytes](), set[str]()
    opened = [not part.number]
    rows = Rows(lambda table, batch: add(table, batch) if opened[0] else None, job.records, keeps=job.is_known)
    flows = rows.flows(job, quality, apart=True)
    if job.records is not None:  # of which there may be as many as one has room for
        flows.takes = NOBODY
    nobodys = [key for pair in part.conflicting for key in pair]
    flows.leave(nobodys)
    packets = Packets(spool)
    flaws = Quality()
    excerpts: dict[Pair, Excerpt] = {}
    offsets: dict[Pair, Offsets] = {}
    warm = Warm(flows, part.split, part.overlap_part)
    of_others: set[Flow] = set()  # that began in the warm-up
    first_ns = last_ns = NONE
    read_bytes = 0

    def claim() -> None:
        claims = warm.claims()
        of_others.update(flows.ended, flows.open)
        rows.flush(1)  # to nobody
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
    deferred: dict[Pair, int] = dict.fromkeys(part.conflicting, MAIN)
    conflicting: dict[Pair, str] = {}
    left: set[int] = set()
    ended = {pair_of(flow.keys[0]): flow.close for flow in flows.ended if not flow.continues}
    if part.following is None:  # the capture ends here, and with it what is open
        ended |= {pair_of(flow.keys[0]): "open" for flow in flows.open if not flow.continues}
    begun, firsts = _beginnings((*flows.ended, *flows.open), of_others)
    unsplittable = unsplittable or ("clock step" if flows.clock.steps else "")
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
    """Whether a connection begins as the one before it did: its packets are there twice, and one reader would know."""
    return begun is not None and firsts is not None and firsts[begun[0]] == begun[1]


def firsts_of(flow: Flow) -> tuple[int, int]:
    """Where the sides of a connection's pair began; -1: not seen."""
    numbers = [half.first & MASK if half.seen else -1 for half in flow.talk.halves]
    side = pair_of(flow.keys[0]).index(flow.keys[0])
    return numbers[side], numbers[1 - side]


def begun_by(flow: Flow) -> tuple[int, int]:
    """As `Excerpt.begun` has it."""
    side = pair_of(flow.keys[0]).index(flow.keys[0])
    return side, firsts_of(flow)[side]


def _beginnings(
    flows: Sequence[Flow], of_others: Collection[Flow]
) -> tuple[dict[Pair, tuple[int, int]], dict[Pair, tuple[int, int]]]:
    """As `Excerpt` has them."""
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

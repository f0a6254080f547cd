"""Joins the excerpts of one connection from all readers of a capture's parts: its rows are those of a single reader.

Duty: `Joiner` takes the excerpts of a connection in their order, and its deferred packets. It reads these packets,
compares each claim with the state that it has reached, and joins the excerpts: numbers, ids, lags and the connection's
row. `Conflicting`: one reader must read this connection; `Unsplittable`: one reader must read the capture.

Memory: that of Flows with one connection.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kproxy.capture.connections.flow import Flow
from kproxy.capture.connections.flows import Flows
from kproxy.convert.parts.handover import Handover, Offsets
from kproxy.convert.parts.places import WARM
from kproxy.convert.parts.reader import Conflicting, Excerpt, Unsplittable, begun_by, firsts_of, is_again, let_go
from kproxy.convert.rows import Counted, Rows
from kproxy.tables.arrays import array, nulls, numbers
from kproxy.tables.partitions import LATER, MAX_POSITIONS, Positions, with_offsets
from kproxy.wire.events import NONE


@dataclass
class Correction:
    """Corrections for one reader's rows of a connection: final id, offset of exchange numbers, missing lags."""

    id: int
    whole: int
    added: int
    offsets: list[int]


class Joiner:
    """Joins the excerpts of one connection, and its deferred packets, in the order of the capture.

    The owner calls `at` before it passes packets of a part and phase to `flows`, which are `apart`; `finish` at the
    end.
    """

    def __init__(self, excerpts: Sequence[Excerpt], flows: Flows, rows: Rows, gate: list[bool]) -> None:
        """gate: one flag, whether rows are emitted."""
        self.corrections: list[Correction] = []
        self.rows: list[dict[str, Any]] = []  # of `connections`
        self._excerpts = {excerpt.part: excerpt for excerpt in excerpts}
        self._pair = excerpts[0].pair
        if any(excerpt.pair != self._pair for excerpt in excerpts) or len(self._excerpts) < len(excerpts):
            raise Conflicting("two connections of one hash")
        self._flows = flows
        self._rows = rows
        self._gate = gate
        self._steps = sorted(
            (2 * excerpt.part + after, excerpt.part, step)
            for excerpt in excerpts
            for after, step in ((-0.5, "enter"), (0.5, "warmed"), (1.5, "leave"))
        )
        self._begun = 0
        self._before: tuple[Handover, int] | None = None  # the last handover, and the part that takes over
        self._ids: dict[int, tuple[int, int]] = {}  # by a reader's id: (final id, offset of exchange numbers)
        self._known: dict[int, Handover] = {}  # by final id: the connection up to its last handover
        self._waiting: list[tuple[int, int, int, Positions, Callable[[], Sequence[Any]]]] = []
        self._is_over = ""  # the end of the connection, reported by a reader
        self._firsts: tuple[int, int] | None = None  # `firsts` of the last connection
        self._noted: set[Flow] = set()  # flows that were seen here

    def at(self, part: int, phase: int) -> bool:
        """Return whether the packets of a part and phase must be passed to the flows."""
        self._go(2 * part + phase)
        if phase == WARM:
            if self._gate[0]:
                if self._running is not None:
                    return False
                self._rows.flush(1)
                self._gate[0] = False
        elif self._before is not None:
            raise Conflicting("nobody took a connection")
        return True

    def seen(self) -> None:
        """Check the flows after packets were passed to them."""
        flow = self._flows.of(self._pair[0])
        if flow is not None and self._gate[0]:
            for each in (*self._flows.ended, flow):  # a few packets may hold several connections with the same ports
                if each in self._noted and each is not flow:
                    continue
                if self._is_over and (self._is_over == "reset" or not each.start_seen):
                    raise Unsplittable("late packets")
                if each.start_seen and not each.continues and each not in self._noted:
                    self._note(begun_by(each), firsts_of(each))
                self._noted.add(each)
        if self._flows.unsure:
            raise Conflicting("sent again, or captured twice")
        self._end()

    def finish(self) -> None:
        self._go(float("inf"))
        if self._before is not None:
            raise Conflicting("nobody took a connection")
        self._flows.finish()
        self._end()
        for claimed, whole, added, positions, missed in self._waiting:
            self.corrections.append(Correction(claimed, whole, added, [positions.get(each, NONE) for each in missed()]))

    def _note(self, begun: tuple[int, int] | None, firsts: tuple[int, int] | None) -> None:
        if is_again(begun, self._firsts):
            raise Conflicting("a connection that is there twice")
        self._firsts = firsts or self._firsts

    @property
    def _running(self) -> Flow | None:
        flow = self._flows.of(self._pair[0])
        return flow if flow is not None and flow.close == "open" else None

    def _go(self, until: float) -> None:
        while self._begun < len(self._steps) and self._steps[self._begun][0] < until:
            _, part, step = self._steps[self._begun]
            self._begun += 1
            getattr(self, f"_{step}")(self._excerpts[part])

    def _enter(self, excerpt: Excerpt) -> None:
        running = self._running
        if self._before is not None and (self._before[1] != excerpt.part or excerpt.snapshot is None):
            raise Conflicting("nobody took a connection")
        if excerpt.snapshot is None:
            if running is not None:
                raise Conflicting("ports used again")
            return
        if running is not None and self._before is not None:
            raise Conflicting("two readers of a connection")
        if excerpt.is_left:
            if running is None and self._before is None:
                raise Conflicting("a connection that nobody had")
            return
        if running is not None:
            if running.snapshot != excerpt.snapshot:
                raise Conflicting("readers differ")
            assert running.session is not None and running.info is not None
            positions = dict(self._rows.positions(running))
            if len(positions) * 2 >= MAX_POSITIONS:
                raise Conflicting("too many positions")
            session = running.session
            handover = Handover(
                running.info.id, session.number, self._rows.counted(running), positions, session.has_seen_gap
            )
            self._flows.quality.add(running.noted)
            let_go(running, self._rows, self._flows)
            self._flows.take_back(running.keys)
            handover.counted.let_go()
            self._before = handover, excerpt.part
        if self._before is None:
            raise Conflicting("a connection that nobody had")
        if excerpt.is_full:
            raise Conflicting("too many positions")
        self._link(excerpt.id, excerpt.number, lambda: excerpt.missed)

    def _warmed(self, excerpt: Excerpt) -> None:
        """Compare the state after a warm-up with the state that was handed over."""
        if self._before is None or not excerpt.is_left:
            return
        self._rows.flush(1)
        self._gate[0] = True
        flow = self._running
        if flow is None or flow.snapshot != excerpt.snapshot:
            raise Conflicting("readers differ")
        assert flow.session is not None and flow.info is not None
        flow.noted.forget()
        offsets = Offsets()
        self._rows.count_anew(flow, offsets)
        flow.count_anew()

        def missed() -> list[Any]:
            if offsets.is_full:
                raise Conflicting("too many positions")
            return list(offsets.missed)

        self._link(flow.info.id, flow.session.number, missed)

    def _leave(self, excerpt: Excerpt) -> None:
        self._note(excerpt.begun, excerpt.firsts)
        if excerpt.ended:
            if self._running is not None:
                raise Conflicting("ports used again")
            self._is_over = excerpt.ended
        if excerpt.counted is not None:
            self._ended(excerpt.counted)
            self._is_over = excerpt.counted.flow.close
        if excerpt.handover is not None:
            self._before = excerpt.handover, excerpt.part + 1

    def _link(self, claimed: int, number: int, missed: Callable[[], Sequence[Any]]) -> None:
        """Link a connection that was handed over to its id in the next reader."""
        assert self._before is not None
        handover, _ = self._before
        self._before = None
        whole, added = self._ids.get(handover.id, (handover.id, 0))
        if whole in self._known and not handover.follow(self._known[whole]):
            raise Conflicting("the part in between depends on earlier packets")
        added += handover.number - number
        if claimed in self._ids or (claimed == whole and added):  # a coarse clock: both begin at the same time
            raise Conflicting("one id for two readers")
        self._known[whole] = handover
        self._ids[claimed] = whole, added
        self._waiting.append((claimed, *self._ids[claimed], handover.positions, missed))

    def _end(self) -> None:
        for counted in self._rows.continued:
            self._ended(counted)
        self._rows.continued.clear()

    def _ended(self, counted: Counted) -> None:
        assert counted.flow.info is not None
        before = self._known[self._ids[counted.flow.info.id][0]]
        if before.has_seen_gap and counted.is_surprised:
            raise Conflicting("the part in between depends on earlier packets")
        counted.join(before.counted)
        counted.flow.count(self._flows.quality)
        counted.flow.count_kind(self._flows.quality)
        self.rows.append(counted.row())


def corrected(corrections: Sequence[Correction], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with final ids, numbers and lags of connections that began in another part; other rows unchanged."""
    if not corrections or not {"connection", "number"} <= set(rows.schema.names):
        return rows
    known = sorted(
        {correction.id: correction for correction in corrections}.values(), key=lambda correction: correction.id
    )
    connection, number = rows["connection"], rows["number"]
    ids, ours = numbers(connection, 0), np.array([correction.id for correction in known], np.int64)
    index = np.searchsorted(ours, ids)
    index[index == len(ours)] = 0
    mine = (ours[index] == ids) & ~nulls(connection)
    if not mine.any():
        return rows
    if "lag_records" in rows.schema.names and numbers(rows["lag_records"], 0).min() <= LATER:
        for correction in (known[each] for each in np.unique(index[mine]).tolist()):
            if correction.offsets:
                rows = with_offsets(rows, correction.id, correction.offsets)
    whole = np.where(mine, np.array([correction.whole for correction in known], np.int64)[index], ids)
    later = numbers(number, 0) + np.where(
        mine, np.array([correction.added for correction in known], np.int64)[index], 0
    )
    columns = {
        "connection": array(connection.type, whole, nulls(connection)),
        "number": array(number.type, later, nulls(number)),
    }
    return pa.RecordBatch.from_arrays([columns.get(name, rows[name]) for name in rows.schema.names], schema=rows.schema)


def clash(told: Sequence[tuple[dict[int, bool], set[int]]]) -> bool:
    """Return whether readers disagree whether a topic is a coordinators' log, or left out batches of one."""
    decided: dict[int, bool] = {}
    for logs, _ in told:
        for identity, is_log in logs.items():
            if decided.setdefault(identity, is_log) != is_log:
                return True
    return any(decided.get(identity, False) for _, doubted in told for identity in doubted)


def without(left: Collection[int], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows without the rows of some connections."""
    if not left or "connection" not in rows.schema.names:
        return rows
    mine = np.isin(numbers(rows["connection"], 0), np.array(sorted(left), np.int64)) & ~nulls(rows["connection"])
    return rows.filter(array(pa.bool_(), ~mine)) if mine.any() else rows

"""Deliveries of the connections in a window, which the compiled core reads at its end, for all connections at once.

Duty: TCP is put in order packet by packet where necessary, but most deliveries are successive bytes of the window.
`Later` wraps the receiver of a Kafka connection and notes them, with the holes, ends, and bytes from elsewhere between
them. When the window is over, `Deferred.play` lets the core read the bytes between two of these, for all connections
together, and passes the rest to the receivers, in order of arrival. So disorder of TCP does not stop the core, and a
hole affects only the exchanges around it. Without a window in hand everything passes at once.

Memory: for a window, a tuple for each segment processed alone, some numbers for each other one. Refuses to know TCP,
and why bytes are in order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kproxy.capture.columns import inorder
from kproxy.capture.columns.pairs import PairReader
from kproxy.capture.columns.segments import Part, Segments
from kproxy.capture.connections.flow import Flow
from kproxy.capture.connections.receivers import Kafka
from kproxy.wire.offline.bulk import Bulk


@dataclass(slots=True)
class _Taken:
    """Segments that were taken together."""

    segments: Segments
    carrying: slice
    flip: int  # 1 where their side 0 is the conversation's side 1


Delivery = tuple[int, int, int, int]  # side, start, end, time
_Note = list[Delivery] | _Taken | Callable[[], None]


class Later:
    """Notes what a connection delivers while a window is in hand."""

    __slots__ = ("_deferred", "_notes", "clock_ns", "flow", "talk")

    def __init__(self, flow: Flow, talk: Kafka, deferred: "Deferred") -> None:
        self.flow = flow
        self.talk = talk
        self.clock_ns = 0  # of what was played
        self._deferred = deferred
        self._notes: list[_Note] = []

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        start = self._deferred.place(view)
        if start < 0:
            self._note(lambda: self._receive(side, view, now_ns))
            return
        notes = self._notes
        delivery = (side, start, start + len(view), now_ns)
        if notes and type(notes[-1]) is list:
            notes[-1].append(delivery)
        else:
            self._note([delivery])

    def taken(self, segments: Segments, carrying: slice, flip: int) -> None:
        """Segments of the window are delivered, their times not yet put in order."""
        if carrying.stop > carrying.start:
            self._note(_Taken(segments, carrying, flip))

    def gap(self, side: int, count: int, now_ns: int) -> None:
        self._note(lambda: self._gap(side, count, now_ns))

    def close(self, side: int, now_ns: int) -> None:
        self._note(lambda: self._close(side, now_ns))

    def then(self, action: Callable[[], None]) -> None:
        """Do something when all that came so far is played."""
        self._note(action)

    def _note(self, note: _Note) -> None:
        if not self._deferred.is_on and callable(note):
            note()
            return
        if not self._notes:
            self._deferred.waiting.append(self)
        self._notes.append(note)

    def _receive(self, side: int, view: memoryview, now_ns: int) -> None:
        self.clock_ns = max(self.clock_ns, now_ns)
        self.talk.receive(side, view, now_ns)

    def _gap(self, side: int, count: int, now_ns: int) -> None:
        self.clock_ns = max(self.clock_ns, now_ns)
        self.talk.gap(side, count, now_ns)

    def _close(self, side: int, now_ns: int) -> None:
        self.clock_ns = max(self.clock_ns, now_ns)
        self.talk.close(side, now_ns)

    def forget(self) -> None:
        """Drop the notes without playing them."""
        self._notes.clear()

    def next_run(self) -> list[Segments]:
        """The next notes to play that are bytes of the window."""
        runs = []
        for number, note in enumerate(self._notes):
            if isinstance(note, _Taken):
                its = note.segments
                side, start, end, time_ns = (
                    column[note.carrying] for column in (its.side, its.start, its.end, its.time_ns)
                )
                runs.append(Segments(side ^ note.flip, start, end, time_ns))
            elif isinstance(note, list):
                runs.append(Segments(*np.array(note, np.int64).T))
            else:
                del self._notes[:number]
                return runs
        self._notes.clear()
        return runs

    def do_next(self) -> bool:
        """Play what is next and is no bytes of the window; whether there is more."""
        done = 0
        for note in self._notes:
            if not callable(note):
                break
            note()
            done += 1
        del self._notes[:done]
        return bool(self._notes)


class Deferred:
    """The connections of a window that have something to be played."""

    def __init__(self, reader: PairReader | None) -> None:
        """reader: None: nothing is deferred."""
        self.is_on = False
        self.waiting: list[Later] = []
        self._reader = reader
        self._base = self._size = 0  # where the window's bytes are in memory

    def begin(self, whole: memoryview) -> None:
        """A window is in hand."""
        self.is_on = True
        self._base = _address(whole) if len(whole) else 0
        self._size = len(whole)

    def place(self, view: memoryview) -> int:
        """Where in the window some bytes lie; -1: elsewhere."""
        if not self.is_on or not len(view):
            return -1
        start = _address(view) - self._base
        return start if 0 <= start <= self._size - len(view) else -1

    def play(self, whole: memoryview) -> Iterator[tuple[list[Flow], Bulk]]:
        """The window is over: yields exchanges that the core has read, with their connections by number.

        All others reach the receivers, before and after each yield.
        """
        self.is_on = False
        while left := self.waiting:
            parts: list[Part] = []
            laters: list[Later] = []
            runs: list[Segments] = []
            size = 0
            for later in left:
                mine = later.next_run()
                if mine:
                    low = size
                    size += sum(len(run.side) for run in mine)
                    runs += mine
                    laters.append(later)
                    parts.append(Part(later.talk, low, size, later.clock_ns))
            if runs:
                segments = Segments(
                    *(
                        np.concatenate([getattr(run, name) for run in runs])
                        for name in ("side", "start", "end", "time_ns")
                    )
                )
                if size < inorder.FEWEST or self._reader is None:
                    _one_by_one(whole, segments, parts)
                else:
                    for bulk in self._reader.read(whole, segments, parts):
                        yield [later.flow for later in laters], bulk
                for later, part in zip(laters, parts, strict=True):
                    later.clock_ns = part.clock_ns
            self.waiting = [later for later in left if later.do_next()]

    def drop(self) -> None:
        """Nothing more of the window is played: it was not understood."""
        self.is_on = False
        for later in self.waiting:
            later.forget()
        self.waiting = []


def _one_by_one(whole: memoryview, segments: Segments, parts: list[Part]) -> None:
    for part in parts:
        for side, start, end, time_ns in segments.rows(part.low, part.high):
            part.clock_ns = max(part.clock_ns, time_ns)
            part.talk.receive(side, whole[start:end], part.clock_ns)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address

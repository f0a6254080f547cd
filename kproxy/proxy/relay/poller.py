"""Which sockets of the relays can be read or written, and when that was: one epoll of ours, inside the event loop.

The loop's own add_reader would do, were it not for resets: libuv stops watching a socket for good once epoll reports an
error on it, after one last call of the reader (uv__poll_io). A relay reads once per event; it would get the bytes that
came before the reset, and never hear of the reset. Here an error is reported like anything else, until it is read.

The poller is the relays' clock. `turn_ns` is when epoll last returned: what it reported was there by then. `now_ns` is
when the event before the current one was done; whoever handles an event sets it. If epoll was not asked for longer than
LATE_NS, `is_late` says that `turn_ns` may be far from when bytes arrived: the loop was idle, or it was busy, and nobody
in this process knows which. A reader then asks the kernel (`sockets.receive_timed`), whose clock is the time of day:
`wall_offset_ns` converts it. A turn in which that clock was found set anew is not late: times of before and after are
not comparable. `lag_bucket` is the relays' too: the bucket of their histogram for `now_ns - turn_ns`.

Where `is_in_order`, epoll reports sockets in the order in which they became ready: it was asked until it had none.
Then the first read that turns out to be recent ends the lateness of the turn, and a wake-up costs one such read.

Sockets whose events take long have their turn after all others, one at a time: a client that costs much waits for those
that cost little, and never the other way round. As long as no turn takes LONG_TURN_NS nothing is measured for that.

All times are nanoseconds of the monotonic clock. The interface is the loop's. Refuses to know what the sockets are.
"""

import select
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from time import monotonic_ns, time_ns
from typing import Any

LATE_NS = 1_000_000  # what is booked wrongly is at most so much
_IN, _OUT, _END = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
_EVENTS = 256  # in one turn; then the rest of the loop has its own
_STEP_NS = 10_000_000  # of the time of day against ours: less is between the two calls that ask for them
LONG_TURN_NS = 4_000_000  # of one return of epoll: then events are measured
COSTLY_NS = 1_000_000  # of one event, some 500 us more than 512 KiB of a large body take
_LOOP_NS = 10_000_000  # while events are measured, the rest of the loop has its turn after so long

Callback = Callable[..., None]


class Poller:
    __slots__ = (
        "_costly",
        "_emptied",
        "_ends",
        "_epoll",
        "_is_scheduled",
        "_later",
        "_loop",
        "_measures",
        "_readers",
        "_writers",
        "is_in_order",
        "is_late",
        "lag_bucket",
        "now_ns",
        "turn_ns",
        "wall_offset_ns",
    )

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._readers: list[Callback | None] = []  # by file descriptor: as long as the highest of them
        self._ends: set[int] = set()  # whose readers wait for nothing but the end
        self._writers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._later: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._is_scheduled = False
        self._measures = False
        self._costly: dict[int, None] = {}  # whose last event took long; the first waits for longest
        self.turn_ns = self.now_ns = monotonic_ns()
        self.is_late = False
        self.is_in_order = False
        self._emptied = True  # the last call left nothing ready
        self.lag_bucket = 0
        self.wall_offset_ns = (
            time_ns() - self.turn_ns
        )  # the time of day less `turn_ns`, of a late turn: steps of that clock are followed
        loop.add_reader(self._epoll.fileno(), self._ready)

    def close(self) -> None:
        if self._epoll.closed:
            return
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._later.clear()

    def later(self, callback: Callback, *args: Any) -> None:
        """Call back once, in a later turn: one of those who wait so, after the sockets that are ready then."""
        self._later.append((callback, args))
        self._schedule()

    def _schedule(self) -> None:
        """One call of `_next` per turn: a callback that asks for its next turn must not ask for two."""
        if self._later and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Give the sockets their turn, then one of those who wait for a later one."""
        self._is_scheduled = False
        if self._epoll.closed:
            return
        try:
            self._ready()
            if self._later:
                callback, args = self._later.popleft()
                callback(*args)
        finally:  # a callback that raises does not take the turn of the others
            self._schedule()

    def add_reader(self, fd: int, callback: Callback) -> None:
        known = self._is_known(fd)
        self._readers[fd] = callback
        self._ends.discard(fd)
        self._apply(fd, known)

    def add_end_reader(self, fd: int, callback: Callback) -> None:
        """Call back when the peer ends or resets, whatever is unread; again and again, until the reader is removed."""
        known = self._is_known(fd)
        self._readers[fd] = callback
        self._ends.add(fd)
        self._apply(fd, known)

    def remove_reader(self, fd: int) -> None:
        if self._reads(fd):
            self._readers[fd] = None
            self._ends.discard(fd)
            self._apply(fd, True)

    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None:
        known = self._is_known(fd)
        self._writers[fd] = callback, args
        self._apply(fd, known)

    def remove_writer(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._apply(fd, True)

    def _reads(self, fd: int) -> bool:
        return fd < len(self._readers) and self._readers[fd] is not None

    def _is_known(self, fd: int) -> bool:
        """Whether a socket is watched; makes room for its reader."""
        if fd >= len(self._readers):
            self._readers += [None] * (fd + 1 - len(self._readers))
        return self._readers[fd] is not None or fd in self._writers

    def _apply(self, fd: int, known: bool) -> None:
        """A socket that is neither read nor written is not watched: its end is always reported, and would spin us."""
        events = _OUT if fd in self._writers else 0
        if self._readers[fd] is not None:
            events |= _END if fd in self._ends else _IN
        if not events:
            self._costly.pop(fd, None)  # the number is soon that of another socket
            self._epoll.unregister(fd)
        elif known:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)

    def _ready(self) -> None:
        readers = self._readers
        writers = self._writers
        poll = self._epoll.poll
        left = _EVENTS
        begun_ns = 0
        while left and (ready := poll(0, left)):  # to come back for them would cost two calls more
            turn_ns = monotonic_ns()
            self.is_late = turn_ns - self.turn_ns > LATE_NS
            if self.is_late:
                offset_ns = time_ns() - turn_ns
                self.is_late = -_STEP_NS < offset_ns - self.wall_offset_ns < _STEP_NS
                self.wall_offset_ns = offset_ns
                # In one call, what lay between two returns was work; else the loop may have been idle.
                self._measures |= left < _EVENTS and turn_ns - self.turn_ns > LONG_TURN_NS
            self.turn_ns = self.now_ns = turn_ns
            self.lag_bucket = 0
            begun_ns = begun_ns or turn_ns
            self.is_in_order = self._emptied and left == _EVENTS and not self._measures
            self._emptied = False
            left -= len(ready)
            if self._measures:
                self._cheap_first(ready)
                if monotonic_ns() - begun_ns > _LOOP_NS:
                    return
                continue
            for fd, events in ready:
                # An error and a hang-up are for both: whoever reads or writes then meets them.
                if events != _OUT:
                    reader = readers[fd]
                    if reader is not None:  # unless an earlier event of this turn closed it
                        reader()
                    if events == _IN:
                        continue
                if fd in writers:
                    callback, args = writers[fd]
                    callback(*args)
        self._emptied = left > 0

    def _cheap_first(self, ready: list[tuple[int, int]]) -> None:
        """Handle the events of one return of epoll, but of the costly ones only that which has waited for longest."""
        begun_ns = monotonic_ns()
        costly = self._costly
        waiting: dict[int, int] = {}
        for fd, events in ready:
            if fd in costly:
                waiting[fd] = events
            else:
                self._handle(fd, events)
        for fd in costly:
            if fd in waiting:
                self._handle(fd, waiting[fd])
                break
        self._measures = bool(costly) or monotonic_ns() - begun_ns > LONG_TURN_NS

    def _handle(self, fd: int, events: int) -> None:
        """Handle one event, and note whether it took long."""
        begun_ns = monotonic_ns()
        self.now_ns = begun_ns
        reader = self._readers[fd]
        if events != _OUT and reader is not None:
            reader()
        if events != _IN and fd in self._writers:
            callback, args = self._writers[fd]
            callback(*args)
        self._costly.pop(fd, None)
        if monotonic_ns() - begun_ns > COSTLY_NS and self._is_known(fd):
            self._costly[fd] = None

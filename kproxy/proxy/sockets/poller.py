"""Which sockets of the relays can be read or written, and when that was: one epoll of ours, inside the event loop.

The loop's own add_reader would do, were it not for resets: libuv stops watching a socket for good once epoll reports an
error on it, after one last call of the reader (uv__poll_io). A relay reads once per event; it would get the bytes that
came before the reset, and never hear of the reset. Here an error is reported like anything else, until it is read.

The poller is the relays' clock. `turn_ns` is when epoll last returned: what it reported was there by then. `now_ns` is
when the event before the current one was done; whoever handles an event sets it, else the poller does. If epoll was not
asked for longer than LATE_NS, `is_late` says that `turn_ns` may be far from when bytes arrived: the loop was idle, or
it was busy, and nobody in this process knows which. A reader then asks the kernel (`sockets.receive_timed`), whose
clock is the time of day: `wall_offset_ns` converts it. A turn in which that clock was found set anew is not late: times
of before and after are not comparable. `lag_bucket` is the relays' too: the bucket of their histogram for
`now_ns - turn_ns`.

Where `is_in_order`, epoll reports sockets in the order in which they became ready: it was asked until it had none.
Then the first read that turns out to be recent ends the lateness of the turn, and a wake-up costs one such read.

A turn is bounded by the time that it takes. While the events that epoll reported at once took at most SHORT_NS, they
are handled in that order. Beyond that the rest, and the events reported next, are handled by their cost, which is
measured then. The bounds of CHEAP_NS make three kinds of sockets whose events cost little: they have three quarters of
the turn, and each kind has as much of that as the others. Then come alternately those of unknown cost and all others,
one of each at least. After LONG_TURN_NS the rest queues, and is `queuing`: relays then take less of each read, so that
each connection's turn comes soon. A socket that queues is not in the epoll: else each turn would cost time for all that
wait, however many there are. So a client whose events cost little waits for few of those that cost more, however many
there are, a new one for those that are as new, and all of a kind have their turn equally often. A socket is new once
(`meet`), and not each time it is watched again after its peer took nothing. Every LOOK_NS events are measured in any
case, so that those of every day are known.

What an event costs is the thread's CPU time: on a busy machine the kernel runs somebody else in the middle of many
events, most of all where a send wakes them. The kind of a socket follows from the mean of its events, of which the last
counts an eighth, and at most MOST_NS: one event that took long by chance, as for a collection of garbage, does not make
a socket costly. A second one within AGAIN_NS does, however many cheap events were between them. All events of a socket
may still turn costly at once: then others of its kind wait for one event of it.

All times are nanoseconds of the monotonic clock. The interface is the loop's. Refuses to know what the sockets are.
"""

import select
from asyncio import AbstractEventLoop, Handle
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns, time_ns
from typing import Any

LATE_NS = 1_000_000  # what is booked wrongly is at most so much
_IN, _OUT, _END = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
_EVENTS = 256  # in one turn; then the rest of the loop has its own
_QUEUED_EVENTS = 4096  # in one turn while some queue, where the others come to; each takes about 2 us
_STEP_NS = 10_000_000  # of the time of day against ours: less is between the two calls that ask for them
SHORT_NS = 1_000_000  # of what was reported at once
LONG_TURN_NS = 4_000_000  # of one turn; with one event more, that is how long who costs little waits
# Of one event: a small request takes some 30 us, to read and send 512 KiB of a large body some 500 us.
CHEAP_NS = (50_000, 100_000, 200_000)
LOOK_NS = 10_000_000  # from one measured turn to the next
_COSTLY = len(CHEAP_NS)  # the kind behind those of CHEAP_NS
_NEW = _COSTLY + 1  # no event of it has been measured yet
_UNKNOWN = -1
MOST_NS = 1_000_000  # that one event counts
AGAIN_NS = 8_000_000_000  # within which a second event above CHEAP_NS makes a socket costly for as long

Callback = Callable[..., None]


class Poller:
    __slots__ = (
        "_again",
        "_costly",
        "_costs",
        "_emptied",
        "_ends",
        "_epoll",
        "_is_scheduled",
        "_later",
        "_look_ns",
        "_loop",
        "_parked",
        "_queues",
        "_readers",
        "_writers",
        "is_in_order",
        "is_late",
        "lag_bucket",
        "now_ns",
        "queuing",
        "turn_ns",
        "wall_offset_ns",
    )

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._readers: list[Callback | None] = []  # by file descriptor: as long as the highest of them
        self._ends: dict[int, Callback] = {}  # of those that wait for nothing but the end
        self._writers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._later: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._is_scheduled = False
        self._costs: list[int] = []  # by file descriptor: the mean of what events of its socket cost
        # By file descriptor: when the last event above CHEAP_NS was; where it was the second, until when that counts.
        self._costly: dict[int, tuple[int, int]] = {}
        self._look_ns = 0  # when the time of events is looked at again
        # By kind: events that were reported and wait, by file descriptor; the first for longest.
        self._queues: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(_NEW + 1)]
        self.queuing: dict[int, int] = {}  # the kind of each file descriptor that is in a queue: empty, nobody waits
        self._parked: set[int] = set()  # those of them that are not in the epoll: they queue since an earlier turn
        self._again: Handle | None = None  # the next turn: epoll does not wake the loop for those that queue
        self.turn_ns = self.now_ns = monotonic_ns()
        self.is_late = False
        self.is_in_order = False
        self._emptied = True  # the last call left nothing ready
        self.lag_bucket = 0
        # The time of day less `turn_ns`, of a late turn: steps of that clock are followed.
        self.wall_offset_ns = time_ns() - self.turn_ns
        loop.add_reader(self._epoll.fileno(), self._readable)

    def close(self) -> None:
        if self._epoll.closed:
            return
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        if self._again is not None:
            self._again.cancel()
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
        """Call back one of those who wait for a later turn; before the next one the loop gives the sockets theirs."""
        self._is_scheduled = False
        if self._epoll.closed:
            return
        try:
            callback, args = self._later.popleft()
            callback(*args)
        finally:  # a callback that raises does not take the turn of the others
            self._schedule()

    def add_reader(self, fd: int, callback: Callback) -> None:
        known = self._is_known(fd)
        self._readers[fd] = callback
        self._ends.pop(fd, None)
        self._apply(fd, known)

    def add_end_reader(self, fd: int, callback: Callback) -> None:
        """Call back when the peer ends or resets, whatever is unread; again and again, until the reader is removed."""
        known = self._is_known(fd)
        self._readers[fd] = None
        self._ends[fd] = callback
        self._apply(fd, known)

    def remove_reader(self, fd: int) -> None:
        if self._reads(fd):
            self._readers[fd] = None
            self._ends.pop(fd, None)
            self._apply(fd, True)

    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None:
        known = self._is_known(fd)
        self._writers[fd] = callback, args
        self._apply(fd, known)

    def remove_writer(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._apply(fd, True)

    def meet(self, fd: int) -> None:
        """A new socket has that number: what the events of the one before cost says nothing about its own."""
        if fd < len(self._costs):
            self._costs[fd] = _UNKNOWN
            self._costly.pop(fd, None)

    def _reads(self, fd: int) -> bool:
        return fd < len(self._readers) and (self._readers[fd] is not None or fd in self._ends)

    def _is_known(self, fd: int) -> bool:
        """Whether a socket is watched; makes room for its reader."""
        if fd >= len(self._readers):
            self._readers += [None] * (fd + 1 - len(self._readers))
            self._costs.extend([_UNKNOWN] * (fd + 1 - len(self._costs)))
        return self._reads(fd) or fd in self._writers

    def _apply(self, fd: int, known: bool) -> None:
        """A socket that is neither read nor written is not watched: its end is always reported, and would spin us."""
        events = self._wanted(fd)
        if not events and fd in self.queuing:  # the number may soon be that of another socket
            del self._queues[self.queuing.pop(fd)][fd]
        if fd in self._parked:
            if not events:
                self._parked.remove(fd)
        elif not events:
            self._epoll.unregister(fd)
        elif known:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)

    def _wanted(self, fd: int) -> int:
        """The events that somebody waits for."""
        events = _OUT if fd in self._writers else 0
        if self._reads(fd):
            events |= _END if fd in self._ends else _IN
        return events

    def _readable(self) -> None:
        if self._again is None:  # else that is the turn: two in a row would keep the rest of the loop waiting
            self._ready()

    def _go_on(self) -> None:
        self._again = None
        if not self._epoll.closed:
            self._ready()

    def _ready(self) -> None:
        readers = self._readers
        poll = self._epoll.poll
        queued = bool(self.queuing)
        most = left = _QUEUED_EVENTS if queued else _EVENTS
        until_ns = 0
        while left and ((ready := poll(0, left)) or queued):  # to come back for them would cost two calls more
            turn_ns = monotonic_ns()
            count = len(ready)
            if turn_ns - self.turn_ns > LATE_NS or queued:
                offset_ns = time_ns() - turn_ns
                self.is_late = -_STEP_NS < offset_ns - self.wall_offset_ns < _STEP_NS
                self.wall_offset_ns = offset_ns
            else:
                self.is_late = False
            self.turn_ns = self.now_ns = turn_ns
            self.lag_bucket = 0
            until_ns = until_ns or turn_ns + LONG_TURN_NS
            self.is_in_order = self._emptied and left == most
            self._emptied = False
            left -= count
            if queued or turn_ns > self._look_ns or turn_ns > until_ns:
                if not self._in_turn(ready, until_ns):
                    return
                queued = False
                continue
            now_ns = turn_ns
            long_ns = min(turn_ns + SHORT_NS, until_ns)
            rest = iter(ready)
            for fd, events in rest:
                if events == _IN:
                    reader = readers[fd]
                    if reader is not None:  # unless an earlier event of this turn closed it
                        reader()
                else:
                    self._call_back(fd, events)
                before_ns, now_ns = now_ns, self.now_ns
                if now_ns is before_ns:
                    self.now_ns = now_ns = monotonic_ns()
                if now_ns > long_ns:
                    if not self._in_turn(list(rest), until_ns):
                        return
                    break
        self._emptied = left > 0

    def _in_turn(self, ready: list[tuple[int, int]], until_ns: int) -> bool:
        """Handle events until then, the cheap ones first. True: none queues, and there is time left."""
        try:
            self._handle_in_turn(ready, until_ns)
        finally:  # a callback that raises does not take the turn of those that queue
            self._park(ready)
        now_ns = self.now_ns
        self._look_ns = now_ns if now_ns - self.turn_ns > SHORT_NS else now_ns + LOOK_NS
        return not self.queuing and now_ns <= until_ns

    def _handle_in_turn(self, ready: list[tuple[int, int]], until_ns: int) -> None:
        queues, readers, costs, costly = self._queues, self._readers, self._costs, self._costly
        now_ns = self.now_ns
        soon_ns = until_ns - LONG_TURN_NS // 4
        early_ns = soon_ns - LONG_TURN_NS // 2  # until then they are handled in the order in which they are reported
        queued = any(queues)
        cpu_ns = thread_time_ns()
        for fd, events in ready:
            cost = costs[fd]
            kind = _NEW if cost == _UNKNOWN else bisect_left(CHEAP_NS, cost)
            if fd in costly and costly[fd][1] > now_ns:
                kind = _COSTLY
            if queued or kind == _COSTLY or now_ns > (early_ns if kind == _NEW else soon_ns):
                self.is_in_order = False
                if self._is_known(fd) and fd not in self.queuing:  # unless an earlier event of this turn closed it
                    queues[kind][fd] = events
                    self.queuing[fd] = kind
                    queued = True
                continue
            reader = readers[fd]
            if events != _IN:
                self._call_back(fd, events)
            elif reader is not None:
                reader()
            begun_ns, cpu_ns = cpu_ns, thread_time_ns()
            self.now_ns = now_ns = monotonic_ns()
            self._measured(fd, cpu_ns - begun_ns)
        if queued:
            self._share(soon_ns)
            while queues[_NEW] or queues[_COSTLY]:
                for kind in (_NEW, _COSTLY):
                    if queues[kind]:
                        self._handle(*queues[kind].popitem(last=False))
                if self.now_ns > until_ns:
                    break

    def _park(self, ready: list[tuple[int, int]]) -> None:
        """Take sockets that still queue after their turn out of the epoll, and ask the loop for the next turn."""
        if not self.queuing:
            return
        for fd, _ in ready:
            if fd in self.queuing and fd not in self._parked:
                self._epoll.unregister(fd)
                self._parked.add(fd)
        if self._again is None:
            self._again = self._loop.call_soon(self._go_on)

    def _share(self, until_ns: int) -> None:
        """Handle cheap events that queue until then: next is always the kind that had the least of this time."""
        cheap = self._queues[:_COSTLY]
        had_ns = [0] * _COSTLY
        now_ns = self.now_ns
        while now_ns <= until_ns and any(cheap):
            kind = min((kind for kind in range(_COSTLY) if cheap[kind]), key=had_ns.__getitem__)
            begun_ns = now_ns
            self._handle(*cheap[kind].popitem(last=False))
            now_ns = self.now_ns
            had_ns[kind] += now_ns - begun_ns

    def _handle(self, fd: int, events: int) -> None:
        """Handle one event that queued, and note when it was done and what it cost."""
        begun_ns = thread_time_ns()
        if fd in self._parked:
            try:
                self._epoll.register(fd, self._wanted(fd))
            except OSError:  # ENOMEM; ENOSPC: fs.epoll.max_user_watches. Nothing else would wake it: it queues again
                self.now_ns = monotonic_ns()
                self._queues[_COSTLY][fd] = events
                self.queuing[fd] = _COSTLY
                return
            self._parked.remove(fd)
        del self.queuing[fd]
        self._call_back(fd, events)
        took = thread_time_ns() - begun_ns
        self.now_ns = monotonic_ns()
        self._measured(fd, took)

    def _measured(self, fd: int, took: int) -> None:
        """Note what an event of a socket cost, which was done just now."""
        cost = self._costs[fd]
        self._costs[fd] = _mean(cost, took)
        if took > CHEAP_NS[-1] and cost != _UNKNOWN:
            last_ns, until_ns = self._costly.get(fd, (-AGAIN_NS, 0))
            is_again = self.now_ns - last_ns < AGAIN_NS
            self._costly[fd] = self.now_ns, self.now_ns + AGAIN_NS if is_again else until_ns

    def _call_back(self, fd: int, events: int) -> None:
        """Call back who waits for this. An error and a hang-up are for both: who reads or writes then meets them."""
        if events != _OUT:
            reader = self._readers[fd]
            if reader is not None:  # unless an earlier event of this turn closed it
                reader()
            self._tell_end(fd, events)
        if events != _IN and fd in self._writers:
            callback, args = self._writers[fd]
            callback(*args)

    def _tell_end(self, fd: int, events: int) -> None:
        """Call back who waits for an end, unless the event is older than that: bytes to be read."""
        if fd in self._ends and events & ~(_IN | _OUT):
            self._ends[fd]()


def _mean(cost: int, took: int) -> int:
    """The mean cost of a socket's events with one more."""
    took = min(took, MOST_NS)
    return took if cost == _UNKNOWN else cost + (took - cost) // 8

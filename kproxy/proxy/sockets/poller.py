"""Readiness of the relays' sockets, with times: an epoll of our own, inside the event loop.

Why not add_reader of the loop: libuv stops watching a socket for good once epoll reports an error on it, after one last
call of the reader (uv__poll_io). A relay reads once per event. It would get the bytes before a reset, and never the
reset. This poller reports an error like any other event, until it is read.

Clock. The poller is the clock of the relays. `turn_ns` is the time when epoll last returned: the reported bytes had
arrived by then. `now_ns` is the time when the previous event was done; the reader sets it, otherwise the poller does.
`is_late`: epoll was not called for longer than LATE_NS, because the loop was idle or busy, so bytes may have arrived
long before `turn_ns`. A reader then uses the kernel's receive timestamp (`sockets.receive_timed`). That is wall-clock
time, which `wall_offset_ns` converts. If the wall clock is set during a turn, the turn is not late, since the times
before and after are not comparable. `lag_bucket` is the bucket of `now_ns - turn_ns` in the relays' histogram.

Order. `is_in_order`: the previous call of epoll left no ready socket, so this one reports sockets in the order in which
they became ready. Then the first read with a recent timestamp ends the lateness of the turn, and a wake-up costs one
such read.

Fairness. A turn is bounded in time. The poller handles the events of one epoll call in order while they take at most
SHORT_NS. Beyond that, it measures events, and handles the rest by the cost of their sockets. CHEAP_NS divides cheap
sockets into three kinds, which share three quarters of the turn equally. Sockets of unknown cost and costly ones
alternate in the last quarter, at least one of each. After LONG_TURN_NS the remaining events queue (`queuing`), and
relays take less from each read, so that every connection has its turn soon. Queued sockets leave the epoll: otherwise
each turn would cost time for all of them. The effects: a client with cheap events waits for few costly events, even if
many are ready; a new client waits for other new ones; and sockets of one kind have equally many turns. A socket is new
once (`meet`), and not each time that it is watched again after back-pressure. The poller also measures events every
LOOK_NS, so that it knows costs before a burst.

Cost. The cost of an event is CPU time of the thread: on a busy machine the kernel often runs other threads in the
middle of an event, above all if a send wakes them. The kind of a socket follows from the mean cost of its events. The
last event counts an eighth, and MOST_NS at most, so one long event, such as a garbage collection, does not make a
socket costly. A second one within AGAIN_NS does, even after many cheap events in between. If all events of a socket
turn costly at once, others of its kind wait for one of them.

Rejected sockets. The kernel bounds the number of sockets that the epolls of a user watch. The poller polls sockets that
epoll rejects every RETRY_S, until epoll accepts them.

All times are nanoseconds of the monotonic clock. The interface is the loop's. Refuses to know the protocol of the
sockets.
"""

import errno
import logging
import select
from asyncio import AbstractEventLoop, Handle
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns, time_ns
from typing import Any, Protocol

from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.sockets.sockets import receive_timed

LATE_NS = 1_000_000  # also the largest error of a time
_IN, _OUT, _END = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
_EVENTS = 256  # per turn; then the rest of the loop runs
_QUEUED_EVENTS = 4096  # per turn while sockets queue; queueing one takes about 2 us
_STEP_NS = 10_000_000  # a larger change of wall clock minus monotonic clock is a step
SHORT_NS = 1_000_000  # time limit for the events of one epoll call
LONG_TURN_NS = 4_000_000  # time limit of one turn; a cheap socket waits this long, and one event more
# Bounds for one event: a small request takes about 30 us, 512 KiB of a large body about 500 us.
CHEAP_NS = (50_000, 100_000, 200_000)
LOOK_NS = 10_000_000  # between two measured turns
_COSTLY = len(CHEAP_NS)  # the kind after those of CHEAP_NS
_NEW = _COSTLY + 1  # sockets without a measured event
_UNKNOWN = -1
RETRY_S = 0.1  # between two polls of the sockets that the epoll rejected; a poll takes 0.2 us for each
MOST_NS = 1_000_000  # the most that one event counts
AGAIN_NS = 8_000_000_000  # a second event above CHEAP_NS within this time makes a socket costly for as long

Callback = Callable[..., None]

log = logging.getLogger("kproxy.poller")


class Core(Protocol):
    """The compiled core, `Lane` in native/src/tally.rs."""

    def handle(self, ready: list[tuple[int, int]], readers: list[Callback | None], long_ns: int) -> int:
        """Handle events in order until one ends after `long_ns`; return how many were handled."""
        ...

    def flush(self) -> None:
        """Add what was counted to the metrics."""
        ...


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
        "_limiter",
        "_look_ns",
        "_loop",
        "_parked",
        "_queues",
        "_readers",
        "_retry",
        "_unwatched",
        "_writers",
        "core",
        "is_in_order",
        "is_late",
        "lag_bucket",
        "now_ns",
        "queuing",
        "refused",
        "turn_ns",
        "wall_offset_ns",
    )

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._readers: list[Callback | None] = []  # by file descriptor: as long as the highest of them
        self._ends: dict[int, Callback] = {}  # file descriptor -> end reader, for sockets that wait only for the end
        self._writers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._later: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._is_scheduled = False
        self._costs: list[int] = []  # file descriptor -> mean cost of its events in ns
        # By file descriptor: time of the last event above CHEAP_NS; end of being costly, after a second one.
        self._costly: dict[int, tuple[int, int]] = {}
        self._look_ns = 0  # when events are measured next
        # By kind: queued events by file descriptor, the oldest first.
        self._queues: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(_NEW + 1)]
        self.queuing: dict[int, int] = {}  # the kind of each queued file descriptor
        self._parked: set[int] = set()  # not in the epoll: queued since an earlier turn, or without room
        self._unwatched: dict[int, None] = {}  # those of them without room, which wait for `_retry`, the oldest first
        self._retry: Handle | None = None
        self.refused = 0  # rejected attempts to add a socket to the epoll
        self._again: Handle | None = None  # the next turn: epoll does not wake the loop for queued sockets
        self.turn_ns = self.now_ns = monotonic_ns()
        self.is_late = False
        self.is_in_order = False
        self._limiter = LogLimiter(log)
        self._emptied = True  # the last call left no ready socket
        self.lag_bucket = 0
        # Wall-clock time minus `turn_ns`, at a late turn; steps of the wall clock change it.
        self.wall_offset_ns = time_ns() - self.turn_ns
        self.core: Core | None = None  # handles the events of connections that it relays without Python
        loop.add_reader(self._epoll.fileno(), self._readable)

    def close(self) -> None:
        if self._epoll.closed:
            return
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        for handle in (self._again, self._retry):
            if handle is not None:
                handle.cancel()
        self._later.clear()

    def receive_late(self, sock: Any, buffer: Any) -> tuple[int, int]:
        """Receive in a turn that is late; return (bytes, when the last of them arrived). Raises OSError."""
        count, wall_ns = receive_timed(sock.recvmsg_into, buffer)
        if wall_ns is None:
            return count, self.turn_ns
        arrived_ns = min(wall_ns - self.wall_offset_ns, self.now_ns)
        if self.is_in_order and self.turn_ns - arrived_ns <= LATE_NS:
            self.is_late = False  # sockets that became ready later are as recent
        return count, arrived_ns

    def later(self, callback: Callback, *args: Any) -> None:
        """Call back once, in a later turn: one such callback per turn, after the sockets that are ready then."""
        self._later.append((callback, args))
        self._schedule()

    def _schedule(self) -> None:
        """Schedule `_next` at most once per turn, even if callbacks add others."""
        if self._later and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Run one callback of `later`; the sockets have their turn before the next one."""
        self._is_scheduled = False
        if self._epoll.closed:
            return
        try:
            callback, args = self._later.popleft()
            callback(*args)
        finally:  # a callback that raises must not stop the others
            self._schedule()

    def add_reader(self, fd: int, callback: Callback) -> None:
        known = self._is_known(fd)
        self._readers[fd] = callback
        self._ends.pop(fd, None)
        self._apply(fd, known)

    def replace_reader(self, fd: int, callback: Callback) -> None:
        """Call back this function in place of a socket's reader, if it has one."""
        if fd < len(self._readers) and self._readers[fd] is not None:
            self._readers[fd] = callback

    def add_end_reader(self, fd: int, callback: Callback) -> None:
        """Call back when the peer ends or resets, even if bytes are unread; again until the reader is removed."""
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
        """Forget the cost of a file descriptor that a new socket has."""
        if fd < len(self._costs):
            self._costs[fd] = _UNKNOWN
            self._costly.pop(fd, None)

    def _reads(self, fd: int) -> bool:
        return fd < len(self._readers) and (self._readers[fd] is not None or fd in self._ends)

    def _is_known(self, fd: int) -> bool:
        """Whether a socket is watched; extends the lists for its number."""
        if fd >= len(self._readers):
            self._readers += [None] * (fd + 1 - len(self._readers))
            self._costs.extend([_UNKNOWN] * (fd + 1 - len(self._costs)))
        return self._reads(fd) or fd in self._writers

    def _apply(self, fd: int, known: bool) -> None:
        """Update the epoll. A socket without events is removed: epoll always reports an end, the loop would spin."""
        events = self._wanted(fd)
        if not events and fd in self.queuing:  # another socket may soon have the number
            del self._queues[self.queuing.pop(fd)][fd]
        if fd in self._parked:
            if not events:
                self._parked.remove(fd)
                self._unwatched.pop(fd, None)
        elif not events:
            self._epoll.unregister(fd)
        elif known:
            self._epoll.modify(fd, events)
        elif not self._register(fd, events):
            self._parked.add(fd)
            self._put_off(fd)

    def _register(self, fd: int, events: int) -> bool:
        """Add a socket to the epoll; returns False if the kernel has no room for it."""
        try:
            self._epoll.register(fd, events)
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            self.refused += 1
            text = "epoll has no room for a socket: %s; raise sysctl fs.epoll.max_user_watches, or give it memory; "
            text += "until then such sockets wait %g s for each turn"
            self._limiter.log(logging.ERROR, "watches", text, fault.strerror, RETRY_S)
            return False
        return True

    def _put_off(self, fd: int) -> None:
        """Poll a socket that the epoll rejected after RETRY_S: nothing else would wake it."""
        self._unwatched[fd] = None
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._poll_unwatched)

    def _poll_unwatched(self) -> None:
        """Add the sockets that the epoll accepts now; queue those of the others that are ready."""
        self._retry = None
        if self._epoll.closed:
            return
        unwatched = self._unwatched
        while unwatched and self._register(fd := next(iter(unwatched)), self._wanted(fd)):
            del unwatched[fd]
            self._parked.remove(fd)
        if not unwatched:
            return
        polling = select.poll()
        for fd in unwatched:
            polling.register(fd, self._wanted(fd))
        for fd, events in polling.poll(0):
            del unwatched[fd]
            self._queues[_COSTLY][fd] = events
            self.queuing[fd] = _COSTLY
        if self.queuing and self._again is None:
            self._again = self._loop.call_soon(self._go_on)
        if unwatched:
            self._retry = self._loop.call_later(RETRY_S, self._poll_unwatched)

    def _wanted(self, fd: int) -> int:
        """Return the events that have a callback."""
        events = _OUT if fd in self._writers else 0
        if self._reads(fd):
            events |= _END if fd in self._ends else _IN
        return events

    def _readable(self) -> None:
        if self._again is None:  # otherwise that is the next turn: two in a row would delay the rest of the loop
            self._turn()

    def _go_on(self) -> None:
        self._again = None
        if not self._epoll.closed:
            self._turn()

    def _turn(self) -> None:
        try:
            self._ready()
        finally:  # a callback that raises must not hold back what others have counted
            if self.core is not None:
                self.core.flush()

    def _ready(self) -> None:
        readers = self._readers
        poll = self._epoll.poll
        queued = bool(self.queuing)
        most = left = _QUEUED_EVENTS if queued else _EVENTS
        until_ns = 0
        while left and ((ready := poll(0, left)) or queued):  # returning to the loop would cost two further calls
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
            if self.core is not None:
                handled = self.core.handle(ready, readers, long_ns)
                if self.now_ns > long_ns and not self._in_turn(ready[handled:], until_ns):
                    return
                continue
            rest = iter(ready)
            for fd, events in rest:
                if events == _IN:
                    reader = readers[fd]
                    if reader is not None:  # unless an earlier event of this turn closed it
                        reader()
                else:
                    self.call_back(fd, events)
                before_ns, now_ns = now_ns, self.now_ns
                if now_ns is before_ns:
                    self.now_ns = now_ns = monotonic_ns()
                if now_ns > long_ns:
                    if not self._in_turn(list(rest), until_ns):
                        return
                    break
        self._emptied = left > 0

    def _in_turn(self, ready: list[tuple[int, int]], until_ns: int) -> bool:
        """Handle events until `until_ns`, cheap ones first. Returns True if none is queued and time is left."""
        try:
            self._handle_in_turn(ready, until_ns)
        finally:  # a callback that raises must not stop queued sockets
            self._park(ready)
        now_ns = self.now_ns
        self._look_ns = now_ns if now_ns - self.turn_ns > SHORT_NS else now_ns + LOOK_NS
        return not self.queuing and now_ns <= until_ns

    def _handle_in_turn(self, ready: list[tuple[int, int]], until_ns: int) -> None:
        queues, readers, costs, costly = self._queues, self._readers, self._costs, self._costly
        now_ns = self.now_ns
        soon_ns = until_ns - LONG_TURN_NS // 4
        early_ns = soon_ns - LONG_TURN_NS // 2  # until then events are handled in the order of epoll
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
                self.call_back(fd, events)
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
        """Remove sockets that are still queued from the epoll, and schedule the next turn."""
        if not self.queuing:
            return
        for fd, _ in ready:
            if fd in self.queuing and fd not in self._parked:
                self._epoll.unregister(fd)
                self._parked.add(fd)
        if self._again is None:
            self._again = self._loop.call_soon(self._go_on)

    def _share(self, until_ns: int) -> None:
        """Handle queued cheap events until `until_ns`; next is always the kind that has had the least time."""
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
        """Handle one queued event; record when it was done, and its cost."""
        begun_ns = thread_time_ns()
        del self.queuing[fd]
        if fd in self._parked:
            if self._register(fd, self._wanted(fd)):
                self._parked.remove(fd)
            else:
                self._put_off(fd)
        self.call_back(fd, events)
        took = thread_time_ns() - begun_ns
        self.now_ns = monotonic_ns()
        self._measured(fd, took)

    def _measured(self, fd: int, took: int) -> None:
        """Record the cost of an event that was done just now."""
        cost = self._costs[fd]
        self._costs[fd] = _mean(cost, took)
        if took > CHEAP_NS[-1] and cost != _UNKNOWN:
            last_ns, until_ns = self._costly.get(fd, (-AGAIN_NS, 0))
            is_again = self.now_ns - last_ns < AGAIN_NS
            self._costly[fd] = self.now_ns, self.now_ns + AGAIN_NS if is_again else until_ns

    def call_back(self, fd: int, events: int) -> None:
        """Run the callbacks of an event. An error or hang-up is for both: reading or writing then raises it."""
        if events != _OUT:
            reader = self._readers[fd]
            if reader is not None:  # unless an earlier event of this turn closed it
                reader()
            self._tell_end(fd, events)
        if events != _IN and fd in self._writers:
            callback, args = self._writers[fd]
            callback(*args)

    def _tell_end(self, fd: int, events: int) -> None:
        """Run the end reader, unless the event is older than it and reports bytes only."""
        if fd in self._ends and events & ~(_IN | _OUT):
            self._ends[fd]()


def _mean(cost: int, took: int) -> int:
    """Return the mean cost after one more event."""
    took = min(took, MOST_NS)
    return took if cost == _UNKNOWN else cost + (took - cost) // 8

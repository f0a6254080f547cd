"""Readiness as epoll reports it, including errors, until a reader handles it."""

import asyncio
import errno
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from kproxy.proxy.sockets import poller as poller_module
from kproxy.proxy.sockets.poller import Poller
from tests.proxy.live import HOST, live


async def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setblocking(False)
    other.setblocking(False)
    return one, other


Pairs = list[tuple[socket.socket, socket.socket]]


async def watched(poller: Poller, count: int, read: Callable[[int, socket.socket], None]) -> Pairs:
    """Pairs of sockets, ours and theirs; `read(number, ours)` reads the byte that waits in each."""
    pairs = [await pair() for _ in range(count)]
    for number, (ours, theirs) in enumerate(pairs):
        theirs.send(b"x")
        poller.add_reader(ours.fileno(), partial(read, number, ours))
    return pairs


def closed(poller: Poller, pairs: Pairs) -> None:
    for ours, theirs in pairs:
        poller.remove_reader(ours.fileno())
        ours.close()
        theirs.close()
    poller.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the poller has no event for it
        await asyncio.sleep(0.001)


async def turns(poller: Poller) -> None:
    """Run some turns of the poller: each ends when the byte that was sent in it has been read."""
    one, other = await pair()
    with one, other:
        for number in range(3):
            other.send(b"x")
            read: list[bytes] = []
            poller.add_reader(one.fileno(), lambda read=read: read.append(one.recv(9)))
            await until(lambda read=read: bool(read))
            poller.remove_reader(one.fileno())
            assert read == [b"x"], number


def test_an_error_is_reported_until_it_is_read():
    async def test():
        poller = Poller(asyncio.get_running_loop())
        ours, theirs = await pair()
        seen: list[bytes | str] = []

        def readable() -> None:
            try:
                seen.append(ours.recv(1))  # fewer bytes than wait
            except ConnectionResetError:
                seen.append("reset")
                poller.remove_reader(ours.fileno())

        poller.add_reader(ours.fileno(), readable)
        theirs.send(b"abc")
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        await until(lambda: "reset" in seen)
        await turns(poller)
        assert seen == [b"a", b"b", b"c", "reset"]
        poller.close()
        poller.close()

    live(test())


def test_readers_and_writers_can_be_added_and_removed():
    async def test():
        poller = Poller(asyncio.get_running_loop())
        ours, theirs = await pair()
        calls: list[str] = []

        def writable(what: str) -> None:
            calls.append(what)
            poller.remove_writer(ours.fileno())

        poller.add_writer(ours.fileno(), writable, "written")
        poller.add_reader(ours.fileno(), lambda: calls.append(f"read {ours.recv(9)!r}"))
        await until(lambda: bool(calls))
        theirs.send(b"1")
        await until(lambda: len(calls) > 1)
        poller.remove_reader(ours.fileno())
        poller.remove_reader(ours.fileno())
        theirs.send(b"2")
        theirs.close()
        await turns(poller)  # the peer has closed and no reader is there: no busy loop
        assert calls == ["written", "read b'1'"]
        poller.add_reader(ours.fileno(), lambda: calls.append(f"read {ours.recv(9)!r}"))
        await until(lambda: len(calls) > 3)
        assert calls[2:4] == ["read b'2'", "read b''"]
        poller.close()

    live(test())


def test_costly_sockets_wait_for_cheap_ones():
    """Between the events of two costly sockets, whatever their number, all others have their turn."""

    async def test():
        poller = Poller(asyncio.get_running_loop())
        floods = [await pair() for _ in range(30)]
        cheap, friend = await pair()
        costly_since: list[int] = []  # costly events between a send to the cheap socket and its turn
        served = [0] * len(floods)
        since = 0

        def flooded(number: int) -> None:
            nonlocal since
            until_ns = time.thread_time_ns() + 2_000_000
            while time.thread_time_ns() < until_ns:  # and the socket is still readable
                pass
            served[number] += 1
            since += 1
            if since == 1:
                friend.send(b"x")

        def answer() -> None:
            nonlocal since
            cheap.recv(9)
            costly_since.append(since)
            since = 0

        for number, (ours, theirs) in enumerate(floods):
            theirs.send(b"flood")
            poller.add_reader(ours.fileno(), partial(flooded, number))
        poller.add_reader(cheap.fileno(), answer)
        before: list[int] = []  # set when the cost of each is known
        while len(costly_since) < 100:
            await asyncio.sleep(0)
            if not before and min(served):
                before = served.copy()
        assert max(costly_since[10:]) <= 2  # not 30
        turns_of = [now - then for now, then in zip(served, before, strict=True)]
        assert max(turns_of) - min(turns_of) <= 2  # costly sockets take turns
        for ours, theirs in (*floods, (cheap, friend)):
            poller.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
        assert not any(poller._queues)
        poller.close()

    live(test())


def test_a_new_socket_waits_for_new_ones_and_not_for_costly_ones_that_are_watched_again(monkeypatch):
    """The clock advances only in the events of this test. Many sockets are costly, and unwatched for a moment after
    each event. During the event of a cheap socket, the kernel runs another process for longer than a turn."""
    now_ns = time.monotonic_ns()
    others_ns = 0
    monkeypatch.setattr(poller_module, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(poller_module, "thread_time_ns", lambda: now_ns - others_ns)

    async def test():
        poller = Poller(asyncio.get_running_loop())
        floods = [await pair() for _ in range(30)]
        served = [0] * len(floods)

        def flooded(number: int, ours: socket.socket) -> None:
            nonlocal now_ns
            now_ns += 2_000_000
            served[number] += 1
            poller.remove_reader(ours.fileno())
            poller.add_reader(ours.fileno(), partial(flooded, number, ours))

        def interrupted() -> None:
            nonlocal now_ns, others_ns
            now_ns += 5_000_000
            others_ns += 5_000_000

        cheap, friend = await pair()
        friend.send(b"x")
        poller.add_reader(cheap.fileno(), interrupted)
        for number, (ours, theirs) in enumerate(floods):
            theirs.send(b"flood")
            poller.add_reader(ours.fileno(), partial(flooded, number, ours))
        await until(lambda: min(served) > 0)
        for _ in range(10):
            ours, theirs = await pair()
            seen: list[int] = []
            before = sum(served)
            theirs.send(b"x")
            poller.meet(ours.fileno())
            poller.add_reader(ours.fileno(), lambda seen=seen: seen.append(sum(served)))
            await until(lambda seen=seen: bool(seen))
            poller.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
            assert seen[0] - before <= 6  # the events of two turns, not 30
        for ours, theirs in (*floods, (cheap, friend)):
            poller.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
        poller.close()

    live(test())


@pytest.mark.parametrize("cost_us,most", [(20, 202), (80, 52), (150, 28), (500, 10), (900, 6), (20_000, 2)])
def test_a_turn_has_a_limited_duration_whatever_the_number_and_cost_of_events(monkeypatch, cost_us, most):
    """The clock advances only in the events of this test. A socket known as cheap waits for one turn, although the
    kernel runs another process during each of its events; if all sockets are cheap, it waits for each of them once."""
    now_ns = time.monotonic_ns()
    others_ns = 0
    monkeypatch.setattr(poller_module, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(poller_module, "thread_time_ns", lambda: now_ns - others_ns)
    count = 300

    async def test():
        nonlocal now_ns
        poller = Poller(asyncio.get_running_loop())
        floods = [await pair() for _ in range(count)]
        cheap, friend = await pair()
        waited: list[int] = []  # events of others between a send to the cheap socket and its turn
        in_turns: list[int] = []  # events between two turns of the loop
        served = [0] * count
        since = in_turn = 0

        def flooded(number: int) -> None:
            nonlocal now_ns, since, in_turn
            now_ns += cost_us * 1000
            served[number] += 1
            since += 1
            in_turn += 1
            if since == 1:
                friend.send(b"x")

        def answer() -> None:
            nonlocal now_ns, others_ns, since
            cheap.recv(9)
            waited.append(since)
            since = 0
            now_ns += 400_000
            others_ns += 400_000

        def next_turn() -> None:
            nonlocal in_turn
            in_turns.append(in_turn)
            in_turn = 0

        poller.add_reader(cheap.fileno(), answer)
        now_ns += poller_module.LOOK_NS
        friend.send(b"x")
        poller._ready()
        assert waited == [0]
        for number, (ours, theirs) in enumerate(floods):
            theirs.send(b"flood")
            poller.add_reader(ours.fileno(), partial(flooded, number))
        before: list[int] = []  # set when the cost of each is known
        while not before or sum(served) - sum(before) < 3 * count:
            await asyncio.sleep(0)
            next_turn()
            if not before and min(served):
                before = served.copy()
        assert max(waited) <= most + (count if cost_us * 1000 <= poller_module.CHEAP_NS[0] else 0)
        assert max(in_turns) <= most  # timers and listeners wait no longer
        turns_of = [now - then for now, then in zip(served, before, strict=True)]
        assert max(turns_of) - min(turns_of) <= 2  # they take turns
        for ours, theirs in (*floods, (cheap, friend)):
            poller.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
        assert not any(poller._queues)
        poller.close()

    live(test())


def test_a_turn_does_not_grow_with_the_number_of_queued_sockets(monkeypatch):
    """In each turn, epoll reports the sockets that became ready since the last one, and not all queued ones."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(poller_module, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(poller_module, "thread_time_ns", lambda: now_ns)
    reported: list[int] = []
    in_turn = Poller._in_turn

    def counted(self, ready, until_ns):
        reported.append(len(ready))
        return in_turn(self, ready, until_ns)

    monkeypatch.setattr(Poller, "_in_turn", counted)
    count = 1000

    async def test():
        poller = Poller(asyncio.get_running_loop())
        floods = [await pair() for _ in range(count)]
        served = [0] * count

        def flooded(number: int) -> None:
            nonlocal now_ns
            now_ns += 500_000
            served[number] += 1

        for number, (ours, theirs) in enumerate(floods):
            theirs.send(b"flood")
            poller.add_reader(ours.fileno(), partial(flooded, number))
        await until(lambda: len(poller.queuing) >= count - 20)
        reported.clear()
        await until(lambda: min(served) >= 3)
        assert len(reported) > 200 and max(reported) <= 20  # the sockets that the previous turn handled
        first = floods[0][0].fileno()
        await until(lambda: first in poller.queuing)
        poller.remove_reader(first)
        assert first not in poller.queuing
        for ours, _ in floods[1:]:
            poller.remove_reader(ours.fileno())
        assert not poller.queuing and not any(poller._queues)
        for each in floods:
            for sock in each:
                sock.close()
        poller.close()

    live(test())


@pytest.mark.parametrize("costs_us", [(20, 500), (20, 20, 20, 1000), (20, 900, 900), (*[10] * 12, 700)])
def test_cheap_events_between_costly_ones_do_not_make_a_socket_cheap(monkeypatch, costs_us):
    """The clock advances only in the events of this test."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(poller_module, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(poller_module, "thread_time_ns", lambda: now_ns)

    async def test():
        nonlocal now_ns
        poller = Poller(asyncio.get_running_loop())
        floods = [await pair() for _ in range(100)]
        cheap, friend = await pair()
        served = [0] * len(floods)
        sent_ns = 0
        waited_ns: list[int] = []

        def flooded(number: int) -> None:
            nonlocal now_ns, sent_ns
            now_ns += costs_us[served[number] % len(costs_us)] * 1000
            served[number] += 1
            if not sent_ns:
                friend.send(b"x")
                sent_ns = now_ns

        def answer() -> None:
            nonlocal now_ns, sent_ns
            cheap.recv(9)
            if min(served) > 4 * len(costs_us):  # the cost of each is known
                waited_ns.append(now_ns - sent_ns)
            now_ns += 30_000
            sent_ns = 0

        poller.add_reader(cheap.fileno(), answer)
        now_ns += poller_module.LOOK_NS
        friend.send(b"x")
        poller._ready()
        for number, (ours, theirs) in enumerate(floods):
            theirs.send(b"flood")
            poller.add_reader(ours.fileno(), partial(flooded, number))
        await until(lambda: len(waited_ns) > 100)
        assert max(waited_ns) <= 2 * poller_module.LONG_TURN_NS  # not the cost of 100 events
        for ours, theirs in (*floods, (cheap, friend)):
            poller.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
        poller.close()

    live(test())


@pytest.mark.parametrize("sets_time", [True, False], ids=["readers set now_ns", "readers do not"])
def test_a_short_turn_reads_the_clock_once_if_its_readers_set_the_time(monkeypatch, sets_time):
    """If readers set `now_ns` at their end, as relays do, the clock is read only when epoll returns."""
    asked = 0

    def monotonic_ns() -> int:
        nonlocal asked
        asked += 1
        return time.monotonic_ns()

    monkeypatch.setattr(poller_module, "monotonic_ns", monotonic_ns)
    monkeypatch.setattr(poller_module, "SHORT_NS", 1 << 60)
    monkeypatch.setattr(poller_module, "LONG_TURN_NS", 1 << 60)

    async def test():
        poller = Poller(asyncio.get_running_loop())
        pairs = [await pair() for _ in range(100)]
        seen: list[bytes] = []

        def read(sock: socket.socket) -> None:
            seen.append(sock.recv(9))
            if sets_time:
                poller.now_ns = time.monotonic_ns()

        for ours, _ in pairs:
            poller.add_reader(ours.fileno(), partial(read, ours))
        nonlocal asked
        poller._look_ns = 1 << 63
        for turn in range(1, 4):
            asked = 0
            for _, theirs in pairs:
                theirs.send(b"x")
            poller._ready()
            assert len(seen) == turn * len(pairs) and asked == (1 if sets_time else 1 + len(pairs))
        for ours, theirs in pairs:
            poller.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
        poller.close()

    live(test())


@pytest.mark.parametrize("others", [0, 300], ids=["at once", "queued"])
def test_an_event_before_add_end_reader_is_not_taken_for_the_end(monkeypatch, others):
    """Two sockets are ready at once, and the reader of the first adds an end reader for the second."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(poller_module, "monotonic_ns", lambda: now_ns)

    async def test():
        poller = Poller(asyncio.get_running_loop())
        (one, peer_of_one), (two, peer_of_two), *rest = [await pair() for _ in range(2 + others)]
        seen: list[str] = []

        def first() -> None:
            nonlocal now_ns
            now_ns += 1_000_000_000  # so that other sockets queue
            one.recv(9)
            poller.add_end_reader(two.fileno(), lambda: seen.append("end"))

        poller.add_reader(one.fileno(), first)
        poller.add_reader(two.fileno(), lambda: seen.append("read"))
        for theirs in (peer_of_one, peer_of_two):
            theirs.send(b"x")
        for ours, theirs in rest:
            poller.add_reader(ours.fileno(), lambda sock=ours: seen.append(sock.recv(9).decode()))
            theirs.send(b"y")
        await until(lambda: len(seen) >= others)
        await turns(poller)
        assert seen == ["y"] * others
        peer_of_two.close()
        await until(lambda: len(seen) > others)
        assert seen[others:] and set(seen[others:]) == {"end"}
        for sock in (one, two, *(ours for ours, _ in rest)):
            poller.remove_reader(sock.fileno())
        for sock in (one, two, peer_of_one, *(end for ends in rest for end in ends)):
            sock.close()
        poller.close()

    live(test())


def test_deferred_work_runs_one_at_a_time_between_events():
    async def test():
        poller = Poller(asyncio.get_running_loop())
        cheap, friend = await pair()
        since = 0
        most: list[int] = []
        done: list[int] = []

        def put_back(number: int, left: int) -> None:
            nonlocal since
            since += 1
            if since == 1:
                friend.send(b"x")
            done.append(number)
            if left:
                poller.later(put_back, number, left - 1)

        def answer() -> None:
            nonlocal since
            cheap.recv(9)
            most.append(since)
            since = 0

        poller.add_reader(cheap.fileno(), answer)
        for number in range(50):
            poller.later(put_back, number, 9)
        while len(done) < 500:  # noqa: ASYNC110 - the work is done in other turns of this loop
            await asyncio.sleep(0)
        assert done == list(range(50)) * 10  # each in its turn
        assert max(most) <= 2  # not 50
        poller.later(put_back, 0, 0)
        poller.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(done) == 500

    live(test())


def test_deferred_work_that_raises_takes_no_turn_of_others():
    async def test():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        poller = Poller(loop)
        seen: list[int] = []
        poller.later(lambda: 1 // 0)
        for number in range(3):
            poller.later(seen.append, number)
        await until(lambda: len(seen) > 2)
        assert seen == [0, 1, 2]
        poller.close()

    live(test())


def test_queued_sockets_have_their_turn_although_a_reader_raises(monkeypatch):
    """Nothing else wakes the loop then, since queued sockets are not registered with epoll."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(poller_module, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(poller_module, "thread_time_ns", lambda: now_ns)

    async def test():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        poller = Poller(loop)
        seen: list[int] = []

        def read(number: int, ours: socket.socket) -> None:
            nonlocal now_ns
            now_ns += 2_000_000
            seen.append(number)
            ours.recv(9)
            if number > 9:  # the other sockets are queued by then
                raise ArithmeticError

        pairs = await watched(poller, 30, read)
        await until(lambda: len(seen) == len(pairs))
        assert sorted(seen) == list(range(len(pairs))) and not poller.queuing
        closed(poller, pairs)

    live(test())


class Exhausted:
    """An epoll that fails to register a socket, `times` times."""

    def __init__(self, epoll: Any, times: int) -> None:
        self.epoll, self.times = epoll, times

    def register(self, fd: int, events: int) -> None:
        if self.times:
            self.times -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.epoll.register(fd, events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.epoll, name)


def test_a_queued_socket_that_epoll_refuses_keeps_its_turn(monkeypatch):
    """Queued sockets are unregistered, and other processes of the user may use up the limit of watches meanwhile."""
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(poller_module, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(poller_module, "thread_time_ns", lambda: now_ns)

    async def test():
        poller = Poller(asyncio.get_running_loop())
        seen: list[int] = []

        def read(number: int, ours: socket.socket) -> None:
            nonlocal now_ns
            now_ns += 2_000_000
            with suppress(BlockingIOError):  # it is called whether the socket is ready or not
                ours.recv(9)
                seen.append(number)

        pairs = await watched(poller, 30, read)
        poller._epoll = Exhausted(poller._epoll, 20)
        await until(lambda: len(seen) == len(pairs))
        assert sorted(seen) == list(range(len(pairs)))
        await until(lambda: not poller.queuing and not poller._epoll.times)
        for _, theirs in pairs:
            theirs.send(b"y")
        await until(lambda: len(seen) == 2 * len(pairs))  # epoll watches them again
        closed(poller, pairs)

    live(test())


def test_a_new_socket_that_epoll_refuses_is_served(caplog):
    """It was never watched, nor was the next socket with its descriptor; and kproxy could not exit."""

    async def test():
        poller = Poller(asyncio.get_running_loop())
        poller._epoll = Exhausted(poller._epoll, 1 << 30)
        seen: list[bytes] = []
        for letter in (b"a", b"b"):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            number = ours.fileno()

            def read(ours: socket.socket = ours) -> None:
                with suppress(BlockingIOError):
                    seen.append(ours.recv(9))

            poller.add_reader(number, read)
            poller.add_end_reader(number, read)
            poller.add_reader(number, read)
            theirs.send(letter)
            await until(lambda letter=letter: letter in seen)
            poller.remove_reader(number)
            assert not poller.queuing and not poller._parked
            poller._epoll.times = 0  # epoll accepts the next socket
            ours.close()
            theirs.close()
        assert "fs.epoll.max_user_watches" in caplog.text
        poller.close()

    live(test())


@pytest.mark.parametrize("waits_for", ["bytes", "end"])
def test_sockets_that_epoll_refuses_are_polled_at_intervals(monkeypatch, waits_for):
    """Trying them in each turn of the loop took a whole core; and closes of peers were not reported."""
    polls = 0
    poll_unwatched = Poller._poll_unwatched

    def counted(self: Poller) -> None:
        nonlocal polls
        polls += 1
        poll_unwatched(self)

    monkeypatch.setattr(Poller, "_poll_unwatched", counted)
    turns = 0
    go_on = Poller._go_on

    def turn(self: Poller) -> None:
        nonlocal turns
        turns += 1
        go_on(self)

    monkeypatch.setattr(Poller, "_go_on", turn)

    async def test():
        poller = Poller(asyncio.get_running_loop())
        poller._epoll = Exhausted(poller._epoll, 1 << 30)
        called: list[int] = []
        pairs = [socket.socketpair() for _ in range(3)]
        for number, (ours, _) in enumerate(pairs):

            def call(number: int = number, ours: socket.socket = ours) -> None:
                called.append(number)
                poller.remove_reader(ours.fileno())

            (poller.add_end_reader if waits_for == "end" else poller.add_reader)(ours.fileno(), call)
        await until(lambda: polls == 3)
        assert not turns and poller.refused == 6  # one attempt per poll, whatever their number
        if waits_for == "end":
            pairs[1][1].send(b"unread")
            await until(lambda: polls == 5)
            assert not called
            pairs[1][1].close()
        else:
            pairs[1][1].send(b"y")
        await until(lambda: called == [1])
        assert turns == 1 and list(poller._unwatched) == [pairs[0][0].fileno(), pairs[2][0].fileno()]
        poller._epoll.times = 0
        await until(lambda: not poller._unwatched)
        before = polls
        pairs[2][1].close() if waits_for == "end" else pairs[2][1].send(b"y")
        await until(lambda: called == [1, 2])
        assert polls == before  # epoll watches them
        closed(poller, pairs)

    live(test())


def test_a_reader_that_raises_is_called_again_although_epoll_refuses_its_socket():
    """Its socket was neither watched nor queued afterwards."""

    async def test():
        poller = Poller(asyncio.get_running_loop())
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        poller._epoll = Exhausted(poller._epoll, 1 << 30)
        ours, theirs = socket.socketpair()
        calls = 0

        def raises() -> None:
            nonlocal calls
            calls += 1
            raise ValueError

        poller.add_reader(ours.fileno(), raises)
        theirs.send(b"y")
        await until(lambda: calls == 2)
        closed(poller, [(ours, theirs)])

    live(test())


def test_a_close_is_noticed_although_bytes_are_unread():
    async def test():
        poller = Poller(asyncio.get_running_loop())
        ours, theirs = await pair()
        seen: list[str] = []

        def ended() -> None:
            seen.append("end")
            poller.remove_reader(ours.fileno())

        poller.add_end_reader(ours.fileno(), ended)
        theirs.send(b"unread")
        await turns(poller)
        assert not seen
        theirs.shutdown(socket.SHUT_WR)
        await until(lambda: bool(seen))
        await turns(poller)
        assert seen == ["end"]
        poller.add_reader(ours.fileno(), lambda: seen.append(ours.recv(9).decode()))
        await until(lambda: len(seen) > 2)
        assert seen[:3] == ["end", "unread", ""]
        poller.close()
        for sock in (ours, theirs):
            sock.close()

    live(test())


def test_is_in_order_is_false_if_epoll_had_more_ready_sockets(monkeypatch):
    """Sockets left for the next call may come before sockets that became ready earlier."""
    monkeypatch.setattr("kproxy.proxy.sockets.poller._EVENTS", 1)

    async def test():
        poller = Poller(asyncio.get_running_loop())
        seen: list[tuple[bytes, bool]] = []
        pairs = [await pair() for _ in range(2)]
        for ours, _ in pairs:
            poller.add_reader(ours.fileno(), lambda sock=ours: seen.append((sock.recv(10), poller.is_in_order)))
        for _, theirs in pairs:
            theirs.send(b"x")
        await until(lambda: len(seen) > 1)
        assert seen == [(b"x", True), (b"x", False)]
        poller.close()

    live(test())

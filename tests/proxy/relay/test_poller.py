"""Readiness as epoll tells it, errors included, until someone takes note."""

import asyncio
import socket
import struct
import time
from functools import partial

from kproxy.proxy.relay.poller import Poller
from tests.proxy.live import HOST, live


async def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setblocking(False)
    other.setblocking(False)
    return one, other


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_an_error_is_told_until_it_is_read():
    async def test():
        poller = Poller(asyncio.get_running_loop())
        ours, theirs = await pair()
        heard: list[bytes | str] = []

        def readable() -> None:
            try:
                heard.append(ours.recv(1))  # less than there is
            except ConnectionResetError:
                heard.append("reset")
                poller.remove_reader(ours.fileno())

        poller.add_reader(ours.fileno(), readable)
        theirs.send(b"abc")
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        await turns()
        assert heard == [b"a", b"b", b"c", "reset"]
        poller.close()
        poller.close()

    live(test())


def test_readers_and_writers_come_and_go():
    async def test():
        poller = Poller(asyncio.get_running_loop())
        ours, theirs = await pair()
        told: list[str] = []

        def writable(what: str) -> None:
            told.append(what)
            poller.remove_writer(ours.fileno())

        poller.add_writer(ours.fileno(), writable, "written")
        poller.add_reader(ours.fileno(), lambda: told.append(f"read {ours.recv(9)!r}"))
        await turns()
        theirs.send(b"1")
        await turns()
        poller.remove_reader(ours.fileno())
        poller.remove_reader(ours.fileno())
        theirs.send(b"2")
        theirs.close()
        await turns()  # its end is there, and nobody watches: nothing spins
        assert told == ["written", "read b'1'"]
        poller.add_reader(ours.fileno(), lambda: told.append(f"read {ours.recv(9)!r}"))
        await turns()
        assert told[2:4] == ["read b'2'", "read b''"]
        poller.close()

    live(test())


def test_who_costs_much_waits_for_those_who_cost_little():
    """Whatever the number of the costly: between two of them all others have their turn."""

    async def test():
        poller = Poller(asyncio.get_running_loop())
        floods = [await pair() for _ in range(30)]
        cheap, friend = await pair()
        costly_since: list[int] = []  # between what was sent to the cheap one and its turn
        served = [0] * len(floods)
        since = 0

        def flooded(number: int) -> None:
            nonlocal since
            time.sleep(0.002)  # and the socket is still readable
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
        while len(costly_since) < 100:  # noqa: ASYNC110 - what is waited for happens in other turns of this loop
            await asyncio.sleep(0)
        assert max(costly_since[10:]) <= 2  # and not 30
        assert min(served) > 0
        assert max(served) - min(served) <= 2  # they take turns
        for ours, theirs in (*floods, (cheap, friend)):
            poller.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
        assert not poller._costly
        poller.close()

    live(test())


def test_work_that_was_put_back_is_done_one_at_a_time_between_events():
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
        while len(done) < 500:  # noqa: ASYNC110 - what is waited for happens in other turns of this loop
            await asyncio.sleep(0)
        assert done == list(range(50)) * 10  # in turn
        assert max(most) <= 2  # and not 50
        poller.later(put_back, 0, 0)
        poller.close()
        await turns()
        assert len(done) == 500

    live(test())


def test_who_raises_takes_no_turn_of_others():
    async def test():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        poller = Poller(loop)
        heard: list[int] = []
        poller.later(lambda: 1 // 0)
        for number in range(3):
            poller.later(heard.append, number)
        await turns()
        assert heard == [0, 1, 2]
        poller.close()

    live(test())


def test_an_end_is_noticed_whatever_is_unread():
    async def test():
        poller = Poller(asyncio.get_running_loop())
        ours, theirs = await pair()
        heard: list[str] = []

        def ended() -> None:
            heard.append("end")
            poller.remove_reader(ours.fileno())

        poller.add_end_reader(ours.fileno(), ended)
        theirs.send(b"unread")
        await turns()
        assert not heard
        theirs.shutdown(socket.SHUT_WR)
        await turns()
        assert heard == ["end"]
        poller.add_reader(ours.fileno(), lambda: heard.append(ours.recv(9).decode()))
        await turns()
        assert heard[:3] == ["end", "unread", ""]
        poller.close()
        for sock in (ours, theirs):
            sock.close()

    live(test())


def test_sockets_are_in_order_only_where_epoll_had_none_left(monkeypatch):
    """What is left from one call to the next may stand before what became ready earlier."""
    monkeypatch.setattr("kproxy.proxy.relay.poller._EVENTS", 1)

    async def test():
        poller = Poller(asyncio.get_running_loop())
        heard: list[tuple[bytes, bool]] = []
        pairs = [await pair() for _ in range(2)]
        for ours, _ in pairs:
            poller.add_reader(ours.fileno(), lambda sock=ours: heard.append((sock.recv(10), poller.is_in_order)))
        for _, theirs in pairs:
            theirs.send(b"x")
        await turns()
        assert heard == [(b"x", True), (b"x", False)]
        poller.close()

    live(test())

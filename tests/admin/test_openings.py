"""Turns for TLS handshakes: order and limits."""

import asyncio
import selectors
from contextlib import suppress
from typing import Any

from kproxy.admin.openings import Openings


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it waits: how long code runs changes nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Steps(self))

    def time(self) -> float:
        return self.now_s


class _Steps(selectors.DefaultSelector):
    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now_s += timeout or 0
        return super().select(0)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def turns(*hosts: str, most: int = 100) -> list[str]:
    """Let hosts ask at once; return them in the order of their turns, refused ones in capitals."""
    order: list[str] = []

    async def one(here: Openings, host: str) -> None:
        try:
            await here.turn(host)
            order.append(host)
        except ConnectionAbortedError:
            order.append(host.upper())

    async def test() -> None:
        here = Openings(most)
        async with asyncio.timeout(60):
            await asyncio.gather(*(one(here, host) for host in hosts))
        assert not here._waiting and here._count == 0

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(test())
    return order


def test_addresses_alternate() -> None:
    assert turns("a", "a", "a", "a", "b", "c", "b") == ["a", "a", "b", "c", "a", "b", "a"]


def test_addresses_of_one_ipv6_network_share_turns() -> None:
    many = [f"2001:db8::{number}" for number in range(1, 5)]
    assert turns(*many, "2001:db8:1::1") == [*many[:2], "2001:db8:1::1", *many[2:]]


def test_at_the_limit_the_newest_of_the_address_with_most_waiting_is_refused() -> None:
    order = turns("a", "a", "a", "a", "b", "c", most=3)
    assert sorted(order) == ["A", "A", "a", "a", "b", "c"]


def test_clients_that_left_take_no_turn() -> None:
    async def test() -> None:
        here = Openings(10)
        await here.turn("a")
        waiting = [asyncio.ensure_future(here.turn(host)) for host in ("b", "b", "c")]
        await settled()
        assert not any(task.done() for task in waiting)
        for task in waiting[:2]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert list(here._waiting) == ["c"] and here._count == 1
        await waiting[2]
        assert not here._waiting

    asyncio.run(test())

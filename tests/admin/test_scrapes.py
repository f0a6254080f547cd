"""Scrapes: how many are rendered for simultaneous clients, and when."""

import asyncio
import threading

import pytest

from kproxy.admin.scrapes import Scrapes


class Rendering:
    """A scrape that is held until `released`; `now` is the clock."""

    def __init__(self):
        self.began, self.released = threading.Semaphore(0), threading.Semaphore(0)
        self.asked, self.rests, self.now = [], [], 0.0

    def __call__(self, accept):
        self.asked.append(accept)
        self.began.release()
        assert self.released.acquire(timeout=60)
        return f"{len(self.asked)}".encode(), "text/plain"

    async def sleep(self, seconds):
        self.rests.append(seconds)
        self.now += seconds

    def scrapes(self):
        return Scrapes(self, clock=lambda: self.now, sleep=self.sleep)

    async def has_begun(self):
        assert await asyncio.to_thread(self.began.acquire, timeout=60)


def test_clients_that_ask_during_a_scrape_share_the_next_one():
    rendering = Rendering()

    async def main():
        scrapes = rendering.scrapes()
        first = asyncio.create_task(scrapes.rendered(""))
        await rendering.has_begun()
        later = [asyncio.create_task(scrapes.rendered("")) for _ in range(8)]
        other = asyncio.create_task(scrapes.rendered("application/openmetrics-text"))
        await asyncio.sleep(0)
        rendering.released.release(3)
        found = [body for body, _ in await asyncio.gather(first, *later, other)]
        scrapes.stop()
        return found

    assert asyncio.run(main()) == [b"1", *[b"2"] * 8, b"3"]
    assert rendering.asked == ["", "", "application/openmetrics-text"]


def test_there_are_two_formats_for_any_accept_header():
    rendering = Rendering()

    async def main():
        scrapes = rendering.scrapes()
        first = asyncio.create_task(scrapes.rendered(""))
        await rendering.has_begun()
        leaving = [asyncio.create_task(scrapes.rendered(f"text/{number}")) for number in range(100)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        last = asyncio.create_task(scrapes.rendered("text/plain"))
        rendering.released.release(2)
        bodies = [(await first)[0], (await last)[0]]
        scrapes.stop()
        return bodies

    assert asyncio.run(main()) == [b"1", b"2"]


def test_the_pause_between_two_scrapes_is_as_long_as_the_first_took():
    rendering = Rendering()

    async def main():
        scrapes = rendering.scrapes()
        for took, waits in ((3.0, 1.0), (2.0, 5.0), (1.0, 0.0)):
            task = asyncio.create_task(scrapes.rendered(""))
            await rendering.has_begun()
            rendering.now += took
            rendering.released.release()
            await task
            rendering.now += waits
        scrapes.stop()

    asyncio.run(main())
    assert rendering.rests == [2.0]  # 3 s less the second that nobody asked; then 5 s are longer than the 2 s


def test_a_client_that_leaves_does_not_affect_others_and_a_failure_affects_one_scrape():
    rendering = Rendering()

    async def main():
        scrapes = rendering.scrapes()
        leaves = asyncio.create_task(scrapes.rendered(""))
        stays = asyncio.create_task(scrapes.rendered(""))
        await rendering.has_begun()
        leaves.cancel()
        rendering.released.release()
        assert (await stays)[0] == b"1"
        scrapes.stop()

        failing = Scrapes(lambda _: (b"", 1 // 0))  # type: ignore[arg-type,return-value]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await failing.rendered("")
        failing.stop()

    asyncio.run(main())


def test_after_the_end_no_scrape_begins_and_its_thread_ends():
    rendering = Rendering()

    async def main():
        scrapes = rendering.scrapes()
        rendering.released.release(2)
        await scrapes.rendered("")
        scrapes.stop()
        with pytest.raises(RuntimeError, match="shutdown"):
            await scrapes.rendered("")

    asyncio.run(main())
    assert rendering.asked == [""]

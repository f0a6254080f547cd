"""The order in which answers are built, and the turns of the loop in between."""

import asyncio
import time

import pytest

from kproxy.admin.server import Admin
from kproxy.admin.turns import Turns
from tests.proxy.live import HOST, Wire, live


class Clock:
    def __init__(self):
        self.now = 10.0
        self.rests = []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        if seconds:
            self.rests.append(seconds)
        await asyncio.sleep(0)
        self.now += seconds


def test_answers_are_made_one_at_a_time_and_each_is_followed_by_a_rest():
    clock = Clock()

    def takes(seconds):
        def make():
            clock.now += seconds
            return seconds

        return make

    async def main():
        turns = Turns(clock=clock, sleep=clock.sleep)
        made = await asyncio.gather(*(turns.make(takes(seconds)) for seconds in (0.5, 0.25, 0.125)))
        assert made == [0.5, 0.25, 0.125]
        assert clock.rests == [0.5, 0.25]
        clock.now += 1.0
        await turns.make(takes(0.5))
        assert clock.rests == [0.5, 0.25]  # no rest if no answer was built recently

    asyncio.run(main())


def test_a_fault_leaves_the_turn_to_the_next():
    def fails():
        raise ValueError("bad")

    async def main():
        turns = Turns()
        with pytest.raises(ValueError, match="bad"):
            await turns.make(fails)
        assert await turns.make(lambda: 1) == 1

    asyncio.run(main())


def test_one_of_many_simultaneous_clients_is_answered_per_turn_of_the_loop():
    turns_of_loop = 0
    made = []

    async def loop_turns():
        nonlocal turns_of_loop
        while True:
            await asyncio.sleep(0)
            turns_of_loop += 1

    def answer(_):
        made.append(turns_of_loop)
        end = time.monotonic() + 0.002
        while time.monotonic() < end:
            pass
        return {"rules": 1000}

    async def main():
        admin = Admin(HOST, 0, scrape=lambda _: (b"", "text/plain"), not_ready=tuple, api={"policy": answer})
        await admin.start()
        clients = [await Wire.dial(admin.address[1]) for _ in range(16)]
        counting = asyncio.create_task(loop_turns())
        for client in clients:
            client.sock.send(b"GET /api/policy HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        for client in clients:
            assert (await client.rest()).endswith(b'{"rules": 1000}')
            client.close()
        counting.cancel()
        await admin.stop()

    live(main())
    assert len(made) == 16 == len(set(made))

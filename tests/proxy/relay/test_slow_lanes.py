"""Slow work of many connections: the order of slices, and other work of the loop between two slices."""

import asyncio

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import DESCRIBE_GROUPS, GROUP_AUTHORIZATION_FAILED, HEARTBEAT
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.process.accounts import held
from kproxy.proxy.relay import readings
from kproxy.proxy.relay.readings import Readings
from kproxy.proxy.relay.slow_lanes import FIRST_STEPS, SlowLanes
from kproxy.wire.decisions.slow_work import SlowWork
from kproxy.wire.events import Exchange
from kproxy.wire.state import UNSEEN
from tests.proxy.live import kproxy, live
from tests.wire.playbook import request, response


class Play:
    """Adds works with a given number of slices to the lanes; `done` lists their numbers in the order of completion."""

    def __init__(self) -> None:
        self.lanes = SlowLanes(Readings())
        self.done: list[int] = []
        self.most_begun = 0
        self._begun: set[int] = set()

    def add(self, number: int, slices: int) -> SlowWork:
        def begin(frame):
            self._begun.add(number)
            self.most_begun = max(self.most_begun, len(self._begun))
            try:
                for _ in range(slices):
                    yield
            finally:
                self._begun.discard(number)

        work = SlowWork(Exchange(UNSEEN, number, number, 0, 0, 0), begin, b"")
        self.lanes.add(work, lambda: self.done.append(number))
        return work


def test_short_work_overtakes_long_work_and_at_most_two_works_are_begun(monkeypatch):
    monkeypatch.setattr(readings, "TURN_NS", 100_000)

    async def play():
        here = Play()
        for number in range(20):
            here.add(number, 30 * FIRST_STEPS)
        here.add(20, 10)
        turns = 0
        while 20 not in here.done:
            await asyncio.sleep(0)
            turns += 1
        assert here.done[0] == 20  # no long work is complete by then
        here.add(21, 10)
        while len(here.done) < 22:
            await asyncio.sleep(0)
            turns += 1
        assert here.most_begun <= 2
        return here.done, turns

    done, turns = asyncio.run(play())
    assert [number for number in done if number < 20] == list(range(20))  # in the order of their arrival
    assert turns > 5  # other work of the loop had turns


def test_dropped_work_gets_no_slice_and_an_exception_ends_only_its_own_work():
    async def play():
        here = Play()
        gone, _ = here.add(0, 1 << 60), here.add(1, 2)
        broken = SlowWork(gone.exchange, lambda frame: iter(()).missing, b"")
        here.lanes.add(broken, lambda: here.done.append(2))
        here.add(3, 2)
        await asyncio.sleep(0)
        gone.drop()
        while len(here.done) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert isinstance(broken.fault, AttributeError)
        return sorted(here.done)

    assert asyncio.run(play()) == [0, 1, 2, 3]


GUARDED = {"policy": (Rule(action="deny", group=["secret-*"]),)}
SECRETS = [f"secret-{number}" for number in range(30_000)]


@pytest.fixture
def slices(monkeypatch):
    """The number of turns of the lanes so far, as a list of one number."""
    count, read = [0], SlowLanes.read

    def counted(lanes):
        count[0] += 1
        return read(lanes)

    monkeypatch.setattr(SlowLanes, "read", counted)
    return count


async def exchange_of(client, broker, number):
    asked, answer = request(HEARTBEAT, 4, number, {"groupId": "g"}), response(HEARTBEAT, 4, number)
    await client.send(asked)
    assert await broker.frame() == asked
    await broker.send(answer)
    assert await client.frame() == answer


def test_other_clients_get_responses_between_two_slices_of_a_refusal(slices, monkeypatch):
    monkeypatch.setattr(readings, "TURN_NS", 100_000)

    async def test():
        async with kproxy(cluster=GUARDED) as here:
            (healthy, its_broker), (attacker, never_asked) = await here.connect(), await here.connect()
            await attacker.send(request(DESCRIBE_GROUPS, 4, 7, {"groups": SECRETS}))
            refusal = asyncio.create_task(attacker.frame())
            at = []
            while not refusal.done():
                await exchange_of(healthy, its_broker, len(at))
                at.append(slices[0])
            assert len({count for count in at if 0 < count < slices[0]}) > 10
            _, answer = codec.decode_response((await refusal)[4:], DESCRIBE_GROUPS, 4)
            assert [group["groupId"] for group in answer["groups"]] == SECRETS
            assert {group["errorCode"] for group in answer["groups"]} == {GROUP_AUTHORIZATION_FAILED}
            assert await never_asked.is_silent()

    live(test())


@pytest.mark.parametrize("ends", ["reset", "end of the process"])
def test_a_client_that_disconnects_between_its_slices_leaks_nothing(slices, ends, caplog):
    async def test():
        async with kproxy(cluster=GUARDED) as here:
            (healthy, its_broker), (attacker, _) = await here.connect(), await here.connect()
            await attacker.send(request(DESCRIBE_GROUPS, 4, 7, {"groups": SECRETS}))
            await here.until(lambda: slices[0] > 5)
            if ends == "reset":
                attacker.reset()
                await here.until(lambda: here.relays == 1)
                assert {
                    key: count for key, count in held(here.server.relays.worker).items() if count and key != "names"
                } == {}
                done = slices[0]
                await exchange_of(healthy, its_broker, 1)
                assert slices[0] <= done + 1  # dropped work takes one more
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    live(test())

"""Collections: none walks many objects because a client makes some, and cycles are freed all the same."""

import asyncio
import gc
import struct
import weakref
from collections import deque
from contextlib import contextmanager

import pytest

from kproxy.protocol.apis import METADATA
from kproxy.proxy.connection import zookeeper
from kproxy.proxy.connection.worker import OBJECTS_PER_RELAY
from kproxy.proxy.process import garbage
from kproxy.proxy.process.garbage import Collections
from kproxy.zookeeper.records import layouts
from kproxy.zookeeper.session import CLIENT, FREE_PENDING, Operation, Room, Session
from tests.proxy.live import kproxy, live
from tests.wire.playbook import request


@contextmanager
def counted():
    """The generations that were collected meanwhile."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@pytest.fixture
def collections(monkeypatch):
    """What starts them with an estimate; they are Python's again after the test."""
    started = []

    def start(objects):
        started.append(Collections(objects))
        started[-1].start()

    before = gc.get_threshold()
    monkeypatch.setattr(garbage, "INTERVAL_S", 0.02)
    yield start
    for one in started:
        one.stop()
    gc.unfreeze()
    assert gc.get_threshold() == before


class Knot:
    def __init__(self):
        self.own = self


@pytest.mark.parametrize("objects,each", [(0, 1), (garbage.MAX_OBJECTS + 1, 4)], ids=["few", "many"])
def test_cycles_are_freed_at_an_interval_while_there_are_few_objects_and_else_seldom(
    collections, monkeypatch, objects, each
):
    monkeypatch.setattr(garbage, "MAX_SKIPPED", 3)

    asked = []
    enough = asyncio.Event()

    def estimate():
        asked.append(objects)
        if len(asked) == 9:
            enough.set()
        return objects

    async def test():
        collections(estimate)
        knot = weakref.ref(Knot())
        await enough.wait()
        assert knot() is None

    with counted() as seen:
        live(test())
    assert seen.count(2) == 9 // each


@pytest.mark.parametrize("is_ours", [True, False], ids=["kproxy", "python"])
def test_requests_that_pile_up_start_no_full_collection(collections, monkeypatch, is_ours):
    """Where Python decides, 30 clients with 4,096 pending requests each start some."""
    monkeypatch.setattr(garbage, "INTERVAL_S", 3600)  # none is due meanwhile, however slow this machine is
    clients = 30

    async def test():
        async with kproxy() as here:
            worker = here.server.relays.worker
            if is_ours:
                collections(lambda: garbage.MAX_OBJECTS + worker.objects)
            else:
                gc.freeze()
            with counted() as seen:
                ends = [await here.connect() for _ in range(clients)]
                for client, _ in ends:
                    await client.send(request(METADATA, 1, 7) * 4096)
                await here.until(lambda: all(len(relay.session.pending) == 4096 for relay in worker.relays.values()))
            assert worker.objects == clients * (OBJECTS_PER_RELAY + 4096)
            assert (2 in seen) is not is_ours

    live(test())


@contextmanager
def walked():
    """How many objects each collection of young and middle ones walks."""
    seen = []

    def note(phase, info):
        if phase == "start" and info["generation"] < 2:
            seen.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize("is_ours", [True, False], ids=["kproxy", "python"])
def test_requests_that_wait_in_a_queue_are_never_walked_all_at_once(collections, monkeypatch, is_ours):
    """Each new one pays for the end of an old one: Python, which counts the difference, sees nothing grow."""
    monkeypatch.setattr(garbage, "CHECK_S", 0)  # in each turn of the loop
    monkeypatch.setattr(garbage, "GROWING_CHECK_S", 0)
    waiting, each = 50_000, 2000

    async def test():
        queue = deque(Knot() for _ in range(waiting))
        for knot in queue:
            knot.own = None
        if is_ours:
            collections(lambda: garbage.MAX_OBJECTS + 1)
        else:
            gc.freeze()
        with walked() as seen:
            for _ in range(2 * waiting // each):
                for _ in range(each):
                    queue.append(queue.popleft().__class__())
                    queue[-1].own = None
                await asyncio.sleep(0)
            more = [Knot() for _ in range(each)]
        assert len(queue) == waiting and len(more) == each
        assert (max(seen) > waiting / 2) is not is_ours
        if is_ours:
            assert max(seen) <= garbage.MIDDLE_OBJECTS + 2 * each and len(seen) >= waiting / each

    live(test())


def test_requests_that_pile_up_are_walked_while_they_are_young_and_never_counted_again(collections, monkeypatch):
    """Neither a collection nor a question for a generation's objects meets more the more of them wait."""
    monkeypatch.setattr(garbage, "CHECK_S", 0)
    monkeypatch.setattr(garbage, "GROWING_CHECK_S", 0)
    monkeypatch.setattr(garbage, "MIDDLE_S", 0)
    at_once, turns, each = 50_000, 25, 2000
    objects = gc.get_objects
    counted = []

    def get_objects(generation=None):
        found = objects(generation)
        counted.append(len(found))
        return found

    async def test():
        collections(lambda: garbage.MAX_OBJECTS + 1)
        pile = []
        monkeypatch.setattr(gc, "get_objects", get_objects)
        with walked() as seen:
            for more in (at_once, *[each] * turns):
                pile.extend(Knot() for _ in range(more))
                await asyncio.sleep(0)
        assert len(pile) == at_once + turns * each and counted and seen
        assert max(counted + seen) < 2 * garbage.MIDDLE_OBJECTS

    live(test())


def test_cycles_that_a_young_collection_met_are_freed_while_few_are_left(collections, monkeypatch):
    monkeypatch.setattr(garbage, "MIDDLE_S", 0.01)
    monkeypatch.setattr(garbage, "INTERVAL_S", 3600)

    async def test():
        collections(lambda: 0)
        knot = Knot()
        gone = weakref.ref(knot)
        gc.collect(0)
        del knot
        async with asyncio.timeout(30):
            while gone() is not None:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.01)

    live(test())


def test_what_clients_of_zookeeper_have_pending_is_no_more_than_a_collection_walks():
    """Each operation without an answer is an object, and all of them are young while clients go on asking."""

    def operations() -> int:
        return sum(isinstance(each, Operation) for each in gc.get_objects())

    gc.collect()
    before = operations()  # of tests that ran earlier in this process
    room = Room(zookeeper.ROOM_BYTES, zookeeper.ROOM_OPERATIONS)
    sessions = [Session(resync=False, values=False, room=room) for _ in range(4)]
    asked = struct.pack(">iii", 8, 1, layouts()["operations"]["ping"])
    for session in sessions:
        session.receive(CLIENT, asked * 4096, 0)
        session.events.clear()  # as who counts them does
    alive = operations() - before
    assert sum(session.unanswered for session in sessions) <= room.lent + len(sessions) * FREE_PENDING
    assert room.lent <= alive <= garbage.MIDDLE_OBJECTS

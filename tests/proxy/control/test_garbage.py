"""Full collections: never because a client makes objects, and cycles are freed all the same."""

import asyncio
import gc
import weakref
from contextlib import contextmanager

import pytest

from kproxy.proxy.control import garbage
from kproxy.proxy.control.garbage import FullCollections
from kproxy.proxy.control.workers.worker import OBJECTS_PER_RELAY
from tests.proxy.live import kproxy, live
from tests.wire.playbook import request

METADATA = 3


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
        started.append(FullCollections(objects))
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


@pytest.mark.parametrize("objects,each", [(0, 1), (garbage.FEW + 1, 4)], ids=["few", "many"])
def test_cycles_are_freed_at_an_interval_while_there_are_few_objects_and_else_seldom(
    collections, monkeypatch, objects, each
):
    monkeypatch.setattr(garbage, "MOST_LEFT_OUT", 3)

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
            worker = here.server._worker
            if is_ours:
                collections(lambda: garbage.FEW + worker.objects)
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

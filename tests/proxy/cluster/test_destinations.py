"""The broker at an address that a client dialled."""

import asyncio

from kproxy.proxy.cluster import destinations
from kproxy.proxy.cluster.destinations import Destinations
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.resolver import Resolver
from tests.proxy.live import live


async def settled(known):
    """A round of look-ups: the last one has ended, and it waits for the next."""
    running = asyncio.create_task(known.run())
    try:
        while not known._new._getters:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.001)
    finally:
        running.cancel()


def test_brokers_are_known_by_every_address_of_their_names():
    async def test():
        known = Destinations(Resolver())
        assert known.learn([(1, Address("localhost", 9092)), (2, Address("::ffff:192.0.2.2", 9092))]) == [1, 2]
        assert known.learn([(1, Address("localhost", 9092))]) == []
        await settled(known)
        assert known.broker_at(Address("127.0.0.1", 9092)) == 1
        assert known.broker_at(Address("192.0.2.2", 9092)) == 2
        assert known.broker_at(Address("127.0.0.1", 9093)) is None
        known.learn([(1, Address("192.0.2.1", 9092))])  # it moved
        await settled(known)
        assert known.broker_at(Address("127.0.0.1", 9092)) is None
        assert known.broker_at(Address("192.0.2.1", 9092)) == 1

    live(test())


def test_a_name_that_does_not_resolve_leaves_the_known_addresses():
    async def test():
        known = Destinations(Resolver())
        known.learn([(1, Address("192.0.2.1", 9092))])
        await settled(known)
        known.learn([(1, Address("no such name", 9092))])
        await settled(known)
        assert known.broker_at(Address("192.0.2.1", 9092)) == 1

    live(test())


def test_invented_brokers_are_bounded(monkeypatch):
    monkeypatch.setattr(destinations, "MAX_BROKERS", 3)

    async def test():
        known = Destinations(Resolver())
        assert known.learn((number, Address("192.0.2.1", number)) for number in range(1, 100)) == [1, 2, 3]
        await settled(known)
        assert len(known) == 3

    live(test())

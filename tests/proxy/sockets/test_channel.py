"""Messages between processes arrive complete, in order and with descriptors, also when one end closes."""

import asyncio
import os
import socket
import threading

import pytest

from kproxy.proxy.sockets.channel import PACKET_BYTES, Channel, Gone, pair
from tests.proxy.live import live


def ends(**handlers):
    """(our channel, the other one, the event set when the other one has ended)"""
    ours, theirs = pair()
    ended = asyncio.Event()
    return Channel(ours, {}, lambda: None), Channel(theirs, handlers, ended.set), ended


def test_messages_of_any_length_arrive_complete_and_in_order():
    async def test():
        found = []
        channel, _, ended = ends(message=lambda *values: found.append(values))
        sizes = [0, 1, PACKET_BYTES - 100, PACKET_BYTES, PACKET_BYTES + 1, 5_000_000, 3]
        for number, size in enumerate(sizes):
            channel.send("message", number, bytes(size))
        while channel.is_behind:  # noqa: ASYNC110 - as a worker does before it exits
            await asyncio.sleep(0.001)
        channel.close()
        await ended.wait()  # after all messages
        assert [(number, len(data)) for number, data in found] == list(enumerate(sizes))

    live(test())


def test_a_descriptor_arrives_with_its_message():
    async def test():
        found = asyncio.get_running_loop().create_future()
        channel, _, _ = ends(large=lambda data: None, client=lambda number, files: found.set_result((number, files)))
        here, there = socket.socketpair()
        channel.send("large", bytes(1_000_000))
        channel.send("client", 7, files=[there.fileno()])
        number, (file,) = await found
        assert number == 7
        there.close()
        os.write(file, b"hello")
        assert here.recv(5) == b"hello"
        os.close(file)
        here.close()

    live(test())


def test_a_request_gets_its_reply_or_gone():
    async def test():
        async def slowly(value):
            await asyncio.sleep(0.05)
            return value + 1

        async def never():
            raise RuntimeError("a defect")

        channel, other, _ = ends(at_once=lambda value: value * 2, slowly=slowly, never=never)
        assert await asyncio.gather(channel.ask("slowly", 1, timeout_s=5), channel.ask("at_once", 4, timeout_s=5)) == [
            2,
            8,
        ]
        with pytest.raises(Gone, match="no reply"):
            await channel.ask("never", timeout_s=0.1)
        asked = asyncio.create_task(channel.ask("slowly", 1, timeout_s=5))
        await asyncio.sleep(0)
        other.close()
        with pytest.raises(Gone, match="gone"):
            await asked
        with pytest.raises(Gone):
            await channel.ask("at_once", 1, timeout_s=5)

    live(test())


def test_ask_now_waits_without_the_loop_and_loses_no_other_message():
    """A session's transform uses it. Other messages that arrive meanwhile are handled later, in their order."""

    async def test():
        ours, theirs = pair()
        found = []
        channel = Channel(ours, {"message": found.append}, lambda: None)

        def other():
            async def answers():
                done = asyncio.Event()

                def asked(value):
                    for number in range(100):
                        there.send("message", number)
                    asyncio.get_running_loop().call_later(0.05, done.set)
                    return value + 1

                there = Channel(theirs, {"asked": asked}, done.set)
                await done.wait()
                there.send("message", "last")
                there.close()

            asyncio.run(answers())

        thread = threading.Thread(target=other)
        thread.start()
        assert channel.ask_now("asked", 41, timeout_s=5) == 42
        assert not found
        await asyncio.to_thread(thread.join)
        while "last" not in found:  # noqa: ASYNC110 - the channel has no event for it
            await asyncio.sleep(0.01)
        assert found == [*range(100), "last"]
        with pytest.raises(Gone):
            channel.ask_now("asked", 1, timeout_s=0.2)

    live(test())


@pytest.mark.parametrize("sends", [False, True], ids=["receives", "sends"])
def test_the_end_is_seen_after_all_messages_although_the_peer_left_some_unread(sends):
    """The kernel then reports a reset, and libuv only once: the messages take many turns to read, then the end follows.

    If a send gets the reset, a read does not get it again.
    """

    async def test():
        ours, theirs = pair()
        found, ended = [], asyncio.Event()
        channel = Channel(ours, {"message": found.append}, ended.set)
        channel.send("unread")
        other = Channel(theirs, {}, lambda: None)
        for number in range(150):
            other.send("message", number)
        assert not other.is_behind
        if sends:  # in the turn in which libuv has already reported it
            here, there = socket.socketpair()
            asyncio.get_running_loop().add_reader(here, lambda: channel.send("unheard"))
            there.send(b"1")
        other.close()
        async with asyncio.timeout(60):
            await ended.wait()
        assert found == [*range(150)]
        if sends:
            asyncio.get_running_loop().remove_reader(here)
            here.close()
            there.close()

    live(test())


def test_a_handler_that_raises_does_not_delay_other_messages():
    async def test():
        found = []
        channel, _, _ = ends(message=found.append, broken=lambda value: 1 // value)
        channel.send("broken", 0)
        channel.send("message", 1)
        async with asyncio.timeout(60):
            while not found:  # noqa: ASYNC110 - the channel has no event for it
                await asyncio.sleep(0.01)

    live(test())

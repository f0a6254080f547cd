"""A lookup that hangs delays neither other lookups nor the exit."""

import asyncio
import socket
import threading

import pytest
import uvloop

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream import resolver as names_module
from kproxy.proxy.upstream.resolver import Resolver
from tests.proxy.live import HOST, live


def test_a_hung_lookup_delays_neither_other_names_nor_the_exit(monkeypatch):
    asked = []
    answer = threading.Event()
    whole = socket.getaddrinfo

    def hanging(host, *rest, **more):
        asked.append(host)
        if host.startswith("hangs"):
            answer.wait(20)
            host = HOST
        return whole(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)

    async def test():
        resolver = Resolver()
        hang = [asyncio.create_task(resolver.addresses(Address(f"hangs-{n % 8}", 9092))) for n in range(40)]
        await asyncio.sleep(0)
        place = (socket.AF_INET, (HOST, 9092))
        assert place in await resolver.addresses(Address("localhost", 9092))
        assert await resolver.addresses(Address(HOST, 9092)) == [place]
        assert await resolver.addresses(Address("::1", 9092)) == [(socket.AF_INET6, ("::1", 9092))]
        assert sorted(asked) == sorted([*(f"hangs-{n}" for n in range(8)), "localhost"])
        monkeypatch.setattr(names_module, "MAX_LOOKUPS", 8)
        with pytest.raises(OSError, match="8 other names"):
            await resolver.addresses(Address("localhost", 9092))
        for task in hang[1:]:
            task.cancel()  # a cancelled lookup does not take the answer from others
        answer.set()
        assert await hang[0] == [place]
        answer.clear()
        hang.append(asyncio.create_task(resolver.addresses(Address("hangs-to-the-end", 9092))))
        await asyncio.sleep(0)

    uvloop.run(test())
    assert "resolver" in {thread.name for thread in threading.enumerate()}  # it still waits for an answer
    answer.set()


@pytest.mark.parametrize("host", ["h" * 300, "a..b", "zero\0zero", "no-such-host.invalid", "", "::1%nowhere"])
def test_an_invalid_or_unknown_name_raises_os_error(host):
    async def test():
        with pytest.raises(OSError):
            await Resolver().addresses(Address(host, 9092))

    live(test())


@pytest.mark.parametrize("port", [-1, 0, 65536, 1 << 31])
def test_an_invalid_port_raises_os_error(port):
    async def test():
        for host in (HOST, "::1", "localhost"):
            with pytest.raises(OSError, match="is no port"):
                await Resolver().addresses(Address(host, port))

    live(test())

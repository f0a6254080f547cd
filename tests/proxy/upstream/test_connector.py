"""The steps of a connection to a broker run in order and within a time limit; a failed step leaks nothing."""

import asyncio
import gc
import socket

import pytest

from kproxy.errors import UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.dial import Dialler
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.proxy.upstream.request import ClosedByBroker
from kproxy.proxy.upstream.resolver import Resolver
from tests.proxy.live import HOST, live


async def opened(*steps, timeout_s=5.0):
    """The outcome of these steps with a listening port, and the number of own connections that the guard still has."""
    guard = LoopGuard(lambda *_: False)
    connector = BrokerConnector(Dialler(Resolver(), guard, timeout_s), steps)
    with socket.create_server((HOST, 0)) as broker:
        address = Address(*broker.getsockname())
        try:
            sock, upstream, _ = await connector.open(address)
        except UpstreamError as fault:
            return fault, len(guard._dialled)
        assert upstream == address
        connector.close(sock)
        return sock, len(guard._dialled)


def test_steps_run_in_order_and_may_replace_the_socket():
    async def test():
        seen = []

        async def wrap(end):
            seen.append("wrap")
            end.sock = socket.socket(fileno=end.sock.detach())

        async def look(end):
            seen.append(end.sock.getpeername())

        sock, left = await opened(wrap, look)
        assert seen[0] == "wrap"
        assert len(seen) == 2
        assert sock.fileno() == -1
        assert left == 0

    live(test())


@pytest.mark.parametrize("refusal", ["refused", "gone", "hangs"])
def test_a_failed_step_leaks_nothing(refusal):
    async def test():
        ends = []

        async def step(end):
            end.sock = socket.socket(fileno=end.sock.detach())
            ends.append(end.sock)
            if refusal == "refused":
                raise UpstreamError("wrong password", "login")
            if refusal == "gone":
                raise ConnectionResetError("it is gone")
            await asyncio.sleep(60)

        fault, left = await opened(step, timeout_s=0.5)
        assert isinstance(fault, ClosedByBroker) == (refusal == "gone")
        assert fault.cause == {"refused": "login", "gone": "other", "hangs": "timeout"}[refusal]
        assert ends[0].fileno() == -1
        assert left == 0
        gc.collect()  # an unclosed socket would cause a warning, which fails the test

    live(test())

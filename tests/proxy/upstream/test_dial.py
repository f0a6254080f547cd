"""Dialling brokers whose names have several addresses. kproxy's own requests to them: test_cluster.py."""

import asyncio
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import uvloop

from kproxy.errors import UpstreamError
from kproxy.proxy.cluster.questions.question import ask_brokers
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.dial import Dialler
from kproxy.proxy.upstream.dial_faults import NO_IPV6, REFUSED, RESOLVER, TIMEOUT
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.proxy.upstream.resolver import Resolver, SocketAddresses
from tests.proxy.live import HOST, live


@contextmanager
def silent() -> Iterator[int]:
    """A port that neither accepts nor refuses connections, as behind a firewall."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def dialler(timeout_s: float, resolver: Resolver | None = None) -> Dialler:
    return Dialler(resolver or Resolver(), LoopGuard(lambda *_: False), timeout_s)


async def dialled(ports: Sequence[int], timeout_s: float) -> int:
    class Several(Resolver):
        async def addresses(self, of: Address) -> SocketAddresses:
            return [(socket.AF_INET, (HOST, port)) for port in ports]

    with await dialler(timeout_s, Several()).dial(Address("kafka", 9092)) as sock:
        port: int = sock.getpeername()[1]
        return port


def test_a_silent_address_leaves_time_for_the_next():
    async def test():
        with silent() as nowhere, socket.create_server((HOST, 0)) as listener:
            broker = listener.getsockname()[1]
            assert await dialled((nowhere, nowhere, broker), 0.6) == broker

    live(test())


def test_an_address_without_a_way_does_not_hide_why_another_one_failed():
    """A broker that is down, whose name has an IPv6 address too, seen from a host with IPv4 alone."""

    class Both(Resolver):
        async def addresses(self, of: Address) -> SocketAddresses:
            return [(socket.AF_INET, (HOST, of.port)), *await Ipv6().addresses(of)]

    class Ipv6(Resolver):
        async def addresses(self, of: Address) -> SocketAddresses:
            return [(socket.AF_INET6, ("fe80::1", of.port, 0, 0))]  # without an interface: no way

    async def test():
        with socket.socket() as closed:
            closed.bind((HOST, 0))
            port = closed.getsockname()[1]
            for resolver, cause, text in (
                (Both(), "refused", f"kafka:{port} ({HOST}) cannot be reached: Connection refused: {REFUSED.remedy}"),
                (Ipv6(), "unreachable", NO_IPV6.remedy),
            ):
                with pytest.raises(UpstreamError) as caught:
                    await dialler(5, resolver).dial(Address("kafka", port))
                assert caught.value.cause == cause
                assert text in str(caught.value)

    live(test())


class Resolverless(uvloop.Loop):
    async def getaddrinfo(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
        await asyncio.Event().wait()
        raise AssertionError


def test_an_address_does_not_wait_for_the_resolver():
    """A hung lookup would delay all clusters: the loop has four threads for lookups."""

    async def test():
        for host in (HOST, "::1"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family) as listener:
                address = Address(host, listener.getsockname()[1])
                with await dialler(5).dial(address) as sock:
                    assert sock.getpeername()[:2] == tuple(address)

    with asyncio.Runner(loop_factory=Resolverless) as runner:
        runner.run(test())


def test_the_error_gives_the_cause_of_the_last_address():
    async def test():
        with silent() as nowhere, socket.socket() as closed:
            closed.bind((HOST, 0))
            for ports, reason in (
                ((nowhere,), f"kafka:9092 ({HOST}) did not answer within 0.2 s: {TIMEOUT.remedy}"),
                (
                    (closed.getsockname()[1], nowhere),
                    f"kafka:9092 ({HOST}) did not answer within 0.2 s: {TIMEOUT.remedy}",
                ),
                (
                    (nowhere, closed.getsockname()[1]),
                    f"kafka:9092 ({HOST}) cannot be reached: Connection refused: {REFUSED.remedy}",
                ),
            ):
                with pytest.raises(UpstreamError) as caught:
                    await dialled(ports, 0.2)
                assert str(caught.value) == reason
                assert caught.value.cause == ("refused" if "refused" in reason else "timeout")

    live(test())


def test_the_error_contains_a_name_that_does_not_exist():
    """With a fake answer of a name server, independent of the name servers of this machine."""

    class Nameless(uvloop.Loop):
        async def getaddrinfo(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def test():
        with pytest.raises(UpstreamError, match=r"^no-such-host\.invalid:1 cannot be reached: [A-Z]"):
            await dialler(5).dial(Address("no-such-host.invalid", 1))

    with asyncio.Runner(loop_factory=Nameless) as runner:
        runner.run(test())


def test_the_error_of_kproxys_own_request_has_the_cause_of_the_failed_dial():
    """Not only a timeout: a silent name server is not the broker's fault."""

    class Hanging(Resolver):
        async def addresses(self, of):
            await asyncio.Event().wait()

    async def test():
        with silent() as nowhere:
            for resolver, host, cause, text in (
                (None, HOST, "timeout", f"{HOST}:{nowhere} did not answer within 0.1 s: {TIMEOUT.remedy}"),
                (Hanging(), "kafka", "resolver", f"kafka:{nowhere} was not looked up within 0.1 s: {RESOLVER.remedy}"),
            ):
                connector = BrokerConnector(dialler(0.1, resolver))
                with pytest.raises(UpstreamError) as caught:
                    await ask_brokers(Address(host, nowhere), connector)
                assert (caught.value.cause, str(caught.value)) == (cause, text)
        no_answer = f"did not answer within 0.1 s: {re.escape(TIMEOUT.remedy)}"
        with socket.create_server((HOST, 0)) as mute, pytest.raises(UpstreamError, match=no_answer):
            await ask_brokers(Address(HOST, mute.getsockname()[1]), BrokerConnector(dialler(0.1)))

    live(test())

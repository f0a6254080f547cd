"""Each error of the kernel or the resolver in a dial has a cause and a remedy; source addresses."""

import asyncio
import ctypes
import errno
import os
import shlex
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from kproxy.errors import DIAL_CAUSES, UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.dial import Dialler
from kproxy.proxy.upstream.dial_faults import of_connect
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.proxy.upstream.resolver import Resolver, SocketAddresses
from tests import namespaces
from tests.proxy.live import HOST, live

CLONE_NEWNET = 0x40000000  # linux/sched.h

needs_namespaces = pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))


def in_own_network_namespace(test: Callable[[], Coroutine[Any, Any, None]], *commands: str) -> None:
    """Run commands, then a test, on a thread in a network namespace: a loopback interface with more addresses."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "unshare")
            addresses = [f"ip address add {one} dev lo" for one in ("10.9.0.1/32", "10.9.0.2/32", "fd00::1/128 nodad")]
            for command in ("ip link set lo up", *addresses):
                subprocess.run(shlex.split(command), check=True, stdout=subprocess.DEVNULL)
            wait_until_reachable("::1", "fd00::1")
            for command in commands:
                subprocess.run(shlex.split(command), check=True, stdout=subprocess.DEVNULL)
            live(test())
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]


def wait_until_reachable(source: str, host: str) -> None:
    """Wait until the kernel's work queue has added the route of a new IPv6 address: earlier SYNs get ENETUNREACH."""
    end_s = time.monotonic() + 60
    while True:
        try:
            with (
                socket.create_server((host, 0), family=socket.AF_INET6) as server,
                socket.create_connection(server.getsockname()[:2], 5, source_address=(source, 0)) as client,
            ):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no TIME_WAIT
                return
        except OSError:
            if time.monotonic() > end_s:
                raise


def dialler(*sources: str, resolver: Resolver | None = None, timeout_s: float = 5.0) -> Dialler:
    return Dialler(resolver or Resolver(), LoopGuard(lambda *_: False), timeout_s, sources=sources)


async def failed(to: Dialler, host: str, port: int = 9092) -> tuple[str, str]:
    with pytest.raises(UpstreamError) as caught:
        await to.dial(Address(host, port))
    assert str(caught.value) == f"{caught.value.text}: {caught.value.remedy}"
    return caught.value.cause, str(caught.value)


def listener(stack: ExitStack, host: str) -> Address:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return Address(*stack.enter_context(socket.create_server((host, 0), family=family)).getsockname()[:2])


@needs_namespaces
def test_a_failed_dial_is_reported_with_the_kernels_cause_and_a_remedy() -> None:
    async def test() -> None:
        for host, cause, words in (
            ("10.8.0.1", "not_permitted", "nft list ruleset"),
            ("10.8.0.2", "unreachable", "the host is down, or a router or a firewall refuses"),
            ("10.8.0.3", "unreachable", "ip route get"),
            ("192.0.2.1", "unreachable", "Network is unreachable"),
            ("2001:db8::1", "unreachable", "no way there by IPv6"),
            (HOST, "refused", "is the broker up"),
        ):
            got, text = await failed(dialler(), host)
            assert (got, words in text) == (cause, True), text
        got, text = await failed(dialler(), "::1")
        assert got == "unreachable", text  # "Cannot assign requested address", although ports are free

    routes = ("prohibit 10.8.0.1", "unreachable 10.8.0.2", "blackhole 10.8.0.3")
    no_ipv6 = "sysctl -q -w net.ipv6.conf.lo.disable_ipv6=1"
    in_own_network_namespace(test, *(f"ip route add {route}" for route in routes), no_ipv6)


@needs_namespaces
@pytest.mark.parametrize(("host", "sources"), [("10.9.0.1", ("10.9.0.1", "10.9.0.2")), ("fd00::1", ("::1", "fd00::1"))])
def test_further_source_addresses_provide_local_ports(host: str, sources: tuple[str, str]) -> None:
    async def test() -> None:
        with ExitStack() as stack:
            listening = stack.enter_context(
                socket.create_server((host, 9092), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            )
            broker = Address(*listening.getsockname()[:2])
            for _ in range(2):
                stack.enter_context(await dialler(sources[0]).dial(broker))
            for to in (dialler(sources[0]), dialler() if sources[0] == host else dialler(sources[0])):
                cause, text = await failed(to, *broker)
                assert cause == "no_port"
                assert "ip_local_port_range" in text
                assert "upstream_source_addresses" in text
            both = dialler(sources[1], sources[0])
            with await both.dial(broker) as sock:
                assert sock.getsockname()[0] == sources[1]

    in_own_network_namespace(test, "sysctl -q -w net.ipv4.ip_local_port_range='40000 40001'")


@needs_namespaces
def test_connections_use_source_addresses_of_their_brokers_family() -> None:
    async def test() -> None:
        with ExitStack() as stack:
            four, six = listener(stack, HOST), listener(stack, "::1")
            to = dialler("10.9.0.1", "fd00::1", "10.9.0.2")
            came_from = []
            for broker in (four, six, four, four, six):
                with await to.dial(broker) as sock:
                    came_from.append(sock.getsockname()[0])
            assert came_from == ["10.9.0.1", "fd00::1", "10.9.0.2", "10.9.0.1", "fd00::1"]
            cause, text = await failed(dialler("10.9.0.9"), *four)
            assert cause == "source_address"
            assert "(10.9.0.9): it is no address of this machine any more" in text
            with await dialler("10.9.0.9").dial(six):
                pass

    in_own_network_namespace(test)


def test_each_errno_has_a_cause_and_a_remedy() -> None:
    for number, cause, words in (
        (errno.EMFILE, "no_descriptor", "ulimit -n"),
        (errno.ENFILE, "no_descriptor", "fs.file-max"),
        (errno.ENOBUFS, "no_descriptor", "tcp_mem"),
        (errno.EPERM, "not_permitted", "nft"),
        (errno.EADDRINUSE, "no_port", "ip_local_port_range"),
        (errno.ETIMEDOUT, "timeout", "firewall"),
        (errno.EAFNOSUPPORT, "unreachable", "route"),
        (errno.EHOSTDOWN, "unreachable", "the host is down"),
        (errno.ENOPROTOOPT, "unreachable", "a firewall refuses"),
        (errno.EOPNOTSUPP, "unreachable", "a firewall refuses"),
    ):
        fault = of_connect(OSError(number, os.strerror(number)))
        assert fault.cause == cause
        assert cause in DIAL_CAUSES
        assert words in fault.remedy
    assert of_connect(OSError("no number")).cause == "other"


def test_an_unknown_name_is_distinguished_from_a_silent_resolver() -> None:
    class Failing(Resolver):
        def __init__(self, fault: OSError | None) -> None:
            super().__init__()
            self.fault = fault

        async def addresses(self, of: Address) -> SocketAddresses:
            if self.fault is None:
                await asyncio.Event().wait()
            raise self.fault or OSError

    async def test() -> None:
        for number, cause, words in (
            (socket.EAI_NONAME, "name", "getent hosts"),
            (socket.EAI_NODATA, "name", "getent hosts"),
            (socket.EAI_AGAIN, "resolver", "/etc/resolv.conf"),
            (socket.EAI_FAIL, "resolver", "/etc/resolv.conf"),
            (socket.EAI_SYSTEM, "resolver", "ulimit -n"),
            (socket.EAI_MEMORY, "resolver", "memory"),
        ):
            got, text = await failed(dialler(resolver=Failing(socket.gaierror(number, "it failed"))), "kafka")
            assert (got, words in text) == (cause, True), text
        got, text = await failed(dialler(resolver=Failing(None), timeout_s=0.05), "kafka")
        assert got == "resolver"
        assert text.startswith("kafka:9092 was not looked up within 0.05 s: no name server answers")

    live(test())

"""The reason why a port cannot be bound, with real sockets, and the order of accepting clients of several ports."""

import asyncio
import errno
import os
import socket
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.sockets import listeners
from kproxy.proxy.sockets.listeners import ACCEPTS_PER_TURN, Gate, Listener, listening, why_unbound

HOSTS = ("127.0.0.1", "::1")


def why(host: str, port: int) -> str:
    with pytest.raises(OSError, match=r".") as caught:
        listening([host], port, 1)
    return why_unbound(caught.value, hosts=[host], port=port)


def connected_from(host: str, port: int, stack: ExitStack) -> socket.socket:
    """An outgoing connection from that address and port. Raises OSError if they are in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = stack.enter_context(socket.create_server((host, 0), family=family))
    outgoing = stack.enter_context(socket.socket(family))
    outgoing.bind((host, port))
    outgoing.connect(server.getsockname()[:2])
    return outgoing


@pytest.mark.parametrize("host", HOSTS)
def test_the_holder_of_a_port_is_named(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((host, 0), family=family))
        outgoing = connected_from(host, 0, stack)
        idle = stack.enter_context(socket.socket(family))
        idle.bind((host, 0))
        assert "another program listens there, or this kproxy itself (ss -ltnp): stop it" in why(
            host, listener.getsockname()[1]
        )
        reason = why(host, outgoing.getsockname()[1])
        assert "an outgoing connection of this machine has that port (ss -tnp)" in reason
        assert "ip_local_reserved_ports" in reason
        assert "another program has it, or an outgoing connection" in why(host, idle.getsockname()[1])


@pytest.mark.parametrize(("host", "other"), [HOSTS, HOSTS[::-1]])
def test_a_connection_at_another_address_does_not_hold_a_port(host: str, other: str) -> None:
    with ExitStack() as stack:
        for _ in range(100):  # until the port is free at both addresses
            idle = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            idle.bind((host, 0))
            with suppress(OSError):
                connected_from(other, idle.getsockname()[1], stack)
                break
        assert "another program has it, or an outgoing connection" in why(host, idle.getsockname()[1])


def test_an_address_of_another_machine_is_reported_as_such() -> None:
    for host in ("192.0.2.1", "2001:db8::1"):
        assert why(host, 0) == "that is no address of this machine: see ip address"


def test_an_ipv6_address_where_ipv6_is_switched_off_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "is_local", lambda host: ":" not in host)
    unbound = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    assert "IPv6 is switched off here" in why_unbound(unbound, hosts=["::1"], port=9092)
    assert "no address of this machine" in why_unbound(unbound, hosts=["192.0.2.1"], port=9092)


def test_privileged_ports_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = tmp_path / "ip_unprivileged_port_start"
    first.write_text("10000\n")
    monkeypatch.setattr(listeners, "_UNPRIVILEGED_FROM", first)
    assert "ports below 10000 need root" in why_unbound(PermissionError(errno.EACCES, ""), port=9092)
    first.write_text("0\n")
    assert "SELinux" in why_unbound(PermissionError(errno.EACCES, ""), port=443)
    first.unlink()
    assert "ports below 1024 need root" in why_unbound(PermissionError(errno.EACCES, ""), port=443)


def test_each_fault_that_stops_accepting_has_its_own_remedy(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        for number, words in (
            (errno.EMFILE, "ulimit -n"),
            (errno.ENFILE, "fs.file-max"),
            (errno.ENOBUFS, "tcp_mem"),
            (errno.ENOMEM, "tcp_mem"),
        ):
            gate = Gate(1)
            assert gate.check(OSError(number, os.strerror(number)))
            assert f"{os.strerror(number)}; " in caplog.messages[-1] and words in caplog.messages[-1]
            gate.close()

    asyncio.run(run())


def test_other_faults_have_their_remedies() -> None:
    for number, port, words in (
        (errno.EACCES, 443, "CAP_NET_BIND_SERVICE"),
        (errno.EACCES, 9092, "SELinux"),
        (errno.EMFILE, 9092, "ulimit -n"),
        (errno.ENFILE, 9092, "fs.file-max"),
        (errno.EAFNOSUPPORT, 9092, "0.0.0.0"),
        (errno.EINVAL, 9092, "link-local"),
        (errno.ENOBUFS, 9092, "net.ipv4.tcp_mem"),
    ):
        assert words in why_unbound(OSError(number, os.strerror(number)), port=port)
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert "correct the name, or the DNS of this host" in why_unbound(unknown, port=9092)


def accepted(flooded: int, clients: int, limit: int) -> tuple[list[int], int]:
    """The ports at which clients were accepted, in order, and the port of the last listener.

    `flooded` listeners have `clients` clients each, and the last listener has one. limit: the maximum of open
    connections, none of which ends.
    """
    ports: list[int] = []

    async def run() -> int:
        gate, enough = Gate(limit), asyncio.Event()
        gate.hold(True)

        def accept(client: socket.socket, _peer: Address) -> None:
            stack.callback(client.close)
            gate.enter()
            ports.append(client.getsockname()[1])
            if len(ports) == min(limit, flooded * clients + 1):
                enough.set()

        with ExitStack() as stack:
            stack.callback(gate.close)
            listeners = [Listener(gate, ["127.0.0.1"], 0, clients, accept) for _ in range(flooded + 1)]
            *busy, last = [listener.port for listener in listeners]
            for port in [*busy * clients, last]:
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            gate.hold(False)
            async with asyncio.timeout(60):
                await enough.wait()
            for _ in range(10):  # turns in which no further client may be accepted
                await asyncio.sleep(0)
            return last

    return ports, asyncio.run(run())


def test_a_client_of_one_port_does_not_wait_for_the_backlogs_of_others() -> None:
    flooded = 2 * ACCEPTS_PER_TURN
    ports, last = accepted(flooded, clients=20, limit=1000)
    assert ports.index(last) <= flooded + ACCEPTS_PER_TURN  # the clients of one turn, then one of each port
    assert sorted(Counter(ports).values()) == [1, *[20] * flooded]


def test_listeners_that_take_turns_respect_the_limit() -> None:
    limit = ACCEPTS_PER_TURN + 1
    ports, _ = accepted(ACCEPTS_PER_TURN, clients=limit, limit=limit)
    assert len(ports) == limit
